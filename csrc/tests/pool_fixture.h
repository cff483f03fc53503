/* pool_fixture.h: a pool of workers with a control plane for tests. Include after worker.h (or worker.c) and check.h.
 *
 * The control thread calls pump() until a condition holds; it takes events, keeps what runs said, and answers. Nothing sleeps:
 * a condition that does not come true within WATCHDOG_MS without any event fails the test. */
#ifndef ART_TESTS_POOL_FIXTURE_H
#define ART_TESTS_POOL_FIXTURE_H

#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>

#include "art_err.h"
#include "guests.h"
#include "sys_linux.h"

/* Script lines and configs name what matters. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

/* Guests' memory and stacks are reused by way of the engine, whose own synchronisation ThreadSanitizer does not see: what host
 * functions do there looks like races of two guests. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
    return "race:^import_\n";
}
#endif
#endif

enum { WATCHDOG_MS = 60000, HELD_MAX = 80 };
#define FOREVER_NS (UINT64_C(1) << 36) /* as a quantum: 69 s */

typedef struct job {
    art_run *run; /* NULL once it was freed */
    enum guest_name guest;
    bool manual;          /* requests are kept in `held` rather than answered */
    int32_t held[HELD_MAX];
    uint32_t held_count;
    uint32_t requests, waits, fuel_stops;
    uint64_t wait_seen, fuel_seen;
    bool waiting;         /* as last reported */
    bool unwinding;       /* its handlers have begun, */
    uint32_t asked_before; /* after so many requests of the program */
    uint64_t seq;
    bool done;
    art_run_view view;    /* of the exit; pointers inside are stale */
    int32_t output;       /* first four bytes */
    uint32_t output_len;
    char message[200];
} job;

typedef struct foreign_job {
    art_foreign *foreign;
    art_foreign_state state; /* as last reported */
    uint32_t grants, preemptions, events;
    bool released;
} foreign_job;

typedef struct script_line {
    int32_t what, a, b, c, d, e;
} script_line;

static art_engine *fixture_engine;
static art_module *fixture_modules[GUEST_COUNT];
static art_pool *pool;
static uint64_t ended_total, events_total;

static inline void fixture_open(uint32_t guests_max)
{
    const char *library = getenv("AGENTRT_WASMTIME_LIB");
    CHECK_MSG(library && *library, "AGENTRT_WASMTIME_LIB must name wasmtime's shared library");
    art_engine_config config = {
        .library = library,
        .guests_max = guests_max,
        .stacks_max = guests_max,
        .memory_bytes_max = 1 << 21,
        .wasm_stack_bytes = 64 << 10,
        .table_elements_max = 100,
        .request_bytes_max = 1 << 16,
        .result_bytes_max = 1 << 20,
        .inflight_max = 64,
    };
    char msg[ART_MSG_BYTES] = "";
    CHECK_MSG(art_engine_create(&config, &fixture_engine, msg, sizeof msg) == 0, "%s", msg);
}

static inline art_module *fixture_module(enum guest_name name)
{
    if (!fixture_modules[name]) {
        char msg[ART_MSG_BYTES] = "";
        uint8_t *artifact = NULL;
        size_t len = 0;
        int err = art_engine_compile(fixture_engine, guests[name].bytes, guests[name].len, &artifact, &len, msg, sizeof msg);
        CHECK_MSG(err == 0, "%s", msg);
        CHECK_OK(art_module_load(fixture_engine, artifact, len, &fixture_modules[name], msg, sizeof msg));
        free(artifact);
    }
    return fixture_modules[name];
}

static inline void fixture_close(void)
{
    for (int i = 0; i < GUEST_COUNT; i++) {
        art_module_release(fixture_modules[i]);
    }
    art_engine_destroy(fixture_engine);
}

static inline art_pool_config pool_config(uint32_t workers)
{
    art_pool_config config = {
        .workers = workers,
        .nice = 0,
        .quantum_ns = {FOREVER_NS, FOREVER_NS, FOREVER_NS, FOREVER_NS},
        .micro_slice_fuel = 50000,
        .live_max = 200,
        .base_tier_ops = 1u << 1,
        .engine = fixture_engine,
    };
    art_runq_config_default(&config.runq);
    config.runq.tier0_share_pct = 100;
    config.runq.aging_threshold = 0; /* strict tiers, unless a test says otherwise */
    memset(config.runq.aging_wait_ns, 0, sizeof config.runq.aging_wait_ns);
    return config;
}

