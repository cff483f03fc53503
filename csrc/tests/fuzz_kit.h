/* fuzz_kit.h: what the fuzzers share: a check that libFuzzer sees as a crash, a reader of the input that never ends, and a
 * small engine. Included once by each program. */
#ifndef ART_TESTS_FUZZ_KIT_H
#define ART_TESTS_FUZZ_KIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

/* Aborts, so that libFuzzer keeps the input, unless the condition holds. */
static inline void require(bool condition, const char *msg)
{
    if (!condition) {
        (void)fprintf(stderr, "failed: %s\n", msg);
        abort();
    }
}

typedef struct reader {
    const uint8_t *data;
    size_t left;
} reader;

/* The next byte; 0 at the end. */
static inline uint8_t next(reader *in)
{
    return in->left ? (in->left--, *in->data++) : 0;
}

/* The next `len` bytes, or as many as there are. */
static inline reader next_part(reader *in, size_t len)
{
    reader part = {in->data, len < in->left ? len : in->left};
    in->data += part.left;
    in->left -= part.left;
    return part;
}

#ifdef ART_GUEST_H

/* Limits small enough for inputs of a few hundred bytes to meet. The caller changes what it wants. */
static inline art_engine_config fuzz_engine_config(void)
{
    art_engine_config config = {
        .library = getenv("AGENTRT_WASMTIME_LIB"),
        .guests_max = 2,
        .stacks_max = 2,
        .memory_bytes_max = 4 << 16,
        .wasm_stack_bytes = 64 << 10,
        .table_elements_max = 100,
        .request_bytes_max = 1 << 16,
        .result_bytes_max = 1 << 20,
        .inflight_max = 8,
    };
    require(config.library, "AGENTRT_WASMTIME_LIB must name wasmtime's shared library");
    return config;
}

static inline art_engine *fuzz_engine(art_engine_config config)
{
    char msg[ART_MSG_BYTES] = "";
    art_engine *engine = NULL;
    require(art_engine_create(&config, &engine, msg, sizeof msg) == 0, msg);
    return engine;
}

static inline art_module *fuzz_module(art_engine *engine, const void *wasm, size_t wasm_len)
{
    char msg[ART_MSG_BYTES] = "";
    art_module *module = NULL;
    uint8_t *artifact;
    size_t len;
    require(art_engine_compile(engine, wasm, wasm_len, &artifact, &len, msg, sizeof msg) == 0, msg);
    require(art_module_load(engine, artifact, len, &module, msg, sizeof msg) == 0, msg);
    free(artifact);
    return module;
}

/* What holds for the account of a guest that has ended. */
static inline void fuzz_check_fuel(const art_fuel_account *fuel)
{
    art_fuel_stats stats = art_fuel_statistics(fuel);
    require(stats.granted == stats.left + stats.used && !stats.outstanding, "fuel adds up");
}

#endif
#endif
