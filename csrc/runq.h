/* runq.h: the run queue. Which runnable task gets a CPU slot next.
 *
 * Four tiers, served strictly highest (0) first. Inside a tier, tenants share slot time by weight (deficit round robin).
 * Inside a tenant, FIFO. Tiers 2 and 3 age; tier 0 is capped. Time is an argument: nothing here reads a clock.
 * Why it is built this way, what each rule counts, and the bound of waiting: docs/decisions/0001-run-queue.md.
 *
 * What always holds
 *   - push never waits for a worker and is never refused; admission (art_runq_admit) is what refuses.
 *   - tier 0 never waits for a thread that is picking or inserting in tiers 1-3.
 *   - P1: no pick returns a task of tier t (or nothing) while a task of a higher tier was queued during all of that
 *     call, except for promoted tasks, the tier-0 cap, and "busy" (below).
 *   - a task is in one place: with its owner, or in the queue. From push until the call that returns it the queue owns it.
 *   - not lock-free: a pick holds a token for ~20 ns. A thread descheduled inside holds up other picks of that half only;
 *     those give up after about 3 us and say busy.
 *
 * Threads: every function but create and destroy may be called from any thread at any time; all may run together.
 *
 *   | runs together with | push | pick (pop, take, preempt, yield) | cancel | charge | tiers | admit, release |
 *   | push               | yes  | yes                              | yes[1] | yes[1] | yes   | yes            |
 *   | pick               |      | yes                              | yes    | yes    | yes   | yes            |
 *   [1] of one and the same task: push after cancel has returned; charge before the task is handed back.
 *
 * Locks: none is held on return; no function calls out. Core tokens are leaves: do not call with the GIL held if that
 * can be avoided (art_runq_cancel and the picks may spin for microseconds).
 */
#ifndef ART_RUNQ_H
#define ART_RUNQ_H

#include <stdbool.h>
#include <stdint.h>

#include "art_err.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ART_TIERS 4
#define ART_WEIGHT_MAX 1000000u

/* Private to the queue: a link of a list in order of arrival within a tier. */
typedef struct art_task_age {
    struct art_task_age *next, *prev;
    uint64_t stamp; /* while queued: enqueued_ns; in an inbox: tier-0 picks made when it was pushed */
} art_task_age;

/* The scheduler's handle for something runnable; embedded in what it stands for. Pinned: must not move or be freed while
 * queued. Zero-initialised is a valid unqueued task. Fields below the line belong to whoever owns the task right now:
 * write them only while it is not queued. */
typedef struct art_task {
    /* private to the queue */
    struct art_task *q_next, *q_prev; /* tenant FIFO; q_next also links the inbox */
    art_task_age q_age;
    uint64_t enqueued_ns; /* written by push, preempt, yield; kept by promotion; read by anyone who owns it */
    /* ------------------ owner's */
    uint32_t tenant;   /* dense index < max_tenants */
    uint8_t tier;      /* where it is now; the queue writes it only when it promotes */
    uint8_t base_tier; /* what was asked for; the queue ignores it */
    uint8_t kind;      /* for the worker; the queue ignores it */
    bool promoted;     /* written by promotion: runs as tier 1 for `promoted_us`; the owner clears it (art_task_unpromote) */
    uint8_t aged_from; /* written by promotion: the tier it came from */
    uint8_t q_where;   /* private, atomic: where the queue has it */
    uint32_t promoted_us; /* written by promotion: its slot time, or a quantum if that is less; ART_PROMOTED_QUANTUM: a quantum */
} art_task;

#define ART_PROMOTED_QUANTUM UINT32_MAX

/* End of a promoted task's time: back to the tier it came from. Call while owning the task, before push or yield. */
static inline void art_task_unpromote(art_task *task)
{
    if (task->promoted) {
        task->tier = task->aged_from;
        task->promoted = false;
    }
}

typedef struct art_runq_config {
    uint32_t max_tenants;      /* 1..2^20; 256 bytes each */
    uint32_t items_max;        /* admitted runs, all tenants; 1..2^24-1 */
    uint64_t bytes_max;        /* admitted bytes, all tenants; up to 2^40-1 */
    uint32_t tenant_items_max; /* the same per tenant; 0: no bound of its own */
    uint64_t tenant_bytes_max; /* 0: no bound of its own */
    uint32_t slots;            /* workers: what 100 % of slot time is; 1..1024. Also art_runq_slots_set */
    uint32_t aging_threshold;  /* picks passed over before a promotion; 0: count rule off, spacing of the wait rule 50 */
    uint64_t aging_wait_ns[ART_TIERS]; /* of tiers 2 and 3; 0: wait rule off. [0] and [1] are ignored */
    uint32_t tier0_share_pct;  /* of slots * window; 100 or more: no cap */
    uint64_t tier0_window_ns;  /* 8 ns .. 2^33 ns (8.6 s); rounded down to a multiple of 8 ns */
    uint64_t drr_quantum_ns;   /* slot time per turn and unit of weight; 1 .. 2^37 */
    uint64_t pick_charge_ns;   /* what a pick costs its tenant by itself, so that free slices end a turn too; 0 .. 2^37 */
} art_runq_config;

