/* System calls against the real kernel: each test looks at the effect, not only at the return value. What this machine does not
 * permit (real-time priorities, lowering nice) is named in the output, and its error is checked instead. */
#define _GNU_SOURCE
#include "sys_linux.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static pid_t fork_or_fail(void)
{
    (void)fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    return pid;
}

/* Runs test in a child, because what it does cannot be undone. */
static void in_child(void (*test)(void))
{
    pid_t pid = fork_or_fail();
    if (pid == 0) {
        test();
        (void)fflush(NULL);
        _exit(0);
    }
    int status = 0;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child status 0x%x", (unsigned)status);
}

/* A thread that reports its tid and waits until it is let go. */
struct sleeper {
    pthread_t thread;
    pid_t tid;
    sem_t ready;
    sem_t go;
};

static void *sleeper_main(void *arg)
{
    struct sleeper *s = arg;
    s->tid = art_sys_gettid();
    CHECK_OK(sem_post(&s->ready));
    CHECK_OK(sem_wait(&s->go));
    return NULL;
}

static void sleeper_start(struct sleeper *s)
{
    CHECK_OK(sem_init(&s->ready, 0, 0));
    CHECK_OK(sem_init(&s->go, 0, 0));
    CHECK_OK(pthread_create(&s->thread, NULL, sleeper_main, s));
    CHECK_OK(sem_wait(&s->ready));
}

static void sleeper_end(struct sleeper *s)
{
    CHECK_OK(sem_post(&s->go));
    CHECK_OK(pthread_join(s->thread, NULL));
    /* A join ends when the kernel lets go of the thread's memory, which is a moment before its id is gone. */
    while (syscall(SYS_tgkill, getpid(), s->tid, 0) == 0) {
        sched_yield();
    }
    CHECK_OK(sem_destroy(&s->ready));
    CHECK_OK(sem_destroy(&s->go));
}

static void test_pidfd_stops_continues_and_kills(void)
{
    pid_t pid = fork_or_fail();
    if (pid == 0) {
        for (;;) {
            (void)pause();
        }
    }
    int fd = art_sys_pidfd_open(pid, 0);
    CHECK(fd >= 0);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    CHECK_OK(art_sys_pidfd_send_signal(fd, 0));
    int status = 0;
    CHECK_OK(art_sys_pidfd_send_signal(fd, SIGSTOP));
    CHECK_EQ(waitpid(pid, &status, WUNTRACED), pid);
    CHECK(WIFSTOPPED(status));
    CHECK_OK(art_sys_pidfd_send_signal(fd, SIGCONT));
    CHECK_EQ(waitpid(pid, &status, WCONTINUED), pid);
    CHECK(WIFCONTINUED(status));
    CHECK_OK(art_sys_pidfd_send_signal(fd, SIGKILL));
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    /* Reaped: the descriptor never reaches whoever has the number now. errno stays the caller's. */
    errno = 7777;
    CHECK_EQ(art_sys_pidfd_send_signal(fd, 0), -ESRCH);
    CHECK_EQ(art_sys_pidfd_open(-1, 0), -EINVAL);
    CHECK_EQ(art_sys_pidfd_send_signal(-1, 0), -EBADF);
    CHECK_EQ(errno, 7777);
    CHECK_OK(close(fd));
}

static void test_subreaper_gets_orphans(void)
{
    CHECK_EQ(art_sys_get_child_subreaper(), 0);
    CHECK_OK(art_sys_set_child_subreaper(true));
    CHECK_EQ(art_sys_get_child_subreaper(), 1);
    pid_t middle = fork_or_fail();
    if (middle == 0) {
        pid_t orphan = fork();
        if (orphan == 0) {
            for (;;) {
                (void)pause();
            }
        }
        _exit(orphan < 0);
    }
    int status = 0;
    CHECK_EQ(waitpid(middle, &status, 0), middle);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    /* Re-parented before its parent could be reaped, so it is our child by now. */
    siginfo_t info;
    memset(&info, 0, sizeof info);
    CHECK_EQ(waitid(P_ALL, 0, &info, WEXITED | WNOHANG), 0); /* ECHILD without the subreaper */
    CHECK_EQ(info.si_pid, 0);
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)art_sys_gettid());
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        int orphan = 0;
        CHECK_EQ(fscanf(file, "%d", &orphan), 1);
        CHECK_OK(fclose(file));
        CHECK_OK(kill(orphan, SIGKILL));
        CHECK_EQ(waitpid(orphan, &status, 0), orphan);
    } else {
        printf("not checked: reaping the orphan (no /proc children files)\n");
    }
    CHECK_OK(art_sys_set_child_subreaper(false));
    CHECK_EQ(art_sys_get_child_subreaper(), 0);
}

