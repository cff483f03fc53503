/* The event queue under contention. evq.c is compiled in with random yields in every window, since without them the rare
 * interleavings hardly happen.
 *
 * Oracles:
 *   - no lost wake-up: the consumer sleeps in poll() without looking at the queue; if it sleeps for WATCHDOG while
 *     events are out, one was lost. Producers often wait until all their events are back, so that no later bell hides a
 *     lost one.
 *   - handed-over events (plain payload, given back explicitly): each arrives exactly once, consecutive per producer and tier.
 *   - shared events (atomic payload, published by anyone at any time): after the end the consumer has seen the last value.
 *   - inside one batch tiers rise.
 *
 * And a litmus test for the one place where seq_cst matters on strongly ordered machines: publish and drain at the same
 * instant, many times; the event was drained, or the fd is readable.
 */
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

enum window { before_write, after_write, before_push, after_push, after_clear, after_arm, after_collect, before_rering };

static void window(enum window at);

#define ART_EVQ_WINDOW(at) window(at)
#include "../evq.c"

#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "sys_linux.h"

enum { PRODUCERS_MAX = 3, OWN_EVENTS = 12, SHARED_EVENTS = 4, BATCH_MAX = 64, WATCHDOG_MS = 10000 };

struct own_event {
    art_event event; /* first, so that the event's address is the struct's */
    int producer;    /* >= 0; the shared ones have -1 */
    uint64_t seq;    /* plain: belongs to whoever has the event */
    _Atomic(bool) away; /* true from publish until the consumer gives it back (release, partner: the producer's acquire) */
};

struct shared_event {
    art_event event;
    int producer; /* -1 */
    _Atomic(uint64_t) value[PRODUCERS_MAX];
    uint64_t seen[PRODUCERS_MAX]; /* consumer only */
};

struct config {
    int producers;
    size_t batch;
    uint64_t coalesce_ns;
    bool yields;
    uint64_t duration_ns;
};

struct producer {
    pthread_t thread;
    int index;
    uint64_t random;
    uint64_t next_seq[ART_EVQ_TIERS];
    uint64_t published;
    struct own_event own[OWN_EVENTS];
};

static struct config config;
static art_evq *q;
static struct producer producers[PRODUCERS_MAX];
static struct shared_event shared[SHARED_EVENTS];
static pthread_barrier_t barrier;
static uint64_t end_ns;
static _Atomic(int) running;
static int done_fd; /* readable once no producer is running */

static _Thread_local uint64_t window_random;
static void (*after_clear_hook)(void); /* set while no other thread is at work */

static void window(enum window at)
{
    if (at == after_clear && after_clear_hook != NULL) {
        after_clear_hook();
    }
    if (config.yields && check_random(&window_random) % 4 == 0) {
        sched_yield();
    }
}

static uint64_t now_now(struct producer *p)
{
    /* Callers may be a little behind. */
    return art_sys_now_ns() - (check_random(&p->random) % 4 == 0 ? check_random(&p->random) % 100000 : 0);
}

static void publish_own(struct producer *p, struct own_event *ev)
{
    uint8_t tier = (uint8_t)(check_random(&p->random) % ART_EVQ_TIERS);
    ev->event.tier = tier;
    ev->seq = p->next_seq[tier]++;
    atomic_store_explicit(&ev->away, true, memory_order_relaxed); /* handed over by publish */
    CHECK(art_evq_publish(q, &ev->event, now_now(p)));
    p->published++;
}

static void publish_shared(struct producer *p)
{
    struct shared_event *ev = &shared[check_random(&p->random) % SHARED_EVENTS];
    /* Relaxed: publish itself must make it visible, also when it returns false. */
    (void)atomic_fetch_add_explicit(&ev->value[p->index], 1, memory_order_relaxed);
    (void)art_evq_publish(q, &ev->event, now_now(p));
}

/* Waits for all own events to come back, in one of the two ways a worker does: parked, or looking for due bells. */
static void wait_all_back(struct producer *p)
{
    bool parked = check_random(&p->random) % 2 != 0;
    if (parked) {
        art_evq_flush_now(q);
    }
    for (int i = 0; i < OWN_EVENTS; i++) {
        while (atomic_load_explicit(&p->own[i].away, memory_order_acquire)) {
            if (!parked) {
                uint64_t now_ns = art_sys_now_ns();
                if (art_evq_due(q, now_ns)) {
                    art_evq_flush(q, now_ns);
                }
            }
            sched_yield();
        }
    }
}

