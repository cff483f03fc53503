/* worker.h: CPU slots and the threads that fill them with work.
 *
 * A pool has one worker thread per slot. A worker takes the best task of the run queue and gives it slices until it ends,
 * traps, blocks, is preempted (a higher tier has work, and it is not tier 0) or has used its allotment (then it is
 * demoted and requeued). Two kinds of task: an `art_run` (a wasm guest, run in the worker itself) and an `art_foreign`
 * (another process holds the slot; the worker sleeps until it is released, and preempts it with SIGSTOP through its pidfd).
 *
 * What always holds:
 *   P1  A task is in one place: the queue, one worker, or blocked/parked with nobody. Its `state` says which.
 *   P2  Workers never take the GIL and never call out; they talk to the control plane by events (evq.h).
 *   P3  A blocked run holds no slot. An answer that comes at any moment is not missed ("blocking" in worker.c).
 *   P4  The allotment counts all slot time at a tier; only a wait for an op of `base_tier_ops` (steps and waits)
 *       returns a run to its base tier. Slot time at a lent tier counts at none.
 *   P5  A run lives until its exit was taken and art_run_free called; a foreign until released and freed.
 *
 * Threads: create, start and destroy by one thread; everything else from any thread unless said otherwise. The control plane
 * takes events and frees runs on one thread (it is the evq's single consumer).
 */
#ifndef ART_WORKER_H
#define ART_WORKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "capture.h"
#include "evq.h"
#include "guest.h"
#include "runq.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct art_pool art_pool;
typedef struct art_run art_run;
typedef struct art_foreign art_foreign;

typedef struct art_pool_config {
    uint32_t workers;                 /* slots; 1..64 */
    int nice;                         /* of the workers; kept as it is where not permitted */
    bool pin;                         /* worker i on the i-th usable CPU */
    uint64_t quantum_ns[ART_TIERS];   /* slot time at a tier before demotion */
    uint64_t micro_slice_fuel;
    uint32_t live_max;                /* started and not ended runs: the engine's stacks */
    uint64_t base_tier_ops;           /* bit 1 << op: waiting for it returns a run to its base tier */
    art_runq_config runq;             /* slots is set from workers */
    art_engine *engine;               /* borrowed */
} art_pool_config;

/* *out is the caller's. Starts the threads. ART_EINVAL, ART_ENOMEM, ART_ESYS. */
int art_pool_create(const art_pool_config *config, art_pool **out);

/* Stops and joins the workers. Runs and foreigns are the control plane's to free afterwards; no events follow. */
void art_pool_stop(art_pool *pool);

/* After stop, when all runs and foreigns are freed. */
void art_pool_destroy(art_pool *pool);

/* For draining events: art_pool_event_owner tells what an event belongs to. */
art_evq *art_pool_evq(art_pool *pool);
art_runq *art_pool_runq(art_pool *pool);

/* Waits for a slot, by length: the first bucket is below 2^ART_WAIT_FIRST_BIT ns, each further one below twice that of the one
 * before, and the last is the rest. */
#define ART_WAIT_BUCKETS 28
#define ART_WAIT_FIRST_BIT 10

typedef struct art_pool_stats {
    uint64_t slices, micro_slices, preemptions, demotions, parks;
    uint64_t slot_ns[ART_TIERS]; /* slot time by tier */
    uint64_t waits[ART_TIERS][ART_WAIT_BUCKETS]; /* from being queued, or queued again, to the slice; by the tier it began at */
    uint64_t waited_ns[ART_TIERS];               /* their sum */
    uint64_t live, live_max, starved;
    uint64_t foreign_grants, foreign_preemptions;
    int nice;            /* in force, of worker 0 */
} art_pool_stats;
void art_pool_statistics(art_pool *pool, art_pool_stats *out);

/* Of one worker, since it was made. Slot time is counted when a slice ends. */
typedef struct art_worker_stats {
    uint64_t slices, preemptions, demotions;
    uint64_t slot_ns[ART_TIERS];
} art_worker_stats;
/* Any thread; ART_EINVAL: there is no such worker. */
int art_pool_worker_statistics(art_pool *pool, uint32_t index, art_worker_stats *out);

/* Each worker remembers the last slices that have ended in its slot. */
#define ART_SLICES_KEPT 4096 /* one of them is being written */

