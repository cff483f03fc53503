/* The same module, input and journal give the same fuel, memory, globals, output, exit and syscalls, whatever interrupts the
 * guest, and wherever it is when it is told to unwind: 10,000 patterns of micro-slices, workers, preemptions, quanta, pieces of fuel and times of answers, each compared with the
 * same guest run alone in one piece. guest.c and worker.c are compiled in: their polls are given random micro-slices
 * and forced ends of quanta. AGENTRT_TEST_SEED repeats a run, AGENTRT_TEST_PATTERNS says how many patterns. Needs
 * AGENTRT_WASMTIME_LIB. */
struct art_guest;
static void ending(struct art_guest *guest);
#define ART_GUEST_ENDING(guest) ending(guest)
#include "../guest.c"

static art_guest_outcome poll_at_random(art_guest *guest);
static void pace_at_random(art_guest *guest, uint64_t took_ns);
#define art_guest_poll poll_at_random
#define art_guest_pace pace_at_random
#define CLOCK_EVERY 1
#include "../worker.c"
#undef art_guest_poll
#undef art_guest_pace

#include <dlfcn.h>
#include <poll.h>

#include "check.h"
#include "guests.h"

/* Configs name what matters. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

enum { IN_FLIGHT = 16, PER_POOL = 50, URGENT_MAX = 8, WATCHDOG_MS = 60000, HELD_MAX = 8, PATTERNS = 10000 };
#define PLENTY (UINT64_C(1) << 50)

/* --- guests --------------------------------------------------------------------- */

/* Works, so that the last write-back of fuel before a trap depends on the micro-slice, then ends in the way that is asked
 * for. Input: u32 work before a syscall, its number, work after it, the fate. */
enum fate {
    RETURNS, FAILS, UNREACHABLE, LOAD_OUTSIDE, STORE_OUTSIDE, DIVIDES_BY_ZERO, OVERFLOWS, CONVERTS_NAN, RECURSES,
    RECURSES_BY_REF, CALLS_NULL, CALLS_WRONG_TYPE, CALLS_OUTSIDE, GETS_OUTSIDE, FILLS_OUTSIDE, COPIES_OUTSIDE, INITS_OUTSIDE,
    THROWS, THROWS_NULL, REFERS_NULL, CALLS_REF_NULL, FATES
};
static const char fates_wat[] =
    "(module"
    " (import \"agentrt\" \"input\" (func $input (param i32 i32 i32) (result i32)))"
    " (import \"agentrt\" \"call\" (func $call (param i32 i32 i32 i32 i32) (result i32)))"
    " (memory (export \"memory\") 1) (global $x (export \"x\") (mut i32) (i32.const 1))"
    " (type $unary (func (param i32) (result i32))) (type $none (func))"
    " (table $t 4 funcref) (elem (i32.const 1) $deep) (elem declare func $deep_ref) (data $d \"abc\") (tag $e (param i32))"
    " (func $deep (type $unary) (drop (call $work (i32.const 3)))"
    "  (i32.add (i32.const 1) (call $deep (i32.add (local.get 0) (i32.const 1)))))"
    " (func $deep_ref (type $unary) (drop (call $work (i32.const 3)))"
    "  (i32.add (i32.const 1) (call_ref $unary (i32.add (local.get 0) (i32.const 1)) (ref.func $deep_ref))))"
    " (func $work (param $n i32) (result i32)"
    "  (block $out (loop $more (br_if $out (i32.eqz (local.get $n)))"
    "   (global.set $x (i32.add (i32.mul (global.get $x) (i32.const 1664525)) (i32.const 1013904223)))"
    "   (i32.store (i32.and (global.get $x) (i32.const 0xfff0)) (global.get $x))"
    "   (local.set $n (i32.sub (local.get $n) (i32.const 1))) (br $more))) (global.get $x))"
    " (func (export \"agentrt_run\") (result i32) (local $n i32) (local $calls i32) (local $fate i32)"
    "  (drop (call $input (i32.const 0) (i32.const 0) (i32.const 16)))"
    "  (local.set $calls (i32.load (i32.const 4))) (local.set $n (i32.load (i32.const 8)))"
    "  (local.set $fate (i32.load (i32.const 12)))"
    "  (drop (call $work (i32.load (i32.const 0))))"
    "  (block $called (loop $again (br_if $called (i32.eqz (local.get $calls)))"
    "   (drop (call $call (i32.const 1) (i32.const 0) (i32.const 16) (i32.const 64) (i32.const 64)))"
    "   (drop (call $work (i32.and (i32.load (i32.const 64)) (i32.const 255))))"
    "   (local.set $calls (i32.sub (local.get $calls) (i32.const 1))) (br $again)))"
    "  (block $out (loop $more (br_if $out (i32.eqz (local.get $n)))" /* in this function: no call writes fuel back */
    "   (global.set $x (i32.add (i32.mul (global.get $x) (i32.const 22695477)) (i32.const 1)))"
    "   (local.set $n (i32.sub (local.get $n) (i32.const 1))) (br $more)))"
    "  (block $f20 (block $f19 (block $f18 (block $f17 (block $f16 (block $f15 (block $f14 (block $f13 (block $f12 (block $f11"
    "  (block $f10 (block $f9 (block $f8 (block $f7 (block $f6 (block $f5 (block $f4 (block $f3 (block $f2 (block $f1 (block $f0"
    "   (br_table $f0 $f1 $f2 $f3 $f4 $f5 $f6 $f7 $f8 $f9 $f10 $f11 $f12 $f13 $f14 $f15 $f16 $f17 $f18 $f19 $f20 (local.get $fate)))"
    "   (return (i32.const 0)))"
    "   (return (i32.const 42)))"
    "   unreachable)"
    "   (return (i32.load (i32.const 65535))))"
    "   (i64.store (i32.const -1) (i64.const 1)) (return (i32.const 0)))"
    "   (return (i32.div_u (local.get $fate) (local.get $n))))"
    "   (return (i32.div_s (i32.const 0x80000000) (i32.sub (local.get $n) (i32.const 1)))))"
    "   (return (i32.trunc_f64_s (f64.div (f64.const 0) (f64.convert_i32_u (local.get $n))))))"
    "   (return (call $deep (i32.const 0))))"
    "   (return (call $deep_ref (i32.const 0))))"
    "   (return (call_indirect (type $unary) (i32.const 0) (i32.add (local.get $n) (i32.const 2)))))"
    "   (call_indirect (type $none) (i32.add (local.get $n) (i32.const 1))) (return (i32.const 0)))"
    "   (return (call_indirect (type $unary) (i32.const 0) (i32.add (local.get $n) (i32.const 4)))))"
    "   (return (ref.is_null (table.get $t (i32.add (local.get $n) (i32.const 4))))))"
    "   (memory.fill (i32.add (local.get $n) (i32.const 60000)) (i32.const 1) (i32.const 10000)) (return (i32.const 0)))"
    "   (memory.copy (i32.add (local.get $n) (i32.const 60000)) (local.get $n) (i32.const 10000)) (return (i32.const 0)))"
    "   (memory.init $d (i32.const 0) (i32.const 2) (i32.add (local.get $n) (i32.const 2))) (return (i32.const 0)))"
    "   (throw $e (i32.const 5)))"
    "   (throw_ref (ref.null exn)))"
    "   (return (call_ref $unary (i32.const 0) (ref.as_non_null (ref.null $unary)))))"
    "  (call_ref $unary (i32.const 0) (ref.null $unary))))";

