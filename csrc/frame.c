/* frame.c: see frame.h for what holds, docs/frame-format.md for the bytes.
 *
 * Encoding is one pass over the memory: a page is looked at, checked and copied while it is in the nearest cache, so that
 * taking a frame costs little more than copying. Restoring walks the frame and its base side by side, for both list
 * their pages in order.
 */
#include "frame.h"

#include "art_err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian, and so are words of pages here");

#define PAGE ((size_t)ART_FRAME_PAGE_BYTES)
#define PAGE_WORDS (ART_FRAME_PAGE_BYTES / 8)
/* A patch that saves less than a quarter of its page is not worth its time. */
#define PATCH_BYTES_MAX (PAGE * 3 / 4)
/* Changed words with fewer equal ones between them than that are one range: its header takes half a word. */
#define PATCH_GAP_WORDS 2
#define RUN_PAGES_MAX ((1u << 24) - 1)
/* A frame of a memory up to here may still be in a cache of its core when it is written to a file. */
#define CACHED_BYTES_MAX (4u << 20)

static const uint8_t magic[8] = "ARTFRAME";

enum { FLAG_DELTA = 1 };

/* The header. Places stand as they are: every field is at a multiple of its size. */
typedef struct header {
    uint8_t magic[8];
    uint16_t version, flags;
    uint32_t abi;
    uint64_t total_bytes;
    uint8_t module[32], image[32], engine[32];
    uint8_t id[16], base_id[16];
    uint64_t segment, seq, fuel, clock_ns;
    uint64_t memory_bytes, data_bytes;
    uint32_t section_count, stored_count, run_count, base_check;
    uint32_t check, reserved;
} header;
_Static_assert(sizeof(header) == 224 && offsetof(header, check) == 216, "docs/frame-format.md");

typedef struct section_head {
    uint32_t tag, reserved;
    uint64_t len;
} section_head;

/* A page that is stored, in order. */
typedef struct stored_page {
    uint32_t crc, bytes;
} stored_page;

/* A range of a patch. */
typedef struct range {
    uint16_t first, count; /* words */
} range;

static uint64_t padded(uint64_t len)
{
    return (len + 7) & ~UINT64_C(7);
}

__attribute__((format(printf, 3, 4))) static void say(char *msg, size_t msg_len, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(msg, msg_len, format, args);
    va_end(args);
}

/* --- output ------------------------------------------------------------------- */

void art_frame_buf_free(art_frame_buf *buf)
{
    free(buf->bytes);
    *buf = (art_frame_buf){0};
}

/* Where `len` more bytes go, or NULL. */
static uint8_t *room(art_frame_buf *buf, size_t len)
{
    if (buf->room - buf->len < len) {
        size_t wanted = buf->room ? buf->room : 64 << 10;
        while (wanted - buf->len < len) {
            wanted *= 2;
        }
        uint8_t *grown = realloc(buf->bytes, wanted);
        if (!grown) {
            return NULL;
        }
        buf->bytes = grown;
        buf->room = wanted;
    }
    return buf->bytes + buf->len;
}

static bool put(art_frame_buf *buf, const void *bytes, size_t len)
{
    uint8_t *to = room(buf, len);
    if (to && len) {
        memcpy(to, bytes, len);
        buf->len += len;
    }
    return to != NULL;
}

/* Has the caches fetch a page that is needed soon: most often it is in those of another core, and what the processor foresees by
 * itself ends with the page. Past the end of what is there it is nothing. */
static void foresee(const uint8_t *page)
{
    for (size_t at = 0; at < PAGE; at += 64) {
        __builtin_prefetch((const void *)((uintptr_t)page + at));
    }
}

/* `put` for a page. `past_caches`, where that can be said: for what is written of a large memory is not read again soon, and a
 * store through them would read the line first. It makes a frame of one in two thirds of the time. */
static bool put_whole(art_frame_buf *buf, const uint8_t *page, bool past_caches)
{
    uint8_t *to = room(buf, PAGE);
    if (!to) {
        return false;
    }
#if defined(__x86_64__)
    if (!past_caches) {
        memcpy(to, page, PAGE);
    }
    for (size_t at = 0; past_caches && at < PAGE; at += 64) { /* `to` is at a multiple of 8 */
        long long words[8];
        memcpy(words, page + at, sizeof words);
        for (int i = 0; i < 8; i++) {
            _mm_stream_si64((long long *)(void *)(to + at) + i, words[i]);
        }
    }
#else
    (void)past_caches;
    memcpy(to, page, PAGE);
#endif
    buf->len += PAGE;
    return true;
}

