"""Moving runs in and out of a store that no node has open."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from agentrt import _core
from agentrt.config import StoreConfig, WasmConfig
from agentrt.errors import InputError, StoreError
from agentrt.ids import new_run_id
from agentrt.progress import Progress, no_progress
from agentrt.stores.base import Batch, Store
from agentrt.stores.frames import frames_beside
from agentrt.stores.lmdb import LmdbStore
from agentrt.stores.lmdb_files import DATA_NAME
from agentrt.stores.modules import modules_beside
from agentrt.transfer.moves import Place, ensemble, export_runs, import_runs, refuse_exported

_FRAMES_BYTES_MAX: Final = WasmConfig().frames_bytes_max


def new_export_id() -> str:
    """A fresh one."""
    return new_run_id().replace("run_", "exp_")


def committer(store: Store) -> Callable[[Batch], Any]:
    """A commit to wait for, on the loop on which the store calls back."""

    async def commit(batch: Batch) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told(error: StoreError | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        store.commit(batch, told)
        await done

    return commit


async def export_offline(
    config: StoreConfig,
    run_ids: Sequence[str],
    path: Path,
    agentrt: str,
    *,
    again: bool = False,
    frames_bytes_max: int = _FRAMES_BYTES_MAX,
    progress: Progress = no_progress,
) -> list[str]:
    """Moves runs, and what they started, into a file; the runs that it holds. ``again``: those that were exported
    before, too, which is right only if no file was made of them. Raises what `export_runs` and `ensemble` raise."""
    if not (Path(config.path) / DATA_NAME).is_file():
        raise InputError(f"there is no store in {config.path}")
    place = _open(config, agentrt, frames_bytes_max, progress)
    try:
        members = ensemble(place.store, run_ids)
        if not again:
            refuse_exported(place.store, members)
        await export_runs(place, members, path, new_export_id())
        return members
    finally:
        await asyncio.to_thread(place.store.close)


async def import_offline(
    config: StoreConfig,
    path: Path,
    agentrt: str,
    *,
    frames_bytes_max: int = _FRAMES_BYTES_MAX,
    progress: Progress = no_progress,
) -> list[str]:
    """Takes the runs of a file over, and returns them. Raises what `import_runs` raises."""
    place = _open(config, agentrt, frames_bytes_max, progress)
    try:
        return await import_runs(place, path)
    finally:
        await asyncio.to_thread(place.store.close)


def _open(config: StoreConfig, agentrt: str, frames_bytes_max: int, progress: Progress) -> Place:
    store = LmdbStore(
        os.fspath(config.path),
        asyncio.get_running_loop(),
        map_bytes=config.map_bytes,
        map_bytes_max=config.map_bytes_max,
        free_bytes_min=config.free_bytes_min,
        force_place=config.force_place,
        blob_bytes_max=config.blob_bytes_max,
    )
    modules = modules_beside(config.kind, config.path)
    abi, frames = _core.abi_version(), frames_beside(config.kind, config.path, frames_bytes_max)
    return Place(store, modules, committer(store), asyncio.to_thread, time.time_ns, abi, agentrt, frames, progress)
