"""A node of its own process, to be killed: prints the ids of its template and hosts, then waits."""

import asyncio
import sys

from python_kit import Hold, ScriptedRun, free_node

from agentrt.backends.base import Request


def hold(run: ScriptedRun, request: Request) -> None:
    raise Hold


async def main() -> None:
    async with free_node() as node:
        waiting = await node.start("steps", 1, reply=hold)
        await waiting.until(lambda: bool(waiting.requests))
        spinning = await node.start("spin", tenant="other")
        while spinning.guest is None or spinning.guest.demotions == 0:
            await asyncio.sleep(0.005)
        pool = node.backend._pool
        assert pool is not None
        templates = [bundle.template.pid for bundle in pool._bundles.values()]
        print(*templates, *(host.pid for host in pool._hosts))
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
