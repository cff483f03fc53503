/* The event queue, step by step. evq.c is compiled into this program with a hook in each of its windows, so that a test can
 * stop a thread at a precise line and look at what the others can still do. */
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>

enum window { NOWHERE, before_write, after_write, before_push, after_push, after_clear, after_arm, after_collect, before_rering };

static void window(enum window at);

#define ART_EVQ_WINDOW(at) window(at)
#include "../evq.c"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "check.h"

/* --- a thread that stops where it is told to --- */

struct actor {
    pthread_t thread;
    art_evq *q;
    art_event *ev;
    uint64_t now_ns;
    enum window stop_at;
    sem_t arrived;
    sem_t go_on;
};

static _Thread_local struct actor *self;

/* For this (the consumer's) thread: what to do in a window of its own drain. */
static enum window callback_at;
static void (*callback)(void);

static void window(enum window at)
{
    if (self != NULL && self->stop_at == at) {
        CHECK_OK(sem_post(&self->arrived));
        CHECK_OK(sem_wait(&self->go_on));
    }
    if (self == NULL && callback != NULL && callback_at == at) {
        void (*now)(void) = callback;
        callback = NULL;
        now();
    }
}

static void *actor_main(void *arg)
{
    self = arg;
    CHECK(art_evq_publish(self->q, self->ev, self->now_ns));
    return NULL;
}

/* Starts a thread that publishes ev and returns once it stands in the window. */
static void actor_start(struct actor *actor, art_evq *q, art_event *ev, uint64_t now_ns, enum window stop_at)
{
    actor->q = q;
    actor->ev = ev;
    actor->now_ns = now_ns;
    actor->stop_at = stop_at;
    CHECK_OK(sem_init(&actor->arrived, 0, 0));
    CHECK_OK(sem_init(&actor->go_on, 0, 0));
    CHECK_OK(pthread_create(&actor->thread, NULL, actor_main, actor));
    CHECK_OK(sem_wait(&actor->arrived));
}

static void actor_finish(struct actor *actor)
{
    CHECK_OK(sem_post(&actor->go_on));
    CHECK_OK(pthread_join(actor->thread, NULL));
    CHECK_OK(sem_destroy(&actor->arrived));
    CHECK_OK(sem_destroy(&actor->go_on));
}

/* --- helpers --- */

static art_evq *make(uint64_t coalesce_ns)
{
    art_evq *q = NULL;
    CHECK_OK(art_evq_create(coalesce_ns, &q));
    return q;
}

static bool readable(const art_evq *q)
{
    struct pollfd p = {.fd = art_evq_fd(q), .events = POLLIN};
    int n = poll(&p, 1, 0);
    CHECK(n >= 0);
    return n == 1;
}

static void drain_exactly(art_evq *q, art_event *const *expected, size_t n)
{
    art_event *out[64];
    CHECK_EQ(art_evq_drain(q, out, 64), n);
    for (size_t i = 0; i < n; i++) {
        CHECK_MSG(out[i] == expected[i], "event %zu of %zu", i, n);
        CHECK_EQ(art_event_take(out[i]), 1);
    }
}

static void drain_one(art_evq *q, art_event *expected)
{
    drain_exactly(q, &expected, 1);
}

static void drain_nothing(art_evq *q)
{
    drain_exactly(q, NULL, 0);
}

/* --- tests --- */

static void test_create_checks_arguments_and_the_fd_is_nonblocking_and_private(void)
{
    art_evq *q = NULL;
    CHECK_EQ(art_evq_create(0, NULL), ART_EINVAL);
    CHECK_EQ(art_evq_create(UINT64_C(1000000001), &q), ART_EINVAL);
    CHECK(q == NULL);

    struct rlimit old;
    CHECK_OK(getrlimit(RLIMIT_NOFILE, &old));
    struct rlimit none = {.rlim_cur = 0, .rlim_max = old.rlim_max};
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &none));
    errno = 0;
    CHECK_EQ(art_evq_create(0, &q), ART_ESYS);
    CHECK_EQ(errno, EMFILE);
    CHECK(q == NULL);
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &old));

    q = make(0);
    int fd = art_evq_fd(q);
    CHECK(fcntl(fd, F_GETFL) & O_NONBLOCK);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    CHECK(!readable(q));
    drain_nothing(q);
    art_evq_destroy(q);
    CHECK_EQ(fcntl(fd, F_GETFD), -1); /* closed */
    art_evq_destroy(NULL);
}

