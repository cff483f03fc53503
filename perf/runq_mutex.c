/* runq_mutex.c: a mutex and four lists, served in order: no tenants, no aging, no cancel. */
#define _GNU_SOURCE
#include <pthread.h>

#include "runq_peer.h"

#define BENCH_VOLUNTARY false

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static item *first[4], **last[4];

static void queue_make(uint32_t tenants)
{
    (void)tenants;
    for (int tier = 0; tier < 4; tier++) {
        first[tier] = 0;
        last[tier] = &first[tier];
    }
}

static void queue_destroy(void)
{
}

static void queue_push(item *it, uint64_t now_ns)
{
    (void)now_ns;
    it->next = 0;
    pthread_mutex_lock(&lock);
    *last[it->tier] = it;
    last[it->tier] = &it->next;
    pthread_mutex_unlock(&lock);
}

static item *queue_pop(uint64_t now_ns)
{
    item *found = 0;
    (void)now_ns;
    pthread_mutex_lock(&lock);
    for (int tier = 0; tier < 4 && !found; tier++) {
        found = first[tier];
        if (found && !(first[tier] = found->next)) {
            last[tier] = &first[tier];
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

#include "runq_bench.h"

int main(int argc, char **argv)
{
    return bench(argc, argv);
}
