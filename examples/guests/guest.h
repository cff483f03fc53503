/* guest.h: what the example guests share: building and reading JSON, calling a tool, without a C library.
 *
 * Not part of the ABI (that is agentrt_guest.h): copy what you need. Nothing here allocates; buffers are the caller's.
 */
#ifndef GUEST_H
#define GUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agentrt_guest.h"

/* The compiler calls these for large copies and clears, freestanding or not. */
void *memcpy(void *restrict to, const void *restrict from, size_t len)
{
    unsigned char *t = to;
    for (const unsigned char *f = from; len; len--) {
        *t++ = *f++;
    }
    return to;
}

void *memset(void *to, int value, size_t len)
{
    for (unsigned char *t = to; len; len--) {
        *t++ = (unsigned char)value;
    }
    return to;
}

/* Bytes of text, not NUL-terminated. at == NULL: there is none. */
typedef struct span {
    const char *at;
    uint32_t len;
} span;

static inline uint32_t string_length(const char *s)
{
    uint32_t len = 0;
    while (s[len]) {
        len++;
    }
    return len;
}

static inline bool span_is(span s, const char *text)
{
    uint32_t len = string_length(text);
    if (s.len != len) {
        return false;
    }
    for (uint32_t i = 0; i < len; i++) {
        if (s.at[i] != text[i]) {
            return false;
        }
    }
    return true;
}

/* --- building ----------------------------------------------------------------- */

/* Text under construction; past cap it drops the rest and says so in `full`. */
typedef struct text {
    char *at;
    uint32_t len, cap;
    bool full;
} text;

#define TEXT(name, bytes)    \
    static char name##_[bytes]; \
    text name = {name##_, 0, bytes, false}

static inline void put_char(text *t, char c)
{
    if (t->len < t->cap) {
        t->at[t->len++] = c;
    } else {
        t->full = true;
    }
}

/* Raw text: JSON as it is. */
static inline void put(text *t, const char *raw)
{
    while (*raw) {
        put_char(t, *raw++);
    }
}

static inline void put_span(text *t, span s)
{
    for (uint32_t i = 0; i < s.len; i++) {
        put_char(t, s.at[i]);
    }
}

static inline void put_int(text *t, int64_t value)
{
    char digits[20];
    int count = 0;
    uint64_t left = value < 0 ? -(uint64_t)value : (uint64_t)value;
    do {
        digits[count++] = (char)('0' + left % 10);
        left /= 10;
    } while (left);
    if (value < 0) {
        put_char(t, '-');
    }
    while (count) {
        put_char(t, digits[--count]);
    }
}

/* UTF-8 text as a JSON string, with its quotes. */
static inline void put_string(text *t, span s)
{
    static const char hex[] = "0123456789abcdef";
    put_char(t, '"');
    for (uint32_t i = 0; i < s.len; i++) {
        unsigned char c = (unsigned char)s.at[i];
        if (c == '"' || c == '\\') {
            put_char(t, '\\');
            put_char(t, (char)c);
        } else if (c < 0x20) {
            put(t, "\\u00");
            put_char(t, hex[c >> 4]);
            put_char(t, hex[c & 15]);
        } else {
            put_char(t, (char)c);
        }
    }
    put_char(t, '"');
}

/* --- reading ------------------------------------------------------------------
 * For JSON that the runtime has checked: answers and the run's input. Values are spans of their text, found without
 * building anything. Malformed text gives no value, never a read outside the span. */

static inline const char *skip_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) {
        at++;
    }
    return at;
}

/* The end of the value that begins at `at`; `end` if it never ends. */
static inline const char *skip_value(const char *at, const char *end)
{
    int depth = 0;
    while (at < end) {
        char c = *at++;
        if (c == '"') {
            while (at < end && *at != '"') {
                at += *at == '\\' ? 2 : 1;
            }
            at = at < end ? at + 1 : end;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            depth--;
        } else if (depth == 0) {
            while (at < end && *at != ',' && *at != '}' && *at != ']' && *at > ' ') {
                at++;
            }
        }
        if (depth == 0) {
            break;
        }
    }
    return at;
}

/* The value of a member of an object, by a key without escapes. None: no object, or no such member. */
static inline span json_get(span object, const char *key)
{
    const char *end = object.at + object.len;
    const char *at = object.at ? skip_space(object.at, end) : end;
    if (at >= end || *at != '{') {
        return (span){NULL, 0};
    }
    at = skip_space(at + 1, end);
    while (at < end && *at == '"') {
        const char *name = at;
        at = skip_value(at, end);
        span member = {name + 1, at - name >= 2 ? (uint32_t)(at - name - 2) : 0};
        at = skip_space(at, end);
        if (at >= end || *at != ':') {
            break;
        }
        at = skip_space(at + 1, end);
        const char *value = at;
        at = skip_value(at, end);
        if (span_is(member, key)) {
            return (span){value, (uint32_t)(at - value)};
        }
        at = skip_space(at, end);
        if (at >= end || *at != ',') {
            break;
        }
        at = skip_space(at + 1, end);
    }
    return (span){NULL, 0};
}

