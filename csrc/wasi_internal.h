/* wasi_internal.h: private to wasi.c and wasi_image.c: the inside of an image. See wasi.h for rules. */
#ifndef ART_WASI_INTERNAL_H
#define ART_WASI_INTERNAL_H

#include <stdbool.h>

#include "art_atomic.h"
#include "wasi.h"

/* A file or directory. The children of a directory stand together, ascending by name (bytes; a prefix first). */
typedef struct art__wasi_node {
    const char *name;
    const uint8_t *bytes;
    uint32_t name_len, len;
    uint32_t parent, first, count;
    bool directory;
} art__wasi_node;

/* Texts one after the other, each with its NUL. */
typedef struct art__wasi_strings {
    char *bytes;
    uint32_t *at; /* where each begins */
    uint32_t count, len;
} art__wasi_strings;

struct art_wasi_image {
    ART_ATOMIC(uint32_t) references;
    art__wasi_strings args, env;
    art__wasi_node *nodes; /* nodes[0] is the root, its own parent; NULL: no files, and then no root either */
    uint32_t node_count;
    char *paths;
    uint8_t *contents;
};

enum { ART__WASI_NONE = UINT32_MAX };

/* The child of that name, or ART__WASI_NONE. */
uint32_t art__wasi_child(const art_wasi_image *image, uint32_t node, const char *name, uint32_t len);

#endif
