/* frame.h: the codec of frames: the state of a suspended guest as bytes, and back. docs/frame-format.md draws the bytes.
 *
 * What it is: a header (whose state it is, and where in its journal), small sections that the codec only carries, and
 * the linear memory, page by page of 4 KiB. Pages of zeros and pages as in the guest's initial image are not stored; a
 * frame may be a delta: then pages as in another frame, its base, are not stored either, and of pages that changed a
 * little only the changed words. A base is no delta itself, so two frames are the most that are needed to get a memory back.
 *
 * What always holds:
 *  - What was encoded comes back to the byte, given the same image and base; anything else is refused, or found by the
 *    checks: CRC32C over header, sections and table of pages, and over each page that is stored in whole or in part, as
 *    it is once restored. They find damage and mix-ups. They are no protection against forgery: frames are kept where
 *    only the node writes.
 *  - Input is hostile all the same: art_frame_open uses no length before it was checked, allocates nothing, and its time is
 *    linear in the input, or in the memory's pages where these take no bytes.
 *
 * Thread-safety: no state but a table that is made once; any thread, any number at once. An art_frame borrows its bytes.
 */
#ifndef ART_FRAME_H
#define ART_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    ART_FRAME_VERSION = 1,
    ART_FRAME_PAGE_BYTES = 4096,
    ART_FRAME_ID_BYTES = 16,
    ART_FRAME_DIGEST_BYTES = 32,
    ART_FRAME_SECTIONS_MAX = 64,
};
/* Of any frame's memory: what 32-bit guests can have. */
#define ART_FRAME_MEMORY_BYTES_MAX (UINT64_C(4) << 30)

/* Whose state, and when. Fields of bytes are the caller's: the codec compares what it says it compares. */
typedef struct art_frame_head {
    uint32_t abi;                            /* of guests */
    uint8_t module[ART_FRAME_DIGEST_BYTES];  /* digest of the module's wasm */
    uint8_t image[ART_FRAME_DIGEST_BYTES];   /* digest of the initial memory; zeros: pages are not compared with any */
    uint8_t engine[ART_FRAME_DIGEST_BYTES];  /* the engine's version, as text, NULs after it */
    uint8_t id[ART_FRAME_ID_BYTES];          /* of this frame; of its run's frames, no two have the same */
    uint64_t segment, seq;                   /* position in the journal: of the last record that the guest has seen */
    uint64_t fuel;                           /* used so far */
    uint64_t clock_ns;                       /* the guest's clock */
    uint64_t memory_bytes;                   /* a multiple of ART_FRAME_PAGE_BYTES */
} art_frame_head;

typedef struct art_frame_section {
    uint32_t tag; /* the caller's; not 0 */
    const uint8_t *bytes;
    uint64_t len;
} art_frame_section;

/* What the pages of a frame are. */
enum {
    ART_FRAME_ZERO,        /* nothing stored */
    ART_FRAME_IMAGE,       /* as in the image; nothing stored */
    ART_FRAME_BASE,        /* as in the base; nothing stored */
    ART_FRAME_WHOLE,       /* stored */
    ART_FRAME_IMAGE_PATCH, /* words that differ from the image */
    ART_FRAME_BASE_PATCH,  /* words that differ from the base */
    ART_FRAME_KINDS,
};

/* A frame whose header, sections and table were checked. Borrows `bytes`. Fields from `bytes` on are the codec's own. */
typedef struct art_frame {
    art_frame_head head;
    bool delta;
    uint8_t base_id[ART_FRAME_ID_BYTES]; /* if it is one */
    uint32_t base_check;
    uint32_t check; /* CRC32C over header, sections and table, hence over all pages' */
    uint32_t section_count;
    art_frame_section sections[ART_FRAME_SECTIONS_MAX];
    uint64_t page_count[ART_FRAME_KINDS];
    const uint8_t *bytes;
    size_t len;
    const uint8_t *data, *runs, *stored;
    uint32_t run_count, stored_count;
} art_frame;

