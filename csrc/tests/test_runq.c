/* test_runq.c: the run queue on one thread: rules one by one, then random operations against the naive model.
 *
 *   test_runq [seed [operations]]      or ART_TEST_SEED, ART_TEST_OPS in the environment
 *
 * The seed is printed; the same seed gives the same operations.
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../runq.h"
#include "../runq.h" /* headers can be read twice */
#include "../runq_model.h"

static int failures;

#define EXPECT(cond)                                                                                                   \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, __func__, #cond);                                   \
            failures++;                                                                                                \
        }                                                                                                              \
    } while (0)

#define MS UINT64_C(1000000)

static art_runq_config plain_config(void)
{
    art_runq_config c;
    art_runq_config_default(&c);
    c.max_tenants = 16;
    c.aging_wait_ns[2] = c.aging_wait_ns[3] = 0;
    return c;
}

static art_runq *make(const art_runq_config *c)
{
    art_runq *q = NULL;
    if (art_runq_create(c, &q)) {
        fprintf(stderr, "create failed\n");
        exit(1);
    }
    return q;
}

static art_task task_of(uint32_t tenant, uint8_t tier)
{
    return (art_task){.tenant = tenant, .tier = tier, .base_tier = tier};
}

static art_runq_stats stats_of(art_runq *q)
{
    art_runq_stats s;
    art_runq_statistics(q, &s);
    return s;
}

/* ---------------------------------------------------------------- rules */

static void test_config_ranges(void)
{
    art_runq *q = (art_runq *)&failures; /* must stay untouched */
#define REFUSED(field, value)                                                                                          \
    do {                                                                                                               \
        art_runq_config c = plain_config();                                                                            \
        c.field = (value);                                                                                             \
        EXPECT(art_runq_create(&c, &q) == ART_EINVAL && q == (art_runq *)&failures);                                   \
    } while (0)
    REFUSED(max_tenants, 0);
    REFUSED(max_tenants, (1u << 20) + 1);
    REFUSED(items_max, 0);
    REFUSED(items_max, 1u << 24);
    REFUSED(bytes_max, UINT64_C(1) << 40);
    REFUSED(tenant_items_max, 1u << 24);
    REFUSED(tenant_bytes_max, UINT64_C(1) << 40);
    REFUSED(slots, 0);
    REFUSED(slots, 1025);
    REFUSED(tier0_window_ns, 7);
    REFUSED(tier0_window_ns, (UINT64_C(1) << 33) + 1);
    REFUSED(drr_quantum_ns, 0);
    REFUSED(drr_quantum_ns, (UINT64_C(1) << 37) + 1);
    REFUSED(pick_charge_ns, (UINT64_C(1) << 37) + 1);
#undef REFUSED
    art_runq_config c = plain_config();
    q = make(&c);
    EXPECT(art_runq_tenant_set(q, 16, 1) == ART_EINVAL);
    EXPECT(art_runq_tenant_set(q, 0, 0) == ART_EINVAL);
    EXPECT(art_runq_tenant_set(q, 0, ART_WEIGHT_MAX + 1) == ART_EINVAL);
    EXPECT(art_runq_tenant_set(q, 15, ART_WEIGHT_MAX) == 0);
    EXPECT(art_runq_slots_set(q, 0) == ART_EINVAL && art_runq_slots_set(q, 1025) == ART_EINVAL);
    EXPECT(art_runq_slots_set(q, 1024) == 0);
    EXPECT(art_runq_admit(q, 16, 1) == ART_EINVAL);
    EXPECT(art_runq_oldest_ns(q, ART_TIERS) == 0);
    EXPECT(art_runq_pop(q, 0) == NULL && art_runq_tiers(q) == 0);
    art_runq_destroy(q);
    art_runq_destroy(NULL);
}

static void test_strict_tiers_and_fifo(void)
{
    art_runq_config c = plain_config();
    art_runq *q = make(&c);
    art_task t[12];
    for (int i = 0; i < 12; i++) {
        t[i] = task_of(3, (uint8_t)(3 - i % 4));
        art_runq_push(q, &t[i], 100 + (uint64_t)i);
        EXPECT(t[i].enqueued_ns == 100 + (uint64_t)i);
    }
    EXPECT(art_runq_tiers(q) == 0xf);
    EXPECT(art_runq_oldest_ns(q, 0) == 103 && art_runq_oldest_ns(q, 3) == 100);
    for (int tier = 0; tier < 4; tier++)
        for (int i = 0; i < 3; i++)
            EXPECT(art_runq_pop(q, 200) == &t[4 * i + 3 - tier]);
    EXPECT(art_runq_pop(q, 200) == NULL && art_runq_tiers(q) == 0 && art_runq_oldest_ns(q, 2) == 0);
    art_runq_stats s = stats_of(q);
    for (int tier = 0; tier < 4; tier++)
        EXPECT(s.pushes[tier] == 3 && s.pops[tier] == 3 && s.queued[tier] == 0);
    art_runq_destroy(q);
}

static void test_weights_share_slot_time(void)
{
    art_runq_config c = plain_config();
    art_runq *q = make(&c);
    /* tenant 0: weight 3, slices of 2 ms; tenant 1: weight 1, slices of 7 ms; both always have work */
    art_task t[8];
    uint64_t used[2] = {0, 0}, now = 0, slice[2] = {2 * MS, 7 * MS};
    art_runq_tenant_set(q, 0, 3);
    for (uint32_t i = 0; i < 8; i++) {
        t[i] = task_of(i & 1, 1);
        art_runq_push(q, &t[i], now);
    }
    for (int i = 0; i < 20000; i++) {
        art_task *got = art_runq_pop(q, now);
        now += slice[got->tenant];
        used[got->tenant] += slice[got->tenant];
        art_runq_charge(q, got, slice[got->tenant], now);
        art_runq_push(q, got, now);
    }
    double ratio = (double)used[0] / (double)used[1];
    EXPECT(ratio > 2.97 && ratio < 3.03);
    art_runq_destroy(q);
}

