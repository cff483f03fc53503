/* Where a run is, as the pool shows it. Needs AGENTRT_WASMTIME_LIB. */
#include "worker.h"

#include "check.h"
#include "pool_fixture.h"

static void test_a_run_through_all_phases(void)
{
    art_pool_config config = pool_config(1);
    pool_open(&config);
    job hog, second, urgent;
    script_line call = {.what = SCRIPT_CALL, .a = 1};
    job_submit(&hog, GUEST_HOG, 3, (submit_options){0});
    SPIN_UNTIL(art_run_glance(hog.run) == ART_RUN_RUNNING);
    job_submit(&second, GUEST_SCRIPT, 3, (submit_options){.input = &call, .input_len = sizeof call, .manual = true});
    CHECK_EQ(art_run_glance(second.run), ART_RUN_QUEUED); /* nothing takes the slot from the hog */
    job_submit(&urgent, GUEST_ASKER, 0, (submit_options){.manual = true});
    PUMP_UNTIL(urgent.requests == 1);
    CHECK_EQ(art_run_glance(hog.run), ART_RUN_PREEMPTED);
    CHECK_EQ(art_run_glance(urgent.run), ART_RUN_RUNNING);
    CHECK_EQ(art_run_glance(second.run), ART_RUN_QUEUED);
    art_run_kill(hog.run); /* out of the queue, where it was preempted */
    while (art_run_glance(hog.run) != ART_RUN_DONE) {
        sched_yield();
    }
    PUMP_UNTIL(hog.done);
    expect_end(&hog, ART_EXIT_KILLED, 0);
    art_run_kill(urgent.run);
    PUMP_UNTIL(second.waiting && urgent.done);
    SPIN_UNTIL(art_run_glance(second.run) == ART_RUN_BLOCKED);
    job_answer_held(&second, 0);
    PUMP_UNTIL(second.done);
    expect_end(&second, ART_EXIT_RETURNED, 0);
    pool_close_empty();
}

/* The end of a quantum counts as well, and takes a run down the tiers. */
static void test_a_quantum_ends(void)
{
    art_pool_config config = pool_config(1);
    for (int tier = 0; tier < ART_TIERS; tier++) {
        config.quantum_ns[tier] = 1000000;
    }
    pool_open(&config);
    job hogs[2];
    for (int i = 0; i < 2; i++) {
        job_submit(&hogs[i], GUEST_HOG, 3, (submit_options){0});
    }
    for (int i = 0; i < 2; i++) {
        SPIN_UNTIL(art_run_glance(hogs[i].run) == ART_RUN_PREEMPTED);
        SPIN_UNTIL(art_run_glance(hogs[i].run) == ART_RUN_RUNNING);
    }
    for (int i = 0; i < 2; i++) {
        art_run_kill(hogs[i].run);
    }
    PUMP_UNTIL(hogs[0].done && hogs[1].done);
    pool_close_empty();
}

int main(void)
{
    fixture_open(20);
    test_a_run_through_all_phases();
    test_a_quantum_ends();
    fixture_close();
    printf("ok\n");
    return 0;
}
