/* engine.c: wasmtime's engine, compilation and modules; guests are in guest.c. */
#include "guest_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "art_err.h"
#include "rewrite.h"
#include "stack_guard.h"

void art__msg(char *msg, size_t msg_len, const char *format, ...)
{
    va_list args;
    if (!msg || !msg_len) {
        return;
    }
    va_start(args, format);
    vsnprintf(msg, msg_len, format, args);
    va_end(args);
}

void art__error_take(const art__wasmtime *w, wasmtime_error_t *error, char *msg, size_t msg_len)
{
    wasm_byte_vec_t text;
    w->wasmtime_error_message(error, &text);
    art__msg(msg, msg_len, "%.*s", (int)text.size, text.data);
    w->wasm_byte_vec_delete(&text);
    w->wasmtime_error_delete(error);
}

/* Also what keeps the sum below from overflowing, and what wasmtime would abort for. */
static bool config_fits(const art_engine_config *config)
{
    return config->guests_max && config->guests_max <= 1u << 20 && config->stacks_max &&
           config->stacks_max <= config->guests_max && config->inflight_max && config->inflight_max <= 1u << 16 &&
           config->memory_bytes_max <= 4ull << 30 && config->wasm_stack_bytes >= 16u << 10 &&
           config->wasm_stack_bytes <= 1u << 30 && config->table_elements_max <= 10u << 20 &&
           config->request_bytes_max <= INT32_MAX && config->result_bytes_max <= INT32_MAX; /* lengths are i32 */
}

/* wasmtime aborts the process when its pool does not fit into the address space, so ask the kernel first. A slot is the
 * 4 GiB a 32-bit index reaches plus 32 MiB of guard, and a table; stacks are small beside it. */
static bool pool_fits(const art_engine_config *config)
{
    uint64_t bytes = config->guests_max * ((4ull << 30) + (64ull << 20) + 8ull * config->table_elements_max) +
                     config->stacks_max * (config->wasm_stack_bytes + ART_HOST_STACK_BYTES + (1u << 20));
    void *area = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) {
        return false;
    }
    munmap(area, bytes);
    return true;
}

/* See stack_guard.h: below 0 the pool must not be used. */
static int light_guards(const art_engine_config *config)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = config->wasm_stack_bytes + ART_HOST_STACK_BYTES;
    return art_stack_guards_lighten(config->stacks_max, (bytes + page - 1) / page * page);
}

#if defined(__x86_64__)
#define HOST_TARGET "x86_64-unknown-linux-gnu"
#else
#define HOST_TARGET "aarch64-unknown-linux-gnu"
#endif

/* NULL: the engine does not know the target. */
static wasm_config_t *config_new(const art__wasmtime *w, const art_engine_config *config)
{
    wasm_config_t *c = w->wasm_config_new();
    w->wasmtime_config_strategy_set(c, ART_WASM_STRATEGY_CRANELIFT);
    w->wasmtime_config_consume_fuel_set(c, true);
    w->wasmtime_config_max_wasm_stack_set(c, config->wasm_stack_bytes);
    w->wasmtime_config_async_stack_size_set(c, config->wasm_stack_bytes + ART_HOST_STACK_BYTES);
    /* shared memories and 64-bit or second memories are outside the ABI; garbage collection has unbounded pauses */
    w->wasmtime_config_wasm_threads_set(c, false);
    w->wasmtime_config_shared_memory_set(c, false);
    w->wasmtime_config_wasm_gc_set(c, false);
    w->wasmtime_config_wasm_multi_memory_set(c, false);
    w->wasmtime_config_wasm_memory64_set(c, false);
    w->wasmtime_config_wasm_exceptions_set(c, true);
    /* law 10: the same bits on every CPU */
    w->wasmtime_config_wasm_relaxed_simd_deterministic_set(c, true);
    w->wasmtime_config_cranelift_nan_canonicalization_set(c, true);
    /* one low-priority thread compiles; a thread pool would compete with the workers */
    w->wasmtime_config_parallel_compilation_set(c, false);
    /* with a target named, even the host's own, what the host's CPU can do is not looked at */
    wasmtime_error_t *error = config->any_cpu ? w->wasmtime_config_target_set(c, HOST_TARGET) : NULL;
    if (error) {
        w->wasmtime_error_delete(error);
        w->wasm_config_delete(c);
        return NULL;
    }
    if (!config->compile_only) {
        wasmtime_pooling_allocation_config_t *pool = w->wasmtime_pooling_allocation_config_new();
        w->wasmtime_pooling_allocation_config_total_core_instances_set(pool, config->guests_max);
        w->wasmtime_pooling_allocation_config_total_memories_set(pool, config->guests_max);
        w->wasmtime_pooling_allocation_config_total_tables_set(pool, config->guests_max);
        w->wasmtime_pooling_allocation_config_total_stacks_set(pool, config->stacks_max);
        w->wasmtime_pooling_allocation_config_max_memory_size_set(pool, config->memory_bytes_max);
        w->wasmtime_pooling_allocation_config_table_elements_set(pool, config->table_elements_max);
        w->wasmtime_pooling_allocation_config_max_unused_warm_slots_set(pool, config->guests_max);
        w->wasmtime_pooling_allocation_strategy_set(c, pool);
        w->wasmtime_pooling_allocation_config_delete(pool);
    }
    return c;
}