static inline void pool_open(const art_pool_config *config)
{
    CHECK_OK(art_pool_create(config, &pool));
}

static inline art_pool_stats pool_stats(void)
{
    art_pool_stats stats;
    art_pool_statistics(pool, &stats);
    return stats;
}

/* --- runs ------------------------------------------------------------------------- */

typedef struct submit_options {
    const void *input;
    uint32_t input_len;
    uint32_t tenant;
    uint64_t fuel;
    bool not_final, admitted, manual, replay;
} submit_options;

static inline int job_try_submit(job *j, enum guest_name guest, uint8_t tier, submit_options o)
{
    *j = (job){.guest = guest, .manual = o.manual, .fuel_seen = UINT64_MAX};
    art_run_config config = {
        .guest = {.module = fixture_module(guest), .input = o.input, .input_len = o.input_len, .replay = o.replay},
        .tenant = o.tenant,
        .tier = tier,
        .fuel = o.fuel ? o.fuel : UINT64_C(1) << 50,
        .fuel_final = !o.not_final,
        .admitted = o.admitted,
        .user = j,
    };
    return art_run_submit(pool, &config, &j->run);
}

static inline void job_submit(job *j, enum guest_name guest, uint8_t tier, submit_options o)
{
    CHECK_OK(job_try_submit(j, guest, tier, o));
}

/* The answer to a handle is the handle. */
static inline void job_answer(job *j, int32_t handle)
{
    j->waiting = false;
    art_run_answer(j->run, art_answer_new(handle, 0, 0, ++j->seq, &handle, sizeof handle));
}

static inline void job_answer_held(job *j, uint32_t index)
{
    int32_t handle = j->held[index];
    j->held[index] = j->held[--j->held_count];
    job_answer(j, handle);
}

static inline void job_event(job *j)
{
    art_run_view view;
    CHECK(!j->done); /* no event follows the exit */
    art_run_look(j->run, &view);
    for (art_request *r = art_guest_take_requests(art_run_guest(j->run)), *next; r; r = next) {
        next = r->next;
        if (r->handle == ART_REQUEST_UNWINDING) {
            CHECK(!j->unwinding);
            j->unwinding = true;
            j->asked_before = j->requests;
            j->held_count = 0; /* nobody takes these answers any more */
        } else if (r->handle) {
            CHECK_EQ(r->handle, j->requests + 1);
            j->requests++;
            CHECK(j->held_count < HELD_MAX);
            j->held[j->held_count++] = r->handle;
        }
        free(r);
    }
    if (view.done) {
        j->done = true;
        j->view = view;
        j->output_len = view.exit.output_len;
        if (view.exit.output_len >= 4) {
            memcpy(&j->output, view.exit.output, 4);
        }
        (void)snprintf(j->message, sizeof j->message, "%s", view.exit.message);
        art_run_free(j->run);
        j->run = NULL;
        ended_total++;
        return;
    }
    if (view.no_fuel && view.fuel_granted != j->fuel_seen) {
        j->fuel_seen = view.fuel_granted;
        j->fuel_stops++;
    }
    if (view.waiting) {
        CHECK(view.handle_count > 0 && view.handles[0] > 0 && (uint32_t)view.handles[0] <= j->requests);
        if (view.wait_number != j->wait_seen) {
            CHECK(view.wait_number > j->wait_seen);
            j->wait_seen = view.wait_number;
            j->waits++;
            j->waiting = true;
        }
    }
    while (!j->manual && j->held_count) {
        job_answer_held(j, j->held_count - 1);
    }
}

static inline void expect_end(const job *j, art_exit_reason reason, int32_t code)
{
    CHECK_MSG(j->done && j->view.exit.reason == reason && j->view.exit.code == code, "%s: done %d reason %d code %d: %s",
              guests[j->guest].name, j->done, j->view.exit.reason, j->view.exit.code, j->message);
}

/* --- foreigns ---------------------------------------------------------------------- */