static void test_debt_is_kept_credit_is_not(void)
{
    art_runq_config c = plain_config();
    c.pick_charge_ns = 0;
    art_runq *q = make(&c);
    art_task a = task_of(0, 1), a2 = task_of(0, 1), b[3] = {task_of(1, 1), task_of(1, 1), task_of(1, 1)};
    /* tenant 0 runs 35 ms of a 10 ms quantum and leaves with 25 ms of debt */
    art_runq_push(q, &a, 0);
    EXPECT(art_runq_pop(q, 0) == &a);
    art_runq_charge(q, &a, 35 * MS, 35 * MS);
    /* back first in the ring, but tenant 1 has two turns of 10 ms before the third quantum makes up for the debt */
    art_runq_push(q, &a, 0);
    for (int i = 0; i < 3; i++)
        art_runq_push(q, &b[i], 0);
    for (int i = 0; i < 2; i++) {
        art_task *got = art_runq_pop(q, 0);
        EXPECT(got == &b[i]);
        art_runq_charge(q, got, 10 * MS, 0);
    }
    EXPECT(art_runq_pop(q, 0) == &a);
    EXPECT(art_runq_pop(q, 0) == &b[2]);
    art_runq_charge(q, &b[2], 10 * MS, 0);
    /* credit: tenant 2 runs 1 ms of its 10 and goes away; when it comes back it has one quantum, not 19 ms */
    for (int spell = 0; spell < 5; spell++) {
        a = task_of(2, 1);
        art_runq_push(q, &a, 0);
        EXPECT(art_runq_pop(q, 0) == &a);
        art_runq_charge(q, &a, 1 * MS, 0);
    }
    a2 = task_of(2, 1);
    b[0] = task_of(3, 1);
    art_runq_push(q, &a, 0);
    art_runq_push(q, &a2, 0);
    art_runq_push(q, &b[0], 0);
    EXPECT(art_runq_pop(q, 0) == &a);
    art_runq_charge(q, &a, 10 * MS, 0);
    EXPECT(art_runq_pop(q, 0) == &b[0]);
    EXPECT(art_runq_pop(q, 0) == &a2);
    art_runq_destroy(q);
}

static void test_free_slices_end_a_turn_too(void)
{
    art_runq_config c = plain_config(); /* 10 ms quantum, 1 us per pick */
    art_runq *q = make(&c);
    art_task a = task_of(0, 1), b = task_of(1, 1), other = task_of(0, 1);
    art_runq_push(q, &a, 0);
    art_runq_push(q, &other, 0);
    art_runq_push(q, &b, 0);
    int picks = 0;
    for (art_task *got; (got = art_runq_pop(q, 0)) != &b; picks++)
        art_runq_push(q, got, 0);
    EXPECT(picks == 10000);
    art_runq_destroy(q);
}

static void test_aging_by_count(void)
{
    art_runq_config c = plain_config();
    art_runq *q = make(&c);
    art_task hot[4], low = task_of(1, 2), lowest = task_of(2, 3);
    for (int i = 0; i < 4; i++) {
        hot[i] = task_of(0, 1);
        art_runq_push(q, &hot[i], 0);
    }
    art_runq_push(q, &low, 5);
    art_runq_push(q, &lowest, 6);
    int low_at = 0, lowest_at = 0;
    for (int pick = 1; pick <= 60; pick++) {
        art_task *got = art_runq_pop(q, 0);
        if (pick <= 50)
            EXPECT(got->tenant == 0);
        if (got == &low)
            low_at = pick;
        else if (got == &lowest)
            lowest_at = pick;
        else {
            art_runq_charge(q, got, 10 * MS, 0);
            art_runq_push(q, got, 0);
        }
    }
    /* 50 picks pass them over, the 51st promotes both; tenant 0's turn is used up, tenants 1 and 2 follow */
    EXPECT(low_at == 51 && lowest_at == 52);
    EXPECT(low.promoted && low.tier == 1 && low.aged_from == 2 && low.base_tier == 2 && low.enqueued_ns == 5);
    EXPECT(lowest.promoted && lowest.tier == 1 && lowest.aged_from == 3);
    art_task_unpromote(&lowest);
    EXPECT(!lowest.promoted && lowest.tier == 3);
    art_runq_stats s = stats_of(q);
    EXPECT(s.promotions_count[2] == 1 && s.promotions_count[3] == 1 && s.pops[2] == 0 && s.pops[3] == 0);
    art_runq_destroy(q);
}

/* A promotion by count is worth a mean pick of those that passed the tier over while it had work, of short ones up to all
 * of them, however long a quantum is. */
