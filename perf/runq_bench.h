/* runq_bench.h: the same load for every queue. A program defines an adapter and includes this file, C or C++:
 *
 *   typedef … item;                                 with the fields tenant, tier, promoted
 *   #define BENCH_VOLUNTARY                         false if the queue sleeps by design (a mutex)
 *   static void queue_make(uint32_t tenants);
 *   static void queue_push(item *, uint64_t now_ns);
 *   static item *queue_pop(uint64_t now_ns);        NULL: nothing, or ask again
 *   static void queue_destroy(void);
 *
 * Arguments: trials to keep, pairs per trial, seconds at most per mode, seconds of the push mode. Printed: lines of a
 * name and a number.
 *
 * A trial is short (about a millisecond) and counts only if none of its threads lost its CPU: on a shared machine a
 * longer one would measure the other load. `_kept` says how many of the wanted ones were found; if there were none, all
 * count. Times are wall time over the pairs of all threads.
 */
#ifndef RUNQ_BENCH_H
#define RUNQ_BENCH_H

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { QUEUED = 64, TENANTS = 16, TIERS = 4, THREADS = 2, TRIALS_MAX = 1000, PUSHED = 256 };

static int cpus[THREADS], cpu_count;
static unsigned trials_wanted, pairs;
static double mode_seconds, push_seconds;

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static uint32_t random_next(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return (uint32_t)(*x >> 16);
}

static void find_cpus(void)
{
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    for (int cpu = 0; cpu < CPU_SETSIZE && cpu_count < THREADS; cpu++) {
        if (CPU_ISSET(cpu, &set)) {
            cpus[cpu_count++] = cpu;
        }
    }
}

static void pin(int nth)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[nth % cpu_count], &set);
    sched_setaffinity(0, sizeof set, &set);
}

static long switches(bool voluntary)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw + (voluntary ? usage.ru_nvcsw : 0);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* --- trials ------------------------------------------------------------------- */

typedef enum { ROLE_PAIR, ROLE_PRODUCER, ROLE_CONSUMER, ROLE_OTHER } role;

typedef struct {
    role what;
    int nth;
    uint32_t tenants;
    bool one_tier;
    uint64_t seed, start, end;
    long switched;
} part;

static unsigned parts_ready, parts_expected;

/* The way back from a consumer to a producer: one of each. */
static item *free_items[PUSHED];
static unsigned free_head __attribute__((aligned(64))), free_tail __attribute__((aligned(64)));

static void give_free(item *it)
{
    unsigned head = __atomic_load_n(&free_head, __ATOMIC_RELAXED);
    free_items[head % PUSHED] = it;
    __atomic_store_n(&free_head, head + 1, __ATOMIC_RELEASE);
}

static item *take_free(void)
{
    unsigned tail = __atomic_load_n(&free_tail, __ATOMIC_RELAXED);
    while (__atomic_load_n(&free_head, __ATOMIC_ACQUIRE) == tail) {
        relax();
    }
    item *it = free_items[tail % PUSHED];
    __atomic_store_n(&free_tail, tail + 1, __ATOMIC_RELEASE);
    return it;
}

static void prepare(item *it, uint32_t random, uint32_t tenants, bool one_tier)
{
    it->promoted = false;
    it->tenant = (random >> 2) % tenants;
    it->tier = one_tier ? 1 : (uint8_t)(random % TIERS);
}

#ifndef BENCH_OTHER
#define BENCH_OTHER(p, clock) (void)(clock)
#endif
#ifndef BENCH_ADMIT
#define BENCH_ADMIT(it) (void)(it)
#endif

