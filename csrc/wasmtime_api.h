/* wasmtime_api.h (private to the C core): the part of wasmtime's C API that agentrt uses, as a table of function pointers.
 *
 * The PyPI package ships the shared library without headers, so what is used is declared here; tests/unit/test_core_abi.py
 * compares each signature with the package's own ctypes declarations. The library is dlopened, never linked.
 * Thread-safety: the table is written once by art__wasmtime_load and read-only afterwards.
 */
#ifndef ART_WASMTIME_API_H
#define ART_WASMTIME_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct wasm_config_t wasm_config_t;
typedef struct wasm_engine_t wasm_engine_t;
typedef struct wasm_trap_t wasm_trap_t;
typedef struct wasm_functype_t wasm_functype_t;
typedef struct wasm_valtype_t wasm_valtype_t;
typedef struct wasm_externtype_t wasm_externtype_t;
typedef struct wasm_importtype_t wasm_importtype_t;
typedef struct wasm_exporttype_t wasm_exporttype_t;
typedef struct wasmtime_error wasmtime_error_t;
typedef struct wasmtime_store wasmtime_store_t;
typedef struct wasmtime_context wasmtime_context_t;
typedef struct wasmtime_caller wasmtime_caller_t;
typedef struct wasmtime_module wasmtime_module_t;
typedef struct wasmtime_linker wasmtime_linker_t;
typedef struct wasmtime_instance_pre wasmtime_instance_pre_t;
typedef struct wasmtime_call_future wasmtime_call_future_t;
typedef struct wasmtime_pooling_allocation_config_t wasmtime_pooling_allocation_config_t;

typedef struct wasm_byte_vec_t {
    size_t size;
    char *data;
} wasm_byte_vec_t;
typedef struct wasm_valtype_vec_t {
    size_t size;
    wasm_valtype_t **data;
} wasm_valtype_vec_t;
typedef struct wasm_importtype_vec_t {
    size_t size;
    wasm_importtype_t **data;
} wasm_importtype_vec_t;
typedef struct wasm_exporttype_vec_t {
    size_t size;
    wasm_exporttype_t **data;
} wasm_exporttype_vec_t;

typedef struct wasmtime_func {
    uint64_t store_id;
    void *private1;
} wasmtime_func_t;
typedef struct wasmtime_memory {
    struct {
        uint64_t store_id;
        uint32_t private1;
    } head;
    uint32_t private2;
} wasmtime_memory_t;
typedef struct wasmtime_global {
    uint64_t store_id;
    uint32_t private1, private2, private3;
} wasmtime_global_t;
typedef struct wasmtime_instance {
    uint64_t store_id;
    size_t private1;
} wasmtime_instance_t;

enum { ART_WASM_I32 = 0, ART_WASM_I64 = 1 };                     /* kinds of wasmtime_val_t and wasm_valtype_t, */
enum { ART_WASM_V128 = 4 };                                     /* of the first only: the last that is a number */
/* kinds of wasmtime_extern_t and wasm_externtype_t */
enum { ART_WASM_EXTERN_FUNC = 0, ART_WASM_EXTERN_GLOBAL = 1, ART_WASM_EXTERN_MEMORY = 3 };
enum { ART_WASM_STRATEGY_CRANELIFT = 1 };
enum { /* of wasmtime_trap_code */
    ART_WASM_TRAP_STACK_OVERFLOW = 0,
    ART_WASM_TRAP_INDIRECT_CALL_TO_NULL = 4,
    ART_WASM_TRAP_BAD_SIGNATURE = 5,
    ART_WASM_TRAP_UNREACHABLE = 9,
    ART_WASM_TRAP_OUT_OF_FUEL = 11,
};

typedef struct wasmtime_extern {
    uint8_t kind;
    union {
        wasmtime_func_t func;
        wasmtime_memory_t memory;
        wasmtime_global_t global;
        uint64_t words[3];
    } of;
} wasmtime_extern_t;

