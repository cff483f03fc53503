/* runq_moodycamel.cc: four moodycamel::ConcurrentQueue, scanned in order: no tenants, no aging, FIFO per producer only. */
#include <concurrentqueue/concurrentqueue.h>

#include "runq_peer.h"

#define BENCH_VOLUNTARY true

static moodycamel::ConcurrentQueue<item *> *queues;

static void queue_make(uint32_t tenants)
{
    (void)tenants;
    queues = new moodycamel::ConcurrentQueue<item *>[4];
}

static void queue_destroy(void)
{
    delete[] queues;
}

static void queue_push(item *it, uint64_t now_ns)
{
    (void)now_ns;
    queues[it->tier].enqueue(it);
}

static item *queue_pop(uint64_t now_ns)
{
    (void)now_ns;
    item *found;
    for (int tier = 0; tier < 4; tier++) {
        if (queues[tier].try_dequeue(found)) {
            return found;
        }
    }
    return nullptr;
}

#include "runq_bench.h"

int main(int argc, char **argv)
{
    return bench(argc, argv);
}
