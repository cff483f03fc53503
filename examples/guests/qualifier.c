/* qualifier: scores a sales lead and books the verdict: short, urgent work. Its first act is a host call.
 *
 * input  {"order": text, "company": text, "employees": int, "budget": int, "message": text}   the last three may be absent
 * tools  ledger_add {"order": text, "place": 1}, keyed; any answer
 * output {"company": text, "score": 0 to 100, "verdict": "hot" | "warm" | "cold"}
 */
#include "guest.h"

/* Words in a message that speak for the lead, with their points. */
static const struct {
    const char *word;
    int points;
} words[] = {{"urgent", 15}, {"demo", 10}, {"price", 10}, {"quote", 10}, {"migrate", 8}, {"unsubscribe", -40}};

static bool contains(span s, const char *word)
{
    uint32_t len = string_length(word);
    for (uint32_t i = 0; i + len <= s.len; i++) {
        uint32_t k = 0;
        while (k < len && (s.at[i + k] | 0x20) == word[k]) {
            k++;
        }
        if (k == len) {
            return true;
        }
    }
    return false;
}

AGENTRT_EXPORT(agentrt_run)
int32_t agentrt_run(void)
{
    static char buf[16384], answer[4096];
    span input = read_input(buf, sizeof buf);
    span order = json_get(input, "order"), company = json_get(input, "company"), message = json_get(input, "message");
    if (!order.at || !company.at) {
        return CODE_INPUT;
    }
    int64_t employees = json_int(json_get(input, "employees"), 0), budget = json_int(json_get(input, "budget"), 0);
    int64_t score = 20 + (employees >= 50 ? 15 : 0) + (employees >= 1000 ? 15 : 0) + (budget >= 10000 ? 20 : 0);
    for (uint32_t i = 0; i < sizeof words / sizeof *words; i++) {
        score += contains(message, words[i].word) ? words[i].points : 0;
    }
    score = score < 0 ? 0 : score > 100 ? 100 : score;

    TEXT(request, 16384);
    put(&request, "{\"tool\":\"ledger_add\",\"args\":{\"order\":");
    put_span(&request, order);
    put(&request, ",\"place\":1}}");
    if (call_tool(&request, answer, sizeof answer) < 0) {
        return CODE_TOOL;
    }
    TEXT(out, 16384);
    put(&out, "{\"company\":");
    put_span(&out, company);
    put(&out, ",\"score\":");
    put_int(&out, score);
    put(&out, score >= 60 ? ",\"verdict\":\"hot\"}" : score >= 35 ? ",\"verdict\":\"warm\"}" : ",\"verdict\":\"cold\"}");
    return set_output(&out);
}
