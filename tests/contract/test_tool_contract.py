"""What a caller of tools may rely on, whatever happens to hosts, workers and templates: each accepted call gets one
outcome, later and on the loop; what is reported as not begun had no effect; nothing is left behind."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import tool_kinds_fixture as fixture
from tool_kit import Node, hosts_of, node, wait_until

from agentrt.tools import ToolOutcome
from agentrt.tools.importing import tools_in

pytestmark = pytest.mark.timeout(120)

#: An outcome with one of these says that the call's code never began.
NOT_BEGUN = {"tool_args", "tool_host_start", "tool_import", "tool_secret"}


class Storm:
    """Calls of all kinds from several tenants and tiers, some cancelled, while hosts are killed."""

    def __init__(self, node: Node, seed: int, file: str) -> None:
        self.node = node
        self.random = random.Random(seed)
        self.file = file
        self.open: dict[str, object] = {}
        self.outcomes: dict[str, ToolOutcome] = {}
        self.inside = False

    def call(self, number: int) -> None:
        key = f"k{number}"
        name, args = self.random.choice(
            [
                ("charge_async", {"file": self.file, "cents": 1}),
                ("charge", {"file": self.file, "cents": 1, "die": self.random.random() < 0.1}),
                ("charge", {"file": self.file, "cents": "1"}),
                ("add", {"x": 1}),
                ("double", {"x": self.random.choice((1, -1, -2))}),
                ("once", {"file": self.file, "how": self.random.choice(("raise", "none", "die"))}),
                ("overrun", {}),
                ("wait_then_note", {"file": self.file, "seconds": 0.02}),
                ("keyed_sync", {"file": self.file, "seconds": 0.01}),
            ]
        )

        def done(outcome: ToolOutcome) -> None:
            assert not self.inside, "an outcome from inside a call"
            assert key not in self.outcomes, "a second outcome"
            self.outcomes[key] = outcome

        self.inside = True
        self.open[key] = self.node.pool.call(
            name,
            msgspec.json.encode(args),
            key=key,
            tenant=self.random.choice("ab"),
            tier=self.random.choice((0, 2)),
            attempt=1,
            done=done,
            reconcile=name.startswith("charge") and self.random.random() < 0.2,
        )
        self.inside = False

    def disturb(self) -> None:
        what = self.random.random()
        if what < 0.3 and self.open:
            self.node.pool.cancel(self.random.choice(list(self.open.values())))
        elif what < 0.36:
            hosts = [host for host in hosts_of(self.node.pool) if host.ready and not host.ending]
            if hosts:
                with contextlib.suppress(ProcessLookupError):  # it has just died of the one before
                    os.kill(self.random.choice(hosts).pid, signal.SIGKILL)


@pytest.mark.parametrize("mode", ["import", "bare", "exec"])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_call_gets_one_outcome_that_is_true(mode: str, seed: int, tmp_path: Path) -> None:
    file = str(tmp_path / "effects")

    async def test(node: Node) -> None:
        storm = Storm(node, seed, file)
        for number in range(300):
            storm.call(number)
            storm.disturb()
            if storm.random.random() < 0.3:
                await asyncio.sleep(0.005)
        await wait_until(lambda: len(storm.outcomes) == 300, "every call has its outcome")
        effects = Counter(line.split()[0] for line in fixture.lines(file) if line.startswith("k"))
        for key, outcome in storm.outcomes.items():
            decoded: Any = msgspec.json.decode(outcome.payload)
            assert outcome.ok == (outcome.code is None) and (outcome.ok or decoded["code"] == outcome.code)
            assert outcome.unknown or not outcome.host_died
            if outcome.code in NOT_BEGUN or (outcome.code == "cancelled" and not outcome.unknown):
                assert effects[key] == 0, (key, outcome)
            if outcome.ok and decoded == "charged":
                assert effects[key] == 1
        codes = {outcome.code for outcome in storm.outcomes.values()}
        assert codes >= {None, "tool_args", "tool_failed", "tool_timeout", "tool_host_died", "cancelled"}
        statistics = node.pool.statistics()
        assert statistics.queued == statistics.queued_bytes == 0
        assert statistics.start_mode == mode

    node(
        test,
        specs=tools_in(fixture),
        template=mode,
        backoff_min_ns=1_000_000,
        backoff_max_ns=20_000_000,
        hosts_max=6,
        turn_ns=50_000_000,
    )
