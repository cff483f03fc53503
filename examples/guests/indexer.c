/* indexer: reads a text through a tool, cuts it into chunks at line ends, counts their words, finds those that stand in
 * the most chunks, and stores that: batch work.
 *
 * input  {"order": text, "text": number of the text, "chunk_bytes": 256 to 1,000,000, default 4096}
 * tools  read_text {"text": int}, pure; answer {"name": text, "text": text}, as JSON at most 1 MiB
 *        index_put {"order": text, "words": int, "top": [word, …]}, keyed; any answer
 * output {"name": text, "bytes": int, "chunks": int, "words": int, "distinct": int, "top": [word, …]}
 */
#include "guest.h"

#define TEXT_BYTES_MAX (1u << 20)
#define WORDS_MAX 24000 /* distinct ones in a text; more are refused */
#define TABLE_SIZE (1u << 15)
#define TOP 16
#define WORD_BYTES_MAX 64 /* of those on top */

typedef struct word {
    const char *at;
    uint32_t len;
    uint32_t count;      /* how often it stands in the text */
    uint32_t chunks;     /* in how many chunks */
    uint32_t last_chunk; /* number of the last of these, from 1 */
} word;

static char body[TEXT_BYTES_MAX];
static word words[WORDS_MAX]; /* in order of first appearance */
static uint32_t distinct;
static uint16_t table[TABLE_SIZE]; /* by hash: index in words + 1, 0 where free; open addressing */

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c & 0x80);
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The word's entry, made if it is new; NULL when the table is full. */
static word *word_entry(const char *at, uint32_t len)
{
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (uint32_t i = 0; i < len; i++) {
        hash = (hash ^ (unsigned char)at[i]) * 16777619u;
    }
    for (;; hash++) {
        uint16_t *slot = &table[hash % TABLE_SIZE];
        if (!*slot) {
            if (distinct == WORDS_MAX) {
                return NULL;
            }
            words[distinct] = (word){.at = at, .len = len};
            *slot = (uint16_t)++distinct;
            return &words[distinct - 1];
        }
        word *entry = &words[*slot - 1];
        if (entry->len == len) {
            uint32_t i = 0;
            while (i < len && entry->at[i] == at[i]) {
                i++;
            }
            if (i == len) {
                return entry;
            }
        }
    }
}

/* The order of the index: what stands in more chunks first, then what stands there more often, then by spelling. */
static bool before(const word *a, const word *b)
{
    if (a->chunks != b->chunks) {
        return a->chunks > b->chunks;
    }
    if (a->count != b->count) {
        return a->count > b->count;
    }
    for (uint32_t i = 0; i < a->len && i < b->len; i++) {
        if (a->at[i] != b->at[i]) {
            return (unsigned char)a->at[i] < (unsigned char)b->at[i];
        }
    }
    return a->len < b->len;
}

/* The first TOP words, as JSON. */
static void put_top(text *out)
{
    const word *top[TOP];
    uint32_t found = 0;
    for (uint32_t i = 0; i < distinct; i++) {
        const word *entry = &words[i];
        uint32_t place = found;
        while (place && before(entry, top[place - 1])) {
            place--;
        }
        if (place == TOP || entry->len > WORD_BYTES_MAX) {
            continue;
        }
        found += found < TOP;
        for (uint32_t k = found - 1; k > place; k--) {
            top[k] = top[k - 1];
        }
        top[place] = entry;
    }
    put(out, "[");
    for (uint32_t i = 0; i < found; i++) {
        put(out, i ? "," : "");
        put_string(out, (span){top[i]->at, top[i]->len});
    }
    put(out, "]");
}

/* Counts the words of one chunk (numbered from 1). Returns how many there are, -1 when the table is full. */
static int64_t count_words(span chunk, uint32_t number)
{
    int64_t count = 0;
    for (uint32_t i = 0; i < chunk.len;) {
        if (!is_letter(chunk.at[i])) {
            i++;
            continue;
        }
        uint32_t begin = i;
        while (i < chunk.len && (is_letter(chunk.at[i]) || is_digit(chunk.at[i]))) {
            i++;
        }
        word *entry = word_entry(chunk.at + begin, i - begin);
        if (!entry) {
            return -1;
        }
        if (entry->last_chunk != number) {
            entry->last_chunk = number;
            entry->chunks++;
        }
        entry->count++;
        count++;
    }
    return count;
}

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[4096], answer[4096];
    span input = read_input(buf, sizeof buf);
    span order = json_get(input, "order"), number = json_get(input, "text");
    int64_t chunk_bytes = json_int(json_get(input, "chunk_bytes"), 4096);
    if (!order.at || !number.at || chunk_bytes < 256 || chunk_bytes > 1000000) {
        return CODE_INPUT;
    }
    TEXT(request, 4608);
    put(&request, "{\"tool\":\"read_text\",\"args\":{\"text\":");
    put_span(&request, number);
    put(&request, "}}");
    int32_t len = call_tool(&request, body, sizeof body);
    if (len < 0) {
        return CODE_TOOL;
    }
    if ((uint32_t)len > sizeof body) {
        return CODE_LIMIT;
    }
    static char name[1024];
    span reply = {body, (uint32_t)len}, raw_name = json_get(reply, "name"), raw = json_get(reply, "text");
    if (!raw_name.at || raw_name.len > sizeof name) {
        return CODE_ANSWER;
    }
    memcpy(name, raw_name.at, raw_name.len);
    span all = json_string(raw, (char *)raw.at, raw.len); /* in its own place */
    if (!all.at) {
        return CODE_ANSWER;
    }

    int64_t total = 0;
    uint32_t chunks = 0;
    for (uint32_t begin = 0; begin < all.len; chunks++) {
        uint32_t end = all.len - begin <= (uint32_t)chunk_bytes ? all.len : begin + (uint32_t)chunk_bytes, cut = end;
        while (cut < all.len && cut > begin && all.at[cut - 1] != '\n') {
            cut--;
        }
        end = cut > begin ? cut : end; /* a line longer than a chunk is cut anywhere but inside a character */
        while (end < all.len && (all.at[end] & 0xc0) == 0x80) {
            end--;
        }
        int64_t count = count_words((span){all.at + begin, end - begin}, chunks + 1);
        if (count < 0) {
            return CODE_LIMIT;
        }
        total += count;
        begin = end;
    }

    TEXT(index, 8192);
    put(&index, "{\"tool\":\"index_put\",\"args\":{\"order\":");
    put_span(&index, order);
    put(&index, ",\"words\":");
    put_int(&index, total);
    put(&index, ",\"top\":");
    put_top(&index);
    put(&index, "}}");
    if (call_tool(&index, answer, sizeof answer) < 0) {
        return CODE_TOOL;
    }
    TEXT(out, 8192);
    put(&out, "{\"name\":");
    put_span(&out, (span){name, raw_name.len});
    put(&out, ",\"bytes\":");
    put_int(&out, all.len);
    put(&out, ",\"chunks\":");
    put_int(&out, chunks);
    put(&out, ",\"words\":");
    put_int(&out, total);
    put(&out, ",\"distinct\":");
    put_int(&out, distinct);
    put(&out, ",\"top\":");
    put_top(&out);
    put(&out, "}");
    return set_output(&out);
}
