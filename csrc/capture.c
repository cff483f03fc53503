/* capture.c: see capture.h. Sections: the module's side, state as bytes, moving the stack, capturing, going on. */
#include "capture.h"

#include <stdlib.h>
#include <string.h>

#include "art_err.h"
#include "guest_internal.h"
#include "sys_linux.h"

/* agentrt/capture/instrument.py makes these. */
#define EXPORT_STATE "agentrt:state"
#define EXPORT_DATA "agentrt:data"
#define EXPORT_GLOBAL "agentrt:global:"
#define EXPORT_CHECK "agentrt:check"
#define EXPORT_FLAG "agentrt:flag"

enum { NORMAL = 0, UNWINDING = 1, REWINDING = 2 }; /* asyncify's states */
enum { SECTION_GLOBALS = 1, SECTION_STACK, SECTION_GUEST, SECTION_OUTPUT, SECTION_WASI, SECTION_BOOT };

/* Where the stack is while it moves: {i32 next free, i32 end}, then the locals of its functions. Not at 0, so that null pointers
 * stay what they are to whoever debugs this. */
#define MOVE_AT 16u
#define MOVE_HEAD 8u
/* More than an honest module takes to unwind the largest stack there is; one that does not unwind at all ends here. */
#define MOVE_FUEL (UINT64_C(1) << 28)
/* Pages that a poll restores: about what a micro-slice takes when none of them is there yet. */
#define RESTORE_PAGES 16
/* From so many on it pays to ask the kernel for all of them at once. */
#define POPULATE_PAGES_MIN 4

/* --- the module's side -------------------------------------------------------- */

static bool named(const wasm_byte_vec_t *name, const char *text)
{
    return name->size == strlen(text) && memcmp(name->data, text, name->size) == 0;
}

void art__capture_export(art_module *module, const wasm_byte_vec_t *name, uint8_t kind, bool plain)
{
    if (kind == ART_WASM_EXTERN_GLOBAL) {
        module->capture_state = module->capture_state || named(name, EXPORT_STATE);
        module->capture_data = module->capture_data || named(name, EXPORT_DATA);
        module->capture_flag = module->capture_flag || named(name, EXPORT_FLAG);
        size_t len = sizeof EXPORT_GLOBAL - 1;
        module->global_count += name->size > len && memcmp(name->data, EXPORT_GLOBAL, len) == 0;
    } else if (kind == ART_WASM_EXTERN_FUNC && plain) {
        module->capture_check = module->capture_check || named(name, EXPORT_CHECK);
    }
}

bool art_module_captures(const art_module *module)
{
    return module->capture_state && module->capture_data;
}

bool art_module_captures_anywhere(const art_module *module)
{
    return art_module_captures(module) && module->capture_check && module->capture_flag;
}

static bool find_global(art_guest *guest, const char *name, wasmtime_global_t *out)
{
    wasmtime_extern_t found;
    if (!guest->engine->w->wasmtime_instance_export_get(guest->context, &guest->instance, name, strlen(name), &found) ||
        found.kind != ART_WASM_EXTERN_GLOBAL) {
        return false;
    }
    *out = found.of.global;
    return true;
}

/* The n-th of the module's own mutable globals, and its value. False: it has none, or one that is no number. */
static bool get_global(art_guest *guest, uint32_t index, wasmtime_global_t *global, wasmtime_val_t *value)
{
    char name[sizeof EXPORT_GLOBAL + 10];
    (void)art__msg(name, sizeof name, EXPORT_GLOBAL "%u", index);
    if (!find_global(guest, name, global)) {
        return false;
    }
    guest->engine->w->wasmtime_global_get(guest->context, global, value);
    return value->kind <= ART_WASM_V128;
}

static bool set_global(art_guest *guest, const wasmtime_global_t *global, const wasmtime_val_t *value)
{
    wasmtime_error_t *error = guest->engine->w->wasmtime_global_set(guest->context, global, value);
    if (error) {
        guest->engine->w->wasmtime_error_delete(error);
    }
    return !error;
}

static bool set_i32(art_guest *guest, const char *name, uint32_t value)
{
    wasmtime_global_t global;
    wasmtime_val_t val = {.kind = ART_WASM_I32, .of.i32 = (int32_t)value};
    return find_global(guest, name, &global) && set_global(guest, &global, &val);
}

