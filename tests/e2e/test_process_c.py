"""Agents in C: the header against the node's side of the process ABI."""

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from process_kit import Hold, ProcessNode, ScriptedProcess, double_tool, process_node

from agentrt.backends.base import Request
from agentrt.backends.process.agents.command import Command
from agentrt.backends.process.settings import ProcessConfig

ROOT = Path(__file__).parents[2]
SOURCES = (Path(__file__).with_name("process_agent.c"), ROOT / "examples" / "processes" / "primes.c")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs, which the sanitizers watch."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("programs")
    flags = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-I", str(ROOT / "csrc"))
    for source in SOURCES:
        subprocess.run(
            [compiler, *flags, "-fsanitize=address,undefined", "-o", folder / source.stem, source], check=True
        )
    return folder


def on_node(scenario: Callable[[ProcessNode], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        # the sanitizers' shadow is data that nobody uses
        config = ProcessConfig(memory_high_bytes=1 << 45, memory_max_bytes=1 << 46)
        async with process_node(config=config) as node:
            await asyncio.wait_for(scenario(node), 100)

    asyncio.run(run())


def test_it_asks_waits_and_gives_up_the_same_in_every_life(programs: Path) -> None:
    command = Command((str(programs / "process_agent"), "parallel"))

    async def scenario(node: ProcessNode) -> None:
        run = await node.start(command)
        result = await run.result()
        assert [each for each in result if isinstance(each, list)] == [[1, 0], [2, 2], [3, 4]]
        assert run.abandoned == [4]
        assert run.logs == [{"level": "info", "message": 'a "line"\twith\\ what JSON escapes'}]
        for known in range(1, 4):
            answers = [answer for answer in run.answers if answer[0] != 4]
            again = await node.start(command, history=answers[:known])
            assert await again.result() == result
            assert again.asked() == run.asked()

    on_node(scenario)


def test_texts_of_any_length_go_both_ways(programs: Path) -> None:
    command = Command((str(programs / "process_agent"), "big"))

    def long(run: ScriptedProcess, request: Request) -> Any:
        return msgspec.json.decode(request.payload)

    async def scenario(node: ProcessNode) -> None:
        for size in (0, 4_000, 70_000, 900_000):
            given = {"tool": "double", "args": {"x": "x" * size}}
            length = len(msgspec.json.encode(given))
            run = await node.start(command, given, reply=long)  # type: ignore[arg-type]
            assert await run.result() == [length, length]

    on_node(scenario)


def test_a_failed_step_is_the_runs_error_unless_it_is_caught(programs: Path) -> None:
    def refuse(run: ScriptedProcess, request: Request) -> Any:
        run.answer(request.handle, {"code": "refused", "message": '"ok":true'}, failed=True)
        raise Hold

    async def scenario(node: ProcessNode) -> None:
        run = await node.start(Command((str(programs / "process_agent"), "parallel")), reply=refuse)  # type: ignore[arg-type]
        assert await run.failure() == {"code": "refused", "message": '"ok":true'}

    on_node(scenario)


def test_segments_and_unwinding(programs: Path) -> None:
    async def scenario(node: ProcessNode) -> None:
        segments = Command((str(programs / "process_agent"), "segments"))
        run = await node.start(segments, reply=hold)  # type: ignore[arg-type]
        await run.until(lambda: bool(run.requests))
        assert run.asked() == [("checkpoint", {"state": {"restored": True}})]
        run.guest.kill()
        await run.exited()
        again = await node.start(segments, {"input": 1}, restored={"restored": True})
        assert await again.result() == {"restored": True}

        run = await node.start(Command((str(programs / "process_agent"), "unwinds")))
        await run.until(lambda: bool(run.requests))
        run.guest.unwind('"cancelled"')
        assert (await run.exited()).reason == "unwound" and run.unwinding
        assert run.asked()[1][1]["args"] == {"what": '"cancelled"'}

    def hold(run: ScriptedProcess, request: Request) -> Any:
        raise Hold

    on_node(scenario)


def test_the_example_counts_primes(programs: Path) -> None:
    async def scenario(node: ProcessNode) -> None:
        command = Command((str(programs / "primes"),), preempt="snapshot")
        run = await node.start(command, 1000, reply=double_tool)  # type: ignore[arg-type]
        assert await run.result() == {"primes": 168, "double": 336, "restored": False}
        rest = await node.start(command, 1000, restored=[500, 95])
        assert await rest.result() == {"primes": 168, "double": 336, "restored": True}

    on_node(scenario)
