"""A server with faults on demand: ``faulty.py FOLDER [PORT]``, by stdio, or by streamable HTTP at the port.

What happens to it is noted in ``FOLDER/log``, a line for each thing.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations

FOLDER = Path(sys.argv[1])
server = MCPServer("faulty")
state: dict[str, Any] = {"count": 0}


def note(text: str) -> None:
    fd = os.open(FOLDER / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def add(x: int, y: int) -> int:
    return x + y


@server.tool()
async def fail(why: str) -> str:
    raise ValueError(why)


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def meta(ctx: Context) -> dict[str, Any]:
    """What came along with the call."""
    told = ctx.request_context.meta or {}
    return {key: value for key, value in dict(told).items() if str(key).startswith("agentrt/")}


@server.tool()
async def count(step: int = 1) -> int:
    """A state, which tenants must not share."""
    state["count"] += step
    return int(state["count"])


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def wait(name: str) -> str:
    """Until FOLDER/name is there."""
    note(f"wait {name}")
    try:
        while not (FOLDER / name).exists():  # noqa: ASYNC110 - the test makes it
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        note(f"cancelled {name}")
        raise
    return name


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def die_once(name: str) -> str:
    """Die, unless FOLDER/name says that this was done before."""
    note(f"die_once {name}")
    try:
        os.close(os.open(FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "alive"
    print(f"this is the end, {os.environ.get('API_KEY', '')}", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def die_always() -> str:
    note("die_always")
    os._exit(3)


@server.tool()
async def big(size: int) -> str:
    return "x" * size


@server.tool()
async def chatter(size: int) -> str:
    """A line that is no message, and one that never ends."""
    sys.stdout.buffer.write(b"hello\n" + b"y" * size + b"\n")
    sys.stdout.buffer.flush()
    return "done"


@server.tool()
async def environment(name: str) -> str:
    return os.environ.get(name, "")


@server.tool()
async def header(name: str, ctx: Context) -> str:
    return (ctx.headers or {}).get(name, "")


@server.tool()
async def echo(value: Any) -> dict[str, Any]:
    return {"value": value}


@server.tool()
async def network() -> str:
    import socket

    with socket.socket() as made:
        made.settimeout(2)
        try:
            made.connect(("127.0.0.1", int(os.environ["PROBE_PORT"])))
        except OSError as error:
            return type(error).__name__
    return "connected"


@server.tool()
def files(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return type(error).__name__


def grown(x: int) -> int:
    return x


def stricter(x: int, y: int, z: int) -> int:
    return x + y + z


@server.tool()
async def grow(ctx: Context) -> str:
    """A tool more, and one that is another."""
    server.add_tool(grown)
    server.remove_tool("add")
    server.add_tool(stricter, "add")
    await ctx.notify_tools_changed()
    if ctx.protocol_version is not None and ctx.protocol_version < "2026":
        await ctx.session.send_tool_list_changed()
    return "grown"


if __name__ == "__main__":
    os.umask(0)  # the next one may be of another user
    note("start")
    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
