/* guest.c: one guest's life, from first poll to exit. The sequence is the one measured to be right: store, limiter, fuel,
 * yield interval (before instantiation, so that a start function yields too), instantiate, call, poll. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memmem */
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "art_err.h"
#include "guest_internal.h"
#include "sys_linux.h"

/* While more fuel may come the store must not run dry, for a guest cannot be resumed after that: it is polled only with
 * what one poll can use at most, a micro-slice and a stretch without loop or call (a function has at most 7,654,321 bytes,
 * so fewer operations). Once the account is final, a look now and then is enough, to give an overdrawn grant a chance. */
#define FUEL_STRETCH_MAX (8u << 20)
#define FUEL_CHECK_POLLS 16

/* A yield costs 0.1 us, so micro-slices of 3 us cost an interpreter 3 %, and urgent work waits 3 us at worst. A guest begins
 * with fuel that the slowest one spends in about 6 us. */
#define MICRO_SLICE_NS 3000
#define MICRO_SLICE_FUEL_FIRST 10000
#define MICRO_SLICE_FUEL_MIN 1000
/* A micro-slice that took longer was off its CPU: it says nothing about the guest. */
#define MICRO_SLICE_DOUBT_NS 1000000

/* A test build may define ART_GUEST_ENDING(guest), called when the guest has ended and its memory is still there. */
#ifndef ART_GUEST_ENDING
#define ART_GUEST_ENDING(guest) ((void)0)
#endif

/* --- ownership ---------------------------------------------------------------- */

void art__guest_own(art_guest *guest)
{
    /* acquire, partner [O1]: the new owner sees all that the last one wrote */
    if (atomic_exchange_explicit(&guest->owned, 1, memory_order_acquire)) {
        fputs("agentrt: a guest has two owners\n", stderr);
        abort();
    }
}

void art__guest_disown(art_guest *guest)
{
    atomic_store_explicit(&guest->owned, 0, memory_order_release); /* [O1] */
}

/* --- making and ending -------------------------------------------------------- */

art_answer *art_answer_new(int32_t handle, int32_t status, uint64_t clock_ns, uint64_t seq, const void *payload,
                           uint32_t len)
{
    art_answer *answer = malloc(sizeof *answer + len);
    if (answer) {
        *answer = (art_answer){.handle = handle, .status = status, .clock_ns = clock_ns, .seq = seq, .len = len};
        if (len) {
            memcpy(answer->payload, payload, len);
        }
    }
    return answer;
}

static bool copy_bytes(uint8_t **to, const void *from, uint32_t len)
{
    *to = malloc(len ? len : 1);
    if (*to && len) {
        memcpy(*to, from, len);
    }
    return *to != NULL;
}

/* Spreads the seed over the generator's state; SplitMix64 (Steele, Lea, Flood) as xoshiro's authors recommend. */
static void random_seed(uint64_t state[4], const uint8_t seed[16])
{
    uint64_t words[2];
    memcpy(words, seed, sizeof words);
    uint64_t x = words[0] ^ (words[1] * 0x9E3779B97F4A7C15u);
    for (int i = 0; i < 4; i++) {
        uint64_t z = (x += 0x9E3779B97F4A7C15u) ^ (i & 1 ? words[1] : 0);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        state[i] = z ^ (z >> 31);
    }
    state[0] |= state[0] | state[1] | state[2] | state[3] ? 0 : 1; /* all zero is the one bad state */
}