static void *producer_main(void *arg)
{
    struct producer *p = arg;
    window_random = check_random(&p->random);
    pthread_barrier_wait(&barrier);
    while (art_sys_now_ns() < end_ns) {
        uint64_t burst = 1 + check_random(&p->random) % (check_random(&p->random) % 2 ? 2 : OWN_EVENTS);
        for (int i = 0; i < OWN_EVENTS && burst > 0; i++) {
            if (!atomic_load_explicit(&p->own[i].away, memory_order_acquire)) {
                publish_own(p, &p->own[i]);
                burst--;
            }
            if (check_random(&p->random) % 4 == 0) {
                publish_shared(p);
            }
        }
        if (check_random(&p->random) % 4 != 0) {
            wait_all_back(p);
        }
    }
    wait_all_back(p);
    art_evq_flush_now(q); /* for the shared ones: this producer is about to end */
    if (atomic_fetch_sub(&running, 1) == 1) {
        const uint64_t one = 1;
        CHECK_EQ(write(done_fd, &one, sizeof one), sizeof one);
    }
    return NULL;
}

static void receive(art_event *ev, uint64_t expected_seq[PRODUCERS_MAX][ART_EVQ_TIERS], uint64_t *received)
{
    uint8_t tier = ev->tier;
    CHECK_EQ(art_event_take(ev), 1);
    if (((struct own_event *)ev)->producer >= 0) {
        struct own_event *own = (struct own_event *)ev;
        CHECK_EQ(own->seq, expected_seq[own->producer][tier]);
        expected_seq[own->producer][tier]++;
        (*received)++;
        atomic_store_explicit(&own->away, false, memory_order_release);
        return;
    }
    struct shared_event *any = (struct shared_event *)ev;
    for (int p = 0; p < PRODUCERS_MAX; p++) {
        uint64_t value = atomic_load_explicit(&any->value[p], memory_order_relaxed);
        CHECK(value >= any->seen[p]);
        any->seen[p] = value;
    }
}

static bool shared_all_seen(void)
{
    for (int i = 0; i < SHARED_EVENTS; i++) {
        for (int p = 0; p < PRODUCERS_MAX; p++) {
            if (atomic_load(&shared[i].value[p]) != shared[i].seen[p]) {
                return false;
            }
        }
    }
    return true;
}

static void run(const struct config *with, uint64_t seed)
{
    uint64_t random = seed;
    uint64_t expected_seq[PRODUCERS_MAX][ART_EVQ_TIERS] = {{0}};
    uint64_t received = 0;
    uint64_t empty = 0;
    config = *with;
    CHECK_OK(art_evq_create(config.coalesce_ns, &q));
    done_fd = eventfd(0, EFD_CLOEXEC);
    CHECK(done_fd >= 0);
    memset(producers, 0, sizeof producers);
    memset(shared, 0, sizeof shared);
    CHECK_OK(pthread_barrier_init(&barrier, NULL, (unsigned)config.producers + 1));
    atomic_store(&running, config.producers);
    for (int i = 0; i < SHARED_EVENTS; i++) {
        shared[i].producer = -1;
        shared[i].event.tier = (uint8_t)(i % ART_EVQ_TIERS);
    }
    end_ns = art_sys_now_ns() + config.duration_ns;
    for (int i = 0; i < config.producers; i++) {
        producers[i].index = i;
        producers[i].random = check_random(&random);
        for (int k = 0; k < OWN_EVENTS; k++) {
            producers[i].own[k].producer = i;
        }
        CHECK_OK(pthread_create(&producers[i].thread, NULL, producer_main, &producers[i]));
    }
    window_random = check_random(&random);
    pthread_barrier_wait(&barrier);
    /* When a producer has ended, its events are back and its shared bells rung: the fd tells about the last ones. */
    while (atomic_load(&running) > 0 || !shared_all_seen()) {
        struct pollfd fds[2] = {{.fd = art_evq_fd(q), .events = POLLIN},
                                {.fd = atomic_load(&running) > 0 ? done_fd : -1, .events = POLLIN}};
        int n = poll(fds, 2, WATCHDOG_MS);
        CHECK_MSG(n > 0, "lost wake-up: bell %ju, received %ju", (uintmax_t)atomic_load(&q->bell), (uintmax_t)received);
        if ((fds[0].revents & POLLIN) == 0) {
            continue;
        }
        art_event *out[BATCH_MAX];
        size_t count_out = art_evq_drain(q, out, config.batch);
        empty += count_out == 0;
        for (size_t i = 0; i + 1 < count_out; i++) {
            CHECK(out[i]->tier <= out[i + 1]->tier);
        }
        for (size_t i = 0; i < count_out; i++) {
            receive(out[i], expected_seq, &received);
        }
    }
    uint64_t published = 0;
    for (int i = 0; i < config.producers; i++) {
        CHECK_OK(pthread_join(producers[i].thread, NULL));
        published += producers[i].published;
    }
    CHECK(published > 0);
    CHECK_EQ(received, published);
    art_evq_stats stats = art_evq_statistics(q);
    CHECK_EQ(stats.failed, 0);
    printf("%d producers, batch %zu, coalesce %ju ns, yields %d: %ju events, %ju drains (%ju empty), rung %ju, delayed %ju, "
           "rerung %ju\n",
           config.producers, config.batch, (uintmax_t)config.coalesce_ns, config.yields, (uintmax_t)stats.drained,
           (uintmax_t)stats.drains, (uintmax_t)empty, (uintmax_t)stats.rung, (uintmax_t)stats.delayed,
           (uintmax_t)stats.rerung);
    CHECK_OK(pthread_barrier_destroy(&barrier));
    CHECK_OK(close(done_fd));
    art_evq_destroy(q);
}

