/* spawn.h: starts a program as a confined process, born in its cgroup, in one system call of the caller's and without a
 * copy of the caller's memory (clone3 with CLONE_VM and CLONE_VFORK, as posix_spawn does it).
 *
 * All that confines the program is in force before its first instruction: session, namespaces, a folder of its own,
 * resource limits, landlock, uid, seccomp. What cannot be done fails the spawn and says at which stage; nothing is skipped.
 *
 * Thread-safety: any thread. The calling thread sleeps until the program runs or has failed to (about half a millisecond),
 * and its signals are blocked meanwhile. The child is killed when that *thread* ends: call it from one that lives as long
 * as the child may.
 * Ownership: everything in the arguments stays the caller's. The pidfd is the caller's to close, and close-on-exec. The
 * child must be waited for, through the pidfd (waitid P_PIDFD); it signals its parent with SIGCHLD.
 * Errors: 0, or a negative errno as in sys_linux.h; `stage` then says what failed, and there is no child.
 */
#ifndef ART_SPAWN_H
#define ART_SPAWN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What failed. */
enum {
    ART_SPAWN_CLONE = 1,  /* no process: namespaces not permitted, the cgroup refuses, too many processes */
    ART_SPAWN_USER = 2,   /* the maps of its user namespace */
    ART_SPAWN_MOUNT = 3,  /* its folder in memory */
    ART_SPAWN_NETWORK = 4,
    ART_SPAWN_FOLDER = 5, /* it is not there, or may not be entered */
    ART_SPAWN_LIMIT = 6,
    ART_SPAWN_FDS = 7,
    ART_SPAWN_LANDLOCK = 8,
    ART_SPAWN_IDS = 9,
    ART_SPAWN_PARENT = 10, /* the caller is gone already */
    ART_SPAWN_SECCOMP = 11,
    ART_SPAWN_EXEC = 12,  /* no such program, or it may not be executed */
};

/* A landlock rule: what is allowed beneath fd (opened with O_PATH). */
typedef struct art_spawn_rule {
    uint64_t rights;
    int fd;
} art_spawn_rule;

typedef struct art_spawn_limit {
    uint64_t soft;
    uint64_t hard;
    int resource; /* RLIMIT_… */
} art_spawn_limit;

typedef struct art_spawn_args {
    const char *path;      /* of the program, absolute */
    char *const *argv;     /* ends with NULL */
    char *const *envp;     /* ends with NULL: all of its environment */
    const int *fds;        /* fds[i] becomes its descriptor i; it has no others */
    size_t fd_count;       /* at most ART_SPAWN_FDS_MAX */
    const char *folder;    /* its working folder, absolute */
    int cgroup_fd;         /* the folder of a cgroup v2 group, or -1: the caller's */
    uint64_t namespaces;   /* of its own: CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWNS */
    int net_fd;            /* a network namespace to enter (art_spawn_network), or -1 */
    const char *tmpfs;     /* not NULL: options of a tmpfs of its own over folder; needs CLONE_NEWNS */
    const char *user_map;  /* lines for uid_map and gid_map of a CLONE_NEWUSER; NULL without */
    const char *group_map;
    int64_t uid;           /* -1: as the caller. With one, supplementary groups go, too */
    int64_t gid;
    int nice;
    int group_nice;        /* of its session's group in the scheduler, where sessions are groups; 0: as it comes */
    bool idle;             /* SCHED_IDLE */
    bool reaper;           /* orphans among what it starts are its children: PR_SET_CHILD_SUBREAPER */
    const art_spawn_limit *limits;
    size_t limit_count;
    bool confined;         /* no_new_privs, landlock and seccomp as follows */
    uint64_t landlock_files; /* rights that are withheld but for the rules; 0: no landlock */
    uint64_t landlock_net;
    uint64_t landlock_scopes;
    const art_spawn_rule *rules;
    size_t rule_count;
    uint64_t folder_rights; /* landlock rights beneath folder */
    const void *filter;    /* struct sock_filter[], or NULL */
    size_t filter_count;
} art_spawn_args;

#define ART_SPAWN_FDS_MAX 16u

typedef struct art_spawned {
    pid_t pid;
    int pidfd;
    int stage; /* ART_SPAWN_… of a failure, else 0 */
} art_spawned;

/* out is filled in any case. -EINVAL: arguments that contradict each other. */
int art_spawn(const art_spawn_args *args, art_spawned *out);

/* A network namespace with nothing in it but its own loopback, as a descriptor: it is gone with the last descriptor and
 * process. Making one takes the kernel milliseconds, entering it microseconds. -EPERM without CAP_SYS_ADMIN. */
int art_spawn_network(void);

#ifdef __cplusplus
}
#endif
#endif