static uint32_t get_i32(art_guest *guest, const char *name)
{
    wasmtime_global_t global;
    wasmtime_val_t val = {0};
    if (find_global(guest, name, &global)) {
        guest->engine->w->wasmtime_global_get(guest->context, &global, &val);
    }
    return (uint32_t)val.of.i32;
}

static void set_fuel_left(art_guest *guest, uint64_t left)
{
    guest->engine->w->wasmtime_context_set_fuel(guest->context, left);
}

static uint64_t fuel_left(const art_guest *guest)
{
    uint64_t left = 0;
    guest->engine->w->wasmtime_context_get_fuel(guest->context, &left);
    return left;
}

static uint8_t *memory_of(art_guest *guest, size_t *len)
{
    if (!art__guest_find_memory(guest)) {
        return NULL;
    }
    *len = guest->engine->w->wasmtime_memory_data_size(guest->context, &guest->memory);
    return guest->engine->w->wasmtime_memory_data(guest->context, &guest->memory);
}

int art_module_initial_memory(art_module *module, uint8_t **out, size_t *out_len, char *msg, size_t msg_len)
{
    art_guest *guest;
    int err = art__probe_new(module, &guest, msg, msg_len);
    if (err) {
        return err;
    }
    size_t len = 0;
    const uint8_t *memory = memory_of(guest, &len);
    *out = NULL;
    *out_len = 0;
    while (memory && len && art_frame_is_zero(memory + len - ART_FRAME_PAGE_BYTES)) {
        len -= ART_FRAME_PAGE_BYTES;
    }
    if (memory) {
        uint8_t *copy = malloc(len ? len : 1);
        err = copy ? 0 : ART_ENOMEM;
        if (copy) {
            memcpy(copy, memory, len);
            *out = copy;
            *out_len = len;
        }
    }
    art__probe_delete(guest);
    return err;
}

/* --- state as bytes ----------------------------------------------------------- */

/* A global's value. */
typedef struct saved_global {
    uint64_t kind, words[2];
} saved_global;

/* What art_guest has of a guest; then its waited handles, its slots, and the answers, the last call's first. */
typedef struct saved_guest {
    uint32_t version;
    uint8_t wait, has_output, has_call_answer, reserved;
    int32_t next_handle;
    uint32_t call_buf, call_cap, slot_count, waiting_count, padding;
    uint64_t waits, clock_base_ns, clock_base_fuel, random_state[4];
} saved_guest;
_Static_assert(sizeof(saved_guest) == 88, "no holes");

typedef struct saved_slot {
    int32_t handle, op;
    uint8_t waited, has_answer, reserved[6];
} saved_slot;

typedef struct saved_answer {
    int32_t handle, status;
    uint64_t clock_ns, seq, len;
} saved_answer;

enum { SAVED_VERSION = 1 };

bool art__save(art_frame_buf *to, const void *bytes, size_t len)
{
    static const uint8_t zeros[8];
    size_t padding = -len & 7;
    if (to->room - to->len < len + padding) {
        size_t wanted = to->room ? to->room : 1024;
        while (wanted - to->len < len + padding) {
            wanted *= 2;
        }
        uint8_t *grown = realloc(to->bytes, wanted);
        if (!grown) {
            return false;
        }
        to->bytes = grown;
        to->room = wanted;
    }
    if (len) {
        memcpy(to->bytes + to->len, bytes, len);
    }
    memcpy(to->bytes + to->len + len, zeros, padding);
    to->len += len + padding;
    return true;
}

const void *art__saved(art__saved_bytes *from, uint64_t len)
{
    uint64_t taken = len <= from->left ? (len + 7) & ~UINT64_C(7) : UINT64_MAX;
    if (taken > from->left) {
        return NULL;
    }
    const void *at = from->at;
    from->at += taken;
    from->left -= taken;
    return at;
}

static bool save_answer(art_frame_buf *to, const art_answer *answer)
{
    saved_answer head = {answer->handle, answer->status, answer->clock_ns, answer->seq, answer->len};
    return art__save(to, &head, sizeof head) && art__save(to, answer->payload, answer->len);
}

/* Malloc'ed; NULL: there is none. */
static art_answer *load_answer(art__saved_bytes *from)
{
    saved_answer head;
    const void *at = art__saved(from, sizeof head);
    if (!at) {
        return NULL;
    }
    memcpy(&head, at, sizeof head);
    const void *payload = head.len <= INT32_MAX ? art__saved(from, head.len) : NULL;
    return payload ? art_answer_new(head.handle, head.status, head.clock_ns, head.seq, payload, (uint32_t)head.len) : NULL;
}

