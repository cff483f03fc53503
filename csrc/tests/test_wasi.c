/* WASI preview 1: images, and every import as a guest sees it. Needs AGENTRT_WASMTIME_LIB. */
#include <stdbool.h>
#include <string.h>

#include "art_err.h"
#include "check.h"
#include "guest.h"
#include "guests.h"

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

enum { SLICE = 50000, MEMORY = 4 << 16, REQUEST_MAX = 1 << 20, LINES_MAX = 400 };
enum { SUCCESS, E2BIG = 1, EBADF = 8, EFAULT = 21, EFBIG = 22, EINVAL = 28, EISDIR = 31, EMFILE = 33, ENAMETOOLONG = 37, ENOENT = 44,
       ENOSYS = 52, ENOTDIR = 54, ENOTSOCK = 57, ENOTSUP = 58, EROFS = 69, ESPIPE = 70, ENOTCAPABLE = 76 };

static art_engine *engine;
static art_module *modules[GUEST_COUNT];
static const uint64_t CLOCK = UINT64_C(1700000000) * 1000000000;

static art_module *load(enum guest_name name, const char *entry, int expected, const char *says)
{
    uint8_t *artifact = NULL;
    size_t len = 0;
    char msg[ART_MSG_BYTES] = "";
    art_module *made = NULL;
    CHECK_MSG(art_engine_compile(engine, guests[name].bytes, guests[name].len, &artifact, &len, msg, sizeof msg) == 0, "%s",
              msg);
    int err = entry ? art_module_load_reactor(engine, artifact, len, entry, &made, msg, sizeof msg)
                    : art_module_load(engine, artifact, len, &made, msg, sizeof msg);
    CHECK_MSG(err == expected, "%s: %d %s", guests[name].name, err, msg);
    CHECK_MSG(!says || strstr(msg, says), "%s: \"%s\"", guests[name].name, msg);
    free(artifact);
    return made;
}

static art_module *module(enum guest_name name)
{
    return modules[name] ? modules[name] : (modules[name] = load(name, NULL, 0, NULL));
}

/* --- images ------------------------------------------------------------------- */

#define TEXT(s) {s, sizeof s - 1}
#define FILE_(name, content) {TEXT(name), (const uint8_t *)(content), sizeof(content) - 1}

static art_wasi_image *image_new(art_wasi_config config, int expected, const char *says)
{
    art_wasi_image *image = NULL;
    char msg[200] = "";
    int err = art_wasi_image_new(&config, &image, msg, sizeof msg);
    CHECK_MSG(err == expected && (err == 0) == (image != NULL), "%d, expected %d: %s", err, expected, msg);
    CHECK_MSG(!says || strstr(msg, says), "\"%s\"", msg);
    return image;
}

static const art_wasi_text args[] = {TEXT("prog"), TEXT("-c"), TEXT("")};
static const art_wasi_text env[] = {TEXT("HOME=/"), TEXT("EMPTY=")};
static const art_wasi_file files[] = {
    FILE_("lib/b.py", "bee"), FILE_("main.py", "hello, world"), FILE_("lib/a.py", "a"), FILE_("lib.txt", "not lib"),
    FILE_("lib/deep/er/x", ""),
};

static art_wasi_image *usual_image(void)
{
    art_wasi_config config = {args, env, files, 3, 2, 5};
    return image_new(config, 0, NULL);
}

static void refused_file(const char *path, uint32_t len, int err, const char *says)
{
    art_wasi_file both[] = {{{"x", 1}, (const uint8_t *)"", 0}, {{path, len}, (const uint8_t *)"", 0}};
    image_new((art_wasi_config){.files = both, .files_count = 2}, err, says);
}

static void test_images_are_checked(void)
{
    art_wasi_image_release(NULL);
    CHECK(art_wasi_image_retain(NULL) == NULL);
    art_wasi_image_release(image_new((art_wasi_config){0}, 0, NULL));
    art_wasi_image *image = usual_image();
    art_wasi_image_release(art_wasi_image_retain(image));
    art_wasi_image_release(image);

    art_wasi_text nul[] = {{"a\0b=", 4}}, nameless[] = {TEXT("=x")}, valueless[] = {TEXT("x")};
    image_new((art_wasi_config){.args = nul, .args_count = 1}, ART_EINVAL, "NUL");
    image_new((art_wasi_config){.env = nul, .env_count = 1}, ART_EINVAL, "NUL");
    image_new((art_wasi_config){.env = nameless, .env_count = 1}, ART_EINVAL, "NAME=value");
    image_new((art_wasi_config){.env = valueless, .env_count = 1}, ART_EINVAL, "NAME=value");

    static art_wasi_text many[ART_WASI_STRINGS_MAX + 1];
    static char megabyte[1 << 20];
    memset(megabyte, 'x', sizeof megabyte);
    image_new((art_wasi_config){.args = many, .args_count = ART_WASI_STRINGS_MAX + 1}, ART_ELIMIT, "1025");
    art_wasi_image_release(image_new((art_wasi_config){.args = many, .args_count = ART_WASI_STRINGS_MAX}, 0, NULL));
    many[0] = (art_wasi_text){megabyte, sizeof megabyte};
    image_new((art_wasi_config){.args = many, .args_count = 1}, ART_ELIMIT, "1048577");
    many[0].len--;
    art_wasi_image_release(image_new((art_wasi_config){.args = many, .args_count = 1}, 0, NULL));

    refused_file("", 0, ART_EINVAL, "empty name");
    refused_file("/a", 2, ART_EINVAL, "empty name");
    refused_file("a/", 2, ART_EINVAL, "empty name");
    refused_file("a//b", 4, ART_EINVAL, "empty name");
    refused_file("a/../b", 6, ART_EINVAL, "\"..\"");
    refused_file(".", 1, ART_EINVAL, "\".\"");
    refused_file("a\0b", 3, ART_EINVAL, "NUL");
    refused_file("x", 1, ART_EINVAL, "twice");
    refused_file("x/y", 3, ART_EINVAL, "directory too");
    refused_file(megabyte, 256, ART_ELIMIT, "255");
    refused_file(megabyte, 1025, ART_ELIMIT, "1024");
    refused_file("a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a/a", 65, ART_ELIMIT, "names");
    static art_wasi_file lots[ART_WASI_FILES_MAX + 1];
    static char names[ART_WASI_FILES_MAX + 1][16];
    for (int i = 0; i <= ART_WASI_FILES_MAX; i++) {
        int len = snprintf(names[i], sizeof names[i], "d%d/f%d", (i * 7) % 100, i);
        lots[i] = (art_wasi_file){{names[i], (uint32_t)len}, (const uint8_t *)names[i], (uint32_t)len};
    }
    image_new((art_wasi_config){.files = lots, .files_count = ART_WASI_FILES_MAX + 1}, ART_ELIMIT, "4097");
    art_wasi_image_release(image_new((art_wasi_config){.files = lots, .files_count = ART_WASI_FILES_MAX}, 0, NULL));
    lots[3].len = ART_WASI_FILE_BYTES_MAX + 1; /* refused before it is read */
    image_new((art_wasi_config){.files = lots, .files_count = 5}, ART_ELIMIT, "bytes of files");
}

/* --- scripts ------------------------------------------------------------------ */

typedef struct script {
    int64_t lines[LINES_MAX][10];
    char data[16384];
    uint32_t count, data_len;
    int64_t results[LINES_MAX];
    art_fuel_account fuel;
    art_guest *guest;
    art_exit end;
} script;

