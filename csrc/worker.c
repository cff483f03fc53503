/* worker.c: see worker.h. Sections: states, waking, blocking, slices, hosting foreigns, the thread, the control plane's side. */
#include "worker.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "art_err.h"
#include "sys_linux.h"
#include "topo.h"

/* The clock is read every so many micro-slices (1.7 us of a tight loop, 7 us of CPython each): 3 % of a slice's time
 * otherwise, and quanta are milliseconds. A test build may define another. */
#ifndef CLOCK_EVERY
#define CLOCK_EVERY 8
#endif

/* How long a worker that hosts a foreign sleeps while tier 0 is held back by its cap: the window moves by eighths of a second. */
#define CAP_LOOK_NS 10000000u

/* Of the live runs, one in so many is kept for tier 0, so that urgent work starts when lower tiers hold all slots. */
#define LIVE_RESERVE 16

/* A test build may define ART_WORKER_WINDOW(), called where a descheduled thread could hurt. */
#ifndef ART_WORKER_WINDOW
#define ART_WORKER_WINDOW() ((void)0)
#endif

enum { KIND_RUN = 1, KIND_FOREIGN = 2 };

/* A run's states. Who moves it on: W the worker that has it, C the control thread.
 *   QUEUED -> RUNNING (W) -> PREEMPTED (W: by a higher tier, or its quantum is over) -> RUNNING (W); starved is QUEUED too
 *   RUNNING -> CHECKING -> BLOCKING -> BLOCKED (W), -> WAKE from CHECKING and BLOCKING (C), WAKE -> RUNNING (W)
 *   BLOCKED -> QUEUED (C)
 *   BLOCKED -> CAPTURING (any thread, which has it then) -> BLOCKED, DONE, or, if it was woken meanwhile, WAKE -> QUEUED
 *   RUNNING -> DONE (W), QUEUED, PREEMPTED -> DONE (C, after it was cancelled from the queue) */
enum run_state {
    RUN_QUEUED,
    RUN_PREEMPTED,
    RUN_RUNNING,
    RUN_CHECKING,
    RUN_BLOCKING,
    RUN_WAKE,
    RUN_BLOCKED,
    RUN_CAPTURING,
    RUN_DONE,
};

enum { SAFE_POINT_LEFT = 1, SAFE_POINT_WANTED = 2 }; /* in that order, if both */

/* What runs and foreigns have in common, as their first member. */
typedef struct entity {
    art_event event;
    art_task task; /* kind: KIND_RUN or KIND_FOREIGN, constant */
    art_pool *pool;
    void *user;
    uint64_t number; /* constant */
    ART_ATOMIC(uint32_t) references; /* control plane 1, and 1 for the worker while it has it: who ends it still publishes */
    bool over;                       /* the control plane's: "the last event", below, is settled */
    /* tier lending, see take_floor. `floor_wanted` the control plane writes, the rest is the owner's */
    ART_ATOMIC(uint32_t) floor_wanted; /* art_tier_floor in force from when the owner sees it */
    uint8_t floor, own_tier;           /* own_tier: with `lent`, where it would be without */
    bool promoted;                     /* `allotment_ns` is that of a promotion */
    bool lent;                         /* task.tier is the floor (or promoted from there), which is above own_tier */
    uint64_t own_allotment_ns;         /* with `lent`, what was used at own_tier */
    uint64_t allotment_ns;             /* slot time used at the present tier; the owner's */
} entity;

struct art_run {
    entity base;
    art_guest *guest;
    art_fuel_account fuel;
    ART_ATOMIC(uint32_t) state;
    ART_ATOMIC(bool) kill;
    ART_ATOMIC(uint64_t) unwind_ns; /* 0: not told to unwind. art_run_unwind writes, once */
    uint8_t unwind_stage;           /* art_unwind_stage, as the owner last saw it, */
    uint64_t unwind_from_ns;        /* and the slot time that it began with */
    bool replay;                    /* constant */
    ART_ATOMIC(bool) started;       /* has had a slot; the worker writes */
    bool counted;    /* has a place in the queue's admission */
    bool live;       /* counted in pool->live */
    bool no_fuel;    /* why it is blocked; valid like the guest's handles */
    bool at_safe_point;                  /* as no_fuel */
    ART_ATOMIC(uint32_t) safe_point;     /* SAFE_POINT_…: anybody writes, the worker takes */
    uint64_t fuel_granted; /* with no_fuel */
    uint64_t base_tier_wait; /* number of the wait that last returned it to its base tier */
    uint64_t bytes;
    uint64_t slot_ns, submitted_ns;
    ART_ATOMIC(uint64_t) ran_ns; /* slot_ns and what is not charged yet, as of the last tick; the owner writes, as the next two */
    ART_ATOMIC(uint64_t) used_fuel, memory_bytes; /* as of then, too */
    uint32_t preemptions, demotions;
};

struct art_foreign {
    entity base;
    int pidfd;
    ART_ATOMIC(uint64_t) state; /* bits 0-1 art_foreign_state, 2-32 grants, 33-63 preemptions: seen together. The owner writes */
    ART_ATOMIC(bool) release;
    ART_ATOMIC(int32_t) host; /* worker that hosts it, -1 none */
    uint64_t seen;            /* `state` at the control plane's last look */
};

/* A slice as a worker keeps it: `what` is number << 8 | foreign << 7 | tier, `end` when << 3 | art_slice_end, 0 while it is open. */
typedef struct kept_slice {
    ART_ATOMIC(uint64_t) start_ns, what, end;
} kept_slice;

typedef struct worker {
    art_pool *pool;
    uint32_t index;
    pthread_t thread;
    bool started;
    ART_ATOMIC(uint32_t) parked;    /* 1: asleep for want of work. Worker sets, whoever wakes it clears */
    ART_ATOMIC(uint32_t) nudges;    /* a hosting worker sleeps on it */
    ART_ATOMIC(uint32_t) host_tier; /* tier of the foreign it hosts, NOT_HOSTING otherwise */
    /* statistics: written by the worker, read by anyone, hence atomic; relaxed, since each stands alone */
    ART_ATOMIC(uint64_t) slices, micro_slices, preemptions, demotions, parks, slot_ns[ART_TIERS];
    ART_ATOMIC(uint64_t) waits[ART_TIERS][ART_WAIT_BUCKETS], waited_ns[ART_TIERS];
    ART_ATOMIC(int) nice;
    ART_ATOMIC(uint64_t) opened; /* slices that are or were in `kept`, see open_slice */
    kept_slice *kept; /* ART_SLICES_KEPT, in pool->kept */
} worker;

#define NOT_HOSTING UINT32_MAX

struct art_pool {
    art_pool_config config;
    art_runq *runq;
    art_evq *evq;
    ART_ATOMIC(bool) stop;
    ART_ATOMIC(uint32_t) parked_count;  /* at least the number of workers with parked == 1 */
    ART_ATOMIC(uint32_t) hosting_count; /* workers with host_tier != NOT_HOSTING */
    ART_ATOMIC(uint32_t) live, starved_count;
    ART_ATOMIC(uint64_t) numbers; /* given so far to runs and foreigns */
    ART_ATOMIC(uint64_t) live_peak, starved_total, foreign_grants, foreign_preemptions;
    pthread_mutex_t starved_lock; /* a leaf; taken only when live_max is reached */
    art_task *starved_first[ART_TIERS], *starved_last[ART_TIERS];
    uint32_t starved_passed[ART_TIERS]; /* picks of a higher tier while it had runs here */
    kept_slice *kept; /* of all workers */
    uint32_t worker_count;
    worker workers[];
};

static art_run *run_of(art_task *task)
{
    return (art_run *)((char *)task - offsetof(entity, task));
}

static art_foreign *foreign_of(art_task *task)
{
    return (art_foreign *)((char *)task - offsetof(entity, task));
}

static void count(ART_ATOMIC(uint64_t) *counter, uint64_t n)
{
    /* one writer, so no read-modify-write is needed; relaxed: a statistic */
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n, memory_order_relaxed);
}

/* A slice begins; what is returned is for close_slice. The release is what makes it be there for art_pool_slices ("counted");
 * the fence is before what is overwritten there, partner "overwritten". */