static void test_a_promotion_is_worth_what_passed(void)
{
    art_runq_config c = plain_config();
    c.aging_wait_ns[3] = 1000;
    c.pick_charge_ns = 2000;
    art_runq *q = make(&c);
    art_task hot = task_of(0, 1), urgent = task_of(0, 0), low = task_of(1, 2), lowest = task_of(1, 3);
    art_runq_charge(q, &hot, 700 * MS, 0); /* nobody was passed over */
    for (int spell = 0; spell < 4; spell++) {
        uint64_t passed_ns = 0;
        low.tier = 2;
        low.promoted = false;
        art_runq_push(q, &low, 0);
        for (int pick = 0; pick < 50; pick++) {
            art_task *it = pick % 2 ? &urgent : &hot;
            art_runq_push(q, it, 0);
            EXPECT(art_runq_pop(q, 0) == it && !low.promoted);
            static const uint64_t slots_ns[] = {7 * MS, 300000, 9000, 10}; /* mean; 1 ms; all; picks alone */
            uint64_t slot_ns = slots_ns[spell] + (uint64_t)(spell < 3 ? pick * 100 : 0);
            art_runq_charge(q, it, slot_ns, 0);
            passed_ns += slot_ns;
            if (pick == 20) { /* not there for a while: what others have then passes nobody over */
                EXPECT(art_runq_cancel(q, &low));
                art_runq_charge(q, &hot, 900 * MS, 0);
                art_runq_charge(q, &urgent, 900 * MS, 0);
                art_runq_push(q, &low, 0);
            }
        }
        EXPECT(art_runq_pop(q, 0) == &low && low.promoted);
        const uint64_t worth_ns[] = {passed_ns / 50, MS, passed_ns, 50 * 2000};
        EXPECT(low.promoted_us == worth_ns[spell] / 1000 + 1);
        art_runq_charge(q, &low, 300 * MS, 0); /* its own, as of tier 1: passes tier 3 over, not tier 2 */
    }
    art_runq_push(q, &lowest, 0); /* by time: a whole quantum, as 50 picks and a long wait apart it is rare */
    for (int pick = 0; pick < 49; pick++) {
        art_runq_push(q, &hot, 0);
        EXPECT(art_runq_pop(q, 0) == &hot);
    }
    EXPECT(art_runq_pop(q, 2000) == &lowest && lowest.promoted && lowest.promoted_us == ART_PROMOTED_QUANTUM);
    art_runq_destroy(q);
}

static void test_tier0_picks_count_for_aging(void)
{
    art_runq_config c = plain_config();
    c.tier0_share_pct = 100;
    art_runq *q = make(&c);
    art_task urgent = task_of(0, 0), low = task_of(1, 2), mid = task_of(0, 1);
    for (int i = 0; i < 30; i++) { /* before there is work: must not count */
        art_runq_push(q, &urgent, 0);
        EXPECT(art_runq_pop(q, 0) == &urgent);
    }
    art_runq_push(q, &low, 0);
    art_runq_push(q, &mid, 0);
    for (int i = 0; i < 49; i++) {
        art_runq_push(q, &urgent, 0);
        EXPECT(art_runq_pop(q, 0) == &urgent);
    }
    EXPECT(art_runq_pop(q, 0) == &mid); /* the 50th that passes tier 2 over */
    EXPECT(!low.promoted);
    art_runq_push(q, &mid, 0);
    EXPECT(art_runq_pop(q, 0) == &mid); /* the promoted one is behind it in tier 1 */
    EXPECT(low.promoted);
    EXPECT(art_runq_pop(q, 0) == &low);
    art_runq_destroy(q);
}

static void test_aging_by_wait(void)
{
    art_runq_config c = plain_config();
    c.aging_wait_ns[3] = 1000;
    art_runq *q = make(&c);
    art_task hot = task_of(0, 1), low[3] = {task_of(1, 3), task_of(1, 3), task_of(1, 3)};
    art_runq_push(q, &hot, 0);
    for (int i = 0; i < 3; i++)
        art_runq_push(q, &low[i], 10);
    EXPECT(art_runq_pop(q, 1009) == &hot);
    EXPECT(!low[0].promoted);
    art_runq_push(q, &hot, 0);
    EXPECT(art_runq_pop(q, 5) == &hot); /* a clock that is behind ages nobody */
    EXPECT(!low[0].promoted);
    art_runq_push(q, &hot, 0);
    EXPECT(art_runq_pop(q, 1010) == &hot);
    EXPECT(low[0].promoted);
    art_runq_push(q, &hot, 1010);
    int picks = 0; /* all are overdue now, but promotions keep 50 picks apart */
    while (!low[1].promoted && picks < 1000) {
        art_task *got = art_runq_pop(q, 5000);
        picks++;
        if (got == &hot)
            art_runq_push(q, &hot, 0);
    }
    EXPECT(picks == 50);
    art_runq_stats s = stats_of(q);
    EXPECT(s.promotions_wait[3] + s.promotions_count[3] == 2);
    art_runq_destroy(q);
}

static void test_fault_S30_promotions_keep_their_distance(void)
{
    /* every combination of rules, everything overdue: never two promotions of a tier within `threshold` picks */
    for (uint32_t threshold = 0; threshold < 8; threshold++) {
        art_runq_config c = plain_config();
        c.aging_threshold = threshold;
        c.aging_wait_ns[2] = 1;
        c.aging_wait_ns[3] = threshold % 3 ? 1 : 0;
        art_runq *q = make(&c);
        static art_task t[600];
        for (uint32_t i = 0; i < 600; i++) {
            t[i] = task_of(i % 5, (uint8_t)(i % 4));
            art_runq_push(q, &t[i], 0);
        }
        uint64_t spacing = threshold ? threshold : 50, last[2] = {0, 0}, picks = 0;
        art_runq_stats before = stats_of(q);
        for (art_task *got; (got = art_runq_pop(q, 1000 + picks)); picks++) {
            art_runq_charge(q, got, picks % 7 * MS, picks);
            art_runq_stats s = stats_of(q);
            for (int tier = 2; tier < 4; tier++) {
                uint64_t n = s.promotions_count[tier] + s.promotions_wait[tier];
                uint64_t n0 = before.promotions_count[tier] + before.promotions_wait[tier];
                EXPECT(n - n0 <= 1);
                if (n != n0) {
                    EXPECT(last[tier - 2] == 0 || picks - last[tier - 2] >= spacing);
                    last[tier - 2] = picks;
                }
            }
            before = s;
        }
        EXPECT(picks == 600);
        art_runq_destroy(q);
    }
}

