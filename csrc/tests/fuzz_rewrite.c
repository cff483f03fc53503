/* libFuzzer entry for the rewriter: any bytes give an error or a module within the bound that the rewriter itself can read again.
 * Seeds: corpus/rewrite. */
#include "rewrite.h"

#include "art_err.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int condition)
{
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* Tiny chunks, so that small inputs reach every helper; the bound is near enough to be met. */
    const art_rewrite_config cfg = {
        .memory_chunk_bytes = 2,
        .table_chunk_entries = 1,
        .table_elements_max = 1000,
        .bytes_max = 8192,
    };
    uint8_t *out = NULL, *again = NULL, *called = NULL;
    size_t len = 0, again_len = 0, called_len = 0;
    char msg[128] = "";
    int rc = art_rewrite(data, size, &cfg, &out, &len, msg, sizeof msg);
    if (rc != 0) {
        require((rc == ART_EMODULE || rc == ART_ELIMIT) && !out && strncmp(msg, "byte ", 5) == 0);
        return 0;
    }
    require(out && len >= 8 && len <= cfg.bytes_max);
    rc = art_rewrite(out, len, &cfg, &again, &again_len, msg, sizeof msg);
    require(rc == 0 || rc == ART_ELIMIT);
    /* calls at loops: the result can be read again, and is the same module to whoever looks for facts */
    art_rewrite_config with_calls = {
        .memory_chunk_bytes = 1, .table_chunk_entries = 1, .table_elements_max = 1000, .bytes_max = 8192,
        .loop_export = "f", .keep_bulk = true,
    };
    art_rewrite_facts facts, facts_after;
    rc = art_rewrite_knowing(data, size, &with_calls, &called, &called_len, &facts, msg, sizeof msg);
    require(rc == 0 || rc == ART_EMODULE || rc == ART_ELIMIT);
    free(again);
    again = NULL;
    if (rc == 0) {
        with_calls.loop_export = NULL;
        rc = art_rewrite_knowing(called, called_len, &with_calls, &again, &again_len, &facts_after, msg, sizeof msg);
        require(rc == 0 && again_len == called_len && memcmp(again, called, called_len) == 0);
        require(facts.loops == facts_after.loops && facts.exceptions == facts_after.exceptions &&
                facts.tables_change == facts_after.tables_change && facts.start == facts_after.start);
        free(called);
    }
    free(again);
    again = NULL;
    /* functions that are said to be copies of others: what comes out is read again as it is, or refused */
    const uint32_t of[] = {data[size - 1] % 8, 8 + data[size - 1] / 32};
    with_calls.loop_export = NULL;
    with_calls.copied = of;
    with_calls.copied_count = 2;
    with_calls.copies_first = data[size / 2] % 32;
    rc = art_rewrite_knowing(data, size, &with_calls, &called, &called_len, &facts, msg, sizeof msg);
    require(rc == 0 || rc == ART_EMODULE || rc == ART_ELIMIT);
    if (rc == 0) {
        with_calls.copied = NULL;
        rc = art_rewrite_knowing(called, called_len, &with_calls, &again, &again_len, &facts_after, msg, sizeof msg);
        require(rc == ART_EMODULE || (rc == 0 && again_len == called_len && memcmp(again, called, called_len) == 0 &&
                                      facts.loops == facts_after.loops));
        free(called);
        free(again);
    }
    free(out);
    return 0;
}
