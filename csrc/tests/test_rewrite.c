/* The bulk-operation rewriter against hostile bytes: what it refuses and how it says so, every truncation and many mutations of a
 * real module (run under ASan, each input in an allocation of its exact size), and the bounds on its output. That the
 * rewritten code means the same is tested where modules can run: tests/unit/test_rewrite.py. */
#include "rewrite.h"

#include "art_err.h"
#include "check.h"

#include <stdbool.h>
#include <string.h>

/* Every operation that is rewritten, assembled from:
 *   (module
 *     (type $t (func (result i32)))
 *     (import "m" "f" (func $imp (param i32)))
 *     (table $a 4 funcref)
 *     (table $b 4 60 externref)
 *     (memory (export "memory") 1)
 *     (global $g (mut i32) (i32.const 7))
 *     (export "run" (func $run))
 *     (start $nop)
 *     (elem $e func $run $nop $run $nop $run $run)
 *     (elem (table $a) (i32.const 0) func $run)
 *     (data $d "0123456789")
 *     (data (i32.const 4) "active")
 *     (func $nop)
 *     (func $run
 *       (memory.fill (i32.const 0) (i32.const 1) (i32.const 100))
 *       (memory.copy (i32.const 0) (i32.const 1) (i32.const 100))
 *       (memory.init $d (i32.const 0) (i32.const 0) (i32.const 10))
 *       (table.fill $a (i32.const 0) (ref.func $run) (i32.const 2))
 *       (table.fill $b (i32.const 0) (ref.null extern) (i32.const 2))
 *       (table.copy $a $a (i32.const 0) (i32.const 1) (i32.const 2))
 *       (table.init $a $e (i32.const 0) (i32.const 0) (i32.const 2))
 *       (drop (table.grow $a (ref.null func) (i32.const 9)))
 *       (drop (table.grow $b (ref.null extern) (i32.const 9)))
 *       (memory.fill (i32.const 0) (i32.const 1) (i32.const 100))
 *       data.drop $d
 *       elem.drop $e))
 */
static const uint8_t sample[] = {
    0x00, 0x61, 0x73, 0x6d, 0x01, 0x00, 0x00, 0x00, 0x01, 0x0c, 0x03, 0x60, 0x00, 0x01, 0x7f, 0x60, 0x01, 0x7f,
    0x00, 0x60, 0x00, 0x00, 0x02, 0x07, 0x01, 0x01, 0x6d, 0x01, 0x66, 0x00, 0x01, 0x03, 0x03, 0x02, 0x02, 0x02,
    0x04, 0x08, 0x02, 0x70, 0x00, 0x04, 0x6f, 0x01, 0x04, 0x3c, 0x05, 0x03, 0x01, 0x00, 0x01, 0x06, 0x06, 0x01,
    0x7f, 0x01, 0x41, 0x07, 0x0b, 0x07, 0x10, 0x02, 0x06, 0x6d, 0x65, 0x6d, 0x6f, 0x72, 0x79, 0x02, 0x00, 0x03,
    0x72, 0x75, 0x6e, 0x00, 0x02, 0x08, 0x01, 0x01, 0x09, 0x12, 0x02, 0x01, 0x00, 0x06, 0x02, 0x01, 0x02, 0x01,
    0x02, 0x02, 0x02, 0x00, 0x41, 0x00, 0x0b, 0x00, 0x01, 0x02, 0x0c, 0x01, 0x02, 0x0a, 0x6c, 0x02, 0x02, 0x00,
    0x0b, 0x67, 0x00, 0x41, 0x00, 0x41, 0x01, 0x41, 0xe4, 0x00, 0xfc, 0x0b, 0x00, 0x41, 0x00, 0x41, 0x01, 0x41,
    0xe4, 0x00, 0xfc, 0x0a, 0x00, 0x00, 0x41, 0x00, 0x41, 0x00, 0x41, 0x0a, 0xfc, 0x08, 0x00, 0x00, 0x41, 0x00,
    0xd2, 0x02, 0x41, 0x02, 0xfc, 0x11, 0x00, 0x41, 0x00, 0xd0, 0x6f, 0x41, 0x02, 0xfc, 0x11, 0x01, 0x41, 0x00,
    0x41, 0x01, 0x41, 0x02, 0xfc, 0x0e, 0x00, 0x00, 0x41, 0x00, 0x41, 0x00, 0x41, 0x02, 0xfc, 0x0c, 0x00, 0x00,
    0xd0, 0x70, 0x41, 0x09, 0xfc, 0x0f, 0x00, 0x1a, 0xd0, 0x6f, 0x41, 0x09, 0xfc, 0x0f, 0x01, 0x1a, 0x41, 0x00,
    0x41, 0x01, 0x41, 0xe4, 0x00, 0xfc, 0x0b, 0x00, 0xfc, 0x09, 0x00, 0xfc, 0x0d, 0x00, 0x0b, 0x0b, 0x18, 0x02,
    0x01, 0x0a, 0x30, 0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38, 0x39, 0x00, 0x41, 0x04, 0x0b, 0x06, 0x61,
    0x63, 0x74, 0x69, 0x76, 0x65, 0x00, 0x38, 0x04, 0x6e, 0x61, 0x6d, 0x65, 0x01, 0x10, 0x03, 0x00, 0x03, 0x69,
    0x6d, 0x70, 0x01, 0x03, 0x6e, 0x6f, 0x70, 0x02, 0x03, 0x72, 0x75, 0x6e, 0x04, 0x04, 0x01, 0x00, 0x01, 0x74,
    0x05, 0x07, 0x02, 0x00, 0x01, 0x61, 0x01, 0x01, 0x62, 0x07, 0x04, 0x01, 0x00, 0x01, 0x67, 0x08, 0x04, 0x01,
    0x00, 0x01, 0x65, 0x09, 0x04, 0x01, 0x00, 0x01, 0x64,
};

