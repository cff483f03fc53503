/* abi.c: guest ABI v1, the host functions a guest imports from "agentrt". agentrt_guest.h is the contract.
 *
 * All run on the guest's own stack, on the thread that polls it. They copy bytes and return; agentrt_call and
 * agentrt_wait_any may suspend to wait. No wrong argument traps: each has a status.
 *
 * Host functions cost no fuel, so a micro-slice does not bound them: 50,000 fuel are some 10,000 calls, each of which may
 * copy megabytes. So all are asynchronous imports (60 ns more than plain ones) and count what they do; past
 * HOST_WORK_MAX the guest suspends once, which art_guest_poll reports as a yield and the guest cannot observe.
 */
#include <stdlib.h>
#include <string.h>

#include "agentrt_guest.h"
#include "art_err.h"
#include "guest_internal.h"
#include "sys_linux.h"

/* Log bytes waiting for the control plane, per guest (and one line more); what comes on top is dropped, since nothing
 * depends on it. */
#define LOGS_UNSEEN_BYTES_MAX (64u << 10)

/* Work of imports in one poll before the guest yields, in bytes copied; a call counts as HOST_WORK_CALL besides, which is
 * about what it takes at a memory copy's speed. Together some 10 us. */
#define HOST_WORK_MAX (64u << 10)
#define HOST_WORK_CALL 512

art_guest *art__abi_guest(const art__wasmtime *w, wasmtime_caller_t *caller)
{
    art_guest *guest = w->wasmtime_context_get_data(w->wasmtime_caller_context(caller));
    if (!guest->first_ns) {
        guest->first_ns = art_sys_now_ns();
    }
    guest->host_work += HOST_WORK_CALL;
    guest->strays += guest->stack != ART__STACK_PLAIN;
    guest->fuel_at_call = art__guest_fuel_now(guest);
    return guest;
}

static const art__wasmtime *table(void *env)
{
    return ((art_engine *)env)->w;
}

uint8_t *art__abi_bytes(art_guest *guest, wasmtime_caller_t *caller, uint32_t at, uint32_t len)
{
    const art__wasmtime *w = guest->engine->w;
    if (!guest->has_memory) {
        wasmtime_extern_t export;
        if (!caller || !w->wasmtime_caller_export_get(caller, "memory", 6, &export) ||
            export.kind != ART_WASM_EXTERN_MEMORY) {
            return NULL;
        }
        guest->memory = export.of.memory;
        guest->has_memory = true;
    }
    uint64_t size = w->wasmtime_memory_data_size(guest->context, &guest->memory);
    if ((uint64_t)at + len > size) {
        return NULL;
    }
    guest->host_work += len;
    return w->wasmtime_memory_data(guest->context, &guest->memory) + at;
}

/* --- handles ------------------------------------------------------------------ */

