/* rewrite.c: see rewrite.h for what holds. How it works:
 *
 *  1. walk_sections: one pass over the section headers; order, duplicates and sizes are checked, ranges kept.
 *  2. The sections the rewriting depends on are read in order of dependency: types, imports, functions, tables, memories,
 *     globals, exports, start, elements, and data (which stands behind the code but whose lengths the code needs).
 *  3. rewrite_code: every body is decoded once. Untouched bodies are copied in runs; a bulk operation becomes
 *     `call helper`, and the helper is created at its first use.
 *  4. assemble: sections are copied, or written anew (types, functions, code, function names).
 *
 * The decoder must agree with the engine's to the byte: an operation it overlooks would run in one stretch. So each
 * opcode is listed, and one that is not listed is refused instead of guessed at. What the decoder accepts and the engine
 * does not is harmless: the bytes stand unchanged in the result, which the engine validates.
 */
#include "rewrite.h"

#include "art_err.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The engine's own limits (wasmparser): more is refused there anyway, and refusing it here bounds our arrays. */
#define TYPE_COUNT_MAX 1000000u
#define FUNC_COUNT_MAX 1000000u
#define TABLE_COUNT_MAX 100u
#define SEGMENT_COUNT_MAX 100000u

#define NONE UINT32_MAX
#define LEB_U32_MAX 5 /* longest encoding, bytes */

enum section_id {
    SEC_CUSTOM = 0,
    SEC_TYPE = 1,
    SEC_IMPORT = 2,
    SEC_FUNCTION = 3,
    SEC_TABLE = 4,
    SEC_MEMORY = 5,
    SEC_GLOBAL = 6,
    SEC_EXPORT = 7,
    SEC_START = 8,
    SEC_ELEMENT = 9,
    SEC_CODE = 10,
    SEC_DATA = 11,
    SEC_DATA_COUNT = 12,
    SEC_TAG = 13,
    SEC_COUNT = 14
};

/* Position of each section in a module; ids do not stand in order since tags and the data count came later. */
static const uint8_t section_rank[SEC_COUNT] = {
    [SEC_TYPE] = 1,   [SEC_IMPORT] = 2, [SEC_FUNCTION] = 3, [SEC_TABLE] = 4,    [SEC_MEMORY] = 5,
    [SEC_TAG] = 6,    [SEC_GLOBAL] = 7, [SEC_EXPORT] = 8,   [SEC_START] = 9,    [SEC_ELEMENT] = 10,
    [SEC_DATA_COUNT] = 11,              [SEC_CODE] = 12,    [SEC_DATA] = 13,
};

/* The opcodes helpers are made of, and those the decoder names. */
enum opcode {
    I_UNREACHABLE = 0x00,
    I_BLOCK = 0x02,
    I_LOOP = 0x03,
    I_IF = 0x04,
    I_ELSE = 0x05,
    I_END = 0x0B,
    I_BR = 0x0C,
    I_BR_IF = 0x0D,
    I_RETURN = 0x0F,
    I_CALL = 0x10,
    I_SELECT = 0x1B,
    I_LOCAL_GET = 0x20,
    I_LOCAL_SET = 0x21,
    I_LOCAL_TEE = 0x22,
    I_MEMORY_SIZE = 0x3F,
    I_I32_CONST = 0x41,
    I_I64_CONST = 0x42,
    I_I32_EQ = 0x46,
    I_I32_GT_U = 0x4B,
    I_I32_LE_U = 0x4D,
    I_I64_GT_U = 0x56,
    I_I32_ADD = 0x6A,
    I_I32_SUB = 0x6B,
    I_I64_ADD = 0x7C,
    I_I64_SHL = 0x86,
    I_I64_EXTEND_I32_U = 0xAD,
    I_MISC = 0xFC,
};
enum misc_opcode {
    M_MEMORY_INIT = 8,
    M_DATA_DROP = 9,
    M_MEMORY_COPY = 10,
    M_MEMORY_FILL = 11,
    M_TABLE_INIT = 12,
    M_ELEM_DROP = 13,
    M_TABLE_COPY = 14,
    M_TABLE_GROW = 15,
    M_TABLE_SIZE = 16,
    M_TABLE_FILL = 17,
    M_WIDE_FIRST = 19, /* i64.add128 .. i64.mul_wide_u: no immediates */
    M_WIDE_LAST = 22,
};
enum { T_V128 = 0x7B, T_I32 = 0x7F, T_FUNC = 0x60, T_EMPTY_BLOCK = 0x40 };

/* ---- state ---- */

typedef struct cursor {
    const uint8_t *p, *end;
} cursor;

/* A growing output; `err` is sticky, so that a run of puts needs one check. */
typedef struct buf {
    uint8_t *p;
    size_t len, cap, max;
    int err;
} buf;

typedef struct table_info {
    const uint8_t *type; /* element type, raw, in the input */
    uint8_t type_len;
    uint64_t limit;     /* most entries it can ever have by its own declaration */
    uint32_t fill_type; /* type index of its fill and grow helper, or NONE */
    uint32_t grow_type;
    uint32_t helpers; /* head of the list of helpers with this table as destination, or NONE */
} table_info;

typedef struct segment {
    uint32_t len;     /* bytes or entries; 0 unless passive: active and declared ones count as dropped */
    uint32_t helpers; /* head of list, or NONE */
} segment;

typedef struct segments {
    segment *v;
    uint32_t count, cap;
} segments;

/* What needs a helper stands behind OP_END. */
enum op_kind {
    OP_PLAIN,
    OP_END,
    OP_MEMORY_FILL,
    OP_MEMORY_COPY,
    OP_MEMORY_INIT,
    OP_TABLE_FILL,
    OP_TABLE_COPY,
    OP_TABLE_INIT,
    OP_TABLE_GROW
};

/* A decoded instruction. a is the destination (table; 0 for the memory), b the source (table or segment). */
typedef struct op {
    enum op_kind kind;
    uint32_t a, b;
} op;

typedef struct helper {
    enum op_kind kind;
    uint32_t a, b, type, next;
} helper;

typedef struct rw {
    const uint8_t *base;
    size_t len;
    const art_rewrite_config *cfg;
    char *msg;
    size_t msg_len;

    cursor section[SEC_COUNT]; /* contents; p == NULL when absent */
    uint32_t type_count, func_import_count, func_count /* defined */, table_count, memory_count;
    table_info tables[TABLE_COUNT_MAX];
    segments data, elem;

    helper *helpers;
    uint32_t helper_count, helper_cap;
    uint32_t memory_helpers; /* head of the list of memory.fill and memory.copy */
    uint32_t new_type_count;
    uint32_t loop_call; /* the function that each loop calls, or NONE */
    uint32_t body_of;   /* the function whose body is rewritten */
    bool changed;       /* some body is */
    art_rewrite_facts facts;
    uint32_t plain_type; /* (i32 i32 i32) -> () */
    buf types, code;     /* what is appended to the types; all bodies */
} rw;

#define TRY(e)                                                                                                         \
    do {                                                                                                               \
        int try_rc = (e);                                                                                              \
        if (__builtin_expect(try_rc != 0, 0))                                                                          \
            return try_rc;                                                                                             \
    } while (0)

__attribute__((noinline, cold, format(printf, 3, 4))) static void report(rw *r, const uint8_t *at, const char *fmt, ...)
{
    if (r->msg_len == 0)
        return;
    int n = snprintf(r->msg, r->msg_len, "byte %zu: ", (size_t)(at - r->base));
    if (n > 0 && (size_t)n < r->msg_len) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(r->msg + n, r->msg_len - (size_t)n, fmt, ap);
        va_end(ap);
    }
}

/* A macro, so that the compiler sees that the result is not 0. */
#define fail(r, err, at, ...) (report((r), (at), __VA_ARGS__), (int)(err))

/* ---- output ---- */

static bool buf_reserve(buf *b, size_t n)
{
    if (b->err)
        return false;
    if (n <= b->cap - b->len)
        return true;
    if (n > b->max - b->len) {
        b->err = ART_ELIMIT;
        return false;
    }
    size_t cap = b->cap < b->max / 2 ? b->cap * 2 : b->max;
    if (cap < b->len + n)
        cap = b->len + n;
    if (cap < 256)
        cap = 256;
    uint8_t *p = realloc(b->p, cap);
    if (!p) {
        b->err = ART_ENOMEM;
        return false;
    }
    b->p = p;
    b->cap = cap;
    return true;
}

static void put_bytes(buf *b, const uint8_t *p, size_t n)
{
    if (n > 0 && buf_reserve(b, n)) {
        memcpy(b->p + b->len, p, n);
        b->len += n;
    }
}

static void put_u8(buf *b, uint32_t v)
{
    if (buf_reserve(b, 1))
        b->p[b->len++] = (uint8_t)v;
}

static size_t leb_u32(uint8_t *p, uint32_t v)
{
    size_t n = 0;
    for (; v >= 0x80; v >>= 7)
        p[n++] = (uint8_t)(v | 0x80);
    p[n++] = (uint8_t)v;
    return n;
}

