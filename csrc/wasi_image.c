/* wasi_image.c: arguments, environment and files of WASI guests, checked and copied into one immutable image. */
#include "wasi_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "art_err.h"

static int refuse(int err, char *msg, size_t msg_len, const char *format, ...) __attribute__((format(printf, 4, 5)));

static int refuse(int err, char *msg, size_t msg_len, const char *format, ...)
{
    va_list args;
    if (msg && msg_len) {
        va_start(args, format);
        vsnprintf(msg, msg_len, format, args);
        va_end(args);
    }
    return err;
}

/* --- texts -------------------------------------------------------------------- */

static int strings_copy(const art_wasi_text *texts, uint32_t count, bool env, art__wasi_strings *out, char *msg,
                        size_t msg_len)
{
    const char *what = env ? "environment variable" : "argument";
    uint64_t total = 0;
    if (count > ART_WASI_STRINGS_MAX) {
        return refuse(ART_ELIMIT, msg, msg_len, "%u %ss, the limit is %u", count, what, ART_WASI_STRINGS_MAX);
    }
    for (uint32_t i = 0; i < count; i++) {
        const char *equals = texts[i].len ? memchr(texts[i].bytes, '=', texts[i].len) : NULL;
        if (texts[i].len && memchr(texts[i].bytes, '\0', texts[i].len)) {
            return refuse(ART_EINVAL, msg, msg_len, "%s %u holds a NUL", what, i);
        }
        if (env && (!equals || equals == texts[i].bytes)) {
            return refuse(ART_EINVAL, msg, msg_len, "%s %u is not NAME=value", what, i);
        }
        total += (uint64_t)texts[i].len + 1;
    }
    if (total > ART_WASI_STRING_BYTES_MAX) {
        return refuse(ART_ELIMIT, msg, msg_len, "%llu bytes of %ss, the limit is %u", (unsigned long long)total, what,
                      ART_WASI_STRING_BYTES_MAX);
    }
    out->bytes = malloc(total ? total : 1);
    out->at = malloc(count ? count * sizeof *out->at : 1);
    if (!out->bytes || !out->at) {
        return ART_ENOMEM;
    }
    for (uint32_t i = 0; i < count; i++) {
        out->at[i] = out->len;
        if (texts[i].len) {
            memcpy(out->bytes + out->len, texts[i].bytes, texts[i].len);
        }
        out->len += texts[i].len;
        out->bytes[out->len++] = '\0';
    }
    out->count = count;
    return 0;
}

/* --- files -------------------------------------------------------------------- */

static int path_check(const art_wasi_text *path, uint32_t index, char *msg, size_t msg_len)
{
    uint32_t depth = 1, start = 0;
    if (path->len > ART_WASI_PATH_BYTES_MAX) {
        return refuse(ART_ELIMIT, msg, msg_len, "the path of file %u has %u bytes, the limit is %u", index, path->len,
                      ART_WASI_PATH_BYTES_MAX);
    }
    for (uint32_t i = 0; i <= path->len; i++) {
        if (i < path->len && path->bytes[i] != '/') {
            if (path->bytes[i] == '\0') {
                return refuse(ART_EINVAL, msg, msg_len, "the path of file %u holds a NUL", index);
            }
            continue;
        }
        uint32_t len = i - start;
        const char *name = path->bytes + start;
        if (len == 0 || (name[0] == '.' && (len == 1 || (len == 2 && name[1] == '.')))) {
            return refuse(ART_EINVAL, msg, msg_len, "the path of file %u has an empty name, \".\" or \"..\"", index);
        }
        if (len > ART_WASI_NAME_BYTES_MAX || (i < path->len && ++depth > ART_WASI_DEPTH_MAX)) {
            return refuse(ART_ELIMIT, msg, msg_len,
                          "the path of file %u has a name of more than %u bytes, or more than %u names", index, ART_WASI_NAME_BYTES_MAX, ART_WASI_DEPTH_MAX);
        }
        start = i + 1;
    }
    return 0;
}

static int compare_names(const char *a, uint32_t a_len, const char *b, uint32_t b_len)
{
    int order = memcmp(a, b, a_len < b_len ? a_len : b_len);
    return order ? order : (a_len > b_len) - (a_len < b_len);
}

static uint32_t name_len_at(const art_wasi_text *path, uint32_t at)
{
    const char *slash = memchr(path->bytes + at, '/', path->len - at);
    return slash ? (uint32_t)(slash - path->bytes) - at : path->len - at;
}

/* Name by name, so that what is in one directory stands together. */
static int compare_paths(const void *left, const void *right)
{
    const art_wasi_text *a = &((const art_wasi_file *)left)->path, *b = &((const art_wasi_file *)right)->path;
    for (uint32_t at = 0;;) { /* the same up to `at` */
        uint32_t a_len = name_len_at(a, at), b_len = name_len_at(b, at);
        int order = compare_names(a->bytes + at, a_len, b->bytes + at, b_len);
        if (order) {
            return order;
        }
        at += a_len + 1;
        if (at > a->len || at > b->len) {
            return (a->len > b->len) - (a->len < b->len);
        }
    }
}

/* Which files are below a node, and how long its own path with its slash is. */
typedef struct span {
    uint32_t from, to, prefix;
} span;

