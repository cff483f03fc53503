/* runq_model.c: see runq_model.h. Clarity over speed everywhere; every list is an array that gets shifted. */
#include "runq_model.h"

#include <stdlib.h>
#include <string.h>

typedef struct fifo { /* one tenant in one tier */
    int32_t *tasks;
    uint32_t length;
    int64_t deficit_ns;
    bool in_turn;
} fifo;

typedef struct span { /* tier-0 slot time */
    uint64_t start_ns, end_ns;
} span;

struct art_model {
    art_runq_config config;
    uint32_t task_count;
    art_model_task *tasks;
    uint32_t *weights;
    fifo *fifos[ART_TIERS];
    uint32_t *ring[ART_TIERS]; /* tenants with work, [0] is next */
    uint32_t ring_length[ART_TIERS];
    uint64_t passed[ART_TIERS], passed_ns[ART_TIERS], picks, promoted_at[ART_TIERS], arrivals;
    bool ever_promoted[ART_TIERS];
    span *spans;
    size_t span_count, span_room;
    uint64_t *tenant_items, *tenant_bytes;
    art_runq_stats stats;
};

art_model *art_model_create(const art_runq_config *config, uint32_t tasks)
{
    art_model *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    uint32_t n = config->max_tenants;
    bool ok = true;
    m->config = *config;
    m->task_count = tasks;
    ok &= (m->tasks = calloc(tasks, sizeof *m->tasks)) != NULL;
    ok &= (m->weights = calloc(n, sizeof *m->weights)) != NULL;
    ok &= (m->tenant_items = calloc(n, sizeof *m->tenant_items)) != NULL;
    ok &= (m->tenant_bytes = calloc(n, sizeof *m->tenant_bytes)) != NULL;
    for (uint32_t t = 0; t < ART_TIERS; t++) {
        ok &= (m->ring[t] = calloc(n, sizeof *m->ring[t])) != NULL;
        ok &= (m->fifos[t] = calloc(n, sizeof *m->fifos[t])) != NULL;
        for (uint32_t i = 0; ok && i < n; i++)
            ok &= (m->fifos[t][i].tasks = calloc(tasks, sizeof(int32_t))) != NULL;
    }
    for (uint32_t i = 0; ok && i < n; i++)
        m->weights[i] = 1;
    if (!ok) {
        art_model_destroy(m);
        return NULL;
    }
    return m;
}

void art_model_destroy(art_model *m)
{
    if (!m)
        return;
    for (uint32_t t = 0; t < ART_TIERS; t++) {
        for (uint32_t i = 0; m->fifos[t] && i < m->config.max_tenants; i++)
            free(m->fifos[t][i].tasks);
        free(m->fifos[t]);
        free(m->ring[t]);
    }
    free(m->tasks);
    free(m->weights);
    free(m->tenant_items);
    free(m->tenant_bytes);
    free(m->spans);
    free(m);
}

art_model_task *art_model_at(art_model *m, int32_t task)
{
    return &m->tasks[task];
}

void art_model_tenant_set(art_model *m, uint32_t tenant, uint32_t weight)
{
    m->weights[tenant] = weight;
}

int art_model_admit(art_model *m, uint32_t tenant, uint64_t bytes)
{
    const art_runq_config *c = &m->config;
    bool fits = m->stats.admitted_items + 1 <= c->items_max && m->stats.admitted_bytes + bytes <= c->bytes_max;
    if (c->tenant_items_max && m->tenant_items[tenant] + 1 > c->tenant_items_max)
        fits = false;
    if (c->tenant_bytes_max && m->tenant_bytes[tenant] + bytes > c->tenant_bytes_max)
        fits = false;
    if (!fits) {
        m->stats.refusals++;
        return ART_EFULL;
    }
    m->stats.admitted_items++;
    m->stats.admitted_bytes += bytes;
    m->tenant_items[tenant]++;
    m->tenant_bytes[tenant] += bytes;
    return 0;
}

void art_model_release(art_model *m, uint32_t tenant, uint64_t bytes)
{
    m->stats.admitted_items--;
    m->stats.admitted_bytes -= bytes;
    m->tenant_items[tenant]--;
    m->tenant_bytes[tenant] -= bytes;
}

/* ---------------------------------------------------------------- lists */

static void ring_insert(art_model *m, uint32_t tier, uint32_t at, uint32_t tenant)
{
    uint32_t *ring = m->ring[tier], n = m->ring_length[tier]++;
    memmove(ring + at + 1, ring + at, (n - at) * sizeof *ring);
    ring[at] = tenant;
}

static void ring_remove(art_model *m, uint32_t tier, uint32_t tenant)
{
    uint32_t *ring = m->ring[tier], n = m->ring_length[tier]--, at = 0;
    while (ring[at] != tenant)
        at++;
    memmove(ring + at, ring + at + 1, (n - at - 1) * sizeof *ring);
}