/* Chunks small enough that nothing in the sample is left plain. */
static art_rewrite_config small_chunks(void)
{
    art_rewrite_config cfg;
    art_rewrite_config_default(&cfg);
    cfg.memory_chunk_bytes = 4;
    cfg.table_chunk_entries = 1;
    cfg.table_elements_max = 100;
    return cfg;
}

typedef struct result {
    int rc;
    uint8_t *out;
    size_t len;
    char msg[160];
} result;

/* Runs on a copy of exactly `len` bytes, so that a read past the end is caught; checks what holds for every input. */
static result run(const uint8_t *bytes, size_t len, const art_rewrite_config *cfg)
{
    static uint8_t marker;
    result r = { .out = &marker, .len = 12345 };
    uint8_t *copy = malloc(len > 0 ? len : 1);
    CHECK(copy);
    memcpy(copy, bytes, len);
    r.rc = art_rewrite(copy, len, cfg, &r.out, &r.len, r.msg, sizeof r.msg);
    CHECK(memcmp(copy, bytes, len) == 0);
    free(copy);
    if (r.rc == 0) {
        CHECK(r.out != &marker && r.len <= cfg->bytes_max);
    } else {
        CHECK(r.out == &marker && r.len == 12345);
        CHECK_MSG(r.rc == ART_EINVAL || strncmp(r.msg, "byte ", 5) == 0, "%s", r.msg);
        CHECK(r.rc == ART_EMODULE || r.rc == ART_ELIMIT || r.rc == ART_EINVAL);
        r.out = NULL;
    }
    return r;
}

static bool contains(const uint8_t *bytes, size_t len, const char *text)
{
    size_t n = strlen(text);
    for (size_t i = 0; i + n <= len; i++)
        if (memcmp(bytes + i, text, n) == 0)
            return true;
    return false;
}

/* ---- building modules ---- */

typedef struct module {
    uint8_t bytes[4096];
    size_t len;
} module;

static module new_module(void)
{
    return (module){ .bytes = { 0, 'a', 's', 'm', 1, 0, 0, 0 }, .len = 8 };
}

static void add_section(module *m, uint8_t id, const uint8_t *content, size_t n)
{
    CHECK(n < 128 && m->len + n + 2 <= sizeof m->bytes);
    m->bytes[m->len++] = id;
    m->bytes[m->len++] = (uint8_t)n;
    memcpy(m->bytes + m->len, content, n);
    m->len += n;
}

#define SECTION(m, id, ...)                                    \
    do {                                                       \
        static const uint8_t content_[] = { __VA_ARGS__ };     \
        add_section((m), (id), content_, sizeof content_);     \
    } while (0)

/* One function () -> () with a memory and a funcref table of at least 3, and the given instructions before its end. */
static module code_module(const uint8_t *code, size_t n)
{
    module m = new_module();
    uint8_t body[100] = { 1, (uint8_t)(n + 2), 0 };
    CHECK(n + 4 <= sizeof body);
    memcpy(body + 3, code, n);
    body[3 + n] = 0x0B;
    SECTION(&m, 1, 1, 0x60, 0, 0);
    SECTION(&m, 3, 1, 0);
    SECTION(&m, 4, 1, 0x70, 0, 3);
    SECTION(&m, 5, 1, 0, 1);
    add_section(&m, 10, body, n + 4);
    return m;
}

#define EXPECT(m, code, text)                                                                            \
    do {                                                                                                 \
        art_rewrite_config cfg_ = small_chunks();                                                        \
        result r_ = run((m).bytes, (m).len, &cfg_);                                                      \
        CHECK_MSG(r_.rc == (code), "rc %d: %s", r_.rc, r_.msg);                                          \
        CHECK_MSG((code) == 0 || strstr(r_.msg, (text)), "\"%s\" does not say \"%s\"", r_.msg, (text));  \
        free(r_.out);                                                                                    \
    } while (0)

#define EXPECT_CODE(code, text, ...)                              \
    do {                                                          \
        static const uint8_t code_[] = { __VA_ARGS__ };           \
        module m_ = code_module(code_, sizeof code_);             \
        EXPECT(m_, (code), (text));                               \
    } while (0)

/* ---- tests ---- */

