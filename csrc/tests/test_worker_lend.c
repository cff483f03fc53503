/* Tier lending: wherever a run or foreign is, it is not below the tier that it is lent, and has its own back afterwards. Needs
 * AGENTRT_WASMTIME_LIB. */
#include "worker.h"

#include "check.h"
#include "pool_fixture.h"

static void lend(job *j, uint8_t tier)
{
    int err;
    while ((err = art_run_lend(j->run, tier)) == ART_EBUSY) {
        sched_yield();
    }
    CHECK_OK(err);
}

static void lend_foreign(foreign_job *f, uint8_t tier)
{
    int err;
    while ((err = art_foreign_lend(f->foreign, tier)) == ART_EBUSY) {
        sched_yield();
    }
    CHECK_OK(err);
}

/* A hog that has its slot. */
static void occupy(job *j, uint8_t tier)
{
    job_submit(j, GUEST_HOG, tier, (submit_options){0});
    SPIN_UNTIL(art_run_glance(j->run) == ART_RUN_RUNNING);
}

static void end(job *j)
{
    art_run_kill(j->run);
    PUMP_UNTIL(j->done);
}

static bool waits_in_vain(job *j)
{
    uint64_t until_ns = art_sys_now_ns() + 5000000; /* as long as a worker needs by far, if it wanted to */
    while (art_sys_now_ns() < until_ns) {
        (void)take_events();
        sched_yield();
    }
    return !j->done && art_run_glance(j->run) == ART_RUN_QUEUED;
}

static void test_queued(void)
{
    art_pool_config config = pool_config(1);
    job hog, first, second, third;
    pool_open(&config);
    occupy(&hog, 0);
    job_submit(&first, GUEST_HELLO, 1, (submit_options){0});
    job_submit(&second, GUEST_HELLO, 2, (submit_options){0});
    job_submit(&third, GUEST_HELLO, 3, (submit_options){0});
    lend(&third, 0);
    lend(&second, 1);
    lend(&second, ART_TIERS); /* and back */
    end(&hog);
    PUMP_UNTIL(first.done && second.done && third.done);
    CHECK(third.view.first_ns <= first.view.first_ns && first.view.first_ns <= second.view.first_ns);
    CHECK_EQ(second.view.tier, 2);
    CHECK_EQ(third.view.demotions, 0);

    /* from the queue at once, over the head of whoever runs */
    occupy(&hog, 1);
    job_submit(&second, GUEST_HELLO, 2, (submit_options){0});
    CHECK(waits_in_vain(&second));
    lend(&second, 1); /* that is not above it */
    CHECK(waits_in_vain(&second));
    CHECK_EQ(art_run_lend(second.run, ART_TIERS + 1), ART_EINVAL);
    lend(&second, 0);
    PUMP_UNTIL(second.done);
    CHECK(!hog.done);
    end(&hog);
    CHECK_EQ(hog.view.preemptions, 1);
    pool_close_empty();
}

static void test_running(void)
{
    art_pool_config config = pool_config(1);
    job hog, other;
    pool_open(&config);
    occupy(&hog, 3);
    uint64_t had_ns = art_run_ran_ns(hog.run);
    SPIN_UNTIL(art_run_ran_ns(hog.run) > had_ns + 1000000);
    lend(&hog, 1);
    had_ns = art_run_ran_ns(hog.run);
    SPIN_UNTIL(art_run_ran_ns(hog.run) > had_ns + 1000000); /* its worker has seen it */
    job_submit(&other, GUEST_HELLO, 2, (submit_options){0});
    CHECK(waits_in_vain(&other));
    lend(&hog, ART_TIERS);
    PUMP_UNTIL(other.done); /* preempts it, as it is again */
    had_ns = art_run_ran_ns(hog.run);
    SPIN_UNTIL(art_run_ran_ns(hog.run) > had_ns + 1000000);
    CHECK_EQ(art_run_glance(hog.run), ART_RUN_RUNNING);
    end(&hog);
    CHECK(pool_stats().slot_ns[1] > 0 && pool_stats().slot_ns[3] > 0);
    CHECK(hog.view.preemptions == 1 && hog.view.demotions == 0 && hog.view.tier == 3);
    pool_close_empty();
}

