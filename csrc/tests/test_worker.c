/* Workers, one situation at a time. Needs AGENTRT_WASMTIME_LIB. */
#include "worker.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "pool_fixture.h"

/* Input of a guest `talker`. */
static submit_options talk(uint32_t rounds, uint32_t spin, bool manual)
{
    static uint32_t inputs[64][2];
    static uint32_t n;
    uint32_t *input = inputs[n++ % 64];
    input[0] = rounds;
    input[1] = spin;
    return (submit_options){.input = input, .input_len = 8, .manual = manual};
}

static void test_runs_on_any_number_of_workers(void)
{
    for (uint32_t workers = 1; workers <= 4; workers++) {
        enum { N = 200 };
        static job jobs[N];
        art_pool_config config = pool_config(workers);
        pool_open(&config);
        uint64_t before = ended_total;
        for (uint32_t i = 0; i < N; i++) {
            submit_options o = i % 2 ? talk(1 + i % 5, 10, false) : (submit_options){.input = "abcd", .input_len = 4};
            o.tenant = i % 7;
            job_submit(&jobs[i], i % 2 ? GUEST_TALKER : GUEST_HELLO, i % 4, o);
        }
        PUMP_UNTIL(ended_total == before + N);
        for (uint32_t i = 0; i < N; i++) {
            expect_end(&jobs[i], ART_EXIT_RETURNED, 0);
            CHECK_EQ(jobs[i].view.tier, i % 4);
            CHECK(jobs[i].view.first_ns >= jobs[i].view.submitted_ns && jobs[i].view.slot_ns > 0 && jobs[i].view.fuel > 0);
            CHECK(i % 2 || memcmp(&jobs[i].output, "abcd", 4) == 0);
        }
        pool_close_empty();
    }
}

/* Makes the only worker busy: returns when the hog runs. */
static void occupy(job *hog, uint8_t tier)
{
    job_submit(hog, GUEST_ASKER, tier, (submit_options){.manual = true});
    PUMP_UNTIL(hog->requests == 1);
}

static void test_tier_0_preempts_and_order_is_strict(void)
{
    art_pool_config config = pool_config(1);
    job hog, urgent, jobs[12];
    pool_open(&config);
    occupy(&hog, 3);
    job_submit(&urgent, GUEST_HELLO, 0, (submit_options){0});
    PUMP_UNTIL(urgent.done);
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done);
    expect_end(&hog, ART_EXIT_KILLED, 0);
    CHECK(hog.view.preemptions >= 1 && hog.view.demotions == 0);

    occupy(&hog, 0);
    for (int i = 0; i < 12; i++) {
        job_submit(&jobs[i], GUEST_HELLO, (uint8_t)(3 - i % 4), (submit_options){.tenant = (uint32_t)i % 3});
    }
    art_run_kill(hog.run);
    for (int i = 0; i < 12; i++) {
        PUMP_UNTIL(jobs[i].done);
    }
    for (int i = 0; i < 12; i++) {
        for (int k = 0; k < 12; k++) {
            CHECK(3 - i % 4 >= 3 - k % 4 || jobs[i].view.first_ns <= jobs[k].view.first_ns);
        }
    }
    PUMP_UNTIL(hog.done);
    CHECK_EQ(hog.view.preemptions, 0);
    pool_close_empty();
}

static void test_waits_for_a_slot_are_counted(void)
{
    art_pool_config config = pool_config(1);
    job hog, jobs[6];
    pool_open(&config);
    occupy(&hog, 0);
    for (int i = 0; i < 6; i++) {
        job_submit(&jobs[i], GUEST_HELLO, (uint8_t)(1 + i / 2), (submit_options){0});
    }
    uint64_t until_ns = art_sys_now_ns() + (UINT64_C(1) << 21);
    while (art_sys_now_ns() < until_ns) { /* so they wait for 2^21 ns at least */
    }
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done);
    for (int i = 0; i < 6; i++) {
        PUMP_UNTIL(jobs[i].done);
    }
    art_pool_stats stats = pool_stats();
    uint64_t total = 0;
    for (int tier = 0; tier < ART_TIERS; tier++) {
        uint64_t waits = 0, least_ns = 0;
        for (int bucket = 0; bucket < ART_WAIT_BUCKETS; bucket++) {
            waits += stats.waits[tier][bucket];
            least_ns += stats.waits[tier][bucket] * (bucket ? UINT64_C(1) << (ART_WAIT_FIRST_BIT + bucket - 1) : 0);
            CHECK(tier == 0 || bucket > 21 - ART_WAIT_FIRST_BIT || stats.waits[tier][bucket] == 0);
        }
        CHECK_EQ(waits, tier ? 2 : stats.slices - 6);
        CHECK(least_ns <= stats.waited_ns[tier]);
        total += waits;
    }
    CHECK_EQ(total, stats.slices);
    art_worker_stats worker;
    CHECK_OK(art_pool_worker_statistics(pool, 0, &worker));
    CHECK_EQ(worker.slices, stats.slices);
    CHECK_EQ(worker.slot_ns[0], stats.slot_ns[0]);
    CHECK_EQ(art_pool_worker_statistics(pool, 1, &worker), ART_EINVAL);
    pool_close_empty();
}