typedef struct art_runq_stats {
    uint64_t queued[ART_TIERS];
    uint64_t pushes[ART_TIERS];         /* every insertion, requeues included; promotions are not insertions */
    uint64_t pops[ART_TIERS];           /* by the tier it was picked from (promoted: 1) */
    uint64_t cancels;
    uint64_t promotions_count[ART_TIERS]; /* by aging_threshold, by the tier promoted from */
    uint64_t promotions_wait[ART_TIERS];  /* by aging_wait_ns */
    uint64_t tier0_capped;              /* picks that took a lower tier although tier 0 had work, by the cap */
    uint64_t refusals;                  /* art_runq_admit that said full */
    uint64_t inbox;                     /* insertions that went through an inbox */
    uint64_t busy;                      /* picks that gave up on a token */
    uint64_t admitted_items;
    uint64_t admitted_bytes;
} art_runq_stats;

typedef struct art_runq art_runq; /* owned by the creator; outlives every call */

/* The defaults: 1,024 tenants, 100,000 items / 256 MiB, 1 slot, aging 50, waits 0/0/5 min/30 min, tier 0 80 % over 1 s,
 * quantum 10 ms, pick 1 us. */
void art_runq_config_default(art_runq_config *config);

/* 0, ART_EINVAL (a value outside its range) or ART_ENOMEM. *out is the caller's. */
int art_runq_create(const art_runq_config *config, art_runq **out);

/* No other call may be running or follow. Tasks still queued are simply forgotten: they are the caller's. NULL is fine. */
void art_runq_destroy(art_runq *q);

/* Weight 1..ART_WEIGHT_MAX (default 1), in force from the tenant's next turn. 0 or ART_EINVAL. */
int art_runq_tenant_set(art_runq *q, uint32_t tenant, uint32_t weight);

/* Number of workers, 1..1024. 0 or ART_EINVAL. */
int art_runq_slots_set(art_runq *q, uint32_t slots);

/* Reserves one item and `bytes` for the whole life of a run: requeues cost nothing and cannot be refused. 0, ART_EFULL
 * (nothing reserved, counted) or ART_EINVAL (tenant). Bounds are exact: what is counted is holders. Never waits. */
int art_runq_admit(art_runq *q, uint32_t tenant, uint64_t bytes);

/* Undoes one art_runq_admit with the same tenant and bytes, at the end of the run. Aborts on more releases than admissions. */
void art_runq_release(art_runq *q, uint32_t tenant, uint64_t bytes);

/* Queues the task at task->tier, last of its tenant. The queue owns it until a pick or cancel returns it. Never waits for
 * a worker (at most ~1.5 us of spinning), never fails. Aborts if tenant or tier is out of range or the task is queued.
 * It is not a full fence: a caller that next asks "is anyone parked?" needs its own StoreLoad fence. */
void art_runq_push(art_runq *q, art_task *task, uint64_t now_ns);

/* The best task, now the caller's; NULL: nothing queued, or busy. NULL while art_runq_tiers() != 0 means busy (or a task
 * that has come since): yield the CPU and call again; do not park. */
art_task *art_runq_pop(art_runq *q, uint64_t now_ns);

/* The same; *busy says whether NULL means that a token could not be had in about 3 us. */
art_task *art_runq_take(art_runq *q, uint64_t now_ns, bool *busy);

/* A task of a tier strictly higher than cur->tier, with cur requeued in the same step, or NULL and cur untouched (also
 * when busy: run another micro-slice). cur goes back as the first of its tenant, and its tenant goes on with its turn: it
 * was interrupted, not served (if a token is held up at that moment it goes back last). Tier 0 above its cap does not
 * preempt. Charge the slice so far before the call. */
art_task *art_runq_preempt(art_runq *q, art_task *cur, uint64_t now_ns);

/* Requeues cur at cur->tier (demoted or unpromoted by the caller beforehand), last of its tenant, and returns the best
 * task: never NULL, may be cur. When busy it is cur, not requeued. Charge the slice before the call, and before cur->tier
 * is changed. */
art_task *art_runq_yield(art_runq *q, art_task *cur, uint64_t now_ns);

/* Slot time that ended at now_ns, charged to the task's tenant at task->tier and, in tier 0, to the tier's share. The
 * caller owns the task. May be called several times per slice. Never waits (one atomic add; in tier 0 one CAS per 1/8
 * window touched). */
void art_runq_charge(art_runq *q, art_task *task, uint64_t slot_ns, uint64_t now_ns);

/* true: unlinked, now the caller's. false: at some moment during the call it was not queued (a worker has it, or it is
 * in the middle of a push). Waits while another thread is in the task's half: not for the control thread. */
bool art_runq_cancel(art_runq *q, art_task *task);

/* The same without waiting (~1.5 us at most): 1, 0, or ART_EBUSY (task untouched: try again later, and let the worker
 * look at the run's cancel flag when it picks it). */
int art_runq_try_cancel(art_runq *q, art_task *task);

/* Bit t set: tier t has queued work. Four acquire loads on two lines; a task whose push has returned and that nobody has
 * begun to take is always seen. */
uint32_t art_runq_tiers(const art_runq *q);

/* True if tier 0 is above its share at now_ns (whether or not others have work). Advisory. */
bool art_runq_tier0_capped(art_runq *q, uint64_t now_ns);

/* A snapshot, each number exact at some moment during the call if the tokens were free, else a little old (and `queued`, a
 * difference of counts, off by what happened meanwhile). Never waits. */
void art_runq_statistics(art_runq *q, art_runq_stats *out);

/* Enqueue time of the task that has been in the tier longest, 0 if none. Never waits: if the token is busy it is what the
 * last call that had the token saw. */
uint64_t art_runq_oldest_ns(art_runq *q, uint32_t tier);

/* Internal, for tests: takes both tokens, drains, walks everything and aborts if a link or a count is wrong. O(queued). */
void art__runq_verify(art_runq *q);

#ifdef __cplusplus
}
#endif
#endif