int art_engine_create(const art_engine_config *config, art_engine **out, char *msg, size_t msg_len)
{
    if (!config_fits(config)) {
        art__msg(msg, msg_len, "the engine's limits are out of range or do not fit together");
        return ART_EINVAL;
    }
    art_engine *engine = calloc(1, sizeof *engine);
    if (!engine) {
        return ART_ENOMEM;
    }
    engine->config = *config;
    engine->config.library = NULL;
    int err = art__wasmtime_load(config->library, &engine->w, msg, msg_len);
    if (!err && !config->compile_only && !pool_fits(config)) {
        art__msg(msg, msg_len, "no address space for %u guests of 4 GiB each", config->guests_max);
        err = ART_ENOMEM;
    }
    if (!err) {
        wasm_config_t *made = config_new(engine->w, config);
        engine->engine = made ? engine->w->wasm_engine_new_with_config(made) : NULL;
        if (!engine->engine) {
            art__msg(msg, msg_len, "wasmtime refused the engine's configuration");
            err = ART_EENGINE;
        }
    }
    if (!err && !config->compile_only && light_guards(config) < 0) {
        art__msg(msg, msg_len, "the pool of stacks lost its guard pages");
        err = ART_EENGINE;
    }
    if (!err) {
        engine->linker = engine->w->wasmtime_linker_new(engine->engine);
        err = art__abi_link(engine, msg, msg_len);
    }
    if (!err) {
        err = art__wasi_link(engine, msg, msg_len);
    }
    if (!err) {
        err = art__micropython_link(engine, msg, msg_len);
    }
    if (err) {
        art_engine_destroy(engine);
        return err;
    }
    *out = engine;
    return 0;
}

void art_engine_destroy(art_engine *engine)
{
    if (!engine) {
        return;
    }
    if (engine->linker) {
        engine->w->wasmtime_linker_delete(engine->linker);
    }
    if (engine->engine) {
        engine->w->wasm_engine_delete(engine->engine);
    }
    free(engine);
}

int art_engine_compile(art_engine *engine, const uint8_t *wasm, size_t len, uint8_t **artifact, size_t *artifact_len,
                       char *msg, size_t msg_len)
{
    const art__wasmtime *w = engine->w;
    art_rewrite_config rewrite;
    art_rewrite_config_default(&rewrite);
    rewrite.table_elements_max = engine->config.table_elements_max;
    uint8_t *code;
    size_t code_len;
    int err = art_rewrite(wasm, len, &rewrite, &code, &code_len, msg, msg_len);
    if (err) {
        return err;
    }
    wasmtime_module_t *module = NULL;
    wasmtime_error_t *error = w->wasmtime_module_new(engine->engine, code, code_len, &module);
    free(code);
    if (error) {
        art__error_take(w, error, msg, msg_len);
        return ART_EMODULE;
    }
    wasm_byte_vec_t bytes;
    error = w->wasmtime_module_serialize(module, &bytes);
    w->wasmtime_module_delete(module);
    if (error) {
        art__error_take(w, error, msg, msg_len);
        return ART_EMODULE;
    }
    uint8_t *copy = malloc(bytes.size);
    if (copy) {
        memcpy(copy, bytes.data, bytes.size);
        *artifact = copy;
        *artifact_len = bytes.size;
    }
    w->wasm_byte_vec_delete(&bytes);
    return copy ? 0 : ART_ENOMEM;
}

static bool name_is(const wasm_byte_vec_t *name, const char *text)
{
    return name->size == strlen(text) && memcmp(name->data, text, name->size) == 0;
}

