/* Fuel accounts in one thread: the pure helpers at their extremes, each operation's contract, and random operations
 * against a model that keeps what is outstanding explicitly. */
#include "fuel.h"

#include "check.h"

#define MAX UINT64_MAX

static void test_pure_helpers(void)
{
    CHECK_EQ(art_fuel_add(0, 0), 0);
    CHECK_EQ(art_fuel_add(MAX, 0), MAX);
    CHECK_EQ(art_fuel_add(MAX, 1), MAX);
    CHECK_EQ(art_fuel_add(MAX, MAX), MAX);
    CHECK_EQ(art_fuel_add(MAX - 1, 1), MAX);
    CHECK_EQ(art_fuel_add(MAX / 2, MAX / 2), MAX - 1);

    CHECK_EQ(art_fuel_sub(0, 0), 0);
    CHECK_EQ(art_fuel_sub(0, 1), 0);
    CHECK_EQ(art_fuel_sub(0, MAX), 0);
    CHECK_EQ(art_fuel_sub(MAX, MAX), 0);
    CHECK_EQ(art_fuel_sub(MAX, 0), MAX);
    CHECK_EQ(art_fuel_sub(MAX - 1, MAX), 0);

    CHECK_EQ(art_fuel_min(0, MAX), 0);
    CHECK_EQ(art_fuel_min(MAX, MAX), MAX);

    CHECK_EQ(art_fuel_scale(10, 3, 4), 7);
    CHECK_EQ(art_fuel_scale(MAX, 1, 1), MAX);
    CHECK_EQ(art_fuel_scale(MAX, MAX, MAX), MAX);
    CHECK_EQ(art_fuel_scale(MAX, MAX, 1), MAX);
    CHECK_EQ(art_fuel_scale(MAX, 1, MAX), 1);
    CHECK_EQ(art_fuel_scale(MAX, 2, 1), MAX);
    CHECK_EQ(art_fuel_scale(MAX - 1, 1, MAX), 0);
    CHECK_EQ(art_fuel_scale(0, MAX, 1), 0);
    CHECK_EQ(art_fuel_scale(0, 0, 0), MAX);
}

static void check_account(const art_fuel_account *account, uint64_t granted, uint64_t left, uint64_t used)
{
    art_fuel_stats stats = art_fuel_statistics(account);
    CHECK_EQ(stats.granted, granted);
    CHECK_EQ(stats.left, left);
    CHECK_EQ(stats.used, used);
    CHECK_EQ(stats.outstanding, granted - left - used);
}

static void test_take_charge_put(void)
{
    art_fuel_account account;
    art_fuel_init(&account, 100, false);
    check_account(&account, 100, 100, 0);
    CHECK_EQ(art_fuel_take(&account, 0), 0);
    CHECK_EQ(art_fuel_take(&account, 30), 30);
    check_account(&account, 100, 70, 0);
    art_fuel_charge(&account, 20);
    art_fuel_put(&account, 10);
    check_account(&account, 100, 80, 20);
    CHECK_EQ(art_fuel_take(&account, MAX), 80);
    CHECK_EQ(art_fuel_take(&account, 1), 0);
    check_account(&account, 100, 0, 20);
    art_fuel_grant(&account, 5, false);
    check_account(&account, 105, 5, 20);
    CHECK_EQ(art_fuel_take(&account, 6), 5);
    art_fuel_charge(&account, 85);
    check_account(&account, 105, 0, 105);
}