static kept_slice *open_slice(worker *me, const entity *e, uint64_t now_ns)
{
    uint64_t number = atomic_load_explicit(&me->opened, memory_order_relaxed); /* the worker's own */
    kept_slice *slice = &me->kept[number % ART_SLICES_KEPT];
    uint64_t what = e->number << 8 | (uint64_t)(e->task.kind == KIND_FOREIGN) << 7 | e->task.tier;
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&slice->end, 0, memory_order_relaxed);
    atomic_store_explicit(&slice->start_ns, now_ns, memory_order_relaxed);
    atomic_store_explicit(&slice->what, what, memory_order_relaxed);
    atomic_store_explicit(&me->opened, number + 1, memory_order_release);
    return slice;
}

/* It is over. Of its task nothing is touched: that may be another worker's by now. */
static void close_slice(kept_slice *slice, uint64_t now_ns, art_slice_end end)
{
    /* relaxed: one word, seen late as an open slice */
    atomic_store_explicit(&slice->end, now_ns << 3 | end, memory_order_relaxed);
}

/* A slice of the task begins; it has been queued until now. */
static void count_wait(worker *me, const art_task *task, uint64_t now_ns)
{
    /* whoever queued it may have read the clock a little later than this worker */
    uint64_t waited_ns = now_ns > task->enqueued_ns ? now_ns - task->enqueued_ns : 0;
    uint64_t units = waited_ns >> ART_WAIT_FIRST_BIT;
    uint32_t bucket = units ? 64 - (uint32_t)__builtin_clzll(units) : 0;
    count(&me->waits[task->tier][bucket < ART_WAIT_BUCKETS ? bucket : ART_WAIT_BUCKETS - 1], 1);
    count(&me->waited_ns[task->tier], waited_ns);
}

static void destroy_run(art_run *run)
{
    art_guest_destroy(run->guest);
    free(run);
}

static void unref(entity *e)
{
    /* acq_rel: all uses happen before the free */
    if (atomic_fetch_sub_explicit(&e->references, 1, memory_order_acq_rel) == 1) {
        if (e->task.kind == KIND_RUN) {
            destroy_run((art_run *)e);
        } else {
            free(e);
        }
    }
}

static void publish(entity *e, uint64_t now_ns)
{
    /* the tier may be written only while the event is not pending; relaxed: we are its only publisher now */
    if (!atomic_load_explicit(&e->event.pending, memory_order_relaxed)) {
        e->event.tier = e->task.tier;
    }
    art_evq_publish(e->pool->evq, &e->event, now_ns);
}

/* The last event. Whoever ends an entity stores its last state, then publishes. The control plane may see that state early,
 * by an event that was still pending; if it freed the entity then, the last event would be queued with nothing behind it. So
 * it makes sure by claiming the event: `pending` goes to 1 and stays so. If it was 0, the last event was taken, or its
 * publisher has yet to come and will find it pending and queue nothing. If it was 1 an event is queued and the look that
 * follows that one settles it. */
static bool is_over(entity *e)
{
    /* acq_rel: as in art_evq_publish [V1] */
    e->over = e->over || atomic_exchange_explicit(&e->event.pending, 1, memory_order_acq_rel) == 0;
    return e->over;
}

/* --- lending ------------------------------------------------------------------ */

/* A floor is a tier below which the entity does not run while it is set: somebody of that tier waits for it. It hides the
 * entity's own tier and allotment, which it gets back as they were: what it does for others neither demotes nor rests it.
 *
 * Only the owner may change a task's tier. The control plane stores `floor_wanted` (seq_cst), then looks where the task is: in
 * the queue or starved it takes it out, which makes it the owner; blocked, whoever wakes it will look; otherwise a worker has it.
 * A worker stores the state that makes the task queued (or takes `host` back), then looks at `floor_wanted`, then queues it: so
 * either it sees the floor, or the control plane sees a task that is on its way into the queue, and says ART_EBUSY. */
static void take_floor(entity *e)
{
    uint8_t floor = (uint8_t)atomic_load(&e->floor_wanted);
    if (floor == e->floor) {
        return;
    }
    e->floor = floor;
    e->promoted = false;
    art_task_unpromote(&e->task);
    if (e->lent) {
        e->lent = false;
        e->task.tier = e->own_tier;
        e->allotment_ns = e->own_allotment_ns;
    }
    if (floor < e->task.tier) {
        e->lent = true;
        e->own_tier = e->task.tier;
        e->own_allotment_ns = e->allotment_ns;
        e->task.tier = floor;
        e->allotment_ns = 0;
    }
}

static bool floor_changed(const entity *e)
{
    /* relaxed: a running task sees it a micro-slice later at worst; where it may not be missed take_floor looks */
    return atomic_load_explicit(&e->floor_wanted, memory_order_relaxed) != e->floor;
}

/* --- waking ------------------------------------------------------------------- */

/* Why no push is missed: the pusher inserts, fences, then reads parked_count; a worker raises parked_count, sets `parked`, fences,
 * then reads the queue's tier bits and sleeps only if there are none. One of the two fences comes first: either the
 * pusher sees the worker parked, or the worker sees the task. */
static bool wake_parked(art_pool *pool)
{
    for (uint32_t i = 0; i < pool->worker_count; i++) {
        worker *w = &pool->workers[i];
        uint32_t one = 1;
        /* seq_cst as the fences it belongs to; the winner alone wakes */
        if (atomic_load_explicit(&w->parked, memory_order_relaxed) &&
            atomic_compare_exchange_strong(&w->parked, &one, 0)) {
            atomic_fetch_sub(&pool->parked_count, 1);
            art_sys_futex_wake(&w->parked, 1);
            return true;
        }
    }
    return false;
}

static void nudge(worker *w)
{
    atomic_fetch_add(&w->nudges, 1); /* seq_cst: after the flag or task it announces */
    art_sys_futex_wake(&w->nudges, 1);
}

/* A task of `tier` was queued: find a worker for it. Also when a worker has requeued a task and goes on with another: between
 * the two the queue may have looked empty to a worker that is now parked, and a lower tier may be hosted elsewhere. */
static void wake_for(art_pool *pool, uint8_t tier)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&pool->parked_count, memory_order_relaxed) && wake_parked(pool)) {
        return;
    }
    if (!atomic_load_explicit(&pool->hosting_count, memory_order_relaxed)) {
        return; /* all workers run guests and look at the queue every micro-slice */
    }
    worker *lowest = NULL;
    uint32_t lowest_tier = tier;
    for (uint32_t i = 0; i < pool->worker_count; i++) {
        uint32_t hosted = atomic_load_explicit(&pool->workers[i].host_tier, memory_order_relaxed);
        if (hosted != NOT_HOSTING && hosted > lowest_tier) {
            lowest = &pool->workers[i];
            lowest_tier = hosted;
        }
    }
    if (lowest) {
        nudge(lowest);
    }
}

static void enqueue(art_pool *pool, art_task *task, uint64_t now_ns)
{
    uint8_t tier = task->tier;
    art_runq_push(pool->runq, task, now_ns);
    ART_WORKER_WINDOW();
    wake_for(pool, tier); /* the task may be gone by now */
}

/* --- live runs ---------------------------------------------------------------- */

static bool may_live(art_pool *pool, uint8_t tier)
{
    uint32_t max = pool->config.live_max;
    if (tier != 0 && max >= LIVE_RESERVE) {
        max -= max / LIVE_RESERVE;
    }
    uint32_t live = atomic_load(&pool->live);
    while (live < max) {
        if (atomic_compare_exchange_weak(&pool->live, &live, live + 1)) {
            /* relaxed: a statistic, a lost maximum is of no harm */
            if (live + 1 > atomic_load_explicit(&pool->live_peak, memory_order_relaxed)) {
                atomic_store_explicit(&pool->live_peak, live + 1, memory_order_relaxed);
            }
            return true;
        }
    }
    return false;
}

/* Sets a run aside until another ends; false if it may live after all, or was killed. The count is raised before `live` and
 * `kill` are looked at: whoever ends a run lowers `live`, and whoever kills sets the flag, before it looks at the count, so
 * one of them sees the other. */
