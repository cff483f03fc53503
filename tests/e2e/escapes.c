/* What a confined program may try: `escapes WHAT [ARG]` prints "refused ERRNO" or "done …". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static int said(long result)
{
    if (result < 0) {
        printf("refused %s\n", strerrorname_np(errno));
    } else {
        printf("done %ld\n", result);
    }
    return 0;
}

static int try_connect(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) {
        return said(-1);
    }
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return said(connect(fd, (struct sockaddr *)&to, sizeof to));
}

static int try_abstract(const char *name)
{
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    memcpy(to.sun_path + 1, name, strlen(name));
    return said(connect(fd, (struct sockaddr *)&to, (socklen_t)(sizeof(sa_family_t) + 1 + strlen(name))));
}

/* Every descriptor that is open, as far as anybody would look. */
static int list_descriptors(void)
{
    for (int fd = 0; fd < 70000; fd++) {
        if (fcntl(fd, F_GETFD) >= 0) {
            printf("%d ", fd);
        }
    }
    printf("\n");
    return 0;
}

static int fork_bomb(void)
{
    long children = 0;
    while (children < 100000) {
        pid_t pid = fork();
        if (pid < 0) {
            printf("refused %s after %ld\n", strerrorname_np(errno), children);
            return 0;
        }
        if (pid == 0) {
            (void)setsid();
            (void)signal(SIGTERM, SIG_IGN);
            (void)pause();
        }
        children++;
    }
    printf("done %ld\n", children);
    return 0;
}

static int eat(long mib)
{
    for (long i = 0; i < mib; i++) {
        char *page = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) {
            return said(-1);
        }
        memset(page, 1, 1 << 20);
    }
    return said(mib);
}

static int fill(const char *path)
{
    static char block[1 << 16];
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    long wrote = 0;
    (void)signal(SIGXFSZ, SIG_IGN);
    for (;;) {
        ssize_t n = write(fd, block, sizeof block);
        if (n < 0) {
            printf("refused %s after %ld\n", strerrorname_np(errno), wrote);
            return 0;
        }
        wrote += n;
    }
}

static int files(void)
{
    char name[32];
    for (int i = 0;; i++) {
        (void)snprintf(name, sizeof name, "f%d", i);
        int fd = open(name, O_CREAT | O_WRONLY, 0600);
        if (fd < 0) {
            printf("refused %s after %d\n", strerrorname_np(errno), i);
            return 0;
        }
        (void)close(fd);
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    const char *arg = argc > 2 ? argv[2] : "";
    long number = atol(arg);
    if (!strcmp(what, "connect")) return try_connect((int)number);
    if (!strcmp(what, "abstract")) return try_abstract(arg);
    if (!strcmp(what, "packet")) return said(socket(AF_PACKET, SOCK_RAW, 0));
    if (!strcmp(what, "vsock")) return said(socket(AF_VSOCK, SOCK_STREAM, 0));
    if (!strcmp(what, "alg")) return said(socket(AF_ALG, SOCK_SEQPACKET, 0));
    if (!strcmp(what, "ptrace")) return said(ptrace(PTRACE_ATTACH, (pid_t)number, NULL, NULL));
    if (!strcmp(what, "peek")) {
        char byte;
        struct iovec ours = {&byte, 1}, theirs = {main, 1};
        return said(process_vm_readv((pid_t)number, &ours, 1, &theirs, 1, 0));
    }
    if (!strcmp(what, "kill")) return said(kill((pid_t)number, SIGKILL));
    if (!strcmp(what, "kill_all")) return said(kill(-1, SIGKILL));
    if (!strcmp(what, "pidfd")) return said(syscall(SYS_pidfd_open, (pid_t)number, 0));
    if (!strcmp(what, "read")) return said(open(arg, O_RDONLY));
    if (!strcmp(what, "write")) return said(open(arg, O_WRONLY | O_CREAT, 0600));
    if (!strcmp(what, "unlink")) return said(unlink(arg));
    if (!strcmp(what, "list")) return said(opendir(arg) == NULL ? -1 : 0);
    if (!strcmp(what, "userns")) return said(unshare(CLONE_NEWUSER));
    if (!strcmp(what, "clone_userns")) return said(syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
    if (!strcmp(what, "clone3")) return said(syscall(SYS_clone3, NULL, 0));
    if (!strcmp(what, "mount")) return said(mount("x", ".", "tmpfs", 0, ""));
    if (!strcmp(what, "umount")) return said(umount2(".", MNT_DETACH));
    if (!strcmp(what, "chroot")) return said(chroot("."));
    if (!strcmp(what, "setuid")) return said(setuid(0));
    if (!strcmp(what, "nice")) return said(nice(-5) == -1 && errno ? -1 : 0);
    if (!strcmp(what, "core")) return said(prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0));
    if (!strcmp(what, "io_uring")) return said(syscall(425, 8, NULL));
    if (!strcmp(what, "bpf")) return said(syscall(SYS_bpf, 0, NULL, 0));
    if (!strcmp(what, "keyctl")) return said(syscall(SYS_keyctl, 0, -3, 0));
    if (!strcmp(what, "shmget")) return said(syscall(SYS_shmget, 0, 4096, 0600 | 01000));
    if (!strcmp(what, "new_call")) return said(syscall(600));
    if (!strcmp(what, "tty")) return said(syscall(SYS_ioctl, 0, 0x5412, "x"));
    if (!strcmp(what, "tty_high")) return said(syscall(SYS_ioctl, 0, 0x100005412ul, "x"));
    if (!strcmp(what, "fds")) return list_descriptors();
    if (!strcmp(what, "bomb")) return fork_bomb();
    if (!strcmp(what, "eat")) return eat(number);
    if (!strcmp(what, "fill")) return fill(arg);
    if (!strcmp(what, "files")) return files();
    return 2;
}