static int check_imports(const art_engine *engine, const wasmtime_module_t *module, char *msg, size_t msg_len)
{
    const art__wasmtime *w = engine->w;
    wasm_importtype_vec_t imports;
    int err = 0;
    w->wasmtime_module_imports(module, &imports);
    for (size_t i = 0; i < imports.size && !err; i++) {
        const wasm_byte_vec_t *from = w->wasm_importtype_module(imports.data[i]);
        const wasm_byte_vec_t *name = w->wasm_importtype_name(imports.data[i]);
        bool known = name_is(from, ART_MODULE_NAME)               ? art__abi_has(name->data, name->size)
                     : name_is(from, ART_WASI_MODULE_NAME)        ? art__wasi_has(name->data, name->size)
                     : name_is(from, ART_MICROPYTHON_MODULE_NAME) ? art__micropython_has(name->data, name->size)
                                                                  : false;
        if (!known) {
            art__msg(msg, msg_len, "unknown import \"%.*s\" from module \"%.*s\"", (int)(name->size > 200 ? 200 : name->size),
                     name->data, (int)(from->size > 200 ? 200 : from->size), from->data);
            err = ART_EIMPORT;
        }
    }
    w->wasm_importtype_vec_delete(&imports);
    return err;
}

/* Is it a function of that type: so many i32 in, so many (0 or 1) out? Types are compared, for wasm_valtype_kind aborts at
 * a v128. */
static bool function_is(const art__wasmtime *w, const wasm_externtype_t *type, size_t params, size_t results)
{
    wasm_valtype_t *i32 = w->wasm_valtype_new(ART_WASM_I32);
    const wasm_functype_t *func = w->wasm_externtype_as_functype_const(type);
    const wasm_valtype_vec_t *in = w->wasm_functype_params(func), *out = w->wasm_functype_results(func);
    bool fits = in->size == params && out->size == results;
    for (size_t i = 0; fits && i < params; i++) {
        fits = w->wasmtime_wasm_valtype_equal(in->data[i], i32);
    }
    fits = fits && (!results || w->wasmtime_wasm_valtype_equal(out->data[0], i32));
    w->wasm_valtype_delete(i32);
    return fits;
}

enum {
    EXPORT_RUN = 1,
    EXPORT_START = 2,
    EXPORT_INITIALIZE = 4,
    EXPORT_MAIN = 8,
    EXPORT_MALLOC = 16,
    EXPORT_UNWIND = 32,
    EXPORT_UNWIND_I32 = 64,
};

/* Finds what the module is entered by. `entry` is NULL, or names a reactor's. */
static int check_exports(const art_engine *engine, const char *entry, art_module *made, char *msg, size_t msg_len)
{
    const art__wasmtime *w = engine->w;
    const struct {
        const char *name;
        uint32_t bit, params, results;
        const char *type;
    } wanted[] = {
        {ART_ENTRY, EXPORT_RUN, 0, 1, "take nothing and return an i32"},
        {"_start", EXPORT_START, 0, 0, "take and return nothing"},
        {"_initialize", EXPORT_INITIALIZE, 0, 0, "take and return nothing"},
        {entry, EXPORT_MAIN, 2, 1, "take two i32, argc and argv, and return an i32"},
        {"malloc", EXPORT_MALLOC, 1, 1, "take an i32 and return one"},
        {ART_UNWIND_ENTRY, EXPORT_UNWIND, 0, 0, "take nothing and return nothing or an i32"}, /* optional */
        {ART_UNWIND_ENTRY, EXPORT_UNWIND_I32, 0, 1, ""},
    };
    wasm_exporttype_vec_t exports;
    uint32_t has = 0, wrong = 0;
    w->wasmtime_module_exports(made->module, &exports);
    for (size_t i = 0; i < exports.size; i++) {
        const wasm_byte_vec_t *name = w->wasm_exporttype_name(exports.data[i]);
        const wasm_externtype_t *type = w->wasm_exporttype_type(exports.data[i]);
        uint8_t kind = w->wasm_externtype_kind(type);
        art__boot_export(made, name, kind);
        art__capture_export(made, name, kind, kind == ART_WASM_EXTERN_FUNC && function_is(w, type, 0, 0));
        for (size_t k = 0; k < sizeof wanted / sizeof *wanted; k++) {
            bool func = kind == ART_WASM_EXTERN_FUNC;
            /* handlers that would silently never run are refused, whatever else has their name */
            if (wanted[k].name && (func || wanted[k].bit >= EXPORT_UNWIND) && name_is(name, wanted[k].name)) {
                *(func && function_is(w, type, wanted[k].params, wanted[k].results) ? &has : &wrong) |= wanted[k].bit;
            }
        }
    }
    w->wasm_exporttype_vec_delete(&exports);
    uint32_t need = entry                                    ? EXPORT_MAIN | EXPORT_MALLOC
                    : (has | wrong) & EXPORT_RUN             ? EXPORT_RUN
                    : (has | wrong) & EXPORT_START           ? EXPORT_START
                                                             : EXPORT_RUN;
    if (need != EXPORT_START && wrong & EXPORT_INITIALIZE) {
        need |= EXPORT_INITIALIZE;
    }
    need |= has & EXPORT_UNWIND_I32 ? 0 : wrong & EXPORT_UNWIND;
    for (size_t k = 0; k < sizeof wanted / sizeof *wanted; k++) {
        if (need & ~has & wanted[k].bit) {
            if (wrong & wanted[k].bit) {
                art__msg(msg, msg_len, "%.200s must %s", wanted[k].name, wanted[k].type);
            } else if (need & EXPORT_RUN) {
                art__msg(msg, msg_len, "module does not export the function " ART_ENTRY ", nor _start");
            } else {
                art__msg(msg, msg_len, "module does not export the function %.200s", wanted[k].name);
            }
            return ART_EENTRY;
        }
    }
    made->entry = entry ? ART__ENTRY_MAIN : need & EXPORT_RUN ? ART__ENTRY_RUN : ART__ENTRY_START;
    /* _start does that itself */
    made->initialize = made->entry != ART__ENTRY_START && has & EXPORT_INITIALIZE;
    made->unwind = has & EXPORT_UNWIND ? ART__UNWIND_VOID : has & EXPORT_UNWIND_I32 ? ART__UNWIND_I32 : ART__UNWIND_NONE;
    made->entry_name = strdup(entry ? entry : made->entry == ART__ENTRY_RUN ? ART_ENTRY : "_start");
    return made->entry_name ? 0 : ART_ENOMEM;
}

