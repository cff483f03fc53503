"""The launcher of a node's loop: tools and agents share its processes, its bounds and its users."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.settings import ProcessConfig

_launchers: Final[dict[asyncio.AbstractEventLoop, tuple[Launcher, list[int]]]] = {}


def acquire(loop: asyncio.AbstractEventLoop, config: ProcessConfig, tier0_share_pct: int = 80) -> Launcher:
    """On the loop's thread. It begins to open; `Launcher.open` waits until it is. Give it back with `release`."""
    known = _launchers.get(loop)
    if known is None:
        known = _launchers[loop] = (Launcher(loop, config, tier0_share_pct), [0])
        known[0].open_soon()
    known[1][0] += 1
    return known[0]


def statistics(loop: asyncio.AbstractEventLoop) -> Mapping[str, Any]:
    """What the loop's launcher says; empty while nobody uses one."""
    known = _launchers.get(loop)
    return {} if known is None else known[0].statistics()


async def release(launcher: Launcher) -> None:
    """The last one closes it: its processes are killed."""
    users = _launchers[launcher.loop][1]
    users[0] -= 1
    if not users[0]:
        del _launchers[launcher.loop]
        await launcher.close()