static void test_quantum_demotes_to_the_last_tier(void)
{
    art_pool_config config = pool_config(1);
    job hog;
    for (int i = 0; i < 4; i++) {
        config.quantum_ns[i] = 1000000;
    }
    pool_open(&config);
    occupy(&hog, 0);
    SPIN_UNTIL(pool_stats().demotions == 3);
    art_pool_stats stats = pool_stats();
    SPIN_UNTIL(pool_stats().slot_ns[3] > stats.slot_ns[3] + 3000000); /* and no further */
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done);
    CHECK_EQ(hog.view.tier, 3);
    CHECK_EQ(hog.view.demotions, 3);
    CHECK_EQ(pool_stats().demotions, 3);
    for (int i = 0; i < 3; i++) {
        CHECK(pool_stats().slot_ns[i] >= 1000000);
    }
    pool_close_empty();
}

/* Two hogs of one tier share the slot by quanta; the allotment is not given back by being preempted. */
static void test_allotment_survives_preemption(void)
{
    art_pool_config config = pool_config(1);
    config.quantum_ns[2] = 150000000; /* longer than a stall of a full machine */
    job hog, urgent;
    pool_open(&config);
    occupy(&hog, 2);
    uint32_t interruptions = 0;
    while (pool_stats().demotions == 0) {
        job_submit(&urgent, GUEST_HELLO, 0, (submit_options){0});
        PUMP_UNTIL(urgent.done);
        interruptions++;
    }
    CHECK(interruptions > 1);
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done);
    CHECK_EQ(hog.view.tier, 3);
    CHECK(pool_stats().slot_ns[2] < 1000000000); /* a quantum or a little more, on whatever machine */
    pool_close_empty();
}

static void test_a_step_returns_to_the_base_tier(void)
{
    for (int op = 1; op <= 2; op++) { /* 1 is in base_tier_ops, 2 is not */
        script_line lines[] = {{.what = SCRIPT_SPIN, .a = 60000000}, {.what = SCRIPT_SPIN, .a = 60000000},
                               {.what = SCRIPT_CALL, .a = op}};
        bool restored = false;
        for (int attempt = 0; attempt < 10 && !restored; attempt++) { /* a stall of the machine may demote it again */
            art_pool_config config = pool_config(1);
            config.quantum_ns[1] = 30000000;
            job j;
            pool_open(&config);
            job_submit(&j, GUEST_SCRIPT, 1, (submit_options){.input = lines, .input_len = sizeof lines});
            PUMP_UNTIL(j.done);
            expect_end(&j, ART_EXIT_RETURNED, 0);
            CHECK(j.view.demotions >= 1);
            restored = j.view.tier == 1;
            CHECK(op == 1 || !restored);
            pool_close_empty();
            if (op == 2) {
                break;
            }
        }
        CHECK_EQ(restored, op == 1);
    }
}

static void test_bad_arguments_and_closed_pool(void)
{
    art_pool_config config = pool_config(1);
    art_pool *none = NULL;
#define REFUSED(field, value)                                  \
    config = pool_config(1);                                   \
    config.field = (value);                                    \
    CHECK_EQ(art_pool_create(&config, &none), ART_EINVAL);     \
    CHECK(none == NULL)
    REFUSED(workers, 0);
    REFUSED(workers, 65);
    REFUSED(live_max, 0);
    REFUSED(micro_slice_fuel, 0);
    REFUSED(quantum_ns[3], 0);
    REFUSED(runq.max_tenants, 0);
    REFUSED(runq.tier0_window_ns, 1);
#undef REFUSED
    config = pool_config(1);
    pool_open(&config);
    job j;
    CHECK_EQ(job_try_submit(&j, GUEST_HELLO, 4, (submit_options){0}), ART_EINVAL);
    CHECK_EQ(job_try_submit(&j, GUEST_HELLO, 0, (submit_options){.tenant = 1u << 30}), ART_EINVAL);
    art_foreign *f = NULL;
    CHECK_EQ(art_foreign_submit(pool, -1, 0, 4, NULL, &f), ART_EINVAL);
    CHECK_EQ(art_foreign_submit(pool, -1, 1u << 30, 0, NULL, &f), ART_EINVAL);
    art_pool_stop(pool);
    CHECK_EQ(job_try_submit(&j, GUEST_HELLO, 0, (submit_options){0}), ART_ECLOSED);
    CHECK_EQ(art_foreign_submit(pool, -1, 0, 0, NULL, &f), ART_ECLOSED);
    CHECK(f == NULL);
    art_pool_destroy(pool);
    art_pool_destroy(NULL);
    art_run_free(NULL);
    art_foreign_free(NULL);
}