static void test_no_new_privs(void)
{
    CHECK_OK(art_sys_set_no_new_privs());
    CHECK_EQ(art_sys_get_no_new_privs(), 1);
}

/* Tester -> parent -> child; the parent ends once the child has asked for a signal, and the child dies of it. */
static void test_pdeathsig(void)
{
    CHECK_OK(art_sys_set_child_subreaper(true));
    int ready[2];
    int pids[2];
    CHECK_OK(pipe(ready));
    CHECK_OK(pipe(pids));
    pid_t parent = fork_or_fail();
    if (parent == 0) {
        pid_t child = fork();
        if (child == 0) {
            char ok = art_sys_get_pdeathsig() == 0 && art_sys_set_pdeathsig(SIGKILL) == 0 &&
                      art_sys_get_pdeathsig() == SIGKILL;
            if (write(ready[1], &ok, 1) != 1) {
                _exit(1);
            }
            for (;;) {
                (void)pause();
            }
        }
        char ok = 0;
        bool told = write(pids[1], &child, sizeof child) == sizeof child && read(ready[0], &ok, 1) == 1 && ok;
        _exit(told ? 0 : 1);
    }
    pid_t child = 0;
    int status = 0;
    CHECK_EQ(read(pids[0], &child, sizeof child), sizeof child);
    CHECK_EQ(waitpid(parent, &status, 0), parent);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK_EQ(art_sys_set_pdeathsig(1000), -EINVAL);
}

static void test_close_range(void)
{
    int a = fcntl(STDERR_FILENO, F_DUPFD, 500);
    int b = fcntl(STDERR_FILENO, F_DUPFD, 501);
    int c = fcntl(STDERR_FILENO, F_DUPFD, 510);
    CHECK(a == 500 && b == 501 && c == 510);
    CHECK_OK(art_sys_close_range(500, 505, ART_CLOSE_RANGE_CLOEXEC));
    CHECK(fcntl(a, F_GETFD) & FD_CLOEXEC);
    CHECK(!(fcntl(c, F_GETFD) & FD_CLOEXEC));
    CHECK_OK(art_sys_close_range(500, 505, 0));
    CHECK_EQ(fcntl(a, F_GETFD), -1);
    CHECK_EQ(fcntl(b, F_GETFD), -1);
    CHECK(fcntl(c, F_GETFD) >= 0);
    CHECK_OK(close(c));
    CHECK_EQ(art_sys_close_range(5, 4, 0), -EINVAL);
    CHECK_EQ(art_sys_close_range(5, 6, 1u << 30), -EINVAL);
}

static void test_landlock_abi(void)
{
    int abi = art_sys_landlock_abi();
    printf("landlock ABI: %d\n", abi);
    CHECK(abi >= 1 || abi == -ENOSYS || abi == -EOPNOTSUPP);
}

static void test_gettid(void)
{
    struct sleeper s;
    sleeper_start(&s);
    CHECK_EQ(art_sys_gettid(), getpid());
    CHECK(s.tid > 0 && s.tid != getpid());
    sleeper_end(&s);
    art_sched sched;
    memset(&sched, 0x5a, sizeof sched);
    CHECK_EQ(art_sys_sched_get(-1, &sched), -EINVAL);
    CHECK_EQ(sched.policy, 0x5a5a5a5a);
    CHECK_EQ(art_sys_sched_get(0, NULL), -EFAULT);
    CHECK_EQ(art_sys_sched_set(0, NULL), -EFAULT);
}

