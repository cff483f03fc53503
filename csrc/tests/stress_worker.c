/* Workers under load: guests that talk, compute, log, loop, starve and unwind, foreigns, and a control thread that answers,
 * grants, kills, unwinds and releases at random moments. worker.c and runq.c are compiled in
 * with random yields in their windows.
 * Oracles: every run and foreign ends, exactly once, with the right result unless it was killed; nothing is left in the queue, in
 * admission or among the live (S32); no wake-up is lost (a silence of WATCHDOG_MS fails). Needs AGENTRT_WASMTIME_LIB. */
#include <sched.h>

static void window(void);

#define ART_RUNQ_WINDOW() window()
#include "../runq.c"
#undef CHECK

#define ART_WORKER_WINDOW() window()
#include "../worker.c"

#include "check.h"
#include "pool_fixture.h"

static const uint64_t DURATION_NS = UINT64_C(4000000000);

static _Atomic(uint32_t) window_odds; /* one in so many windows is opened; 0: none */

static void window(void)
{
    static _Thread_local uint64_t random;
    uint32_t odds = atomic_load_explicit(&window_odds, memory_order_relaxed);
    if (!odds) {
        return;
    }
    if (!random) {
        random = (uint64_t)(uintptr_t)&random;
    }
    uint64_t r = check_random(&random) % (odds * 64);
    if (r == 0) { /* descheduled for long */
        for (int i = 0; i < 50; i++) {
            sched_yield();
        }
    } else if (r % odds == 0) {
        sched_yield();
    }
}

enum { JOBS = 200, FOREIGNS = 6, TENANTS = 5 };

typedef enum kind { TALKS, COMPUTES, LAST_WORDS, LOOPS, ASKS, LOGS, HUNGERS, STARTS, SCRIPTED, UNDOES, KINDS } kind;

typedef struct actor {
    job j;
    kind kind;
    bool used, killed, fed, unwound;
    uint8_t floor;     /* that it is lent, as last wanted */
    bool floor_wanted; /* it said busy: to be asked again */
    uint32_t input[2];
    script_line lines[8];
} actor;

static actor actors[JOBS];
static foreign_job foreigns[FOREIGNS];
static bool foreign_used[FOREIGNS];
static uint64_t seed, submitted, refused, kills, unwinds, undone, loans, loans_late, completed[KINDS];

static uint64_t pick(uint64_t n)
{
    return check_random(&seed) % n;
}

static void actor_start(actor *a)
{
    static const enum guest_name names[KINDS] = {GUEST_TALKER, GUEST_COMPUTE, GUEST_LAST_WORDS,  GUEST_HOG,   GUEST_ASKER,
                                                 GUEST_LOGGER, GUEST_SCRIPT,  GUEST_START_CALLS, GUEST_SCRIPT,
                                                 GUEST_UNWINDER};
    /* hogs are few, or nothing else would run */
    kind k = pick(40) == 0 ? (kind)(LOOPS + pick(3)) : pick(4) == 0 ? UNDOES : pick(3) ? TALKS : (kind)pick(KINDS);
    if ((k == LOOPS || k == ASKS || k == LOGS) && pick(4)) {
        k = SCRIPTED;
    }
    *a = (actor){.kind = k, .floor = ART_TIERS};
    submit_options o = {.tenant = (uint32_t)pick(TENANTS), .manual = true};
    if (k == TALKS) {
        a->input[0] = 1 + (uint32_t)pick(12);
        a->input[1] = (uint32_t)pick(pick(10) ? 100 : 200000);
    } else if (k == COMPUTES) {
        a->input[0] = (uint32_t)pick(2000);
    }
    o.input = a->input;
    o.input_len = 8;
    if (k == HUNGERS || k == SCRIPTED) {
        a->lines[0] = (script_line){.what = SCRIPT_SPIN, .a = (int32_t)pick(200000)};
        a->lines[1] = (script_line){.what = SCRIPT_CALL, .a = 1 + (int32_t)pick(3)};
        a->lines[2] = (script_line){.what = SCRIPT_SPIN, .a = (int32_t)pick(200000)};
        o.input = a->lines;
        o.input_len = 3 * sizeof *a->lines;
        o.fuel = k == HUNGERS ? 1 + pick(1 << 20) : 0;
        o.not_final = k == HUNGERS;
    }
    if (k == UNDOES) {
        a->lines[0] = (script_line){.what = SCRIPT_DEEP, .a = (int32_t)pick(200)};
        a->lines[1] = (script_line){.what = SCRIPT_SPIN, .a = (int32_t)pick(100000)};
        a->lines[2] = (script_line){.what = SCRIPT_CALL, .a = 1 + (int32_t)pick(3)};
        a->lines[3] = (script_line){.what = SCRIPT_UNWIND};
        a->lines[4] = (script_line){.what = SCRIPT_SPIN, .a = (int32_t)pick(100000)};
        a->lines[5] = (script_line){.what = SCRIPT_DEEP, .a = (int32_t)pick(200)};
        a->lines[6] = (script_line){.what = SCRIPT_CALL, .a = 1};
        a->lines[7] = (script_line){.what = SCRIPT_RETURN, .a = 21};
        o.input = a->lines;
        o.input_len = sizeof a->lines;
        o.replay = pick(4) == 0;
    }
    uint8_t tier = pick(10) ? (uint8_t)(1 + pick(3)) : 0;
    int err = job_try_submit(&a->j, names[k], tier, o);
    CHECK(err == 0 || err == ART_EFULL);
    a->used = err == 0;
    submitted += err == 0;
    refused += err != 0;
}