static bool save_globals(art_guest *guest, art_frame_buf *to)
{
    for (uint32_t i = 0; i < guest->module->global_count; i++) {
        wasmtime_global_t global;
        wasmtime_val_t value = {0};
        if (!get_global(guest, i, &global, &value)) {
            return false;
        }
        saved_global saved = {value.kind, {0, 0}};
        /* what a kind does not use of the words is not always zero */
        memcpy(saved.words, &value.of, value.kind == ART_WASM_V128 ? 16 : value.kind % 2 ? 8 : 4);
        if (!art__save(to, &saved, sizeof saved)) {
            return false;
        }
    }
    return true;
}

static bool load_globals(art_guest *guest, art__saved_bytes from)
{
    for (uint32_t i = 0; i < guest->module->global_count; i++) {
        wasmtime_global_t global;
        wasmtime_val_t value = {0};
        saved_global saved;
        const void *at = art__saved(&from, sizeof saved);
        if (!at || !get_global(guest, i, &global, &value)) {
            return false;
        }
        memcpy(&saved, at, sizeof saved);
        if (saved.kind != value.kind) {
            return false;
        }
        memcpy(&value.of, saved.words, sizeof saved.words);
        if (!set_global(guest, &global, &value)) {
            return false;
        }
    }
    return from.left == 0;
}

static bool save_guest(const art_guest *guest, art_frame_buf *to)
{
    saved_guest saved = {
        .version = SAVED_VERSION,
        .wait = guest->wait,
        .has_output = guest->has_output,
        .has_call_answer = guest->call_answer != NULL,
        .next_handle = guest->next_handle,
        .call_buf = guest->call_buf,
        .call_cap = guest->call_cap,
        .slot_count = guest->slot_count,
        .waiting_count = guest->waiting_count,
        .waits = guest->waits,
        .clock_base_ns = guest->clock_base_ns,
        .clock_base_fuel = guest->clock_base_fuel,
    };
    memcpy(saved.random_state, guest->random_state, sizeof saved.random_state);
    bool done = art__save(to, &saved, sizeof saved) &&
                art__save(to, guest->waiting, guest->waiting_count * sizeof *guest->waiting);
    for (uint32_t i = 0; done && i < guest->slot_count; i++) {
        const art__slot *slot = &guest->slots[i];
        saved_slot each = {slot->handle, slot->op, slot->waited, slot->answer != NULL, {0}};
        done = art__save(to, &each, sizeof each);
    }
    done = done && (!guest->call_answer || save_answer(to, guest->call_answer));
    for (uint32_t i = 0; done && i < guest->slot_count; i++) {
        done = !guest->slots[i].answer || save_answer(to, guest->slots[i].answer);
    }
    return done;
}

static bool wait_is_known(uint8_t wait)
{
    return wait == ART__WAIT_CALL || wait == ART__WAIT_ANY || wait == ART__WAIT_SAFE_POINT;
}

/* What was loaded is the guest's even on failure: it is freed with it. */
static bool load_slots(art_guest *guest, const saved_guest *saved, art__saved_bytes *from)
{
    guest->waiting = malloc((saved->waiting_count ? saved->waiting_count : 1) * sizeof *guest->waiting);
    guest->slots = malloc((saved->slot_count ? saved->slot_count : 1) * sizeof *guest->slots);
    const void *waiting = art__saved(from, saved->waiting_count * sizeof *guest->waiting);
    if (!guest->waiting || !guest->slots || !waiting) {
        return false;
    }
    memcpy(guest->waiting, waiting, saved->waiting_count * sizeof *guest->waiting);
    guest->waiting_room = guest->waiting_count = saved->waiting_count;
    guest->slot_room = saved->slot_count;
    int32_t before = 0;
    art__saved_bytes slots = *from;
    if (!art__saved(from, saved->slot_count * sizeof(saved_slot))) {
        return false;
    }
    if (saved->has_call_answer && !(guest->call_answer = load_answer(from))) {
        return false;
    }
    for (uint32_t i = 0; i < saved->slot_count; i++) {
        saved_slot each;
        memcpy(&each, art__saved(&slots, sizeof each), sizeof each);
        art_answer *answer = each.has_answer ? load_answer(from) : NULL;
        if (each.handle <= before || each.handle >= saved->next_handle || each.op < 0 || each.op > 63 ||
            (each.has_answer && (!answer || answer->handle != each.handle)) || (each.waited && !answer)) {
            free(answer);
            return false;
        }
        before = each.handle;
        guest->slots[guest->slot_count++] =
            (art__slot){.handle = each.handle, .op = each.op, .answer = answer, .waited = each.waited};
    }
    return from->left == 0;
}

