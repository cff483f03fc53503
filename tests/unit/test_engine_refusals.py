"""A store that cannot be read or refuses: what was acknowledged holds, what waits is found again, nothing spins."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from engine_kit import DIED, Ctx, Node, World, run

from agentrt.engine import access, loading
from agentrt.engine.info import EngineLimits
from agentrt.errors import StaleWriteError, StoreError
from agentrt.records import CancelRequested, StepPrepared
from agentrt.states import RunState
from agentrt.stores.base import Batch
from agentrt.stores.memory import MemoryDisk
from agentrt.tools.spec import ToolSpec

EVENT, SPAWN, JOIN, LOCK = 4, 6, 7, 8
COLD = EngineLimits(hot_ns=0)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (access, loading):
        monkeypatch.setattr(module, "AGAIN_S", 0.02)
    yield


def one(ctx: Ctx, input: Any) -> Any:
    handle = ctx.tool(input, x=1)
    yield ctx.wait(handle)
    return ctx.read(handle)


def listener(ctx: Ctx, input: Any) -> Any:
    handle = ctx.op(EVENT, topic="t")
    yield ctx.wait(handle)
    return ctx.read(handle)["data"]


def locker(ctx: Ctx, input: Any) -> Any:
    handle = ctx.op(LOCK, name="l")
    yield ctx.wait(handle)
    return ctx.read(handle)["token"]


def parent(ctx: Ctx, input: Any) -> Any:
    spawn = ctx.op(SPAWN, agent="one", input="put")
    yield ctx.wait(spawn)
    join = ctx.op(JOIN, run_id=ctx.read(spawn)["run_id"])
    yield ctx.wait(join)
    return ctx.read(join)


AGENTS = {"one": one, "listener": listener, "locker": locker, "parent": parent}


def new_node(disk: MemoryDisk, world: World, limits: EngineLimits | None = None) -> Node:
    node = Node(disk, world, limits=limits)
    node.tools.registry.add(ToolSpec("brittle", "keyed", 10**9, True, "x:brittle", attempts_max=2))
    for name, agent in AGENTS.items():
        node.register(name, agent)
    node.engine.recover()
    return node


async def parked(node: Node, run_id: str) -> None:
    await node.until(lambda: run_id in node.engine._places.parked)


async def one_parked(node: Node) -> str:
    """A run whose step may have had its effect, which may not be done twice: it waits for an operator."""
    node.tools.hold = True
    run_id = await node.submit("one", "once")
    await node.until(lambda: bool(node.tools.held))
    node.tools.held.pop()[4](DIED)
    await parked(node, run_id)
    return run_id


async def cold(node: Node, run_id: str) -> None:
    for _ in range(400):
        if run_id not in node.engine._runs and node.fold(run_id).state is RunState.WAITING:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it is not cold")


def test_a_tools_own_bound_on_attempts_goes_before_the_runtimes() -> None:
    async def main() -> None:
        node = new_node(MemoryDisk(), World(), EngineLimits(attempts_max=5))
        node.tools.hold = True
        for tool, attempts in (("brittle", 2), ("put", 5)):
            run_id = await node.submit("one", tool)
            seen = 0
            while run_id not in node.engine._places.parked:
                await asyncio.sleep(0)
                if node.tools.held:
                    seen += 1
                    node.tools.held.pop()[4](DIED)
            assert seen == attempts
            prepared = [record for record in node.records(run_id) if isinstance(record, StepPrepared)]
            assert [record.attempt for record in prepared] == [*range(1, attempts + 1)]
        await node.close()

    run(main())


def test_attempts_of_a_tool_with_its_own_bound_count_across_restarts() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = new_node(disk, world)
        node.tools.hold = True
        run_id = await node.submit("one", "brittle")
        for life in (1, 2):
            while not node.tools.held:
                await asyncio.sleep(0)
            assert node.tools.held[0][3] == life
            node.crash()
            node = new_node(disk, world)
            node.tools.hold = True
        await parked(node, run_id)
        assert "2 attempts" in node.engine._places.parked[run_id].detail
        await node.close()

    run(main())


@pytest.mark.parametrize("where", ["parked", "read"])
def test_whoever_lists_runs_is_told_what_an_operator_would_decide(where: str) -> None:
    """At any moment: who lets a run go on without knowing what, may let an effect happen twice."""

    async def main() -> None:
        node = new_node(MemoryDisk(), World())
        run_id = await one_parked(node)
        if where == "read":  # as while it is being loaded, for whatever reason
            del node.engine._places.parked[run_id]
        (listed,) = await node.engine.queries.list_runs()
        assert (listed.run_id, listed.wait_reason) == (run_id, "operator")
        assert "may not be done twice" in (listed.detail or "")
        await node.close()

    run(main())


@pytest.mark.parametrize("how", ["settle", "retry", "resume", "approve"])
def test_what_people_decide_is_durable_when_it_is_acknowledged(how: str) -> None:
    def asks(ctx: Ctx, input: Any) -> Any:
        handle = ctx.op(5, question="?")
        yield ctx.wait(handle)
        return ctx.read(handle)

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = new_node(disk, world)
        node.tools.hold = True
        if how == "approve":
            node.register("asks", asks)
            run_id = await node.submit("asks")
            await node.until(lambda: bool(node.engine._runs[run_id].open))
            action: Any = node.approve(run_id)
        else:
            run_id = await one_parked(node)
            acts = {
                "settle": node.decide(run_id, "1:1", True, 7),
                "retry": node.decide(run_id, "1:1", None),
                "resume": node.resume(run_id),
            }
            action = acts.pop(how)
            for other in acts.values():
                other.close()
        node.store.slow = True
        node.store.at = node.store.commits + 1  # the node dies with what follows from the decision
        asked = asyncio.ensure_future(action)
        await node.until(lambda: bool(node.store._said))
        assert not asked.done()
        node.store.speak()
        await asked
        node.crash()

        node = new_node(disk, world)
        node.register("asks", asks)
        result = await node.result(run_id)
        expected = {"settle": 7, "approve": {"approved": True, "by": "ann", "comment": None}}
        assert result.state is RunState.SUCCEEDED
        assert result.value() == expected.get(how, {"put": {"x": 1}})
        assert len(world.effects) == (how in ("retry", "resume"))
        node.check_disk()
        await node.close()

    run(main())


def test_a_refused_decision_is_not_acknowledged_and_the_run_still_waits() -> None:
    async def main() -> None:
        node = new_node(MemoryDisk(), World())
        run_id = await one_parked(node)
        node.store.refuse = lambda batch: StaleWriteError("no") if batch.run_id == run_id else None
        with pytest.raises(StoreError):
            await node.decide(run_id, "1:1", True, 7)
        node.store.accept_again()
        await parked(node, run_id)
        await node.decide(run_id, "1:1", True, 8)
        assert (await node.result(run_id)).value() == 8
        await node.close()

    run(main())


class Deaf:
    """Reads of a store fail while ``deaf`` is set."""

    def __init__(self, node: Node) -> None:
        self.deaf, self.failed = False, 0
        for name in ("read_head", "read_records", "read_row", "scan_rows"):
            setattr(node.store, name, self._guard(getattr(node.store, name)))

    def _guard(self, read: Any) -> Any:
        def guarded(*args: Any, **how: Any) -> Any:
            if self.deaf:
                self.failed += 1
                raise StoreError("cannot be read")
            return read(*args, **how)

        return guarded


@pytest.mark.parametrize("what", ["event", "lock", "child", "timer"])
def test_a_wait_is_looked_at_again_after_a_failed_read(what: str) -> None:
    def sleeper(ctx: Ctx, input: Any) -> Any:
        handle = ctx.op(3, seconds=0.2)
        yield ctx.wait(handle)
        return "slept"

    def holder(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.op(LOCK, name="l"))
        yield ctx.wait(ctx.tool("put", x=1))
        return "held"

    async def main() -> None:
        node = new_node(MemoryDisk(), World(), COLD)
        node.register("sleeper", sleeper)
        node.register("holder", holder)
        met: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: met.append(context))
        store = Deaf(node)
        node.tools.hold = True
        if what == "event":
            run_id = await node.submit("listener")
            await cold(node, run_id)
            await node.send(topic="t", data=5)
            store.deaf = True
        elif what == "lock":
            first = await node.submit("holder")
            await node.until(lambda: bool(node.tools.held))
            run_id = await node.submit("locker")
            await cold(node, run_id)
            store.deaf = True
            node.tools.answer_one()
            await node.until(lambda: first not in node.engine._runs)
        elif what == "child":
            run_id = await node.submit("parent")
            await cold(node, run_id)
            child = next(iter(node.fold(run_id).children.values())).run_id
            store.deaf = True
            node.tools.answer_one()
            await node.until(lambda: child not in node.engine._runs)
        else:
            run_id = await node.submit("sleeper")
            await cold(node, run_id)
            store.deaf = True
        while store.failed < 3:  # it tries more than once
            await asyncio.sleep(0.01)
        store.deaf = False
        assert (await node.result(run_id)).state is RunState.SUCCEEDED
        node.check_disk()
        await node.close()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("agent", ["listener", "locker"])
def test_a_refusal_that_persists_backs_off_and_lets_others_pass(agent: str) -> None:
    def holder(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.op(LOCK, name="l"))
        yield ctx.wait(ctx.tool("put", x=1))

    async def main() -> None:
        node = new_node(MemoryDisk(), World(), COLD)
        node.register("holder", holder)
        node.tools.hold = True
        await node.submit("holder")
        await node.until(lambda: bool(node.tools.held))
        first, second = await node.submit(agent), await node.submit(agent)
        await cold(node, first)
        await cold(node, second)
        tries = 0

        def refuse(batch: Batch) -> StoreError | None:
            nonlocal tries
            tries += batch.run_id == first
            return StaleWriteError("no") if batch.run_id == first else None

        async def give(data: int) -> None:
            """Something for one of the two."""
            if agent == "listener":
                await node.send(topic="t", data=data)
            elif node.tools.held:
                node.tools.answer_one()  # the lock's holder ends

        node.store.refuse = refuse
        await give(1)
        assert (await node.result(second)).state is RunState.SUCCEEDED
        await asyncio.sleep(0.3)
        assert 0 < tries < 12
        node.store.accept_again()
        await give(2)
        assert (await node.result(first)).state is RunState.SUCCEEDED
        await node.close()

    run(main())


@pytest.mark.parametrize("whose", ["a client's", "a parent's"])
def test_a_cancel_that_the_store_refused_is_asked_for_again(whose: str) -> None:
    def parent(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.op(SPAWN, agent="one", input="put"))
        yield ctx.wait(ctx.tool("put", x=2))

    async def main() -> None:
        node = new_node(MemoryDisk(), World())
        node.register("one", one)
        node.register("family", parent)
        node.tools.hold = True
        run_id = await node.submit("family")
        await node.until(lambda: len(node.tools.held) == 2, 10**6)
        child = next(iter(node.fold(run_id).children.values())).run_id
        told = child if whose == "a parent's" else run_id
        refused = 0

        def refuse(batch: Batch) -> StoreError | None:
            nonlocal refused
            asks = any(isinstance(record, CancelRequested) for record in batch.records)
            refused += asks and batch.run_id == told
            return StaleWriteError("no") if asks and batch.run_id == told else None

        node.store.refuse = refuse
        cancelled = node.loop.create_task(node.cancel(run_id))
        if whose == "a parent's":  # it ends its children when its own calls have returned
            await cancelled
            own = next(held for held in node.tools.held if held[1] == {"x": 2})
            node.tools.held.remove(own)
            own[4](node.tools.execute(*own[:3]))
        await node.until(lambda: refused > 0, 10**6)
        node.store.accept_again()
        node.tools.hold = False
        while node.tools.held:
            node.tools.answer_one()
        await cancelled
        for ended in (run_id, told):
            assert (await node.result(ended)).state is RunState.CANCELLED
        await node.close()

    run(main())