int art_guest_create(const art_guest_config *config, art_guest **out)
{
    if (!config->micro_slice_fuel || !config->fuel || !config->module) {
        return ART_EINVAL;
    }
    art_guest *guest = calloc(1, sizeof *guest);
    if (!guest) {
        return ART_ENOMEM;
    }
    guest->has_restored = config->restored != NULL;
    if (!copy_bytes(&guest->input, config->input, config->input_len) ||
        (config->restored && !copy_bytes(&guest->restored, config->restored, config->restored_len))) {
        free(guest->input);
        free(guest);
        return ART_ENOMEM;
    }
    guest->input_len = config->input_len;
    guest->restored_len = config->restored_len;
    guest->module = art_module_retain(config->module);
    guest->engine = config->module->engine;
    guest->fuel = config->fuel;
    guest->micro_slice_fuel_max = config->micro_slice_fuel;
    guest->micro_slice_fuel = art_fuel_min(config->micro_slice_fuel, MICRO_SLICE_FUEL_FIRST);
    guest->memory_bytes_max = guest->engine->config.memory_bytes_max;
    if (config->memory_bytes_max && config->memory_bytes_max < guest->memory_bytes_max) {
        guest->memory_bytes_max = config->memory_bytes_max;
    }
    guest->clock_base_ns = config->clock_ns;
    guest->image = art_wasi_image_retain(config->wasi);
    guest->frame = config->frame;
    guest->frame_base = config->frame_base;
    guest->frame_image = config->frame_image;
    guest->stays = config->frame_stays;
    guest->boot = (uint8_t)config->boot;
    guest->next_handle = 1;
    random_seed(guest->random_state, config->seed);
    guest->replayed = config->replay;
    atomic_init(&guest->live, !config->replay);
    *out = guest;
    return 0;
}

/* Frees the guest's slots in the pools: future before store, or wasmtime aborts. `exact` says that the store's fuel is; if not,
 * the guest is charged up to its last call out, and what it did since is put back. */
static void release_engine_side(art_guest *guest, bool exact)
{
    const art__wasmtime *w = guest->engine->w;
    if (guest->future) {
        w->wasmtime_call_future_delete(guest->future);
        guest->future = NULL;
    }
    if (guest->store) {
        guest->fuel_used_final = exact ? art__guest_fuel_now(guest) : guest->fuel_at_call;
        art_fuel_charge(guest->fuel, guest->fuel_used_final);
        art_fuel_put(guest->fuel, guest->fuel_taken - guest->fuel_used_final);
        w->wasmtime_store_delete(guest->store);
        guest->store = NULL;
        guest->context = NULL;
        guest->has_memory = false;
    }
    if (guest->trap) {
        w->wasm_trap_delete(guest->trap);
        guest->trap = NULL;
    }
    if (guest->error) {
        w->wasmtime_error_delete(guest->error);
        guest->error = NULL;
    }
}

static void end_at(art_guest *guest, art_exit_reason reason, int32_t code, bool exact)
{
    guest->exit_reason = reason;
    guest->exit_code = code;
    guest->wait = ART__WAIT_NONE;
    guest->waiting_count = 0;
    guest->phase = ART__ENDED;
    art__wasi_end(guest);
    ART_GUEST_ENDING(guest);
    release_engine_side(guest, exact);
}

static void end(art_guest *guest, art_exit_reason reason, int32_t code)
{
    end_at(guest, reason, code, true);
}

static void end_with_bytes(art_guest *guest, art_exit_reason reason, int32_t code, bool exact, const char *text, size_t len)
{
    while (len && text[len - 1] == '\0') {
        len--;
    }
    guest->message = strndup(text, len < ART_MSG_BYTES ? len : ART_MSG_BYTES);
    end_at(guest, reason, code, exact);
}

/* Whether the store's fuel is exact at a trap. Compiled code counts in a register and writes the count to the store at calls,
 * `throw` and `unreachable`, and when a micro-slice ends. At a trap anywhere else the store holds the last of these, which
 * depends on how long micro-slices were. */
static bool trap_is_exact(uint8_t code)
{
    switch (code) {
    case ART_WASM_TRAP_STACK_OVERFLOW: /* found at a function's entry */
    case ART_WASM_TRAP_INDIRECT_CALL_TO_NULL:
    case ART_WASM_TRAP_BAD_SIGNATURE:
    case ART_WASM_TRAP_UNREACHABLE:
    case ART_WASM_TRAP_OUT_OF_FUEL:
        return true;
    default:
        return false;
    }
}

