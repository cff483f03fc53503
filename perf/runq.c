/* runq.c: agentrt's run queue under the load of runq_bench.h, and what only it can do: 10,000 tenants, the worker's swap,
 * and everything at once (admission, the look at parked workers, charging, cancels). */
#define _GNU_SOURCE
#include "runq.h"

typedef art_task item;
#define BENCH_VOLUNTARY true
#define BYTES 200 /* of an input, for admission */

static void other(void *p, uint64_t *clock);
#define BENCH_OTHER other
static void admit(art_task *task);
#define BENCH_ADMIT admit
static void more(void);
#define BENCH_MORE more

static art_runq *queue;

static void queue_make(uint32_t tenants);
static void queue_destroy(void);

static inline void queue_push(item *it, uint64_t now_ns)
{
    art_runq_push(queue, it, now_ns);
}

static inline item *queue_pop(uint64_t now_ns)
{
    return art_runq_pop(queue, now_ns);
}

#include "runq_bench.h"

static void queue_make(uint32_t tenants)
{
    art_runq_config config;
    art_runq_config_default(&config);
    config.max_tenants = tenants;
    config.slots = 2;
    if (art_runq_create(&config, &queue)) {
        abort();
    }
}

static void queue_destroy(void)
{
    art_runq_destroy(queue);
}

static void admit(art_task *task)
{
    if (art_runq_admit(queue, task->tenant, BYTES)) {
        abort();
    }
}

/* What `other` does, and the memory that stands for the count of parked workers. */
static enum { SWAP, EVERYTHING } other_what;
static unsigned parked;

static void other(void *arg, uint64_t *clock)
{
    part *p = arg;
    uint64_t x = p->seed;
    art_task *cur;
    if (other_what == SWAP) {
        /* a worker's normal step: its task goes back, the best one comes */
        while (!(cur = art_runq_pop(queue, *clock))) {
            relax();
        }
        for (unsigned i = 0; i < pairs; i++) {
            *clock += 100;
            prepare(cur, random_next(&x), p->tenants, p->one_tier);
            cur = art_runq_yield(queue, cur, *clock);
        }
        art_runq_push(queue, cur, *clock);
        return;
    }
    for (unsigned i = 0; i < pairs; i++) {
        *clock += 100;
        while (!(cur = art_runq_pop(queue, *clock))) {
            relax();
        }
        art_runq_charge(queue, cur, 100, *clock);
        art_runq_release(queue, cur->tenant, BYTES);
        prepare(cur, random_next(&x), p->tenants, p->one_tier);
        admit(cur);
        art_runq_push(queue, cur, *clock);
        if (i % 16 == 0 && art_runq_cancel(queue, cur)) { /* another thread may have picked it by now */
            art_runq_push(queue, cur, *clock);
        }
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        if (__atomic_load_n(&parked, __ATOMIC_RELAXED)) {
            abort();
        }
    }
}

static void more(void)
{
    enum { MANY = 10000 };
    mode("pair_one_tier_1t", 1, ROLE_PAIR, ROLE_PAIR, TENANTS, QUEUED, true);
    mode("pair_10k_tenants", 1, ROLE_PAIR, ROLE_PAIR, MANY, QUEUED, false);
    mode("pair_10k_tenants_10k_queued", 1, ROLE_PAIR, ROLE_PAIR, MANY, MANY, false);
    mode("pair_10k_tenants_2t", 2, ROLE_PAIR, ROLE_PAIR, MANY, QUEUED, false);
    for (int threads = 1; threads <= 2; threads++) {
        other_what = SWAP;
        mode(threads == 1 ? "swap_1t" : "swap_2t", threads, ROLE_OTHER, ROLE_OTHER, TENANTS, QUEUED, false);
        other_what = EVERYTHING;
        mode(threads == 1 ? "everything_1t" : "everything_2t", threads, ROLE_OTHER, ROLE_OTHER, TENANTS, QUEUED, false);
    }
}

int main(int argc, char **argv)
{
    return bench(argc, argv);
}