static void test_fault_S30_bound_of_waiting(void)
{
    /* Tier 1 always has work, so tiers 2 and 3 live on promotions alone. Slices cost exactly one quantum, so that the
     * decision page's formula has no free variable: p <= k + (R + 1) * W, then 51 p + the wait in tier 1. */
    enum { TENANTS = 5, PER_TENANT = 4, HOT = 6 };
    uint32_t weight[TENANTS] = {1, 3, 2, 1, 2};
    for (uint32_t threshold = 1; threshold <= 50; threshold += 7) {
        art_runq_config c = plain_config();
        c.aging_threshold = threshold;
        c.pick_charge_ns = 0;
        art_runq *q = make(&c);
        static art_task low[2][TENANTS][PER_TENANT], hot[HOT];
        uint64_t pushed_at[2][TENANTS][PER_TENANT], picks = 0, worst = 0;
        for (uint32_t i = 0; i < TENANTS; i++)
            art_runq_tenant_set(q, i, weight[i]);
        for (uint32_t i = 0; i < HOT; i++) {
            hot[i] = task_of(i % 3, 1);
            art_runq_push(q, &hot[i], 0);
        }
        for (int tier = 0; tier < 2; tier++)
            for (uint32_t i = 0; i < TENANTS; i++)
                for (int k = 0; k < PER_TENANT; k++) {
                    low[tier][i][k] = task_of(i, (uint8_t)(2 + tier));
                    pushed_at[tier][i][k] = 0;
                    art_runq_push(q, &low[tier][i][k], 0);
                }
        uint32_t weights = 1 + 3 + 2 + 1 + 2;
        for (; picks < 60000; picks++) {
            art_task *got = art_runq_pop(q, 0);
            art_runq_charge(q, got, c.drr_quantum_ns, 0);
            if (got->promoted) {
                ptrdiff_t at = got - &low[0][0][0];
                uint64_t *since = &pushed_at[0][0][0] + at, waited = picks - *since, w = weight[got->tenant];
                uint64_t k = PER_TENANT, others = weights - w;
                uint64_t rounds = (k - 1) / w + 1, p = k + (rounds + 1) * others;
                /* in tier 1: before it at most what its tenant has there (HOT/3 hot ones and both tiers' promoted), its own
                 * debt of one turn, and the other tenants' turns meanwhile */
                uint64_t ahead = HOT / 3 + 2 * PER_TENANT, rounds1 = ahead / w + 2;
                uint64_t bound = (threshold + 1) * p + ahead + (rounds1 + 1) * (others + TENANTS);
                if (waited > bound) {
                    fprintf(stderr, "threshold %u tenant %u waited %" PRIu64 " > %" PRIu64 "\n", threshold, got->tenant,
                            waited, bound);
                    failures++;
                }
                worst = waited > worst ? waited : worst;
                art_task_unpromote(got);
                *since = picks + 1;
            }
            art_runq_push(q, got, 0);
        }
        for (int tier = 0; tier < 2; tier++)
            for (uint32_t i = 0; i < TENANTS; i++)
                for (int k = 0; k < PER_TENANT; k++)
                    EXPECT(pushed_at[tier][i][k] != 0); /* everyone ran */
        EXPECT(worst > threshold);
        art_runq_destroy(q);
    }
}

static void test_fault_S31_tier_survives_requeue(void)
{
    art_runq_config c = plain_config();
    art_runq *q = make(&c);
    art_task cur = task_of(1, 3), urgent = task_of(2, 0);
    for (int i = 0; i < 100; i++) {
        art_runq_push(q, &urgent, 0);
        EXPECT(art_runq_preempt(q, &cur, 0) == &urgent);
        EXPECT(cur.tier == 3 && art_runq_tiers(q) == 8);
        EXPECT(art_runq_pop(q, 0) == &cur);
        EXPECT(art_runq_yield(q, &cur, 0) == &cur);
        EXPECT(cur.tier == 3 && cur.base_tier == 3 && !cur.promoted && cur.tenant == 1);
    }
    art_runq_destroy(q);
}

static void test_fault_S35_aging_stays_in_the_tenants_share(void)
{
    /* tenant 0 (weight 1) floods tier 2, tenant 1 (weight 4) holds tier 1: promotions must not raise tenant 0's share */
    art_runq_config c = plain_config();
    c.aging_threshold = 1; /* as hard as it gets */
    art_runq *q = make(&c);
    static art_task t[40];
    uint64_t used[2] = {0, 0};
    art_runq_tenant_set(q, 1, 4);
    for (uint32_t i = 0; i < 40; i++) {
        t[i] = i < 30 ? task_of(0, 2) : task_of(i & 1, 1);
        art_runq_push(q, &t[i], 0);
    }
    for (int i = 0; i < 50000; i++) {
        art_task *got = art_runq_pop(q, 0);
        used[got->tenant] += 3 * MS;
        art_runq_charge(q, got, 3 * MS, 0);
        art_task_unpromote(got);
        art_runq_push(q, got, 0);
    }
    double share = (double)used[0] / (double)(used[0] + used[1]);
    EXPECT(share > 0.195 && share < 0.205);
    art_runq_stats s = stats_of(q);
    EXPECT(s.promotions_count[2] > 1000);
    art_runq_destroy(q);
}

