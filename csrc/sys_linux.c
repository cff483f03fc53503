/* sys_linux.c: see sys_linux.h. Structures and numbers of the kernel's interface that the C library's headers of older
 * systems lack are spelled out here; they are fixed for good. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sync_file_range */
#endif
#include "sys_linux.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* One number on every architecture since Linux 5.0. */
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#endif

enum {
    NS_PER_S = 1000000000,
    FUTEX_WAIT_PRIVATE_OP = 0 | 128,
    FUTEX_WAKE_PRIVATE_OP = 1 | 128,
    MEMBARRIER_PRIVATE_EXPEDITED = 1 << 3,
    MEMBARRIER_REGISTER_PRIVATE_EXPEDITED = 1 << 4,
    LANDLOCK_CREATE_RULESET_VERSION_FLAG = 1 << 0,
    MEMORY_POPULATE_WRITE = 23, /* since 5.14 */
    GETPRIORITY_BIAS = 20, /* the raw call returns 20 - nice, so that it is never negative */
};

/* struct sched_attr, first published version (48 bytes): all kernels accept it. */
struct sched_attr_v0 {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns;
    uint64_t deadline_ns;
    uint64_t period_ns;
};
_Static_assert(sizeof(struct sched_attr_v0) == 48, "kernel interface");
_Static_assert(sizeof(_Atomic(uint32_t)) == sizeof(uint32_t), "a futex word is 32 bits");

/* Turns "-1 and errno" into a negative errno, and puts the caller's errno back. */
#define DIRECT(call)                               \
    ({                                             \
        int saved_ = errno;                        \
        long result_ = (call);                     \
        if (result_ < 0) {                         \
            result_ = -errno;                      \
            errno = saved_;                        \
        }                                          \
        (int)result_;                              \
    })

int art_sys_pidfd_open(pid_t pid, unsigned flags)
{
    return DIRECT(syscall(SYS_pidfd_open, pid, flags));
}

int art_sys_pidfd_send_signal(int pidfd, int sig)
{
    return DIRECT(syscall(SYS_pidfd_send_signal, pidfd, sig, NULL, 0));
}

int art_sys_set_child_subreaper(bool on)
{
    return DIRECT(prctl(PR_SET_CHILD_SUBREAPER, on ? 1UL : 0UL, 0UL, 0UL, 0UL));
}

int art_sys_get_child_subreaper(void)
{
    int on = 0;
    int rc = DIRECT(prctl(PR_GET_CHILD_SUBREAPER, &on, 0UL, 0UL, 0UL));
    return rc < 0 ? rc : on != 0;
}

int art_sys_set_no_new_privs(void)
{
    return DIRECT(prctl(PR_SET_NO_NEW_PRIVS, 1UL, 0UL, 0UL, 0UL));
}

int art_sys_get_no_new_privs(void)
{
    return DIRECT(prctl(PR_GET_NO_NEW_PRIVS, 0UL, 0UL, 0UL, 0UL));
}

int art_sys_set_pdeathsig(int sig)
{
    return DIRECT(prctl(PR_SET_PDEATHSIG, (unsigned long)sig, 0UL, 0UL, 0UL));
}

int art_sys_get_pdeathsig(void)
{
    int sig = 0;
    int rc = DIRECT(prctl(PR_GET_PDEATHSIG, &sig, 0UL, 0UL, 0UL));
    return rc < 0 ? rc : sig;
}

int art_sys_close_range(unsigned first, unsigned last, unsigned flags)
{
    return DIRECT(syscall(SYS_close_range, first, last, flags));
}

int art_sys_landlock_abi(void)
{
    return DIRECT(syscall(SYS_landlock_create_ruleset, NULL, (size_t)0, LANDLOCK_CREATE_RULESET_VERSION_FLAG));
}

pid_t art_sys_gettid(void)
{
    return (pid_t)syscall(SYS_gettid);
}

