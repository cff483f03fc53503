/* stack_guard.h: guard pages below the guests' stacks that are no mappings of their own.
 *
 * wasmtime's pool of stacks protects the lowest page of each: two mappings per stack, used or not, so vm.max_map_count (65,530)
 * allows a few thousand guests. Since Linux 6.13 a page can be made to fault without that (MADV_GUARD_INSTALL): the pool
 * is one mapping then, whatever its size.
 *
 * Threads: to be called before anything runs on the stacks.
 */
#ifndef ART_STACK_GUARD_H
#define ART_STACK_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Can this kernel do it? */
bool art_stack_guards_light(void);

/* Looks in /proc/self/maps for `stacks` times a protected page and `stack_bytes` (whole pages) of memory, one after the
 * other, and makes it one mapping in which the same pages fault. 1: done; 0: not possible here, or there is no such pool, and
 * nothing has changed; ART_EENGINE: it went wrong in the middle, the pool must not be used. */
int art_stack_guards_lighten(uint32_t stacks, size_t stack_bytes);

#endif
