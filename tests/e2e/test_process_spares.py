"""Programs that are started ahead of their runs, as profiles say: real processes under a scripted engine."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from process_kit import ProcessNode, python
from runtime_tools import double
from test_process_agents import alive, on_node, pid_of, until
from test_process_agents_slots import on_core

from agentrt import Runtime, _core, load_config
from agentrt.backends.process.agents import spares as module
from agentrt.backends.process.agents.command import Command, ProcessProgram
from agentrt.backends.process.agents.spares import Spare


def ready(node: ProcessNode, program: ProcessProgram) -> list[Spare]:
    pool = node.backend._pool
    assert pool is not None
    return [*pool.spares._there.get(id(program), ())]


def stands_still(spare: Spare) -> bool:
    """As the kernel says: its leaf is frozen, or it is stopped."""
    process = spare.process._process
    assert process is not None
    if process.leaf is not None:
        return "frozen 1" in Path(process.leaf.path, "cgroup.events").read_text()
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def prepared(node: ProcessNode, command: Command | str) -> ProcessProgram:
    return await node.backend.prepare((python(command) if isinstance(command, str) else command).encode())


async def warm(node: ProcessNode, program: ProcessProgram, count: int) -> list[Spare]:
    node.backend.prewarm([(program, count)])
    await until(lambda: len(ready(node, program)) == count)
    return ready(node, program)


def test_runs_get_processes_that_are_there_and_others_come_after_them() -> None:
    async def scenario(node: ProcessNode) -> None:
        program = await prepared(node, "double")
        there = await warm(node, program, 2)
        pids = [spare.process.pid for spare in there]
        assert node.backend.statistics()["spares"] == 2
        for number, pid in enumerate(pids):
            run = await node.start(program, number, tenant=f"t{number}", tier=number, run_id=f"run_{number}")
            await until(lambda run=run: run.guest.process is not None)  # type: ignore[attr-defined,misc]
            assert pid_of(run) == pid
            assert await run.result() == 2 * number
        await until(lambda: len(ready(node, program)) == 2)
        assert not {spare.process.pid for spare in ready(node, program)} & set(pids)
        assert node.backend.statistics()["started"] == 2

    on_node(scenario)


def test_one_that_waits_for_its_run_computes_nothing_and_is_counted_as_the_runs_afterwards() -> None:
    async def scenario(node: ProcessNode) -> None:
        program = await prepared(node, Command((sys.executable, "-c", BUSY)))
        (spare,) = await warm(node, program, 1)
        await until(lambda: stands_still(spare))
        used = spare.cpu_ns()
        for _ in range(10):
            await asyncio.sleep(0)
            assert spare.cpu_ns() == used
        run = await node.start(program, None)
        assert await run.result() == "run_test"
        assert run.guest.ran_ns >= used  # type: ignore[union-attr]

    on_node(scenario)


#: Says that it is ready and the first half of a question, and computes on another thread until it is told to start.
BUSY = """
import json, os, socket, threading
stream = socket.socket(fileno=int(os.environ["AGENTRT_SOCKET"]))
lines = stream.makefile("r")
over = []
def compute():
    while not over:
        pass
threading.Thread(target=compute).start()
stream.sendall(b'{"ready":1}\\n{"ask":0,"op"')
start = json.loads(next(lines))["start"]
over.append(1)
next(lines)
stream.sendall(b':"clock.now"}\\n')
assert json.loads(next(lines))["value"]
stream.sendall(json.dumps({"return": start["run_id"]}).encode() + b"\\n")
"""


def test_no_others_are_kept_than_are_wanted_now() -> None:
    """Nor those of a registration that is not the run's, whose environment may be another."""

    async def scenario(node: ProcessNode) -> None:
        old, new = await prepared(node, "double"), await prepared(node, "double")
        assert old.version == new.version
        (spare,) = await warm(node, old, 1)
        run = await node.start(new, 4)
        assert await run.result() == 8 and ready(node, old) == [spare]
        (other,) = await warm(node, new, 1)
        await until(lambda: not alive(spare.process.pid))
        assert ready(node, old) == [] and ready(node, new) == [other]
        node.backend.prewarm([(old, 0), (new, 0)])
        await until(lambda: not alive(other.process.pid))
        assert node.backend.statistics()["spares"] == 0

    on_node(scenario)


