/* dropwrites: makes kill -9 count for as much as a power cut.
 *
 * Preloaded into a process, it watches writes to the files under $DROPWRITES_DIR. A write goes through, so that every
 * reader and mapping sees it, but what it replaces is first appended to the log $DROPWRITES_LOG. When a file is
 * synced, the log says so. After the process was killed, powercut.py reads the log: what was written and not synced may
 * be put back to what it was, wholly or by sectors, which is what a disk may show after a power cut.
 *
 * What must hold:
 *   - the old bytes are in the log before the write begins, the sync's mark only after the sync has succeeded: killed
 *     anywhere in between, the log takes durability away and never invents it;
 *   - a sync covers the log entries that were there when it began (`upto`);
 *   - a write through an O_DSYNC or O_SYNC descriptor is durable, for its own range, when it returns.
 *
 * Not watched: stores through a shared mapping, and directory entries (a rename is taken as durable).
 *
 * Threads: one mutex orders the log. Descriptors are looked up anew at every call (readlink), so dup, close and fork
 * need no bookkeeping. Log entry: struct entry, the path, then `old_bytes` bytes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { WRITE = 1, SYNC = 2, DURABLE = 3 };

struct entry {
    uint32_t kind;
    uint32_t path_bytes;
    uint64_t offset;     /* of the write */
    uint64_t bytes;      /* length of the write */
    uint64_t file_bytes; /* size of the file before it */
    uint64_t old_bytes;  /* how much old content follows: what of the range was inside the file */
    uint64_t upto;       /* SYNC: entries that begin before this position of the log are durable */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char dir[PATH_MAX];
static size_t dir_bytes;
static int log_fd = -1;

static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_pwritev)(int, const struct iovec *, int, off_t);
static ssize_t (*real_pwritev2)(int, const struct iovec *, int, off_t, int);
static int (*real_ftruncate)(int, off_t);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);

static void die(const char *what)
{
    fprintf(stderr, "dropwrites: %s: %s\n", what, strerror(errno));
    abort();
}

__attribute__((constructor)) static void start(void)
{
    *(void **)&real_write = dlsym(RTLD_NEXT, "write");
    *(void **)&real_writev = dlsym(RTLD_NEXT, "writev");
    *(void **)&real_pwrite = dlsym(RTLD_NEXT, "pwrite");
    *(void **)&real_pwritev = dlsym(RTLD_NEXT, "pwritev");
    *(void **)&real_pwritev2 = dlsym(RTLD_NEXT, "pwritev2");
    *(void **)&real_ftruncate = dlsym(RTLD_NEXT, "ftruncate");
    *(void **)&real_fsync = dlsym(RTLD_NEXT, "fsync");
    *(void **)&real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    const char *folder = getenv("DROPWRITES_DIR");
    const char *log_path = getenv("DROPWRITES_LOG");
    if (!folder || !log_path)
        return;
    if (!realpath(folder, dir))
        die("DROPWRITES_DIR");
    dir_bytes = strlen(dir);
    /* High, so that it is not among the descriptors that a program closes or hands on. */
    int fd = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || (log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900)) < 0)
        die("DROPWRITES_LOG");
    close(fd);
}

/* Whether fd is a file under the folder; its path goes to `path`. */
static int watched(int fd, char path[PATH_MAX])
{
    char link[32];
    int saved = errno;
    if (log_fd < 0 || fd == log_fd)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, path, PATH_MAX - 1);
    errno = saved;
    if (got < 0)
        return 0;
    path[got] = 0;
    return strncmp(path, dir, dir_bytes) == 0 && path[dir_bytes] == '/';
}

static void append(struct entry *entry, const char *path, const void *old)
{
    entry->path_bytes = (uint32_t)strlen(path);
    struct iovec parts[3] = {
        {entry, sizeof *entry},
        {(void *)path, entry->path_bytes},
        {(void *)old, entry->old_bytes},
    };
    ssize_t bytes = (ssize_t)(sizeof *entry + entry->path_bytes + entry->old_bytes);
    if (real_writev(log_fd, parts, 3) != bytes)
        die("log");
}

/* Logs what [offset, offset + bytes) holds now. Called with the lock held, as is the write that follows: two writes to
 * one place must be in the log in the order in which they happen. */
