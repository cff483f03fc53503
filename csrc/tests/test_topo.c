/* Topology from fake trees in a temporary directory, and once from the real system. */
#define _GNU_SOURCE
#include "topo.h"

#include <errno.h>
#include <ftw.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "art_err.h"
#include "check.h"

static char root[] = "/tmp/art-topo-XXXXXX";

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st;
    (void)kind;
    (void)ftw;
    return remove(path);
}

static void remove_tree(void)
{
    (void)nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* A new, empty tree. */
static void fresh(void)
{
    remove_tree();
    CHECK_OK(mkdir(root, 0700));
}

static void put(const char *path, const char *text)
{
    char full[512];
    CHECK(snprintf(full, sizeof full, "%s%s", root, path) < (int)sizeof full);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        CHECK(mkdir(full, 0700) == 0 || errno == EEXIST);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK_OK(fclose(file));
}

static void put_node(unsigned id, const char *cpus)
{
    char path[128];
    (void)snprintf(path, sizeof path, "/sys/devices/system/node/node%u/cpulist", id);
    put(path, cpus);
}

static art_cpuset set_of(const char *text)
{
    art_cpuset set;
    CHECK_OK(art_cpuset_parse(text, strlen(text), &set));
    return set;
}

static bool same(const art_cpuset *a, const char *text)
{
    art_cpuset b = set_of(text);
    return memcmp(a, &b, sizeof b) == 0;
}

static art_topo topo;

static void read_with(const char *cpus)
{
    art_cpuset usable = set_of(cpus);
    memset(&topo, 0xa5, sizeof topo);
    errno = 0;
    CHECK_OK(art_topo_read_cpus(root, &usable, &topo));
    CHECK_EQ(errno, 0);
}

static void test_parse(void)
{
    static const struct {
        const char *text;
        int rc;
        uint32_t count;
    } cases[] = {
        {"", 0, 0},
        {"\n", 0, 0},
        {"0", 0, 1},
        {"0\n", 0, 1},
        {"0-3,8-11\n", 0, 8},
        {"5,1-2", 0, 3},
        {"1-4,2-6", 0, 6},
        {"63-64", 0, 2},
        {"0-1023", 0, 1024},
        {"1023", 0, 1},
        {"1024", ART_ELIMIT, 0},
        {"0-1024", ART_ELIMIT, 0},
        {"0-4294967295", ART_ELIMIT, 0},
        {"4294967296", ART_ELIMIT, 0},
        {"99999999999999999999999", ART_ELIMIT, 0},
        {"3-1", ART_EINVAL, 0},
        {"-1", ART_EINVAL, 0},
        {"1-", ART_EINVAL, 0},
        {"1,", ART_EINVAL, 0},
        {",1", ART_EINVAL, 0},
        {"1,,2", ART_EINVAL, 0},
        {"1 2", ART_EINVAL, 0},
        {" 1", ART_EINVAL, 0},
        {"+1", ART_EINVAL, 0},
        {"0x1", ART_EINVAL, 0},
        {"1\n\n", ART_EINVAL, 0},
        {"1-2-3", ART_EINVAL, 0},
        {"all", ART_EINVAL, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* An exact-size copy, so that ASan sees a read beyond the length. */
        size_t length = strlen(cases[i].text);
        char *text = malloc(length + 1);
        CHECK(text != NULL);
        char *exact = malloc(length > 0 ? length : 1);
        CHECK(exact != NULL);
        memcpy(exact, cases[i].text, length);
        art_cpuset set;
        memset(&set, 0x5a, sizeof set);
        art_cpuset before = set;
        int rc = art_cpuset_parse(exact, length, &set);
        CHECK_MSG(rc == cases[i].rc, "case %zu: \"%s\" gave %d", i, cases[i].text, rc);
        if (rc == 0) {
            CHECK_EQ(art_cpuset_count(&set), cases[i].count);
        } else {
            CHECK(memcmp(&set, &before, sizeof set) == 0);
        }
        free(text);
        free(exact);
    }
    CHECK_EQ(art_cpuset_parse("1\0002", 3, &(art_cpuset){{0}}), ART_EINVAL);
    CHECK_EQ(art_cpuset_parse(NULL, 0, &(art_cpuset){{0}}), ART_EINVAL);
    CHECK_EQ(art_cpuset_parse("1", 1, NULL), ART_EINVAL);
}

static void test_sets(void)
{
    art_cpuset set = set_of("0,63-65,1023");
    static const int members[] = {0, 63, 64, 65, 1023, -1, -1};
    for (uint32_t n = 0; n < 7; n++) {
        CHECK_EQ(art_cpuset_nth(&set, n), members[n]);
    }
    CHECK_EQ(art_cpuset_nth(&set, UINT32_MAX), -1);
    CHECK(art_cpuset_has(&set, 64) && art_cpuset_has(&set, 1023));
    CHECK(!art_cpuset_has(&set, 1) && !art_cpuset_has(&set, 1024) && !art_cpuset_has(&set, UINT32_MAX));
    art_cpuset_add(&set, 1024);
    art_cpuset_add(&set, UINT32_MAX);
    CHECK_EQ(art_cpuset_count(&set), 5);
    art_cpuset_add(&set, 7);
    CHECK_EQ(art_cpuset_nth(&set, 1), 7);
}

static void test_empty_tree_gives_defaults_and_says_so(void)
{
    fresh();
    read_with("2-3");
    CHECK_EQ(topo.flags, ART_TOPO_NUMA_UNKNOWN | ART_TOPO_QUOTA_UNKNOWN | ART_TOPO_MAPS_UNKNOWN);
    CHECK_EQ(topo.cpu_count, 2);
    CHECK_EQ(topo.node_count, 1);
    CHECK_EQ(topo.nodes[0].id, 0);
    CHECK_EQ(topo.nodes[0].cpu_count, 2);
    CHECK(same(&topo.nodes[0].cpus, "2-3"));
    CHECK_EQ(topo.quota_us, 0);
    CHECK_EQ(topo.period_us, 0);
    CHECK_EQ(topo.map_count_max, 0);
}

static void test_two_nodes_cut_to_the_usable_cpus(void)
{
    fresh();
    put_node(0, "0-3,8-11\n");
    put_node(1, "4-7,12-15\n");
    put("/sys/devices/system/node/online", "0-1\n");
    put("/proc/sys/vm/max_map_count", "65530\n");
    put("/proc/self/cgroup", "0::/\n");
    put("/sys/fs/cgroup/cpu.max", "max 100000\n");
    read_with("2-5,15");
    CHECK_EQ(topo.flags, 0);
    CHECK_EQ(topo.cpu_count, 5);
    CHECK_EQ(topo.node_count, 2);
    CHECK(topo.nodes[0].id == 0 && topo.nodes[0].cpu_count == 2 && same(&topo.nodes[0].cpus, "2-3"));
    CHECK(topo.nodes[1].id == 1 && topo.nodes[1].cpu_count == 3 && same(&topo.nodes[1].cpus, "4-5,15"));
    CHECK_EQ(art_topo_node_of(&topo, 3), 0);
    CHECK_EQ(art_topo_node_of(&topo, 15), 1);
    CHECK_EQ(art_topo_node_of(&topo, 0), -1);
    CHECK_EQ(art_topo_node_of(&topo, UINT32_MAX), -1);
    CHECK_EQ(topo.map_count_max, 65530);
    CHECK_EQ(topo.quota_us, 0);
}

static void test_nodes_sorted_and_odd_entries_ignored(void)
{
    fresh();
    put_node(10, "2\n");
    put_node(2, "1\n");
    put_node(0, "0\n");
    put_node(3, "\n");          /* memory only */
    put_node(4, "9\n");         /* nothing usable */
    put_node(5, "nonsense\n");  /* not ours to understand */
    put("/sys/devices/system/node/node7x/cpulist", "0-2\n");
    put("/sys/devices/system/node/node/cpulist", "0-2\n");
    put("/sys/devices/system/node/node99999999999/cpulist", "0-2\n");
    put("/sys/devices/system/node/node6/meminfo", "");
    read_with("0-2");
    CHECK_EQ(topo.node_count, 3);
    CHECK_EQ(topo.nodes[0].id, 0);
    CHECK_EQ(topo.nodes[1].id, 2);
    CHECK_EQ(topo.nodes[2].id, 10);
    CHECK((topo.flags & (ART_TOPO_NUMA_UNKNOWN | ART_TOPO_NUMA_PARTIAL | ART_TOPO_TRUNCATED)) == 0);
}

/* Every usable CPU is in exactly one node, whatever the files say. */
static void check_partition(void)
{
    uint32_t total = 0;
    art_cpuset all = {{0}};
    for (uint32_t i = 0; i < topo.node_count; i++) {
        CHECK_EQ(art_cpuset_count(&topo.nodes[i].cpus), topo.nodes[i].cpu_count);
        CHECK(i == 0 || topo.nodes[i - 1].id < topo.nodes[i].id);
        total += topo.nodes[i].cpu_count;
        for (size_t w = 0; w < ART_CPUSET_WORDS; w++) {
            all.words[w] |= topo.nodes[i].cpus.words[w];
        }
    }
    CHECK_EQ(total, topo.cpu_count);
    CHECK(memcmp(&all, &topo.cpus, sizeof all) == 0);
}

static void test_cpus_in_no_node_or_in_two(void)
{
    fresh();
    put_node(1, "0-1\n");
    put_node(2, "1-2\n");
    read_with("0-5");
    CHECK(topo.flags & ART_TOPO_NUMA_PARTIAL);
    check_partition();
    CHECK_EQ(art_topo_node_of(&topo, 5), 1);
}

static void test_more_nodes_than_fit(void)
{
    fresh();
    for (unsigned i = 0; i < ART_NODE_MAX + 6; i++) {
        char cpu[16];
        (void)snprintf(cpu, sizeof cpu, "%u\n", i);
        put_node(i, cpu);
    }
    read_with("0-69");
    CHECK_EQ(topo.node_count, ART_NODE_MAX);
    CHECK_EQ(topo.nodes[ART_NODE_MAX - 1].id, ART_NODE_MAX - 1);
    CHECK((topo.flags & ART_TOPO_TRUNCATED) != 0);
    CHECK((topo.flags & ART_TOPO_NUMA_PARTIAL) != 0);
    check_partition();

    fresh();
    put_node(0, "0-4095\n"); /* a list beyond our CPUs is no reason to refuse the node */
    read_with("0-1023");
    CHECK_EQ(topo.nodes[0].cpu_count, ART_CPU_MAX);
}

static void expect_quota(uint64_t quota_us, uint64_t period_us, bool known)
{
    read_with("0-63");
    CHECK_EQ(topo.quota_us, quota_us);
    CHECK_EQ(topo.period_us, period_us);
    CHECK_EQ((topo.flags & ART_TOPO_QUOTA_UNKNOWN) == 0, known);
}

static void test_quota(void)
{
    fresh();
    put("/proc/self/cgroup", "12:cpu,cpuacct:/old\n1:name=systemd:/\n0::/a/b\n");
    expect_quota(0, 0, false);
    put("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    expect_quota(0, 0, true);
    put("/sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
    expect_quota(400000, 100000, true);
    put("/sys/fs/cgroup/a/cpu.max", "75000 50000\n"); /* a parent is tighter: 1.5 against 4 CPUs */
    expect_quota(75000, 50000, true);
    put("/sys/fs/cgroup/cpu.max", "300000 100000\n");
    expect_quota(75000, 50000, true);
    put("/sys/fs/cgroup/a/b/cpu.max", "18446744073709551615 1000000\n");
    expect_quota(75000, 50000, true);

    static const char *const broken[] = {"",       "max",         "max \n",        "100000\n",      "0 100000\n", "100 0\n",
                                         "-1 100", "100 100 100", "maximum 100\n", "1e5 100000\n", "18446744073709551616 1\n"};
    fresh();
    put("/proc/self/cgroup", "0::/\n");
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        put("/sys/fs/cgroup/cpu.max", broken[i]);
        expect_quota(0, 0, false);
    }

    fresh(); /* version 2 beside version 1 */
    put("/proc/self/cgroup", "4:cpu:/x\n0::/s/t\n");
    put("/sys/fs/cgroup/unified/s/cpu.max", "50000 100000\n");
    expect_quota(50000, 100000, true);

    fresh(); /* outside the cgroup namespace's root */
    put("/proc/self/cgroup", "0::/../../elsewhere\n");
    put("/sys/fs/cgroup/cpu.max", "50000 100000\n");
    expect_quota(50000, 100000, true);

    fresh(); /* version 1 only, and no newline at the end */
    put("/proc/self/cgroup", "4:cpu:/x");
    put("/sys/fs/cgroup/cpu.max", "50000 100000\n");
    expect_quota(0, 0, false);
}

static void test_map_count(void)
{
    static const char *const broken[] = {"", "\n", "0\n", "-5\n", "12x\n", "99999999999999999999\n"};
    fresh();
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        put("/proc/sys/vm/max_map_count", broken[i]);
        read_with("0");
        CHECK_EQ(topo.map_count_max, 0);
        CHECK(topo.flags & ART_TOPO_MAPS_UNKNOWN);
    }
    put("/proc/sys/vm/max_map_count", "1048576");
    read_with("0");
    CHECK_EQ(topo.map_count_max, 1048576);
}

static void test_worker_count(void)
{
    static const struct {
        uint32_t cpus;
        uint64_t quota_us;
        uint64_t period_us;
        uint32_t max;
        uint32_t expected;
    } cases[] = {
        {4, 0, 0, 0, 4},
        {4, 0, 0, 3, 3},
        {128, 0, 0, 64, 64},
        {4, 150000, 100000, 64, 2},
        {4, 200000, 100000, 64, 2},
        {4, 1, 100000, 64, 1},
        {4, 900000, 100000, 64, 4},
        {4, UINT64_MAX, 1, 0, 4},
        {4, UINT64_MAX, 2, 0, 4},
        {4, 5, 0, 0, 4},
        {0, 0, 0, 0, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memset(&topo, 0, sizeof topo);
        topo.cpu_count = cases[i].cpus;
        topo.quota_us = cases[i].quota_us;
        topo.period_us = cases[i].period_us;
        CHECK_MSG(art_topo_worker_count(&topo, cases[i].max) == cases[i].expected, "case %zu", i);
    }
}

static void test_bad_arguments(void)
{
    art_cpuset one = set_of("0");
    art_cpuset none = {{0}};
    char *long_root = malloc(8193);
    CHECK(long_root != NULL);
    memset(long_root, 'x', 8192);
    long_root[8192] = '\0';
    memset(&topo, 0x5a, sizeof topo);
    CHECK_EQ(art_topo_read_cpus(root, &one, NULL), ART_EINVAL);
    CHECK_EQ(art_topo_read_cpus(root, NULL, &topo), ART_EINVAL);
    CHECK_EQ(art_topo_read_cpus(root, &none, &topo), ART_EINVAL);
    CHECK_EQ(art_topo_read_cpus(long_root, &one, &topo), ART_EINVAL);
    CHECK_EQ(art_topo_read("", NULL), ART_EINVAL);
    CHECK_EQ(topo.flags, 0x5a5a5a5a);
    free(long_root);
}

static void test_real_system(void)
{
    cpu_set_t allowed;
    CHECK_OK(sched_getaffinity(0, sizeof allowed, &allowed));
    CHECK_OK(art_topo_read(NULL, &topo));
    CHECK_EQ(topo.cpu_count, CPU_COUNT(&allowed));
    for (uint32_t cpu = 0; cpu < ART_CPU_MAX; cpu++) {
        CHECK_EQ(art_cpuset_has(&topo.cpus, cpu), CPU_ISSET(cpu, &allowed) != 0);
    }
    check_partition();
    CHECK(topo.map_count_max > 0);
    CHECK(art_topo_worker_count(&topo, 64) >= 1);
    printf("%u CPUs, %u nodes, quota %ju/%ju, %ju maps, flags 0x%x\n", topo.cpu_count, topo.node_count,
           (uintmax_t)topo.quota_us, (uintmax_t)topo.period_us, (uintmax_t)topo.map_count_max, topo.flags);

    /* The mask is the calling thread's, not the machine's. */
    cpu_set_t one;
    CPU_ZERO(&one);
    int cpu = art_cpuset_nth(&topo.cpus, topo.cpu_count - 1);
    CPU_SET(cpu, &one);
    CHECK_OK(sched_setaffinity(0, sizeof one, &one));
    CHECK_OK(art_topo_read("", &topo));
    CHECK_EQ(topo.cpu_count, 1);
    CHECK_EQ(art_cpuset_nth(&topo.cpus, 0), cpu);
    CHECK_EQ(topo.node_count, 1);
}

int main(void)
{
    CHECK(mkdtemp(root) != NULL);
    CHECK_OK(atexit(remove_tree));
    test_parse();
    test_sets();
    test_empty_tree_gives_defaults_and_says_so();
    test_two_nodes_cut_to_the_usable_cpus();
    test_nodes_sorted_and_odd_entries_ignored();
    test_cpus_in_no_node_or_in_two();
    test_more_nodes_than_fit();
    test_quota();
    test_map_count();
    test_worker_count();
    test_bad_arguments();
    test_real_system();
    return 0;
}