static void test_admission_is_exact_and_released(void)
{
    art_pool_config config = pool_config(1);
    config.runq.items_max = 3;
    job jobs[5], hog;
    pool_open(&config);
    occupy(&hog, 0); /* one of the three */
    job_submit(&jobs[0], GUEST_HELLO, 2, (submit_options){0});
    job_submit(&jobs[1], GUEST_HELLO, 2, (submit_options){0});
    CHECK_EQ(job_try_submit(&jobs[2], GUEST_HELLO, 0, (submit_options){0}), ART_EFULL);
    job_submit(&jobs[2], GUEST_HELLO, 2, (submit_options){.admitted = true}); /* recovered work is never refused */
    art_run_kill(jobs[0].run);
    PUMP_UNTIL(jobs[0].done);
    job_submit(&jobs[3], GUEST_HELLO, 2, (submit_options){0});
    CHECK_EQ(job_try_submit(&jobs[4], GUEST_HELLO, 0, (submit_options){0}), ART_EFULL);
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done && jobs[1].done && jobs[2].done && jobs[3].done);
    pool_close_empty();

    config = pool_config(1);
    config.runq.bytes_max = 100000;
    pool_open(&config);
    occupy(&hog, 0);
    static const char big[60000];
    job_submit(&jobs[0], GUEST_HELLO, 2, (submit_options){.input = big, .input_len = sizeof big});
    CHECK_EQ(job_try_submit(&jobs[1], GUEST_HELLO, 2, (submit_options){.input = big, .input_len = sizeof big}), ART_EFULL);
    job_submit(&jobs[1], GUEST_HELLO, 2, (submit_options){0});
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done && jobs[0].done && jobs[1].done);
    job_submit(&jobs[2], GUEST_HELLO, 2, (submit_options){.input = big, .input_len = sizeof big});
    PUMP_UNTIL(jobs[2].done);
    pool_close_empty();
}

/* --- live runs ---------------------------------------------------------------------------- */

static void test_starved_runs_all_run(void)
{
    enum { N = 60 };
    static job jobs[N];
    for (uint32_t live_max = 1; live_max <= 20; live_max = live_max * 2 + 2) {
        art_pool_config config = pool_config(2);
        config.live_max = live_max;
        pool_open(&config);
        uint64_t before = ended_total;
        for (uint32_t i = 0; i < N; i++) {
            job_submit(&jobs[i], GUEST_TALKER, i % 4, talk(3, 100, true));
        }
        while (ended_total < before + N) {
            uint32_t waiting = 0;
            for (uint32_t i = 0; i < N; i++) {
                waiting += !jobs[i].done && jobs[i].waiting;
            }
            CHECK(waiting <= live_max);
            for (uint32_t i = 0; i < N; i++) {
                if (!jobs[i].done && jobs[i].waiting && jobs[i].held_count) {
                    job_answer_held(&jobs[i], 0);
                }
            }
            if (!take_events()) {
                wait_for_events("starved runs");
            }
        }
        for (uint32_t i = 0; i < N; i++) {
            expect_end(&jobs[i], ART_EXIT_RETURNED, 0);
        }
        CHECK(pool_stats().starved > 0);
        CHECK(pool_stats().live_max <= live_max);
        pool_close_empty();
    }
}

