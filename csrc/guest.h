/* guest.h: wasm engine, modules, and one guest: an instance of a module on its own stack, with its syscalls.
 *
 * What it is: `art_engine` owns wasmtime's engine and the linker with the guest ABI's imports (agentrt_guest.h);
 * `art_module` is compiled code checked against that ABI; `art_guest` is one execution, advanced a micro-slice at a time by
 * art_guest_poll. Guest faults are outcomes of a guest, never errors of the host.
 *
 * What always holds:
 *   G1  One owner: all functions that take a guest, but those marked "any thread", are called by its owner only, one
 *       at a time (asserted: `owned`). The owner may change between calls, on any threads.
 *   G2  A store exists from the first poll until the guest is done or destroyed, and no longer: its stack and memory are
 *       slots of a pool.
 *   G3  Handles are 1, 2, 3, … in the order of the guest's syscalls; what a guest can observe depends only on its module,
 *       its input and seed, and the order and content of its answers. In particular "too many in flight" counts handles
 *       not closed, not unanswered ones.
 *   G4  fuel used + fuel in the store == fuel taken from the account; a guest that is done has charged what it says it used,
 *       and put back the rest.
 *
 * Bounds: request and result lengths, handles in flight, memory, tables, stack. Fuel is counted by the engine in wasm
 * operations; a yield costs none.
 */
#ifndef ART_GUEST_H
#define ART_GUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "art_atomic.h"
#include "frame.h"
#include "fuel.h"
#include "wasi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ART_MSG_BYTES 4096 /* messages are cut to this, a trap's backtrace included */

typedef struct art_engine art_engine;
typedef struct art_module art_module;
typedef struct art_guest art_guest;

typedef struct art_engine_config {
    const char *library;          /* path of wasmtime's shared library; read during create only */
    uint32_t guests_max;          /* instances, memories, tables of the pool */
    uint32_t stacks_max;          /* stacks of the pool: guests that have started and not ended */
    uint64_t memory_bytes_max;    /* linear memory of one guest */
    uint64_t wasm_stack_bytes;    /* of one guest; host functions have ART_HOST_STACK_BYTES more */
    uint32_t table_elements_max;
    uint32_t request_bytes_max;
    uint32_t result_bytes_max;
    uint32_t inflight_max;        /* handles of one guest not yet closed */
    bool compile_only;            /* no pool: for the compile child */
    bool any_cpu;                 /* what is compiled uses nothing that a CPU of this architecture may lack */
} art_engine_config;

/* Room for host functions on a guest's stack; they only copy bytes. Picked by feel, four times what was seen used. */
#define ART_HOST_STACK_BYTES (64u << 10)

/* Creates the engine. *out is the caller's. Errors with a message: ART_EENGINE (library), ART_EINVAL, ART_ENOMEM (also if the
 * pool's address space does not fit: tried with mmap before, since wasmtime would abort). */
int art_engine_create(const art_engine_config *config, art_engine **out, char *msg, size_t msg_len);

/* All modules and guests must be gone. NULL is allowed. */
void art_engine_destroy(art_engine *engine);

/* Compiles wasm (rewritten so that bulk operations run in chunks) to an artifact: trusted native code. *artifact is
 * malloc'ed, the caller's. Errors with a message: ART_EMODULE, ART_ELIMIT, ART_ENOMEM. Any thread; meant for a child
 * process, since a hostile module may take all memory and time it is given. */
int art_engine_compile(art_engine *engine, const uint8_t *wasm, size_t len, uint8_t **artifact, size_t *artifact_len,
                       char *msg, size_t msg_len);

/* Loads an artifact made by the same version with the same config, which must be authentic. *out is the caller's. Errors with a
 * message: ART_EMODULE, ART_EIMPORT, ART_EENTRY, ART_ELIMIT (initial memory above memory_bytes_max). Any thread. */
int art_module_load(art_engine *engine, const uint8_t *artifact, size_t len, art_module **out, char *msg,
                    size_t msg_len);