/* Whatever may lose count of fuel: exceptions over calls, calls by reference, tail calls, bulk operations, growth, SIMD; clock and
 * randomness, whose values depend on it. Input: u32 rounds. */
static const char mixed_wat[] =
    "(module"
    " (import \"agentrt\" \"input\" (func $input (param i32 i32 i32) (result i32)))"
    " (import \"agentrt\" \"output\" (func $output (param i32 i32) (result i32)))"
    " (import \"agentrt\" \"clock_now\" (func $clock (result i64)))"
    " (import \"agentrt\" \"random\" (func $random (param i32 i32) (result i32)))"
    " (memory (export \"memory\") 2 8) (global $x (export \"x\") (mut i64) (i64.const 88172645463325252))"
    " (global $f (export \"f\") (mut f64) (f64.const 1.5)) (global $v (mut v128) (v128.const i32x4 1 2 3 4))"
    " (type $unary (func (param i32) (result i32))) (tag $e (param i32)) (table $t 8 100 funcref)"
    " (elem (i32.const 0) $fib $odd $throws $fib) (elem declare func $fib $odd $throws)"
    " (data $d \"the quick brown fox jumps over the lazy dog\")"
    " (func $next (result i32)"
    "  (global.set $x (i64.xor (global.get $x) (i64.shl (global.get $x) (i64.const 13))))"
    "  (global.set $x (i64.xor (global.get $x) (i64.shr_u (global.get $x) (i64.const 7))))"
    "  (global.set $x (i64.xor (global.get $x) (i64.shl (global.get $x) (i64.const 17))))"
    "  (global.set $f (f64.sqrt (f64.add (global.get $f) (f64.convert_i64_u (global.get $x)))))"
    "  (i32.wrap_i64 (i64.shr_u (global.get $x) (i64.const 20))))"
    " (func $fib (type $unary) (if (i32.lt_u (local.get 0) (i32.const 2)) (then (return (local.get 0))))"
    "  (i32.add (call $fib (i32.sub (local.get 0) (i32.const 1))) (call $fib (i32.sub (local.get 0) (i32.const 2)))))"
    " (func $even (type $unary) (if (i32.eqz (local.get 0)) (then (return (i32.const 1))))"
    "  (return_call $odd (i32.sub (local.get 0) (i32.const 1))))"
    " (func $odd (type $unary) (if (i32.eqz (local.get 0)) (then (return (i32.const 0))))"
    "  (return_call_ref $unary (i32.sub (local.get 0) (i32.const 1)) (ref.func $even2)))"
    " (func $even2 (type $unary) (return_call_indirect (type $unary) (local.get 0) (i32.const 7)))"
    " (elem (i32.const 7) $even) (elem declare func $even2)"
    " (func $throws (type $unary) (local $n i32) (local.set $n (local.get 0))"
    "  (loop $l (br_if $l (i32.gt_s (local.tee $n (i32.sub (local.get $n) (i32.const 1))) (i32.const 0))))"
    "  (if (i32.and (local.get 0) (i32.const 1)) (then (drop (call $clock)) (throw $e (local.get 0))))"
    "  (if (i32.and (local.get 0) (i32.const 2)) (then (return (call $throws (i32.or (local.get 0) (i32.const 1))))))"
    "  (i32.const 9))"
    " (func $catches (type $unary) (block $h (result i32)"
    "  (return (try_table (result i32) (catch $e $h) (call $throws (local.get 0))))))"
    " (func $catches_any (type $unary) (block $h (drop (try_table (result i32) (catch_all $h)"
    "   (call_indirect (type $unary) (local.get 0) (i32.const 2)))) (return (i32.const 1))) (i32.const 2))"
    " (func (export \"agentrt_run\") (result i32) (local $n i32) (local $r i32)"
    "  (drop (call $input (i32.const 0) (i32.const 0) (i32.const 4)))"
    "  (local.set $n (i32.load (i32.const 0)))"
    "  (block $done (loop $more (br_if $done (i32.eqz (local.get $n)))"
    "   (local.set $r (call $next))"
    "   (i32.store (i32.and (local.get $r) (i32.const 0x1fff0)) (call $catches (i32.and (local.get $r) (i32.const 127))))"
    "   (i32.store (i32.and (call $next) (i32.const 0x1fff0)) (call $catches_any (i32.and (local.get $r) (i32.const 31))))"
    "   (i32.store (i32.and (call $next) (i32.const 0x1fff0))"
    "    (call_ref $unary (i32.and (local.get $r) (i32.const 7)) (ref.func $fib)))"
    "   (i32.store (i32.and (call $next) (i32.const 0x1fff0)) (call $even (i32.and (local.get $r) (i32.const 63))))"
    "   (global.set $v (i32x4.add (global.get $v) (i32x4.splat (local.get $r))))"
    "   (v128.store (i32.and (call $next) (i32.const 0x1fff0)) (global.get $v))"
    "   (i64.store (i32.and (call $next) (i32.const 0x1fff0)) (call $clock))"
    "   (drop (call $random (i32.and (call $next) (i32.const 0x1fff0)) (i32.const 8)))"
    "   (if (i32.eqz (i32.and (local.get $r) (i32.const 15))) (then"
    "    (memory.fill (i32.and (call $next) (i32.const 0xfff0)) (local.get $r) (i32.and (call $next) (i32.const 0xffff)))"
    "    (memory.copy (i32.and (call $next) (i32.const 0xfff0)) (i32.and (call $next) (i32.const 0xfff0))"
    "     (i32.and (call $next) (i32.const 0xffff)))"
    "    (memory.init $d (i32.and (call $next) (i32.const 0xfff0)) (i32.const 4) (i32.const 30))"
    "    (i32.store (i32.and (call $next) (i32.const 0x1fff0)) (memory.grow (i32.and (call $next) (i32.const 1))))"
    "    (i32.store (i32.and (call $next) (i32.const 0x1fff0)) (table.grow $t (ref.func $fib) (i32.and (call $next) (i32.const 3))))"
    "    (table.fill $t (i32.const 5) (ref.func $odd) (i32.const 2))))"
    "   (local.set $n (i32.sub (local.get $n) (i32.const 1))) (br $more)))"
    "  (call $output (i32.const 0) (i32.const 4096))))";

