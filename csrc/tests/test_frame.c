/* The codec of frames: CRC-32C against known values, memories of every kind there and back, the smallest change in any byte
 * found, every truncation refused, and what does not belong together. */
#include "frame.h"

#include "art_err.h"
#include "check.h"

#include <stdbool.h>
#include <string.h>

enum { PAGE = ART_FRAME_PAGE_BYTES, PAGES = 40 };

static uint64_t seed;

static uint64_t below(uint64_t limit)
{
    return check_random(&seed) % limit;
}

static void fill(uint8_t *to, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        to[i] = (uint8_t)below(256);
    }
}

/* Some pages of zeros, some full, some with a few words changed. */
static void scribble(uint8_t *memory, size_t pages)
{
    for (size_t i = 0; i < pages; i++) {
        switch (below(5)) {
        case 0:
            memset(memory + i * PAGE, 0, PAGE);
            break;
        case 1:
            fill(memory + i * PAGE, PAGE);
            break;
        case 2:
            for (uint64_t n = 1 + below(200); n; n--) {
                memory[i * PAGE + below(PAGE)] ^= (uint8_t)(1 + below(255));
            }
            break;
        default:
            break; /* as it was */
        }
    }
}

static art_frame_head head_of(size_t pages, bool image)
{
    art_frame_head head = {.abi = 1, .segment = 2, .seq = 3, .fuel = 4, .clock_ns = 5, .memory_bytes = pages * PAGE};
    memset(head.module, 'm', sizeof head.module);
    memset(head.image, image ? 'i' : 0, sizeof head.image);
    memset(head.engine, 'e', sizeof head.engine);
    fill(head.id, sizeof head.id);
    return head;
}

static art_frame opened(const art_frame_buf *buf)
{
    art_frame frame;
    char msg[200] = "";
    CHECK_MSG(art_frame_open(buf->bytes, buf->len, UINT64_MAX, &frame, msg, sizeof msg) == 0, "%s", msg);
    return frame;
}

/* Restores in pieces, each of which says before which pages it will write to at least. */
static void check_pieces(const art_frame *frame, const art_frame_image *image, const art_frame *base, uint8_t *back, size_t len)
{
    enum { PIECE = 3 };
    uint8_t kinds[PAGES];
    char msg[200] = "";
    art_frame_pages(frame, kinds);
    art_frame_restorer pieces = {.frame = frame, .image = image, .base = base, .fresh = true, .memory = back};
    int more;
    do {
        size_t first = (size_t)pieces.page, count = 0;
        while (count < PIECE && first + count < len / PAGE && kinds[first + count] >= ART_FRAME_WHOLE) {
            count++;
        }
        CHECK_EQ(art_frame_restore_writes(&pieces, PIECE), count);
        more = art_frame_restore_some(&pieces, PIECE, msg, sizeof msg);
        CHECK_MSG(more >= 0, "%s", msg);
    } while (more);
}

/* Restores into garbage, and into a fresh memory; both must be `memory`. */
static void check_restores(const art_frame *frame, const uint8_t *memory, const art_frame_image *image, const art_frame *base)
{
    static uint8_t back[PAGES * PAGE];
    char msg[200] = "";
    size_t len = (size_t)frame->head.memory_bytes;
    memset(back, 0xa5, sizeof back);
    CHECK_MSG(art_frame_restore(frame, image, base, false, back, msg, sizeof msg) == 0, "%s", msg);
    CHECK(memcmp(back, memory, len) == 0);
    memset(back, 0, sizeof back);
    if (image) {
        memcpy(back, image->bytes, image->len < len ? image->len : len);
    }
    check_pieces(frame, image, base, back, len);
    CHECK(memcmp(back, memory, len) == 0);
}

static void test_crc(void)
{
    static uint8_t bytes[3 * PAGE];
    CHECK_EQ(art_crc32c(0, bytes, 32), 0x8a9136aa); /* RFC 3720, B.4 */
    CHECK_EQ(art_crc32c(0, "123456789", 9), 0xe3069283);
    CHECK_EQ(art_crc32c_plain(0, "123456789", 9), 0xe3069283);
    CHECK_EQ(art_crc32c(7, bytes, 0), 7);
    fill(bytes, sizeof bytes);
    for (int i = 0; i < 2000; i++) {
        size_t from = below(9), len = below(sizeof bytes - from), middle = below(len + 1);
        uint32_t whole = art_crc32c_plain(0, bytes + from, len);
        CHECK_EQ(art_crc32c(0, bytes + from, len), whole);
        CHECK_EQ(art_crc32c(art_crc32c(0, bytes + from, middle), bytes + from + middle, len - middle), whole);
    }
}

