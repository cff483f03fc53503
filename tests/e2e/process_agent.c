/* What agentrt_process.h can do, for its tests: process_agent MODE. */
#include "agentrt_process.h"

static agentrt_answer answer;
static char text[1 << 16];

/* Four steps in flight, one of them given up; answers in their order, with clock and randomness around them. */
static int parallel(void)
{
    int handles[4], left = 3;
    unsigned char drawn[5];
    for (int i = 0; i < 4; i++) {
        snprintf(text, sizeof text, "{\"tool\":\"double\",\n\"args\":{\"x\":%d}}", i);
        handles[i] = agentrt_submit("tool.call", text);
    }
    agentrt_abandon(handles[3]);
    agentrt_log("info", "a \"line\"\twith\\ what JSON escapes");
    size_t length = (size_t)snprintf(text, sizeof text, "[%lld", (long long)agentrt_clock_now());
    while (left) {
        if (agentrt_wait_any(handles, left, &answer)) {
            return agentrt_stop(&answer);
        }
        length += (size_t)snprintf(text + length, sizeof text - length, ",[%d,%s]", answer.handle, answer.value);
        int at = 0;
        while (handles[at] != answer.handle) {
            at++;
        }
        handles[at] = handles[--left];
    }
    agentrt_random(drawn, sizeof drawn);
    snprintf(text + length, sizeof text - length, ",%lld,%u]", (long long)agentrt_clock_now(), drawn[0] + 256u * drawn[4]);
    return agentrt_return(text);
}

/* The length of what it got, twice: longer than any buffer to begin with. */
static int big(void)
{
    size_t length;
    const char *input = agentrt_input(&length);
    if (length != strlen(input) || agentrt_call("tool.call", input, &answer)) {
        return agentrt_fail("big", "the input, or its step");
    }
    snprintf(text, sizeof text, "[%zu,%zu]", length, answer.length);
    return agentrt_return(text);
}

static int segments(void)
{
    if (!agentrt_restored(NULL)) {
        agentrt_call("checkpoint", "{\"state\":{\"restored\":true}}", &answer);
        return 1;
    }
    return agentrt_return(agentrt_restored(NULL));
}

static int unwinds(void)
{
    if (agentrt_call("event.wait", "{\"key\":\"never\"}", &answer) == AGENTRT_EUNWIND) {
        snprintf(text, sizeof text, "{\"tool\":\"undo\",\"args\":{\"what\":%s}}", answer.value);
        agentrt_call("tool.call", text, &answer);
        return agentrt_unwound();
    }
    return 1;
}

int main(int argc, char **argv)
{
    agentrt_start();
    const char *mode = argc > 1 ? argv[1] : "";
    return !strcmp(mode, "parallel") ? parallel() : !strcmp(mode, "big") ? big() : !strcmp(mode, "segments") ? segments() : unwinds();
}