/* A lent tier is not used up, and its time is not held against the run; its own allotment is where it was. */
static void test_a_lent_run_is_not_demoted(void)
{
    art_pool_config config = pool_config(1);
    job hog;
    for (int tier = 0; tier < ART_TIERS; tier++) {
        config.quantum_ns[tier] = 1000000;
    }
    config.quantum_ns[2] = UINT64_C(1) << 33; /* 8.6 s: more than this test takes on any machine */
    pool_open(&config);
    occupy(&hog, 2);
    lend(&hog, 1);
    SPIN_UNTIL(pool_stats().slot_ns[1] > 20000000);
    lend(&hog, 0);
    SPIN_UNTIL(pool_stats().slot_ns[0] > 20000000);
    CHECK_EQ(pool_stats().demotions, 0);
    lend(&hog, ART_TIERS);
    uint64_t since_ns = art_run_ran_ns(hog.run);
    SPIN_UNTIL(art_run_ran_ns(hog.run) > since_ns + 5000000);
    CHECK_EQ(pool_stats().demotions, 0);
    end(&hog);
    CHECK_EQ(hog.view.tier, 2);
    pool_close_empty();

    /* lent its own tier, it is demoted out of sight: that shows when the floor goes */
    job before;
    config.quantum_ns[2] = 1000000;
    config.quantum_ns[0] = UINT64_C(1) << 33;
    pool_open(&config);
    occupy(&before, 0);
    job_submit(&hog, GUEST_HOG, 1, (submit_options){0});
    lend(&hog, 1);
    end(&before);
    SPIN_UNTIL(pool_stats().slot_ns[1] > 20000000);
    CHECK(pool_stats().slot_ns[2] == 0 && pool_stats().demotions <= 1);
    lend(&hog, ART_TIERS);
    SPIN_UNTIL(pool_stats().slot_ns[3] > 2000000);
    end(&hog);
    CHECK_EQ(hog.view.tier, 3);
    pool_close_empty();
}

static void test_blocked(void)
{
    art_pool_config config = pool_config(1);
    job hog, waiter;
    script_line lines[] = {{.what = SCRIPT_CALL, .a = 1}, {.what = SCRIPT_SPIN, .a = 1000}, {.what = SCRIPT_CALL, .a = 1}};
    pool_open(&config);
    job_submit(&waiter, GUEST_SCRIPT, 2, (submit_options){.input = lines, .input_len = sizeof lines, .manual = true});
    PUMP_UNTIL(waiter.waiting);
    SPIN_UNTIL(art_run_glance(waiter.run) == ART_RUN_BLOCKED);
    lend(&waiter, 0);
    occupy(&hog, 1);
    job_answer_held(&waiter, 0);
    PUMP_UNTIL(waiter.waiting); /* a wait returns it to its base tier, but for the floor */
    job_answer_held(&waiter, 0);
    PUMP_UNTIL(waiter.done);
    end(&hog);
    CHECK(pool_stats().slot_ns[0] > 0);
    pool_close_empty();

    pool_open(&config); /* and back while it is blocked */
    job_submit(&waiter, GUEST_SCRIPT, 2, (submit_options){.input = lines, .input_len = sizeof lines, .manual = true});
    PUMP_UNTIL(waiter.waiting);
    lend(&waiter, 0);
    lend(&waiter, ART_TIERS);
    occupy(&hog, 1);
    job_answer_held(&waiter, 0);
    CHECK(waits_in_vain(&waiter));
    end(&hog);
    PUMP_UNTIL(waiter.waiting);
    job_answer_held(&waiter, 0);
    PUMP_UNTIL(waiter.done);
    CHECK_EQ(pool_stats().slot_ns[0], 0);
    pool_close_empty();
}

static void test_starved(void)
{
    art_pool_config config = pool_config(1);
    script_line call = {.what = SCRIPT_CALL, .a = 1};
    job holder, first, second;
    config.live_max = 1;
    pool_open(&config);
    submit_options o = {.input = &call, .input_len = sizeof call, .manual = true};
    job_submit(&holder, GUEST_SCRIPT, 1, o);
    PUMP_UNTIL(holder.waiting);
    job_submit(&first, GUEST_SCRIPT, 2, o);
    job_submit(&second, GUEST_SCRIPT, 3, o);
    SPIN_UNTIL(pool_stats().starved == 2);
    lend(&second, 0);
    SPIN_UNTIL(pool_stats().starved == 3); /* set aside again, as what it is now */
    job_answer_held(&holder, 0);
    PUMP_UNTIL(holder.done && second.waiting);
    CHECK(!first.waiting);
    job_answer_held(&second, 0);
    PUMP_UNTIL(second.done && first.waiting);
    job_answer_held(&first, 0);
    PUMP_UNTIL(first.done);
    pool_close_empty();
}