static bool starve(art_pool *pool, art_run *run)
{
    art_task *task = &run->base.task;
    ART_WORKER_WINDOW();
    pthread_mutex_lock(&pool->starved_lock);
    atomic_fetch_add(&pool->starved_count, 1);
    ART_WORKER_WINDOW();
    run->live = may_live(pool, task->tier);
    bool starved = !run->live && !atomic_load(&run->kill);
    if (starved) {
        art_task *last = pool->starved_last[task->tier];
        task->q_next = NULL;
        task->q_prev = last;
        *(last ? &last->q_next : &pool->starved_first[task->tier]) = task;
        pool->starved_last[task->tier] = task;
        atomic_fetch_add_explicit(&pool->starved_total, 1, memory_order_relaxed); /* a statistic */
    } else {
        atomic_fetch_sub(&pool->starved_count, 1);
    }
    pthread_mutex_unlock(&pool->starved_lock); /* set aside, it may be another worker's already */
    return starved;
}

static void starved_unlink(art_pool *pool, art_task *task)
{
    *(task->q_prev ? &task->q_prev->q_next : &pool->starved_first[task->tier]) = task->q_next;
    *(task->q_next ? &task->q_next->q_prev : &pool->starved_last[task->tier]) = task->q_prev;
    task->q_next = task->q_prev = NULL;
    atomic_fetch_sub(&pool->starved_count, 1);
}

/* Which tier's starved run is next (lock held): the highest, but after aging_threshold picks over its head a lower one (law 2);
 * ART_TIERS if there is none. */
static int starved_tier(art_pool *pool)
{
    int best = ART_TIERS;
    for (int tier = ART_TIERS - 1; tier >= 0; tier--) {
        uint32_t threshold = pool->config.runq.aging_threshold;
        if (pool->starved_first[tier] && !(best < ART_TIERS && threshold && pool->starved_passed[best] >= threshold)) {
            best = tier;
        }
    }
    return best;
}

/* A run has ended. Its place goes to a starved run in the same step, so that it cannot be lost: a starved run that was only
 * woken could be killed, or overtaken by a new run, before it took it. */
static void live_end(art_pool *pool, uint64_t now_ns)
{
    art_task *task = NULL;
    atomic_fetch_sub(&pool->live, 1);
    ART_WORKER_WINDOW();
    if (!atomic_load(&pool->starved_count)) {
        return;
    }
    pthread_mutex_lock(&pool->starved_lock);
    int tier = starved_tier(pool);
    bool may = tier < ART_TIERS && may_live(pool, (uint8_t)tier);
    if (!may && pool->starved_first[0]) { /* tier 0 has its reserve */
        tier = 0;
        may = may_live(pool, 0);
    }
    if (may) {
        task = pool->starved_first[tier];
        run_of(task)->live = true;
        starved_unlink(pool, task);
        for (int lower = tier; lower < ART_TIERS; lower++) {
            pool->starved_passed[lower] = lower > tier && pool->starved_first[lower] ? pool->starved_passed[lower] + 1 : 0;
        }
    }
    pthread_mutex_unlock(&pool->starved_lock);
    if (task) {
        ART_WORKER_WINDOW();
        take_floor((entity *)run_of(task));
        enqueue(pool, task, now_ns);
    }
}

/* Takes a run out of the starved list; false if it is not there. */
static bool starved_cancel(art_pool *pool, art_task *wanted)
{
    bool found = false;
    if (!atomic_load(&pool->starved_count)) {
        return false;
    }
    pthread_mutex_lock(&pool->starved_lock);
    for (int tier = 0; tier < ART_TIERS && !found; tier++) {
        for (art_task *task = pool->starved_first[tier]; task && !found; task = task->q_next) {
            found = task == wanted;
        }
    }
    if (found) {
        starved_unlink(pool, wanted);
    }
    pthread_mutex_unlock(&pool->starved_lock);
    return found;
}

/* --- ending and blocking ------------------------------------------------------ */

/* The guest has ended; the caller owns the run and has a reference besides the control plane's. */
static void finish(art_run *run, uint64_t now_ns)
{
    art_pool *pool = run->base.pool;
    if (run->live) {
        run->live = false;
        live_end(pool, now_ns);
    }
    if (run->counted) {
        art_runq_release(pool->runq, run->base.task.tenant, run->bytes);
    }
    /* release, partner in art_run_look: who sees DONE sees the exit */
    atomic_store_explicit(&run->state, RUN_DONE, memory_order_release);
    ART_WORKER_WINDOW();
    publish(&run->base, now_ns);
    unref(&run->base);
}

/* Blocking. The worker stores CHECKING, then looks for answers and the kill flag; the control thread posts an answer (or the
 * flag), then looks at the state. Both pairs are seq_cst, so at least one sees the other: either the worker finds the
 * answer and goes on, or the control thread finds a state to change (CHECKING, BLOCKING -> WAKE; BLOCKED -> QUEUED).
 * BLOCKING says that the event is being published: the worker still owns the run, and the control thread may read its
 * handles, since only itself can end the wait. After BLOCKED the worker does not touch the run.
 * Returns true if the run is blocked, false if it goes on at once. */
static bool block(art_run *run, uint64_t now_ns)
{
    ART_WORKER_WINDOW();
    atomic_store(&run->state, RUN_CHECKING);
    ART_WORKER_WINDOW();
    atomic_thread_fence(memory_order_seq_cst); /* for the fuel account, partner in art_run_grant */
    bool has_fuel = atomic_load_explicit(&run->fuel.left, memory_order_relaxed) ||
                    atomic_load_explicit(&run->fuel.final, memory_order_relaxed);
    /* without fuel an answer changes nothing */
    bool left = run->at_safe_point && atomic_load(&run->safe_point) & SAFE_POINT_LEFT;
    if (atomic_load(&run->kill) || left || (run->no_fuel ? has_fuel : art_guest_has_answers(run->guest))) {
        atomic_store(&run->state, RUN_RUNNING);
        return false;
    }
    uint32_t expected = RUN_CHECKING;
    if (!atomic_compare_exchange_strong(&run->state, &expected, RUN_BLOCKING)) {
        atomic_store(&run->state, RUN_RUNNING); /* it was WAKE */
        return false;
    }
    ART_WORKER_WINDOW();
    publish(&run->base, now_ns);
    ART_WORKER_WINDOW();
    expected = RUN_BLOCKING;
    if (!atomic_compare_exchange_strong(&run->state, &expected, RUN_BLOCKED)) {
        atomic_store(&run->state, RUN_RUNNING);
        return false;
    }
    return true;
}

/* The control thread's side of blocking: something was given to the run. */
static void wake_run(art_run *run)
{
    uint32_t state = atomic_load(&run->state);
    for (;;) {
        uint32_t to;
        if (state == RUN_BLOCKED) {
            to = RUN_QUEUED;
        } else if (state == RUN_CHECKING || state == RUN_BLOCKING || state == RUN_CAPTURING) {
            to = RUN_WAKE;
        } else {
            return; /* queued or running: it will look for itself; or done */
        }
        if (atomic_compare_exchange_weak(&run->state, &state, to)) {
            break;
        }
    }
    if (state == RUN_BLOCKED) {
        ART_WORKER_WINDOW();
        take_floor(&run->base);
        enqueue(run->base.pool, &run->base.task, art_sys_now_ns());
    }
}

/* --- slices ------------------------------------------------------------------- */

/* Has others see how far the run has come. Relaxed: numbers. */
static void show_progress(art_run *run, uint64_t ran_ns)
{
    atomic_store_explicit(&run->ran_ns, ran_ns, memory_order_relaxed);
    atomic_store_explicit(&run->used_fuel, art_guest_fuel_used(run->guest), memory_order_relaxed);
    atomic_store_explicit(&run->memory_bytes, art_guest_memory_bytes(run->guest), memory_order_relaxed);
}

/* Charges the slot time since *since_ns to the task, and starts the next stretch. */
static void charge(worker *me, entity *e, uint64_t *since_ns, uint64_t now_ns)
{
    uint64_t ran_ns = now_ns > *since_ns ? now_ns - *since_ns : 0;
    art_runq_charge(me->pool->runq, &e->task, ran_ns, now_ns);
    count(&me->slot_ns[e->task.tier], ran_ns);
    e->allotment_ns += ran_ns;
    if (e->task.kind == KIND_RUN) {
        art_run *run = (art_run *)e;
        run->slot_ns += ran_ns;
        show_progress(run, run->slot_ns);
    }
    *since_ns = now_ns;
}