int art_sys_sched_set(pid_t tid, const art_sched *sched)
{
    if (sched == NULL) {
        return -EFAULT;
    }
    struct sched_attr_v0 attr = {
        .size = sizeof attr,
        .policy = sched->policy,
        .flags = sched->flags,
        .nice = sched->nice,
        .priority = sched->priority,
    };
    return DIRECT(syscall(SYS_sched_setattr, tid, &attr, 0));
}

int art_sys_sched_get(pid_t tid, art_sched *out)
{
    if (out == NULL) {
        return -EFAULT;
    }
    struct sched_attr_v0 attr;
    memset(&attr, 0, sizeof attr);
    int rc = DIRECT(syscall(SYS_sched_getattr, tid, &attr, sizeof attr, 0));
    if (rc < 0) {
        return rc;
    }
    *out = (art_sched){.policy = attr.policy, .nice = attr.nice, .priority = attr.priority, .flags = attr.flags};
    return 0;
}

int art_sys_sched_set_rr(pid_t tid, uint32_t priority)
{
    const art_sched sched = {
        .policy = ART_SCHED_RR,
        .nice = 0,
        .priority = priority,
        .flags = ART_SCHED_FLAG_RESET_ON_FORK,
    };
    return art_sys_sched_set(tid, &sched);
}

int art_sys_setpriority(pid_t tid, int nice)
{
    return DIRECT(syscall(SYS_setpriority, PRIO_PROCESS, tid, nice));
}

int art_sys_getpriority(pid_t tid, int *out)
{
    if (out == NULL) {
        return -EFAULT;
    }
    int rc = DIRECT(syscall(SYS_getpriority, PRIO_PROCESS, tid));
    if (rc < 0) {
        return rc;
    }
    *out = GETPRIORITY_BIAS - rc;
    return 0;
}

int art_sys_sched_setaffinity(pid_t tid, const uint64_t *words, size_t word_count)
{
    if (word_count > INT_MAX / sizeof *words) {
        return -EINVAL;
    }
    return DIRECT(syscall(SYS_sched_setaffinity, tid, word_count * sizeof *words, words));
}

int art_sys_sched_getaffinity(pid_t tid, uint64_t *words, size_t word_count)
{
    if (word_count > INT_MAX / sizeof *words) {
        return -EINVAL;
    }
    /* The call returns how many bytes the kernel's own mask has; it writes no more than those. */
    int bytes = DIRECT(syscall(SYS_sched_getaffinity, tid, word_count * sizeof *words, words));
    if (bytes < 0) {
        return bytes;
    }
    memset((char *)words + bytes, 0, word_count * sizeof *words - (size_t)bytes);
    return 0;
}

/* The kernel's numbers (linux/mempolicy.h). It reads one bit less than it is told to. */
enum { MEMORY_DEFAULT = 0, MEMORY_BIND = 2, MEMORY_NODE = 1, MEMORY_AT = 2, MEMORY_NODES_MAX = 64 };

int art_sys_memory_bind(int node)
{
    if (node < 0) {
        return DIRECT(syscall(SYS_set_mempolicy, MEMORY_DEFAULT, NULL, 0UL));
    }
    if (node >= MEMORY_NODES_MAX) {
        return -EINVAL;
    }
    unsigned long nodes = 1UL << node;
    return DIRECT(syscall(SYS_set_mempolicy, MEMORY_BIND, &nodes, MEMORY_NODES_MAX + 1UL));
}

int art_sys_memory_bound(uint64_t *nodes)
{
    int mode = 0;
    unsigned long found[16] = {0}; /* 1,024 nodes: the kernel refuses a mask that is shorter than its own */
    int error = DIRECT(syscall(SYS_get_mempolicy, &mode, found, 8 * sizeof found, NULL, 0UL));
    if (!error) {
        *nodes = mode == MEMORY_BIND ? found[0] : 0;
    }
    return error;
}