static bool load_guest(art_guest *guest, art__saved_bytes from, uint64_t memory_bytes)
{
    saved_guest saved;
    const uint32_t most = guest->engine->config.inflight_max;
    const void *at = art__saved(&from, sizeof saved);
    if (!at) {
        return false;
    }
    memcpy(&saved, at, sizeof saved);
    if (saved.version != SAVED_VERSION || !wait_is_known(saved.wait) || saved.slot_count > most ||
        saved.waiting_count > most || saved.next_handle < 1 || (uint64_t)saved.call_buf + saved.call_cap > memory_bytes ||
        saved.clock_base_fuel > guest->frame->head.fuel || !load_slots(guest, &saved, &from) ||
        (saved.wait == ART__WAIT_CALL && saved.waiting_count != 1)) {
        return false;
    }
    guest->waiting_ops = 0;
    for (uint32_t i = 0; i < guest->waiting_count; i++) {
        const art__slot *slot = art__abi_slot(guest, guest->waiting[i]);
        if (!slot) {
            return false;
        }
        guest->waiting_ops |= UINT64_C(1) << slot->op;
    }
    guest->next_handle = saved.next_handle;
    guest->call_buf = saved.call_buf;
    guest->call_cap = saved.call_cap;
    guest->waits = saved.waits;
    guest->clock_base_ns = saved.clock_base_ns;
    guest->clock_base_fuel = saved.clock_base_fuel;
    memcpy(guest->random_state, saved.random_state, sizeof saved.random_state);
    guest->wait = saved.wait;
    guest->has_output = saved.has_output;
    return true;
}

static bool load_output(art_guest *guest, art__saved_bytes from)
{
    if (guest->has_output && from.left <= guest->engine->config.result_bytes_max) {
        guest->output = malloc(from.left ? from.left : 1);
        if (guest->output && from.left) {
            memcpy(guest->output, from.at, from.left);
        }
        guest->output_len = guest->output_room = (uint32_t)from.left;
        return guest->output != NULL;
    }
    guest->has_output = false;
    return from.left == 0;
}

/* --- moving the stack --------------------------------------------------------- */

void art__capture_set_flag(art_guest *guest, const char *name, uint32_t value)
{
    (void)set_i32(guest, name, value);
}

/* A module is made for being captured, or for being an image. */
bool art__capture_set_state(art_guest *guest, uint32_t state)
{
    return set_i32(guest, guest->module->capture_state ? EXPORT_STATE : ART__EXPORT_IMAGE_STATE, state);
}

static bool set_data(art_guest *guest, uint32_t at)
{
    return set_i32(guest, guest->module->capture_data ? EXPORT_DATA : ART__EXPORT_IMAGE_DATA, at);
}

static uint32_t get_state(art_guest *guest)
{
    return get_i32(guest, guest->module->capture_state ? EXPORT_STATE : ART__EXPORT_IMAGE_STATE);
}

/* Ends a guest whose module does not do what it was made for. */
static int broken(art_guest *guest, const char *why, char *msg, size_t msg_len)
{
    free(guest->under);
    guest->under = NULL;
    guest->stack = ART__STACK_PLAIN;
    art__msg(msg, msg_len, "%s", why);
    art__guest_end(guest, ART_EXIT_ENGINE, why);
    return ART_EMODULE;
}

static void put_head(uint8_t *memory, uint32_t next_free, uint32_t end)
{
    const uint32_t head[2] = {next_free, end};
    memcpy(memory + MOVE_AT, head, sizeof head);
}