/* Aging and lending meet: a promoted run that is lent a tier has that one. */
static void test_promoted(void)
{
    art_pool_config config = pool_config(1);
    job hog, old;
    config.runq.aging_wait_ns[3] = 1;
    pool_open(&config);
    occupy(&hog, 2);
    job_submit(&old, GUEST_HOG, 3, (submit_options){0}); /* promoted at the next pick, and runs as tier 1 */
    job passing;
    job_submit(&passing, GUEST_HELLO, 0, (submit_options){0});
    PUMP_UNTIL(passing.done);
    SPIN_UNTIL(art_run_glance(old.run) == ART_RUN_RUNNING);
    lend(&old, 0);
    uint64_t since_ns = art_run_ran_ns(old.run);
    SPIN_UNTIL(art_run_ran_ns(old.run) > since_ns + 3000000);
    lend(&old, ART_TIERS);
    SPIN_UNTIL(art_run_glance(hog.run) == ART_RUN_RUNNING); /* the other is 3 again */
    end(&old);
    CHECK_EQ(old.view.demotions, 0);
    end(&hog);
    pool_close_empty();
}

static void test_foreigns(void)
{
    art_pool_config config = pool_config(1);
    foreign_job hosted, queued;
    job urgent;
    pool_open(&config);
    foreign_submit(&hosted, -1, 3);
    PUMP_UNTIL(hosted.state == ART_FOREIGN_GRANTED);
    foreign_submit(&queued, -1, 3);
    lend_foreign(&queued, 2);
    PUMP_UNTIL(queued.state == ART_FOREIGN_GRANTED && hosted.state == ART_FOREIGN_PREEMPTED);
    lend_foreign(&hosted, 1);
    PUMP_UNTIL(hosted.state == ART_FOREIGN_GRANTED && queued.state == ART_FOREIGN_PREEMPTED);
    job_submit(&urgent, GUEST_HELLO, 1, (submit_options){0});
    CHECK(waits_in_vain(&urgent));
    lend_foreign(&hosted, ART_TIERS); /* while it is hosted: both others are above it now */
    PUMP_UNTIL(urgent.done && queued.state == ART_FOREIGN_GRANTED);
    art_foreign_release(queued.foreign);
    PUMP_UNTIL(queued.released && hosted.state == ART_FOREIGN_GRANTED);
    CHECK_EQ(art_foreign_lend(hosted.foreign, ART_TIERS + 1), ART_EINVAL);
    art_foreign_release(hosted.foreign);
    CHECK_OK(art_foreign_lend(hosted.foreign, 0)); /* too late, and harmless */
    PUMP_UNTIL(hosted.released);
    pool_close_empty();
}

/* What is told to end while a worker puts it back into the queue ends, though its turn would never come. */
static void test_fault_S29_told_on_the_way_into_the_queue(void)
{
    art_pool_config config = pool_config(1);
    foreign_job f;
    job hog, low;
    pool_open(&config);
    occupy(&hog, 1);
    for (int round = 0; round < 3000; round++) {
        foreign_submit(&f, -1, 3);
        lend_foreign(&f, 0);
        PUMP_UNTIL(f.state == ART_FOREIGN_GRANTED);
        lend_foreign(&f, ART_TIERS); /* the hog takes the slot back, */
        for (int i = 0; i < round % 50; i++) {
            __asm__ volatile("" ::: "memory");
        }
        while (art_foreign_release(f.foreign) == ART_EBUSY) { /* just as it is released */
            sched_yield();
        }
        PUMP_UNTIL(f.released);
    }
    for (int round = 0; round < 1000; round++) {
        job_submit(&low, GUEST_HOG, 3, (submit_options){0});
        lend(&low, 0);
        SPIN_UNTIL(art_run_glance(low.run) == ART_RUN_RUNNING);
        lend(&low, ART_TIERS);
        for (int i = 0; i < round % 50 * 20; i++) {
            __asm__ volatile("" ::: "memory");
        }
        end(&low);
    }
    CHECK(!hog.done);
    end(&hog);
    pool_close_empty();
}

int main(void)
{
    fixture_open(20);
    test_queued();
    test_running();
    test_a_lent_run_is_not_demoted();
    test_blocked();
    test_starved();
    test_promoted();
    test_foreigns();
    test_fault_S29_told_on_the_way_into_the_queue();
    fixture_close();
    printf("ok\n");
    return 0;
}
