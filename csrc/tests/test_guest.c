/* Engine, modules and one guest at a time. Needs AGENTRT_WASMTIME_LIB. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agentrt_guest.h"
#include "art_err.h"
#include "check.h"
#include "guest.h"
#include "guests.h"

/* Lines of a script name what matters. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

#ifdef __SANITIZE_ADDRESS__
#define SANITIZED 1 /* its shadow takes more address space than the test allows */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

enum { MEMORY_PAGES_MAX = 1024, RESULT_MAX = 1 << 20, REQUEST_MAX = 1 << 16, INFLIGHT_MAX = 8, SLICE = 50000 };

static art_engine *engine, *compiler;
static art_module *modules[GUEST_COUNT];

static art_engine_config engine_config(void)
{
    const char *library = getenv("AGENTRT_WASMTIME_LIB");
    CHECK_MSG(library && *library, "AGENTRT_WASMTIME_LIB must name wasmtime's shared library");
    return (art_engine_config){
        .library = library,
        .guests_max = 8,
        .stacks_max = 8,
        .memory_bytes_max = (uint64_t)MEMORY_PAGES_MAX << 16,
        .wasm_stack_bytes = 128 << 10,
        .table_elements_max = 20000,
        .request_bytes_max = REQUEST_MAX,
        .result_bytes_max = RESULT_MAX,
        .inflight_max = INFLIGHT_MAX,
    };
}

static art_engine *engine_new(bool compile_only)
{
    art_engine_config config = engine_config();
    art_engine *made = NULL;
    char msg[ART_MSG_BYTES] = "";
    config.compile_only = compile_only;
    CHECK_MSG(art_engine_create(&config, &made, msg, sizeof msg) == 0, "%s", msg);
    return made;
}

static int load_into(art_engine *into, enum guest_name name, art_module **out, char *msg)
{
    uint8_t *artifact = NULL;
    size_t len = 0;
    int err = art_engine_compile(compiler, guests[name].bytes, guests[name].len, &artifact, &len, msg, ART_MSG_BYTES);
    if (!err) {
        err = art_module_load(into, artifact, len, out, msg, ART_MSG_BYTES);
        free(artifact);
    }
    return err;
}

static art_module *module(enum guest_name name)
{
    char msg[ART_MSG_BYTES] = "";
    if (!modules[name]) {
        CHECK_MSG(load_into(engine, name, &modules[name], msg) == 0, "%s: %s", guests[name].name, msg);
    }
    return modules[name];
}

/* --- a guest under test --------------------------------------------------------- */

typedef struct subject {
    art_fuel_account fuel;
    art_guest *guest;
    uint64_t polls;
    bool full_slices;
} subject;

typedef struct options {
    const void *input;
    uint32_t input_len;
    const char *restored;
    uint64_t fuel;
    bool not_final;
    bool replay;
    uint64_t slice;   /* at most; without full_slices a guest keeps the short ones it begins with */
    bool full_slices; /* as if every micro-slice took no time, so that they grow to `slice` */
    uint64_t clock_ns;
    uint8_t seed;
} options;

static subject *subject_new(enum guest_name name, options o)
{
    subject *s = calloc(1, sizeof *s);
    s->full_slices = o.full_slices;
    art_fuel_init(&s->fuel, o.fuel ? o.fuel : UINT64_C(1) << 50, !o.not_final);
    art_guest_config config = {
        .module = module(name),
        .fuel = &s->fuel,
        .input = o.input,
        .input_len = o.input_len,
        .restored = o.restored,
        .restored_len = o.restored ? (uint32_t)strlen(o.restored) : 0,
        .clock_ns = o.clock_ns,
        .micro_slice_fuel = o.slice ? o.slice : SLICE,
        .replay = o.replay,
    };
    memset(config.seed, o.seed, sizeof config.seed);
    CHECK_OK(art_guest_create(&config, &s->guest));
    return s;
}

/* What holds for the fuel of every guest that has ended (G4). */
static void check_fuel(subject *s)
{
    art_fuel_stats fuel = art_fuel_statistics(&s->fuel);
    CHECK_EQ(fuel.granted, fuel.left + fuel.used);
    CHECK_EQ(fuel.outstanding, 0);
    CHECK_EQ(fuel.used, art_guest_fuel_used(s->guest));
}

static void subject_free(subject *s)
{
    art_guest_destroy(s->guest);
    art_fuel_stats fuel = art_fuel_statistics(&s->fuel);
    CHECK_EQ(fuel.granted, fuel.left + fuel.used);
    free(s);
}

/* Polls until it does something else than yield. */
static art_guest_outcome advance(subject *s)
{
    art_guest_outcome outcome;
    do {
        outcome = art_guest_poll(s->guest);
        s->polls++;
        if (s->full_slices && outcome != ART_GUEST_DONE) {
            art_guest_pace(s->guest, 0);
        }
    } while (outcome == ART_GUEST_YIELD);
    if (outcome == ART_GUEST_DONE) {
        check_fuel(s);
    }
    return outcome;
}

static void answer(subject *s, int32_t handle, int32_t status, uint64_t clock_ns, uint64_t seq, const char *text)
{
    art_guest_post(s->guest, art_answer_new(handle, status, clock_ns, seq, text, (uint32_t)strlen(text)));
}

static art_exit finished(subject *s, art_exit_reason reason, int32_t code)
{
    CHECK_EQ(advance(s), ART_GUEST_DONE);
    art_exit end = art_guest_exit(s->guest);
    CHECK_MSG(end.reason == reason && end.code == code, "reason %d code %d: %s", end.reason, end.code, end.message);
    return end;
}

static void drop_requests(art_guest *guest)
{
    for (art_request *r = art_guest_take_requests(guest), *next; r; r = next) {
        next = r->next;
        free(r);
    }
}

/* Scripts. */
typedef struct script_line {
    int32_t what, a, b, c, d, e;
} script_line;

#define SCRIPT(...) .input = (script_line[]){__VA_ARGS__}, .input_len = sizeof(script_line[]){__VA_ARGS__}

static int64_t result(const art_exit *end, uint32_t index)
{
    int64_t value;
    CHECK_MSG(end->output_len >= (index + 1) * 8, "only %u results", end->output_len / 8);
    memcpy(&value, end->output + index * 8, 8);
    return value;
}

/* --- engine and modules ---------------------------------------------------------- */

static void expect_engine_refused(art_engine_config config, int err)
{
    art_engine *made = NULL;
    char msg[ART_MSG_BYTES] = "";
    CHECK_EQ(art_engine_create(&config, &made, msg, sizeof msg), err);
    CHECK(made == NULL && msg[0]);
}

static void test_engine_refuses_bad_configs(void)
{
    art_engine_config c = engine_config();
#define WITH(field, value, err) c = engine_config(), c.field = (value), expect_engine_refused(c, err)
    WITH(guests_max, 0, ART_EINVAL);
    WITH(stacks_max, 0, ART_EINVAL);
    WITH(stacks_max, 9, ART_EINVAL);
    WITH(inflight_max, 0, ART_EINVAL);
    WITH(inflight_max, UINT32_MAX, ART_EINVAL);
    WITH(memory_bytes_max, UINT64_MAX, ART_EINVAL);
    WITH(wasm_stack_bytes, 0, ART_EINVAL);
    WITH(wasm_stack_bytes, UINT64_MAX, ART_EINVAL);
    WITH(table_elements_max, UINT32_MAX, ART_EINVAL);
    WITH(result_bytes_max, UINT32_MAX, ART_EINVAL);
    WITH(request_bytes_max, UINT32_MAX, ART_EINVAL);
#undef WITH
}

/* wasmtime aborts when its pool cannot be mapped: the sum must be asked for before (W52). */
static void test_fault_W52_pool_that_does_not_fit_is_an_error(void)
{
    art_engine_config c = engine_config();
    for (uint64_t guests = 30000; guests <= UINT32_MAX; guests *= 5) {
        c.guests_max = c.stacks_max = (uint32_t)guests;
        art_engine *made = NULL;
        char msg[ART_MSG_BYTES] = "";
        int err = art_engine_create(&c, &made, msg, sizeof msg);
        CHECK_MSG(err == ART_ENOMEM || err == ART_EINVAL, "%d for %ju guests", err, (uintmax_t)guests);
    }
    c = engine_config();
    c.table_elements_max = 10 * 1000 * 1000;
    struct rlimit before, small = {UINT64_C(64) << 30, UINT64_C(64) << 30};
    CHECK_OK(getrlimit(RLIMIT_AS, &before));
    small.rlim_max = before.rlim_max;
#if !SANITIZED
    CHECK_OK(setrlimit(RLIMIT_AS, &small)); /* 8 slots of 4 GiB fit, with their tables they may not: no abort */
    art_engine *made = NULL;
    char msg[ART_MSG_BYTES] = "";
    int err = art_engine_create(&c, &made, msg, sizeof msg);
    CHECK(err == 0 || err == ART_ENOMEM);
    art_engine_destroy(made);
    small.rlim_cur = UINT64_C(8) << 30;
    CHECK_OK(setrlimit(RLIMIT_AS, &small));
    CHECK_EQ(art_engine_create(&c, &made, msg, sizeof msg), ART_ENOMEM);
    CHECK_OK(setrlimit(RLIMIT_AS, &before));
#else
    (void)small;
#endif
}