/* What the task may use at its tier before it is demoted; a promoted one no more than those had that it was passed over for. */
static uint64_t allotment_of(const art_pool *pool, const art_task *task)
{
    uint64_t quantum_ns = pool->config.quantum_ns[task->tier];
    uint64_t promoted_ns = UINT64_C(1000) * task->promoted_us;
    return task->promoted && task->promoted_us != ART_PROMOTED_QUANTUM && promoted_ns < quantum_ns ? promoted_ns : quantum_ns;
}

/* The queue may have promoted it: then it begins an allotment, whatever it had used where it came from. */
static void look_promoted(entity *e)
{
    if (e->task.promoted && !e->promoted) {
        e->allotment_ns = 0;
    }
    e->promoted = e->task.promoted;
}

/* The allotment at this tier is used up: one tier down, or back where a promoted task came from; a lent tier stays. */
static void demote(worker *me, entity *e)
{
    e->allotment_ns = 0;
    e->promoted = false;
    if (e->task.promoted) {
        art_task_unpromote(&e->task);
    } else if (!e->lent && e->task.tier < ART_TIERS - 1) {
        e->task.tier++;
        if (e->task.tier > e->floor) { /* demoted all the same, but that shows when the floor goes */
            e->lent = true;
            e->own_tier = e->task.tier;
            e->own_allotment_ns = 0;
            e->task.tier = e->floor;
        }
        count(&me->demotions, 1);
        if (e->task.kind == KIND_RUN) {
            ((art_run *)e)->demotions++;
        }
    }
}

static bool higher_waits(const art_pool *pool, const art_task *task)
{
    return task->tier && art_runq_tiers(pool->runq) & ((1u << task->tier) - 1);
}

/* An unwinding has had the slot time it is allowed. `slot_ns` is the run's until now. */
static bool unwind_is_spent(art_run *run, uint64_t slot_ns)
{
    /* relaxed: seen a little later at worst */
    uint64_t allowed_ns = atomic_load_explicit(&run->unwind_ns, memory_order_relaxed);
    if (!allowed_ns) {
        return false;
    }
    uint8_t stage = (uint8_t)art_guest_unwinding(run->guest);
    if (stage != run->unwind_stage) {
        run->unwind_stage = stage;
        run->unwind_from_ns = slot_ns;
    }
    if (stage == ART_UNWIND_HANDLERS_REPLAY) {
        allowed_ns = art_fuel_scale(allowed_ns, ART_UNWIND_REPLAY_FACTOR, 1);
    }
    return stage != ART_UNWIND_NONE && stage != ART_UNWIND_PROGRAM_REPLAY && slot_ns - run->unwind_from_ns >= allowed_ns;
}

static void return_to_base_tier(entity *e)
{
    e->task.promoted = e->promoted = false;
    e->allotment_ns = 0;
    e->lent = e->floor < e->task.base_tier;
    e->own_tier = e->task.base_tier;
    e->own_allotment_ns = 0;
    e->task.tier = e->lent ? e->floor : e->task.base_tier;
}

/* Told on the way: who ends a run sets the flag, fences, then takes it out of the queue if it is there; a worker that has
 * queued it fences, then looks at the flag. So one of the two takes it out, and it does not wait for a turn that may never come.
 * The caller has a reference. */
static void end_if_told(art_run *run, uint64_t now_ns)
{
    ART_WORKER_WINDOW();
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&run->kill) && art_runq_cancel(run->base.pool->runq, &run->base.task)) {
        atomic_fetch_add_explicit(&run->base.references, 1, memory_order_relaxed); /* finish gives one back */
        art_guest_kill(run->guest);
        finish(run, now_ns);
    }
}

/* Tells the guest whether it shall stop at its next safe point. The owner, between polls. */
static void take_safe_point_wish(art_run *run)
{
    /* relaxed: seen a micro-slice later at worst; a look is cheaper than an exchange */
    if (__builtin_expect(!atomic_load_explicit(&run->safe_point, memory_order_relaxed), 1)) {
        return;
    }
    /* seq_cst, as the look in block: a wish that comes after this is for the next time */
    uint32_t wishes = atomic_exchange(&run->safe_point, 0);
    if (wishes & SAFE_POINT_LEFT) {
        art_guest_leave_safe_point(run->guest);
    }
    if (wishes & SAFE_POINT_WANTED) {
        art_guest_want_safe_point(run->guest);
    }
}

/* Gives the run slices until it ends, blocks or another task is to run; that task, or NULL: pop one. */
static art_task *run_slices(worker *me, art_run *run)
{
    art_pool *pool = me->pool;
    art_task *task = &run->base.task;
    /* relaxed: starve looks again */
    bool killed = atomic_load_explicit(&run->kill, memory_order_relaxed);
    ART_WORKER_WINDOW();
    if (!run->live && !killed && !(run->live = may_live(pool, task->tier)) && starve(pool, run)) {
        return NULL;
    }
    /* relaxed: the queue handed the run over; taking a reference publishes nothing */
    atomic_fetch_add_explicit(&run->base.references, 1, memory_order_relaxed);
    atomic_store(&run->state, RUN_RUNNING);
    atomic_store_explicit(&run->started, true, memory_order_relaxed); /* a hint, see art_run_unwind */
    uint64_t now_ns = art_sys_now_ns(), since_ns = now_ns, tick_ns = now_ns;
    uint32_t micro_slices = 0, ticked = 0;
    art_task *next = NULL;
    art_slice_end end;
    count(&me->slices, 1);
    count_wait(me, task, now_ns);
    kept_slice *slice = open_slice(me, &run->base, now_ns);
    look_promoted(&run->base);
    for (;;) {
        /* relaxed: seen a micro-slice later at worst */
        if (atomic_load_explicit(&run->kill, memory_order_relaxed)) {
            art_guest_kill(run->guest);
            break;
        }
        if (floor_changed(&run->base)) {
            charge(me, &run->base, &since_ns, now_ns = art_sys_now_ns()); /* at the tier that it ran at */
            take_floor(&run->base);
        }
        take_safe_point_wish(run);
        art_guest_outcome outcome = art_guest_poll(run->guest);
        micro_slices++;
        if (outcome == ART_GUEST_DONE) {
            break;
        }
        bool tick = micro_slices % CLOCK_EVERY == 0;
        if (outcome == ART_GUEST_WAIT || outcome == ART_GUEST_NO_FUEL || outcome == ART_GUEST_SAFE_POINT) {
            charge(me, &run->base, &since_ns, now_ns = art_sys_now_ns());
            if (unwind_is_spent(run, run->slot_ns)) {
                art_guest_unwind_stop(run->guest);
                break;
            }
            art_guest_wait wait = art_guest_waiting(run->guest);
            run->no_fuel = outcome == ART_GUEST_NO_FUEL;
            run->at_safe_point = outcome == ART_GUEST_SAFE_POINT;
            run->fuel_granted = atomic_load_explicit(&run->fuel.granted, memory_order_relaxed); /* a number */
            if (!run->no_fuel && wait.ops & pool->config.base_tier_ops && wait.number != run->base_tier_wait) {
                run->base_tier_wait = wait.number;
                return_to_base_tier(&run->base);
            }
            if (block(run, now_ns)) {
                end = ART_SLICE_BLOCKED;
                goto gone;
            }
            if (!run->no_fuel && !run->at_safe_point && !art_guest_can_resume(run->guest)) {
                continue; /* an answer to something else: the next poll says WAIT again */
            }
            tick = true;
            ticked = micro_slices; /* the waiting was not the guest's */
            tick_ns = art_sys_now_ns();
        } else if (art_guest_has_requests(run->guest)) {
            publish(&run->base, now_ns);
        }
        /* relaxed: seen a micro-slice later at worst */
        if (atomic_load_explicit(&pool->stop, memory_order_relaxed)) {
            atomic_store(&run->state, RUN_QUEUED);
            end = ART_SLICE_STOPPED;
            goto gone;
        }
        bool higher = higher_waits(pool, task);
        if (!higher && !tick) {
            continue;
        }
        now_ns = art_sys_now_ns();
        if (unwind_is_spent(run, run->slot_ns + (now_ns - since_ns))) {
            art_guest_unwind_stop(run->guest);
            break;
        }
        if (tick) {
            show_progress(run, run->slot_ns + (now_ns - since_ns));
            if (micro_slices > ticked) {
                art_guest_pace(run->guest, (now_ns - tick_ns) / (micro_slices - ticked));
            }
            ticked = micro_slices;
            tick_ns = now_ns;
        }
        if (art_evq_due(pool->evq, now_ns)) {
            art_evq_flush(pool->evq, now_ns);
        }
        if (higher) {
            charge(me, &run->base, &since_ns, now_ns);
            run->preemptions++; /* before the queue owns it */
            atomic_store(&run->state, RUN_PREEMPTED);
            ART_WORKER_WINDOW();
            take_floor(&run->base); /* what waits may not be above it any more; then nothing is picked */
            uint8_t tier = task->tier;
            next = art_runq_preempt(pool->runq, task, now_ns);
            ART_WORKER_WINDOW();
            if (next) {
                count(&me->preemptions, 1);
                wake_for(pool, tier); /* see there, "requeued" */
                end_if_told(run, now_ns);
                end = ART_SLICE_PREEMPTED;
                goto gone;
            }
            run->preemptions--;
            atomic_store(&run->state, RUN_RUNNING);
        }
        if (run->base.allotment_ns + (now_ns - since_ns) >= allotment_of(pool, task)) {
            charge(me, &run->base, &since_ns, now_ns);
            demote(me, &run->base);
            atomic_store(&run->state, RUN_PREEMPTED);
            ART_WORKER_WINDOW();
            take_floor(&run->base);
            uint8_t tier = task->tier;
            next = art_runq_yield(pool->runq, task, now_ns);
            ART_WORKER_WINDOW();
            if (next != task) {
                wake_for(pool, tier);
                end_if_told(run, now_ns);
                end = ART_SLICE_SPENT;
                goto gone;
            }
            next = NULL;
            look_promoted(&run->base);
            close_slice(slice, now_ns, ART_SLICE_SPENT);
            slice = open_slice(me, &run->base, now_ns);
            atomic_store(&run->state, RUN_RUNNING);
        }
    }
    charge(me, &run->base, &since_ns, now_ns = art_sys_now_ns());
    count(&me->micro_slices, micro_slices);
    close_slice(slice, now_ns, ART_SLICE_OVER);
    finish(run, now_ns);
    return NULL;
gone:
    close_slice(slice, now_ns, end);
    count(&me->micro_slices, micro_slices);
    unref(&run->base);
    return next;
}