static void test_sample(void)
{
    art_rewrite_config cfg = small_chunks();
    result r = run(sample, sizeof sample, &cfg);
    CHECK_EQ(r.rc, 0);
    CHECK(r.len > sizeof sample);
    /* One helper each, although memory.fill stands there twice. */
    static const char *const names[] = {
        "agentrt.memory.fill",  "agentrt.memory.copy",  "agentrt.memory.init 0",
        "agentrt.table.fill 0", "agentrt.table.fill 1", "agentrt.table.copy 0 0",
        "agentrt.table.init 0 0", "agentrt.table.grow 0", "agentrt.table.grow 1",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char entry[40]; /* function index (1 imported and 2 defined stand before), length, name */
        (void)snprintf(entry, sizeof entry, "%c%c%s", (int)(3 + i), (int)strlen(names[i]), names[i]);
        CHECK_MSG(contains(r.out, r.len, entry), "%s", names[i]);
    }
    /* The function section: 2 + 9 entries. */
    CHECK(contains(r.out, r.len, "\x03\x0c\x0b\x02\x02\x03"));
    /* The output is read again, and the operations inside the helpers are found. */
    result again = run(r.out, r.len, &cfg);
    CHECK_EQ(again.rc, 0);
    CHECK(again.len > r.len);
    free(again.out);
    free(r.out);
}

static void test_operations_within_one_chunk_stay(void)
{
    art_rewrite_config cfg;
    art_rewrite_config_default(&cfg);
    result r = run(sample, sizeof sample, &cfg);
    CHECK_EQ(r.rc, 0);
    /* Constant counts, 10 bytes of data, 6 entries, a table of at most 60: none can be more than a chunk. What is left is the
     * growth of a table without a maximum. */
    CHECK(contains(r.out, r.len, "agentrt.table.grow 0") && !contains(r.out, r.len, "agentrt.memory"));
    CHECK(!contains(r.out, r.len, "agentrt.table.init") && !contains(r.out, r.len, "agentrt.table.copy"));
    CHECK(!contains(r.out, r.len, "agentrt.table.fill") && !contains(r.out, r.len, "agentrt.table.grow 1"));
    /* But a limit below its own maximum must hold. */
    cfg.table_elements_max = 59;
    result limited = run(sample, sizeof sample, &cfg);
    CHECK_EQ(limited.rc, 0);
    CHECK(contains(limited.out, limited.len, "agentrt.table.grow 1"));
    free(limited.out);
    free(r.out);
}

static void test_nothing_to_do(void)
{
    art_rewrite_config cfg = small_chunks();
    module m = code_module((const uint8_t[]){ 0x01 }, 1);
    /* A length in more bytes than needed must come back as it was. */
    static const uint8_t padded[] = { 0, 0x85, 0x80, 0, 4, 'k', 'e', 'e', 'p' };
    memcpy(m.bytes + m.len, padded, sizeof padded);
    m.len += sizeof padded;
    result r = run(m.bytes, m.len, &cfg);
    CHECK_EQ(r.rc, 0);
    CHECK_EQ(r.len, m.len);
    CHECK(memcmp(r.out, m.bytes, m.len) == 0);
    free(r.out);

    module debug = new_module();
    SECTION(&debug, 0, 11, '.', 'd', 'e', 'b', 'u', 'g', '_', 'l', 'i', 'n', 'e', 1, 2, 3);
    memcpy(debug.bytes + debug.len, m.bytes + 8, m.len - 8);
    debug.len += m.len - 8;
    SECTION(&debug, 0, 16, 's', 'o', 'u', 'r', 'c', 'e', 'M', 'a', 'p', 'p', 'i', 'n', 'g', 'U', 'R', 'L', 1, 'x');
    r = run(debug.bytes, debug.len, &cfg);
    CHECK_EQ(r.rc, 0);
    CHECK_EQ(r.len, m.len);
    CHECK(memcmp(r.out, m.bytes, m.len) == 0);
    free(r.out);

    /* A name that is no text makes a module invalid, and it must stay so. */
    module broken = code_module((const uint8_t[]){ 0x01 }, 1);
    SECTION(&broken, 0, 8, '.', 'd', 'e', 'b', 'u', 'g', '_', 0xff);
    r = run(broken.bytes, broken.len, &cfg);
    CHECK_EQ(r.rc, 0);
    CHECK_EQ(r.len, broken.len);
    CHECK(memcmp(r.out, broken.bytes, broken.len) == 0);
    free(r.out);

    /* No sections at all. */
    r = run(m.bytes, 8, &cfg);
    CHECK(r.rc == 0 && r.len == 8);
    free(r.out);
}

static void test_truncations(void)
{
    art_rewrite_config cfg = small_chunks();
    int good = 0;
    for (size_t len = 0; len < sizeof sample; len++) {
        result r = run(sample, len, &cfg);
        good += r.rc == 0;
        free(r.out);
    }
    /* Good: only the header, that and the types, the imports too, and all but the names. From the functions on bodies are
     * missing, and behind the code the data it names. */
    CHECK_EQ(good, 4);
}

static void test_mutations(void)
{
    art_rewrite_config cfg = small_chunks();
    uint8_t copy[sizeof sample];
    memcpy(copy, sample, sizeof sample);
    static const uint8_t values[] = { 0x00, 0x01, 0x7F, 0x80, 0xFF, 0x40, 0x0B, 0xFC };
    for (size_t i = 0; i < sizeof sample; i++) {
        for (size_t k = 0; k < sizeof values; k++) {
            copy[i] = values[k];
            result r = run(copy, sizeof copy, &cfg);
            if (r.rc == 0) { /* what it writes, it can read */
                result again = run(r.out, r.len, &cfg);
                CHECK_MSG(again.rc == 0, "byte %zu = 0x%02x: %s", i, values[k], again.msg);
                free(again.out);
            }
            free(r.out);
        }
        copy[i] = sample[i];
    }
}