/* The same, and zeros up to a multiple of 8. */
static bool put_padded(art_frame_buf *buf, const void *bytes, size_t len)
{
    static const uint8_t zeros[8];
    return put(buf, bytes, len) && put(buf, zeros, (size_t)(padded(len) - len));
}

/* --- pages -------------------------------------------------------------------- */

static const uint8_t zero_page[ART_FRAME_PAGE_BYTES];

bool art_frame_is_zero(const uint8_t *page)
{
    for (size_t at = 0; at < PAGE; at += 64) {
        uint64_t words[8];
        memcpy(words, page + at, sizeof words);
        if (words[0] | words[1] | words[2] | words[3] | words[4] | words[5] | words[6] | words[7]) {
            return false;
        }
    }
    return true;
}

/* That page of it: of one that has no more, zeros; NULL without an image. */
static const uint8_t *image_page(const art_frame_image *image, uint64_t page)
{
    return !image ? NULL : page < image->len / PAGE ? image->bytes + page * PAGE : zero_page;
}

/* A patch: how many ranges, then these, zeros up to a multiple of 8, and the words of all ranges. */
typedef struct patch_head {
    uint16_t count, reserved;
    range ranges[PAGE_WORDS + 1]; /* the last may be padding */
} patch_head;

static size_t patch_head_bytes(uint32_t count)
{
    return (size_t)padded(offsetof(patch_head, ranges) + count * sizeof(range));
}

/* Whether nearly all of some words, spread over two pages, differ: then a patch will not be worth it, and to find that out
 * word by word takes longer than all else that is done with a page. */
static bool differs_widely(const uint8_t *page, const uint8_t *from)
{
    enum { PROBES = 16, ALIKE_MAX = 1 };
    uint32_t alike = 0;
    for (uint32_t i = 0; i < PROBES && alike <= ALIKE_MAX; i++) {
        size_t at = (size_t)i * (PAGE / PROBES);
        alike += memcmp(page + at, from + at, 8) == 0;
    }
    return alike <= ALIKE_MAX;
}

/* The ranges of words in which two pages differ; false if a patch of them is not worth it. */
static bool differences(const uint8_t *page, const uint8_t *from, patch_head *head)
{
    uint32_t words = 0, count = 0;
    for (uint32_t at = 0; at < PAGE_WORDS; at++) {
        uint64_t a, b;
        memcpy(&a, page + (size_t)at * 8, 8);
        memcpy(&b, from + (size_t)at * 8, 8);
        if (a == b) {
            continue;
        }
        range *last = count ? &head->ranges[count - 1] : NULL;
        if (last && at - (last->first + last->count) < PATCH_GAP_WORDS) {
            words += at + 1 - (last->first + last->count);
            last->count = (uint16_t)(at + 1 - last->first);
        } else {
            head->ranges[count++] = (range){(uint16_t)at, 1};
            words++;
        }
        if (patch_head_bytes(count) + words * 8 > PATCH_BYTES_MAX) {
            return false;
        }
    }
    head->count = (uint16_t)count;
    head->reserved = 0;
    if (count % 2 == 0) {
        head->ranges[count] = (range){0}; /* the padding */
    }
    return true;
}

/* Appends the patch that makes `page` of `from`. 1; 0 if the page had better be stored whole; negative without memory. */
static int put_patch(art_frame_buf *out, const uint8_t *page, const uint8_t *from, uint32_t *bytes)
{
    patch_head head;
    if (differs_widely(page, from) || !differences(page, from, &head)) {
        return 0;
    }
    size_t before = out->len;
    bool done = put(out, &head, patch_head_bytes(head.count));
    for (uint32_t i = 0; done && i < head.count; i++) {
        done = put(out, page + (size_t)head.ranges[i].first * 8, (size_t)head.ranges[i].count * 8);
    }
    *bytes = (uint32_t)(out->len - before);
    return done ? 1 : ART_ENOMEM;
}