/* --- hosting foreigns --------------------------------------------------------- */

enum { FOREIGN_GRANTS_SHIFT = 2, FOREIGN_PREEMPTIONS_SHIFT = 33 };
#define FOREIGN_COUNT_MASK 0x7fffffffu

/* Enters a state, counts it and says so. */
static void foreign_set(art_foreign *foreign, art_foreign_state state, uint64_t now_ns)
{
    uint64_t word = atomic_load_explicit(&foreign->state, memory_order_relaxed); /* the owner's own */
    word += state == ART_FOREIGN_GRANTED ? UINT64_C(1) << FOREIGN_GRANTS_SHIFT : 0;
    word += state == ART_FOREIGN_PREEMPTED ? UINT64_C(1) << FOREIGN_PREEMPTIONS_SHIFT : 0;
    atomic_store(&foreign->state, (word & ~UINT64_C(3)) | state);
    ART_WORKER_WINDOW();
    publish(&foreign->base, now_ns);
}

static void foreign_signal(const art_foreign *foreign, int signal)
{
    if (foreign->pidfd >= 0) {
        art_sys_pidfd_send_signal(foreign->pidfd, signal); /* -ESRCH: it is gone, its release will come */
    }
}

static void host_at(worker *me, uint32_t tier)
{
    /* relaxed: a fence follows before the worker looks at the queue */
    atomic_store_explicit(&me->host_tier, tier, memory_order_relaxed);
}

static void foreign_released(art_foreign *foreign, uint64_t now_ns)
{
    foreign_set(foreign, ART_FOREIGN_RELEASED, now_ns);
    art_evq_flush_now(foreign->base.pool->evq);
}

/* Sleeps while the foreign has the slot. Returns the task to run next, or NULL: pop one. */
static art_task *host(worker *me, art_foreign *foreign)
{
    art_pool *pool = me->pool;
    art_task *task = &foreign->base.task;
    uint64_t now_ns = art_sys_now_ns(), since_ns = now_ns;
    art_task *next = NULL;
    kept_slice *slice = NULL;
    art_slice_end end = ART_SLICE_OVER;
    atomic_fetch_add_explicit(&foreign->base.references, 1, memory_order_relaxed);
    look_promoted(&foreign->base);
    atomic_store(&foreign->host, (int32_t)me->index);
    host_at(me, task->tier);
    atomic_fetch_add(&pool->hosting_count, 1);
    if (!atomic_load(&foreign->release)) {
        if (atomic_load_explicit(&foreign->state, memory_order_relaxed)) { /* the owner's own; 0: never granted */
            foreign_signal(foreign, SIGCONT);
        }
        atomic_fetch_add_explicit(&pool->foreign_grants, 1, memory_order_relaxed); /* a statistic */
        count_wait(me, task, now_ns);
        slice = open_slice(me, &foreign->base, now_ns);
        foreign_set(foreign, ART_FOREIGN_GRANTED, now_ns);
        art_evq_flush_now(pool->evq);
    }
    for (;;) {
        uint32_t seen = atomic_load(&me->nudges);
        now_ns = art_sys_now_ns();
        if (atomic_load(&foreign->release) || atomic_load(&pool->stop)) {
            break;
        }
        charge(me, &foreign->base, &since_ns, now_ns);
        if (floor_changed(&foreign->base)) { /* it was nudged for that */
            take_floor(&foreign->base);
            host_at(me, task->tier);
        }
        atomic_thread_fence(memory_order_seq_cst); /* after host_tier and hosting_count, before the queue: see wake_parked */
        bool spent = foreign->base.allotment_ns >= allotment_of(pool, task);
        uint32_t waiting = art_runq_tiers(pool->runq);
        bool higher = (waiting & ((1u << task->tier) - 1)) > 1 || /* tier 0 alone does not preempt when capped */
                      (task->tier && waiting & 1 && !art_runq_tier0_capped(pool->runq, now_ns));
        if (higher || (spent && waiting)) {
            foreign_signal(foreign, SIGSTOP); /* before the slot is another's */
            if (!higher) {
                demote(me, &foreign->base);
            }
            foreign_set(foreign, ART_FOREIGN_PREEMPTED, now_ns);
            ART_WORKER_WINDOW();
            atomic_store(&foreign->host, -1);
            ART_WORKER_WINDOW();
            take_floor(&foreign->base);
            next = higher ? art_runq_preempt(pool->runq, task, now_ns) : art_runq_yield(pool->runq, task, now_ns);
            if (next && next != task) {
                atomic_fetch_add_explicit(&pool->foreign_preemptions, 1, memory_order_relaxed); /* a statistic */
                count(&me->preemptions, 1);
                ART_WORKER_WINDOW();
                atomic_thread_fence(memory_order_seq_cst); /* between queueing and the look, as "told on the way" */
                if (atomic_load(&foreign->release) && art_runq_cancel(pool->runq, task)) {
                    foreign_released(foreign, now_ns);
                }
                end = higher ? ART_SLICE_PREEMPTED : ART_SLICE_SPENT;
                goto gone;
            }
            next = NULL; /* the queue had nothing better after all: the slot stays its */
            look_promoted(&foreign->base);
            atomic_store(&foreign->host, (int32_t)me->index);
            host_at(me, task->tier); /* demoted or lent a tier above, or promoted by the queue */
            foreign_signal(foreign, SIGCONT);
            foreign_set(foreign, ART_FOREIGN_GRANTED, now_ns);
            continue;
        }
        if (spent) {
            demote(me, &foreign->base);
            host_at(me, task->tier);
            continue; /* what was no reason to stop at the old tier may be one now */
        }
        art_evq_flush_now(pool->evq);
        ART_WORKER_WINDOW();
        uint64_t left_ns = allotment_of(pool, task) - foreign->base.allotment_ns;
        if (task->tier && waiting & 1 && left_ns > CAP_LOOK_NS) {
            left_ns = CAP_LOOK_NS; /* tier 0 waits for its share to recover, which nobody announces */
        }
        art_sys_futex_wait(&me->nudges, seen, left_ns);
    }
    charge(me, &foreign->base, &since_ns, now_ns);
    atomic_store(&foreign->host, -1);
    if (atomic_load(&foreign->release)) {
        foreign_released(foreign, now_ns);
    } else {
        end = ART_SLICE_STOPPED;
    }
gone:
    if (slice) { /* else it was released before it had the slot */
        close_slice(slice, now_ns, end);
    }
    host_at(me, NOT_HOSTING);
    atomic_fetch_sub(&pool->hosting_count, 1);
    unref(&foreign->base);
    /* What is queued now was requeued here (see wake_for), or came together with `next` and nudged this host only: pass it on. */
    uint32_t waiting = art_runq_tiers(pool->runq);
    if (waiting) {
        wake_for(pool, (uint8_t)__builtin_ctz(waiting));
    }
    return next;
}