static void expect_refused(enum guest_name name, int err, const char *says)
{
    char msg[ART_MSG_BYTES] = "";
    art_module *made = NULL;
    int got = load_into(engine, name, &made, msg);
    CHECK_MSG(got == err && !made, "%s: %d (%s), expected %d", guests[name].name, got, msg, err);
    CHECK_MSG(strstr(msg, says), "%s: \"%s\" does not say \"%s\"", guests[name].name, msg, says);
}

static void test_modules_are_refused_by_type(void)
{
    expect_refused(GUEST_IMPORT_UNKNOWN, ART_EIMPORT, "frobnicate");
    expect_refused(GUEST_IMPORT_WASI, ART_EIMPORT, "wasi_snapshot_preview1");
    expect_refused(GUEST_IMPORT_TYPE, ART_EIMPORT, "close");
    expect_refused(GUEST_IMPORT_KIND, ART_EIMPORT, "close");
    expect_refused(GUEST_IMPORT_MEMORY, ART_EIMPORT, "memory");
    expect_refused(GUEST_ENTRY_NONE, ART_EENTRY, "agentrt_run");
    expect_refused(GUEST_ENTRY_PARAMETER, ART_EENTRY, "agentrt_run");
    expect_refused(GUEST_ENTRY_I64, ART_EENTRY, "agentrt_run");
    expect_refused(GUEST_ENTRY_TWO, ART_EENTRY, "agentrt_run");
    expect_refused(GUEST_ENTRY_MEMORY, ART_EENTRY, "agentrt_run");
    expect_refused(GUEST_MEMORY_LARGE, ART_ELIMIT, "memory");
    expect_refused(GUEST_MEMORY_LARGE_HIDDEN, ART_ELIMIT, "memory");
    expect_refused(GUEST_TABLE_LARGE, ART_ELIMIT, "table");
    expect_refused(GUEST_MEMORY_SECOND, ART_EMODULE, "memor");
    expect_refused(GUEST_MEMORY_SHARED, ART_EMODULE, "");
    expect_refused(GUEST_MEMORY_64, ART_EMODULE, "");
}

static void test_garbage_is_refused(void)
{
    uint8_t *artifact = NULL;
    size_t len = 0;
    art_module *made = NULL;
    char msg[ART_MSG_BYTES] = "";
    const uint8_t *hello = guests[GUEST_HELLO].bytes;
    CHECK_EQ(art_engine_compile(compiler, (const uint8_t *)"garbage!", 8, &artifact, &len, msg, sizeof msg), ART_EMODULE);
    CHECK_EQ(art_engine_compile(compiler, NULL, 0, &artifact, &len, msg, sizeof msg) < 0, 1);
    CHECK(artifact == NULL);
    size_t names = 0; /* where the section of names begins, without which a module is whole */
    while (memcmp(hello + names, "\4name", 5)) {
        names++;
    }
    for (size_t cut = 0; cut + 3 < names; cut++) { /* no other prefix of a module is one with an entry */
        if (art_engine_compile(compiler, hello, cut, &artifact, &len, msg, sizeof msg) == 0) {
            CHECK(art_module_load(engine, artifact, len, &made, msg, sizeof msg) < 0);
            free(artifact);
        }
    }
    CHECK_EQ(art_module_load(engine, (const uint8_t *)"garbage!", 8, &made, msg, sizeof msg), ART_EMODULE);
    CHECK_EQ(art_module_load(engine, hello, guests[GUEST_HELLO].len, &made, msg, sizeof msg), ART_EMODULE);
    CHECK_OK(art_engine_compile(compiler, hello, guests[GUEST_HELLO].len, &artifact, &len, msg, sizeof msg));
    for (size_t cut = 0; cut < len; cut += len / 37) {
        uint8_t *copy = malloc(cut + 1); /* exact, so that a sanitizer sees a read behind it */
        memcpy(copy, artifact, cut);
        CHECK_EQ(art_module_load(engine, copy, cut, &made, msg, sizeof msg), ART_EMODULE);
        free(copy);
    }
    CHECK(made == NULL && msg[0]);
    free(artifact);
}

/* --- input, output, syscalls ------------------------------------------------------ */

static void test_hello(void)
{
    for (uint32_t len = 0; len <= 65536; len = len ? len * 16 : 1) {
        char *text = malloc(len + 1);
        memset(text, 'x', len);
        subject *s = subject_new(GUEST_HELLO, (options){.input = text, .input_len = len});
        art_exit end = finished(s, ART_EXIT_RETURNED, 0);
        CHECK_EQ(end.output_len, len);
        CHECK(end.output && memcmp(end.output, text, len) == 0 && end.message[0] == '\0');
        CHECK(art_guest_first_ns(s->guest) != 0);
        subject_free(s);
        free(text);
    }
    subject *s = subject_new(GUEST_MINIMAL, (options){0});
    CHECK_EQ(art_guest_first_ns(s->guest), 0);
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    CHECK(end.output == NULL && end.output_len == 0);
    CHECK(art_guest_first_ns(s->guest) != 0);
    subject_free(s);
}

static void test_call_answer_and_failed_answer(void)
{
    subject *s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_CALL, 1, 0x10000, 4, 0x100, 64},
                                                            {SCRIPT_PEEK, 0x100},
                                                            {SCRIPT_CALL, 12, 0, 0, 0x100, 64},
                                                            {SCRIPT_PEEK, 0x100},
                                                            {SCRIPT_READ, 0, 0, 0x200, 4},
                                                            {SCRIPT_READ, 0, 1, 0x200, 3},
                                                            {SCRIPT_PEEK, 0x200},
                                                            {SCRIPT_RETURN, 77})});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK(!art_guest_can_resume(s->guest));
    art_request *r = art_guest_take_requests(s->guest);
    CHECK(r && !r->next && r->handle == 1 && r->op == 1 && r->len == 4);
    CHECK_EQ(r->payload[0], SCRIPT_CALL); /* the script's own first bytes */
    free(r);
    art_guest_wait wait = art_guest_waiting(s->guest);
    CHECK(wait.number == 1 && wait.count == 1 && wait.handles[0] == 1 && wait.ops == 1u << 1);
    answer(s, 7, 0, 0, 1, "nobody"); /* no such handle: dropped */
    CHECK(art_guest_has_answers(s->guest));
    CHECK(!art_guest_can_resume(s->guest));
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_WAIT);
    CHECK_EQ(art_guest_waiting(s->guest).number, 1);
    answer(s, 1, 0, 0, 1, "abcd");
    answer(s, 1, 0, 0, 2, "second answer, too late");
    CHECK(art_guest_can_resume(s->guest));
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    r = art_guest_take_requests(s->guest);
    CHECK(r && r->handle == 2 && r->op == 12 && r->len == 0);
    free(r);
    CHECK(art_guest_waiting(s->guest).ops == 1u << 12);
    answer(s, 2, 1, 0, 3, "oops");
    art_exit end = finished(s, ART_EXIT_FAILED, 77);
    CHECK_EQ(result(&end, 0), 4);
    CHECK_EQ(result(&end, 1), 0x64636261);
    CHECK_EQ(result(&end, 2), AGENTRT_EFAILED);
    CHECK_EQ(result(&end, 3), 0x73706f6f); /* the error is copied all the same */
    CHECK_EQ(result(&end, 4), AGENTRT_EFAILED);
    CHECK_EQ(result(&end, 5), 4);
    CHECK_EQ(result(&end, 6) & 0xffffff, 0x73706f);
    CHECK_EQ(end.output_len, 7 * 8);
    subject_free(s);
}

