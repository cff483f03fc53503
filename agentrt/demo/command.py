"""What ``agentrt demo`` does: run it, show it, say whether it passed."""

import asyncio
import os
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from agentrt.demo.supervisor import Options, Progress, Result, run_demo
from agentrt.demo.view import render, render_verdict

#: Rounds of a hog a second on the machine this was written on; only the demo's length depends on it.
HOG_ROUNDS_PER_S = {"wasm": 300_000_000, "process": 2_500_000}


def hog_rounds(hogs: int, backend: str = "wasm") -> int:
    """Each hog computes for at most a second, and all of them for about 4 s on 2 cores, since they must end."""
    return int(HOG_ROUNDS_PER_S[backend] * min(1.0, 8 / max(hogs, 1)))


def main(
    *, seconds: float, hogs: int, store: str | None, as_json: bool, config_file: str | None, backend: str = "wasm"
) -> int:
    """Run the demo; 0 if it passed. With ``as_json`` progress and, last, the summary are JSON objects a line.
    ``config_file``: the node's settings; None: AGENTRT_CONFIG."""
    file = None if config_file is None else os.path.abspath(config_file)
    options = Options(
        seconds, hogs, Path(store) if store else None, hog_rounds(hogs, backend), config_file=file, backend=backend
    )
    result = _run_as_json(options) if as_json else _run_in_terminal(options)
    return 0 if result.verdict.passed else 1


def _run_as_json(options: Options) -> Result:
    def watch(progress: Progress) -> None:
        line = {
            "phase": progress.phase,
            "elapsed_s": round(progress.elapsed_s, 2),
            "accepted": progress.accepted,
            "ended_by_tier": progress.ended_by_tier,
            "kills": progress.kills,
        }
        print(msgspec.json.encode(line).decode(), flush=True)

    result = asyncio.run(run_demo(options, watch, interval_s=1.0))
    print(msgspec.json.encode(result.summary()).decode(), flush=True)
    return result


def _run_in_terminal(options: Options) -> Result:
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        result = asyncio.run(run_demo(options, lambda progress: live.update(render(progress), refresh=True)))
        live.update(render(result.progress), refresh=True)
    console.print(render_verdict(result))
    return result
