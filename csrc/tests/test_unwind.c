/* Unwinding: a guest that is told to stop gives up its stack at a wait and runs its handlers in the same store, and where it stops
 * follows from its answers alone. First single guests, polled here; then runs on workers. Needs AGENTRT_WASMTIME_LIB. */
#include <pthread.h>

#include "agentrt_guest.h"
#include "check.h"
#include "worker.h"

#include "pool_fixture.h"

enum { LINES_MAX = 48 };

/* --- a guest under test --------------------------------------------------------- */

typedef struct subject {
    art_fuel_account fuel;
    art_guest *guest;
    int32_t handles, before; /* requests taken so far; of them by the program */
    bool marked;
    uint64_t seq, asked;     /* digest of what the handlers asked */
    uint64_t *slices;        /* a seed: each poll has a random micro-slice */
} subject;

typedef struct options {
    const void *input;
    uint32_t input_len;
    uint64_t fuel;
    bool not_final, replay;
} options;

#define SCRIPT(...) .input = (script_line[]){__VA_ARGS__}, .input_len = sizeof(script_line[]){__VA_ARGS__}
#define CALL {SCRIPT_CALL, 1, 0x10000, 24, 0x100, 64}

static subject *subject_new(enum guest_name name, options o)
{
    subject *s = calloc(1, sizeof *s);
    art_fuel_init(&s->fuel, o.fuel ? o.fuel : UINT64_C(1) << 50, !o.not_final);
    art_guest_config config = {
        .module = fixture_module(name),
        .fuel = &s->fuel,
        .input = o.input,
        .input_len = o.input_len,
        .micro_slice_fuel = 50000,
        .replay = o.replay,
    };
    CHECK_OK(art_guest_create(&config, &s->guest));
    return s;
}

static void subject_free(subject *s)
{
    art_guest_destroy(s->guest);
    art_fuel_stats fuel = art_fuel_statistics(&s->fuel);
    CHECK_EQ(fuel.granted, fuel.left + fuel.used);
    free(s);
}

static void take_requests(subject *s)
{
    for (art_request *r = art_guest_take_requests(s->guest), *next; r; r = next) {
        next = r->next;
        if (r->handle == ART_REQUEST_UNWINDING) {
            CHECK(!s->marked);
            s->marked = true;
            s->before = s->handles;
        } else if (r->handle) {
            CHECK_EQ(r->handle, ++s->handles);
            s->asked = s->asked * 31 + (s->marked ? (uint64_t)r->handle * 1000 + (uint64_t)r->op + r->len : 0);
        }
        free(r);
    }
}

/* Polls until it does something else than yield. */
static art_guest_outcome advance(subject *s)
{
    art_guest_outcome outcome;
    do {
        if (s->slices) {
            /* shrinks or grows the micro-slice */
            art_guest_pace(s->guest, check_random(s->slices) % 2 ? 0 : 900000);
        }
        outcome = art_guest_poll(s->guest);
    } while (outcome == ART_GUEST_YIELD);
    take_requests(s);
    if (outcome == ART_GUEST_DONE) {
        art_fuel_stats fuel = art_fuel_statistics(&s->fuel);
        CHECK_EQ(fuel.outstanding, 0);
        CHECK_EQ(fuel.used, art_guest_fuel_used(s->guest));
    }
    return outcome;
}

static void answer(subject *s, int32_t handle, const char *text)
{
    art_guest_post(s->guest, art_answer_new(handle, 0, 0, ++s->seq, text, (uint32_t)strlen(text)));
}

static art_exit finished(subject *s, art_exit_reason reason, int32_t code, const char *says)
{
    CHECK_EQ(advance(s), ART_GUEST_DONE);
    art_exit end = art_guest_exit(s->guest);
    CHECK_MSG(end.reason == reason && end.code == code, "reason %d code %d: %s", end.reason, end.code, end.message);
    CHECK_MSG(*says ? strstr(end.message, says) != NULL : !end.message[0], "\"%s\" does not say \"%s\"", end.message, says);
    CHECK_EQ(art_guest_unwinding(s->guest), ART_UNWIND_NONE);
    return end;
}

static int64_t result(const art_exit *end, uint32_t index)
{
    int64_t value;
    CHECK_MSG(end->output_len >= (index + 1) * 8, "only %u results", end->output_len / 8);
    memcpy(&value, end->output + index * 8, 8);
    return value;
}

/* --- modules ---------------------------------------------------------------------- */

static void expect_refused(enum guest_name name)
{
    char msg[ART_MSG_BYTES] = "";
    uint8_t *artifact = NULL;
    size_t len = 0;
    art_module *made = NULL;
    CHECK_OK(art_engine_compile(fixture_engine, guests[name].bytes, guests[name].len, &artifact, &len, msg, sizeof msg));
    CHECK_EQ(art_module_load(fixture_engine, artifact, len, &made, msg, sizeof msg), ART_EENTRY);
    CHECK_MSG(!made && strstr(msg, "agentrt_unwind must take nothing and return nothing or an i32"), "%s", msg);
    free(artifact);
}