static void *part_main(void *arg)
{
    part *p = (part *)arg;
    uint64_t x = p->seed, clock = 1000000000;
    pin(p->nth);
    __atomic_fetch_add(&parts_ready, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&parts_ready, __ATOMIC_SEQ_CST) < parts_expected) {
        relax();
    }
    long before = switches(BENCH_VOLUNTARY);
    p->start = clock_ns();
    if (p->what == ROLE_OTHER) {
        BENCH_OTHER(p, &clock);
    } else {
        for (unsigned i = 0; i < pairs; i++) {
            item *it;
            clock += 100;
            if (p->what == ROLE_PRODUCER) {
                it = take_free();
            } else {
                while (!(it = queue_pop(clock))) {
                    relax();
                }
            }
            if (p->what == ROLE_CONSUMER) {
                give_free(it);
            } else {
                prepare(it, random_next(&x), p->tenants, p->one_tier);
                queue_push(it, clock);
            }
        }
    }
    p->end = clock_ns();
    p->switched = switches(BENCH_VOLUNTARY) - before;
    return NULL;
}

static void mode(const char *name, int threads, role first, role second, uint32_t tenants, unsigned queued, bool one_tier)
{
    if (threads > cpu_count) {
        return; /* both on one CPU would measure the scheduler */
    }
    static double kept[TRIALS_MAX], all[TRIALS_MAX];
    unsigned kept_count = 0, all_count = 0;
    uint64_t seed = 88172645463325252u, until = clock_ns() + (uint64_t)(mode_seconds * 1e9);
    item *items = (item *)calloc(queued, sizeof *items);
    queue_make(tenants);
    free_head = free_tail = 0;
    for (unsigned i = 0; i < queued; i++) {
        prepare(&items[i], random_next(&seed), tenants, one_tier);
        if (first == ROLE_PRODUCER) {
            give_free(&items[i]);
        } else {
            BENCH_ADMIT(&items[i]);
            queue_push(&items[i], 1000000000);
        }
    }
    while (kept_count < trials_wanted && all_count < TRIALS_MAX && (clock_ns() < until || !all_count)) {
        part parts[THREADS];
        pthread_t ids[THREADS];
        parts_ready = 0;
        parts_expected = (unsigned)threads;
        for (int i = 0; i < threads; i++) {
            memset(&parts[i], 0, sizeof parts[i]);
            parts[i].what = i ? second : first;
            parts[i].nth = i;
            parts[i].tenants = tenants;
            parts[i].one_tier = one_tier;
            parts[i].seed = (seed += 1000003);
            pthread_create(&ids[i], NULL, part_main, &parts[i]);
        }
        uint64_t start = UINT64_MAX, end = 0;
        long switched = 0;
        for (int i = 0; i < threads; i++) {
            pthread_join(ids[i], NULL);
            start = parts[i].start < start ? parts[i].start : start;
            end = parts[i].end > end ? parts[i].end : end;
            switched += parts[i].switched;
        }
        unsigned done = first == ROLE_PRODUCER ? pairs : pairs * (unsigned)threads;
        double ns = (double)(end - start) / done;
        all[all_count++] = ns;
        if (!switched) {
            kept[kept_count++] = ns;
        }
    }
    double *values = kept_count ? kept : all;
    unsigned count = kept_count ? kept_count : all_count;
    qsort(values, count, sizeof *values, by_size);
    printf("%s_ns %.2f\n%s_best_ns %.2f\n%s_kept %u\n", name, values[count / 2], name, values[0], name, kept_count);
    fflush(stdout);
    queue_destroy();
    free(items);
}

/* --- the control plane's push -------------------------------------------------- */

/* One thread at nice -10 pushes an urgent item every 60 us or so and sleeps in between, so that it often comes while a
 * worker on its CPU is in the queue. The workers, at nice 19, pick, work 1 us and requeue: fifty times as often as
 * slices of guests would. */

typedef struct {
    item it;
    uint32_t is_free;
} pushed_item;

static pushed_item pushed[PUSHED];
static bool push_stop;