static void test_tiers_in_order_and_fifo_inside(void)
{
    art_evq *q = make(ART_EVQ_COALESCE_NS);
    static const uint8_t tiers[] = {3, 1, 2, 0, 3, 0, 1, 2};
    art_event events[8];
    memset(events, 0, sizeof events);
    for (int i = 0; i < 8; i++) {
        events[i].tier = tiers[i];
        CHECK(art_evq_publish(q, &events[i], 0));
    }
    CHECK(readable(q));
    art_event *const expected[] = {&events[3], &events[5], &events[1], &events[6],
                                   &events[2], &events[7], &events[0], &events[4]};
    drain_exactly(q, expected, 8);
    CHECK(!readable(q));
    drain_nothing(q);
    art_evq_destroy(q);
}

static void test_pending_event_is_not_queued_twice(void)
{
    art_evq *q = make(0);
    art_event ev = {0};
    art_event *out[2];
    CHECK(art_evq_publish(q, &ev, 0));
    CHECK(!art_evq_publish(q, &ev, 0));
    CHECK_EQ(art_evq_drain(q, out, 2), 1);
    /* Drained, not yet taken: the consumer will see what was written before this publish. */
    CHECK(!art_evq_publish(q, &ev, 0));
    CHECK(!readable(q));
    CHECK_EQ(art_event_take(&ev), 1);
    CHECK_EQ(art_event_take(&ev), 0);
    drain_nothing(q);
    CHECK(art_evq_publish(q, &ev, 0));
    drain_one(q, &ev);
    art_evq_destroy(q);
}

static void test_one_bell_per_drain(void)
{
    art_evq *q = make(0);
    art_event events[20];
    memset(events, 0, sizeof events);
    for (int i = 0; i < 20; i++) {
        events[i].tier = (uint8_t)(i % 4);
        CHECK(art_evq_publish(q, &events[i], (uint64_t)i));
    }
    CHECK_EQ(art_evq_statistics(q).rung, 1);
    art_event *out[20];
    CHECK_EQ(art_evq_drain(q, out, 20), 20);
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(art_event_take(out[i]), 1);
    }
    CHECK(art_evq_publish(q, &events[7], 100));
    CHECK_EQ(art_evq_statistics(q).rung, 2);
    CHECK(readable(q));
    drain_one(q, &events[7]);
    art_evq_stats stats = art_evq_statistics(q);
    CHECK_EQ(stats.drains, 2);
    CHECK_EQ(stats.drained, 21);
    CHECK_EQ(stats.delayed, 0);
    CHECK_EQ(stats.failed, 0);
    art_evq_destroy(q);
}

static void test_tier_2_and_3_ring_at_most_once_per_interval(void)
{
    art_evq *q = make(50000);
    art_event a = {.tier = 2};
    art_event b = {.tier = 3};
    uint64_t now = 1000000;
    CHECK(!art_evq_due(q, now));
    CHECK(art_evq_publish(q, &a, now)); /* the first rings at once: a lone guest does not wait */
    CHECK(readable(q));
    drain_one(q, &a);

    CHECK(art_evq_publish(q, &a, now + 1)); /* too early: owed */
    CHECK(art_evq_publish(q, &b, now + 2));
    CHECK(!readable(q));
    CHECK_EQ(art_evq_statistics(q).delayed, 1);
    CHECK(!art_evq_due(q, now + 49999));
    art_evq_flush(q, now + 49999);
    CHECK(!readable(q));
    CHECK(art_evq_due(q, now + 50000));
    art_evq_flush(q, now + 50000);
    CHECK(readable(q));
    CHECK(!art_evq_due(q, now + 500000)); /* paid */
    art_event *const both[] = {&a, &b};
    drain_exactly(q, both, 2);

    /* A late publish finds the owed bell due and rings it itself. */
    CHECK(art_evq_publish(q, &a, now + 50001));
    CHECK(!readable(q));
    CHECK(art_evq_publish(q, &b, now + 100000));
    CHECK(readable(q));
    drain_exactly(q, both, 2);

    /* Before parking: now, due or not. Nothing owed: no bell. */
    CHECK(art_evq_publish(q, &a, now + 100001));
    CHECK(!readable(q));
    art_evq_flush_now(q);
    CHECK(readable(q));
    drain_one(q, &a);
    art_evq_flush_now(q);
    CHECK(!readable(q));

    /* A drain that comes by itself settles the debt. */
    CHECK(art_evq_publish(q, &a, now + 100002));
    drain_one(q, &a);
    CHECK(!art_evq_due(q, now + 1000000));
    art_evq_flush_now(q);
    CHECK(!readable(q));
    CHECK_EQ(art_evq_statistics(q).rung, 4);
    art_evq_destroy(q);
}

