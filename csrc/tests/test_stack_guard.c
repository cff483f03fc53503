/* test_stack_guard.c: a pool of stacks made as the engine makes it, and the engine's own. */
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../guest.h"
#include "../stack_guard.h"
#include "check.h"

enum { PAGE = 4096, STACK = 12 * PAGE, STEP = STACK + PAGE, STACKS = 40 };

/* Between pages of another kind, so that it does not become one with what else there is. */
static char *pool_make(void)
{
    char *area = mmap(NULL, (size_t)STEP * STACKS + 2 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *pool = area + PAGE;
    CHECK(area != MAP_FAILED);
    CHECK_OK(mprotect(pool, (size_t)STEP * STACKS, PROT_READ | PROT_WRITE));
    for (int i = 0; i < STACKS; i++) {
        CHECK_OK(mprotect(pool + i * STEP, PAGE, PROT_NONE));
    }
    return pool;
}

static void pool_unmap(char *pool)
{
    CHECK_OK(munmap(pool - PAGE, (size_t)STEP * STACKS + 2 * PAGE));
}

/* Mappings of this process that begin in [from, to). */
static int mappings(const char *from, const char *to)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[8192];
    int count = 0;
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        uintptr_t start = strtoull(line, NULL, 16);
        count += start >= (uintptr_t)from && start < (uintptr_t)to;
    }
    fclose(maps);
    return count;
}

/* Does writing there fault? Asked of a child, which keeps the guards. */
static bool faults(char *at)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would end it otherwise */
        *(volatile char *)at = 1;
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : status == 0);
    return WIFSIGNALED(status);
}

static void check_guards(char *pool)
{
    for (int i = 0; i < STACKS; i += 13) {
        CHECK(faults(pool + i * STEP) && faults(pool + i * STEP + PAGE - 1));
        CHECK(!faults(pool + i * STEP + PAGE) && !faults(pool + (i + 1) * STEP - 1));
    }
}

static void test_a_pool_becomes_one_mapping(void)
{
    char *pool = pool_make(), *end = pool + (size_t)STEP * STACKS;
    CHECK_EQ(mappings(pool, end), 2 * STACKS);
    CHECK_EQ(art_stack_guards_lighten(STACKS, STACK), 1);
    CHECK_EQ(mappings(pool, end), 1);
    check_guards(pool);
    for (int i = 0; i < STACKS; i++) { /* what is used stays beside the guards, and they stay when it is given back */
        memset(pool + i * STEP + PAGE, 7, STACK);
    }
    CHECK_OK(madvise(pool + PAGE, STACK, MADV_DONTNEED));
    CHECK(pool[PAGE] == 0 && pool[STEP + PAGE] == 7);
    check_guards(pool);
    CHECK_EQ(art_stack_guards_lighten(STACKS, STACK), 0); /* there is none left to find */
    pool_unmap(pool);
}

static void test_what_is_no_such_pool_is_left_alone(void)
{
    char *pool = pool_make(), *end = pool + (size_t)STEP * STACKS;
    CHECK_EQ(art_stack_guards_lighten(STACKS + 1, STACK), 0);
    CHECK_EQ(art_stack_guards_lighten(STACKS, STACK - PAGE), 0);
    CHECK_EQ(art_stack_guards_lighten(STACKS, STACK + PAGE), 0);
    CHECK_EQ(art_stack_guards_lighten(STACKS, STACK + 1), 0);
    CHECK_EQ(art_stack_guards_lighten(1, STACK), 0);
    CHECK_EQ(art_stack_guards_lighten(0, STACK), 0);
    CHECK_EQ(mappings(pool, end), 2 * STACKS);
    CHECK_OK(mprotect(pool + 20 * STEP + PAGE, PAGE, PROT_READ)); /* a hole in the pattern */
    CHECK_EQ(art_stack_guards_lighten(STACKS, STACK), 0);
    CHECK_EQ(mappings(pool, end), 2 * STACKS + 1);
    check_guards(pool);
    pool_unmap(pool);
}

static void test_neighbours_may_have_become_one_with_its_ends(void)
{
    char *pool = pool_make(), *end = pool + (size_t)STEP * STACKS;
    CHECK_OK(mprotect(pool - PAGE, PAGE, PROT_NONE));
    CHECK_OK(mprotect(end, PAGE, PROT_READ | PROT_WRITE));
    CHECK_EQ(art_stack_guards_lighten(STACKS, STACK), 1);
    check_guards(pool);
    CHECK(faults(pool - 1)); /* not the pool's: protected as before */
    CHECK_EQ(mappings(pool, end), 1);
    CHECK(!faults(end));
    pool_unmap(pool);
}

static void test_the_engine_s_pool(void)
{
    const char *library = getenv("AGENTRT_WASMTIME_LIB");
    CHECK_MSG(library && *library, "AGENTRT_WASMTIME_LIB must name wasmtime's shared library");
    art_engine_config config = {
        .library = library,
        .guests_max = 500,
        .stacks_max = 500,
        .memory_bytes_max = 1 << 21,
        .wasm_stack_bytes = (64 << 10) + 100, /* is rounded up */
        .table_elements_max = 100,
        .request_bytes_max = 1 << 16,
        .result_bytes_max = 1 << 20,
        .inflight_max = 8,
    };
    art_engine *engine;
    char message[256] = "";
    int before = mappings(NULL, (char *)UINTPTR_MAX);
    CHECK_MSG(art_engine_create(&config, &engine, message, sizeof message) == 0, "%s", message);
    int grown = mappings(NULL, (char *)UINTPTR_MAX) - before;
    CHECK_MSG(grown < 500, "500 stacks took %d mappings", grown);
    art_engine_destroy(engine);
}

int main(void)
{
    CHECK_EQ(sysconf(_SC_PAGESIZE), PAGE);
    test_what_is_no_such_pool_is_left_alone();
    if (!art_stack_guards_light()) {
        char *pool = pool_make();
        CHECK_EQ(art_stack_guards_lighten(STACKS, STACK), 0);
        check_guards(pool);
        puts("this kernel has no light guards: nothing more to test");
        return 0;
    }
    test_a_pool_becomes_one_mapping();
    test_neighbours_may_have_become_one_with_its_ends();
    test_the_engine_s_pool();
    return 0;
}