enum { DATA = 0x20000 + LINES_MAX * 80 };
_Static_assert(LINES_MAX * 80 + 16384 <= 0x10000, "the guest has room for this");

/* Returns the line's number, for its result. */
#define LINE(s, ...) line(s, (int64_t[10]){__VA_ARGS__})

static uint32_t line(script *s, const int64_t words[10])
{
    CHECK(s->count < LINES_MAX - 1);
    memcpy(s->lines[s->count], words, sizeof s->lines[0]);
    return s->count++;
}

static uint32_t data(script *s, const void *bytes, uint32_t len)
{
    CHECK(s->data_len + len <= sizeof s->data);
    memcpy(s->data + s->data_len, bytes, len);
    s->data_len += len;
    return DATA + s->data_len - len;
}

static uint32_t text(script *s, const char *of)
{
    return data(s, of, (uint32_t)strlen(of));
}

static script *script_new(void)
{
    return calloc(1, sizeof(script));
}

static void run_as(script *s, art_module *of, const void *input, uint32_t input_len, art_wasi_image *image, uint64_t slice)
{
    art_fuel_init(&s->fuel, UINT64_C(1) << 50, true);
    art_guest_config config = {
        .module = of,
        .fuel = &s->fuel,
        .input = input,
        .input_len = input_len,
        .clock_ns = CLOCK,
        .micro_slice_fuel = slice,
        .wasi = image,
    };
    CHECK_OK(art_guest_create(&config, &s->guest));
    art_wasi_image_release(image); /* the guest has its own reference */
    art_guest_outcome outcome;
    do {
        outcome = art_guest_poll(s->guest);
    } while (outcome == ART_GUEST_YIELD);
    CHECK_EQ(outcome, ART_GUEST_DONE);
    s->end = art_guest_exit(s->guest);
}

static void run(script *s, art_wasi_image *image)
{
    s->lines[s->count][0] = WASI_END;
    run_as(s, module(GUEST_WASI_SCRIPT), s, (uint32_t)(sizeof s->lines + sizeof s->data), image, SLICE);
    CHECK_MSG(s->end.reason == ART_EXIT_RETURNED && s->end.code == 0, "%s", s->end.message);
    CHECK_EQ(s->end.output_len, s->count * 8);
    memcpy(s->results, s->end.output, s->end.output_len);
}

static void script_free(script *s)
{
    art_guest_destroy(s->guest);
    free(s);
}

/* What the guest has at an address, little by little: eight lines give 64 bytes. */
static uint32_t peek(script *s, uint32_t at, uint32_t words)
{
    uint32_t first = s->count;
    for (uint32_t i = 0; i < words; i++) {
        LINE(s, WASI_PEEK, at + 8 * i);
    }
    return first;
}

static const char *seen(const script *s, uint32_t first)
{
    return (const char *)&s->results[first];
}

/* A list of one or two buffers. */
static uint32_t iovecs(script *s, uint32_t a, uint32_t a_len, uint32_t b, uint32_t b_len)
{
    uint32_t list[] = {a, a_len, b, b_len};
    return data(s, list, sizeof list);
}

/* --- arguments, environment, clocks, randomness ---------------------------------- */

static void test_arguments_and_environment(void)
{
    for (int with = 0; with < 2; with++) {
        script *s = script_new();
        uint32_t a = LINE(s, WASI_ARGS_SIZES_GET, 0, 4), b = LINE(s, WASI_ARGS_GET, 16, 101), c = peek(s, 0, 4);
        uint32_t text_at = peek(s, 101, 2);
        uint32_t d = LINE(s, WASI_ENVIRON_SIZES_GET, 0, 4), e = LINE(s, WASI_ENVIRON_GET, 16, 200), f = peek(s, 0, 4);
        uint32_t env_at = peek(s, 200, 2);
        uint32_t bad[] = {LINE(s, WASI_ARGS_SIZES_GET, MEMORY, 0), LINE(s, WASI_ARGS_SIZES_GET, 0, MEMORY - 3),
                          LINE(s, WASI_ARGS_GET, MEMORY - 3, 0), LINE(s, WASI_ARGS_GET, 0, MEMORY - 3)};
        run(s, with ? usual_image() : NULL);
        CHECK(!s->results[a] && !s->results[b] && !s->results[d] && !s->results[e]);
        const uint32_t *words = (const uint32_t *)seen(s, c);
        if (with) {
            CHECK(words[0] == 3 && words[1] == 9 && words[4] == 101 && words[5] == 106 && words[6] == 109);
            CHECK(memcmp(seen(s, text_at), "prog\0-c\0\0", 9) == 0);
            words = (const uint32_t *)seen(s, f);
            CHECK(words[0] == 2 && words[1] == 14 && words[4] == 200 && words[5] == 207);
            CHECK(memcmp(seen(s, env_at), "HOME=/\0EMPTY=\0", 14) == 0);
        } else {
            CHECK(words[0] == 1 && words[1] == 6 && words[4] == 101);
            CHECK(memcmp(seen(s, text_at), "agent\0", 6) == 0);
            words = (const uint32_t *)seen(s, f);
            CHECK(words[0] == 0 && words[1] == 0);
        }
        for (int i = 0; i < 4; i++) {
            CHECK_EQ(s->results[bad[i]], EFAULT);
        }
        script_free(s);
    }
}

static void test_clocks_and_random_numbers_are_the_runs_own(void)
{
    int64_t first[8] = {0};
    for (int round = 0; round < 2; round++) {
        script *s = script_new();
        uint32_t a = s->count;
        for (int id = 0; id < 4; id++) {
            LINE(s, WASI_CLOCK_TIME_GET, id, 1, 8 * id);
            LINE(s, WASI_CLOCK_RES_GET, id, 64 + 8 * id);
        }
        uint32_t b = peek(s, 0, 4), res = peek(s, 64, 4), now = LINE(s, WASI_CLOCK_NOW);
        uint32_t bad[] = {LINE(s, WASI_CLOCK_TIME_GET, 4, 0, 0), LINE(s, WASI_CLOCK_RES_GET, -1, 0),
                          LINE(s, WASI_CLOCK_TIME_GET, 0, 0, MEMORY - 7), LINE(s, WASI_CLOCK_RES_GET, 0, -1)};
        uint32_t filled = LINE(s, WASI_RANDOM_GET, 512, 13), c = peek(s, 512, 3);
        uint32_t too_long = LINE(s, WASI_RANDOM_GET, 0, REQUEST_MAX + 1), outside = LINE(s, WASI_RANDOM_GET, MEMORY - 12, 13);
        uint32_t none = LINE(s, WASI_RANDOM_GET, MEMORY, 0);
        run(s, NULL);
        for (int i = 0; i < 8; i++) {
            CHECK_EQ(s->results[a + i], 0);
        }
        CHECK(s->results[b] > (int64_t)CLOCK && s->results[b + 1] > s->results[b] && s->results[now] > s->results[b + 1]);
        CHECK(s->results[b + 2] > 0 && s->results[b + 3] > s->results[b + 2] && s->results[b + 3] < 1000000);
        CHECK(s->results[res] == 1 && s->results[res + 3] == 1);
        CHECK(s->results[bad[0]] == EINVAL && s->results[bad[1]] == EINVAL && s->results[bad[2]] == EFAULT &&
              s->results[bad[3]] == EFAULT);
        CHECK(s->results[filled] == 0 && s->results[too_long] == E2BIG && s->results[outside] == EFAULT &&
              s->results[none] == 0);
        CHECK(s->results[c] && s->results[c + 1] >> 40 == 0 && s->results[c + 1] && !s->results[c + 2]);
        int64_t same[8] = {s->results[b], s->results[b + 1], s->results[b + 2], s->results[b + 3], s->results[c],
                           s->results[c + 1], s->results[now], 1};
        CHECK(!round || memcmp(first, same, sizeof same) == 0);
        memcpy(first, same, sizeof same);
        script_free(s);
    }
}