/* A trap or error that wasmtime reported: which of the guest's ways to end it was. */
static void end_with_fault(art_guest *guest)
{
    const art__wasmtime *w = guest->engine->w;
    wasm_byte_vec_t text;
    if (guest->trap) {
        uint8_t code = 0;
        bool has_code = w->wasmtime_trap_code(guest->trap, &code);
        bool fuel = has_code && code == ART_WASM_TRAP_OUT_OF_FUEL;
        w->wasm_trap_message(guest->trap, &text);
        end_with_bytes(guest, fuel ? ART_EXIT_FUEL : ART_EXIT_TRAP, has_code ? code : -1, has_code && trap_is_exact(code),
                       text.data, text.size);
    } else {
        w->wasmtime_error_message(guest->error, &text);
        /* An exception that nobody caught comes as an error, but is the guest's own fault. */
        bool thrown = guest->failing || memmem(text.data, text.size, "thrown Wasm exception", 21) != NULL;
        end_with_bytes(guest, thrown ? ART_EXIT_TRAP : ART_EXIT_ENGINE, thrown ? -1 : 0, thrown, text.data, text.size);
    }
    w->wasm_byte_vec_delete(&text);
}

static void end_unwound(art_guest *guest, const char *text)
{
    end_with_bytes(guest, ART_EXIT_UNWOUND, 0, true, text, strlen(text));
}

void art__guest_end(art_guest *guest, art_exit_reason reason, const char *message)
{
    if (message) {
        end_with_bytes(guest, reason, 0, true, message, strlen(message));
    } else {
        end(guest, reason, 0);
    }
}

void art_guest_kill(art_guest *guest)
{
    art__guest_own(guest);
    if (guest->phase != ART__ENDED) {
        end(guest, ART_EXIT_KILLED, 0);
    }
    art__guest_disown(guest);
}

int art_guest_fail(art_guest *guest, char *msg, size_t msg_len)
{
    const art__wasmtime *w = guest->engine->w;
    static const char text[] = "stopped to be looked at";
    art__guest_own(guest);
    bool waits = guest->wait == ART__WAIT_CALL || guest->wait == ART__WAIT_ANY || guest->wait == ART__WAIT_SAFE_POINT;
    if (guest->phase != ART__RUNNING || !guest->future || !waits || art__abi_resolve(guest)) {
        art__guest_disown(guest);
        art__msg(msg, msg_len, "the guest is not suspended in a syscall that waits");
        return ART_ESTATE;
    }
    *guest->trap_slot = w->wasmtime_trap_new(text, sizeof text - 1);
    guest->failing = true;
    (void)w->wasmtime_call_future_poll(guest->future); /* nothing can catch a trap, so it is done */
    if (guest->trap || guest->error) {
        end_with_fault(guest);
    } else {
        end(guest, ART_EXIT_KILLED, 0);
    }
    art__guest_disown(guest);
    return 0;
}

void art_guest_destroy(art_guest *guest)
{
    if (!guest) {
        return;
    }
    art__guest_own(guest);
    release_engine_side(guest, true);
    for (uint32_t i = 0; i < guest->slot_count; i++) {
        free(guest->slots[i].answer);
    }
    /* relaxed: nobody else may use the guest any more */
    for (art_answer *a = atomic_load_explicit(&guest->answers, memory_order_relaxed), *next; a; a = next) {
        next = a->next;
        free(a);
    }
    for (art_request *r = atomic_load_explicit(&guest->requests, memory_order_relaxed), *next; r; r = next) {
        next = r->next;
        free(r);
    }
    art_module_release(guest->module);
    free(guest->slots);
    free(guest->waiting);
    free(guest->call_answer);
    free(guest->input);
    free(guest->restored);
    free(guest->output);
    free(guest->message);
    free(guest->under);
    art__wasi_free(guest);
    art_wasi_image_release(guest->image);
    free(guest);
}

/* --- fuel --------------------------------------------------------------------- */

