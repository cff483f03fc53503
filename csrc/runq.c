/* runq.c: see runq.h for the contract and docs/decisions/0001-run-queue.md for the reasons.
 *
 * Shape: two halves (tier 0 | tiers 1-3). A half is a try-token, a one-word inbox, a published mask, and plain lists that
 * only the token holder touches. Nobody waits for a token without a bound except art_runq_cancel and art__runq_verify.
 *
 * Push     token free: drain the inbox, insert, give the token back. Else (after ~1.5 us): one CAS onto the inbox.
 * Pick     tier 0 has work: its token, drain, pick. Else tiers 1-3 have work: their token, drain, look at tier 0 once
 *          more, age, pick.
 * Drain    1. read the inbox word; 2. publish its tier bits in the mask; 3. take everything by CAS of the word read in 1
 *          (if it changed: again from 1); 4. reverse (it is a stack); 5. insert.
 *          A plain exchange in 3 could take tiers that 2 did not publish.
 * Readers  inbox word first, mask second: at every instant a queued task shows in at least one of them.
 *
 * Invariants (under the half's token)
 *   mask bit t set        <=> lane t has tasks, or a drain is under way that will put one there
 *   pushes - pops - cancels -+ promotions == length of a lane's age list == sum of the lengths of its tenants' FIFOs
 *   tenant in the ring    <=> its FIFO is not empty; lane.ring == NULL <=> the lane is empty
 *   task->q_where         == IN_HALF(h) <=> it is in the lists of half h; changed from or to that only under h's token
 *   deficit of a tenant outside the ring: debt is kept; credit counts only for a preempted task that comes straight back
 *
 * Pairs of orderings
 *   [TOKEN] release in token_release  -> acquire in token_try: all plain fields of the half, and of tasks in its lists
 *   [INBOX] release in inbox_push CAS -> acquire in drain: the pushed task's fields
 *   [SEEN]  release in drain's take   -> acquire of `in` in half_bits: the mask published before (later pushes are RMWs
 *           on the same word, so they continue the release sequence)
 *   [MASK]  release in mask stores    -> acquire in half_bits: nothing but the bit is read through it; release keeps it
 *           before a following token release on every machine, acquire keeps the caller's next steps after the look
 */
#include "runq.h"

#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A test build may define ART_RUNQ_WINDOW() (called at every point where a descheduled thread could hurt) and
 * ART_RUNQ_NO_SPIN (so that the inboxes are really used). */
#ifndef ART_RUNQ_WINDOW
#define ART_RUNQ_WINDOW() ((void)0)
#endif

/* Without a call inside push, take and yield: a pair of them costs a tenth more with calls. */
#define HOT inline __attribute__((always_inline))
/* Out of their way. */
#define ASIDE __attribute__((noinline))

#define CACHE_LINE 64
#define HALVES 2
#define BUCKETS 8 /* the window slides by 1/8: the cap is judged over the last 7/8 to 8/8 of it */
#define PTR_BITS 48
#define PTR_MASK ((UINT64_C(1) << PTR_BITS) - 1)
#define TIER_SHIFT 60 /* inbox word: bits 60-63 tiers present, 48-59 zero, 0-47 newest task */
#define PROMOTED_MIN_NS UINT64_C(1000000)       /* a promotion is worth as much, if those that passed had it; 20 times a switch */
#define CHARGE_MAX_NS (UINT64_C(1) << 40)      /* 18 minutes: more in one charge is a bug; keeps sums far from overflow */
#define DEBT_MAX_NS (INT64_C(1) << 60)
#define AGING_SPACING 50 /* picks between promotions by waiting time when the count rule is off */
#define LATE_BUCKETS 64 /* a charge that is up to 8 windows late is dropped; older numbers than that are taken for stale */
#define BUCKET_NS_BITS 40
#define BUCKET_NS_MASK ((UINT64_C(1) << BUCKET_NS_BITS) - 1)
#define PUSH_SPIN_ROUNDS 6 /* 1 + 2 + .. + 32 pauses, about 1.5 us: a holder that runs is out in 20-50 ns */
#define PICK_SPIN_ROUNDS 7 /* 127 pauses, about 3 us: one micro-slice of an interpreter */

enum { WHERE_NONE = 0, WHERE_INBOX0 = 1, WHERE_INBOX1 = 2, WHERE_HALF0 = 3, WHERE_HALF1 = 4 };
#define IN_INBOX(h) ((uint8_t)(WHERE_INBOX0 + (h)))
#define IN_HALF(h) ((uint8_t)(WHERE_HALF0 + (h)))

_Static_assert(sizeof(void *) == 8, "the inbox word packs a 48-bit user address");
_Static_assert(sizeof(art_task) == 64, "a task's queue part is one line");

/* Cheap asserts are always on: past one of these the lists are not to be trusted. */
#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (__builtin_expect(!(cond), 0))                                                                              \
            check_failed(#cond, __LINE__);                                                                             \
    } while (0)

static _Noreturn __attribute__((cold, noinline)) void check_failed(const char *cond, int line)
{
    fprintf(stderr, "agentrt: runq.c:%d: %s\n", line, cond);
    abort();
}

/* One tenant in one tier. The token holder owns everything but `charged` (any worker adds) and `weight` (any thread). */
typedef struct account {
    art_task *head, *tail;
    struct account *next, *prev; /* ring of tenants with work */
    int64_t deficit_ns;          /* what is left of the turn; negative: debt */
    _Atomic uint64_t charged_ns; /* free-running; relaxed: a number, publishes nothing */
    uint64_t charged_seen_ns;    /* how much of it is in deficit_ns; compared by difference only */
    _Atomic uint32_t weight;     /* relaxed: any recent value will do */
    bool in_turn;                /* has had this turn's quantum */
} account;

_Static_assert(sizeof(account) == CACHE_LINE, "an account is one line");

/* A counter with one writer at a time (the token holder) and readers anywhere. Relaxed: statistics only. */
typedef _Atomic uint64_t counter;

static inline void bump(counter *c, uint64_t by)
{
    atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed) + by, memory_order_relaxed);
}

static inline uint64_t look(const counter *c)
{
    return atomic_load_explicit(c, memory_order_relaxed);
}

/* One tier. The token holder of its half owns it; the counters may be read by anyone. What pushes and picks write is one
 * line, so that a half that goes to another core takes few with it. */