static void test_handlers_of_another_type_are_refused(void)
{
    expect_refused(GUEST_UNWIND_PARAMETER);
    expect_refused(GUEST_UNWIND_I64);
    expect_refused(GUEST_UNWIND_GLOBAL);
}

/* --- what an unwinding is ------------------------------------------------------------ */

static void test_handlers_run_after_the_program_and_have_its_memory(void)
{
    subject *s = subject_new(GUEST_UNWINDER,
                             (options){SCRIPT({SCRIPT_POKE, 0x300, 41}, CALL, {SCRIPT_POKE, 0x300, 42}, CALL, CALL,
                                              {SCRIPT_UNWIND, 0}, {SCRIPT_PEEK, 0x300}, CALL, {SCRIPT_PEEK, 0x100}, CALL,
                                              {SCRIPT_RETURN, 9})});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 1, "one");
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_EQ(art_guest_unwinding(s->guest), ART_UNWIND_NONE);
    uint64_t wait = art_guest_waiting(s->guest).number;
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK_OK(art_guest_unwind(s->guest, 0)); /* again: nothing */
    CHECK_EQ(art_guest_unwinding(s->guest), ART_UNWIND_PROGRAM);
    CHECK(art_guest_has_answers(s->guest)); /* what keeps a worker from blocking it */
    CHECK(art_guest_can_resume(s->guest));
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    CHECK_EQ(art_guest_unwinding(s->guest), ART_UNWIND_HANDLERS);
    CHECK_EQ(art_guest_waiting(s->guest).count, 0);
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK(s->marked && s->before == 2 && s->handles == 3);
    art_guest_wait now = art_guest_waiting(s->guest);
    CHECK(now.count == 1 && now.handles[0] == 3 && now.number == wait + 1);
    CHECK(!art_guest_can_resume(s->guest)); /* told, but these waits are the handlers' own */
    answer(s, 2, "too late, the program is gone");
    CHECK(!art_guest_can_resume(s->guest));
    answer(s, 3, "abcd");
    CHECK(art_guest_can_resume(s->guest));
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 4, "");
    art_exit end = finished(s, ART_EXIT_UNWOUND, 9, "");
    /* the program's two, without the call that it never came back from, then the handlers' four */
    CHECK_EQ(end.output_len, 7 * 8);
    CHECK_EQ(result(&end, 1), 3);
    CHECK_EQ(result(&end, 3), 42);
    CHECK_EQ(result(&end, 4), 4);
    CHECK_EQ(result(&end, 5), 0x64636261);
    subject_free(s);
}

static void test_handlers_without_a_result(void)
{
    subject *s = subject_new(GUEST_UNWINDER_VOID, (options){SCRIPT(CALL, {SCRIPT_UNWIND, 0}, {SCRIPT_RETURN, 9})});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    finished(s, ART_EXIT_UNWOUND, 0, "");
    CHECK(s->marked);
    subject_free(s);
}

static void test_without_handlers_the_exit_comes_at_once(void)
{
    subject *s = subject_new(GUEST_SCRIPT, (options){SCRIPT({SCRIPT_OUTPUT, 0, 3}, CALL)});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_DONE);
    art_exit end = art_guest_exit(s->guest);
    CHECK(end.reason == ART_EXIT_UNWOUND && end.code == 0 && !end.message[0] && end.output_len == 3);
    take_requests(s);
    CHECK(!s->marked);
    subject_free(s);
}

static void test_before_the_first_instruction_there_is_nothing_to_undo(void)
{
    subject *s = subject_new(GUEST_UNWINDER, (options){SCRIPT({SCRIPT_UNREACHABLE}, {SCRIPT_UNWIND}, {SCRIPT_UNREACHABLE})});
    CHECK(!art_guest_unwind_unstarted(s->guest)); /* not told */
    CHECK_OK(art_guest_unwind(s->guest, 0));
    finished(s, ART_EXIT_UNWOUND, 0, "");
    CHECK(!s->marked && art_guest_fuel_used(s->guest) == 0 && art_guest_first_ns(s->guest) == 0);
    subject_free(s);

    s = subject_new(GUEST_UNWINDER, (options){SCRIPT({SCRIPT_UNREACHABLE})});
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK(art_guest_unwind_unstarted(s->guest));
    CHECK_EQ(art_guest_exit(s->guest).reason, ART_EXIT_UNWOUND);
    CHECK(!art_guest_unwind_unstarted(s->guest));
    art_guest_unwind_stop(s->guest); /* has ended: nothing */
    CHECK(!art_guest_exit(s->guest).message[0]);
    subject_free(s);

    /* in replay it may have come further before */
    s = subject_new(GUEST_UNWINDER, (options){SCRIPT(CALL, {SCRIPT_UNWIND}, {SCRIPT_RETURN, 3}), .replay = true});
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK(!art_guest_unwind_unstarted(s->guest));
    CHECK_EQ(art_guest_unwinding(s->guest), ART_UNWIND_PROGRAM_REPLAY);
    finished(s, ART_EXIT_UNWOUND, 3, "");
    CHECK(s->marked && s->before == 1);
    subject_free(s);
}