static void test_tier_0_and_1_ring_at_once_whatever_is_owed(void)
{
    for (uint8_t urgent = 0; urgent <= 1; urgent++) {
        art_evq *q = make(50000);
        art_event slow = {.tier = 2};
        art_event fast = {.tier = urgent};
        CHECK(art_evq_publish(q, &fast, 10));
        drain_one(q, &fast);
        CHECK(art_evq_publish(q, &slow, 11));
        CHECK(!readable(q));
        CHECK(art_evq_publish(q, &fast, 12));
        CHECK(readable(q));
        art_event *const expected[] = {&fast, &slow};
        drain_exactly(q, expected, 2);
        art_evq_destroy(q);
    }
}

static void test_clock_readings_that_are_behind_or_wrap(void)
{
    art_evq *q = make(50000);
    art_event ev = {.tier = 3};
    uint64_t now = UINT64_MAX - 10;
    art_event first = {.tier = 0};
    CHECK(art_evq_publish(q, &first, now));
    drain_one(q, &first);
    CHECK(art_evq_publish(q, &ev, now - 1000)); /* another thread's older reading: not due, not "ages ago" */
    CHECK(!readable(q));
    CHECK(!art_evq_due(q, now - 1));
    CHECK(art_evq_due(q, now + 50000)); /* wrapped */
    art_evq_flush(q, now + 50000);
    CHECK(readable(q));
    drain_one(q, &ev);
    art_evq_destroy(q);

    q = make(0); /* no coalescing: at once, even so */
    CHECK(art_evq_publish(q, &ev, 1000));
    drain_one(q, &ev);
    CHECK(art_evq_publish(q, &ev, 999));
    CHECK(readable(q));
    drain_one(q, &ev);
    art_evq_destroy(q);
}

static void test_more_than_max_keeps_the_fd_readable_and_the_order(void)
{
    art_evq *q = make(50000);
    art_event events[10];
    memset(events, 0, sizeof events);
    art_event *out[4];
    for (int i = 0; i < 10; i++) {
        events[i].tier = 2;
        CHECK(art_evq_publish(q, &events[i], 0));
    }
    CHECK_EQ(art_evq_drain(q, out, 0), 0);
    CHECK(readable(q));
    CHECK_EQ(art_evq_drain(q, out, 4), 4);
    for (int i = 0; i < 4; i++) {
        CHECK(out[i] == &events[i]);
        CHECK_EQ(art_event_take(out[i]), 1);
    }
    CHECK(readable(q));
    /* What comes now is behind its own tier, and in front of lower ones. */
    art_event urgent = {.tier = 0};
    CHECK(art_evq_publish(q, &events[0], 1));
    CHECK(art_evq_publish(q, &urgent, 1));
    CHECK_EQ(art_evq_drain(q, out, 4), 4);
    CHECK(out[0] == &urgent && out[1] == &events[4] && out[2] == &events[5] && out[3] == &events[6]);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(art_event_take(out[i]), 1);
    }
    CHECK(readable(q));
    CHECK_EQ(art_evq_drain(q, out, 4), 4);
    CHECK(out[0] == &events[7] && out[1] == &events[8] && out[2] == &events[9] && out[3] == &events[0]);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(art_event_take(out[i]), 1);
    }
    CHECK(!readable(q)); /* exactly max: nothing is left */
    drain_nothing(q);
    CHECK_EQ(art_evq_statistics(q).rerung, 3);
    art_evq_destroy(q);
}