/* --- stdio ----------------------------------------------------------------------- */

static void test_what_is_written_is_kept(void)
{
    script *s = script_new();
    uint32_t hello = text(s, "hello, "), world = text(s, "world\n");
    uint32_t list = iovecs(s, hello, 7, world, 6), empty = iovecs(s, MEMORY, 0, 0, 0);
    uint32_t bad_second = iovecs(s, hello, 7, MEMORY - 5, 6), bad_first = iovecs(s, -1, 1, hello, 7);
    uint32_t huge = iovecs(s, 0, 0x30000, 0, 0x30000), beyond = iovecs(s, 0, UINT32_MAX, 0, 0);
    uint32_t ok[] = {LINE(s, WASI_FD_WRITE, 1, list, 2, 0), LINE(s, WASI_FD_WRITE, 2, list, 1, 8),
                     LINE(s, WASI_FD_WRITE, 1, list, 0, 16), LINE(s, WASI_FD_WRITE, 1, empty, 2, 24)};
    uint32_t counts = peek(s, 0, 4);
    uint32_t partly = LINE(s, WASI_FD_WRITE, 1, bad_second, 2, 0), partly_count = peek(s, 0, 1);
    uint32_t fault[] = {LINE(s, WASI_FD_WRITE, 1, bad_first, 2, 0), LINE(s, WASI_FD_WRITE, 1, MEMORY - 15, 2, 0),
                        LINE(s, WASI_FD_WRITE, 1, list, 2, MEMORY - 3)};
    uint32_t badf[] = {LINE(s, WASI_FD_WRITE, 0, list, 2, 0), LINE(s, WASI_FD_WRITE, 3, list, 2, 0),
                       LINE(s, WASI_FD_WRITE, -1, list, 2, 0), LINE(s, WASI_FD_PWRITE, 3, list, 2, 0, 0)};
    uint32_t many = LINE(s, WASI_FD_WRITE, 1, 0, 1025, 0), most = LINE(s, WASI_FD_WRITE, 1, -1, -1, 0);
    uint32_t pipe = LINE(s, WASI_FD_PWRITE, 1, list, 2, 0, 0);
    LINE(s, WASI_POKE, 0, 0);
    uint32_t large[] = {LINE(s, WASI_FD_WRITE, 2, huge, 2, 0), peek(s, 0, 1)};
    uint32_t none[] = {LINE(s, WASI_FD_WRITE, 2, beyond, 1, 0), peek(s, 0, 1)};
    run(s, NULL);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(s->results[ok[i]], 0);
        CHECK_EQ(s->results[badf[i]], EBADF);
    }
    CHECK(s->results[counts] == 13 && s->results[counts + 1] == 7 && !s->results[counts + 2] && !s->results[counts + 3]);
    CHECK(s->results[partly] == 0 && s->results[partly_count] == 7);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(s->results[fault[i]], EFAULT);
    }
    CHECK(s->results[many] == EINVAL && s->results[most] == EINVAL && s->results[pipe] == ESPIPE);
    CHECK(s->results[large[0]] == 0 && s->results[large[1]] == 64 << 10); /* a call's most */
    CHECK(s->results[none[0]] == 0 && s->results[none[1]] == 64 << 10);
    CHECK(s->end.out.len == 20 && s->end.out.total == 20);
    CHECK(memcmp(s->end.out.bytes, "hello, world\nhello, ", 20) == 0);
    CHECK(s->end.err.len == ART_WASI_OUTPUT_BYTES_MAX && s->end.err.total == 7 + (128 << 10));
    script_free(s);
}

static void test_only_the_end_of_a_flood_is_kept(void)
{
    script *s = script_new();
    run_as(s, module(GUEST_WASI_FLOODS), "", 0, NULL, SLICE);
    CHECK_EQ(s->end.reason, ART_EXIT_RETURNED);
    CHECK(s->end.out.total == 100000 && s->end.out.len == ART_WASI_OUTPUT_BYTES_MAX && !s->end.err.len);
    uint32_t last;
    for (uint32_t i = 999; i > 345; i--) {
        memcpy(&last, s->end.out.bytes + s->end.out.len - 100 * (1000 - i), 4);
        CHECK_EQ(last, i);
    }
    script_free(s);
}

static void test_stdin_is_the_input(void)
{
    script *s = script_new();
    uint32_t list = iovecs(s, 0x1000, 24, 0x1018, 56);
    uint32_t a = LINE(s, WASI_FD_READ, 0, list, 2, 0), n = peek(s, 0, 1), first = peek(s, 0x1000, 10);
    uint32_t rest = iovecs(s, 0x1000, 0x1f000, 0, 0);
    uint32_t b = LINE(s, WASI_FD_READ, 0, rest, 1, 0), m = peek(s, 0, 1);
    uint32_t c = LINE(s, WASI_FD_READ, 0, list, 2, 0), end = peek(s, 0, 1);
    uint32_t badf = LINE(s, WASI_FD_READ, 1, list, 2, 0), pipe = LINE(s, WASI_FD_PREAD, 0, list, 2, 0, 0);
    uint32_t bad = iovecs(s, MEMORY - 1, 2, 0, 0), fault = LINE(s, WASI_FD_READ, 0, list, 2, MEMORY);
    (void)bad;
    run(s, NULL);
    CHECK(s->results[a] == 0 && s->results[n] == 80);
    CHECK(memcmp(seen(s, first), s->lines[0], 80) == 0);
    CHECK(s->results[b] == 0 && s->results[m] == sizeof s->lines + sizeof s->data - 80);
    CHECK(s->results[c] == 0 && s->results[end] == 0);
    CHECK(s->results[badf] == EBADF && s->results[pipe] == ESPIPE && s->results[fault] == EFAULT);
    script_free(s);
}

/* --- descriptors and files ---------------------------------------------------------- */

static uint32_t open_path(script *s, uint32_t dir, const char *path, uint32_t oflags, uint64_t rights, uint32_t to)
{
    uint32_t at = text(s, path);
    return LINE(s, WASI_PATH_OPEN, dir, 1, at, (int64_t)strlen(path), oflags, (int64_t)rights, 0, 0, to);
}

