/* evq.c: see evq.h for what the queue promises.
 *
 * Structure. Per tier an inbox: a stack whose top is one word, so that a push is whole at one instant (a producer that is
 * descheduled in the middle of publish hides nobody else's event). The consumer takes a whole stack by exchange, reverses it
 * and appends it to a list of its own: first in, first out, in the order in which the pushes took effect. Since only the whole
 * stack is ever taken, there is no ABA problem.
 *
 * The bell is one word: generation << 2 | state. Only drain changes the generation, once per call.
 *
 *     RUNG     the fd was written in this generation and not cleared since: nobody needs to do anything
 *     ARMED    the next event must ring
 *     OWED     an event of tier 2 or 3 came too early to ring; a flush rings when it is due
 *     RINGING  somebody is about to write the fd, or has written it and not yet said so
 *
 *     ARMED -> OWED             publish at tier 2, 3, too early
 *     ARMED, OWED -> RINGING    publish, flush: before the write
 *     RINGING -> RUNG           after the write, only in the same generation
 *     any -> ARMED, generation + 1     drain, between clearing the fd and looking at the inboxes
 *     any -> RUNG               drain, after writing the fd itself because more than max were queued
 *
 * Why no wake-up is lost. A producer (P) pushes, then looks at the bell; drain (D) clears the fd, then stores ARMED, then
 * looks at the inboxes. Push, look at the bell, store and look at the inbox are all seq_cst, so they have one order:
 *   1. P's look comes before D's store: then P's push comes before D's look at the inboxes, and D takes the event. What P saw in
 *      the bell, and whether it rang, does not matter. (The clear comes first of all: a ring that it swallowed belongs to an
 *      event that D finds.)
 *   2. P's look comes after D's store: it sees a state of D's generation (or of a later one, which is case 1 for a later drain).
 *      ARMED: P rings, or owes. OWED: as if P owed. RUNG: the fd is readable, because between a write in this generation and the
 *      next drain nobody clears it. RINGING: see the next paragraph.
 * With acquire and release alone both looks could miss (store buffering), which is why seq_cst is needed here.
 *
 * Why RINGING is a state of its own. Were the bell marked as rung before the write, a worker at nice 19 that loses its
 * core between the two would silence every other producer until it runs again, for milliseconds or more. So RINGING is no
 * promise: a producer of tier 0 or 1 that sees it writes the fd itself (a second write is harmless), and for tiers 2 and 3 it
 * counts as owed, so their flush writes after coalesce_ns. The generation makes "RINGING -> RUNG" exact: without it a
 * producer that slept after its write could mark the bell as rung for a later generation, in which nobody has written yet.
 *
 * Why an owed bell is not forgotten. OWED is left only by a ring (through RINGING, which counts as owed) or by a drain, whose
 * look at the inboxes comes after its store and so after the push of whoever owed. Any producer's flush may ring it; the
 * one who published does so before it parks, at the latest.
 */
#include "evq.h"

#include <errno.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "art_err.h"

/* Tests put delays and stops into the windows between two steps; otherwise nothing. */
#ifndef ART_EVQ_WINDOW
#define ART_EVQ_WINDOW(at) ((void)0)
#endif

enum { BELL_RUNG = 0, BELL_ARMED = 1, BELL_OWED = 2, BELL_RINGING = 3, BELL_STATE_MASK = 3, BELL_GENERATION = 4 };

#define CACHE_LINE 64
#define COALESCE_NS_MAX UINT64_C(1000000000)

struct inbox {
    alignas(CACHE_LINE) _Atomic(art_event *) top; /* producers push, the consumer takes all */
};

struct ready_list {
    art_event *first;
    art_event *last;
};

struct art_evq {
    struct inbox inboxes[ART_EVQ_TIERS]; /* a line each, so that tiers do not slow each other down */

