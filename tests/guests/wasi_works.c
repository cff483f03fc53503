/* wasi_works: a program for WASI, without a C library: reads a file in parts, tells on stdout what it read, and adds up random
 * numbers and the clock between. It never waits, so it can only be captured in its loops.
 */
#include <stdint.h>

#define IMPORT(name) __attribute__((import_module("wasi_snapshot_preview1"), import_name(#name)))

typedef struct part {
    void *at;
    uint32_t len;
} part;

IMPORT(path_open)
int32_t path_open(int32_t, int32_t, const char *, uint32_t, int32_t, uint64_t, uint64_t, int32_t, int32_t *);
IMPORT(fd_read) int32_t fd_read(int32_t, const part *, uint32_t, uint32_t *);
IMPORT(fd_write) int32_t fd_write(int32_t, const part *, uint32_t, uint32_t *);
IMPORT(random_get) int32_t random_get(void *, uint32_t);
IMPORT(clock_time_get) int32_t clock_time_get(int32_t, uint64_t, uint64_t *);
IMPORT(proc_exit) _Noreturn void proc_exit(int32_t);

static void say(const char *what, uint64_t value)
{
    char line[64];
    uint32_t len = 0, done;
    while (what[len]) {
        line[len] = what[len];
        len++;
    }
    char digits[20];
    int count = 0;
    do {
        digits[count++] = (char)('0' + value % 10);
        value /= 10;
    } while (value);
    while (count) {
        line[len++] = digits[--count];
    }
    line[len++] = '\n';
    part out = {line, len};
    fd_write(1, &out, 1, &done);
}

static uint64_t sum;

__attribute__((noinline)) static uint64_t stir(uint64_t of, uint32_t rounds)
{
    for (uint32_t i = 0; i < rounds; i++) {
        of = (of ^ of >> 7) * 0x9E3779B97F4A7C15u + i;
        sum += of & 1;
    }
    return of;
}

__attribute__((export_name("_start"))) void start(void)
{
    static char room[37];
    int32_t fd;
    uint64_t clock, dice;
    uint32_t len;
    if (path_open(3, 0, "text", 4, 0, 2, 0, 0, &fd)) {
        proc_exit(1);
    }
    for (int i = 0; i < 400; i++) {
        part in = {room, sizeof room};
        if (fd_read(fd, &in, 1, &len) || random_get(&dice, sizeof dice) || clock_time_get(1, 0, &clock)) {
            proc_exit(2);
        }
        uint64_t read = len;
        for (uint32_t k = 0; k < len; k++) {
            read = read * 31 + (unsigned char)room[k];
        }
        say("read ", read);
        say("dice ", stir(dice, 2000));
        say("clock ", clock);
    }
    say("sum ", sum);
    proc_exit(0);
}
