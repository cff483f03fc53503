/* errand: twelve steps of every kind in one run: effects, a checkpoint, a lock, a timer, an approval and two children,
 * which are errands too.
 *
 * input  {"order": text}, of a child {"order": text, "place": n}
 * tools  errand_keyed, errand_reconcilable, errand_at_most_once {"order": text, "place": n}; any answer. The first two
 *        must succeed.
 * output {"order": text, "approved": bool, "children": [n, n]}, of a child its place
 *
 * The lock is "dock"; both children take it, the first one waits until its parent has slept and released it.
 */
#include "guest.h"

static char buf[4096], answer[4096];
static span order;

static int32_t ask(int32_t op, const text *request)
{
    int32_t len = AGENTRT_E2BIG;
    if (!request->full) {
        len = agentrt_call(op, request->at, (int32_t)request->len, answer, sizeof answer);
    }
    if (len < 0) {
        log_line("error", "errand: failed: ", call_error(len, answer, sizeof answer));
    }
    return len;
}

static int32_t effect(const char *kind, int64_t place)
{
    TEXT(request, 4608);
    put(&request, "{\"tool\":\"errand_");
    put(&request, kind);
    put(&request, "\",\"args\":{\"order\":");
    put_span(&request, order);
    put(&request, ",\"place\":");
    put_int(&request, place);
    put(&request, "}}");
    return ask(AGENTRT_TOOL_CALL, &request);
}

/* The token; negative: it was not acquired. */
static int64_t acquire(void)
{
    TEXT(request, 64);
    put(&request, "{\"name\":\"dock\"}");
    int32_t len = ask(AGENTRT_LOCK_ACQUIRE, &request);
    return len < 0 ? len : json_int(json_get((span){answer, (uint32_t)len}, "token"), -1);
}

static int32_t release(int64_t token)
{
    TEXT(request, 128);
    put(&request, "{\"name\":\"dock\",\"token\":");
    put_int(&request, token);
    put(&request, "}");
    return ask(AGENTRT_LOCK_RELEASE, &request);
}

/* The child's id, as the JSON string it is, in `to`. */
static int32_t spawn(int64_t place, text *to)
{
    TEXT(request, 4608);
    put(&request, "{\"agent\":\"errand\",\"input\":{\"order\":");
    put_span(&request, order);
    put(&request, ",\"place\":");
    put_int(&request, place);
    put(&request, "}}");
    int32_t len = ask(AGENTRT_RUN_SPAWN, &request);
    if (len >= 0) {
        put_span(to, json_get((span){answer, (uint32_t)len}, "run_id"));
    }
    return len;
}

static int32_t join(const text *child, text *result)
{
    TEXT(request, 256);
    put(&request, "{\"run_id\":");
    put_span(&request, (span){child->at, child->len});
    put(&request, "}");
    int32_t len = ask(AGENTRT_RUN_JOIN, &request);
    if (len >= 0) {
        put_span(result, (span){answer, (uint32_t)len});
    }
    return len;
}

static int32_t child(int64_t place)
{
    int64_t token = acquire();
    if (token < 0 || effect("keyed", place) < 0 || release(token) < 0) {
        return CODE_TOOL;
    }
    TEXT(out, 32);
    put_int(&out, place);
    return set_output(&out);
}

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    span input = read_input(buf, sizeof buf);
    order = json_get(input, "order");
    int64_t place = json_int(json_get(input, "place"), 0);
    if (!order.at) {
        return CODE_INPUT;
    }
    if (place) {
        return child(place);
    }
    char state[16];
    if (agentrt_restored(0, state, sizeof state) < 0) {
        if (effect("keyed", 1) < 0) {
            return CODE_TOOL;
        }
        TEXT(begun, 32);
        put(&begun, "{\"state\":\"begun\"}");
        ask(AGENTRT_CHECKPOINT, &begun); /* does not return: the guest begins again */
        return CODE_ANSWER;
    }
    TEXT(first, 64);
    TEXT(second, 64);
    TEXT(sleep, 32);
    TEXT(question, 64);
    TEXT(out, 4608);
    put(&sleep, "{\"seconds\":0.06}");
    put(&question, "{\"question\":\"go on?\"}");
    int64_t token = acquire();
    if (token < 0 || spawn(5, &first) < 0 || effect("reconcilable", 2) < 0 || ask(AGENTRT_TIMER_SLEEP, &sleep) < 0 ||
        release(token) < 0 || spawn(6, &second) < 0) {
        return CODE_TOOL;
    }
    int32_t len = ask(AGENTRT_APPROVAL_REQUEST, &question);
    if (len < 0) {
        return CODE_ANSWER;
    }
    put(&out, "{\"order\":");
    put_span(&out, order);
    put(&out, ",\"approved\":");
    put_span(&out, json_get((span){answer, (uint32_t)len}, "approved"));
    effect("at_most_once", 3); /* who knows whether it happened is an operator, who may have given it up */
    put(&out, ",\"children\":[");
    if (join(&first, &out) < 0) {
        return CODE_TOOL;
    }
    put(&out, ",");
    if (join(&second, &out) < 0 || effect("keyed", 4) < 0) {
        return CODE_TOOL;
    }
    put(&out, "]}");
    return set_output(&out);
}