static void put_u32(buf *b, uint32_t v)
{
    if (buf_reserve(b, LEB_U32_MAX))
        b->len += leb_u32(b->p + b->len, v);
}

static void put_s64(buf *b, int64_t v)
{
    for (;;) {
        uint32_t low = (uint32_t)(v & 0x7F);
        /* Arithmetic shift without relying on how the compiler shifts negative numbers. */
        v = v >= 0 ? v / 128 : -((-(v + 1)) / 128) - 1;
        if ((v == 0 && !(low & 0x40)) || (v == -1 && (low & 0x40))) {
            put_u8(b, low);
            return;
        }
        put_u8(b, low | 0x80);
    }
}

/* A run of bytes with its length before it: begin leaves room for the longest length, end closes the gap. */
static size_t sized_begin(buf *b)
{
    size_t mark = b->len;
    if (buf_reserve(b, LEB_U32_MAX))
        b->len += LEB_U32_MAX;
    return mark;
}

static void sized_end(buf *b, size_t mark)
{
    if (b->err)
        return;
    size_t start = mark + LEB_U32_MAX, n = b->len - start;
    if (n > UINT32_MAX) {
        b->err = ART_ELIMIT;
        return;
    }
    size_t head = leb_u32(b->p + mark, (uint32_t)n);
    memmove(b->p + mark + head, b->p + start, n);
    b->len = mark + head + n;
}

/* ---- input ---- */

static inline int fail_leb(rw *r, cursor *c, unsigned bytes_max)
{
    bool cut = (size_t)(c->end - c->p) < bytes_max;
    return fail(r, ART_EMODULE, c->p, cut ? "unexpected end of an integer" : "integer too long");
}

static int read_u32_slow(rw *r, cursor *c, uint32_t *v)
{
    uint32_t x = 0;
    for (unsigned i = 0; i < LEB_U32_MAX; i++) {
        if (i >= (size_t)(c->end - c->p))
            break;
        uint8_t byte = c->p[i];
        if (i == LEB_U32_MAX - 1 && byte > 0x0F)
            break;
        x |= (uint32_t)(byte & 0x7F) << (7 * i);
        if (!(byte & 0x80)) {
            c->p += i + 1;
            *v = x;
            return 0;
        }
    }
    *v = 0; /* for the compiler: callers stop here */
    return fail_leb(r, c, LEB_U32_MAX);
}

static inline int read_u32(rw *r, cursor *c, uint32_t *v)
{
    if (__builtin_expect(c->p < c->end && *c->p < 0x80, 1)) {
        *v = *c->p++;
        return 0;
    }
    return read_u32_slow(r, c, v);
}

/* Steps over an integer whose value does not matter here; the engine judges its unused bits. */
static inline int skip_leb(rw *r, cursor *c, unsigned bytes_max)
{
    for (unsigned i = 0; i < bytes_max && i < (size_t)(c->end - c->p); i++) {
        if (!(c->p[i] & 0x80)) {
            c->p += i + 1;
            return 0;
        }
    }
    return fail_leb(r, c, bytes_max);
}

static inline int read_u8(rw *r, cursor *c, uint8_t *v)
{
    if (__builtin_expect(c->p >= c->end, 0))
        return fail(r, ART_EMODULE, c->p, "unexpected end");
    *v = *c->p++;
    return 0;
}

static inline int skip_bytes(rw *r, cursor *c, size_t n)
{
    if (__builtin_expect(n > (size_t)(c->end - c->p), 0))
        return fail(r, ART_EMODULE, c->p, "%zu bytes wanted, %zu left", n, (size_t)(c->end - c->p));
    c->p += n;
    return 0;
}

static int skip_name(rw *r, cursor *c)
{
    uint32_t n;
    TRY(read_u32(r, c, &n));
    return skip_bytes(r, c, n);
}

static int read_count(rw *r, cursor *c, uint32_t max, const char *what, uint32_t *v)
{
    const uint8_t *at = c->p;
    TRY(read_u32(r, c, v));
    if (*v > max)
        return fail(r, ART_ELIMIT, at, "%u %s, at most %u are allowed", *v, what, max);
    return 0;
}

static int expect_end(rw *r, const cursor *c, const char *what)
{
    if (c->p != c->end)
        return fail(r, ART_EMODULE, c->p, "%zu bytes too many in the %s section", (size_t)(c->end - c->p), what);
    return 0;
}

static int read_func_index(rw *r, cursor *c)
{
    const uint8_t *at = c->p;
    uint32_t i;
    TRY(read_u32(r, c, &i));
    /* Both counts are at most FUNC_COUNT_MAX, so the sum fits. */
    if (i >= r->func_import_count + r->func_count)
        return fail(r, ART_EMODULE, at, "unknown function %u", i);
    return 0;
}

static int read_type_index(rw *r, cursor *c)
{
    const uint8_t *at = c->p;
    uint32_t i;
    TRY(read_u32(r, c, &i));
    if (i >= r->type_count)
        return fail(r, ART_EMODULE, at, "unknown type %u", i);
    return 0;
}

/* An index where single-byte types may stand too: a signed 33-bit number that must not be negative. */
static int read_s33_type_index(rw *r, cursor *c)
{
    const uint8_t *at = c->p;
    TRY(skip_leb(r, c, 5));
    uint64_t v = 0;
    for (const uint8_t *p = at; p < c->p; p++)
        v |= (uint64_t)(*p & 0x7F) << (7 * (unsigned)(p - at));
    /* The last byte's bit 6 is the sign. */
    if (c->p[-1] & 0x40)
        return fail(r, ART_EMODULE, at, "unknown or unsupported type byte 0x%02x", *at);
    if (v >= r->type_count)
        return fail(r, ART_EMODULE, at, "unknown type %llu", (unsigned long long)v);
    return 0;
}

/* Abstract heap types, which are also the one-byte reference types: cont .. nocont, extern, func, any, exn and so on. */
static inline bool is_abstract_heap_type(uint8_t b)
{
    return b >= 0x68 && b <= 0x75;
}

static int skip_heap_type(rw *r, cursor *c)
{
    if (c->p < c->end && is_abstract_heap_type(*c->p)) {
        c->p++;
        return 0;
    }
    return read_s33_type_index(r, c);
}

static inline bool is_value_type(uint8_t b)
{
    return (b >= 0x7B && b <= 0x7F) || is_abstract_heap_type(b) || b == 0x63 || b == 0x64;
}

static int skip_ref_type(rw *r, cursor *c)
{
    uint8_t b;
    TRY(read_u8(r, c, &b));
    if (is_abstract_heap_type(b))
        return 0;
    if (b == 0x63 || b == 0x64) /* (ref null ht), (ref ht) */
        return skip_heap_type(r, c);
    return fail(r, ART_EMODULE, c->p - 1, "unknown or unsupported reference type 0x%02x", b);
}

static int skip_value_type(rw *r, cursor *c)
{
    if (c->p < c->end && *c->p >= 0x7B && *c->p <= 0x7F) { /* i32 i64 f32 f64 v128 */
        c->p++;
        return 0;
    }
    if (c->p < c->end && !is_value_type(*c->p))
        return fail(r, ART_EMODULE, c->p, "unknown or unsupported value type 0x%02x", *c->p);
    return skip_ref_type(r, c);
}

static int skip_value_types(rw *r, cursor *c)
{
    uint32_t n;
    TRY(read_u32(r, c, &n));
    for (; n > 0; n--)
        TRY(skip_value_type(r, c));
    return 0;
}

static int skip_block_type(rw *r, cursor *c)
{
    if (c->p < c->end) {
        if (*c->p == T_EMPTY_BLOCK) {
            c->p++;
            return 0;
        }
        if (is_value_type(*c->p))
            return skip_value_type(r, c);
    }
    return read_s33_type_index(r, c);
}

/* ---- instructions ---- */

/* What follows an opcode byte. Zero is refused, so that an opcode nobody listed is refused. */
enum immediate {
    X_BAD, X_NONE, X_END, X_U32, X_FUNC, X_TYPE, X_TYPE_U32, X_MEMORY_INDEX, X_MEMARG, X_BLOCK, X_BR_TABLE, X_SELECT,
    X_TRY_TABLE, X_I32, X_I64, X_F32, X_F64, X_HEAP_TYPE, X_GC, X_MISC, X_SIMD, X_ATOMIC, X_SWITCH
};