/* The same for a reactor, a library that is entered by the export `entry`, which is called like C's main after `_initialize`,
 * its arguments (art_guest_config.wasi) in memory from the export `malloc`. art_module_load takes agentrt_run, or `_start`. */
int art_module_load_reactor(art_engine *engine, const uint8_t *artifact, size_t len, const char *entry,
                            art_module **out, char *msg, size_t msg_len);

/* Whether it is entered by agentrt_run; if not, it tells its result by what it writes to stdout. */
bool art_module_is_agent(const art_module *module);
/* Whether the module has unwinding handlers, the export agentrt_unwind. */
bool art_module_unwinds(const art_module *module);

/* Modules are counted: each guest holds one reference. Any thread. */
art_module *art_module_retain(art_module *module);
void art_module_release(art_module *module);

/* Instantiates so many guests at the same time and lets go of them; how many there was a place for. The first guest of a module
 * has the engine make a copy of its memory's beginning, in time that goes with its length and that no worker should spend; and
 * places that had guests of a module are quicker to take for others of it. Any thread with an ordinary stack. */
uint32_t art_module_warm(art_module *module, uint32_t count);

/* As a request's handle: no request, but the mark where the unwinding handlers begin. What comes after it they ask for. */
#define ART_REQUEST_UNWINDING (-1)

/* A syscall on its way to the control plane; malloc'ed by the guest, the taker's to free(). */
typedef struct art_request {
    struct art_request *next;
    int32_t handle; /* 0: a log line, never answered; ART_REQUEST_UNWINDING */
    int32_t op;
    uint32_t len;
    uint8_t payload[];
} art_request;

/* An answer on its way to the guest; made with art_answer_new, owned by the guest once posted. */
typedef struct art_answer {
    struct art_answer *next;
    int32_t handle;
    int32_t status; /* 0 answered, 1 failed */
    uint64_t clock_ns; /* Unix time of the record that holds it */
    uint64_t seq;      /* of that record: orders answers */
    uint32_t len;
    uint8_t payload[];
} art_answer;

art_answer *art_answer_new(int32_t handle, int32_t status, uint64_t clock_ns, uint64_t seq, const void *payload,
                           uint32_t len);

/* A guest whose state shall become an image (boot.h) stops as at a safe point, for good, where its boot is over: */
typedef enum art_boot {
    ART_BOOT_NOT,
    ART_BOOT_AT_REST,  /* its entry has returned 0 */
    ART_BOOT_AT_INPUT, /* it is about to read stdin */
} art_boot;

typedef struct art_guest_config {
    art_module *module;            /* retained */
    art_fuel_account *fuel;        /* borrowed; outlives the guest */
    const void *input;             /* copied */
    uint32_t input_len;
    const void *restored;          /* copied; NULL = none */
    uint32_t restored_len;
    uint8_t seed[16];
    uint64_t clock_ns;             /* Unix time of acceptance */
    uint64_t memory_bytes_max;     /* 0, or less than the engine's: a module that begins with more ends at once (ENGINE) */
    uint64_t micro_slice_fuel;     /* most guest work between two returns of art_guest_poll; see art_guest_pace */
    bool replay;                   /* see art_guest_go_live */
    art_wasi_image *wasi;          /* retained; NULL = no arguments, environment and files */
    /* To go on from a frame of a guest with the same module, input, restored, wasi (capture.h): these are borrowed, and outlive
     * the guest. `seed` and `clock_ns` are in it. The answers to its open handles are posted as ever; `frame_image`: NULL, or
     * what the module's guests have when they are instantiated. */
    const art_frame *frame, *frame_base;
    const art_frame_image *frame_image;
    bool frame_stays; /* one that was taken at a safe point stands there, as if it had just come */
    art_boot boot;
} art_guest_config;

/* *out is the caller's. Takes no slot of the pool yet. Errors: ART_ENOMEM, ART_EINVAL. */
int art_guest_create(const art_guest_config *config, art_guest **out);

