/* spawn.c: see spawn.h.
 *
 * The child runs on a stack of its own in the calling thread's memory, while the calling thread sleeps. So it uses only system
 * calls (the C library's wrappers of set*id talk to threads, its errno is the sleeping thread's, which is put back), takes
 * no lock and allocates nothing.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP UINT64_C(0x200000000)
#endif
#ifndef CLONE_CLEAR_SIGHAND
#define CLONE_CLEAR_SIGHAND UINT64_C(0x100000000)
#endif

enum {
    LANDLOCK_CREATE = 444, /* the same on all machines */
    LANDLOCK_ADD_RULE = 445,
    LANDLOCK_RESTRICT = 446,
    LANDLOCK_PATH_BENEATH = 1,
    STACK_BYTES = 16 * 1024, /* what it calls is here, and small; the largest frame is a few hundred bytes */
    SIGNALS = 64,
    SIGSET_BYTES = 8,
};

/* struct clone_args up to its cgroup member (kernel 5.7). */
struct clone_args_v2 {
    uint64_t flags;
    uint64_t pidfd;
    uint64_t child_tid;
    uint64_t parent_tid;
    uint64_t exit_signal;
    uint64_t stack;
    uint64_t stack_size;
    uint64_t tls;
    uint64_t set_tid;
    uint64_t set_tid_size;
    uint64_t cgroup;
};
_Static_assert(sizeof(struct clone_args_v2) == 88, "kernel interface");

struct landlock_ruleset {
    uint64_t files;
    uint64_t net;
    uint64_t scopes;
};
struct landlock_path {
    uint64_t rights;
    int32_t fd;
} __attribute__((packed));

struct child {
    const art_spawn_args *args;
    pid_t parent;
    int stage; /* written by the child, read when it is gone or runs another program */
    int error;
};

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    ssize_t wrote = write(fd, text, strlen(text));
    int saved = errno;
    (void)close(fd);
    errno = saved;
    return wrote < 0 ? -1 : 0;
}

static int user_namespace_ready(const art_spawn_args *args)
{
    if ((args->namespaces & CLONE_NEWUSER) == 0) {
        return 0;
    }
    /* Without this an unprivileged process may not write its group map. */
    if (write_file("/proc/self/setgroups", "deny") != 0 && errno != ENOENT) {
        return -1;
    }
    if (write_file("/proc/self/uid_map", args->user_map) != 0) {
        return -1;
    }
    return write_file("/proc/self/gid_map", args->group_map);
}

static int folder_mounted(const art_spawn_args *args)
{
    if ((args->namespaces & CLONE_NEWNS) == 0) {
        return 0;
    }
    /* Nothing that is mounted here is to be seen elsewhere. */
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        return -1;
    }
    if (args->tmpfs == NULL) {
        return 0;
    }
    return mount("agentrt", args->folder, "tmpfs", MS_NOSUID | MS_NODEV, args->tmpfs);
}

/* Its own loopback, for programs that talk to themselves. */
static int loopback_up(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return errno == EAFNOSUPPORT ? 0 : -1; /* a kernel without IP */
    }
    struct ifreq request;
    memset(&request, 0, sizeof request);
    request.ifr_name[0] = 'l';
    request.ifr_name[1] = 'o';
    request.ifr_flags = IFF_UP;
    int rc = ioctl(fd, SIOCSIFFLAGS, &request);
    int saved = errno;
    (void)close(fd);
    errno = saved;
    return rc;
}

static int network_entered(const art_spawn_args *args)
{
    if (args->net_fd >= 0) {
        return (int)syscall(SYS_setns, args->net_fd, CLONE_NEWNET);
    }
    return (args->namespaces & CLONE_NEWNET) != 0 ? loopback_up() : 0;
}