typedef enum art_slice_end {
    ART_SLICE_OPEN,      /* it goes on */
    ART_SLICE_OVER,      /* the run has ended, the foreign was released */
    ART_SLICE_BLOCKED,   /* the run waits */
    ART_SLICE_PREEMPTED, /* a higher tier wanted the slot */
    ART_SLICE_SPENT,     /* its allotment was used; the next slice may be the same task's */
    ART_SLICE_STOPPED,   /* the pool stops */
} art_slice_end;

typedef struct art_slice {
    uint64_t start_ns, end_ns; /* CLOCK_MONOTONIC; of an open one, when it was looked at */
    uint64_t number;           /* of the run or foreign, see art_run_number */
    art_slice_end end;
    uint8_t tier;              /* at which it began */
    bool foreign;
} art_slice;

/* Slices of one worker, the newest first, down to those that ended before `since_ns`, at most `max`; how many. What is
 * overwritten meanwhile is left out. Any thread, and the worker does not wait for it. ART_EINVAL: there is no such worker. */
int art_pool_slices(art_pool *pool, uint32_t index, uint64_t since_ns, art_slice *out, uint32_t max);

/* --- events ------------------------------------------------------------------- */

typedef enum art_owner_kind { ART_OWNER_RUN, ART_OWNER_FOREIGN } art_owner_kind;

/* What a drained event belongs to. Takes the event (evq.h: take before reading). */
art_owner_kind art_pool_event_take(art_event *event, art_run **run, art_foreign **foreign);

/* --- runs --------------------------------------------------------------------- */

typedef struct art_run_config {
    art_guest_config guest; /* its fuel account and micro-slice are filled in */
    uint32_t tenant;
    uint8_t tier;
    uint64_t fuel;      /* first grant */
    bool fuel_final;    /* no further grant will come */
    bool admitted;      /* recovered work: reserves a place without being refused */
    bool safe_point;    /* as if art_run_want_safe_point had been called before it ran */
    void *user;         /* the control plane's; returned by art_run_user */
} art_run_config;

/* Makes and queues a run. ART_EFULL, ART_EINVAL, ART_ENOMEM, ART_ECLOSED. *out is written before the run can produce an
 * event. */
int art_run_submit(art_pool *pool, const art_run_config *config, art_run **out);

void *art_run_user(const art_run *run);
art_guest *art_run_guest(art_run *run);

/* Answers a syscall and wakes the run if it waits. Takes ownership of the answer. */
void art_run_answer(art_run *run, art_answer *answer);
void art_run_go_live(art_run *run);
/* Adds fuel; wakes the run if it waits for fuel. */
void art_run_grant(art_run *run, uint64_t fuel, bool final);

/* Tells the run to stop and to run its unwinding handlers (art_guest_unwind); its exit event follows. Its program has unwind_ns
 * of slot time to come to its next wait (in replay as much as it takes), then the handlers have as much again (in replay
 * ART_UNWIND_REPLAY_FACTOR times that, and afresh when it is live); past it the run exits with reason UNWOUND and a message. A
 * run that never had a slot exits without one. `skipped`: see there. Again: nothing. ART_ENOMEM. */
int art_run_unwind(art_run *run, int32_t skipped, uint64_t unwind_ns);

/* Handlers in replay must come as far as they came before, on a machine that may be slower or busier now. */
#define ART_UNWIND_REPLAY_FACTOR 10

/* Asks a run whose module can be captured anywhere to stop at its next safe point: an event follows when it has, and the look
 * says safe_point; or the run waits, or ends, and says that. Any thread. */
void art_run_want_safe_point(art_run *run);
/* Has it go on: to the next one, with `again`. */
void art_run_leave_safe_point(art_run *run, bool again);

/* Captures a run that waits for an answer, or stands at a safe point: art_guest_capture. It is not given a slot meanwhile. If it is
 * not kept, or it turns out to be broken, its exit event follows. ART_ESTATE as well if it is not blocked, or somebody else
 * captures it. Needs an ordinary thread stack; takes as long as its memory is large, so not on the control thread. Not together
 * with art_run_free; after art_pool_stop no event follows. */
int art_run_capture(art_run *run, const art_capture_config *config, art_frame_buf *out, char *msg, size_t msg_len);

/* Ends such a run where it stands: art_guest_fail. Its exit event follows, unless ART_ESTATE, as above. */
int art_run_fail(art_run *run, char *msg, size_t msg_len);