/* --- the thread --------------------------------------------------------------- */

static void park(worker *me)
{
    art_pool *pool = me->pool;
    art_evq_flush_now(pool->evq);
    count(&me->parks, 1);
    /* the count first: a waker that lowered it for a worker that had yet to raise it would hide another that sleeps */
    atomic_fetch_add(&pool->parked_count, 1);
    ART_WORKER_WINDOW();
    atomic_store(&me->parked, 1);
    ART_WORKER_WINDOW();
    atomic_thread_fence(memory_order_seq_cst); /* see wake_parked */
    while (!art_runq_tiers(pool->runq) && !atomic_load(&pool->stop) && atomic_load(&me->parked)) {
        art_sys_futex_wait(&me->parked, 1, ART_SYS_FOREVER);
    }
    uint32_t one = 1;
    if (atomic_compare_exchange_strong(&me->parked, &one, 0)) {
        atomic_fetch_sub(&pool->parked_count, 1);
    }
}

static void pin(const worker *me)
{
    art_cpuset usable, one = {0};
    uint32_t nth = 0;
    if (art_sys_sched_getaffinity(0, usable.words, ART_CPUSET_WORDS)) {
        return;
    }
    for (uint32_t cpu = 0; cpu < ART_CPUSET_WORDS * 64; cpu++) {
        if (usable.words[cpu / 64] >> (cpu % 64) & 1 && nth++ == me->index) {
            one.words[cpu / 64] = 1ull << (cpu % 64);
            art_sys_sched_setaffinity(0, one.words, ART_CPUSET_WORDS);
            return;
        }
    }
}

static void *worker_main(void *arg)
{
    worker *me = arg;
    art_pool *pool = me->pool;
    char name[16];
    art_sys_thread_block_signals();
    snprintf(name, sizeof name, "agentrt-w%u", me->index);
    art_sys_thread_set_name(name);
    art_sys_setpriority(0, pool->config.nice); /* what is in force is reported, not assumed */
    int nice = 0;
    art_sys_getpriority(0, &nice);
    atomic_store_explicit(&me->nice, nice, memory_order_relaxed); /* a statistic */
    if (pool->config.pin) {
        pin(me);
    }
    art_task *task = NULL;
    while (!atomic_load_explicit(&pool->stop, memory_order_acquire)) {
        if (!task) {
            task = art_runq_pop(pool->runq, art_sys_now_ns());
        }
        if (task) {
            task = task->kind == KIND_RUN ? run_slices(me, run_of(task)) : host(me, foreign_of(task));
        } else if (art_runq_tiers(pool->runq)) {
            art_evq_flush_now(pool->evq);
            sched_yield(); /* another worker holds the token, perhaps off its CPU */
        } else {
            park(me);
        }
    }
    return NULL;
}

int art_pool_create(const art_pool_config *config, art_pool **out)
{
    if (!config->workers || config->workers > 64 || !config->live_max || !config->micro_slice_fuel) {
        return ART_EINVAL;
    }
    for (int tier = 0; tier < ART_TIERS; tier++) {
        if (!config->quantum_ns[tier]) {
            return ART_EINVAL;
        }
    }
    art_pool *pool = calloc(1, sizeof *pool + config->workers * sizeof *pool->workers);
    if (!pool) {
        return ART_ENOMEM;
    }
    pool->config = *config;
    pool->config.runq.slots = config->workers;
    pthread_mutex_init(&pool->starved_lock, NULL);
    pool->kept = calloc((size_t)config->workers * ART_SLICES_KEPT, sizeof *pool->kept); /* touched as it is used */
    int err = pool->kept ? art_runq_create(&pool->config.runq, &pool->runq) : ART_ENOMEM;
    if (!err) {
        err = art_evq_create(ART_EVQ_COALESCE_NS, &pool->evq);
    }
    if (err) {
        art_pool_destroy(pool);
        return err;
    }
    pool->worker_count = config->workers;
    for (uint32_t i = 0; i < config->workers; i++) {
        worker *w = &pool->workers[i];
        w->pool = pool;
        w->kept = pool->kept + (size_t)i * ART_SLICES_KEPT;
        w->index = i;
        atomic_store_explicit(&w->host_tier, NOT_HOSTING, memory_order_relaxed); /* before its thread exists */
    }
    for (uint32_t i = 0; i < config->workers; i++) {
        worker *w = &pool->workers[i];
        w->started = pthread_create(&w->thread, NULL, worker_main, w) == 0;
        if (!w->started) {
            art_pool_stop(pool);
            art_pool_destroy(pool);
            return ART_ESYS;
        }
    }
    *out = pool;
    return 0;
}

void art_pool_stop(art_pool *pool)
{
    atomic_store(&pool->stop, true);
    for (uint32_t i = 0; i < pool->worker_count; i++) {
        worker *w = &pool->workers[i];
        atomic_store(&w->parked, 0);
        art_sys_futex_wake(&w->parked, 1);
        nudge(w);
    }
    for (uint32_t i = 0; i < pool->worker_count; i++) {
        if (pool->workers[i].started) {
            pthread_join(pool->workers[i].thread, NULL);
            pool->workers[i].started = false;
        }
    }
}

void art_pool_destroy(art_pool *pool)
{
    if (!pool) {
        return;
    }
    art_evq_destroy(pool->evq);
    art_runq_destroy(pool->runq);
    pthread_mutex_destroy(&pool->starved_lock);
    free(pool->kept);
    free(pool);
}

/* --- the control plane's side ------------------------------------------------- */

art_evq *art_pool_evq(art_pool *pool)
{
    return pool->evq;
}

art_runq *art_pool_runq(art_pool *pool)
{
    return pool->runq;
}

static uint64_t read_count(const ART_ATOMIC(uint64_t) *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed); /* a statistic */
}

void art_pool_statistics(art_pool *pool, art_pool_stats *out)
{
    *out = (art_pool_stats){
        .live = atomic_load_explicit(&pool->live, memory_order_relaxed),
        .live_max = read_count(&pool->live_peak),
        .starved = read_count(&pool->starved_total),
        .foreign_grants = read_count(&pool->foreign_grants),
        .foreign_preemptions = read_count(&pool->foreign_preemptions),
        .nice = atomic_load_explicit(&pool->workers[0].nice, memory_order_relaxed),
    };
    for (uint32_t i = 0; i < pool->worker_count; i++) {
        const worker *w = &pool->workers[i];
        out->slices += read_count(&w->slices);
        out->micro_slices += read_count(&w->micro_slices);
        out->preemptions += read_count(&w->preemptions);
        out->demotions += read_count(&w->demotions);
        out->parks += read_count(&w->parks);
        for (int tier = 0; tier < ART_TIERS; tier++) {
            out->slot_ns[tier] += read_count(&w->slot_ns[tier]);
            out->waited_ns[tier] += read_count(&w->waited_ns[tier]);
            for (int bucket = 0; bucket < ART_WAIT_BUCKETS; bucket++) {
                out->waits[tier][bucket] += read_count(&w->waits[tier][bucket]);
            }
        }
    }
}

int art_pool_worker_statistics(art_pool *pool, uint32_t index, art_worker_stats *out)
{
    if (index >= pool->worker_count) {
        return ART_EINVAL;
    }
    const worker *w = &pool->workers[index];
    *out = (art_worker_stats){
        .slices = read_count(&w->slices),
        .preemptions = read_count(&w->preemptions),
        .demotions = read_count(&w->demotions),
    };
    for (int tier = 0; tier < ART_TIERS; tier++) {
        out->slot_ns[tier] = read_count(&w->slot_ns[tier]);
    }
    return 0;
}

