"""kill -9 of the node at every durable point of a six-step agent, enumerated: nothing is lost, nothing is done twice.

Each case runs the agent in a process that kills itself at the n-th pass of a named point, then again without. n grows
until the process passes the point no more, so no durable edge is left out.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrt.demo.ledger import Client, Report
from agentrt.demo.tools import LEDGER_VARIABLE
from agentrt.engine.crashpoints import POINTS, VARIABLE

NODE = Path(__file__).with_name("steps_node.py")
STEPS = dict.fromkeys(range(1, 7), 1)
LIFE_TIMEOUT_S = 60

NORMAL = [p for p in POINTS if p.split(".")[0] in ("accept", "prepare", "tool", "guest", "outcome", "end")]
RECOVERY = [p for p in POINTS if p.startswith("recover.")]
CANCEL = [p for p in POINTS if p.startswith("cancel.")]


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A ledger process; the path of its socket."""
    path = str(tmp_path_factory.mktemp("ledger") / "ledger.sock")
    with subprocess.Popen(
        [sys.executable, "-m", "agentrt.demo.ledger", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        yield path
        process.stdin.close()


def report(ledger: str) -> Report:
    async def ask() -> Report:
        client = await Client.connect(ledger)
        try:
            return await client.report()
        finally:
            client.close()

    return asyncio.run(ask())


def live(store: Path, order: str, ledger: str, crash_at: str = "", *words: str) -> dict[str, Any] | None:
    """One life of the node; None if it was killed, else what it printed."""
    # a sequential agent's outcomes always join its next step, unless each has to go alone
    settings = {"AGENTRT_STORE__COMMIT_DELAY_US": "0"} if crash_at.startswith("outcome.") else {}
    done = subprocess.run(
        [sys.executable, str(NODE), str(store), order, *words],
        env={**os.environ, LEDGER_VARIABLE: ledger, VARIABLE: crash_at, **settings},
        capture_output=True,
        timeout=LIFE_TIMEOUT_S,
    )
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr.decode()
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def check(said: dict[str, Any] | None, order: str, ledger: str) -> None:
    assert said is not None
    assert (said["state"], said["runs"]) == ("SUCCEEDED", 1)
    assert report(ledger).entries[order] == STEPS


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", NORMAL)
def test_fault_D01_a_kill_at_any_durable_point_loses_and_doubles_nothing(
    point: str, tmp_path: Path, ledger: str
) -> None:
    passes = 0
    while True:
        order = f"{point}:{passes + 1}"
        said = live(tmp_path / str(passes), order, ledger, order)
        if said is not None:  # the point is passed no more
            check(said, order, ledger)
            break
        passes += 1
        check(live(tmp_path / str(passes - 1), order, ledger), order, ledger)
    assert passes >= 1, f"{point} is never passed: the sweep misses it"


@pytest.mark.sweep
@pytest.mark.parametrize("point", RECOVERY)
@pytest.mark.parametrize("first", ["prepare.durable:3", "tool.after_dispatch:3", "guest.after_complete:3"])
def test_a_kill_during_recovery_loses_and_doubles_nothing(point: str, first: str, tmp_path: Path, ledger: str) -> None:
    order = f"{first} {point}"
    assert live(tmp_path, order, ledger, first) is None
    assert live(tmp_path, order, ledger, f"{point}:1") is None
    check(live(tmp_path, order, ledger), order, ledger)


@pytest.mark.sweep
@pytest.mark.parametrize("point", CANCEL)
def test_fault_C22_a_cancel_holds_through_a_kill(point: str, tmp_path: Path, ledger: str) -> None:
    order = f"cancel {point}"
    assert live(tmp_path, order, ledger, f"{point}:1", "cancel") is None
    said = live(tmp_path, order, ledger)
    assert said is not None and said["runs"] == 1
    # before it was durable the request may be lost with the node: nobody was told that it was taken
    assert said["state"] in (("CANCELLED",) if point == "cancel.durable" else ("CANCELLED", "SUCCEEDED"))
    places = report(ledger).entries.get(order, {})
    assert set(places.values()) <= {1} and set(places) <= set(STEPS)
    if said["state"] == "SUCCEEDED":
        assert places == STEPS