static void test_answer_larger_than_the_buffer(void)
{
    enum { LEN = 100000 };
    subject *s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_CALL, 1, 0, 0, 0x100, 4}, /* 0 */
                                                            {SCRIPT_READ, 0, LEN - 2, 0x200, 100},
                                                            {SCRIPT_PEEK, 0x200},
                                                            {SCRIPT_READ, 0, LEN, 0x200, 100},
                                                            {SCRIPT_READ, 0, LEN + 1, 0x200, 100},
                                                            {SCRIPT_READ, 0, -1, 0x200, 100}, /* 5 */
                                                            {SCRIPT_PEEK, 0x100},
                                                            {SCRIPT_PEEK, 0x104},
                                                            {SCRIPT_CALL, 1, 0, 0, 0x100, 0},
                                                            {SCRIPT_READ, 0, 0, 0x200, 1})});
    char *big = malloc(LEN + 1);
    memset(big, 'z', LEN);
    big[LEN] = '\0';
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 1, 0, 0, 1, big);
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 2, 0, 0, 2, "");
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    CHECK_EQ(result(&end, 0), LEN);
    CHECK_EQ(result(&end, 1), LEN);
    CHECK_EQ(result(&end, 2), 0x7a7a);
    CHECK_EQ(result(&end, 3), LEN);
    CHECK_EQ(result(&end, 4), LEN);
    CHECK_EQ(result(&end, 5), LEN);
    CHECK_EQ(result(&end, 6), 0x7a7a7a7a);
    CHECK_EQ(result(&end, 7), 0); /* not one byte behind the buffer */
    CHECK_EQ(result(&end, 8), 0);
    CHECK_EQ(result(&end, 9), 0);
    subject_free(s);
    free(big);
}

/* --- parallel syscalls -------------------------------------------------------------- */

/* Three syscalls, then waits for all three; handles are written to 0x100. */
#define THREE_WAITS                                                                                                    \
    SCRIPT({SCRIPT_SUBMIT, 1, 0, 0}, {SCRIPT_SUBMIT, 1, 0, 0}, {SCRIPT_SUBMIT, 3, 0, 0}, {SCRIPT_POKE, 0x100, 1},      \
           {SCRIPT_POKE, 0x104, 2}, {SCRIPT_POKE, 0x108, 3}, {SCRIPT_WAIT_ANY, 0x100, 3}, /* 6 */                      \
           {SCRIPT_READ, 2, 0, 0x200, 8}, {SCRIPT_READ, 1, 0, 0x200, 8}, {SCRIPT_CLOSE, 1}, {SCRIPT_CLOSE, 2},         \
           {SCRIPT_CLOSE, 2}, {SCRIPT_WAIT_ANY, 0x100, 3}, /* 12: 2 is closed */                                       \
           {SCRIPT_POKE, 0x104, 3}, {SCRIPT_WAIT_ANY, 0x100, 2}, /* 14 */                                              \
           {SCRIPT_WAIT_ANY, 0x108, 1}, {SCRIPT_WAIT_ANY, 0x100, 2}, {SCRIPT_CLOSE, 3})

static void check_three_waits(const art_exit *end)
{
    CHECK_EQ(result(end, 0), 1);
    CHECK_EQ(result(end, 2), 3);
    CHECK_EQ(result(end, 6), 1);
    CHECK_EQ(result(end, 7), 3);
    CHECK_EQ(result(end, 8), AGENTRT_EBADF); /* answered or not: no wait has returned it yet */
    CHECK_EQ(result(end, 9), AGENTRT_EBADF);
    CHECK_EQ(result(end, 10), 0);
    CHECK_EQ(result(end, 11), AGENTRT_EBADF);
    CHECK_EQ(result(end, 12), AGENTRT_EBADF);
    CHECK_EQ(result(end, 14), 0);
    CHECK_EQ(result(end, 15), 0);
    CHECK_EQ(result(end, 16), 0); /* waited for once more: at once, and the lower seq */
    CHECK_EQ(result(end, 17), 0);
}

static void test_wait_any_follows_seq_not_arrival(void)
{
    uint64_t fuel = 0;
    for (int order = 0; order < 2; order++) {
        subject *s = subject_new(GUEST_SCRIPT, (options){THREE_WAITS});
        CHECK_EQ(advance(s), ART_GUEST_WAIT);
        art_guest_wait wait = art_guest_waiting(s->guest);
        CHECK(wait.count == 3 && wait.handles[2] == 3 && wait.ops == (1u << 1 | 1u << 3));
        if (order) {
            answer(s, 1, 0, 0, 6, "one");
            answer(s, 2, 0, 0, 5, "two");
        } else {
            answer(s, 2, 0, 0, 5, "two");
            answer(s, 1, 0, 0, 6, "one");
        }
        answer(s, 3, 0, 0, 7, "three");
        art_exit end = finished(s, ART_EXIT_RETURNED, 0); /* nothing suspends any more */
        check_three_waits(&end);
        CHECK(fuel == 0 || fuel == art_guest_fuel_used(s->guest));
        fuel = art_guest_fuel_used(s->guest);
        subject_free(s);
    }
}

/* What a guest can read or close must not depend on when answers come. */
static void test_unwaited_handles_do_not_show_whether_they_are_answered(void)
{
    for (int early = 0; early < 2; early++) {
        subject *s = subject_new(GUEST_SCRIPT,
                                 (options){SCRIPT({SCRIPT_SUBMIT, 1, 0, 0}, {SCRIPT_SUBMIT, 1, 0, 0},
                                                  {SCRIPT_POKE, 0x100, 1}, {SCRIPT_POKE, 0x104, 2},
                                                  {SCRIPT_WAIT_ANY, 0x100, 1}, {SCRIPT_READ, 2, 0, 0x200, 8}, /* 5 */
                                                  {SCRIPT_PEEK, 0x200}, {SCRIPT_CLOSE, 2},
                                                  {SCRIPT_WAIT_ANY, 0x104, 1}, {SCRIPT_READ, 2, 0, 0x200, 8})});
        CHECK_EQ(advance(s), ART_GUEST_WAIT);
        if (early) {
            answer(s, 2, 0, 0, 9, "two");
        }
        answer(s, 1, 0, 0, 8, "one");
        if (!early) {
            CHECK_EQ(advance(s), ART_GUEST_WAIT);
            answer(s, 2, 0, 0, 9, "two");
        }
        art_exit end = finished(s, ART_EXIT_RETURNED, 0);
        CHECK_EQ(result(&end, 4), 0);
        CHECK_EQ(result(&end, 5), AGENTRT_EBADF);
        CHECK_EQ(result(&end, 6), 0);
        CHECK_EQ(result(&end, 7), AGENTRT_EBADF);
        CHECK_EQ(result(&end, 8), 0);
        CHECK_EQ(result(&end, 9), 3);
        subject_free(s);
    }
}

static void test_replay_suspends_each_wait_and_follows_the_control_plane(void)
{
    subject *s = subject_new(GUEST_SCRIPT, (options){THREE_WAITS, .replay = true});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_EQ(art_guest_waiting(s->guest).number, 1);
    answer(s, 2, 0, 0, 5, "two");
    CHECK_EQ(advance(s), ART_GUEST_WAIT); /* the wait for 1 and 3 */
    CHECK_EQ(art_guest_waiting(s->guest).number, 2);
    answer(s, 1, 0, 0, 6, "one");
    CHECK_EQ(advance(s), ART_GUEST_WAIT); /* 3 alone */
    CHECK_EQ(art_guest_waiting(s->guest).number, 3);
    answer(s, 2, 0, 0, 8, "closed handle");
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_EQ(art_guest_waiting(s->guest).number, 3);
    answer(s, 3, 0, 0, 7, "three");
    CHECK_EQ(advance(s), ART_GUEST_WAIT); /* answered all, and suspends all the same */
    CHECK_EQ(art_guest_waiting(s->guest).number, 4);
    CHECK(!art_guest_can_resume(s->guest));
    art_guest_go_live(s->guest);
    answer(s, 0, 0, 0, 0, "");
    CHECK(art_guest_can_resume(s->guest));
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    check_three_waits(&end);
    subject_free(s);

    /* an answer that came while the guest ran is none to the wait that begins later */
    s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_SUBMIT, 1, 0, 0}, {SCRIPT_SPIN, 1000000}, {SCRIPT_POKE, 0, 1},
                                                   {SCRIPT_WAIT_ANY, 0, 1}),
                                            .replay = true});
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    answer(s, 1, 0, 0, 1, "early");
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 1, 0, 0, 2, "wakes");
    finished(s, ART_EXIT_RETURNED, 0);
    subject_free(s);
}

