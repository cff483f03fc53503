/* boot.h: images: guests that begin where another one's boot was over.
 *
 * A guest is *booted* (art_guest_config.boot) until it is at rest, or about to read its input; there it stops and is captured
 * (capture.h). agentrt/capture/image.py makes a module of the frame: its data segments are the memory, its globals have their
 * values, so that the engine clones all of it copy-on-write. At rest nothing else is needed. In the middle of a call, the stack and
 * what WASI knows are a section of the module, given here: each guest begins by rewinding that stack, and goes on with the
 * reading that the boot stopped at.
 *
 * What always holds:
 *  - Arriving is no work of the guest: it costs no fuel, and its clock and random numbers begin there.
 *  - A hostile section ends its guests (reason ENGINE, with a message) and touches nothing else. It is polled like any guest,
 *    a micro-slice at a time.
 */
#ifndef ART_BOOT_H
#define ART_BOOT_H

#include "guest.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where guests of a module begin that was loaded just now: bytes of the frame's sections, put together as boot.c says; copied.
 * ART_EMODULE with a message: it is none, or the module is not made for it; ART_ENOMEM. Before the module has guests. */
int art_module_begin_at(art_module *module, const uint8_t *begin, size_t len, char *msg, size_t msg_len);

#ifdef __cplusplus
}
#endif
#endif