typedef struct wasmtime_val {
    uint8_t kind;
    union {
        int32_t i32;
        int64_t i64;
        uint64_t words[3];
    } of;
} wasmtime_val_t;

_Static_assert(sizeof(wasmtime_func_t) == 16, "layout");
_Static_assert(sizeof(wasmtime_memory_t) == 24, "layout");
_Static_assert(sizeof(wasmtime_global_t) == 24, "layout");
_Static_assert(sizeof(wasmtime_extern_t) == 32, "layout");
_Static_assert(sizeof(wasmtime_val_t) == 32, "layout");

typedef struct wasmtime_async_continuation_t {
    bool (*callback)(void *);
    void *env;
    void (*finalizer)(void *);
} wasmtime_async_continuation_t;
typedef void (*wasmtime_func_async_callback_t)(void *, wasmtime_caller_t *, const wasmtime_val_t *, size_t,
                                               wasmtime_val_t *, size_t, wasm_trap_t **,
                                               wasmtime_async_continuation_t *);

/* X(return type, name, arguments) */
#define ART_WASMTIME_API(X)                                                                                            \
    X(wasm_config_t *, wasm_config_new, (void))                                                                        \
    X(void, wasm_config_delete, (wasm_config_t *))                                                                     \
    X(void, wasmtime_config_strategy_set, (wasm_config_t *, uint8_t))                                                  \
    X(void, wasmtime_config_consume_fuel_set, (wasm_config_t *, bool))                                                 \
    X(void, wasmtime_config_max_wasm_stack_set, (wasm_config_t *, size_t))                                             \
    X(wasmtime_error_t *, wasmtime_config_target_set, (wasm_config_t *, const char *))                                 \
    X(void, wasmtime_config_async_stack_size_set, (wasm_config_t *, size_t))                                           \
    X(void, wasmtime_config_wasm_threads_set, (wasm_config_t *, bool))                                                 \
    X(void, wasmtime_config_shared_memory_set, (wasm_config_t *, bool))                                                \
    X(void, wasmtime_config_wasm_gc_set, (wasm_config_t *, bool))                                                      \
    X(void, wasmtime_config_wasm_exceptions_set, (wasm_config_t *, bool))                                              \
    X(void, wasmtime_config_wasm_multi_memory_set, (wasm_config_t *, bool))                                            \
    X(void, wasmtime_config_wasm_memory64_set, (wasm_config_t *, bool))                                                \
    X(void, wasmtime_config_wasm_relaxed_simd_deterministic_set, (wasm_config_t *, bool))                              \
    X(void, wasmtime_config_cranelift_nan_canonicalization_set, (wasm_config_t *, bool))                               \
    X(void, wasmtime_config_parallel_compilation_set, (wasm_config_t *, bool))                                         \
    X(void, wasmtime_pooling_allocation_strategy_set,                                                                  \
      (wasm_config_t *, const wasmtime_pooling_allocation_config_t *))                                                 \
    X(wasmtime_pooling_allocation_config_t *, wasmtime_pooling_allocation_config_new, (void))                          \
    X(void, wasmtime_pooling_allocation_config_delete, (wasmtime_pooling_allocation_config_t *))                       \
    X(void, wasmtime_pooling_allocation_config_total_core_instances_set,                                               \
      (wasmtime_pooling_allocation_config_t *, uint32_t))                                                              \
    X(void, wasmtime_pooling_allocation_config_total_memories_set, (wasmtime_pooling_allocation_config_t *, uint32_t)) \
    X(void, wasmtime_pooling_allocation_config_total_tables_set, (wasmtime_pooling_allocation_config_t *, uint32_t))   \
    X(void, wasmtime_pooling_allocation_config_total_stacks_set, (wasmtime_pooling_allocation_config_t *, uint32_t))   \
    X(void, wasmtime_pooling_allocation_config_max_memory_size_set, (wasmtime_pooling_allocation_config_t *, size_t))  \
    X(void, wasmtime_pooling_allocation_config_table_elements_set, (wasmtime_pooling_allocation_config_t *, size_t))   \
    X(void, wasmtime_pooling_allocation_config_max_unused_warm_slots_set,                                              \
      (wasmtime_pooling_allocation_config_t *, uint32_t))                                                              \
    X(wasm_engine_t *, wasm_engine_new_with_config, (wasm_config_t *))                                                 \
    X(void, wasm_engine_delete, (wasm_engine_t *))                                                                     \
    X(wasmtime_error_t *, wasmtime_module_new,                                                                         \
      (wasm_engine_t *, const uint8_t *, size_t, wasmtime_module_t **))                                                \
    X(wasmtime_error_t *, wasmtime_module_serialize, (wasmtime_module_t *, wasm_byte_vec_t *))                         \
    X(wasmtime_error_t *, wasmtime_module_deserialize,                                                                 \
      (wasm_engine_t *, const uint8_t *, size_t, wasmtime_module_t **))                                                \
    X(void, wasmtime_module_delete, (wasmtime_module_t *))                                                             \
    X(void, wasmtime_module_imports, (const wasmtime_module_t *, wasm_importtype_vec_t *))                             \
    X(void, wasmtime_module_exports, (const wasmtime_module_t *, wasm_exporttype_vec_t *))                             \
    X(void, wasm_importtype_vec_delete, (wasm_importtype_vec_t *))                                                     \
    X(void, wasm_exporttype_vec_delete, (wasm_exporttype_vec_t *))                                                     \
    X(const wasm_byte_vec_t *, wasm_importtype_module, (const wasm_importtype_t *))                                    \
    X(const wasm_byte_vec_t *, wasm_importtype_name, (const wasm_importtype_t *))                                      \
    X(const wasm_externtype_t *, wasm_importtype_type, (const wasm_importtype_t *))                                    \
    X(const wasm_byte_vec_t *, wasm_exporttype_name, (const wasm_exporttype_t *))                                      \
    X(const wasm_externtype_t *, wasm_exporttype_type, (const wasm_exporttype_t *))                                    \
    X(uint8_t, wasm_externtype_kind, (const wasm_externtype_t *))                                                      \
    X(const wasm_functype_t *, wasm_externtype_as_functype_const, (const wasm_externtype_t *))                         \
    X(const wasm_valtype_vec_t *, wasm_functype_params, (const wasm_functype_t *))                                     \
    X(const wasm_valtype_vec_t *, wasm_functype_results, (const wasm_functype_t *))                                    \
    X(bool, wasmtime_wasm_valtype_equal, (const wasm_valtype_t *, const wasm_valtype_t *))                             \
    X(wasm_valtype_t *, wasm_valtype_new, (uint8_t))                                                                   \
    X(void, wasm_valtype_delete, (wasm_valtype_t *))                                                                   \
    X(void, wasm_valtype_vec_new, (wasm_valtype_vec_t *, size_t, wasm_valtype_t *const *))                             \
    X(wasm_functype_t *, wasm_functype_new, (wasm_valtype_vec_t *, wasm_valtype_vec_t *))                              \
    X(void, wasm_functype_delete, (wasm_functype_t *))                                                                 \
    X(wasmtime_linker_t *, wasmtime_linker_new, (wasm_engine_t *))                                                     \
    X(void, wasmtime_linker_delete, (wasmtime_linker_t *))                                                             \
    X(wasmtime_error_t *, wasmtime_linker_define_async_func,                                                           \
      (wasmtime_linker_t *, const char *, size_t, const char *, size_t, const wasm_functype_t *,                       \
       wasmtime_func_async_callback_t, void *, void (*)(void *)))                                                      \
    X(wasmtime_error_t *, wasmtime_linker_instantiate_pre,                                                             \
      (const wasmtime_linker_t *, const wasmtime_module_t *, wasmtime_instance_pre_t **))                              \
    X(void, wasmtime_instance_pre_delete, (wasmtime_instance_pre_t *))                                                 \
    X(wasmtime_call_future_t *, wasmtime_instance_pre_instantiate_async,                                               \
      (const wasmtime_instance_pre_t *, wasmtime_context_t *, wasmtime_instance_t *, wasm_trap_t **,                   \
       wasmtime_error_t **))                                                                                           \
    X(wasmtime_store_t *, wasmtime_store_new, (wasm_engine_t *, void *, void (*)(void *)))                             \
    X(wasmtime_context_t *, wasmtime_store_context, (wasmtime_store_t *))                                              \
    X(void, wasmtime_store_limiter, (wasmtime_store_t *, int64_t, int64_t, int64_t, int64_t, int64_t))                 \
    X(void, wasmtime_store_delete, (wasmtime_store_t *))                                                               \
    X(void *, wasmtime_context_get_data, (const wasmtime_context_t *))                                                 \
    X(wasmtime_error_t *, wasmtime_context_set_fuel, (wasmtime_context_t *, uint64_t))                                 \
    X(wasmtime_error_t *, wasmtime_context_get_fuel, (const wasmtime_context_t *, uint64_t *))                         \
    X(wasmtime_error_t *, wasmtime_context_fuel_async_yield_interval, (wasmtime_context_t *, uint64_t))                \
    X(bool, wasmtime_instance_export_get,                                                                              \
      (wasmtime_context_t *, const wasmtime_instance_t *, const char *, size_t, wasmtime_extern_t *))                  \
    X(wasmtime_context_t *, wasmtime_caller_context, (wasmtime_caller_t *))                                            \
    X(bool, wasmtime_caller_export_get, (wasmtime_caller_t *, const char *, size_t, wasmtime_extern_t *))              \
    X(uint8_t *, wasmtime_memory_data, (const wasmtime_context_t *, const wasmtime_memory_t *))                        \
    X(size_t, wasmtime_memory_data_size, (const wasmtime_context_t *, const wasmtime_memory_t *))                      \
    X(wasmtime_error_t *, wasmtime_memory_grow,                                                                        \
      (wasmtime_context_t *, const wasmtime_memory_t *, uint64_t, uint64_t *))                                         \
    X(void, wasmtime_global_get, (wasmtime_context_t *, const wasmtime_global_t *, wasmtime_val_t *))                  \
    X(wasmtime_error_t *, wasmtime_global_set,                                                                         \
      (wasmtime_context_t *, const wasmtime_global_t *, const wasmtime_val_t *))                                       \
    X(wasmtime_call_future_t *, wasmtime_func_call_async,                                                              \
      (wasmtime_context_t *, const wasmtime_func_t *, const wasmtime_val_t *, size_t, wasmtime_val_t *, size_t,        \
       wasm_trap_t **, wasmtime_error_t **))                                                                           \
    X(bool, wasmtime_call_future_poll, (wasmtime_call_future_t *))                                                     \
    X(void, wasmtime_call_future_delete, (wasmtime_call_future_t *))                                                   \
    X(bool, wasmtime_trap_code, (const wasm_trap_t *, uint8_t *))                                                      \
    X(void, wasm_trap_message, (const wasm_trap_t *, wasm_byte_vec_t *))                                               \
    X(wasm_trap_t *, wasmtime_trap_new, (const char *, size_t))                                                        \
    X(void, wasm_trap_delete, (wasm_trap_t *))                                                                         \
    X(void, wasmtime_error_message, (const wasmtime_error_t *, wasm_byte_vec_t *))                                     \
    X(void, wasmtime_error_delete, (wasmtime_error_t *))                                                               \
    X(void, wasm_byte_vec_delete, (wasm_byte_vec_t *))

typedef struct art__wasmtime {
#define ART_WASMTIME_MEMBER(ret, name, args) ret(*name) args;
    ART_WASMTIME_API(ART_WASMTIME_MEMBER)
#undef ART_WASMTIME_MEMBER
} art__wasmtime;

/* Loads the library at path into the one table of the process; *out points to it. A second call with any path returns the
 * same table. Returns 0 or ART_EENGINE with a message. Thread-safe. */
int art__wasmtime_load(const char *path, const art__wasmtime **out, char *msg, size_t msg_len);

#endif
