/* check.h: checks for C tests. A failed check names its place and ends the process with status 1; each test program is a process
 * of its own, so that is all a test needs. Checks may be used from any thread and stay on in every build type. */
#ifndef ART_TESTS_CHECK_H
#define ART_TESTS_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            (void)fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);        \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

/* With printf-style details. */
#define CHECK_MSG(condition, ...)                                                                \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            (void)fprintf(stderr, "%s:%d: failed: %s: ", __FILE__, __LINE__, #condition);        \
            (void)fprintf(stderr, __VA_ARGS__);                                                  \
            (void)fputc('\n', stderr);                                                           \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

/* Integers of any type; both values are shown, signed and in hexadecimal. */
#define CHECK_EQ(actual, expected)                                                               \
    do {                                                                                         \
        intmax_t actual_ = (intmax_t)(actual);                                                   \
        intmax_t expected_ = (intmax_t)(expected);                                               \
        CHECK_MSG(actual_ == expected_, "%s is %jd (0x%jx), expected %s = %jd (0x%jx)", #actual, \
                  actual_, (uintmax_t)actual_, #expected, expected_, (uintmax_t)expected_);      \
    } while (0)

#define CHECK_OK(call) CHECK_EQ(call, 0)

/* xorshift64*: a seed gives the same numbers everywhere; a seed of 0 is replaced. */
static inline uint64_t check_random(uint64_t *state)
{
    uint64_t x = *state != 0 ? *state : UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * UINT64_C(0x2545f4914f6cdd1d);
}

/* The seed of a randomised test: AGENTRT_TEST_SEED if set, else the default; printed, so that a failure can be repeated. */
static inline uint64_t check_seed(uint64_t otherwise)
{
    const char *text = getenv("AGENTRT_TEST_SEED");
    uint64_t seed = text != NULL && *text != '\0' ? strtoull(text, NULL, 0) : otherwise;
    (void)printf("AGENTRT_TEST_SEED=%ju\n", (uintmax_t)seed);
    (void)fflush(stdout);
    return seed;
}

#endif