/* Applies a patch to `page`. False if it is none; part of it may have been applied. */
static bool apply_patch(uint8_t *page, const uint8_t *patch, uint32_t bytes)
{
    patch_head head;
    memcpy(&head, patch, offsetof(patch_head, ranges)); /* a stored patch has 8 bytes at least */
    size_t at = patch_head_bytes(head.count);
    if (head.reserved || head.count > PAGE_WORDS || at > bytes) {
        return false;
    }
    memcpy(&head, patch, at);
    if (head.count % 2 == 0 && (head.ranges[head.count].first || head.ranges[head.count].count)) {
        return false; /* the padding */
    }
    uint32_t end = 0;
    for (uint32_t i = 0; i < head.count; i++) {
        range r = head.ranges[i];
        if (r.first < end || !r.count || r.count > PAGE_WORDS - r.first || (size_t)r.count * 8 > bytes - at) {
            return false;
        }
        memcpy(page + (size_t)r.first * 8, patch + at, (size_t)r.count * 8);
        at += (size_t)r.count * 8;
        end = (uint32_t)r.first + r.count;
    }
    return at == bytes;
}

/* Walks the pages of a frame in order; `left` are those of the run before `run`. */
typedef struct art__frame_cursor cursor;

typedef struct page {
    uint32_t kind;
    const uint8_t *bytes; /* of the stored ones */
    stored_page stored;
} page;

static cursor pages_of(const art_frame *frame)
{
    return (cursor){.frame = frame, .data = frame ? frame->data : NULL, .stored = frame ? frame->stored : NULL};
}

static void run_at(const art_frame *frame, uint32_t index, uint32_t *kind, uint32_t *count)
{
    uint32_t word;
    memcpy(&word, frame->runs + (size_t)index * 4, 4);
    *kind = word >> 24;
    *count = word & RUN_PAGES_MAX;
}

static bool is_stored(uint32_t kind)
{
    return kind >= ART_FRAME_WHOLE;
}

/* The next page; beyond the frame's memory zeros. The table was checked. */
static page next_page(cursor *c)
{
    if (!c->left) {
        if (!c->frame || c->run == c->frame->run_count) {
            return (page){.kind = ART_FRAME_ZERO};
        }
        run_at(c->frame, c->run++, &c->kind, &c->left);
    }
    c->left--;
    page p = {.kind = c->kind};
    if (is_stored(c->kind)) {
        memcpy(&p.stored, c->stored, sizeof p.stored);
        p.bytes = c->data;
        c->stored += sizeof p.stored;
        c->data += p.stored.bytes;
    }
    return p;
}

/* The bytes of a page of a frame that is no delta; `room` is for those that have to be put together. NULL: damaged. */
static const uint8_t *bytes_of(const page *p, const uint8_t *image, uint8_t *room_for)
{
    const uint8_t *from = image ? image : zero_page;
    switch (p->kind) {
    case ART_FRAME_ZERO:
        return zero_page;
    case ART_FRAME_IMAGE:
        return from;
    case ART_FRAME_WHOLE:
        return p->bytes;
    default:
        memcpy(room_for, from, PAGE);
        return apply_patch(room_for, p->bytes, p->stored.bytes) ? room_for : NULL;
    }
}

/* --- encoding ----------------------------------------------------------------- */

typedef struct encoder {
    art_frame_buf *out;
    art_frame_buf stored, runs;
    uint32_t stored_count, run_count;
    uint32_t run_kind, run_pages;
    bool past_caches;
} encoder;

static bool end_run(encoder *e)
{
    uint32_t word = e->run_kind << 24 | e->run_pages;
    if (!e->run_pages) {
        return true;
    }
    e->run_pages = 0;
    e->run_count++;
    return put(&e->runs, &word, sizeof word);
}

static bool count_page(encoder *e, uint32_t kind)
{
    if (e->run_pages && (kind != e->run_kind || e->run_pages == RUN_PAGES_MAX) && !end_run(e)) {
        return false;
    }
    e->run_kind = kind;
    e->run_pages++;
    return true;
}