static void test_there_and_back(void)
{
    static uint8_t initial[PAGES * PAGE], memory[PAGES * PAGE], later[PAGES * PAGE];
    static const uint8_t globals[13] = "globals";
    art_frame_section sections[2] = {{1, globals, sizeof globals}, {9, NULL, 0}};
    art_frame_buf full = {0}, delta = {0};
    for (int round = 0; round < 300; round++) {
        size_t initial_pages = below(PAGES / 2 + 1), pages = initial_pages + below(PAGES / 2);
        size_t later_pages = pages + below(PAGES - pages + 1);
        bool with_image = below(2);
        art_frame_image image = {initial, initial_pages * PAGE};
        memset(initial, 0, sizeof initial);
        scribble(initial, initial_pages);
        memcpy(memory, initial, sizeof memory);
        scribble(memory, pages);
        memcpy(later, memory, sizeof later);
        scribble(later, later_pages);
        art_frame_head head = head_of(pages, with_image);
        CHECK_OK(art_frame_encode(&head, sections, 2, memory, with_image ? &image : NULL, NULL, &full));
        art_frame frame = opened(&full);
        CHECK(memcmp(&frame.head, &head, sizeof head) == 0 && !frame.delta);
        check_restores(&frame, memory, with_image ? &image : NULL, NULL);
        uint64_t len = 99;
        const uint8_t *section = art_frame_section_get(&frame, 1, &len);
        CHECK(section && len == sizeof globals && memcmp(section, globals, sizeof globals) == 0);
        CHECK(art_frame_section_get(&frame, 9, &len) && !len);
        CHECK(!art_frame_section_get(&frame, 2, &len) && !len);
        uint8_t kinds[PAGES];
        uint64_t counted[ART_FRAME_KINDS] = {0};
        art_frame_pages(&frame, kinds);
        for (size_t i = 0; i < pages; i++) {
            counted[kinds[i]]++;
        }
        CHECK(memcmp(counted, frame.page_count, sizeof counted) == 0);

        art_frame_head later_head = head_of(later_pages, with_image);
        CHECK_OK(art_frame_encode(&later_head, NULL, 0, later, with_image ? &image : NULL, &frame, &delta));
        art_frame after = opened(&delta);
        CHECK(after.delta && art_frame_is_base_of(&frame, &after));
        check_restores(&after, later, with_image ? &image : NULL, &frame);
        char msg[200] = "";
        if (later_pages) {
            CHECK_EQ(art_frame_restore(&after, with_image ? &image : NULL, NULL, false, later, msg, sizeof msg), ART_EINVAL);
        }
        CHECK_EQ(art_frame_encode(&later_head, NULL, 0, later, with_image ? &image : NULL, &after, &full), ART_EINVAL);
    }
    art_frame_buf_free(&full);
    art_frame_buf_free(&delta);
}

static void test_what_is_left_out(void)
{
    static uint8_t initial[4 * PAGE], memory[8 * PAGE];
    art_frame_image image = {initial, sizeof initial};
    art_frame_buf full = {0}, delta = {0};
    fill(initial, sizeof initial);
    memcpy(memory, initial, sizeof initial);
    memory[PAGE + 100] ^= 1;        /* a word of a page of the image */
    memset(memory + 2 * PAGE, 0, PAGE);
    fill(memory + 3 * PAGE, PAGE);  /* nothing is left of the image's */
    memory[5 * PAGE] = 1;           /* a word where the image counts as zeros */
    art_frame_head head = head_of(8, true);
    CHECK_OK(art_frame_encode(&head, NULL, 0, memory, &image, NULL, &full));
    art_frame frame = opened(&full);
    CHECK_EQ(frame.page_count[ART_FRAME_IMAGE], 1);
    CHECK_EQ(frame.page_count[ART_FRAME_IMAGE_PATCH], 2);
    CHECK_EQ(frame.page_count[ART_FRAME_ZERO], 4);
    CHECK_EQ(frame.page_count[ART_FRAME_WHOLE], 1);
    CHECK(full.len < PAGE + 450);
    memory[5 * PAGE + 8] = 2;
    CHECK_OK(art_frame_encode(&head, NULL, 0, memory, &image, &frame, &delta));
    frame = opened(&delta);
    CHECK_EQ(frame.page_count[ART_FRAME_BASE_PATCH], 1);
    CHECK_EQ(frame.page_count[ART_FRAME_BASE], 2); /* those that the base has something of */
    CHECK(delta.len < 400);
    art_frame_buf_free(&full);
    art_frame_buf_free(&delta);
}

