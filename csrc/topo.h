/* topo.h: what CPUs, NUMA nodes and limits this process has.
 *
 * What it is: one reading of the machine, as plain data; nothing is cached, kept open or allocated. Files that cannot be read
 * are no error: the field keeps its "unknown" value and a flag says so, because limits degrade (and `doctor` tells).
 * Thread-safety: every function depends on its arguments and the file system only.
 */
#ifndef ART_TOPO_H
#define ART_TOPO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 1,024 CPUs and 64 nodes: the largest single systems in use; more is reported by ART_TOPO_TRUNCATED, not ignored. */
enum {
    ART_CPU_MAX = 1024,
    ART_CPUSET_WORDS = ART_CPU_MAX / 64,
    ART_NODE_MAX = 64,
};

/* CPU n is bit n % 64 of word n / 64: the kernel's own layout on 64-bit machines. */
typedef struct art_cpuset {
    uint64_t words[ART_CPUSET_WORDS];
} art_cpuset;

typedef struct art_topo_node {
    uint32_t id;        /* the kernel's node number */
    uint32_t cpu_count; /* usable CPUs in it, at least 1 */
    art_cpuset cpus;    /* usable CPUs in it */
} art_topo_node;

enum {
    ART_TOPO_NUMA_UNKNOWN = 1 << 0, /* no readable node directory: one node 0 with every usable CPU was assumed */
    ART_TOPO_NUMA_PARTIAL = 1 << 1, /* some usable CPUs are in no node: they were added to the first one */
    ART_TOPO_QUOTA_UNKNOWN = 1 << 2, /* no cgroup v2 cpu.max could be read (none mounted, or not on v2) */
    ART_TOPO_MAPS_UNKNOWN = 1 << 3,  /* max_map_count could not be read */
    ART_TOPO_TRUNCATED = 1 << 4,     /* more CPUs or nodes than fit above; the first ones are listed */
};

typedef struct art_topo {
    uint32_t flags;         /* ART_TOPO_… */
    uint32_t cpu_count;     /* usable CPUs, at least 1 */
    art_cpuset cpus;        /* usable CPUs: the calling thread's affinity mask */
    uint64_t quota_us;      /* tightest cgroup v2 cpu.max on the way to the root, per period_us; 0 = no quota */
    uint64_t period_us;     /* 0 = no quota */
    uint64_t map_count_max; /* vm.max_map_count; 0 = unknown */
    uint32_t node_count;    /* at least 1 */
    art_topo_node nodes[ART_NODE_MAX]; /* the first node_count are filled, by rising id; nodes without usable CPUs left out */
} art_topo;

/* Reads the topology as seen by the calling thread. root is put before every path that is read
 * (<root>/sys/devices/system/node, <root>/sys/fs/cgroup, <root>/proc/self/cgroup, <root>/proc/sys/vm/max_map_count):
 * "" or NULL for the real system, a directory with a fake tree in tests. The CPUs always come from sched_getaffinity.
 * Errors (out untouched): ART_EINVAL (out NULL or root too long), ART_ESYS (no affinity mask; errno says why). */
int art_topo_read(const char *root, art_topo *out);

/* The same with the usable CPUs given. Errors: also ART_EINVAL for an empty set. */
int art_topo_read_cpus(const char *root, const art_cpuset *usable, art_topo *out);

/* How many workers fit: usable CPUs, or the quota's whole CPUs rounded up if that is less; at least 1, at most max (0 =
 * no maximum). */
uint32_t art_topo_worker_count(const art_topo *topo, uint32_t max);

/* Node number that holds cpu; -1 when it is in none (not usable). */
int art_topo_node_of(const art_topo *topo, uint32_t cpu);

/* Parses the kernel's list format ("0-3,8\n", "" = empty set). Errors (out untouched): ART_EINVAL for anything else,
 * ART_ELIMIT for a CPU number >= ART_CPU_MAX. */
int art_cpuset_parse(const char *text, size_t length, art_cpuset *out);

uint32_t art_cpuset_count(const art_cpuset *set);

/* The n-th CPU of the set in rising order, counted from 0; -1 when there are fewer. */
int art_cpuset_nth(const art_cpuset *set, uint32_t n);

static inline bool art_cpuset_has(const art_cpuset *set, uint32_t cpu)
{
    return cpu < ART_CPU_MAX && ((set->words[cpu / 64] >> (cpu % 64)) & 1) != 0;
}

/* A cpu >= ART_CPU_MAX is ignored. */
static inline void art_cpuset_add(art_cpuset *set, uint32_t cpu)
{
    if (cpu < ART_CPU_MAX) {
        set->words[cpu / 64] |= UINT64_C(1) << (cpu % 64);
    }
}

#ifdef __cplusplus
}
#endif
#endif
