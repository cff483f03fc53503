"""What was decided about runs is their history: it survives restarts, costs no commit of its own, is bounded, and goes
with its run."""

import asyncio
from functools import partial

import msgspec
import pytest
from engine_kit import MemoryReader, Node, World, run, settle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_engine_flow import HOURLY, is_cold, make
from test_engine_waits import COLD, HOT, Clock

from agentrt.engine.decisionlog import PER_RUN_MAX, DecisionLog, saved
from agentrt.engine.retention import find_expired
from agentrt.errors import StoreCorruptError
from agentrt.flow.decisions import Action, Control, Decision, Scope
from agentrt.ids import new_run_id
from agentrt.states import RunState
from agentrt.stores.base import DECISIONS
from agentrt.stores.memory import MemoryDisk

TURNS = 1_000_000
RUNS = [new_run_id(1, bytes([number] * 10)) for number in range(3)]
MOST = 4


def decision(run_id: str | None, number: int) -> Decision:
    return Decision(at_ns=number, control=Control.RATE, action=Action.WAIT, scope=Scope.TOOL, run=run_id)


class LogModel(RuleBasedStateMachine):
    """Beside it, a list for each run of all that was decided and of what a commit took along."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.reader = MemoryReader(self.disk)
        self.log = DecisionLog(per_run_max=MOST)
        self.made = 0
        self.decided: dict[str, list[Decision]] = {run_id: [] for run_id in RUNS}  # in this life, or durable
        self.durable: dict[str, list[Decision]] = {run_id: [] for run_id in RUNS}
        self.absent: set[str] = set()

    @rule(run_id=st.sampled_from(RUNS), many=st.integers(1, 2 * MOST))
    def decide(self, run_id: str, many: int) -> None:
        for _ in range(many):
            self.made += 1
            self.log.add(decision(run_id, self.made))
            self.decided[run_id].append(decision(run_id, self.made))

    @rule(run_id=st.sampled_from(RUNS), refused=st.booleans())
    def commit(self, run_id: str, refused: bool) -> None:
        if run_id in self.absent or run_id not in self.log.unsaved:
            return
        rows = self.log.take(run_id)
        if not refused:
            for row in rows:
                assert row.value is not None
                self.disk.tables[row.table][row.key] = row.value
            self.durable[run_id] = self.decided[run_id][:]
        else:  # the run is read again, and its history has lost them once this node has ended
            self.log.left(run_id)
            self.log.returned(run_id, saved(self.reader, run_id)[0])

    @rule(run_id=st.sampled_from(RUNS))
    def leave(self, run_id: str) -> None:
        self.log.left(run_id)
        self.absent.add(run_id)

    @rule(run_id=st.sampled_from(RUNS))
    def come_back(self, run_id: str) -> None:
        if run_id in self.absent:
            self.absent.remove(run_id)
            self.log.returned(run_id, saved(self.reader, run_id)[0])

    @rule()
    def restart(self) -> None:
        self.log = DecisionLog(per_run_max=MOST)
        self.absent = set(RUNS)
        self.decided = {run_id: self.durable_of(run_id) for run_id in RUNS}
        self.durable = {run_id: found[:] for run_id, found in self.decided.items()}

    def durable_of(self, run_id: str) -> list[Decision]:
        return [*saved(self.reader, run_id)[1]]

    @invariant()
    def the_latest_are_there(self) -> None:
        for run_id in RUNS:
            found = self.durable_of(run_id)
            assert len(self.reader.scan_rows(DECISIONS)) <= MOST * len(RUNS)
            assert self.log.of_run(run_id, tuple(found)) == self.decided[run_id][-MOST:]
            if self.durable[run_id]:
                assert found[-1] == self.durable[run_id][-1]


LogModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLog = LogModel.TestCase


def history(node: Node, run_id: str) -> "asyncio.Future[list[Decision]]":
    future: asyncio.Future[list[Decision]] = node.loop.create_future()
    node.engine.queries.decisions(run_id, partial(settle, future))
    return future


def test_what_was_decided_about_a_run_survives_a_restart() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, HOURLY, limits=COLD)
        run_id = await node.submit("caller", 7)
        found: list[Decision] = []
        for hour in range(1, 3):
            await node.until(partial(is_cold, node, run_id), TURNS)
            now = await history(node, run_id)
            assert now[: len(found)] == found and len(now) > len(found)  # nothing is lost, in order
            assert now[-1].action in (Action.WAIT, Action.PARK) and now[-1].limit == "tool_calls/hour"
            found = now
            node.crash()
            node = make(disk, world, clock, HOURLY, limits=COLD)
            node.engine.recover()
            assert await history(node, run_id) == found
            clock.forward(3600)
            await node.until(lambda hour=hour: len(world.effects) >= min(7, 3 * (hour + 1)), TURNS)  # type: ignore[misc]
        assert (await node.result(run_id)).value() == 7
        assert (await history(node, run_id))[: len(found)] == found
        node.check_disk()
        rows = MemoryReader(disk).scan_rows(DECISIONS)
        assert len(rows) == len(await history(node, run_id)) <= PER_RUN_MAX

        (batch,) = find_expired(MemoryReader(disk), "", 1 << 62).batches
        gone = {row.key for row in batch.rows if row.table == DECISIONS and row.value is None}
        assert gone == {key for key, _ in rows}
        await node.close()

    run(main())


def test_how_a_run_timed_out_is_in_its_history() -> None:
    """The decision is made with the end, not after it."""

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=HOT)
        node.tools.hold = True
        run_id = await node.submit("caller", 1, timeout_ns=10**9)
        await node.until(lambda: bool(node.tools.held))
        clock.forward(2)
        node.engine._runs[run_id].time_out()
        while node.tools.held:
            node.tools.answer_one()
        assert (await node.result(run_id)).state is RunState.TIMED_OUT
        node.crash()
        node = make(disk, world, clock, limits=HOT)
        (told,) = await history(node, run_id)
        assert (told.control, told.action, told.name) == (Control.TIMEOUT, Action.END, run_id)
        await node.close()

    run(main())


def test_a_decision_goes_with_the_next_commit_and_makes_none() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        node = make(disk, World(), Clock(), limits=HOT)
        node.tools.hold = True
        run_id = await node.submit("caller", 1)
        await node.until(lambda: bool(node.tools.held))
        made = node.store.commits
        node.engine.flow.decide(decision(run_id, 5))
        for _ in range(100):
            await asyncio.sleep(0)
        assert node.store.commits == made and not MemoryReader(disk).scan_rows(DECISIONS)
        node.tools.answer_one()
        await node.result(run_id)
        assert saved(MemoryReader(disk), run_id) == (1, (decision(run_id, 5),))
        assert not node.engine.flow.decisions.unsaved
        await node.close()

    run(main())


def test_a_decision_that_cannot_be_read_is_an_error_of_the_store() -> None:
    disk = MemoryDisk()
    run_id = RUNS[0]
    for wrong in (b"\xc1", msgspec.msgpack.encode(("a", {})), b""):
        log = DecisionLog()
        log.add(decision(run_id, 1))
        (row,) = log.take(run_id)
        disk.tables[DECISIONS][row.key] = wrong
        with pytest.raises(StoreCorruptError, match=run_id):
            saved(MemoryReader(disk), run_id)
