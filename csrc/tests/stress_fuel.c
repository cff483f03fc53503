/* Fuel accounts under contention. fuel.c is compiled in with random yields in its windows.
 *
 * Oracles: what the takers charged equals what was granted, to the unit; at every instant left + used <= granted; a taker
 * that is told "exhausted" has missed nothing. */
#include <sched.h>

static void window(void);

#define ART_FUEL_WINDOW(at) window()
#include "../fuel.c"

#include <pthread.h>

#include "check.h"
#include "sys_linux.h"

enum { TAKERS = 3 };

static const uint64_t DURATION_NS = UINT64_C(2000000000);

static art_fuel_account account;
static pthread_barrier_t barrier;
static _Atomic(bool) stop;
static _Atomic(bool) watch_stop;
static _Atomic(uint64_t) charged_total;
static uint64_t chunk_max; /* of this round; written between barriers */
static int chunk_count;
static bool yields; /* of this round */

static _Thread_local uint64_t window_random;

static void window(void)
{
    if (yields && check_random(&window_random) % 4 == 0) {
        sched_yield();
    }
}

static void *taker(void *arg)
{
    uint64_t random = (uint64_t)(uintptr_t)arg;
    window_random = check_random(&random);
    for (;;) {
        pthread_barrier_wait(&barrier);
        if (atomic_load(&stop)) {
            return NULL;
        }
        uint64_t charged = 0;
        for (;;) {
            uint64_t want = check_random(&random) % 7 == 0 ? UINT64_MAX : 1 + check_random(&random) % (2 * chunk_max);
            uint64_t got = art_fuel_take(&account, want);
            CHECK(got <= want);
            if (got == 0) {
                if (art_fuel_exhausted(&account)) {
                    break;
                }
                sched_yield();
                continue;
            }
            uint64_t part = check_random(&random) % 4 == 0 ? got : check_random(&random) % (got + 1);
            if (check_random(&random) % 8 == 0) {
                sched_yield(); /* hold it a while */
            }
            art_fuel_charge(&account, part);
            charged += part;
            if (part < got) {
                art_fuel_put(&account, got - part);
            }
        }
        atomic_fetch_add(&charged_total, charged);
        pthread_barrier_wait(&barrier);
    }
}

/* Reads as statistics() does, without its saturation, so that a negative outstanding cannot hide. */
static void *watcher(void *arg)
{
    (void)arg;
    while (!atomic_load_explicit(&watch_stop, memory_order_relaxed)) {
        uint64_t used = atomic_load_explicit(&account.used, memory_order_acquire);
        uint64_t left = atomic_load_explicit(&account.left, memory_order_acquire);
        uint64_t granted = atomic_load_explicit(&account.granted, memory_order_acquire);
        CHECK_MSG(left <= granted && used <= granted - left, "granted %ju left %ju used %ju", (uintmax_t)granted,
                  (uintmax_t)left, (uintmax_t)used);
        sched_yield();
    }
    return NULL;
}

int main(void)
{
    uint64_t random = check_seed(1);
    uint64_t end_ns = art_sys_now_ns() + DURATION_NS;
    pthread_t threads[TAKERS];
    int rounds = 0;
    CHECK_OK(pthread_barrier_init(&barrier, NULL, TAKERS + 1));
    for (uintptr_t i = 0; i < TAKERS; i++) {
        uint64_t seed = check_random(&random);
        CHECK_OK(pthread_create(&threads[i], NULL, taker, (void *)(uintptr_t)seed));
    }
    for (; art_sys_now_ns() < end_ns; rounds++) {
        /* Small chunks make the account run dry often; the large ones reach the top of the range. */
        chunk_max = rounds % 4 == 3 ? UINT64_C(1) << 56 : 1 + check_random(&random) % 64;
        chunk_count = 1 + (int)(check_random(&random) % (rounds % 8 == 0 ? 1000 : 8));
        yields = rounds % 2 == 0;
        uint64_t granted = check_random(&random) % chunk_max;
        art_fuel_init(&account, granted, false);
        atomic_store(&charged_total, 0);
        atomic_store(&watch_stop, false);
        pthread_t watch_thread;
        CHECK_OK(pthread_create(&watch_thread, NULL, watcher, NULL));

        pthread_barrier_wait(&barrier);
        for (int i = 0; i < chunk_count; i++) {
            uint64_t n = 1 + check_random(&random) % chunk_max;
            granted = art_fuel_add(granted, n);
            art_fuel_grant(&account, n, i + 1 == chunk_count);
            if (check_random(&random) % 4 == 0) {
                sched_yield();
            }
        }
        pthread_barrier_wait(&barrier);

        atomic_store(&watch_stop, true);
        CHECK_OK(pthread_join(watch_thread, NULL));
        art_fuel_stats stats = art_fuel_statistics(&account);
        CHECK_EQ(stats.granted, granted);
        CHECK_EQ(stats.left, 0);
        CHECK_EQ(stats.outstanding, 0);
        CHECK_EQ(stats.used, granted);
        CHECK_EQ(atomic_load(&charged_total), granted);
    }
    atomic_store(&stop, true);
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < TAKERS; i++) {
        CHECK_OK(pthread_join(threads[i], NULL));
    }
    CHECK(rounds > 0);
    printf("%d rounds\n", rounds);
    return 0;
}
