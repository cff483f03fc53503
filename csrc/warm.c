/* warm.c: guests that are only instantiated: to have the engine do what it does once for a module, and to look at them. */
#include <stdlib.h>

#include "art_err.h"
#include "guest_internal.h"

static void let_go(art_guest *guest)
{
    const art__wasmtime *w = guest->engine->w;
    if (guest->trap) {
        w->wasm_trap_delete(guest->trap);
    }
    if (guest->error) {
        w->wasmtime_error_delete(guest->error);
    }
    w->wasmtime_store_delete(guest->store);
    free(guest);
}

/* Enough of a guest for a start function's imports to find, as far as it comes in one poll. NULL: out of memory. */
static art_guest *instantiated(art_module *module, bool *done)
{
    const art__wasmtime *w = module->engine->w;
    art_guest *guest = calloc(1, sizeof *guest);
    if (!guest) {
        return NULL;
    }
    guest->module = module;
    guest->engine = module->engine;
    guest->store = w->wasmtime_store_new(module->engine->engine, guest, NULL);
    guest->context = w->wasmtime_store_context(guest->store);
    wasmtime_call_future_t *future =
        w->wasmtime_instance_pre_instantiate_async(module->pre, guest->context, &guest->instance, &guest->trap, &guest->error);
    *done = w->wasmtime_call_future_poll(future); /* without a start function it is, or has failed */
    w->wasmtime_call_future_delete(future);
    return guest;
}

int art__probe_new(art_module *module, art_guest **out, char *msg, size_t msg_len)
{
    bool done;
    art_guest *guest = instantiated(module, &done);
    if (!guest) {
        return ART_ENOMEM;
    }
    if (guest->error) {
        art__error_take(guest->engine->w, guest->error, msg, msg_len);
        guest->error = NULL;
    } else if (guest->trap || !done) {
        art__msg(msg, msg_len, "the module does not come to rest by itself");
    } else {
        guest->phase = ART__RUNNING; /* memories are not looked for before */
        *out = guest;
        return 0;
    }
    let_go(guest);
    return ART_EENGINE;
}

void art__probe_delete(art_guest *guest)
{
    let_go(guest);
}

uint32_t art_module_warm(art_module *module, uint32_t count)
{
    art_guest **guests = calloc(count ? count : 1, sizeof *guests);
    uint32_t made = 0;
    while (guests && made < count) {
        bool done;
        art_guest *guest = instantiated(module, &done);
        if (!guest) {
            break;
        }
        guests[made++] = guest;
        if (guest->error) { /* no place for one more */
            break;
        }
    }
    uint32_t warm = made - (made && guests[made - 1]->error);
    while (made) {
        let_go(guests[--made]);
    }
    free(guests);
    return warm;
}
