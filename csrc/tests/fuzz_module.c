/* libFuzzer entry for the registration of modules, end to end: rewrite, compile, load, and a run with little fuel. Any bytes
 * give one of the documented errors with a message, or a guest that ends; a valid module stays valid when it is rewritten, an
 * invalid one invalid; and what a run computes is the same for every micro-slice, and without the rewrite. Seeds:
 * corpus/module, corpus/rewrite, tests/guests. Needs AGENTRT_WASMTIME_LIB.
 *
 * The mutator knows sections and function bodies, keeps their lengths right, and knows a few instructions. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memmem */
#endif
#include "art_err.h"
#include "boot.h"
#include "guest_internal.h"
#include "rewrite.h"

#include "fuzz_kit.h"

#include <dlfcn.h>
#include <string.h>

enum { FUEL = 300000, BYTES_MAX = 4096, SECTIONS_MAX = 64, TRAP_STACK_OVERFLOW = 0 };

static art_engine *engine;
static wasmtime_error_t *(*validate)(wasm_engine_t *, const uint8_t *, size_t);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    art_engine_config config = fuzz_engine_config();
    engine = fuzz_engine(config);
    void *library = dlopen(config.library, RTLD_NOW);
    if (library) {
        *(void **)&validate = dlsym(library, "wasmtime_module_validate");
    }
    require(validate, "wasmtime_module_validate");
    return 0;
}

/* --- running ------------------------------------------------------------------ */

typedef struct ending {
    art_guest *guest;
    art_exit exit;
    uint64_t fuel;
    bool booted; /* it stood where its boot is over, and was killed there */
} ending;

static ending run_to(art_module *module, uint64_t slice, art_boot boot)
{
    art_fuel_account fuel;
    art_fuel_init(&fuel, FUEL, true);
    art_guest_config config = {
        .module = module, .fuel = &fuel, .input = "{}", .input_len = 2, .clock_ns = 1, .micro_slice_fuel = slice,
        .boot = boot};
    ending ending = {0};
    require(art_guest_create(&config, &ending.guest) == 0, "a guest");
    art_guest_outcome outcome;
    do {
        outcome = art_guest_poll(ending.guest);
        require(outcome != ART_GUEST_NO_FUEL, "the grant was final");
    } while (outcome == ART_GUEST_YIELD);
    require(outcome != ART_GUEST_SAFE_POINT || boot != ART_BOOT_NOT, "nobody asked it to stop");
    ending.booted = outcome == ART_GUEST_SAFE_POINT;
    if (outcome == ART_GUEST_WAIT || ending.booted) {
        art_guest_kill(ending.guest);
    }
    ending.exit = art_guest_exit(ending.guest);
    ending.fuel = art_guest_fuel_used(ending.guest);
    require(ending.exit.reason < ART_EXIT_TRAP || ending.exit.reason == ART_EXIT_KILLED || ending.exit.message[0],
            "a fault with a message");
    fuzz_check_fuel(&fuel);
    return ending;
}

static ending run(art_module *module, uint64_t slice)
{
    return run_to(module, slice, ART_BOOT_NOT);
}

static void check_same(ending one, ending two, const char *what)
{
    require(one.exit.reason == two.exit.reason && one.exit.code == two.exit.code, what);
    require((one.exit.output != NULL) == (two.exit.output != NULL) && one.exit.output_len == two.exit.output_len &&
                (!one.exit.output_len || memcmp(one.exit.output, two.exit.output, one.exit.output_len) == 0),
            what);
}

/* The module as it came, compiled without the rewrite. */
static art_module *load_plain(const uint8_t *wasm, size_t len)
{
    const art__wasmtime *w = engine->w;
    wasmtime_module_t *made = NULL;
    art_module *module = NULL;
    wasm_byte_vec_t artifact;
    char msg[ART_MSG_BYTES];
    require(!w->wasmtime_module_new(engine->engine, wasm, len, &made), "the module is valid");
    require(!w->wasmtime_module_serialize(made, &artifact), "an artifact");
    w->wasmtime_module_delete(made);
    if (art_module_load(engine, (const uint8_t *)artifact.data, artifact.size, &module, msg, sizeof msg) != 0) {
        module = NULL;
    }
    w->wasm_byte_vec_delete(&artifact);
    return module;
}