static void test_files_are_read(void)
{
    script *s = script_new();
    uint32_t list = iovecs(s, 0x100, 5, 0x108, 4);
    uint32_t pre[] = {LINE(s, WASI_FD_PRESTAT_GET, 3, 0), LINE(s, WASI_FD_PRESTAT_DIR_NAME, 3, 8, 1)};
    uint32_t pre_seen = peek(s, 0, 2);
    uint32_t next[] = {LINE(s, WASI_FD_PRESTAT_GET, 4, 0), LINE(s, WASI_FD_PRESTAT_GET, 0, 0),
                       LINE(s, WASI_FD_PRESTAT_DIR_NAME, 4, 0, 9), LINE(s, WASI_FD_PRESTAT_DIR_NAME, 3, 0, 0),
                       LINE(s, WASI_FD_PRESTAT_DIR_NAME, 3, MEMORY, 1), LINE(s, WASI_FD_PRESTAT_GET, 3, MEMORY - 7)};
    LINE(s, WASI_POKE, 0, 0);
    uint32_t opened = open_path(s, 3, "main.py", 0, 2, 0), fd = peek(s, 0, 1);
    const uint64_t readable[6] = {1, 1, 4}; /* a subscription */
    uint32_t polled = LINE(s, WASI_POLL_ONEOFF, data(s, readable, 48), 0x400, 1, 0x420), event = peek(s, 0x400, 5);
    uint32_t reads[] = {LINE(s, WASI_FD_READ, 4, list, 2, 16), LINE(s, WASI_FD_TELL, 4, 24)};
    uint32_t got = peek(s, 16, 2), bytes = peek(s, 0x100, 2);
    uint32_t again = LINE(s, WASI_FD_READ, 4, list, 2, 16), got_again = peek(s, 16, 1);
    uint32_t done = LINE(s, WASI_FD_READ, 4, list, 2, 16), got_done = peek(s, 16, 1);
    uint32_t seeks[] = {LINE(s, WASI_FD_SEEK, 4, -5, 2, 24), peek(s, 24, 1), LINE(s, WASI_FD_READ, 4, list, 1, 16),
                        peek(s, 0x100, 1), LINE(s, WASI_FD_SEEK, 4, -20, 1, 24), LINE(s, WASI_FD_SEEK, 4, 0, 3, 24),
                        LINE(s, WASI_FD_SEEK, 4, INT64_MAX, 2, 24), LINE(s, WASI_FD_SEEK, 4, INT64_MAX, 0, 24),
                        LINE(s, WASI_FD_READ, 4, list, 1, 16), peek(s, 16, 1), LINE(s, WASI_FD_SEEK, 4, 0, 0, MEMORY)};
    uint32_t preads[] = {LINE(s, WASI_FD_PREAD, 4, list, 1, 7, 16), peek(s, 0x100, 1),
                         LINE(s, WASI_FD_PREAD, 4, list, 1, INT64_MIN, 16), peek(s, 16, 1), LINE(s, WASI_FD_PREAD, 3, list, 1, 0, 16)};
    uint32_t stat = LINE(s, WASI_FD_FILESTAT_GET, 4, 0x200), stats = peek(s, 0x200, 8);
    uint32_t fdstat = LINE(s, WASI_FD_FDSTAT_GET, 4, 0x300), fdstats = peek(s, 0x300, 3);
    uint32_t closed[] = {LINE(s, WASI_FD_CLOSE, 4), LINE(s, WASI_FD_CLOSE, 4), LINE(s, WASI_FD_READ, 4, list, 1, 16)};
    uint32_t spipe[] = {LINE(s, WASI_FD_SEEK, 0, 0, 0, 0), LINE(s, WASI_FD_TELL, 1, 0)};
    run(s, usual_image());
    CHECK(!s->results[pre[0]] && !s->results[pre[1]] && s->results[pre_seen] == INT64_C(1) << 32);
    CHECK(seen(s, pre_seen)[8] == '/');
    CHECK(s->results[next[0]] == EBADF && s->results[next[1]] == EBADF && s->results[next[2]] == EBADF &&
          s->results[next[3]] == ENAMETOOLONG && s->results[next[4]] == EFAULT && s->results[next[5]] == EFAULT);
    CHECK(s->results[opened] == 0 && s->results[fd] == 4);
    CHECK(!s->results[polled] && s->results[event] == 1 && s->results[event + 2] == 12 && s->results[event + 4] == 1);
    CHECK(!s->results[reads[0]] && !s->results[reads[1]] && s->results[got] == 9 && s->results[got + 1] == 9);
    CHECK(memcmp(seen(s, bytes), "hello\0\0\0, wo", 12) == 0);
    CHECK(!s->results[again] && s->results[got_again] == 3 && !s->results[done] && s->results[got_done] == 0);
    CHECK(!s->results[seeks[0]] && s->results[seeks[1]] == 7 && !s->results[seeks[2]]);
    CHECK(memcmp(seen(s, seeks[3]), "world", 5) == 0);
    CHECK(s->results[seeks[4]] == EINVAL && s->results[seeks[5]] == EINVAL && s->results[seeks[6]] == EINVAL);
    CHECK(!s->results[seeks[7]] && !s->results[seeks[8]] && !s->results[seeks[9]] && s->results[seeks[10]] == EFAULT);
    CHECK(!s->results[preads[0]] && memcmp(seen(s, preads[1]), "world", 5) == 0);
    CHECK(!s->results[preads[2]] && !s->results[preads[3]] && s->results[preads[4]] == EISDIR);
    CHECK(!s->results[stat] && seen(s, stats)[16] == 4 && s->results[stats + 4] == 12 && s->results[stats + 3] == 1);
    CHECK(!s->results[fdstat] && seen(s, fdstats)[0] == 4 && s->results[fdstats + 1] & 2 && !(s->results[fdstats + 1] & 64));
    CHECK(!s->results[closed[0]] && s->results[closed[1]] == EBADF && s->results[closed[2]] == EBADF);
    CHECK(s->results[spipe[0]] == ESPIPE && s->results[spipe[1]] == ESPIPE);
    script_free(s);
}

static void test_paths_stay_inside(void)
{
    static const struct {
        const char *path;
        uint32_t oflags;
        uint64_t rights;
        int expected;
    } cases[] = {
        {"lib/a.py", 0, 2, SUCCESS},
        {"./lib/./../lib//a.py", 0, 2, SUCCESS},
        {"lib", 0, 2, SUCCESS},
        {"lib/", 2, 2, SUCCESS},
        {".", 2, 2, SUCCESS},
        {"lib/deep/er/../..", 2, 2, SUCCESS},
        {"lib/deep/er/x", 0, 2, SUCCESS},
        {"", 0, 2, ENOENT},
        {"/main.py", 0, 2, ENOTCAPABLE},
        {"..", 0, 2, ENOTCAPABLE},
        {"lib/../../main.py", 0, 2, ENOTCAPABLE},
        {"lib.tx", 0, 2, ENOENT},
        {"lib.txt2", 0, 2, ENOENT},
        {"nope/a", 0, 2, ENOENT},
        {"main.py/x", 0, 2, ENOTDIR},
        {"main.py/..", 0, 2, ENOTDIR},
        {"main.py/", 0, 2, ENOTDIR},
        {"main.py", 2, 2, ENOTDIR},
        {"main.py", 0, 64, EROFS},
        {"main.py", 8, 2, EROFS},
        {"main.py", 1, 2, SUCCESS},
        {"main.py", 5, 2, EROFS},
        {"new", 1, 66, EROFS},
        {"no/new", 1, 66, EROFS},
        {"lib", 0, 64, EISDIR},
    };
    enum { CASES = sizeof cases / sizeof *cases };
    script *s = script_new();
    uint32_t opened[CASES], stat[CASES];
    for (int i = 0; i < CASES; i++) {
        opened[i] = open_path(s, 3, cases[i].path, cases[i].oflags, cases[i].rights, 0);
        LINE(s, WASI_FD_CLOSE, 4);
        stat[i] = LINE(s, WASI_PATH_FILESTAT_GET, 3, 0, DATA + s->data_len - strlen(cases[i].path), strlen(cases[i].path), 0);
    }
    uint32_t bad[] = {open_path(s, 0, "x", 0, 2, 0), open_path(s, 9, "x", 0, 2, 0), open_path(s, 3, "main.py", 0, 2, MEMORY - 3),
                      LINE(s, WASI_PATH_OPEN, 3, 0, MEMORY - 3, 7, 0, 2, 0, 0, 0), LINE(s, WASI_PATH_OPEN, 3, 0, 0, 1025, 0, 2, 0, 0, 0),
                      LINE(s, WASI_PATH_OPEN, 3, 0, -1, -1, 0, 2, 0, 0, 0)};
    uint32_t main_py = text(s, "main.py"), up = text(s, "../main.py");
    uint32_t flags = LINE(s, WASI_PATH_OPEN, 3, 0, main_py, 7, 0, 2, 0, 32, 0);
    /* from a directory below the root there is no way up either */
    uint32_t sub = open_path(s, 3, "lib", 2, 2, 0), from_sub = open_path(s, 4, "b.py", 0, 2, 0);
    uint32_t above = LINE(s, WASI_PATH_OPEN, 4, 0, up, 10, 0, 2, 0, 0, 0);
    uint32_t links[] = {LINE(s, WASI_PATH_READLINK, 3, main_py, 7, 0, 9, 0), LINE(s, WASI_PATH_READLINK, 3, up, 10, 0, 9, 0)};
    run(s, usual_image());
    for (int i = 0; i < CASES; i++) {
        CHECK_MSG(s->results[opened[i]] == cases[i].expected, "%s: %d", cases[i].path, (int)s->results[opened[i]]);
        bool there = cases[i].expected == SUCCESS || cases[i].oflags & 14 || cases[i].rights == 64;
        there = there && strchr(cases[i].path, 'w') == NULL;
        CHECK_MSG(!there || s->results[stat[i]] == 0, "%s: %d", cases[i].path, (int)s->results[stat[i]]);
    }
    const int expected[] = {ENOTDIR, EBADF, EFAULT, EFAULT, ENAMETOOLONG, ENAMETOOLONG};
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(s->results[bad[i]], expected[i]);
    }
    CHECK(s->results[flags] == EINVAL && s->results[sub] == 0 && s->results[from_sub] == 0 && s->results[above] == ENOTCAPABLE);
    CHECK(s->results[links[0]] == EINVAL && s->results[links[1]] == ENOTCAPABLE);
    script_free(s);
}

