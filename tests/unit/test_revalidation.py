"""What is asked before a run goes on: tenants that are off, policies, deadlines, locks that were lost."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from engine_kit import Ctx, Node, World, run, settle

from agentrt.config import load_config
from agentrt.engine.accept import Via
from agentrt.engine.info import EngineLimits
from agentrt.errors import ConfigError, DeferredError, DeniedError, StoreError, TenantDisabledError
from agentrt.hooks import HOOKS_VERSION, hookimpl
from agentrt.plugins import Plugins
from agentrt.policy import ALLOW, OVERRUN_NS, OVERRUN_WALL_NS, Decision, Defer, Deny, Policies
from agentrt.records import Ending, LockBroken, RunEnded, Upgraded
from agentrt.runtime import Runtime
from agentrt.states import RunState
from agentrt.stores.base import LOCKS
from agentrt.stores.memory import MemoryDisk

EVENT, APPROVAL, LOCK = 4, 5, 8
HOT, COLD = EngineLimits(hot_ns=10**15), EngineLimits(hot_ns=0)


def asker(ctx: Ctx, input: Any) -> Any:
    handle = ctx.op(APPROVAL, question="?")
    yield ctx.wait(handle)
    yield ctx.wait(ctx.tool("put", x=1))
    return ctx.read(handle)["approved"]


def careful(ctx: Ctx, input: Any) -> Any:
    def undo(ctx: Ctx, reason: Any) -> Any:
        yield ctx.wait(ctx.tool("put", undo=reason))

    ctx.on_unwind(undo)
    return (yield from asker(ctx, input))


def locker(ctx: Ctx, input: Any) -> Any:
    yield ctx.wait(ctx.op(LOCK, name="l"))
    yield ctx.wait(ctx.op(EVENT, topic="t"))
    handle = ctx.tool("put", x=1)
    yield ctx.wait(handle)
    return ctx.read(handle)


class Says:
    """A policy that says what the test wants; ``asked`` is what it was asked."""

    def __init__(self, answer: Any = ALLOW, version: str = "1") -> None:
        self.answer, self.version = answer, version
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def decide(self, kind: str, facts: Mapping[str, Any]) -> Decision:
        self.asked.append((kind, facts))
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: Decision = self.answer
        return answer


def new_node(disk: MemoryDisk, world: World, limits: EngineLimits, *policies: Says) -> Node:
    node = Node(disk, world, limits=limits, policies=Policies([(f"p{n}", each) for n, each in enumerate(policies)]))
    node.engine.tenants.load(node.store)  # type: ignore[arg-type]
    node.register("asker", asker)
    node.register("careful", careful, unwinds=True)
    node.register("locker", locker)
    node.engine.recover()
    return node


async def switch(node: Node, tenant: str, *, on: bool) -> None:
    future: asyncio.Future[None] = node.loop.create_future()
    if on:
        node.engine.tenants.enable(tenant, lambda error: settle(future, None, error))
    else:
        node.engine.tenants.disable(tenant, "unpaid", lambda error: settle(future, None, error))
    await future


async def asks(node: Node, run_id: str, *, cold: bool = False) -> None:
    for _ in range(1000):
        fold = node.fold(run_id)
        if fold.open and (not cold or (fold.state is RunState.WAITING and run_id not in node.engine._runs)):
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it asks for nothing")


async def held(node: Node, run_id: str) -> str:
    await node.until(lambda: run_id in node.engine._places.parked, 100_000)
    return (await node.engine.queries.describe(run_id)).detail or ""


@pytest.mark.parametrize("limits", [HOT, COLD])
def test_nothing_of_a_disabled_tenant_goes_on_until_it_is_enabled_even_through_a_restart(limits: EngineLimits) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = new_node(disk, world, limits)
        run_id = await node.submit("asker", tenant="red")
        other = await node.submit("asker", tenant="blue")
        for each in (run_id, other):
            await asks(node, each, cold=limits is COLD)
        await switch(node, "red", on=False)
        with pytest.raises(TenantDisabledError) as refused:
            await node.submit("asker", tenant="red")
        assert "unpaid" in refused.value.message
        await node.approve(run_id)
        await node.approve(other)
        assert (await node.result(other)).value() is True
        assert "tenant red is disabled: unpaid" in await held(node, run_id)
        assert len(world.effects) == 1
        node.crash()

        node = new_node(disk, world, limits)
        assert node.engine.tenants.disabled() == {"red": "unpaid"}
        assert "unpaid" in await held(node, run_id)
        before = node.fold(run_id).version
        await node.resume(run_id)  # does not help
        assert "unpaid" in await held(node, run_id)
        assert node.fold(run_id).version == before + 2
        await switch(node, "red", on=True)
        assert (await node.result(run_id)).value() is True
        assert node.engine.tenants.disabled() == {}
        node.check_disk()
        await node.close()

    run(main())


def test_a_switch_that_the_store_refuses_changes_nothing() -> None:
    async def main() -> None:
        node = new_node(MemoryDisk(), World(), HOT)
        node.store.refuse = lambda batch: StoreError("full") if batch.head is None else None
        with pytest.raises(StoreError):
            await switch(node, "red", on=False)
        assert node.engine.tenants.disabled() == {}
        node.store.accept_again()
        await switch(node, "red", on=False)
        node.store.refuse = lambda batch: StoreError("full") if batch.head is None else None
        with pytest.raises(StoreError):
            await switch(node, "red", on=True)
        assert node.engine.tenants.disabled() == {"red": "unpaid"}
        await node.close()

    run(main())


@pytest.mark.parametrize("agent", ["asker", "careful"])
@pytest.mark.parametrize("limits", [HOT, COLD])
@pytest.mark.parametrize("answer", [Deny("not these"), ValueError("broken"), "yes"])
def test_a_denied_run_ends_typed_and_journaled_after_unwinding(agent: str, limits: EngineLimits, answer: Any) -> None:
    async def main() -> None:
        policy, world = Says(), World()
        node = new_node(MemoryDisk(), world, limits, policy)
        run_id = await node.submit(agent)
        await asks(node, run_id, cold=limits is COLD)
        policy.answer = answer
        await node.approve(run_id)
        result = await node.result(run_id)
        assert result.state is RunState.FAILED and result.exception().code == "denied"
        assert "policy p0" in result.exception().message
        records = node.records(run_id)
        assert isinstance(records[-1], RunEnded)
        assert any(isinstance(record, Ending) for record in records) is (agent == "careful")
        assert len(world.effects) == (agent == "careful")  # its handler ran, and nothing else
        kind, facts = policy.asked[-1]
        assert kind == "run.resume" and (facts["run"], facts["agent"]) == (run_id, agent)
        node.check_disk()
        await node.close()

    run(main())


def test_a_refusal_keeps_its_code_through_a_crash_while_it_unwinds() -> None:
    async def main() -> None:
        disk, world, policy = MemoryDisk(), World(), Says()
        node = new_node(disk, world, HOT, policy)
        run_id = await node.submit("careful")
        await asks(node, run_id)
        policy.answer = Deny("not these")
        node.tools.hold = True
        await node.approve(run_id)
        await node.until(lambda: bool(node.tools.held))
        node.crash()
        node = new_node(disk, world, HOT, policy)
        result = await node.result(run_id)
        assert result.exception().code == "denied" and "not these" in result.exception().message
        await node.close()

    run(main())


def test_a_deferred_run_waits_and_is_asked_again_when_it_is_resumed() -> None:
    async def main() -> None:
        policy = Says()
        node = new_node(MemoryDisk(), World(), HOT, Says(), policy)
        run_id = await node.submit("asker")
        await asks(node, run_id)
        policy.answer = Defer("office hours")
        await node.approve(run_id)
        assert "office hours" in await held(node, run_id)
        await node.resume(run_id)
        assert "office hours" in await held(node, run_id)
        policy.answer = ALLOW
        await node.resume(run_id)
        assert (await node.result(run_id)).value() is True
        await node.close()

    run(main())


def test_policies_stand_at_the_door_too() -> None:
    async def main() -> None:
        policy = Says(Deny("no asker today"))
        node = new_node(MemoryDisk(), World(), HOT, policy)
        with pytest.raises(DeniedError):
            await node.submit("asker", tier="urgent", tenant="red")
        kind, facts = policy.asked[0]
        assert kind == "run.accept"
        assert facts == {
            "tenant": "red", "agent": "asker", "version": "v-asker", "tier": 0, "parent": None,
            "door": "embedding", "source": "", "type": "",
        }  # fmt: skip
        policy.answer = Defer("not now")
        with pytest.raises(DeferredError) as deferred:
            await node.submit("asker", via=Via("bus", "orders", "order.new"))
        assert deferred.value.retry_after_s and "not now" in deferred.value.message
        assert {key: policy.asked[1][1][key] for key in ("door", "source", "type")} == {
            "door": "bus", "source": "orders", "type": "order.new",
        }  # fmt: skip
        assert node.engine.statistics().live == 0 and node.engine._intake.admission.items == 0
        await node.close()

    run(main())


def test_another_policy_version_is_journaled_when_the_run_goes_on() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = new_node(disk, world, HOT, Says())
        run_id = await node.submit("asker")
        assert node.fold(run_id).pins["policy"] == "p0 1"
        await asks(node, run_id)
        node.crash()
        node = new_node(disk, world, HOT, Says(version="2"))
        await node.approve(run_id)
        assert (await node.result(run_id)).value() is True
        assert [record.pins for record in node.records(run_id) if isinstance(record, Upgraded)] == [{"policy": "p0 2"}]
        await node.close()

    run(main())


def test_a_lock_that_is_not_the_runs_any_more_is_lost_when_it_goes_on() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = new_node(disk, world, COLD)
        run_id = await node.submit("locker")
        await node.until(lambda: bool(node.fold(run_id).locks), 100_000)
        while run_id in node.engine._runs:
            await asyncio.sleep(0.01)
        node.crash()
        disk.tables[LOCKS].clear()  # the row is gone, whoever did that
        node = new_node(disk, world, COLD)
        await node.until(lambda: node.engine._locks._open, 100_000)
        await node.send(topic="t")
        assert (await node.result(run_id)).value()["error"]["code"] == "lock_lost"
        assert any(isinstance(record, LockBroken) for record in node.records(run_id))
        await node.close()

    run(main())


def test_a_run_behind_its_deadline_does_not_go_on() -> None:
    async def main() -> None:
        now = [1_700_000_000 * 10**9]
        disk, world = MemoryDisk(), World()
        node = Node(disk, world, limits=HOT, now_ns=lambda: now[0])
        node.register("asker", asker)
        node.tools.hold = True
        run_id = await node.submit("asker", timeout_ns=10**9)
        await asks(node, run_id)
        await node.approve(run_id)
        await node.until(lambda: bool(node.tools.held))
        node.crash()
        now[0] += 2 * 10**9
        node = Node(disk, world, limits=HOT, now_ns=lambda: now[0])
        node.register("asker", asker)
        node.engine._wakes.timers.close()  # not by the timer
        node.engine.recover()
        assert (await node.result(run_id)).state is RunState.TIMED_OUT
        assert node.backend.starts == 0
        await node.close()

    run(main())


def test_an_overrun_is_a_denial_by_cpu_time_or_by_waiting() -> None:
    def decide(cpu_ns: int, wall_ns: int) -> Decision:
        return Policies([("p", Says())], iter([0, cpu_ns]).__next__, iter([0, wall_ns]).__next__).decide("k", {})

    assert decide(OVERRUN_NS, OVERRUN_WALL_NS) == ALLOW
    for late in (decide(OVERRUN_NS + 1, 0), decide(0, OVERRUN_WALL_NS + 1)):
        assert isinstance(late, Deny) and "too long" in late.reason


def test_the_first_denial_counts_and_then_the_first_deferral() -> None:
    def decide(*answers: Any) -> Decision:
        return Policies([(f"p{n}", Says(answer)) for n, answer in enumerate(answers)]).decide("k", {})

    assert decide() == decide(ALLOW, ALLOW) == ALLOW
    assert decide(Defer("a"), ALLOW, Defer("b")) == Defer("policy p0: a")
    assert decide(Defer("a"), Deny("b"), Deny("c")) == Deny("policy p1: b")
    assert isinstance(decide(Deny(7)), Deny)  # type: ignore[arg-type]
    assert not Policies() and Policies().pins == {}
    assert Policies([("a", Says()), ("b", Says(version="7"))]).pins == {"policy": "a 1, b 7"}


class Plugin:
    AGENTRT_HOOKS = HOOKS_VERSION

    @hookimpl
    def agentrt_policies(self) -> Any:
        def broken(config: Any) -> Any:
            raise ConfigError("no rules")

        return {"never": lambda config: Says(Deny("never")), "nothing": lambda config: object(), "broken": broken}


@pytest.mark.parametrize("name", ["nobody", "nothing", "never, broken"])
def test_a_runtime_does_not_start_without_its_policies(name: str) -> None:
    config = load_config(arguments={"store.kind": "memory", "node.policies": name})
    with pytest.raises(ConfigError), Runtime(config=config, plugins=Plugins.load({"test": Plugin()})):
        pass


def test_a_policy_plugin_and_switches_through_the_embedding_api() -> None:
    from pathlib import Path

    guest = Path(__file__).parents[2] / "examples" / "guests" / "sequence.wasm"
    config = load_config(arguments={"store.kind": "memory", "node.policies": "never"})
    with Runtime(config=config, plugins=Plugins.load({"test": Plugin()})) as runtime:
        runtime.register_sync("sequence", guest)
        with pytest.raises(DeniedError):
            runtime.submit_sync("sequence", [])
    with Runtime() as runtime:
        runtime.register_sync("sequence", guest)
        runtime.disable_tenant_sync("default", "why not")
        with pytest.raises(TenantDisabledError):
            runtime.submit_sync("sequence", [])
        runtime.enable_tenant_sync("default")
        assert runtime.submit_sync("sequence", []).wait_sync(30).state is RunState.SUCCEEDED