static bool count_stored(encoder *e, uint32_t kind, const uint8_t *bytes, uint32_t len)
{
    stored_page entry = {art_crc32c(0, bytes, PAGE), len};
    e->stored_count++;
    return count_page(e, kind) && put(&e->stored, &entry, sizeof entry);
}

/* `image` and `base` are that page in these, or NULL. */
static bool put_page(encoder *e, const uint8_t *bytes, const uint8_t *image, const uint8_t *base)
{
    if (base && base != zero_page && base != image && memcmp(bytes, base, PAGE) == 0) {
        return count_page(e, ART_FRAME_BASE);
    }
    if (art_frame_is_zero(bytes)) {
        return count_page(e, ART_FRAME_ZERO);
    }
    if (image && memcmp(bytes, image, PAGE) == 0) {
        return count_page(e, ART_FRAME_IMAGE);
    }
    const uint8_t *from = base && base != zero_page ? base : image;
    if (from) {
        uint32_t len = 0;
        int rc = put_patch(e->out, bytes, from, &len);
        if (rc < 0) {
            return false;
        }
        if (rc) {
            return count_stored(e, from == image ? ART_FRAME_IMAGE_PATCH : ART_FRAME_BASE_PATCH, bytes, len);
        }
    }
    foresee(bytes + PAGE);
    return count_stored(e, ART_FRAME_WHOLE, bytes, ART_FRAME_PAGE_BYTES) && put_whole(e->out, bytes, e->past_caches);
}

static bool all_zero(const uint8_t *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (bytes[i]) {
            return false;
        }
    }
    return true;
}

static bool may_be_base(const art_frame *base, const art_frame_head *head)
{
    return !base->delta && base->head.abi == head->abi && memcmp(base->head.module, head->module, sizeof head->module) == 0 &&
           memcmp(base->head.image, head->image, sizeof head->image) == 0 &&
           memcmp(base->head.engine, head->engine, sizeof head->engine) == 0;
}

static bool put_sections(art_frame_buf *out, const art_frame_section *sections, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        section_head head = {sections[i].tag, 0, sections[i].len};
        if (!put(out, &head, sizeof head) || !put_padded(out, sections[i].bytes, (size_t)sections[i].len)) {
            return false;
        }
    }
    return true;
}

static bool put_pages(encoder *e, const art_frame_head *head, const uint8_t *memory, const art_frame_image *image,
                      const art_frame *base)
{
    cursor c = pages_of(base);
    uint8_t together[ART_FRAME_PAGE_BYTES];
    for (uint64_t i = 0; i < head->memory_bytes / PAGE; i++) {
        const uint8_t *initial = image_page(image, i), *before = NULL;
        if (base) {
            page p = next_page(&c);
            before = bytes_of(&p, initial, together);
        }
        if (!put_page(e, memory + i * PAGE, initial, before)) {
            return false;
        }
    }
    return end_run(e);
}

/* CRC over what is no page: [0, data) and [data + data_bytes, len), with the check itself taken as 0. */
static uint32_t check_of(const uint8_t *bytes, size_t len, size_t data, size_t data_bytes)
{
    static const uint8_t nothing[4];
    const size_t at = offsetof(header, check);
    uint32_t crc = art_crc32c(0, bytes, at);
    crc = art_crc32c(crc, nothing, sizeof nothing);
    crc = art_crc32c(crc, bytes + at + 4, data - at - 4);
    return art_crc32c(crc, bytes + data + data_bytes, len - data - data_bytes);
}