static art__slot *slot_find(art_guest *guest, int32_t handle)
{
    uint32_t low = 0, high = guest->slot_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (guest->slots[middle].handle < handle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < guest->slot_count && guest->slots[low].handle == handle ? &guest->slots[low] : NULL;
}

const art__slot *art__abi_slot(art_guest *guest, int32_t handle)
{
    return slot_find(guest, handle);
}

static void slot_remove(art_guest *guest, art__slot *slot)
{
    free(slot->answer);
    memmove(slot, slot + 1, (size_t)(&guest->slots[--guest->slot_count] - slot) * sizeof *slot);
}

static bool room_for(void **array, uint32_t *room, uint32_t count, size_t item)
{
    if (count <= *room) {
        return true;
    }
    uint32_t wanted = *room ? *room * 2 : 4;
    while (wanted < count) {
        wanted *= 2;
    }
    void *grown = realloc(*array, wanted * item);
    if (!grown) {
        return false;
    }
    *array = grown;
    *room = wanted;
    return true;
}

static void request_push(art_guest *guest, art_request *request)
{
    art_request *head = atomic_load_explicit(&guest->requests, memory_order_relaxed);
    do {
        request->next = head;
        /* release [Q1]: the taker (acquire [Q2]) sees the request's fields */
    } while (!atomic_compare_exchange_weak_explicit(&guest->requests, &head, request, memory_order_release,
                                                    memory_order_relaxed));
}

/* Checks and sends a syscall. Returns its handle or a negative status. */
int32_t art__abi_send(art_guest *guest, wasmtime_caller_t *caller, int32_t op, uint32_t at, uint32_t len)
{
    if ((op < AGENTRT_TOOL_CALL || op > AGENTRT_CAPACITY_GET) && op != AGENTRT_LOCK_FOREIGN) {
        return AGENTRT_ENOSYS; /* clock and randomness have imports of their own */
    }
    guest->seen |= ART__SEEN_STEPS;
    if (len > guest->engine->config.request_bytes_max) {
        return AGENTRT_E2BIG;
    }
    const uint8_t *bytes = art__abi_bytes(guest, caller, at, len);
    if (!bytes) {
        return AGENTRT_EFAULT;
    }
    if (op == AGENTRT_LOG) {
        /* relaxed: a rough bound */
        if (atomic_load_explicit(&guest->logs_unseen, memory_order_relaxed) >= LOGS_UNSEEN_BYTES_MAX) {
            return 0;
        }
        atomic_fetch_add_explicit(&guest->logs_unseen, (uint32_t)sizeof(art_request) + len, memory_order_relaxed);
    } else if (guest->slot_count >= guest->engine->config.inflight_max) {
        return AGENTRT_EAGAIN;
    }
    art_request *request = malloc(sizeof *request + len);
    if (!request ||
        !room_for((void **)&guest->slots, &guest->slot_room, guest->slot_count + 1, sizeof *guest->slots)) {
        abort(); /* the host is out of memory: as for any allocation in the engine itself */
    }
    request->op = op;
    request->len = len;
    memcpy(request->payload, bytes, len);
    if (op == AGENTRT_LOG) {
        request->handle = 0;
    } else {
        request->handle = guest->next_handle++;
        guest->slots[guest->slot_count++] = (art__slot){.handle = request->handle, .op = op};
    }
    int32_t handle = request->handle;
    request_push(guest, request);
    return handle;
}

/* --- waiting ------------------------------------------------------------------ */

void art__abi_take_answers(art_guest *guest)
{
    /* acquire [A2], partner [A1] in art_guest_post */
    art_answer *newest = atomic_exchange_explicit(&guest->answers, NULL, memory_order_acquire);
    art_answer *answer = NULL;
    while (newest) { /* oldest first: of two answers to one handle the first counts */
        art_answer *next = newest->next;
        newest->next = answer;
        answer = newest;
        newest = next;
    }
    while (answer) {
        art_answer *next = answer->next;
        art__slot *slot = slot_find(guest, answer->handle);
        guest->look = true;
        bool handlers = guest->phase == ART__UNWINDING;
        /* relaxed: see art_guest_unwind */
        if (answer == atomic_load_explicit(&guest->unwind_mark, memory_order_relaxed)) {
            guest->unwind_due = true;
            guest->unwind_skipped = answer->handle;
        }
        if (slot && !slot->answer && (handlers || !guest->unwind_due)) {
            slot->answer = answer;
        } else {
            free(answer);
        }
        answer = next;
    }
}

void art__abi_unwind(art_guest *guest)
{
    art_request *mark = malloc(sizeof *mark);
    if (!mark) {
        abort();
    }
    while (guest->slot_count) {
        free(guest->slots[--guest->slot_count].answer);
    }
    free(guest->call_answer);
    guest->call_answer = NULL;
    guest->wait = ART__WAIT_NONE;
    guest->waiting_count = 0;
    guest->resolved = guest->pause = false;
    *mark = (art_request){.handle = ART_REQUEST_UNWINDING};
    int32_t left = INT32_MAX - guest->next_handle;
    guest->next_handle += guest->unwind_skipped < left ? guest->unwind_skipped : left;
    request_push(guest, mark);
}

uint64_t art__abi_clock(const art_guest *guest)
{
    return guest->clock_base_ns + (art__guest_fuel_now(guest) - guest->clock_base_fuel);
}

void art__abi_clock_reach(art_guest *guest, uint64_t clock_ns)
{
    uint64_t fuel = art__guest_fuel_now(guest);
    uint64_t now = guest->clock_base_ns + (fuel - guest->clock_base_fuel);
    guest->clock_base_ns = clock_ns > now ? clock_ns : now;
    guest->clock_base_fuel = fuel;
}

static int32_t copy_out(const uint8_t *from, uint32_t len, uint32_t offset, uint8_t *to, uint32_t cap)
{
    if (offset < len) {
        uint32_t rest = len - offset;
        memcpy(to, from + offset, rest < cap ? rest : cap);
    }
    return (int32_t)len;
}

bool art__abi_resolve(art_guest *guest)
{
    /* acquire, and before the answers are taken: who sees live also sees the answers posted before it */
    bool live = atomic_load_explicit(&guest->live, memory_order_acquire);
    art__abi_take_answers(guest);
    if (guest->resolved || guest->wait == ART__WAIT_SAFE_POINT || guest->wait == ART__WAIT_BOOTED) {
        return guest->resolved;
    }
    /* what the program was given before it was told to stop it may take, as it did when that was live */
    bool rest = guest->unwind_due && guest->phase != ART__UNWINDING;
    if (!guest->look && !live && !rest) {
        return false;
    }
    art__slot *best = NULL;
    int32_t best_index = 0;
    for (uint32_t i = 0; i < guest->waiting_count; i++) {
        art__slot *slot = slot_find(guest, guest->waiting[i]);
        if (slot && slot->answer && (!best || slot->answer->seq < best->answer->seq)) {
            best = slot;
            best_index = (int32_t)i;
        }
    }
    if (!best) {
        return false;
    }
    best->waited = true;
    art__abi_clock_reach(guest, best->answer->clock_ns);
    guest->resolved_value = best_index;
    if (guest->wait != ART__WAIT_ANY) {
        free(guest->call_answer);
        guest->call_answer = best->answer;
        best->answer = NULL;
        slot_remove(guest, best);
        /* the buffer was inside memory when the call was made, and memory never shrinks */
        uint8_t *to = art__abi_bytes(guest, NULL, guest->call_buf, guest->call_cap);
        if (guest->wait == ART__WAIT_HOST_CALL) {
            guest->resolved_value = art__host_call_answer(guest->call_answer, to, guest->call_cap);
        } else {
            int32_t len = copy_out(guest->call_answer->payload, guest->call_answer->len, 0, to, guest->call_cap);
            guest->resolved_value = guest->call_answer->status ? AGENTRT_EFAILED : len;
        }
    }
    guest->resolved = true;
    return true;
}

/* The continuation of all imports: returns the value once the wait is over, if there is one, and the pause. */
static bool resume(void *env)
{
    art_guest *guest = env;
    if (guest->stack == ART__STACK_UNWINDING) { /* whatever it returns: nobody looks at it */
        return guest->strays == 0;
    }
    if (guest->failing) {
        return true;
    }
    bool waits = guest->wait != ART__WAIT_NONE && !guest->resolved;
    if (waits || guest->pause || guest->exiting) {
        guest->pause = false;
        return false;
    }
    guest->wait = ART__WAIT_NONE;
    if (guest->result_slot->kind == ART_WASM_I64) {
        guest->result_slot->of.i64 = guest->resolved_value;
    } else {
        guest->result_slot->of.i32 = (int32_t)guest->resolved_value;
    }
    return true;
}

wasmtime_async_continuation_t art__abi_suspended(art_guest *guest, wasmtime_val_t *results)
{
    results->kind = ART_WASM_I32;
    guest->result_slot = results;
    return (wasmtime_async_continuation_t){resume, guest, NULL};
}

static wasmtime_async_continuation_t suspend(art_guest *guest, wasmtime_val_t *results, uint8_t kind)
{
    results->kind = kind;
    guest->result_slot = results;
    guest->pause = guest->host_work > HOST_WORK_MAX;
    return (wasmtime_async_continuation_t){resume, guest, NULL};
}

static void suspend_until_resolved(art_guest *guest, uint8_t wait, wasmtime_val_t *results,
                                   wasmtime_async_continuation_t *continuation)
{
    art__abi_take_answers(guest); /* what was posted before this wait is no answer to it in replay */
    guest->wait = wait;
    guest->resolved = false;
    guest->waits++;
    guest->look = false;
    guest->waiting_ops = 0;
    for (uint32_t i = 0; i < guest->waiting_count; i++) {
        guest->waiting_ops |= 1ull << slot_find(guest, guest->waiting[i])->op;
    }
    art__abi_resolve(guest);
    *continuation = suspend(guest, results, ART_WASM_I32);
}

void art__abi_wait_one(art_guest *guest, int32_t handle, uint8_t wait, uint32_t buf, uint32_t cap,
                       wasmtime_val_t *results, wasmtime_async_continuation_t *continuation)
{
    if (!room_for((void **)&guest->waiting, &guest->waiting_room, 1, sizeof *guest->waiting)) {
        abort();
    }
    guest->waiting[0] = handle;
    guest->waiting_count = 1;
    guest->call_buf = buf;
    guest->call_cap = cap;
    suspend_until_resolved(guest, wait, results, continuation);
}

/* --- the imports -------------------------------------------------------------- */

void art__abi_return(art_guest *guest, int64_t value, uint8_t kind, wasmtime_val_t *results,
                     wasmtime_async_continuation_t *continuation)
{
    guest->wait = ART__WAIT_NONE;
    guest->resolved_value = value;
    *continuation = suspend(guest, results, kind);
}

static void import_call(ART__IMPORT_PARAMETERS)
{
    (void)nargs, (void)nresults;
    art_guest *guest = art__abi_guest(table(env), caller);
    guest->trap_slot = trap;
    if (art__capture_arrive(guest, ART__WAIT_CALL, results, continuation)) {
        return;
    }
    uint32_t buf = (uint32_t)args[3].of.i32, cap = (uint32_t)args[4].of.i32;
    if (!art__abi_bytes(guest, caller, buf, cap)) {
        art__abi_return(guest, AGENTRT_EFAULT, ART_WASM_I32, results, continuation);
        return;
    }
    int32_t handle = art__abi_send(guest, caller, args[0].of.i32, (uint32_t)args[1].of.i32, (uint32_t)args[2].of.i32);
    if (handle <= 0) {
        art__abi_return(guest, handle, ART_WASM_I32, results, continuation); /* a status, or 0: no answer to a log line */
        return;
    }
    art__abi_wait_one(guest, handle, ART__WAIT_CALL, buf, cap, results, continuation);
}

static void import_wait_any(ART__IMPORT_PARAMETERS)
{
    (void)nargs, (void)nresults;
    art_guest *guest = art__abi_guest(table(env), caller);
    guest->trap_slot = trap;
    if (art__capture_arrive(guest, ART__WAIT_ANY, results, continuation)) {
        return;
    }
    uint32_t count = (uint32_t)args[1].of.i32;
    if (count > guest->engine->config.inflight_max) {
        art__abi_return(guest, AGENTRT_E2BIG, ART_WASM_I32, results, continuation);
        return;
    }
    const uint8_t *handles = art__abi_bytes(guest, caller, (uint32_t)args[0].of.i32, count * 4);
    if (!handles) {
        art__abi_return(guest, AGENTRT_EFAULT, ART_WASM_I32, results, continuation);
        return;
    }
    if (!room_for((void **)&guest->waiting, &guest->waiting_room, count, sizeof *guest->waiting)) {
        abort();
    }
    if (count) {
        memcpy(guest->waiting, handles, count * 4);
    }
    guest->waiting_count = count;
    guest->host_work += (uint64_t)count * HOST_WORK_CALL;
    for (uint32_t i = 0; i < count; i++) {
        if (!slot_find(guest, guest->waiting[i])) {
            count = 0;
        }
    }
    if (!count) {
        guest->waiting_count = 0;
        art__abi_return(guest, AGENTRT_EBADF, ART_WASM_I32, results, continuation);
        return;
    }
    suspend_until_resolved(guest, ART__WAIT_ANY, results, continuation);
}

/* Modules that can be captured anywhere call it when they are asked to stop (capture.c). */
static void import_safe_point(ART__IMPORT_PARAMETERS)
{
    (void)args, (void)nargs, (void)results, (void)nresults;
    art_guest *guest = art__abi_guest(table(env), caller);
    guest->trap_slot = trap;
    if (art__capture_arrive(guest, ART__WAIT_SAFE_POINT, &guest->no_result, continuation)) {
        return;
    }
    if (guest->phase != ART__RUNNING || !art__capture_stop_here(guest)) {
        art__abi_return(guest, 0, ART_WASM_I32, &guest->no_result, continuation);
        return;
    }
    guest->wait = ART__WAIT_SAFE_POINT;
    guest->waiting_count = 0;
    guest->waiting_ops = 0;
    guest->resolved = false;
    guest->stops++;
    *continuation = suspend(guest, &guest->no_result, ART_WASM_I32);
}

/* The others return at once: args in, result out. */

static int64_t do_submit(art_guest *guest, wasmtime_caller_t *caller, const wasmtime_val_t *args)
{
    return art__abi_send(guest, caller, args[0].of.i32, (uint32_t)args[1].of.i32, (uint32_t)args[2].of.i32);
}

static int64_t do_read(art_guest *guest, wasmtime_caller_t *caller, const wasmtime_val_t *args)
{
    const art_answer *answer = guest->call_answer;
    if (args[0].of.i32) {
        const art__slot *slot = slot_find(guest, args[0].of.i32);
        answer = slot && slot->waited ? slot->answer : NULL;
    }
    uint32_t offset = (uint32_t)args[1].of.i32, cap = (uint32_t)args[3].of.i32;
    uint8_t *to = art__abi_bytes(guest, caller, (uint32_t)args[2].of.i32, cap);
    if (!to) {
        return AGENTRT_EFAULT;
    }
    if (!answer) {
        return AGENTRT_EBADF;
    }
    int32_t len = copy_out(answer->payload, answer->len, offset, to, cap);
    return answer->status && offset == 0 ? AGENTRT_EFAILED : len;
}

/* Only what was waited for can be closed: an abandoned syscall stays in flight, or its requests could pile up without a
 * bound, and whether its answer has come must not show. */
static int64_t do_close(art_guest *guest, wasmtime_caller_t *caller, const wasmtime_val_t *args)
{
    (void)caller;
    art__slot *slot = slot_find(guest, args[0].of.i32);
    if (!slot || !slot->waited) {
        return AGENTRT_EBADF;
    }
    slot_remove(guest, slot);
    return 0;
}

static int64_t read_bytes(art_guest *guest, wasmtime_caller_t *caller, const uint8_t *from, uint32_t len,
                          const wasmtime_val_t *args)
{
    uint32_t cap = (uint32_t)args[2].of.i32;
    uint8_t *to = art__abi_bytes(guest, caller, (uint32_t)args[1].of.i32, cap);
    return to ? copy_out(from, len, (uint32_t)args[0].of.i32, to, cap) : AGENTRT_EFAULT;
}

static int64_t do_input(art_guest *guest, wasmtime_caller_t *caller, const wasmtime_val_t *args)
{
    guest->seen |= ART__SEEN_INPUT;
    return read_bytes(guest, caller, guest->input, guest->input_len, args);
}

static int64_t do_restored(art_guest *guest, wasmtime_caller_t *caller, const wasmtime_val_t *args)
{
    guest->seen |= ART__SEEN_INPUT;
    return guest->has_restored ? read_bytes(guest, caller, guest->restored, guest->restored_len, args)
                               : AGENTRT_ENODATA;
}

int32_t art__abi_output(art_guest *guest, wasmtime_caller_t *caller, uint32_t at, uint32_t len)
{
    if (len > guest->engine->config.result_bytes_max) {
        return AGENTRT_E2BIG;
    }
    const uint8_t *bytes = art__abi_bytes(guest, caller, at, len);
    if (!bytes) {
        return AGENTRT_EFAULT;
    }
    uint8_t *copy = malloc(len ? len : 1);
    if (!copy) {
        abort();
    }
    memcpy(copy, bytes, len);
    free(guest->output);
    guest->output = copy;
    guest->output_len = guest->output_room = len;
    guest->has_output = true;
    return 0;
}

void art__abi_output_add(art_guest *guest, const uint8_t *bytes, uint32_t len)
{
    uint64_t wanted = (uint64_t)guest->output_len + len;
    if (wanted > guest->output_room) {
        uint64_t room = 2 * wanted;
        if (room > guest->engine->config.result_bytes_max) {
            room = guest->engine->config.result_bytes_max;
        }
        guest->output = realloc(guest->output, room);
        if (!guest->output) {
            abort();
        }
        guest->output_room = (uint32_t)room;
    }
    memcpy(guest->output + guest->output_len, bytes, len);
    guest->output_len = (uint32_t)wanted;
    guest->has_output = true;
}

static int64_t do_output(art_guest *guest, wasmtime_caller_t *caller, const wasmtime_val_t *args)
{
    return art__abi_output(guest, caller, (uint32_t)args[0].of.i32, (uint32_t)args[1].of.i32);
}

static int64_t do_clock_now(art_guest *guest, wasmtime_caller_t *caller, const wasmtime_val_t *args)
{
    (void)caller, (void)args;
    guest->seen |= ART__SEEN_CLOCK;
    return (int64_t)art__abi_clock(guest);
}

static uint64_t rotl(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

/* xoshiro256++ (Blackman and Vigna, public domain): repeatable, not secret. */
static uint64_t random_next(uint64_t s[4])
{
    uint64_t result = rotl(s[0] + s[3], 23) + s[0], t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
}

void art__abi_random(art_guest *guest, uint8_t *to, uint32_t len)
{
    guest->seen |= ART__SEEN_SEED;
    for (uint32_t at = 0; at < len; at += 8) {
        uint64_t word = random_next(guest->random_state);
        memcpy(to + at, &word, len - at < 8 ? len - at : 8);
    }
}

static int64_t do_random(art_guest *guest, wasmtime_caller_t *caller, const wasmtime_val_t *args)
{
    uint32_t len = (uint32_t)args[1].of.i32;
    if (len > guest->engine->config.request_bytes_max) {
        return AGENTRT_E2BIG;
    }
    uint8_t *to = art__abi_bytes(guest, caller, (uint32_t)args[0].of.i32, len);
    if (!to) {
        return AGENTRT_EFAULT;
    }
    art__abi_random(guest, to, len);
    return 0;
}

#define PLAIN(name, kind)                                                                                              \
    static void import_##name(ART__IMPORT_PARAMETERS)                                                                  \
    {                                                                                                                  \
        (void)nargs, (void)nresults, (void)trap;                                                                       \
        art_guest *guest = art__abi_guest(table(env), caller);                                                         \
        art__abi_return(guest, do_##name(guest, caller, args), kind, results, continuation);                           \
    }
PLAIN(submit, ART_WASM_I32)
PLAIN(read, ART_WASM_I32)
PLAIN(close, ART_WASM_I32)
PLAIN(input, ART_WASM_I32)
PLAIN(restored, ART_WASM_I32)
PLAIN(output, ART_WASM_I32)
PLAIN(clock_now, ART_WASM_I64)
PLAIN(random, ART_WASM_I32)
#undef PLAIN

/* X(name, parameters as a string of i (i32), result: i or l (i64)) */
#define ABI(X)                      \
    X(call, "iiiii", 'i')           \
    X(wait_any, "ii", 'i')          \
    X(submit, "iii", 'i')           \
    X(read, "iiii", 'i')            \
    X(close, "i", 'i')              \
    X(input, "iii", 'i')            \
    X(restored, "iii", 'i')         \
    X(output, "ii", 'i')            \
    X(clock_now, "", 'l')           \
    X(random, "ii", 'i')            \
    X(safe_point, "", 0)

static const art__import imports[] = {
#define ABI_ROW(name, params, result) {#name, params, result, import_##name},
    ABI(ABI_ROW)
#undef ABI_ROW
};

bool art__import_in(const art__import *table_of, size_t count, const char *name, size_t len)
{
    for (size_t i = 0; i < count; i++) {
        if (strlen(table_of[i].name) == len && memcmp(table_of[i].name, name, len) == 0) {
            return true;
        }
    }
    return false;
}

bool art__abi_has(const char *name, size_t len)
{
    return art__import_in(imports, sizeof imports / sizeof *imports, name, len);
}

static wasm_valtype_t *valtype(const art__wasmtime *w, char code)
{
    return w->wasm_valtype_new(code == 'l' ? ART_WASM_I64 : ART_WASM_I32);
}

int art__imports_link(art_engine *engine, const char *module, const art__import *table_of, size_t count_of, char *msg,
                      size_t msg_len)
{
    const art__wasmtime *w = engine->w;
    for (size_t i = 0; i < count_of; i++) {
        const art__import *import = &table_of[i];
        wasm_valtype_t *types[16];
        size_t count = strlen(import->params);
        for (size_t k = 0; k < count; k++) {
            types[k] = valtype(w, import->params[k]);
        }
        wasm_valtype_vec_t params, results;
        w->wasm_valtype_vec_new(&params, count, types);
        if (import->result) {
            types[0] = valtype(w, import->result);
        }
        w->wasm_valtype_vec_new(&results, import->result ? 1 : 0, types);
        wasm_functype_t *type = w->wasm_functype_new(&params, &results);
        wasmtime_error_t *error =
            w->wasmtime_linker_define_async_func(engine->linker, module, strlen(module), import->name,
                                                 strlen(import->name), type, import->call, engine, NULL);
        w->wasm_functype_delete(type);
        if (error) {
            art__error_take(w, error, msg, msg_len);
            return ART_EENGINE;
        }
    }
    return 0;
}

int art__abi_link(art_engine *engine, char *msg, size_t msg_len)
{
    return art__imports_link(engine, ART_MODULE_NAME, imports, sizeof imports / sizeof *imports, msg, msg_len);
}
