/* agentrt_guest.h: guest ABI v1, for agents written in C and compiled to freestanding wasm32.
 *
 * A module exports `memory` and `agentrt_run`, a function without parameters that returns an i32: 0 says the run has
 * succeeded and its result is what agentrt_output was given (JSON; null if never called); anything else fails the run
 * with that number as its code. It may export `agentrt_unwind` too, without parameters, returning an i32 or nothing: called
 * when the run is told to end, after `agentrt_run` was stopped at a wait for good, to undo what should not stay. All imports come from the module "agentrt". docs/guest-abi.md is the manual.
 *
 * A syscall is (op, request, length): the request is JSON text in the guest's memory, the answer JSON text too.
 * Functions return a length or handle >= 0, or one of the negative agentrt_status values; no wrong argument traps.
 */
#ifndef AGENTRT_GUEST_H
#define AGENTRT_GUEST_H

#include <stdint.h>

#define AGENTRT_ABI_VERSION 1

/* Numbers of the ops (agentrt/syscalls.py is their table). */
enum agentrt_op {
    AGENTRT_TOOL_CALL = 1,
    AGENTRT_MODEL_GENERATE = 2,
    AGENTRT_TIMER_SLEEP = 3,
    AGENTRT_EVENT_WAIT = 4,
    AGENTRT_APPROVAL_REQUEST = 5,
    AGENTRT_RUN_SPAWN = 6,
    AGENTRT_RUN_JOIN = 7,
    AGENTRT_LOCK_ACQUIRE = 8,
    AGENTRT_LOCK_RELEASE = 9,
    AGENTRT_EVENT_SEND = 10,
    AGENTRT_CHECKPOINT = 11,
    AGENTRT_EMIT = 12,
    AGENTRT_LOG = 13,
    AGENTRT_CAPACITY_GET = 14,
    AGENTRT_CLOCK_NOW = 15,
    AGENTRT_RANDOM_BYTES = 16,
    AGENTRT_LOCK_FOREIGN = 17,
};

enum agentrt_status {
    AGENTRT_EFAILED = -1,  /* the syscall failed; its error (JSON) can be read like a result */
    AGENTRT_EFAULT = -2,   /* a pointer and length outside the guest's memory */
    AGENTRT_E2BIG = -3,    /* longer than the limit for requests, results or handle sets */
    AGENTRT_ENOSYS = -4,   /* no such op; one that this release does not serve fails with code "unsupported" */
    AGENTRT_EBADF = -5,    /* no such handle */
    AGENTRT_EAGAIN = -6,   /* too many syscalls in flight: wait for one and close it */
    AGENTRT_ENODATA = -7,  /* nothing there */
};

#ifdef __wasm__
#define AGENTRT_IMPORT(name) __attribute__((import_module("agentrt"), import_name(#name)))
#define AGENTRT_EXPORT(name) __attribute__((export_name(#name)))
#else /* read by the host for its numbers */
#define AGENTRT_IMPORT(name)
#define AGENTRT_EXPORT(name)
#endif

/* Syscall, waiting for its answer: min(answer length, cap) bytes are copied to buf. Returns the answer's length (which
 * may exceed cap: agentrt_read(0, …) reads the rest until the next agentrt_call), or a negative status. */
AGENTRT_IMPORT(call)
int32_t agentrt_call(int32_t op, const void *request, int32_t length, void *buf, int32_t cap);

/* Syscall, not waiting. Returns its handle (1, 2, 3, … in program order, agentrt_call included). */
AGENTRT_IMPORT(submit) int32_t agentrt_submit(int32_t op, const void *request, int32_t length);

/* Wait until one of `count` handles is answered. Returns its index; which one is part of the run's history and the
 * same on replay. Handles already closed give AGENTRT_EBADF. */
AGENTRT_IMPORT(wait_any) int32_t agentrt_wait_any(const int32_t *handles, int32_t count);

/* Read an answer that was waited for: copies min(cap, length - offset) bytes from offset. Returns the whole length, or
 * AGENTRT_EFAILED if the answer is an error and offset is 0 (the error is copied to buf all the same), or
 * AGENTRT_EBADF (no such handle, or no wait has returned it). Handle 0 is the answer to the last agentrt_call. */
AGENTRT_IMPORT(read) int32_t agentrt_read(int32_t handle, int32_t offset, void *buf, int32_t cap);

/* Forget an answer that was waited for, so that its handle counts no more as in flight. Returns 0 or AGENTRT_EBADF. */
AGENTRT_IMPORT(close) int32_t agentrt_close(int32_t handle);

/* The run's input (JSON): copies min(cap, length - offset) bytes from offset. Returns the whole length. */
AGENTRT_IMPORT(input) int32_t agentrt_input(int32_t offset, void *buf, int32_t cap);

/* The state given to the last checkpoint, read like the input; AGENTRT_ENODATA when there is none. */
AGENTRT_IMPORT(restored) int32_t agentrt_restored(int32_t offset, void *buf, int32_t cap);

/* Set the run's result (JSON). The last call counts. Returns 0 or a negative status. */
AGENTRT_IMPORT(output) int32_t agentrt_output(const void *json, int32_t length);

/* Unix time in ns: time of the last answer received (at first: of acceptance) + fuel used since. Never backwards. */
AGENTRT_IMPORT(clock_now) int64_t agentrt_clock_now(void);

/* Fill buf with bytes from the run's own seed; the same on replay. Returns 0 or a negative status. */
AGENTRT_IMPORT(random) int32_t agentrt_random(void *buf, int32_t length);

#endif
