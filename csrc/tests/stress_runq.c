/* stress_runq.c: the run queue under several threads, judged afterwards by an oracle on time stamps.
 *
 *   stress_runq [seed [seconds]]      or ART_TEST_SEED, ART_TEST_SECONDS; default 5 s in all
 *
 * The queue's source is compiled into this file under other names, with no spinning before the inbox and a random yield
 * in every window in which a descheduled thread could hurt: an ordinary build hardly ever takes the inbox path, and a
 * stress run of it is blind to what goes wrong there. -DSTRESS_PLAIN compiles the queue as it is shipped.
 *
 * Checked of every call, from stamps taken around it (S before, E after):
 *   once   every push is matched by exactly one pick or cancel of that task, never two, and none is left at the end
 *   P1     no pick X returns tier t (or nothing, not busy) while a task of a higher tier was queued during all of X: its
 *          push ended before X began and its removal began after X ended
 *   cancel no cancel says "not queued" of a task that was queued during all of the call
 *   P2     art_runq_tiers shows the tier of every task that was queued during all of the call
 *   order  per (pushing thread, tenant, tier) no later task's pick ends before an earlier one's begins (preempted tasks
 *          come back first, so they may be earlier but not later; promoted ones may be later but not earlier)
 * First, on one thread: every operation is interrupted once in each of its windows by another whole operation.
 *
 * Stamps come from one shared counter: a locked add on x86 (nothing floats over it), with fences elsewhere. Relaxed, so
 * that it gives TSan no happens-before that the queue itself does not.
 */
#define art_runq_config_default stress_runq_config_default
#define art_runq_create stress_runq_create
#define art_runq_destroy stress_runq_destroy
#define art_runq_tenant_set stress_runq_tenant_set
#define art_runq_slots_set stress_runq_slots_set
#define art_runq_admit stress_runq_admit
#define art_runq_release stress_runq_release
#define art_runq_push stress_runq_push
#define art_runq_pop stress_runq_pop
#define art_runq_take stress_runq_take
#define art_runq_preempt stress_runq_preempt
#define art_runq_yield stress_runq_yield
#define art_runq_charge stress_runq_charge
#define art_runq_cancel stress_runq_cancel
#define art_runq_try_cancel stress_runq_try_cancel
#define art_runq_tiers stress_runq_tiers
#define art_runq_tier0_capped stress_runq_tier0_capped
#define art_runq_statistics stress_runq_statistics
#define art_runq_oldest_ns stress_runq_oldest_ns
#define art__runq_verify stress__runq_verify

static void window(void);
#ifndef STRESS_PLAIN
#define ART_RUNQ_WINDOW() window()
#define ART_RUNQ_NO_SPIN
#endif
#include "../runq.c"

#include <inttypes.h>
#include <pthread.h>
#include <time.h>

enum { THREADS_MAX = 4, TASKS = 64, TENANTS = 8, LOG = 150000 };

typedef struct span { /* one stay of a task in the queue */
    uint64_t push_start, push_end, out_start, out_end;
    uint32_t tenant;
    uint8_t task;
    uint8_t tier;     /* pushed at */
    uint8_t out_tier; /* picked from */
    bool interrupted, promoted, cancelled, done;
} span;

typedef struct glance { /* a pick that returned nothing, a cancel that said "not queued", or a look at the tiers */
    uint64_t start, end;
    uint8_t bits; /* of a look: tiers that were said to have work; of a cancel: the task */
} glance;

typedef struct worker {
    alignas(CACHE_LINE) pthread_t thread;
    uint32_t index;
    uint64_t rng;
    span *spans;
    glance *nothing, *missed, *looks;
    uint32_t span_count, nothing_count, missed_count, look_count;
    int owned[TASKS];
    uint32_t owned_count;
} worker;

typedef struct stress_task {
    art_task task;
    _Atomic uint32_t queued; /* once: relaxed exchange, so it adds no happens-before */
    span *at;                /* plain, and written by each owner: TSan sees two owners at once */
    uint64_t scribble;
} stress_task;

static art_runq *q;
static stress_task tasks[TASKS];
static worker workers[THREADS_MAX];
static _Atomic uint64_t ticks;
static _Atomic uint32_t stop, ready, errors;
static uint32_t thread_count, window_rate;
static bool logging;
static _Thread_local uint64_t window_rng;