uint64_t art__guest_fuel_now(const art_guest *guest)
{
    if (!guest->store) {
        return guest->fuel_used_final;
    }
    if (guest->arriving) { /* what that takes is not charged */
        return art_fuel_sub(guest->fuel_taken, guest->left_then);
    }
    uint64_t left = 0;
    guest->engine->w->wasmtime_context_get_fuel(guest->context, &left);
    return art_fuel_sub(guest->fuel_taken, left);
}

/* Moves all of the account into the store when that is low. False if it is low still and more may come. */
static bool refill(art_guest *guest)
{
    const art__wasmtime *w = guest->engine->w;
    uint64_t left = 0, low = art_fuel_add(guest->micro_slice_fuel, FUEL_STRETCH_MAX);
    w->wasmtime_context_get_fuel(guest->context, &left);
    if (left >= low) {
        return true;
    }
    /* acquire, as in art_fuel_exhausted and before the take: who sees "no more will come" takes the last chunk too */
    guest->fuel_sealed = atomic_load_explicit(&guest->fuel->final, memory_order_acquire);
    uint64_t more = art_fuel_take(guest->fuel, UINT64_MAX - guest->fuel_taken);
    if (more) {
        guest->fuel_taken += more;
        left += more;
        w->wasmtime_context_set_fuel(guest->context, left);
    }
    return guest->fuel_sealed || left >= low;
}

void art_guest_pace(art_guest *guest, uint64_t took_ns)
{
    uint64_t fuel = guest->micro_slice_fuel;
    if (took_ns > MICRO_SLICE_NS * 3 / 2 && took_ns < MICRO_SLICE_DOUBT_NS) {
        fuel = fuel * MICRO_SLICE_NS / took_ns;
        fuel = fuel < MICRO_SLICE_FUEL_MIN ? MICRO_SLICE_FUEL_MIN : fuel;
    } else if (took_ns < MICRO_SLICE_NS / 2) {
        fuel = art_fuel_add(fuel, fuel);
    } else if (took_ns < MICRO_SLICE_NS * 5 / 6) {
        fuel = fuel * MICRO_SLICE_NS / took_ns;
    }
    fuel = art_fuel_min(fuel, guest->micro_slice_fuel_max);
    if (fuel != guest->micro_slice_fuel && guest->store) {
        const art__wasmtime *w = guest->engine->w;
        wasmtime_error_t *error = w->wasmtime_context_fuel_async_yield_interval(guest->context, fuel);
        if (error) {
            w->wasmtime_error_delete(error); /* the old length stays */
        } else {
            guest->micro_slice_fuel = fuel;
        }
    }
}

/* --- polling ------------------------------------------------------------------ */

static bool start(art_guest *guest)
{
    const art__wasmtime *w = guest->engine->w;
    const art_engine_config *limits = &guest->engine->config;
    guest->store = w->wasmtime_store_new(guest->engine->engine, guest, NULL);
    guest->context = w->wasmtime_store_context(guest->store);
    w->wasmtime_store_limiter(guest->store, (int64_t)guest->memory_bytes_max, limits->table_elements_max, 1, 1, 1);
    guest->fuel_taken = art_fuel_take(guest->fuel, UINT64_MAX);
    wasmtime_error_t *error = w->wasmtime_context_set_fuel(guest->context, guest->fuel_taken);
    if (!error) {
        error = w->wasmtime_context_fuel_async_yield_interval(guest->context, guest->micro_slice_fuel);
    }
    if (error) {
        guest->error = error;
        return false;
    }
    guest->future = w->wasmtime_instance_pre_instantiate_async(guest->module->pre, guest->context, &guest->instance,
                                                               &guest->trap, &guest->error);
    guest->phase = ART__INSTANTIATING;
    return true;
}

static void call_export(art_guest *guest, const char *name, uint8_t phase, size_t args, size_t results)
{
    const art__wasmtime *w = guest->engine->w;
    wasmtime_extern_t export;
    /* checked when the module was loaded */
    w->wasmtime_instance_export_get(guest->context, &guest->instance, name, strlen(name), &export);
    guest->entry = export.of.func;
    guest->phase = phase;
    guest->future = w->wasmtime_func_call_async(guest->context, &guest->entry, guest->entry_args, args, &guest->result,
                                                results, &guest->trap, &guest->error);
}

