/* primes: counts the primes below a number, for as long as it takes.
 *
 * input   a number
 * tools   double {"x": number}: its double
 * result  {"primes": n, "double": 2 n, "restored": whether it was put away meanwhile}
 *
 * A long computation whose state is two numbers, so it hands them over when more urgent work needs the CPU. Register it
 * with preempt = "snapshot".   cc -O2 -I csrc -o primes examples/processes/primes.c
 */
#include "agentrt_process.h"

int main(void)
{
    char text[160];
    long at = 2, primes = 0;
    agentrt_answer answer;
    agentrt_start();
    long below = strtol(agentrt_input(NULL), NULL, 10);
    if (agentrt_restored(NULL)) {
        sscanf(agentrt_restored(NULL), "[%ld,%ld]", &at, &primes);
    }
    for (; at < below; at++) {
        int prime = 1;
        for (long by = 2; prime && by * by <= at; by++) {
            prime = at % by != 0;
        }
        primes += prime;
        if (agentrt_noticed()) {
            snprintf(text, sizeof text, "[%ld,%ld]", at + 1, primes);
            agentrt_snapshot(text);
        }
    }
    snprintf(text, sizeof text, "{\"tool\":\"double\",\"args\":{\"x\":%ld}}", primes);
    if (agentrt_call("tool.call", text, &answer)) {
        return agentrt_stop(&answer);
    }
    snprintf(text, sizeof text, "{\"primes\":%ld,\"double\":%.40s,\"restored\":%s}", primes, answer.value,
             agentrt_restored(NULL) ? "true" : "false");
    return agentrt_return(text);
}
