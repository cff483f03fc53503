/* evq.h: events from worker threads to the control loop.
 *
 * What it is: one intrusive list per tier, many producers, one consumer, and an eventfd as the bell. An event is embedded in
 * the object it speaks about (a task has at most one outstanding event), so the queue allocates nothing and cannot overflow.
 *
 * What always holds:
 *   E1  pending == 1  <=>  the event is queued, or was drained and not yet taken. Only then does the queue or the
 *       consumer use `next`.
 *   E2  No lost wake-up: once its publish has returned, an event not yet handed out is in the reach of a drain that is
 *       running, or the fd is readable, or (tiers 2 and 3 only) the bell is owed, and then it is rung by the flush of
 *       any producer, so at the latest by that of the one who published. The argument is in evq.c.
 *   E3  An event of tier 0 or 1 never depends on another producer being scheduled: its own publish makes the fd
 *       readable unless the fd has been written already.
 *   E4  drain returns lower tier numbers first, and inside a tier the order in which publishes took effect.
 *
 * Who may call what, at the same time:
 *                     publish  flush*  due  drain  take  fd/statistics  destroy
 *     publish            y       y      y     y     y         y            -
 *     flush*, due        y       y      y     y     y         y            -
 *     drain              y       y      y     -     y         y            -
 * "drain" is single-consumer: two drains at once abort the process. All but drain are lock-free; only ringing makes a
 * system call. Publish waits for nobody, whatever its callers' OS priorities.
 *
 * Bells. Ringing wakes the loop, and where the loop shares a core with the writer it preempts the writer at once,
 * so batches would shrink to one event each. Two cures: the fd is written at most once between two drains ("armed"),
 * and tiers 2 and 3 ring at most every coalesce_ns (50 us: a lone guest must not wait longer; picked by measurement). A
 * publish that comes too early leaves the bell *owed*. Whoever publishes at tier 2 or 3 therefore looks at
 * art_evq_due in its slice loop (one relaxed load) and calls art_evq_flush_now before it parks or blocks. Tiers 0
 * and 1 ring at once and owe nothing.
 * The fd may be readable with nothing queued (a bell that was overtaken by a drain): consumers must accept an empty drain.
 */
#ifndef ART_EVQ_H
#define ART_EVQ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "art_atomic.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ART_EVQ_TIERS = 4 };

/* 50 us: see "Bells" above. */
#define ART_EVQ_COALESCE_NS UINT64_C(50000)

/* Embedded in its owner, zero-initialised, must not move or be freed while pending. */
typedef struct art_event {
    struct art_event *next;       /* the queue's while pending; nobody else reads or writes it */
    ART_ATOMIC(uint32_t) pending; /* 0 or 1; publish sets it, take clears it */
    uint8_t tier;                 /* 0..3, written by the event's owner while it is not pending */
} art_event;

typedef struct art_evq art_evq;

/* Counters since creation; each exact, taken one after the other. */
typedef struct art_evq_stats {
    uint64_t rung;    /* writes of the eventfd by producers */
    uint64_t delayed; /* times a bell became owed */
    uint64_t drains;  /* calls of drain */
    uint64_t drained; /* events handed out */
    uint64_t rerung;  /* writes of the eventfd by drain, because more than max were queued */
    uint64_t failed;  /* writes of the eventfd that failed (somebody closed it): always 0 in a healthy process */
} art_evq_stats;

/* Makes a queue with its eventfd (nonblocking, close-on-exec); *out is the caller's, to be destroyed. coalesce_ns 0 =
 * every tier rings at once. Errors: ART_EINVAL (out NULL, or coalesce_ns above one second: a mistaken unit), ART_ENOMEM,
 * ART_ESYS (no eventfd to be had; errno says why). */
int art_evq_create(uint64_t coalesce_ns, art_evq **out);

/* Closes the fd and frees the queue. No other thread may be using it. Events still queued are left as they are (pending
 * stays 1); their memory is their owners'. NULL is allowed. */
void art_evq_destroy(art_evq *q);

/* The eventfd, for the consumer's poller (level- or edge-triggered); owned by the queue: do not read, write or close it. */
int art_evq_fd(const art_evq *q);

/* Queues ev at ev->tier. true: it is queued now. false: it was pending already and nothing was done, because nothing
 * is needed: the consumer has yet to take it, and will see whatever the caller wrote before this call.
 * Either way the caller must not touch ev or its owner afterwards, unless something else says that it still exists.
 * now_ns: CLOCK_MONOTONIC, as fresh as the caller has it. A tier above 3 aborts the process.
 *
 * The pending race. Producers write the payload, then exchange pending to 1 (acq_rel, [V1]). The consumer exchanges it to
 * 0 (acq_rel, [V2]) and then reads the payload. All of these are read-modify-writes of one word, so they have one order:
 *   - the exchange [V1] found 0: either no event was outstanding or the last one was taken. We queue it; a
 *     later [V2] reads our 1, or a later producer's that read ours, and so sees our payload.
 *   - it found 1: the [V2] that will clear that 1 comes later in the order, reads our exchange (or a later one that read
 *     ours), and sees our payload. Nothing to queue: that [V2] is still to come, since the 1 is still there.
 * So take before reading, never after: read first and take then, and a payload written in between would be cleared
 * unseen. A payload of plain fields needs a hand-over besides (after the event the object is the consumer's until it
 * is given back); only a payload of atomics may be written at any time. */
bool art_evq_publish(art_evq *q, art_event *ev, uint64_t now_ns);

/* True when a delayed bell is owed and its time has come: call art_evq_flush. One relaxed load when none is owed; may be
 * late by one look, never lost. */
bool art_evq_due(const art_evq *q, uint64_t now_ns);

/* Rings an owed bell if it is due; nothing otherwise. */
void art_evq_flush(art_evq *q, uint64_t now_ns);

/* Rings an owed bell now, due or not. For a producer about to park, block or end. */
void art_evq_flush_now(art_evq *q);

/* Consumer only. Clears the fd, re-arms the bell, and moves up to max events into out (tier order, FIFO inside a
 * tier); returns how many. Events keep pending == 1: call art_event_take on each before reading its payload; until then the
 * event must stay alive. When more than max were queued the fd is made readable again before the call returns, so
 * that neither a level- nor an edge-triggered poller forgets them; the rest keeps its order, and newer events of a higher
 * tier still overtake it. max 0 moves nothing and leaves the fd readable if anything is queued. */
size_t art_evq_drain(art_evq *q, art_event **out, size_t max);

/* Takes an event that drain returned: exchanges pending to 0 and returns what it was (1; 0 = it was taken before, a bug of
 * the caller). From here on producers may publish the event again. Any one thread, once per drained event. */
uint32_t art_event_take(art_event *ev);

art_evq_stats art_evq_statistics(const art_evq *q);

#ifdef __cplusplus
}
#endif
#endif