static void test_output_bound(void)
{
    art_rewrite_config cfg = small_chunks();
    result full = run(sample, sizeof sample, &cfg);
    CHECK_EQ(full.rc, 0);
    for (cfg.bytes_max = 8; cfg.bytes_max < full.len; cfg.bytes_max++) {
        result r = run(sample, sizeof sample, &cfg);
        /* Room for a padded length is asked for before it is closed up, so a few bytes below the exact length may fail too. */
        CHECK_EQ(r.rc, ART_ELIMIT);
    }
    cfg.bytes_max = full.len + 64;
    result r = run(sample, sizeof sample, &cfg);
    CHECK(r.rc == 0 && r.len == full.len && memcmp(r.out, full.out, r.len) == 0);
    free(r.out);
    free(full.out);
}

static void test_arguments(void)
{
    uint8_t *out;
    size_t len;
    art_rewrite_config good = small_chunks(), cfg;
    CHECK_EQ(art_rewrite(NULL, 0, &good, &out, &len, NULL, 0), ART_EINVAL);
    CHECK_EQ(art_rewrite(sample, sizeof sample, NULL, &out, &len, NULL, 0), ART_EINVAL);
    CHECK_EQ(art_rewrite(sample, sizeof sample, &good, NULL, &len, NULL, 0), ART_EINVAL);
    CHECK_EQ(art_rewrite(sample, sizeof sample, &good, &out, NULL, NULL, 0), ART_EINVAL);
#define REFUSED(field, value)                                        \
    do {                                                             \
        cfg = good;                                                  \
        cfg.field = (value);                                         \
        CHECK_EQ(run(sample, sizeof sample, &cfg).rc, ART_EINVAL);   \
    } while (0)
    REFUSED(memory_chunk_bytes, 0);
    REFUSED(memory_chunk_bytes, UINT32_C(1) << 31);
    REFUSED(table_chunk_entries, 0);
    REFUSED(table_chunk_entries, UINT32_MAX);
    REFUSED(bytes_max, 7);
#undef REFUSED
    /* A message is optional, and is cut to its room. */
    char msg[8] = "1234567";
    CHECK_EQ(art_rewrite(sample, 20, &good, &out, &len, NULL, 100), ART_EMODULE);
    CHECK_EQ(art_rewrite(sample, 20, &good, &out, &len, msg, 0), ART_EMODULE);
    CHECK(strcmp(msg, "1234567") == 0);
    CHECK_EQ(art_rewrite(sample, 20, &good, &out, &len, msg, sizeof msg), ART_EMODULE);
    CHECK(memcmp(msg, "byte", 4) == 0 && memchr(msg, 0, sizeof msg));
}

static void test_header(void)
{
    module m = new_module();
    m.bytes[0] = 1;
    EXPECT(m, ART_EMODULE, "byte 0: not a wasm binary");
    m = new_module();
    m.bytes[4] = 0x0D;
    m.bytes[6] = 1;
    EXPECT(m, ART_EMODULE, "component");
    m = new_module();
    m.bytes[4] = 2;
    EXPECT(m, ART_EMODULE, "byte 4: unknown wasm version");
    m = new_module();
    m.len = 7;
    EXPECT(m, ART_EMODULE, "not a wasm binary");
}

static void test_sections(void)
{
    module m = new_module();
    SECTION(&m, 5, 1, 0, 1);
    SECTION(&m, 5, 1, 0, 1);
    EXPECT(m, ART_EMODULE, "byte 13: section 5 is out of order or there twice");
    m = new_module();
    SECTION(&m, 5, 1, 0, 1);
    SECTION(&m, 4, 1, 0x70, 0, 1);
    EXPECT(m, ART_EMODULE, "out of order");
    m = new_module();
    SECTION(&m, 14, 0);
    EXPECT(m, ART_EMODULE, "unknown section 14");
    m = new_module();
    SECTION(&m, 5, 1, 0, 1, 0);
    EXPECT(m, ART_EMODULE, "1 bytes too many in the memory section");
    m = new_module();
    SECTION(&m, 5, 1, 0, 1);
    m.bytes[9] = 100;
    EXPECT(m, ART_EMODULE, "past the end");
    m = new_module();
    SECTION(&m, 0, 200);
    EXPECT(m, ART_EMODULE, "byte 10: ");
    m = new_module();
    SECTION(&m, 1, 1, 0x60, 0, 0);
    SECTION(&m, 3, 2, 0, 0);
    EXPECT(m, ART_EMODULE, "0 function bodies for 2 functions");
}

