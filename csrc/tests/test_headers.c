/* All headers together, twice over: guards work, and no two headers define the same thing. Built with one more file per
 * header, in which that header comes first (and so must bring what it needs). all_headers.inc is written by CMake. */
#include "all_headers.inc"
#include "all_headers.inc"

#include <string.h>

#include "check.h"

int main(void)
{
    /* Error codes are fixed for good, distinct, and each has a message of its own. */
    static const int codes[] = {
#define CODE(name, value, message) ART_E##name,
        ART_ERR_MAP(CODE)
#undef CODE
    };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        CHECK(codes[i] < 0);
        CHECK(strcmp(art_strerror(codes[i]), art_strerror(INT32_MIN)) != 0);
        for (size_t k = 0; k < i; k++) {
            CHECK(codes[i] != codes[k]);
            CHECK(strcmp(art_strerror(codes[i]), art_strerror(codes[k])) != 0);
        }
    }
    CHECK(strcmp(art_strerror(0), "ok") == 0);
    return 0;
}