static void test_policy_and_nice_are_per_thread(void)
{
    struct sleeper s;
    int before = 0;
    int nice = -100;
    art_sched sched;
    sleeper_start(&s);
    CHECK_OK(art_sys_getpriority(0, &before));
    CHECK_OK(art_sys_setpriority(s.tid, 19));
    CHECK_OK(art_sys_getpriority(s.tid, &nice));
    CHECK_EQ(nice, 19);
    CHECK_OK(art_sys_getpriority(0, &nice));
    CHECK_EQ(nice, before);
    CHECK_OK(art_sys_sched_get(s.tid, &sched));
    CHECK_EQ(sched.policy, ART_SCHED_OTHER);
    CHECK_EQ(sched.nice, 19);
    CHECK_EQ(sched.flags, 0);

    sched = (art_sched){.policy = ART_SCHED_BATCH, .nice = 19, .flags = ART_SCHED_FLAG_RESET_ON_FORK};
    CHECK_OK(art_sys_sched_set(s.tid, &sched));
    memset(&sched, 0, sizeof sched);
    CHECK_OK(art_sys_sched_get(s.tid, &sched));
    CHECK_EQ(sched.policy, ART_SCHED_BATCH);
    CHECK_EQ(sched.nice, 19);
    CHECK_EQ(sched.flags, ART_SCHED_FLAG_RESET_ON_FORK);
    CHECK_OK(art_sys_sched_get(0, &sched));
    CHECK_EQ(sched.policy, ART_SCHED_OTHER);

    int rc = art_sys_setpriority(s.tid, -5);
    CHECK(rc == 0 || rc == -EACCES);
    CHECK_OK(art_sys_getpriority(s.tid, &nice));
    CHECK_EQ(nice, rc == 0 ? -5 : 19); /* a negative nice value is a value, not an error */
    if (rc != 0) {
        printf("not checked: negative nice (%s)\n", strerror(-rc));
    }
    sched.policy = 77;
    CHECK_EQ(art_sys_sched_set(s.tid, &sched), -EINVAL);
    sleeper_end(&s);
    CHECK_EQ(art_sys_getpriority(s.tid, &nice), -ESRCH);
    CHECK_EQ(art_sys_setpriority(s.tid, 19), -ESRCH);
}