void art__guest_call(art_guest *guest, const char *name, uint8_t phase)
{
    call_export(guest, name, phase, 0, 0);
}

void art__guest_enter(art_guest *guest)
{
    const art_module *module = guest->module;
    call_export(guest, module->entry_name, ART__RUNNING, module->entry == ART__ENTRY_MAIN ? 2 : 0,
                module->entry == ART__ENTRY_START ? 0 : 1);
}

bool art__guest_find_memory(art_guest *guest)
{
    wasmtime_extern_t export;
    if (!guest->has_memory && guest->store && guest->phase > ART__INSTANTIATING &&
        guest->engine->w->wasmtime_instance_export_get(guest->context, &guest->instance, "memory", 6, &export) &&
        export.kind == ART_WASM_EXTERN_MEMORY) {
        guest->memory = export.of.memory;
        guest->has_memory = true;
    }
    return guest->has_memory;
}

/* The arguments of an entry like C's main, where malloc had room. */
static bool place_arguments(art_guest *guest)
{
    uint32_t at = (uint32_t)guest->result.of.i32, len = art__wasi_main_bytes(guest);
    uint8_t *to = at && art__guest_find_memory(guest) ? art__abi_bytes(guest, NULL, at, len) : NULL;
    if (!to) {
        return false;
    }
    art__wasi_main_write(guest, to, at);
    guest->entry_args[0] = (wasmtime_val_t){.kind = ART_WASM_I32, .of.i32 = art__wasi_main_argc(guest)};
    guest->entry_args[1] = (wasmtime_val_t){.kind = ART_WASM_I32, .of.i32 = (int32_t)at};
    return true;
}

/* A call on the way to the entry's end is over: makes the next one. False if the guest is at its end. */
static bool advance(art_guest *guest)
{
    const art_module *module = guest->module;
    guest->engine->w->wasmtime_call_future_delete(guest->future);
    guest->future = NULL;
    if (guest->trap || guest->error) {
        end_with_fault(guest);
        return false;
    }
    guest->fuel_at_call = art__guest_fuel_now(guest);
    if (guest->phase == ART__INSTANTIATING) {
        /* relaxed: see art__capture_measured */
        guest->check_cost = atomic_load_explicit(&module->check_cost, memory_order_relaxed);
        if (!guest->check_cost && art_module_captures_anywhere(module)) {
            art__capture_measure(guest);
            return true;
        }
    }
    if ((guest->phase == ART__MEASURING || guest->phase == ART__MEASURING_REST) && !art__capture_measured(guest)) {
        return true;
    }
    if (guest->frame) {
        return art__capture_begin(guest);
    }
    bool begun = guest->phase == ART__INSTANTIATING || guest->phase == ART__MEASURING_REST;
    if (begun && module->begin) {
        return art__boot_begin(guest);
    }
    if (begun && module->initialize) {
        call_export(guest, "_initialize", ART__INITIALIZING, 0, 0);
        return true;
    }
    if (module->entry == ART__ENTRY_MAIN && guest->phase < ART__ALLOCATING) {
        guest->entry_args[0] = (wasmtime_val_t){.kind = ART_WASM_I32, .of.i32 = (int32_t)art__wasi_main_bytes(guest)};
        call_export(guest, "malloc", ART__ALLOCATING, 1, 1);
        return true;
    }
    if (guest->phase < ART__RUNNING) {
        if (module->entry == ART__ENTRY_MAIN && !place_arguments(guest)) {
            static const char text[] = "malloc gave no room for the arguments";
            end_with_bytes(guest, ART_EXIT_TRAP, -1, true, text, sizeof text - 1);
            return false;
        }
        art__guest_enter(guest);
        art__capture_entered(guest);
        return true;
    }
    if (guest->phase == ART__UNWINDING) {
        end(guest, ART_EXIT_UNWOUND, module->unwind == ART__UNWIND_I32 ? guest->result.of.i32 : 0);
        return false;
    }
    int32_t code = module->entry == ART__ENTRY_START ? 0 : guest->result.of.i32;
    if (art__boot_at_rest(guest, code)) {
        return true;
    }
    end(guest, code ? ART_EXIT_FAILED : ART_EXIT_RETURNED, code);
    return false;
}

