"""Ended runs are erased whole when their time has come, and nothing else is."""

import asyncio

import pytest
from engine_kit import Node, World, run
from test_engine_waits import AGENTS, SECOND, Clock, make, parked, timed

from agentrt.engine.info import EngineLimits
from agentrt.engine.rows import rows_of
from agentrt.errors import RunExportedError, UnknownRunError
from agentrt.fold import apply, head_of
from agentrt.records import Exported
from agentrt.stores.base import IDEMPOTENCY, Batch, Row
from agentrt.stores.memory import MemoryDisk

assert AGENTS


def test_fault_D08_an_old_run_goes_whole_and_its_key_may_be_used_again() -> None:
    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=EngineLimits(hot_ns=0, retention_ns=100 * SECOND))
        old = await node.submit("double", 1, idempotency_key="k")
        await node.result(old)
        waiting = await node.submit("asker", None)
        await parked(node, waiting, "approval")
        parent = await node.submit("parent", [["double", 2], ["asker", None]])
        await parked(node, parent, "child")
        clock.forward(101)
        young = await node.submit("double", 3)
        await node.result(young)
        node.engine._retention.walk()
        await timed(node, lambda: old not in disk.heads)
        assert old not in disk.journals and not disk.tables[IDEMPOTENCY]
        children = [child.run_id for child in node.fold(parent).children.values()]
        assert {waiting, parent, young, *children} == set(disk.heads)
        with pytest.raises(UnknownRunError):
            await node.engine.queries.describe(old)
        again = await node.submit("double", 5, idempotency_key="k")
        assert again != old and (await node.result(again)).value() == 10
        await node.approve(children[1])
        assert (await node.result(parent)).value()[0] == 4
        node.check_disk()
        await node.close()

    run(main())


def test_a_run_that_was_exported_goes_in_time() -> None:
    """It can come back for as long as ended runs are kept."""

    async def main() -> None:
        disk, world, clock = MemoryDisk(), World(), Clock()
        node = make(disk, world, clock, limits=EngineLimits(hot_ns=0, retention_ns=100 * SECOND))
        left = await node.submit("asker", None, idempotency_key="k")
        await parked(node, left, "approval")
        state = node.fold(left)
        gone = tuple(Row(row.table, row.key, None) for row in rows_of(left, state))
        record = Exported(state.version + 1, clock(), "exp_1")
        apply(state, record)
        told = asyncio.get_running_loop().create_future()
        node.store.commit(Batch(head_of(state, left), record.seq - 1, (record,), gone), told.set_result)
        assert await told is None
        clock.forward(99)
        node.engine._retention.walk()
        later = await node.submit("double", 1)
        await node.result(later)
        assert left in disk.heads
        with pytest.raises(RunExportedError):
            (await node.result(left)).value()
        clock.forward(2)
        node.engine._retention.walk()
        await timed(node, lambda: left not in disk.heads)
        assert left not in disk.journals and not disk.tables[IDEMPOTENCY]
        await node.close()

    run(main())


def test_a_crash_in_the_middle_leaves_a_run_whole_or_gone() -> None:
    async def main() -> None:
        for applied in (False, True):
            disk, world, clock = MemoryDisk(), World(), Clock()
            limits = EngineLimits(retention_ns=100 * SECOND)
            node = make(disk, world, clock, limits=limits)
            old = await node.submit("double", 1, idempotency_key="k")
            await node.result(old)
            clock.forward(101)
            node.store.at, node.store.applied = node.store.commits, applied
            node.engine._retention.walk()
            await asyncio.wait_for(node.store.crashed.wait(), 5)
            node.crash()
            gone = old not in disk.heads
            assert gone is applied
            assert gone is (old not in disk.journals) is (not disk.tables[IDEMPOTENCY])

    run(main())


assert Node
