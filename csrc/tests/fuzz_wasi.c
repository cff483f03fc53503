/* libFuzzer entry for WASI: images of any texts, and a guest that calls any imports with any arguments. It ends, its fuel adds
 * up, and another micro-slice shows it nothing else. Seeds: corpus/wasi. Needs AGENTRT_WASMTIME_LIB.
 *
 * An input: a byte says how many paths and texts follow, each a length and its bytes; the rest are calls: a byte for the
 * import, then for each argument a byte that picks an odd number, or announces four bytes of one. */
#include "art_err.h"
#include "guest.h"
#include "guests.h"

#include "fuzz_kit.h"

#include <string.h>

enum { TEXTS_MAX = 15, LINES_MAX = 300, MEMORY = 4 << 16 };

static art_engine *engine;
static art_module *module;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    engine = fuzz_engine(fuzz_engine_config());
    module = fuzz_module(engine, guests[GUEST_WASI_SCRIPT].bytes, guests[GUEST_WASI_SCRIPT].len);
    return 0;
}

static art_wasi_text next_text(reader *in)
{
    reader part = next_part(in, next(in));
    return (art_wasi_text){(const char *)part.data, (uint32_t)part.left};
}

static art_wasi_image *next_image(reader *in)
{
    art_wasi_text texts[TEXTS_MAX];
    art_wasi_file files[TEXTS_MAX];
    uint32_t count = next(in) & TEXTS_MAX, half = count / 2;
    for (uint32_t i = 0; i < count; i++) {
        texts[i] = next_text(in);
        files[i] = (art_wasi_file){texts[i], (const uint8_t *)texts[i].bytes, texts[i].len};
    }
    art_wasi_config config = {texts, texts + half, files, half, count - half, count};
    art_wasi_image *image = NULL;
    char msg[200] = "";
    int err = art_wasi_image_new(&config, &image, msg, sizeof msg);
    require((err == 0) == (image != NULL), "an image or an error");
    require(err == 0 || ((err == ART_EINVAL || err == ART_ELIMIT) && msg[0]), "an error with a message");
    config.env_count = 0;
    if (!image && art_wasi_image_new(&config, &image, msg, sizeof msg) != 0) {
        image = NULL;
    }
    return image;
}

static int64_t next_number(reader *in)
{
    static const int64_t odd[] = {0, 1, 2, 3, 4, 5, 8, 48, 63, 64, 96, 0x100, 0x108, 0x1000, 1024, 1025, 0x8000, 1 << 16, 0x20000, MEMORY - 64,
                                  MEMORY - 8, MEMORY - 4, MEMORY - 1, MEMORY, INT32_MAX, INT32_MIN, -1, INT64_MAX, INT64_MIN};
    uint8_t pick = next(in);
    if (pick < sizeof odd / sizeof *odd) {
        return odd[pick];
    }
    if (pick < 0xe0) {
        return pick * 8;
    }
    int64_t value = 0;
    for (int i = 0; i < (pick & 7) + 1; i++) {
        value = (int64_t)((uint64_t)value << 8 | next(in));
    }
    return value;
}

typedef struct ending {
    art_exit exit;
    art_guest *guest;
    uint64_t fuel;
} ending;

static ending run(const void *input, uint32_t len, art_wasi_image *image, uint64_t slice)
{
    art_fuel_account fuel;
    art_fuel_init(&fuel, 20 << 20, true);
    art_guest_config config = {
        .module = module,
        .fuel = &fuel,
        .input = input,
        .input_len = len,
        .clock_ns = 1,
        .micro_slice_fuel = slice,
        .wasi = image,
    };
    ending ending = {0};
    require(art_guest_create(&config, &ending.guest) == 0, "a guest");
    art_guest_outcome outcome;
    do {
        outcome = art_guest_poll(ending.guest);
    } while (outcome == ART_GUEST_YIELD);
    if (outcome == ART_GUEST_WAIT) { /* it wrote itself a script with syscalls */
        art_guest_kill(ending.guest);
    }
    ending.exit = art_guest_exit(ending.guest);
    ending.fuel = art_guest_fuel_used(ending.guest);
    fuzz_check_fuel(&fuel);
    return ending;
}

static bool same_stream(art_stream a, art_stream b)
{
    return a.total == b.total && a.len == b.len && (!a.len || memcmp(a.bytes, b.bytes, a.len) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int64_t lines[LINES_MAX + 1][10];
    reader in = {data, size};
    art_wasi_image *image = next_image(&in);
    uint32_t count = 0;
    memset(lines, 0, sizeof lines);
    for (; in.left && count < LINES_MAX; count++) {
        lines[count][0] = next(&in) % (WASI_FUNCTIONS + 2);
        int arguments = lines[count][0] >= WASI_FUNCTIONS ? 2 : 9;
        for (int i = 1; i <= arguments; i++) {
            uint8_t kind = in.left ? *in.data : 0;
            if (kind == 0xff) { /* the rest are zero */
                next(&in);
                break;
            }
            lines[count][i] = next_number(&in);
        }
    }
    lines[count][0] = WASI_END;
    uint32_t len = (count + 1) * (uint32_t)sizeof lines[0];
    ending one = run(lines, len, image, 50000), two = run(lines, len, image, 997);
    require(one.exit.reason == two.exit.reason && one.exit.code == two.exit.code, "one end");
    require(one.fuel == two.fuel, "one amount of fuel");
    require(same_stream(one.exit.out, two.exit.out) && same_stream(one.exit.err, two.exit.err), "one output");
    require(one.exit.output_len == two.exit.output_len &&
                (!one.exit.output_len || memcmp(one.exit.output, two.exit.output, one.exit.output_len) == 0),
            "one result");
    art_guest_destroy(one.guest);
    art_guest_destroy(two.guest);
    art_wasi_image_release(image);
    return 0;
}
