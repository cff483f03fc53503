/* libFuzzer entry for frames. The first byte says what the rest is: a frame to open and restore, whatever it claims; two
 * memories that must come back; or a real frame with bytes changed, its checks made right again where the input says so, so that
 * what is behind them is reached. Seeds: corpus/frame. */
#include "frame.h"

#include "art_err.h"
#include "fuzz_kit.h"

#include <string.h>

enum { PAGE = ART_FRAME_PAGE_BYTES, PAGES = 6 };

static uint8_t initial[2 * PAGE], memory[PAGES * PAGE], later[PAGES * PAGE], back[PAGES * PAGE];
static const art_frame_image image = {initial, sizeof initial};
static art_frame_buf full, delta;

static void try_frame(const uint8_t *bytes, size_t len, const art_frame *base)
{
    art_frame frame;
    char msg[200] = "";
    int rc = art_frame_open(bytes, len, sizeof back, &frame, msg, sizeof msg);
    require(rc == 0 || rc == ART_EINVAL || rc == ART_EVERSION || rc == ART_ELIMIT, "a code that open may give");
    require((rc == 0) == !msg[0], "a message with each error");
    if (rc) {
        return;
    }
    uint8_t kinds[PAGES];
    art_frame_pages(&frame, kinds);
    for (uint32_t i = 0; i < frame.section_count; i++) {
        uint64_t size;
        const uint8_t *section = art_frame_section_get(&frame, frame.sections[i].tag, &size);
        for (uint64_t k = 0; k < size; k++) {
            back[0] ^= section[k]; /* readable */
        }
    }
    rc = art_frame_restore(&frame, &image, base, false, back, msg, sizeof msg);
    require(rc == 0 || rc == ART_EINVAL, "a code that restore may give");
    (void)art_frame_restore(&frame, &image, base, true, back, msg, sizeof msg);
}

static void scribble(reader *in, uint8_t *to, size_t len)
{
    for (uint8_t n = next(in) & 31; n; n--) {
        size_t at = ((size_t)next(in) << 8 | next(in)) % len, count = next(in) * 8u;
        memset(to + at, next(in), count < len - at ? count : len - at);
    }
}

static art_frame make(reader *in, const uint8_t *of, const art_frame *base, art_frame_buf *to)
{
    art_frame frame;
    char msg[200] = "";
    art_frame_head head = {.abi = 1, .memory_bytes = (uint64_t)(next(in) % (PAGES + 1)) * PAGE};
    head.image[0] = 1;
    head.id[0] = next(in);
    reader name = next_part(in, next(in) & 15);
    art_frame_section section = {1, name.data, name.left};
    require(art_frame_encode(&head, &section, next(in) & 1, of, &image, base, to) == 0, "encodes");
    require(art_frame_open(to->bytes, to->len, sizeof back, &frame, msg, sizeof msg) == 0, msg);
    require(art_frame_restore(&frame, &image, base, false, back, msg, sizeof msg) == 0, msg);
    require(memcmp(back, of, (size_t)head.memory_bytes) == 0, "comes back");
    return frame;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader in = {data, size};
    uint8_t what = next(&in);
    memset(initial, 0, sizeof initial);
    memset(memory, 0, sizeof memory);
    if (what & 1) {
        try_frame(in.data, in.left, NULL);
        return 0;
    }
    scribble(&in, initial, sizeof initial);
    memcpy(memory, initial, sizeof initial);
    scribble(&in, memory, sizeof memory);
    art_frame base = make(&in, memory, NULL, &full);
    memcpy(later, memory, sizeof later);
    scribble(&in, later, sizeof later);
    (void)make(&in, later, &base, &delta);
    uint8_t *bytes = malloc(delta.len);
    require(bytes, "memory");
    memcpy(bytes, delta.bytes, delta.len);
    while (in.left) {
        size_t at = ((size_t)next(&in) << 8 | next(&in)) % delta.len;
        bytes[at] = next(&in);
    }
    if (what & 2) { /* the check right again: header, sections and table as they are now claimed to be */
        uint32_t check = 0;
        uint64_t claimed;
        memcpy(&claimed, bytes + 192, sizeof claimed); /* data_bytes */
        memcpy(bytes + 216, &check, sizeof check);
        for (size_t data_at = 224; data_at <= delta.len; data_at += 8) {
            if (claimed > delta.len - data_at) {
                break;
            }
            check = art_crc32c(art_crc32c(0, bytes, data_at), bytes + data_at + claimed, delta.len - data_at - (size_t)claimed);
            memcpy(bytes + 216, &check, sizeof check);
            try_frame(bytes, delta.len, &base);
            check = 0;
            memcpy(bytes + 216, &check, sizeof check);
            if (data_at > 300) {
                break;
            }
        }
    } else {
        try_frame(bytes, delta.len, &base);
    }
    free(bytes);
    return 0;
}