static void test_in_flight_is_bounded_and_counts_handles_not_closed(void)
{
    script_line lines[64] = {0};
    uint32_t n = 0;
    for (int i = 0; i < INFLIGHT_MAX + 2; i++) {
        lines[n++] = (script_line){.what = SCRIPT_SUBMIT, .a = 1}; /* 0..9 */
    }
    lines[n++] = (script_line){.what = SCRIPT_CALL, .a = 1, .d = 0x100, .e = 4};    /* 10 */
    lines[n++] = (script_line){.what = SCRIPT_SUBMIT, .a = 13, .c = 5};             /* 11: a log line takes no handle */
    lines[n++] = (script_line){.what = SCRIPT_POKE, .a = 0, .b = 3};                /* 12 */
    lines[n++] = (script_line){.what = SCRIPT_WAIT_ANY, .a = 0, .b = 1};            /* 13 */
    lines[n++] = (script_line){.what = SCRIPT_SUBMIT, .a = 1};                      /* 14: answered is not closed */
    lines[n++] = (script_line){.what = SCRIPT_CLOSE, .a = 3};                       /* 15 */
    lines[n++] = (script_line){.what = SCRIPT_SUBMIT, .a = 1};                      /* 16 */
    lines[n++] = (script_line){.what = SCRIPT_SUBMIT, .a = 1};                      /* 17 */
    lines[n++] = (script_line){.what = SCRIPT_CLOSE, .a = INFLIGHT_MAX + 1};        /* 18: abandoned stays in flight */
    lines[n++] = (script_line){.what = SCRIPT_SUBMIT, .a = 1};                      /* 19 */
    subject *s = subject_new(GUEST_SCRIPT, (options){.input = lines, .input_len = n * sizeof *lines});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    for (int32_t handle = INFLIGHT_MAX; handle >= 1; handle--) {
        answer(s, handle, 0, 0, (uint64_t)handle, "x");
    }
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    for (uint32_t i = 0; i < INFLIGHT_MAX; i++) {
        CHECK_EQ(result(&end, i), i + 1);
    }
    CHECK_EQ(result(&end, INFLIGHT_MAX), AGENTRT_EAGAIN);
    CHECK_EQ(result(&end, 10), AGENTRT_EAGAIN);
    CHECK_EQ(result(&end, 11), 0);
    CHECK_EQ(result(&end, 13), 0);
    CHECK_EQ(result(&end, 14), AGENTRT_EAGAIN);
    CHECK_EQ(result(&end, 15), 0);
    CHECK_EQ(result(&end, 16), INFLIGHT_MAX + 1);
    CHECK_EQ(result(&end, 17), AGENTRT_EAGAIN);
    CHECK_EQ(result(&end, 18), AGENTRT_EBADF);
    CHECK_EQ(result(&end, 19), AGENTRT_EAGAIN);
    subject_free(s);
}

/* --- statuses ------------------------------------------------------------------------ */

enum { SIZE = 4 << 16 }; /* of a script guest's memory */

static void test_every_status(void)
{
#define R(code, ...) {{__VA_ARGS__}, code}
    static const struct {
        script_line line;
        int64_t expected;
    } cases[] = {
        /* ops */
        R(AGENTRT_ENOSYS, SCRIPT_SUBMIT, 0, 0, 0),
        R(AGENTRT_ENOSYS, SCRIPT_SUBMIT, -1, 0, 0),
        R(AGENTRT_ENOSYS, SCRIPT_SUBMIT, 15, 0, 0),
        R(AGENTRT_ENOSYS, SCRIPT_SUBMIT, 16, 0, 0),
        R(AGENTRT_ENOSYS, SCRIPT_SUBMIT, INT32_MAX, 0, 0),
        R(AGENTRT_ENOSYS, SCRIPT_CALL, INT32_MIN, 0, 0, 0, 0),
        R(0, SCRIPT_CALL, 13, 0, 5, 0, 0),
        /* request pointers */
        R(AGENTRT_EFAULT, SCRIPT_SUBMIT, 1, SIZE, 1),
        R(AGENTRT_EFAULT, SCRIPT_SUBMIT, 1, SIZE - 4, 5),
        R(AGENTRT_EFAULT, SCRIPT_SUBMIT, 1, SIZE + 1, 0),
        R(AGENTRT_EFAULT, SCRIPT_SUBMIT, 1, -1, 1),
        R(AGENTRT_EFAULT, SCRIPT_SUBMIT, 1, -1, 2), /* wraps to 1 in 32 bits */
        R(AGENTRT_EFAULT, SCRIPT_SUBMIT, 1, -4, 8),
        R(AGENTRT_E2BIG, SCRIPT_SUBMIT, 1, 0, REQUEST_MAX + 1),
        R(AGENTRT_E2BIG, SCRIPT_SUBMIT, 1, 0, -1),
        R(AGENTRT_E2BIG, SCRIPT_SUBMIT, 1, -1, INT32_MIN),
        R(AGENTRT_EFAULT, SCRIPT_CALL, 1, SIZE, 1, 0, 0),
        R(AGENTRT_EFAULT, SCRIPT_CALL, 1, 0, 0, SIZE, 1),
        R(AGENTRT_EFAULT, SCRIPT_CALL, 1, 0, 0, 0, -1),
        R(AGENTRT_EFAULT, SCRIPT_CALL, 1, 0, 0, 16, -1),
        R(AGENTRT_EFAULT, SCRIPT_CALL, 1, 0, 0, -16, 32),
        R(AGENTRT_EFAULT, SCRIPT_CALL, 1, 0, 0, SIZE + 1, 0),
        R(AGENTRT_E2BIG, SCRIPT_CALL, 1, 0, REQUEST_MAX + 1, 0, 0),
        /* none of these took a handle; this one does, at the very end of memory */
        R(1, SCRIPT_SUBMIT, 1, SIZE, 0),
        R(2, SCRIPT_SUBMIT, 1, SIZE - REQUEST_MAX, REQUEST_MAX),
        /* handles */
        R(AGENTRT_EBADF, SCRIPT_WAIT_ANY, 0, 0),
        R(AGENTRT_EBADF, SCRIPT_WAIT_ANY, 0x8000, 1), /* handle 0 */
        R(AGENTRT_EBADF, SCRIPT_WAIT_ANY, 0x8000, INFLIGHT_MAX),
        R(AGENTRT_E2BIG, SCRIPT_WAIT_ANY, 0x8000, INFLIGHT_MAX + 1),
        R(AGENTRT_E2BIG, SCRIPT_WAIT_ANY, 0x8000, -1),
        R(AGENTRT_E2BIG, SCRIPT_WAIT_ANY, 0x8000, 0x40000001), /* times 4 wraps to 4 */
        R(AGENTRT_EFAULT, SCRIPT_WAIT_ANY, SIZE, 1),
        R(AGENTRT_EFAULT, SCRIPT_WAIT_ANY, SIZE - 3, 1),
        R(AGENTRT_EFAULT, SCRIPT_WAIT_ANY, -4, 2),
        R(AGENTRT_EBADF, SCRIPT_CLOSE, 0),
        R(AGENTRT_EBADF, SCRIPT_CLOSE, 3),
        R(AGENTRT_EBADF, SCRIPT_CLOSE, -1),
        R(AGENTRT_EBADF, SCRIPT_CLOSE, 1),
        R(AGENTRT_EBADF, SCRIPT_READ, 0, 0, 0, 0), /* no call yet */
        R(AGENTRT_EBADF, SCRIPT_READ, 1, 0, 0, 0),
        R(AGENTRT_EBADF, SCRIPT_READ, 99, 0, 0, 0),
        R(AGENTRT_EBADF, SCRIPT_READ, -1, 0, 0, 0),
        R(AGENTRT_EFAULT, SCRIPT_READ, 0, 0, SIZE, 1),
        R(AGENTRT_EFAULT, SCRIPT_READ, 0, 0, -1, 2),
        /* input (its length is filled in below), restored */
        R(-100, SCRIPT_INPUT, 0, SIZE, 0),
        R(-100, SCRIPT_INPUT, -1, 0x8000, 100),
        R(-100, SCRIPT_INPUT, 0, 0x8000, 4),
        R(AGENTRT_EFAULT, SCRIPT_INPUT, 0, SIZE, 1),
        R(AGENTRT_EFAULT, SCRIPT_INPUT, 0, 0, -1),
        R(AGENTRT_EFAULT, SCRIPT_INPUT, 0, -1, 2),
        R(AGENTRT_ENODATA, SCRIPT_RESTORED, 0, 0, 0),
        R(AGENTRT_ENODATA, SCRIPT_RESTORED, 0, -1, -1),
        /* output, random */
        R(0, SCRIPT_OUTPUT, 0, SIZE),
        R(0, SCRIPT_OUTPUT, SIZE, 0),
        R(AGENTRT_EFAULT, SCRIPT_OUTPUT, SIZE, 1),
        R(AGENTRT_EFAULT, SCRIPT_OUTPUT, 1, SIZE),
        R(AGENTRT_EFAULT, SCRIPT_OUTPUT, -1, 2),
        R(AGENTRT_E2BIG, SCRIPT_OUTPUT, 0, RESULT_MAX + 1),
        R(AGENTRT_E2BIG, SCRIPT_OUTPUT, 0, -1),
        R(0, SCRIPT_RANDOM, SIZE, 0),
        R(0, SCRIPT_RANDOM, SIZE - 3, 3),
        R(AGENTRT_EFAULT, SCRIPT_RANDOM, SIZE - 3, 4),
        R(AGENTRT_EFAULT, SCRIPT_RANDOM, -1, 2),
        R(AGENTRT_E2BIG, SCRIPT_RANDOM, 0, REQUEST_MAX + 1),
        R(AGENTRT_E2BIG, SCRIPT_RANDOM, 0, -1),
    };
#undef R
    enum { COUNT = sizeof cases / sizeof *cases };
    script_line lines[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        lines[i] = cases[i].line;
    }
    subject *s = subject_new(GUEST_SCRIPT, (options){.input = lines, .input_len = sizeof lines});
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    CHECK_EQ(end.output_len, COUNT * 8);
    for (uint32_t i = 0; i < COUNT; i++) {
        int64_t expected = cases[i].expected == -100 ? (int64_t)sizeof lines : cases[i].expected;
        CHECK_MSG(result(&end, i) == expected, "case %u: %jd, expected %jd", i, (intmax_t)result(&end, i),
                  (intmax_t)expected);
    }
    subject_free(s);
}