int art_frame_encode(const art_frame_head *head, const art_frame_section *sections, uint32_t section_count,
                     const uint8_t *memory, const art_frame_image *image, const art_frame *base, art_frame_buf *out)
{
    out->len = 0;
    if (head->memory_bytes % PAGE || head->memory_bytes > ART_FRAME_MEMORY_BYTES_MAX ||
        section_count > ART_FRAME_SECTIONS_MAX || (base && !may_be_base(base, head)) || (image && image->len % PAGE) ||
        all_zero(head->image, sizeof head->image) != !image) {
        return ART_EINVAL;
    }
    for (uint32_t i = 0; i < section_count; i++) {
        for (uint32_t k = 0; k <= i; k++) {
            if (!sections[i].tag || (k < i && sections[k].tag == sections[i].tag)) {
                return ART_EINVAL;
            }
        }
    }
    header h = {
        .version = ART_FRAME_VERSION,
        .flags = base ? FLAG_DELTA : 0,
        .abi = head->abi,
        .segment = head->segment,
        .seq = head->seq,
        .fuel = head->fuel,
        .clock_ns = head->clock_ns,
        .memory_bytes = head->memory_bytes,
        .section_count = section_count,
        .base_check = base ? base->check : 0,
    };
    memcpy(h.magic, magic, sizeof magic);
    memcpy(h.module, head->module, sizeof h.module);
    memcpy(h.image, head->image, sizeof h.image);
    memcpy(h.engine, head->engine, sizeof h.engine);
    memcpy(h.id, head->id, sizeof h.id);
    if (base) {
        memcpy(h.base_id, base->head.id, sizeof h.base_id);
    }
    encoder e = {.out = out, .past_caches = head->memory_bytes > CACHED_BYTES_MAX};
    bool done = put(out, &h, sizeof h) && put_sections(out, sections, section_count);
    size_t data = out->len;
    done = done && put_pages(&e, head, memory, image, base);
    h.data_bytes = out->len - data;
    h.stored_count = e.stored_count;
    h.run_count = e.run_count;
    done = done && put(out, e.stored.bytes, e.stored.len) && put(out, e.runs.bytes, e.runs.len);
    art_frame_buf_free(&e.stored);
    art_frame_buf_free(&e.runs);
    if (!done) {
        out->len = 0;
        return ART_ENOMEM;
    }
#if defined(__x86_64__)
    _mm_sfence(); /* so that who is given the frame sees what went past the caches */
#endif
    h.total_bytes = out->len;
    memcpy(out->bytes, &h, sizeof h);
    h.check = check_of(out->bytes, out->len, data, (size_t)h.data_bytes);
    memcpy(out->bytes, &h, sizeof h);
    return 0;
}

/* --- opening ------------------------------------------------------------------ */

/* Reads the sections' heads; the bytes they take, or 0 with *out's count wrong: they do not fit, or are none. */
static bool open_sections(const uint8_t *at, size_t left, uint32_t count, art_frame *out, size_t *taken)
{
    const size_t whole = left;
    for (uint32_t i = 0; i < count; i++) {
        section_head head;
        if (left < sizeof head) {
            return false;
        }
        memcpy(&head, at, sizeof head);
        left -= sizeof head;
        at += sizeof head;
        if (!head.tag || head.reserved || head.len > left || padded(head.len) > left) {
            return false;
        }
        for (uint32_t k = 0; k < i; k++) {
            if (out->sections[k].tag == head.tag) {
                return false;
            }
        }
        out->sections[i] = (art_frame_section){head.tag, at, head.len};
        left -= (size_t)padded(head.len);
        at += padded(head.len);
    }
    out->section_count = count;
    *taken = whole - left;
    return true;
}

/* Whether the table says what the header does. */
static bool open_table(const header *h, art_frame *out)
{
    uint64_t pages = 0, bytes = 0;
    uint32_t stored = 0, before = ART_FRAME_KINDS, before_count = 0;
    bool has_image = !all_zero(h->image, sizeof h->image);
    for (uint32_t i = 0; i < h->run_count; i++) {
        uint32_t kind, count;
        run_at(out, i, &kind, &count);
        bool of_base = kind == ART_FRAME_BASE || kind == ART_FRAME_BASE_PATCH;
        bool of_image = kind == ART_FRAME_IMAGE || kind == ART_FRAME_IMAGE_PATCH;
        if (kind >= ART_FRAME_KINDS || !count || (kind == before && before_count != RUN_PAGES_MAX) ||
            (of_base && !out->delta) || (of_image && !has_image) || count > h->memory_bytes / PAGE - pages) {
            return false;
        }
        pages += count;
        out->page_count[kind] += count;
        for (uint32_t k = 0; is_stored(kind) && k < count; k++) {
            stored_page entry;
            if (stored == h->stored_count) {
                return false;
            }
            memcpy(&entry, out->stored + (size_t)stored++ * sizeof entry, sizeof entry);
            if (kind == ART_FRAME_WHOLE ? entry.bytes != PAGE
                                        : entry.bytes % 8 || !entry.bytes || entry.bytes > PATCH_BYTES_MAX) {
                return false;
            }
            bytes += entry.bytes;
        }
        before = kind;
        before_count = count;
    }
    return pages == h->memory_bytes / PAGE && stored == h->stored_count && bytes == h->data_bytes;
}