/* Ends the guest wherever it is and frees it, answers and requests included. Needs an ordinary thread stack. */
void art_guest_destroy(art_guest *guest);

typedef enum art_guest_outcome {
    ART_GUEST_YIELD,   /* a micro-slice is over; poll again */
    ART_GUEST_WAIT,    /* suspended in a syscall none of whose handles is answered: poll after art_guest_can_resume */
    ART_GUEST_NO_FUEL, /* the account is empty but not final, and the store holds less than a poll may use (a micro-slice
                        * and 8 Mi): grant more than that, or say that it was the last, then poll again */
    ART_GUEST_SAFE_POINT, /* stopped, as art_guest_want_safe_point asked; poll after art_guest_leave_safe_point */
    ART_GUEST_DONE,    /* see art_guest_exit; never poll again */
} art_guest_outcome;

/* Runs the guest for one micro-slice. */
art_guest_outcome art_guest_poll(art_guest *guest);

/* Fits the micro-slice to the guest's speed, since fuel is not time (an empty loop does 1,800 a microsecond, one with work
 * in it 33,000, an interpreter's start 640): `took_ns` is what one of the last micro-slices took. Between polls. What the
 * guest computes and its fuel are the same for every length. */
void art_guest_pace(art_guest *guest, uint64_t took_ns);

/* The owner takes the answers posted so far; true if the suspended guest can go on. */
bool art_guest_can_resume(art_guest *guest);

/* Syscalls since the last take, in program order; NULL if none. The taker frees each. Any thread, one taker. */
art_request *art_guest_take_requests(art_guest *guest);
/* True if there may be some. Any thread. */
bool art_guest_has_requests(const art_guest *guest);

/* Gives an answer. Any thread. Takes ownership. Among the answered handles a waiting guest gets the one with the lowest
 * seq. An answer for a handle that is answered already only wakes; one for a handle that does not exist is dropped. */
void art_guest_post(art_guest *guest, art_answer *answer);

/* The replay is over. Until then each wait suspends and only an answer posted after it resumes the guest, so that the control
 * plane decides which recorded answer comes first. Any thread; post an answer (any) afterwards to have a suspended guest
 * look again. */
void art_guest_go_live(art_guest *guest);

/* Tells the guest to stop for good and to run its unwinding handlers, the export `agentrt_unwind`. Any thread; again: nothing.
 * ART_ENOMEM.
 *
 * It stops at the first wait that the answers posted before do not end, wherever it is now: so what it has done by then
 * follows from these answers alone. If it ends on its way there, that is its exit. At that wait its stack is gone and the
 * handles it had are closed, answers to them that are still to come being dropped; the handlers find its memory as it
 * was. They run like any program, after a mark among the requests (ART_REQUEST_UNWINDING), and exit with reason UNWOUND,
 * or as they end (TRAP, FUEL, …). A module without them exits at once and gives no mark; so does a guest that was not
 * polled yet, unless it is in replay (it may have been, before), and one still in its start function, since until that has
 * returned there is nothing to call.
 *
 * `skipped` handles, at least 0, are left out between the program's and those of the handlers: an earlier guest of the run
 * has used them. */
int art_guest_unwind(art_guest *guest, int32_t skipped);

/* How far that is. By the owner. */
typedef enum art_unwind_stage {
    ART_UNWIND_NONE,            /* not told yet, or told and over */
    ART_UNWIND_PROGRAM,         /* the program is on its way to a wait */
    ART_UNWIND_PROGRAM_REPLAY,  /* the same, told in replay: it came to that wait before, however long it takes now */
    ART_UNWIND_HANDLERS,
    ART_UNWIND_HANDLERS_REPLAY, /* they have begun, and the guest is still in replay */
} art_unwind_stage;
art_unwind_stage art_guest_unwinding(const art_guest *guest);

/* Ends an unwinding that takes too long: reason UNWOUND with a message that says how far it was. A program that has not come
 * to its wait is stopped where it is, and its handlers do not run, for what they found would depend on time. By the
 * owner; needs an ordinary thread stack. */