static void test_restored(void)
{
    subject *s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_RESTORED, 0, 0x100, 2}, {SCRIPT_PEEK, 0x100},
                                                            {SCRIPT_RESTORED, 2, 0x100, 9}, {SCRIPT_PEEK, 0x100}),
                                                     .restored = "state"});
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    CHECK_EQ(result(&end, 0), 5);
    CHECK_EQ(result(&end, 1), 0x7473);
    CHECK_EQ(result(&end, 2), 5);
    CHECK_EQ(result(&end, 3) & 0xffffff, 0x657461);
    subject_free(s);
    s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_RESTORED, 0, 0, 0}), .restored = ""});
    end = finished(s, ART_EXIT_RETURNED, 0);
    CHECK_EQ(result(&end, 0), 0); /* empty, not absent */
    subject_free(s);
}

static void test_no_memory_and_odd_memory(void)
{
    subject *s = subject_new(GUEST_NO_MEMORY, (options){0});
    CHECK_EQ(AGENTRT_EFAULT, -2);
    finished(s, ART_EXIT_FAILED, 2020202);
    subject_free(s);
    s = subject_new(GUEST_ODD_MEMORY, (options){0});
    finished(s, ART_EXIT_FAILED, AGENTRT_EFAULT);
    subject_free(s);
}

/* --- traps ------------------------------------------------------------------------------ */

static void expect_trap(options o, enum guest_name name, int32_t code, const char *says)
{
    subject *s = subject_new(name, o);
    art_exit end = finished(s, ART_EXIT_TRAP, code);
    CHECK_MSG(strstr(end.message, says), "\"%s\" does not say \"%s\"", end.message, says);
    CHECK(strlen(end.message) <= ART_MSG_BYTES);
    subject_free(s);
}

static void test_traps(void)
{
    enum { STACK_OVERFLOW = 0, MEMORY_OUT_OF_BOUNDS = 1, INDIRECT_CALL_TO_NULL = 4, INTEGER_OVERFLOW = 6,
           INTEGER_DIVISION_BY_ZERO = 7, UNREACHABLE = 9, TABLE_OUT_OF_BOUNDS = 3 };
    expect_trap((options){SCRIPT({SCRIPT_UNREACHABLE})}, GUEST_SCRIPT, UNREACHABLE, "boom");
    expect_trap((options){SCRIPT({SCRIPT_LOAD, -1})}, GUEST_SCRIPT, MEMORY_OUT_OF_BOUNDS, "out of bounds memory access");
    expect_trap((options){SCRIPT({SCRIPT_LOAD, SIZE - 3})}, GUEST_SCRIPT, MEMORY_OUT_OF_BOUNDS, "entry");
    expect_trap((options){SCRIPT({SCRIPT_FILL, 0, 0, SIZE + 1})}, GUEST_SCRIPT, MEMORY_OUT_OF_BOUNDS, "");
    expect_trap((options){SCRIPT({SCRIPT_DIVIDE, 1, 0})}, GUEST_SCRIPT, INTEGER_DIVISION_BY_ZERO, "divide by zero");
    expect_trap((options){SCRIPT({SCRIPT_DIVIDE, INT32_MIN, -1})}, GUEST_SCRIPT, INTEGER_OVERFLOW, "overflow");
    expect_trap((options){SCRIPT({SCRIPT_INDIRECT, 0})}, GUEST_SCRIPT, INDIRECT_CALL_TO_NULL, "");
    expect_trap((options){SCRIPT({SCRIPT_INDIRECT, 99})}, GUEST_SCRIPT, TABLE_OUT_OF_BOUNDS, "");
    expect_trap((options){SCRIPT({SCRIPT_RECURSE, INT32_MAX})}, GUEST_SCRIPT, STACK_OVERFLOW, "recurse");
    expect_trap((options){0}, GUEST_START_TRAPS, UNREACHABLE, "start_trap");
    expect_trap((options){0}, GUEST_DATA_OUTSIDE, MEMORY_OUT_OF_BOUNDS, "");
    subject *s = subject_new(GUEST_THROWS, (options){0});
    CHECK_EQ(advance(s), ART_GUEST_DONE);
    art_exit end = art_guest_exit(s->guest);
    CHECK_MSG(end.reason == ART_EXIT_TRAP && end.message[0], "%d %d %s", end.reason, end.code, end.message);
    subject_free(s);
    /* deep, but not too deep; and what a guest said before its trap is kept */
    s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_RECURSE, 500}, {SCRIPT_OUTPUT, 0, 3}, {SCRIPT_UNREACHABLE})});
    end = finished(s, ART_EXIT_TRAP, UNREACHABLE);
    CHECK_EQ(end.output_len, 3);
    subject_free(s);
}

/* --- fuel -------------------------------------------------------------------------------- */

/* Outputs the clock after some work, several times: with clock 0 that is the fuel used at fixed positions. */
#define POSITIONS                                                                                                      \
    SCRIPT({SCRIPT_CLOCK_NOW}, {SCRIPT_SPIN, 10000}, {SCRIPT_CLOCK_NOW}, {SCRIPT_FILL, 0x8000, 1, 0x4001},             \
           {SCRIPT_CLOCK_NOW}, {SCRIPT_RECURSE, 300}, {SCRIPT_CLOCK_NOW}, {SCRIPT_GROW, 3}, {SCRIPT_CLOCK_NOW},        \
           {SCRIPT_RANDOM, 0x8000, 0x4000}, {SCRIPT_CLOCK_NOW}, {SCRIPT_SPIN, 77777}, {SCRIPT_CLOCK_NOW})
enum { POSITION_COUNT = 13 };

static void test_fuel_positions_do_not_depend_on_slices(void)
{
    static const uint64_t slices[] = {1, 7, 100, 50000, 9999, 1000, 700000, 1000000, UINT64_MAX, UINT64_C(1) << 39};
    int64_t expected[POSITION_COUNT];
    uint64_t used = 0, seed = check_seed(20);
    for (uint32_t round = 0; round < 40; round++) {
        uint64_t slice = round < sizeof slices / sizeof *slices ? slices[round] : 1 + check_random(&seed) % 1000000;
        subject *s = subject_new(GUEST_SCRIPT, (options){POSITIONS, .slice = slice, .full_slices = round % 4 != 3});
        art_exit end = finished(s, ART_EXIT_RETURNED, 0);
        if (slice == 1) {
            CHECK(s->polls > 1000);
        } else if (slice == UINT64_MAX) {
            CHECK(s->polls < 20); /* little more than host work makes it yield */
        }
        for (uint32_t i = 0; i < POSITION_COUNT; i++) {
            if (round == 0) {
                expected[i] = result(&end, i);
            }
            CHECK_EQ(result(&end, i), expected[i]);
        }
        CHECK(round == 0 || used == art_guest_fuel_used(s->guest));
        used = art_guest_fuel_used(s->guest);
        subject_free(s);
    }
    CHECK(expected[0] > 0 && expected[2] > expected[0] + 10000 && expected[12] > expected[10]);
}

