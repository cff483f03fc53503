/* non_deterministic: what it does depends on the pure tool "dice" {}, an int. Where that tool is not pure, a replay after
 * the first ledger_add asks for something else than the journal says.
 *
 * input  {"steps": n}   default 3
 */
#include "guest.h"

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[1024], answer[1024];
    int64_t steps = json_int(json_get(read_input(buf, sizeof buf), "steps"), 3);
    for (int64_t step = 1; step <= steps; step++) {
        TEXT(dice, 64);
        put(&dice, "{\"tool\":\"dice\",\"args\":{}}");
        int32_t len = call_tool(&dice, answer, sizeof answer);
        if (len < 0 || len > (int32_t)sizeof answer) {
            return CODE_TOOL;
        }
        TEXT(request, 256);
        put(&request, "{\"tool\":\"ledger_add\",\"args\":{\"order\":\"dice\",\"place\":");
        put_span(&request, (span){answer, (uint32_t)len});
        put(&request, "}}");
        if (call_tool(&request, answer, sizeof answer) < 0) {
            return CODE_TOOL;
        }
    }
    return 0;
}