static void test_unsupported(void)
{
    module m = new_module();
    SECTION(&m, 5, 1, 4, 1);
    EXPECT(m, ART_EMODULE, "64-bit memories");
    m = new_module();
    SECTION(&m, 5, 1, 3, 1, 1);
    EXPECT(m, ART_EMODULE, "shared memories");
    m = new_module();
    SECTION(&m, 5, 1, 8, 1, 0);
    EXPECT(m, ART_EMODULE, "custom page sizes");
    m = new_module();
    SECTION(&m, 5, 2, 0, 1, 0, 1);
    EXPECT(m, ART_EMODULE, "only one memory");
    m = new_module();
    SECTION(&m, 2, 1, 1, 'm', 1, 'n', 2, 0, 1);
    SECTION(&m, 5, 1, 0, 1);
    EXPECT(m, ART_EMODULE, "only one memory");
    m = new_module();
    SECTION(&m, 2, 1, 1, 'm', 1, 'n', 2, 4, 1);
    EXPECT(m, ART_EMODULE, "64-bit memories");
    m = new_module();
    SECTION(&m, 4, 1, 0x70, 4, 1);
    EXPECT(m, ART_EMODULE, "64-bit tables");
    m = new_module();
    SECTION(&m, 4, 1, 0x70, 2, 1);
    EXPECT(m, ART_EMODULE, "shared tables");
    m = new_module();
    SECTION(&m, 1, 1, 0x5F, 0);
    EXPECT(m, ART_EMODULE, "type form 0x5f");
    m = new_module();
    SECTION(&m, 1, 1, 0x4E, 0);
    EXPECT(m, ART_EMODULE, "type form 0x4e");
    EXPECT_CODE(ART_EMODULE, "garbage-collection", 0xFB, 0x1C);
    EXPECT_CODE(ART_EMODULE, "stack-switching instruction 0xe0", 0xE0, 0);
    EXPECT_CODE(ART_EMODULE, "unknown opcode 0x27", 0x27);
    EXPECT_CODE(ART_EMODULE, "unknown opcode 0xfc 0x12", 0xFC, 0x12, 0);
    EXPECT_CODE(ART_EMODULE, "unknown opcode 0xfc 0x17", 0xFC, 0x17);
    EXPECT_CODE(ART_EMODULE, "unknown opcode 0xfd 0x9a", 0xFD, 0x9A, 0x01);
    EXPECT_CODE(ART_EMODULE, "unknown opcode 0xfd 0x114", 0xFD, 0x94, 0x02);
    EXPECT_CODE(ART_EMODULE, "unknown opcode 0xfe 0x4f", 0xFE, 0x4F, 0, 0);
    EXPECT_CODE(ART_EMODULE, "memory index 1", 0xFC, 0x0B, 1);
    EXPECT_CODE(ART_EMODULE, "memory index 1", 0xFC, 0x0A, 0, 1);
    EXPECT_CODE(ART_EMODULE, "memory index 1", 0x28, 0x42, 1, 0);
}