/* Polls until the guest says that it is where it should be. */
static bool move(art_guest *guest)
{
    const art__wasmtime *w = guest->engine->w;
    bool unwinding = guest->stack == ART__STACK_UNWINDING;
    guest->strays = 0;
    for (;;) {
        bool done = w->wasmtime_call_future_poll(guest->future);
        if (guest->strays || (done && !unwinding)) {
            return false;
        }
        if (done) {
            w->wasmtime_call_future_delete(guest->future);
            guest->future = NULL;
            return !guest->trap && !guest->error;
        }
        if (!unwinding && guest->stack == ART__STACK_PLAIN) {
            return true;
        }
    }
}

/* Takes the stack out of the guest. *stack is malloc'ed, the caller's. */
static int unwind(art_guest *guest, uint8_t **stack, uint32_t *stack_len, char *msg, size_t msg_len)
{
    size_t len = 0;
    uint8_t *memory = memory_of(guest, &len);
    /* twice the native stack: locals that are nowhere but in registers take room in memory */
    uint64_t want = MOVE_AT + MOVE_HEAD + 2 * guest->engine->config.wasm_stack_bytes;
    uint32_t end = (uint32_t)(want < len ? want : len);
    if (!memory || len < MOVE_AT + MOVE_HEAD) {
        art__msg(msg, msg_len, "the guest has no memory that its stack could be kept in");
        return ART_ESTATE;
    }
    guest->under = malloc(end - MOVE_AT);
    if (!guest->under) {
        return ART_ENOMEM;
    }
    memcpy(guest->under, memory + MOVE_AT, end - MOVE_AT);
    uint64_t left = fuel_left(guest);
    put_head(memory, MOVE_AT + MOVE_HEAD, end);
    if (!set_data(guest, MOVE_AT) || !art__capture_set_state(guest, UNWINDING)) {
        return broken(guest, "the module's globals for unwinding cannot be set", msg, msg_len);
    }
    set_fuel_left(guest, MOVE_FUEL);
    guest->stack = ART__STACK_UNWINDING;
    bool moved = move(guest);
    if (guest->store) {
        set_fuel_left(guest, left);
    }
    if (!moved || get_state(guest) != UNWINDING) {
        return broken(guest, "the module does not unwind its stack, or has too much of it for its memory", msg, msg_len);
    }
    guest->stack = ART__STACK_PLAIN;
    memory = memory_of(guest, &len);
    uint32_t next_free;
    memcpy(&next_free, memory + MOVE_AT, sizeof next_free);
    if (next_free < MOVE_AT + MOVE_HEAD || next_free > end || !art__capture_set_state(guest, NORMAL)) {
        return broken(guest, "the module does not unwind its stack as it should", msg, msg_len);
    }
    *stack_len = next_free - (MOVE_AT + MOVE_HEAD);
    *stack = malloc(*stack_len ? *stack_len : 1);
    if (*stack) {
        memcpy(*stack, memory + MOVE_AT + MOVE_HEAD, *stack_len);
    }
    memcpy(memory + MOVE_AT, guest->under, next_free - MOVE_AT); /* nothing was written beyond it */
    free(guest->under);
    guest->under = NULL;
    return *stack ? 0 : broken(guest, "out of memory while its stack was out of it", msg, msg_len);
}

/* Lets a guest rewind, whose memory and globals are as they were. */
static int rewind_from(art_guest *guest, const uint8_t *stack, uint64_t stack_len, uint64_t left, char *msg, size_t msg_len)
{
    size_t len = 0;
    uint8_t *memory = memory_of(guest, &len);
    if (!memory || len < MOVE_AT + MOVE_HEAD || stack_len > len - MOVE_AT - MOVE_HEAD) {
        return broken(guest, "the stack does not fit into the memory", msg, msg_len);
    }
    guest->under_len = (uint32_t)(MOVE_HEAD + stack_len);
    guest->under = malloc(guest->under_len);
    if (!guest->under) {
        return broken(guest, "out of memory while its stack was out of it", msg, msg_len);
    }
    memcpy(guest->under, memory + MOVE_AT, guest->under_len);
    uint32_t end = MOVE_AT + guest->under_len;
    put_head(memory, end, end);
    memcpy(memory + MOVE_AT + MOVE_HEAD, stack, stack_len);
    if (!set_data(guest, MOVE_AT) || !art__capture_set_state(guest, REWINDING)) {
        return broken(guest, "the module's globals for rewinding cannot be set", msg, msg_len);
    }
    guest->left_then = left;
    set_fuel_left(guest, MOVE_FUEL);
    guest->stack = ART__STACK_REWINDING;
    guest->strays = 0;
    art__guest_enter(guest);
    return 0;
}

