/* Spawning against the real kernel: what the program finds, what it does not, and that a failure leaves no child. What this
 * machine does not permit (namespaces) is named in the output. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static char shell[] = "/bin/sh";
static char flag[] = "-c";
static char *no_environment[] = {NULL};

/* A shell that runs the script; its output goes to out. */
static art_spawn_args with_script(char *argv[4], char *script, int fds[3])
{
    argv[0] = shell;
    argv[1] = flag;
    argv[2] = script;
    argv[3] = NULL;
    return (art_spawn_args){
        .path = shell,
        .argv = argv,
        .envp = no_environment,
        .fds = fds,
        .fd_count = 3,
        .folder = "/",
        .cgroup_fd = -1,
        .net_fd = -1,
        .uid = -1,
        .gid = -1,
    };
}

static int status_of(art_spawned spawned)
{
    siginfo_t ended;
    memset(&ended, 0, sizeof ended);
    CHECK_OK(waitid(P_PIDFD, (id_t)spawned.pidfd, &ended, WEXITED));
    CHECK_EQ(ended.si_pid, spawned.pid);
    CHECK_OK(close(spawned.pidfd));
    return ended.si_code == CLD_EXITED ? ended.si_status : -ended.si_status;
}

/* Runs the script to its end; returns its status, and what it wrote in text. */
static int run(char *script, void (*change)(art_spawn_args *), char *text, size_t size)
{
    int pipe_ends[2];
    CHECK_OK(pipe2(pipe_ends, O_CLOEXEC));
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(null >= 0);
    int fds[3] = {null, pipe_ends[1], pipe_ends[1]};
    char *argv[4];
    art_spawn_args args = with_script(argv, script, fds);
    if (change != NULL) {
        change(&args);
    }
    art_spawned spawned;
    errno = 4711;
    int rc = art_spawn(&args, &spawned);
    CHECK_EQ(errno, 4711);
    CHECK_MSG(rc == 0, "rc %d at stage %d", rc, spawned.stage);
    CHECK_EQ(spawned.stage, 0);
    CHECK(fcntl(spawned.pidfd, F_GETFD) & FD_CLOEXEC);
    CHECK_OK(close(pipe_ends[1]));
    size_t length = 0;
    ssize_t got;
    while (length < size - 1 && (got = read(pipe_ends[0], text + length, size - 1 - length)) > 0) {
        length += (size_t)got;
    }
    text[length] = '\0';
    CHECK_OK(close(pipe_ends[0]));
    CHECK_OK(close(null));
    return status_of(spawned);
}

static void test_output_and_status(void)
{
    char text[256];
    static char script[] = "echo hello; exit 7";
    CHECK_EQ(run(script, NULL, text, sizeof text), 7);
    CHECK_MSG(strcmp(text, "hello\n") == 0, "%s", text);
}

/* Descriptors, signals, session and parent are as of a program that was just started, whatever its caller has. */
static void test_nothing_is_inherited_by_chance(void)
{
    int leaked = open("/dev/null", O_RDONLY); /* not close-on-exec */
    CHECK(leaked >= 0);
    CHECK_EQ(dup2(leaked, 700), 700);
    CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    sigset_t blocked;
    CHECK_OK(sigemptyset(&blocked));
    CHECK_OK(sigaddset(&blocked, SIGTERM));
    CHECK_OK(sigprocmask(SIG_BLOCK, &blocked, NULL));
    char text[1024];
    static char script[] = "ls /proc/self/fd | tr '\\n' ' '; grep -E '^Sig(Blk|Ign)' /proc/self/status | cut -f2 | tr '\\n' ' ';"
                           "cut -d' ' -f6 /proc/$$/stat | grep -qx $$ && echo leader";
    CHECK_EQ(run(script, NULL, text, sizeof text), 0);
    CHECK_MSG(strcmp(text, "0 1 2 3 0000000000000000 0000000000000000 leader\n") == 0, "%s", text);
    sigset_t still;
    CHECK_OK(sigprocmask(SIG_UNBLOCK, &blocked, &still));
    CHECK(sigismember(&still, SIGTERM));
    CHECK(signal(SIGPIPE, SIG_DFL) == SIG_IGN);
    CHECK_OK(close(700));
    CHECK_OK(close(leaked));
}

static const art_spawn_limit limits[] = {{.soft = 5, .hard = 6, .resource = RLIMIT_NOFILE}};

static void limited(art_spawn_args *args)
{
    args->limits = limits;
    args->limit_count = 1;
    args->nice = 3;
    args->folder = "/usr";
}

static void test_limits_and_folder(void)
{
    char text[256];
    static char script[] = "ulimit -Sn; ulimit -Hn; cut -d' ' -f19 /proc/self/stat; pwd; umask";
    CHECK_EQ(run(script, limited, text, sizeof text), 0);
    CHECK_MSG(strcmp(text, "5\n6\n3\n/usr\n0077\n") == 0, "%s", text);
}

/* uname fails with EBUSY. */
static struct sock_filter no_uname[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_uname, 0, 1),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EBUSY),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
};

static void filtered(art_spawn_args *args)
{
    args->confined = true;
    args->filter = no_uname;
    args->filter_count = sizeof no_uname / sizeof *no_uname;
}