static void test_start_function_and_initialize(void)
{
    subject *s = subject_new(GUEST_UNWIND_START, (options){0});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    finished(s, ART_EXIT_UNWOUND, 0, "start function");
    CHECK(!s->marked);
    subject_free(s);

    s = subject_new(GUEST_UNWIND_INITIALIZE, (options){0});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK(s->marked && s->before == 1 && s->handles == 2);
    answer(s, 2, "");
    finished(s, ART_EXIT_UNWOUND, 7, "");
    subject_free(s);

    s = subject_new(GUEST_UNWIND_EXITS, (options){0});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    finished(s, ART_EXIT_UNWOUND, 5, ""); /* by proc_exit */
    subject_free(s);
}

static void test_who_ends_first_keeps_that_exit(void)
{
    subject *s = subject_new(GUEST_UNWINDER,
                             (options){SCRIPT({SCRIPT_SPIN, 1000000}, {SCRIPT_RETURN, 4}, {SCRIPT_UNWIND}, {SCRIPT_UNREACHABLE})});
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    finished(s, ART_EXIT_FAILED, 4, "");
    CHECK(!s->marked);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK_EQ(art_guest_exit(s->guest).reason, ART_EXIT_FAILED);
    subject_free(s);

    s = subject_new(GUEST_UNWINDER, (options){SCRIPT({SCRIPT_SPIN, 100000}, {SCRIPT_UNREACHABLE}, {SCRIPT_UNWIND})});
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    finished(s, ART_EXIT_TRAP, 9, "boom");
    subject_free(s);

    s = subject_new(GUEST_UNWINDER, (options){SCRIPT(CALL, {SCRIPT_UNWIND}, {SCRIPT_RETURN, 1})});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    art_guest_kill(s->guest);
    CHECK_EQ(art_guest_exit(s->guest).reason, ART_EXIT_KILLED);
    subject_free(s);
}

static void test_how_handlers_end(void)
{
    subject *s = subject_new(GUEST_UNWINDER, (options){SCRIPT(CALL, {SCRIPT_UNWIND}, {SCRIPT_UNREACHABLE})});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    finished(s, ART_EXIT_TRAP, 9, "boom");
    CHECK(s->marked);
    subject_free(s);

    s = subject_new(GUEST_UNWINDER, (options){SCRIPT(CALL, {SCRIPT_UNWIND}, {SCRIPT_SPIN, 1000000}), .fuel = 1000000});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK_EQ(advance(s), ART_GUEST_DONE);
    CHECK_EQ(art_guest_exit(s->guest).reason, ART_EXIT_FUEL);
    CHECK_EQ(art_guest_fuel_used(s->guest), 1000000);
    subject_free(s);

    s = subject_new(GUEST_UNWINDER, (options){SCRIPT(CALL, {SCRIPT_UNWIND}, CALL)});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    art_guest_kill(s->guest);
    CHECK_EQ(art_guest_exit(s->guest).reason, ART_EXIT_KILLED);
    subject_free(s);

    /* more fuel is asked for in the middle, and had */
    s = subject_new(GUEST_UNWINDER,
                    (options){SCRIPT(CALL, {SCRIPT_UNWIND}, {SCRIPT_SPIN, 1000000}, {SCRIPT_RETURN, 2}), .fuel = 9 << 20,
                              .not_final = true});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    CHECK_EQ(advance(s), ART_GUEST_NO_FUEL);
    CHECK_EQ(art_guest_unwinding(s->guest), ART_UNWIND_HANDLERS);
    art_fuel_grant(&s->fuel, 1 << 30, true);
    finished(s, ART_EXIT_UNWOUND, 2, "");
    subject_free(s);
}

static void test_a_stop_says_how_far_it_was(void)
{
    subject *s = subject_new(GUEST_UNWIND_HOG, (options){0});
    CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    for (int i = 0; i < 50; i++) {
        CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    }
    art_guest_unwind_stop(s->guest);
    art_exit end = art_guest_exit(s->guest);
    CHECK(end.reason == ART_EXIT_UNWOUND && strstr(end.message, "did not run"));
    take_requests(s);
    CHECK(!s->marked);
    subject_free(s);

    s = subject_new(GUEST_UNWINDER, (options){SCRIPT(CALL, {SCRIPT_UNWIND}, {SCRIPT_SPIN, -1})});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    for (int i = 0; i < 50; i++) {
        CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    }
    art_guest_unwind_stop(s->guest);
    end = art_guest_exit(s->guest);
    CHECK(end.reason == ART_EXIT_UNWOUND && strstr(end.message, "handlers had not ended"));
    take_requests(s);
    CHECK(s->marked);
    subject_free(s);
}

