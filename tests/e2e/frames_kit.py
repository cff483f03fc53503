"""Nodes whose guests leave memory as frames, for test_run_frames.py and frames_node.py."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.engine.frames import RunFrames


def runtime(folder: Path, **more: Any) -> Runtime:
    """One whose guests leave memory as soon as they wait, and as frames."""
    settings = {
        "store.path": str(folder / "store"),
        "store.force_place": True,
        "wasm.cache_path": str(folder / "cache"),
        "wasm.frame_after_ms": 0,
        "limits.hot_ms": 0,
    }
    return Runtime(config=load_config(arguments=settings | more, env={}))


def counters(made: Runtime) -> RunFrames:
    return made._engine.frames


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def in_memory(made: Runtime, run_id: str) -> bool:
    return run_id in made._engine._runs


async def parked(made: Runtime, run_id: str, taken: int = 0) -> None:
    """It has left memory, as a frame: more than ``taken`` have been."""
    await until(lambda: counters(made).taken > taken and not in_memory(made, run_id))
