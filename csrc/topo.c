/* topo.c: see topo.h. */
#include "topo.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "art_err.h"
#include "sys_linux.h"

enum {
    /* A node's CPU list of 1,024 single numbers is under 5 KiB; /proc/self/cgroup holds a line, that is a path, for each
     * hierarchy. */
    FILE_BYTES_MAX = 16384,
    /* Room for the fixed part of every path below. */
    PATH_BYTES_MAX = PATH_MAX,
};

/* --- sets --- */

static int parse_number(const char **at, const char *end, uint32_t *out)
{
    const char *p = *at;
    uint64_t value = 0;
    if (p == end || !isdigit((unsigned char)*p)) {
        return ART_EINVAL;
    }
    while (p != end && isdigit((unsigned char)*p)) {
        value = value * 10 + (uint64_t)(*p - '0');
        if (value > UINT32_MAX) {
            return ART_ELIMIT;
        }
        p++;
    }
    *at = p;
    *out = (uint32_t)value;
    return ART_OK;
}

/* As art_cpuset_parse; CPUs that do not fit are left out and *beyond is set. */
static int parse_list(const char *text, size_t length, art_cpuset *out, bool *beyond)
{
    const char *at = text;
    const char *end = text + length;
    art_cpuset set = {{0}};
    *beyond = false;
    if (at != end && end[-1] == '\n') {
        end--;
    }
    while (at != end) {
        uint32_t first = 0;
        int rc = parse_number(&at, end, &first);
        uint32_t last = first;
        if (rc == ART_OK && at != end && *at == '-') {
            at++;
            rc = parse_number(&at, end, &last);
        }
        if (rc != ART_OK) {
            return rc;
        }
        if (last < first) {
            return ART_EINVAL;
        }
        for (uint32_t cpu = first; cpu <= last && cpu < ART_CPU_MAX; cpu++) {
            art_cpuset_add(&set, cpu);
        }
        *beyond = *beyond || last >= ART_CPU_MAX;
        if (at != end) {
            if (*at != ',' || at + 1 == end) {
                return ART_EINVAL;
            }
            at++;
        }
    }
    *out = set;
    return ART_OK;
}

int art_cpuset_parse(const char *text, size_t length, art_cpuset *out)
{
    if (text == NULL || out == NULL) {
        return ART_EINVAL;
    }
    art_cpuset set;
    bool beyond = false;
    int rc = parse_list(text, length, &set, &beyond);
    if (rc != ART_OK) {
        return rc;
    }
    if (beyond) {
        return ART_ELIMIT;
    }
    *out = set;
    return ART_OK;
}

uint32_t art_cpuset_count(const art_cpuset *set)
{
    uint32_t n = 0;
    for (size_t i = 0; i < ART_CPUSET_WORDS; i++) {
        n += (uint32_t)__builtin_popcountll(set->words[i]);
    }
    return n;
}

int art_cpuset_nth(const art_cpuset *set, uint32_t n)
{
    for (uint32_t i = 0; i < ART_CPUSET_WORDS; i++) {
        uint64_t word = set->words[i];
        uint32_t here = (uint32_t)__builtin_popcountll(word);
        if (n >= here) {
            n -= here;
            continue;
        }
        for (; n > 0; n--) {
            word &= word - 1;
        }
        return (int)(i * 64 + (uint32_t)__builtin_ctzll(word));
    }
    return -1;
}

static void cpuset_and(art_cpuset *set, const art_cpuset *other)
{
    for (size_t i = 0; i < ART_CPUSET_WORDS; i++) {
        set->words[i] &= other->words[i];
    }
}

/* set without other. */
static void cpuset_minus(art_cpuset *set, const art_cpuset *other)
{
    for (size_t i = 0; i < ART_CPUSET_WORDS; i++) {
        set->words[i] &= ~other->words[i];
    }
}

/* --- files --- */

/* Reads a whole small file into buf, NUL-terminated. Returns its length, or -1 when it cannot be read or does not fit. */
static ssize_t read_file(const char *path, char *buf, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    size_t length = 0;
    for (;;) {
        ssize_t n = read(fd, buf + length, size - 1 - length);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            (void)close(fd);
            buf[length] = '\0';
            return n == 0 ? (ssize_t)length : -1;
        }
        length += (size_t)n;
        if (length == size - 1) {
            (void)close(fd);
            return -1;
        }
    }
}

static bool make_path(char *path, const char *root, const char *a, const char *b, const char *c)
{
    int n = snprintf(path, PATH_BYTES_MAX, "%s%s%s%s", root, a, b, c);
    return n >= 0 && n < PATH_BYTES_MAX;
}

/* Strict unsigned decimal with an optional newline; no sign, no blanks. */
static bool parse_u64(const char *text, const char **rest, uint64_t *out)
{
    if (!isdigit((unsigned char)*text)) {
        return false;
    }
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0) {
        return false;
    }
    *out = value;
    *rest = end;
    return true;
}