/* The handles of the program are closed, whatever had become of them, and take no room. */
static void test_handles_of_the_program_are_gone(void)
{
    script_line lines[LINES_MAX + 64];
    uint32_t n = 0;
    for (int i = 0; i < 63; i++) {
        lines[n++] = (script_line){SCRIPT_SUBMIT, 1};
    }
    lines[n++] = (script_line)CALL; /* 64, which is all there may be */
    lines[n++] = (script_line){SCRIPT_POKE, 0x100, 1};
    lines[n++] = (script_line){SCRIPT_WAIT_ANY, 0x100, 1};
    lines[n++] = (script_line){SCRIPT_POKE, 0x100, 2};
    lines[n++] = (script_line){SCRIPT_WAIT_ANY, 0x100, 1};
    uint32_t first = n;
    lines[n++] = (script_line){SCRIPT_UNWIND};
    lines[n++] = (script_line){SCRIPT_READ, 0, 0, 0x200, 4};
    lines[n++] = (script_line){SCRIPT_READ, 1, 0, 0x200, 4};
    lines[n++] = (script_line){SCRIPT_CLOSE, 1};
    lines[n++] = (script_line){SCRIPT_POKE, 0x100, 3};
    lines[n++] = (script_line){SCRIPT_WAIT_ANY, 0x100, 1};
    for (int i = 0; i < 65; i++) {
        lines[n++] = (script_line){SCRIPT_SUBMIT, 1};
        CHECK(n <= sizeof lines / sizeof *lines + 64);
        if (n == sizeof lines / sizeof *lines) {
            break;
        }
    }
    subject *s = subject_new(GUEST_UNWINDER, (options){.input = lines, .input_len = n * sizeof *lines});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 64, "x");
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    answer(s, 1, "one");
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    answer(s, 3, "three, too late");
    art_exit end = finished(s, ART_EXIT_UNWOUND, 0, "");
    uint32_t at = first - 1; /* the program's results, without the wait that it stopped at */
    CHECK_EQ(result(&end, at), AGENTRT_EBADF);
    CHECK_EQ(result(&end, at + 1), AGENTRT_EBADF);
    CHECK_EQ(result(&end, at + 2), AGENTRT_EBADF);
    CHECK_EQ(result(&end, at + 4), AGENTRT_EBADF);
    CHECK_EQ(result(&end, at + 5), 65);
    CHECK_EQ(s->before, 64);
    subject_free(s);
}

/* --- the place where a program stops --------------------------------------------------- */

/* Three submits, waits for two of them and for another call, work between. */
#define WANDERS                                                                                                        \
    SCRIPT({SCRIPT_SUBMIT, 1, 0, 8}, {SCRIPT_SUBMIT, 1, 0, 8}, {SCRIPT_SPIN, 20000}, {SCRIPT_POKE, 0x100, 1},          \
           {SCRIPT_POKE, 0x104, 2}, {SCRIPT_WAIT_ANY, 0x100, 2}, {SCRIPT_READ, 2, 0, 0x400, 8}, {SCRIPT_SPIN, 30000},  \
           {SCRIPT_WAIT_ANY, 0x104, 1}, /* answered already */ {SCRIPT_SPIN, 30000}, {SCRIPT_WAIT_ANY, 0x100, 1},      \
           {SCRIPT_SPIN, 10000}, CALL, {SCRIPT_SPIN, 40000}, {SCRIPT_SUBMIT, 1, 0, 24}, CALL,                          \
           {SCRIPT_UNWIND, 0}, {SCRIPT_CLOCK_NOW}, {SCRIPT_RANDOM, 0x500, 64}, CALL, {SCRIPT_SPIN, 5000},        \
           {SCRIPT_SUBMIT, 1, 0, 16}, CALL, {SCRIPT_CLOCK_NOW}, {SCRIPT_RETURN, 6})

typedef struct outcome {
    uint64_t fuel, digest, asked;
    int32_t before, handles;
    uint32_t output_len;
    uint8_t output[512];
} outcome;

/* Answers of handles 2 (lowest seq), 1 and 3, of which the program is given the first `given` before it is told. */
static const int32_t order[] = {2, 1, 3};

/* Polls a while, at random. */
static void dawdle(subject *s)
{
    for (uint64_t polls = check_random(s->slices) % 12; polls; polls--) {
        art_guest_pace(s->guest, check_random(s->slices) % 2 ? 0 : 900000);
        art_guest_outcome o = art_guest_poll(s->guest);
        CHECK(o != ART_GUEST_DONE && o != ART_GUEST_NO_FUEL);
    }
}