int art_frame_open(const uint8_t *bytes, size_t len, uint64_t memory_bytes_max, art_frame *out, char *msg, size_t msg_len)
{
    header h;
    if (len < sizeof h) {
        say(msg, msg_len, "%zu bytes are no frame", len);
        return ART_EINVAL;
    }
    memcpy(&h, bytes, sizeof h);
    if (memcmp(h.magic, magic, sizeof magic) != 0) {
        say(msg, msg_len, "it does not begin like a frame");
        return ART_EINVAL;
    }
    if (h.version != ART_FRAME_VERSION) {
        say(msg, msg_len, "version %u of the format; this is version %d", h.version, ART_FRAME_VERSION);
        return ART_EVERSION;
    }
    if (h.total_bytes != len) {
        say(msg, msg_len, "%zu of %ju bytes are there", len, (uintmax_t)h.total_bytes);
        return ART_EINVAL;
    }
    art_frame f = {
        .head = {.abi = h.abi, .segment = h.segment, .seq = h.seq, .fuel = h.fuel, .clock_ns = h.clock_ns,
                 .memory_bytes = h.memory_bytes},
        .delta = h.flags & FLAG_DELTA,
        .base_check = h.base_check,
        .check = h.check,
        .bytes = bytes,
        .len = len,
        .run_count = h.run_count,
        .stored_count = h.stored_count,
    };
    memcpy(f.head.module, h.module, sizeof h.module);
    memcpy(f.head.image, h.image, sizeof h.image);
    memcpy(f.head.engine, h.engine, sizeof h.engine);
    memcpy(f.head.id, h.id, sizeof h.id);
    memcpy(f.base_id, h.base_id, sizeof h.base_id);
    size_t sections = 0;
    uint64_t tables = (uint64_t)h.stored_count * sizeof(stored_page) + (uint64_t)h.run_count * 4;
    bool fits = !(h.flags & ~FLAG_DELTA) && !h.reserved && h.memory_bytes % PAGE == 0 &&
                h.memory_bytes <= ART_FRAME_MEMORY_BYTES_MAX && h.section_count <= ART_FRAME_SECTIONS_MAX &&
                (f.delta || (!h.base_check && all_zero(h.base_id, sizeof h.base_id))) && h.data_bytes % 8 == 0 &&
                tables <= len - sizeof h && h.data_bytes <= len - sizeof h - tables;
    fits = fits && open_sections(bytes + sizeof h, len - sizeof h - (size_t)tables - (size_t)h.data_bytes, h.section_count,
                                 &f, &sections);
    if (!fits || sizeof h + sections + h.data_bytes + tables != len) {
        say(msg, msg_len, "its parts do not fit together: it is damaged");
        return ART_EINVAL;
    }
    f.data = bytes + sizeof h + sections;
    f.stored = f.data + h.data_bytes;
    f.runs = f.stored + (size_t)h.stored_count * sizeof(stored_page);
    uint32_t check = check_of(bytes, len, sizeof h + sections, (size_t)h.data_bytes);
    if (check != h.check) {
        say(msg, msg_len, "its check is %08x where %08x was written: it is damaged", check, h.check);
        return ART_EINVAL;
    }
    if (h.memory_bytes > memory_bytes_max) {
        say(msg, msg_len, "a memory of %ju bytes; the limit is %ju", (uintmax_t)h.memory_bytes, (uintmax_t)memory_bytes_max);
        return ART_ELIMIT;
    }
    if (!open_table(&h, &f)) {
        say(msg, msg_len, "its table of pages is wrong: it is damaged");
        return ART_EINVAL;
    }
    *out = f;
    return 0;
}

bool art_frame_is_base_of(const art_frame *base, const art_frame *frame)
{
    return frame->delta && may_be_base(base, &frame->head) && base->check == frame->base_check &&
           memcmp(base->head.id, frame->base_id, sizeof base->head.id) == 0;
}

