"""Tools that say who they are, and an agent that asks them."""

import asyncio
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from agentrt import tool
from agentrt.agents import Context, agent


def who() -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(prefix="mine-") as file:
        Path("kept").write_text("x")
        return {
            "uid": [*os.getresuid(), *os.getresgid()],
            "groups": os.getgroups(),
            "folder": os.getcwd(),
            "mode": oct(os.stat(".").st_mode & 0o777),
            "home": os.environ["HOME"],
            "temporary": os.path.dirname(file.name),
            "group": Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2],
        }


@tool(kind="pure", timeout=100)
def plain() -> dict[str, Any]:
    """In a worker, which may write nowhere else, and import what nobody has imported yet."""
    from fractions import Fraction

    try:
        Path("/etc/agentrt-own-uid").write_text("")
        raise AssertionError("it may write what root may")
    except PermissionError:
        return who() | {"third": str(Fraction(2, 6))}


@tool(kind="pure", timeout=100)
async def looped() -> dict[str, Any]:
    """On the host's loop."""
    return who()


@tool(kind="pure", timeout=100, secrets=["key"])
async def talks(port: int, key: str) -> str:
    """To somebody who wants to hear a secret."""

    def say() -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(key.encode())
            return sock.recv(100).decode()

    return await asyncio.to_thread(say)


@agent(name="asks_who")
async def asks_who(ctx: Context, port: int) -> list[Any]:
    plainly, on_loop = await ctx.tool("plain"), await ctx.tool("looped")
    return [plainly, on_loop, await ctx.tool("talks", port=port, key="secret://key")]