static void run_wanderer(outcome *out, uint32_t given, bool replay, uint64_t *seed)
{
    subject *s = subject_new(GUEST_UNWINDER, (options){WANDERS, .replay = replay});
    memset(out, 0, sizeof *out); /* compared as bytes */
    s->slices = seed;
    for (uint32_t i = 0; i < given; i++) {
        if (!replay) {
            dawdle(s);
            take_requests(s);
        }
        if (replay || s->handles < order[i]) { /* only what was asked for is answered */
            CHECK_EQ(advance(s), ART_GUEST_WAIT);
        }
        if (replay && i && art_guest_waiting(s->guest).handles[0] == order[0]) { /* given again */
            answer(s, order[0], "answer");
            CHECK_EQ(advance(s), ART_GUEST_WAIT);
        }
        answer(s, order[i], "answer");
    }
    if (!given && !replay) { /* at least begun */
        CHECK_EQ(art_guest_poll(s->guest), ART_GUEST_YIELD);
    }
    if (check_random(seed) % 2) {
        dawdle(s);
    }
    CHECK_OK(art_guest_unwind(s->guest, 0));
    for (uint32_t i = given; i < 3; i++) {
        if (check_random(seed) % 2 && (order[i] < 3 || given == 2)) { /* the handle is the program's */
            answer(s, order[i], "too late"); /* while it may still be on its way */
        }
        if (check_random(seed) % 4 == 0) {
            dawdle(s);
        }
    }
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK(s->marked);
    out->digest = art_guest_memory_digest(s->guest);
    answer(s, s->handles, "comp");
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    if (replay) {
        CHECK_EQ(art_guest_unwinding(s->guest), ART_UNWIND_HANDLERS_REPLAY);
        art_guest_go_live(s->guest);
    }
    CHECK_EQ(art_guest_unwinding(s->guest), ART_UNWIND_HANDLERS);
    answer(s, s->handles, "done");
    art_exit end = finished(s, ART_EXIT_UNWOUND, 6, "");
    out->fuel = art_guest_fuel_used(s->guest);
    out->before = s->before;
    out->handles = s->handles;
    out->asked = s->asked;
    out->output_len = end.output_len;
    CHECK(end.output_len <= sizeof out->output);
    memcpy(out->output, end.output, end.output_len);
    subject_free(s);
}

static void test_where_it_stops_follows_from_its_answers(void)
{
    uint64_t seed = check_seed(4), differ = 0;
    outcome expected[4], last = {0};
    for (uint32_t given = 0; given <= 3; given++) {
        for (int round = 0; round < 60; round++) {
            outcome got;
            run_wanderer(&got, given, round % 2, &seed);
            if (round == 0) {
                expected[given] = got;
                differ += memcmp(&got, &last, sizeof got) != 0;
                last = got;
            }
            CHECK_MSG(memcmp(&got, &expected[given], sizeof got) == 0,
                      "%u answers, round %d: fuel %ju %ju, handles %d %d and %d %d, output %u %u, memory %#jx %#jx", given,
                      round, (uintmax_t)got.fuel, (uintmax_t)expected[given].fuel, got.before, expected[given].before,
                      got.handles, expected[given].handles, got.output_len, expected[given].output_len,
                      (uintmax_t)got.digest, (uintmax_t)expected[given].digest);
        }
    }
    CHECK_EQ(differ, 4);
    CHECK(expected[0].before == 2 && expected[2].before == 3 && expected[3].before == 5);
}

/* --- stacks and stores ------------------------------------------------------------------ */

/* The program waits under many calls that would catch an exception. None does; the handlers have the whole stack, and may wait
 * under as many calls themselves. */
static void test_deep_stacks_are_gone(void)
{
    static const int32_t depths[] = {0, 1, 7, 50, 300};
    for (size_t i = 0; i < sizeof depths / sizeof *depths; i++) {
        subject *s = subject_new(GUEST_UNWINDER,
                                 (options){SCRIPT({SCRIPT_DEEP, depths[i]}, {SCRIPT_UNWIND, 0}, {SCRIPT_CAUGHT},
                                                  {SCRIPT_RECURSE, 500}, {SCRIPT_DEEP, depths[i]}, {SCRIPT_CAUGHT})});
        CHECK_EQ(advance(s), ART_GUEST_WAIT);
        CHECK_OK(art_guest_unwind(s->guest, 0));
        CHECK_EQ(advance(s), ART_GUEST_WAIT);
        answer(s, 2, "");
        art_exit end = finished(s, ART_EXIT_UNWOUND, 0, "");
        CHECK_EQ(result(&end, 0), 0);
        CHECK_EQ(result(&end, 1), 500);
        CHECK_EQ(result(&end, 2), depths[i]);
        CHECK_EQ(result(&end, 3), 0);
        subject_free(s);
    }
    /* as deep as it may be without overflow, twice over; then one step too deep, in the handlers */
    subject *s = subject_new(GUEST_UNWINDER, (options){SCRIPT({SCRIPT_DEEP, 400}, {SCRIPT_UNWIND}, {SCRIPT_RECURSE, INT32_MAX})});
    CHECK_EQ(advance(s), ART_GUEST_WAIT);
    CHECK_OK(art_guest_unwind(s->guest, 0));
    finished(s, ART_EXIT_TRAP, 0, "recurse");
    subject_free(s);
}

