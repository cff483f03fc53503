/* runq_peer.h: what the peers queue: as large as an art_task, with what the load needs. */
#ifndef RUNQ_PEER_H
#define RUNQ_PEER_H

#include <stdbool.h>
#include <stdint.h>

typedef struct item {
    struct item *next;
    uint32_t tenant;
    uint8_t tier;
    bool promoted;
    char filler[48];
} item;

#endif
