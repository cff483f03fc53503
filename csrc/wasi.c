/* wasi.c: WASI preview 1 for guests, the part of it that is deterministic.
 *
 * A guest has its arguments, environment and files from its image (wasi.h), its stdin is the run's input, what it
 * writes to stdout and stderr is kept to a bound, its clocks are the guest's clock and its random numbers come from the
 * run's seed. So nothing here depends on the host, and nothing waits: poll_oneoff moves the guest's clock on. What would
 * change a file is refused with EROFS, and what there is no use for with ENOSYS. docs/guest-abi.md lists all of it.
 *
 * As in abi.c: no wrong argument traps; every range is checked, nothing is allocated by a claimed size, and a call's
 * work is bounded and counted. Multi-byte fields in the guest's memory need no alignment.
 */
#include <stdlib.h>
#include <string.h>

#include "agentrt_guest.h"
#include "guest_internal.h"
#include "wasi_internal.h"

/* errno values of preview 1 */
enum {
    SUCCESS = 0,
    E2BIG = 1,
    EBADF = 8,
    EFAULT = 21,
    EFBIG = 22,
    EINVAL = 28,
    EISDIR = 31,
    EMFILE = 33,
    ENAMETOOLONG = 37,
    ENOENT = 44,
    ENOSYS = 52,
    ENOTDIR = 54,
    ENOTSOCK = 57,
    ENOTSUP = 58,
    EROFS = 69,
    ESPIPE = 70,
    ENOTCAPABLE = 76,
};

enum { FILETYPE_CHARACTER_DEVICE = 2, FILETYPE_DIRECTORY = 3, FILETYPE_REGULAR = 4 };
enum { CLOCK_REALTIME_ID = 0, CLOCK_MONOTONIC_ID = 1, CLOCK_PROCESS_ID = 2, CLOCK_THREAD_ID = 3 };
enum { EVENT_CLOCK = 0, EVENT_FD_READ = 1, EVENT_FD_WRITE = 2 };
enum { OFLAG_CREAT = 1, OFLAG_DIRECTORY = 2, OFLAG_EXCL = 4, OFLAG_TRUNC = 8 };
enum { FDFLAGS_MASK = 31, LOOKUP_SYMLINK_FOLLOW = 1 };

#define RIGHT_FD_READ (UINT64_C(1) << 1)
#define RIGHT_FD_SEEK (UINT64_C(1) << 2)
#define RIGHT_FD_FDSTAT_SET_FLAGS (UINT64_C(1) << 3)
#define RIGHT_FD_TELL (UINT64_C(1) << 5)
#define RIGHT_FD_WRITE (UINT64_C(1) << 6)
#define RIGHT_FD_ADVISE (UINT64_C(1) << 7)
#define RIGHT_PATH_OPEN (UINT64_C(1) << 13)
#define RIGHT_FD_READDIR (UINT64_C(1) << 14)
#define RIGHT_PATH_READLINK (UINT64_C(1) << 15)
#define RIGHT_PATH_FILESTAT_GET (UINT64_C(1) << 18)
#define RIGHT_FD_FILESTAT_GET (UINT64_C(1) << 21)
#define RIGHT_POLL_FD_READWRITE (UINT64_C(1) << 27)
#define RIGHTS_FILE                                                                                                    \
    (RIGHT_FD_READ | RIGHT_FD_SEEK | RIGHT_FD_TELL | RIGHT_FD_ADVISE | RIGHT_FD_FILESTAT_GET | RIGHT_POLL_FD_READWRITE |   \
     RIGHT_FD_FDSTAT_SET_FLAGS)
#define RIGHTS_DIRECTORY                                                                                               \
    (RIGHT_PATH_OPEN | RIGHT_FD_READDIR | RIGHT_PATH_READLINK | RIGHT_PATH_FILESTAT_GET | RIGHT_FD_FILESTAT_GET)
/* Seeking and telling do not work here: a character device with these rights is none that people sit at, so that
 * programs read their input and write their output as through pipes. */
#define RIGHTS_STDIO                                                                                                   \
    (RIGHT_FD_READ | RIGHT_FD_WRITE | RIGHT_FD_SEEK | RIGHT_FD_TELL | RIGHT_FD_FILESTAT_GET | RIGHT_POLL_FD_READWRITE |    \
     RIGHT_FD_FDSTAT_SET_FLAGS)

/* Bounds. A call reads or writes at most IO_BYTES_MAX and says so, as POSIX lets it. */
enum { FDS_MAX = 64, PREOPEN_FD = 3, IOVECS_MAX = 1024, IO_BYTES_MAX = 64 << 10, SUBSCRIPTIONS_MAX = 64 };
/* The guest's clock stops here, in the year 2200: sums with it cannot overflow, nor can a signed time. */
#define CLOCK_NS_MAX (UINT64_C(230) * 365 * 86400 * 1000000000)

/* In frames by their numbers. */
typedef enum fd_kind { FD_CLOSED, FD_STDIN, FD_STDOUT, FD_STDERR, FD_FILE, FD_DIRECTORY, FD_RESULT } fd_kind;

typedef struct descriptor {
    uint8_t kind; /* fd_kind */
    bool preopen;
    uint16_t flags;
    uint32_t node;
    uint64_t offset;
} descriptor;

/* The last ART_WASI_OUTPUT_BYTES_MAX bytes: a ring, once it is as large as that. */
typedef struct ring {
    uint8_t *bytes;
    uint32_t room;
    uint64_t total;
} ring;

struct art__wasi {
    descriptor fds[FDS_MAX];
    ring streams[2];
    uint32_t stdin_at;
};

typedef struct call {
    art_guest *guest;
    struct art__wasi *wasi;
    wasmtime_caller_t *caller;
    const wasmtime_val_t *args;
} call;

/* --- the guest's memory ------------------------------------------------------- */