typedef struct polling {
    subject *s;
    art_guest_outcome outcome;
} polling;

static void *poll_elsewhere(void *arg)
{
    polling *p = arg;
    p->outcome = advance(p->s);
    return NULL;
}

static art_guest_outcome advance_elsewhere(subject *s)
{
    polling p = {.s = s};
    pthread_t thread;
    CHECK_OK(pthread_create(&thread, NULL, poll_elsewhere, &p));
    CHECK_OK(pthread_join(thread, NULL));
    return p.outcome;
}

/* Thousands of stores whose suspended call is dropped, eight at a time in a pool that has no slot to spare, from any thread. */
static void test_dropped_calls_leave_stores_and_pools_usable(void)
{
    enum { AT_ONCE = 8, ROUNDS = 400 };
    uint64_t seed = check_seed(11);
    for (int round = 0; round < ROUNDS; round++) {
        subject *s[AT_ONCE];
        bool elsewhere = round % 16 == 0;
        for (int i = 0; i < AT_ONCE; i++) {
            int32_t depth = (int32_t)(check_random(&seed) % 200);
            s[i] = subject_new(GUEST_UNWINDER,
                               (options){SCRIPT(CALL, {SCRIPT_SPIN, 3000}, {SCRIPT_DEEP, depth}, {SCRIPT_UNWIND, 0},
                                                {SCRIPT_DEEP, 200 - depth}, {SCRIPT_CAUGHT}, CALL, {SCRIPT_PEEK, 0x100})});
            CHECK_EQ(advance(s[i]), ART_GUEST_WAIT);
            answer(s[i], 1, "");
            CHECK_EQ(elsewhere ? advance_elsewhere(s[i]) : advance(s[i]), ART_GUEST_WAIT);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            CHECK_OK(art_guest_unwind(s[i]->guest, 0));
            CHECK_EQ(elsewhere ? advance_elsewhere(s[i]) : advance(s[i]), ART_GUEST_WAIT);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            if ((round + i) % 5 == 0) { /* dropped once more, by a kill */
                art_guest_kill(s[i]->guest);
                CHECK_EQ(art_guest_exit(s[i]->guest).reason, ART_EXIT_KILLED);
                continue;
            }
            answer(s[i], 3, "");
            CHECK_EQ(advance(s[i]), ART_GUEST_WAIT);
            answer(s[i], 4, "abcd");
            art_exit end = finished(s[i], ART_EXIT_UNWOUND, 0, "");
            CHECK_EQ(result(&end, 3), 0);
            CHECK_EQ(result(&end, 5), 0x64636261);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            subject_free(s[i]);
        }
    }
}

/* --- runs on workers ---------------------------------------------------------------------- */

#define MS UINT64_C(1000000)

static void hold_the_worker(job *hog)
{
    job_submit(hog, GUEST_ASKER, 0, (submit_options){.manual = true});
    PUMP_UNTIL(hog->requests == 1);
}

static void release_the_worker(job *hog)
{
    art_run_kill(hog->run);
    PUMP_UNTIL(hog->done);
}

static submit_options lines_of(const script_line *lines, size_t bytes)
{
    return (submit_options){.input = lines, .input_len = (uint32_t)bytes, .manual = true};
}

static void test_a_blocked_run_unwinds(void)
{
    static const script_line lines[] = {CALL, {SCRIPT_UNWIND}, CALL, CALL, {SCRIPT_RETURN, 3}};
    art_pool_config config = pool_config(2);
    pool_open(&config);
    job j;
    job_submit(&j, GUEST_UNWINDER, 2, lines_of(lines, sizeof lines));
    PUMP_UNTIL(j.waiting);
    CHECK_OK(art_run_unwind(j.run, 0, 200 * MS));
    j.waiting = false;
    PUMP_UNTIL(j.waiting);
    CHECK(j.unwinding && j.asked_before == 1 && j.held[0] == 2);
    CHECK_OK(art_run_unwind(j.run, 0, 1)); /* again: nothing, its allowance is as it was */
    job_answer_held(&j, 0);
    PUMP_UNTIL(j.waiting);
    job_answer_held(&j, 0);
    PUMP_UNTIL(j.done);
    expect_end(&j, ART_EXIT_UNWOUND, 3);
    CHECK(!j.message[0]);
    pool_close_empty();
}