static bool mentions(const uint8_t *data, size_t size, const char *text)
{
    return memmem(data, size, text, strlen(text)) != NULL;
}

static void run_all(art_module *module, const uint8_t *data, size_t size)
{
    ending one = run(module, 50000), two = run(module, 997);
    check_same(one, two, "one end, whatever the micro-slice");
    require(one.fuel == two.fuel, "one amount of fuel");
    bool exhausted = one.exit.reason == ART_EXIT_FUEL ||
                     (one.exit.reason == ART_EXIT_TRAP && one.exit.code == TRAP_STACK_OVERFLOW);
    /* clocks show fuel; the rewrite's helpers take some, and stack */
    if (art_module_is_agent(module) && !exhausted && !mentions(data, size, "clock") && !mentions(data, size, "poll_")) {
        art_module *plain = load_plain(data, size);
        if (plain) { /* a table over the limit is refused by one only */
            ending three = run(plain, 50000);
            if (three.exit.reason != ART_EXIT_FUEL) {
                check_same(one, three, "one end, with and without the rewrite");
            }
            art_guest_destroy(three.guest);
            art_module_release(plain);
        }
    }
    art_guest_destroy(one.guest);
    art_guest_destroy(two.guest);
}

/* Guests that stop where an image of them would begin, and guests that begin with what the input says is their image. */
static void run_boots(art_module *module, const uint8_t *data, size_t size)
{
    static const art_boot boots[] = {ART_BOOT_AT_REST, ART_BOOT_AT_INPUT};
    for (size_t i = 0; i < sizeof boots / sizeof *boots; i++) {
        ending one = run_to(module, 50000, boots[i]), two = run_to(module, 997, boots[i]);
        require(one.booted == two.booted && one.fuel == two.fuel, "one boot, whatever the micro-slice");
        check_same(one, two, "one end of a boot");
        art_guest_destroy(one.guest);
        art_guest_destroy(two.guest);
    }
    /* version, what it has seen, four arguments; lengths of the stack and of WASI's state; the stack, and that */
    uint8_t begin[40 + 256] = {1};
    char msg[ART_MSG_BYTES] = "";
    size_t taken = size < 256 ? size & ~(size_t)7 : 256;
    uint64_t stack_len = size & 8 ? taken : taken / 16 * 8, wasi_len = taken - stack_len;
    memcpy(begin + 24, &stack_len, 8);
    memcpy(begin + 32, &wasi_len, 8);
    memcpy(begin + 40, data + size - taken, taken);
    int rc = art_module_begin_at(module, begin, 40 + taken, msg, sizeof msg);
    require(rc == 0 || (rc == ART_EMODULE && msg[0]), "a beginning, or an error with a message");
    if (rc == 0) {
        ending one = run(module, 50000), two = run(module, 997);
        check_same(one, two, "one end from where an image begins");
        require(one.fuel == two.fuel, "arriving is free, whatever the micro-slice");
        art_guest_destroy(one.guest);
        art_guest_destroy(two.guest);
    }
}

static bool is_valid(const uint8_t *wasm, size_t len)
{
    wasmtime_error_t *error = validate(engine->engine, wasm, len);
    if (error) {
        engine->w->wasmtime_error_delete(error);
    }
    return !error;
}