/* clang-format off */
static const uint8_t immediates[256] = {
    [0x00] = X_NONE,  /* unreachable */   [0x01] = X_NONE,  /* nop */
    [0x02] = X_BLOCK, /* block */         [0x03] = X_BLOCK, /* loop */
    [0x04] = X_BLOCK, /* if */            [0x05] = X_NONE,  /* else */
    [0x06] = X_BLOCK, /* try */           [0x07] = X_U32,   /* catch */
    [0x08] = X_U32,   /* throw */         [0x09] = X_U32,   /* rethrow */
    [0x0A] = X_NONE,  /* throw_ref */     [0x0B] = X_END,
    [0x0C] = X_U32,   /* br */            [0x0D] = X_U32,   /* br_if */
    [0x0E] = X_BR_TABLE,                  [0x0F] = X_NONE,  /* return */
    [0x10] = X_FUNC,  /* call */          [0x11] = X_TYPE_U32, /* call_indirect */
    [0x12] = X_FUNC,  /* return_call */   [0x13] = X_TYPE_U32, /* return_call_indirect */
    [0x14] = X_TYPE,  /* call_ref */      [0x15] = X_TYPE,  /* return_call_ref */
    [0x18] = X_U32,   /* delegate */      [0x19] = X_NONE,  /* catch_all */
    [0x1A] = X_NONE,  /* drop */          [0x1B] = X_NONE,  /* select */
    [0x1C] = X_SELECT,                    [0x1F] = X_TRY_TABLE,
    [0x20 ... 0x24] = X_U32,              /* local.get/set/tee, global.get/set */
    [0x25 ... 0x26] = X_U32,              /* table.get/set */
    [0x28 ... 0x3E] = X_MEMARG,           /* loads and stores */
    [0x3F ... 0x40] = X_MEMORY_INDEX,     /* memory.size, memory.grow */
    [0x41] = X_I32, [0x42] = X_I64, [0x43] = X_F32, [0x44] = X_F64,
    [0x45 ... 0xC4] = X_NONE,             /* numeric, sign extension */
    [0xD0] = X_HEAP_TYPE, /* ref.null */  [0xD1] = X_NONE,  /* ref.is_null */
    [0xD2] = X_FUNC,  /* ref.func */      [0xD3] = X_NONE,  /* ref.eq */
    [0xD4] = X_NONE,  /* ref.as_non_null */
    [0xD5 ... 0xD6] = X_U32,              /* br_on_null, br_on_non_null */
    [0xE0 ... 0xE6] = X_SWITCH,           /* stack switching */
    [0xFB] = X_GC, [0xFC] = X_MISC, [0xFD] = X_SIMD, [0xFE] = X_ATOMIC,
};
/* clang-format on */

static int read_memory_index(rw *r, cursor *c)
{
    const uint8_t *at = c->p;
    uint32_t i;
    TRY(read_u32(r, c, &i));
    if (i != 0)
        return fail(r, ART_EMODULE, at, "memory index %u: only one memory is supported", i);
    return 0;
}

static int skip_memarg(rw *r, cursor *c)
{
    const uint8_t *at = c->p;
    uint32_t align;
    TRY(read_u32(r, c, &align));
    if (align & 0x40) { /* multi-memory: an explicit memory index follows */
        TRY(read_memory_index(r, c));
        align &= ~0x40u;
    }
    if (align >= 0x40)
        return fail(r, ART_EMODULE, at, "malformed alignment");
    return skip_leb(r, c, 10); /* offset: the engine says which width it takes */
}

static int skip_br_table(rw *r, cursor *c)
{
    uint32_t n;
    TRY(read_u32(r, c, &n));
    for (uint64_t left = (uint64_t)n + 1; left > 0; left--)
        TRY(skip_leb(r, c, 5));
    return 0;
}

static int skip_try_table(rw *r, cursor *c)
{
    uint32_t n;
    TRY(skip_block_type(r, c));
    TRY(read_u32(r, c, &n));
    for (; n > 0; n--) {
        uint8_t kind;
        TRY(read_u8(r, c, &kind));
        if (kind > 3)
            return fail(r, ART_EMODULE, c->p - 1, "unknown catch kind 0x%02x", kind);
        if (kind < 2) /* catch, catch_ref: a tag before the label */
            TRY(skip_leb(r, c, 5));
        TRY(skip_leb(r, c, 5));
    }
    return 0;
}

static int skip_simd(rw *r, cursor *c)
{
    /* Unassigned numbers below 0x100, each 32 in a word; the engine refuses them too. */
#define HOLE(n) (1u << ((n) & 31))
    static const uint32_t holes[8] = {
        [4] = HOLE(0x9A),
        [5] = HOLE(0xA2) | HOLE(0xA5) | HOLE(0xA6) | HOLE(0xAF) | HOLE(0xB0) | HOLE(0xB2) | HOLE(0xB3) | HOLE(0xB4) | HOLE(0xBB),
        [6] = HOLE(0xC2) | HOLE(0xC5) | HOLE(0xC6) | HOLE(0xCF) | HOLE(0xD0) | HOLE(0xD2) | HOLE(0xD3) | HOLE(0xD4),
        [7] = HOLE(0xE2) | HOLE(0xEE),
    };
#undef HOLE
    const uint8_t *at = c->p;
    uint32_t n;
    TRY(read_u32(r, c, &n));
    if (n <= 0x0B || n == 0x5C || n == 0x5D) /* loads and stores */
        return skip_memarg(r, c);
    if (n == 0x0C || n == 0x0D) /* v128.const, i8x16.shuffle */
        return skip_bytes(r, c, 16);
    if (n >= 0x15 && n <= 0x22) /* extract and replace lane */
        return skip_bytes(r, c, 1);
    if (n >= 0x54 && n <= 0x5B) { /* load and store lane */
        TRY(skip_memarg(r, c));
        return skip_bytes(r, c, 1);
    }
    if (n > 0x113 || (n < 0x100 && (holes[n >> 5] >> (n & 31) & 1))) /* 0x100 and up: relaxed SIMD */
        return fail(r, ART_EMODULE, at, "unknown opcode 0xfd 0x%x", n);
    return 0;
}

static int skip_atomic(rw *r, cursor *c)
{
    const uint8_t *at = c->p;
    uint32_t n;
    TRY(read_u32(r, c, &n));
    if (n == 0x03) /* atomic.fence */
        return skip_bytes(r, c, 1);
    if (n <= 0x02 || (n >= 0x10 && n <= 0x4E))
        return skip_memarg(r, c);
    return fail(r, ART_EMODULE, at, "unknown opcode 0xfe 0x%x", n);
}

static int read_table_index(rw *r, cursor *c, uint32_t *v)
{
    const uint8_t *at = c->p;
    TRY(read_u32(r, c, v));
    if (*v >= r->table_count)
        return fail(r, ART_EMODULE, at, "unknown table %u", *v);
    return 0;
}

static int read_segment_index(rw *r, cursor *c, const segments *s, const char *what, uint32_t *v)
{
    const uint8_t *at = c->p;
    TRY(read_u32(r, c, v));
    if (*v >= s->count)
        return fail(r, ART_EMODULE, at, "unknown %s segment %u", what, *v);
    return 0;
}

static int bulk_memory(rw *r, cursor *c, op *o, enum op_kind kind)
{
    const uint8_t *at = c->p;
    TRY(read_memory_index(r, c));
    if (r->memory_count == 0)
        return fail(r, ART_EMODULE, at, "memory instruction in a module without memory");
    o->kind = kind;
    return 0;
}

/* The 0xFC family. An operation that cannot touch more than one chunk whatever its operands are stays plain. */
static int decode_misc(rw *r, cursor *c, op *o)
{
    const uint8_t *at = c->p;
    const uint32_t chunk = r->cfg->table_chunk_entries;
    uint32_t n;
    TRY(read_u32(r, c, &n));
    if (n < M_MEMORY_INIT) /* saturating truncation */
        return 0;
    switch (n) {
    case M_MEMORY_INIT:
        TRY(read_segment_index(r, c, &r->data, "data", &o->b));
        TRY(bulk_memory(r, c, o, OP_MEMORY_INIT));
        if (r->data.v[o->b].len <= r->cfg->memory_chunk_bytes)
            o->kind = OP_PLAIN;
        return 0;
    case M_DATA_DROP:
        return skip_leb(r, c, 5);
    case M_MEMORY_COPY:
        TRY(read_memory_index(r, c));
        return bulk_memory(r, c, o, OP_MEMORY_COPY);
    case M_MEMORY_FILL:
        return bulk_memory(r, c, o, OP_MEMORY_FILL);
    case M_TABLE_INIT:
        TRY(read_segment_index(r, c, &r->elem, "element", &o->b));
        TRY(read_table_index(r, c, &o->a));
        if (r->elem.v[o->b].len > chunk && r->tables[o->a].limit > chunk)
            o->kind = OP_TABLE_INIT;
        return 0;
    case M_ELEM_DROP:
        return skip_leb(r, c, 5);
    case M_TABLE_COPY:
        TRY(read_table_index(r, c, &o->a));
        TRY(read_table_index(r, c, &o->b));
        if (r->tables[o->a].limit > chunk && r->tables[o->b].limit > chunk)
            o->kind = OP_TABLE_COPY;
        return 0;
    case M_TABLE_GROW:
        TRY(read_table_index(r, c, &o->a));
        if (r->tables[o->a].limit > chunk || r->tables[o->a].limit > r->cfg->table_elements_max)
            o->kind = OP_TABLE_GROW;
        return 0;
    case M_TABLE_SIZE:
        return skip_leb(r, c, 5);
    case M_TABLE_FILL:
        TRY(read_table_index(r, c, &o->a));
        if (r->tables[o->a].limit > chunk)
            o->kind = OP_TABLE_FILL;
        return 0;
    default:
        if (n >= M_WIDE_FIRST && n <= M_WIDE_LAST)
            return 0;
        return fail(r, ART_EMODULE, at, "unknown opcode 0xfc 0x%x", n);
    }
}