/* The engine counts in a register: at a trap in the middle of a stretch its count depends on the micro-slice, and the guest is
 * charged up to its last call of an import. Where the count is exact, all is charged. */
static void test_fuel_of_traps(void)
{
    static const uint64_t slices[] = {1, 777, SLICE, UINT64_MAX};
    static const script_line fates[] = {{SCRIPT_LOAD, -1}, {SCRIPT_DIVIDE, 1, 0}, {SCRIPT_INDIRECT, 99}, {SCRIPT_FILL, 0, 0, -1},
                                        {SCRIPT_UNREACHABLE}, {SCRIPT_INDIRECT, 0}, {SCRIPT_RECURSE, INT32_MAX}};
    subject *s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_CLOCK_NOW}, {SCRIPT_SPIN, 10000}, {SCRIPT_CLOCK_NOW})});
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    uint64_t at_call = (uint64_t)result(&end, 0), spun = (uint64_t)result(&end, 2);
    subject_free(s);
    CHECK(at_call > 0 && spun > at_call + 10000);
    for (uint32_t fate = 0; fate < sizeof fates / sizeof *fates; fate++) {
        uint64_t used = 0;
        for (int i = 0; i < 4; i++) {
            s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_CLOCK_NOW}, {SCRIPT_SPIN, 10000}, fates[fate]), .slice = slices[i],
                                                    .full_slices = true});
            CHECK_EQ(advance(s), ART_GUEST_DONE); /* and the account was charged the same */
            CHECK_EQ(art_guest_exit(s->guest).reason, ART_EXIT_TRAP);
            CHECK_MSG(i == 0 || used == art_guest_fuel_used(s->guest), "fate %u: %ju and %ju", fate, (uintmax_t)used,
                      (uintmax_t)art_guest_fuel_used(s->guest));
            used = art_guest_fuel_used(s->guest);
            subject_free(s);
        }
        if (fates[fate].what == SCRIPT_UNREACHABLE || fates[fate].what == SCRIPT_RECURSE ||
            (fates[fate].what == SCRIPT_INDIRECT && !fates[fate].a)) {
            CHECK(used > spun - 50);
        } else {
            CHECK_EQ(used, at_call);
        }
    }
}

static void test_memory_digest(void)
{
    static const script_line changes[][2] = {{{SCRIPT_POKE, 0, 1}, {SCRIPT_GROW, 0}},      {{SCRIPT_POKE, 0, 1}, {SCRIPT_GROW, 0}},
                                             {{SCRIPT_POKE, 0, 2}, {SCRIPT_GROW, 0}},      {{SCRIPT_POKE, 4, 1}, {SCRIPT_GROW, 0}},
                                             {{SCRIPT_POKE, 0x3fffc, 1}, {SCRIPT_GROW, 0}}};
    uint64_t digests[6];
    for (int i = 0; i < 6; i++) {
        subject *s = subject_new(GUEST_SCRIPT, (options){SCRIPT(changes[i % 5][0], changes[i % 5][1], {SCRIPT_CALL, 1})});
        CHECK_EQ(art_guest_memory_digest(s->guest), 0);
        CHECK_EQ(advance(s), ART_GUEST_WAIT);
        digests[i] = art_guest_memory_digest(s->guest);
        CHECK_EQ(digests[i], art_guest_memory_digest(s->guest));
        answer(s, 1, 0, 0, 1, "x");
        finished(s, ART_EXIT_RETURNED, 0);
        CHECK_EQ(art_guest_memory_digest(s->guest), 0);
        subject_free(s);
    }
    CHECK_EQ(digests[0], digests[1]);
    CHECK_EQ(digests[0], digests[5]);
    for (int i = 0; i < 5; i++) {
        for (int k = 2; k < i; k++) { /* 0 and 1 are the same */
            CHECK(digests[i] != digests[k] && digests[i] != digests[0]);
        }
    }
    uint64_t grown[2];
    for (int i = 0; i < 2; i++) { /* zeros that were not there */
        subject *s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_CALL, 1}, {SCRIPT_GROW, 1}, {SCRIPT_CALL, 1})});
        for (int32_t call = 1; call <= i + 1; call++) {
            CHECK_EQ(advance(s), ART_GUEST_WAIT);
            if (call <= i) {
                answer(s, call, 0, 0, (uint64_t)call, "");
            }
        }
        grown[i] = art_guest_memory_digest(s->guest);
        subject_free(s);
    }
    CHECK(grown[0] && grown[1] && grown[0] != grown[1]);
    subject *s = subject_new(GUEST_HOG, (options){0});
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    CHECK_EQ(art_guest_memory_digest(s->guest), 0); /* it has none */
    subject_free(s);
}

/* Where fuel ends is where it ends: the same output before, whatever the slices. */
static void test_fuel_ends_at_the_same_place(void)
{
    static const uint64_t slices[] = {1, 7, 1000, 50000, 1000000, UINT64_MAX};
    subject *s = subject_new(GUEST_COMPUTE, (options){.input = "\x10\0\0\0", .input_len = 4});
    finished(s, ART_EXIT_RETURNED, 0);
    uint64_t needed = art_guest_fuel_used(s->guest), seed = check_seed(21);
    subject_free(s);
    for (uint32_t round = 0; round < 40; round++) {
        uint64_t fuel = round == 0 ? 1 : round == 1 ? needed - 1 : 1 + check_random(&seed) % needed;
        uint64_t used = 0;
        for (uint32_t i = 0; i < sizeof slices / sizeof *slices; i++) {
            s = subject_new(GUEST_COMPUTE, (options){.input = "\x10\0\0\0", .input_len = 4, .fuel = fuel, .slice = slices[i],
                                                    .full_slices = i != 3});
            CHECK_EQ(advance(s), ART_GUEST_DONE);
            art_exit end = art_guest_exit(s->guest);
            CHECK_MSG(end.reason == ART_EXIT_FUEL || fuel >= needed - 10, "reason %d with fuel %ju", end.reason, (uintmax_t)fuel);
            CHECK(art_guest_fuel_used(s->guest) <= fuel);
            CHECK(i == 0 || used == art_guest_fuel_used(s->guest));
            used = art_guest_fuel_used(s->guest);
            subject_free(s);
        }
    }
    s = subject_new(GUEST_COMPUTE, (options){.input = "\x10\0\0\0", .input_len = 4, .fuel = needed});
    finished(s, ART_EXIT_RETURNED, 0);
    CHECK_EQ(art_guest_fuel_used(s->guest), needed);
    subject_free(s);
    s = subject_new(GUEST_MINIMAL, (options){.fuel = UINT64_MAX, .slice = UINT64_MAX});
    finished(s, ART_EXIT_RETURNED, 0);
    subject_free(s);
}

/* Granted in pieces, of whatever size, it is the same run. A poll may need all that one stretch of code can use, so a guest
 * stops long before the store is empty (W47). */