#define FAIL(...)                                                                                                      \
    do {                                                                                                               \
        if (atomic_fetch_add(&errors, 1) < 10)                                                                         \
            fprintf(stderr, __VA_ARGS__);                                                                              \
    } while (0)

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * UINT64_C(2685821657736338717) >> 16;
}

/* One thread, one interruption: what runs in which window of the current operation. */
static void (*nested)(void);
static uint32_t nested_in, window_number;

static __attribute__((unused)) void window(void)
{
    if (nested) {
        if (window_number++ == nested_in) {
            void (*run)(void) = nested;
            nested = NULL;
            run();
        }
        return;
    }
    if (window_rate == 0 || window_rng == 0)
        return;
    uint64_t r = next_random(&window_rng);
    if (r % window_rate == 0)
        for (uint64_t i = r / window_rate % 32 ? 1 : 30; i != 0; i--) /* now and then a long absence */
            sched_yield();
}

static uint64_t stamp(void)
{
#ifndef __x86_64__
    atomic_thread_fence(memory_order_seq_cst);
#endif
    uint64_t t = atomic_fetch_add_explicit(&ticks, 1, memory_order_relaxed) + 1;
#ifndef __x86_64__
    atomic_thread_fence(memory_order_seq_cst);
#endif
    return t;
}

static uint64_t fake_now(void)
{
    return atomic_load_explicit(&ticks, memory_order_relaxed) * 100;
}

/* ---------------------------------------------------------------- one thread's operations */

static void owns(worker *w, art_task *task, uint64_t start, uint64_t end, bool cancelled)
{
    stress_task *s = (stress_task *)task;
    if (atomic_exchange_explicit(&s->queued, 0, memory_order_relaxed) != 1)
        FAIL("once: task %td came out twice\n", s - tasks);
    s->scribble += w->index + 1;
    if (s->at) {
        s->at->out_start = start;
        s->at->out_end = end;
        s->at->out_tier = task->tier;
        s->at->promoted = task->promoted;
        s->at->cancelled = cancelled;
        s->at->done = true;
    }
    w->owned[w->owned_count++] = (int)(s - tasks);
}

/* Gives a task up: from here to the end of the call that queues it only `at` is looked at, by its next owner. */
static span *gives(worker *w, stress_task *s, bool interrupted)
{
    span *at = NULL;
    if (logging) {
        at = &w->spans[w->span_count++];
        *at = (span){.tenant = s->task.tenant, .task = (uint8_t)(s - tasks), .tier = s->task.tier, .interrupted = interrupted};
    }
    s->at = at;
    s->scribble ^= UINT64_C(0x5555);
    atomic_store_explicit(&s->queued, 1, memory_order_relaxed);
    return at;
}

static void takes_back(worker *w, stress_task *s)
{
    atomic_store_explicit(&s->queued, 0, memory_order_relaxed);
    s->at = NULL;
    if (logging)
        w->span_count--;
}

static void fresh(worker *w, stress_task *s)
{
    uint64_t r = next_random(&w->rng);
    s->task.promoted = false;
    s->task.tenant = (uint32_t)(r >> 8) % TENANTS;
    s->task.tier = (uint8_t)(r & 3);
}

static void do_push(worker *w, uint32_t at)
{
    stress_task *s = &tasks[w->owned[at]];
    w->owned[at] = w->owned[--w->owned_count];
    fresh(w, s);
    span *sp = gives(w, s, false);
    uint64_t start = stamp();
    art_runq_push(q, &s->task, fake_now());
    uint64_t end = stamp();
    if (sp)
        sp->push_start = start, sp->push_end = end;
}

static void do_take(worker *w)
{
    bool busy;
    uint64_t start = stamp();
    art_task *task = art_runq_take(q, fake_now(), &busy);
    uint64_t end = stamp();
    if (task)
        owns(w, task, start, end, false);
    else if (!busy && logging && w->nothing_count < LOG)
        w->nothing[w->nothing_count++] = (glance){start, end, 0};
}