int art_pool_slices(art_pool *pool, uint32_t index, uint64_t since_ns, art_slice *out, uint32_t max)
{
    if (index >= pool->worker_count) {
        return ART_EINVAL;
    }
    const worker *w = &pool->workers[index];
    uint32_t count = 0;
    uint64_t opened = atomic_load_explicit(&w->opened, memory_order_acquire); /* "counted", see open_slice */
    uint64_t now_ns = art_sys_now_ns();
    for (uint64_t n = opened; n > 0 && opened - n < ART_SLICES_KEPT && count < max; n--) {
        /* relaxed: the look at `opened` below says whether these are of one slice */
        const kept_slice *slice = &w->kept[(n - 1) % ART_SLICES_KEPT];
        uint64_t start_ns = atomic_load_explicit(&slice->start_ns, memory_order_relaxed);
        uint64_t what = atomic_load_explicit(&slice->what, memory_order_relaxed);
        uint64_t end = atomic_load_explicit(&slice->end, memory_order_relaxed);
        uint64_t end_ns = end ? end >> 3 : now_ns > start_ns ? now_ns : start_ns;
        if (end_ns < since_ns) {
            break;
        }
        out[count++] = (art_slice){start_ns, end_ns, what >> 8, (art_slice_end)(end & 7), what & 3, what >> 7 & 1};
    }
    atomic_thread_fence(memory_order_acquire); /* "overwritten", partner in open_slice */
    uint64_t later = atomic_load_explicit(&w->opened, memory_order_relaxed);
    /* Slice n is overwritten by slice n + ART_SLICES_KEPT, which may be written once all before it are counted. */
    uint64_t lost = later - opened, whole = lost < ART_SLICES_KEPT - 1 ? ART_SLICES_KEPT - 1 - lost : 0;
    return (int)(count < whole ? count : whole);
}

art_owner_kind art_pool_event_take(art_event *event, art_run **run, art_foreign **foreign)
{
    entity *e = (entity *)event;
    art_event_take(event);
    if (e->task.kind == KIND_RUN) {
        *run = (art_run *)e;
        return ART_OWNER_RUN;
    }
    *foreign = (art_foreign *)e;
    return ART_OWNER_FOREIGN;
}

static void entity_init(entity *e, art_pool *pool, uint8_t kind, uint32_t tenant, uint8_t tier, void *user)
{
    e->pool = pool;
    e->user = user;
    /* relaxed: only that it is given once */
    e->number = atomic_fetch_add_explicit(&pool->numbers, 1, memory_order_relaxed) + 1;
    e->task.kind = kind;
    e->task.tenant = tenant;
    e->task.tier = e->task.base_tier = tier;
    e->floor = ART_TIERS;
    atomic_init(&e->floor_wanted, ART_TIERS);
    atomic_init(&e->references, 1);
}

int art_run_submit(art_pool *pool, const art_run_config *config, art_run **out)
{
    if (config->tier >= ART_TIERS || config->tenant >= pool->config.runq.max_tenants) {
        return ART_EINVAL;
    }
    if (atomic_load(&pool->stop)) {
        return ART_ECLOSED;
    }
    uint64_t bytes = sizeof(art_run) + config->guest.input_len + config->guest.restored_len;
    int err = art_runq_admit(pool->runq, config->tenant, bytes);
    if (err && !(err == ART_EFULL && config->admitted)) {
        return err;
    }
    bool counted = !err;
    art_run *run = calloc(1, sizeof *run);
    err = ART_ENOMEM;
    if (run) {
        art_guest_config guest = config->guest;
        guest.fuel = &run->fuel;
        guest.micro_slice_fuel = pool->config.micro_slice_fuel;
        art_fuel_init(&run->fuel, config->fuel, config->fuel_final);
        err = art_guest_create(&guest, &run->guest);
    }
    if (err) {
        if (counted) {
            art_runq_release(pool->runq, config->tenant, bytes);
        }
        free(run);
        return err;
    }
    entity_init(&run->base, pool, KIND_RUN, config->tenant, config->tier, config->user);
    run->counted = counted;
    run->replay = config->guest.replay;
    run->bytes = bytes;
    run->submitted_ns = art_sys_now_ns();
    atomic_init(&run->safe_point, config->safe_point ? SAFE_POINT_WANTED : 0);
    *out = run;
    enqueue(pool, &run->base.task, run->submitted_ns);
    return 0;
}

void *art_run_user(const art_run *run)
{
    return run->base.user;
}

uint64_t art_run_number(const art_run *run)
{
    return run->base.number;
}

art_guest *art_run_guest(art_run *run)
{
    return run->guest;
}

void art_run_answer(art_run *run, art_answer *answer)
{
    art_guest_post(run->guest, answer);
    wake_run(run);
}

void art_run_go_live(art_run *run)
{
    art_guest_go_live(run->guest);
    art_answer *kick = art_answer_new(0, 0, 0, 0, NULL, 0); /* no such handle: only wakes */
    if (kick) {
        art_run_answer(run, kick);
    }
}

void art_run_grant(art_run *run, uint64_t fuel, bool final)
{
    art_fuel_grant(&run->fuel, fuel, final);
    atomic_thread_fence(memory_order_seq_cst); /* before the look at the state, partner in block */
    wake_run(run);
}

void art_run_kill(art_run *run)
{
    art_pool *pool = run->base.pool;
    art_task *task = &run->base.task;
    atomic_store(&run->kill, true);
    ART_WORKER_WINDOW();
    wake_run(run);
    ART_WORKER_WINDOW();
    atomic_thread_fence(memory_order_seq_cst); /* told on the way, see end_if_told */
    if (atomic_load(&run->state) <= RUN_PREEMPTED &&
        (art_runq_try_cancel(pool->runq, task) == 1 || starved_cancel(pool, task))) {
        /* nobody else has it now: end it here rather than let it wait for a slot */
        atomic_fetch_add_explicit(&run->base.references, 1, memory_order_relaxed);
        art_guest_kill(run->guest);
        finish(run, art_sys_now_ns());
    }
}

void art_run_want_safe_point(art_run *run)
{
    atomic_fetch_or(&run->safe_point, SAFE_POINT_WANTED); /* one that waits takes it up when it goes on */
}

void art_run_leave_safe_point(art_run *run, bool again)
{
    /* an earlier wish is over with it; seq_cst: before the look at the state, partner in block */
    atomic_store(&run->safe_point, again ? SAFE_POINT_LEFT | SAFE_POINT_WANTED : SAFE_POINT_LEFT);
    wake_run(run);
}

/* Has a run that is blocked to oneself: no worker takes it meanwhile. False, with a message: it is not blocked. */
static bool take_blocked(art_run *run, char *msg, size_t msg_len)
{
    uint32_t expected = RUN_BLOCKED;
    bool taken = atomic_compare_exchange_strong(&run->state, &expected, RUN_CAPTURING);
    while (!taken && expected == RUN_BLOCKING) { /* its event is out and the worker about to leave it */
        sched_yield();
        expected = RUN_BLOCKED;
        taken = atomic_compare_exchange_strong(&run->state, &expected, RUN_CAPTURING);
    }
    if (!taken && msg_len) {
        (void)snprintf(msg, msg_len, "the run is not suspended in a syscall or at a safe point");
    }
    return taken;
}

static void let_go(art_run *run)
{
    if (art_guest_ended(run->guest)) {
        atomic_fetch_add_explicit(&run->base.references, 1, memory_order_relaxed); /* finish gives one back */
        finish(run, art_sys_now_ns());
        return;
    }
    uint32_t expected = RUN_CAPTURING;
    if (!atomic_compare_exchange_strong(&run->state, &expected, RUN_BLOCKED)) {
        atomic_store(&run->state, RUN_QUEUED); /* it was WAKE: what woke it is looked at by a worker */
        ART_WORKER_WINDOW();
        take_floor(&run->base);
        enqueue(run->base.pool, &run->base.task, art_sys_now_ns());
    }
}

int art_run_capture(art_run *run, const art_capture_config *config, art_frame_buf *out, char *msg, size_t msg_len)
{
    if (!take_blocked(run, msg, msg_len)) {
        return ART_ESTATE;
    }
    int err = art_guest_capture(run->guest, config, out, msg, msg_len);
    let_go(run);
    return err;
}