def test_a_changed_program_is_not_kept_nor_run(tmp_path: Path) -> None:
    async def scenario(node: ProcessNode) -> None:
        path = tmp_path / "agent.py"
        source = Path(__file__).with_name("process_agents.py").read_text()
        path.write_text(source)
        command = Command((sys.executable, str(path), "double"), environment=python("double").environment)
        program = await prepared(node, command)
        await warm(node, program, 1)
        path.write_text(source + "\n")
        run = await node.start(program, 1)
        assert (await run.exited()).reason == "missing"
        again = await prepared(node, command)
        await warm(node, again, 1)
        assert await (await node.start(again, 3)).result() == 6

    on_node(scenario)


def test_they_take_no_place_that_a_run_needs() -> None:
    async def scenario(node: ProcessNode) -> None:
        double, waits = await prepared(node, "double"), await prepared(node, "computed")
        node.backend.prewarm([(double, 50)])
        await until(lambda: len(ready(node, double)) == 3)  # four places, of which one is kept
        pool = node.backend._pool
        assert pool is not None
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(pool.spares) == 3
        most = 0
        runs = [await node.start(waits, None, run_id=f"run_{number}", tier=0) for number in range(6)]
        while any(run.exit is None for run in runs):
            most = max(most, len(pool._running))
            await asyncio.sleep(0.002)
        assert 0 < most <= 4
        await until(lambda: len(ready(node, double)) == 3)

    on_node(scenario, processes_max=4, reserved=1)


@pytest.mark.parametrize("says", ["exits", "nothing", "nonsense", "long", "stands"])
def test_programs_that_do_not_come_up_are_not_started_for_ever(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.001)
    code = {
        "exits": "raise SystemExit(3)",
        "nothing": "import time; time.sleep(100)",
        "nonsense": "s.sendall(b'nonsense\\n')",
        "long": "s.sendall(b'x' * 5000)",
        "stands": "s.sendall(b'{\"ready\":2}\\n')",
    }[says]
    opening = "import os, socket\ns = socket.socket(fileno=int(os.environ['AGENTRT_SOCKET']))\n"

    async def scenario(node: ProcessNode) -> None:
        program = await prepared(node, Command((sys.executable, "-c", opening + code + "\ninput()")))
        pool = node.backend._pool
        assert pool is not None
        node.backend.prewarm([(program, 2)])
        await until(lambda: pool.spares._failures.get(id(program)) == module._FAILURES_MAX and not len(pool.spares))
        started = pool.spares._number
        pool.spares.fill()
        assert pool.spares._number == started == module._FAILURES_MAX
        node.backend.prewarm([(program, 2)])  # the next profile tries again
        assert pool.spares._number == started + 1

    on_node(scenario, start_timeout_ns=100_000_000 if says == "nothing" else 30_000_000_000)


def test_one_that_others_have_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.001)

    async def scenario(node: ProcessNode) -> None:
        program = await prepared(node, "double")
        (spare,) = await warm(node, program, 1)
        os.kill(spare.process.pid, 9)
        await until(lambda: ready(node, program) not in ([], [spare]))
        assert await (await node.start(program, 1)).result() == 2

    on_node(scenario)


def test_they_boot_in_slots_of_the_lowest_tier_and_give_them_back() -> None:
    async def scenario(node: ProcessNode, core: _core.Core) -> None:
        program = await prepared(node, "double")
        (spare,) = await warm(node, program, 1)
        assert spare.turn is not None and spare.turn.idle
        computes = await node.start("endless", None, tier=2)
        await until(lambda: computes.guest is not None and computes.guest.ran_ns > 0)
        urgent = await node.start(program, 5, tier=0)
        assert await urgent.result() == 10
        computes.guest.kill()  # type: ignore[union-attr]
        await computes.exited()

    on_core(scenario)


def test_a_profile_keeps_programs_ready_over_registrations_until_it_is_rolled_back(tmp_path: Path) -> None:
    (tmp_path / "flow.toml").write_text("[profiles.rush]\nprewarm = { doubles = 2 }\n")
    settings = {"programs.confined": False, "flow.file": str(tmp_path / "flow.toml")}

    async def main() -> None:
        made = load_config(env={}, arguments=settings)
        async with Runtime(store=tmp_path / "store", config=made, tools=[double]) as runtime:

            async def spares(count: int) -> None:
                async with asyncio.timeout(60):
                    while (await runtime.statistics()).backends["process"]["spares"] != count:
                        await asyncio.sleep(0.01)

            await runtime.register("doubles", python("double"))
            await spares(0)
            await runtime.apply_profile("rush")
            await spares(2)
            run = await runtime.submit("doubles", 4)
            assert await run.result() == 8
            await spares(2)  # what was taken is replaced
            await runtime.register("doubles", python("computed"))  # of the other version none is left
            assert len(await (await runtime.submit("doubles")).result()) == 5
            await spares(2)
            await runtime.roll_back_profile()
            await spares(0)

    asyncio.run(main())
