"""Builds `agentrt._sys`: what Python uses of csrc (sys_linux, topo, stack_guard, spawn), by cffi in API mode.

Named in setup.py as ``cffi_modules=["agentrt/_sys_build.py:ffibuilder"]``; run from the project's root. The
module offers ``ffi`` and ``lib``. For control-plane work that is not on a hot path. The ``art_sys_*`` functions
return 0 (or a result) or a negative errno value and leave errno alone; the ``art_topo_*`` and ``art_cpuset_*``
functions return 0 or a negative ``art_err`` code. Every call releases the GIL. What acts on "this thread" acts
on the calling Python thread.

The futex calls are left out: Python has no shared word to wait on. The structs are complete, so that cffi checks
their layout against the headers when the module is compiled.
"""

from cffi import FFI

_TOPO = """
    #define ART_CPU_MAX ...
    #define ART_CPUSET_WORDS ...
    #define ART_NODE_MAX ...
    #define ART_TOPO_NUMA_UNKNOWN ...
    #define ART_TOPO_NUMA_PARTIAL ...
    #define ART_TOPO_QUOTA_UNKNOWN ...
    #define ART_TOPO_MAPS_UNKNOWN ...
    #define ART_TOPO_TRUNCATED ...

    typedef struct art_cpuset { uint64_t words[...]; } art_cpuset;
    typedef struct art_topo_node { uint32_t id; uint32_t cpu_count; art_cpuset cpus; } art_topo_node;
    typedef struct art_topo {
        uint32_t flags;
        uint32_t cpu_count;
        art_cpuset cpus;
        uint64_t quota_us;
        uint64_t period_us;
        uint64_t map_count_max;
        uint32_t node_count;
        art_topo_node nodes[...];
    } art_topo;

    int art_topo_read(const char *root, art_topo *out);
    int art_topo_read_cpus(const char *root, const art_cpuset *usable, art_topo *out);
    uint32_t art_topo_worker_count(const art_topo *topo, uint32_t max);
    int art_topo_node_of(const art_topo *topo, uint32_t cpu);
    int art_cpuset_parse(const char *text, size_t length, art_cpuset *out);
    uint32_t art_cpuset_count(const art_cpuset *set);
    int art_cpuset_nth(const art_cpuset *set, uint32_t n);
    bool art_cpuset_has(const art_cpuset *set, uint32_t cpu);
    void art_cpuset_add(art_cpuset *set, uint32_t cpu);
"""

_SYS = """
    typedef int... pid_t;

    #define ART_CLOSE_RANGE_CLOEXEC ...
    #define ART_SCHED_OTHER ...
    #define ART_SCHED_FIFO ...
    #define ART_SCHED_RR ...
    #define ART_SCHED_BATCH ...
    #define ART_SCHED_IDLE ...
    #define ART_SCHED_FLAG_RESET_ON_FORK ...

    int art_sys_pidfd_open(pid_t pid, unsigned flags);
    int art_sys_pidfd_send_signal(int pidfd, int sig);
    int art_sys_set_child_subreaper(bool on);
    int art_sys_get_child_subreaper(void);
    int art_sys_set_no_new_privs(void);
    int art_sys_get_no_new_privs(void);
    int art_sys_set_pdeathsig(int sig);
    int art_sys_get_pdeathsig(void);
    int art_sys_close_range(unsigned first, unsigned last, unsigned flags);
    int art_sys_landlock_abi(void);

    typedef struct art_sched { uint32_t policy; int32_t nice; uint32_t priority; uint64_t flags; } art_sched;
    pid_t art_sys_gettid(void);
    int art_sys_sched_set(pid_t tid, const art_sched *sched);
    int art_sys_sched_get(pid_t tid, art_sched *out);
    int art_sys_sched_set_rr(pid_t tid, uint32_t priority);
    int art_sys_setpriority(pid_t tid, int nice);
    int art_sys_getpriority(pid_t tid, int *out);
    int art_sys_sched_setaffinity(pid_t tid, const uint64_t *words, size_t word_count);
    int art_sys_sched_getaffinity(pid_t tid, uint64_t *words, size_t word_count);

    int art_sys_memory_bind(int node);
    int art_sys_memory_bound(uint64_t *nodes);
    int art_sys_memory_move(int node);
    int art_sys_memory_node_of(const void *address);
    int art_sys_file_write_paced(int fd, const void *bytes, uint64_t len, uint64_t at, uint64_t piece,
                                 uint64_t pause_ns_max);
    int art_sys_thread_set_name(const char *name);
    int art_sys_thread_block_signals(void);
    int art_sys_membarrier_register(void);
    int art_sys_membarrier(void);
    uint64_t art_sys_now_ns(void);
    uint64_t art_sys_thread_cpu_ns(void);

    bool art_stack_guards_light(void);
"""

_SPAWN = """
    #define ART_SPAWN_CLONE ...
    #define ART_SPAWN_USER ...
    #define ART_SPAWN_MOUNT ...
    #define ART_SPAWN_NETWORK ...
    #define ART_SPAWN_FOLDER ...
    #define ART_SPAWN_LIMIT ...
    #define ART_SPAWN_FDS ...
    #define ART_SPAWN_LANDLOCK ...
    #define ART_SPAWN_IDS ...
    #define ART_SPAWN_PARENT ...
    #define ART_SPAWN_SECCOMP ...
    #define ART_SPAWN_EXEC ...
    #define ART_SPAWN_FDS_MAX ...

    typedef struct art_spawn_rule { uint64_t rights; int fd; } art_spawn_rule;
    typedef struct art_spawn_limit { uint64_t soft; uint64_t hard; int resource; } art_spawn_limit;
    typedef struct art_spawn_args {
        const char *path;
        char *const *argv;
        char *const *envp;
        const int *fds;
        size_t fd_count;
        const char *folder;
        int cgroup_fd;
        uint64_t namespaces;
        int net_fd;
        const char *tmpfs;
        const char *user_map;
        const char *group_map;
        int64_t uid;
        int64_t gid;
        int nice;
        int group_nice;
        bool idle;
        bool reaper;
        const art_spawn_limit *limits;
        size_t limit_count;
        bool confined;
        uint64_t landlock_files;
        uint64_t landlock_net;
        uint64_t landlock_scopes;
        const art_spawn_rule *rules;
        size_t rule_count;
        uint64_t folder_rights;
        const void *filter;
        size_t filter_count;
    } art_spawn_args;
    typedef struct art_spawned { pid_t pid; int pidfd; int stage; } art_spawned;
    int art_spawn(const art_spawn_args *args, art_spawned *out);
    int art_spawn_network(void);
"""

ffibuilder = FFI()
ffibuilder.cdef(_TOPO)
ffibuilder.cdef(_SYS)
ffibuilder.cdef(_SPAWN)
ffibuilder.set_source(
    "agentrt._sys",
    '#include <stdbool.h>\n#include "spawn.h"\n#include "stack_guard.h"\n#include "sys_linux.h"\n#include "topo.h"\n',
    sources=["csrc/spawn.c", "csrc/stack_guard.c", "csrc/sys_linux.c", "csrc/topo.c"],
    include_dirs=["csrc"],
    depends=[f"csrc/{name}.h" for name in ("spawn", "stack_guard", "sys_linux", "topo", "art_atomic", "art_err")],
    extra_compile_args=["-std=gnu11", "-fvisibility=hidden"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