    alignas(CACHE_LINE) _Atomic(uint64_t) bell; /* see above. Producers and the consumer */
    _Atomic(uint64_t) last_ring_ns; /* when a producer last began to ring. Relaxed everywhere: it only spaces bells out; an old
                                     * value makes one bell early or up to coalesce_ns late, both allowed */

    alignas(CACHE_LINE) uint64_t coalesce_ns; /* constant */
    int fd;                                   /* constant */

    alignas(CACHE_LINE) struct ready_list ready[ART_EVQ_TIERS]; /* consumer only: taken from the inboxes, not handed out */
    _Atomic(bool) draining;                                     /* catches a second consumer */

    /* Counters, all relaxed: nothing is concluded from them. */
    _Atomic(uint64_t) drains;  /* consumer writes */
    _Atomic(uint64_t) drained; /* consumer writes */
    _Atomic(uint64_t) rerung;  /* consumer writes */
    alignas(CACHE_LINE) _Atomic(uint64_t) rung;
    _Atomic(uint64_t) delayed;
    _Atomic(uint64_t) failed;
};

_Static_assert(sizeof(struct inbox) == CACHE_LINE, "one inbox per cache line");
_Static_assert(offsetof(struct art_evq, bell) % CACHE_LINE == 0, "the bell has its own line");

static _Noreturn void die(const char *what)
{
    (void)fprintf(stderr, "agentrt: evq: %s\n", what);
    abort();
}

static void count(_Atomic(uint64_t) *counter, uint64_t n)
{
    (void)atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

int art_evq_create(uint64_t coalesce_ns, art_evq **out)
{
    if (out == NULL || coalesce_ns > COALESCE_NS_MAX) {
        return ART_EINVAL;
    }
    art_evq *q = aligned_alloc(CACHE_LINE, sizeof *q);
    if (q == NULL) {
        return ART_ENOMEM;
    }
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd < 0) {
        int saved = errno;
        free(q);
        errno = saved;
        return ART_ESYS;
    }
    for (int tier = 0; tier < ART_EVQ_TIERS; tier++) {
        atomic_init(&q->inboxes[tier].top, NULL);
        q->ready[tier] = (struct ready_list){NULL, NULL};
    }
    atomic_init(&q->bell, BELL_GENERATION | BELL_ARMED);
    /* As if the last bell had been exactly coalesce_ns before time 0: the first one is due at once. */
    atomic_init(&q->last_ring_ns, UINT64_C(0) - coalesce_ns);
    q->coalesce_ns = coalesce_ns;
    q->fd = fd;
    atomic_init(&q->draining, false);
    atomic_init(&q->drains, 0);
    atomic_init(&q->drained, 0);
    atomic_init(&q->rerung, 0);
    atomic_init(&q->rung, 0);
    atomic_init(&q->delayed, 0);
    atomic_init(&q->failed, 0);
    *out = q;
    return ART_OK;
}

void art_evq_destroy(art_evq *q)
{
    if (q != NULL) {
        (void)close(q->fd);
        free(q);
    }
}

int art_evq_fd(const art_evq *q)
{
    return q->fd;
}

/* Makes the fd readable. A full counter (EAGAIN) is readable as well. */
static bool write_fd(art_evq *q)
{
    const uint64_t one = 1;
    int saved = errno;
    ssize_t n;
    do {
        n = write(q->fd, &one, sizeof one);
    } while (n < 0 && errno == EINTR);
    bool ok = n == (ssize_t)sizeof one || errno == EAGAIN;
    errno = saved;
    if (!ok) {
        count(&q->failed, 1);
    }
    return ok;
}

/* Signed difference, so that a clock reading a little older than the last bell's means "not yet", not "long ago". */
static bool is_due(const art_evq *q, uint64_t now_ns)
{
    if (q->coalesce_ns == 0) {
        return true;
    }
    uint64_t last_ns = atomic_load_explicit(&q->last_ring_ns, memory_order_relaxed);
    return (int64_t)(now_ns - last_ns) >= (int64_t)q->coalesce_ns;
}

