/* crc32c.c: CRC-32C for frames (frame.h). With the processor's instruction three stretches of a page at once, for one
 * takes three cycles, then put together by tables that shift a CRC over a stretch of zeros; without it eight tables. */
#include "frame.h"

#include <pthread.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#define POLY 0x82f63b78u /* reflected */
/* A page is three of these and 16 bytes. */
#define LANE_BYTES 1360

static uint32_t plain[8][256];
static uint32_t shift_one[4][256], shift_two[4][256]; /* over LANE_BYTES zeros, and over twice that */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t (*best)(uint32_t, const uint8_t *, size_t);

/* On and by complemented CRCs, as all below. */
static uint32_t run_plain(uint32_t crc, const uint8_t *at, size_t len)
{
    for (; len >= 8; at += 8, len -= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= crc;
        crc = plain[7][word & 255] ^ plain[6][word >> 8 & 255] ^ plain[5][word >> 16 & 255] ^ plain[4][word >> 24 & 255] ^
              plain[3][word >> 32 & 255] ^ plain[2][word >> 40 & 255] ^ plain[1][word >> 48 & 255] ^ plain[0][word >> 56];
    }
    while (len--) {
        crc = crc >> 8 ^ plain[0][(crc ^ *at++) & 255];
    }
    return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)

#if defined(__x86_64__)
#define TARGET __attribute__((target("sse4.2")))
#define STEP8(crc, word) __builtin_ia32_crc32di((crc), (word))
#define STEP1(crc, byte) __builtin_ia32_crc32qi((crc), (byte))
#else
#define TARGET __attribute__((target("+crc")))
#define STEP8(crc, word) __crc32cd((uint32_t)(crc), (word))
#define STEP1(crc, byte) __crc32cb((crc), (byte))
#endif

static uint32_t shifted(uint32_t table[4][256], uint32_t crc)
{
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24];
}

TARGET static uint32_t run_hardware(uint32_t crc, const uint8_t *at, size_t len)
{
    for (; len >= (size_t)3 * LANE_BYTES; at += 3 * LANE_BYTES, len -= (size_t)3 * LANE_BYTES) {
        uint64_t first = crc, second = 0, third = 0;
        for (size_t i = 0; i < LANE_BYTES; i += 8) {
            uint64_t a, b, c;
            memcpy(&a, at + i, 8);
            memcpy(&b, at + LANE_BYTES + i, 8);
            memcpy(&c, at + 2 * LANE_BYTES + i, 8);
            first = STEP8(first, a);
            second = STEP8(second, b);
            third = STEP8(third, c);
        }
        crc = shifted(shift_two, (uint32_t)first) ^ shifted(shift_one, (uint32_t)second) ^ (uint32_t)third;
    }
    for (; len >= 8; at += 8, len -= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        crc = (uint32_t)STEP8(crc, word);
    }
    while (len--) {
        crc = STEP1(crc, *at++);
    }
    return crc;
}

static bool has_hardware(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#else
    return getauxval(AT_HWCAP) & 1u << 7; /* HWCAP_CRC32 */
#endif
}

#endif

/* A CRC is linear: what each of its bytes becomes by so many zeros, by running them. */
static void make_shift(uint32_t table[4][256], size_t zeros)
{
    static const uint8_t nothing[2 * LANE_BYTES];
    uint32_t bits[32];
    for (int bit = 0; bit < 32; bit++) {
        bits[bit] = run_plain(1u << bit, nothing, zeros);
    }
    for (int byte = 0; byte < 4; byte++) {
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t sum = 0;
            for (int bit = 0; bit < 8; bit++) {
                sum ^= value >> bit & 1 ? bits[byte * 8 + bit] : 0;
            }
            table[byte][value] = sum;
        }
    }
}

static void make(void)
{
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? POLY : 0);
        }
        plain[0][value] = crc;
    }
    for (uint32_t value = 0; value < 256; value++) {
        for (int i = 1; i < 8; i++) {
            plain[i][value] = plain[i - 1][value] >> 8 ^ plain[0][plain[i - 1][value] & 255];
        }
    }
    make_shift(shift_one, LANE_BYTES);
    make_shift(shift_two, (size_t)2 * LANE_BYTES);
    best = run_plain;
#if defined(__x86_64__) || defined(__aarch64__)
    best = has_hardware() ? run_hardware : run_plain;
#endif
}

uint32_t art_crc32c(uint32_t crc, const void *bytes, size_t len)
{
    pthread_once(&once, make);
    return ~best(~crc, bytes, len);
}

uint32_t art_crc32c_plain(uint32_t crc, const void *bytes, size_t len)
{
    pthread_once(&once, make);
    return ~run_plain(~crc, bytes, len);
}