/* The engine's validation knows proposals that its compiler does not (imports in groups). */
static bool compiles(const uint8_t *wasm, size_t len)
{
    wasmtime_module_t *module = NULL;
    wasmtime_error_t *error = engine->w->wasmtime_module_new(engine->engine, wasm, len, &module);
    if (error) {
        engine->w->wasmtime_error_delete(error);
        return false;
    }
    engine->w->wasmtime_module_delete(module);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char msg[ART_MSG_BYTES] = "";
    art_rewrite_config rewrite;
    art_rewrite_config_default(&rewrite);
    rewrite.table_elements_max = engine->config.table_elements_max;
    uint8_t *code = NULL, *artifact = NULL;
    size_t code_len = 0, len = 0;
    int rc = art_rewrite(data, size, &rewrite, &code, &code_len, msg, sizeof msg);
    bool valid = is_valid(data, size);
    if (rc != 0) {
        require(!valid || rc == ART_ELIMIT || !compiles(data, size), "what the engine compiles is taken, within the limits");
    } else {
        require(is_valid(code, code_len) == valid, "as valid as it was");
        free(code);
    }
    int compiled = art_engine_compile(engine, data, size, &artifact, &len, msg, sizeof msg);
    if (compiled != 0) {
        require((compiled == ART_EMODULE || compiled == ART_ELIMIT) && msg[0], "an error of a compilation");
        return 0;
    }
    require(valid, "compiled because it is valid");
    art_module *module = NULL;
    rc = art_module_load(engine, artifact, len, &module, msg, sizeof msg);
    if (rc == ART_EENTRY) {
        require(!module && msg[0], "an error with a message");
        rc = art_module_load_reactor(engine, artifact, len, "main", &module, msg, sizeof msg);
    }
    free(artifact);
    if (rc != 0) {
        require((rc == ART_EIMPORT || rc == ART_EENTRY || rc == ART_ELIMIT) && !module && msg[0], "an error of a load");
        return 0;
    }
    run_all(module, data, size);
    run_boots(module, data, size);
    art_module_release(module);
    return 0;
}

/* --- mutating ----------------------------------------------------------------- */

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerCustomCrossOver(const uint8_t *one, size_t one_len, const uint8_t *two, size_t two_len, uint8_t *out,
                                 size_t out_max, unsigned seed);

typedef struct part {
    uint8_t id; /* of a section */
    const uint8_t *data;
    size_t len;
} part;

typedef struct parts {
    part at[SECTIONS_MAX];
    size_t count;
} parts;

typedef struct buffer {
    uint8_t data[2 * BYTES_MAX];
    size_t len;
} buffer;

static uint32_t random_below(unsigned *seed, size_t n)
{
    *seed = *seed * 1664525 + 1013904223;
    return n ? (uint32_t)((*seed >> 8) % n) : 0;
}

static bool read_leb(const uint8_t *data, size_t len, size_t *at, uint32_t *out)
{
    *out = 0;
    for (int shift = 0; shift < 35 && *at < len; shift += 7) {
        uint8_t byte = data[(*at)++];
        *out |= (uint32_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return true;
        }
    }
    return false;
}

static void put(buffer *out, const void *data, size_t len)
{
    if (len <= sizeof out->data - out->len) {
        memcpy(out->data + out->len, data, len);
        out->len += len;
    }
}

static void put_leb(buffer *out, size_t value)
{
    uint8_t byte;
    do {
        byte = (value & 0x7f) | (value > 0x7f ? 0x80 : 0);
        put(out, &byte, 1);
        value >>= 7;
    } while (value);
}

static bool split_sections(const uint8_t *data, size_t len, parts *out)
{
    size_t at = 8;
    uint32_t size;
    out->count = 0;
    while (at < len && out->count < SECTIONS_MAX) {
        uint8_t id = data[at++];
        if (!read_leb(data, len, &at, &size) || size > len - at) {
            return false;
        }
        out->at[out->count++] = (part){id, data + at, size};
        at += size;
    }
    return out->count > 0 && len >= 8;
}

