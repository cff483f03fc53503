/* wasi.h: what a WASI preview 1 guest is started with: its arguments, its environment and its files.
 *
 * What it is: an `art_wasi_image` is one immutable set of those, shared by any number of guests. The files are a tree in
 * memory that guests can read and not change; no guest ever reaches a file of the host. What the imports of
 * "wasi_snapshot_preview1" do with it is in wasi.c, and for writers of guests in docs/guest-abi.md.
 *
 * Bounds: ART_WASI_…_MAX below; refused with ART_ELIMIT. Thread-safety: an image may be used from any thread.
 */
#ifndef ART_WASI_H
#define ART_WASI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ART_WASI_STRINGS_MAX 1024               /* arguments; variables */
#define ART_WASI_STRING_BYTES_MAX (1u << 20)    /* of all arguments; of all variables; each with its NUL */
#define ART_WASI_FILES_MAX 4096
#define ART_WASI_FILE_BYTES_MAX (256u << 20)    /* of all files */
#define ART_WASI_PATH_BYTES_MAX 1024
#define ART_WASI_NAME_BYTES_MAX 255
#define ART_WASI_DEPTH_MAX 32                   /* names in a path */
#define ART_WASI_RESULT_PATH "dev/result"       /* from the root, where there are files: what is written goes to the run's result */
#define ART_WASI_OUTPUT_BYTES_MAX (64u << 10)   /* kept of what a guest writes to stdout, and to stderr: the end of it */

typedef struct art_wasi_image art_wasi_image;

typedef struct art_wasi_text {
    const char *bytes;
    uint32_t len; /* no NUL among them */
} art_wasi_text;

typedef struct art_wasi_file {
    art_wasi_text path; /* like lib/json.py: names between single slashes, none "." or ".."; from the root */
    const uint8_t *bytes;
    uint32_t len;
} art_wasi_file;

typedef struct art_wasi_config {
    const art_wasi_text *args; /* the first is the program's name */
    const art_wasi_text *env;  /* NAME=value */
    const art_wasi_file *files;
    uint32_t args_count, env_count, files_count;
} art_wasi_config;

/* Copies all it is given. *out is the caller's. Errors with a message: ART_EINVAL (a text or path that cannot be, a path
 * twice, a file that is a directory too), ART_ELIMIT, ART_ENOMEM. */
int art_wasi_image_new(const art_wasi_config *config, art_wasi_image **out, char *msg, size_t msg_len);

/* Images are counted: each guest holds one reference. Any thread; NULL is allowed. */
art_wasi_image *art_wasi_image_retain(art_wasi_image *image);
void art_wasi_image_release(art_wasi_image *image);

#ifdef __cplusplus
}
#endif
#endif
