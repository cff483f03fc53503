/* runq_model.h: the run queue again, naively, for tests: one thread, O(n), no tokens, no rounds skipped, no buckets.
 *
 * Written from docs/decisions/0001-run-queue.md, sharing only the types of runq.h. Tasks are indices; the model keeps
 * its own copy of tenant and tier, so a queue that forgets them is caught. Not part of the product.
 */
#ifndef ART_RUNQ_MODEL_H
#define ART_RUNQ_MODEL_H

#include "runq.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct art_model_task {
    uint32_t tenant;
    uint8_t tier;
    uint8_t aged_from;
    bool promoted;
    uint32_t promoted_us;
    bool queued;
    uint64_t enqueued_ns;
    uint64_t arrival; /* order in which tasks came into their tier */
} art_model_task;

typedef struct art_model art_model;

/* `tasks` tasks, indices 0..tasks-1, none queued; NULL if out of memory. Owner: the caller. */
art_model *art_model_create(const art_runq_config *config, uint32_t tasks);
void art_model_destroy(art_model *m);

/* The record of a task: tenant and tier are the caller's to write while it is not queued. */
art_model_task *art_model_at(art_model *m, int32_t task);

/* As their namesakes in runq.h; a task is returned as its index, nothing as -1. */
void art_model_tenant_set(art_model *m, uint32_t tenant, uint32_t weight);
int art_model_admit(art_model *m, uint32_t tenant, uint64_t bytes);
void art_model_release(art_model *m, uint32_t tenant, uint64_t bytes);
void art_model_push(art_model *m, int32_t task, uint64_t now_ns);
int32_t art_model_pop(art_model *m, uint64_t now_ns);
int32_t art_model_preempt(art_model *m, int32_t cur, uint64_t now_ns);
int32_t art_model_yield(art_model *m, int32_t cur, uint64_t now_ns);
void art_model_charge(art_model *m, int32_t task, uint64_t slot_ns, uint64_t now_ns);
bool art_model_cancel(art_model *m, int32_t task);
uint32_t art_model_tiers(const art_model *m);
bool art_model_tier0_capped(const art_model *m, uint64_t now_ns);
void art_model_statistics(const art_model *m, art_runq_stats *out); /* without inbox and busy */
uint64_t art_model_oldest_ns(const art_model *m, uint32_t tier);

#ifdef __cplusplus
}
#endif
#endif