static bool split_bodies(part code, parts *out)
{
    size_t at = 0;
    uint32_t count, size;
    out->count = 0;
    if (!read_leb(code.data, code.len, &at, &count)) {
        return false;
    }
    while (at < code.len && out->count < SECTIONS_MAX) {
        if (!read_leb(code.data, code.len, &at, &size) || size > code.len - at) {
            return false;
        }
        out->at[out->count++] = (part){0, code.data + at, size};
        at += size;
    }
    return out->count > 0;
}

static void join_bodies(const parts *bodies, buffer *out)
{
    out->len = 0;
    put_leb(out, bodies->count);
    for (size_t i = 0; i < bodies->count; i++) {
        put_leb(out, bodies->at[i].len);
        put(out, bodies->at[i].data, bodies->at[i].len);
    }
}

static size_t join_sections(const uint8_t *header, const parts *sections, uint8_t *to, size_t max)
{
    static buffer out;
    out.len = 0;
    put(&out, header, 8);
    for (size_t i = 0; i < sections->count; i++) {
        put(&out, &sections->at[i].id, 1);
        put_leb(&out, sections->at[i].len);
        put(&out, sections->at[i].data, sections->at[i].len);
    }
    size_t len = out.len < max ? out.len : max;
    memcpy(to, out.data, len);
    return len;
}

/* Instructions that are valid almost anywhere, and the ones that the rewrite replaces. */
static const struct snippet {
    uint8_t len, bytes[14];
} snippets[] = {
    {1, {0x01}},                                                              /* nop */
    {1, {0x00}},                                                              /* unreachable */
    {1, {0x1a}},                                                              /* drop */
    {1, {0x0f}},                                                              /* return */
    {2, {0x41, 0x00}},                                                        /* i32.const 0 */
    {2, {0x41, 0x7f}},                                                        /* i32.const -1 */
    {4, {0x41, 0x80, 0x80, 0x04}},                                            /* i32.const 65536 */
    {3, {0x42, 0x00, 0x1a}},                                                  /* i64.const 0, drop */
    {2, {0x20, 0x00}},                                                        /* local.get 0 */
    {2, {0x10, 0x00}},                                                        /* call 0 */
    {2, {0x0c, 0x00}},                                                        /* br 0 */
    {3, {0x02, 0x40, 0x0b}},                                                  /* block end */
    {3, {0x03, 0x40, 0x0b}},                                                  /* loop end */
    {5, {0x03, 0x40, 0x0c, 0x00, 0x0b}},                                      /* loop br 0 end */
    {10, {0x41, 0x00, 0x41, 0x07, 0x41, 0x08, 0xfc, 0x0b, 0x00, 0x01}},       /* memory.fill, nop */
    {11, {0x41, 0x04, 0x41, 0x00, 0x41, 0xe4, 0x00, 0xfc, 0x0a, 0x00, 0x00}}, /* memory.copy */
    {10, {0x41, 0x00, 0x41, 0x00, 0x41, 0x03, 0xfc, 0x08, 0x00, 0x00}},       /* memory.init 0 */
    {3, {0xfc, 0x09, 0x00}},                                                  /* data.drop 0 */
    {10, {0x41, 0x00, 0x41, 0x00, 0x41, 0x02, 0xfc, 0x0c, 0x00, 0x00}},       /* table.init 0 0 */
    {3, {0xfc, 0x0d, 0x00}},                                                  /* elem.drop 0 */
    {10, {0x41, 0x01, 0x41, 0x00, 0x41, 0x02, 0xfc, 0x0e, 0x00, 0x00}},       /* table.copy 0 0 */
    {8, {0xd0, 0x70, 0x41, 0x32, 0xfc, 0x0f, 0x00, 0x1a}},                    /* table.grow 0 by 50, drop */
    {9, {0x41, 0x00, 0xd0, 0x70, 0x41, 0x02, 0xfc, 0x11, 0x00}},              /* table.fill 0 */
    {5, {0x41, 0x01, 0x40, 0x00, 0x1a}},                                      /* memory.grow 1, drop */
    {4, {0x3f, 0x00, 0x1a, 0x01}},                                            /* memory.size, drop, nop */
};