/* Queued behind a run that never yields, or set aside for want of a place to live: it ends all the same, and takes no slot. */
static void test_a_run_that_never_had_a_slot_needs_none_to_end(void)
{
    static const script_line lines[] = {{SCRIPT_UNREACHABLE}, {SCRIPT_UNWIND}, {SCRIPT_UNREACHABLE}};
    art_pool_config config = pool_config(1);
    pool_open(&config);
    job hog, j;
    hold_the_worker(&hog);
    job_submit(&j, GUEST_UNWINDER, 3, lines_of(lines, sizeof lines));
    CHECK_OK(art_run_unwind(j.run, 0, 200 * MS));
    PUMP_UNTIL(j.done);
    expect_end(&j, ART_EXIT_UNWOUND, 0);
    CHECK(!j.unwinding && j.view.first_ns == 0 && j.view.slot_ns == 0);
    release_the_worker(&hog);
    pool_close_empty();

    static const script_line waits[] = {CALL};
    config = pool_config(2);
    config.live_max = 1;
    pool_open(&config);
    job holder;
    job_submit(&holder, GUEST_SCRIPT, 1, lines_of(waits, sizeof waits));
    PUMP_UNTIL(holder.waiting);
    job_submit(&j, GUEST_UNWINDER, 1, lines_of(lines, sizeof lines));
    SPIN_UNTIL(pool_stats().starved == 1);
    CHECK_OK(art_run_unwind(j.run, 0, 200 * MS));
    PUMP_UNTIL(j.done);
    expect_end(&j, ART_EXIT_UNWOUND, 0);
    job_answer_held(&holder, 0);
    PUMP_UNTIL(holder.done);
    pool_close_empty();
}

static void test_in_replay_it_starts_first(void)
{
    static const script_line lines[] = {{SCRIPT_SPIN, 50000000}, CALL, {SCRIPT_UNWIND}, CALL, {SCRIPT_RETURN, 3}};
    art_pool_config config = pool_config(1);
    pool_open(&config);
    job hog, j;
    hold_the_worker(&hog);
    submit_options o = lines_of(lines, sizeof lines);
    o.replay = true;
    job_submit(&j, GUEST_UNWINDER, 1, o);
    CHECK_OK(art_run_unwind(j.run, 0, 1 * MS)); /* too little to come to its wait, were it not replay */
    release_the_worker(&hog);
    PUMP_UNTIL(j.waiting);
    CHECK(j.unwinding && j.asked_before == 1 && j.held[0] == 2);
    art_run_kill(j.run);
    PUMP_UNTIL(j.done);
    expect_end(&j, ART_EXIT_KILLED, 0);
    pool_close_empty();
}

static void test_a_program_that_does_not_wait_is_stopped(void)
{
    art_pool_config config = pool_config(1);
    pool_open(&config);
    job j;
    job_submit(&j, GUEST_ASKER, 1, (submit_options){.manual = true});
    PUMP_UNTIL(j.requests == 1);
    CHECK_OK(art_run_unwind(j.run, 0, 5 * MS));
    PUMP_UNTIL(j.done);
    expect_end(&j, ART_EXIT_UNWOUND, 0);
    CHECK(strstr(j.message, "its handlers did not run") && j.view.slot_ns >= 5 * MS);

    job_submit(&j, GUEST_UNWIND_HOG, 1, (submit_options){.replay = true, .manual = true});
    SPIN_UNTIL(art_run_glance(j.run) == ART_RUN_RUNNING);
    uint64_t before_ns = pool_stats().slot_ns[1];
    CHECK_OK(art_run_unwind(j.run, 0, 1 * MS));
    job nudge; /* each time it is preempted its slot time is counted */
    do {
        job_submit(&nudge, GUEST_MINIMAL, 0, (submit_options){0});
        PUMP_UNTIL(nudge.done);
    } while (pool_stats().slot_ns[1] - before_ns < 30 * MS);
    CHECK(!j.done); /* in replay it may take what it takes */
    art_run_kill(j.run);
    PUMP_UNTIL(j.done);
    expect_end(&j, ART_EXIT_KILLED, 0);
    pool_close_empty();
}

static void test_handlers_have_so_much_slot_time(void)
{
    art_pool_config config = pool_config(1);
    pool_open(&config);
    static const script_line spins[] = {CALL, {SCRIPT_UNWIND}, {SCRIPT_SPIN, -1}, {SCRIPT_SPIN, -1}, {SCRIPT_SPIN, -1}};
    job j;
    job_submit(&j, GUEST_UNWINDER, 1, lines_of(spins, sizeof spins));
    PUMP_UNTIL(j.waiting);
    CHECK_OK(art_run_unwind(j.run, 0, 5 * MS));
    PUMP_UNTIL(j.done);
    expect_end(&j, ART_EXIT_UNWOUND, 0);
    CHECK(j.unwinding && strstr(j.message, "handlers had not ended") && j.view.slot_ns >= 5 * MS);

    /* in short pieces, too, with waits between them */
    enum { PIECES = 1300 };
    static script_line pieces[2 * PIECES + 2];
    uint32_t n = 0;
    pieces[n++] = (script_line)CALL;
    pieces[n++] = (script_line){SCRIPT_UNWIND};
    for (int i = 0; i < PIECES; i++) {
        pieces[n++] = (script_line){SCRIPT_SPIN, 1000}; /* less than a micro-slice */
        pieces[n++] = (script_line)CALL;
    }
    CHECK(n * sizeof *pieces <= 65536);
    for (int generous = 0; generous < 2; generous++) {
        job_submit(&j, GUEST_UNWINDER, 1, lines_of(pieces, n * sizeof *pieces));
        PUMP_UNTIL(j.waiting);
        CHECK_OK(art_run_unwind(j.run, 0, generous ? 10000 * MS : MS / 5));
        while (!j.done) {
            PUMP_UNTIL(j.done || (j.unwinding && j.held_count));
            if (!j.done) {
                SPIN_UNTIL(j.done || art_run_glance(j.run) == ART_RUN_BLOCKED); /* it has left its worker, each time */
                if (!j.done) {
                    job_answer_held(&j, 0);
                }
            }
        }
        expect_end(&j, ART_EXIT_UNWOUND, 0);
        CHECK((j.message[0] == 0) == generous);
    }
    pool_close_empty();
}