static void test_directories_are_listed(void)
{
    script *s = script_new();
    uint32_t whole = LINE(s, WASI_FD_READDIR, 3, 0x1000, 512, 0, 0), used = peek(s, 0, 1), listed = peek(s, 0x1000, 20);
    uint32_t cut = LINE(s, WASI_FD_READDIR, 3, 0x2000, 60, 0, 8), cut_used = peek(s, 8, 1), cut_listed = peek(s, 0x2000, 8);
    uint32_t last = LINE(s, WASI_FD_READDIR, 3, 0x2000, 512, 4, 8), last_used = peek(s, 8, 1), last_listed = peek(s, 0x2000, 4);
    uint32_t past[] = {LINE(s, WASI_FD_READDIR, 3, 0x2000, 512, 5, 8), peek(s, 8, 1), LINE(s, WASI_FD_READDIR, 3, 0x2000, 512, -1, 8),
                       peek(s, 8, 1)};
    uint32_t bad[] = {LINE(s, WASI_FD_READDIR, 1, 0, 9, 0, 0), LINE(s, WASI_FD_READDIR, 9, 0, 9, 0, 0),
                      LINE(s, WASI_FD_READDIR, 3, MEMORY - 8, 9, 0, 0), LINE(s, WASI_FD_READDIR, 3, 0, 9, 0, MEMORY - 3)};
    run(s, usual_image());
    CHECK(!s->results[whole] && s->results[used] == 5 * 24 + 1 + 2 + 3 + 7 + 7);
    const char *at = seen(s, listed);
    static const struct {
        const char *name;
        uint8_t type;
    } expected[] = {{".", 3}, {"..", 3}, {"lib", 3}, {"lib.txt", 4}, {"main.py", 4}};
    for (uint64_t i = 0; i < 5; i++) {
        uint64_t next;
        uint32_t len;
        memcpy(&next, at, 8);
        memcpy(&len, at + 16, 4);
        CHECK(next == i + 1 && len == strlen(expected[i].name) && at[20] == expected[i].type);
        CHECK(memcmp(at + 24, expected[i].name, len) == 0);
        at += 24 + len;
    }
    CHECK(!s->results[cut] && s->results[cut_used] == 60 && memcmp(seen(s, cut_listed), seen(s, listed), 60) == 0);
    CHECK(!s->results[last] && s->results[last_used] == 31 && memcmp(seen(s, last_listed) + 24, "main.py", 7) == 0);
    CHECK(!s->results[past[0]] && !s->results[past[1]] && !s->results[past[2]] && !s->results[past[3]]);
    CHECK(s->results[bad[0]] == ENOTDIR && s->results[bad[1]] == EBADF && s->results[bad[2]] == EFAULT &&
          s->results[bad[3]] == EFAULT);
    script_free(s);
}

static void test_descriptors_are_bounded_and_stdio_is_no_terminal(void)
{
    script *s = script_new();
    uint32_t first = s->count;
    for (int i = 0; i < 61; i++) {
        open_path(s, 3, "main.py", 0, 2, 0);
    }
    uint32_t last = peek(s, 0, 1);
    uint32_t renumber[] = {LINE(s, WASI_FD_RENUMBER, 10, 11), LINE(s, WASI_FD_RENUMBER, 10, 11), LINE(s, WASI_FD_RENUMBER, 11, 11),
                           LINE(s, WASI_FD_RENUMBER, 11, 64), LINE(s, WASI_FD_RENUMBER, -1, 11)};
    uint32_t reopened = open_path(s, 3, "main.py", 0, 2, 0), reopened_fd = peek(s, 0, 1);
    uint32_t stdio = s->count;
    for (int fd = 0; fd < 3; fd++) {
        LINE(s, WASI_FD_FDSTAT_GET, fd, 24 * fd);
        LINE(s, WASI_FD_FILESTAT_GET, fd, 0x100 + 64 * fd);
    }
    uint32_t fdstats = peek(s, 0, 9), filestats = peek(s, 0x100, 24);
    uint32_t flags[] = {LINE(s, WASI_FD_FDSTAT_SET_FLAGS, 1, 4), LINE(s, WASI_FD_FDSTAT_GET, 1, 0), peek(s, 0, 1),
                        LINE(s, WASI_FD_FDSTAT_SET_FLAGS, 1, 32), LINE(s, WASI_FD_FDSTAT_SET_FLAGS, 64, 0)};
    uint32_t bad[] = {LINE(s, WASI_FD_FDSTAT_GET, 0, MEMORY - 23), LINE(s, WASI_FD_FILESTAT_GET, 0, MEMORY - 63),
                      LINE(s, WASI_FD_FDSTAT_GET, 64, 0), LINE(s, WASI_FD_FILESTAT_GET, 64, 0)};
    uint32_t closed[] = {LINE(s, WASI_FD_CLOSE, 1), LINE(s, WASI_FD_WRITE, 1, 0, 0, 0)};
    run(s, usual_image());
    for (int i = 0; i < 60; i++) {
        CHECK_EQ(s->results[first + i], 0);
    }
    CHECK(s->results[first + 60] == EMFILE && s->results[last] == 63);
    CHECK(!s->results[renumber[0]] && s->results[renumber[1]] == EBADF && !s->results[renumber[2]] &&
          s->results[renumber[3]] == EBADF && s->results[renumber[4]] == EBADF);
    CHECK(!s->results[reopened] && s->results[reopened_fd] == 10);
    for (int i = 0; i < 3; i++) {
        CHECK(!s->results[stdio + 2 * i] && !s->results[stdio + 2 * i + 1]);
        CHECK_EQ(seen(s, fdstats)[24 * i], 2);
        CHECK(s->results[fdstats + 3 * i + 1] & (4 | 32)); /* what makes a C library's isatty say no */
        CHECK_EQ(seen(s, filestats)[64 * i + 16], 2);
    }
    CHECK(!(s->results[fdstats + 1] & 64) && s->results[fdstats + 4] & 64 && !(s->results[fdstats + 4] & 2));
    CHECK(!s->results[flags[0]] && !s->results[flags[1]] && s->results[flags[2]] == (2 | 4 << 16));
    CHECK(s->results[flags[3]] == EINVAL && s->results[flags[4]] == EBADF);
    CHECK(s->results[bad[0]] == EFAULT && s->results[bad[1]] == EFAULT && s->results[bad[2]] == EBADF && s->results[bad[3]] == EBADF);
    CHECK(!s->results[closed[0]] && s->results[closed[1]] == EBADF);
    script_free(s);
}