static void test_tier_0_has_its_reserve_of_live_runs(void)
{
    enum { N = 40, LIVE = 32 };
    static job jobs[N];
    art_pool_config config = pool_config(1);
    config.live_max = LIVE;
    pool_open(&config);
    for (uint32_t i = 0; i < N; i++) {
        job_submit(&jobs[i], GUEST_TALKER, 1, talk(1, 0, true));
    }
    uint32_t waiting = 0;
    do {
        if (!take_events()) {
            wait_for_events("lower tiers");
        }
        waiting = 0;
        for (uint32_t i = 0; i < N; i++) {
            waiting += jobs[i].waiting;
        }
    } while (waiting < LIVE - LIVE / 16);
    SPIN_UNTIL(pool_stats().starved == N - (LIVE - LIVE / 16));
    CHECK_EQ(pool_stats().live, LIVE - LIVE / 16);
    job urgent[3];
    for (int i = 0; i < 3; i++) {
        job_submit(&urgent[i], GUEST_TALKER, 0, talk(1, 0, true));
    }
    PUMP_UNTIL(urgent[0].waiting && urgent[1].waiting);
    SPIN_UNTIL(pool_stats().starved == N - (LIVE - LIVE / 16) + 1);
    CHECK(!urgent[2].waiting);
    /* a starved run is killed at once though nobody ends; the next one to end makes room for tier 0 first */
    uint32_t last = 0;
    for (uint32_t i = 0; i < N; i++) {
        last = jobs[i].waiting ? last : i;
    }
    art_run_kill(jobs[last].run);
    PUMP_UNTIL(jobs[last].done);
    urgent[0].manual = false;
    while (urgent[0].held_count) {
        job_answer_held(&urgent[0], 0);
    }
    PUMP_UNTIL(urgent[0].done && urgent[2].waiting);
    uint64_t before = ended_total;
    for (uint32_t i = 0; i < N; i++) {
        jobs[i].manual = false;
        while (!jobs[i].done && jobs[i].held_count) {
            job_answer_held(&jobs[i], 0);
        }
    }
    for (int i = 1; i < 3; i++) {
        urgent[i].manual = false;
        while (urgent[i].held_count) {
            job_answer_held(&urgent[i], 0);
        }
    }
    PUMP_UNTIL(ended_total == before + N - 1 + 2);
    pool_close_empty();
}

/* The place of an ended run goes to a starved one; when that is killed before it ran, to the next (S32). */
static void test_fault_S32_a_live_place_is_not_lost_with_the_run_it_was_given_to(void)
{
    for (int round = 0; round < 200; round++) {
        enum { N = 6 };
        job jobs[N];
        art_pool_config config = pool_config(2);
        config.live_max = 1;
        pool_open(&config);
        for (int i = 0; i < N; i++) {
            job_submit(&jobs[i], GUEST_TALKER, 1, talk(1, 0, true));
        }
        PUMP_UNTIL(jobs[0].waiting || jobs[1].waiting);
        SPIN_UNTIL(pool_stats().starved == N - 1);
        int first = jobs[0].waiting ? 0 : 1;
        while (jobs[first].held_count) {
            job_answer_held(&jobs[first], 0);
        }
        for (int i = 0; i < N - 1; i++) { /* the next in line, at about the moment when its turn comes */
            if (i != first) {
                art_run_kill(jobs[i].run);
            }
        }
        jobs[N - 1].manual = false;
        for (int i = 0; i < N; i++) {
            PUMP_UNTIL(jobs[i].done);
        }
        expect_end(&jobs[N - 1], ART_EXIT_RETURNED, 0);
        pool_close_empty();
    }
}

/* --- kill, stop, fuel ------------------------------------------------------------------------ */

static void test_kill_in_every_state(void)
{
    art_pool_config config = pool_config(1);
    config.live_max = 5;
    pool_open(&config);
    job hog, queued, blocked, starved[3], hungry, starting;
    job_submit(&blocked, GUEST_TALKER, 1, talk(1, 0, true));
    PUMP_UNTIL(blocked.waiting);
    job_submit(&hungry, GUEST_SCRIPT, 1, (submit_options){.fuel = 1000, .not_final = true});
    PUMP_UNTIL(hungry.fuel_stops == 1);
    job_submit(&starting, GUEST_START_LOOPS, 2, (submit_options){0});
    SPIN_UNTIL(pool_stats().slot_ns[2] > 0 || pool_stats().live == 3);
    occupy(&hog, 0);
    for (int i = 0; i < 3; i++) {
        job_submit(&starved[i], GUEST_TALKER, 0, talk(1, 0, true));
    }
    job_submit(&queued, GUEST_HELLO, 3, (submit_options){0});
    job *victims[] = {&queued, &starved[1], &starved[0], &starved[2], &hungry, &blocked, &starting, &hog};
    for (size_t i = 0; i < sizeof victims / sizeof *victims; i++) {
        art_run_kill(victims[i]->run);
        art_run_kill(victims[i]->run);
        PUMP_UNTIL(victims[i]->done);
        expect_end(victims[i], ART_EXIT_KILLED, 0);
    }
    /* one that has ended, but whose event was not taken yet */
    job ended;
    job_submit(&ended, GUEST_MINIMAL, 1, (submit_options){0});
    SPIN_UNTIL(pool_stats().live == 0 && ended.run == NULL);
    expect_end(&ended, ART_EXIT_RETURNED, 0);
    pool_close_empty();
}