/* An operation whose bytes stand inside another's immediates is no operation, and one behind them is. */
static void test_immediates(void)
{
#define FILL 0x41, 0, 0x41, 0, 0x41, 5, 0xFC, 0x0B, 0
#define FOUND(...)                                                                         \
    do {                                                                                   \
        static const uint8_t with_[] = { __VA_ARGS__, FILL }, without_[] = { __VA_ARGS__ };\
        art_rewrite_config cfg_ = small_chunks();                                          \
        module m_ = code_module(with_, sizeof with_);                                      \
        result r_ = run(m_.bytes, m_.len, &cfg_);                                          \
        CHECK_MSG(r_.rc == 0, "%s", r_.msg);                                               \
        CHECK(r_.len > m_.len + 50);                                                       \
        free(r_.out);                                                                      \
        m_ = code_module(without_, sizeof without_);                                       \
        r_ = run(m_.bytes, m_.len, &cfg_);                                                 \
        CHECK_MSG(r_.rc == 0 && r_.len == m_.len, "%s", r_.msg);                           \
        free(r_.out);                                                                      \
    } while (0)
    FOUND(0x01);
    FOUND(0x41, 0xFC, 0x8B, 0x00);                                      /* i32.const */
    FOUND(0x42, 0xFC, 0x8B, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00);  /* i64.const */
    FOUND(0x43, 0xFC, 0x0B, 0x00, 0x0B);                                /* f32.const */
    FOUND(0x44, 0xFC, 0x0B, 0x00, 0xFC, 0x0B, 0x00, 0xFC, 0x0B);        /* f64.const */
    FOUND(0xFD, 0x0C, 0xFC, 0x0B, 0, 0xFC, 0x0B, 0, 0xFC, 0x0B, 0, 0xFC, 0x0B, 0, 0xFC, 0x0B, 0, 0); /* v128.const */
    FOUND(0xFD, 0x15, 0xFC);                                            /* i8x16.extract_lane_s */
    FOUND(0xFD, 0x54, 0x00, 0xFC, 0x0B, 0x03);                          /* v128.load8_lane offset=0x5fc */
    FOUND(0xFD, 0xFF, 0x01);                                            /* f64x2.convert_low_i32x4_u */
    FOUND(0xFD, 0x93, 0x02);                                            /* the last relaxed one */
    FOUND(0xFE, 0x03, 0xFC);                                            /* atomic.fence */
    FOUND(0xFE, 0x4E, 0x02, 0xFC, 0x0B);                                /* i64.atomic.rmw32.cmpxchg_u */
    FOUND(0x28, 0x02, 0xFC, 0x8B, 0x00);                                /* i32.load */
    FOUND(0x0E, 0x02, 0x00, 0xFC, 0x00, 0x00);                          /* br_table */
    FOUND(0x1C, 0x01, 0x7F);                                            /* select t */
    FOUND(0x1C, 0x01, 0x63, 0x00);                                      /* select (ref null 0) */
    FOUND(0x02, 0x40, 0x0B);                                            /* block */
    FOUND(0x02, 0x63, 0x70, 0x0B);                                      /* block (result (ref null func)) */
    FOUND(0x02, 0x80, 0x80, 0x00, 0x0B);                                /* block (type 0), padded */
    FOUND(0x06, 0x40, 0x07, 0x7C, 0x19, 0x0B);                          /* try catch catch_all end */
    FOUND(0x06, 0x40, 0x18, 0x7C);                                      /* try delegate */
    FOUND(0x1F, 0x40, 0x04, 0, 1, 0, 1, 1, 0, 2, 0, 3, 0, 0x0B);        /* try_table, all four catches */
    FOUND(0x11, 0x00, 0xFC, 0x00);                                      /* call_indirect */
    FOUND(0x14, 0x00, 0x15, 0x00, 0x12, 0x00);                          /* call_ref, return_call_ref, return_call */
    FOUND(0xD0, 0x70, 0xD0, 0x00, 0xD2, 0x00, 0xD5, 0x7C, 0xD6, 0x7C);  /* reference instructions */
    FOUND(0xFC, 0x07, 0xFC, 0x09, 0x7C, 0xFC, 0x0D, 0x7C, 0xFC, 0x10, 0x7C, 0xFC, 0x13, 0xFC, 0x16);
    FOUND(0xFC, 0x90, 0x80, 0x80, 0x80, 0x00, 0x00);                    /* table.size, opcode padded */
#undef FOUND
    /* A constant count of at most one chunk needs no helper, one that only looks like it does. */
    art_rewrite_config cfg = small_chunks();
#define COUNT(helpers, ...)                                                              \
    do {                                                                                 \
        static const uint8_t code_[] = { __VA_ARGS__ };                                  \
        module m_ = code_module(code_, sizeof code_);                                    \
        result r_ = run(m_.bytes, m_.len, &cfg);                                         \
        CHECK_MSG(r_.rc == 0, "%s", r_.msg);                                             \
        CHECK_EQ(r_.len != m_.len, (helpers) != 0);                                      \
        free(r_.out);                                                                    \
    } while (0)
    cfg.memory_chunk_bytes = 8192;
    COUNT(0, 0x41, 0x00, 0xFC, 0x0B, 0);
    COUNT(0, 0x41, 0x80, 0xC0, 0x00, 0xFC, 0x0B, 0);             /* 8192 */
    COUNT(1, 0x41, 0x81, 0xC0, 0x00, 0xFC, 0x0B, 0);             /* 8193 */
    COUNT(0, 0x41, 0x84, 0x80, 0x80, 0x80, 0x00, 0xFC, 0x0B, 0); /* 4 */
    COUNT(1, 0x41, 0x84, 0x80, 0x80, 0x80, 0x08, 0xFC, 0x0B, 0); /* 2^31 + 4, not as it must be written */
    COUNT(1, 0x41, 0x84, 0x80, 0x80, 0x80, 0x78, 0xFC, 0x0B, 0); /* the same, as it must be */
    COUNT(1, 0x41, 0x7F, 0xFC, 0x0B, 0);                         /* -1 */
    COUNT(1, 0x41, 0x80, 0x40, 0xFC, 0x0B, 0);                   /* -8192 */
    COUNT(1, 0x41, 0x04, 0x01, 0xFC, 0x0B, 0);                   /* a nop between */
    COUNT(1, 0x41, 0x04, 0x0B, 0xFC, 0x0B, 0);                   /* an end: others may branch here */
    COUNT(1, 0x42, 0x04, 0xFC, 0x0B, 0);                         /* i64.const */
    COUNT(1, 0x20, 0x41, 0xFC, 0x0B, 0);                         /* local.get 0x41 */
    COUNT(1, 0xFC, 0x0B, 0);                                     /* the first instruction */
    COUNT(0, 0x41, 0x01, 0xFC, 0x0E, 0, 0);                      /* tables by entries */
    COUNT(1, 0x41, 0x02, 0xFC, 0x0E, 0, 0);
    COUNT(1, 0x41, 0x01, 0xFC, 0x0F, 0); /* a grow has a limit to keep */
#undef COUNT
    /* The opcode of the operation itself padded, and the longest index allowed. */
    static const uint8_t padded[] = { 0xFC, 0x8B, 0x80, 0x80, 0x80, 0x00, 0x80, 0x80, 0x80, 0x80, 0x00 };
    module m = code_module(padded, sizeof padded);
    result r = run(m.bytes, m.len, &cfg);
    CHECK(r.rc == 0 && r.len > m.len + 50);
    free(r.out);
    EXPECT_CODE(ART_EMODULE, "integer too long", 0xFC, 0x8B, 0x80, 0x80, 0x80, 0x80, 0x00, 0);
    EXPECT_CODE(ART_EMODULE, "integer too long", 0x41, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00);
    EXPECT_CODE(ART_EMODULE, "integer", 0xFC, 0x8B, 0x80, 0x80, 0x80, 0x10, 0);
    EXPECT_CODE(ART_EMODULE, "unknown catch kind", 0x1F, 0x40, 0x01, 4, 0);
    EXPECT_CODE(ART_EMODULE, "alignment", 0x28, 0x80, 0x01, 0);
    EXPECT_CODE(ART_EMODULE, "type byte 0x65", 0x02, 0x65, 0x0B);
    EXPECT_CODE(ART_EMODULE, "value type 0x65", 0x1C, 0x01, 0x65);
}

