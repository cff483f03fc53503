/* art_err.h: the one list of error codes of the C core.
 *
 * Convention: a function that can fail returns 0 or a negative art_err. On failure nothing the caller passed in has
 * changed owner unless the function's comment says so, and out-parameters are untouched. The Python translator
 * (pyx/_core.pyx) maps each name to one exception type; a code it does not know still raises.
 * Thread-safety: pure functions of their arguments.
 */
#ifndef ART_ERR_H
#define ART_ERR_H

#ifdef __cplusplus
extern "C" {
#endif

/* X(NAME, value, message): values are fixed for good; new codes get new numbers. */
#define ART_ERR_MAP(X)                                                          \
    X(NOMEM, -1, "out of memory")                                               \
    X(INVAL, -2, "invalid argument")                                            \
    X(FULL, -3, "queue is full")                                                \
    X(CLOSED, -4, "core is closed")                                             \
    X(BUSY, -5, "try again")                                                    \
    X(ENGINE, -6, "wasm engine could not be used")                              \
    X(MODULE, -7, "not a usable wasm module")                                   \
    X(IMPORT, -8, "module wants an unknown import")                             \
    X(ENTRY, -9, "module has no usable entry")                                  \
    X(LIMIT, -10, "module or guest is over a limit")                            \
    X(STATE, -11, "not allowed in this state")                                  \
    X(SYS, -12, "system call failed")                                           \
    X(VERSION, -13, "version does not fit")                                     \
    X(NOENT, -14, "no such object")

typedef enum art_err {
    ART_OK = 0,
#define ART_ERR_ENUM(name, value, message) ART_E##name = value,
    ART_ERR_MAP(ART_ERR_ENUM)
#undef ART_ERR_ENUM
} art_err;

/* A fixed message for a code; never NULL, never freed. */
static inline const char *art_strerror(int err)
{
    switch (err) {
#define ART_ERR_CASE(name, value, message)                                      \
    case value:                                                                 \
        return message;
        ART_ERR_MAP(ART_ERR_CASE)
#undef ART_ERR_CASE
    case 0:
        return "ok";
    default:
        return "unknown error";
    }
}

#ifdef __cplusplus
}
#endif
#endif
