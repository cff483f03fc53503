#include "wasmtime_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "art_err.h"

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static art__wasmtime table;
static bool loaded;

static int load_locked(const char *path, char *msg, size_t msg_len)
{
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        snprintf(msg, msg_len, "%s", dlerror());
        return ART_EENGINE;
    }
#define ART_WASMTIME_RESOLVE(ret, name, args)                                                                          \
    *(void **)&table.name = dlsym(lib, #name);                                                                         \
    if (!table.name) {                                                                                                 \
        snprintf(msg, msg_len, "%s has no function %s", path, #name);                                                  \
        dlclose(lib);                                                                                                  \
        return ART_EENGINE;                                                                                            \
    }
    ART_WASMTIME_API(ART_WASMTIME_RESOLVE)
#undef ART_WASMTIME_RESOLVE
    return 0; /* the library stays loaded for the life of the process: guests' traps run in its signal handlers */
}

int art__wasmtime_load(const char *path, const art__wasmtime **out, char *msg, size_t msg_len)
{
    int err = 0;
    pthread_mutex_lock(&load_lock);
    if (!loaded) {
        err = load_locked(path, msg, msg_len);
        loaded = err == 0;
    }
    pthread_mutex_unlock(&load_lock);
    if (!err) {
        *out = &table;
    }
    return err;
}