/* The guest's wait is not over. Goes on to the handlers if this is where the program stops. Deleting the future resumes its
 * stack once with an error, as if the import had failed: it unwinds as by a trap, which no handler of the guest's can catch,
 * and the store is ready for another call. Its fuel stands as it was when the import was called. */
static art_guest_outcome wait_or_unwind(art_guest *guest)
{
    if (!guest->unwind_due || guest->phase == ART__UNWINDING) {
        bool stopped = guest->wait == ART__WAIT_SAFE_POINT || guest->wait == ART__WAIT_BOOTED;
        return stopped ? ART_GUEST_SAFE_POINT : ART_GUEST_WAIT;
    }
    if (guest->module->unwind == ART__UNWIND_NONE || guest->wait == ART__WAIT_BOOTED) {
        end_unwound(guest, "");
        return ART_GUEST_DONE;
    }
    if (guest->phase == ART__INSTANTIATING) {
        end_unwound(guest, "unwinding: the start function had not returned, so there were no handlers to call yet");
        return ART_GUEST_DONE;
    }
    guest->engine->w->wasmtime_call_future_delete(guest->future);
    guest->future = NULL;
    art__abi_unwind(guest);
    guest->fuel_at_call = art__guest_fuel_now(guest);
    call_export(guest, ART_UNWIND_ENTRY, ART__UNWINDING, 0, guest->module->unwind == ART__UNWIND_I32 ? 1 : 0);
    return ART_GUEST_YIELD;
}

/* Nothing of a guest that is told to stop before it was polled needs undoing. In replay it may have been polled before. */
static bool unwind_unstarted(art_guest *guest)
{
    /* relaxed: a mark that comes just now is met at the first wait; without one the answers keep for the waits to come */
    if (guest->phase != ART__NEW || guest->replayed ||
        atomic_load_explicit(&guest->unwind_told, memory_order_relaxed) == ART__TOLD_NOT) {
        return false;
    }
    art__abi_take_answers(guest);
    if (guest->unwind_due) {
        end_unwound(guest, "");
    }
    return guest->unwind_due;
}

static art_guest_outcome poll_owned(art_guest *guest)
{
    const art__wasmtime *w = guest->engine->w;
    if (guest->phase == ART__NEW) {
        if (unwind_unstarted(guest)) {
            return ART_GUEST_DONE;
        }
        if (!start(guest)) {
            end_with_fault(guest);
            return ART_GUEST_DONE;
        }
    }
    if (guest->phase == ART__RESTORING) {
        return art__capture_restore(guest);
    }
    if (guest->wait != ART__WAIT_NONE && !art__abi_resolve(guest)) {
        return wait_or_unwind(guest);
    }
    if (guest->polls_until_fuel_check == 0 && !guest->arriving) {
        if (!refill(guest)) {
            return ART_GUEST_NO_FUEL;
        }
        guest->polls_until_fuel_check = guest->fuel_sealed ? FUEL_CHECK_POLLS : 1;
    }
    guest->polls_until_fuel_check -= !guest->arriving;
    guest->host_work = 0;
    for (;;) {
        bool entered = guest->phase != ART__INSTANTIATING;
        bool done = w->wasmtime_call_future_poll(guest->future);
        if (entered && !guest->first_ns) {
            guest->first_ns = art_sys_now_ns();
        }
        if (guest->exiting) { /* the import is suspended for good */
            end(guest,
                guest->phase == ART__UNWINDING ? ART_EXIT_UNWOUND
                : guest->exit_code             ? ART_EXIT_FAILED
                                               : ART_EXIT_RETURNED,
                guest->exit_code);
            return ART_GUEST_DONE;
        }
        if (guest->arriving && (done || guest->strays)) {
            art__capture_lost(guest);
            return ART_GUEST_DONE;
        }
        if (!done) {
            /* a wait that was answered at once has been resolved already and goes on at the next poll */
            return guest->wait != ART__WAIT_NONE && !art__abi_resolve(guest) ? wait_or_unwind(guest) : ART_GUEST_YIELD;
        }
        if (!advance(guest)) {
            return ART_GUEST_DONE;
        }
        if (entered || guest->phase == ART__RESTORING) {
            return ART_GUEST_YIELD; /* each call begins a micro-slice of its own */
        }
    }
}

