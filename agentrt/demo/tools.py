"""The demo's tools; they run in the node's tool hosts."""

import asyncio
import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

from agentrt.demo.ledger import Client, Entry
from agentrt.tools import tool
from agentrt.tools.commands import command_tool

#: Where the ledger listens; set by the supervisor and inherited by the node and its hosts.
LEDGER_VARIABLE: Final = "AGENTRT_DEMO_LEDGER"
TEXT_BYTES_MAX: Final = 64 * 1024

_clients: dict[asyncio.AbstractEventLoop, "asyncio.Task[Client]"] = {}


async def _client() -> Client:
    """The loop's one connection, however many calls want it at once; after a failure the next call tries again."""
    loop = asyncio.get_running_loop()
    connecting = _clients.get(loop)
    if connecting is None or (connecting.done() and (connecting.cancelled() or connecting.exception() is not None)):
        connecting = _clients[loop] = loop.create_task(Client.connect(os.environ[LEDGER_VARIABLE]))
    return await asyncio.shield(connecting)


@tool(kind="keyed", timeout=20)
async def ledger_add(order: str, place: int, *, idempotency_key: str) -> dict[str, bool]:
    """Enter an effect into the ledger; a repeated key has no effect there."""
    return {"new": await (await _client()).enter(Entry(idempotency_key, order, place))}


@cache
def texts() -> tuple[Path, ...]:
    """Real text found on this machine: the sources of Python's standard library, in a fixed order."""
    return tuple(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


@tool(kind="pure", timeout=20)
async def read_text(text: int) -> dict[str, str]:
    """The name and the first 64 KiB of text number ``text``."""
    path = texts()[text % len(texts())]
    return {"name": path.name, "text": path.read_bytes()[:TEXT_BYTES_MAX].decode("utf-8", "replace")}


@tool(kind="keyed", timeout=20)
async def index_put(order: str, words: int, top: list[str], *, idempotency_key: str) -> dict[str, bool]:
    """Store a text's index: how many words, and the most frequent ones."""
    if words < 0 or len(top) > 64:
        raise ValueError(f"not an index: {words} words, {len(top)} on top")
    return {"new": await (await _client()).enter(Entry(idempotency_key, order, 1))}


#: A native process that computes and never yields: a shell that counts to the number it reads.
native_hog = command_tool(
    "native_hog",
    ["sh", "-c", "read n; i=0; while [ $i -lt $n ]; do i=$((i+1)); done; printf '{\"rounds\": %s}' $i"],
    kind="pure",
    timeout=600,
    input="text",
)