/* Makes the fd readable unless it was written in this generation already. bell is what the caller saw. */
static void ring(art_evq *q, uint64_t bell)
{
    uint64_t ringing;
    for (;;) {
        if ((bell & BELL_STATE_MASK) == BELL_RUNG) {
            return;
        }
        ringing = bell | BELL_RINGING;
        if (bell == ringing) {
            break; /* another's write may not have happened yet: write as well */
        }
        if (atomic_compare_exchange_weak_explicit(&q->bell, &bell, ringing, memory_order_seq_cst,
                                                  memory_order_seq_cst)) {
            break;
        }
        /* A failed exchange saw a newer bell; if a drain came in between, its generation is the one to ring for. */
    }
    ART_EVQ_WINDOW(before_write);
    count(&q->rung, 1);
    if (!write_fd(q)) {
        return; /* stays RINGING, so that others try again */
    }
    ART_EVQ_WINDOW(after_write);
    /* Fails, rightly, when a drain came in between. Seq_cst: who sees RUNG is ordered after the write, see above. */
    (void)atomic_compare_exchange_strong_explicit(&q->bell, &ringing, ringing - BELL_RINGING + BELL_RUNG,
                                                  memory_order_seq_cst, memory_order_seq_cst);
}

static void ring_at(art_evq *q, uint64_t bell, uint64_t now_ns)
{
    /* Before the bell changes, so that a second producer finds the bell not due, rather than rings too. */
    atomic_store_explicit(&q->last_ring_ns, now_ns, memory_order_relaxed);
    ring(q, bell);
}

bool art_evq_publish(art_evq *q, art_event *ev, uint64_t now_ns)
{
    /* [V1], partner [V2] in art_event_take. */
    if (atomic_exchange_explicit(&ev->pending, 1, memory_order_acq_rel) != 0) {
        return false;
    }
    unsigned tier = ev->tier;
    if (tier >= ART_EVQ_TIERS) {
        die("event with a tier above 3");
    }
    ART_EVQ_WINDOW(before_push);
    _Atomic(art_event *) *top = &q->inboxes[tier].top;
    art_event *old = atomic_load_explicit(top, memory_order_relaxed);
    do {
        ev->next = old;
        /* Seq_cst for the wake-up argument; it includes the release that hands `next` to the consumer. */
    } while (!atomic_compare_exchange_weak_explicit(top, &old, ev, memory_order_seq_cst, memory_order_relaxed));
    /* From here on ev may be gone. */
    ART_EVQ_WINDOW(after_push);

    uint64_t bell = atomic_load_explicit(&q->bell, memory_order_seq_cst);
    while ((bell & BELL_STATE_MASK) != BELL_RUNG) {
        if (tier <= 1 || is_due(q, now_ns)) {
            ring_at(q, bell, now_ns);
            break;
        }
        if ((bell & BELL_STATE_MASK) != BELL_ARMED) {
            break; /* owed already; RINGING counts as owed */
        }
        if (atomic_compare_exchange_weak_explicit(&q->bell, &bell, bell - BELL_ARMED + BELL_OWED,
                                                  memory_order_seq_cst, memory_order_seq_cst)) {
            count(&q->delayed, 1);
            break;
        }
    }
    return true;
}

/* Relaxed looks suffice in due and flush: a producer sees its own OWED or something later in the word's order, and each
 * later value either still owes, or rang, or is a drain's that took the event. */
static bool is_owed(uint64_t bell)
{
    return (bell & BELL_STATE_MASK) >= BELL_OWED; /* OWED or RINGING */
}

bool art_evq_due(const art_evq *q, uint64_t now_ns)
{
    return is_owed(atomic_load_explicit(&q->bell, memory_order_relaxed)) && is_due(q, now_ns);
}

void art_evq_flush(art_evq *q, uint64_t now_ns)
{
    uint64_t bell = atomic_load_explicit(&q->bell, memory_order_relaxed);
    if (is_owed(bell) && is_due(q, now_ns)) {
        ring_at(q, bell, now_ns);
    }
}