/* A killed run that waits for a place to live ends although nobody makes room. */
static void test_kill_on_the_way_to_the_starved_list(void)
{
    for (int round = 0; round < 300; round++) {
        art_pool_config config = pool_config(2);
        config.live_max = 1;
        pool_open(&config);
        job blocked, victim;
        job_submit(&blocked, GUEST_TALKER, 1, talk(1, 0, true));
        PUMP_UNTIL(blocked.waiting);
        job_submit(&victim, GUEST_HELLO, 1, (submit_options){0});
        for (int i = 0; i < round % 50; i++) {
            sched_yield();
        }
        art_run_kill(victim.run);
        PUMP_UNTIL(victim.done);
        art_run_kill(blocked.run);
        PUMP_UNTIL(blocked.done);
        pool_close_empty();
    }
}

static void test_stop_with_work_of_all_kinds(void)
{
    for (int round = 0; round < 10; round++) {
        enum { N = 30 };
        static job jobs[N];
        foreign_job foreigns[3];
        art_pool_config config = pool_config(2);
        config.live_max = 10;
        pool_open(&config);
        for (uint32_t i = 0; i < N; i++) {
            static const enum guest_name names[] = {GUEST_HOG, GUEST_ASKER, GUEST_TALKER, GUEST_LOGGER, GUEST_START_LOOPS};
            submit_options o = talk(100, 10, true);
            job_submit(&jobs[i], names[i % 5], i % 4, o);
        }
        for (int i = 0; i < 3; i++) {
            foreign_submit(&foreigns[i], -1, (uint8_t)i);
        }
        for (int i = 0; i < round; i++) {
            (void)take_events();
        }
        uint64_t start_ns = art_sys_now_ns();
        art_pool_stop(pool);
        CHECK(art_sys_now_ns() - start_ns < UINT64_C(20000000000));
        for (int i = 0; i < N; i++) {
            art_run_free(jobs[i].run);
        }
        for (int i = 0; i < 3; i++) {
            art_foreign_free(foreigns[i].foreign);
        }
        art_pool_destroy(pool);
    }
}

static void test_fuel_by_the_piece(void)
{
    art_pool_config config = pool_config(2);
    pool_open(&config);
    for (int round = 0; round < 50; round++) {
        script_line lines[] = {{.what = SCRIPT_SPIN, .a = 3000000}, {.what = SCRIPT_CALL, .a = 1}};
        job j;
        job_submit(&j, GUEST_SCRIPT, 1, (submit_options){.input = lines, .input_len = sizeof lines, .fuel = 1, .not_final = true});
        uint32_t stops = 0;
        while (!j.done) {
            PUMP_UNTIL(j.done || j.fuel_stops > stops);
            if (!j.done) {
                stops = j.fuel_stops;
                art_run_grant(j.run, 9 << 20, false);
            }
            if (!j.done && stops > 2) { /* only the word that no more comes, as a second call */
                art_run_grant(j.run, 20 << 20, false);
                for (int i = 0; i < round; i++) {
                    sched_yield();
                }
                art_run_grant(j.run, 0, true);
                PUMP_UNTIL(j.done);
            }
        }
        CHECK(stops >= 1);
        expect_end(&j, ART_EXIT_RETURNED, 0);
    }
    pool_close_empty();
}

/* "No more comes" at any moment, alone, ends the wait for fuel. */
static void test_final_grant_is_never_missed(void)
{
    art_pool_config config = pool_config(2);
    pool_open(&config);
    for (int round = 0; round < 2000; round++) {
        job j;
        job_submit(&j, GUEST_MINIMAL, 1, (submit_options){.fuel = 1000, .not_final = true});
        for (int i = 0; i < round % 40; i++) {
            sched_yield();
        }
        art_run_grant(j.run, 0, true);
        PUMP_UNTIL(j.done);
        expect_end(&j, ART_EXIT_RETURNED, 0);
    }
    pool_close_empty();
}

static void test_no_fuel_with_an_answer_waiting_holds_no_slot(void)
{
    art_pool_config config = pool_config(1);
    pool_open(&config);
    job j;
    job_submit(&j, GUEST_ASKER, 1, (submit_options){.fuel = 60 << 20, .not_final = true, .manual = true});
    PUMP_UNTIL(j.requests == 1);
    job_answer_held(&j, 0);
    PUMP_UNTIL(j.fuel_stops == 1);
    uint64_t parks = pool_stats().parks;
    job other;
    job_submit(&other, GUEST_HELLO, 1, (submit_options){0});
    PUMP_UNTIL(other.done);
    SPIN_UNTIL(pool_stats().parks > parks); /* the worker has nothing to do */
    job_answer(&j, 1); /* an answer is no fuel, and no reason to ask again */
    SPIN_UNTIL(pool_stats().parks > parks + 1);
    CHECK_EQ(j.fuel_stops, 1);
    art_run_kill(j.run);
    PUMP_UNTIL(j.done);
    pool_close_empty();
}