static void test_edge_triggered_poller_hears_of_the_rest(void)
{
    art_evq *q = make(0);
    art_event events[3];
    memset(events, 0, sizeof events);
    for (int i = 0; i < 3; i++) {
        CHECK(art_evq_publish(q, &events[i], 0));
    }
    art_event *out[1];
    uint64_t value = 0;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(read(art_evq_fd(q), &value, sizeof value), sizeof value); /* an edge since the last drain */
        CHECK_EQ(art_evq_drain(q, out, 1), 1);
        CHECK(out[0] == &events[i]);
        CHECK_EQ(art_event_take(out[0]), 1);
    }
    CHECK(!readable(q));
    art_evq_destroy(q);
}

static void test_full_eventfd_counter_counts_as_rung(void)
{
    art_evq *q = make(0);
    art_event ev = {0};
    uint64_t most = UINT64_MAX - 1;
    CHECK_EQ(write(art_evq_fd(q), &most, sizeof most), sizeof most);
    CHECK(art_evq_publish(q, &ev, 0));
    CHECK_EQ(art_evq_statistics(q).failed, 0);
    CHECK(readable(q));
    drain_one(q, &ev);
    CHECK(!readable(q));
    art_evq_destroy(q);
}

/* A producer that loses its core between "I ring" and the write must not silence the others. */
static void test_stalled_ringer_does_not_silence_tier_0(void)
{
    art_evq *q = make(50000);
    art_event low = {.tier = 3};
    art_event high = {.tier = 0};
    struct actor stalled;
    actor_start(&stalled, q, &low, 1000, before_write);
    CHECK(!readable(q));
    CHECK(art_evq_publish(q, &high, 1001));
    CHECK(readable(q));
    art_event *const expected[] = {&high, &low};
    drain_exactly(q, expected, 2);
    actor_finish(&stalled);
    CHECK(readable(q)); /* its write came late: an empty wake-up, allowed */
    drain_nothing(q);
    art_evq_destroy(q);
}

static void test_stalled_ringer_leaves_the_bell_owed_for_tiers_2_and_3(void)
{
    art_evq *q = make(50000);
    art_event first = {.tier = 2};
    art_event second = {.tier = 2};
    struct actor stalled;
    actor_start(&stalled, q, &first, 1000, before_write);
    CHECK(art_evq_publish(q, &second, 1001));
    CHECK(!readable(q));
    CHECK(!art_evq_due(q, 1002));
    CHECK(art_evq_due(q, 51000));
    art_evq_flush(q, 51000);
    CHECK(readable(q));
    art_event *const expected[] = {&first, &second};
    drain_exactly(q, expected, 2);
    CHECK(art_evq_publish(q, &second, 51001));
    CHECK(!readable(q));
    art_evq_flush_now(q); /* parking does not wait for the stalled one either */
    CHECK(readable(q));
    drain_one(q, &second);
    actor_finish(&stalled);
    drain_nothing(q);
    art_evq_destroy(q);
}

/* The first one slept after its write and wakes up two drains later: it must not mark the new bell as rung. */
static void test_late_ringer_does_not_settle_a_later_bell(void)
{
    art_evq *q = make(50000);
    art_event a = {.tier = 0};
    art_event b = {.tier = 0};
    art_event c = {.tier = 0};
    struct actor late;
    struct actor stalled;
    actor_start(&late, q, &a, 1000, after_write);
    CHECK(readable(q));
    drain_one(q, &a);
    actor_start(&stalled, q, &b, 1001, before_write);
    actor_finish(&late);
    CHECK(!readable(q));
    CHECK(art_evq_publish(q, &c, 1002));
    CHECK(readable(q));
    art_event *const expected[] = {&b, &c};
    drain_exactly(q, expected, 2);
    actor_finish(&stalled);
    drain_nothing(q);
    art_evq_destroy(q);
}

/* A producer stopped in the middle of its push hides nothing of the others'. */
static void test_stalled_pusher_hides_no_other_event(void)
{
    for (enum window at = before_push; at <= after_push; at++) {
        art_evq *q = make(50000);
        art_event a = {.tier = 1};
        art_event b = {.tier = 1};
        struct actor stalled;
        actor_start(&stalled, q, &a, 1000, at);
        CHECK(art_evq_publish(q, &b, 1001));
        CHECK(readable(q));
        if (at == before_push) {
            drain_one(q, &b);
            actor_finish(&stalled);
            CHECK(readable(q));
            drain_one(q, &a);
        } else {
            art_event *const expected[] = {&a, &b};
            drain_exactly(q, expected, 2);
            actor_finish(&stalled);
        }
        drain_nothing(q);
        art_evq_destroy(q);
    }
}