/* Ends the run wherever it is: its exit event follows. */
void art_run_kill(art_run *run);

/* Tier lending: until told otherwise the run is not at a lower tier than this, wherever it is, and not demoted from it;
 * ART_TIERS ends that, and gives it back the tier and the allotment it had. 0; ART_EINVAL; or ART_EBUSY: it is on its way into
 * or out of the queue, which may mean that it is queued as it was: call again in a moment. Never waits. One thread at a time
 * for one run, and not together with art_run_kill or art_run_unwind of the same. */
int art_run_lend(art_run *run, uint8_t tier);
/* Slot time that it has had; of a running one up to about ten micro-slices old. Any thread, until art_run_free. */
uint64_t art_run_ran_ns(const art_run *run);
/* Its guest's work in fuel, and the length of its guest's memory (0: none, or gone), as old as that. Any thread, until
 * art_run_free. */
uint64_t art_run_fuel(const art_run *run);
uint64_t art_run_memory_bytes(const art_run *run);

typedef struct art_run_view {
    bool done;            /* exit is valid; no further event will come */
    bool waiting;         /* suspended: handles are valid until the run is answered */
    bool no_fuel;         /* waits for a grant */
    bool safe_point;      /* stands where art_run_want_safe_point asked it to */
    uint64_t fuel_granted; /* with no_fuel: all that was granted when it stopped; the same shortage keeps the number */
    uint64_t wait_number; /* counts suspensions: one is reported once */
    const int32_t *handles;
    size_t handle_count;
    art_exit exit;
    uint64_t fuel, slot_ns, submitted_ns, first_ns;
    uint32_t preemptions, demotions;
    uint8_t tier;
} art_run_view;
/* The control plane's thread only, after art_pool_event_take. `done` is said once no further event can come, so a look that
 * follows an event may say nothing. */
void art_run_look(art_run *run, art_run_view *out);

/* Which one it is in slices: from 1 on, never again in the pool. Any thread. */
uint64_t art_run_number(const art_run *run);

typedef enum art_run_phase {
    ART_RUN_QUEUED,    /* new, or woken, and not given a slot yet */
    ART_RUN_PREEMPTED, /* queued again, by a higher tier or at the end of a quantum */
    ART_RUN_RUNNING,
    ART_RUN_BLOCKED,   /* waits for an answer or for fuel */
    ART_RUN_DONE,
} art_run_phase;
/* Where it is, to be shown: it may be elsewhere by the time the caller knows. Any thread, until art_run_free. */
art_run_phase art_run_glance(const art_run *run);

/* Frees a run whose look said done, or any run after art_pool_stop. */
void art_run_free(art_run *run);

/* --- foreign tasks -------------------------------------------------------------- */

typedef enum art_foreign_state {
    ART_FOREIGN_QUEUED,
    ART_FOREIGN_GRANTED,
    ART_FOREIGN_PREEMPTED, /* stopped; queued again by itself, granted again later */
    ART_FOREIGN_RELEASED,
} art_foreign_state;

/* Asks for a slot for the process behind pidfd (borrowed until freed; -1: nothing is signalled). Its events report the
 * state; SIGCONT is sent before each grant but the first, SIGSTOP at each preemption. */
int art_foreign_submit(art_pool *pool, int pidfd, uint32_t tenant, uint8_t tier, void *user, art_foreign **out);
void *art_foreign_user(const art_foreign *foreign);
/* State now, and how often it was granted and preempted. The control plane's thread only, after art_pool_event_take. The
 * same state may be seen twice; RELEASED is seen once no further event can come. */
art_foreign_state art_foreign_look(art_foreign *foreign, uint32_t *grants, uint32_t *preemptions);
/* Gives the slot back, or stops asking for one. The event with RELEASED is the last. 0, or ART_EBUSY: the queue is held up at
 * this moment, so that it may take until its turn comes: call again soon. More than once is harmless. */
int art_foreign_release(art_foreign *foreign);
/* As art_run_lend; one thread at a time for one foreign, and not together with its release. */
int art_foreign_lend(art_foreign *foreign, uint8_t tier);
/* After the RELEASED event, or after art_pool_stop. */
void art_foreign_free(art_foreign *foreign);

#ifdef __cplusplus
}
#endif
#endif