#define NOT_REWOUND "the module does not rewind its stack to where it was"

/* Puts a stack into the guest. It is then suspended where it was. `left` is the fuel that it has then. */
static int rewind_to(art_guest *guest, const uint8_t *stack, uint64_t stack_len, uint64_t left, char *msg, size_t msg_len)
{
    int err = rewind_from(guest, stack, stack_len, left, msg, msg_len);
    return err ? err : move(guest) ? 0 : broken(guest, NOT_REWOUND, msg, msg_len);
}

bool art__capture_rewind(art_guest *guest, const uint8_t *stack, uint64_t stack_len, uint64_t left)
{
    return rewind_from(guest, stack, stack_len, left, NULL, 0) == 0;
}

void art__capture_lost(art_guest *guest)
{
    (void)broken(guest, NOT_REWOUND, NULL, 0);
}

bool art__capture_rewound(art_guest *guest)
{
    size_t len = 0;
    uint8_t *memory = memory_of(guest, &len);
    if (guest->stack != ART__STACK_REWINDING || !memory || guest->under_len > len - MOVE_AT) {
        return false;
    }
    art__capture_set_state(guest, NORMAL);
    memcpy(memory + MOVE_AT, guest->under, guest->under_len);
    free(guest->under);
    guest->under = NULL;
    set_fuel_left(guest, guest->left_then);
    guest->stack = ART__STACK_PLAIN;
    guest->strays = 0;
    return true;
}

bool art__capture_arrive(art_guest *guest, uint8_t wait, wasmtime_val_t *results, wasmtime_async_continuation_t *continuation)
{
    if (guest->stack == ART__STACK_PLAIN) {
        return false;
    }
    if (guest->wait == wait && art__capture_rewound(guest)) {
        guest->fuel_at_call = art__guest_fuel_now(guest);
        guest->pause = false;
        *continuation = art__abi_suspended(guest, results);
    } else {
        guest->strays++; /* and move ends the guest */
        *continuation = art__abi_suspended(guest, results);
    }
    return true;
}

/* --- capturing ---------------------------------------------------------------- */

static bool may_capture(const art_guest *guest)
{
    return guest->phase == ART__RUNNING && (wait_is_known(guest->wait) || guest->wait == ART__WAIT_BOOTED) &&
           !guest->resolved && !guest->exiting && !guest->unwind_due;
}

static int encode(art_guest *guest, const art_capture_config *config, const uint8_t *stack, uint32_t stack_len,
                  art_frame_buf *out)
{
    art_frame_buf globals = {0}, state = {0}, wasi = {0}, boot = {0};
    bool booted = guest->wait == ART__WAIT_BOOTED;
    size_t len = 0;
    const uint8_t *memory = memory_of(guest, &len);
    art_frame_head head = {
        .abi = ART__ABI_VERSION,
        .segment = config->segment,
        .seq = config->seq,
        .fuel = art__guest_fuel_now(guest),
        .clock_ns = art__abi_clock(guest),
        .memory_bytes = len,
    };
    memcpy(head.module, config->module, sizeof head.module);
    memcpy(head.engine, config->engine, sizeof head.engine);
    memcpy(head.id, config->id, sizeof head.id);
    if (config->image) {
        memcpy(head.image, config->image_digest, sizeof head.image);
    }
    int err = ART_ENOMEM;
    if (save_globals(guest, &globals) && save_guest(guest, &state) && art__wasi_save(guest, &wasi) &&
        (!booted || art__boot_save(guest, &boot))) {
        const art_frame_section sections[] = {
            {SECTION_GLOBALS, globals.bytes, globals.len},
            {SECTION_STACK, stack, stack_len},
            {SECTION_GUEST, state.bytes, state.len},
            {SECTION_OUTPUT, guest->output, guest->has_output ? guest->output_len : 0},
            {SECTION_WASI, wasi.bytes, wasi.len},
            {SECTION_BOOT, boot.bytes, boot.len},
        };
        uint32_t count = sizeof sections / sizeof *sections - !booted;
        err = art_frame_encode(&head, sections, count, memory, config->image, config->base, out);
    }
    art_frame_buf_free(&globals);
    art_frame_buf_free(&state);
    art_frame_buf_free(&wasi);
    art_frame_buf_free(&boot);
    return err;
}

