/* boot.c: see boot.h.
 *
 * Where an image begins: a saved_begin, the stack, and WASI's state as in a frame, each padded to a multiple of 8. */
#include "boot.h"

#include <stdlib.h>
#include <string.h>

#include "art_err.h"
#include "guest_internal.h"

enum { BOOT_VERSION = 1 };

/* agentrt/capture/instrument.py: while it is not 0, functions that were on the stack run as copies that can be rewound. A module
 * without it is slower. */
#define EXPORT_IMAGE_FLAG "agentrt:image-flag"

/* The section of a frame, and the beginning of an image's: what the boot has seen, and the arguments of the fd_read that it
 * stopped at, which do not come back with the stack, since nobody needs them after the call. */
typedef struct saved_boot {
    uint32_t version, seen, first_read[4];
} saved_boot;

typedef struct saved_begin {
    saved_boot boot;
    uint64_t stack_len, wasi_len;
} saved_begin;
_Static_assert(sizeof(saved_begin) == 40, "no holes");

static bool named(const wasm_byte_vec_t *name, const char *text)
{
    return name->size == strlen(text) && memcmp(name->data, text, name->size) == 0;
}

void art__boot_export(art_module *module, const wasm_byte_vec_t *name, uint8_t kind)
{
    if (kind == ART_WASM_EXTERN_GLOBAL) {
        module->image_state = module->image_state || named(name, ART__EXPORT_IMAGE_STATE);
        module->image_data = module->image_data || named(name, ART__EXPORT_IMAGE_DATA);
    }
}

/* --- booting ------------------------------------------------------------------ */

static bool stop(art_guest *guest, art_boot where)
{
    if (guest->boot != where || guest->phase != ART__RUNNING) {
        return false;
    }
    guest->wait = ART__WAIT_BOOTED;
    guest->waiting_count = 0;
    guest->waiting_ops = 0;
    guest->resolved = false;
    guest->stops++;
    return true;
}

bool art__boot_at_input(art_guest *guest, const wasmtime_val_t *args)
{
    for (int i = 0; i < 4; i++) {
        guest->first_read[i] = (uint32_t)args[i].of.i32;
    }
    return stop(guest, ART_BOOT_AT_INPUT);
}

bool art__boot_at_rest(art_guest *guest, int32_t code)
{
    return code == 0 && stop(guest, ART_BOOT_AT_REST);
}

bool art__boot_save(const art_guest *guest, art_frame_buf *to)
{
    saved_boot saved = {.version = BOOT_VERSION, .seen = guest->seen};
    memcpy(saved.first_read, guest->first_read, sizeof saved.first_read);
    return art__save(to, &saved, sizeof saved);
}

/* --- beginning there ---------------------------------------------------------- */

typedef struct begin {
    saved_begin head;
    const uint8_t *stack;
    art__saved_bytes wasi;
} begin;

static bool read_begin(const uint8_t *bytes, size_t len, begin *out)
{
    art__saved_bytes from = {bytes, len};
    const void *head = art__saved(&from, sizeof out->head);
    if (!head) {
        return false;
    }
    memcpy(&out->head, head, sizeof out->head);
    if (out->head.boot.version != BOOT_VERSION || !(out->stack = art__saved(&from, out->head.stack_len))) {
        return false;
    }
    out->wasi = from;
    return from.left == out->head.wasi_len;
}

int art_module_begin_at(art_module *module, const uint8_t *bytes, size_t len, char *msg, size_t msg_len)
{
    begin begin;
    if (!module->image_state || !module->image_data || !read_begin(bytes, len, &begin)) {
        art__msg(msg, msg_len, "the module's image is damaged: where its guests begin is not to be found out");
        return ART_EMODULE;
    }
    module->begin = malloc(len);
    if (!module->begin) {
        return ART_ENOMEM;
    }
    memcpy(module->begin, bytes, len);
    module->begin_len = len;
    return 0;
}

bool art__boot_begin(art_guest *guest)
{
    begin begin;
    guest->phase = ART__RUNNING;
    if (!read_begin(guest->module->begin, guest->module->begin_len, &begin) || !art__wasi_load(guest, begin.wasi)) {
        art__guest_end(guest, ART_EXIT_ENGINE, "the image cannot be begun with: it has other files than were there when it was made");
        return false;
    }
    memcpy(guest->first_read, begin.head.boot.first_read, sizeof guest->first_read);
    guest->seen = begin.head.boot.seen;
    /* from here on its fuel is what it is now, until it arrives */
    guest->left_then = art_fuel_sub(guest->fuel_taken, art__guest_fuel_now(guest));
    guest->arriving = true;
    return art__capture_rewind(guest, begin.stack, begin.head.stack_len, guest->left_then);
}

bool art__boot_arrive(art_guest *guest, wasmtime_val_t *args)
{
    if (!guest->arriving || !art__capture_rewound(guest)) {
        return false;
    }
    guest->arriving = false;
    art__capture_set_flag(guest, EXPORT_IMAGE_FLAG, 0);
    guest->fuel_at_call = art__guest_fuel_now(guest);
    for (int i = 0; i < 4; i++) {
        args[i] = (wasmtime_val_t){.kind = ART_WASM_I32, .of.i32 = (int32_t)guest->first_read[i]};
    }
    return true;
}
