// The public headers as C++, twice over, and atomic fields that have the same size as in C. Only compiled, never run.
#include "public_headers.inc"
#include "public_headers.inc"

static_assert(sizeof(art_fuel_account) == 4 * sizeof(uint64_t), "as in C");
static_assert(sizeof(art_event) == sizeof(void *) + 8, "as in C");