/* The last event may meet one that is pending still. */
static void test_many_that_speak_before_they_end(void)
{
    art_pool_config config = pool_config(2);
    pool_open(&config);
    for (int round = 0; round < 100; round++) {
        enum { N = 40 };
        static job jobs[N];
        uint64_t before = ended_total;
        for (int i = 0; i < N; i++) {
            job_submit(&jobs[i], GUEST_LAST_WORDS, (uint8_t)(i % 4), (submit_options){0});
        }
        PUMP_UNTIL(ended_total == before + N);
    }
    pool_close_empty();
}

/* --- foreign tasks ------------------------------------------------------------------------------ */

static pid_t spinner_start(int *pidfd)
{
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        art_sys_set_pdeathsig(SIGKILL);
        for (;;) {
            __asm__ volatile("" ::: "memory");
        }
    }
    *pidfd = art_sys_pidfd_open(child, 0);
    CHECK(*pidfd >= 0);
    return child;
}

static void spinner_end(pid_t child, int pidfd)
{
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    close(pidfd);
}

/* The letter of the process state in /proc. */
static char process_state(pid_t pid)
{
    char path[64], text[512] = "";
    (void)snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    size_t len = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[len] = '\0';
    const char *end = strrchr(text, ')');
    CHECK(end != NULL);
    return end[2];
}

static void test_foreign_is_granted_preempted_and_released(void)
{
    int pidfd;
    pid_t child = spinner_start(&pidfd);
    art_pool_config config = pool_config(1);
    foreign_job f;
    job urgent;
    pool_open(&config);
    foreign_submit(&f, pidfd, 2);
    PUMP_UNTIL(f.state == ART_FOREIGN_GRANTED);
    CHECK_EQ(process_state(child), 'R');
    for (uint32_t i = 1; i <= 5; i++) {
        script_line call = {.what = SCRIPT_CALL, .a = 1};
        uint32_t grants = f.grants;
        job_submit(&urgent, GUEST_SCRIPT, 0, (submit_options){.input = &call, .input_len = sizeof call, .manual = true});
        PUMP_UNTIL(urgent.waiting && f.state == ART_FOREIGN_GRANTED && f.grants > grants); /* it waits: the slot is free */
        SPIN_UNTIL(process_state(child) == 'R');
        grants = f.grants;
        job_answer_held(&urgent, 0);
        PUMP_UNTIL(urgent.done && f.state == ART_FOREIGN_GRANTED && f.grants > grants);
        CHECK_EQ(f.preemptions, f.grants - 1);
    }
    /* stopped while a higher tier computes */
    job hog;
    job_submit(&hog, GUEST_ASKER, 1, (submit_options){.manual = true});
    PUMP_UNTIL(hog.requests == 1 && f.state == ART_FOREIGN_PREEMPTED);
    SPIN_UNTIL(process_state(child) == 'T');
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done && f.state == ART_FOREIGN_GRANTED);
    SPIN_UNTIL(process_state(child) == 'R');
    /* same and lower tiers wait */
    job same, lower;
    job_submit(&same, GUEST_HELLO, 2, (submit_options){0});
    job_submit(&lower, GUEST_HELLO, 3, (submit_options){0});
    uint32_t grants = f.grants;
    art_foreign_release(f.foreign);
    art_foreign_release(f.foreign);
    PUMP_UNTIL(f.released && same.done && lower.done);
    CHECK_EQ(f.grants, grants);
    CHECK(pool_stats().foreign_grants >= 5 && pool_stats().foreign_preemptions == f.preemptions);
    pool_close_empty();
    spinner_end(child, pidfd);
}

