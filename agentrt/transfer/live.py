"""Moving runs in and out of a node that goes on with its other runs. On the control loop."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from agentrt.engine.moving import Moving
from agentrt.transfer.moves import Place, ensemble, export_runs, import_runs, refuse_exported
from agentrt.transfer.offline import new_export_id


class Node(Protocol):
    """What it needs of the engine."""

    moving: Moving

    def take_up(self, run_id: str) -> None: ...


async def export_live(node: Node, place: Place, run_ids: Sequence[str], path: Path) -> list[str]:
    """Lets the runs and what they started go, and moves them into a file; the runs that it holds. Raises what
    `export_runs` and `ensemble` raise, and the runs go on here then."""
    released: set[str] = set()
    try:
        while True:  # until nothing was started meanwhile
            members: list[str] = await place.elsewhere(partial(_leaving, place, run_ids))
            more = [run_id for run_id in members if run_id not in released]
            if not more:
                break
            await _release(node, more)
            released.update(more)
        versions = await export_runs(place, members, path, new_export_id())
    except BaseException:
        node.moving.stay(released)
        raise
    node.moving.left({run_id: versions[run_id] for run_id in released})
    return members


def _leaving(place: Place, run_ids: Sequence[str]) -> list[str]:
    members = ensemble(place.store, run_ids)
    refuse_exported(place.store, members)
    return members


async def _release(node: Node, run_ids: Sequence[str]) -> None:
    released: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: BaseException | None) -> None:
        if not released.done():
            if error is None:
                released.set_result(None)
            else:
                released.set_exception(error)

    node.moving.release(run_ids, done)
    await released


async def import_live(node: Node, place: Place, path: Path) -> list[str]:
    """Takes the runs of a file over, and goes on with them; their ids. Raises what `import_runs` raises."""
    come = await import_runs(place, path)
    for run_id in come:
        node.take_up(run_id)
    return come
