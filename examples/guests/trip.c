/* trip: books the parts of a trip one after the other, and cancels them if it is ended before it has them all.
 *
 * input  {"order": text, "parts": [text, …]}   at most 32 parts
 * tools  trip_book {"order": text, "part": text}, trip_cancel {"order": text, "part": text}, both keyed; any answer.
 *        trip_cancel of what was never booked does nothing.
 * output {"order": text, "booked": n}
 *
 * A part counts as booked from before it is asked for: a run can be ended while the answer is on its way, and then nobody can say
 * here whether there is a booking. When a booking fails the trip is given up the same way.
 */
#include "guest.h"

enum { PARTS_MAX = 32 };

static char buf[8192], answer[4096];
static span order, parts[PARTS_MAX];
static int booked;

/* tool {"order": …, "part": …}: 0, or what agentrt_call said. */
static int32_t ask(const char *tool, span part)
{
    TEXT(request, 8704);
    put(&request, "{\"tool\":\"");
    put(&request, tool);
    put(&request, "\",\"args\":{\"order\":");
    put_span(&request, order);
    put(&request, ",\"part\":");
    put_span(&request, part);
    put(&request, "}}");
    int32_t len = call_tool(&request, answer, sizeof answer);
    if (len < 0) {
        log_line("error", "trip: failed: ", call_error(len, answer, sizeof answer));
    }
    return len < 0 ? len : 0;
}

/* The runtime calls it when the run is told to end, with the memory as the program left it: last in, first out. */
AGENTRT_EXPORT(agentrt_unwind)
int32_t agentrt_unwind(void)
{
    int32_t left = 0;
    for (; booked; booked--) { /* not before it is done: this may be the program's own call, and be stopped too */
        left += ask("trip_cancel", parts[booked - 1]) != 0;
    }
    return left; /* shown with the run's end */
}

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    span input = read_input(buf, sizeof buf);
    order = json_get(input, "order");
    span list = json_get(input, "parts");
    int count = 0;
    if (!order.at || !list.at || list.at[0] != '[') {
        return CODE_INPUT;
    }
    const char *end = list.at + list.len, *at = skip_space(list.at + 1, end);
    while (at < end && *at == '"' && count < PARTS_MAX) {
        const char *part = at;
        at = skip_value(at, end);
        parts[count++] = (span){part, (uint32_t)(at - part)};
        at = skip_space(at, end);
        at = at < end && *at == ',' ? skip_space(at + 1, end) : at;
    }
    if (at >= end || *at != ']') {
        return CODE_INPUT;
    }
    while (booked < count) {
        if (ask("trip_book", parts[booked++])) {
            agentrt_unwind();
            return CODE_TOOL;
        }
    }
    TEXT(out, 8704);
    put(&out, "{\"order\":");
    put_span(&out, order);
    put(&out, ",\"booked\":");
    put_int(&out, booked);
    put(&out, "}");
    return set_output(&out);
}