static inline int decode_op(rw *r, cursor *c, op *o)
{
    uint8_t b;
    o->kind = OP_PLAIN;
    o->a = o->b = 0;
    TRY(read_u8(r, c, &b));
    switch ((enum immediate)immediates[b]) {
    case X_NONE:
        return 0;
    case X_END:
        o->kind = OP_END;
        return 0;
    case X_U32:
    case X_I32:
        return skip_leb(r, c, 5);
    case X_MEMARG:
        return skip_memarg(r, c);
    case X_FUNC:
        return read_func_index(r, c);
    case X_BLOCK:
        return skip_block_type(r, c);
    case X_I64:
        return skip_leb(r, c, 10);
    case X_F32:
        return skip_bytes(r, c, 4);
    case X_F64:
        return skip_bytes(r, c, 8);
    case X_TYPE:
        return read_type_index(r, c);
    case X_TYPE_U32:
        TRY(read_type_index(r, c));
        return skip_leb(r, c, 5);
    case X_MEMORY_INDEX:
        return read_memory_index(r, c);
    case X_BR_TABLE:
        return skip_br_table(r, c);
    case X_SELECT:
        return skip_value_types(r, c);
    case X_TRY_TABLE:
        return skip_try_table(r, c);
    case X_HEAP_TYPE:
        return skip_heap_type(r, c);
    case X_MISC:
        return decode_misc(r, c, o);
    case X_SIMD:
        return skip_simd(r, c);
    case X_ATOMIC:
        return skip_atomic(r, c);
    case X_GC:
        return fail(r, ART_EMODULE, c->p - 1, "garbage-collection instructions (0xfb) are not supported");
    case X_SWITCH:
        return fail(r, ART_EMODULE, c->p - 1, "stack-switching instruction 0x%02x is not supported", b);
    case X_BAD:
        break;
    }
    return fail(r, ART_EMODULE, c->p - 1, "unknown opcode 0x%02x", b);
}

/* A constant expression has no blocks, so its first `end` is its last. */
static int skip_const_expr(rw *r, cursor *c)
{
    op o;
    do
        TRY(decode_op(r, c, &o));
    while (o.kind != OP_END);
    return 0;
}

/* ---- sections before the code, and data ---- */

static int walk_sections(rw *r)
{
    static const uint8_t core[8] = { 0, 'a', 's', 'm', 1, 0, 0, 0 };
    cursor c = { r->base, r->base + r->len };
    if (r->len < 8 || memcmp(r->base, core, 4) != 0)
        return fail(r, ART_EMODULE, r->base, "not a wasm binary");
    if (r->base[6] == 1 && r->base[7] == 0)
        return fail(r, ART_EMODULE, r->base + 4, "a component, not a core module");
    if (memcmp(r->base, core, 8) != 0)
        return fail(r, ART_EMODULE, r->base + 4, "unknown wasm version");
    c.p += 8;
    unsigned rank = 0;
    while (c.p < c.end) {
        const uint8_t *at = c.p;
        uint8_t id;
        uint32_t n;
        TRY(read_u8(r, &c, &id));
        TRY(read_u32(r, &c, &n));
        const uint8_t *start = c.p;
        if (n > (size_t)(c.end - c.p))
            return fail(r, ART_EMODULE, at, "section %u of %u bytes goes past the end (%zu left)", id, n,
                        (size_t)(c.end - c.p));
        c.p += n;
        cursor content = { start, c.p };
        if (id == SEC_CUSTOM) {
            TRY(skip_name(r, &content));
            continue;
        }
        if (id >= SEC_COUNT)
            return fail(r, ART_EMODULE, at, "unknown section %u", id);
        if (section_rank[id] <= rank)
            return fail(r, ART_EMODULE, at, "section %u is out of order or there twice", id);
        rank = section_rank[id];
        r->section[id] = content;
    }
    return 0;
}

static int read_types(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_count(r, &c, TYPE_COUNT_MAX, "types", &n));
    r->type_count = n; /* before the entries: they may name types, the engine checks which */
    for (uint32_t i = 0; i < n; i++) {
        uint8_t form;
        TRY(read_u8(r, &c, &form));
        if (form != T_FUNC)
            return fail(r, ART_EMODULE, c.p - 1, "type form 0x%02x is not supported, only function types are", form);
        TRY(skip_value_types(r, &c));
        TRY(skip_value_types(r, &c));
    }
    return expect_end(r, &c, "type");
}

static int read_table_type(rw *r, cursor *c)
{
    const uint8_t *at = c->p;
    if (r->table_count >= TABLE_COUNT_MAX)
        return fail(r, ART_ELIMIT, at, "more than %u tables", TABLE_COUNT_MAX);
    table_info *t = &r->tables[r->table_count];
    *t = (table_info){ .type = at, .limit = UINT32_MAX, .fill_type = NONE, .grow_type = NONE, .helpers = NONE };
    TRY(skip_ref_type(r, c));
    t->type_len = (uint8_t)(c->p - at);
    uint8_t flags;
    TRY(read_u8(r, c, &flags));
    if (flags & 4)
        return fail(r, ART_EMODULE, c->p - 1, "64-bit tables are not supported");
    if (flags & 2)
        return fail(r, ART_EMODULE, c->p - 1, "shared tables are not supported");
    if (flags & ~1u)
        return fail(r, ART_EMODULE, c->p - 1, "unknown table flags 0x%02x", flags);
    uint32_t min, max;
    TRY(read_u32(r, c, &min));
    if (flags & 1) {
        TRY(read_u32(r, c, &max));
        t->limit = max;
    }
    if (min > r->cfg->table_elements_max)
        return fail(r, ART_ELIMIT, at, "table %u starts with %u entries, at most %u are allowed", r->table_count, min,
                    r->cfg->table_elements_max);
    r->table_count++;
    return 0;
}

static int read_memory_type(rw *r, cursor *c)
{
    uint8_t flags;
    TRY(read_u8(r, c, &flags));
    if (flags & 4)
        return fail(r, ART_EMODULE, c->p - 1, "64-bit memories are not supported");
    if (flags & 2)
        return fail(r, ART_EMODULE, c->p - 1, "shared memories are not supported");
    if (flags & 8)
        return fail(r, ART_EMODULE, c->p - 1, "custom page sizes are not supported");
    if (flags & ~1u)
        return fail(r, ART_EMODULE, c->p - 1, "unknown memory flags 0x%02x", flags);
    if (r->memory_count > 0)
        return fail(r, ART_EMODULE, c->p - 1, "only one memory is supported");
    uint32_t pages;
    TRY(read_u32(r, c, &pages));
    if (flags & 1)
        TRY(read_u32(r, c, &pages));
    r->memory_count++;
    return 0;
}

static int read_imports(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_count(r, &c, FUNC_COUNT_MAX, "imports", &n));
    for (uint32_t i = 0; i < n; i++) {
        uint8_t kind, byte;
        TRY(skip_name(r, &c));
        TRY(skip_name(r, &c));
        TRY(read_u8(r, &c, &kind));
        switch (kind) {
        case 0:
            TRY(read_type_index(r, &c));
            r->func_import_count++;
            break;
        case 1:
            TRY(read_table_type(r, &c));
            break;
        case 2:
            TRY(read_memory_type(r, &c));
            break;
        case 3:
            TRY(skip_value_type(r, &c));
            TRY(read_u8(r, &c, &byte));
            break;
        case 4:
            TRY(read_u8(r, &c, &byte));
            TRY(read_type_index(r, &c));
            break;
        case 0x7E:
        case 0x7F:
            return fail(r, ART_EMODULE, c.p - 1, "imports in groups (compact import section) are not supported");
        default:
            return fail(r, ART_EMODULE, c.p - 1, "unknown import kind 0x%02x", kind);
        }
    }
    return expect_end(r, &c, "import");
}

static int read_functions(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_count(r, &c, FUNC_COUNT_MAX, "functions", &n));
    for (uint32_t i = 0; i < n; i++)
        TRY(read_type_index(r, &c));
    r->func_count = n;
    return expect_end(r, &c, "function");
}

static int read_tables(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_count(r, &c, TABLE_COUNT_MAX, "tables", &n));
    for (uint32_t i = 0; i < n; i++) {
        bool init = c.end - c.p >= 2 && c.p[0] == 0x40 && c.p[1] == 0x00;
        if (init)
            c.p += 2;
        TRY(read_table_type(r, &c));
        if (init)
            TRY(skip_const_expr(r, &c));
    }
    return expect_end(r, &c, "table");
}

static int read_memories(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_u32(r, &c, &n));
    for (uint32_t i = 0; i < n; i++)
        TRY(read_memory_type(r, &c));
    return expect_end(r, &c, "memory");
}

static int read_tags(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_u32(r, &c, &n));
    for (uint32_t i = 0; i < n; i++) {
        uint8_t attribute;
        TRY(read_u8(r, &c, &attribute));
        TRY(read_type_index(r, &c));
    }
    return expect_end(r, &c, "tag");
}