typedef struct lane {
    alignas(CACHE_LINE) account *ring; /* whose turn it is; NULL: the tier is empty */
    art_task_age age; /* its ends: next is the oldest. Stamp: all ones, so that an empty tier is never due */
    counter pushes, pops;
    /* law 2 (tiers 2 and 3). Picks that passed over the tier are not counted one by one: they are those of higher tiers,
     * which are counted anyway, less `since`. */
    uint64_t since; /* with work: picks of higher tiers that do not count. Without: those that count so far */
    uint64_t idle0; /* tier-0 picks when it ran out of work */
    /* rarely */
    alignas(CACHE_LINE) counter cancels;
    counter promotions_count, promotions_wait; /* out of this tier */
    uint64_t promoted_at;                      /* number of picks when it last promoted */
    uint64_t since_ns;                         /* as `since`, of the slot time of higher tiers */
    counter oldest_ns;                         /* what the last art_runq_oldest_ns with the token saw */
} lane;

_Static_assert(sizeof(lane) == 2 * CACHE_LINE, "a lane is two lines");

typedef struct half {
    alignas(CACHE_LINE) _Atomic uint32_t token; /* 1: held. On its own line: losers spin here */
    alignas(CACHE_LINE) _Atomic uint64_t in;    /* inbox word; any pusher and the holder write, anyone reads */
    _Atomic uint32_t mask;                      /* published tiers; the holder writes, anyone reads */
    counter inbox;                              /* insertions that came through it */
} half;

struct art_runq {
    half halves[HALVES];
    alignas(CACHE_LINE) lane lanes[ART_TIERS];
    /* written at creation only */
    alignas(CACHE_LINE) uint32_t max_tenants;
    uint32_t items_max, tenant_items_max;
    uint64_t bytes_max, tenant_bytes_max;
    account *accounts; /* by tenant, then tier */
    int64_t aging_over; /* a promotion is due when more picks than that passed over a tier */
    uint64_t aging_spacing;
    uint64_t aging_wait_over_ns[ART_TIERS]; /* the same for its oldest task's wait; all ones: never */
    uint32_t tier0_share_pct;
    uint64_t bucket_width_ns;
    int64_t quantum_ns, pick_charge_ns;
    _Atomic uint64_t *tenant_held; /* per tenant, packed as `held` */
    /* written now and then, by anyone */
    alignas(CACHE_LINE) _Atomic uint64_t held; /* bits 40-63 items, 0-39 bytes: one CAS judges both bounds */
    _Atomic uint64_t refusals;
    _Atomic uint64_t busy;
    counter tier0_capped; /* under half 1's token */
    _Atomic uint32_t slots;
    /* tier-0 share: charges write, picks read; all relaxed, numbers only */
    alignas(CACHE_LINE) _Atomic uint64_t tier0_ns; /* all ever charged, free-running */
    _Atomic uint64_t tier0_safe_ns;                /* below this total the cap cannot be reached, whatever the time */
    alignas(CACHE_LINE) _Atomic uint64_t lower_ns[2]; /* the same of tiers 1 and 2: what may pass a lower one over */
    alignas(CACHE_LINE) _Atomic uint64_t buckets[BUCKETS]; /* bits 40-63 number of the bucket, 0-39 tier-0 slot ns */
};

