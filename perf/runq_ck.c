/* runq_ck.c: four rings of Concurrency Kit (many producers, many consumers), scanned in order: no tenants, no aging. */
#define _GNU_SOURCE
#include <ck_ring.h>

#include "runq_peer.h"

#define BENCH_VOLUNTARY true

enum { RING = 16384 };

static ck_ring_t rings[4];
static ck_ring_buffer_t buffers[4][RING];

static void queue_make(uint32_t tenants)
{
    (void)tenants;
    for (int tier = 0; tier < 4; tier++) {
        ck_ring_init(&rings[tier], RING);
    }
}

static void queue_destroy(void)
{
}

static void queue_push(item *it, uint64_t now_ns)
{
    (void)now_ns;
    while (!ck_ring_enqueue_mpmc(&rings[it->tier], buffers[it->tier], it)) {
    }
}

static item *queue_pop(uint64_t now_ns)
{
    (void)now_ns;
    for (int tier = 0; tier < 4; tier++) {
        item *found;
        if (ck_ring_dequeue_mpmc(&rings[tier], buffers[tier], &found)) {
            return found;
        }
    }
    return 0;
}

#include "runq_bench.h"

int main(int argc, char **argv)
{
    return bench(argc, argv);
}