static void test_preempt(void)
{
    art_runq_config c = plain_config();
    art_runq *q = make(&c);
    art_task a = task_of(0, 2), a2 = task_of(0, 2), b = task_of(1, 2), mid = task_of(0, 1), urgent = task_of(0, 0);
    art_runq_push(q, &a, 0);
    art_runq_push(q, &a2, 0);
    art_runq_push(q, &b, 0);
    EXPECT(art_runq_pop(q, 0) == &a);
    EXPECT(art_runq_preempt(q, &a, 0) == NULL); /* own tier does not preempt */
    art_runq_push(q, &mid, 0);
    EXPECT(art_runq_preempt(q, &a, 0) == &mid);
    EXPECT(art_runq_preempt(q, &mid, 0) == NULL); /* nothing above it */
    art_runq_destroy(q);

    q = make(&c);
    a = task_of(0, 2), a2 = task_of(0, 2), b = task_of(1, 2), mid = task_of(0, 1), urgent = task_of(0, 0);
    art_runq_push(q, &a, 0);
    art_runq_push(q, &b, 0);
    EXPECT(art_runq_pop(q, 0) == &a);
    art_runq_charge(q, &a, 1 * MS, 0);
    art_runq_push(q, &mid, 0);
    EXPECT(art_runq_preempt(q, &a, 7) == &mid);
    EXPECT(a.enqueued_ns == 7);
    art_runq_push(q, &urgent, 0);
    EXPECT(art_runq_preempt(q, &mid, 0) == &urgent); /* across halves */
    EXPECT(art_runq_tiers(q) == 6);
    EXPECT(art_runq_preempt(q, &urgent, 0) == NULL); /* nothing above tier 0 */
    EXPECT(art_runq_pop(q, 0) == &mid);
    /* a was interrupted in its turn with credit left: it goes on before b, and before a2 of its tenant */
    art_runq_push(q, &a2, 0);
    EXPECT(art_runq_pop(q, 0) == &a);
    art_runq_charge(q, &a, 9 * MS, 0);
    art_runq_push(q, &mid, 0);
    EXPECT(art_runq_preempt(q, &a, 0) == &mid);
    EXPECT(art_runq_pop(q, 0) == &b); /* the turn is used up */
    EXPECT(art_runq_pop(q, 0) == &a);
    EXPECT(art_runq_pop(q, 0) == &a2);
    art_runq_destroy(q);

    /* interruption gives no quantum for nothing: interrupted every millisecond, tenant 0 still gets half */
    q = make(&c);
    art_task many[4] = {task_of(1, 2), task_of(1, 2), task_of(1, 2), task_of(1, 2)};
    uint64_t used[2] = {0, 0};
    a = task_of(0, 2);
    art_runq_push(q, &a, 0);
    for (int i = 0; i < 4; i++)
        art_runq_push(q, &many[i], 0);
    art_task *cur = art_runq_pop(q, 0);
    for (int i = 0; i < 20000; i++) {
        used[cur->tenant] += 1 * MS;
        art_runq_charge(q, cur, 1 * MS, 0);
        mid = task_of(2, 1);
        art_runq_push(q, &mid, 0);
        EXPECT(art_runq_preempt(q, cur, 0) == &mid);
        cur = art_runq_pop(q, 0);
        if (cur->promoted)
            art_task_unpromote(cur);
    }
    double share = (double)used[0] / (double)(used[0] + used[1]);
    EXPECT(share > 0.45 && share < 0.55);
    art_runq_destroy(q);
}

static void test_yield(void)
{
    art_runq_config c = plain_config();
    art_runq *q = make(&c);
    art_task a = task_of(0, 1), b = task_of(0, 2), urgent = task_of(1, 0), urgent2 = task_of(1, 0);
    EXPECT(art_runq_yield(q, &a, 0) == &a); /* alone */
    art_runq_push(q, &b, 0);
    EXPECT(art_runq_yield(q, &a, 0) == &a); /* still the best */
    a.tier = 2;
    EXPECT(art_runq_yield(q, &a, 9) == &b); /* demoted: behind b */
    EXPECT(a.enqueued_ns == 9);
    art_runq_push(q, &urgent, 0);
    EXPECT(art_runq_yield(q, &b, 0) == &urgent);
    EXPECT(art_runq_yield(q, &urgent, 0) == &urgent);
    art_runq_push(q, &urgent2, 0);
    EXPECT(art_runq_yield(q, &urgent, 0) == &urgent2);
    urgent2.tier = 1;
    EXPECT(art_runq_yield(q, &urgent2, 0) == &urgent);
    EXPECT(art_runq_pop(q, 0) == &urgent2 && art_runq_pop(q, 0) == &a && art_runq_pop(q, 0) == &b);
    art_runq_destroy(q);
}

