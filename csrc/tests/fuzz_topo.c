/* libFuzzer entry for what the kernel says about CPUs, nodes and limits: lists of CPUs of any text, and a tree of files with any
 * contents. A list that is taken comes back when it is written and read again; every usable CPU is in exactly one node. Seeds:
 * corpus/topo.
 *
 * An input: 'L' and a list; or anything else and the files' contents, each ended by a byte of 0xff, in the order of `files`. */
#include "art_err.h"
#include "topo.h"

#include "fuzz_kit.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const folders[] = {
    "/sys", "/sys/devices", "/sys/devices/system", "/sys/devices/system/node", "/sys/devices/system/node/node0",
    "/sys/devices/system/node/node7", "/sys/fs", "/sys/fs/cgroup", "/sys/fs/cgroup/a", "/proc", "/proc/self",
    "/proc/sys", "/proc/sys/vm",
};
static const char *const files[] = {
    "/sys/devices/system/node/node0/cpulist", "/sys/devices/system/node/node7/cpulist", "/proc/self/cgroup",
    "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/a/cpu.max", "/proc/sys/vm/max_map_count",
};
enum { FOLDERS = sizeof folders / sizeof *folders, FILES = sizeof files / sizeof *files };

static char root[200];

static const char *place(const char *name)
{
    static char path[300];
    (void)snprintf(path, sizeof path, "%s%s", root, name);
    return path;
}

static void clean(void)
{
    for (int i = 0; i < FILES; i++) {
        (void)unlink(place(files[i]));
    }
    for (int i = FOLDERS; i-- > 0;) {
        (void)rmdir(place(folders[i]));
    }
    (void)rmdir(root);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    /* in memory if possible: on a disk it is ten times slower */
    const char *tmp = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    (void)snprintf(root, sizeof root, "%s/fuzz-topo-XXXXXX", tmp);
    require(mkdtemp(root) != NULL, "a folder");
    for (int i = 0; i < FOLDERS; i++) {
        require(mkdir(place(folders[i]), 0700) == 0, "a folder in it");
    }
    (void)atexit(clean);
    return 0;
}

static void check_list(const char *text, size_t len)
{
    art_cpuset set, again;
    char *exact = malloc(len + 1); /* so that a byte too far is seen */
    require(exact, "memory");
    memcpy(exact, text, len);
    char *given = realloc(exact, len ? len : 1);
    int rc = art_cpuset_parse(given, len, &set);
    free(given);
    require(rc == 0 || rc == ART_EINVAL || rc == ART_ELIMIT, "a documented error");
    if (rc != 0) {
        return;
    }
    char written[ART_CPU_MAX * 5 + 1];
    size_t at = 0;
    uint32_t count = art_cpuset_count(&set);
    for (uint32_t n = 0; n < count; n++) {
        int cpu = art_cpuset_nth(&set, n);
        require(cpu >= 0 && art_cpuset_has(&set, (uint32_t)cpu), "as many as it counts");
        at += (size_t)snprintf(written + at, sizeof written - at, n ? ",%d" : "%d", cpu);
    }
    require(art_cpuset_nth(&set, count) == -1, "no more than it counts");
    require(art_cpuset_parse(written, at, &again) == 0 && memcmp(&set, &again, sizeof set) == 0, "the same list");
}

static void write_file(const char *name, const uint8_t *data, size_t len)
{
    int fd = open(place(name), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    require(fd >= 0 && write(fd, data, len) == (ssize_t)len, "a file");
    (void)close(fd);
}

static void check_tree(reader in)
{
    for (int i = 0; i < FILES; i++) {
        const uint8_t *end = in.left ? memchr(in.data, 0xff, in.left) : NULL;
        reader part = next_part(&in, end ? (size_t)(end - in.data) : in.left);
        write_file(files[i], part.data, part.left);
        next(&in);
    }
    art_cpuset usable = {{0}};
    for (uint32_t cpu = 0; cpu < 70; cpu += 1 + cpu / 8) {
        art_cpuset_add(&usable, cpu);
    }
    art_topo topo;
    errno = 77;
    require(art_topo_read_cpus(root, &usable, &topo) == 0 && errno == 77, "whatever the files, a reading");
    uint32_t sum = 0;
    require(topo.node_count >= 1 && topo.node_count <= 2, "nodes");
    for (uint32_t i = 0; i < topo.node_count; i++) {
        const art_topo_node *node = &topo.nodes[i];
        require(i == 0 || node[-1].id < node->id, "nodes by rising id");
        require(node->cpu_count >= 1 && art_cpuset_count(&node->cpus) == node->cpu_count, "CPUs in a node");
        sum += node->cpu_count;
    }
    require(sum == topo.cpu_count && topo.cpu_count == art_cpuset_count(&usable), "each CPU in one node");
    for (uint32_t n = 0; n < sum; n++) {
        require(art_topo_node_of(&topo, (uint32_t)art_cpuset_nth(&usable, n)) >= 0, "each CPU in a node");
    }
    require((topo.quota_us == 0) == (topo.period_us == 0), "a quota has a period");
    require(!(topo.flags & ART_TOPO_QUOTA_UNKNOWN) || !topo.quota_us, "an unknown quota is none");
    require((topo.map_count_max == 0) == !!(topo.flags & ART_TOPO_MAPS_UNKNOWN), "an unknown limit says so");
    uint32_t workers = art_topo_worker_count(&topo, 0);
    require(workers >= 1 && workers <= topo.cpu_count && art_topo_worker_count(&topo, 1) == 1, "workers");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader in = {data, size};
    if (next(&in) == 'L') {
        check_list((const char *)in.data, in.left);
    } else {
        check_tree(in);
    }
    return 0;
}
