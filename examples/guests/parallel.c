/* parallel: several tool calls in flight at once, their answers taken in the order in which they come.
 *
 * input  {"order": text, "calls": n}   n 1 to 32, default 4
 * tools  ledger_add {"order": text, "place": 1 to n}, keyed; any answer
 * output {"places": [in the order of their answers], "failed": how many}
 */
#include "guest.h"

#define CALLS_MAX 32

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[4096], answer[4096];
    span input = read_input(buf, sizeof buf);
    int64_t calls = json_int(json_get(input, "calls"), 4);
    span order = json_get(input, "order");
    if (!order.at || calls < 1 || calls > CALLS_MAX) {
        return CODE_INPUT;
    }
    int32_t handles[CALLS_MAX], places[CALLS_MAX];
    for (int32_t i = 0; i < calls; i++) {
        TEXT(request, 4608);
        put(&request, "{\"tool\":\"ledger_add\",\"args\":{\"order\":");
        put_span(&request, order);
        put(&request, ",\"place\":");
        put_int(&request, i + 1);
        put(&request, "}}");
        handles[i] = request.full ? AGENTRT_E2BIG
                                  : agentrt_submit(AGENTRT_TOOL_CALL, request.at, (int32_t)request.len);
        if (handles[i] < 0) {
            return CODE_TOOL;
        }
        places[i] = i + 1;
    }
    TEXT(out, 512);
    put(&out, "{\"places\":[");
    int32_t failed = 0;
    for (int32_t left = (int32_t)calls; left > 0; left--) {
        int32_t which = agentrt_wait_any(handles, left);
        if (which < 0) {
            return CODE_ANSWER;
        }
        failed += agentrt_read(handles[which], 0, answer, sizeof answer) == AGENTRT_EFAILED;
        agentrt_close(handles[which]);
        if (left < calls) {
            put(&out, ",");
        }
        put_int(&out, places[which]);
        handles[which] = handles[left - 1]; /* the last one takes the place of the one that is answered */
        places[which] = places[left - 1];
    }
    put(&out, "],\"failed\":");
    put_int(&out, failed);
    put(&out, "}");
    return set_output(&out);
}