static void *push_worker(void *arg)
{
    int nth = *(int *)arg;
    uint64_t x = 362436069u + (uint64_t)nth;
    pin(nth);
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 19);
    while (!__atomic_load_n(&push_stop, __ATOMIC_RELAXED)) {
        uint64_t now = clock_ns();
        item *it = queue_pop(now);
        if (!it) {
            sched_yield();
            continue;
        }
        while (clock_ns() < now + 1000) {
        }
        if (it >= &pushed[0].it && it <= &pushed[PUSHED - 1].it) {
            __atomic_store_n(&((pushed_item *)it)->is_free, 1, __ATOMIC_RELEASE);
            continue;
        }
        prepare(it, random_next(&x), TENANTS, false);
        it->tier = (uint8_t)(1 + it->tier % (TIERS - 1));
        queue_push(it, clock_ns());
    }
    return NULL;
}

static void push_mode(void)
{
    static item lower[QUEUED];
    pthread_t ids[THREADS];
    int nth[THREADS];
    uint64_t x = 521288629, worst = 0, worst_running = 0;
    size_t count = 0, room = (size_t)(push_seconds * 40000) + 1;
    double *taken = (double *)malloc(room * sizeof *taken);
    queue_make(TENANTS);
    for (int i = 0; i < QUEUED; i++) {
        prepare(&lower[i], random_next(&x), TENANTS, false);
        lower[i].tier = (uint8_t)(1 + i % (TIERS - 1));
        queue_push(&lower[i], clock_ns());
    }
    for (int i = 0; i < PUSHED; i++) {
        pushed[i].is_free = 1;
    }
    push_stop = false;
    for (int i = 0; i < cpu_count; i++) {
        nth[i] = i;
        pthread_create(&ids[i], NULL, push_worker, &nth[i]);
    }
    pin(0);
    prctl(PR_SET_TIMERSLACK, 1);
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), -10);
    int nice_now = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
    uint64_t until = clock_ns() + (uint64_t)(push_seconds * 1e9);
    for (unsigned i = 0; clock_ns() < until && count < room; i++) {
        struct timespec pause = {0, 40000 + random_next(&x) % 40000};
        nanosleep(&pause, NULL);
        pushed_item *p = &pushed[i % PUSHED];
        if (!__atomic_load_n(&p->is_free, __ATOMIC_ACQUIRE)) {
            continue; /* all of them wait: the workers have no CPU */
        }
        p->is_free = 0;
        p->it.promoted = false;
        p->it.tier = 0;
        p->it.tenant = random_next(&x) % TENANTS;
        long before = switches(false);
        uint64_t start = clock_ns();
        queue_push(&p->it, start);
        uint64_t ns = clock_ns() - start;
        bool lost_cpu = switches(false) != before;
        taken[count++] = (double)ns;
        worst = ns > worst ? ns : worst;
        worst_running = !lost_cpu && ns > worst_running ? ns : worst_running;
    }
    __atomic_store_n(&push_stop, true, __ATOMIC_RELAXED);
    for (int i = 0; i < cpu_count; i++) {
        pthread_join(ids[i], NULL);
    }
    qsort(taken, count, sizeof *taken, by_size);
    printf("push_max_us %.2f\npush_max_running_us %.2f\n", (double)worst / 1000, (double)worst_running / 1000);
    printf("push_p999_us %.2f\npush_count %zu\npush_nice %d\n", count ? taken[(size_t)((double)count * 0.999)] / 1000 : 0.0,
           count, nice_now);
    queue_destroy();
    free(taken);
}

static int bench(int argc, char **argv)
{
    if (argc != 5) {
        return 2;
    }
    trials_wanted = (unsigned)atoi(argv[1]);
    pairs = (unsigned)atoi(argv[2]);
    mode_seconds = atof(argv[3]);
    push_seconds = atof(argv[4]);
    find_cpus();
    mode("pair_1t", 1, ROLE_PAIR, ROLE_PAIR, TENANTS, QUEUED, false);
    mode("pair_2t", 2, ROLE_PAIR, ROLE_PAIR, TENANTS, QUEUED, false);
    mode("pair_1p1c", 2, ROLE_PRODUCER, ROLE_CONSUMER, TENANTS, QUEUED, false);
#ifdef BENCH_MORE
    BENCH_MORE();
#endif
    push_mode();
    return 0;
}

#endif