static void do_swap(worker *w, uint32_t at, bool preempt)
{
    stress_task *s = &tasks[w->owned[at]];
    art_runq_charge(q, &s->task, next_random(&w->rng) % 20000, fake_now());
    if (!preempt) {
        art_task_unpromote(&s->task);
        s->task.tier = (uint8_t)(s->task.tier + (s->task.tier < 3));
    }
    span *sp = gives(w, s, preempt);
    uint64_t start = stamp();
    art_task *task = preempt ? art_runq_preempt(q, &s->task, fake_now()) : art_runq_yield(q, &s->task, fake_now());
    uint64_t end = stamp();
    if (task == NULL || task == &s->task) {
        if (!preempt && task == NULL)
            FAIL("yield returned nothing\n");
        /* yield may have requeued and picked it within the call, or not (busy): no stay that anybody could see */
        takes_back(w, s);
        return;
    }
    if (sp)
        sp->push_start = start, sp->push_end = end;
    w->owned[at] = w->owned[--w->owned_count];
    owns(w, task, start, end, false);
}

static void do_cancel(worker *w)
{
    stress_task *s = &tasks[next_random(&w->rng) % TASKS];
    uint64_t start = stamp();
    int got = next_random(&w->rng) & 1 ? art_runq_cancel(q, &s->task) : art_runq_try_cancel(q, &s->task);
    uint64_t end = stamp();
    if (got == 1)
        owns(w, &s->task, start, end, true);
    else if (got == 0 && logging && w->missed_count < LOG)
        w->missed[w->missed_count++] = (glance){start, end, (uint8_t)(s - tasks)};
}

static void do_look(worker *w)
{
    uint64_t start = stamp();
    uint32_t bits = art_runq_tiers(q);
    uint64_t end = stamp();
    if (w->look_count < LOG && logging)
        w->looks[w->look_count++] = (glance){start, end, (uint8_t)bits};
}

/* What has come into the tier so far. */
static uint64_t came_in(const art_runq_stats *stats, int tier)
{
    uint64_t in = stats->pushes[tier];
    for (int from = 2; tier == 1 && from < ART_TIERS; from++)
        in += stats->promotions_count[from] + stats->promotions_wait[from];
    return in;
}

static void *work(void *arg)
{
    worker *w = arg;
    window_rng = w->rng ^ UINT64_C(0x123456789abcdef);
    atomic_fetch_add(&ready, 1);
    while (atomic_load(&ready) < thread_count)
        sched_yield();
    uint32_t mood = 0;
    /* a swap may use two spans of room */
    while (!atomic_load_explicit(&stop, memory_order_relaxed) && (!logging || w->span_count + 2 < LOG)) {
        uint64_t r = next_random(&w->rng);
        if (r % 128 == 0)
            mood = (uint32_t)(r >> 20) % 3; /* filling, draining, swapping: the queue is empty and full many times */
        uint32_t draw = (uint32_t)(r >> 8) % 100, at = w->owned_count ? (uint32_t)(r >> 32) % w->owned_count : 0;
        static const uint32_t push_up_to[3] = {60, 25, 30}, take_up_to[3] = {75, 75, 45};
        if (draw < push_up_to[mood]) {
            if (w->owned_count)
                do_push(w, at);
        } else if (draw < take_up_to[mood]) {
            do_take(w);
        } else if (draw < 92) {
            if (w->owned_count)
                do_swap(w, at, draw & 1);
        } else if (draw < 95) {
            do_cancel(w);
        } else if (draw == 95) {
            art_runq_stats before, stats, after;
            art_runq_statistics(q, &before);
            art_runq_statistics(q, &stats);
            art_runq_statistics(q, &after);
            (void)art_runq_oldest_ns(q, (uint32_t)r & 3);
            for (int t = 0; t < ART_TIERS; t++) /* off by what comes in meanwhile, and no more */
                if (stats.queued[t] > TASKS + came_in(&after, t) - came_in(&before, t))
                    FAIL("statistics: more queued than there are\n");
        } else {
            do_look(w);
        }
    }
    return NULL;
}