static int read_globals(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_u32(r, &c, &n));
    for (uint32_t i = 0; i < n; i++) {
        uint8_t mutability;
        bool number = c.p < c.end && *c.p >= T_V128; /* the other value types are references */
        TRY(skip_value_type(r, &c));
        TRY(read_u8(r, &c, &mutability));
        r->facts.references = r->facts.references || (mutability && !number);
        TRY(skip_const_expr(r, &c));
    }
    return expect_end(r, &c, "global");
}

/* Whether a name with its length before it is this one, which is shorter than 128 bytes. */
static bool ends_as(cursor name, const char *s)
{
    size_t n = strlen(s);
    return (size_t)(name.end - name.p) == n + 1 && name.p[0] == n && memcmp(name.p + 1, s, n) == 0;
}

static int read_exports(rw *r, cursor c)
{
    uint32_t n, index;
    TRY(read_u32(r, &c, &n));
    for (uint32_t i = 0; i < n; i++) {
        uint8_t kind;
        const uint8_t *at = c.p;
        TRY(skip_name(r, &c));
        cursor name = { at, c.p };
        TRY(read_u8(r, &c, &kind));
        if (kind == 0 && r->cfg->loop_export && ends_as(name, r->cfg->loop_export)) {
            cursor peek = c;
            TRY(read_u32(r, &peek, &r->loop_call));
        }
        if (kind == 0)
            TRY(read_func_index(r, &c));
        else
            TRY(read_u32(r, &c, &index));
    }
    return expect_end(r, &c, "export");
}

static int read_start(rw *r, cursor c)
{
    TRY(read_func_index(r, &c));
    r->facts.start = true;
    return expect_end(r, &c, "start");
}

static int add_segment(rw *r, segments *s, const uint8_t *at, uint32_t len)
{
    if (s->count == s->cap) {
        uint32_t cap = s->cap ? s->cap * 2 : 64; /* count is at most SEGMENT_COUNT_MAX */
        segment *v = realloc(s->v, cap * sizeof *v);
        if (!v)
            return fail(r, ART_ENOMEM, at, "out of memory");
        s->v = v;
        s->cap = cap;
    }
    s->v[s->count++] = (segment){ .len = len, .helpers = NONE };
    return 0;
}

static int read_elements(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_count(r, &c, SEGMENT_COUNT_MAX, "element segments", &n));
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *at = c.p;
        uint32_t flags, table, entries;
        TRY(read_u32(r, &c, &flags));
        if (flags > 7)
            return fail(r, ART_EMODULE, at, "unknown element segment flags %u", flags);
        bool passive = (flags & 3) == 1, active = !(flags & 1), exprs = flags & 4;
        if (active) {
            if (flags & 2)
                TRY(read_u32(r, &c, &table));
            TRY(skip_const_expr(r, &c));
        }
        if (flags & 3) { /* only the short form, active on table 0, leaves the kind out */
            uint8_t kind;
            if (exprs)
                TRY(skip_ref_type(r, &c));
            else
                TRY(read_u8(r, &c, &kind));
        }
        TRY(read_u32(r, &c, &entries));
        for (uint32_t k = 0; k < entries; k++)
            TRY(exprs ? skip_const_expr(r, &c) : read_func_index(r, &c));
        TRY(add_segment(r, &r->elem, at, passive ? entries : 0));
    }
    return expect_end(r, &c, "element");
}

static int read_data(rw *r, cursor c)
{
    uint32_t n;
    TRY(read_count(r, &c, SEGMENT_COUNT_MAX, "data segments", &n));
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *at = c.p;
        uint32_t flags, bytes;
        TRY(read_u32(r, &c, &flags));
        if (flags > 2)
            return fail(r, ART_EMODULE, at, "unknown data segment flags %u", flags);
        if (flags == 2)
            TRY(read_memory_index(r, &c));
        if (flags != 1)
            TRY(skip_const_expr(r, &c));
        TRY(read_u32(r, &c, &bytes));
        TRY(skip_bytes(r, &c, bytes));
        TRY(add_segment(r, &r->data, at, flags == 1 ? bytes : 0));
    }
    return expect_end(r, &c, "data");
}

static int read_sections(rw *r)
{
    static const struct {
        uint8_t id;
        int (*read)(rw *, cursor);
    } readers[] = {
        { SEC_TYPE, read_types },     { SEC_IMPORT, read_imports },     { SEC_FUNCTION, read_functions },
        { SEC_TABLE, read_tables },   { SEC_MEMORY, read_memories },    { SEC_TAG, read_tags },
        { SEC_GLOBAL, read_globals }, { SEC_EXPORT, read_exports },     { SEC_START, read_start },
        { SEC_ELEMENT, read_elements }, { SEC_DATA, read_data },
    };
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
        if (r->section[readers[i].id].p)
            TRY(readers[i].read(r, r->section[readers[i].id]));
    return 0;
}

/* ---- helpers ---- */

/* Appends a function type with the given parameters, where `table` (if any) gives the element type. */
static uint32_t new_type(rw *r, const table_info *t, enum op_kind kind)
{
    buf *b = &r->types;
    put_u8(b, T_FUNC);
    put_u32(b, kind == OP_TABLE_GROW ? 2 : 3);
    if (kind != OP_TABLE_GROW)
        put_u8(b, T_I32);
    if (t)
        put_bytes(b, t->type, t->type_len);
    else
        put_u8(b, T_I32);
    put_u8(b, T_I32);
    if (kind == OP_TABLE_GROW) {
        put_u8(b, 1);
        put_u8(b, T_I32);
    } else {
        put_u8(b, 0);
    }
    return r->type_count + r->new_type_count++;
}

static uint32_t helper_type(rw *r, const op *o)
{
    table_info *t = &r->tables[o->a];
    uint32_t *slot = &r->plain_type;
    if (o->kind == OP_TABLE_FILL)
        slot = &t->fill_type;
    else if (o->kind == OP_TABLE_GROW)
        slot = &t->grow_type;
    if (*slot == NONE)
        *slot = new_type(r, slot == &r->plain_type ? NULL : t, o->kind);
    return *slot;
}

/* The list a helper hangs in: of its segment, its destination table or the memory. Each has at most one helper per table
 * and kind, so a look-up stays short whatever the module does. */
static uint32_t *helper_list(rw *r, const op *o)
{
    switch (o->kind) {
    case OP_MEMORY_INIT:
        return &r->data.v[o->b].helpers;
    case OP_TABLE_INIT:
        return &r->elem.v[o->b].helpers;
    case OP_TABLE_FILL:
    case OP_TABLE_COPY:
    case OP_TABLE_GROW:
        return &r->tables[o->a].helpers;
    default:
        return &r->memory_helpers;
    }
}

/* The function index that replaces *o, made at its first use. */
static int find_helper(rw *r, const op *o, const uint8_t *at, uint32_t *index)
{
    uint32_t *head = helper_list(r, o);
    uint32_t first = r->func_import_count + r->func_count;
    for (uint32_t i = *head; i != NONE; i = r->helpers[i].next) {
        const helper *h = &r->helpers[i];
        if (h->kind == o->kind && h->a == o->a && h->b == o->b) {
            *index = first + i;
            return 0;
        }
    }
    if (r->helper_count == FUNC_COUNT_MAX)
        return fail(r, ART_ELIMIT, at, "too many different bulk operations");
    if (r->helper_count == r->helper_cap) {
        uint32_t cap = r->helper_cap ? r->helper_cap * 2 : 16;
        helper *v = realloc(r->helpers, cap * sizeof *v);
        if (!v)
            return fail(r, ART_ENOMEM, at, "out of memory");
        r->helpers = v;
        r->helper_cap = cap;
    }
    uint32_t type = helper_type(r, o);
    r->helpers[r->helper_count] = (helper){ .kind = o->kind, .a = o->a, .b = o->b, .type = type, .next = *head };
    *head = r->helper_count;
    *index = first + r->helper_count++;
    return 0;
}

static void i_local(buf *b, enum opcode o, uint32_t local)
{
    put_u8(b, o);
    put_u32(b, local);
}

static void i_i32(buf *b, int32_t v)
{
    put_u8(b, I_I32_CONST);
    put_s64(b, v);
}

/* A structured instruction without a result, or a branch to depth `arg`: both take one byte. */
static void i_byte(buf *b, enum opcode o, uint32_t arg)
{
    put_u8(b, o);
    put_u8(b, arg);
}

/* local = local op value */
static void i_step(buf *b, uint32_t local, enum opcode o, uint32_t value)
{
    i_local(b, I_LOCAL_GET, local);
    i_i32(b, (int32_t)value);
    put_u8(b, o);
    i_local(b, I_LOCAL_SET, local);
}

/* local op value, as a condition on the stack */
static void i_compare(buf *b, uint32_t local, enum opcode o, uint32_t value)
{
    i_local(b, I_LOCAL_GET, local);
    i_i32(b, (int32_t)value);
    put_u8(b, o);
}

static void i_table(buf *b, enum misc_opcode o, uint32_t table)
{
    put_u8(b, I_MISC);
    put_u32(b, o);
    put_u32(b, table);
}