static void test_the_result_is_a_device_that_is_written(void)
{
    script *s = script_new();
    uint32_t opened[] = {open_path(s, 3, "dev/result", 1 | 8, 64, 0), open_path(s, 3, "dev/result", 0, 2, 4), peek(s, 0, 1)};
    uint32_t hello = text(s, "hello"), list = iovecs(s, hello, 5, hello, 2), wrong = iovecs(s, MEMORY - 4, 5, 0, 0);
    uint32_t rest = iovecs(s, 0, MEMORY, 0, MEMORY), much = s->count;
    for (uint32_t i = 0; i < 20; i++) { /* 64 KiB each */
        LINE(s, WASI_FD_WRITE, 4, rest, 2, 8);
    }
    uint32_t written[] = {LINE(s, WASI_FD_WRITE, 4, list, 2, 8), LINE(s, WASI_FD_WRITE, 4, wrong, 1, 8),
                          LINE(s, WASI_FD_WRITE, 4, list, 2, MEMORY - 3), LINE(s, WASI_FD_READ, 4, list, 1, 8),
                          LINE(s, WASI_FD_SEEK, 4, 0, 0, 8), LINE(s, WASI_FD_PWRITE, 4, list, 1, 0, 8)};
    uint32_t fdstat = LINE(s, WASI_FD_FDSTAT_GET, 4, 0x100), fdstats = peek(s, 0x100, 3);
    uint32_t filestat = LINE(s, WASI_FD_FILESTAT_GET, 4, 0x100), filestats = peek(s, 0x100, 8);
    uint32_t other[] = {open_path(s, 3, "dev/resul", 1, 64, 0), open_path(s, 3, "./dev/result", 1, 64, 0),
                        open_path(s, 4, "dev/result", 1, 64, 0), LINE(s, WASI_FD_PRESTAT_GET, 4, 0)};
    uint32_t closed[] = {LINE(s, WASI_FD_CLOSE, 4), LINE(s, WASI_FD_WRITE, 4, list, 2, 8)};
    run(s, usual_image());
    CHECK(!s->results[opened[0]] && !s->results[opened[1]] && s->results[opened[2]] == (4 | INT64_C(5) << 32));
    uint32_t full = 0;
    while (full < 20 && s->results[much + full] == SUCCESS) {
        full++;
    }
    CHECK(full == 16 && s->results[much + 19] == EFBIG); /* the engine's result_bytes_max: 1 MiB */
    const int expected[] = {EFBIG, EFBIG, EFAULT, EBADF, ESPIPE, ESPIPE};
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(s->results[written[i]], expected[i]);
    }
    CHECK(!s->results[fdstat] && seen(s, fdstats)[0] == 2 && (s->results[fdstats + 1] & (2 | 64)) == 64);
    CHECK(!s->results[filestat] && seen(s, filestats)[16] == 2);
    CHECK(s->results[other[0]] == EROFS && s->results[other[1]] == EROFS && s->results[other[2]] == ENOTDIR);
    CHECK(s->results[other[3]] == EBADF && !s->results[closed[0]] && s->results[closed[1]] == EBADF);
    script_free(s);
}

static void test_without_files_there_is_no_directory(void)
{
    script *s = script_new();
    uint32_t a = LINE(s, WASI_FD_PRESTAT_GET, 3, 0), b = open_path(s, 3, "x", 0, 2, 0);
    run(s, NULL);
    CHECK(s->results[a] == EBADF && s->results[b] == EBADF);
    script_free(s);
}

static void test_the_rest_says_no(void)
{
    static const struct {
        int64_t line[10];
        int expected;
    } cases[] = {
        {{WASI_FD_ADVISE, 4}, SUCCESS}, {{WASI_FD_ADVISE, 0}, ESPIPE}, {{WASI_FD_ADVISE, 9}, EBADF},
        {{WASI_FD_ALLOCATE, 4, 0, 9}, EROFS}, {{WASI_FD_ALLOCATE, 1}, EINVAL}, {{WASI_FD_ALLOCATE, 9}, EBADF},
        {{WASI_FD_SYNC, 1}, SUCCESS}, {{WASI_FD_DATASYNC, 4}, SUCCESS}, {{WASI_FD_SYNC, 9}, EBADF}, {{WASI_FD_DATASYNC, 9}, EBADF},
        {{WASI_FD_FDSTAT_SET_RIGHTS, 4}, ENOTSUP}, {{WASI_FD_FDSTAT_SET_RIGHTS, 9}, EBADF},
        {{WASI_FD_FILESTAT_SET_SIZE, 4}, EROFS}, {{WASI_FD_FILESTAT_SET_TIMES, 4}, EROFS}, {{WASI_FD_FILESTAT_SET_SIZE, 9}, EBADF},
        {{WASI_FD_PWRITE, 4}, EBADF}, {{WASI_FD_WRITE, 4}, EBADF}, {{WASI_FD_TELL, 3}, EISDIR}, {{WASI_FD_READ, 3}, EISDIR},
        {{WASI_PATH_CREATE_DIRECTORY, 3}, EROFS}, {{WASI_PATH_CREATE_DIRECTORY, 4}, ENOTDIR}, {{WASI_PATH_CREATE_DIRECTORY, 9}, EBADF},
        {{WASI_PATH_FILESTAT_SET_TIMES, 3}, EROFS}, {{WASI_PATH_LINK, 3}, EROFS}, {{WASI_PATH_REMOVE_DIRECTORY, 3}, EROFS},
        {{WASI_PATH_RENAME, 3}, EROFS}, {{WASI_PATH_SYMLINK, 0, 0, 3}, EROFS}, {{WASI_PATH_SYMLINK, 3, 0, 9}, EBADF},
        {{WASI_PATH_UNLINK_FILE, 3}, EROFS}, {{WASI_PROC_RAISE, 9}, ENOSYS}, {{WASI_SCHED_YIELD}, SUCCESS},
        {{WASI_SOCK_ACCEPT, 0}, ENOTSOCK}, {{WASI_SOCK_RECV, 3}, ENOTSOCK}, {{WASI_SOCK_SEND, 4}, ENOTSOCK}, {{WASI_SOCK_SHUTDOWN, 9}, EBADF},
    };
    enum { CASES = sizeof cases / sizeof *cases };
    script *s = script_new();
    open_path(s, 3, "main.py", 0, 2, 0);
    for (int i = 0; i < CASES; i++) {
        line(s, cases[i].line);
    }
    run(s, usual_image());
    for (int i = 0; i < CASES; i++) {
        CHECK_MSG(s->results[1 + i] == cases[i].expected, "case %d: %d", i, (int)s->results[1 + i]);
    }
    script_free(s);
}