static size_t mutate_body(part body, uint8_t *to, size_t max, unsigned *seed)
{
    memcpy(to, body.data, body.len);
    if (random_below(seed, 3) == 0) {
        return LLVMFuzzerMutate(to, body.len, max);
    }
    const struct snippet *s = &snippets[random_below(seed, sizeof snippets / sizeof *snippets)];
    if (body.len + s->len > max || body.len < 2) {
        return body.len;
    }
    size_t at = 1 + random_below(seed, body.len - 1); /* after the count of locals, before the end */
    memmove(to + at + s->len, to + at, body.len - at);
    memcpy(to + at, s->bytes, s->len);
    return body.len + s->len;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    static parts sections, bodies;
    static buffer code;
    static uint8_t changed[BYTES_MAX];
    random_below(&seed, 1);
    if (size > BYTES_MAX || !split_sections(data, size, &sections) || random_below(&seed, 8) == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    part *one = &sections.at[random_below(&seed, sections.count)];
    for (size_t i = 0; i < sections.count && random_below(&seed, 2); i++) { /* most of what can happen is in code */
        one = sections.at[i].id == 10 ? &sections.at[i] : one;
    }
    switch (random_below(&seed, 10)) {
    case 0:
        memmove(one, one + 1, (size_t)(&sections.at[--sections.count] - one) * sizeof *one);
        break;
    case 1: {
        part *other = &sections.at[random_below(&seed, sections.count)], held = *one;
        *one = *other;
        *other = held;
        break;
    }
    case 2:
        if (sections.count < SECTIONS_MAX) {
            sections.at[sections.count++] = *one;
        }
        break;
    default:
        if (one->id == 10 && split_bodies(*one, &bodies)) {
            part *body = &bodies.at[random_below(&seed, bodies.count)];
            if (body->len <= BYTES_MAX / 2) {
                *body = (part){0, changed, mutate_body(*body, changed, BYTES_MAX, &seed)};
                join_bodies(&bodies, &code);
                *one = (part){10, code.data, code.len};
            }
        } else {
            memcpy(changed, one->data, one->len);
            *one = (part){one->id, changed, LLVMFuzzerMutate(changed, one->len, BYTES_MAX)};
        }
    }
    return join_sections(data, &sections, data, max_size);
}

/* The first module with a section of the second, or with one of its functions. */
size_t LLVMFuzzerCustomCrossOver(const uint8_t *one, size_t one_len, const uint8_t *two, size_t two_len, uint8_t *out,
                                 size_t out_max, unsigned seed)
{
    static parts sections, others, bodies, other_bodies;
    static buffer code;
    random_below(&seed, 1);
    if (one_len > BYTES_MAX || two_len > BYTES_MAX || !split_sections(one, one_len, &sections) ||
        !split_sections(two, two_len, &others)) {
        return 0;
    }
    part given = others.at[random_below(&seed, others.count)];
    size_t at = 0;
    while (at < sections.count && sections.at[at].id < given.id) {
        at++;
    }
    bool has = at < sections.count && sections.at[at].id == given.id;
    if (has && given.id == 10 && random_below(&seed, 2) && split_bodies(sections.at[at], &bodies) &&
        split_bodies(given, &other_bodies)) {
        bodies.at[random_below(&seed, bodies.count)] = other_bodies.at[random_below(&seed, other_bodies.count)];
        join_bodies(&bodies, &code);
        given = (part){10, code.data, code.len};
    } else if (!has && sections.count < SECTIONS_MAX) {
        memmove(&sections.at[at + 1], &sections.at[at], (sections.count++ - at) * sizeof(part));
    } else if (!has) {
        return 0;
    }
    sections.at[at] = given;
    return join_sections(one, &sections, out, out_max);
}