static int limits_set(const art_spawn_args *args)
{
    for (size_t i = 0; i < args->limit_count; i++) {
        struct rlimit limit = {.rlim_cur = args->limits[i].soft, .rlim_max = args->limits[i].hard};
        struct rlimit old;
        if (getrlimit((__rlimit_resource_t)args->limits[i].resource, &old) != 0) {
            return -1;
        }
        /* A lower bound that is there already stays: without privileges nobody may raise it. */
        if (old.rlim_max < limit.rlim_max) {
            limit.rlim_max = old.rlim_max;
        }
        if (limit.rlim_cur > limit.rlim_max) {
            limit.rlim_cur = limit.rlim_max;
        }
        if (setrlimit((__rlimit_resource_t)args->limits[i].resource, &limit) != 0) {
            return -1;
        }
    }
    return 0;
}

/* Descriptors 0 to fd_count - 1 and no others. All are moved out of the way first: any may be where another belongs. */
static int descriptors_placed(const art_spawn_args *args)
{
    int moved[ART_SPAWN_FDS_MAX];
    for (size_t i = 0; i < args->fd_count; i++) {
        moved[i] = fcntl(args->fds[i], F_DUPFD_CLOEXEC, ART_SPAWN_FDS_MAX);
        if (moved[i] < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < args->fd_count; i++) {
        if (dup2(moved[i], (int)i) < 0) {
            return -1;
        }
    }
    return (int)syscall(SYS_close_range, (unsigned)args->fd_count, ~0u, 0u);
}

static int files_restricted(const art_spawn_args *args)
{
    struct landlock_ruleset set = {args->landlock_files, args->landlock_net, args->landlock_scopes};
    size_t size = args->landlock_scopes != 0 ? sizeof set : args->landlock_net != 0 ? 16 : 8;
    int ruleset = (int)syscall(LANDLOCK_CREATE, &set, size, 0u);
    if (ruleset < 0) {
        return -1;
    }
    for (size_t i = 0; i < args->rule_count; i++) {
        struct landlock_path rule = {args->rules[i].rights, args->rules[i].fd};
        if (syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_PATH_BENEATH, &rule, 0u) != 0) {
            return -1;
        }
    }
    if (args->folder_rights != 0) {
        int folder = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
        struct landlock_path rule = {args->folder_rights, folder};
        if (folder < 0 || syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_PATH_BENEATH, &rule, 0u) != 0) {
            return -1;
        }
        (void)close(folder);
    }
    int rc = (int)syscall(LANDLOCK_RESTRICT, ruleset, 0u);
    int saved = errno;
    (void)close(ruleset);
    errno = saved;
    return rc;
}

static int ids_dropped(const art_spawn_args *args)
{
    if (args->gid >= 0) {
        gid_t gid = (gid_t)args->gid;
        if ((args->namespaces & CLONE_NEWUSER) == 0 && syscall(SYS_setgroups, 0, NULL) != 0) {
            return -1;
        }
        if (syscall(SYS_setresgid, gid, gid, gid) != 0) {
            return -1;
        }
    }
    if (args->uid >= 0) {
        uid_t uid = (uid_t)args->uid;
        if (syscall(SYS_setresuid, uid, uid, uid) != 0) {
            return -1;
        }
    }
    return 0;
}