static int load(art_engine *engine, const uint8_t *artifact, size_t len, const char *entry, art_module **out, char *msg,
                size_t msg_len)
{
    const art__wasmtime *w = engine->w;
    wasmtime_module_t *module = NULL;
    wasmtime_error_t *error = w->wasmtime_module_deserialize(engine->engine, artifact, len, &module);
    if (error) {
        char text[ART_MSG_BYTES] = "";
        art__error_take(w, error, text, sizeof text);
        art__msg(msg, msg_len, "%s", text);
        /* wasmtime's errors have no codes. The pool refuses what its slots cannot hold: memory, exported or not, tables, and
         * the module's own bookkeeping. */
        return strstr(text, "pooling allocator") ? ART_ELIMIT : ART_EMODULE;
    }
    art_module *made = calloc(1, sizeof *made);
    int err = made ? check_imports(engine, module, msg, msg_len) : ART_ENOMEM;
    if (!err) {
        made->module = module;
        err = check_exports(engine, entry, made, msg, msg_len);
    }
    if (!err) {
        error = w->wasmtime_linker_instantiate_pre(engine->linker, module, &made->pre);
        if (error) {
            art__error_take(w, error, msg, msg_len);
            err = ART_EIMPORT; /* all imports exist, so what is left is a wrong type */
        }
    }
    if (err) {
        free(made ? made->entry_name : NULL);
        free(made);
        w->wasmtime_module_delete(module);
        return err;
    }
    made->engine = engine;
    atomic_init(&made->references, 1);
    *out = made;
    return 0;
}

int art_module_load(art_engine *engine, const uint8_t *artifact, size_t len, art_module **out, char *msg,
                    size_t msg_len)
{
    return load(engine, artifact, len, NULL, out, msg, msg_len);
}

int art_module_load_reactor(art_engine *engine, const uint8_t *artifact, size_t len, const char *entry,
                            art_module **out, char *msg, size_t msg_len)
{
    return load(engine, artifact, len, entry, out, msg, msg_len);
}

bool art_module_unwinds(const art_module *module)
{
    return module->unwind != ART__UNWIND_NONE;
}

bool art_module_is_agent(const art_module *module)
{
    return module->entry == ART__ENTRY_RUN;
}

art_module *art_module_retain(art_module *module)
{
    /* relaxed: the caller has a reference already, nothing is published by taking another */
    atomic_fetch_add_explicit(&module->references, 1, memory_order_relaxed);
    return module;
}

void art_module_release(art_module *module)
{
    if (!module) {
        return;
    }
    /* acq_rel: every use through any reference happens before the free below */
    if (atomic_fetch_sub_explicit(&module->references, 1, memory_order_acq_rel) == 1) {
        module->engine->w->wasmtime_instance_pre_delete(module->pre);
        module->engine->w->wasmtime_module_delete(module->module);
        free(module->entry_name);
        free(module->begin);
        free(module);
    }
}
