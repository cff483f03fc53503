"""In which order frames are written: the most urgent run's first, whoever left memory first."""

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from frames_kit import counters, loop, runtime, until

from agentrt.capture.instrument import Preempt, instrument
from agentrt.stores.frames import FolderFrames, FrameData

PLAIN = (Path(__file__).parents[1] / "guests" / "works.wasm").read_bytes()
WORK: dict[str, Any] = {"work": "sort", "size": 60, "every": 400, "wait": 1}
TIERS = (3, 2, 1, 0, 2, 0)


class SlowFrames(FolderFrames):
    """Whose first frame is not written before the test says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30)
        self.go_on = threading.Event()
        self.written: list[str] = []

    def put(self, run_id: str, frame_id: str, frame: FrameData, copies: int = 1) -> None:
        self.written.append(run_id)
        assert self.go_on.wait(60)
        super().put(run_id, frame_id, frame, copies)

    def keep(self, run_id: str, frame_ids: Collection[str]) -> None:
        """They share the writer's thread, and are not what is tested."""


def test_frames_are_written_by_tier(tmp_path: Path) -> None:
    async def main() -> None:
        async with runtime(tmp_path) as made:
            frames = counters(made)
            slow = frames._store = SlowFrames(tmp_path / "slow")
            await made.register("works", instrument(PLAIN, Preempt.SYSCALLS))
            first = await made.submit("works", WORK, tier=3)
            await until(lambda: slow.written == [first.run_id])
            runs = [await made.submit("works", WORK, tier=tier) for tier in TIERS]
            await until(lambda: len(frames._writing._waiting) == len(TIERS))
            slow.go_on.set()
            await until(lambda: frames.taken == 1 + len(TIERS))
            tier_of = {run.run_id: tier for run, tier in zip(runs, TIERS, strict=True)}
            assert [tier_of[run_id] for run_id in slow.written[1:]] == sorted(TIERS)
            for run in (first, *runs):
                await run.cancel()

    loop(main)