static void test_foreign_quantum_demotes(void)
{
    int pidfd;
    pid_t child = spinner_start(&pidfd);
    art_pool_config config = pool_config(1);
    config.quantum_ns[1] = 5000000;
    foreign_job f;
    job hog;
    pool_open(&config);
    /* alone it goes on at the lower tier, without being stopped */
    foreign_submit(&f, pidfd, 1);
    PUMP_UNTIL(f.state == ART_FOREIGN_GRANTED);
    SPIN_UNTIL(pool_stats().demotions == 1);
    CHECK(f.preemptions == 0 && f.grants == 1);
    job_submit(&hog, GUEST_ASKER, 1, (submit_options){.manual = true}); /* above it now */
    PUMP_UNTIL(hog.requests == 1 && f.preemptions >= 1);
    PUMP_UNTIL(f.state == ART_FOREIGN_GRANTED); /* the hog's quantum ends too */
    art_foreign_release(f.foreign);
    art_run_kill(hog.run);
    PUMP_UNTIL(f.released && hog.done);
    pool_close_empty();

    /* with a lower tier in the queue it is demoted past it and stopped */
    config = pool_config(1);
    config.quantum_ns[1] = config.quantum_ns[2] = 5000000;
    pool_open(&config);
    foreign_submit(&f, pidfd, 1);
    PUMP_UNTIL(f.state == ART_FOREIGN_GRANTED);
    job_submit(&hog, GUEST_ASKER, 2, (submit_options){.manual = true});
    PUMP_UNTIL(hog.requests == 1);
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done);
    art_foreign_release(f.foreign);
    PUMP_UNTIL(f.released);
    CHECK(f.preemptions >= 1);
    pool_close_empty();
    spinner_end(child, pidfd);
}

/* A promotion by count lasts no longer than what passed the hog over, so higher tiers do not wait for a quantum of it: here
 * one is longer than the test may take. */
static void test_an_aged_hog_gives_way_again(bool foreign)
{
    art_pool_config config = pool_config(1);
    config.runq.aging_threshold = 50;
    foreign_job hog, others[4];
    job guest;
    pool_open(&config);
    if (foreign) {
        foreign_submit(&hog, -1, 2);
        PUMP_UNTIL(hog.state == ART_FOREIGN_GRANTED);
    } else {
        job_submit(&guest, GUEST_ASKER, 2, (submit_options){.manual = true});
        PUMP_UNTIL(guest.requests == 1);
    }
    for (int turn = 0; turn < 60; turn++) {
        for (int i = 0; i < 4; i++) {
            foreign_submit(&others[i], -1, 1);
        }
        for (int i = 0; i < 4; i++) { /* the first takes the hog's slot, the others pass it over */
            PUMP_UNTIL(others[i].state == ART_FOREIGN_GRANTED);
            art_foreign_release(others[i].foreign);
            PUMP_UNTIL(others[i].released);
        }
    }
    art_runq_stats stats;
    art_runq_statistics(art_pool_runq(pool), &stats);
    CHECK(stats.promotions_count[2] > 1);
    if (foreign) {
        art_foreign_release(hog.foreign);
        PUMP_UNTIL(hog.released);
    } else {
        CHECK_EQ(guest.done, false);
        art_run_kill(guest.run);
        PUMP_UNTIL(guest.done);
        CHECK_EQ(guest.view.demotions, 0); /* it went back to its own tier each time */
    }
    pool_close_empty();
}

static void test_foreign_released_in_each_state(void)
{
    art_pool_config config = pool_config(1);
    foreign_job hosted, queued, preempted;
    job hog;
    pool_open(&config);
    foreign_submit(&hosted, -1, 2);
    PUMP_UNTIL(hosted.state == ART_FOREIGN_GRANTED);
    foreign_submit(&queued, -1, 2);
    art_foreign_release(queued.foreign);
    PUMP_UNTIL(queued.released);
    CHECK_EQ(queued.grants, 0);
    foreign_submit(&queued, -1, 1); /* preempts the other */
    PUMP_UNTIL(queued.state == ART_FOREIGN_GRANTED && hosted.state == ART_FOREIGN_PREEMPTED);
    preempted = hosted;
    art_foreign_release(hosted.foreign);
    PUMP_UNTIL(hosted.released);
    CHECK_EQ(preempted.grants, hosted.grants);
    occupy(&hog, 0);
    PUMP_UNTIL(queued.state == ART_FOREIGN_PREEMPTED);
    art_run_kill(hog.run);
    PUMP_UNTIL(hog.done && queued.state == ART_FOREIGN_GRANTED);
    art_foreign_release(queued.foreign);
    PUMP_UNTIL(queued.released);
    pool_close_empty();
}

static void test_foreign_whose_process_died(void)
{
    int pidfd;
    pid_t child = spinner_start(&pidfd);
    art_pool_config config = pool_config(1);
    foreign_job f;
    job urgent;
    pool_open(&config);
    foreign_submit(&f, pidfd, 3);
    PUMP_UNTIL(f.state == ART_FOREIGN_GRANTED);
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    job_submit(&urgent, GUEST_HELLO, 0, (submit_options){0});
    PUMP_UNTIL(urgent.done && f.grants == 2 && f.state == ART_FOREIGN_GRANTED);
    art_foreign_release(f.foreign);
    PUMP_UNTIL(f.released);
    close(pidfd);
    pool_close_empty();
}

