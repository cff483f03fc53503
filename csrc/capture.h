/* capture.h: the state of a suspended guest as a frame (frame.h), and a guest that goes on from one.
 *
 * A stack of native code cannot be stored. So the module must have been made for it (agentrt/capture/instrument.py, Binaryen's
 * asyncify): told to *unwind*, each function on the stack saves its locals to memory and returns; told to *rewind*, each takes
 * them back and calls on to where it was. Both go through exported globals, since the core may call nothing of a guest that is
 * suspended. The memory they need is lent by the guest: what was there is put back, so that a frame holds the memory as the
 * guest knows it, and the stack in a section of its own.
 *
 * What always holds:
 *  - Being captured cannot be noticed: memory, globals, fuel and clock are afterwards as before, and the same after going on from
 *    the frame, on another machine, too. Fuel that unwinding and rewinding take is not charged.
 *  - A frame that does not fit the module, or is hostile, ends the guest (reason ENGINE, with a message) and touches nothing else.
 *
 * Thread-safety: as art_guest_poll: the owner only, between polls.
 */
#ifndef ART_CAPTURE_H
#define ART_CAPTURE_H

#include "frame.h"
#include "guest.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether its guests can be captured: at syscalls, and anywhere. Any thread. */
bool art_module_captures(const art_module *module);
bool art_module_captures_anywhere(const art_module *module);

typedef struct art_capture_config {
    uint8_t module[ART_FRAME_DIGEST_BYTES], engine[ART_FRAME_DIGEST_BYTES]; /* for the frame's header, as its id, */
    uint8_t id[ART_FRAME_ID_BYTES];
    uint8_t image_digest[ART_FRAME_DIGEST_BYTES];
    uint64_t segment, seq;        /* and its position */
    const art_frame_image *image; /* NULL: none; else what a guest of the module has once it is instantiated */
    const art_frame *base;        /* NULL: a full frame */
    bool keep;                    /* the guest goes on; if not it ends, with reason KILLED */
} art_capture_config;

/* Captures a guest that is suspended in a syscall that is not answered, or at a safe point. Runs some of its code; takes about
 * as long as copying its memory.
 * ART_ESTATE with a message, the guest being as before: it is not suspended so, or its module cannot be captured.
 * ART_EMODULE, the guest being ended (ENGINE): the module does not unwind as it should, or its memory has no room for its stack.
 * ART_EINVAL, ART_ENOMEM: as art_frame_encode; the guest goes on if it is kept, and has ended if not. */
int art_guest_capture(art_guest *guest, const art_capture_config *config, art_frame_buf *out, char *msg, size_t msg_len);

/* Asks a guest whose module captures_anywhere to stop at its next safe point, that is the beginning of a round of any loop, or at
 * its first one if it has not begun;
 * art_guest_poll then says ART_GUEST_SAFE_POINT, until it is told to leave. Of no effect where there are no safe points. */
void art_guest_want_safe_point(art_guest *guest);
void art_guest_leave_safe_point(art_guest *guest);

/* The memory of a guest of the module before it does anything: *out is malloc'ed, the caller's, without the
 * pages of zeros at its end; NULL if it has none. Takes a slot of the pool while it runs. ART_EENGINE with a message;
 * ART_ENOMEM. Any thread. */
int art_module_initial_memory(art_module *module, uint8_t **out, size_t *out_len, char *msg, size_t msg_len);

#ifdef __cplusplus
}
#endif
#endif
