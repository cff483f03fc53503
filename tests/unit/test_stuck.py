"""Runs that are stuck are found, reported and helped; all others are left alone; every wait says for what."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run

from agentrt.engine.info import EngineLimits, RunInfo
from agentrt.engine.stuck import StuckRun
from agentrt.engine.token import ResumeToken
from agentrt.errors import StoreError
from agentrt.states import RunState
from agentrt.stores.base import READY
from agentrt.stores.memory import MemoryDisk

SLEEP, EVENT, APPROVAL, SPAWN, JOIN, LOCK = 3, 4, 5, 6, 7, 8
MS = 1_000_000
BOUND = EngineLimits(stuck_ns=80 * MS, hot_ns=10**15)


def steps(ctx: Ctx, input: Any) -> Any:
    for number in range(input or 3):
        yield ctx.wait(ctx.tool("put", n=number))


def nothing(ctx: Ctx, input: Any) -> Any:
    yield ctx.wait(ctx.tool("put", n=0))
    yield ctx.wait()  # for nothing that could come


def waits(ctx: Ctx, input: Any) -> Any:
    number, request = input
    if number == LOCK and request.pop("first", None):
        yield ctx.wait(ctx.op(LOCK, name=request["name"]))
        yield ctx.wait(ctx.op(EVENT, topic="never"))
    if number == JOIN:
        spawn = ctx.op(SPAWN, agent="waits", input=[EVENT, {"topic": "never"}])
        yield ctx.wait(spawn)
        request = {"run_id": ctx.read(spawn)["run_id"]}
    yield ctx.wait(ctx.op(number, **request))


class Watched:
    def __init__(self, disk: MemoryDisk, world: World, limits: EngineLimits = BOUND) -> None:
        self.node = Node(disk, world, limits=limits)
        self.told: list[StuckRun] = []
        self.node.engine.observe(lambda event, data: self.told.append(data) if event == "stuck" else None)
        for name, agent in (("steps", steps), ("nothing", nothing), ("waits", waits)):
            self.node.register(name, agent)
        self.node.engine.recover()

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"it never came to that: {self.told}")


def test_fault_D10_a_run_that_sits_between_two_steps_is_replayed_and_ends() -> None:
    """The wake-up of its guest is lost."""

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        watched = Watched(disk, world)
        node = watched.node
        node.tools.hold = True
        run_id = await node.submit("steps")
        await node.until(lambda: len(node.tools.held) == 1)
        guest = node.engine._runs[run_id].guest
        guest.scheduler_state = None  # type: ignore[union-attr]
        guest.complete = lambda *args: None  # type: ignore[union-attr,method-assign]
        node.tools.answer_one()
        node.tools.hold = False
        await watched.until(lambda: bool(watched.told))
        told = watched.told[0]
        assert (told.run_id, told.action) == (run_id, "replayed") and "not queued" in told.reason
        assert (await node.result(run_id)).state is RunState.SUCCEEDED
        assert len(world.effects) == 3 and node.engine.statistics().stuck == 1
        node.check_disk()
        await node.close()

    run(main())


def test_a_program_that_waits_for_nothing_is_named_and_waits_for_an_operator() -> None:
    async def main() -> None:
        watched = Watched(MemoryDisk(), World())
        node = watched.node
        run_id = await node.submit("nothing")
        seen: set[str | None] = set()
        while len(watched.told) < 2:
            seen.add((await node.engine.queries.describe(run_id)).stuck)
            await asyncio.sleep(0.01)
        assert [told.action for told in watched.told] == ["replayed", "operator"]
        assert "its program waits for nothing that could come" in seen
        await watched.until(lambda: run_id in node.engine._places.parked)
        info = await node.engine.queries.describe(run_id)
        assert info.wait_reason == "operator" and "waits for nothing" in (info.detail or "")
        await node.cancel(run_id)
        assert (await node.result(run_id)).state is RunState.CANCELLED
        node.check_disk()
        await node.close()

    run(main())


def test_a_guest_that_was_never_started_is_brought_back() -> None:
    async def main() -> None:
        watched = Watched(MemoryDisk(), World())
        node = watched.node
        start = node.engine._start
        node.engine._start = lambda machine, agent: None  # type: ignore[method-assign]
        run_id = await node.submit("steps")
        node.engine._start = start  # type: ignore[method-assign]
        await watched.until(lambda: bool(watched.told))
        assert watched.told[0].reason == "its guest was not started"
        assert (await node.result(run_id)).state is RunState.SUCCEEDED
        await node.close()

    run(main())


def test_a_run_of_the_store_that_nobody_has_is_brought_back() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        watched = Watched(disk, world)
        node = watched.node
        node.tools.hold = True
        run_id = await node.submit("steps")
        await node.until(lambda: bool(node.tools.held))
        await watched.until(lambda: node.engine._loader.scanned)
        machine = node.engine._runs.pop(run_id)  # whoever had it has forgotten it
        node.engine._intake.gone(machine)
        machine.guest = None
        node.tools.hold = False
        node.tools.held.clear()
        result = node.result(run_id)
        await watched.until(lambda: bool(watched.told))
        assert (watched.told[0].reason, watched.told[0].action) == ("nobody had it", "brought back")
        assert (await result).state is RunState.SUCCEEDED
        node.check_disk()
        await node.close()

    run(main())


def test_fault_L41_who_waits_works_or_is_queued_is_never_called_stuck() -> None:
    """Long past the bound: tools that take their time, a slow store, people, timers, children, a full recovery."""

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        watched = Watched(disk, world)
        node = watched.node
        node.tools.hold = True
        await node.submit("steps")
        for wait in ([SLEEP, {"seconds": 1e6}], [EVENT, {"topic": "never"}], [APPROVAL, {"question": "?"}], [JOIN, {}]):
            await node.submit("waits", wait)
        await asyncio.sleep(0.3)
        queued = await node.submit("nothing")
        node.engine._runs[queued].guest.scheduler_state = "QUEUED"  # type: ignore[union-attr]
        await node.until(lambda: len(node.tools.held) == 2)
        node.tools.held.pop()[4](msgspec_outcome())
        node.store.slow = True
        sends = [asyncio.ensure_future(node.send(topic="slow")) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert watched.told == [] and not any(send.done() for send in sends)
        node.store.speak()
        node.crash()

        watched = Watched(disk, world, msgspec.structs.replace(BOUND, rehydrate_per_s=2))
        await asyncio.sleep(0.4)
        assert watched.told == []
        await watched.node.close()

    def msgspec_outcome() -> Any:
        from agentrt.tools.outcome import ToolOutcome

        return ToolOutcome(True, b"null", None, 5, False)

    run(main())


def test_a_bound_of_zero_switches_it_off() -> None:
    async def main() -> None:
        watched = Watched(MemoryDisk(), World(), EngineLimits(stuck_ns=0, hot_ns=10**15))
        await watched.node.submit("nothing")
        await asyncio.sleep(0.2)
        assert watched.told == [] and watched.node.engine._stuck._handle is None
        await watched.node.close()

    run(main())


def test_a_failed_read_does_not_end_the_looking() -> None:
    async def main() -> None:
        watched = Watched(MemoryDisk(), World())
        node = watched.node
        scan = node.store.scan_rows
        failed = 0

        def fails(table: str, *args: Any, **how: Any) -> Any:
            nonlocal failed
            if table == READY and failed < 2:
                failed += 1
                raise StoreError("cannot be read")
            return scan(table, *args, **how)

        await asyncio.sleep(0.05)
        node.store.scan_rows = fails
        await node.submit("nothing")
        await watched.until(lambda: bool(watched.told))
        assert failed == 2
        await node.close()

    run(main())


@pytest.mark.parametrize("limits", [BOUND, EngineLimits(hot_ns=0)])
def test_fault_S29_every_wait_says_for_what(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Watched(disk, world, limits).node
        holder = await node.submit("waits", [LOCK, {"name": "l", "first": True}], tenant="red")
        await node.until(lambda: bool(node.fold(holder).locks), 100_000)
        cases: list[tuple[list[Any], str, list[str]]] = [
            ([SLEEP, {"seconds": 1e6}], "timer", ["until 20"]),
            ([EVENT, {"topic": "t", "key": "k", "timeout_s": 1e6}], "event", ["'t'", "'k'", "tenant red", "until 20"]),
            ([EVENT, {}], "event", ["mailbox"]),
            ([APPROVAL, {"question": "send?", "timeout_s": 1e6}], "approval", ["send?", "until 20"]),
            ([LOCK, {"name": "l"}], "lock", ["'l'", holder, "tenant red"]),
            ([JOIN, {}], "child", ["run_"]),
        ]
        runs = [(await node.submit("waits", wait, tenant="red", tier=2), wait, why, what) for wait, why, what in cases]
        later = await node.submit("steps", start_ns=node.engine.now_ns() + 10**15)
        await asyncio.sleep(0.3)
        for run_id, _, why, what in runs:
            info = await node.engine.queries.describe(run_id)
            assert info.wait_reason == why and all(part in (info.detail or "") for part in what), info
            check_token(info)
            assert (info.state is RunState.WAITING) is (limits is not BOUND)
        info = await node.engine.queries.describe(later)
        assert info.wait_reason == "timer" and "begins at 20" in (info.detail or "")
        node.tools.hold = True
        busy = await node.submit("steps")
        await node.until(lambda: bool(node.tools.held))
        info = await node.engine.queries.describe(busy)
        assert info.wait_reason == "step" and info.detail == "1:1 put"
        queued = await node.submit("steps", tier=2, tenant="red")
        machine = node.engine._runs[queued]
        machine.guest.scheduler_state = "QUEUED"  # type: ignore[union-attr]
        machine.open.clear()
        info = await node.engine.queries.describe(queued)
        assert info.wait_reason == "pool" and "tier 2 (batch), tenant red" in (info.detail or "")
        node.crash()

        node = Node(disk, world, limits=EngineLimits(rehydrate_per_s=1))
        node.register("steps", steps)
        node.engine._started_ns = 1
        node.engine._versions.begin_grace()
        node.engine._loader.scan(b"")
        node.engine.recover_soon = node.engine._loader.recover_soon = lambda: None  # type: ignore[method-assign]
        await node.until(lambda: len(node.engine._plan) > 0, 100_000)
        info = await node.engine.queries.describe(busy)
        assert info.wait_reason == "pool" and "limits.rehydrate_per_s" in (info.detail or "")
        assert "tier 1 (interactive), tenant default" in (info.detail or "")
        node.crash()

    run(main())


def check_token(info: RunInfo) -> None:
    token = info.token
    assert isinstance(token, ResumeToken)
    assert (token.run_id, token.seq, token.tier, token.segment) == (info.run_id, info.version, info.tier, 1)