/* The original operation; its operands are on the stack. */
static void i_bulk(buf *b, const helper *h)
{
    switch (h->kind) {
    case OP_MEMORY_FILL:
        i_table(b, M_MEMORY_FILL, 0);
        break;
    case OP_MEMORY_COPY:
        i_table(b, M_MEMORY_COPY, 0);
        put_u8(b, 0);
        break;
    case OP_MEMORY_INIT:
        i_table(b, M_MEMORY_INIT, h->b);
        put_u8(b, 0);
        break;
    case OP_TABLE_FILL:
        i_table(b, M_TABLE_FILL, h->a);
        break;
    case OP_TABLE_COPY:
        i_table(b, M_TABLE_COPY, h->a);
        put_u32(b, h->b);
        break;
    case OP_TABLE_INIT:
        i_table(b, M_TABLE_INIT, h->b);
        put_u32(b, h->a);
        break;
    case OP_TABLE_GROW:
        i_table(b, M_TABLE_GROW, h->a);
        break;
    case OP_PLAIN:
    case OP_END:
        break;
    }
}

enum bound { BOUND_MEMORY, BOUND_TABLE, BOUND_CONST };

/* Branches to the enclosing block's end if `local` + n is past the bound. 64 bits wide, so that nothing wraps. */
static void i_branch_if_past(buf *b, uint32_t local, uint32_t n, enum bound bound, uint32_t v)
{
    i_local(b, I_LOCAL_GET, local);
    put_u8(b, I_I64_EXTEND_I32_U);
    i_local(b, I_LOCAL_GET, n);
    put_u8(b, I_I64_EXTEND_I32_U);
    put_u8(b, I_I64_ADD);
    switch (bound) {
    case BOUND_MEMORY:
        i_byte(b, I_MEMORY_SIZE, 0);
        put_u8(b, I_I64_EXTEND_I32_U);
        put_u8(b, I_I64_CONST);
        put_s64(b, 16);
        put_u8(b, I_I64_SHL);
        break;
    case BOUND_TABLE:
        i_table(b, M_TABLE_SIZE, v);
        put_u8(b, I_I64_EXTEND_I32_U);
        break;
    case BOUND_CONST:
        put_u8(b, I_I64_CONST);
        put_s64(b, v);
        break;
    }
    put_u8(b, I_I64_GT_U);
    i_byte(b, I_BR_IF, 0);
}

/* fill, copy and init, in wat (x is the value of a fill, the source otherwise; C is the chunk):
 *
 *   (func (param $d i32) (param $x i32 or T) (param $n i32)
 *     (block
 *       (br_if 0 (i32.le_u n C))                       ;; one chunk: do it
 *       (br_if 0 (d + n > size of destination))        ;; out of bounds: the original traps before it writes
 *       (br_if 0 (x + n > size of source))             ;; not for fill
 *       ;; from here on the range is good, and stays so: nothing shrinks and nothing else runs in this store
 *       (if (i32.le_u d x)                             ;; copy only: others go forward
 *         (then (loop (op d x C) (d += C) (x += C) (n -= C) (br_if 0 (i32.gt_u n C))))
 *         (else (loop (n -= C) (op (d + n) (x + n) C) (br_if 0 (i32.gt_u n C))))))
 *     (op d x n))                                      ;; the whole thing, or the 1 to C entries left
 *
 * A dropped segment is not known here: its length counts as the declared one, and the first chunk traps. */
static void put_chunked(rw *r, const helper *h)
{
    enum { D, X, N };
    buf *b = &r->code;
    bool memory = h->kind == OP_MEMORY_FILL || h->kind == OP_MEMORY_COPY || h->kind == OP_MEMORY_INIT;
    bool fill = h->kind == OP_MEMORY_FILL || h->kind == OP_TABLE_FILL;
    bool copy = h->kind == OP_MEMORY_COPY || h->kind == OP_TABLE_COPY;
    uint32_t chunk = memory ? r->cfg->memory_chunk_bytes : r->cfg->table_chunk_entries;

    put_u8(b, 0); /* no locals */
    i_byte(b, I_BLOCK, T_EMPTY_BLOCK);
    i_compare(b, N, I_I32_LE_U, chunk);
    i_byte(b, I_BR_IF, 0);
    i_branch_if_past(b, D, N, memory ? BOUND_MEMORY : BOUND_TABLE, h->a);
    if (copy)
        i_branch_if_past(b, X, N, memory ? BOUND_MEMORY : BOUND_TABLE, h->b);
    else if (!fill)
        i_branch_if_past(b, X, N, BOUND_CONST, memory ? r->data.v[h->b].len : r->elem.v[h->b].len);

    if (copy) {
        i_local(b, I_LOCAL_GET, D);
        i_local(b, I_LOCAL_GET, X);
        put_u8(b, I_I32_LE_U);
        i_byte(b, I_IF, T_EMPTY_BLOCK);
    }
    i_byte(b, I_LOOP, T_EMPTY_BLOCK);
    i_local(b, I_LOCAL_GET, D);
    i_local(b, I_LOCAL_GET, X);
    i_i32(b, (int32_t)chunk);
    i_bulk(b, h);
    i_step(b, D, I_I32_ADD, chunk);
    if (!fill)
        i_step(b, X, I_I32_ADD, chunk);
    i_step(b, N, I_I32_SUB, chunk);
    i_compare(b, N, I_I32_GT_U, chunk);
    i_byte(b, I_BR_IF, 0);
    put_u8(b, I_END);
    if (copy) {
        put_u8(b, I_ELSE);
        i_byte(b, I_LOOP, T_EMPTY_BLOCK);
        i_step(b, N, I_I32_SUB, chunk);
        for (uint32_t local = D; local <= X; local++) {
            i_local(b, I_LOCAL_GET, local);
            i_local(b, I_LOCAL_GET, N);
            put_u8(b, I_I32_ADD);
        }
        i_i32(b, (int32_t)chunk);
        i_bulk(b, h);
        i_compare(b, N, I_I32_GT_U, chunk);
        i_byte(b, I_BR_IF, 0);
        put_u8(b, I_END);
        put_u8(b, I_END);
    }
    put_u8(b, I_END);
    for (uint32_t local = D; local <= N; local++)
        i_local(b, I_LOCAL_GET, local);
    i_bulk(b, h);
    put_u8(b, I_END);
}

/* grow, in wat (L is the lower of the declared maximum and table_elements_max):
 *
 *   (func (param $v T) (param $n i32) (result i32) (local $old i32)
 *     (if (i64.gt_u (old := table.size) + n) L)
 *       (then (return (select -1 old n))))             ;; n == 0 succeeds even above L
 *     (if (i32.le_u n C) (then (return (table.grow v n))))
 *     (if (i32.eq (table.grow v C) -1) (then (return -1)))   ;; refused by the engine: nothing has changed yet
 *     (loop
 *       (n -= C)                                       ;; n stays at least 1
 *       (if (i32.gt_u n C)
 *         (then (if (i32.eq (table.grow v C) -1) (then unreachable)) (br 1)))
 *     (if (i32.eq (table.grow v n) -1) (then unreachable))
 *     old)
 *
 * The traps are the honest answer where the engine grants less than L: a table cannot shrink, so -1 would be a lie. */
static void put_grow(rw *r, const helper *h)
{
    enum { V, N, OLD };
    buf *b = &r->code;
    uint32_t chunk = r->cfg->table_chunk_entries;
    uint64_t limit = r->tables[h->a].limit;
    if (limit > r->cfg->table_elements_max)
        limit = r->cfg->table_elements_max;

    put_u8(b, 1); /* one group of locals: one i32 */
    put_u8(b, 1);
    put_u8(b, T_I32);

    i_table(b, M_TABLE_SIZE, h->a);
    i_local(b, I_LOCAL_TEE, OLD);
    put_u8(b, I_I64_EXTEND_I32_U);
    i_local(b, I_LOCAL_GET, N);
    put_u8(b, I_I64_EXTEND_I32_U);
    put_u8(b, I_I64_ADD);
    put_u8(b, I_I64_CONST);
    put_s64(b, (int64_t)limit);
    put_u8(b, I_I64_GT_U);
    i_byte(b, I_IF, T_EMPTY_BLOCK);
    i_i32(b, -1);
    i_local(b, I_LOCAL_GET, OLD);
    i_local(b, I_LOCAL_GET, N);
    put_u8(b, I_SELECT);
    put_u8(b, I_RETURN);
    put_u8(b, I_END);

    i_compare(b, N, I_I32_LE_U, chunk);
    i_byte(b, I_IF, T_EMPTY_BLOCK);
    i_local(b, I_LOCAL_GET, V);
    i_local(b, I_LOCAL_GET, N);
    i_bulk(b, h);
    put_u8(b, I_RETURN);
    put_u8(b, I_END);

    /* Three growths follow: the first may fail, the others may not. */
    for (int i = 0; i < 3; i++) {
        if (i == 1) {
            i_byte(b, I_LOOP, T_EMPTY_BLOCK);
            i_step(b, N, I_I32_SUB, chunk);
            i_compare(b, N, I_I32_GT_U, chunk);
            i_byte(b, I_IF, T_EMPTY_BLOCK);
        }
        i_local(b, I_LOCAL_GET, V);
        if (i == 2)
            i_local(b, I_LOCAL_GET, N);
        else
            i_i32(b, (int32_t)chunk);
        i_bulk(b, h);
        i_i32(b, -1);
        put_u8(b, I_I32_EQ);
        i_byte(b, I_IF, T_EMPTY_BLOCK);
        if (i == 0) {
            i_i32(b, -1);
            put_u8(b, I_RETURN);
        } else {
            put_u8(b, I_UNREACHABLE);
        }
        put_u8(b, I_END);
        if (i == 1) {
            i_byte(b, I_BR, 1);
            put_u8(b, I_END);
            put_u8(b, I_END);
        }
    }
    i_local(b, I_LOCAL_GET, OLD);
    put_u8(b, I_END);
}