/* No byte of a frame can change, and none can go, without being found. */
static void test_damage(void)
{
    static uint8_t initial[4 * PAGE], memory[6 * PAGE], back[6 * PAGE];
    art_frame_image image = {initial, sizeof initial};
    art_frame_section section = {7, (const uint8_t *)"abc", 3};
    art_frame_buf full = {0}, delta = {0};
    char msg[200];
    fill(initial, sizeof initial);
    memcpy(memory, initial, sizeof initial);
    memory[10] ^= 1, memory[900] ^= 1, memory[5 * PAGE] ^= 1;
    art_frame_head head = head_of(6, true), later = head_of(6, true);
    CHECK_OK(art_frame_encode(&head, &section, 1, memory, &image, NULL, &full));
    art_frame base = opened(&full), frame;
    memory[10] ^= 3, memory[5 * PAGE + 64] ^= 1;
    CHECK_OK(art_frame_encode(&later, &section, 1, memory, &image, &base, &delta));
    for (int which = 0; which < 2; which++) {
        const art_frame_buf *of = which ? &delta : &full;
        uint8_t *bytes = malloc(of->len);
        CHECK(bytes);
        for (size_t len = 0; len < of->len; len++) {
            uint8_t *cut = malloc(len ? len : 1); /* of the exact size, for the sanitizer */
            CHECK(cut);
            memcpy(cut, of->bytes, len);
            CHECK_EQ(art_frame_open(cut, len, UINT64_MAX, &frame, msg, sizeof msg), ART_EINVAL);
            free(cut);
        }
        for (size_t at = 0; at < of->len; at++) {
            memcpy(bytes, of->bytes, of->len);
            bytes[at] ^= (uint8_t)(1u << below(8));
            msg[0] = 0;
            int rc = art_frame_open(bytes, of->len, UINT64_MAX, &frame, msg, sizeof msg);
            if (rc == 0) {
                rc = art_frame_restore(&frame, &image, which ? &base : NULL, false, back, msg, sizeof msg);
            }
            CHECK_MSG(rc == ART_EINVAL || (rc == ART_EVERSION && (at == 8 || at == 9)), "byte %zu of %zu: %d", at, of->len, rc);
            CHECK(msg[0]);
        }
        free(bytes);
    }
    art_frame_buf_free(&full);
    art_frame_buf_free(&delta);
}

static void test_what_does_not_fit(void)
{
    static uint8_t memory[2 * PAGE], back[2 * PAGE];
    art_frame_image image = {memory, PAGE};
    art_frame_buf one = {0}, two = {0}, three = {0};
    art_frame frame;
    char msg[200] = "";
    fill(memory, sizeof memory);
    art_frame_head head = head_of(2, false), other = head_of(2, false);
    CHECK_OK(art_frame_encode(&head, NULL, 0, memory, NULL, NULL, &one));
    CHECK_OK(art_frame_encode(&other, NULL, 0, memory, NULL, NULL, &two));
    art_frame first = opened(&one), second = opened(&two);
    memory[0] ^= 1;
    CHECK_OK(art_frame_encode(&head, NULL, 0, memory, NULL, &first, &three));
    frame = opened(&three);
    CHECK(!art_frame_is_base_of(&second, &frame) && !art_frame_is_base_of(&frame, &frame));
    CHECK_EQ(art_frame_restore(&frame, NULL, &second, false, back, msg, sizeof msg), ART_EINVAL);
    CHECK(strstr(msg, "another frame"));
    CHECK_OK(art_frame_restore(&frame, NULL, &first, false, back, msg, sizeof msg));
    CHECK_EQ(art_frame_open(one.bytes, one.len, PAGE, &frame, msg, sizeof msg), ART_ELIMIT);
    CHECK(strstr(msg, "4096"));

    art_frame_section twice[2] = {{1, memory, 1}, {1, memory, 1}}, untagged = {0, memory, 1};
    CHECK_EQ(art_frame_encode(&head, twice, 2, memory, NULL, NULL, &one), ART_EINVAL);
    CHECK_EQ(art_frame_encode(&head, &untagged, 1, memory, NULL, NULL, &one), ART_EINVAL);
    CHECK_EQ(art_frame_encode(&head, NULL, 0, memory, &image, NULL, &one), ART_EINVAL); /* an image without a digest */
    CHECK_EQ(one.len, 0);
    other.module[3]++;
    CHECK_EQ(art_frame_encode(&other, NULL, 0, memory, NULL, &second, &one), ART_EINVAL);
    head.memory_bytes = PAGE + 1;
    CHECK_EQ(art_frame_encode(&head, NULL, 0, memory, NULL, NULL, &one), ART_EINVAL);
    head.memory_bytes = 0;
    CHECK_OK(art_frame_encode(&head, NULL, 0, NULL, NULL, NULL, &one));
    frame = opened(&one);
    CHECK_OK(art_frame_restore(&frame, NULL, NULL, false, NULL, msg, sizeof msg));
    art_frame_buf_free(&one);
    art_frame_buf_free(&two);
    art_frame_buf_free(&three);
}

int main(void)
{
    seed = check_seed(20260301);
    test_crc();
    test_there_and_back();
    test_what_is_left_out();
    test_damage();
    test_what_does_not_fit();
    return 0;
}