/* The tightest loop: every pick is pushed again at once, by whoever has it. Finds late touches of a task. */
static void *recycle(void *arg)
{
    worker *w = arg;
    window_rng = w->rng ^ UINT64_C(0x123456789abcdef);
    atomic_fetch_add(&ready, 1);
    while (atomic_load(&ready) < thread_count)
        sched_yield();
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        if (w->owned_count)
            do_push(w, w->owned_count - 1);
        else
            do_take(w);
    }
    return NULL;
}

/* ---------------------------------------------------------------- oracle */

static int by_push_end(const void *a, const void *b)
{
    const span *x = *(span *const *)a, *y = *(span *const *)b;
    return x->push_end < y->push_end ? -1 : x->push_end > y->push_end;
}

typedef struct span_index { /* stays in one tier, or of one task, by end of push, with the latest removal so far */
    span **by_end;
    uint64_t *latest_out;
    size_t count;
} span_index;

typedef enum key { TIER, TIER_UNPROMOTED, TASK } key;

static span_index index_by(key k, uint32_t value)
{
    size_t room = (size_t)LOG * thread_count + 1;
    span_index x = {malloc(room * sizeof(span *)), malloc(room * sizeof(uint64_t)), 0};
    if (!x.by_end || !x.latest_out)
        abort();
    for (uint32_t i = 0; i < thread_count; i++)
        for (uint32_t j = 0; j < workers[i].span_count; j++) {
            span *s = &workers[i].spans[j];
            if (k == TASK ? s->task == value : s->tier == value && !(k == TIER_UNPROMOTED && s->promoted))
                x.by_end[x.count++] = s;
        }
    qsort(x.by_end, x.count, sizeof *x.by_end, by_push_end);
    uint64_t latest = 0;
    for (size_t i = 0; i < x.count; i++) {
        uint64_t out = x.by_end[i]->out_start;
        latest = out > latest ? out : latest;
        x.latest_out[i] = latest;
    }
    return x;
}

static void index_free(span_index *x)
{
    free(x->by_end);
    free(x->latest_out);
}

/* Was some task of this index queued during all of [start, end]? */
static bool queued_during(const span_index *x, uint64_t start, uint64_t end)
{
    size_t low = 0, high = x->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (x->by_end[middle]->push_end < start)
            low = middle + 1;
        else
            high = middle;
    }
    return low != 0 && x->latest_out[low - 1] > end;
}

static void judge(uint64_t counts[4])
{
    span_index any[ART_TIERS], unpromoted[ART_TIERS];
    for (uint32_t t = 0; t < ART_TIERS; t++) {
        any[t] = index_by(TIER, t); /* promoted: it was at least as high as pushed */
        unpromoted[t] = index_by(TIER_UNPROMOTED, t);
    }
    for (uint32_t i = 0; i < thread_count; i++) {
        worker *w = &workers[i];
        for (uint32_t j = 0; j < w->span_count; j++) {
            span *s = &w->spans[j];
            if (!s->done)
                FAIL("once: a task never came out\n");
            counts[0]++;
            if (s->cancelled)
                continue;
            for (uint32_t t = 0; t < s->out_tier; t++)
                if (queued_during(&any[t], s->out_start, s->out_end))
                    FAIL("P1: tier %u picked although tier %u had work during %" PRIu64 "..%" PRIu64 "\n", s->out_tier, t,
                         s->out_start, s->out_end);
        }
        for (uint32_t j = 0; j < w->nothing_count; j++, counts[1]++)
            for (uint32_t t = 0; t < ART_TIERS; t++)
                if (queued_during(&any[t], w->nothing[j].start, w->nothing[j].end))
                    FAIL("P1: nothing found although tier %u had work\n", t);
        for (uint32_t j = 0; j < w->look_count; j++, counts[2]++)
            for (uint32_t t = 0; t < ART_TIERS; t++)
                if (!(w->looks[j].bits >> t & 1) && queued_during(&unpromoted[t], w->looks[j].start, w->looks[j].end))
                    FAIL("P2: tier %u does not show\n", t);
        for (uint32_t group = 0; group < TENANTS * ART_TIERS; group++) {
            uint64_t earliest_later_end = UINT64_MAX;
            for (uint32_t j = w->span_count; j-- != 0;) {
                span *s = &w->spans[j];
                if (s->tenant * ART_TIERS + s->tier != group || s->cancelled)
                    continue;
                if (!s->promoted && earliest_later_end < s->out_start)
                    FAIL("order: tenant %u tier %u\n", s->tenant, s->tier);
                if (!s->interrupted && s->out_end < earliest_later_end)
                    earliest_later_end = s->out_end;
                counts[3]++;
            }
        }
    }
    for (uint32_t task = 0; task < TASKS; task++) {
        span_index stays = index_by(TASK, task);
        for (uint32_t i = 0; i < thread_count; i++)
            for (uint32_t j = 0; j < workers[i].missed_count; j++) {
                const glance *m = &workers[i].missed[j];
                if (m->bits == task && queued_during(&stays, m->start, m->end))
                    FAIL("cancel: task %u was queued all the time\n", task);
            }
        index_free(&stays);
    }
    for (uint32_t t = 0; t < ART_TIERS; t++) {
        index_free(&any[t]);
        index_free(&unpromoted[t]);
    }
}

