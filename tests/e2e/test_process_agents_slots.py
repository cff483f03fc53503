"""Agent processes and the core's slots: tiers, and what each policy does to who is in the way."""

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from process_kit import ProcessNode, ScriptedProcess, core_process_node, python

from agentrt import _core

_spec = importlib.util.spec_from_file_location(
    "core_fixture", Path(__file__).resolve().parents[1] / "unit" / "core_fixture.py"
)
assert _spec is not None and _spec.loader is not None
core_fixture = sys.modules.setdefault("core_fixture", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(core_fixture)


def on_core(scenario: Callable[[ProcessNode, Any], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Run a scenario on a backend that shares a core's one slot; afterwards nothing is queued."""

    async def run() -> None:
        made = _core.Core(**core_fixture.core_arguments(workers=1))
        async with core_process_node(made, **limits) as node:
            await asyncio.wait_for(scenario(node, made), 100)
            pool = node.backend._pool
            assert pool is not None
            async with asyncio.timeout(20):
                while any(guest.turn is not None and guest.turn._lease is not None for guest in pool._running.values()):
                    await asyncio.sleep(0.005)
            assert made.statistics()["queued"] == [0, 0, 0, 0]

    asyncio.run(run())


async def until_stopped(run: ScriptedProcess, other: ScriptedProcess) -> None:
    """It has used no CPU while another used some."""
    mine: Any = run.guest
    theirs: Any = other.guest
    async with asyncio.timeout(60):
        while True:
            before, until_ns = mine.cpu_ns(), theirs.cpu_ns() + 20_000_000
            while theirs.cpu_ns() < until_ns:
                await asyncio.sleep(0.002)
            if mine.cpu_ns() == before:
                return


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():
            await asyncio.sleep(0.002)


async def hogging(node: ProcessNode, name: str, input: Any, preempt: str, tier: int = 2) -> ScriptedProcess:
    """A hog that is known to hold the slot and to compute."""
    run = await node.start(python(name, preempt=preempt), input, tier=tier, run_id=f"run_{preempt}")
    guest: Any = run.guest
    await until(lambda: guest.turn is not None and guest.turn.granted and guest.computing and guest.ready)
    if name != "counts":
        await until(lambda: len(run.requests) == 1 and guest.turn.granted and guest.computing)
    return run


def test_a_process_holds_a_slot_only_while_it_computes() -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        waiting = [await node.start("unwinds", [], run_id=f"run_{n}") for n in range(3)]
        for run in waiting:
            await run.until(lambda run=run: len(run.requests) == 2)
        working = [await node.start("double", n, run_id=f"run_w{n}") for n in range(4)]
        assert [await run.result() for run in working] == [0, 2, 4, 6]
        assert core.statistics()["foreign_grants"] >= 7

    on_core(scenario)


def test_freeze_stops_a_hog_and_loses_nothing() -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        hog = await hogging(node, "hog", 1.0, "freeze")
        urgent = await node.start("double", 7, tier=0, run_id="run_urgent")
        assert await urgent.result() == 14
        assert core.statistics()["foreign_preemptions"] >= 1
        assert await hog.result() == 2, "it goes on where it was"
        assert len(hog.requests) == 2
        assert node.backend.statistics()["evictions"] == 0

    on_core(scenario)


def test_discard_ends_the_process_and_the_run_comes_back() -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        hog = await hogging(node, "endless", "", "discard")
        urgent = await node.start("double", 7, tier=0, run_id="run_urgent")
        assert await urgent.result() == 14
        assert (await hog.exited()).reason == "evicted"
        # discarded again and again it would never come further: then it is stopped instead
        again = await hogging(node, "hog", 1.0, "discard")
        urgent = await node.start("double", 8, tier=0, run_id="run_urgent")
        assert await urgent.result() == 16
        assert await again.result() == 2

    on_core(scenario, discards_max=1)


def test_snapshot_hands_over_the_state_in_time() -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        hog = await hogging(node, "counts", 10**9, "snapshot")
        urgent = await node.start("double", 7, tier=0, run_id="run_urgent")
        assert await urgent.result() == 14
        await hog.until(lambda: bool(hog.requests))
        op, request = hog.asked()[0]
        assert op == "checkpoint" and request["state"][0] > 0
        assert node.backend.statistics()["snapshots"] == 1
        hog.guest.kill()  # as the engine does when it is durable
        assert (await hog.exited()).reason == "killed"
        state = request["state"]
        rest = await node.start(python("counts", preempt="snapshot"), state[0] + 3, restored=state)
        assert await rest.result() == [2 * (state[0] + 3), True]

    on_core(scenario, notice_ns=20_000_000_000)


@pytest.mark.parametrize("stalls_max", [1, 0])
def test_who_stands_still_for_lack_of_memory_hands_over_its_state_and_not_for_ever(stalls_max: int) -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        hog = await hogging(node, "counts", 10**9, "snapshot")
        guest: Any = hog.guest
        process = guest.process._process
        process.stalled = True  # as the watch of its leaf finds
        process._launcher._on_stalled(process)
        if stalls_max:
            await hog.until(lambda: bool(hog.requests))
            op, request = hog.asked()[0]
            assert op == "checkpoint" and request["state"][0] > 0
            guest.kill()
        assert (await hog.exited()).reason == ("killed" if stalls_max else "memory")

    on_core(scenario, stalls_max=stalls_max)


def test_a_snapshot_that_cannot_beready_is_refused_and_the_process_goes_on() -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        hog = await hogging(node, "counts", 10**9, "snapshot")
        hog.snapshots = False
        urgent = await node.start("double", 7, tier=0, run_id="run_urgent")
        assert await urgent.result() == 14
        await asyncio.sleep(0)
        assert not hog.requests and hog.exit is None
        guest: Any = hog.guest
        before = guest.cpu_ns()
        await until(lambda: guest.cpu_ns() > before + 1_000_000)
        hog.guest.kill()
        await hog.exited()

    on_core(scenario, notice_ns=20_000_000_000)


def test_who_does_not_heed_the_notice_is_stopped() -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        hog = await hogging(node, "endless", "", "snapshot")
        other = await hogging(node, "endless", "", "freeze", tier=1)  # keeps the slot
        await until_stopped(hog, other)
        for run in (hog, other):
            run.guest.kill()
            assert (await run.exited()).reason == "killed", "a stopped process can be ended"

    on_core(scenario, notice_ns=1_000_000)


def test_who_sleeps_in_its_slot_loses_it_and_gets_it_back() -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        sleeper = await node.start("sleeps", 2, tier=1, run_id="run_sleeper")
        guest: Any = sleeper.guest
        await until(lambda: guest.afloat)
        low = await node.start("double", 7, tier=3, run_id="run_low")
        assert await low.result() == 14, "a lower tier runs meanwhile"
        assert await sleeper.result() == 4

    on_core(scenario)


def test_a_lent_tier_holds_for_the_turn() -> None:
    async def scenario(node: ProcessNode, core: Any) -> None:
        low = await hogging(node, "hog", 0.3, "freeze", tier=3)
        hog = await hogging(node, "endless", "", "freeze", tier=1)
        assert low.guest.lend(0)
        assert await low.result() == 2, "it goes before the hog that would be ahead of it"
        hog.guest.kill()
        await hog.exited()

    on_core(scenario)


def test_signals_of_others_change_nothing() -> None:
    """SIGSTOP and SIGCONT from outside, at any time: the run comes to its end."""

    async def scenario(node: ProcessNode, core: Any) -> None:
        run = await hogging(node, "hog", 0.3, "freeze")
        guest: Any = run.guest
        pid = guest.process.pid
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGUSR1, signal.SIGSTOP, signal.SIGCONT):
            os.kill(pid, number)
            await asyncio.sleep(0.01)
        assert await run.result() == 2

    on_core(scenario)