static void test_exhausted_means_nothing_left_and_nothing_to_come(void)
{
    art_fuel_account account;
    art_fuel_init(&account, 0, false);
    CHECK_EQ(art_fuel_take(&account, 1), 0);
    CHECK(!art_fuel_exhausted(&account)); /* more may come */
    art_fuel_grant(&account, 1, true);
    CHECK(art_fuel_statistics(&account).final);
    CHECK(!art_fuel_exhausted(&account)); /* the last chunk is there */
    CHECK_EQ(art_fuel_take(&account, 2), 1);
    CHECK(art_fuel_exhausted(&account));
    art_fuel_put(&account, 1);
    CHECK(!art_fuel_exhausted(&account));
    CHECK_EQ(art_fuel_take(&account, 2), 1);
    art_fuel_grant(&account, 0, false); /* opened again */
    CHECK(!art_fuel_exhausted(&account));
    art_fuel_grant(&account, 0, true); /* sealed */
    CHECK(art_fuel_exhausted(&account));
    check_account(&account, 1, 0, 0);
}

static void test_saturation(void)
{
    art_fuel_account account;
    art_fuel_init(&account, MAX, true);
    CHECK_EQ(art_fuel_take(&account, MAX), MAX);
    CHECK(art_fuel_exhausted(&account));
    art_fuel_charge(&account, MAX);
    check_account(&account, MAX, 0, MAX);
    art_fuel_grant(&account, MAX, true); /* beyond the largest total: dropped, not wrapped, not takeable */
    check_account(&account, MAX, 0, MAX);
    CHECK_EQ(art_fuel_take(&account, 1), 0);

    art_fuel_init(&account, MAX - 10, false);
    CHECK_EQ(art_fuel_take(&account, 5), 5);
    art_fuel_grant(&account, 100, false); /* 10 fit */
    check_account(&account, MAX, MAX - 5, 0);

    /* Broken callers: more put or charged than taken must not wrap to a small or huge number. */
    art_fuel_put(&account, MAX);
    CHECK_EQ(art_fuel_statistics(&account).left, MAX);
    art_fuel_charge(&account, MAX);
    art_fuel_charge(&account, MAX);
    CHECK_EQ(art_fuel_statistics(&account).used, MAX);
    CHECK_EQ(art_fuel_statistics(&account).outstanding, 0);
}

/* Small numbers, powers of two and the largest ones, all often. */
static uint64_t random_amount(uint64_t *random)
{
    uint64_t value = check_random(random);
    switch (check_random(random) % 4) {
    case 0:
        return value % 4;
    case 1:
        return value % 1000;
    case 2:
        return value >> (check_random(random) % 64);
    default:
        return MAX - value % 4;
    }
}

static void test_random_against_model(uint64_t seed)
{
    uint64_t random = seed;
    for (int round = 0; round < 2000; round++) {
        uint64_t granted = random_amount(&random);
        uint64_t left = granted;
        uint64_t held = 0;
        uint64_t used = 0;
        bool final = check_random(&random) % 2 != 0;
        art_fuel_account account;
        art_fuel_init(&account, granted, final);
        for (int step = 0; step < 60; step++) {
            uint64_t n = random_amount(&random);
            switch (check_random(&random) % 4) {
            case 0: {
                uint64_t got = n < left ? n : left;
                CHECK_EQ(art_fuel_take(&account, n), got);
                left -= got;
                held += got;
                break;
            }
            case 1:
                n = n < held ? n : held;
                art_fuel_put(&account, n);
                held -= n;
                left += n;
                break;
            case 2:
                n = n < held ? n : held;
                art_fuel_charge(&account, n);
                held -= n;
                used += n;
                break;
            default: {
                uint64_t fits = MAX - granted < n ? MAX - granted : n;
                final = check_random(&random) % 2 != 0;
                art_fuel_grant(&account, n, final);
                granted += fits;
                left += fits;
                break;
            }
            }
            check_account(&account, granted, left, used);
            CHECK_EQ(art_fuel_statistics(&account).outstanding, held);
            CHECK_EQ(art_fuel_statistics(&account).final, final);
            CHECK_EQ(art_fuel_exhausted(&account), final && left == 0);
        }
    }
}

int main(void)
{
    test_pure_helpers();
    test_take_charge_put();
    test_exhausted_means_nothing_left_and_nothing_to_come();
    test_saturation();
    test_random_against_model(check_seed(1));
    return 0;
}