/* ---------------------------------------------------------------- phases */

typedef struct phase {
    const char *name;
    uint32_t threads, window_rate, share_pct, task_count;
    void *(*body)(void *);
    bool judged;
} phase;

static void run_phase(const phase *p, uint64_t seed, double seconds)
{
    art_runq_config c;
    art_runq_config_default(&c);
    c.max_tenants = TENANTS;
    c.aging_threshold = 20;
    c.aging_wait_ns[2] = c.aging_wait_ns[3] = 50000;
    c.tier0_share_pct = p->share_pct;
    c.tier0_window_ns = 100000;
    c.drr_quantum_ns = 20000;
    if (art_runq_create(&c, &q))
        abort();
    thread_count = p->threads;
    window_rate = p->window_rate;
    logging = p->judged;
    atomic_store(&stop, 0);
    atomic_store(&ready, 0);
    for (uint32_t i = 0; i < TASKS; i++)
        tasks[i] = (stress_task){.at = NULL};
    for (uint32_t i = 0; i < p->threads; i++) {
        worker *w = &workers[i];
        w->index = i;
        w->rng = (seed + i + 1) * UINT64_C(0x9E3779B97F4A7C15) | 1;
        w->span_count = w->nothing_count = w->missed_count = w->look_count = w->owned_count = 0;
        if (!w->spans) {
            w->spans = malloc(LOG * sizeof *w->spans);
            w->nothing = malloc(LOG * sizeof *w->nothing);
            w->missed = malloc(LOG * sizeof *w->missed);
            w->looks = malloc(LOG * sizeof *w->looks);
            if (!w->spans || !w->nothing || !w->missed || !w->looks)
                abort();
        }
    }
    for (uint32_t i = 0; i < p->task_count; i++) {
        worker *w = &workers[i % p->threads];
        w->owned[w->owned_count++] = (int)i;
    }
    for (uint32_t i = 0; i < p->threads; i++)
        if (pthread_create(&workers[i].thread, NULL, p->body, &workers[i]))
            abort();
    nanosleep(&(struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)}, NULL);
    atomic_store(&stop, 1);
    for (uint32_t i = 0; i < p->threads; i++)
        pthread_join(workers[i].thread, NULL);

    /* everything still queued must come out, by one thread, once */
    logging = p->judged;
    uint32_t owned = 0;
    while (art_runq_tiers(q)) {
        uint32_t before = workers[0].owned_count;
        do_take(&workers[0]);
        if (workers[0].owned_count == before) {
            FAIL("%s: tiers say there is work but nothing comes\n", p->name);
            break;
        }
    }
    for (uint32_t i = 0; i < p->threads; i++)
        owned += workers[i].owned_count;
    if (owned != p->task_count)
        FAIL("%s: %u tasks of %u left\n", p->name, owned, p->task_count);
    art__runq_verify(q);

    uint64_t counts[4] = {0};
    if (p->judged)
        judge(counts);
    art_runq_stats s;
    art_runq_statistics(q, &s);
    uint64_t pushes = 0, pops = 0, promotions = 0;
    for (int t = 0; t < ART_TIERS; t++) {
        pushes += s.pushes[t];
        pops += s.pops[t];
        promotions += s.promotions_count[t] + s.promotions_wait[t];
    }
    if (pushes != pops + s.cancels)
        FAIL("%s: %" PRIu64 " pushes, %" PRIu64 " pops, %" PRIu64 " cancels\n", p->name, pushes, pops, s.cancels);
    printf("%-22s %u threads: %" PRIu64 " pushes, %" PRIu64 " by inbox, %" PRIu64 " busy, %" PRIu64 " promotions, %" PRIu64
           " cancels, %" PRIu64 " capped; judged %" PRIu64 " stays, %" PRIu64 " nothings, %" PRIu64 " looks\n",
           p->name, p->threads, pushes, s.inbox, s.busy, promotions, s.cancels, s.tier0_capped, counts[0], counts[1],
           counts[2]);
    fflush(stdout);
