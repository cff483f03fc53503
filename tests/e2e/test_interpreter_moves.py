"""Interpreters suspended in a loop of a script go on elsewhere: in another process after a kill, and then, by export
and import, on a node whose machine code is for other CPUs. The script asks for nothing: there is only the loop."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from frames_kit import counters, killed_node, loop, runtime, until

from agentrt import RunState, _core
from agentrt.backends import wasi
from agentrt.backends.cache import ArtifactCache
from agentrt.capture.instrument import Preempt, instrument
from agentrt.config import load_config
from agentrt.engine.info import RunResult
from agentrt.sizing import core_parameters, engine_limits

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from interpreters import INTERPRETERS, interpreter

WORKS = (Path(__file__).parents[1] / "guests" / "works.wasm").read_bytes()
SCRIPTS = {
    "quickjs": "let n = 1; for (let i = 0; i < %d; i++) n = (n * 31 + i) %% 1000003; print(JSON.stringify(n))",
    "cpython": "n = 1\nfor i in range(%d):\n    n = (n * 31 + i) %% 1000003\nprint(n)",
}
ROUNDS = 20_000_000
BOUND = {"wasm.replay_fuel_max": 50_000_000}


def expected() -> int:
    n = 1
    for i in range(ROUNDS):
        n = (n * 31 + i) % 1000003
    return n


def compile_for_any_cpu(folder: Path, agent: bytes) -> None:
    """Fill a node's cache of machine code with what a CPU without any extension would get."""
    code, _ = wasi.unpack(agent)
    parameters = core_parameters(load_config(env={}))
    here = _core.compile_module(parameters["engine_lib"], code, **engine_limits(parameters))
    there = _core.compile_module(parameters["engine_lib"], code, any_cpu=True, **engine_limits(parameters))
    assert here != there
    core = _core.Core(**(parameters | {"guests_max": 2, "stacks_max": 2, "workers": 1}))
    try:
        key = core.artifact_key()
    finally:
        core.close()
    ArtifactCache(folder / "cache", key, 1 << 30).put(hashlib.sha256(code).hexdigest(), there)


def moves(tmp_path: Path, agent: bytes, data: Any, bound: dict[str, Any]) -> RunResult:
    """How a run ends that was killed with its node, went on in another, and then left for another one, each time in the
    middle."""
    run_id = killed_node(tmp_path / "a", agent, data, json.dumps(bound), "2")
    compile_for_any_cpu(tmp_path / "b", agent)
    ends: list[RunResult] = []

    async def main() -> None:
        async with runtime(tmp_path / "a", **bound) as here, runtime(tmp_path / "b", **bound) as there:
            await here.register("works", agent)
            await there.register("works", agent)
            assert len([*(tmp_path / "b" / "cache").glob("*.artifact")]) == 1  # it was not compiled again
            await until(lambda: counters(here).used == 1 and counters(here).taken > 0, 100)
            await here.export_run(run_id, tmp_path / "file")
            (come,) = await there.import_run(tmp_path / "file")
            end = await come.wait()
            assert end.state is RunState.SUCCEEDED, end.error
            assert counters(there).used == 1 and counters(there).refused == counters(here).refused == 0
            ends.append(end)

    loop(main, 600)
    return ends[0]


def test_a_guest_goes_on_where_the_machine_code_is_for_another_cpu(tmp_path: Path) -> None:
    data = {"work": "loop", "size": 30_000_000, "every": 0}
    agent = instrument(WORKS, Preempt.ANYWHERE)
    end = moves(tmp_path, agent, data, {"wasm.replay_fuel_max": 10_000_000})

    async def alone() -> None:
        async with runtime(tmp_path / "alone", **{"wasm.replay_fuel_max": 0}) as made:
            await made.register("works", agent)
            other = await (await made.submit("works", data)).wait()
            assert (other.result, other.cost.fuel) == (end.result, end.cost.fuel)

    loop(alone)


@pytest.mark.sweep
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ["quickjs", "cpython"])
def test_an_interpreter_goes_on_in_the_middle_of_a_loop_of_its_script(name: str, tmp_path: Path) -> None:
    of = INTERPRETERS[name]
    code = instrument(interpreter(name), Preempt.ANYWHERE)
    agent = wasi.pack(code, args=(*of.arguments, SCRIPTS[name] % ROUNDS), entry=of.entry)
    end = moves(tmp_path, agent, {}, BOUND)
    assert json.loads(end.result or b"") == expected()