/* A start function that works, makes a syscall and traps. */
static const char start_wat[] =
    "(module (import \"agentrt\" \"call\" (func $call (param i32 i32 i32 i32 i32) (result i32)))"
    " (memory (export \"memory\") 1)"
    " (func $work (param $n i32) (loop $l (br_if $l (local.tee $n (i32.sub (local.get $n) (i32.const 1))))))"
    " (func $go (local $n i32) (call $work (i32.const 3000))"
    "  (drop (call $call (i32.const 1) (i32.const 0) (i32.const 8) (i32.const 8) (i32.const 8)))"
    "  (local.set $n (i32.const 3000)) (loop $l (br_if $l (local.tee $n (i32.sub (local.get $n) (i32.const 1)))))"
    "  (drop (i32.rem_u (i32.const 1) (local.get $n)))) (start $go)"
    " (func (export \"agentrt_run\") (result i32) (i32.const 0)))";

/* What a guest is and what it is given, besides the answers of the journal. */
#define NEVER UINT32_MAX
typedef struct scenario {
    char name[40];
    art_module *module;
    uint32_t input[144];
    uint32_t input_len;
    uint32_t told_after; /* its program is given so many answers, then it is told to unwind; NEVER */
    uint64_t fuel;
    art_exit_reason reason; /* that it is to end by; others would mean that the guest does not test what it should */
} scenario;

/* All that must be the same. */
typedef struct outcome {
    art_exit_reason reason;
    int32_t code;
    uint64_t fuel, memory, globals, output, message, streams, syscalls;
} outcome;

static art_engine *engine;
static scenario scenarios[128];
static outcome expected[128];
static uint32_t scenario_count;
static wasmtime_error_t *(*wat2wasm)(const char *, size_t, wasm_byte_vec_t *);
static bool (*export_nth)(wasmtime_context_t *, const wasmtime_instance_t *, size_t, char **, size_t *, wasmtime_extern_t *);
static void (*global_get)(wasmtime_context_t *, const void *, wasmtime_val_t *);