static void keep_old(const char *path, uint64_t offset, uint64_t bytes)
{
    int saved = errno;
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC); /* the writer's descriptor may be write only */
    if (fd < 0 || fstat(fd, &st) < 0)
        die(path);
    struct entry entry = {.kind = WRITE, .offset = offset, .bytes = bytes, .file_bytes = (uint64_t)st.st_size};
    void *old = NULL;
    if (offset < entry.file_bytes) {
        entry.old_bytes = bytes < entry.file_bytes - offset ? bytes : entry.file_bytes - offset;
        old = malloc(entry.old_bytes);
        if (!old || pread(fd, old, entry.old_bytes, (off_t)offset) != (ssize_t)entry.old_bytes)
            die("read");
    }
    close(fd);
    append(&entry, path, old);
    free(old);
    errno = saved;
}

static void wrote(int fd, const char *path, uint64_t offset, ssize_t bytes, int synced)
{
    int saved = errno;
    int flags = fcntl(fd, F_GETFL);
    if (bytes > 0 && (synced || (flags >= 0 && (flags & O_DSYNC)))) { /* O_SYNC includes the bit */
        struct entry entry = {.kind = DURABLE, .offset = offset, .bytes = (uint64_t)bytes};
        append(&entry, path, NULL);
    }
    errno = saved;
}

static size_t total(const struct iovec *parts, int count)
{
    size_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += parts[i].iov_len;
    return bytes;
}

/* Where write and writev will put it. */
static off_t position(int fd)
{
    struct stat st;
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0 && (flags & O_APPEND))
        return fstat(fd, &st) == 0 ? st.st_size : -1;
    return lseek(fd, 0, SEEK_CUR);
}

#define THROUGH(fd, length, place, call, synced)                              \
    char path[PATH_MAX];                                                      \
    if (!watched(fd, path))                                                   \
        return call;                                                          \
    pthread_mutex_lock(&lock);                                                \
    off_t offset = place;                                                     \
    if (offset >= 0)                                                          \
        keep_old(path, (uint64_t)offset, length);                             \
    ssize_t result = call;                                                    \
    if (offset >= 0)                                                          \
        wrote(fd, path, (uint64_t)offset, result, synced);                    \
    pthread_mutex_unlock(&lock);                                              \
    return result

ssize_t write(int fd, const void *data, size_t bytes)
{
    THROUGH(fd, bytes, position(fd), real_write(fd, data, bytes), 0);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    THROUGH(fd, total(parts, count), position(fd), real_writev(fd, parts, count), 0);
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at)
{
    THROUGH(fd, bytes, at, real_pwrite(fd, data, bytes, at), 0);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at)
{
    THROUGH(fd, total(parts, count), at, real_pwritev(fd, parts, count, at), 0);
}

/* What Python's os.pwritev calls. */
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags)
{
    THROUGH(fd, total(parts, count), at, real_pwritev2(fd, parts, count, at, flags), flags & (RWF_DSYNC | RWF_SYNC));
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t at, int flags)
{
    return pwritev2(fd, parts, count, at, flags);
}

ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t at)
{
    return pwrite(fd, data, bytes, at);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at)
{
    return pwritev(fd, parts, count, at);
}

int ftruncate(int fd, off_t bytes)
{
    char path[PATH_MAX];
    struct stat st;
    if (!watched(fd, path) || fstat(fd, &st) < 0)
        return real_ftruncate(fd, bytes);
    pthread_mutex_lock(&lock);
    if (bytes < st.st_size)
        keep_old(path, (uint64_t)bytes, (uint64_t)(st.st_size - bytes));
    else
        keep_old(path, (uint64_t)st.st_size, (uint64_t)(bytes - st.st_size));
    int result = real_ftruncate(fd, bytes);
    pthread_mutex_unlock(&lock);
    return result;
}

int ftruncate64(int fd, off_t bytes)
{
    return ftruncate(fd, bytes);
}

static int synced(int fd, int (*real)(int))
{
    char path[PATH_MAX];
    struct stat st;
    if (!watched(fd, path))
        return real(fd);
    pthread_mutex_lock(&lock);
    if (fstat(log_fd, &st) < 0)
        die("log");
    pthread_mutex_unlock(&lock);
    int result = real(fd);
    if (result == 0) {
        pthread_mutex_lock(&lock);
        struct entry entry = {.kind = SYNC, .upto = (uint64_t)st.st_size};
        append(&entry, path, NULL);
        pthread_mutex_unlock(&lock);
    }
    return result;
}

int fsync(int fd)
{
    return synced(fd, real_fsync);
}

int fdatasync(int fd)
{
    return synced(fd, real_fdatasync);
}