/* Publishes in each window of a running drain: either that drain returns the event or the fd is readable after it. */
static art_evq *window_q;
static art_event window_event;
static uint64_t window_now_ns;

static void publish_in_window(void)
{
    CHECK(art_evq_publish(window_q, &window_event, window_now_ns));
    if (window_event.tier >= 2) {
        art_evq_flush_now(window_q);
    }
}

static void test_publish_in_the_middle_of_a_drain_is_not_lost(void)
{
    static const enum window windows[] = {after_clear, after_arm, after_collect, before_rering};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        for (uint8_t tier = 0; tier < ART_EVQ_TIERS; tier++) {
            for (int rang_before = 0; rang_before <= 2; rang_before++) {
                /* 0: idle before; 1: two events, more than one drain takes; 2: the same, and one drain takes all. */
                size_t max = windows[i] != before_rering && rang_before == 2 ? 3 : 1;
                art_evq *q = make(50000);
                art_event others[2];
                memset(others, 0, sizeof others);
                others[0].tier = others[1].tier = 1;
                if (rang_before != 0 || windows[i] == before_rering) {
                    CHECK(art_evq_publish(q, &others[0], 1000));
                    CHECK(art_evq_publish(q, &others[1], 1000));
                }
                memset(&window_event, 0, sizeof window_event);
                window_event.tier = tier;
                window_q = q;
                window_now_ns = 1001;
                callback_at = windows[i];
                callback = publish_in_window;
                art_event *out[3];
                bool seen = false;
                for (int drains = 0; !seen && drains < 5; drains++) {
                    size_t n = art_evq_drain(q, out, max);
                    CHECK(callback == NULL);
                    for (size_t k = 0; k < n; k++) {
                        seen = seen || out[k] == &window_event;
                        CHECK_EQ(art_event_take(out[k]), 1);
                    }
                    CHECK(seen || readable(q)); /* otherwise the consumer would sleep with the event queued */
                }
                CHECK(seen);
                art_evq_destroy(q);
            }
        }
    }
}

/* Misuse ends the process, loudly: memory would be at stake. */
static void expect_abort(void (*misuse)(void))
{
    (void)fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct rlimit no_core = {0, 0};
        (void)setrlimit(RLIMIT_CORE, &no_core);
        int null = open("/dev/null", O_WRONLY);
        (void)dup2(null, STDERR_FILENO);
        misuse();
        _exit(0);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(!(WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

static void misuse_tier(void)
{
    art_event ev = {.tier = 4};
    (void)art_evq_publish(make(0), &ev, 0);
}

static void drain_in_window(void)
{
    art_event *out[1];
    (void)art_evq_drain(window_q, out, 1);
}

static void misuse_two_drains(void)
{
    art_event *out[1];
    window_q = make(0);
    callback_at = after_arm;
    callback = drain_in_window;
    (void)art_evq_drain(window_q, out, 1);
}

static void test_misuse_aborts(void)
{
    expect_abort(misuse_tier);
    expect_abort(misuse_two_drains);
}

int main(void)
{
    test_misuse_aborts();
    test_create_checks_arguments_and_the_fd_is_nonblocking_and_private();
    test_tiers_in_order_and_fifo_inside();
    test_pending_event_is_not_queued_twice();
    test_one_bell_per_drain();
    test_tier_2_and_3_ring_at_most_once_per_interval();
    test_tier_0_and_1_ring_at_once_whatever_is_owed();
    test_clock_readings_that_are_behind_or_wrap();
    test_more_than_max_keeps_the_fd_readable_and_the_order();
    test_edge_triggered_poller_hears_of_the_rest();
    test_full_eventfd_counter_counts_as_rung();
    test_stalled_ringer_does_not_silence_tier_0();
    test_stalled_ringer_leaves_the_bell_owed_for_tiers_2_and_3();
    test_late_ringer_does_not_settle_a_later_bell();
    test_stalled_pusher_hides_no_other_event();
    test_publish_in_the_middle_of_a_drain_is_not_lost();
    return 0;
}