/* --- polling ------------------------------------------------------------------------ */

typedef struct subscription {
    uint64_t userdata;
    uint8_t tag, pad[7];
    uint32_t id, pad2; /* of a clock, or the descriptor */
    uint64_t timeout_ns, precision_ns;
    uint16_t flags;
} subscription;
_Static_assert(sizeof(subscription) == 48, "as the guest has it");

typedef struct event {
    uint64_t userdata;
    uint16_t err;
    uint8_t tag;
    uint64_t bytes;
    uint64_t flags;
} event;
_Static_assert(sizeof(event) == 32, "as the guest has it");

static void test_polling_moves_the_clock_and_never_waits(void)
{
    const int64_t hour = INT64_C(3600) * 1000000000;
    subscription sleep = {.userdata = 7, .id = 1, .timeout_ns = (uint64_t)hour};
    subscription two[] = {{.userdata = 1, .id = 0, .timeout_ns = 2 * (uint64_t)hour}, {.userdata = 2, .id = 1, .timeout_ns = (uint64_t)hour}};
    subscription until = {.userdata = 3, .timeout_ns = CLOCK, .flags = 1};
    subscription ready[] = {two[0], {.userdata = 4, .tag = 1, .id = 0}, {.userdata = 5, .tag = 2, .id = 1}, {.userdata = 6, .tag = 1, .id = 9},
                            {.userdata = 8, .tag = 3}, {.userdata = 9, .id = 2, .timeout_ns = 1}, {.userdata = 10, .id = 9}};
    subscription forever = {.userdata = 11, .timeout_ns = UINT64_MAX};
    script *s = script_new();
    uint32_t t0 = LINE(s, WASI_CLOCK_NOW);
    uint32_t a = LINE(s, WASI_POLL_ONEOFF, data(s, &sleep, 48), 0, 1, 0x800), t1 = LINE(s, WASI_CLOCK_NOW), ea = peek(s, 0, 4),
             na = peek(s, 0x800, 1);
    uint32_t b = LINE(s, WASI_POLL_ONEOFF, data(s, two, 96), 0x100, 2, 0x800), t2 = LINE(s, WASI_CLOCK_NOW), eb = peek(s, 0x100, 4),
             nb = peek(s, 0x800, 1);
    uint32_t c = LINE(s, WASI_POLL_ONEOFF, data(s, &until, 48), 0x100, 1, 0x800), t3 = LINE(s, WASI_CLOCK_NOW);
    uint32_t d = LINE(s, WASI_POLL_ONEOFF, data(s, ready, sizeof ready), 0x200, 7, 0x800), t4 = LINE(s, WASI_CLOCK_NOW),
             ed = peek(s, 0x200, 24), nd = peek(s, 0x800, 1);
    uint32_t overlap = data(s, two, 96), e = LINE(s, WASI_POLL_ONEOFF, overlap, overlap, 2, 0x800), ee = peek(s, overlap, 4);
    uint32_t bad[] = {LINE(s, WASI_POLL_ONEOFF, 0, 0, 0, 0), LINE(s, WASI_POLL_ONEOFF, 0, 0, 65, 0), LINE(s, WASI_POLL_ONEOFF, 0, 0, -1, 0),
                      LINE(s, WASI_POLL_ONEOFF, MEMORY - 47, 0, 1, 0), LINE(s, WASI_POLL_ONEOFF, 0, MEMORY - 31, 1, 0),
                      LINE(s, WASI_POLL_ONEOFF, 0, 0, 1, MEMORY - 3)};
    uint32_t f = LINE(s, WASI_POLL_ONEOFF, data(s, &forever, 48), 0, 1, 0x800), t5 = LINE(s, WASI_CLOCK_NOW);
    uint32_t g = LINE(s, WASI_POLL_ONEOFF, DATA + s->data_len - 48, 0, 1, 0x800), t6 = LINE(s, WASI_CLOCK_NOW);
    run(s, NULL);
    const int64_t *r = s->results;
    event events[8];
    CHECK(!r[a] && r[na] == 1 && r[t1] - r[t0] > hour && r[t1] - r[t0] < hour + 100000);
    memcpy(events, &r[ea], 32);
    CHECK(events[0].userdata == 7 && events[0].err == 0 && events[0].tag == 0);
    CHECK(!r[b] && r[nb] == 1 && r[t2] - r[t1] > hour && r[t2] - r[t1] < hour + 100000);
    memcpy(events, &r[eb], 32);
    CHECK_EQ(events[0].userdata, 2);
    CHECK(!r[c] && r[t3] - r[t2] < 100000 && r[t3] > r[t2]);
    CHECK(!r[d] && r[nd] == 6 && r[t4] - r[t3] < 100000);
    memcpy(events, &r[ed], 192);
    const struct {
        uint64_t userdata, bytes;
        int err;
    } expected[] = {{4, sizeof s->lines + sizeof s->data, 0}, {5, 64 << 10, 0}, {6, 0, EBADF}, {8, 0, EINVAL}, {9, 0, ENOTSUP}, {10, 0, EINVAL}};
    for (int i = 0; i < 6; i++) {
        CHECK(events[i].userdata == expected[i].userdata && events[i].err == expected[i].err && events[i].bytes == expected[i].bytes);
    }
    memcpy(events, &r[ee], 32);
    CHECK(!r[e] && events[0].userdata == 2);
    const int errs[] = {EINVAL, EINVAL, EINVAL, EFAULT, EFAULT, EFAULT};
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(r[bad[i]], errs[i]);
    }
    CHECK(!r[f] && !r[g] && r[t5] > r[t4] && r[t6] > r[t5]); /* the end of time is no end of the run, nor a step back */
    script_free(s);
}

/* --- entries and exits ----------------------------------------------------------------- */

static void expect_end(art_module *of, art_wasi_image *image, art_exit_reason reason, int32_t code)
{
    for (uint64_t slice = SLICE; slice; slice /= 5000) {
        script *s = script_new();
        run_as(s, of, "", 0, art_wasi_image_retain(image), slice);
        CHECK_MSG(s->end.reason == reason && s->end.code == code, "%d %d %s", s->end.reason, s->end.code, s->end.message);
        art_fuel_stats fuel = art_fuel_statistics(&s->fuel);
        CHECK_EQ(fuel.granted, fuel.left + fuel.used);
        script_free(s);
    }
    art_wasi_image_release(image);
}

static void test_entries_and_exits(void)
{
    expect_end(module(GUEST_WASI_RETURNS), NULL, ART_EXIT_RETURNED, 0);
    expect_end(module(GUEST_WASI_EXITS), NULL, ART_EXIT_FAILED, 3);
    expect_end(module(GUEST_WASI_EXITS_WELL), NULL, ART_EXIT_RETURNED, 0);
    expect_end(module(GUEST_WASI_EXITS_AT_START), NULL, ART_EXIT_RETURNED, 0);
    expect_end(module(GUEST_WASI_REACTOR), NULL, ART_EXIT_RETURNED, 0);
    expect_end(module(GUEST_WASI_NO_MEMORY), NULL, ART_EXIT_FAILED, EFAULT);
    CHECK(art_module_is_agent(module(GUEST_WASI_SCRIPT)) && !art_module_is_agent(module(GUEST_WASI_RETURNS)));
    load(GUEST_START_TYPE, NULL, ART_EENTRY, "_start must take and return nothing");
    load(GUEST_INITIALIZE_TYPE, NULL, ART_EENTRY, "_initialize must take and return nothing");
    load(GUEST_ENTRY_NONE, NULL, ART_EENTRY, "agentrt_run, nor _start");
    load(GUEST_IMPORT_WASI, NULL, ART_EIMPORT, "sched_yields");
}