static void test_round_robin_is_not_inherited(void)
{
    struct sleeper s;
    sleeper_start(&s);
    int rc = art_sys_sched_set_rr(s.tid, 1);
    sleeper_end(&s);
    CHECK_EQ(art_sys_sched_set_rr(0, 0), -EINVAL);
    CHECK_EQ(art_sys_sched_set_rr(0, 100), -EINVAL);
    if (rc != 0) {
        CHECK_EQ(rc, -EPERM);
        printf("not checked: SCHED_RR (not permitted)\n");
        return;
    }
    CHECK_OK(art_sys_sched_set_rr(0, 7));
    art_sched sched;
    CHECK_OK(art_sys_sched_get(0, &sched));
    CHECK_EQ(sched.policy, ART_SCHED_RR);
    CHECK_EQ(sched.priority, 7);
    CHECK_EQ(sched.flags, ART_SCHED_FLAG_RESET_ON_FORK);
    pid_t pid = fork_or_fail();
    if (pid == 0) {
        bool reset = art_sys_sched_get(0, &sched) == 0 && sched.policy == ART_SCHED_OTHER && sched.priority == 0;
        _exit(reset ? 0 : 1);
    }
    int status = 0;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_affinity_is_per_thread(void)
{
    enum { WORDS = 16 };
    uint64_t all[WORDS];
    uint64_t got[2 * WORDS];
    uint64_t one[WORDS] = {0};
    uint64_t none[WORDS] = {0};
    CHECK_OK(art_sys_sched_getaffinity(0, all, WORDS));
    memset(got, 0xff, sizeof got);
    CHECK_OK(art_sys_sched_getaffinity(0, got, (size_t)2 * WORDS)); /* what the kernel does not know is zero */
    CHECK(memcmp(got, all, sizeof all) == 0);
    for (int i = WORDS; i < 2 * WORDS; i++) {
        CHECK_EQ(got[i], 0);
    }
    for (int i = 0; i < WORDS; i++) {
        if (all[i] != 0) {
            one[i] = all[i] & -all[i];
            break;
        }
    }
    struct sleeper s;
    sleeper_start(&s);
    CHECK_OK(art_sys_sched_setaffinity(s.tid, one, WORDS));
    CHECK_OK(art_sys_sched_getaffinity(s.tid, got, WORDS));
    CHECK(memcmp(got, one, sizeof one) == 0);
    CHECK_OK(art_sys_sched_getaffinity(0, got, WORDS));
    CHECK(memcmp(got, all, sizeof all) == 0);
    CHECK_EQ(art_sys_sched_setaffinity(s.tid, none, WORDS), -EINVAL);
    CHECK_EQ(art_sys_sched_setaffinity(s.tid, one, SIZE_MAX / 8), -EINVAL);
    CHECK_EQ(art_sys_sched_getaffinity(s.tid, got, SIZE_MAX / 8), -EINVAL);
    CHECK_EQ(art_sys_sched_getaffinity(s.tid, got, 0), -EINVAL);
    sleeper_end(&s);
    CHECK_EQ(art_sys_sched_setaffinity(s.tid, one, WORDS), -ESRCH);
}

static void *name_and_mask(void *arg)
{
    (void)arg;
    CHECK_OK(art_sys_thread_set_name("art-worker-number-17"));
    char path[64];
    char name[32] = "";
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/comm", (int)art_sys_gettid());
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    CHECK(fgets(name, sizeof name, file) != NULL);
    CHECK_OK(fclose(file));
    CHECK(strcmp(name, "art-worker-numb\n") == 0);

    CHECK_OK(art_sys_thread_block_signals());
    sigset_t set;
    CHECK_OK(pthread_sigmask(SIG_SETMASK, NULL, &set));
    static const int blocked[] = {SIGTERM, SIGINT, SIGUSR1, SIGCHLD, SIGPIPE, SIGALRM, SIGHUP};
    static const int open_signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    for (size_t i = 0; i < sizeof blocked / sizeof *blocked; i++) {
        CHECK_EQ(sigismember(&set, blocked[i]), 1);
    }
    for (size_t i = 0; i < sizeof open_signals / sizeof *open_signals; i++) {
        CHECK_EQ(sigismember(&set, open_signals[i]), 0);
    }
    return NULL;
}

static void test_thread_name_and_signals(void)
{
    pthread_t thread;
    CHECK_OK(pthread_create(&thread, NULL, name_and_mask, NULL));
    CHECK_OK(pthread_join(thread, NULL));
    sigset_t set;
    CHECK_OK(pthread_sigmask(SIG_SETMASK, NULL, &set));
    CHECK_EQ(sigismember(&set, SIGTERM), 0); /* only that thread's */
}

static _Atomic(uint32_t) word;
static _Atomic(uint32_t) asleep;

static void *futex_sleeper(void *arg)
{
    (void)arg;
    atomic_fetch_add(&asleep, 1);
    while (atomic_load(&word) == 0) {
        int rc = art_sys_futex_wait(&word, 0, ART_SYS_FOREVER);
        CHECK(rc == 0 || rc == -EAGAIN || rc == -EINTR);
    }
    return NULL;
}

static void test_futex(void)
{
    atomic_store(&word, 5);
    CHECK_EQ(art_sys_futex_wait(&word, 4, ART_SYS_FOREVER), -EAGAIN);
    uint64_t before_ns = art_sys_now_ns();
    CHECK_EQ(art_sys_futex_wait(&word, 5, 2000000), -ETIMEDOUT);
    CHECK(art_sys_now_ns() - before_ns >= 2000000);
    CHECK_EQ(art_sys_futex_wait(&word, 5, 0), -ETIMEDOUT);
    CHECK_EQ(art_sys_futex_wait(&word, 4, UINT64_MAX - 1), -EAGAIN); /* the longest time is a valid one */
    CHECK_EQ(art_sys_futex_wake(&word, UINT32_MAX), 0);

    pthread_t threads[3];
    atomic_store(&word, 0);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(pthread_create(&threads[i], NULL, futex_sleeper, NULL));
    }
    while (atomic_load(&asleep) < 3) {
        sched_yield();
    }
    /* With the word unchanged, woken sleepers go back to sleep; so wakes count sleepers, and more than asked never wake. */
    uint64_t give_up_ns = art_sys_now_ns() + UINT64_C(10000000000);
    int woken;
    while ((woken = art_sys_futex_wake(&word, 1)) == 0) {
        CHECK(art_sys_now_ns() < give_up_ns);
        sched_yield();
    }
    CHECK_EQ(woken, 1);
    atomic_store(&word, 1);
    CHECK(art_sys_futex_wake(&word, UINT32_MAX) <= 3);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(pthread_join(threads[i], NULL));
    }
}

/* In a child: registration is for the whole process, and the sanitizers' runtime might have done it here. */
static void test_membarrier(void)
{
    int rc = art_sys_membarrier();
    if (rc == -ENOSYS) {
        printf("not checked: membarrier (not in this kernel)\n");
        CHECK_EQ(art_sys_membarrier_register(), -ENOSYS);
        return;
    }
    CHECK(rc == 0 || rc == -EPERM);
    CHECK_OK(art_sys_membarrier_register());
    CHECK_OK(art_sys_membarrier());
    CHECK_OK(art_sys_membarrier_register());
    CHECK_OK(art_sys_membarrier());
}

static void test_clocks(void)
{
    uint64_t wall_ns = art_sys_now_ns();
    uint64_t cpu_ns = art_sys_thread_cpu_ns();
    while (art_sys_thread_cpu_ns() - cpu_ns < 1000000) {
    }
    CHECK(art_sys_now_ns() - wall_ns >= 900000); /* a thread cannot use more CPU than time passes (two clocks, so a margin) */
    struct timespec now;
    CHECK_OK(clock_gettime(CLOCK_MONOTONIC, &now));
    uint64_t other_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    CHECK(art_sys_now_ns() >= other_ns && art_sys_now_ns() - other_ns < UINT64_C(60000000000));
}