int art_run_fail(art_run *run, char *msg, size_t msg_len)
{
    if (!take_blocked(run, msg, msg_len)) {
        return ART_ESTATE;
    }
    int err = art_guest_fail(run->guest, msg, msg_len);
    let_go(run);
    return err;
}

int art_run_unwind(art_run *run, int32_t skipped, uint64_t unwind_ns)
{
    art_pool *pool = run->base.pool;
    art_task *task = &run->base.task;
    uint64_t not_yet = 0;
    /* relaxed: the mark that art_guest_unwind posts is what the run goes by */
    if (!atomic_compare_exchange_strong_explicit(&run->unwind_ns, &not_yet, unwind_ns ? unwind_ns : 1, memory_order_relaxed,
                                                 memory_order_relaxed)) {
        return 0;
    }
    int err = art_guest_unwind(run->guest, skipped);
    if (err) {
        atomic_store_explicit(&run->unwind_ns, 0, memory_order_relaxed); /* nobody has seen it act */
        return err;
    }
    ART_WORKER_WINDOW();
    wake_run(run);
    ART_WORKER_WINDOW();
    /* One that never had a slot needs none to end, and would wait for one among thousands when an ensemble is cancelled. */
    if (!run->replay && !atomic_load_explicit(&run->started, memory_order_relaxed) &&
        atomic_load(&run->state) <= RUN_PREEMPTED &&
        (art_runq_try_cancel(pool->runq, task) == 1 || starved_cancel(pool, task))) {
        if (art_guest_unwind_unstarted(run->guest)) {
            atomic_fetch_add_explicit(&run->base.references, 1, memory_order_relaxed);
            finish(run, art_sys_now_ns());
        } else { /* it had one after all, and was preempted since */
            take_floor(&run->base);
            enqueue(pool, task, art_sys_now_ns());
        }
    }
    return 0;
}

int art_run_lend(art_run *run, uint8_t tier)
{
    art_pool *pool = run->base.pool;
    art_task *task = &run->base.task;
    if (tier > ART_TIERS) {
        return ART_EINVAL;
    }
    atomic_store(&run->base.floor_wanted, tier);
    ART_WORKER_WINDOW();
    if (atomic_load(&run->state) > RUN_PREEMPTED) {
        return 0; /* its worker or who wakes it will look */
    }
    if (art_runq_try_cancel(pool->runq, task) == 1 || starved_cancel(pool, task)) {
        ART_WORKER_WINDOW();
        take_floor(&run->base);
        enqueue(pool, task, art_sys_now_ns());
        return 0;
    }
    return ART_EBUSY;
}

uint64_t art_run_ran_ns(const art_run *run)
{
    return atomic_load_explicit(&run->ran_ns, memory_order_relaxed); /* a number */
}

uint64_t art_run_fuel(const art_run *run)
{
    return atomic_load_explicit(&run->used_fuel, memory_order_relaxed); /* a number */
}

uint64_t art_run_memory_bytes(const art_run *run)
{
    return atomic_load_explicit(&run->memory_bytes, memory_order_relaxed); /* a number */
}

void art_run_look(art_run *run, art_run_view *out)
{
    *out = (art_run_view){.submitted_ns = run->submitted_ns};
    /* acquire, partners: finish (release), block (seq_cst): who sees DONE or BLOCKING sees exit or handles */
    uint32_t state = atomic_load_explicit(&run->state, memory_order_acquire);
    if (state == RUN_DONE) {
        if (!is_over(&run->base)) {
            return;
        }
        out->done = true;
        out->exit = art_guest_exit(run->guest);
        out->fuel = art_guest_fuel_used(run->guest);
        out->first_ns = art_guest_first_ns(run->guest);
        out->slot_ns = run->slot_ns;
        out->preemptions = run->preemptions;
        out->demotions = run->demotions;
        out->tier = run->base.task.tier;
    } else if (state == RUN_BLOCKING || state == RUN_BLOCKED) {
        art_guest_wait wait = art_guest_waiting(run->guest);
        out->no_fuel = run->no_fuel;
        out->safe_point = run->at_safe_point;
        out->fuel_granted = run->fuel_granted;
        out->waiting = !run->no_fuel && wait.count;
        out->wait_number = wait.number;
        out->handles = wait.handles;
        out->handle_count = out->waiting ? wait.count : 0;
    }
}

art_run_phase art_run_glance(const art_run *run)
{
    /* relaxed: nothing else is read by it */
    switch (atomic_load_explicit(&run->state, memory_order_relaxed)) {
    case RUN_QUEUED:
        return ART_RUN_QUEUED;
    case RUN_PREEMPTED:
        return ART_RUN_PREEMPTED;
    case RUN_BLOCKED:
        return ART_RUN_BLOCKED;
    case RUN_DONE:
        return ART_RUN_DONE;
    default:
        return ART_RUN_RUNNING;
    }
}

void art_run_free(art_run *run)
{
    if (run) {
        unref(&run->base);
    }
}

int art_foreign_submit(art_pool *pool, int pidfd, uint32_t tenant, uint8_t tier, void *user, art_foreign **out)
{
    if (tier >= ART_TIERS || tenant >= pool->config.runq.max_tenants) {
        return ART_EINVAL;
    }
    if (atomic_load(&pool->stop)) {
        return ART_ECLOSED;
    }
    art_foreign *foreign = calloc(1, sizeof *foreign);
    if (!foreign) {
        return ART_ENOMEM;
    }
    entity_init(&foreign->base, pool, KIND_FOREIGN, tenant, tier, user);
    foreign->pidfd = pidfd;
    atomic_init(&foreign->host, -1);
    *out = foreign;
    enqueue(pool, &foreign->base.task, art_sys_now_ns());
    return 0;
}

void *art_foreign_user(const art_foreign *foreign)
{
    return foreign->base.user;
}

art_foreign_state art_foreign_look(art_foreign *foreign, uint32_t *grants, uint32_t *preemptions)
{
    uint64_t word = atomic_load(&foreign->state);
    if ((word & 3) != ART_FOREIGN_RELEASED || is_over(&foreign->base)) {
        foreign->seen = word;
    }
    *grants = foreign->seen >> FOREIGN_GRANTS_SHIFT & FOREIGN_COUNT_MASK;
    *preemptions = foreign->seen >> FOREIGN_PREEMPTIONS_SHIFT & FOREIGN_COUNT_MASK;
    return (art_foreign_state)(foreign->seen & 3);
}

int art_foreign_release(art_foreign *foreign)
{
    art_pool *pool = foreign->base.pool;
    uint64_t now_ns = art_sys_now_ns();
    atomic_store(&foreign->release, true);
    ART_WORKER_WINDOW();
    atomic_thread_fence(memory_order_seq_cst); /* told on the way: before the look at the queue, partner in host */
    /* seq_cst on both sides: a worker that began to host it sets `host`, then looks at `release` */
    int32_t host_index = atomic_load(&foreign->host);
    if (host_index >= 0) {
        nudge(&pool->workers[host_index]);
        return 0;
    }
    int cancelled = art_runq_try_cancel(pool->runq, &foreign->base.task);
    if (cancelled == 1) {
        foreign_released(foreign, now_ns);
    }
    /* 0: released before; or a worker is about to host it, or has it on its way into the queue, and will see the flag */
    return cancelled == ART_EBUSY ? ART_EBUSY : 0;
}

int art_foreign_lend(art_foreign *foreign, uint8_t tier)
{
    art_pool *pool = foreign->base.pool;
    if (tier > ART_TIERS) {
        return ART_EINVAL;
    }
    atomic_store(&foreign->base.floor_wanted, tier);
    ART_WORKER_WINDOW();
    /* seq_cst on both sides: a worker that gives it back takes `host` away, then looks at the floor */
    int32_t host_index = atomic_load(&foreign->host);
    if (host_index >= 0) {
        nudge(&pool->workers[host_index]);
        return 0;
    }
    if (atomic_load(&foreign->release)) {
        return 0; /* it runs no more */
    }
    if (art_runq_try_cancel(pool->runq, &foreign->base.task) == 1) {
        ART_WORKER_WINDOW();
        take_floor(&foreign->base);
        enqueue(pool, &foreign->base.task, art_sys_now_ns());
        return 0;
    }
    return ART_EBUSY;
}

void art_foreign_free(art_foreign *foreign)
{
    if (foreign) {
        unref(&foreign->base);
    }
}