art_guest_outcome art_guest_poll(art_guest *guest)
{
    art__guest_own(guest);
    art_guest_outcome outcome = poll_owned(guest);
    art__guest_disown(guest);
    return outcome;
}

bool art_guest_can_resume(art_guest *guest)
{
    art__guest_own(guest);
    bool can = guest->wait == ART__WAIT_NONE || art__abi_resolve(guest) ||
               (guest->unwind_due && guest->phase != ART__UNWINDING);
    art__guest_disown(guest);
    return can;
}

/* --- unwinding ---------------------------------------------------------------- */

int art_guest_unwind(art_guest *guest, int32_t skipped)
{
    art_answer *mark = art_answer_new(skipped, 0, 0, 0, NULL, 0);
    if (!mark) {
        return ART_ENOMEM;
    }
    uint32_t not_yet = ART__TOLD_NOT;
    /* acquire, as in art__abi_resolve */
    bool live = atomic_load_explicit(&guest->live, memory_order_acquire);
    /* relaxed: the mark publishes what the owner goes by; this one only bounds its time */
    if (atomic_compare_exchange_strong_explicit(&guest->unwind_told, &not_yet, live ? ART__TOLD_LIVE : ART__TOLD_IN_REPLAY,
                                                memory_order_relaxed, memory_order_relaxed)) {
        /* relaxed: who takes the mark sees this by its post; to who takes another answer it is not that one either way */
        atomic_store_explicit(&guest->unwind_mark, mark, memory_order_relaxed);
        art_guest_post(guest, mark); /* its place among the answers says which of them the program had been given */
    } else {
        free(mark);
    }
    return 0;
}

art_unwind_stage art_guest_unwinding(const art_guest *guest)
{
    /* relaxed: they bound a time */
    uint32_t told = atomic_load_explicit(&guest->unwind_told, memory_order_relaxed);
    if (told == ART__TOLD_NOT || guest->phase == ART__ENDED) {
        return ART_UNWIND_NONE;
    }
    if (guest->phase == ART__UNWINDING) {
        return atomic_load_explicit(&guest->live, memory_order_relaxed) ? ART_UNWIND_HANDLERS : ART_UNWIND_HANDLERS_REPLAY;
    }
    return told == ART__TOLD_LIVE ? ART_UNWIND_PROGRAM : ART_UNWIND_PROGRAM_REPLAY;
}

void art_guest_unwind_stop(art_guest *guest)
{
    art__guest_own(guest);
    if (guest->phase == ART__UNWINDING) {
        end_unwound(guest, "unwinding: the handlers had not ended when their time was over");
    } else if (guest->phase != ART__ENDED) {
        end_unwound(guest, "unwinding: the program did not come to a wait in time; its handlers did not run");
    }
    art__guest_disown(guest);
}

bool art_guest_unwind_unstarted(art_guest *guest)
{
    art__guest_own(guest);
    bool ended = unwind_unstarted(guest);
    art__guest_disown(guest);
    return ended;
}

/* --- talk with the control plane ---------------------------------------------- */

art_request *art_guest_take_requests(art_guest *guest)
{
    /* acquire [Q2], partner [Q1] */
    art_request *newest = atomic_exchange_explicit(&guest->requests, NULL, memory_order_acquire);
    art_request *first = NULL;
    while (newest) {
        art_request *next = newest->next;
        newest->next = first;
        first = newest;
        newest = next;
    }
    /* relaxed: a rough bound of log bytes */
    atomic_store_explicit(&guest->logs_unseen, 0, memory_order_relaxed);
    return first;
}