static void test_fault_W47_fuel_granted_in_pieces(void)
{
    script_line lines[] = {{.what = SCRIPT_SPIN, .a = 2000000}, {.what = SCRIPT_SPIN, .a = 2000000},
                           {.what = SCRIPT_CLOCK_NOW},          {.what = SCRIPT_CALL, .a = 1},
                           {.what = SCRIPT_SPIN, .a = 2000000}, {.what = SCRIPT_CLOCK_NOW}};
    options o = {.input = lines, .input_len = sizeof lines};
    subject *s = subject_new(GUEST_SCRIPT, o);
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 1, 0, 0, 1, "x");
    art_exit whole = finished(s, ART_EXIT_RETURNED, 0);
    uint64_t needed = art_guest_fuel_used(s->guest), seed = check_seed(22);
    for (uint32_t round = 0; round < 60; round++) {
        static const uint64_t pieces[] = {1 << 19, 1 << 22, 9 << 20, 20 << 20, 50 << 20};
        uint64_t piece = pieces[round % 5], slice = round % 3 ? 1 + check_random(&seed) % 100000 : SLICE, granted = 1;
        o.slice = slice < 1000 ? slice * 100 : slice;
        o.fuel = 1;
        o.not_final = true;
        subject *t = subject_new(GUEST_SCRIPT, o);
        uint32_t stops = 0;
        for (;;) {
            art_guest_outcome outcome = advance(t);
            if (outcome == ART_GUEST_DONE) {
                break;
            }
            if (outcome == ART_GUEST_WAIT) {
                answer(t, 1, 0, 0, 1, "x");
                continue;
            }
            CHECK_EQ(outcome, ART_GUEST_NO_FUEL);
            CHECK_EQ(art_guest_poll(t->guest), ART_GUEST_NO_FUEL); /* and stays so */
            stops++;
            uint64_t now = piece / 2 + check_random(&seed) % piece;
            granted += now;
            /* the last piece may be an empty one that only says so */
            bool last = granted >= needed + (round % 2 ? 0 : piece);
            art_fuel_grant(&t->fuel, now, last && round % 4 != 0);
            if (last && round % 4 == 0) {
                art_fuel_grant(&t->fuel, 0, true);
            }
        }
        art_exit end = art_guest_exit(t->guest);
        CHECK_MSG(end.reason == ART_EXIT_RETURNED, "reason %d after %ju of %ju", end.reason, (uintmax_t)granted, (uintmax_t)needed);
        CHECK(stops > 0);
        CHECK(end.output_len == whole.output_len && memcmp(end.output, whole.output, end.output_len) == 0);
        CHECK_EQ(art_guest_fuel_used(t->guest), needed);
        subject_free(t);
    }
    subject_free(s);

    /* not enough after all, and final: then it runs out, at the same place */
    o.fuel = needed / 2;
    o.not_final = true;
    s = subject_new(GUEST_SCRIPT, o);
    CHECK_EQ(advance(s), ART_GUEST_NO_FUEL);
    art_fuel_grant(&s->fuel, 0, true);
    CHECK_EQ(advance(s), ART_GUEST_DONE);
    CHECK_EQ(art_guest_exit(s->guest).reason, ART_EXIT_FUEL);
    uint64_t used = art_guest_fuel_used(s->guest);
    subject_free(s);
    o.not_final = false;
    s = subject_new(GUEST_SCRIPT, o);
    finished(s, ART_EXIT_FUEL, 11);
    CHECK_EQ(art_guest_fuel_used(s->guest), used);
    subject_free(s);
}

/* An answer that waits to be taken does not make a guest without fuel look runnable for ever. */
static void test_no_fuel_with_an_answer_waiting(void)
{
    subject *s = subject_new(GUEST_ASKER, (options){.fuel = 9 << 20, .not_final = true});
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    answer(s, 1, 0, 0, 1, "x");
    CHECK_EQ(advance(s), ART_GUEST_NO_FUEL);
    CHECK(art_guest_has_answers(s->guest));
    subject_free(s);
}

/* --- host functions are bounded too --------------------------------------------------------- */

static void test_fault_W49_host_calls_do_not_hold_the_worker(void)
{
    static const enum guest_name names[] = {GUEST_RANDOMER, GUEST_CLOCKWATCHER, GUEST_LOGGER};
    for (uint32_t i = 0; i < 3; i++) {
        subject *s = subject_new(names[i], (options){.slice = UINT64_C(1) << 40});
        for (int polls = 0; polls < 200; polls++) { /* without the bound the first poll would not return for minutes */
            CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
            art_guest_pace(s->guest, 0);
            drop_requests(s->guest);
        }
        art_guest_kill(s->guest);
        CHECK_EQ(art_guest_exit(s->guest).reason, ART_EXIT_KILLED);
        check_fuel(s);
        subject_free(s);
    }
    /* a pause inside a wait that is answered already */
    script_line lines[300] = {{.what = SCRIPT_SUBMIT, .a = 1}, {.what = SCRIPT_POKE, .a = 0, .b = 1}};
    for (int i = 2; i < 300; i++) {
        lines[i] = (script_line){.what = SCRIPT_WAIT_ANY, .a = 0, .b = 1};
    }
    subject *s = subject_new(GUEST_SCRIPT, (options){.input = lines, .input_len = sizeof lines, .slice = UINT64_C(1) << 40,
                                                   .full_slices = true});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 1, 0, 0, 1, "x");
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    for (uint32_t i = 2; i < 300; i++) {
        CHECK_EQ(result(&end, i), 0);
    }
    CHECK(s->polls > 3);
    CHECK_EQ(art_guest_waiting(s->guest).number, 298);
    subject_free(s);
}

static void test_log_is_bounded_in_bytes(void)
{
    subject *s = subject_new(GUEST_LOGGER, (options){0});
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2000; i++) {
            CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
        }
        uint64_t lines = 0, bytes = 0;
        for (art_request *r = art_guest_take_requests(s->guest), *next; r; r = next) {
            next = r->next;
            CHECK(r->handle == 0 && r->op == 13 && r->len == 1000);
            lines++;
            bytes += sizeof *r + r->len;
            free(r);
        }
        CHECK(lines > 40 && bytes < 70000);
    }
    subject_free(s);
}

/* --- clock and randomness --------------------------------------------------------------------- */

static void test_clock(void)
{
    options o = {SCRIPT({SCRIPT_CLOCK_NOW}, {SCRIPT_SPIN, 1000}, {SCRIPT_CLOCK_NOW}, {SCRIPT_CALL, 1}, {SCRIPT_CLOCK_NOW},
                        {SCRIPT_CALL, 1}, {SCRIPT_CLOCK_NOW}, {SCRIPT_CALL, 1}, {SCRIPT_CLOCK_NOW}),
                 .clock_ns = 1000000000};
    int64_t first[9];
    for (int round = 0; round < 3; round++) {
        subject *s = subject_new(GUEST_SCRIPT, o);
        CHECK_EQ(advance(s), ART_GUEST_WAIT);
        answer(s, 1, 0, 5000000000, 1, "");
        CHECK_EQ(advance(s), ART_GUEST_WAIT);
        answer(s, 2, 0, 4000000000, 2, ""); /* a clock that was set back */
        CHECK_EQ(advance(s), ART_GUEST_WAIT);
        answer(s, 3, 0, 0, 3, "");
        art_exit end = finished(s, ART_EXIT_RETURNED, 0);
        CHECK(result(&end, 0) >= 1000000000 && result(&end, 0) < 1001000000);
        CHECK(result(&end, 2) > result(&end, 0) + 1000);
        CHECK(result(&end, 4) >= 5000000000 && result(&end, 4) < 5001000000);
        CHECK(result(&end, 6) > result(&end, 4));
        CHECK(result(&end, 8) > result(&end, 6) && result(&end, 8) < 5002000000);
        for (uint32_t i = 0; i < 9; i++) {
            first[i] = round ? first[i] : result(&end, i);
            CHECK_EQ(result(&end, i), first[i]);
        }
        subject_free(s);
    }
}

static void test_random(void)
{
    options o = {SCRIPT({SCRIPT_RANDOM, 0x100, 7}, {SCRIPT_PEEK, 0x100}, {SCRIPT_PEEK, 0x104}, {SCRIPT_RANDOM, 0x100, 8},
                        {SCRIPT_PEEK, 0x100}, {SCRIPT_RANDOM, 0x100, 0}, {SCRIPT_RANDOM, 0x100, 8}, {SCRIPT_PEEK, 0x100})};
    int64_t seen[3][8];
    static const uint8_t seeds[] = {0, 0, 1};
    for (int round = 0; round < 3; round++) {
        o.seed = seeds[round];
        subject *s = subject_new(GUEST_SCRIPT, o);
        art_exit end = finished(s, ART_EXIT_RETURNED, 0);
        for (uint32_t i = 0; i < 8; i++) {
            seen[round][i] = result(&end, i);
        }
        subject_free(s);
    }
    CHECK(memcmp(seen[0], seen[1], sizeof seen[0]) == 0);
    CHECK(seen[0][1] != seen[2][1] && seen[0][4] != seen[2][4]);
    CHECK(seen[0][1] != 0 && seen[0][1] != seen[0][4] && seen[0][4] != seen[0][7]);
    CHECK_EQ(seen[0][2] >> 24 & 0xff, 0); /* the eighth byte stayed as it was */
}

/* --- start functions, memory, kill ---------------------------------------------------------------- */

static void test_start_functions(void)
{
    subject *s = subject_new(GUEST_START_COUNTS, (options){0});
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD); /* it yields before its entry has begun */
    CHECK_EQ(art_guest_first_ns(s->guest), 0);
    finished(s, ART_EXIT_RETURNED, 0);
    subject_free(s);
    s = subject_new(GUEST_START_LOOPS, (options){.fuel = 10000000});
    finished(s, ART_EXIT_FUEL, 11);
    subject_free(s);
    s = subject_new(GUEST_START_CALLS, (options){0});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 1, 0, 0, 1, "hello");
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    CHECK(end.output_len == 5 && memcmp(end.output, "hello", 5) == 0);
    subject_free(s);
}

