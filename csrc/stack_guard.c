/* stack_guard.c: see stack_guard.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#endif
#include "stack_guard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "art_err.h"

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

bool art_stack_guards_light(void)
{
    size_t bytes = page_bytes();
    void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return false;
    }
    bool light = madvise(page, bytes, MADV_GUARD_INSTALL) == 0;
    munmap(page, bytes);
    return light;
}

typedef struct mapping {
    uintptr_t start, end;
    enum { OTHER, GUARD, STACK } kind;
} mapping;

/* The next line of /proc/self/maps, "start-end perms offset dev inode [path]"; only private memory without a file may be one of
 * ours. Not by sscanf: there are two lines per stack. */
static bool read_mapping(FILE *maps, char **line, size_t *room, mapping *out)
{
    if (getline(line, room, maps) < 0) {
        return false;
    }
    char *at;
    out->start = strtoull(*line, &at, 16);
    out->end = *at == '-' ? strtoull(at + 1, &at, 16) : out->start;
    out->kind = strncmp(at, " ---p ", 6) == 0 ? GUARD : strncmp(at, " rw-p ", 6) == 0 ? STACK : OTHER;
    if (out->kind != OTHER) {
        const char *inode = at + 6;
        for (int field = 0; inode && field < 2; field++) {
            inode = strchr(inode, ' ');
            inode = inode ? inode + 1 : NULL;
        }
        if (!inode || inode[0] != '0' || inode[1 + strspn(inode + 1, " \n")]) {
            out->kind = OTHER;
        }
    }
    return true;
}

/* The pool's first byte, or 0. Its first guard may have become one with a protected mapping below, and its last stack with
 * memory above; all between must have their exact sizes. */
static uintptr_t find(uint32_t stacks, size_t stack_bytes)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) {
        return 0;
    }
    size_t page = page_bytes(), room = 0;
    char *line = NULL;
    uintptr_t first = 0;
    uint32_t pairs = 0;
    bool found = false;
    mapping last = {0}, now;
    while (!found && read_mapping(maps, &line, &room, &now)) {
        size_t bytes = now.end - now.start;
        bool follows = last.end == now.start;
        if (now.kind == STACK && last.kind == GUARD && follows && bytes >= stack_bytes) {
            pairs = pairs && last.end - last.start == page ? pairs + 1 : 1;
            first = pairs == 1 ? last.end - page : first;
            found = pairs == stacks;
            pairs = bytes == stack_bytes ? pairs : 0;
        } else if (now.kind != GUARD || !follows) {
            pairs = 0;
        }
        last = now;
    }
    free(line);
    fclose(maps);
    return found ? first : 0;
}

int art_stack_guards_lighten(uint32_t stacks, size_t stack_bytes)
{
    size_t page = page_bytes(), step = page + stack_bytes;
    if (stacks < 2 || stack_bytes % page || !art_stack_guards_light()) {
        return 0; /* a single pair looks like any thread's stack */
    }
    uintptr_t first = find(stacks, stack_bytes);
    if (!first) {
        return 0;
    }
    /* Protection goes first: mappings that have had guards installed would not become one any more. */
    int err = mprotect((void *)first, step * stacks, PROT_READ | PROT_WRITE);
    for (uint32_t i = 0; i < stacks && !err; i++) {
        err = madvise((void *)(first + i * step), page, MADV_GUARD_INSTALL);
    }
    if (err) {
        for (uint32_t i = 0; i < stacks; i++) {
            if (mprotect((void *)(first + i * step), page, PROT_NONE)) {
                return ART_EENGINE;
            }
        }
        return 0;
    }
    /* The mapping is large enough for huge pages now, and a stack needs one small page. May not exist, so not checked. */
    madvise((void *)first, step * stacks, MADV_NOHUGEPAGE);
    return 1;
}