static art_module *module_of(const uint8_t *wasm, size_t len)
{
    char msg[ART_MSG_BYTES] = "";
    uint8_t *artifact = NULL;
    size_t artifact_len = 0;
    art_module *made = NULL;
    CHECK_MSG(art_engine_compile(engine, wasm, len, &artifact, &artifact_len, msg, sizeof msg) == 0, "%s", msg);
    CHECK_MSG(art_module_load(engine, artifact, artifact_len, &made, msg, sizeof msg) == 0, "%s", msg);
    free(artifact);
    return made;
}

static art_module *module_of_wat(const char *wat)
{
    char msg[ART_MSG_BYTES] = "";
    wasm_byte_vec_t wasm;
    wasmtime_error_t *error = wat2wasm(wat, strlen(wat), &wasm);
    if (error) {
        art__error_take(engine->w, error, msg, sizeof msg);
        CHECK_MSG(!error, "%s", msg);
    }
    art_module *made = module_of((const uint8_t *)wasm.data, wasm.size);
    engine->w->wasm_byte_vec_delete(&wasm);
    return made;
}

static art_module *module_of_name(enum guest_name name)
{
    return module_of(guests[name].bytes, guests[name].len);
}

/* Takes the reference of the module. */
static scenario *add(const char *name, art_module *module, art_exit_reason reason)
{
    CHECK(scenario_count < sizeof scenarios / sizeof *scenarios);
    scenario *s = &scenarios[scenario_count++];
    *s = (scenario){.module = module, .reason = reason, .fuel = PLENTY, .told_after = NEVER};
    (void)snprintf(s->name, sizeof s->name, "%s", name);
    return s;
}

static void add_input(scenario *s, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t words[] = {a, b, c, d};
    memcpy(s->input, words, sizeof words);
    s->input_len = sizeof words;
}

/* Submits, waits for several and for one under calls, work between; its handlers do as much, and end by `fate`. */
static void add_unwinding(uint32_t told_after, uint32_t fate, art_exit_reason reason)
{
    static const uint32_t lines[][6] = {
        {SCRIPT_SUBMIT, 1, 0, 8}, {SCRIPT_SUBMIT, 1, 8, 8}, {SCRIPT_SPIN, 700}, {SCRIPT_POKE, 0x100, 1}, {SCRIPT_POKE, 0x104, 2},
        {SCRIPT_WAIT_ANY, 0x100, 2}, {SCRIPT_SPIN, 900}, {SCRIPT_DEEP, 9}, {SCRIPT_SUBMIT, 1, 0, 24}, {SCRIPT_CLOCK_NOW},
        {SCRIPT_CALL, 1, 0, 16, 0x200, 8}, {SCRIPT_FILL, 0x8000, 7, 0x3000}, {SCRIPT_UNWIND}, {SCRIPT_CLOCK_NOW}, {SCRIPT_CAUGHT},
        {SCRIPT_SPIN, 500}, {SCRIPT_DEEP, 11}, {SCRIPT_RANDOM, 0x300, 40}, {SCRIPT_CALL, 1, 0, 4, 0x200, 8}, {SCRIPT_SPIN, 300},
    };
    char name[40];
    (void)snprintf(name, sizeof name, "told after %u, handlers %u", told_after, fate);
    scenario *s = add(name, module_of_name(GUEST_UNWINDER), reason);
    memcpy(s->input, lines, sizeof lines);
    s->input[sizeof lines / sizeof **lines] = fate;
    s->input_len = sizeof lines + 24;
    s->told_after = told_after;
    CHECK(s->input_len <= sizeof s->input);
}

