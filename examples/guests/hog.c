/* hog: arithmetic without a single syscall between start and end: what a scheduler must be able to interrupt.
 *
 * input  {"rounds": n}   0 or absent: for ever
 * output {"rounds": n, "value": the last 31 bits}
 */
#include "guest.h"

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[256];
    int64_t rounds = json_int(json_get(read_input(buf, sizeof buf), "rounds"), 0);
    uint64_t x = 0x9e3779b97f4a7c15u;
    for (int64_t round = 0; rounds <= 0 || round < rounds; round++) {
        x ^= x << 13; /* xorshift: no closed form the compiler could put in place of the loop */
        x ^= x >> 7;
        x ^= x << 17;
    }
    TEXT(out, 96);
    put(&out, "{\"rounds\":");
    put_int(&out, rounds);
    put(&out, ",\"value\":");
    put_int(&out, (int64_t)(x & 0x7fffffff));
    put(&out, "}");
    return set_output(&out);
}