static uint32_t arg32(const call *c, int index)
{
    return (uint32_t)c->args[index].of.i32;
}

static uint64_t arg64(const call *c, int index)
{
    return (uint64_t)c->args[index].of.i64;
}

static uint8_t *bytes_at(const call *c, uint32_t at, uint32_t len)
{
    return art__abi_bytes(c->guest, c->caller, at, len);
}

static void put16(uint8_t *to, uint16_t value)
{
    memcpy(to, &value, sizeof value);
}

static void put32(uint8_t *to, uint32_t value)
{
    memcpy(to, &value, sizeof value);
}

static void put64(uint8_t *to, uint64_t value)
{
    memcpy(to, &value, sizeof value);
}

static uint32_t get32(const uint8_t *from)
{
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint64_t get64(const uint8_t *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint32_t give32(const call *c, uint32_t at, uint32_t value)
{
    uint8_t *to = bytes_at(c, at, 4);
    if (!to) {
        return EFAULT;
    }
    put32(to, value);
    return SUCCESS;
}

static uint32_t give64(const call *c, uint32_t at, uint64_t value)
{
    uint8_t *to = bytes_at(c, at, 8);
    if (!to) {
        return EFAULT;
    }
    put64(to, value);
    return SUCCESS;
}

/* --- state -------------------------------------------------------------------- */

static struct art__wasi *wasi_of(art_guest *guest)
{
    if (!guest->wasi) {
        guest->wasi = calloc(1, sizeof *guest->wasi);
        if (!guest->wasi) {
            abort(); /* the host is out of memory: as for any allocation in the engine itself */
        }
        descriptor *fds = guest->wasi->fds;
        fds[0].kind = FD_STDIN;
        fds[1].kind = FD_STDOUT;
        fds[2].kind = FD_STDERR;
        if (guest->image && guest->image->nodes) {
            fds[PREOPEN_FD] = (descriptor){.kind = FD_DIRECTORY, .preopen = true};
        }
    }
    return guest->wasi;
}

void art__wasi_free(art_guest *guest)
{
    if (guest->wasi) {
        free(guest->wasi->streams[0].bytes);
        free(guest->wasi->streams[1].bytes);
        free(guest->wasi);
        guest->wasi = NULL;
    }
}

/* In a frame: a saved_descriptor for each that may be, then the streams, each its `total` and what is kept, oldest byte first. */
static void ring_add(ring *ring, const uint8_t *bytes, uint32_t len);

typedef struct saved_descriptor {
    uint8_t kind, preopen;
    uint16_t flags;
    uint32_t node;
    uint64_t offset;
} saved_descriptor;

typedef struct saved_wasi {
    uint32_t stdin_at, padding;
    saved_descriptor fds[FDS_MAX];
} saved_wasi;

bool art__wasi_save(const art_guest *guest, art_frame_buf *to)
{
    const struct art__wasi *wasi = guest->wasi;
    if (!wasi) {
        return true;
    }
    saved_wasi saved = {.stdin_at = wasi->stdin_at};
    for (int i = 0; i < FDS_MAX; i++) {
        const descriptor *fd = &wasi->fds[i];
        saved.fds[i] = (saved_descriptor){fd->kind, fd->preopen, fd->flags, fd->node, fd->offset};
    }
    bool done = art__save(to, &saved, sizeof saved);
    for (int i = 0; done && i < 2; i++) {
        const ring *ring = &wasi->streams[i];
        const uint32_t most = ART_WASI_OUTPUT_BYTES_MAX;
        uint32_t at = ring->total > most ? (uint32_t)(ring->total % most) : 0;
        uint32_t len = ring->total < most ? (uint32_t)ring->total : most;
        uint8_t *straight = malloc(len ? len : 1);
        if (!straight) {
            return false;
        }
        if (len) {
            memcpy(straight, ring->bytes + at, len - at);
            memcpy(straight + (len - at), ring->bytes, at);
        }
        done = art__save(to, &ring->total, sizeof ring->total) && art__save(to, straight, len);
        free(straight);
    }
    return done;
}

bool art__wasi_load(art_guest *guest, art__saved_bytes from)
{
    saved_wasi saved;
    if (!from.left) {
        return true; /* it had made no call yet */
    }
    const void *at = art__saved(&from, sizeof saved);
    if (!at) {
        return false;
    }
    memcpy(&saved, at, sizeof saved);
    uint32_t nodes = guest->image && guest->image->nodes ? guest->image->node_count : 0;
    struct art__wasi *wasi = wasi_of(guest);
    for (int i = 0; i < FDS_MAX; i++) {
        const saved_descriptor *fd = &saved.fds[i];
        bool of_file = fd->kind == FD_FILE || fd->kind == FD_DIRECTORY;
        if (fd->kind > FD_RESULT || fd->preopen > 1 ||
            (of_file && (fd->node >= nodes || guest->image->nodes[fd->node].directory != (fd->kind == FD_DIRECTORY)))) {
            return false;
        }
        wasi->fds[i] = (descriptor){fd->kind, fd->preopen, fd->flags, fd->node, fd->offset};
    }
    if (saved.stdin_at > guest->input_len) {
        return false;
    }
    wasi->stdin_at = saved.stdin_at;
    for (int i = 0; i < 2; i++) {
        const uint32_t most = ART_WASI_OUTPUT_BYTES_MAX;
        ring *ring = &wasi->streams[i];
        uint64_t total;
        const void *number = art__saved(&from, sizeof total);
        if (!number) {
            return false;
        }
        memcpy(&total, number, sizeof total);
        uint32_t len = total < most ? (uint32_t)total : most;
        const uint8_t *bytes = art__saved(&from, len);
        if (!bytes) {
            return false;
        }
        /* as if the rest had been written and cut off: the oldest byte's place follows from `total` */
        ring->total = total - len;
        if (ring->total) {
            ring->bytes = malloc(most);
            ring->room = most;
            if (!ring->bytes) {
                abort();
            }
        }
        if (len) {
            ring_add(ring, bytes, len);
        }
    }
    return from.left == 0;
}

/* NULL if it is not open. */
static descriptor *fd_of(const call *c, uint32_t fd)
{
    return fd < FDS_MAX && c->wasi->fds[fd].kind != FD_CLOSED ? &c->wasi->fds[fd] : NULL;
}

static const art__wasi_node *node_of(const call *c, const descriptor *fd)
{
    return &c->guest->image->nodes[fd->node];
}

static bool is_stdio(const descriptor *fd)
{
    return fd->kind <= FD_STDERR || fd->kind == FD_RESULT;
}

/* --- output ------------------------------------------------------------------- */

static void ring_add(ring *ring, const uint8_t *bytes, uint32_t len)
{
    const uint32_t most = ART_WASI_OUTPUT_BYTES_MAX;
    uint64_t wanted = ring->total + len;
    if (wanted > ring->room && ring->room < most) {
        uint32_t room = ring->room ? ring->room : 256;
        while (room < most && room < wanted) {
            room *= 2;
        }
        ring->bytes = realloc(ring->bytes, room);
        if (!ring->bytes) {
            abort();
        }
        ring->room = room; /* nothing has wrapped: that happens at the full size only */
    }
    while (len) {
        uint32_t at = (uint32_t)(ring->total % most), part = most - at < len ? most - at : len;
        memcpy(ring->bytes + at, bytes, part);
        ring->total += part;
        bytes += part;
        len -= part;
    }
}

/* Puts the ring's oldest byte first. */
static void ring_straighten(ring *ring)
{
    const uint32_t most = ART_WASI_OUTPUT_BYTES_MAX;
    uint32_t at = ring->total > most ? (uint32_t)(ring->total % most) : 0;
    if (at) {
        uint8_t *straight = malloc(most);
        if (!straight) {
            abort();
        }
        memcpy(straight, ring->bytes + at, most - at);
        memcpy(straight + (most - at), ring->bytes, at);
        free(ring->bytes);
        ring->bytes = straight;
    }
}

void art__wasi_end(art_guest *guest)
{
    if (guest->wasi) {
        ring_straighten(&guest->wasi->streams[0]);
        ring_straighten(&guest->wasi->streams[1]);
    }
}

art_stream art__wasi_stream(const art_guest *guest, int fd)
{
    if (!guest->wasi) {
        return (art_stream){0};
    }
    const ring *ring = &guest->wasi->streams[fd - 1];
    uint32_t len = ring->total < ART_WASI_OUTPUT_BYTES_MAX ? (uint32_t)ring->total : ART_WASI_OUTPUT_BYTES_MAX;
    return (art_stream){.bytes = ring->bytes, .len = len, .total = ring->total};
}

/* --- arguments and environment ------------------------------------------------ */

static const art__wasi_strings no_strings = {.bytes = (char *)"", .count = 0};

static const art__wasi_strings *args_of(const art_guest *guest)
{
    static const uint32_t zero = 0;
    static const art__wasi_strings one = {.bytes = (char *)"agent", .at = (uint32_t *)&zero, .count = 1, .len = 6};
    return guest->image && guest->image->args.count ? &guest->image->args : &one;
}

static const art__wasi_strings *env_of(const art_guest *guest)
{
    return guest->image ? &guest->image->env : &no_strings;
}

static uint32_t strings_sizes(const call *c, const art__wasi_strings *strings)
{
    uint32_t err = give32(c, arg32(c, 0), strings->count);
    return err ? err : give32(c, arg32(c, 1), strings->len);
}

static uint32_t strings_get(const call *c, const art__wasi_strings *strings)
{
    uint32_t at = arg32(c, 1);
    uint8_t *pointers = bytes_at(c, arg32(c, 0), strings->count * 4), *bytes = bytes_at(c, at, strings->len);
    if (!pointers || !bytes) {
        return EFAULT;
    }
    for (uint32_t i = 0; i < strings->count; i++) {
        put32(pointers + 4 * i, at + strings->at[i]);
    }
    memcpy(bytes, strings->bytes, strings->len);
    return SUCCESS;
}

static uint32_t do_args_sizes_get(const call *c)
{
    return strings_sizes(c, args_of(c->guest));
}

static uint32_t do_args_get(const call *c)
{
    return strings_get(c, args_of(c->guest));
}

static uint32_t do_environ_sizes_get(const call *c)
{
    return strings_sizes(c, env_of(c->guest));
}

static uint32_t do_environ_get(const call *c)
{
    return strings_get(c, env_of(c->guest));
}

int32_t art__wasi_main_argc(const art_guest *guest)
{
    return (int32_t)args_of(guest)->count;
}

uint32_t art__wasi_main_bytes(const art_guest *guest)
{
    const art__wasi_strings *args = args_of(guest);
    return (args->count + 1) * 4 + args->len;
}

void art__wasi_main_write(const art_guest *guest, uint8_t *to, uint32_t at)
{
    const art__wasi_strings *args = args_of(guest);
    uint32_t pointers = (args->count + 1) * 4;
    for (uint32_t i = 0; i < args->count; i++) {
        put32(to + 4 * i, at + pointers + args->at[i]);
    }
    put32(to + 4 * args->count, 0);
    memcpy(to + pointers, args->bytes, args->len);
}

/* --- clocks, randomness ------------------------------------------------------- */

static uint32_t clock_read(const call *c, uint32_t id, uint64_t *out)
{
    if (id > CLOCK_THREAD_ID) {
        return EINVAL;
    }
    *out = id >= CLOCK_PROCESS_ID ? art__guest_fuel_now(c->guest) : art__abi_clock(c->guest);
    return SUCCESS;
}

static uint32_t do_clock_res_get(const call *c)
{
    return arg32(c, 0) > CLOCK_THREAD_ID ? EINVAL : give64(c, arg32(c, 1), 1);
}

static uint32_t do_clock_time_get(const call *c)
{
    uint64_t now;
    c->guest->seen |= ART__SEEN_CLOCK;
    uint32_t err = clock_read(c, arg32(c, 0), &now);
    return err ? err : give64(c, arg32(c, 2), now);
}

static uint32_t do_random_get(const call *c)
{
    uint32_t len = arg32(c, 1);
    if (len > c->guest->engine->config.request_bytes_max) {
        return E2BIG;
    }
    uint8_t *to = bytes_at(c, arg32(c, 0), len);
    if (!to) {
        return EFAULT;
    }
    art__abi_random(c->guest, to, len);
    return SUCCESS;
}

static uint32_t do_sched_yield(const call *c)
{
    c->guest->host_work = UINT64_MAX / 2; /* pauses */
    return SUCCESS;
}

/* --- descriptors -------------------------------------------------------------- */

static uint32_t do_fd_close(const call *c)
{
    descriptor *fd = fd_of(c, arg32(c, 0));
    if (!fd) {
        return EBADF;
    }
    *fd = (descriptor){.kind = FD_CLOSED};
    return SUCCESS;
}

static uint32_t do_fd_renumber(const call *c)
{
    descriptor *from = fd_of(c, arg32(c, 0)), *to = fd_of(c, arg32(c, 1));
    if (!from || !to) {
        return EBADF;
    }
    if (from != to) {
        *to = *from;
        *from = (descriptor){.kind = FD_CLOSED};
    }
    return SUCCESS;
}

static uint8_t filetype(const descriptor *fd)
{
    return is_stdio(fd)                ? FILETYPE_CHARACTER_DEVICE
           : fd->kind == FD_DIRECTORY  ? FILETYPE_DIRECTORY
                                       : FILETYPE_REGULAR;
}

static uint32_t do_fd_fdstat_get(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    uint8_t *to = bytes_at(c, arg32(c, 1), 24);
    if (!fd || !to) {
        return fd ? EFAULT : EBADF;
    }
    uint64_t rights = fd->kind == FD_DIRECTORY ? RIGHTS_DIRECTORY : RIGHTS_FILE;
    if (is_stdio(fd)) {
        rights = RIGHTS_STDIO & ~(fd->kind == FD_STDIN ? RIGHT_FD_WRITE : RIGHT_FD_READ);
    }
    memset(to, 0, 24);
    to[0] = filetype(fd);
    put16(to + 2, fd->flags);
    put64(to + 8, rights);
    put64(to + 16, fd->kind == FD_DIRECTORY ? RIGHTS_DIRECTORY | RIGHTS_FILE : 0);
    return SUCCESS;
}

static uint32_t do_fd_fdstat_set_flags(const call *c)
{
    descriptor *fd = fd_of(c, arg32(c, 0));
    if (!fd) {
        return EBADF;
    }
    if (arg32(c, 1) & ~(uint32_t)FDFLAGS_MASK) {
        return EINVAL;
    }
    fd->flags = (uint16_t)arg32(c, 1); /* nothing ever waits, and nothing is written but at the end: none matters */
    return SUCCESS;
}

static uint32_t give_filestat(const call *c, uint32_t at, uint8_t type, uint64_t inode, uint64_t size)
{
    uint8_t *to = bytes_at(c, at, 64);
    if (!to) {
        return EFAULT;
    }
    memset(to, 0, 64); /* times too: files are as old as time */
    put64(to + 8, inode);
    to[16] = type;
    put64(to + 24, 1);
    put64(to + 32, size);
    return SUCCESS;
}

static uint32_t give_filestat_of_node(const call *c, uint32_t at, uint32_t node)
{
    const art__wasi_node *of = &c->guest->image->nodes[node];
    return give_filestat(c, at, of->directory ? FILETYPE_DIRECTORY : FILETYPE_REGULAR, (uint64_t)node + 1, of->len);
}

static uint32_t do_fd_filestat_get(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    if (!fd) {
        return EBADF;
    }
    return is_stdio(fd) ? give_filestat(c, arg32(c, 1), FILETYPE_CHARACTER_DEVICE, 0, 0)
                        : give_filestat_of_node(c, arg32(c, 1), fd->node);
}

/* What changes nothing and may be asked of any descriptor. */
static uint32_t do_fd_sync(const call *c)
{
    return fd_of(c, arg32(c, 0)) ? SUCCESS : EBADF;
}

static uint32_t do_fd_datasync(const call *c)
{
    return do_fd_sync(c);
}

static uint32_t do_fd_advise(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    return !fd ? EBADF : is_stdio(fd) ? ESPIPE : SUCCESS;
}

static uint32_t refuse_change(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    return !fd ? EBADF : is_stdio(fd) ? EINVAL : EROFS;
}

static uint32_t do_fd_allocate(const call *c)
{
    return refuse_change(c);
}

static uint32_t do_fd_filestat_set_size(const call *c)
{
    return refuse_change(c);
}

static uint32_t do_fd_filestat_set_times(const call *c)
{
    return refuse_change(c);
}

static uint32_t do_fd_fdstat_set_rights(const call *c)
{
    return fd_of(c, arg32(c, 0)) ? ENOTSUP : EBADF;
}

static uint32_t do_fd_prestat_get(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    if (!fd || !fd->preopen) {
        return EBADF;
    }
    return give64(c, arg32(c, 1), UINT64_C(1) << 32); /* a directory; its name has one byte */
}

static uint32_t do_fd_prestat_dir_name(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    if (!fd || !fd->preopen) {
        return EBADF;
    }
    if (arg32(c, 2) < 1) {
        return ENAMETOOLONG;
    }
    uint8_t *to = bytes_at(c, arg32(c, 1), 1);
    if (!to) {
        return EFAULT;
    }
    *to = '/';
    return SUCCESS;
}

/* --- reading and writing ------------------------------------------------------ */

/* Goes through a list of buffers, `each` with at most IO_BYTES_MAX bytes together; *done counts them. */
static uint32_t transfer(const call *c, uint32_t at, uint32_t count, uint64_t most, uint32_t *done,
                         void (*each)(void *to, uint8_t *bytes, uint32_t len), void *to)
{
    *done = 0;
    if (count > IOVECS_MAX) {
        return EINVAL;
    }
    const uint8_t *list = bytes_at(c, at, count * 8);
    if (!list) {
        return EFAULT;
    }
    if (most > IO_BYTES_MAX) {
        most = IO_BYTES_MAX;
    }
    c->guest->host_work += (uint64_t)count * 64;
    for (uint32_t i = 0; i < count && *done < most; i++) {
        /* read again each time: a buffer may lie over the list */
        uint32_t buffer = get32(list + 8 * i), len = get32(list + 8 * i + 4);
        len = len < most - *done ? len : (uint32_t)(most - *done);
        uint8_t *bytes = bytes_at(c, buffer, len);
        if (!bytes) {
            return *done ? SUCCESS : EFAULT;
        }
        if (len) {
            each(to, bytes, len);
        }
        *done += len;
    }
    return SUCCESS;
}

static void write_part(void *to, uint8_t *bytes, uint32_t len)
{
    ring_add(to, bytes, len);
}

static void write_result(void *to, uint8_t *bytes, uint32_t len)
{
    art__abi_output_add(to, bytes, len);
}

/* Goes behind what the result is already. */
static uint32_t write_to_result(const call *c)
{
    art_guest *guest = c->guest;
    uint32_t done, left = guest->engine->config.result_bytes_max - guest->output_len;
    if (!bytes_at(c, arg32(c, 3), 4)) {
        return EFAULT;
    }
    if (!left) {
        return EFBIG;
    }
    uint32_t err = transfer(c, arg32(c, 1), arg32(c, 2), left, &done, write_result, guest);
    return err ? err : give32(c, arg32(c, 3), done);
}

static uint32_t do_fd_write(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    uint32_t done;
    if (fd && fd->kind == FD_RESULT) {
        return write_to_result(c);
    }
    if (!fd || (fd->kind != FD_STDOUT && fd->kind != FD_STDERR)) {
        return EBADF;
    }
    if (!bytes_at(c, arg32(c, 3), 4)) {
        return EFAULT;
    }
    uint32_t err = transfer(c, arg32(c, 1), arg32(c, 2), UINT64_MAX, &done, write_part,
                            &c->wasi->streams[fd->kind == FD_STDERR]);
    return err ? err : give32(c, arg32(c, 3), done);
}

static uint32_t do_fd_pwrite(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    return fd && is_stdio(fd) ? ESPIPE : EBADF;
}

typedef struct source {
    const uint8_t *bytes;
} source;

static void read_part(void *from, uint8_t *to, uint32_t len)
{
    source *source = from;
    memcpy(to, source->bytes, len);
    source->bytes += len;
}

static uint32_t read_from(const call *c, const uint8_t *bytes, uint32_t len, uint64_t offset, uint32_t done_at,
                          uint32_t *done)
{
    uint64_t at = offset < len ? offset : len;
    source source = {bytes + at};
    if (!bytes_at(c, done_at, 4)) {
        return EFAULT;
    }
    uint32_t err = transfer(c, arg32(c, 1), arg32(c, 2), len - at, done, read_part, &source);
    return err ? err : give32(c, done_at, *done);
}

static uint32_t do_fd_read(const call *c)
{
    descriptor *fd = fd_of(c, arg32(c, 0));
    uint32_t done, err;
    if (fd && fd->kind == FD_STDIN) {
        art_guest *guest = c->guest;
        guest->seen |= ART__SEEN_INPUT;
        err = read_from(c, guest->input, guest->input_len, c->wasi->stdin_at, arg32(c, 3), &done);
        c->wasi->stdin_at += err ? 0 : done;
        return err;
    }
    if (!fd || fd->kind != FD_FILE) {
        return fd && fd->kind == FD_DIRECTORY ? EISDIR : EBADF;
    }
    err = read_from(c, node_of(c, fd)->bytes, node_of(c, fd)->len, fd->offset, arg32(c, 3), &done);
    fd->offset += err ? 0 : done;
    return err;
}

static uint32_t do_fd_pread(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    uint32_t done;
    if (!fd || fd->kind != FD_FILE) {
        return !fd ? EBADF : is_stdio(fd) ? ESPIPE : EISDIR;
    }
    return read_from(c, node_of(c, fd)->bytes, node_of(c, fd)->len, arg64(c, 3), arg32(c, 4), &done);
}

static uint32_t do_fd_seek(const call *c)
{
    descriptor *fd = fd_of(c, arg32(c, 0));
    int64_t base, target;
    if (!fd || fd->kind != FD_FILE) {
        return !fd ? EBADF : is_stdio(fd) ? ESPIPE : EISDIR;
    }
    switch (arg32(c, 2)) {
    case 0:
        base = 0;
        break;
    case 1:
        base = (int64_t)fd->offset;
        break;
    case 2:
        base = node_of(c, fd)->len;
        break;
    default:
        return EINVAL;
    }
    if (__builtin_add_overflow(base, (int64_t)arg64(c, 1), &target) || target < 0) {
        return EINVAL;
    }
    uint32_t err = give64(c, arg32(c, 3), (uint64_t)target);
    if (!err) {
        fd->offset = (uint64_t)target;
    }
    return err;
}

static uint32_t do_fd_tell(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    if (!fd || fd->kind != FD_FILE) {
        return !fd ? EBADF : is_stdio(fd) ? ESPIPE : EISDIR;
    }
    return give64(c, arg32(c, 1), fd->offset);
}

/* One entry, or as much of it as there is room for. */
static void give_entry(uint8_t *to, uint32_t room, uint32_t *used, uint64_t cookie, uint32_t node, uint8_t type,
                       const char *name, uint32_t len)
{
    uint8_t head[24] = {0};
    put64(head, cookie);
    put64(head + 8, (uint64_t)node + 1);
    put32(head + 16, len);
    head[20] = type;
    uint32_t part = room - *used < sizeof head ? room - *used : (uint32_t)sizeof head;
    memcpy(to + *used, head, part);
    *used += part;
    part = room - *used < len ? room - *used : len;
    memcpy(to + *used, name, part);
    *used += part;
}

static uint32_t do_fd_readdir(const call *c)
{
    const descriptor *fd = fd_of(c, arg32(c, 0));
    uint32_t room = arg32(c, 2), used = 0;
    if (!fd || fd->kind != FD_DIRECTORY) {
        return fd ? ENOTDIR : EBADF;
    }
    uint8_t *to = bytes_at(c, arg32(c, 1), room);
    if (!to || !bytes_at(c, arg32(c, 4), 4)) {
        return EFAULT;
    }
    const art__wasi_node *nodes = c->guest->image->nodes, *of = &nodes[fd->node];
    /* the cookie of an entry is the number of the next: ".", "..", then the children */
    for (uint64_t i = arg64(c, 3); i < (uint64_t)of->count + 2 && used < room; i++) {
        uint32_t node = i == 0 ? fd->node : i == 1 ? of->parent : of->first + (uint32_t)(i - 2);
        const art__wasi_node *entry = &nodes[node];
        const char *name = i == 0 ? "." : i == 1 ? ".." : entry->name;
        give_entry(to, room, &used, i + 1, node, entry->directory ? FILETYPE_DIRECTORY : FILETYPE_REGULAR, name,
                   i < 2 ? (uint32_t)i + 1 : entry->name_len);
        c->guest->host_work += 32;
    }
    return give32(c, arg32(c, 4), used);
}

/* --- paths -------------------------------------------------------------------- */

/* The node a path leads to from a directory, never above it. */
static uint32_t walk(const call *c, uint32_t fd_number, uint32_t at, uint32_t len, uint32_t *out)
{
    const descriptor *fd = fd_of(c, fd_number);
    if (!fd || fd->kind != FD_DIRECTORY) {
        return fd ? ENOTDIR : EBADF;
    }
    if (len > ART_WASI_PATH_BYTES_MAX) {
        return ENAMETOOLONG;
    }
    const char *path = (const char *)bytes_at(c, at, len);
    if (!path) {
        return EFAULT;
    }
    if (!len) {
        return ENOENT;
    }
    if (path[0] == '/') {
        return ENOTCAPABLE;
    }
    const art_wasi_image *image = c->guest->image;
    uint32_t node = fd->node, depth = 0;
    for (uint32_t start = 0, end; start < len; start = end + 1) {
        const char *slash = memchr(path + start, '/', len - start);
        end = slash ? (uint32_t)(slash - path) : len;
        uint32_t size = end - start;
        const char *name = path + start;
        c->guest->host_work += 64;
        if (!image->nodes[node].directory) {
            return ENOTDIR;
        }
        if (size == 0 || (size == 1 && name[0] == '.')) {
            continue;
        }
        if (size == 2 && name[0] == '.' && name[1] == '.') {
            if (!depth--) {
                return ENOTCAPABLE;
            }
            node = image->nodes[node].parent;
            continue;
        }
        node = art__wasi_child(image, node, name, size);
        if (node == ART__WASI_NONE) {
            return ENOENT;
        }
        depth++;
    }
    if (path[len - 1] == '/' && !image->nodes[node].directory) {
        return ENOTDIR;
    }
    *out = node;
    return SUCCESS;
}

static uint32_t open_descriptor(const call *c, descriptor opened)
{
    uint32_t number = 0;
    while (number < FDS_MAX && c->wasi->fds[number].kind != FD_CLOSED) {
        number++;
    }
    if (number == FDS_MAX) {
        return EMFILE;
    }
    uint32_t err = give32(c, arg32(c, 8), number);
    if (!err) {
        c->wasi->fds[number] = opened;
    }
    return err;
}

/* Whether path_open, whose path has been looked at, is asked for what is no file but where the result is written. */
static bool is_result(const call *c)
{
    static const char path[] = ART_WASI_RESULT_PATH;
    return fd_of(c, arg32(c, 0))->node == 0 && arg32(c, 3) == sizeof path - 1 &&
           memcmp(bytes_at(c, arg32(c, 2), arg32(c, 3)), path, sizeof path - 1) == 0;
}

static uint32_t do_path_open(const call *c)
{
    uint32_t node, oflags = arg32(c, 4), flags = arg32(c, 7) & 0xffff;
    uint64_t rights = arg64(c, 5);
    uint32_t err = walk(c, arg32(c, 0), arg32(c, 2), arg32(c, 3), &node);
    if (err == ENOENT && is_result(c)) {
        return open_descriptor(c, (descriptor){.kind = FD_RESULT});
    }
    if (err) {
        return err == ENOENT && oflags & OFLAG_CREAT ? EROFS : err;
    }
    bool directory = c->guest->image->nodes[node].directory;
    if (oflags & OFLAG_CREAT && oflags & OFLAG_EXCL) {
        return EROFS;
    }
    if (oflags & OFLAG_DIRECTORY && !directory) {
        return ENOTDIR;
    }
    if (flags & ~(uint32_t)FDFLAGS_MASK) {
        return EINVAL;
    }
    if (oflags & OFLAG_TRUNC || (rights & RIGHT_FD_WRITE && !(oflags & OFLAG_DIRECTORY))) {
        return directory ? EISDIR : EROFS;
    }
    return open_descriptor(c, (descriptor){
                                  .kind = directory ? FD_DIRECTORY : FD_FILE,
                                  .flags = (uint16_t)flags,
                                  .node = node,
                              });
}

static uint32_t do_path_filestat_get(const call *c)
{
    uint32_t node;
    uint32_t err = walk(c, arg32(c, 0), arg32(c, 2), arg32(c, 3), &node);
    return err ? err : give_filestat_of_node(c, arg32(c, 4), node);
}

static uint32_t do_path_readlink(const call *c)
{
    uint32_t node;
    uint32_t err = walk(c, arg32(c, 0), arg32(c, 1), arg32(c, 2), &node);
    return err ? err : EINVAL; /* there are no links */
}

/* What would change a directory: the descriptor is checked, the path is not looked at. */
static uint32_t refuse_path(const call *c, int fd_at)
{
    const descriptor *fd = fd_of(c, arg32(c, fd_at));
    return !fd ? EBADF : fd->kind == FD_DIRECTORY ? EROFS : ENOTDIR;
}

static uint32_t do_path_create_directory(const call *c)
{
    return refuse_path(c, 0);
}

static uint32_t do_path_filestat_set_times(const call *c)
{
    return refuse_path(c, 0);
}

static uint32_t do_path_link(const call *c)
{
    return refuse_path(c, 0);
}

static uint32_t do_path_remove_directory(const call *c)
{
    return refuse_path(c, 0);
}

static uint32_t do_path_rename(const call *c)
{
    return refuse_path(c, 0);
}

static uint32_t do_path_symlink(const call *c)
{
    return refuse_path(c, 2);
}

static uint32_t do_path_unlink_file(const call *c)
{
    return refuse_path(c, 0);
}

/* --- polling ------------------------------------------------------------------ */

/* A subscription: userdata u64, tag u8 at 8; of a clock: id u32 at 16, timeout u64 at 24, flags u16 at 40; of a
 * descriptor: fd u32 at 16. */
enum { SUBSCRIPTION_BYTES = 48, EVENT_BYTES = 32 };

typedef struct timer {
    uint64_t deadline_ns;
    uint32_t err; /* else it is ready at once */
} timer;

static timer timer_of(const uint8_t *subscription, uint64_t now)
{
    uint64_t timeout = get64(subscription + 24);
    uint32_t id = get32(subscription + 16);
    if (id > CLOCK_MONOTONIC_ID) {
        return (timer){.err = id > CLOCK_THREAD_ID ? EINVAL : ENOTSUP};
    }
    if (!(subscription[40] & 1)) { /* not absolute */
        timeout = timeout < CLOCK_NS_MAX ? now + timeout : CLOCK_NS_MAX;
    }
    return (timer){.deadline_ns = timeout < CLOCK_NS_MAX ? timeout : CLOCK_NS_MAX};
}

/* Is an event due, and with which error? */
static bool event_of(const call *c, const uint8_t *subscription, uint64_t now, uint64_t reached, uint8_t *event)
{
    uint8_t tag = subscription[8];
    uint32_t err = SUCCESS;
    uint64_t bytes = 0;
    if (tag == EVENT_CLOCK) {
        timer timer = timer_of(subscription, now);
        if (!timer.err && timer.deadline_ns > reached) {
            return false;
        }
        err = timer.err;
    } else {
        const descriptor *fd = fd_of(c, get32(subscription + 16));
        if (tag > EVENT_FD_WRITE) {
            err = EINVAL;
        } else if (!fd) {
            err = EBADF;
        } else if (tag == EVENT_FD_WRITE) {
            bytes = IO_BYTES_MAX;
        } else if (fd->kind == FD_STDIN) {
            c->guest->seen |= ART__SEEN_INPUT;
            bytes = c->guest->input_len - c->wasi->stdin_at;
        } else if (fd->kind == FD_FILE) {
            bytes = fd->offset < node_of(c, fd)->len ? node_of(c, fd)->len - fd->offset : 0;
        }
    }
    memset(event, 0, EVENT_BYTES);
    memcpy(event, subscription, 8);
    put16(event + 8, (uint16_t)err);
    event[10] = tag;
    put64(event + 16, bytes);
    return true;
}

/* Nothing waits: descriptors are always ready, and if only clocks are asked for, the guest's clock goes on to the first. */
static uint32_t do_poll_oneoff(const call *c)
{
    uint32_t count = arg32(c, 2), given = 0;
    if (!count || count > SUBSCRIPTIONS_MAX) {
        return EINVAL;
    }
    const uint8_t *in = bytes_at(c, arg32(c, 0), count * SUBSCRIPTION_BYTES);
    uint8_t *out = bytes_at(c, arg32(c, 1), count * EVENT_BYTES);
    if (!in || !out || !bytes_at(c, arg32(c, 3), 4)) {
        return EFAULT;
    }
    uint8_t copy[SUBSCRIPTIONS_MAX * SUBSCRIPTION_BYTES]; /* the two may overlap */
    memcpy(copy, in, count * SUBSCRIPTION_BYTES);
    c->guest->seen |= ART__SEEN_CLOCK;
    uint64_t now = art__abi_clock(c->guest), reached = UINT64_MAX;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *subscription = copy + i * SUBSCRIPTION_BYTES;
        timer timer = {0};
        if (subscription[8] == EVENT_CLOCK) {
            timer = timer_of(subscription, now);
        }
        uint64_t at = timer.err || timer.deadline_ns < now ? now : timer.deadline_ns;
        reached = at < reached ? at : reached;
    }
    art__abi_clock_reach(c->guest, reached);
    for (uint32_t i = 0; i < count; i++) {
        given += event_of(c, copy + i * SUBSCRIPTION_BYTES, now, reached, out + given * EVENT_BYTES);
    }
    c->guest->host_work = UINT64_MAX / 2; /* pauses: whoever waits lets others go first */
    return give32(c, arg32(c, 3), given);
}

/* --- the rest ----------------------------------------------------------------- */

static uint32_t refuse_socket(const call *c)
{
    return fd_of(c, arg32(c, 0)) ? ENOTSOCK : EBADF;
}

static uint32_t do_sock_accept(const call *c)
{
    return refuse_socket(c);
}

static uint32_t do_sock_recv(const call *c)
{
    return refuse_socket(c);
}

static uint32_t do_sock_send(const call *c)
{
    return refuse_socket(c);
}

static uint32_t do_sock_shutdown(const call *c)
{
    return refuse_socket(c);
}

static uint32_t do_proc_raise(const call *c)
{
    (void)c;
    return ENOSYS;
}

/* Where a boot ends, and where the guests of an image begin: that it reads stdin. */
static void import_fd_read(ART__IMPORT_PARAMETERS)
{
    (void)nargs, (void)nresults, (void)trap;
    art_guest *guest = art__abi_guest(((art_engine *)env)->w, caller);
    wasmtime_val_t first[4];
    call c = {guest, wasi_of(guest), caller, args};
    if (guest->stack != ART__STACK_PLAIN) {
        if (!art__boot_arrive(guest, first)) {
            *continuation = art__abi_suspended(guest, results); /* a stray: whoever moves the stack ends the guest */
            return;
        }
        c.args = first;
    }
    const descriptor *fd = fd_of(&c, arg32(&c, 0));
    if (fd && fd->kind == FD_STDIN && art__boot_at_input(guest, c.args)) {
        *continuation = art__abi_suspended(guest, results);
        return;
    }
    art__abi_return(guest, do_fd_read(&c), ART_WASM_I32, results, continuation);
}

/* Suspends for good; art_guest_poll ends the guest. */
static void import_proc_exit(ART__IMPORT_PARAMETERS)
{
    (void)nargs, (void)nresults, (void)results, (void)trap;
    art_guest *guest = art__abi_guest(((art_engine *)env)->w, caller);
    guest->exiting = true;
    guest->exit_code = args[0].of.i32;
    art__abi_return(guest, 0, ART_WASM_I32, &guest->no_result, continuation);
}

/* X(name, parameters); all return an errno */
#define WASI(X)                             \
    X(args_get, "ii")                       \
    X(args_sizes_get, "ii")                 \
    X(environ_get, "ii")                    \
    X(environ_sizes_get, "ii")              \
    X(clock_res_get, "ii")                  \
    X(clock_time_get, "ili")                \
    X(fd_advise, "illi")                    \
    X(fd_allocate, "ill")                   \
    X(fd_close, "i")                        \
    X(fd_datasync, "i")                     \
    X(fd_fdstat_get, "ii")                  \
    X(fd_fdstat_set_flags, "ii")            \
    X(fd_fdstat_set_rights, "ill")          \
    X(fd_filestat_get, "ii")                \
    X(fd_filestat_set_size, "il")           \
    X(fd_filestat_set_times, "illi")        \
    X(fd_pread, "iiili")                    \
    X(fd_prestat_get, "ii")                 \
    X(fd_prestat_dir_name, "iii")           \
    X(fd_pwrite, "iiili")                   \
    X(fd_readdir, "iiili")                  \
    X(fd_renumber, "ii")                    \
    X(fd_seek, "ilii")                      \
    X(fd_sync, "i")                         \
    X(fd_tell, "ii")                        \
    X(fd_write, "iiii")                     \
    X(path_create_directory, "iii")         \
    X(path_filestat_get, "iiiii")           \
    X(path_filestat_set_times, "iiiilli")   \
    X(path_link, "iiiiiii")                 \
    X(path_open, "iiiiillii")               \
    X(path_readlink, "iiiiii")              \
    X(path_remove_directory, "iii")         \
    X(path_rename, "iiiiii")                \
    X(path_symlink, "iiiii")                \
    X(path_unlink_file, "iii")              \
    X(poll_oneoff, "iiii")                  \
    X(proc_raise, "i")                      \
    X(sched_yield, "")                      \
    X(random_get, "ii")                     \
    X(sock_accept, "iii")                   \
    X(sock_recv, "iiiiii")                  \
    X(sock_send, "iiiii")                   \
    X(sock_shutdown, "ii")

#define WASI_IMPORT(name, params)                                                                                      \
    static void import_##name(ART__IMPORT_PARAMETERS)                                                                  \
    {                                                                                                                  \
        (void)nargs, (void)nresults, (void)trap;                                                                       \
        art_guest *guest = art__abi_guest(((art_engine *)env)->w, caller);                                             \
        call c = {guest, wasi_of(guest), caller, args};                                                                \
        art__abi_return(guest, do_##name(&c), ART_WASM_I32, results, continuation);                                    \
    }
WASI(WASI_IMPORT)
#undef WASI_IMPORT

static const art__import imports[] = {
#define WASI_ROW(name, params) {#name, params, 'i', import_##name},
    WASI(WASI_ROW)
#undef WASI_ROW
    {"fd_read", "iiii", 'i', import_fd_read},
    {"proc_exit", "i", 0, import_proc_exit},
};

int art__wasi_link(art_engine *engine, char *msg, size_t msg_len)
{
    return art__imports_link(engine, ART_WASI_MODULE_NAME, imports, sizeof imports / sizeof *imports, msg, msg_len);
}

bool art__wasi_has(const char *name, size_t len)
{
    return art__import_in(imports, sizeof imports / sizeof *imports, name, len);
}