/* Urgent tasks that come at the same time each get a slot of their own, though all foreigns sleep in their workers. */
static void test_urgent_tasks_that_come_together_preempt_one_host_each(void)
{
    for (int round = 0; round < 200; round++) {
        enum { WORKERS = 4 };
        art_pool_config config = pool_config(WORKERS);
        foreign_job hosted[WORKERS];
        job urgent[WORKERS];
        pool_open(&config);
        for (int i = 0; i < WORKERS; i++) {
            foreign_submit(&hosted[i], -1, (uint8_t)(2 + i % 2));
        }
        for (int i = 0; i < WORKERS; i++) {
            PUMP_UNTIL(hosted[i].state == ART_FOREIGN_GRANTED);
        }
        for (int i = 0; i < WORKERS; i++) {
            job_submit(&urgent[i], GUEST_ASKER, (uint8_t)(i % 2), (submit_options){.manual = true});
        }
        for (int i = 0; i < WORKERS; i++) { /* all run, at once: none of them ends by itself */
            PUMP_UNTIL(urgent[i].requests == 1 && hosted[i].state == ART_FOREIGN_PREEMPTED);
        }
        for (int i = 0; i < WORKERS; i++) {
            art_run_kill(urgent[i].run);
            art_foreign_release(hosted[i].foreign);
        }
        for (int i = 0; i < WORKERS; i++) {
            PUMP_UNTIL(urgent[i].done && hosted[i].released);
        }
        pool_close_empty();
    }
}

/* Tier 0 above its share does not preempt, and so must not stop and continue a process for nothing either. */
static void test_capped_tier_0_leaves_a_foreign_alone(void)
{
    int pidfd;
    pid_t child = spinner_start(&pidfd);
    art_pool_config config = pool_config(1);
    config.runq.tier0_share_pct = 1;
    foreign_job f;
    job urgent;
    pool_open(&config);
    while (pool_stats().slot_ns[0] < 100000000) { /* ten times its share of a second */
        script_line spin = {.what = SCRIPT_SPIN, .a = 10000000};
        job_submit(&urgent, GUEST_SCRIPT, 0, (submit_options){.input = &spin, .input_len = sizeof spin});
        PUMP_UNTIL(urgent.done);
    }
    foreign_submit(&f, pidfd, 3);
    PUMP_UNTIL(f.state == ART_FOREIGN_GRANTED);
    uint32_t grants = f.grants;
    uint64_t start_ns = art_sys_now_ns();
    job_submit(&urgent, GUEST_HELLO, 0, (submit_options){0});
    PUMP_UNTIL(urgent.done); /* once the window has moved on */
    uint64_t took_ms = (art_sys_now_ns() - start_ns) / 1000000;
    CHECK_MSG(f.grants - grants <= 5, "%u grants in %ju ms", f.grants - grants, (uintmax_t)took_ms);
    art_foreign_release(f.foreign);
    PUMP_UNTIL(f.released);
    pool_close_empty();
    spinner_end(child, pidfd);
}

int main(void)
{
    fixture_open(200);
    test_runs_on_any_number_of_workers();
    test_tier_0_preempts_and_order_is_strict();
    test_waits_for_a_slot_are_counted();
    test_quantum_demotes_to_the_last_tier();
    test_allotment_survives_preemption();
    test_a_step_returns_to_the_base_tier();
    test_bad_arguments_and_closed_pool();
    test_admission_is_exact_and_released();
    test_starved_runs_all_run();
    test_tier_0_has_its_reserve_of_live_runs();
    test_fault_S32_a_live_place_is_not_lost_with_the_run_it_was_given_to();
    test_kill_in_every_state();
    test_kill_on_the_way_to_the_starved_list();
    test_stop_with_work_of_all_kinds();
    test_fuel_by_the_piece();
    test_final_grant_is_never_missed();
    test_no_fuel_with_an_answer_waiting_holds_no_slot();
    test_many_that_speak_before_they_end();
    test_foreign_is_granted_preempted_and_released();
    test_foreign_quantum_demotes();
    test_an_aged_hog_gives_way_again(false);
    test_an_aged_hog_gives_way_again(true);
    test_foreign_released_in_each_state();
    test_foreign_whose_process_died();
    test_urgent_tasks_that_come_together_preempt_one_host_each();
    test_capped_tier_0_leaves_a_foreign_alone();
    fixture_close();
    printf("ok\n");
    return 0;
}
