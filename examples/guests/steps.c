/* steps: an agent of n steps, each with an effect that must happen once: the shape of most real agents.
 *
 * input  {"order": text, "steps": n}   n 0 to 10,000, default 6
 * tools  ledger_add {"order": text, "place": 1 to n}, keyed; any answer
 * output {"order": text, "steps": n}
 */
#include "guest.h"

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[4096], answer[4096];
    span input = read_input(buf, sizeof buf);
    int64_t steps = json_int(json_get(input, "steps"), 6);
    span order = json_get(input, "order");
    if (!order.at || steps < 0 || steps > 10000) {
        return CODE_INPUT;
    }
    for (int64_t step = 1; step <= steps; step++) {
        TEXT(request, 4608);
        put(&request, "{\"tool\":\"ledger_add\",\"args\":{\"order\":");
        put_span(&request, order);
        put(&request, ",\"place\":");
        put_int(&request, step);
        put(&request, "}}");
        int32_t len = call_tool(&request, answer, sizeof answer);
        if (len < 0) {
            log_line("error", "steps: ledger_add failed: ", call_error(len, answer, sizeof answer));
            return CODE_TOOL;
        }
    }
    TEXT(out, 4608);
    put(&out, "{\"order\":");
    put_span(&out, order);
    put(&out, ",\"steps\":");
    put_int(&out, steps);
    put(&out, "}");
    return set_output(&out);
}
