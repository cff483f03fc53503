/* fuel.h: atomic fuel accounts.
 *
 * What it is: an account holds fuel that the control plane granted and workers spend. The control plane owns the budget
 * tree and grants chunks; workers take a piece, run with it, charge what was used and put back what was not. There
 * is one ledger of truth: an account never creates fuel.
 *
 * What always holds (at every instant, under any interleaving):
 *     granted == left + outstanding + used
 *     outstanding (taken, neither charged nor put back) >= 0
 *     granted and used only grow; the sum of everything taken minus everything put back never exceeds granted
 * "outstanding" is not stored: it is in the hands of the takers. It stays true as long as takers charge or put back each
 * unit they took exactly once; an account cannot check that, and saturates instead of wrapping when it is broken.
 *
 * Thread-safety: every function but art_fuel_init may be called from any thread, at any time, together with any other.
 * All are lock-free and none blocks, allocates or makes a system call. Only `final` has one writer at a time: whoever
 * grants to an account is serialised by its owner, the budget tree.
 * Ownership: an account is plain memory embedded in its owner's struct; there is nothing to free.
 * Errors: none. All arithmetic saturates at UINT64_MAX, which therefore serves as "no limit" in a grant.
 */
#ifndef ART_FUEL_H
#define ART_FUEL_H

#include <stdbool.h>
#include <stdint.h>

#include "art_atomic.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Orderings, by tag (each names its partner):
 *   [F1] grant: `granted` is raised before `left`; `left` is raised with release. Partner [F2].
 *   [F2] take and statistics read `left` with acquire: who sees fuel also sees the grant it came from.
 *   [F3] grant: `final` is stored with release after `left` was raised. Partner [F4].
 *   [F4] art_fuel_exhausted reads `final` with acquire and `left` afterwards: who sees "no more will come" also sees the
 *        last chunk.
 *   [F5] charge raises `used` with release. Partner [F6].
 *   [F6] statistics reads `used` first, with acquire: it then sees every take that the charged fuel came from, so the
 *        computed outstanding is never negative. */
typedef struct art_fuel_account {
    ART_ATOMIC(uint64_t) left;    /* can be taken. Takers lower it, grant and put raise it */
    ART_ATOMIC(uint64_t) used;    /* charged. Takers raise it; never falls */
    ART_ATOMIC(uint64_t) granted; /* all that was ever granted. Granters raise it; never falls */
    ART_ATOMIC(bool) final;       /* the granter's word that no further grant will come. Granters write, takers read */
} art_fuel_account;

/* A reading of an account. Exact when no other thread is at work on it; otherwise `granted`, `left` and `used` were each
 * true at some instant during the call and `outstanding` is granted - left - used of these, never negative. */
typedef struct art_fuel_stats {
    uint64_t granted;
    uint64_t left;
    uint64_t outstanding;
    uint64_t used;
    bool final;
} art_fuel_stats;

/* Starts an account with a first grant (0 is allowed). The memory must not be in use by any other thread. */
void art_fuel_init(art_fuel_account *account, uint64_t grant, bool final);

/* Takes min(want, left) and returns it; 0 when nothing is left or nothing was wanted. The caller now holds that much
 * and must charge or put back every unit of it. */
uint64_t art_fuel_take(art_fuel_account *account, uint64_t want);

/* Gives back n units that were taken and not used. */
void art_fuel_put(art_fuel_account *account, uint64_t n);

/* Records n units that were taken as used. */
void art_fuel_charge(art_fuel_account *account, uint64_t n);

/* Adds n units and says whether this was the last grant. n may be 0: grant(0, true) seals an account. What would lift the
 * total ever granted above UINT64_MAX is dropped. grant(n, false) on a sealed account opens it again. */
void art_fuel_grant(art_fuel_account *account, uint64_t n, bool final);

/* What a take of 0 means: true = nothing is left and no grant will come (the run is out of fuel, unless another
 * taker of the same account puts some back); false = fuel is there again, or ask the granter for more. */
bool art_fuel_exhausted(const art_fuel_account *account);

art_fuel_stats art_fuel_statistics(const art_fuel_account *account);

/* Pure integer helpers, for fuel and anything else that must not wrap. */

/* a + b, at most UINT64_MAX. */
static inline uint64_t art_fuel_add(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

/* a - b, at least 0: used = art_fuel_sub(fuel before, fuel after) is 0, not huge, when an engine reports more after. */
static inline uint64_t art_fuel_sub(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static inline uint64_t art_fuel_min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* value * num / den rounded down, without overflow in between, at most UINT64_MAX. den 0 gives UINT64_MAX (no limit),
 * whatever the others are. For rates: fuel per slice from fuel per microsecond, shares by weight. */
static inline uint64_t art_fuel_scale(uint64_t value, uint64_t num, uint64_t den)
{
    if (den == 0) {
        return UINT64_MAX;
    }
    unsigned __int128 wide = (unsigned __int128)value * num / den;
    return wide > UINT64_MAX ? UINT64_MAX : (uint64_t)wide;
}

#ifdef __cplusplus
}
#endif
#endif
