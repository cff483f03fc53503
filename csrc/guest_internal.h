/* guest_internal.h: private to engine.c, guest.c and abi.c: what they share. See guest.h for rules. */
#ifndef ART_GUEST_INTERNAL_H
#define ART_GUEST_INTERNAL_H

#include "guest.h"
#include "wasmtime_api.h"

#define ART_ENTRY "agentrt_run"
#define ART_MODULE_NAME "agentrt"

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
    ART__RUNNING,
    ART__ENDED,
} art__phase;

/* What a suspended guest waits for. */
typedef enum art__wait {
    ART__WAIT_NONE,
    ART__WAIT_CALL,
    ART__WAIT_ANY,
} art__wait;

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
    wasmtime_val_t result;
    wasmtime_memory_t memory;
    bool has_memory;
    uint8_t phase;
    uint64_t micro_slice_fuel;

    /* syscalls, owner's side */
    art__slot *slots; /* by handle, ascending */
    uint32_t slot_count, slot_room;
    int32_t next_handle;
    art_answer *call_answer; /* of the last agentrt_call */
    int32_t *waiting;
    uint32_t waiting_count, waiting_room;
    uint64_t waiting_ops, waits;
    uint8_t wait;
    bool resolved;            /* the wait has its value and the continuation may return it */
    bool pause;               /* the import shall suspend once before it returns: host_work is over its bound */
    uint64_t host_work;       /* done by imports since the poll began */
    int64_t resolved_value;
    wasmtime_val_t *result_slot; /* wasmtime's; valid while an import is suspended */
    uint32_t call_buf, call_cap;
    bool look;                /* replay: an answer came since the wait began */

    /* syscalls, shared with the control plane: lock-free stacks, newest first */
    ART_ATOMIC(art_request *) requests; /* guest pushes, control plane takes all */
    ART_ATOMIC(art_answer *) answers;   /* control plane pushes, owner takes all */
    ART_ATOMIC(uint32_t) logs_unseen;   /* bytes of log lines in `requests`; guest adds, taker resets */
    ART_ATOMIC(bool) live;

    /* clock, randomness, fuel */
    uint64_t clock_base_ns, clock_base_fuel;
    uint64_t random_state[4];
    art_fuel_account *fuel;
    uint64_t fuel_taken, fuel_used_final;
    uint32_t polls_until_fuel_check;
    bool fuel_sealed; /* the account was final when the store was last filled from it */
    uint64_t first_ns;

    /* input and outcome */
    uint8_t *input, *restored, *output;
    uint32_t input_len, restored_len, output_len;
    bool has_restored, has_output;
    art_exit_reason exit_reason;
    int32_t exit_code;
    char *message;
};

void art__msg(char *msg, size_t msg_len, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Writes the error's text to msg and deletes the error. */
void art__error_take(const art__wasmtime *w, wasmtime_error_t *error, char *msg, size_t msg_len);

/* Defines the guest ABI's imports in engine->linker. */
int art__abi_link(art_engine *engine, char *msg, size_t msg_len);
/* Is there an import of that name? */
bool art__abi_has(const char *name, size_t len);
/* Takes posted answers into slots; true if the guest's wait is over, its value then being set (guest->resolved). */
bool art__abi_resolve(art_guest *guest);

uint64_t art__guest_fuel_now(const art_guest *guest);

#endif
