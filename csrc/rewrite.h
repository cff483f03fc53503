/* rewrite.h: makes every bulk operation of a wasm module interruptible.
 *
 * What it is: a wasm binary in, a wasm binary out. memory.fill/copy/init and table.fill/copy/init/grow, each of which the
 * engine runs as one uninterruptible stretch, become calls of helper functions appended to the module. A helper does
 * the work in chunks inside a loop, so that a fuel or epoch yield is possible at each loop head.
 *
 * What always holds:
 *  - The guest cannot tell the difference: same values, same memory and tables, same trap before the first write when
 *    a range is out of bounds. What differs is fuel, stack depth, and what an OutOfFuel in the middle leaves behind.
 *  - No function, type, table, segment, global or tag changes its index. A module that was invalid stays invalid: an
 *    index that only an appended helper or type would make good is refused.
 *  - After success no bulk operation that is left can touch more than one chunk before it traps.
 *  - Without anything to replace, the result is the input minus the sections that are always dropped.
 *  - Calls at the heads of loops, where they are asked for, are put in where a loop's operands stand; nothing else moves.
 *  - Input is hostile: every length is checked before use, nothing is allocated by a claimed length, there is no
 *    recursion, time is linear in the input, with at most one look-up step per table (100) for each operation, and no
 *    buffer grows past `bytes_max`.
 *
 * Not its business: validation. The result must still be validated by the engine; only what is needed to find the
 * operations, and the indices above, is checked here.
 *
 * Refused with a message: components, memory64 and table64, more than one memory, shared or custom-page memories, GC
 * types and instructions, stack switching, unknown opcodes.
 * Dropped always: custom sections `.debug_*`, `sourceMappingURL`, `external_debug_info` (they hold code offsets). Dropped
 * when code changed: `metadata.code.*` and `reloc.*`, for the same reason. The name section stays and names the helpers.
 *
 * Thread-safety: no state; any thread, any number at once.
 */
#ifndef ART_REWRITE_H
#define ART_REWRITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct art_rewrite_config {
    uint32_t memory_chunk_bytes;  /* most bytes one memory operation handles; 1 .. 2^31-1 */
    uint32_t table_chunk_entries; /* most entries one table operation handles; 1 .. 2^31-1 */
    /* Entries a table may reach: table.grow past it answers -1, a table that starts above it is refused. The engine must
     * grant that many to each table, or a grow that fails half-way ends the run by a trap (see the .c file). */
    uint32_t table_elements_max;
    size_t bytes_max; /* most bytes of input, and of output; at least 8 */
    /* An export, or NULL: each loop of the input begins with a call of this function, which has the type () -> (). */
    const char *loop_export;
    /* Leave bulk operations as they are: for a module that is rewritten again before it runs. */
    bool keep_bulk;
    /* Functions, ascending, and NULL if none: those from `copies_first` on are copies of them, in that order, and call each
     * other where what they were copied from calls what was copied. */
    const uint32_t *copied;
    uint32_t copied_count, copies_first;
} art_rewrite_config;

/* What a module does that some of its uses cannot cope with. */
typedef struct art_rewrite_facts {
    bool exceptions;      /* throws or catches */
    bool tail_calls;
    bool tables_change;   /* after instantiation */
    bool segments_drop;   /* data.drop, elem.drop */
    bool references;      /* in mutable globals */
    bool start;           /* a start function */
    uint32_t loops;
} art_rewrite_facts;

/* The defaults: 8 KiB, 1,000 entries, 20,000 entries a table, 64 MiB. */
void art_rewrite_config_default(art_rewrite_config *cfg);

/* Rewrites wasm[0..len). `wasm` is only read, and not kept.
 * 0: *out is a malloc'ed module of *out_len bytes, the caller frees it.
 * Otherwise *out and *out_len are untouched and, when msg_len > 0, msg holds a NUL-terminated sentence that starts with
 * the byte offset in the input ("byte 123: ..."):
 *   ART_EMODULE  malformed, or uses what is refused
 *   ART_ELIMIT   over bytes_max, table_elements_max or one of the engine's own counts
 *   ART_ENOMEM   out of memory (the offset may be missing)
 *   ART_EINVAL   NULL argument or a config value outside its range (no offset) */
int art_rewrite(const uint8_t *wasm, size_t len, const art_rewrite_config *cfg, uint8_t **out, size_t *out_len, char *msg,
                size_t msg_len);

/* The same, and *facts of the input; untouched on failure. */
int art_rewrite_knowing(const uint8_t *wasm, size_t len, const art_rewrite_config *cfg, uint8_t **out, size_t *out_len,
                        art_rewrite_facts *facts, char *msg, size_t msg_len);

#ifdef __cplusplus
}
#endif
#endif