static void link_task(art_model *m, int32_t id, bool interrupted)
{
    art_model_task *task = &m->tasks[id];
    fifo *f = &m->fifos[task->tier][task->tenant];
    if (f->length == 0) {
        if (interrupted) {
            ring_insert(m, task->tier, 0, task->tenant);
        } else {
            f->in_turn = false;
            f->deficit_ns = f->deficit_ns < 0 ? f->deficit_ns : 0;
            ring_insert(m, task->tier, m->ring_length[task->tier], task->tenant);
        }
    }
    if (interrupted) {
        memmove(f->tasks + 1, f->tasks, f->length * sizeof *f->tasks);
        f->tasks[0] = id;
    } else {
        f->tasks[f->length] = id;
    }
    f->length++;
    task->queued = true;
    task->arrival = m->arrivals++;
    m->stats.queued[task->tier]++;
}

static void unlink_task(art_model *m, int32_t id)
{
    art_model_task *task = &m->tasks[id];
    fifo *f = &m->fifos[task->tier][task->tenant];
    uint32_t at = 0;
    while (f->tasks[at] != id)
        at++;
    f->length--;
    memmove(f->tasks + at, f->tasks + at + 1, (f->length - at) * sizeof *f->tasks);
    if (f->length == 0)
        ring_remove(m, task->tier, task->tenant);
    task->queued = false;
    m->stats.queued[task->tier]--;
}

static void insert(art_model *m, int32_t id, uint64_t now_ns, bool interrupted)
{
    m->tasks[id].enqueued_ns = now_ns;
    link_task(m, id, interrupted);
    m->stats.pushes[m->tasks[id].tier]++;
}

static fifo *fair_head(art_model *m, uint32_t tier)
{
    for (;;) {
        uint32_t tenant = m->ring[tier][0];
        fifo *f = &m->fifos[tier][tenant];
        if (!f->in_turn) {
            f->in_turn = true;
            f->deficit_ns += (int64_t)(m->config.drr_quantum_ns * m->weights[tenant]);
        }
        if (f->deficit_ns > 0)
            return f;
        f->in_turn = false;
        ring_remove(m, tier, tenant);
        ring_insert(m, tier, m->ring_length[tier], tenant);
    }
}

/* ---------------------------------------------------------------- picks */

static int32_t pick_tier(art_model *m, uint32_t tier)
{
    fifo *f = fair_head(m, tier);
    int32_t id = f->tasks[0];
    f->deficit_ns -= (int64_t)m->config.pick_charge_ns;
    unlink_task(m, id);
    m->picks++;
    m->stats.pops[tier]++;
    for (uint32_t t = tier + 1; t < ART_TIERS; t++)
        if (m->stats.queued[t])
            m->passed[t]++;
    return id;
}

static void age(art_model *m, uint32_t tier, uint64_t now_ns)
{
    if (!m->stats.queued[tier])
        return;
    uint64_t oldest = art_model_oldest_ns(m, tier), wait = m->config.aging_wait_ns[tier];
    uint64_t threshold = m->config.aging_threshold, spacing = threshold ? threshold : 50;
    bool count = threshold && m->passed[tier] >= threshold;
    bool waited = wait && now_ns >= oldest && now_ns - oldest >= wait &&
                  (!m->ever_promoted[tier] || m->picks - m->promoted_at[tier] >= spacing);
    if (!count && !waited)
        return;
    fifo *f = fair_head(m, tier);
    int32_t id = f->tasks[0];
    f->deficit_ns -= (int64_t)m->config.drr_quantum_ns;
    unlink_task(m, id);
    m->tasks[id].aged_from = (uint8_t)tier;
    m->tasks[id].promoted = true;
    m->tasks[id].promoted_us = ART_PROMOTED_QUANTUM;
    if (count) { /* a mean pick of those that passed, or 1 ms if all of them together had more */
        uint64_t all_ns = m->passed_ns[tier], least_ns = m->passed[tier] * m->config.pick_charge_ns;
        all_ns = all_ns > least_ns ? all_ns : least_ns;
        uint64_t worth_ns = all_ns / m->passed[tier], some_ns = all_ns > 1000000 ? 1000000 : all_ns;
        m->tasks[id].promoted_us = (uint32_t)((worth_ns > some_ns ? worth_ns : some_ns) / 1000 + 1);
    }
    m->tasks[id].tier = 1;
    link_task(m, id, false);
    m->passed[tier] = m->passed_ns[tier] = 0;
    m->promoted_at[tier] = m->picks;
    m->ever_promoted[tier] = true;
    if (count)
        m->stats.promotions_count[tier]++;
    else
        m->stats.promotions_wait[tier]++;
}

static int32_t pick_lower(art_model *m, uint32_t tier_max, uint64_t now_ns)
{
    uint64_t candidates = 0;
    for (uint32_t t = 1; t <= tier_max; t++)
        candidates += m->stats.queued[t];
    if (!candidates)
        return -1;
    age(m, 2, now_ns);
    age(m, 3, now_ns);
    uint32_t tier = 1;
    while (!m->stats.queued[tier])
        tier++;
    return pick_tier(m, tier);
}

static bool lower_has_work(const art_model *m)
{
    return m->stats.queued[1] + m->stats.queued[2] + m->stats.queued[3] != 0;
}