/* --- litmus --- */

static art_event litmus_event;
static _Atomic(uint64_t) litmus_start; /* round number; UINT64_MAX ends it */
static _Atomic(uint64_t) litmus_done;
static uint64_t litmus_round; /* drain's thread only */

static void spin_until(_Atomic(uint64_t) *cell, uint64_t at_least)
{
    for (unsigned spins = 0; atomic_load_explicit(cell, memory_order_acquire) < at_least; spins++) {
        if (spins > 2000) {
            sched_yield(); /* the other thread has no core */
        }
    }
}

static void delay(uint64_t turns)
{
    for (volatile uint64_t i = 0; i < turns; i++) {
    }
}

/* In drain, just before it arms: lets the publisher go, then waits about as long as that takes to arrive there. */
static void litmus_go(void)
{
    if (litmus_round != 0) {
        atomic_store_explicit(&litmus_start, litmus_round, memory_order_release);
        uint64_t turns_max = UINT64_C(1) << check_random(&window_random) % 11; /* from a few ns to a microsecond */
        delay(check_random(&window_random) % turns_max);
    }
}

static void *litmus_publisher(void *arg)
{
    uint64_t random = *(uint64_t *)arg;
    for (uint64_t round = 1;; round++) {
        spin_until(&litmus_start, round);
        if (atomic_load(&litmus_start) == UINT64_MAX) {
            return NULL;
        }
        delay(check_random(&random) % 16);
        CHECK(art_evq_publish(q, &litmus_event, 0));
        atomic_store_explicit(&litmus_done, round, memory_order_release);
    }
}

static void litmus(uint64_t seed, uint64_t duration_ns)
{
    uint64_t rounds = 0;
    uint64_t met = 0;
    uint64_t both = 0;
    uint64_t until_ns = art_sys_now_ns() + duration_ns;
    art_event first = {.tier = 0};
    pthread_t thread;
    config.yields = false;
    after_clear_hook = litmus_go;
    window_random = seed;
    litmus_event.tier = 3;
    CHECK_OK(art_evq_create(0, &q));
    CHECK_OK(pthread_create(&thread, NULL, litmus_publisher, &seed));
    while (art_sys_now_ns() < until_ns) {
        CHECK(art_evq_publish(q, &first, 0)); /* the bell has been rung: a publisher that sees this does nothing */
        art_event *out[2];
        litmus_round = ++rounds;
        size_t n = art_evq_drain(q, out, 2);
        litmus_round = 0;
        spin_until(&litmus_done, rounds);
        struct pollfd p = {.fd = art_evq_fd(q), .events = POLLIN};
        int readable = poll(&p, 1, 0);
        CHECK_MSG(n == 2 || readable == 1, "lost in round %ju", (uintmax_t)rounds);
        met += n == 2 && readable == 1;
        both += n == 2;
        for (size_t i = 0; i < n; i++) {
            CHECK_EQ(art_event_take(out[i]), 1);
        }
        n += art_evq_drain(q, out, 2);
        CHECK_EQ(n, 2);
        (void)art_event_take(&litmus_event);
    }
    atomic_store(&litmus_start, UINT64_MAX);
    CHECK_OK(pthread_join(thread, NULL));
    art_evq_destroy(q);
    printf("litmus: %ju rounds, %ju drained at once, %ju of them rung\n", (uintmax_t)rounds, (uintmax_t)both, (uintmax_t)met);
}

int main(void)
{
    static const uint64_t MS = 1000000;
    uint64_t random = check_seed(1);
    static const struct config configs[] = {
        {1, BATCH_MAX, 50000, true, 0}, {1, 1, 50000, true, 0},  {1, BATCH_MAX, 0, false, 0}, {2, 2, 50000, true, 0},
        {2, BATCH_MAX, 0, true, 0},     {3, 3, 50000, true, 0}, {3, BATCH_MAX, 50000, false, 0},
        {3, 1, 0, true, 0},
    };
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        struct config with = configs[i];
        with.duration_ns = 400 * MS;
        run(&with, check_random(&random));
    }
    litmus(check_random(&random), 1000 * MS);
    return 0;
}