/* Breadth first, so that children stand together. `files` are sorted. */
static int tree_build(art_wasi_image *image, const art_wasi_file *files, uint32_t count, char *msg, size_t msg_len)
{
    uint32_t room = 64;
    span *spans = malloc(room * sizeof *spans);
    image->nodes = malloc(room * sizeof *image->nodes);
    int err = spans && image->nodes ? 0 : ART_ENOMEM;
    if (!err) {
        image->nodes[0] = (art__wasi_node){.name = "", .directory = true};
        spans[0] = (span){0, count, 0};
        image->node_count = 1;
    }
    for (uint32_t node = 0; !err && node < image->node_count; node++) {
        span in = spans[node];
        image->nodes[node].first = image->node_count;
        for (uint32_t i = in.from, next; image->nodes[node].directory && !err && i < in.to; i = next) {
            const art_wasi_text *path = &files[i].path;
            const char *name = path->bytes + in.prefix;
            uint32_t len = name_len_at(path, in.prefix);
            bool leaf = in.prefix + len == path->len;
            for (next = i + 1; next < in.to; next++) {
                const art_wasi_text *other = &files[next].path;
                uint32_t other_len = name_len_at(other, in.prefix);
                if (other_len != len || memcmp(other->bytes + in.prefix, name, len) != 0) {
                    break;
                }
            }
            if (leaf && next > i + 1) {
                err = refuse(ART_EINVAL, msg, msg_len, "the file %.*s is there twice, or is a directory too",
                             (int)path->len, path->bytes);
                break;
            }
            if (image->node_count == room) {
                room *= 2;
                span *more_spans = realloc(spans, room * sizeof *spans);
                spans = more_spans ? more_spans : spans;
                art__wasi_node *more = realloc(image->nodes, room * sizeof *more);
                image->nodes = more ? more : image->nodes;
                if (!more_spans || !more) {
                    err = ART_ENOMEM;
                    break;
                }
            }
            spans[image->node_count] = (span){i, next, in.prefix + len + 1};
            image->nodes[image->node_count++] = (art__wasi_node){
                .name = name,
                .name_len = len,
                .bytes = leaf ? files[i].bytes : NULL,
                .len = leaf ? files[i].len : 0,
                .parent = node,
                .directory = !leaf,
            };
            image->nodes[node].count++;
        }
    }
    free(spans);
    return err;
}

static int files_copy(const art_wasi_config *config, art_wasi_image *image, char *msg, size_t msg_len)
{
    uint64_t total = 0, paths = 0;
    if (config->files_count > ART_WASI_FILES_MAX) {
        return refuse(ART_ELIMIT, msg, msg_len, "%u files, the limit is %u", config->files_count, ART_WASI_FILES_MAX);
    }
    for (uint32_t i = 0; i < config->files_count; i++) {
        int err = path_check(&config->files[i].path, i, msg, msg_len);
        if (err) {
            return err;
        }
        paths += config->files[i].path.len;
        total += config->files[i].len;
    }
    if (total > ART_WASI_FILE_BYTES_MAX) {
        return refuse(ART_ELIMIT, msg, msg_len, "%llu bytes of files, the limit is %u", (unsigned long long)total,
                      ART_WASI_FILE_BYTES_MAX);
    }
    if (!config->files_count) {
        return 0;
    }
    art_wasi_file *files = malloc(config->files_count * sizeof *files);
    image->paths = malloc(paths);
    image->contents = malloc(total ? total : 1);
    if (!files || !image->paths || !image->contents) {
        free(files);
        return ART_ENOMEM;
    }
    char *path = image->paths;
    uint8_t *bytes = image->contents;
    for (uint32_t i = 0; i < config->files_count; i++) {
        const art_wasi_file *from = &config->files[i];
        memcpy(path, from->path.bytes, from->path.len);
        if (from->len) {
            memcpy(bytes, from->bytes, from->len);
        }
        files[i] = (art_wasi_file){{path, from->path.len}, bytes, from->len};
        path += from->path.len;
        bytes += from->len;
    }
    qsort(files, config->files_count, sizeof *files, compare_paths);
    int err = tree_build(image, files, config->files_count, msg, msg_len);
    free(files);
    return err;
}

uint32_t art__wasi_child(const art_wasi_image *image, uint32_t node, const char *name, uint32_t len)
{
    uint32_t low = image->nodes[node].first, high = low + image->nodes[node].count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const art__wasi_node *at = &image->nodes[middle];
        int order = compare_names(at->name, at->name_len, name, len);
        if (order == 0) {
            return middle;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return ART__WASI_NONE;
}

/* --- life --------------------------------------------------------------------- */

int art_wasi_image_new(const art_wasi_config *config, art_wasi_image **out, char *msg, size_t msg_len)
{
    art_wasi_image *image = calloc(1, sizeof *image);
    if (!image) {
        return ART_ENOMEM;
    }
    atomic_init(&image->references, 1);
    int err = strings_copy(config->args, config->args_count, false, &image->args, msg, msg_len);
    if (!err) {
        err = strings_copy(config->env, config->env_count, true, &image->env, msg, msg_len);
    }
    if (!err) {
        err = files_copy(config, image, msg, msg_len);
    }
    if (err) {
        art_wasi_image_release(image);
        return err;
    }
    *out = image;
    return 0;
}

art_wasi_image *art_wasi_image_retain(art_wasi_image *image)
{
    if (image) {
        /* relaxed: the caller has a reference already, nothing is published by taking another */
        atomic_fetch_add_explicit(&image->references, 1, memory_order_relaxed);
    }
    return image;
}

void art_wasi_image_release(art_wasi_image *image)
{
    /* acq_rel: every use through any reference happens before the free below */
    if (!image || atomic_fetch_sub_explicit(&image->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    free(image->args.bytes);
    free(image->args.at);
    free(image->env.bytes);
    free(image->env.at);
    free(image->nodes);
    free(image->paths);
    free(image->contents);
    free(image);
}
