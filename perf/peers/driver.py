"""Runs a peer's program and reads its answer."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

PEERS: Final = ("langgraph", "dbos")

_ROOT: Final = Path(__file__).parents[2]
_TIMEOUT_S: Final = 300
_ERROR_CHARS: Final = 2000


class PeerMissingError(Exception):
    """The peer's packages are not installed."""


class PeerSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``versions``: of the peer's packages. ``durability``: what its connections say of themselves."""

    sequential_steps_per_s: float
    concurrent_steps_per_s: float
    versions: str
    durability: str


def peer_steps_per_s(peer: str, steps: int, runs: int, seconds: float) -> PeerSteps:
    """Runs of ``steps`` steps: one at a time for about ``seconds``, and ``runs`` at once. Raises PeerMissingError, and
    RuntimeError with what the program said if it fails."""
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="agentrt-perf-") as folder:
        done = subprocess.run(
            [python, "-m", f"perf.peers.{peer}_steps", folder, str(steps), str(runs), str(seconds)],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{peer} ended with {done.returncode}: {done.stderr[-_ERROR_CHARS:]}")
    answer = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, Any])
    if "missing" in answer:
        raise PeerMissingError(f"{peer} is left out: {answer['missing']} is not installed")
    return msgspec.convert(answer, PeerSteps)
