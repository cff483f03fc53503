"""Tools that take and free locks in Redis and PostgreSQL, and an agent that holds one; imported by hosts."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import psycopg
import redis

from agentrt import Context, agent, tool
from agentrt.agents import ForeignLock

_FREE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


@tool(kind="keyed")
def redis_take(server: str, name: str, owner: str, slow_s: float) -> bool:
    """Whether the owner has it now; with an end, should nobody free it."""
    client = redis.Redis(unix_socket_path=server)
    time.sleep(slow_s)
    return bool(client.set(name, owner, nx=True, px=600_000)) or client.get(name) == owner.encode()


@tool(kind="keyed")
def redis_free(server: str, name: str, owner: str) -> bool:
    """Whether the owner had it."""
    return redis.Redis(unix_socket_path=server).eval(_FREE, 1, name, owner) == 1


#: The lock is the session's, so its connection is kept: by owner.
_sessions: dict[str, psycopg.AsyncConnection[Any]] = {}


@tool(kind="keyed")
async def postgres_take(server: str, name: str, owner: str, slow_s: float) -> bool:
    """Whether the owner has it now; its session carries the owner's name, for whoever frees it."""
    session = _sessions.get(owner)
    if session is None or session.closed:
        session = _sessions[owner] = await psycopg.AsyncConnection.connect(
            server, autocommit=True, application_name=owner
        )
    await asyncio.sleep(slow_s)
    held = await session.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
    if (await held.fetchone() or (0,))[0]:
        return True
    taken = await (await session.execute("SELECT pg_try_advisory_lock(hashtext(%s))", (name,))).fetchone()
    return taken is not None and bool(taken[0])


@tool(kind="keyed")
async def postgres_free(server: str, name: str, owner: str) -> bool:
    """Whether the owner had it. Ends the owner's session, in whichever process it is."""
    async with await psycopg.AsyncConnection.connect(server, autocommit=True) as admin:
        ended = await admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = %s", (owner,)
        )
        had = await ended.fetchall()
    session = _sessions.pop(owner, None)
    if session is not None:
        await session.close()
    return bool(had)


@tool(kind="keyed")
def write(file: str, line: str) -> None:
    """The work under the lock: nobody else may be at it."""
    with Path(file).open("a") as out:
        out.write(f"begin {line}\n")
        out.flush()
        time.sleep(0.02)
        out.write(f"end {line}\n")


TOOLS = {"redis": (redis_take, redis_free), "postgres": (postgres_take, postgres_free)}


@agent
async def holder(
    ctx: Context, kind: str, server: str, file: str, wait: bool = False, slow_s: float = 0.0, dies: bool = False
) -> list[str]:
    take, free = TOOLS[kind]

    def release(lock: ForeignLock) -> Any:
        return ctx.tool(free, server=server, name=lock.name, owner=lock.owner)

    async with ctx.foreign_lock("stock", release=release) as lock:
        while not await ctx.tool(take, server=server, name=lock.name, owner=lock.owner, slow_s=slow_s):
            await asyncio.sleep(0.02)
        await ctx.tool(write, file=file, line=ctx.run_id)
        if wait:
            await ctx.event("go")
        if dies:
            os._exit(9)
    return [lock.owner]