static inline void foreign_submit(foreign_job *f, int pidfd, uint8_t tier)
{
    *f = (foreign_job){.state = ART_FOREIGN_QUEUED};
    CHECK_OK(art_foreign_submit(pool, pidfd, 0, tier, f, &f->foreign));
}

static inline void foreign_event(foreign_job *f)
{
    uint32_t grants, preemptions;
    CHECK(!f->released); /* no event follows RELEASED */
    f->state = art_foreign_look(f->foreign, &grants, &preemptions);
    CHECK(grants >= f->grants && preemptions >= f->preemptions);
    CHECK(f->state != ART_FOREIGN_GRANTED || grants == preemptions + 1);
    CHECK(f->state != ART_FOREIGN_PREEMPTED || grants == preemptions);
    f->grants = grants;
    f->preemptions = preemptions;
    f->events++;
    if (f->state == ART_FOREIGN_RELEASED) {
        f->released = true;
        art_foreign_free(f->foreign);
        f->foreign = NULL;
        ended_total++;
    }
}

/* --- the control thread ------------------------------------------------------------- */

/* Takes what events there are; false if there are none. */
static inline bool take_events(void)
{
    art_event *events[64];
    size_t count = art_evq_drain(art_pool_evq(pool), events, 64);
    for (size_t i = 0; i < count; i++) {
        art_run *run = NULL;
        art_foreign *foreign = NULL;
        events_total++;
        if (art_pool_event_take(events[i], &run, &foreign) == ART_OWNER_RUN) {
            job_event(art_run_user(run));
        } else {
            foreign_event(art_foreign_user(foreign));
        }
    }
    return count != 0;
}

static inline void wait_for_events(const char *what)
{
    struct pollfd fd = {.fd = art_evq_fd(art_pool_evq(pool)), .events = POLLIN};
    int ready = poll(&fd, 1, WATCHDOG_MS);
    if (ready != 1) {
        art_pool_stats s = pool_stats();
        art_runq_stats q;
        art_runq_statistics(art_pool_runq(pool), &q);
        fprintf(stderr, "live %ju starved %ju parks %ju slices %ju foreigns granted %ju preempted %ju "
                "queued %ju %ju %ju %ju admitted %ju tiers %#x\n",
                (uintmax_t)s.live, (uintmax_t)s.starved, (uintmax_t)s.parks, (uintmax_t)s.slices,
                (uintmax_t)s.foreign_grants, (uintmax_t)s.foreign_preemptions,
                (uintmax_t)q.queued[0], (uintmax_t)q.queued[1], (uintmax_t)q.queued[2], (uintmax_t)q.queued[3],
                (uintmax_t)q.admitted_items, art_runq_tiers(art_pool_runq(pool)));
        CHECK_MSG(ready == 1, "nothing happens any more; waiting for: %s", what);
    }
}

#define PUMP_UNTIL(condition)                 \
    do {                                      \
        while (!(condition)) {                \
            if (!take_events()) {             \
                wait_for_events(#condition);  \
            }                                 \
        }                                     \
    } while (0)

/* For a condition that is reached without an event: looks again and again. */
#define SPIN_UNTIL(condition)                                                                      \
    do {                                                                                           \
        uint64_t until_ns = art_sys_now_ns() + WATCHDOG_MS * UINT64_C(1000000);                    \
        while (!(condition)) {                                                                     \
            (void)take_events();                                                                   \
            CHECK_MSG(art_sys_now_ns() < until_ns, "does not come true: %s", #condition);          \
            sched_yield();                                                                         \
        }                                                                                          \
    } while (0)

/* Stops the pool and audits it: nothing may be left (S32). */
static inline void pool_close_empty(void)
{
    art_runq_stats queue;
    SPIN_UNTIL(pool_stats().live == 0);
    art_runq_statistics(art_pool_runq(pool), &queue);
    CHECK_EQ(queue.admitted_items, 0);
    CHECK_EQ(queue.admitted_bytes, 0);
    CHECK_EQ(art_runq_tiers(art_pool_runq(pool)), 0);
    CHECK_EQ(queue.queued[0] + queue.queued[1] + queue.queued[2] + queue.queued[3], 0);
    art__runq_verify(art_pool_runq(pool));
    CHECK(!take_events());
    art_pool_stop(pool);
    CHECK(!take_events());
    art_pool_destroy(pool);
    pool = NULL;
}

#endif
