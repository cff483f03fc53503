/* fuel.c: see fuel.h for the invariant and the ordering tags. */
#include "fuel.h"

/* Tests put delays and stops into the windows between two steps; otherwise nothing. */
#ifndef ART_FUEL_WINDOW
#define ART_FUEL_WINDOW(at) ((void)0)
#endif

/* Raises *cell by n, at most to UINT64_MAX, and returns by how much it was raised. */
static uint64_t add_saturating(_Atomic(uint64_t) *cell, uint64_t n, memory_order order)
{
    uint64_t old = atomic_load_explicit(cell, memory_order_relaxed);
    uint64_t sum;
    do {
        sum = art_fuel_add(old, n);
        if (sum == old) {
            return 0;
        }
        ART_FUEL_WINDOW(before_add);
        /* Relaxed on failure: the value is only the next guess. */
    } while (!atomic_compare_exchange_weak_explicit(cell, &old, sum, order, memory_order_relaxed));
    return sum - old;
}

void art_fuel_init(art_fuel_account *account, uint64_t grant, bool final)
{
    atomic_init(&account->left, grant);
    atomic_init(&account->used, 0);
    atomic_init(&account->granted, grant);
    atomic_init(&account->final, final);
}

uint64_t art_fuel_take(art_fuel_account *account, uint64_t want)
{
    uint64_t left = atomic_load_explicit(&account->left, memory_order_relaxed);
    uint64_t got;
    do {
        got = art_fuel_min(want, left);
        if (got == 0) {
            return 0;
        }
        ART_FUEL_WINDOW(before_take);
        /* One CAS moves exactly what this thread saw to be there: no interleaving hands a unit out twice.
         * [F2] acquire with [F1]; release keeps the chain of grants visible to later readers of left. */
    } while (!atomic_compare_exchange_weak_explicit(&account->left, &left, left - got, memory_order_acq_rel,
                                                    memory_order_relaxed));
    return got;
}

void art_fuel_put(art_fuel_account *account, uint64_t n)
{
    /* Release: as [F1], so that statistics sees what happened to this fuel before it came back. */
    (void)add_saturating(&account->left, n, memory_order_acq_rel);
}

void art_fuel_charge(art_fuel_account *account, uint64_t n)
{
    (void)add_saturating(&account->used, n, memory_order_acq_rel); /* [F5] */
}

void art_fuel_grant(art_fuel_account *account, uint64_t n, bool final)
{
    /* Only what fitted under UINT64_MAX becomes takeable, so left can never exceed granted. Relaxed: published by [F1]. */
    uint64_t fitted = add_saturating(&account->granted, n, memory_order_relaxed);
    ART_FUEL_WINDOW(after_granted);
    (void)add_saturating(&account->left, fitted, memory_order_acq_rel); /* [F1] */
    ART_FUEL_WINDOW(before_final);
    atomic_store_explicit(&account->final, final, memory_order_release); /* [F3] */
}

bool art_fuel_exhausted(const art_fuel_account *account)
{
    if (!atomic_load_explicit(&account->final, memory_order_acquire)) { /* [F4] */
        return false;
    }
    ART_FUEL_WINDOW(exhausted);
    return atomic_load_explicit(&account->left, memory_order_acquire) == 0;
}

art_fuel_stats art_fuel_statistics(const art_fuel_account *account)
{
    art_fuel_stats stats;
    /* This order of reading is what keeps outstanding from going negative: used ([F6]), then left ([F2]), then granted. What
     * is charged was taken before, and what is left was granted before. */
    stats.used = atomic_load_explicit(&account->used, memory_order_acquire);
    stats.left = atomic_load_explicit(&account->left, memory_order_acquire);
    stats.granted = atomic_load_explicit(&account->granted, memory_order_acquire);
    stats.final = atomic_load_explicit(&account->final, memory_order_acquire);
    stats.outstanding = art_fuel_sub(stats.granted, art_fuel_add(stats.left, stats.used));
    return stats;
}