static void scenarios_make(void)
{
    art_module *fates = module_of_wat(fates_wat), *mixed = module_of_wat(mixed_wat), *start = module_of_wat(start_wat);
    art_module *compute = module_of_name(GUEST_COMPUTE), *talker = module_of_name(GUEST_TALKER);
    scenario *s;
    char name[40];
    for (uint32_t fate = 0; fate < FATES; fate++) {
        art_exit_reason reason = fate == RETURNS ? ART_EXIT_RETURNED : fate == FAILS ? ART_EXIT_FAILED : ART_EXIT_TRAP;
        for (uint32_t calls = 0; calls < 2; calls++) {
            (void)snprintf(name, sizeof name, "fate %u after %u calls", fate, calls);
            add_input(add(name, art_module_retain(fates), reason), 700, calls * 3, 2000 + 37 * fate, fate);
        }
    }
    for (uint32_t i = 0; i < 4; i++) {
        (void)snprintf(name, sizeof name, "fuel ends %u", i);
        s = add(name, art_module_retain(fates), ART_EXIT_FUEL);
        add_input(s, 500 * i, 4 * i, 5000, RETURNS);
        s->fuel = 1 + 7001 * i;
        (void)snprintf(name, sizeof name, "mixed, fuel ends %u", i);
        s = add(name, art_module_retain(mixed), ART_EXIT_FUEL);
        add_input(s, 1000, 0, 0, 0);
        s->fuel = 40000 * i + 13;
        (void)snprintf(name, sizeof name, "mixed %u", i);
        add_input(add(name, art_module_retain(mixed), ART_EXIT_RETURNED), 10 + 15 * i, 0, 0, 0);
        (void)snprintf(name, sizeof name, "compute %u", i);
        add_input(add(name, art_module_retain(compute), ART_EXIT_RETURNED), 50 * i + 1, 0, 0, 0);
        (void)snprintf(name, sizeof name, "talker %u", i);
        s = add(name, art_module_retain(talker), ART_EXIT_RETURNED);
        add_input(s, 2 + 2 * i, 500 * i, 0, 0);
        s->input_len = 8;
    }
    for (uint32_t told_after = 0; told_after < 3; told_after++) {
        add_unwinding(told_after, SCRIPT_RETURN, ART_EXIT_UNWOUND);
        add_unwinding(told_after, SCRIPT_UNREACHABLE, ART_EXIT_TRAP);
        s = add("told without handlers", art_module_retain(talker), ART_EXIT_UNWOUND);
        add_input(s, 4, 1000, 0, 0);
        s->input_len = 8;
        s->told_after = told_after;
    }
    add("start function traps", art_module_retain(start), ART_EXIT_TRAP);
    add("start function is unreachable", module_of_name(GUEST_START_TRAPS), ART_EXIT_TRAP);
    add("data outside", module_of_name(GUEST_DATA_OUTSIDE), ART_EXIT_TRAP);
    add("start function calls", module_of_name(GUEST_START_CALLS), ART_EXIT_FAILED); /* it would like an answer of five bytes */
    add("hello", module_of_name(GUEST_HELLO), ART_EXIT_RETURNED);
    add("logs", module_of_name(GUEST_LAST_WORDS), ART_EXIT_RETURNED);
    add("dirty", module_of_name(GUEST_DIRTY), ART_EXIT_RETURNED);
    add("floods stdout", module_of_name(GUEST_WASI_FLOODS), ART_EXIT_RETURNED);
    add("proc_exit", module_of_name(GUEST_WASI_EXITS), ART_EXIT_FAILED);
    add("no memory", module_of_name(GUEST_NO_MEMORY), ART_EXIT_FAILED);
    art_module_release(fates);
    art_module_release(mixed);
    art_module_release(start);
    art_module_release(compute);
    art_module_release(talker);
}

/* --- one guest ------------------------------------------------------------------- */

/* A guest on its way. */
typedef struct pattern {
    const scenario *s;
    art_run *run;
    outcome got;         /* memory and globals are the worker's until the run is done */
    uint64_t random;     /* the worker's, for what it does between polls */
    uint32_t slice_log2; /* micro-slices are up to this long */
    uint32_t odds;       /* a quantum is ended by force before one of so many polls; 0: never */
    uint64_t granted;
    uint64_t wait_seen, fuel_seen;
    int32_t held[HELD_MAX]; /* answers that the journal has next, and the guest perhaps not yet */
    uint32_t held_count;
    uint32_t given;      /* answers to the program */
    bool replays, fuel_waits, used, told;
    uint32_t seed_at;    /* which pattern it is */
} pattern;

static uint64_t digest_text(const void *bytes, size_t len)
{
    return bytes ? digest_bytes(bytes, len) : 0;
}

/* The exported globals of number types, all of which these guests have. */
static uint64_t globals_digest(art_guest *guest)
{
    enum { GLOBAL = 1 };
    uint64_t digest = 0;
    char *name;
    size_t len;
    wasmtime_extern_t export;
    for (size_t i = 0; guest->phase == ART__ENDED && guest->instance.store_id &&
                       export_nth(guest->context, &guest->instance, i, &name, &len, &export);
         i++) {
        if (export.kind == GLOBAL) {
            wasmtime_val_t value = {0};
            global_get(guest->context, &export.of, &value);
            digest = digest_step(digest, value.kind <= 1 ? value.of.words[0] : 0) + value.kind;
            digest = digest_step(digest, value.kind == ART_WASM_I32 ? (uint32_t)value.of.i32 : value.of.words[0]);
        }
    }
    return digest;
}

/* The last look at a guest's memory, on the thread that ends it. */
static void note_end(art_guest *guest, outcome *o)
{
    guest->phase = ART__RUNNING; /* for find_memory, where there is an instance */
    if (!guest->instance.store_id) {
        guest->phase = ART__INSTANTIATING;
    }
    o->memory = memory_digest(guest);
    guest->phase = ART__ENDED;
    o->globals = globals_digest(guest);
}

static outcome *alone; /* of the guest that is run without a pool */

static void ending(art_guest *guest)
{
    if (alone) {
        note_end(guest, alone);
        return;
    }
    art_run *run = (art_run *)((char *)guest->fuel - offsetof(art_run, fuel));
    pattern *p = run->base.user;
    if (p) {
        note_end(guest, &p->got);
    }
}

static void note_exit(outcome *o, const art_exit *end, uint64_t fuel)
{
    o->reason = end->reason;
    o->code = end->code;
    o->fuel = fuel;
    o->output = digest_text(end->output, end->output_len);
    o->message = digest_text(end->message, strlen(end->message));
    o->streams = digest_step(digest_text(end->out.bytes, end->out.len), end->out.total);
    o->streams = digest_step(o->streams ^ digest_text(end->err.bytes, end->err.len), end->err.total);
}

