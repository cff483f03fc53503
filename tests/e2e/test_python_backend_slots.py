"""Hosts and the core's slots: tiers across processes, hogs that are stopped and go on lower, no slot left behind."""

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from python_kit import Hold, Node, ScriptedRun, core_node

from agentrt import _core
from agentrt.backends.base import Request

_spec = importlib.util.spec_from_file_location(
    "core_fixture", Path(__file__).resolve().parents[1] / "unit" / "core_fixture.py"
)
assert _spec is not None and _spec.loader is not None
core_fixture = sys.modules.setdefault("core_fixture", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(core_fixture)

MS = 1_000_000


def on_core(
    scenario: Callable[[Node, Any], Coroutine[Any, Any, None]], *, core: dict[str, Any] | None = None, **limits: Any
) -> None:
    """Run a scenario on a backend that shares a core's slots; afterwards no slot is held."""

    async def run() -> None:
        made = _core.Core(**core_fixture.core_arguments(**{"workers": 1, **(core or {})}))
        async with core_node(made, **limits) as node:
            await asyncio.wait_for(scenario(node, made), 100)
            pool = node.backend._pool
            assert pool is not None
            async with asyncio.timeout(20):
                while any(host._lease is not None for host in pool._hosts):
                    await asyncio.sleep(0.005)
            assert made.statistics()["queued"] == [0, 0, 0, 0]

    asyncio.run(run())


def hold_tools(run: ScriptedRun, request: Request) -> Any:
    raise Hold


async def hogging(node: Node, tier: int, **start: Any) -> ScriptedRun:
    """A hog that is known to hold the slot."""
    run = await node.start("spin", tier=tier, tenant=f"hog{tier}", **start)
    async with asyncio.timeout(30):
        while run.guest is None or run.guest.demotions == 0:
            await asyncio.sleep(0.002)
    return run


def test_turns_take_slots_and_give_them_back() -> None:
    async def scenario(node: Node, core: Any) -> None:
        runs = [await node.start("steps", 20, tenant=f"t{n % 3}") for n in range(12)]
        for run in runs:
            assert await run.result() == 20 * 19
        assert core.statistics()["foreign_grants"] >= 3

    on_core(scenario)


def test_an_urgent_agent_preempts_a_hog_of_a_lower_tier() -> None:
    async def scenario(node: Node, core: Any) -> None:
        await node.program("spin")
        hog = await hogging(node, 2)
        urgent = await node.start("steps", 30, tier=0)
        assert await urgent.result() == 30 * 29
        assert hog.exit is None
        assert core.statistics()["foreign_preemptions"] >= 1
        assert hog.guest is not None
        hog.guest.kill()
        assert (await hog.exited()).reason == "killed"

    on_core(scenario)


def test_what_was_preempted_goes_on_where_it_was() -> None:
    async def scenario(node: Node, core: Any) -> None:
        slow = [await node.start("busy", 120, tier=2, tenant=f"slow{n}") for n in range(2)]
        for _ in range(10):
            urgent = await node.start("steps", 5, tier=0)
            assert await urgent.result() == 20
            await asyncio.sleep(0.02)
        for run in slow:
            assert await run.result() == "done"
            assert len(run.requests) == 2  # nothing was repeated

    on_core(scenario)


def test_a_hog_beside_others_of_its_host_is_stopped_and_demoted() -> None:
    async def scenario(node: Node, core: Any) -> None:
        others = [await node.start("steps", 300, tier=1) for _ in range(10)]
        hog = await node.start("catch_all", tier=1)
        for run in others:
            assert await run.result() == 300 * 299
        late = await node.start("steps", 10, tier=1)
        assert await late.result() == 90
        assert hog.exit is None
        assert hog.guest is not None
        host = hog.guest.host
        assert host is not None
        assert (host.exiled, host.slot_tier) == (True, 2)
        hog.guest.kill()
        await hog.exited()

    on_core(scenario, core={"quantum_ns": (50 * MS, 200 * MS, 500 * MS, 1000 * MS)})


def test_wasm_guests_and_python_agents_share_the_slots_by_tier() -> None:
    async def scenario(node: Node, core: Any) -> None:
        module = core.load(core_fixture.artifact("script"))
        guest = core.submit(
            module, object(), tenant=0, tier=2, restored=None, fuel=10**15, seed=bytes(16), clock_ns=0,
            admitted=True, replay=False, input=core_fixture.script(("spin", 2**31 - 1), ("spin", 2**31 - 1)),
        )  # fmt: skip
        run = await node.start("steps", 20, tier=1)
        assert await run.result() == 380
        assert core.statistics()["preemptions"] >= 1
        guest.kill()

    on_core(scenario)


def test_a_host_that_dies_with_its_slot_leaves_none_behind() -> None:
    async def scenario(node: Node, core: Any) -> None:
        for _ in range(4):
            bad = await node.start("leave")
            assert (await bad.exited()).reason == "host_died"
        run = await node.start("steps", 10)
        assert await run.result() == 90

    on_core(scenario)


def test_a_stopped_hog_is_unwound() -> None:
    async def scenario(node: Node, core: Any) -> None:
        run = await node.start("tidy", "spin", tier=2)
        async with asyncio.timeout(30):
            while run.guest is None or run.guest.demotions == 0:
                await asyncio.sleep(0.002)
        urgent = await node.start("steps", 5, tier=0)
        await urgent.result()
        run.guest.unwind("cancelled")
        assert (await run.exited()).reason == "unwound"
        assert len(run.requests) == 3

    on_core(scenario)


def test_overruns_leave_no_host_behind() -> None:
    async def scenario(node: Node, core: Any) -> None:
        steady = [await node.start("steps", 1, reply=hold_tools) for _ in range(5)]
        for run in steady:
            await run.until(lambda run=run: bool(run.requests))
        for _ in range(15):
            hog = await node.start("spin")
            other = await node.start("steps", 40)
            assert await other.result() == 40 * 39
            async with asyncio.timeout(30):
                while hog.guest is None or hog.guest.demotions == 0:
                    await asyncio.sleep(0.002)
            hog.guest.kill()
            await hog.exited()
        for run in steady:
            run.answer(1, 0)
            assert await run.result() == 0
        async with asyncio.timeout(20):
            while node.statistics()["hosts"] > 4:
                await asyncio.sleep(0.01)
        assert node.statistics()["hosts_died"] == 0

    on_core(scenario)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():
            await asyncio.sleep(0.002)


def test_a_lent_agent_raises_its_hosts_turn_and_nothing_else() -> None:
    async def scenario(node: Node, core: Any) -> None:
        await node.program("steps")
        hog = await hogging(node, 1)
        low = await node.start("steps", 20, tier=3, tenant="low")
        await asyncio.sleep(0.05)
        assert not low.requests  # it waits for the hog
        assert low.guest is not None and low.guest.lend(0)
        assert await low.result() == 20 * 19
        assert low.guest.ran_ns > 0 and low.guest.tier == 3
        assert hog.exit is None and hog.guest is not None
        other = await node.start("steps", 20, tier=3, tenant="low")
        await asyncio.sleep(0.05)
        assert not other.requests  # of the same host, whose turn is its own again
        hog.guest.kill()
        assert await other.result() == 20 * 19

    on_core(scenario, core={"quantum_ns": (2**36,) * 4})


def test_an_exiled_agent_that_is_lent_a_tier_goes_on() -> None:
    async def scenario(node: Node, core: Any) -> None:
        other = await node.start("steps", 300, tier=2)
        hog = await node.start("catch_all", tier=2)
        assert await other.result() == 300 * 299
        guest = hog.guest
        assert guest is not None and guest.host is not None and guest.host.exiled
        host = guest.host
        module = core.load(core_fixture.artifact("script"))
        spinner = core.submit(
            module, object(), tenant=0, tier=2, restored=None, fuel=10**15, seed=bytes(16), clock_ns=0,
            admitted=True, replay=False, input=core_fixture.script(("spin", 2**31 - 1), ("spin", 2**31 - 1)),
        )  # fmt: skip
        await until(lambda: spinner.scheduler_state == "RUNNING" and not host.granted)
        assert guest.lend(1)
        await until(lambda: host.granted)
        before = host.cpu_ns()
        await until(lambda: host.cpu_ns() > before + MS)
        guest.lend(None)
        await until(lambda: not host.granted)
        spinner.kill()
        guest.kill()
        await hog.exited()

    on_core(scenario, core={"quantum_ns": (2**36,) * 4})