static void put_helpers(rw *r)
{
    for (uint32_t i = 0; i < r->helper_count && !r->code.err; i++) {
        size_t mark = sized_begin(&r->code);
        if (r->helpers[i].kind == OP_TABLE_GROW)
            put_grow(r, &r->helpers[i]);
        else
            put_chunked(r, &r->helpers[i]);
        sized_end(&r->code, mark);
    }
}

/* ---- code ---- */

static int check_buf(rw *r, const buf *b, const uint8_t *at)
{
    if (b->err == ART_ENOMEM)
        return fail(r, ART_ENOMEM, at, "out of memory");
    if (b->err)
        return fail(r, ART_ELIMIT, at, "the rewritten module is over %zu bytes", r->cfg->bytes_max);
    return 0;
}

static int skip_locals(rw *r, cursor *c)
{
    uint32_t groups;
    TRY(read_u32(r, c, &groups));
    for (; groups > 0; groups--) {
        TRY(skip_leb(r, c, 5));
        TRY(skip_value_type(r, c));
    }
    return 0;
}

/* Whether the operation's count stands before it as a constant of at most one chunk: compilers copy structures that way, and
 * a call would cost six times the copy. `prev` is the instruction before the one at `at`, or NULL; between the two there
 * is nothing, so no branch can arrive with another count. A grow is never let off, since its limit is checked in its helper. */
static bool is_small(const rw *r, enum op_kind kind, const uint8_t *prev, const uint8_t *at)
{
    if (!prev || *prev != I_I32_CONST || kind == OP_TABLE_GROW)
        return false;
    uint32_t v = 0, bits = 0;
    for (const uint8_t *p = prev + 1; p < at && bits < 32; p++, bits += 7)
        v |= (uint32_t)(*p & 0x7F) << bits;
    if (bits < 32 && (at[-1] & 0x40))
        return false; /* negative, that is huge */
    bool memory = kind == OP_MEMORY_FILL || kind == OP_MEMORY_COPY || kind == OP_MEMORY_INIT;
    return v <= (memory ? r->cfg->memory_chunk_bytes : r->cfg->table_chunk_entries);
}

/* What the operation at `at` means for facts. */
static void note(art_rewrite_facts *facts, const uint8_t *at)
{
    switch (at[0]) {
    case I_LOOP:
        facts->loops++;
        break;
    case 0x06: case 0x07: case 0x08: case 0x09: case 0x0A: case 0x18: case 0x19: case 0x1F:
        facts->exceptions = true;
        break;
    case 0x12: case 0x13: case 0x15:
        facts->tail_calls = true;
        break;
    case 0x26: /* table.set */
        facts->tables_change = true;
        break;
    case I_MISC:
        /* one byte: all numbers above are one; a longer way to write a small one is padded with these bytes */
        switch (at[1] & 0x7F) {
        case M_DATA_DROP: case M_ELEM_DROP:
            facts->segments_drop = true;
            break;
        case M_TABLE_INIT: case M_TABLE_COPY: case M_TABLE_GROW: case M_TABLE_FILL:
            facts->tables_change = true;
            break;
        default:
            break;
        }
        break;
    default:
        break;
    }
}

/* From here on the body is written anew: what of it was not yet, and then what is put in. */
static void edit(rw *r, const uint8_t *start, const uint8_t *content, bool *edited, size_t *mark, const uint8_t *at,
                 const uint8_t **copied)
{
    if (!*edited) {
        *edited = r->changed = true;
        put_bytes(&r->code, *copied, (size_t)(start - *copied));
        *mark = sized_begin(&r->code);
        *copied = content;
    }
    put_bytes(&r->code, *copied, (size_t)(at - *copied));
    *copied = at;
}

/* The copy of the function that is called at `at`, or NONE. */
static uint32_t copy_called(const rw *r, const uint8_t *at)
{
    if (!r->cfg->copied || r->body_of < r->cfg->copies_first || *at != I_CALL)
        return NONE;
    uint32_t called = 0, low = 0, high = r->cfg->copied_count;
    for (unsigned i = 0; i < LEB_U32_MAX; i++) { /* decoded before, so it is whole */
        called |= (uint32_t)(at[1 + i] & 0x7F) << (7 * i);
        if (!(at[1 + i] & 0x80))
            break;
    }
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (r->cfg->copied[middle] < called)
            low = middle + 1;
        else
            high = middle;
    }
    return low < r->cfg->copied_count && r->cfg->copied[low] == called ? r->cfg->copies_first + low : NONE;
}

/* One body. *copied is the first input byte not yet in r->code: everything before it has been written. */
static int rewrite_body(rw *r, const uint8_t *start, cursor body, const uint8_t **copied)
{
    const uint8_t *content = body.p;
    bool edited = false;
    size_t mark = 0;
    op o = { OP_PLAIN, 0, 0 };
    TRY(skip_locals(r, &body));
    const uint8_t *prev = NULL, *at = NULL;
    while (body.p < body.end) {
        prev = at;
        at = body.p;
        TRY(decode_op(r, &body, &o));
        note(&r->facts, at);
        if (*at == I_LOOP && r->loop_call != NONE) {
            edit(r, start, content, &edited, &mark, body.p, copied);
            put_u8(&r->code, I_CALL);
            put_u32(&r->code, r->loop_call);
        }
        uint32_t copy = copy_called(r, at);
        if (copy != NONE) {
            if (copy >= r->func_import_count + r->func_count)
                return fail(r, ART_EMODULE, at, "unknown function %u", copy);
            edit(r, start, content, &edited, &mark, at, copied);
            put_u8(&r->code, I_CALL);
            put_u32(&r->code, copy);
            *copied = body.p;
        }
        if (__builtin_expect(o.kind <= OP_END, 1) || r->cfg->keep_bulk)
            continue;
        if (is_small(r, o.kind, prev, at))
            continue;
        uint32_t index;
        TRY(find_helper(r, &o, at, &index));
        edit(r, start, content, &edited, &mark, at, copied);
        put_u8(&r->code, I_CALL);
        put_u32(&r->code, index);
        *copied = body.p;
    }
    if (o.kind != OP_END)
        return fail(r, ART_EMODULE, body.end, "function body without an end");
    if (edited) {
        put_bytes(&r->code, *copied, (size_t)(body.end - *copied));
        sized_end(&r->code, mark);
        *copied = body.end;
    }
    return 0;
}

static int rewrite_code(rw *r)
{
    cursor c = r->section[SEC_CODE];
    uint32_t n = 0;
    const uint8_t *at = c.p ? c.p : r->base + r->len;
    if (c.p)
        TRY(read_u32(r, &c, &n));
    if (n != r->func_count)
        return fail(r, ART_EMODULE, at, "%u function bodies for %u functions", n, r->func_count);
    if (!c.p)
        return 0;
    const uint8_t *copied = c.p;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *start = c.p;
        uint32_t bytes;
        TRY(read_u32(r, &c, &bytes));
        cursor body = { c.p, c.p };
        TRY(skip_bytes(r, &c, bytes));
        body.end = c.p;
        r->body_of = r->func_import_count + i;
        TRY(rewrite_body(r, start, body, &copied));
        TRY(check_buf(r, &r->code, start));
        TRY(check_buf(r, &r->types, start));
    }
    TRY(expect_end(r, &c, "code"));
    if (r->changed)
        put_bytes(&r->code, copied, (size_t)(c.end - copied));
    return 0;
}

/* ---- result ---- */

static bool name_is(cursor name, const char *s)
{
    size_t n = strlen(s);
    return (size_t)(name.end - name.p) == n && memcmp(name.p, s, n) == 0;
}

static bool name_starts(cursor name, const char *s)
{
    size_t n = strlen(s);
    return (size_t)(name.end - name.p) >= n && memcmp(name.p, s, n) == 0;
}

static bool drop_custom(const rw *r, cursor name)
{
    for (const uint8_t *p = name.p; p < name.end; p++)
        if (*p >= 0x80)
            return false; /* it may be no text, and then the engine must see it */
    if (name_starts(name, ".debug_") || name_is(name, "sourceMappingURL") || name_is(name, "external_debug_info"))
        return true;
    return r->changed && (name_starts(name, "metadata.code.") || name_starts(name, "reloc."));
}