void art_guest_unwind_stop(art_guest *guest);

/* Ends a guest that was told to unwind and has nothing to undo; false if it has, and is to be polled. By the owner. */
bool art_guest_unwind_unstarted(art_guest *guest);

/* What a suspended guest waits for; valid until the next poll. */
typedef struct art_guest_wait {
    uint64_t number;        /* counts the guest's waits; the same wait keeps its number */
    const int32_t *handles;
    size_t count;           /* 0: not suspended in a syscall */
    uint64_t ops;           /* bit 1 << op for each handle */
} art_guest_wait;
art_guest_wait art_guest_waiting(const art_guest *guest);

/* True if answers were posted that the owner has not taken. Any thread. */
bool art_guest_has_answers(const art_guest *guest);

typedef enum art_exit_reason {
    ART_EXIT_RETURNED, /* code 0 */
    ART_EXIT_FAILED,   /* the entry returned `code` != 0, or proc_exit was given it */
    ART_EXIT_TRAP,     /* `code` is wasmtime's trap code, -1 for an uncaught exception; message with backtrace */
    ART_EXIT_FUEL,     /* the account is empty and final */
    ART_EXIT_KILLED,   /* art_guest_kill */
    ART_EXIT_ENGINE,   /* the engine could not run it; message */
    ART_EXIT_UNWOUND,  /* art_guest_unwind; `code` is what the handlers returned, the message why they were cut short */
} art_exit_reason;

/* The end of what was written to a stream. */
typedef struct art_stream {
    const uint8_t *bytes; /* at most ART_WASI_OUTPUT_BYTES_MAX; NULL: none */
    uint32_t len;
    uint64_t total;       /* written; more than len: the beginning is cut */
} art_stream;

typedef struct art_exit {
    art_exit_reason reason;
    int32_t code;
    const uint8_t *output; /* NULL: none was given */
    uint32_t output_len;
    const char *message; /* "" if none */
    art_stream out, err;   /* of a WASI guest: stdout, stderr */
    uint64_t waits;        /* begun in all its life, before a frame too; safe points are none */
    int32_t asked;         /* handles it was given */
} art_exit;

bool art_guest_ended(const art_guest *guest);
/* The exit of a guest that is done; pointers live as long as the guest. */
art_exit art_guest_exit(const art_guest *guest);

/* Ends the guest now (reason KILLED unless it is done already); frees its slots. Needs an ordinary thread stack. */
void art_guest_kill(art_guest *guest);

/* Has a guest that is suspended in a call, or at a safe point, fail where it stands (reason TRAP): its message is then the
 * backtrace of what it was doing. To look at guests that nobody needs. ART_ESTATE with a message, the guest being as before: it
 * is not suspended so. Needs an ordinary thread stack; the owner only, between polls. */
int art_guest_fail(art_guest *guest, char *msg, size_t msg_len);

/* Guest work done, in fuel. Of a guest that has ended: what the account was charged. That follows from module, input and
 * answers, whatever interrupted the guest, but where it was killed. At an end by `unreachable`, an uncaught exception, a call
 * of nothing or of a wrong type, stack overflow or want of fuel it is exact; any other trap counts up to the last call of a
 * host function, or the entry, since the engine does not tell where in the stretch after it the trap was. */
uint64_t art_guest_fuel_used(const art_guest *guest);

/* Length of the memory that the guest exports; 0 while there is none, and once the guest is done. The owner only, between polls. */
uint64_t art_guest_memory_bytes(art_guest *guest);

/* A digest of the whole memory that the guest exports, its length included; 0 while there is none, and once the guest is done.
 * Between polls. Reads all of it: some 0.1 ms a MiB. */
uint64_t art_guest_memory_digest(art_guest *guest);

/* CLOCK_MONOTONIC at the guest's first call of a host function, or else at the end of its first micro-slice of the entry
 * (later than its first instruction, never earlier); 0 before. */
uint64_t art_guest_first_ns(const art_guest *guest);

#ifdef __cplusplus
}
#endif
#endif
