/* abuse: gives every import wrong arguments and checks what it gets. Returns 0, or the line of the first wrong answer.
 * Needs no tool. input: any.
 */
#include "guest.h"

#define EXPECT(call, status)     \
    do {                         \
        if ((call) != (status)) { \
            return __LINE__;     \
        }                        \
    } while (0)

#define OUTSIDE ((void *)0x7ffffff0)
#define EDGE ((void *)((uint32_t)__builtin_wasm_memory_size(0) * 65536 - 1))

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[64];
    static int32_t handles[4096];
    const char *request = "{\"tool\":\"no_such_tool\",\"args\":{}}";
    int32_t length = (int32_t)string_length(request);

    /* pointers */
    EXPECT(agentrt_input(0, OUTSIDE, 1), AGENTRT_EFAULT);
    EXPECT(agentrt_input(0, EDGE, 2), AGENTRT_EFAULT);
    EXPECT(agentrt_input(0, buf, -1), AGENTRT_EFAULT);
    EXPECT(agentrt_input(0, (void *)0xffffffff, -1), AGENTRT_EFAULT);
    EXPECT(agentrt_input(0, EDGE, 1) >= 0, 1);
    EXPECT(agentrt_input(-1, buf, sizeof buf) >= 0, 1);
    EXPECT(agentrt_restored(0, OUTSIDE, 1) < 0, 1);
    EXPECT(agentrt_output(OUTSIDE, 1), AGENTRT_EFAULT);
    EXPECT(agentrt_output(EDGE, 2), AGENTRT_EFAULT);
    EXPECT(agentrt_random(OUTSIDE, 1), AGENTRT_EFAULT);
    EXPECT(agentrt_call(AGENTRT_TOOL_CALL, OUTSIDE, 1, buf, sizeof buf), AGENTRT_EFAULT);
    EXPECT(agentrt_call(AGENTRT_TOOL_CALL, request, length, OUTSIDE, 1), AGENTRT_EFAULT);
    EXPECT(agentrt_call(AGENTRT_TOOL_CALL, request, length, buf, -1), AGENTRT_EFAULT);
    EXPECT(agentrt_submit(AGENTRT_TOOL_CALL, EDGE, 2), AGENTRT_EFAULT);
    EXPECT(agentrt_wait_any(OUTSIDE, 1), AGENTRT_EFAULT);
    EXPECT(agentrt_read(1, 0, OUTSIDE, 1) < 0, 1);

    /* lengths */
    EXPECT(agentrt_output(buf, -1), AGENTRT_E2BIG);
    EXPECT(agentrt_random(buf, -1), AGENTRT_E2BIG);
    EXPECT(agentrt_random(buf, INT32_MIN), AGENTRT_E2BIG);
    EXPECT(agentrt_call(AGENTRT_TOOL_CALL, request, -1, buf, sizeof buf), AGENTRT_E2BIG);
    EXPECT(agentrt_submit(AGENTRT_TOOL_CALL, request, 0x7fffffff), AGENTRT_E2BIG);
    EXPECT(agentrt_wait_any(handles, -1), AGENTRT_E2BIG);
    EXPECT(agentrt_wait_any(handles, 0x40000001), AGENTRT_E2BIG);

    /* ops */
    static const int32_t ops[] = {0, -1, 18, 1000, INT32_MIN, INT32_MAX, AGENTRT_CLOCK_NOW, AGENTRT_RANDOM_BYTES};
    for (uint32_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        EXPECT(agentrt_call(ops[i], request, length, buf, sizeof buf), AGENTRT_ENOSYS);
        EXPECT(agentrt_submit(ops[i], request, length), AGENTRT_ENOSYS);
    }

    /* handles: none exists so far, so refused syscalls took no number */
    handles[0] = 1;
    EXPECT(agentrt_wait_any(handles, 1), AGENTRT_EBADF);
    EXPECT(agentrt_wait_any(handles, 0), AGENTRT_EBADF);
    EXPECT(agentrt_close(1), AGENTRT_EBADF);
    EXPECT(agentrt_close(0), AGENTRT_EBADF);
    EXPECT(agentrt_read(0, 0, buf, sizeof buf), AGENTRT_EBADF);
    EXPECT(agentrt_read(1, 0, buf, sizeof buf), AGENTRT_EBADF);
    EXPECT(agentrt_restored(0, buf, sizeof buf), AGENTRT_ENODATA);

    /* requests that are no JSON, or not of the op's shape, fail like any syscall */
    static const char *const bad[] = {"", "{", "[]", "\xff", "{\"tool\":1}", "{\"tool\":\"no_such_tool\",\"args\":{}}"};
    int32_t made = 0;
    for (uint32_t i = 0; i < sizeof bad / sizeof *bad; i++, made++) {
        EXPECT(agentrt_call(AGENTRT_TOOL_CALL, bad[i], (int32_t)string_length(bad[i]), buf, sizeof buf), AGENTRT_EFAILED);
        EXPECT(buf[0], '{');
        EXPECT(agentrt_read(0, 0, buf, 0), AGENTRT_EFAILED);
        EXPECT(agentrt_read(0, 1, buf, 0) > 2, 1);
        EXPECT(agentrt_read(0, 0x7fffffff, buf, sizeof buf) > 2, 1); /* past the end: nothing is copied */
    }

    /* too many in flight, and again room once some are closed */
    int32_t count = 0, handle;
    while ((handle = agentrt_submit(AGENTRT_TOOL_CALL, request, length)) > 0 && count < 4096) {
        EXPECT(handle, ++made);
        handles[count++] = handle;
    }
    EXPECT(handle, AGENTRT_EAGAIN);
    EXPECT(count > 0, 1);
    EXPECT(agentrt_call(AGENTRT_TOOL_CALL, request, length, buf, sizeof buf), AGENTRT_EAGAIN);
    EXPECT(agentrt_close(handles[0]), AGENTRT_EBADF); /* not waited for */
    EXPECT(agentrt_read(handles[0], 0, buf, sizeof buf), AGENTRT_EBADF);
    while (count) {
        int32_t which = agentrt_wait_any(handles, count);
        EXPECT(which >= 0 && which < count, 1);
        EXPECT(agentrt_read(handles[which], 0, buf, sizeof buf), AGENTRT_EFAILED);
        EXPECT(agentrt_close(handles[which]), 0);
        EXPECT(agentrt_close(handles[which]), AGENTRT_EBADF);
        handles[which] = handles[--count];
    }
    EXPECT(agentrt_submit(AGENTRT_TOOL_CALL, request, length), made + 1);
    return agentrt_output("\"well\"", 6);
}