static void note_requests(outcome *o, art_guest *guest)
{
    for (art_request *r = art_guest_take_requests(guest), *next; r; r = next) {
        next = r->next;
        if (r->handle) { /* log lines may be dropped */
            o->syscalls = digest_step(o->syscalls, (uint64_t)(uint32_t)r->handle << 32 | (uint32_t)r->op);
            o->syscalls = digest_step(o->syscalls, digest_text(r->payload, r->len));
        }
        free(r);
    }
}

/* The journal: where among the others a handle is answered, when and with what. Of the handles of a wait the answers are given in
 * this order, one or several at once, which the guest must not notice. */
static uint64_t journal_seq(int32_t handle)
{
    return digest_step(7, (uint64_t)handle) >> 1;
}

static art_answer *journal_answer(int32_t handle)
{
    uint64_t clock_ns = 1000000 + (uint64_t)handle * 5000;
    return art_answer_new(handle, 0, clock_ns, journal_seq(handle), &handle, sizeof handle);
}

static uint32_t journal_next(const int32_t *handles, size_t count, int32_t out[HELD_MAX])
{
    uint32_t n = 0;
    CHECK(count && count <= HELD_MAX);
    for (; n < count; n++) {
        uint32_t at = n;
        for (; at && journal_seq(out[at - 1]) > journal_seq(handles[n]); at--) {
            out[at] = out[at - 1];
        }
        out[at] = handles[n];
    }
    return n;
}

static art_guest_config guest_config(const scenario *s)
{
    return (art_guest_config){
        .module = s->module, .input = s->input, .input_len = s->input_len, .clock_ns = 1000000, .seed = {1, 2, 3}};
}

/* In one piece: no micro-slice ends but by a wait. */
static outcome run_alone(const scenario *s, uint64_t micro_slice)
{
    art_fuel_account account;
    art_guest *guest = NULL;
    outcome o = {0};
    uint32_t given = 0;
    art_fuel_init(&account, s->fuel, true);
    art_guest_config config = guest_config(s);
    config.fuel = &account;
    config.micro_slice_fuel = micro_slice;
    CHECK_OK(art_guest_create(&config, &guest));
    guest->micro_slice_fuel = micro_slice;
    alone = &o;
    for (;;) {
        art_guest_outcome outcome = art_guest_poll(guest);
        note_requests(&o, guest);
        if (outcome == ART_GUEST_DONE) {
            break;
        }
        art_guest_wait wait = art_guest_waiting(guest);
        if (outcome == ART_GUEST_WAIT && given++ == s->told_after) {
            CHECK_OK(art_guest_unwind(guest, 0));
        } else if (outcome == ART_GUEST_WAIT) {
            int32_t next[HELD_MAX];
            journal_next(wait.handles, wait.count, next);
            art_guest_post(guest, journal_answer(next[0]));
        }
    }
    alone = NULL;
    art_exit end = art_guest_exit(guest);
    note_exit(&o, &end, art_guest_fuel_used(guest));
    art_fuel_stats stats = art_fuel_statistics(&account);
    CHECK_EQ(stats.used, o.fuel);
    CHECK_EQ(stats.left, s->fuel - o.fuel);
    CHECK_MSG(o.reason == s->reason, "%s: reason %d code %d: %s", s->name, end.reason, end.code, end.message);
    art_guest_destroy(guest);
    return o;
}

static void compare(const pattern *p, const outcome *got, const outcome *want)
{
#define SAME(field)                                                                                                    \
    CHECK_MSG(got->field == want->field, "pattern %u, %s: " #field " %jx, alone %jx", p->seed_at, p->s->name,          \
              (uintmax_t)got->field, (uintmax_t)want->field)
    SAME(reason);
    SAME(code);
    SAME(fuel);
    SAME(memory);
    SAME(globals);
    SAME(output);
    SAME(message);
    SAME(streams);
    SAME(syscalls);
#undef SAME
}

/* --- what happens to it ----------------------------------------------------------------- */

/* Sets another micro-slice now and then, and ends the quantum by force. On the worker. */
static art_guest_outcome poll_at_random(art_guest *guest)
{
    art_run *run = (art_run *)((char *)guest->fuel - offsetof(art_run, fuel));
    pattern *p = run->base.user;
    if (p) {
        uint64_t r = check_random(&p->random);
        if (guest->store && r % 4 == 0) {
            uint64_t slice = 1 + (r >> 8) % (UINT64_C(1) << (1 + (r >> 40) % p->slice_log2));
            CHECK(!guest->engine->w->wasmtime_context_fuel_async_yield_interval(guest->context, slice));
            guest->micro_slice_fuel = slice;
        }
        run->base.allotment_ns = p->odds && (r >> 16) % p->odds == 0 ? UINT64_MAX / 2 : 0;
    }
    return art_guest_poll(guest);
}

static void pace_at_random(art_guest *guest, uint64_t took_ns)
{
    (void)guest, (void)took_ns; /* by the above instead */
}

/* --- the pool --------------------------------------------------------------------------- */

static art_pool *pool;
static uint64_t seed, forced_total, preempted_total, stopped_total, urgent_total, micro_slices_total, told_total;
static pattern patterns[IN_FLIGHT];
static art_run *urgent[URGENT_MAX];
static art_module *urgent_module;