static int bound_to_parent(const struct child *child)
{
    /* After the ids: changing them clears it. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0) {
        return -1;
    }
    if ((child->args->namespaces & CLONE_NEWPID) == 0 && syscall(SYS_getppid) != child->parent) {
        errno = ESRCH;
        return -1;
    }
    return 0;
}

static int calls_restricted(const art_spawn_args *args)
{
    if (args->filter == NULL) {
        return 0;
    }
    struct sock_fprog program = {.len = (unsigned short)args->filter_count, .filter = (struct sock_filter *)args->filter};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

/* Its session is a group of its own for the scheduler where the kernel has autogroups. Best effort: the kernel may not
 * have them, and lets those without privileges do it a few times a second. */
static void group_ranked(int nice)
{
    char text[8];
    int length = snprintf(text, sizeof text, "%d", nice);
    if (length > 0 && (size_t)length < sizeof text) {
        (void)write_file("/proc/self/autogroup", text);
    }
}

static int ranked(const art_spawn_args *args)
{
    if (setpriority(PRIO_PROCESS, 0, args->nice) != 0) {
        return -1;
    }
    struct sched_param none = {.sched_priority = 0};
    return args->idle ? (int)syscall(SYS_sched_setscheduler, 0, SCHED_IDLE, &none) : 0;
}

/* What the caller ignores, the program does not; what it handles was reset by CLONE_CLEAR_SIGHAND. */
static void signals_as_new(void)
{
    struct {
        void *handler;
        unsigned long flags;
        void *restorer;
        uint64_t mask;
    } fresh;
    memset(&fresh, 0, sizeof fresh);
    for (int sig = 1; sig <= SIGNALS; sig++) {
        (void)syscall(SYS_rt_sigaction, sig, &fresh, NULL, SIGSET_BYTES);
    }
    uint64_t none = 0;
    (void)syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, NULL, SIGSET_BYTES);
}

/* Does everything up to exec; returns the stage that failed, with errno. */
static int prepare(struct child *child)
{
    const art_spawn_args *args = child->args;
    (void)syscall(SYS_setsid);
    if (args->group_nice != 0) {
        group_ranked(args->group_nice);
    }
    /* Until its own are in place it has the caller's descriptors and a few more, which a full caller has no room for. */
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
    if (user_namespace_ready(args) != 0) {
        return ART_SPAWN_USER;
    }
    if (folder_mounted(args) != 0) {
        return ART_SPAWN_MOUNT;
    }
    if (network_entered(args) != 0) {
        return ART_SPAWN_NETWORK;
    }
    (void)umask(077);
    if (args->confined && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        return ART_SPAWN_SECCOMP;
    }
    if (chdir(args->folder) != 0) {
        return ART_SPAWN_FOLDER;
    }
    if (args->confined && args->landlock_files != 0 && files_restricted(args) != 0) {
        return ART_SPAWN_LANDLOCK;
    }
    if (descriptors_placed(args) != 0) {
        return ART_SPAWN_FDS;
    }
    /* With its descriptors in place: they may be bounded to fewer than it took to get here. */
    if (ranked(args) != 0 || limits_set(args) != 0) {
        return ART_SPAWN_LIMIT;
    }
    if (args->reaper && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0) {
        return ART_SPAWN_PARENT;
    }
    if (ids_dropped(args) != 0) {
        return ART_SPAWN_IDS;
    }
    if (bound_to_parent(child) != 0) {
        return ART_SPAWN_PARENT;
    }
    signals_as_new();
    if (args->confined && calls_restricted(args) != 0) {
        return ART_SPAWN_SECCOMP;
    }
    (void)syscall(SYS_execve, args->path, args->argv, args->envp);
    return ART_SPAWN_EXEC;
}

__attribute__((noreturn, used)) static void child_main(struct child *child)
{
    child->stage = prepare(child);
    child->error = errno;
    for (;;) {
        (void)syscall(SYS_exit_group, 127);
    }
}

/* clone3 whose child calls child_main(child) on the stack given in args: it never returns here. */
static long clone_into(struct clone_args_v2 *args, struct child *child)
{
#if defined(__x86_64__)
    register struct child *given __asm__("r12") = child;
    register void (*enter)(struct child *) __asm__("r13") = child_main;
    long result;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t" /* the end of the frames */
                     "mov %%r12, %%rdi\n\t"
                     "call *%%r13\n\t"
                     "ud2\n"
                     "1:"
                     : "=a"(result)
                     : "a"(SYS_clone3), "D"(args), "S"(sizeof *args), "r"(given), "r"(enter)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long number __asm__("x8") = SYS_clone3;
    register long result __asm__("x0") = (long)args; /* the first argument, too */
    register long size __asm__("x1") = sizeof *args;
    register struct child *given __asm__("x19") = child;
    register void (*enter)(struct child *) __asm__("x20") = child_main;
    __asm__ volatile("svc #0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x29, xzr\n\t" /* the end of the frames */
                     "mov x0, x19\n\t"
                     "blr x20\n\t"
                     "brk #1\n"
                     "1:"
                     : "+r"(result)
                     : "r"(number), "r"(size), "r"(given), "r"(enter)
                     : "memory", "x30");
    return result;
#else
    (void)args;
    (void)child;
    return -ENOSYS;
#endif
}