void art_model_push(art_model *m, int32_t task, uint64_t now_ns)
{
    insert(m, task, now_ns, false);
}

int32_t art_model_pop(art_model *m, uint64_t now_ns)
{
    bool tier0 = m->stats.queued[0] != 0;
    if (tier0 && lower_has_work(m) && art_model_tier0_capped(m, now_ns)) {
        m->stats.tier0_capped++;
        tier0 = false;
    }
    return tier0 ? pick_tier(m, 0) : pick_lower(m, 3, now_ns);
}

int32_t art_model_preempt(art_model *m, int32_t cur, uint64_t now_ns)
{
    uint32_t tier = m->tasks[cur].tier;
    if (tier == 0)
        return -1;
    bool tier0 = m->stats.queued[0] != 0, capped = art_model_tier0_capped(m, now_ns);
    int32_t id = -1;
    if (tier0 && !capped) {
        id = pick_tier(m, 0);
    } else {
        id = pick_lower(m, tier - 1, now_ns);
        m->stats.tier0_capped += id >= 0 && tier0;
    }
    if (id >= 0)
        insert(m, cur, now_ns, true);
    return id;
}

int32_t art_model_yield(art_model *m, int32_t cur, uint64_t now_ns)
{
    uint32_t tier = m->tasks[cur].tier;
    bool capped = art_model_tier0_capped(m, now_ns), tier0 = m->stats.queued[0] != 0;
    int32_t id;
    if (tier == 0) {
        if (capped && lower_has_work(m)) {
            /* tier0_capped counts tasks that waited, and cur is not one until it is back */
            m->stats.tier0_capped += tier0;
            id = pick_lower(m, 3, now_ns);
            insert(m, cur, now_ns, false);
            return id;
        }
        insert(m, cur, now_ns, false);
        return pick_tier(m, 0);
    }
    if (tier0 && !capped) {
        id = pick_tier(m, 0);
        insert(m, cur, now_ns, false);
        return id;
    }
    insert(m, cur, now_ns, false);
    m->stats.tier0_capped += tier0;
    return pick_lower(m, 3, now_ns);
}

bool art_model_cancel(art_model *m, int32_t task)
{
    if (!m->tasks[task].queued)
        return false;
    unlink_task(m, task);
    m->stats.cancels++;
    return true;
}

/* ---------------------------------------------------------------- charges and the tier-0 share */

void art_model_charge(art_model *m, int32_t task, uint64_t slot_ns, uint64_t now_ns)
{
    uint32_t tier = m->tasks[task].tier;
    m->fifos[tier][m->tasks[task].tenant].deficit_ns -= (int64_t)slot_ns;
    for (uint32_t t = tier + 1; t < ART_TIERS; t++)
        if (m->stats.queued[t])
            m->passed_ns[t] += slot_ns;
    if (tier != 0)
        return;
    size_t kept = 0; /* times only grow in the tests, so what has left the window never comes back */
    for (size_t i = 0; i < m->span_count; i++)
        if (m->spans[i].end_ns + m->config.tier0_window_ns >= now_ns)
            m->spans[kept++] = m->spans[i];
    m->span_count = kept;
    if (m->span_count == m->span_room) {
        m->span_room = m->span_room ? m->span_room * 2 : 64;
        span *grown = realloc(m->spans, m->span_room * sizeof *grown);
        if (!grown)
            abort();
        m->spans = grown;
    }
    m->spans[m->span_count++] = (span){now_ns > slot_ns ? now_ns - slot_ns : 0, now_ns};
}

bool art_model_tier0_capped(const art_model *m, uint64_t now_ns)
{
    if (m->config.tier0_share_pct >= 100)
        return false;
    uint64_t step = m->config.tier0_window_ns / 8, boundary = now_ns / step * step;
    uint64_t since = boundary > 7 * step ? boundary - 7 * step : 0, used = 0;
    for (size_t i = 0; i < m->span_count; i++) {
        uint64_t start = m->spans[i].start_ns > since ? m->spans[i].start_ns : since;
        if (m->spans[i].end_ns > start)
            used += m->spans[i].end_ns - start;
    }
    return used * 100 > m->config.tier0_share_pct * m->config.slots * (7 * step + now_ns - boundary);
}

/* ---------------------------------------------------------------- looking */

uint32_t art_model_tiers(const art_model *m)
{
    uint32_t bits = 0;
    for (uint32_t t = 0; t < ART_TIERS; t++)
        bits |= (uint32_t)(m->stats.queued[t] != 0) << t;
    return bits;
}

void art_model_statistics(const art_model *m, art_runq_stats *out)
{
    *out = m->stats;
}

uint64_t art_model_oldest_ns(const art_model *m, uint32_t tier)
{
    const art_model_task *oldest = NULL;
    for (uint32_t i = 0; i < m->task_count; i++) {
        const art_model_task *task = &m->tasks[i];
        if (task->queued && task->tier == tier && (!oldest || task->arrival < oldest->arrival))
            oldest = task;
    }
    return oldest ? oldest->enqueued_ns : 0;
}