const uint8_t *art_frame_section_get(const art_frame *frame, uint32_t tag, uint64_t *len)
{
    for (uint32_t i = 0; i < frame->section_count; i++) {
        if (frame->sections[i].tag == tag) {
            *len = frame->sections[i].len;
            return frame->sections[i].bytes;
        }
    }
    *len = 0;
    return NULL;
}

void art_frame_pages(const art_frame *frame, uint8_t *kinds)
{
    for (uint32_t i = 0; i < frame->run_count; i++) {
        uint32_t kind, count;
        run_at(frame, i, &kind, &count);
        memset(kinds, (int)kind, count);
        kinds += count;
    }
}

/* --- restoring ---------------------------------------------------------------- */

/* Writes one page. `image`: that page of it, or NULL. False: it is damaged. */
static bool restore_page(const page *p, const page *before, const uint8_t *image, bool fresh, uint8_t *to)
{
    const page *source = p->kind == ART_FRAME_BASE ? before : p;
    uint8_t together[ART_FRAME_PAGE_BYTES];
    const uint8_t *from;
    switch (source->kind) {
    case ART_FRAME_ZERO:
        /* in a fresh memory most are zero, and to write them would take memory */
        if (!fresh || (image && image != zero_page && !art_frame_is_zero(to))) {
            memset(to, 0, PAGE);
        }
        return true;
    case ART_FRAME_IMAGE:
        if (!fresh) {
            memcpy(to, image ? image : zero_page, PAGE);
        }
        return true;
    case ART_FRAME_BASE_PATCH:
        from = bytes_of(before, image, together);
        if (!from) {
            return false;
        }
        memcpy(to, from, PAGE);
        break;
    case ART_FRAME_IMAGE_PATCH:
        if (!fresh) {
            memcpy(to, image ? image : zero_page, PAGE);
        }
        break;
    default: /* whole */
        memcpy(to, source->bytes, PAGE);
        return art_crc32c(0, to, PAGE) == source->stored.crc;
    }
    return apply_patch(to, source->bytes, source->stored.bytes) && art_crc32c(0, to, PAGE) == source->stored.crc;
}

int art_frame_restore_some(art_frame_restorer *r, uint32_t pages, char *msg, size_t msg_len)
{
    const art_frame *frame = r->frame;
    if (!r->page) {
        if (frame->delta && (!r->base || !art_frame_is_base_of(r->base, frame))) {
            say(msg, msg_len, r->base ? "the base is another frame than the one it was made against"
                                      : "it is a delta and its base is missing");
            return ART_EINVAL;
        }
        if ((r->image && r->image->len % PAGE) || (!r->image && !all_zero(frame->head.image, sizeof frame->head.image))) {
            say(msg, msg_len, "its image is missing");
            return ART_EINVAL;
        }
        r->pages = pages_of(frame);
        r->befores = pages_of(frame->delta ? r->base : NULL);
    }
    const uint64_t end = frame->head.memory_bytes / PAGE;
    for (; pages && r->page < end; pages--, r->page++) {
        page p = next_page(&r->pages), before = next_page(&r->befores);
        if (p.kind == ART_FRAME_WHOLE) {
            foresee(r->pages.data);
        }
        if (!restore_page(&p, &before, image_page(r->image, r->page), r->fresh, r->memory + r->page * PAGE)) {
            say(msg, msg_len, "the page at byte %ju of its memory is damaged", (uintmax_t)(r->page * PAGE));
            return ART_EINVAL;
        }
    }
    return r->page < end;
}

uint32_t art_frame_restore_writes(const art_frame_restorer *r, uint32_t most)
{
    const art_frame *frame = r->frame;
    cursor c = r->page ? r->pages : pages_of(frame);
    const uint64_t rest = frame->head.memory_bytes / PAGE - r->page;
    uint32_t count = 0;
    while (count < most && count < rest && is_stored(next_page(&c).kind)) {
        count++;
    }
    return count;
}

int art_frame_restore(const art_frame *frame, const art_frame_image *image, const art_frame *base, bool fresh,
                      uint8_t *memory, char *msg, size_t msg_len)
{
    art_frame_restorer all = {.frame = frame, .base = base, .image = image, .fresh = fresh, .memory = memory};
    return art_frame_restore_some(&all, UINT32_MAX, msg, msg_len);
}