/* ---------------------------------------------------------------- waiting a little */

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` is a no-op on most cores */
#endif
}

static inline void back_off(unsigned round)
{
#ifdef ART_RUNQ_NO_SPIN
    (void)round;
    ART_RUNQ_WINDOW();
#else
    for (unsigned i = 0; i < 1u << round; i++)
        pause_cpu();
#endif
}

/* ---------------------------------------------------------------- token, inbox, mask */

static inline unsigned half_of(uint32_t tier)
{
    return tier != 0;
}

static inline bool token_try(half *h)
{
    /* relaxed look first: the exchange would take the line from the holder for nothing */
    if (atomic_load_explicit(&h->token, memory_order_relaxed) != 0)
        return false;
    bool got = atomic_exchange_explicit(&h->token, 1, memory_order_acquire) == 0; /* [TOKEN] */
    ART_RUNQ_WINDOW();
    return got;
}

static inline void token_release(half *h)
{
    ART_RUNQ_WINDOW();
    atomic_store_explicit(&h->token, 0, memory_order_release); /* [TOKEN] */
}

static ASIDE bool token_spin_on(half *h, unsigned rounds)
{
    for (unsigned round = 0; round < rounds; round++) {
        back_off(round);
        if (token_try(h))
            return true;
    }
    return false;
}

static inline bool token_spin(half *h, unsigned rounds)
{
    return __builtin_expect(token_try(h), 1) || token_spin_on(h, rounds);
}

static void token_wait(half *h)
{
    while (!token_spin(h, PICK_SPIN_ROUNDS))
        sched_yield(); /* the holder may be off this very CPU */
}

/* Tiers with queued work. */
static inline uint32_t half_bits(const half *h)
{
    uint64_t in = atomic_load_explicit(&h->in, memory_order_acquire); /* [SEEN]; must come before the mask */
    ART_RUNQ_WINDOW();
    return (uint32_t)(in >> TIER_SHIFT) | atomic_load_explicit(&h->mask, memory_order_acquire); /* [MASK] */
}

static inline void mask_set(half *h, uint32_t bits)
{
    uint32_t mask = atomic_load_explicit(&h->mask, memory_order_relaxed); /* only the holder writes */
    if ((mask & bits) != bits)
        atomic_store_explicit(&h->mask, mask | bits, memory_order_release); /* [MASK] */
}

static inline void mask_clear(half *h, uint32_t bits)
{
    uint32_t mask = atomic_load_explicit(&h->mask, memory_order_relaxed);
    atomic_store_explicit(&h->mask, mask & ~bits, memory_order_release); /* [MASK] */
}

static inline void where_set(art_task *task, uint8_t where)
{
    /* relaxed: whoever acts on it takes the token and looks again */
    __atomic_store_n(&task->q_where, where, __ATOMIC_RELAXED);
}

static inline uint8_t where_get(const art_task *task)
{
    return __atomic_load_n(&task->q_where, __ATOMIC_RELAXED);
}

static ASIDE void inbox_push(half *h, unsigned index, art_task *task)
{
    uint64_t self = (uint64_t)(uintptr_t)task;
    CHECK((self & ~PTR_MASK) == 0);
    uint64_t bit = UINT64_C(1) << (TIER_SHIFT + task->tier);
    where_set(task, IN_INBOX(index));
    uint64_t seen = atomic_load_explicit(&h->in, memory_order_relaxed); /* only linked to, never followed here */
    do {
        task->q_next = (art_task *)(uintptr_t)(seen & PTR_MASK);
        ART_RUNQ_WINDOW();
        /* A word that was taken and came back equal is the same stack top and the same tiers: no ABA to fear.
         * After success the task may be anywhere; it is not touched again. */
    } while (!atomic_compare_exchange_weak_explicit(&h->in, &seen, (seen & ~PTR_MASK) | bit | self, memory_order_release,
                                                    memory_order_relaxed)); /* [INBOX] */
}

/* ---------------------------------------------------------------- lists (token held) */

static inline account *account_of(const art_runq *q, const art_task *task, uint32_t tier)
{
    return &q->accounts[(size_t)task->tenant * ART_TIERS + tier];
}

static inline uint64_t tier0_picks(const art_runq *q)
{
    return look(&q->lanes[0].pops); /* relaxed: late by a pick is fine, it is counted at the next look */
}

/* Picks of higher tiers than this one (2 or 3), of which picks0 of tier 0. Of tiers 0 and 1 it is a number without a
 * meaning, had without a branch and without a look at the other half's lines. */
static inline uint64_t picks_above(const art_runq *q, uint32_t tier, uint64_t picks0)
{
    unsigned index = half_of(tier);
    return picks0 + look(&q->lanes[index].pops) + (look(&q->lanes[index * 2].pops) & -(uint64_t)(tier == 3));
}

/* Slot time charged to higher tiers than this one (2 or 3). Relaxed: numbers, late by a slice at most. */
static ASIDE uint64_t slot_ns_above(const art_runq *q, uint32_t tier)
{
    uint64_t ns = atomic_load_explicit(&q->tier0_ns, memory_order_relaxed) +
                  atomic_load_explicit(&q->lower_ns[0], memory_order_relaxed);
    return tier == 3 ? ns + atomic_load_explicit(&q->lower_ns[1], memory_order_relaxed) : ns;
}

/* The tier has work from now on, or none: picks do or do not pass over it. */
static inline void lane_begin(art_runq *q, half *h, lane *l, uint32_t tier, uint64_t picks0)
{
    mask_set(h, 1u << tier);
    picks0 = (int64_t)(picks0 - l->idle0) > 0 ? picks0 : l->idle0; /* it may have been read before that */
    l->since = picks_above(q, tier, picks0) - l->since;
    if (tier >= 2)
        l->since_ns = slot_ns_above(q, tier) - l->since_ns;
}

static inline void lane_end(art_runq *q, half *h, lane *l, uint32_t tier, uint64_t picks0)
{
    mask_clear(h, 1u << tier);
    l->since = picks_above(q, tier, picks0) - l->since;
    if (tier >= 2)
        l->since_ns = slot_ns_above(q, tier) - l->since_ns;
    l->idle0 = picks0;
}

/* A ring with its ends in the lane: no branches, which would be coin tosses to the CPU. */
static inline void age_append(lane *l, art_task *task)
{
    art_task_age *last = l->age.prev;
    task->q_age = (art_task_age){&l->age, last, task->enqueued_ns};
    last->next = &task->q_age;
    l->age.prev = &task->q_age;
}

static inline void age_unlink(art_task *task)
{
    task->q_age.next->prev = task->q_age.prev;
    task->q_age.prev->next = task->q_age.next;
}

/* Takes new charges into the deficit. */
static inline void absorb(account *a)
{
    uint64_t charged = atomic_load_explicit(&a->charged_ns, memory_order_relaxed);
    uint64_t fresh = charged - a->charged_seen_ns;
    if (fresh) {
        a->charged_seen_ns = charged;
        if (fresh > (uint64_t)DEBT_MAX_NS)
            fresh = (uint64_t)DEBT_MAX_NS;
        a->deficit_ns -= (int64_t)fresh;
        if (a->deficit_ns < -DEBT_MAX_NS)
            a->deficit_ns = -DEBT_MAX_NS;
    }
}

/* `interrupted`: it was preempted, so it goes first and its tenant goes on with its turn. */
static HOT void link_task(art_runq *q, half *h, art_task *task, uint32_t tier, uint64_t picks0, bool interrupted)
{
    lane *l = &q->lanes[tier];
    account *a = account_of(q, task, tier);
    art_task *head = a->head, *tail = a->tail;
    if (interrupted) {
        task->q_prev = NULL;
        task->q_next = head;
        *(head ? &head->q_prev : &a->tail) = task;
        a->head = task;
    } else {
        task->q_next = NULL;
        task->q_prev = tail;
        *(tail ? &tail->q_next : &a->head) = task;
        a->tail = task;
    }
    age_append(l, task);
    if (head)
        return;
    if (!interrupted) { /* a new spell of work: debt stays, credit does not */
        a->in_turn = false;
        absorb(a);
        a->deficit_ns = a->deficit_ns < 0 ? a->deficit_ns : 0;
    }
    account *at = l->ring;
    if (!at) {
        a->next = a->prev = a;
        l->ring = a;
        lane_begin(q, h, l, tier, picks0);
    } else {
        a->next = at;
        a->prev = at->prev;
        at->prev->next = a;
        at->prev = a;
        if (interrupted)
            l->ring = a;
    }
}

/* Of the first of its tenant `prev` is known to be NULL. */
static HOT void unlink_task(art_runq *q, half *h, art_task *task, account *a, uint32_t tier, art_task *prev,
                            uint64_t picks0)
{
    lane *l = &q->lanes[tier];
    art_task *next = task->q_next;
    *(prev ? &prev->q_next : &a->head) = next;
    *(next ? &next->q_prev : &a->tail) = prev;
    age_unlink(task);
    if (a->head)
        return;
    if (a->next == a) {
        l->ring = NULL;
        lane_end(q, h, l, tier, picks0);
    } else {
        account *after = a->next;
        a->prev->next = after;
        after->prev = a->prev;
        l->ring = l->ring == a ? after : l->ring;
        __builtin_prefetch(after->head, 1); /* the next pick's task, and the neighbour it will unlink from */
        __builtin_prefetch(after->next, 1);
    }
}

static HOT void insert(art_runq *q, half *h, unsigned index, art_task *task, uint64_t picks0, bool interrupted)
{
    uint32_t tier = task->tier;
    link_task(q, h, task, tier, picks0, interrupted);
    bump(&q->lanes[tier].pushes, 1);
    where_set(task, IN_HALF(index));
}

static ASIDE void drain_word(art_runq *q, half *h, unsigned index, uint64_t word)
{
    do {
        ART_RUNQ_WINDOW();
        mask_set(h, (uint32_t)(word >> TIER_SHIFT)); /* publish before taking */
        ART_RUNQ_WINDOW();
    } while (!atomic_compare_exchange_weak_explicit(&h->in, &word, 0, memory_order_acq_rel,
                                                    memory_order_relaxed)); /* [INBOX] acquire, [SEEN] release */
    ART_RUNQ_WINDOW();
    art_task *newest = (art_task *)(uintptr_t)(word & PTR_MASK), *oldest = NULL;
    while (newest) {
        art_task *next = newest->q_next;
        newest->q_next = oldest;
        oldest = newest;
        newest = next;
    }
    while (oldest) {
        art_task *next = oldest->q_next;
        insert(q, h, index, oldest, oldest->q_age.stamp, false);
        bump(&h->inbox, 1);
        oldest = next;
    }
}

static inline void drain(art_runq *q, half *h, unsigned index)
{
    uint64_t word = atomic_load_explicit(&h->in, memory_order_relaxed); /* zero needs nothing; else the CAS acquires */
    if (__builtin_expect(word != 0, 0))
        drain_word(q, h, index, word);
}

/* ---------------------------------------------------------------- fair order (token held, lane not empty) */

static inline int64_t turn_ns(const art_runq *q, const account *a)
{
    return q->quantum_ns * (int64_t)atomic_load_explicit(&a->weight, memory_order_relaxed); /* < 2^37 * 2^20 */
}

/* A whole round found nobody in credit: give everybody at once the rounds in which that would stay so. */
static ASIDE void skip_rounds(art_runq *q, lane *l)
{
    int64_t rounds = INT64_MAX;
    account *a = l->ring;
    do {
        int64_t needed = -a->deficit_ns / turn_ns(q, a);
        rounds = needed < rounds ? needed : rounds;
        a = a->next;
    } while (a != l->ring);
    do {
        int64_t credit;
        if (__builtin_mul_overflow(rounds, turn_ns(q, a), &credit) || credit > -a->deficit_ns)
            credit = -a->deficit_ns; /* the weight was raised in between */
        a->deficit_ns += credit;
        a = a->next;
    } while (a != l->ring);
}

/* Whose turn it is: surplus round robin. A turn starts with quantum * weight and lasts while the deficit is positive;
 * slices are charged when they have run, so a turn may overshoot and the debt is carried. At most two rounds. */
static HOT account *fair_head(art_runq *q, lane *l)
{
    account *first = l->ring;
    for (;;) {
        account *a = l->ring;
        absorb(a);
        a->deficit_ns += turn_ns(q, a) & -(int64_t)!a->in_turn;
        a->in_turn = true;
        if (__builtin_expect(a->deficit_ns > 0, 1))
            return a;
        a->in_turn = false;
        l->ring = a->next;
        if (l->ring == first)
            skip_rounds(q, l);
    }
}

/* ---------------------------------------------------------------- law 2 (token of half 1 held) */

static inline bool due_by_count(const art_runq *q, uint32_t tier, uint64_t picks0)
{
    return (int64_t)(picks_above(q, tier, picks0) - q->lanes[tier].since) > q->aging_over;
}

static inline bool due_by_wait(const art_runq *q, uint32_t tier, uint64_t now_ns)
{
    uint64_t since = q->lanes[tier].age.next->stamp;
    return (uint32_t)(now_ns >= since) & (uint32_t)(now_ns - since > q->aging_wait_over_ns[tier]);
}

/* What a promotion by count is worth: the mean of the `picks` that passed the tier over since the last one and had `slot_ns`
 * together, so that one in so many picks is a lower tier's, and is like the others. Of short ones it is more, as stopping and
 * continuing a process has its price, but never more than all of theirs. A pick counts as it does for tenants. */
static uint32_t passed_us(const art_runq *q, uint64_t picks, uint64_t slot_ns)
{
    uint64_t least_ns = picks * (uint64_t)q->pick_charge_ns;
    uint64_t all_ns = slot_ns > least_ns ? slot_ns : least_ns, mean_ns = all_ns / picks;
    uint64_t some_ns = all_ns < PROMOTED_MIN_NS ? all_ns : PROMOTED_MIN_NS;
    uint64_t us = (mean_ns > some_ns ? mean_ns : some_ns) / 1000 + 1;
    return us < ART_PROMOTED_QUANTUM ? (uint32_t)us : ART_PROMOTED_QUANTUM - 1;
}

static ASIDE void promote(art_runq *q, uint32_t tier, uint64_t now_ns, uint64_t picks0)
{
    lane *l = &q->lanes[tier];
    half *h = &q->halves[1];
    uint64_t picks = picks0 + look(&q->lanes[1].pops) + look(&q->lanes[2].pops) + look(&q->lanes[3].pops);
    bool by_count = due_by_count(q, tier, picks0);
    /* The wait rule may only come sooner than the count rule when picks pass over nobody (own-tier or slow picks): it
     * keeps the same distance from the last promotion, counted in picks of any kind. */
    if (!l->ring || (!by_count && !(due_by_wait(q, tier, now_ns) && picks - l->promoted_at >= q->aging_spacing)))
        return;

    account *a = fair_head(q, l);
    art_task *task = a->head;
    a->deficit_ns -= q->quantum_ns; /* a promotion uses up a turn of weight 1: promotions too are shared by weight */
    uint64_t above = picks_above(q, tier, picks0), above_ns = slot_ns_above(q, tier);
    uint64_t passed = above - l->since, passed_ns = above_ns - l->since_ns;
    l->since = above;
    l->since_ns = above_ns;
    l->promoted_at = picks;
    mask_set(h, 1u << 1); /* before the tier's own bit may go: it shows in one of them all the time */
    unlink_task(q, h, task, a, tier, NULL, picks0);
    task->aged_from = (uint8_t)tier;
    task->promoted = true;
    task->promoted_us = by_count ? passed_us(q, passed, passed_ns) : ART_PROMOTED_QUANTUM;
    task->tier = 1;
    link_task(q, h, task, 1, picks0, false);
    bump(by_count ? &l->promotions_count : &l->promotions_wait, 1);
}

static inline uint32_t due(const art_runq *q, uint32_t tier, uint64_t now_ns, uint64_t picks0)
{
    return (uint32_t)due_by_count(q, tier, picks0) | (uint32_t)due_by_wait(q, tier, now_ns);
}

/* ---------------------------------------------------------------- picking (token held) */

static HOT art_task *pick_tier(art_runq *q, half *h, uint32_t tier, uint64_t picks0)
{
    lane *l = &q->lanes[tier];
    account *a = fair_head(q, l);
    art_task *task = a->head;
    a->deficit_ns -= q->pick_charge_ns;
    unlink_task(q, h, task, a, tier, NULL, picks0);
    bump(&l->pops, 1);
    where_set(task, WHERE_NONE);
    return task;
}

/* The best of tiers 1..tier_max, or NULL. */
static HOT art_task *pick_lower(art_runq *q, uint32_t tier_max, uint64_t now_ns)
{
    half *h = &q->halves[1];
    uint32_t allowed = ((2u << tier_max) - 1) & ~1u;
    uint32_t mask = atomic_load_explicit(&h->mask, memory_order_relaxed); /* own half, token held */
    if ((mask & allowed) == 0)
        return NULL;
    uint64_t picks0 = 0;
    if (mask & 0xcu) {
        picks0 = tier0_picks(q);
        uint32_t due2 = due(q, 2, now_ns, picks0) & mask >> 2, due3 = due(q, 3, now_ns, picks0) & mask >> 3;
        if (__builtin_expect(due2 | due3, 0)) {
            promote(q, 2, now_ns, picks0);
            promote(q, 3, now_ns, picks0);
            mask = atomic_load_explicit(&h->mask, memory_order_relaxed);
        }
    }
    return pick_tier(q, h, (uint32_t)__builtin_ctz(mask), picks0);
}

/* ---------------------------------------------------------------- tier-0 share */

/* Looks at the buckets, and notes how much more tier 0 can be charged before it is worth looking again: time alone only
 * takes from what the window holds. */
static ASIDE bool share_exceeded(art_runq *q, uint64_t now_ns)
{
    uint64_t total = atomic_load_explicit(&q->tier0_ns, memory_order_relaxed); /* before the buckets: errs on the safe side */
    uint64_t current = now_ns / q->bucket_width_ns, used_ns = 0;
    for (unsigned i = 0; i < BUCKETS; i++) {
        uint64_t bucket = atomic_load_explicit(&q->buckets[i], memory_order_relaxed);
        uint64_t age_buckets = (current - (bucket >> BUCKET_NS_BITS)) & (UINT64_MAX >> BUCKET_NS_BITS);
        if (age_buckets < BUCKETS)
            used_ns += bucket & BUCKET_NS_MASK;
    }
    uint64_t slots = atomic_load_explicit(&q->slots, memory_order_relaxed);
    uint64_t least_ns = (BUCKETS - 1) * q->bucket_width_ns, judged_ns = least_ns + now_ns % q->bucket_width_ns;
    uint64_t limit_ns = q->tier0_share_pct * slots * least_ns / 100; /* < 2^7 * 2^10 * 2^33 */
    if (used_ns < limit_ns)
        atomic_store_explicit(&q->tier0_safe_ns, total + (limit_ns - used_ns), memory_order_relaxed);
    return used_ns * 100 > q->tier0_share_pct * slots * judged_ns; /* < 2^43 * 2^7 on either side */
}

static inline bool share_above(art_runq *q, uint64_t now_ns)
{
    if (q->tier0_share_pct >= 100)
        return false;
    uint64_t left = atomic_load_explicit(&q->tier0_safe_ns, memory_order_relaxed) -
                    atomic_load_explicit(&q->tier0_ns, memory_order_relaxed);
    if (__builtin_expect((int64_t)left > 0, 1))
        return false;
    return share_exceeded(q, now_ns);
}

bool art_runq_tier0_capped(art_runq *q, uint64_t now_ns)
{
    return share_above(q, now_ns);
}

static void share_add(art_runq *q, uint64_t number, uint64_t ns)
{
    _Atomic uint64_t *bucket = &q->buckets[number % BUCKETS];
    uint64_t tag = (number & (UINT64_MAX >> BUCKET_NS_BITS)) << BUCKET_NS_BITS;
    uint64_t seen = atomic_load_explicit(bucket, memory_order_relaxed), want;
    do { /* relaxed: numbers only */
        uint64_t ahead = (seen - tag) >> BUCKET_NS_BITS;
        uint64_t sum = ns;
        if (ahead == 0)
            sum += seen & BUCKET_NS_MASK;
        else if (ahead < LATE_BUCKETS && (seen & BUCKET_NS_MASK) != 0)
            return; /* the bucket has gone round meanwhile: too late to count */
        want = tag | (sum < BUCKET_NS_MASK ? sum : BUCKET_NS_MASK);
    } while (!atomic_compare_exchange_weak_explicit(bucket, &seen, want, memory_order_relaxed, memory_order_relaxed));
}

void art_runq_charge(art_runq *q, art_task *task, uint64_t slot_ns, uint64_t now_ns)
{
    CHECK(task->tenant < q->max_tenants && task->tier < ART_TIERS);
    if (slot_ns > CHARGE_MAX_NS)
        slot_ns = CHARGE_MAX_NS;
    atomic_fetch_add_explicit(&account_of(q, task, task->tier)->charged_ns, slot_ns, memory_order_relaxed);
    if (task->tier != 0) {
        if (task->tier != 3)
            atomic_fetch_add_explicit(&q->lower_ns[task->tier - 1], slot_ns, memory_order_relaxed);
        return;
    }
    uint64_t width = q->bucket_width_ns, end = now_ns, charged_ns = slot_ns;
    slot_ns = q->tier0_share_pct < 100 ? slot_ns : 0;
    for (unsigned i = 0; i < BUCKETS && slot_ns != 0; i++) { /* newest part first; what is out of the window is forgotten */
        uint64_t number = (end - (end != 0)) / width, part = end - number * width;
        part = part < slot_ns ? part : slot_ns;
        if (part == 0)
            break;
        share_add(q, number, part);
        end -= part;
        slot_ns -= part;
    }
    atomic_fetch_add_explicit(&q->tier0_ns, charged_ns, memory_order_relaxed);
}

/* ---------------------------------------------------------------- push */

void art_runq_push(art_runq *q, art_task *task, uint64_t now_ns)
{
    CHECK(task->tenant < q->max_tenants && task->tier < ART_TIERS && where_get(task) == WHERE_NONE);
    unsigned index = half_of(task->tier);
    half *h = &q->halves[index];
    task->enqueued_ns = now_ns;
    __builtin_prefetch(account_of(q, task, task->tier), 1); /* with many tenants: fetched while the token is */
#ifdef ART_RUNQ_NO_SPIN
    bool got = token_try(h);
#else
    bool got = token_spin(h, PUSH_SPIN_ROUNDS);
#endif
    if (__builtin_expect(got, 1)) {
        drain(q, h, index); /* first: what is in the inbox came before */
        insert(q, h, index, task, tier0_picks(q), false);
        token_release(h);
    } else {
        task->q_age.stamp = tier0_picks(q);
        inbox_push(h, index, task);
    }
}

/* ---------------------------------------------------------------- picks */

static ASIDE void note_busy(art_runq *q)
{
    atomic_fetch_add_explicit(&q->busy, 1, memory_order_relaxed);
}

typedef enum outcome { TOOK, EMPTY, BUSY, TIER0_CAME } outcome;

/* Tier 0's best. EMPTY: somebody else had it. */
static outcome take_tier0(art_runq *q, art_task **out)
{
    half *h = &q->halves[0];
    if (!token_spin(h, PICK_SPIN_ROUNDS))
        return half_bits(h) ? BUSY : EMPTY; /* the holder took what there was, or is asleep on it */
    drain(q, h, 0);
    *out = q->lanes[0].ring ? pick_tier(q, h, 0, 0) : NULL;
    token_release(h);
    return *out ? TOOK : EMPTY;
}

/* The token of half 1 with its inbox drained and tier 0 looked at once more. `tier0_waits`: tier 0 is capped. */
static outcome lower_begin(art_runq *q, bool tier0_waits)
{
    half *h = &q->halves[1], *h0 = &q->halves[0];
    for (unsigned round = 0; !token_try(h); round++) {
        if (!tier0_waits && half_bits(h0))
            return TIER0_CAME;
        if (round == PICK_SPIN_ROUNDS)
            return BUSY;
        back_off(round);
    }
    if (!tier0_waits && half_bits(h0)) {
        token_release(h);
        return TIER0_CAME;
    }
    drain(q, h, 1);
    return TOOK;
}

static void lower_end(art_runq *q, const art_task *taken, bool tier0_waits)
{
    if (taken && tier0_waits && half_bits(&q->halves[0]))
        bump(&q->tier0_capped, 1);
    token_release(&q->halves[1]);
}

static outcome take_lower(art_runq *q, uint32_t tier_max, uint64_t now_ns, bool tier0_waits, art_task **out)
{
    outcome got = lower_begin(q, tier0_waits);
    if (got != TOOK)
        return got;
    *out = pick_lower(q, tier_max, now_ns);
    lower_end(q, *out, tier0_waits);
    return *out ? TOOK : EMPTY;
}

static ASIDE art_task *take_anyhow(art_runq *q, uint64_t now_ns, bool *busy)
{
    art_task *task = NULL;
    outcome got;
    do {
        got = EMPTY;
        if (half_bits(&q->halves[0])) {
            if (half_bits(&q->halves[1]) && share_above(q, now_ns) &&
                take_lower(q, 3, now_ns, true, &task) == TOOK)
                break;
            got = take_tier0(q, &task);
            if (got != EMPTY)
                break;
        }
        if (half_bits(&q->halves[1]))
            got = take_lower(q, 3, now_ns, false, &task);
        /* each time round a new tier-0 task has come, so somebody gets on */
    } while (got == TIER0_CAME);
    *busy = got == BUSY;
    if (__builtin_expect(*busy, 0))
        note_busy(q);
    return task;
}

/* The short way while the token of the best half is free and tier 0 is below its cap; else all over again by the long
 * one. */
art_task *art_runq_take(art_runq *q, uint64_t now_ns, bool *busy)
{
    half *h0 = &q->halves[0], *h1 = &q->halves[1];
    art_task *task = NULL;
    *busy = false;
    if (half_bits(h0)) {
        if (__builtin_expect((half_bits(h1) && share_above(q, now_ns)) || !token_try(h0), 0))
            return take_anyhow(q, now_ns, busy);
        drain(q, h0, 0);
        if (q->lanes[0].ring)
            task = pick_tier(q, h0, 0, 0);
        token_release(h0);
    } else if (half_bits(h1)) {
        if (__builtin_expect(!token_try(h1), 0))
            return take_anyhow(q, now_ns, busy);
        if (__builtin_expect(!half_bits(h0), 1)) { /* tier 0 once more */
            drain(q, h1, 1);
            task = pick_lower(q, 3, now_ns);
        }
        token_release(h1);
    } else {
        return NULL;
    }
    return __builtin_expect(task != NULL, 1) ? task : take_anyhow(q, now_ns, busy);
}

art_task *art_runq_pop(art_runq *q, uint64_t now_ns)
{
    bool busy;
    return art_runq_take(q, now_ns, &busy);
}

/* Requeues a preempted task. A preempted task's place is only kept if the token is free; an inbox has no first place. */
static void put_back(art_runq *q, art_task *cur, uint64_t now_ns)
{
    half *h = &q->halves[1];
    cur->enqueued_ns = now_ns;
    if (__builtin_expect(token_spin(h, PUSH_SPIN_ROUNDS), 1)) {
        drain(q, h, 1);
        insert(q, h, 1, cur, tier0_picks(q), true);
        token_release(h);
    } else {
        cur->q_age.stamp = tier0_picks(q);
        inbox_push(h, 1, cur);
    }
}

art_task *art_runq_preempt(art_runq *q, art_task *cur, uint64_t now_ns)
{
    CHECK(cur->tenant < q->max_tenants && cur->tier < ART_TIERS && where_get(cur) == WHERE_NONE);
    if ((art_runq_tiers(q) & ((1u << cur->tier) - 1)) == 0)
        return NULL;
    bool tier0_waits = share_above(q, now_ns); /* cur itself is the lower work it waits behind */
    for (;;) {
        art_task *task = NULL;
        outcome got;
        if (!tier0_waits && half_bits(&q->halves[0])) {
            got = take_tier0(q, &task);
            if (got == TOOK) {
                put_back(q, cur, now_ns);
                return task;
            }
            if (got == BUSY) {
                note_busy(q);
                return NULL;
            }
        }
        if (cur->tier < 2 || (half_bits(&q->halves[1]) & ((1u << cur->tier) - 1)) == 0)
            return NULL;
        got = lower_begin(q, tier0_waits);
        if (got == TIER0_CAME)
            continue;
        if (got == BUSY) {
            note_busy(q);
            return NULL;
        }
        task = pick_lower(q, cur->tier - 1u, now_ns);
        if (task) {
            cur->enqueued_ns = now_ns;
            insert(q, &q->halves[1], 1, cur, tier0_picks(q), true);
        }
        lower_end(q, task, tier0_waits);
        return task;
    }
}

static art_task *yield_tier0(art_runq *q, art_task *cur, uint64_t now_ns)
{
    art_task *task = NULL;
    if (half_bits(&q->halves[1]) && share_above(q, now_ns) && take_lower(q, 3, now_ns, true, &task) == TOOK) {
        art_runq_push(q, cur, now_ns);
        return task;
    }
    half *h = &q->halves[0];
    if (!token_spin(h, PICK_SPIN_ROUNDS)) {
        note_busy(q);
        return cur;
    }
    drain(q, h, 0);
    cur->enqueued_ns = now_ns;
    insert(q, h, 0, cur, 0, false);
    task = pick_tier(q, h, 0, 0);
    token_release(h);
    return task;
}

art_task *art_runq_yield(art_runq *q, art_task *cur, uint64_t now_ns)
{
    CHECK(cur->tenant < q->max_tenants && cur->tier < ART_TIERS && where_get(cur) == WHERE_NONE);
    if (cur->tier == 0)
        return yield_tier0(q, cur, now_ns);
    for (;;) {
        art_task *task = NULL;
        bool tier0_waits = false;
        if (half_bits(&q->halves[0])) {
            tier0_waits = share_above(q, now_ns);
            outcome got = tier0_waits ? EMPTY : take_tier0(q, &task);
            if (got == TOOK) {
                art_runq_push(q, cur, now_ns);
                return task;
            }
            if (got == BUSY)
                break;
        }
        outcome got = lower_begin(q, tier0_waits);
        if (got == TIER0_CAME)
            continue;
        if (got == BUSY)
            break;
        cur->enqueued_ns = now_ns;
        insert(q, &q->halves[1], 1, cur, tier0_picks(q), false);
        task = pick_lower(q, 3, now_ns);
        lower_end(q, task, tier0_waits);
        return task;
    }
    note_busy(q);
    return cur;
}

/* ---------------------------------------------------------------- cancel */

static int cancel(art_runq *q, art_task *task, bool wait)
{
    uint8_t where = where_get(task);
    if (where == WHERE_NONE)
        return 0;
    unsigned index = where == WHERE_INBOX1 || where == WHERE_HALF1;
    half *h = &q->halves[index];
    if (wait)
        token_wait(h);
    else if (!token_spin(h, PUSH_SPIN_ROUNDS))
        return ART_EBUSY;
    drain(q, h, index);
    /* Not in this half's lists now, although it was in this half before: it was picked in between, or its push has not
     * returned. Either way it was not queued at some moment of this call. */
    bool here = where_get(task) == IN_HALF(index);
    if (here) {
        uint32_t tier = task->tier;
        unlink_task(q, h, task, account_of(q, task, tier), tier, task->q_prev, tier0_picks(q));
        bump(&q->lanes[tier].cancels, 1);
        where_set(task, WHERE_NONE);
    }
    token_release(h);
    return here;
}

bool art_runq_cancel(art_runq *q, art_task *task)
{
    return cancel(q, task, true) == 1;
}

int art_runq_try_cancel(art_runq *q, art_task *task)
{
    return cancel(q, task, false);
}

/* ---------------------------------------------------------------- admission */

#define HELD_BYTES_BITS 40
#define HELD_BYTES_MAX ((UINT64_C(1) << HELD_BYTES_BITS) - 1)
#define HELD_ITEMS_MAX ((UINT64_C(1) << (64 - HELD_BYTES_BITS)) - 1)

static bool hold(_Atomic uint64_t *held, uint64_t bytes, uint64_t items_max, uint64_t bytes_max)
{
    /* relaxed throughout: a count, publishes nothing */
    uint64_t seen = atomic_load_explicit(held, memory_order_relaxed);
    do {
        uint64_t held_bytes = seen & HELD_BYTES_MAX;
        if (seen >> HELD_BYTES_BITS >= items_max || held_bytes > bytes_max || bytes > bytes_max - held_bytes)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(held, &seen, seen + (UINT64_C(1) << HELD_BYTES_BITS) + bytes,
                                                    memory_order_relaxed, memory_order_relaxed));
    return true;
}

static void unhold(_Atomic uint64_t *held, uint64_t bytes)
{
    uint64_t seen = atomic_fetch_sub_explicit(held, (UINT64_C(1) << HELD_BYTES_BITS) + bytes, memory_order_relaxed);
    CHECK(seen >> HELD_BYTES_BITS != 0 && (seen & HELD_BYTES_MAX) >= bytes);
}

int art_runq_admit(art_runq *q, uint32_t tenant, uint64_t bytes)
{
    if (tenant >= q->max_tenants)
        return ART_EINVAL;
    /* The tenant's own bound first: a full tenant must not push others over theirs even for a moment. */
    if (hold(&q->tenant_held[tenant], bytes, q->tenant_items_max, q->tenant_bytes_max)) {
        if (hold(&q->held, bytes, q->items_max, q->bytes_max))
            return 0;
        unhold(&q->tenant_held[tenant], bytes);
    }
    atomic_fetch_add_explicit(&q->refusals, 1, memory_order_relaxed);
    return ART_EFULL;
}

void art_runq_release(art_runq *q, uint32_t tenant, uint64_t bytes)
{
    CHECK(tenant < q->max_tenants && bytes <= HELD_BYTES_MAX);
    unhold(&q->held, bytes);
    unhold(&q->tenant_held[tenant], bytes);
}

/* ---------------------------------------------------------------- looking */

uint32_t art_runq_tiers(const art_runq *q)
{
    return half_bits(&q->halves[0]) | half_bits(&q->halves[1]);
}

/* Promotions out of a tier. */
static inline uint64_t promotions(const lane *l)
{
    return look(&l->promotions_count) + look(&l->promotions_wait);
}

/* Without the token it may be off by what happens meanwhile. */
static uint64_t queued(const art_runq *q, uint32_t tier)
{
    const lane *l = &q->lanes[tier];
    uint64_t out = look(&l->pops) + look(&l->cancels) + promotions(l);
    uint64_t in = look(&l->pushes) + (tier == 1 ? promotions(&q->lanes[2]) + promotions(&q->lanes[3]) : 0);
    return (int64_t)(in - out) > 0 ? in - out : 0;
}

void art_runq_statistics(art_runq *q, art_runq_stats *out)
{
    memset(out, 0, sizeof *out);
    for (unsigned index = 0; index < HALVES; index++) {
        half *h = &q->halves[index];
        bool got = token_spin(h, PUSH_SPIN_ROUNDS);
        if (got)
            drain(q, h, index);
        for (uint32_t t = index; t < (index ? ART_TIERS : 1u); t++) {
            const lane *l = &q->lanes[t];
            out->queued[t] = queued(q, t);
            out->pushes[t] = look(&l->pushes);
            out->pops[t] = look(&l->pops);
            out->cancels += look(&l->cancels);
            out->promotions_count[t] = look(&l->promotions_count);
            out->promotions_wait[t] = look(&l->promotions_wait);
        }
        out->inbox += look(&h->inbox);
        if (got)
            token_release(h);
    }
    out->tier0_capped = look(&q->tier0_capped);
    out->refusals = atomic_load_explicit(&q->refusals, memory_order_relaxed);
    out->busy = atomic_load_explicit(&q->busy, memory_order_relaxed);
    uint64_t held = atomic_load_explicit(&q->held, memory_order_relaxed);
    out->admitted_items = held >> HELD_BYTES_BITS;
    out->admitted_bytes = held & HELD_BYTES_MAX;
}

uint64_t art_runq_oldest_ns(art_runq *q, uint32_t tier)
{
    if (tier >= ART_TIERS)
        return 0;
    lane *l = &q->lanes[tier];
    unsigned index = half_of(tier);
    half *h = &q->halves[index];
    if (!token_spin(h, PUSH_SPIN_ROUNDS))
        return look(&l->oldest_ns);
    drain(q, h, index);
    uint64_t oldest = l->ring ? l->age.next->stamp : 0;
    atomic_store_explicit(&l->oldest_ns, oldest, memory_order_relaxed);
    token_release(h);
    return oldest;
}

void art__runq_verify(art_runq *q)
{
    for (unsigned index = 0; index < HALVES; index++) {
        half *h = &q->halves[index];
        token_wait(h);
        drain(q, h, index);
        uint32_t mask = 0;
        for (uint32_t t = index; t < (index ? ART_TIERS : 1u); t++) {
            lane *l = &q->lanes[t];
            uint64_t by_age = 0, by_tenant = 0, ring = 0;
            for (art_task_age *at = l->age.next; at != &l->age; at = at->next, by_age++) {
                art_task *task = (art_task *)((char *)at - offsetof(art_task, q_age));
                CHECK(task->tier == t && where_get(task) == IN_HALF(index));
                CHECK(at->next->prev == at && at->stamp == task->enqueued_ns);
            }
            if (l->ring) {
                account *a = l->ring;
                do {
                    CHECK(a->head && a->next->prev == a && a->tail->q_next == NULL);
                    for (art_task *task = a->head; task; task = task->q_next, by_tenant++)
                        CHECK(account_of(q, task, t) == a && (task->q_next ? task->q_next->q_prev : a->tail) == task);
                    a = a->next;
                    ring++;
                } while (a != l->ring);
            }
            CHECK(by_age == by_tenant && by_age == queued(q, t));
            for (uint32_t tenant = 0; tenant < q->max_tenants; tenant++)
                ring -= q->accounts[(size_t)tenant * ART_TIERS + t].head != NULL;
            CHECK(ring == 0);
            mask |= (uint32_t)(by_age != 0) << t;
        }
        CHECK(atomic_load_explicit(&h->mask, memory_order_relaxed) == mask);
        token_release(h);
    }
}

/* ---------------------------------------------------------------- life */

void art_runq_config_default(art_runq_config *config)
{
    *config = (art_runq_config){
        .max_tenants = 1024,
        .items_max = 100000,
        .bytes_max = UINT64_C(256) << 20,
        .slots = 1,
        .aging_threshold = 50,
        .aging_wait_ns = {0, 0, UINT64_C(300) * 1000000000, UINT64_C(1800) * 1000000000},
        .tier0_share_pct = 80,
        .tier0_window_ns = 1000000000,
        .drr_quantum_ns = 10000000, /* by feel: a tenant's turn in tier 1 stays below what a person notices */
        .pick_charge_ns = 1000,     /* about what a pick and a switch cost */
    };
}

int art_runq_create(const art_runq_config *c, art_runq **out)
{
    if (c->max_tenants == 0 || c->max_tenants > 1u << 20 || c->items_max == 0 || c->items_max > HELD_ITEMS_MAX ||
        c->bytes_max > HELD_BYTES_MAX || c->tenant_items_max > HELD_ITEMS_MAX || c->tenant_bytes_max > HELD_BYTES_MAX ||
        c->slots == 0 || c->slots > 1024 || c->tier0_window_ns < BUCKETS || c->tier0_window_ns > UINT64_C(1) << 33 ||
        c->drr_quantum_ns == 0 || c->drr_quantum_ns > UINT64_C(1) << 37 || c->pick_charge_ns > UINT64_C(1) << 37)
        return ART_EINVAL;

    art_runq *q = aligned_alloc(CACHE_LINE, sizeof *q);
    size_t accounts_bytes = (size_t)c->max_tenants * ART_TIERS * sizeof(account);
    account *accounts = aligned_alloc(CACHE_LINE, accounts_bytes);
    _Atomic uint64_t *tenant_held = calloc(c->max_tenants, sizeof *tenant_held);
    if (!q || !accounts || !tenant_held) {
        free(q);
        free(accounts);
        free(tenant_held);
        return ART_ENOMEM;
    }
    memset(q, 0, sizeof *q);
    memset(accounts, 0, accounts_bytes);
    q->max_tenants = c->max_tenants;
    q->items_max = c->items_max;
    q->bytes_max = c->bytes_max;
    q->tenant_items_max = c->tenant_items_max ? c->tenant_items_max : (uint32_t)HELD_ITEMS_MAX;
    q->tenant_bytes_max = c->tenant_bytes_max ? c->tenant_bytes_max : HELD_BYTES_MAX;
    q->aging_over = c->aging_threshold ? (int64_t)c->aging_threshold - 1 : INT64_MAX;
    q->aging_spacing = c->aging_threshold ? c->aging_threshold : AGING_SPACING;
    q->tier0_share_pct = c->tier0_share_pct;
    q->bucket_width_ns = c->tier0_window_ns / BUCKETS;
    q->quantum_ns = (int64_t)c->drr_quantum_ns;
    q->pick_charge_ns = (int64_t)c->pick_charge_ns;
    q->accounts = accounts;
    q->tenant_held = tenant_held;
    atomic_store_explicit(&q->slots, c->slots, memory_order_relaxed);
    for (uint32_t t = 0; t < ART_TIERS; t++) {
        q->aging_wait_over_ns[t] = c->aging_wait_ns[t] - 1; /* 0: never */
        q->lanes[t].age = (art_task_age){&q->lanes[t].age, &q->lanes[t].age, UINT64_MAX};
        q->lanes[t].promoted_at = -q->aging_spacing;        /* the first promotion has none to keep its distance from */
    }
    for (size_t i = 0; i < (size_t)c->max_tenants * ART_TIERS; i++)
        atomic_store_explicit(&accounts[i].weight, 1, memory_order_relaxed);
    *out = q;
    return 0;
}

void art_runq_destroy(art_runq *q)
{
    if (!q)
        return;
    free(q->accounts);
    free((void *)q->tenant_held);
    free(q);
}

int art_runq_tenant_set(art_runq *q, uint32_t tenant, uint32_t weight)
{
    if (tenant >= q->max_tenants || weight == 0 || weight > ART_WEIGHT_MAX)
        return ART_EINVAL;
    for (uint32_t t = 0; t < ART_TIERS; t++)
        atomic_store_explicit(&q->accounts[(size_t)tenant * ART_TIERS + t].weight, weight, memory_order_relaxed);
    return 0;
}

int art_runq_slots_set(art_runq *q, uint32_t slots)
{
    if (slots == 0 || slots > 1024)
        return ART_EINVAL;
    atomic_store_explicit(&q->slots, slots, memory_order_relaxed);
    atomic_store_explicit(&q->tier0_safe_ns, 0, memory_order_relaxed); /* look again */
    return 0;
}
