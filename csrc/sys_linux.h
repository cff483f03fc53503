/* sys_linux.h: Linux system calls that the C library lacks or wraps too loosely, and helpers for threads.
 *
 * Convention of this file only: every int function returns 0 (or a non-negative result where it says so) or a negative
 * errno value, and leaves `errno` alone. It is the one place below art_err.h's codes, so that callers can tell EPERM from
 * ENOSYS and degrade or refuse accordingly. Commonest: -ENOSYS (kernel too old or a seccomp filter), -EPERM, -EINVAL,
 * -ESRCH (no such thread or process), -EFAULT for a NULL pointer.
 * Thread-safety: all are direct system calls and may be made from any thread. "tid 0" means the calling thread.
 * Ownership: file descriptors returned are the caller's to close, and close-on-exec.
 */
#ifndef ART_SYS_LINUX_H
#define ART_SYS_LINUX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "art_atomic.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- processes --- */

/* A descriptor for a process (not a thread), immune to pid reuse. flags: 0 or O_NONBLOCK. Returns the fd. */
int art_sys_pidfd_open(pid_t pid, unsigned flags);

/* Sends a signal to the process behind pidfd; 0 probes. -ESRCH: it has been reaped. */
int art_sys_pidfd_send_signal(int pidfd, int sig);

/* Orphaned descendants are re-parented to this process. */
int art_sys_set_child_subreaper(bool on);
/* 1, 0 or an error. */
int art_sys_get_child_subreaper(void);

/* Irrevocable for this thread and all it starts. */
int art_sys_set_no_new_privs(void);
/* 1, 0 or an error. */
int art_sys_get_no_new_privs(void);

/* This process gets sig when its parent *thread* ends; 0 = none. Cleared in a child by fork, so set it there; and look at
 * getppid afterwards, since the parent may have ended already. */
int art_sys_set_pdeathsig(int sig);
/* The signal set, 0 or an error. */
int art_sys_get_pdeathsig(void);

/* Closes (flags 0) every descriptor in [first, last], or marks it close-on-exec (flags ART_CLOSE_RANGE_CLOEXEC). */
#define ART_CLOSE_RANGE_CLOEXEC 4u
int art_sys_close_range(unsigned first, unsigned last, unsigned flags);

/* The Landlock ABI of the kernel (1 or more), -ENOSYS when not built in, -EOPNOTSUPP when switched off at boot. */
int art_sys_landlock_abi(void);

/* --- scheduling of threads --- */

/* The kernel's numbers. */
enum {
    ART_SCHED_OTHER = 0,
    ART_SCHED_FIFO = 1,
    ART_SCHED_RR = 2,
    ART_SCHED_BATCH = 3,
    ART_SCHED_IDLE = 5,
};
#define ART_SCHED_FLAG_RESET_ON_FORK UINT64_C(1)

typedef struct art_sched {
    uint32_t policy;   /* ART_SCHED_… */
    int32_t nice;      /* -20..19; for OTHER and BATCH */
    uint32_t priority; /* 1..99 for FIFO and RR, else 0 */
    uint64_t flags;    /* ART_SCHED_FLAG_… */
} art_sched;

pid_t art_sys_gettid(void);

int art_sys_sched_set(pid_t tid, const art_sched *sched);
/* out is untouched on error. */
int art_sys_sched_get(pid_t tid, art_sched *out);

/* SCHED_RR at priority 1..99 with reset-on-fork, so that no child inherits it. -EPERM without CAP_SYS_NICE and RLIMIT_RTPRIO. */
int art_sys_sched_set_rr(pid_t tid, uint32_t priority);

/* Nice value of one thread (Linux keeps it per thread). Values outside -20..19 are clamped by the kernel. */
int art_sys_setpriority(pid_t tid, int nice);
/* out is untouched on error (the raw value can be negative, so it is no return value). */
int art_sys_getpriority(pid_t tid, int *out);

/* CPU mask of one thread, CPU n = bit n % 64 of word n / 64 (as in art_cpuset). Set: -EINVAL when no CPU of the mask may be
 * used. Get: fills all words (zero beyond what the kernel knows) and returns 0; -EINVAL when the mask is wider than words, out
 * then untouched. */
int art_sys_sched_setaffinity(pid_t tid, const uint64_t *words, size_t word_count);
int art_sys_sched_getaffinity(pid_t tid, uint64_t *words, size_t word_count);

/* --- memory of NUMA nodes --- */

/* From now on new pages of the calling thread, and of threads and processes that it starts, come from this node and no
 * other; a negative node: from wherever the kernel likes, as at first. -EINVAL: no such node with memory, or not in this
 * process's cpuset. */
int art_sys_memory_bind(int node);

/* The calling thread's nodes by `art_sys_memory_bind`, node n = bit n; 0 when it is not bound, or an error. */
int art_sys_memory_bound(uint64_t *nodes);

/* Moves the pages that this process has on other nodes, as far as they can be. Returns how many could not. */
int art_sys_memory_move(int node);

/* The node of the page at this address, which must be in use. */
int art_sys_memory_node_of(const void *address);

/* --- memory --- */

/* Has the pages of [at, at + len) there, to be written to, as if each had been: at a fifth of the price. `at` is at a page's
 * beginning. -EINVAL: the kernel cannot (before 5.14), -EFAULT, -ENOMEM: some of it cannot be written to. */
int art_sys_memory_populate(void *at, size_t len);

/* --- files --- */

/* Writes bytes[0..len) to [at, at + len) of the file, `piece` bytes at a time, so that others have the disk between them: for as
 * long as the last one took, at most pause_ns_max. Each is on the disk, or in its cache, before the next: without what a sync
 * adds, the file system's own records, which others' syncs wait for. So it makes nothing durable, and a sync at the end quick.
 * 0, or what writing says; -EIO: a disk that takes nothing. */
int art_sys_file_write_paced(int fd, const void *bytes, uint64_t len, uint64_t at, uint64_t piece, uint64_t pause_ns_max);

/* --- this thread --- */

/* Name as seen in ps and debuggers; cut after 15 bytes. */
int art_sys_thread_set_name(const char *name);

/* Blocks every signal but SIGSEGV, SIGBUS, SIGILL and SIGFPE (which the wasm engine handles), so that the process's
 * signals reach the control thread. Threads started afterwards inherit it. */
int art_sys_thread_block_signals(void);

/* --- synchronisation --- */

#define ART_SYS_FOREVER UINT64_MAX

/* Sleeps while *word == expected, at most timeout_ns (relative, CLOCK_MONOTONIC; ART_SYS_FOREVER = no limit). Private to
 * the process. Returns 0 (woken, or spuriously: look at the word again), -EAGAIN (it differed), -ETIMEDOUT, -EINTR. */
int art_sys_futex_wait(ART_ATOMIC(uint32_t) *word, uint32_t expected, uint64_t timeout_ns);

/* Wakes at most count sleepers; returns how many. */
int art_sys_futex_wake(ART_ATOMIC(uint32_t) *word, uint32_t count);

/* Registers the process for art_sys_membarrier; once, before the first call; again is harmless. */
int art_sys_membarrier_register(void);

/* On return every running thread of this process has executed a full memory barrier since the call. Costs an
 * inter-processor interrupt per core: for the rare side of an asymmetric protocol. -EPERM: not registered. */
int art_sys_membarrier(void);

/* --- clocks --- */

/* CLOCK_MONOTONIC in ns. */
uint64_t art_sys_now_ns(void);

/* CPU time of the calling thread in ns. */
uint64_t art_sys_thread_cpu_ns(void);

#ifdef __cplusplus
}
#endif
#endif