static void actor_kill(actor *a)
{
    if (a->j.run) {
        a->killed = true;
        kills++;
        art_run_kill(a->j.run);
    }
}

static void actor_unwind(actor *a)
{
    if (a->j.run) {
        a->unwound = true;
        unwinds++;
        CHECK_OK(art_run_unwind(a->j.run, 0, pick(8) ? UINT64_C(1) << 40 : pick(300000)));
        CHECK(a->j.run); /* its exit is an event like any other */
    }
}

static void actor_lend(actor *a)
{
    if (a->j.run && (a->floor_wanted || pick(60) == 0)) {
        if (!a->floor_wanted) {
            a->floor = (uint8_t)pick(ART_TIERS + 1);
        }
        int err = art_run_lend(a->j.run, a->floor);
        CHECK(err == 0 || err == ART_EBUSY);
        a->floor_wanted = err == ART_EBUSY;
        loans++;
        loans_late += a->floor_wanted;
    }
}

static void actor_step(actor *a)
{
    job *j = &a->j;
    actor_lend(a);
    if (j->held_count && (j->waiting || pick(3) == 0)) {
        job_answer_held(j, (uint32_t)pick(j->held_count));
    }
    if (a->kind == HUNGERS && !a->fed && (j->fuel_stops || pick(20) == 0)) {
        switch (pick(4)) {
        case 0:
            art_run_grant(j->run, 0, true); /* too little, and no more */
            a->fed = true;
            break;
        case 1:
            art_run_grant(j->run, 1 << 20, false);
            break;
        default:
            art_run_grant(j->run, UINT64_C(1) << 40, pick(2));
            a->fed = true;
        }
    }
    bool endless = a->kind == LOOPS || a->kind == ASKS || a->kind == LOGS;
    if (pick(endless ? 300 : 20000) == 0) {
        actor_kill(a);
    }
    if (pick(a->unwound ? 500 : a->kind == UNDOES ? 12 : endless ? 300 : 5000) == 0) {
        actor_unwind(a);
    }
    if (pick(3000) == 0) {
        art_run_go_live(j->run); /* harmless, and a wake-up at an odd moment */
    }
}

static void actor_check(actor *a)
{
    const job *j = &a->j;
    art_exit_reason reason = j->view.exit.reason;
    completed[a->kind]++;
    CHECK_MSG((reason == ART_EXIT_RETURNED && a->kind != STARTS) ||
                  (reason == ART_EXIT_FAILED && a->kind == STARTS) || /* it would like an answer of five bytes */
                  (a->killed && reason == ART_EXIT_KILLED) ||
                  (a->unwound && reason == ART_EXIT_UNWOUND) || (a->kind == HUNGERS && reason == ART_EXIT_FUEL),
              "kind %d reason %d code %d: %s", a->kind, reason, j->view.exit.code, j->message);
    CHECK(reason != ART_EXIT_RETURNED || a->kind != TALKS || j->output_len == 4);
    CHECK(j->view.fuel > 0 || reason == ART_EXIT_KILLED || reason == ART_EXIT_FUEL || reason == ART_EXIT_UNWOUND);
    CHECK(!j->unwinding || a->kind == UNDOES);
    if (j->unwinding && reason == ART_EXIT_UNWOUND && !j->message[0]) {
        CHECK_EQ(j->view.exit.code, 21); /* the handlers came to their end */
        CHECK_EQ(j->requests, j->asked_before + 2);
        undone++;
    }
    a->used = false;
}

static void foreign_step(uint32_t i)
{
    foreign_job *f = &foreigns[i];
    if (foreign_used[i] && f->released) {
        foreign_used[i] = false;
    } else if (!foreign_used[i]) {
        if (pick(10) == 0) {
            foreign_submit(f, -1, (uint8_t)pick(4));
            foreign_used[i] = true;
        }
    } else if (pick(30) == 0) {
        art_foreign_release(f->foreign);
    } else if (pick(6) == 0) {
        int err = art_foreign_lend(f->foreign, (uint8_t)pick(ART_TIERS + 1));
        CHECK(err == 0 || err == ART_EBUSY);
        loans++;
        loans_late += err == ART_EBUSY;
    }
}