static void test_a_reactor_is_entered_like_main(void)
{
    art_module *reactor = load(GUEST_WASI_MAIN, "run_main", 0, NULL);
    expect_end(reactor, usual_image(), ART_EXIT_FAILED, 3);
    script *s = script_new();
    run_as(s, reactor, "", 0, usual_image(), SLICE);
    CHECK(s->end.out.len == 9 && memcmp(s->end.out.bytes, "prog\n-c\n\n", 9) == 0);
    script_free(s);
    expect_end(reactor, NULL, ART_EXIT_FAILED, 1); /* "agent" */
    static char long_text[100000];
    memset(long_text, 'x', sizeof long_text);
    art_wasi_text one[] = {{long_text, 40000}};
    expect_end(reactor, image_new((art_wasi_config){.args = one, .args_count = 1}, 0, NULL), ART_EXIT_TRAP, -1); /* malloc: 0 */
    one[0].len = 100000;
    expect_end(reactor, image_new((art_wasi_config){.args = one, .args_count = 1}, 0, NULL), ART_EXIT_TRAP, -1); /* outside */
    art_module_release(reactor);
    load(GUEST_WASI_MAIN, NULL, ART_EENTRY, "agentrt_run");
    load(GUEST_WASI_MAIN, "nope", ART_EENTRY, "nope");
    load(GUEST_MAIN_TYPE, "run_main", ART_EENTRY, "run_main must take two i32");
    load(GUEST_MALLOC_TYPE, "run_main", ART_EENTRY, "malloc must");
    load(GUEST_ENTRY_I64, "agentrt_run", ART_EENTRY, "agentrt_run must take two");
}

static void test_a_guest_that_exits_can_be_killed_before_and_after(void)
{
    for (int polls = 0; polls < 2; polls++) {
        art_fuel_account fuel;
        art_guest *guest;
        art_fuel_init(&fuel, 1 << 30, true);
        art_guest_config config = {.module = module(GUEST_WASI_EXITS), .fuel = &fuel, .micro_slice_fuel = SLICE};
        CHECK_OK(art_guest_create(&config, &guest));
        if (polls) {
            CHECK_EQ(art_guest_poll(guest), ART_GUEST_DONE);
        }
        art_guest_kill(guest);
        art_exit end = art_guest_exit(guest);
        CHECK(end.reason == (polls ? ART_EXIT_FAILED : ART_EXIT_KILLED) && end.code == (polls ? 3 : 0));
        art_guest_destroy(guest);
    }
}

/* --- hostile calls ------------------------------------------------------------------ */

/* Any arguments to any import: an errno, and what a guest can see is the same for every micro-slice. */
static void test_any_arguments_give_an_errno(void)
{
    static const int64_t odd[] = {0, 1, 2, 3, 4, 5, 63, 64, MEMORY - 1, MEMORY, MEMORY - 64, 0x20000, 0x1000, 1024, 1025, -1, INT32_MAX,
                                  INT32_MIN, INT64_MAX, INT64_MIN, 48, 96, 1 << 16, 8};
    uint64_t random = check_seed(0x3a5e17);
    for (int round = 0; round < 60; round++) {
        script *s = script_new(), *again = script_new();
        open_path(s, 3, "main.py", 0, 2, 0);
        open_path(s, 3, "lib", 2, 2, 0);
        for (int i = 0; i < 300; i++) {
            int64_t words[10] = {(int64_t)(check_random(&random) % WASI_FUNCTIONS)};
            for (int k = 1; k < 10; k++) {
                uint64_t pick = check_random(&random);
                words[k] = pick % 7 ? odd[pick / 7 % (sizeof odd / sizeof *odd)] : (int64_t)(pick % (2 * MEMORY));
            }
            if (words[0] == WASI_PROC_EXIT || (words[0] == WASI_RANDOM_GET && words[1] >= 0x10000) ||
                (words[0] != WASI_FD_WRITE && words[0] != WASI_SCHED_YIELD && check_random(&random) % 2)) {
                words[0] = WASI_POKE; /* lists and paths of all kinds, but not over the script */
                words[1] = (int64_t)(check_random(&random) % 0x10000);
            }
            for (int k = 1; k < 10; k++) { /* nor may a call write over it */
                words[k] = words[k] >= 0x18000 && words[k] < MEMORY - 64 ? words[k] % 0x10000 : words[k];
            }
            line(s, words);
        }
        s->lines[s->count][0] = WASI_END;
        memcpy(again, s, sizeof *s);
        uint32_t input_len = (uint32_t)(sizeof s->lines + sizeof s->data);
        run_as(s, module(GUEST_WASI_SCRIPT), s, input_len, usual_image(), SLICE);
        run_as(again, module(GUEST_WASI_SCRIPT), again, input_len, usual_image(), 7);
        CHECK_EQ(s->end.reason, again->end.reason);
        CHECK_EQ(art_guest_fuel_used(s->guest), art_guest_fuel_used(again->guest));
        CHECK(s->end.output_len == again->end.output_len);
        CHECK(!s->end.output_len || memcmp(s->end.output, again->end.output, s->end.output_len) == 0);
        CHECK(s->end.out.total == again->end.out.total && s->end.err.total == again->end.err.total);
        CHECK(!s->end.out.len || memcmp(s->end.out.bytes, again->end.out.bytes, s->end.out.len) == 0);
        /* it may have written over itself, and then do anything a guest can */
        CHECK(s->end.reason == ART_EXIT_RETURNED || s->end.reason == ART_EXIT_TRAP || s->end.reason == ART_EXIT_FAILED);
        script_free(s);
        script_free(again);
    }
}

int main(void)
{
    test_images_are_checked();
    const char *library = getenv("AGENTRT_WASMTIME_LIB");
    CHECK_MSG(library && *library, "AGENTRT_WASMTIME_LIB must name wasmtime's shared library");
    art_engine_config config = {
        .library = library,
        .guests_max = 4,
        .stacks_max = 4,
        .memory_bytes_max = MEMORY,
        .wasm_stack_bytes = 64 << 10,
        .table_elements_max = 100,
        .request_bytes_max = REQUEST_MAX,
        .result_bytes_max = REQUEST_MAX,
        .inflight_max = 8,
    };
    char msg[ART_MSG_BYTES] = "";
    CHECK_MSG(art_engine_create(&config, &engine, msg, sizeof msg) == 0, "%s", msg);
    test_arguments_and_environment();
    test_clocks_and_random_numbers_are_the_runs_own();
    test_what_is_written_is_kept();
    test_only_the_end_of_a_flood_is_kept();
    test_stdin_is_the_input();
    test_files_are_read();
    test_paths_stay_inside();
    test_directories_are_listed();
    test_descriptors_are_bounded_and_stdio_is_no_terminal();
    test_the_result_is_a_device_that_is_written();
    test_without_files_there_is_no_directory();
    test_the_rest_says_no();
    test_polling_moves_the_clock_and_never_waits();
    test_entries_and_exits();
    test_a_reactor_is_entered_like_main();
    test_a_guest_that_exits_can_be_killed_before_and_after();
    test_any_arguments_give_an_errno();
    for (int i = 0; i < GUEST_COUNT; i++) {
        art_module_release(modules[i]);
    }
    art_engine_destroy(engine);
    return 0;
}