static int capture(art_guest *guest, const art_capture_config *config, art_frame_buf *out, char *msg, size_t msg_len)
{
    bool boot = guest->wait == ART__WAIT_BOOTED;
    bool moves = boot ? guest->module->image_state && guest->module->image_data : art_module_captures(guest->module);
    if (!moves && !(boot && guest->boot == ART_BOOT_AT_REST)) {
        art__msg(msg, msg_len, "the module was not made to be captured: see `agentrt build`");
        return ART_ESTATE;
    }
    /* answers that have come are its own by now, unless one of them ends its wait */
    if (!may_capture(guest) || art__abi_resolve(guest)) {
        art__msg(msg, msg_len, "the guest is not suspended in a syscall that waits");
        return ART_ESTATE;
    }
    uint8_t *stack = NULL;
    uint32_t stack_len = 0;
    bool has_stack = guest->future != NULL;
    int err = has_stack ? unwind(guest, &stack, &stack_len, msg, msg_len) : 0;
    if (err) {
        return err;
    }
    err = encode(guest, config, stack, stack_len, out);
    if (!config->keep) {
        art__guest_end(guest, ART_EXIT_KILLED, NULL);
    } else if (has_stack) {
        int lost = rewind_to(guest, stack, stack_len, fuel_left(guest), msg, msg_len);
        err = lost ? lost : err;
    }
    free(stack);
    return err;
}

int art_guest_capture(art_guest *guest, const art_capture_config *config, art_frame_buf *out, char *msg, size_t msg_len)
{
    art__guest_own(guest);
    out->len = 0;
    int err = capture(guest, config, out, msg, msg_len);
    art__guest_disown(guest);
    return err;
}

/* What reaching a safe point takes more than passing it is not charged. It is the same at each, for the check is a function
 * of its own; so it is found out once for a module, by the first guest: the check is called with and without being asked to
 * stop. */
#define CHECK_FUEL_MAX 1000

void art__capture_measure(art_guest *guest)
{
    guest->left_then = fuel_left(guest);
    set_fuel_left(guest, CHECK_FUEL_MAX);
    set_i32(guest, EXPORT_FLAG, 1);
    art__guest_call(guest, EXPORT_CHECK, ART__MEASURING);
}

bool art__capture_measured(art_guest *guest)
{
    uint64_t taken = CHECK_FUEL_MAX - fuel_left(guest);
    set_i32(guest, EXPORT_FLAG, 0);
    if (guest->phase == ART__MEASURING) {
        guest->check_cost = (uint32_t)taken;
        set_fuel_left(guest, CHECK_FUEL_MAX);
        art__guest_call(guest, EXPORT_CHECK, ART__MEASURING_REST);
        return false;
    }
    guest->check_cost -= guest->check_cost > taken ? (uint32_t)taken : 0;
    /* relaxed: a number, and every guest of the module would find the same */
    atomic_store_explicit(&guest->module->check_cost, guest->check_cost, memory_order_relaxed);
    set_fuel_left(guest, guest->left_then);
    return true;
}

bool art__capture_stop_here(art_guest *guest)
{
    if (!guest->safe_point) {
        return false; /* the module called the import of its own accord */
    }
    guest->safe_point = false;
    set_i32(guest, EXPORT_FLAG, 0);
    set_fuel_left(guest, fuel_left(guest) + guest->check_cost);
    guest->fuel_at_call = art__guest_fuel_now(guest);
    return true;
}

static void raise_flag(art_guest *guest)
{
    /* so near the end of its fuel the guest could fail by what the check takes before it is given back */
    if (guest->phase == ART__RUNNING && guest->check_cost && !guest->safe_point && fuel_left(guest) > 2 * CHECK_FUEL_MAX) {
        guest->safe_point = set_i32(guest, EXPORT_FLAG, 1);
    }
}

void art__capture_entered(art_guest *guest)
{
    if (guest->safe_point_soon) {
        guest->safe_point_soon = false;
        raise_flag(guest);
    }
}

void art_guest_want_safe_point(art_guest *guest)
{
    art__guest_own(guest);
    guest->safe_point_soon = guest->phase < ART__RUNNING;
    raise_flag(guest);
    art__guest_disown(guest);
}