#ifndef STRESS_PLAIN
    if (p->window_rate && pushes > 5000 && s.inbox * 2000 < pushes)
        FAIL("%s: blind: the inbox was hardly used\n", p->name);
#endif
    art_runq_destroy(q);
}

/* ---------------------------------------------------------------- one interruption in each window */

#ifndef STRESS_PLAIN
enum { LOW_A, LOW_B, LOW_C, CUR, FIRST, NEW, COME, PARTS }; /* tasks[] by part */
enum { OPS_MAIN = 6, OPS_NESTED = 5 };

static uint32_t nested_op, look_bits;
static bool looked, nested_busy;
static art_task *nested_took;

static void run_nested(void)
{
    looked = nested_busy = false;
    switch (nested_op) {
    case 0:
    case 1:
        tasks[COME].task.tier = nested_op == 0 ? 0 : 1;
        art_runq_push(q, &tasks[COME].task, 0);
        break;
    case 2:
        nested_took = art_runq_take(q, 0, &nested_busy);
        looked = !nested_busy;
        break;
    case 3:
        nested_took = art_runq_try_cancel(q, &tasks[LOW_B].task) == 1 ? &tasks[LOW_B].task : NULL;
        break;
    default:
        look_bits = art_runq_tiers(q);
    }
}

static void interrupt(uint32_t main_op, bool by_inbox, bool tier0_first, uint32_t in_window, bool *fired)
{
    static const uint8_t part_tiers[PARTS] = {2, 2, 3, 3, 0, 2, 0};
    uint32_t seen[PARTS] = {0}, expected[PARTS] = {1, 1, 1, 1, tier0_first, 0, 0};
    bool last[PARTS] = {false};
    art_runq_config c;
    art_runq_config_default(&c);
    c.max_tenants = TENANTS;
    c.aging_threshold = main_op == 1 ? 1 : 50;
    if (art_runq_create(&c, &q))
        abort();
    for (uint32_t i = 0; i < PARTS; i++)
        tasks[i] = (stress_task){.task = {.tenant = i, .tier = part_tiers[i]}};
    for (int h = 0; by_inbox && h < HALVES; h++) /* as if somebody were inside */
        atomic_store(&q->halves[h].token, 1);
    for (uint32_t i = 0; i < PARTS; i++)
        if (expected[i] && i != CUR)
            art_runq_push(q, &tasks[i].task, 0);
    for (int h = 0; by_inbox && h < HALVES; h++)
        atomic_store(&q->halves[h].token, 0);

    art_task *took = NULL, *cur = &tasks[CUR].task;
    bool busy = false, has_cur = true;
    nested_took = NULL;
    looked = nested_busy = false;
    look_bits = UINT32_MAX;
    window_number = 0;
    nested_in = in_window;
    nested = run_nested;
    switch (main_op) {
    case 0:
        expected[NEW] = 1;
        art_runq_push(q, &tasks[NEW].task, 0);
        break;
    case 1:
        took = art_runq_take(q, 0, &busy);
        break;
    case 2:
        took = art_runq_preempt(q, cur, 0);
        has_cur = took == NULL;
        break;
    case 3:
        took = art_runq_yield(q, cur, 0);
        has_cur = false;
        break;
    case 4:
        took = art_runq_try_cancel(q, &tasks[LOW_A].task) == 1 ? &tasks[LOW_A].task : NULL;
        if (!took && nested_took != &tasks[LOW_A].task)
            FAIL("interrupt: a queued task could not be cancelled\n");
        break;
    default: {
        art_runq_stats stats;
        art_runq_statistics(q, &stats);
    }
    }
    *fired = nested == NULL;
    nested = NULL;
    if (*fired && nested_op <= 1)
        expected[COME] = 1;
    art__runq_verify(q);

    if (has_cur)
        seen[CUR]++;
    if (took)
        seen[(stress_task *)took - tasks]++;
    if (nested_took)
        seen[(stress_task *)nested_took - tasks]++;
    for (art_task *task; (task = art_runq_pop(q, 0)) != NULL;) {
        uint32_t part = (uint32_t)((stress_task *)task - tasks);
        seen[part]++;
        last[part] = part != CUR && part != NEW && part != COME; /* queued all the time */
        if (last[part] && !task->promoted && !(look_bits >> part_tiers[part] & 1))
            FAIL("interrupt: tier %u does not show\n", part_tiers[part]);
        if (last[part] && looked && (!nested_took || (!nested_took->promoted && nested_took->tier > part_tiers[part])))
            FAIL("interrupt: the nested pick passed tier %u over\n", part_tiers[part]);
        if (last[part] && main_op == 1 && (!took || (!took->promoted && took->tier > part_tiers[part])))
            FAIL("interrupt: the pick passed tier %u over\n", part_tiers[part]);
    }
    if (busy)
        FAIL("interrupt: busy although nobody was inside\n");
    for (uint32_t i = 0; i < PARTS; i++)
        if (seen[i] != expected[i])
            FAIL("interrupt: op %u, %u nested in window %u: part %u came out %u times\n", main_op, nested_op, in_window, i,
                 seen[i]);
    /* a pick that finds only lower work looks at tier 0 once more when it has the token: windows 0-3 lie before the end of
     * that look */
    if (main_op == 1 && nested_op == 0 && !by_inbox && !tier0_first && in_window < 4 && took != &tasks[COME].task)
        FAIL("interrupt: tier 0 came in window %u and was not taken\n", in_window);
    art_runq_destroy(q);
}

