# mypy: ignore-errors
#
# indexer.c's work as a script for MicroPython: same input, tools, order of words and output, up to 64 KiB of text
# (its heap has 1 MB). Some 70 ms in an interpreter: batch work.
#
# MicroPython's collector for wasm does not see what only the interpreter's own registers hold, such as the locals of a
# running function. So it is switched off and called where nothing runs but this module's own lines, whose names are
# global.
import gc
import json
import sys

import host

gc.disable()
TOP = 16
WORD_BYTES_MAX = 64  # of the words on top
CHUNK = 1 << 18  # a word's rank: chunks it stands in * CHUNK + how often it stands in the text (at most 256 KiB)


def tool(name, **args):
    answer = json.loads(host.call("tool.call", json.dumps({"tool": name, "args": args})))
    if not answer["ok"]:
        raise RuntimeError(name + ": " + answer["error"]["code"])
    return answer["value"]


def chunk_end(text, begin):
    """After the last line that ends within the chunk; a line longer than a chunk is cut between two characters."""
    end = begin + chunk_bytes
    if end >= len(text):
        return len(text)
    cut = text.rfind(b"\n", begin, end) + 1
    if cut > begin:
        return cut
    while text[end] & 0xC0 == 0x80:
        end -= 1
    return end


def count_words(text, at, end):
    """Adds the words of text[at:end] to `ranks`; returns how many there are. A word is letters, digits, underscores
    and anything beyond ASCII, and does not begin with a digit."""
    count = 0
    seen = set()
    kinds = KINDS
    while at < end:
        if kinds[text[at]] != 1:
            at += 1
            continue
        begin = at
        while at < end and kinds[text[at]]:
            at += 1
        word = text[begin:at]
        rank = ranks.get(word, 0) + 1
        if word not in seen:
            seen.add(word)
            rank += CHUNK
        ranks[word] = rank
        count += 1
    return count


def top_words():
    """The words with the highest ranks, by spelling where these are equal."""
    top = []
    for word, rank in ranks.items():
        place = len(top)
        while place and (top[place - 1][0] < rank or (top[place - 1][0] == rank and top[place - 1][1] > word)):
            place -= 1
        if place < TOP and len(word) <= WORD_BYTES_MAX:
            top.insert(place, (rank, word))
            del top[TOP:]
    return [word.decode() for rank, word in top]


KINDS = bytearray(256)  # 1 for a letter, 2 for a digit
for code in range(256):
    if code >= 0x80 or code == 0x5F or 0x41 <= code & 0xDF <= 0x5A:
        KINDS[code] = 1
    elif 0x30 <= code <= 0x39:
        KINDS[code] = 2

order = json.loads(sys.stdin.read())
chunk_bytes = order.get("chunk_bytes", 4096)
if not 256 <= chunk_bytes <= 1000000:
    raise ValueError("chunk_bytes")
answer = tool("read_text", text=order["text"])
name = answer["name"]
text = answer["text"].encode()
answer = None
gc.collect()

ranks = {}
words = chunks = begin = 0
while begin < len(text):
    end = chunk_end(text, begin)
    words += count_words(text, begin, end)
    chunks += 1
    begin = end
    gc.collect()

top = top_words()
tool("index_put", order=order["order"], words=words, top=top)
print(
    json.dumps({"name": name, "bytes": len(text), "chunks": chunks, "words": words, "distinct": len(ranks), "top": top})
)