static void test_filter(void)
{
    char text[256];
    static char script[] = "uname >/dev/null 2>&1 || echo refused; grep NoNewPrivs /proc/self/status | cut -f2";
    CHECK_EQ(run(script, filtered, text, sizeof text), 0);
    CHECK_MSG(strcmp(text, "refused\n1\n") == 0, "%s", text);
}

/* Each failure names its stage, leaves no child, no descriptor and the caller's errno alone. */
static void test_failures(void)
{
    static char script[] = "exit 0";
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    int fds[3] = {null, null, null};
    char *argv[4];
    art_spawned spawned;
    int before = dup(0);
    CHECK_OK(close(before));

    art_spawn_args args = with_script(argv, script, fds);
    args.path = "/no/such/program";
    CHECK_EQ(art_spawn(&args, &spawned), -ENOENT);
    CHECK_EQ(spawned.stage, ART_SPAWN_EXEC);
    CHECK_EQ(spawned.pidfd, -1);

    args = with_script(argv, script, fds);
    args.folder = "/no/such/folder";
    CHECK_EQ(art_spawn(&args, &spawned), -ENOENT);
    CHECK_EQ(spawned.stage, ART_SPAWN_FOLDER);

    args = with_script(argv, script, fds);
    fds[1] = 12345;
    CHECK_EQ(art_spawn(&args, &spawned), -EBADF);
    CHECK_EQ(spawned.stage, ART_SPAWN_FDS);
    fds[1] = null;

    args = with_script(argv, script, fds);
    args.cgroup_fd = null;
    CHECK_EQ(art_spawn(&args, &spawned), -EBADF);
    CHECK_EQ(spawned.stage, ART_SPAWN_CLONE);

    static const struct sock_filter nonsense[] = {{.code = 0xffff}};
    args = with_script(argv, script, fds);
    args.confined = true;
    args.filter = nonsense;
    args.filter_count = 1;
    CHECK_EQ(art_spawn(&args, &spawned), -EINVAL);
    CHECK_EQ(spawned.stage, ART_SPAWN_SECCOMP);

    args = with_script(argv, script, fds);
    args.tmpfs = "size=1m";
    CHECK_EQ(art_spawn(&args, &spawned), -EINVAL); /* without a mount namespace */
    args = with_script(argv, script, fds);
    args.fd_count = ART_SPAWN_FDS_MAX + 1;
    CHECK_EQ(art_spawn(&args, &spawned), -EINVAL);
    args = with_script(argv, script, fds);
    args.namespaces = CLONE_VM;
    CHECK_EQ(art_spawn(&args, &spawned), -EINVAL);
    CHECK_EQ(art_spawn(NULL, &spawned), -EFAULT);

    CHECK_EQ(waitpid(-1, NULL, WNOHANG), -1); /* no child */
    int after = dup(0);
    CHECK_EQ(after, before);
    CHECK_OK(close(after));
    CHECK_OK(close(null));
}

/* It is killed when the thread that started it ends: here, the process. */
static void test_dies_with_its_parent(void)
{
    int report[2];
    CHECK_OK(pipe2(report, O_CLOEXEC));
    (void)fflush(NULL);
    CHECK_OK(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0));
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        static char script[] = "sleep 1000";
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        int fds[3] = {null, null, null};
        char *argv[4];
        art_spawn_args args = with_script(argv, script, fds);
        art_spawned spawned;
        CHECK_OK(art_spawn(&args, &spawned));
        CHECK_EQ(write(report[1], &spawned.pid, sizeof spawned.pid), (ssize_t)sizeof spawned.pid);
        _exit(0);
    }
    pid_t child = 0;
    CHECK_EQ(read(report[0], &child, sizeof child), (ssize_t)sizeof child);
    int status = 0;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK_OK(prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0));
    CHECK_OK(close(report[0]));
    CHECK_OK(close(report[1]));
}

static int network = -1;
static char folder[] = "/tmp/art-spawn-XXXXXX";

static void alone(art_spawn_args *args)
{
    args->namespaces = CLONE_NEWPID | CLONE_NEWNS;
    args->net_fd = network;
    args->folder = folder;
    args->tmpfs = "size=64k,mode=0700,uid=12345,gid=12345";
    args->uid = 12345;
    args->gid = 12345;
}

static void test_namespaces(void)
{
    network = art_spawn_network();
    if (network < 0) {
        CHECK_EQ(network, -EPERM);
        printf("namespaces: not permitted here\n");
        return;
    }
    CHECK(mkdtemp(folder) != NULL);
    CHECK_OK(chmod(folder, 0755));
    char text[1024];
    static char script[] = "echo $$; id -u; id -G; pwd; grep -c : /proc/net/dev;"
                           "head -c 100000 /dev/zero > full 2>/dev/null || echo full; ls";
    CHECK_EQ(run(script, alone, text, sizeof text), 0);
    char expected[256];
    (void)snprintf(expected, sizeof expected, "1\n12345\n12345\n%s\n", folder);
    CHECK_MSG(strncmp(text, expected, strlen(expected)) == 0, "%s", text);
    CHECK_MSG(strstr(text, "full\nfull\n") != NULL, "%s", text);
    CHECK_OK(rmdir(folder)); /* the file was in its own file system */
    CHECK_OK(close(network));
}

int main(void)
{
    test_output_and_status();
    test_nothing_is_inherited_by_chance();
    test_limits_and_folder();
    test_filter();
    test_failures();
    test_dies_with_its_parent();
    test_namespaces();
    printf("ok\n");
    return 0;
}