int art_sys_memory_move(int node)
{
    if (node < 0 || node >= MEMORY_NODES_MAX) {
        return -EINVAL;
    }
    unsigned long to = 1UL << node;
    unsigned long from = ~to;
    return DIRECT(syscall(SYS_migrate_pages, 0, MEMORY_NODES_MAX + 1UL, &from, &to));
}

int art_sys_memory_node_of(const void *address)
{
    int node = -1;
    int error = DIRECT(syscall(SYS_get_mempolicy, &node, NULL, 0UL, address, (unsigned long)(MEMORY_NODE | MEMORY_AT)));
    return error ? error : node;
}

int art_sys_memory_populate(void *at, size_t len)
{
    return DIRECT(madvise(at, len, MEMORY_POPULATE_WRITE));
}

static int write_piece(int fd, const char *bytes, size_t len, uint64_t at)
{
    const unsigned how = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    for (size_t done = 0; done < len;) {
        ssize_t n = pwrite(fd, bytes + done, len - done, (off_t)(at + done));
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return n ? -errno : -EIO;
        }
        done += n < 0 ? 0 : (size_t)n;
    }
    (void)sync_file_range(fd, (off_t)at, (off_t)len, how); /* where it cannot be, the sync at the end does more */
    return 0;
}

int art_sys_file_write_paced(int fd, const void *bytes, uint64_t len, uint64_t at, uint64_t piece, uint64_t pause_ns_max)
{
    uint64_t took_ns = 0;
    for (uint64_t done = 0; done < len;) {
        uint64_t pause_ns = took_ns < pause_ns_max ? took_ns : pause_ns_max;
        struct timespec pause = {(time_t)(pause_ns / 1000000000), (long)(pause_ns % 1000000000)};
        (void)nanosleep(&pause, NULL); /* a signal makes it shorter */
        uint64_t began_ns = art_sys_now_ns(), n = len - done < piece ? len - done : piece;
        int err = write_piece(fd, (const char *)bytes + done, (size_t)n, at + done);
        if (err) {
            return err;
        }
        done += n;
        took_ns = art_sys_now_ns() - began_ns;
    }
    return 0;
}

int art_sys_thread_set_name(const char *name)
{
    return DIRECT(prctl(PR_SET_NAME, name, 0UL, 0UL, 0UL));
}

int art_sys_thread_block_signals(void)
{
    sigset_t set;
    (void)sigfillset(&set);
    (void)sigdelset(&set, SIGSEGV);
    (void)sigdelset(&set, SIGBUS);
    (void)sigdelset(&set, SIGILL);
    (void)sigdelset(&set, SIGFPE);
    return -pthread_sigmask(SIG_SETMASK, &set, NULL);
}

int art_sys_futex_wait(ART_ATOMIC(uint32_t) *word, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec timeout;
    struct timespec *limit = NULL;
    if (timeout_ns != ART_SYS_FOREVER) {
        timeout.tv_sec = (time_t)(timeout_ns / NS_PER_S);
        timeout.tv_nsec = (long)(timeout_ns % NS_PER_S);
        limit = &timeout;
    }
    return DIRECT(syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE_OP, expected, limit, NULL, 0));
}

int art_sys_futex_wake(ART_ATOMIC(uint32_t) *word, uint32_t count)
{
    /* The kernel reads a signed count. */
    uint32_t at_most = count > INT_MAX ? INT_MAX : count;
    return DIRECT(syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE_OP, at_most, NULL, NULL, 0));
}

int art_sys_membarrier_register(void)
{
    return DIRECT(syscall(SYS_membarrier, MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0));
}

int art_sys_membarrier(void)
{
    return DIRECT(syscall(SYS_membarrier, MEMBARRIER_PRIVATE_EXPEDITED, 0, 0));
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    (void)clock_gettime(clock, &now); /* cannot fail for these clocks and a valid pointer */
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t art_sys_now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t art_sys_thread_cpu_ns(void)
{
    return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}