static void test_tier0_cap(void)
{
    for (uint32_t pct = 20; pct <= 100; pct += 20)
        for (uint32_t slots = 1; slots <= 4; slots *= 2) {
            art_runq_config c = plain_config();
            c.tier0_share_pct = pct;
            c.slots = slots;
            c.aging_threshold = 0;
            art_runq *q = make(&c);
            art_task urgent[8], low[8], *running[4];
            uint64_t tier0_ns = 0, now = 0, per_second[20] = {0};
            for (int i = 0; i < 8; i++) {
                urgent[i] = task_of(0, 0);
                low[i] = task_of(1, 3);
                art_runq_push(q, &urgent[i], 0);
                art_runq_push(q, &low[i], 0);
            }
            for (int tick = 0; tick < 20000; tick++) { /* lock-step slices of 1 ms on all slots, both sides saturated */
                for (uint32_t s = 0; s < slots; s++)
                    running[s] = art_runq_pop(q, now);
                now += MS;
                for (uint32_t s = 0; s < slots; s++) {
                    if (running[s]->tier == 0)
                        tier0_ns += MS, per_second[tick / 1000] += MS;
                    art_runq_charge(q, running[s], MS, now);
                    art_runq_push(q, running[s], now);
                }
            }
            double share = (double)tier0_ns / (double)now / slots * 100;
            EXPECT(share > pct - 3 && share < pct + 1);
            for (int i = 0; i < 20; i++) /* and in every second, not only on average */
                EXPECT(pct == 100 || per_second[i] * 100 <= (pct + 13) * slots * 1000 * MS);
            EXPECT((stats_of(q).tier0_capped != 0) == (pct < 100));
            art_runq_destroy(q);
        }

    art_runq_config c = plain_config();
    art_runq *q = make(&c);
    art_task urgent = task_of(0, 0), low = task_of(1, 3), other = task_of(1, 1);
    art_runq_charge(q, &urgent, 900 * MS, 1000 * MS);
    EXPECT(art_runq_tier0_capped(q, 1000 * MS));
    art_runq_push(q, &urgent, 1000 * MS);
    EXPECT(art_runq_preempt(q, &low, 1000 * MS) == NULL); /* behind the running task too */
    EXPECT(art_runq_pop(q, 1000 * MS) == &urgent);        /* nobody else has work: no wait */
    art_runq_push(q, &urgent, 1000 * MS);
    EXPECT(art_runq_yield(q, &low, 1000 * MS) == &low);
    art_runq_push(q, &other, 1000 * MS);
    EXPECT(art_runq_preempt(q, &low, 1000 * MS) == &other); /* tier 1 preempts tier 3 as ever */
    EXPECT(art_runq_yield(q, &other, 1000 * MS) == &other); /* goes on: tier 0 waits, low is lower */
    art_runq_destroy(q);

    /* idle time is slot time: lightly used, tier 0 is within its share whatever the others do not use */
    q = make(&c);
    urgent = task_of(0, 0);
    art_runq_charge(q, &urgent, 50 * MS, 1000 * MS);
    EXPECT(!art_runq_tier0_capped(q, 1000 * MS));
    /* the window slides: a full second of tier 0 is forgotten a second later */
    art_runq_charge(q, &urgent, 1000 * MS, 3000 * MS);
    EXPECT(art_runq_tier0_capped(q, 3000 * MS) && art_runq_tier0_capped(q, 3100 * MS));
    EXPECT(!art_runq_tier0_capped(q, 3300 * MS) && !art_runq_tier0_capped(q, 4000 * MS));
    /* exactly at the share is not above it, one nanosecond more is; the number of slots counts from when it is set */
    art_runq_destroy(q);
    c.tier0_window_ns = 8000;
    c.tier0_share_pct = 50;
    q = make(&c);
    art_runq_charge(q, &urgent, 3000, 8000);
    EXPECT(!art_runq_tier0_capped(q, 8000)); /* 3,000 of the 7,000 judged just after a step of the window */
    art_runq_charge(q, &urgent, 500, 8000);
    EXPECT(!art_runq_tier0_capped(q, 8000));
    art_runq_charge(q, &urgent, 1, 8000);
    EXPECT(art_runq_tier0_capped(q, 8000) && !art_runq_tier0_capped(q, 8002));
    EXPECT(art_runq_slots_set(q, 4) == 0 && !art_runq_tier0_capped(q, 8000));
    EXPECT(art_runq_slots_set(q, 1) == 0 && art_runq_tier0_capped(q, 8000));
    art_runq_charge(q, &urgent, UINT64_MAX, UINT64_MAX); /* nonsense stays bounded */
    art_runq_charge(q, &urgent, UINT64_MAX, 0);
    art_runq_destroy(q);
}

static void test_cancel(void)
{
    art_runq_config c = plain_config();
    art_runq *q = make(&c);
    for (uint8_t tier = 0; tier < 4; tier++)
        for (int victim = 0; victim < 3; victim++) { /* head, middle, tail */
            art_task t[3];
            for (int i = 0; i < 3; i++) {
                t[i] = task_of(2, tier);
                EXPECT(!art_runq_cancel(q, &t[i]) && art_runq_try_cancel(q, &t[i]) == 0);
                art_runq_push(q, &t[i], 0);
            }
            EXPECT(victim & 1 ? art_runq_cancel(q, &t[victim]) : art_runq_try_cancel(q, &t[victim]) == 1);
            EXPECT(!art_runq_cancel(q, &t[victim]));
            art__runq_verify(q);
            for (int i = 0; i < 3; i++)
                if (i != victim)
                    EXPECT(art_runq_pop(q, 0) == &t[i] && !art_runq_cancel(q, &t[i]));
            EXPECT(art_runq_pop(q, 0) == NULL && art_runq_tiers(q) == 0);
        }
    EXPECT(stats_of(q).cancels == 12);
    art_runq_destroy(q);
}

static void test_fault_S33_bounds_count_holders(void)
{
    art_runq_config c = plain_config();
    c.items_max = 4;
    c.bytes_max = 1000;
    c.tenant_items_max = 3;
    c.tenant_bytes_max = 900;
    art_runq *q = make(&c);
    EXPECT(art_runq_admit(q, 0, 901) == ART_EFULL);
    EXPECT(art_runq_admit(q, 0, UINT64_MAX) == ART_EFULL);
    EXPECT(art_runq_admit(q, 0, 900) == 0 && art_runq_admit(q, 0, 1) == ART_EFULL && art_runq_admit(q, 0, 0) == 0);
    EXPECT(art_runq_admit(q, 1, 101) == ART_EFULL && art_runq_admit(q, 1, 100) == 0);
    EXPECT(art_runq_admit(q, 0, 0) == 0 && art_runq_admit(q, 0, 0) == ART_EFULL && art_runq_admit(q, 1, 0) == ART_EFULL);
    art_runq_stats s = stats_of(q);
    EXPECT(s.admitted_items == 4 && s.admitted_bytes == 1000 && s.refusals == 6);
    /* whatever tasks do, holders are what counts: push, pick, requeue, cancel change nothing */
    art_task t = task_of(0, 2);
    art_runq_push(q, &t, 0);
    EXPECT(art_runq_pop(q, 0) == &t && art_runq_yield(q, &t, 0) == &t);
    art_runq_push(q, &t, 0);
    EXPECT(art_runq_cancel(q, &t) && art_runq_admit(q, 2, 0) == ART_EFULL);
    art_runq_release(q, 0, 900);
    s = stats_of(q);
    EXPECT(s.admitted_items == 3 && s.admitted_bytes == 100);
    EXPECT(art_runq_admit(q, 2, 900) == 0);
    art_runq_destroy(q);
}

