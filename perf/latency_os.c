/* latency_os.c: an urgent process among looping ones at nice 19, from the write to its pipe to its first instruction.
 *
 * Arguments: hogs, submits, seconds at most, 1 for an urgent process under SCHED_FIFO (0: at nice 0), 1 for a fork of it
 * per submit (0: the process that waits does the work itself). Prints lines of a name and a number; `permitted` is 0 if
 * SCHED_FIFO was refused. The submitting process is an ordinary one at nice 0. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static pid_t child(pid_t parent)
{
    pid_t pid = fork();
    if (pid < 0) {
        perror("fork");
        exit(1);
    }
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _exit(1);
        }
    }
    return pid;
}

int main(int argc, char **argv)
{
    if (argc != 6) {
        return 2;
    }
    int hogs = atoi(argv[1]), submits = atoi(argv[2]), fifo = atoi(argv[4]), forks = atoi(argv[5]);
    uint64_t x = 88172645463325252u;
    int request[2], reply[2];
    pid_t parent = getpid(), *pids = calloc((size_t)hogs + 1, sizeof *pids);
    double *taken = calloc((size_t)submits, sizeof *taken);
    if (!pids || !taken || pipe(request) || pipe(reply)) {
        return 1;
    }
    if (!(pids[hogs] = child(parent))) {
        struct sched_param param = {.sched_priority = 1};
        uint64_t now = !fifo || !sched_setscheduler(0, SCHED_FIFO, &param);
        char byte;
        while (write(reply[1], &now, sizeof now) == sizeof now && read(request[0], &byte, 1) == 1) {
            now = clock_ns();
            while (forks) { /* a process for each request, as a guest is made for each */
                pid_t pid = fork();
                if (!pid) {
                    now = clock_ns();
                    _exit(write(reply[1], &now, sizeof now) != sizeof now);
                }
                if (pid < 0 || waitpid(pid, NULL, 0) != pid || read(request[0], &byte, 1) != 1) {
                    _exit(1);
                }
            }
        }
        _exit(0);
    }
    uint64_t permitted = 0, first = 0;
    if (read(reply[0], &permitted, sizeof permitted) != sizeof permitted) {
        return 1;
    }
    for (int i = 0; i < hogs; i++) {
        if (!(pids[i] = child(parent))) {
            setpriority(PRIO_PROCESS, 0, 19);
            for (;;) {
                __asm__ volatile("");
            }
        }
    }
    struct timespec pause = {0, 500000000};
    nanosleep(&pause, NULL);
    uint64_t until = clock_ns() + (uint64_t)(atof(argv[3]) * 1e9);
    int count = 0;
    while (count < submits && (clock_ns() < until || !count)) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        pause.tv_nsec = (long)(x % 2000000);
        nanosleep(&pause, NULL);
        uint64_t start = clock_ns();
        if (write(request[1], "x", 1) != 1 || read(reply[0], &first, sizeof first) != sizeof first) {
            return 1;
        }
        taken[count++] = (double)(first - start) / 1000;
    }
    for (int i = 0; i <= hogs; i++) {
        kill(pids[i], SIGKILL);
    }
    while (wait(NULL) > 0) {
    }
    qsort(taken, (size_t)count, sizeof *taken, by_size);
    printf("permitted %d\ncount %d\np50_us %.2f\np99_us %.2f\np999_us %.2f\n", (int)permitted, count, taken[count / 2],
           taken[(int)(count * 0.99)], taken[(int)(count * 0.999)]);
    return 0;
}