static void round_of(uint64_t until_ns, uint32_t workers, uint32_t live_max, uint32_t odds)
{
    art_pool_config config = pool_config(workers);
    config.live_max = live_max;
    config.runq.items_max = JOBS - 20;
    config.runq.aging_threshold = 50;
    config.runq.aging_wait_ns[2] = config.runq.aging_wait_ns[3] = 5000000;
    config.runq.tier0_share_pct = pick(2) ? 100 : 10;
    for (int i = 0; i < ART_TIERS; i++) {
        config.quantum_ns[i] = 200000 + pick(3000000);
    }
    config.micro_slice_fuel = 1000 + pick(100000);
    atomic_store(&window_odds, odds);
    pool_open(&config);
    bool stopping = false;
    for (;;) {
        bool any = false;
        stopping = stopping || art_sys_now_ns() >= until_ns;
        for (uint32_t i = 0; i < JOBS; i++) {
            actor *a = &actors[i];
            if (a->used && a->j.done) {
                actor_check(a);
            }
            if (!a->used && !stopping && pick(100) == 0) {
                actor_start(a);
            } else if (a->used) {
                actor_step(a);
            }
            any = any || a->used;
        }
        for (uint32_t i = 0; i < FOREIGNS; i++) {
            if (!stopping || foreign_used[i]) {
                foreign_step(i);
            }
            any = any || foreign_used[i];
        }
        if (!any) {
            break;
        }
        if (!take_events() && stopping) { /* answer and end all that is left; then only events can change anything */
            bool moves = false;
            for (uint32_t i = 0; i < JOBS; i++) {
                actor *a = &actors[i];
                if (!a->used || a->j.done) {
                    continue;
                }
                a->j.manual = false;
                while (a->j.held_count) {
                    job_answer_held(&a->j, (uint32_t)pick(a->j.held_count));
                    moves = true;
                }
                if (a->kind == UNDOES) { /* in replay an answer may have come before the wait for it */
                    art_run_go_live(a->j.run);
                }
                if (a->kind == HUNGERS) {
                    art_run_grant(a->j.run, UINT64_C(1) << 40, true);
                }
                if ((a->kind == LOOPS || a->kind == ASKS || a->kind == LOGS) && !a->killed) {
                    actor_kill(a);
                    moves = true;
                }
            }
            for (uint32_t i = 0; i < FOREIGNS; i++) {
                if (foreign_used[i] && !foreigns[i].released) {
                    art_foreign_release(foreigns[i].foreign);
                }
            }
            if (!moves && !take_events()) {
                wait_for_events("the last ones");
            }
        }
    }
    pool_close_empty();
}

/* One blocked run holds the only place to live; others are killed on their way to the starved list, in it, and out of it. Nobody
 * makes room for them, and they end all the same; and when the place is free, it is nobody's who is dead. */
static void starved_kills(uint64_t until_ns)
{
    for (uint32_t round = 0; art_sys_now_ns() < until_ns; round++) {
        art_pool_config config = pool_config(2);
        config.live_max = 1;
        atomic_store(&window_odds, 1 + round % 3);
        pool_open(&config);
        for (int i = 0; i < 20; i++) {
            job holder, victims[3], last;
            script_line call = {.what = SCRIPT_CALL, .a = 1};
            submit_options o = {.input = &call, .input_len = sizeof call, .manual = true};
            job_submit(&holder, GUEST_SCRIPT, 1, o);
            PUMP_UNTIL(holder.waiting);
            for (int k = 0; k < 3; k++) {
                job_submit(&victims[k], GUEST_HELLO, 1, (submit_options){0});
            }
            job_submit(&last, GUEST_HELLO, 1, (submit_options){0});
            for (uint64_t k = pick(30); k; k--) {
                sched_yield();
            }
            bool early = pick(2);
            if (early) {
                for (int k = 0; k < 3; k++) {
                    art_run_kill(victims[k].run);
                }
                PUMP_UNTIL(victims[0].done && victims[1].done && victims[2].done);
            }
            job_answer_held(&holder, 0);
            for (int k = 0; !early && k < 3; k++) {
                art_run_kill(victims[k].run);
            }
            PUMP_UNTIL(holder.done && last.done && victims[0].done && victims[1].done && victims[2].done);
            expect_end(&last, ART_EXIT_RETURNED, 0);
        }
        pool_close_empty();
    }
}