static void interrupt_everything(void)
{
    uint64_t count = 0;
    logging = false;
    for (uint32_t variant = 0; variant < OPS_MAIN * OPS_NESTED * 4; variant++) {
        bool fired = true;
        nested_op = variant / 4 % OPS_NESTED;
        for (uint32_t in_window = 0; fired; in_window++, count++)
            interrupt(variant / 4 / OPS_NESTED, variant & 1, variant & 2, in_window, &fired);
    }
    printf("interruptions: %" PRIu64 "\n", count);
    if (count < 500)
        FAIL("interruptions: blind, only %" PRIu64 " windows\n", count);
}
#endif

int main(int argc, char **argv)
{
    const char *seed_text = argc > 1 ? argv[1] : getenv("ART_TEST_SEED");
    const char *seconds_text = argc > 2 ? argv[2] : getenv("ART_TEST_SECONDS");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 0) : (uint64_t)time(NULL);
    double seconds = seconds_text ? strtod(seconds_text, NULL) : 5;
    static const phase phases[] = {
        {"windows", 2, 6, 100, TASKS, work, true},
        {"windows, few tasks", 3, 6, 100, 9, work, true},
        {"windows", 4, 10, 100, TASKS, work, true},
        {"contention", 2, 0, 100, TASKS, work, true},
        {"tier-0 cap", 3, 8, 30, TASKS, work, false},
        {"recycling, windows", 3, 10, 100, 24, recycle, false},
        {"recycling, contention", 4, 0, 100, 24, recycle, false},
    };
    enum { PHASES = sizeof phases / sizeof *phases };
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
#ifndef STRESS_PLAIN
    interrupt_everything();
#endif
    for (uint32_t i = 0; i < PHASES; i++)
        run_phase(&phases[i], seed * PHASES + i, seconds / PHASES);
    for (uint32_t i = 0; i < THREADS_MAX; i++) {
        free(workers[i].spans);
        free(workers[i].nothing);
        free(workers[i].missed);
        free(workers[i].looks);
    }
    uint32_t failed = atomic_load(&errors);
    printf(failed ? "%u FAILED\n" : "ok\n", failed);
    return failed != 0;
}
