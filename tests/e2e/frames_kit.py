"""Nodes whose guests leave memory as frames, for test_run_frames.py and frames_node.py."""

import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentrt import Run, Runtime
from agentrt.config import load_config
from agentrt.engine.frames import RunFrames
from agentrt.records import FrameTaken


def settings(folder: Path) -> dict[str, Any]:
    """Of a node whose guests leave memory as soon as they wait, and as frames."""
    return {
        "store.path": str(folder / "store"),
        "store.force_place": True,
        "wasm.cache_path": str(folder / "cache"),
        "wasm.frame_after_ms": 0,
        "limits.hot_ms": 0,
    }


def runtime(folder: Path, **more: Any) -> Runtime:
    """Such a node."""
    return Runtime(config=load_config(arguments=settings(folder) | more, env={}))


def counters(made: Runtime) -> RunFrames:
    return made._engine.frames


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def in_memory(made: Runtime, run_id: str) -> bool:
    return run_id in made._engine._runs


async def parked(made: Runtime, run_id: str, taken: int = 0) -> None:
    """It has left memory, as a frame: more than ``taken`` have been."""
    await until(lambda: counters(made).taken > taken and not in_memory(made, run_id))


def files(folder: Path, run_id: str) -> list[Path]:
    """Of the run's frames, in the order of their names."""
    return sorted((folder / "store" / "frames").glob(f"{run_id}.*"))


async def frames_named(made: Runtime, run_id: str) -> list[FrameTaken]:
    """By the run's journal."""
    records = await made.read_store(lambda store: store.read_records(run_id))
    return [record for record in records if isinstance(record, FrameTaken)]


async def go(made: Runtime, run: Run) -> None:
    """What the guest ``works`` waits for."""
    await made.send(run_id=run.run_id, key="go")


def killed_node(folder: Path, module: bytes, work: Any, *arguments: str) -> str:
    """A node of its own (frames_node.py) that is killed as soon as it says which run has its frame; the run's id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "module.wasm").write_bytes(module)
    node = Path(__file__).parent / "frames_node.py"
    child = subprocess.Popen(
        [sys.executable, node, folder, folder / "module.wasm", json.dumps(work), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "HOME": str(folder)},
    )
    assert child.stdout is not None
    with child:
        run_id = child.stdout.readline().strip()
        child.kill()
    assert run_id
    return run_id


def loop(main: Callable[[], Awaitable[None]], timeout_s: float = 100) -> None:
    asyncio.run(asyncio.wait_for(main(), timeout_s))


def page_at(frame: bytes | bytearray) -> int:
    """Where the first page that is stored begins (docs/frame-format.md)."""
    (stored_bytes,) = struct.unpack_from("<Q", frame, 192)
    stored, runs = struct.unpack_from("<II", frame, 204)
    assert stored_bytes
    return len(frame) - 4 * int(runs) - 8 * int(stored) - int(stored_bytes)