static void test_extreme_charges_and_weights(void)
{
    art_runq_config c = plain_config();
    c.drr_quantum_ns = 1;
    art_runq *q = make(&c);
    art_task t[3];
    for (uint32_t i = 0; i < 3; i++) {
        t[i] = task_of(i, 1);
        art_runq_tenant_set(q, i, i ? ART_WEIGHT_MAX : 1);
        art_runq_push(q, &t[i], 0);
    }
    /* 2^40 ns of debt at 1 ns a turn: skipped at once, not turned one by one (that would take hours) */
    int seen[3] = {0};
    for (int i = 0; i < 300000; i++) {
        art_task *got = art_runq_pop(q, 0);
        seen[got->tenant]++;
        art_runq_charge(q, got, UINT64_MAX, 0);
        art_runq_push(q, got, 0);
    }
    EXPECT(seen[1] > 149000 && seen[2] > 149000 && seen[0] >= 1 && seen[0] <= 2);
    art_runq_destroy(q);
}

/* ---------------------------------------------------------------- model */

static uint64_t rng_state;

static uint64_t rnd(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return rng_state * UINT64_C(2685821657736338717) >> 16;
}

static uint32_t below(uint32_t n)
{
    return (uint32_t)(rnd() % n);
}

enum { TASKS = 64, TENANTS = 8, ROUND = 20000 };

typedef enum op { PUSH, POP, PREEMPT, YIELD, CHARGE, CANCEL, MOVE, ADMIT, RELEASE, WEIGHT, TIME, OPS } op;
static const char *const op_names[OPS] = {"push", "pop", "preempt", "yield", "charge", "cancel", "move",
                                           "admit", "release", "weight", "time"};

static bool same_stats(const art_runq_stats *a, art_runq_stats b)
{
    b.inbox = a->inbox, b.busy = a->busy;
    return memcmp(a, &b, sizeof b) == 0;
}