/* --- parts of the reading --- */

/* "node12" -> 12. */
static bool parse_node_name(const char *name, uint32_t *id)
{
    if (strncmp(name, "node", 4) != 0) {
        return false;
    }
    const char *at = name + 4;
    const char *end = at + strlen(at);
    return parse_number(&at, end, id) == ART_OK && at == end && *id <= INT32_MAX;
}

/* Keeps nodes sorted by id; when full, the highest id goes. */
static void insert_node(art_topo *topo, const art_topo_node *node)
{
    uint32_t at = topo->node_count;
    if (at == ART_NODE_MAX) {
        topo->flags |= ART_TOPO_TRUNCATED;
        if (topo->nodes[at - 1].id < node->id) {
            return;
        }
        at--;
    } else {
        topo->node_count++;
    }
    for (; at > 0 && topo->nodes[at - 1].id > node->id; at--) {
        topo->nodes[at] = topo->nodes[at - 1];
    }
    topo->nodes[at] = *node;
}

static void read_nodes(const char *root, art_topo *topo)
{
    char path[PATH_BYTES_MAX];
    char text[FILE_BYTES_MAX];
    art_cpuset rest = topo->cpus;
    DIR *dir = NULL;
    if (make_path(path, root, "/sys/devices/system/node", "", "")) {
        dir = opendir(path);
    }
    if (dir != NULL) {
        struct dirent *entry;
        while ((entry = readdir(dir)) != NULL) {
            art_topo_node node = {0};
            bool beyond = false;
            if (!parse_node_name(entry->d_name, &node.id) ||
                !make_path(path, root, "/sys/devices/system/node/", entry->d_name, "/cpulist")) {
                continue;
            }
            ssize_t length = read_file(path, text, sizeof text);
            if (length < 0 || parse_list(text, (size_t)length, &node.cpus, &beyond) != ART_OK) {
                continue;
            }
            /* "rest" and not all usable CPUs: a CPU is in one node, whatever the files say. */
            cpuset_and(&node.cpus, &rest);
            node.cpu_count = art_cpuset_count(&node.cpus);
            if (node.cpu_count > 0) {
                cpuset_minus(&rest, &node.cpus);
                insert_node(topo, &node);
            }
        }
        (void)closedir(dir);
    }
    if (topo->node_count == 0) {
        topo->flags |= ART_TOPO_NUMA_UNKNOWN;
        topo->node_count = 1;
        topo->nodes[0] = (art_topo_node){.id = 0, .cpu_count = topo->cpu_count, .cpus = topo->cpus};
        return;
    }
    /* Recomputed, because a node that did not fit has left its CPUs without one. */
    rest = topo->cpus;
    for (uint32_t i = 0; i < topo->node_count; i++) {
        cpuset_minus(&rest, &topo->nodes[i].cpus);
    }
    uint32_t homeless = art_cpuset_count(&rest);
    if (homeless > 0) {
        topo->flags |= ART_TOPO_NUMA_PARTIAL;
        topo->nodes[0].cpu_count += homeless;
        for (size_t i = 0; i < ART_CPUSET_WORDS; i++) {
            topo->nodes[0].cpus.words[i] |= rest.words[i];
        }
    }
}

/* "50000 100000" or "max 100000". False: not of this form. quota 0 = max. */
static bool parse_cpu_max(const char *text, uint64_t *quota_us, uint64_t *period_us)
{
    const char *at = text;
    *quota_us = 0;
    if (strncmp(at, "max", 3) == 0) {
        at += 3;
    } else if (!parse_u64(at, &at, quota_us) || *quota_us == 0) {
        return false;
    }
    if (*at++ != ' ' || !parse_u64(at, &at, period_us) || *period_us == 0) {
        return false;
    }
    return *at == '\0' || strcmp(at, "\n") == 0;
}

/* Finds the version 2 line ("0::<path>") and returns the path, ended in place; NULL when there is none. */
static char *find_cgroup_path(char *text)
{
    for (char *line = text; line != NULL && *line != '\0';) {
        char *newline = strchr(line, '\n');
        if (newline != NULL) {
            *newline = '\0';
        }
        if (strncmp(line, "0::/", 4) == 0) {
            return line + 3;
        }
        line = newline != NULL ? newline + 1 : NULL;
    }
    return NULL;
}