static void test_memory_grows_to_the_limit(void)
{
    subject *s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_GROW, 1}, {SCRIPT_GROW, MEMORY_PAGES_MAX},
                                                            {SCRIPT_GROW, MEMORY_PAGES_MAX - 5 + 1}, {SCRIPT_GROW, -1},
                                                            {SCRIPT_GROW, MEMORY_PAGES_MAX - 5}, {SCRIPT_GROW, 0},
                                                            {SCRIPT_GROW, 1}, {SCRIPT_POKE, (MEMORY_PAGES_MAX << 16) - 4, 5},
                                                            {SCRIPT_RANDOM, (MEMORY_PAGES_MAX << 16) - 4, 4},
                                                            {SCRIPT_RANDOM, (MEMORY_PAGES_MAX << 16) - 4, 5})});
    art_exit end = finished(s, ART_EXIT_RETURNED, 0);
    static const int64_t expected[] = {4, -1, -1, -1, 5, MEMORY_PAGES_MAX, -1, 0, 0, AGENTRT_EFAULT};
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(result(&end, i), expected[i]);
    }
    subject_free(s);
}

static void test_kill_and_destroy_in_every_state(void)
{
    for (int destroy_only = 0; destroy_only < 2; destroy_only++) {
        for (int state = 0; state < 6; state++) {
            static const enum guest_name names[] = {GUEST_HOG,    GUEST_START_LOOPS, GUEST_HOG,
                                                    GUEST_SCRIPT, GUEST_START_CALLS, GUEST_MINIMAL};
            subject *s = subject_new(names[state], (options){SCRIPT({SCRIPT_CALL, 1})});
            if (state == 1 || state == 2) {
                CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
            } else if (state == 3 || state == 4) {
                CHECK_EQ(advance(s), ART_GUEST_WAIT);
                answer(s, 1, 0, 0, 1, "never read");
            } else if (state == 5) {
                finished(s, ART_EXIT_RETURNED, 0);
            }
            if (!destroy_only) {
                art_guest_kill(s->guest);
                CHECK_EQ(art_guest_exit(s->guest).reason, state == 5 ? ART_EXIT_RETURNED : ART_EXIT_KILLED);
                check_fuel(s);
                CHECK_EQ(art_guest_waiting(s->guest).count, 0);
                art_guest_kill(s->guest);
                check_fuel(s);
            }
            subject_free(s);
        }
    }
    /* as often as there are slots, and more: none is lost */
    for (int i = 0; i < 100; i++) {
        subject *s = subject_new(i % 2 ? GUEST_HOG : GUEST_START_LOOPS, (options){0});
        CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
        subject_free(s);
    }
}

static void test_pool_that_is_full_is_an_engine_exit(void)
{
    subject *held[8];
    for (int i = 0; i < 8; i++) {
        held[i] = subject_new(GUEST_HOG, (options){0});
        CHECK_EQ(art_guest_poll(held[i]->guest), ART_GUEST_YIELD);
    }
    subject *s = subject_new(GUEST_HOG, (options){0});
    art_exit end = finished(s, ART_EXIT_ENGINE, 0);
    CHECK(strstr(end.message, "limit"));
    subject_free(s);
    for (int i = 0; i < 8; i++) {
        subject_free(held[i]);
    }
    s = subject_new(GUEST_MINIMAL, (options){0});
    finished(s, ART_EXIT_RETURNED, 0);
    subject_free(s);
}

static void test_fault_W53_reused_memory_is_zero(void)
{
    for (int round = 0; round < 5; round++) {
        subject *dirty[8];
        for (int i = 0; i < 8; i++) { /* all slots */
            dirty[i] = subject_new(GUEST_DIRTY, (options){0});
            CHECK_EQ(art_guest_poll(dirty[i]->guest), ART_GUEST_YIELD);
        }
        for (int i = 0; i < 8; i++) {
            if (i % 2) {
                finished(dirty[i], ART_EXIT_RETURNED, 0);
            }
            subject_free(dirty[i]);
        }
        for (int i = 0; i < 8; i++) {
            subject *s = subject_new(GUEST_SCAN, (options){0});
            finished(s, ART_EXIT_RETURNED, 0);
            subject_free(s);
        }
    }
}

static uint64_t mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    uint64_t lines = 0;
    for (int c; (c = fgetc(maps)) != EOF;) {
        lines += c == '\n';
    }
    fclose(maps);
    return lines;
}

/* Engines and guests come and go; mappings do not pile up (W51). */
static void test_fault_W51_engines_leave_no_mappings(void)
{
    uint64_t before = 0;
    for (int round = 0; round < 20; round++) {
        art_engine *other = engine_new(false);
        art_module *made = NULL;
        char msg[ART_MSG_BYTES];
        CHECK_OK(load_into(other, GUEST_COMPUTE, &made, msg));
        for (int i = 0; i < 20; i++) {
            art_fuel_account fuel;
            art_fuel_init(&fuel, 1 << 20, true);
            art_guest_config config = {
                .module = made, .fuel = &fuel, .input = "\xff\xff\0\0", .input_len = 4, .micro_slice_fuel = SLICE};
            art_guest *guest = NULL;
            CHECK_OK(art_guest_create(&config, &guest));
            for (int polls = 0; polls < i && art_guest_poll(guest) == ART_GUEST_YIELD; polls++) {
            }
            art_guest_destroy(guest);
        }
        art_module_release(made);
        art_engine_destroy(other);
        if (round == 4) {
            before = mappings();
        }
    }
    CHECK_MSG(mappings() <= before + 8, "%ju mappings, %ju before", (uintmax_t)mappings(), (uintmax_t)before);
}

/* --- two owners -------------------------------------------------------------------------------------- */

static void *poll_for_ever(void *arg)
{
    for (;;) {
        (void)art_guest_poll(arg);
    }
    return NULL;
}

static void test_fault_W50_two_owners_abort(void)
{
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        CHECK(freopen("/dev/null", "w", stderr));
        alarm(60);
        subject *s = subject_new(GUEST_HOG, (options){0});
        pthread_t other;
        CHECK_OK(pthread_create(&other, NULL, poll_for_ever, s->guest));
        poll_for_ever(s->guest);
        _exit(0);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_MSG(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "status %#x", status);
}

static void test_bad_guest_configs(void)
{
    art_fuel_account fuel;
    art_guest *guest = NULL;
    art_fuel_init(&fuel, 1, true);
    CHECK_EQ(art_guest_create(&(art_guest_config){.module = module(GUEST_HOG), .fuel = &fuel}, &guest), ART_EINVAL);
    CHECK_EQ(art_guest_create(&(art_guest_config){.module = module(GUEST_HOG), .micro_slice_fuel = 1}, &guest), ART_EINVAL);
    CHECK_EQ(art_guest_create(&(art_guest_config){.fuel = &fuel, .micro_slice_fuel = 1}, &guest), ART_EINVAL);
    CHECK(guest == NULL);
    art_guest_destroy(NULL);
    art_module_release(NULL);
    art_engine_destroy(NULL);
}

int main(void)
{
    engine = engine_new(false);
    compiler = engine_new(true);
    test_engine_refuses_bad_configs();
    test_fault_W52_pool_that_does_not_fit_is_an_error();
    test_modules_are_refused_by_type();
    test_garbage_is_refused();
    test_hello();
    test_call_answer_and_failed_answer();
    test_answer_larger_than_the_buffer();
    test_wait_any_follows_seq_not_arrival();
    test_unwaited_handles_do_not_show_whether_they_are_answered();
    test_replay_suspends_each_wait_and_follows_the_control_plane();
    test_in_flight_is_bounded_and_counts_handles_not_closed();
    test_every_status();
    test_restored();
    test_no_memory_and_odd_memory();
    test_traps();
    test_fuel_positions_do_not_depend_on_slices();
    test_fuel_of_traps();
    test_memory_digest();
    test_fuel_ends_at_the_same_place();
    test_fault_W47_fuel_granted_in_pieces();
    test_no_fuel_with_an_answer_waiting();
    test_fault_W49_host_calls_do_not_hold_the_worker();
    test_log_is_bounded_in_bytes();
    test_clock();
    test_random();
    test_start_functions();
    test_memory_grows_to_the_limit();
    test_kill_and_destroy_in_every_state();
    test_pool_that_is_full_is_an_engine_exit();
    test_fault_W53_reused_memory_is_zero();
    test_fault_W51_engines_leave_no_mappings();
    test_fault_W50_two_owners_abort();
    test_bad_guest_configs();
    for (int i = 0; i < GUEST_COUNT; i++) {
        art_module_release(modules[i]);
    }
    art_engine_destroy(compiler);
    art_engine_destroy(engine);
    printf("ok\n");
    return 0;
}
