/* sequence: performs the syscalls that its input lists, one after the other, and returns their answers. What an agent
 * may do, for trying it out.
 *
 * input  [[op, request], …]: op is a number of agentrt_op, request the JSON object to send. A member of it that is "$N"
 *        stands for answer N (from 1), one that is "$N.name" for the member of that name of an answer that is an object.
 * output [answer, …]; for one that failed {"error": its error}
 *
 * After a checkpoint the guest begins again; it then goes on behind the checkpoint, whose state must be the number of
 * steps done so far, itself included. Their answers are null in the output and may not be referred to.
 */
#include "guest.h"

#define STEPS_MAX 64
#define ANSWERS_BYTES (1u << 20)

static char input[1u << 16];
static char request[1u << 16];
static char answers[ANSWERS_BYTES];
static uint32_t starts[STEPS_MAX + 1];
static uint32_t used;
static char output[ANSWERS_BYTES + 4096];

/* The end of the JSON value that begins at `at`. */
static uint32_t value_end(const char *text, uint32_t at)
{
    uint32_t depth = 0;
    do {
        char c = text[at];
        if (c == '"') {
            for (at++; text[at] && text[at] != '"'; at++) {
                if (text[at] == '\\') {
                    at++;
                }
            }
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            depth--;
        } else if (depth == 0) { /* a number, true, false or null */
            while (text[at] && text[at] != ',' && text[at] != ']' && text[at] != '}') {
                at++;
            }
            return at;
        }
        if (!text[at]) {
            return at;
        }
        at++;
    } while (depth);
    return at;
}

/* The member of the object at `at`; 0 if it has none of that name. Values are as the runtime writes them: no spaces. */
static uint32_t member(const char *text, uint32_t at, const char *name, uint32_t length)
{
    if (text[at] != '{') {
        return 0;
    }
    at++;
    while (text[at] == '"') {
        uint32_t end = value_end(text, at);
        uint32_t same = end - at - 2 == length;
        for (uint32_t i = 0; same && i < length; i++) {
            same = text[at + 1 + i] == name[i];
        }
        at = end + 1;
        if (same) {
            return at;
        }
        at = value_end(text, at);
        if (text[at] == ',') {
            at++;
        }
    }
    return 0;
}

/* Copy the request with its references replaced. Returns its length, 0 if it does not fit. */
static uint32_t fill(const char *from, uint32_t length)
{
    uint32_t to = 0, depth = 0;
    for (uint32_t i = 0; i < length;) {
        if (from[i] == '"' && (from[i + 1] != '$' || depth != 1)) {
            for (uint32_t end = value_end(from, i); i < end && to < sizeof request;) {
                request[to++] = from[i++];
            }
        } else if (from[i] == '"') {
            uint32_t end = value_end(from, i), at = i + 2, number = 0;
            while (from[at] >= '0' && from[at] <= '9') {
                number = number * 10 + (uint32_t)(from[at++] - '0');
            }
            uint32_t begin = number && number < STEPS_MAX ? starts[number - 1] : 0;
            if (from[at] == '.') {
                begin = member(answers, begin, from + at + 1, end - at - 2);
            }
            uint32_t stop = value_end(answers, begin);
            while (begin < stop && to < sizeof request) {
                request[to++] = answers[begin++];
            }
            i = end;
        } else if (to < sizeof request) {
            depth += from[i] == '{' || from[i] == '[';
            depth -= from[i] == '}' || from[i] == ']';
            request[to++] = from[i++];
        } else {
            return 0;
        }
    }
    return to;
}

static void keep(const char *text, uint32_t length)
{
    for (uint32_t i = 0; i < length && used + 1 < ANSWERS_BYTES; i++) {
        answers[used++] = text[i];
    }
}

AGENTRT_EXPORT(agentrt_run) int32_t agentrt_run(void)
{
    int32_t length = agentrt_input(0, input, sizeof input - 1);
    if (length < 0 || length >= (int32_t)sizeof input || input[0] != '[') {
        return 1;
    }
    char state[16];
    int32_t state_length = agentrt_restored(0, state, sizeof state - 1);
    uint32_t done = 0;
    for (int32_t i = 0; i < state_length && state[i] >= '0' && state[i] <= '9'; i++) {
        done = done * 10 + (uint32_t)(state[i] - '0');
    }
    uint32_t at = 1, count = 0;
    while (input[at] == '[' && count < STEPS_MAX) {
        at++;
        int32_t op = 0;
        while (input[at] >= '0' && input[at] <= '9') {
            op = op * 10 + (input[at++] - '0');
        }
        at++;
        uint32_t end = value_end(input, at);
        starts[count] = used;
        if (count < done) {
            keep("null", 4);
        } else {
            uint32_t size = fill(input + at, end - at);
            static char answer[1u << 16];
            int32_t got = agentrt_call(op, request, (int32_t)size, answer, sizeof answer);
            if (got >= 0) {
                keep(answer, (uint32_t)got < sizeof answer ? (uint32_t)got : sizeof answer);
            } else {
                agentrt_read(0, 0, answer, sizeof answer);
                keep("{\"error\":", 9);
                keep(answer, value_end(answer, 0));
                keep("}", 1);
            }
        }
        count++;
        starts[count] = used;
        at = end + 1;
        if (input[at] == ',') {
            at++;
        }
    }
    uint32_t to = 0;
    output[to++] = '[';
    for (uint32_t i = 0; i < count; i++) {
        if (i) {
            output[to++] = ',';
        }
        for (uint32_t j = starts[i]; j < starts[i + 1]; j++) {
            output[to++] = answers[j];
        }
    }
    output[to++] = ']';
    return agentrt_output(output, (int32_t)to) < 0 ? 2 : 0;
}