/* What a program needs to come to its wait is not taken from its handlers: both do the same work, and had they one allowance for
 * both they could not end with more slot time than that. The machine may be slow for one of them, so there are several tries. */
static void test_the_program_and_its_handlers_have_their_own(void)
{
    static const script_line lines[] = {{SCRIPT_SUBMIT, 1}, {SCRIPT_SPIN, 10000000}, CALL, {SCRIPT_UNWIND},
                                        {SCRIPT_SPIN, 10000000}, {SCRIPT_RETURN, 2}};
    art_pool_config config = pool_config(1);
    bool more = false;
    uint64_t allowed_ns = 10 * MS;
    pool_open(&config);
    for (int i = 0; i < 40 && !more; i++) {
        job j;
        job_submit(&j, GUEST_UNWINDER, 1, lines_of(lines, sizeof lines));
        PUMP_UNTIL(j.requests == 1);
        CHECK_OK(art_run_unwind(j.run, 0, allowed_ns));
        PUMP_UNTIL(j.done);
        bool ended = j.view.exit.reason == ART_EXIT_UNWOUND && !j.message[0];
        more = ended && j.view.slot_ns > allowed_ns;
        allowed_ns = ended ? j.view.slot_ns * 3 / 4 : allowed_ns * 2;
    }
    CHECK(more);
    pool_close_empty();
}

static void test_an_ensemble_of_hundreds(void)
{
    enum { RUNS = 150 };
    static job runs[RUNS];
    static const script_line lines[] = {CALL, CALL, {SCRIPT_UNWIND}, {SCRIPT_SPIN, 1000}, CALL, CALL, {SCRIPT_RETURN, 8}};
    art_pool_config config = pool_config(2);
    config.live_max = 40;
    pool_open(&config);
    for (int i = 0; i < RUNS; i++) {
        job_submit(&runs[i], GUEST_UNWINDER, (uint8_t)(i % 4), lines_of(lines, sizeof lines));
    }
    SPIN_UNTIL(pool_stats().starved > 0);
    for (int i = 0; i < RUNS; i++) {
        CHECK_OK(art_run_unwind(runs[i].run, 0, 200 * MS));
        if (i % 7 == 0) {
            art_run_kill(runs[i].run);
        }
    }
    int unwound = 0, handled = 0;
    for (int i = 0; i < RUNS; i++) {
        while (!runs[i].done) {
            if (runs[i].unwinding && runs[i].held_count) {
                job_answer_held(&runs[i], 0);
            } else if (!take_events()) {
                wait_for_events("a handler or an end");
            }
        }
        CHECK(runs[i].view.exit.reason == ART_EXIT_UNWOUND || (i % 7 == 0 && runs[i].view.exit.reason == ART_EXIT_KILLED));
        unwound += runs[i].view.exit.reason == ART_EXIT_UNWOUND;
        handled += runs[i].unwinding && runs[i].view.exit.reason == ART_EXIT_UNWOUND;
        CHECK(!runs[i].unwinding || runs[i].view.exit.reason == ART_EXIT_KILLED || runs[i].view.exit.code == 8);
    }
    CHECK(unwound > RUNS / 2 && handled > 0);
    pool_close_empty();
}

int main(void)
{
    fixture_open(200);
    test_handlers_of_another_type_are_refused();
    test_handlers_run_after_the_program_and_have_its_memory();
    test_handlers_without_a_result();
    test_without_handlers_the_exit_comes_at_once();
    test_before_the_first_instruction_there_is_nothing_to_undo();
    test_start_function_and_initialize();
    test_who_ends_first_keeps_that_exit();
    test_how_handlers_end();
    test_a_stop_says_how_far_it_was();
    test_handles_of_the_program_are_gone();
    test_where_it_stops_follows_from_its_answers();
    test_deep_stacks_are_gone();
    test_dropped_calls_leave_stores_and_pools_usable();
    test_a_blocked_run_unwinds();
    test_a_run_that_never_had_a_slot_needs_none_to_end();
    test_in_replay_it_starts_first();
    test_a_program_that_does_not_wait_is_stopped();
    test_handlers_have_so_much_slot_time();
    test_the_program_and_its_handlers_have_their_own();
    test_an_ensemble_of_hundreds();
    fixture_close();
    printf("ok\n");
    return 0;
}