static bool contradictory(const art_spawn_args *args)
{
    if (args->path == NULL || args->argv == NULL || args->envp == NULL || args->folder == NULL) {
        return true;
    }
    if (args->fd_count > ART_SPAWN_FDS_MAX || (args->fd_count != 0 && args->fds == NULL)) {
        return true;
    }
    if (args->tmpfs != NULL && (args->namespaces & CLONE_NEWNS) == 0) {
        return true;
    }
    if ((args->namespaces & CLONE_NEWUSER) != 0 && (args->user_map == NULL || args->group_map == NULL)) {
        return true;
    }
    const uint64_t known = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWNS;
    return (args->namespaces & ~known) != 0 || args->filter_count > 4096;
}

int art_spawn(const art_spawn_args *args, art_spawned *out)
{
    if (args == NULL || out == NULL) {
        return -EFAULT;
    }
    *out = (art_spawned){.pid = 0, .pidfd = -1, .stage = ART_SPAWN_CLONE};
    if (contradictory(args)) {
        return -EINVAL;
    }
    int saved = errno;
    /* The thread's, which sleeps while the child uses it. Mapping one for each takes longer than all else here, for its
     * removal has to be told to every CPU. */
    static _Thread_local char stack[STACK_BYTES] __attribute__((aligned(16)));
    struct child child = {.args = args, .parent = getpid()};
    int pidfd = -1;
    struct clone_args_v2 call = {
        .flags = (uint64_t)CLONE_VM | CLONE_VFORK | CLONE_PIDFD | CLONE_CLEAR_SIGHAND | args->namespaces,
        .pidfd = (uint64_t)(uintptr_t)&pidfd,
        .exit_signal = SIGCHLD,
        .stack = (uint64_t)(uintptr_t)stack,
        .stack_size = STACK_BYTES,
    };
    if (args->cgroup_fd >= 0) {
        call.flags |= CLONE_INTO_CGROUP;
        call.cgroup = (uint64_t)args->cgroup_fd;
    }
    /* No handler of the caller's may run on the child's side of the shared memory. */
    sigset_t all;
    sigset_t old;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &old);
    long pid = clone_into(&call, &child);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    errno = saved;
    if (pid < 0) {
        return (int)pid;
    }
    if (child.stage != 0) {
        siginfo_t gone;
        while (waitid(P_PIDFD, (id_t)pidfd, &gone, WEXITED) != 0 && errno == EINTR) {
        }
        (void)close(pidfd);
        errno = saved;
        out->stage = child.stage;
        return child.error != 0 ? -child.error : -EIO;
    }
    *out = (art_spawned){.pid = (pid_t)pid, .pidfd = pidfd, .stage = 0};
    return 0;
}

/* On a thread of its own, which alone moves to the new namespace. */
static void *network_main(void *out)
{
    int *result = out;
    if (syscall(SYS_unshare, CLONE_NEWNET) != 0 || loopback_up() != 0) {
        *result = -errno;
        return NULL;
    }
    int fd = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    *result = fd < 0 ? -errno : fd;
    return NULL;
}

int art_spawn_network(void)
{
    pthread_t thread;
    int result = -EIO;
    int rc = pthread_create(&thread, NULL, network_main, &result);
    if (rc != 0) {
        return -rc;
    }
    (void)pthread_join(thread, NULL);
    return result;
}