static void put_helper_names(const rw *r, buf *b)
{
    static const char *const verbs[] = {
        [OP_MEMORY_FILL] = "memory.fill", [OP_MEMORY_COPY] = "memory.copy", [OP_MEMORY_INIT] = "memory.init",
        [OP_TABLE_FILL] = "table.fill",   [OP_TABLE_COPY] = "table.copy",   [OP_TABLE_INIT] = "table.init",
        [OP_TABLE_GROW] = "table.grow",
    };
    for (uint32_t i = 0; i < r->helper_count; i++) {
        const helper *h = &r->helpers[i];
        char text[64];
        int n;
        if (h->kind == OP_MEMORY_FILL || h->kind == OP_MEMORY_COPY)
            n = snprintf(text, sizeof text, "agentrt.%s", verbs[h->kind]);
        else if (h->kind == OP_MEMORY_INIT)
            n = snprintf(text, sizeof text, "agentrt.%s %u", verbs[h->kind], h->b);
        else if (h->kind == OP_TABLE_FILL || h->kind == OP_TABLE_GROW)
            n = snprintf(text, sizeof text, "agentrt.%s %u", verbs[h->kind], h->a);
        else
            n = snprintf(text, sizeof text, "agentrt.%s %u %u", verbs[h->kind], h->a, h->b);
        put_u32(b, r->func_import_count + r->func_count + i);
        put_u32(b, (uint32_t)n);
        put_bytes(b, (const uint8_t *)text, (size_t)n);
    }
}

/* Writes the function-name subsection with the helpers added. False, with nothing written, if it does not parse or
 * already names a helper's index: then it is kept as it is, since names are not worth a refusal. */
static bool put_function_names(rw *r, buf *b, cursor c)
{
    rw quiet = { .base = r->base, .cfg = r->cfg }; /* parse errors here are nobody's business */
    uint32_t n, index, first = r->func_import_count + r->func_count;
    if (read_u32(&quiet, &c, &n) || n > FUNC_COUNT_MAX)
        return false;
    cursor entries = c;
    for (uint32_t i = 0; i < n; i++)
        if (read_u32(&quiet, &c, &index) || index >= first || skip_name(&quiet, &c))
            return false;
    if (c.p != c.end)
        return false;
    put_u8(b, 1);
    size_t mark = sized_begin(b);
    put_u32(b, n + r->helper_count);
    put_bytes(b, entries.p, (size_t)(entries.end - entries.p));
    put_helper_names(r, b);
    sized_end(b, mark);
    return true;
}

/* A name section, `content` from its own name on, `c` the subsections. */
static void put_name_section(rw *r, buf *b, cursor content, cursor c)
{
    rw quiet = { .base = r->base, .cfg = r->cfg };
    put_u8(b, SEC_CUSTOM);
    size_t mark = sized_begin(b);
    put_bytes(b, content.p, (size_t)(c.p - content.p));
    bool done = false;
    while (c.p < c.end) {
        const uint8_t *start = c.p;
        uint8_t id;
        uint32_t n;
        if (read_u8(&quiet, &c, &id) || read_u32(&quiet, &c, &n) || n > (size_t)(c.end - c.p)) {
            put_bytes(b, start, (size_t)(c.end - start));
            break;
        }
        cursor sub = { c.p, c.p + n };
        c.p = sub.end;
        if (id == 1 && !done)
            done = put_function_names(r, b, sub);
        if (id != 1 || !done)
            put_bytes(b, start, (size_t)(c.p - start));
    }
    sized_end(b, mark);
}

/* A section of `count` entries: the old content behind its count, then what is appended. */
static void put_extended(rw *r, buf *b, uint8_t id, uint32_t count, const buf *appended)
{
    rw quiet = { .base = r->base, .cfg = r->cfg };
    cursor c = r->section[id];
    uint32_t old;
    put_u8(b, id);
    size_t mark = sized_begin(b);
    put_u32(b, count);
    if (id != SEC_CODE && read_u32(&quiet, &c, &old) == 0)
        put_bytes(b, c.p, (size_t)(c.end - c.p));
    put_bytes(b, appended->p, appended->len);
    sized_end(b, mark);
}

static void put_section(rw *r, buf *b, uint8_t id, const uint8_t *start, cursor content)
{
    if (id == SEC_CUSTOM) {
        cursor c = content;
        uint32_t n = 0;
        if (read_u32(r, &c, &n) != 0)
            return; /* cannot be: walk_sections has read it */
        cursor name = { c.p, c.p + n };
        c.p = name.end;
        if (drop_custom(r, name))
            return;
        if (r->helper_count > 0 && name_is(name, "name")) {
            put_name_section(r, b, content, c);
            return;
        }
    } else if (r->changed) {
        if (id == SEC_TYPE && r->new_type_count > 0) {
            put_extended(r, b, id, r->type_count + r->new_type_count, &r->types);
            return;
        }
        if (id == SEC_FUNCTION && r->helper_count > 0) {
            buf types = { .max = b->max };
            for (uint32_t i = 0; i < r->helper_count; i++)
                put_u32(&types, r->helpers[i].type);
            put_extended(r, b, id, r->func_count + r->helper_count, &types);
            if (types.err && !b->err)
                b->err = types.err;
            free(types.p);
            return;
        }
        if (id == SEC_CODE) {
            put_extended(r, b, id, r->func_count + r->helper_count, &r->code);
            return;
        }
    }
    put_bytes(b, start, (size_t)(content.end - start));
}

/* Sections are there and well-formed by now, so reading their headers again cannot fail. Helpers exist only where a body
 * does, and a body only where a function and a type do: no section has to be made up. */
static int assemble(rw *r, buf *b)
{
    put_helpers(r);
    if (r->code.err)
        b->err = r->code.err;
    /* The input's size plus what grew; an estimate only, puts check. */
    size_t guess = r->len + (r->changed ? r->code.len / 8 + 4096 : 0);
    buf_reserve(b, guess < b->max ? guess : b->max);
    cursor c = { r->base + 8, r->base + r->len };
    put_bytes(b, r->base, 8);
    while (c.p < c.end && !b->err) {
        const uint8_t *start = c.p;
        uint8_t id;
        uint32_t n;
        TRY(read_u8(r, &c, &id));
        TRY(read_u32(r, &c, &n));
        cursor content = { c.p, c.p + n };
        c.p = content.end;
        put_section(r, b, id, start, content);
    }
    return check_buf(r, b, c.p);
}

static int rewrite(rw *r, buf *b)
{
    if (r->len > r->cfg->bytes_max)
        return fail(r, ART_ELIMIT, r->base, "module of %zu bytes, at most %zu are allowed", r->len, r->cfg->bytes_max);
    TRY(walk_sections(r));
    TRY(read_sections(r));
    if (r->cfg->loop_export && r->loop_call == NONE)
        return fail(r, ART_EMODULE, r->base, "no function is exported as %s", r->cfg->loop_export);
    TRY(rewrite_code(r));
    return assemble(r, b);
}

void art_rewrite_config_default(art_rewrite_config *cfg)
{
    *cfg = (art_rewrite_config){
        .memory_chunk_bytes = 8192,
        .table_chunk_entries = 1000,
        .table_elements_max = 20000, /* the engine's pooling default */
        .bytes_max = (size_t)64 << 20,
    };
}

int art_rewrite(const uint8_t *wasm, size_t len, const art_rewrite_config *cfg, uint8_t **out, size_t *out_len, char *msg,
                size_t msg_len)
{
    art_rewrite_facts facts;
    return art_rewrite_knowing(wasm, len, cfg, out, out_len, &facts, msg, msg_len);
}

int art_rewrite_knowing(const uint8_t *wasm, size_t len, const art_rewrite_config *cfg, uint8_t **out, size_t *out_len,
                        art_rewrite_facts *facts, char *msg, size_t msg_len)
{
    if (!msg)
        msg_len = 0;
    if (!wasm || !cfg || !out || !out_len || cfg->memory_chunk_bytes == 0 || cfg->memory_chunk_bytes > INT32_MAX
        || cfg->table_chunk_entries == 0 || cfg->table_chunk_entries > INT32_MAX || cfg->bytes_max < 8) {
        if (msg_len > 0)
            snprintf(msg, msg_len, "rewrite: argument out of range");
        return ART_EINVAL;
    }
    rw *r = calloc(1, sizeof *r);
    if (!r) {
        if (msg_len > 0)
            snprintf(msg, msg_len, "rewrite: out of memory");
        return ART_ENOMEM;
    }
    r->base = wasm;
    r->len = len;
    r->cfg = cfg;
    r->msg = msg;
    r->msg_len = msg_len;
    r->memory_helpers = NONE;
    r->plain_type = NONE;
    r->loop_call = NONE;
    r->types.max = r->code.max = cfg->bytes_max;
    buf b = { .max = cfg->bytes_max };
    int rc = rewrite(r, &b);
    if (rc == 0)
        *facts = r->facts;
    free(r->data.v);
    free(r->elem.v);
    free(r->helpers);
    free(r->types.p);
    free(r->code.p);
    free(r);
    if (rc != 0) {
        free(b.p);
        return rc;
    }
    *out = b.p;
    *out_len = b.len;
    return 0;
}
