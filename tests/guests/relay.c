/* relay: makes the tool calls it is told to make, one after the other.
 *
 * input  {"tool": text, "args": object, "times": n}   times by default 1
 * output {"calls": n, "failed": n, "last": the last answer or error}
 */
#include "guest.h"

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[1 << 20], answer[1 << 20];
    span input = read_input(buf, sizeof buf);
    span tool = json_get(input, "tool"), args = json_get(input, "args");
    int64_t times = json_int(json_get(input, "times"), 1), failed = 0;
    if (!tool.at || !args.at) {
        return CODE_INPUT;
    }
    TEXT(request, (1 << 20) + 64);
    put(&request, "{\"tool\":");
    put_span(&request, tool);
    put(&request, ",\"args\":");
    put_span(&request, args);
    put(&request, "}");
    span last = {"null", 4};
    for (int64_t i = 0; i < times; i++) {
        int32_t len = call_tool(&request, answer, sizeof answer);
        if (len < 0 && len != AGENTRT_EFAILED) {
            return -len;
        }
        failed += len < 0;
        last = len < 0 ? call_error(len, answer, sizeof answer) : (span){answer, (uint32_t)len};
        if (last.len > sizeof answer) {
            return CODE_LIMIT;
        }
    }
    TEXT(out, (1 << 20) + 64);
    put(&out, "{\"calls\":");
    put_int(&out, times);
    put(&out, ",\"failed\":");
    put_int(&out, failed);
    put(&out, ",\"last\":");
    put_span(&out, last);
    put(&out, "}");
    return set_output(&out);
}
