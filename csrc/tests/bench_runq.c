/* bench_runq.c: ns per push+pop pair and per yield on one thread. Tiny by default; the argument is the number of pairs. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../runq.h"

enum { TASKS = 64, TENANTS = 16, TRIALS = 15 };

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int main(int argc, char **argv)
{
    uint64_t pairs = argc > 1 ? strtoull(argv[1], NULL, 0) : 20000, hash = 0;
    for (int mode = 0; mode < 3; mode++) {
        art_runq_config config;
        art_runq *q;
        static art_task tasks[TASKS];
        art_runq_config_default(&config);
        config.max_tenants = TENANTS;
        if (art_runq_create(&config, &q))
            return 1;
        uint64_t x = 88172645463325252u, best = UINT64_MAX, clock = 1000000000;
        for (int i = 0; i < TASKS; i++) {
            tasks[i] = (art_task){.tenant = (uint32_t)i % TENANTS, .tier = mode == 0 ? 1 : (uint8_t)(i % ART_TIERS)};
            art_runq_push(q, &tasks[i], clock);
        }
        for (int trial = 0; trial < TRIALS; trial++) {
            uint64_t start = now_ns();
            for (uint64_t i = 0; i < pairs; i++) {
                art_task *t = art_runq_pop(q, clock);
                clock += 100;
                hash = hash * 31 + t->tenant + t->tier;
                x ^= x << 13, x ^= x >> 7, x ^= x << 17;
                t->promoted = false;
                t->tenant = (uint32_t)(x >> 8) % TENANTS;
                t->tier = mode == 0 ? 1 : (uint8_t)(x & 3);
                if (mode == 2)
                    art_runq_charge(q, t, 100, clock);
                art_runq_push(q, t, clock);
            }
            uint64_t took = now_ns() - start;
            best = took < best ? took : best;
        }
        printf("%-24s best of %d: %5.1f ns per pair\n",
               (const char *[]){"one tier", "mixed tiers and tenants", "mixed, charged"}[mode], TRIALS,
               (double)best / (double)pairs);
        while (art_runq_pop(q, clock))
            ;
        art_runq_destroy(q);
    }
    printf("hash %016llx\n", (unsigned long long)hash);
    return 0;
}