/* An index must not become good because of what is appended: 1 is the first helper's function and type. */
static void test_indices(void)
{
    EXPECT_CODE(0, "", FILL, 0x10, 0);
    EXPECT_CODE(ART_EMODULE, "unknown function 1", FILL, 0x10, 1);
    EXPECT_CODE(ART_EMODULE, "unknown function 1", FILL, 0x12, 1);
    EXPECT_CODE(ART_EMODULE, "unknown function 1", FILL, 0xD2, 1);
    EXPECT_CODE(ART_EMODULE, "unknown type 1", FILL, 0x02, 1, 0x0B);
    EXPECT_CODE(ART_EMODULE, "unknown type 1", FILL, 0x11, 1, 0);
    EXPECT_CODE(ART_EMODULE, "unknown type 1", FILL, 0x14, 1);
    EXPECT_CODE(ART_EMODULE, "unknown type 1", FILL, 0xD0, 1);
    EXPECT_CODE(ART_EMODULE, "unknown table 1", 0xFC, 0x11, 1);
    EXPECT_CODE(ART_EMODULE, "unknown table 1", 0xFC, 0x0E, 0, 1);
    EXPECT_CODE(ART_EMODULE, "unknown table 200", 0xFC, 0x0F, 0xC8, 0x01);
    EXPECT_CODE(ART_EMODULE, "unknown data segment 0", 0xFC, 0x08, 0, 0);
    EXPECT_CODE(ART_EMODULE, "unknown element segment 0", 0xFC, 0x0C, 0, 0);
#define HEAD(m)                              \
    module m = new_module();                 \
    SECTION(&m, 1, 1, 0x60, 0, 0)
#define TAIL(m) SECTION(&m, 10, 1, 11, 0, FILL, 0x0B)
    {
        HEAD(m);
        SECTION(&m, 3, 1, 0);
        SECTION(&m, 5, 1, 0, 1);
        SECTION(&m, 7, 1, 1, 'x', 0, 1);
        TAIL(m);
        EXPECT(m, ART_EMODULE, "unknown function 1");
    }
    {
        HEAD(m);
        SECTION(&m, 3, 1, 0);
        SECTION(&m, 5, 1, 0, 1);
        SECTION(&m, 8, 1);
        TAIL(m);
        EXPECT(m, ART_EMODULE, "unknown function 1");
    }
    {
        HEAD(m);
        SECTION(&m, 3, 1, 0);
        SECTION(&m, 5, 1, 0, 1);
        SECTION(&m, 9, 1, 1, 0, 1, 1);
        TAIL(m);
        EXPECT(m, ART_EMODULE, "unknown function 1");
    }
    {
        HEAD(m);
        SECTION(&m, 3, 1, 0);
        SECTION(&m, 5, 1, 0, 1);
        SECTION(&m, 6, 1, 0x70, 0, 0xD2, 1, 0x0B);
        TAIL(m);
        EXPECT(m, ART_EMODULE, "unknown function 1");
    }
    {
        HEAD(m);
        SECTION(&m, 3, 1, 1);
        SECTION(&m, 5, 1, 0, 1);
        TAIL(m);
        EXPECT(m, ART_EMODULE, "unknown type 1");
    }
    {
        HEAD(m);
        SECTION(&m, 3, 1, 0);
        TAIL(m);
        EXPECT(m, ART_EMODULE, "without memory");
    }
#undef HEAD
#undef TAIL
#undef FILL
}

/* Counts of 2^32-1 with nothing behind them: refused at once, without an allocation or a loop of that size. */
static void test_absurd_counts(void)
{
#define HUGE 0xFF, 0xFF, 0xFF, 0xFF, 0x0F
#define SECTION_OF(id, rc, ...)                \
    do {                                       \
        module m_ = new_module();              \
        SECTION(&m_, (id), __VA_ARGS__);       \
        EXPECT(m_, (rc), "byte ");             \
    } while (0)
    SECTION_OF(1, ART_ELIMIT, HUGE);
    SECTION_OF(1, ART_EMODULE, 1, 0x60, HUGE);
    SECTION_OF(2, ART_ELIMIT, HUGE);
    SECTION_OF(2, ART_EMODULE, 1, HUGE);
    SECTION_OF(3, ART_ELIMIT, HUGE);
    SECTION_OF(4, ART_ELIMIT, HUGE);
    SECTION_OF(4, ART_ELIMIT, 1, 0x70, 0, HUGE);
    SECTION_OF(5, ART_EMODULE, HUGE);
    SECTION_OF(6, ART_EMODULE, HUGE);
    SECTION_OF(7, ART_EMODULE, HUGE);
    SECTION_OF(9, ART_ELIMIT, HUGE);
    SECTION_OF(9, ART_EMODULE, 1, 1, 0, HUGE);
    SECTION_OF(10, ART_EMODULE, HUGE);
    SECTION_OF(11, ART_ELIMIT, HUGE);
    SECTION_OF(11, ART_EMODULE, 1, 1, HUGE);
    SECTION_OF(13, ART_EMODULE, HUGE);
    EXPECT_CODE(ART_EMODULE, "byte ", 0x0E, HUGE);
    EXPECT_CODE(ART_EMODULE, "byte ", 0x1C, HUGE);
    EXPECT_CODE(ART_EMODULE, "byte ", 0x1F, 0x40, HUGE);
#undef SECTION_OF
#undef HUGE
    module m = new_module();
    SECTION(&m, 4, 1, 0x70, 0, 101);
    EXPECT(m, ART_ELIMIT, "table 0 starts with 101 entries, at most 100");
}