bool art_guest_has_requests(const art_guest *guest)
{
    /* relaxed: only a hint whether an event is worth publishing */
    return atomic_load_explicit(&guest->requests, memory_order_relaxed) != NULL;
}

void art_guest_post(art_guest *guest, art_answer *answer)
{
    art_answer *head = atomic_load_explicit(&guest->answers, memory_order_relaxed);
    do {
        answer->next = head;
        /* seq_cst [A1]: partner [A2] takes the answer; and it must not move after the poster's look at the run's
         * state (worker.c, "blocking"), or both sides could miss each other */
    } while (!atomic_compare_exchange_weak_explicit(&guest->answers, &head, answer, memory_order_seq_cst,
                                                    memory_order_relaxed));
}

void art_guest_go_live(art_guest *guest)
{
    /* release, partner in art__abi_resolve */
    atomic_store_explicit(&guest->live, true, memory_order_release);
}

art_guest_wait art_guest_waiting(const art_guest *guest)
{
    return (art_guest_wait){
        .number = guest->waits + guest->stops,
        .handles = guest->waiting,
        .count = guest->wait == ART__WAIT_NONE ? 0 : guest->waiting_count,
        .ops = guest->waiting_ops,
    };
}

bool art_guest_has_answers(const art_guest *guest)
{
    /* seq_cst: must not move before the owner's store of its state (worker.c, "blocking") */
    return atomic_load_explicit(&guest->answers, memory_order_seq_cst) != NULL;
}

bool art_guest_ended(const art_guest *guest)
{
    return guest->phase == ART__ENDED;
}

art_exit art_guest_exit(const art_guest *guest)
{
    return (art_exit){
        .reason = guest->exit_reason,
        .code = guest->exit_code,
        .output = guest->has_output ? guest->output : NULL,
        .output_len = guest->output_len,
        .message = guest->message ? guest->message : "",
        .out = art__wasi_stream(guest, 1),
        .err = art__wasi_stream(guest, 2),
        .waits = guest->waits,
        .asked = guest->next_handle - 1,
    };
}

uint64_t art_guest_fuel_used(const art_guest *guest)
{
    return art__guest_fuel_now(guest);
}

uint64_t art_guest_memory_bytes(art_guest *guest)
{
    return art__guest_find_memory(guest)
               ? guest->engine->w->wasmtime_memory_data_size(guest->context, &guest->memory)
               : 0;
}

/* The digest is for finding differences, not for keeping secrets: four lanes of words, so that it goes at a memory's speed. Each
 * step can be undone, so memories that differ in one word never agree. */
static uint64_t digest_step(uint64_t lane, uint64_t word)
{
    lane = (lane ^ word) * 0x9E3779B97F4A7C15u;
    return lane ^ lane >> 32;
}

static uint64_t digest_bytes(const uint8_t *bytes, size_t len)
{
    uint64_t lanes[4] = {len, 1, 2, 3}, words[4];
    size_t at = 0;
    for (; at + sizeof words <= len; at += sizeof words) {
        memcpy(words, bytes + at, sizeof words);
        for (int i = 0; i < 4; i++) {
            lanes[i] = digest_step(lanes[i], words[i]);
        }
    }
    for (; at < len; at++) {
        lanes[0] = digest_step(lanes[0], bytes[at]);
    }
    return digest_step(digest_step(digest_step(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

static uint64_t memory_digest(art_guest *guest)
{
    const art__wasmtime *w = guest->engine->w;
    if (!art__guest_find_memory(guest)) {
        return 0;
    }
    return digest_bytes(w->wasmtime_memory_data(guest->context, &guest->memory),
                        w->wasmtime_memory_data_size(guest->context, &guest->memory));
}

uint64_t art_guest_memory_digest(art_guest *guest)
{
    art__guest_own(guest);
    uint64_t digest = memory_digest(guest);
    art__guest_disown(guest);
    return digest;
}

uint64_t art_guest_first_ns(const art_guest *guest)
{
    return guest->first_ns;
}