static uint64_t pick(uint64_t n)
{
    return check_random(&seed) % n;
}

static void pool_open(void)
{
    art_pool_config config = {
        .workers = 1 + (uint32_t)pick(3),
        .live_max = 32,
        .micro_slice_fuel = UINT64_C(1) << pick(20),
        .base_tier_ops = pick(2) ? 1u << 1 : 0,
        .engine = engine,
    };
    for (int tier = 0; tier < ART_TIERS; tier++) {
        config.quantum_ns[tier] = 1000 + (UINT64_C(1) << pick(24));
    }
    art_runq_config_default(&config.runq);
    CHECK_OK(art_pool_create(&config, &pool));
}

static void pool_close(void)
{
    art_pool_stats stats;
    art_pool_statistics(pool, &stats);
    forced_total += stats.demotions;
    preempted_total += stats.preemptions;
    micro_slices_total += stats.micro_slices;
    art_pool_stop(pool);
    art_pool_destroy(pool);
}

static void pattern_tell(pattern *p)
{
    p->told = true;
    CHECK_OK(art_run_unwind(p->run, 0, PLENTY)); /* no time ends it */
    told_total++;
    for (uint32_t i = 0; i < p->held_count && pick(2); i++) { /* too late, and not to be noticed */
        art_run_answer(p->run, journal_answer(p->held[i]));
    }
    p->held_count = 0;
}

static void pattern_start(pattern *p, uint32_t number)
{
    uint32_t which = (uint32_t)pick(scenario_count);
    const scenario *s = &scenarios[which];
    *p = (pattern){
        .s = s,
        .random = 1 + pick(UINT64_MAX),
        .slice_log2 = 1 + (uint32_t)pick(16),
        .odds = (uint32_t)(pick(2) ? 0 : 1 + pick(20)),
        .replays = pick(3) == 0,
        .fuel_seen = UINT64_MAX,
        .used = true,
        .seed_at = number,
    };
    bool pieces = pick(4) == 0;
    p->granted = pieces ? pick(s->fuel < 100000 ? s->fuel : 100000) : s->fuel;
    art_run_config config = {.guest = guest_config(s),
                             .tenant = (uint32_t)pick(5),
                             .tier = (uint8_t)(pick(8) ? 1 + pick(3) : 0),
                             .fuel = p->granted,
                             .fuel_final = !pieces,
                             .user = p};
    config.guest.replay = p->replays;
    CHECK_OK(art_run_submit(pool, &config, &p->run));
    if (p->replays && s->told_after == 0 && pick(4) == 0) {
        pattern_tell(p);
    }
}

static void pattern_grant(pattern *p)
{
    uint64_t left = p->s->fuel - p->granted, piece = 1 + pick(left ? left : 1);
    bool last = pick(4) == 0 || piece >= left;
    piece = last ? left : piece;
    p->granted += piece;
    p->fuel_waits = false;
    art_run_grant(p->run, piece, last);
}

/* Answers a wait. A program that is to be told is given one answer a time, so that it has had exactly so many. */
static void pattern_answer(pattern *p)
{
    bool counts = p->s->told_after != NEVER && !p->told;
    if (counts && p->given == p->s->told_after) {
        pattern_tell(p);
        return;
    }
    uint32_t count = counts ? 1 : 1 + (uint32_t)pick(p->held_count);
    p->held_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        art_run_answer(p->run, journal_answer(p->held[i]));
    }
    if (counts && ++p->given == p->s->told_after && pick(2)) { /* wherever it is on its way from there */
        for (uint64_t yields = pick(6); yields; yields--) {
            sched_yield();
        }
        pattern_tell(p);
    }
}

static void pattern_step(pattern *p)
{
    if (p->held_count && pick(3) == 0) {
        pattern_answer(p);
    } else if (p->replays && p->s->told_after == 0 && !p->told && pick(10) == 0) {
        pattern_tell(p); /* before its first wait, or before it has begun */
    } else if (p->fuel_waits) {
        pattern_grant(p);
    } else if (!p->replays && pick(50) == 0) {
        art_run_answer(p->run, art_answer_new(0, 0, 0, 0, NULL, 0)); /* for nobody: only wakes */
    } else if (p->replays && pick(100) == 0) {
        p->replays = false;
        art_run_go_live(p->run);
    }
}

static void pattern_event(pattern *p)
{
    art_run_view view;
    art_run_look(p->run, &view);
    note_requests(&p->got, art_run_guest(p->run));
    if (view.done) {
        art_fuel_stats account = art_fuel_statistics(&p->run->fuel);
        note_exit(&p->got, &view.exit, view.fuel);
        CHECK_EQ(account.used, view.fuel);
        CHECK_EQ(account.outstanding, 0);
        compare(p, &p->got, &expected[p->s - scenarios]);
        art_run_free(p->run);
        p->used = false;
    } else if (view.no_fuel) {
        if (view.fuel_granted != p->fuel_seen) { /* else it was woken by something else, and stopped for the same want again */
            stopped_total++;
            p->fuel_waits = true;
            p->fuel_seen = view.fuel_granted;
        }
    } else if (view.waiting && view.wait_number != p->wait_seen) {
        p->wait_seen = view.wait_number;
        p->held_count = journal_next(view.handles, view.handle_count, p->held);
    }
}