/* Two workers, two endless runs: both run, however the second came to preempt the first just when the other worker was about to
 * sleep. */
static void both_workers_work(uint64_t until_ns)
{
    for (uint32_t round = 0; art_sys_now_ns() < until_ns; round++) {
        art_pool_config config = pool_config(2);
        config.quantum_ns[0] = round % 2 ? FOREVER_NS : 1000000; /* by preemption, or by a quantum that ends */
        atomic_store(&window_odds, 1 + round % 3);
        pool_open(&config);
        job low;
        job_submit(&low, GUEST_ASKER, 3, (submit_options){.manual = true});
        PUMP_UNTIL(low.requests == 1);
        for (int i = 0; i < 20; i++) {
            job small, urgent;
            job_submit(&small, GUEST_HELLO, 1, (submit_options){0});
            PUMP_UNTIL(small.done); /* its worker is on its way to sleep */
            job_submit(&urgent, GUEST_ASKER, 0, (submit_options){.manual = true});
            PUMP_UNTIL(urgent.requests == 1);
            SPIN_UNTIL(art_runq_tiers(art_pool_runq(pool)) == 0);
            art_run_kill(urgent.run);
            PUMP_UNTIL(urgent.done);
        }
        art_run_kill(low.run);
        PUMP_UNTIL(low.done);
        pool_close_empty();
    }
}

/* As many foreigns as workers, of two tiers, right after the workers have started: each gets one, whoever preempts whom on the
 * way. Then urgent runs take all slots, and give them back. */
static void foreigns_fill_all_workers(uint64_t until_ns)
{
    for (uint32_t round = 0; art_sys_now_ns() < until_ns; round++) {
        enum { WORKERS = 4 };
        art_pool_config config = pool_config(WORKERS);
        foreign_job hosted[WORKERS];
        job urgent[WORKERS];
        atomic_store(&window_odds, 1 + round % 4);
        pool_open(&config);
        for (uint64_t i = pick(60); i; i--) {
            sched_yield();
        }
        for (int i = 0; i < WORKERS; i++) {
            foreign_submit(&hosted[i], -1, (uint8_t)(2 + pick(2)));
        }
        for (int i = 0; i < WORKERS; i++) {
            PUMP_UNTIL(hosted[i].state == ART_FOREIGN_GRANTED);
        }
        for (int i = 0; i < WORKERS; i++) {
            job_submit(&urgent[i], GUEST_ASKER, (uint8_t)pick(2), (submit_options){.manual = true});
        }
        for (int i = 0; i < WORKERS; i++) {
            PUMP_UNTIL(urgent[i].requests == 1 && hosted[i].state == ART_FOREIGN_PREEMPTED);
        }
        for (int i = 0; i < WORKERS; i++) {
            art_run_kill(urgent[i].run);
        }
        for (int i = 0; i < WORKERS; i++) {
            PUMP_UNTIL(urgent[i].done && hosted[i].state == ART_FOREIGN_GRANTED);
        }
        for (int i = 0; i < WORKERS; i++) {
            art_foreign_release(hosted[i].foreign);
        }
        for (int i = 0; i < WORKERS; i++) {
            PUMP_UNTIL(hosted[i].released);
        }
        pool_close_empty();
    }
}

int main(void)
{
    seed = check_seed(art_sys_now_ns());
    fixture_open(JOBS);
    uint64_t start_ns = art_sys_now_ns();
    static const uint32_t workers[] = {2, 1, 4, 3, 2, 4, 2, 3}, lives[] = {JOBS, 20, 3, 1, 17, 60, 2, JOBS};
    static const uint32_t odds[] = {0, 8, 4, 8, 2, 16, 3, 5};
    for (uint32_t i = 0; i < 8; i++) {
        round_of(start_ns + DURATION_NS * (i + 1) / 8, workers[i], lives[i], odds[i]);
    }
    starved_kills(start_ns + DURATION_NS + DURATION_NS / 4);
    both_workers_work(start_ns + DURATION_NS + DURATION_NS / 2);
    foreigns_fill_all_workers(start_ns + DURATION_NS + DURATION_NS * 3 / 4);
    fixture_close();
    CHECK(undone > 0 && loans > 0);
    printf("%ju runs, %ju refused, %ju kills, %ju unwinds, %ju undone, %ju loans (%ju late), %ju events; by kind:", (uintmax_t)submitted,
           (uintmax_t)refused, (uintmax_t)kills, (uintmax_t)unwinds, (uintmax_t)undone,
           (uintmax_t)loans, (uintmax_t)loans_late, (uintmax_t)events_total);
    for (int i = 0; i < KINDS; i++) {
        printf(" %ju", (uintmax_t)completed[i]);
    }
    printf("\nok\n");
    return 0;
}