/* An integer, or `otherwise` if the value is none (absent, a string, a fraction, out of range). */
static inline int64_t json_int(span value, int64_t otherwise)
{
    bool negative = value.len && value.at[0] == '-';
    int64_t result = 0;
    uint32_t i = negative;
    if (!value.at || i == value.len) {
        return otherwise;
    }
    for (; i < value.len; i++) {
        char c = value.at[i];
        if (c < '0' || c > '9' || result > (INT64_MAX - 9) / 10) {
            return otherwise;
        }
        result = result * 10 + (c - '0');
    }
    return negative ? -result : result;
}

static inline int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static inline bool hex4(const char *at, const char *end, uint32_t *code)
{
    *code = 0;
    for (int i = 0; i < 4; i++) {
        int digit = at + i < end ? hex_digit(at[i]) : -1;
        if (digit < 0) {
            return false;
        }
        *code = *code << 4 | (uint32_t)digit;
    }
    return true;
}

/* The text of a JSON string, decoded to UTF-8 into `to`, which may be the string's own place: it only gets shorter.
 * None if the value is no string or does not fit. */
static inline span json_string(span value, char *to, uint32_t cap)
{
    if (value.len < 2 || value.at[0] != '"' || value.at[value.len - 1] != '"') {
        return (span){NULL, 0};
    }
    const char *at = value.at + 1, *end = value.at + value.len - 1;
    uint32_t len = 0;
    while (at < end) {
        uint32_t code = (unsigned char)*at++;
        bool escaped = code == '\\' && at < end;
        if (escaped) {
            switch (*at++) {
            case 'n': code = '\n'; break;
            case 't': code = '\t'; break;
            case 'r': code = '\r'; break;
            case 'b': code = '\b'; break;
            case 'f': code = '\f'; break;
            case 'u': {
                uint32_t low;
                if (!hex4(at, end, &code)) {
                    return (span){NULL, 0};
                }
                at += 4;
                if (code >= 0xd800 && code < 0xdc00 && end - at >= 6 && at[0] == '\\' && at[1] == 'u' &&
                    hex4(at + 2, end, &low) && low >= 0xdc00 && low < 0xe000) {
                    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                    at += 6;
                }
                break;
            }
            default: code = (unsigned char)at[-1];
            }
        }
        char out[4];
        uint32_t count = 0;
        if (!escaped || code < 0x80) {
            out[count++] = (char)code; /* a byte of UTF-8 as it is */
        } else if (code < 0x800) {
            out[count++] = (char)(0xc0 | code >> 6);
        } else if (code < 0x10000) {
            out[count++] = (char)(0xe0 | code >> 12);
            out[count++] = (char)(0x80 | (code >> 6 & 63));
        } else {
            out[count++] = (char)(0xf0 | code >> 18);
            out[count++] = (char)(0x80 | (code >> 12 & 63));
            out[count++] = (char)(0x80 | (code >> 6 & 63));
        }
        if (escaped && code >= 0x80) {
            out[count++] = (char)(0x80 | (code & 63));
        }
        if (len + count > cap) {
            return (span){NULL, 0};
        }
        for (uint32_t i = 0; i < count; i++) {
            to[len++] = out[i];
        }
    }
    return (span){to, len};
}

/* --- the runtime -------------------------------------------------------------- */

/* The run's input; none if it is longer than cap. */
static inline span read_input(char *buf, uint32_t cap)
{
    int32_t len = agentrt_input(0, buf, (int32_t)cap);
    return len >= 0 && (uint32_t)len <= cap ? (span){buf, (uint32_t)len} : (span){NULL, 0};
}

static inline int32_t set_output(const text *t)
{
    return t->full ? AGENTRT_E2BIG : agentrt_output(t->at, (int32_t)t->len);
}

/* tool.call with a request of the form {"tool": …, "args": {…}}. Returns as agentrt_call. */
static inline int32_t call_tool(const text *request, char *answer, uint32_t cap)
{
    if (request->full) {
        return AGENTRT_E2BIG;
    }
    return agentrt_call(AGENTRT_TOOL_CALL, request->at, (int32_t)request->len, answer, (int32_t)cap);
}

/* What went wrong with a call that returned `status`: the error's JSON, if there is one and it fits. */
static inline span call_error(int32_t status, const char *answer, uint32_t cap)
{
    int32_t len = status == AGENTRT_EFAILED ? agentrt_read(0, 1, NULL, 0) : 0; /* not at 0: the length, not the failure */
    return (span){answer, len < 0 ? 0 : (uint32_t)len < cap ? (uint32_t)len : cap};
}

/* A line in the node's log. */
static inline void log_line(const char *level, const char *message, span detail)
{
    TEXT(line, 1024);
    put(&line, "{\"level\":\"");
    put(&line, level);
    put(&line, "\",\"message\":");
    /* the detail is quoted inside the message */
    TEXT(words, 512);
    put(&words, message);
    put_span(&words, detail);
    put_string(&line, (span){words.at, words.len});
    put(&line, "}");
    if (!line.full) {
        agentrt_call(AGENTRT_LOG, line.at, (int32_t)line.len, NULL, 0);
    }
}

/* Codes with which the examples end a run that cannot go on. */
enum { CODE_INPUT = 1, CODE_TOOL = 2, CODE_ANSWER = 3, CODE_LIMIT = 4 };

#endif