static void test_memory_is_bound_to_a_node(void)
{
    uint64_t nodes = 77;
    int error = art_sys_memory_bound(&nodes);
    if (error) { /* no NUMA in this kernel, or a filter that forbids it: said, and nothing changed */
        CHECK((error == -ENOSYS || error == -EPERM) && nodes == 77);
        CHECK(art_sys_memory_bind(0) == error);
        return;
    }
    CHECK(nodes == 0);
    char *page = malloc(1 << 20);
    CHECK(page != NULL);
    page[4096] = 1;
    int node = art_sys_memory_node_of(page + 4096);
    CHECK(node >= 0);
    if (art_sys_memory_bind(node) == 0) { /* else a filter, as in many containers */
        CHECK(art_sys_memory_bound(&nodes) == 0 && nodes == UINT64_C(1) << node);
        CHECK(art_sys_memory_move(node) >= 0);
        char *more = malloc(4 << 20);
        CHECK(more != NULL);
        memset(more, 1, 4 << 20);
        CHECK(art_sys_memory_node_of(more + (2 << 20)) == node);
        CHECK(art_sys_memory_bind(63) == -EINVAL);
        CHECK(art_sys_memory_bound(&nodes) == 0 && nodes == UINT64_C(1) << node);
        CHECK(art_sys_memory_bind(-1) == 0);
        CHECK(art_sys_memory_bound(&nodes) == 0 && nodes == 0);
        free(more);
    }
    CHECK(art_sys_memory_bind(64) == -EINVAL && art_sys_memory_move(-1) == -EINVAL);
    CHECK(art_sys_memory_node_of((void *)1) == -EFAULT);
    free(page);
}

static void test_memory_is_there_when_it_was_asked_for(void)
{
    enum { PAGES = 64, PAGE_BYTES = 4096 };
    char *at = mmap(NULL, PAGES * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    unsigned char there[PAGES];
    CHECK(mincore(at, sizeof there * PAGE_BYTES, there) == 0 && !(there[0] & 1) && !(there[PAGES - 1] & 1));
    int err = art_sys_memory_populate(at + PAGE_BYTES, 3 * PAGE_BYTES);
    CHECK(err == 0 || err == -EINVAL); /* the second: a kernel before 5.14 */
    CHECK(mincore(at, sizeof there * PAGE_BYTES, there) == 0);
    for (int i = 0; i < PAGES; i++) {
        CHECK((there[i] & 1) == (err == 0 && i >= 1 && i < 4) && at[i * PAGE_BYTES] == 0);
    }
    munmap(at, PAGES * PAGE_BYTES);
    CHECK(art_sys_memory_populate(at, PAGE_BYTES) < 0);
}

static void test_what_is_written_in_pieces_is_all_there(void)
{
    FILE *file = tmpfile();
    CHECK(file && fwrite("abc", 1, 3, file) == 3 && fflush(file) == 0);
    char text[1000], found[1100] = "";
    memset(text, 'x', sizeof text);
    text[999] = 'y';
    for (uint64_t piece = 1; piece < 3000; piece = piece * 7) {
        CHECK(art_sys_file_write_paced(fileno(file), text, sizeof text, 3, piece, 1) == 0);
        CHECK(pread(fileno(file), found, sizeof found, 0) == 1003);
        CHECK(memcmp(found, "abc", 3) == 0 && memcmp(found + 3, text, sizeof text) == 0);
        CHECK(ftruncate(fileno(file), 3) == 0);
    }
    CHECK(art_sys_file_write_paced(fileno(file), text, 0, 0, 1, 1) == 0);
    fclose(file);
    CHECK(art_sys_file_write_paced(-1, text, 3, 0, 2, 1) == -EBADF);
}

int main(void)
{
    /* Forking tests first, while there is one thread. */
    in_child(test_pidfd_stops_continues_and_kills);
    in_child(test_subreaper_gets_orphans);
    in_child(test_no_new_privs);
    in_child(test_pdeathsig);
    in_child(test_membarrier);
    in_child(test_round_robin_is_not_inherited);
    test_close_range();
    test_landlock_abi();
    test_gettid();
    test_policy_and_nice_are_per_thread();
    test_affinity_is_per_thread();
    test_thread_name_and_signals();
    test_futex();
    test_clocks();
    test_memory_is_bound_to_a_node();
    test_memory_is_there_when_it_was_asked_for();
    test_what_is_written_in_pieces_is_all_there();
    return 0;
}