/* Every form of import, table, segment and tag that carries no operation: read to the end and given back as it was. */
static void test_section_forms(void)
{
    art_rewrite_config cfg = small_chunks();
    module m = new_module();
    SECTION(&m, 1, 1, 0x60, 2, 0x7B, 0x64, 0, 1, 0x63, 0x70);
    SECTION(&m, 2, 5, 1, 'm', 1, 'f', 0, 0, 1, 'm', 1, 't', 1, 0x6F, 1, 1, 9, 0, 0, 2, 0, 1, 1, 'm', 1, 'g', 3, 0x63, 0, 1, 1,
            'm', 1, 'e', 4, 0, 0);
    SECTION(&m, 4, 2, 0x70, 0, 1, 0x40, 0, 0x64, 0, 0, 1, 0xD2, 0, 0x0B);
    SECTION(&m, 13, 1, 0, 0);
    SECTION(&m, 6, 1, 0x7F, 0, 0x41, 1, 0x41, 2, 0x6A, 0x0B);
    SECTION(&m, 7, 2, 1, 'a', 0, 0, 1, 'b', 4, 1);
    SECTION(&m, 8, 0);
    SECTION(&m, 9, 8, 0, 0x41, 0, 0x0B, 1, 0, 1, 0, 0, 2, 1, 0x41, 0, 0x0B, 0, 1, 0, 3, 0, 0, 4, 0x41, 0, 0x0B, 1, 0xD2, 0, 0x0B,
            5, 0x70, 1, 0xD0, 0x70, 0x0B, 6, 1, 0x41, 0, 0x0B, 0x63, 0x70, 0, 7, 0x70, 0);
    SECTION(&m, 12, 3);
    SECTION(&m, 11, 3, 0, 0x41, 0, 0x0B, 1, 'x', 1, 2, 'y', 'z', 2, 0, 0x23, 0, 0x0B, 0);
    result r = run(m.bytes, m.len, &cfg);
    CHECK_MSG(r.rc == 0, "%s", r.msg);
    CHECK(r.len == m.len && memcmp(r.out, m.bytes, m.len) == 0);
    free(r.out);

    m = new_module();
    SECTION(&m, 2, 1, 1, 'm', 1, 'f', 5, 0);
    EXPECT(m, ART_EMODULE, "unknown import kind");
    m = new_module();
    SECTION(&m, 2, 1, 1, 'm', 0, 0x7F, 0);
    EXPECT(m, ART_EMODULE, "imports in groups");
    m = new_module();
    SECTION(&m, 9, 1, 8);
    EXPECT(m, ART_EMODULE, "unknown element segment flags");
    m = new_module();
    SECTION(&m, 11, 1, 3);
    EXPECT(m, ART_EMODULE, "unknown data segment flags");
    m = new_module();
    SECTION(&m, 11, 1, 2, 1, 0x41, 0, 0x0B, 0);
    EXPECT(m, ART_EMODULE, "memory index 1");
    m = new_module();
    SECTION(&m, 4, 60, 0x70, 0, 0);
    EXPECT(m, ART_EMODULE, "byte 14: ");
}

/* A name section that does not parse is nobody's reason to refuse, and is kept to the byte. */
static void test_broken_names(void)
{
    static const uint8_t fill[] = { 0x41, 0, 0x41, 0, 0x41, 5, 0xFC, 0x0B, 0 };
    static const struct {
        uint8_t bytes[12];
        uint8_t n;
        bool extended;
    } subsections[] = {
        { { 1, 4, 1, 0, 1, 'a' }, 6, true },         { { 1, 1, 0 }, 3, true },
        { { 0, 2, 1, 'm', 1, 1, 0 }, 7, true },      { { 1, 4, 1, 1, 1, 'a' }, 6, false }, /* names the helper's index */
        { { 1, 4, 2, 0, 1, 'a' }, 6, false },        { { 1, 5, 1, 0, 1, 'a', 0 }, 7, false },
        { { 1, 100, 1, 0, 1, 'a' }, 6, false },      { { 1 }, 1, false },
        { { 1, 3, 1, 0, 99 }, 5, false },            { { 0 }, 0, false },
    };
    art_rewrite_config cfg = small_chunks();
    for (size_t i = 0; i < sizeof subsections / sizeof *subsections; i++) {
        module m = code_module(fill, sizeof fill);
        uint8_t content[20] = { 4, 'n', 'a', 'm', 'e' };
        memcpy(content + 5, subsections[i].bytes, subsections[i].n);
        add_section(&m, 0, content, 5u + subsections[i].n);
        result r = run(m.bytes, m.len, &cfg);
        CHECK_EQ(r.rc, 0);
        CHECK_EQ(contains(r.out, r.len, "agentrt.memory.fill"), subsections[i].extended);
        size_t n = 5u + subsections[i].n;
        if (!subsections[i].extended)
            CHECK(memcmp(r.out + r.len - n, content, n) == 0);
        free(r.out);
    }
}

int main(void)
{
    test_sample();
    test_operations_within_one_chunk_stay();
    test_nothing_to_do();
    test_truncations();
    test_mutations();
    test_output_bound();
    test_arguments();
    test_header();
    test_sections();
    test_unsupported();
    test_immediates();
    test_indices();
    test_absurd_counts();
    test_section_forms();
    test_broken_names();
    return 0;
}