/* The tightest cpu.max from the process's cgroup up to the top of what is mounted at mount. False: none could be read. */
static bool read_quota_at(const char *root, const char *mount, const char *cgroup, art_topo *topo)
{
    char here[PATH_BYTES_MAX];
    char path[PATH_BYTES_MAX];
    char text[64];
    bool found = false;
    size_t length = strlen(cgroup);
    if (length >= sizeof here) {
        return false;
    }
    memcpy(here, cgroup, length + 1);
    while (length > 0 && here[length - 1] == '/') {
        here[--length] = '\0';
    }
    for (;;) {
        uint64_t quota_us = 0;
        uint64_t period_us = 0;
        if (make_path(path, root, mount, here, "/cpu.max") && read_file(path, text, sizeof text) >= 0 &&
            parse_cpu_max(text, &quota_us, &period_us)) {
            found = true;
            bool tighter = quota_us != 0 && (topo->quota_us == 0 ||
                                             (unsigned __int128)quota_us * topo->period_us <
                                                 (unsigned __int128)topo->quota_us * period_us);
            if (tighter) {
                topo->quota_us = quota_us;
                topo->period_us = period_us;
            }
        }
        char *slash = strrchr(here, '/');
        if (slash == NULL) {
            return found;
        }
        *slash = '\0';
    }
}

static void read_quota(const char *root, art_topo *topo)
{
    char path[PATH_BYTES_MAX];
    char text[FILE_BYTES_MAX];
    const char *cgroup = NULL;
    if (make_path(path, root, "/proc/self/cgroup", "", "") && read_file(path, text, sizeof text) >= 0) {
        cgroup = find_cgroup_path(text);
    }
    if (cgroup != NULL && strstr(cgroup, "/..") != NULL) {
        cgroup = "/"; /* we are above the cgroup namespace's root: only its top is in sight */
    }
    /* The second is where version 2 is mounted beside version 1. */
    if (cgroup == NULL || !(read_quota_at(root, "/sys/fs/cgroup", cgroup, topo) ||
                            read_quota_at(root, "/sys/fs/cgroup/unified", cgroup, topo))) {
        topo->flags |= ART_TOPO_QUOTA_UNKNOWN;
    }
}

static void read_map_count(const char *root, art_topo *topo)
{
    char path[PATH_BYTES_MAX];
    char text[64];
    const char *rest = NULL;
    uint64_t value = 0;
    if (make_path(path, root, "/proc/sys/vm/max_map_count", "", "") && read_file(path, text, sizeof text) >= 0 &&
        parse_u64(text, &rest, &value) && (*rest == '\0' || strcmp(rest, "\n") == 0) && value > 0) {
        topo->map_count_max = value;
    } else {
        topo->flags |= ART_TOPO_MAPS_UNKNOWN;
    }
}

/* --- the reading --- */

int art_topo_read_cpus(const char *root, const art_cpuset *usable, art_topo *out)
{
    if (root == NULL) {
        root = "";
    }
    /* Half of PATH_MAX leaves room for the paths below it. */
    if (out == NULL || usable == NULL || strlen(root) > PATH_BYTES_MAX / 2 || art_cpuset_count(usable) == 0) {
        return ART_EINVAL;
    }
    int saved = errno; /* files that are missing are no error, so they shall not look like one */
    memset(out, 0, sizeof *out);
    out->cpus = *usable;
    out->cpu_count = art_cpuset_count(usable);
    read_nodes(root, out);
    read_quota(root, out);
    read_map_count(root, out);
    errno = saved;
    return ART_OK;
}

int art_topo_read(const char *root, art_topo *out)
{
    enum { WIDE_WORDS = 1024 }; /* 65,536 CPUs: wider than any kernel's mask */
    uint64_t wide[WIDE_WORDS];
    int rc = art_sys_sched_getaffinity(0, wide, WIDE_WORDS);
    if (rc < 0) {
        errno = -rc;
        return ART_ESYS;
    }
    art_cpuset usable;
    memcpy(usable.words, wide, sizeof usable.words);
    bool truncated = false;
    for (size_t i = ART_CPUSET_WORDS; i < WIDE_WORDS; i++) {
        truncated = truncated || wide[i] != 0;
    }
    rc = art_topo_read_cpus(root, &usable, out);
    if (rc == ART_OK && truncated) {
        out->flags |= ART_TOPO_TRUNCATED;
    }
    return rc;
}

uint32_t art_topo_worker_count(const art_topo *topo, uint32_t max)
{
    uint64_t n = topo->cpu_count;
    if (topo->quota_us != 0 && topo->period_us != 0) {
        uint64_t whole = topo->quota_us / topo->period_us + (topo->quota_us % topo->period_us != 0);
        n = whole < n ? whole : n;
    }
    if (max != 0 && n > max) {
        n = max;
    }
    return n > 0 ? (uint32_t)n : 1;
}

int art_topo_node_of(const art_topo *topo, uint32_t cpu)
{
    for (uint32_t i = 0; i < topo->node_count; i++) {
        if (art_cpuset_has(&topo->nodes[i].cpus, cpu)) {
            return (int)topo->nodes[i].id;
        }
    }
    return -1;
}