void art_evq_flush_now(art_evq *q)
{
    uint64_t bell = atomic_load_explicit(&q->bell, memory_order_relaxed);
    if (is_owed(bell)) {
        ring(q, bell);
    }
}

static void clear_fd(art_evq *q)
{
    uint64_t ignored;
    int saved = errno;
    ssize_t n;
    do {
        n = read(q->fd, &ignored, sizeof ignored);
    } while (n < 0 && errno == EINTR);
    errno = saved; /* EAGAIN: it was not readable */
}

/* Moves an inbox behind what is ready in its tier, oldest first. */
static void collect(art_evq *q, unsigned tier)
{
    _Atomic(art_event *) *top = &q->inboxes[tier].top;
    /* A look first: an exchange on four idle lines is dearer than four loads. Seq_cst like the exchange, since a NULL seen
     * here is the look at the inbox of the wake-up argument. */
    if (atomic_load_explicit(top, memory_order_seq_cst) == NULL) {
        return;
    }
    art_event *newest = atomic_exchange_explicit(top, NULL, memory_order_seq_cst);
    art_event *oldest = NULL;
    for (art_event *ev = newest; ev != NULL;) {
        art_event *next = ev->next;
        ev->next = oldest;
        oldest = ev;
        ev = next;
    }
    struct ready_list *list = &q->ready[tier];
    if (list->first == NULL) {
        list->first = oldest;
    } else {
        list->last->next = oldest;
    }
    list->last = newest;
}

size_t art_evq_drain(art_evq *q, art_event **out, size_t max)
{
    if (atomic_exchange_explicit(&q->draining, true, memory_order_acquire)) {
        die("two drains at once");
    }
    clear_fd(q);
    ART_EVQ_WINDOW(after_clear);
    /* Relaxed load: only drain changes the generation. The store overwrites whatever producers did to the old generation,
     * which has no further use. */
    uint64_t bell = atomic_load_explicit(&q->bell, memory_order_relaxed);
    bell = (bell & ~(uint64_t)BELL_STATE_MASK) + BELL_GENERATION;
    atomic_store_explicit(&q->bell, bell | BELL_ARMED, memory_order_seq_cst);
    ART_EVQ_WINDOW(after_arm);

    size_t n = 0;
    bool more = false;
    for (unsigned tier = 0; tier < ART_EVQ_TIERS; tier++) {
        collect(q, tier);
        struct ready_list *list = &q->ready[tier];
        while (list->first != NULL && n < max) {
            out[n++] = list->first;
            list->first = list->first->next;
        }
        more = more || list->first != NULL;
    }
    ART_EVQ_WINDOW(after_collect);
    if (more) {
        ART_EVQ_WINDOW(before_rering);
        if (write_fd(q)) {
            /* The fd is readable and only the next drain clears it, so whatever producers have made of the bell since (owed,
             * ringing) is settled. */
            atomic_store_explicit(&q->bell, bell | BELL_RUNG, memory_order_seq_cst);
        }
        count(&q->rerung, 1);
    }
    count(&q->drains, 1);
    count(&q->drained, n);
    atomic_store_explicit(&q->draining, false, memory_order_release);
    return n;
}

uint32_t art_event_take(art_event *ev)
{
    return atomic_exchange_explicit(&ev->pending, 0, memory_order_acq_rel); /* [V2], partner [V1] */
}

art_evq_stats art_evq_statistics(const art_evq *q)
{
    return (art_evq_stats){
        .rung = atomic_load_explicit(&q->rung, memory_order_relaxed),
        .delayed = atomic_load_explicit(&q->delayed, memory_order_relaxed),
        .drains = atomic_load_explicit(&q->drains, memory_order_relaxed),
        .drained = atomic_load_explicit(&q->drained, memory_order_relaxed),
        .rerung = atomic_load_explicit(&q->rerung, memory_order_relaxed),
        .failed = atomic_load_explicit(&q->failed, memory_order_relaxed),
    };
}