void art_guest_leave_safe_point(art_guest *guest)
{
    art__guest_own(guest);
    guest->safe_point_soon = false;
    if (guest->wait == ART__WAIT_SAFE_POINT) {
        guest->resolved = true;
    }
    if (guest->safe_point && guest->store) {
        set_i32(guest, EXPORT_FLAG, 0); /* it is set just as long as `safe_point` is, or fuel would be charged for nothing */
    }
    guest->safe_point = false;
    art__guest_disown(guest);
}

/* --- going on ----------------------------------------------------------------- */

static art_guest_outcome refused(art_guest *guest, const char *why)
{
    char text[ART_MSG_BYTES];
    art__msg(text, sizeof text, "the frame cannot be gone on from: %s", why);
    art__guest_end(guest, ART_EXIT_ENGINE, text);
    return ART_GUEST_DONE;
}

static art__saved_bytes section(const art_frame *frame, uint32_t tag)
{
    art__saved_bytes found;
    found.at = art_frame_section_get(frame, tag, &found.left);
    return found;
}

/* The memory is back: the rest of the state, and the stack. */
static art_guest_outcome finish(art_guest *guest)
{
    const art_frame *frame = guest->frame;
    uint64_t memory_bytes = frame->head.memory_bytes;
    char msg[ART_MSG_BYTES] = "";
    if (guest->fuel_taken < frame->head.fuel) {
        return refused(guest, "it has used more fuel than the run has");
    }
    art__saved_bytes wasi = section(frame, SECTION_WASI), stack = section(frame, SECTION_STACK);
    if (!load_globals(guest, section(frame, SECTION_GLOBALS)) ||
        !load_guest(guest, section(frame, SECTION_GUEST), memory_bytes) ||
        !load_output(guest, section(frame, SECTION_OUTPUT)) || !art__wasi_load(guest, wasi)) {
        guest->wait = ART__WAIT_NONE;
        return refused(guest, "its state does not fit the module");
    }
    if (art_module_captures_anywhere(guest->module)) {
        set_i32(guest, EXPORT_FLAG, 0); /* whoever had asked for a safe point has got it, or is gone */
    }
    guest->phase = ART__RUNNING;
    guest->frame = NULL;
    if (rewind_to(guest, stack.at, stack.left, guest->fuel_taken - frame->head.fuel, msg, sizeof msg)) {
        return ART_GUEST_DONE;
    }
    if (guest->wait == ART__WAIT_SAFE_POINT) {
        guest->resolved = !guest->stays; /* nobody waits for anything there */
        guest->stops += guest->stays;    /* whoever is told of stops by their number has not heard of this one */
    }
    art__capture_entered(guest);
    return ART_GUEST_YIELD;
}

bool art__capture_begin(art_guest *guest)
{
    const art__wasmtime *w = guest->engine->w;
    const art_frame *frame = guest->frame;
    size_t len = 0;
    guest->phase = ART__RESTORING;
    uint8_t *memory = memory_of(guest, &len);
    uint64_t want = frame->head.memory_bytes, before;
    if (!art_module_captures(guest->module) || !memory || len > want || want % 65536) {
        refused(guest, "it is not of this module");
        return false;
    }
    if (len < want) {
        wasmtime_error_t *error = w->wasmtime_memory_grow(guest->context, &guest->memory, (want - len) / 65536, &before);
        if (error) {
            w->wasmtime_error_delete(error);
            refused(guest, "its memory is larger than guests may have");
            return false;
        }
        memory = memory_of(guest, &len);
    }
    guest->restorer = (art_frame_restorer){.frame = frame, .base = guest->frame_base, .image = guest->frame_image,
                                           .fresh = guest->frame_image != NULL, .memory = memory};
    return true;
}

art_guest_outcome art__capture_restore(art_guest *guest)
{
    char msg[ART_MSG_BYTES] = "";
    uint32_t writes = art_frame_restore_writes(&guest->restorer, RESTORE_PAGES);
    if (writes >= POPULATE_PAGES_MIN) {
        /* only a matter of speed: what is not there comes when it is written to */
        (void)art_sys_memory_populate(guest->restorer.memory + guest->restorer.page * ART_FRAME_PAGE_BYTES,
                                      (size_t)writes * ART_FRAME_PAGE_BYTES);
    }
    int more = art_frame_restore_some(&guest->restorer, RESTORE_PAGES, msg, sizeof msg);
    return more < 0 ? refused(guest, msg) : more ? ART_GUEST_YIELD : finish(guest);
}