static bool take_events(void)
{
    art_event *events[64];
    size_t count = art_evq_drain(art_pool_evq(pool), events, 64);
    for (size_t i = 0; i < count; i++) {
        art_run *run = NULL;
        art_foreign *foreign = NULL;
        art_pool_event_take(events[i], &run, &foreign);
        if (art_run_user(run)) {
            pattern_event(art_run_user(run));
            continue;
        }
        art_run_view view;
        art_run_look(run, &view);
        for (int k = 0; view.done && k < URGENT_MAX; k++) {
            if (urgent[k] == run) {
                urgent[k] = NULL;
                art_run_free(run);
                break;
            }
        }
    }
    return count != 0;
}

static void urgent_start(void)
{
    for (int k = 0; k < URGENT_MAX; k++) {
        if (!urgent[k]) {
            art_run_config config = {.guest = {.module = urgent_module}, .fuel = PLENTY, .fuel_final = true};
            CHECK_OK(art_run_submit(pool, &config, &urgent[k]));
            urgent_total++;
            return;
        }
    }
}

static void patterns_run(uint32_t first, uint32_t count)
{
    uint32_t started = 0;
    pool_open();
    uint64_t preempt_odds = UINT64_C(2) << pick(8);
    for (bool any = true; any || started < count;) {
        bool moves = false;
        any = false;
        for (uint32_t i = 0; i < IN_FLIGHT; i++) {
            pattern *p = &patterns[i];
            if (!p->used && started < count && pick(4) == 0) {
                pattern_start(p, first + started++);
            } else if (p->used) {
                pattern_step(p);
                moves = moves || p->held_count || p->fuel_waits;
            }
            any = any || p->used;
        }
        for (int k = 0; k < URGENT_MAX; k++) {
            any = any || urgent[k];
        }
        if (started < count && pick(preempt_odds) == 0) {
            urgent_start();
        }
        if (!take_events() && !moves && any && started == count) {
            struct pollfd fd = {.fd = art_evq_fd(art_pool_evq(pool)), .events = POLLIN};
            CHECK_MSG(poll(&fd, 1, WATCHDOG_MS) == 1, "nothing happens any more, in the patterns from %u", first);
        }
    }
    pool_close();
}

int main(void)
{
    const char *library = getenv("AGENTRT_WASMTIME_LIB"), *wanted = getenv("AGENTRT_TEST_PATTERNS");
    CHECK_MSG(library && *library, "AGENTRT_WASMTIME_LIB must name wasmtime's shared library");
    uint32_t count = wanted && *wanted ? (uint32_t)strtoul(wanted, NULL, 0) : PATTERNS;
    char msg[ART_MSG_BYTES] = "";
    seed = check_seed(art_sys_now_ns());
    art_engine_config config = {
        .library = library,
        .guests_max = 64,
        .stacks_max = 64,
        .memory_bytes_max = 1 << 21,
        .wasm_stack_bytes = 16 << 10,
        .table_elements_max = 100,
        .request_bytes_max = 1 << 16,
        .result_bytes_max = 1 << 20,
        .inflight_max = 64,
    };
    CHECK_MSG(art_engine_create(&config, &engine, msg, sizeof msg) == 0, "%s", msg);
    void *handle = dlopen(library, RTLD_NOW);
    *(void **)&wat2wasm = dlsym(handle, "wasmtime_wat2wasm");
    *(void **)&export_nth = dlsym(handle, "wasmtime_instance_export_nth");
    *(void **)&global_get = dlsym(handle, "wasmtime_global_get");
    CHECK(wat2wasm && export_nth && global_get);
    urgent_module = module_of_name(GUEST_MINIMAL);
    scenarios_make();
    uint64_t fuel_sum = 0;
    for (uint32_t i = 0; i < scenario_count; i++) {
        expected[i] = run_alone(&scenarios[i], UINT64_C(1) << 40);
        fuel_sum += expected[i].fuel;
        pattern p = {.s = &scenarios[i]};
        outcome again = run_alone(&scenarios[i], 1); /* the shortest micro-slices */
        compare(&p, &again, &expected[i]);
    }
    uint64_t start_ns = art_sys_now_ns();
    for (uint32_t at = 0; at < count; at += PER_POOL) {
        patterns_run(at, count - at < PER_POOL ? count - at : PER_POOL);
    }
    CHECK(count < 1000 || (preempted_total > count / 100 && forced_total > count / 100 && stopped_total > count / 100 &&
                           told_total > count / 100));
    printf("%u patterns of %u guests (%ju fuel on average) in %.1f s: %ju micro-slices, %ju preemptions, %ju ends of a quantum, "
           "%ju stops for fuel, %ju urgent guests, %ju told to unwind\nok\n",
           count, scenario_count, (uintmax_t)(fuel_sum / scenario_count), (double)(art_sys_now_ns() - start_ns) / 1e9,
           (uintmax_t)micro_slices_total, (uintmax_t)preempted_total, (uintmax_t)forced_total, (uintmax_t)stopped_total,
           (uintmax_t)urgent_total, (uintmax_t)told_total);
    for (uint32_t i = 0; i < scenario_count; i++) {
        art_module_release(scenarios[i].module);
    }
    art_module_release(urgent_module);
    art_engine_destroy(engine);
    return 0;
}
