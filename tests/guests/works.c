/* works: computes by what its input names, asking a tool now and then, and tells what it found. What suspends it must not
 * show: its stack is deep, its calls are indirect, its numbers of every kind.
 *
 * input  {"work": "sort" | "regex" | "json" | "loop", "size": n, "every": a tool call in so many operations, 0: none,
 *         "wait": 1: it waits for an event of its own, with the key go, instead}
 * output {"result": n}
 */
#include "guest.h"

typedef struct work {
    int64_t every, left, asked, wait;
} work;

static work now;
static uint32_t seed = 12345;
static double mean;
static float drift;

static uint32_t next_random(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

/* One operation: perhaps a tool call, whose answer is a number that goes into the result. */
__attribute__((noinline)) static int64_t tick(int64_t about)
{
    static char answer[256];
    mean = mean * 0.999 + (double)about * 0.001;
    drift += (float)(about & 7) * 0.5f;
    if (!now.every || --now.left > 0) {
        return 0;
    }
    now.left = now.every;
    TEXT(request, 128);
    if (now.wait) {
        put(&request, "{\"topic\":null,\"key\":\"go\"}");
        now.asked++;
        return agentrt_call(AGENTRT_EVENT_WAIT, request.at, (int32_t)request.len, answer, sizeof answer) < 0;
    }
    put(&request, "{\"tool\":\"number\",\"args\":{\"about\":");
    put_int(&request, about);
    put(&request, "}}");
    int32_t len = call_tool(&request, answer, sizeof answer);
    now.asked++;
    int64_t value = 0;
    for (int32_t i = 0; i < len && i < (int32_t)sizeof answer; i++) {
        value = value * 10 + (answer[i] >= '0' && answer[i] <= '9' ? answer[i] - '0' : 0);
    }
    return value;
}

/* --- sort: quicksort, its order called through a pointer ---------------------- */

enum { SORT_MAX = 20000 };
static int32_t numbers[SORT_MAX];
static int64_t told;

typedef int32_t (*order)(int32_t, int32_t);

static int32_t ascending(int32_t a, int32_t b)
{
    told += tick((int64_t)a - b);
    return a < b ? -1 : a > b;
}

static int32_t by_last_digit(int32_t a, int32_t b)
{
    told += tick(a ^ b);
    return a % 10 != b % 10 ? a % 10 - b % 10 : a < b ? -1 : a > b;
}

static void sort(int32_t *of, int64_t count, order compare)
{
    if (count < 2) {
        return;
    }
    int32_t pivot = of[count / 2];
    int64_t low = 0, high = count - 1;
    while (low <= high) {
        while (compare(of[low], pivot) < 0) {
            low++;
        }
        while (compare(of[high], pivot) > 0) {
            high--;
        }
        if (low <= high) {
            int32_t kept = of[low];
            of[low++] = of[high];
            of[high--] = kept;
        }
    }
    sort(of, high + 1, compare);
    sort(of + low, count - low, compare);
}

static int64_t work_sort(int64_t size)
{
    static const order orders[] = {ascending, by_last_digit};
    size = size > SORT_MAX ? SORT_MAX : size;
    int64_t sum = 0;
    for (int64_t i = 0; i < size; i++) {
        numbers[i] = (int32_t)next_random();
    }
    for (int round = 0; round < 2; round++) {
        sort(numbers, size, orders[round]);
        for (int64_t i = 0; i < size; i++) {
            sum = sum * 31 + numbers[i];
        }
    }
    return sum;
}

/* --- regex: a backtracking matcher of . * and letters ------------------------- */

static bool matches(const char *pattern, const char *text, int depth);

static bool matches_star(char c, const char *pattern, const char *text, int depth)
{
    do {
        told += tick(depth);
        if (matches(pattern, text, depth + 1)) {
            return true;
        }
    } while (*text && (*text++ == c || c == '.'));
    return false;
}

static bool matches(const char *pattern, const char *text, int depth)
{
    if (!*pattern) {
        return !*text;
    }
    if (pattern[1] == '*') {
        return matches_star(*pattern, pattern + 2, text, depth);
    }
    return *text && (*pattern == '.' || *pattern == *text) && matches(pattern + 1, text + 1, depth + 1);
}

static int64_t work_regex(int64_t size)
{
    static const char *const patterns[] = {"a*b*a*c", ".*a.*b.*c.*", "a*a*a*a*b", ".*cab.*"};
    char text[64];
    int64_t sum = 0;
    for (int64_t i = 0; i < size; i++) {
        uint32_t len = next_random() % 24;
        for (uint32_t k = 0; k < len; k++) {
            text[k] = (char)('a' + next_random() % 3);
        }
        text[len] = 0;
        for (int p = 0; p < 4; p++) {
            sum = sum * 3 + matches(patterns[p], text, 0);
        }
    }
    return sum;
}

/* --- json: built and read, recursively ---------------------------------------- */

static text document = {0};

static void build(int depth)
{
    told += tick(depth);
    if (depth == 0) {
        put_int(&document, next_random() % 1000);
        return;
    }
    put_char(&document, '[');
    for (int i = 0; i < 3; i++) {
        if (i) {
            put_char(&document, ',');
        }
        build(depth - 1);
    }
    put_char(&document, ']');
}

static int64_t total(const char **at)
{
    int64_t sum = 0;
    told += tick(**at);
    if (**at != '[') {
        while (**at >= '0' && **at <= '9') {
            sum = sum * 10 + (*(*at)++ - '0');
        }
        return sum;
    }
    do {
        (*at)++;
        sum = sum * 7 + total(at);
    } while (**at == ',');
    (*at)++;
    return sum;
}

static int64_t work_json(int64_t size)
{
    static char room[1 << 16];
    int64_t sum = 0;
    for (int64_t i = 0; i < size; i++) {
        document = (text){room, 0, sizeof room - 1, false};
        build(5);
        room[document.len] = 0;
        const char *at = room;
        sum = sum * 31 + total(&at);
    }
    return sum;
}

/* --- loop: an interpreter's ---------------------------------------------------- */

typedef struct machine {
    int64_t stack[16];
    int32_t top, at;
} machine;

static void op_push(machine *m, int32_t value)
{
    m->stack[m->top++ & 15] = value;
}

static void op_add(machine *m, int32_t value)
{
    m->stack[(m->top - 1) & 15] += value;
}

static void op_multiply(machine *m, int32_t value)
{
    m->stack[(m->top - 1) & 15] = m->stack[(m->top - 1) & 15] * value % 1000003;
}

static void op_ask(machine *m, int32_t value)
{
    m->stack[(m->top - 1) & 15] += tick(value);
}

static int64_t work_loop(int64_t size)
{
    static void (*const ops[])(machine *, int32_t) = {op_push, op_add, op_multiply, op_ask};
    static const struct {
        int32_t op, value;
    } program[] = {{0, 1}, {1, 7}, {2, 31}, {3, 5}, {1, 11}, {2, 17}, {3, 9}};
    machine m = {{0}, 0, 0};
    for (int64_t i = 0; i < size; i++) {
        for (m.at = 0; m.at < (int32_t)(sizeof program / sizeof *program); m.at++) {
            ops[program[m.at].op](&m, program[m.at].value);
        }
    }
    int64_t sum = 0;
    for (int i = 0; i < 16; i++) {
        sum = sum * 31 + m.stack[i];
    }
    return sum;
}

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[4096];
    span input = read_input(buf, sizeof buf), what = json_get(input, "work");
    int64_t size = json_int(json_get(input, "size"), 100);
    now.every = now.left = json_int(json_get(input, "every"), 0);
    now.wait = json_int(json_get(input, "wait"), 0);
    int64_t result = span_is(what, "\"sort\"")    ? work_sort(size)
                     : span_is(what, "\"regex\"") ? work_regex(size)
                     : span_is(what, "\"json\"")  ? work_json(size)
                                                  : work_loop(size);
    TEXT(out, 256);
    put(&out, "{\"result\":");
    put_int(&out, result);
    put(&out, ",\"told\":");
    put_int(&out, told);
    put(&out, ",\"asked\":");
    put_int(&out, now.asked);
    put(&out, ",\"mean\":");
    put_int(&out, (int64_t)(mean * 1000));
    put(&out, ",\"drift\":");
    put_int(&out, (int64_t)drift);
    put(&out, "}");
    return set_output(&out);
}
