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
    uint8_t *out = NULL, *again = NULL;
    size_t len = 0, again_len = 0;
    char msg[128] = "";
    int rc = art_rewrite(data, size, &cfg, &out, &len, msg, sizeof msg);
    if (rc != 0) {
        require((rc == ART_EMODULE || rc == ART_ELIMIT) && !out && strncmp(msg, "byte ", 5) == 0);
        return 0;
    }
    require(out && len >= 8 && len <= cfg.bytes_max);
    rc = art_rewrite(out, len, &cfg, &again, &again_len, msg, sizeof msg);
    require(rc == 0 || rc == ART_ELIMIT);
    free(again);
    free(out);
    return 0;
}