static bool model_round(uint64_t seed, uint64_t *promoted)
{
    static const uint32_t thresholds[] = {0, 1, 2, 3, 5, 50};
    static const uint32_t shares[] = {0, 10, 50, 80, 100};
    rng_state = seed * UINT64_C(0x9E3779B97F4A7C15) | 1;
    rnd();
    art_runq_config c;
    art_runq_config_default(&c);
    c.max_tenants = TENANTS;
    c.items_max = 1 + below(20);
    c.bytes_max = below(2000);
    c.tenant_items_max = below(6);
    c.tenant_bytes_max = below(2) ? 0 : below(1000);
    c.aging_threshold = thresholds[below(6)];
    c.aging_wait_ns[2] = below(2) ? 0 : 1 + below(3000);
    c.aging_wait_ns[3] = below(2) ? 0 : 1 + below(3000);
    c.tier0_share_pct = shares[below(5)];
    c.tier0_window_ns = 8 + below(4000);
    c.slots = 1 + below(3);
    c.drr_quantum_ns = 1 + below(50);
    c.pick_charge_ns = below(3);
    art_runq *q = make(&c);
    art_model *m = art_model_create(&c, TASKS);
    static art_task tasks[TASKS];
    static uint64_t held[64];
    static uint32_t holder[64];
    uint32_t held_count = 0, weights[OPS], total = 0;
    uint64_t now = below(2) ? 0 : rnd();
    now >>= 8; /* room before the end of time */
    if (!m)
        return false;
    memset(tasks, 0, sizeof tasks);
    for (int i = 0; i < OPS; i++)
        total += weights[i] = i != PUSH && below(6) == 0 ? 0 : 1 + below(i <= YIELD ? 12 : 4); /* some calls off */
    bool ok = true;
    for (int step = 0; ok && step < ROUND; step++) {
        uint32_t draw = below(total), id = below(TASKS);
        int which = 0;
        while (draw >= weights[which])
            draw -= weights[which++];
        art_model_task *r = art_model_at(m, (int32_t)id);
        art_task *t = &tasks[id], *got = NULL;
        int32_t want = -1;
        switch ((op)which) {
        case PUSH:
            if (r->queued)
                break;
            if (below(4)) { /* a new task; else a requeue as it is, perhaps still as promoted */
                t->tenant = r->tenant = below(TENANTS);
                t->tier = r->tier = (uint8_t)below(ART_TIERS);
                t->promoted = r->promoted = false;
            }
            art_runq_push(q, t, now);
            art_model_push(m, (int32_t)id, now);
            break;
        case POP:
            got = art_runq_pop(q, now);
            want = art_model_pop(m, now);
            break;
        case PREEMPT:
            if (r->queued)
                break;
            got = art_runq_preempt(q, t, now);
            want = art_model_preempt(m, (int32_t)id, now);
            break;
        case YIELD:
            if (r->queued)
                break;
            if (below(2))
                t->tier = r->tier = (uint8_t)(t->tier + (t->tier < 3));
            if (below(2)) {
                art_task_unpromote(t);
                if (r->promoted)
                    r->tier = r->aged_from, r->promoted = false;
            }
            ok &= t->tier == r->tier;
            got = art_runq_yield(q, t, now);
            want = art_model_yield(m, (int32_t)id, now);
            ok &= got != NULL;
            break;
        case CHARGE:
            if (r->queued)
                break;
            {
                uint64_t slot = below(4) ? below(60) : below((uint32_t)c.tier0_window_ns * 2);
                slot = below(8) ? slot : below(100000);
                art_runq_charge(q, t, slot, now);
                art_model_charge(m, (int32_t)id, slot, now);
            }
            break;
        case CANCEL:
            if (below(4)) /* keep the queue from draining through here */
                break;
            ok &= (below(2) ? art_runq_cancel(q, t) : art_runq_try_cancel(q, t) == 1) == art_model_cancel(m, (int32_t)id);
            break;
        case MOVE: /* a queued task to another tier, as tier lending does it */
            ok &= (art_runq_try_cancel(q, t) == 1) == art_model_cancel(m, (int32_t)id);
            t->tier = r->tier = (uint8_t)below(ART_TIERS);
            t->promoted = r->promoted = false;
            art_runq_push(q, t, now);
            art_model_push(m, (int32_t)id, now);
            break;
        case ADMIT:
            if (held_count < 64) {
                uint64_t bytes = below(300);
                uint32_t tenant = below(TENANTS);
                int rc = art_runq_admit(q, tenant, bytes);
                ok &= rc == art_model_admit(m, tenant, bytes);
                if (rc == 0)
                    held[held_count] = bytes, holder[held_count++] = tenant;
            }
            break;
        case RELEASE:
            if (held_count) {
                uint32_t at = below(held_count);
                art_runq_release(q, holder[at], held[at]);
                art_model_release(m, holder[at], held[at]);
                held[at] = held[--held_count], holder[at] = holder[held_count];
            }
            break;
        case WEIGHT: {
            uint32_t tenant = below(TENANTS), weight = 1 + below(3);
            ok &= art_runq_tenant_set(q, tenant, weight) == 0;
            art_model_tenant_set(m, tenant, weight);
            break;
        }
        case TIME:
        case OPS:
            break;
        }
        now += below(8) ? below(40) : below((uint32_t)c.tier0_window_ns);
        ok &= (got ? (int32_t)(got - tasks) : -1) == want && art_runq_tiers(q) == art_model_tiers(m);
        if (ok && want >= 0) {
            const art_model_task *w = art_model_at(m, want);
            ok = got->tier == w->tier && got->tenant == w->tenant && got->promoted == w->promoted &&
                 (!got->promoted || (got->aged_from == w->aged_from && got->promoted_us == w->promoted_us)) &&
                 got->enqueued_ns == w->enqueued_ns;
        }
        if (ok && step % 16 == 0) {
            art_runq_stats s, ms;
            art_runq_statistics(q, &s);
            art_model_statistics(m, &ms);
            ok = same_stats(&s, ms) && art_runq_tier0_capped(q, now) == art_model_tier0_capped(m, now);
            for (uint32_t tier = 0; tier < ART_TIERS; tier++)
                ok &= art_runq_oldest_ns(q, tier) == art_model_oldest_ns(m, tier);
        }
        if (step % 512 == 0)
            art__runq_verify(q);
        if (!ok)
            fprintf(stderr, "model: seed %" PRIu64 " step %d op %s task %u: got %td, want %d\n", seed, step, op_names[which],
                    id, got ? got - tasks : (ptrdiff_t)-1, want);
    }
    art_runq_stats s = stats_of(q);
    for (int tier = 2; tier < 4; tier++) {
        promoted[0] += s.promotions_count[tier];
        promoted[1] += s.promotions_wait[tier];
    }
    promoted[2] += s.tier0_capped;
    promoted[3] += s.refusals;
    promoted[4] += s.cancels;
    art_runq_destroy(q);
    art_model_destroy(m);
    return ok;
}

static void test_model(uint64_t seed, uint64_t ops)
{
    uint64_t seen[5] = {0};
    for (uint64_t i = 0; i < (ops + ROUND - 1) / ROUND; i++)
        if (!model_round(seed + i, seen)) {
            fprintf(stderr, "replay: test_runq %" PRIu64 " 1\n", seed + i);
            failures++;
            return;
        }
    printf("model: %" PRIu64 " operations equal; %" PRIu64 " promotions by count, %" PRIu64 " by wait, %" PRIu64
           " capped picks, %" PRIu64 " refusals, %" PRIu64 " cancels\n",
           ops, seen[0], seen[1], seen[2], seen[3], seen[4]);
    if (ops >= 500000) /* a blind test is a failed test */
        for (int i = 0; i < 5; i++)
            EXPECT(seen[i] > 0);
}

int main(int argc, char **argv)
{
    const char *seed_text = argc > 1 ? argv[1] : getenv("ART_TEST_SEED");
    const char *ops_text = argc > 2 ? argv[2] : getenv("ART_TEST_OPS");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 0) : (uint64_t)time(NULL);
    uint64_t ops = ops_text ? strtoull(ops_text, NULL, 0) : 3000000;
    printf("seed %" PRIu64 "\n", seed);
    fflush(stdout);
    test_config_ranges();
    test_strict_tiers_and_fifo();
    test_weights_share_slot_time();
    test_debt_is_kept_credit_is_not();
    test_free_slices_end_a_turn_too();
    test_aging_by_count();
    test_a_promotion_is_worth_what_passed();
    test_tier0_picks_count_for_aging();
    test_aging_by_wait();
    test_fault_S30_promotions_keep_their_distance();
    test_fault_S30_bound_of_waiting();
    test_fault_S31_tier_survives_requeue();
    test_fault_S35_aging_stays_in_the_tenants_share();
    test_preempt();
    test_yield();
    test_tier0_cap();
    test_cancel();
    test_fault_S33_bounds_count_holders();
    test_extreme_charges_and_weights();
    test_model(seed, ops);
    printf(failures ? "%d FAILED\n" : "ok\n", failures);
    return failures != 0;
}