/* Output that grows, for use again and again: set it to zeros first, and free what it has at the end. */
typedef struct art_frame_buf {
    uint8_t *bytes; /* malloc'ed */
    size_t len, room;
} art_frame_buf;
void art_frame_buf_free(art_frame_buf *buf);

/* Memory of a guest when it began. A part that is missing at its end counts as zeros. */
typedef struct art_frame_image {
    const uint8_t *bytes;
    size_t len;
} art_frame_image;

/* Encodes a frame into `out`, whose content it replaces. `image`: NULL or what head->image is the digest of. `base`: NULL, or
 * a frame of the same module, engine, ABI and image that is no delta, for a delta against it.
 * ART_EINVAL (memory_bytes is wrong, a section without a tag or too many, a base that does not fit), ART_ENOMEM; `out` is then
 * empty. */
int art_frame_encode(const art_frame_head *head, const art_frame_section *sections, uint32_t section_count,
                     const uint8_t *memory, const art_frame_image *image, const art_frame *base, art_frame_buf *out);

/* Reads bytes[0..len) into *out, which borrows them. Checks everything but the stored pages, which are checked as they are
 * restored. Errors, with a message: ART_EVERSION (another version of the format), ART_EINVAL (cut off, damaged, no frame),
 * ART_ELIMIT (its memory is larger than memory_bytes_max). */
int art_frame_open(const uint8_t *bytes, size_t len, uint64_t memory_bytes_max, art_frame *out, char *msg, size_t msg_len);

/* Whether `base` is the frame that the delta `frame` was made against. */
bool art_frame_is_base_of(const art_frame *base, const art_frame *frame);

/* Writes a frame's memory to memory[0..head.memory_bytes). `image`: as at its encoding; `base`: if it is a delta.
 * `fresh`: the memory holds the image, and zeros after it, already: only what differs is written.
 * ART_EINVAL with a message: a page is damaged, the base is missing or another. What was written by then is garbage. */
int art_frame_restore(const art_frame *frame, const art_frame_image *image, const art_frame *base, bool fresh,
                      uint8_t *memory, char *msg, size_t msg_len);

/* The same in parts, so that others may have a turn between them: begin with {.frame, .image, .base, .fresh, .memory}, then call
 * until it says 0; 1: there is more. The memory may not move meanwhile; nor may it be looked at. */
typedef struct art_frame_restorer {
    const art_frame *frame, *base;
    const art_frame_image *image;
    bool fresh;
    uint8_t *memory;
    uint64_t page; /* the next one; from here on the codec's own */
    struct art__frame_cursor {
        const art_frame *frame;
        uint32_t run, left, kind;
        const uint8_t *data, *stored;
    } pages, befores;
} art_frame_restorer;
int art_frame_restore_some(art_frame_restorer *restorer, uint32_t pages, char *msg, size_t msg_len);

/* How many of the next pages, at most `most`, it will surely write to, without one between that it may leave alone. */
uint32_t art_frame_restore_writes(const art_frame_restorer *restorer, uint32_t most);

/* The bytes of a section, or NULL with *len 0. */
const uint8_t *art_frame_section_get(const art_frame *frame, uint32_t tag, uint64_t *len);

/* Says for each page which ART_FRAME_… it is: kinds[0..memory_bytes / ART_FRAME_PAGE_BYTES). */
void art_frame_pages(const art_frame *frame, uint8_t *kinds);

/* Whether a page is zeros. */
bool art_frame_is_zero(const uint8_t *page);

/* CRC-32C (Castagnoli), begun with 0; in hardware where there is some. */
uint32_t art_crc32c(uint32_t crc, const void *bytes, size_t len);
/* The same without: for tests. */
uint32_t art_crc32c_plain(uint32_t crc, const void *bytes, size_t len);

#ifdef __cplusplus
}
#endif
#endif
