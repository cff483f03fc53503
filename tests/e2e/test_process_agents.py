"""Agents as programs: real processes under a scripted engine whose slots are always free."""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from process_kit import Hold, ProcessNode, ScriptedProcess, double_tool, process_node, python

from agentrt.backends.base import Request
from agentrt.backends.process.agents.command import Command
from agentrt.backends.process.means import Means
from agentrt.cgroup import shared as shared_tree
from agentrt.cgroup.files import CgroupError
from agentrt.errors import InputError, ModuleError, QueueFullError
from agentrt.sandbox import SandboxError


def on_node(scenario: Callable[[ProcessNode], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Run a scenario on a node of its own; afterwards it has no process."""

    async def run() -> None:
        async with process_node(**limits) as node:
            await asyncio.wait_for(scenario(node), 100)
            pool = node.backend._pool
            assert pool is not None
        assert not pool._running

    asyncio.run(run())


def hold(run: Any, request: Request) -> Any:
    raise Hold


def pid_of(run: ScriptedProcess) -> int:
    assert run.guest is not None and run.guest.process is not None  # type: ignore[attr-defined]
    pid: int = run.guest.process.pid  # type: ignore[attr-defined]
    return pid


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():
            await asyncio.sleep(0.005)


# --- what works ----------------------------------------------------------------------------


def test_a_program_asks_and_is_answered() -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start("double", 21)
        assert await run.result() == 42
        assert run.asked() == [("tool.call", {"tool": "double", "args": {"x": 21}})]
        failed = await node.start("fails", "catch", reply=refuse)
        assert await failed.result() == "refused"
        raised = await node.start("fails", "", reply=refuse)
        assert (await raised.failure())["code"] == "refused"
        wrong = await node.start("raises")
        assert await wrong.failure() == {"code": "agent_raised", "message": "KeyError: 'not there'"}

    def refuse(run: ScriptedProcess, request: Request) -> Any:
        run.answer(request.handle, {"code": "refused", "message": "no"}, failed=True)
        raise Hold

    on_node(scenario)


def test_many_at_once_have_places_and_starts() -> None:
    async def scenario(node: ProcessNode) -> None:
        runs = [await node.start("double", n, tenant=f"t{n % 3}", run_id=f"run_{n}") for n in range(12)]
        most = 0

        async def watch() -> None:
            nonlocal most
            while any(run.exit is None for run in runs):
                most = max(most, node.backend.statistics()["processes"])
                await asyncio.sleep(0.002)

        await watch()
        assert [await run.result() for run in runs] == [2 * n for n in range(12)]
        assert 0 < most <= 4

    on_node(scenario, processes_max=4, reserved=0, starts_max=2)


def test_steps_in_flight_are_answered_in_the_order_of_their_records() -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start("parallel", 4, reply=hold)
        await run.until(lambda: len(run.requests) == 4)
        for handle in (3, 1, 4, 2):
            run.answer(handle, handle * 10)
        assert await run.result() == [[2, 30], [0, 10], [3, 40], [1, 20]]

    on_node(scenario)


def test_a_run_that_is_brought_back_does_the_same() -> None:
    """The answers of an earlier life, in their order, bring another process to the same place, bit for bit."""

    async def scenario(node: ProcessNode) -> None:
        for name, input in (("parallel", 3), ("computed", None)):
            first = await node.start(name, input)
            result = await first.result()
            for known in range(1, len(first.answers) + 1):
                again = await node.start(name, input, history=first.answers[:known])
                assert await again.result() == result
                assert again.asked() == first.asked()
                assert again.answers[:known] == first.answers[:known]

    on_node(scenario)


def test_a_segment_begins_with_the_state() -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start("segments", 1, reply=double_tool)
        await run.until(lambda: len(run.requests) == 2)
        assert run.asked()[1] == ("checkpoint", {"state": 1})
        run.guest.kill()  # as the engine does when it is durable
        assert (await run.exited()).reason == "killed"
        second = await node.start("segments", 1, restored=1)
        assert (await second.result())[0] == 1

    on_node(scenario)


def test_unwinding_runs_the_handlers_last_set_first() -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start("unwinds", ["a", "b", "c"])
        await run.until(lambda: len(run.requests) == 2)
        run.guest.unwind("cancelled")
        exit = await run.exited()
        assert exit.reason == "unwound" and run.unwinding
        assert [args["args"]["what"] for _, args in run.asked()[2:]] == ["c", "b", "a"]
        waiting = await node.start("unwinds", [])
        waiting.guest.unwind("before it began")
        assert (await waiting.exited()).reason == "unwound"
        assert not waiting.requests

    on_node(scenario)


def test_an_answer_that_came_before_the_end_is_given_before_it() -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start("parallel", 2, reply=hold)
        await run.until(lambda: len(run.requests) == 2)
        guest = run.guest
        pid = pid_of(run)
        os.kill(pid, signal.SIGSTOP)  # so that it takes the first answer late
        run.answer(1, 1)
        run.answer(2, 2)
        guest.unwind("cancelled")
        os.kill(pid, signal.SIGCONT)
        exit = await run.exited()
        assert exit.reason in ("unwound", "returned")
        assert exit.reason == "returned"  # both answers were there: it never had to wait again

    on_node(scenario)


def test_a_program_that_never_waits_is_ended_when_it_is_to_unwind() -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start("endless", "it")
        await run.until(lambda: len(run.requests) == 1)
        run.guest.unwind("cancelled")
        exit = await run.exited()
        assert exit.reason == "unwound" and not run.unwinding

    on_node(scenario, unwind_ns=20_000_000)


# --- how it ends ------------------------------------------------------------------------------


def test_a_killed_process_is_brought_back_and_not_for_ever() -> None:
    async def scenario(node: ProcessNode) -> None:
        for kills in range(3):
            run = await node.start("unwinds", [])
            await run.until(lambda run=run: len(run.requests) == 2)
            os.kill(pid_of(run), signal.SIGKILL)
            assert (await run.exited()).reason == ("evicted" if kills < 2 else "host_died")
        assert node.backend.statistics()["kills"] == 3

    on_node(scenario, kills_max=2)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGSYS])
def test_a_crash_of_its_own_is_the_runs_end(number: int) -> None:
    async def scenario(node: ProcessNode) -> None:
        exit = await (await node.start("dies", int(number))).exited()
        assert exit.reason == "trap" and signal.Signals(number).name in exit.message

    on_node(scenario)


def test_an_exit_without_a_word_says_what_was_written() -> None:
    async def scenario(node: ProcessNode) -> None:
        exit = await (await node.start("exits", 3)).exited()
        assert (exit.reason, exit.code, exit.stderr) == ("failed", 3, b"last words\n")
        quiet = await (await node.start("exits", 0)).exited()
        assert (quiet.reason, quiet.output) == ("returned", None)
        flood = await (await node.start("writes", 100)).exited()
        assert flood.reason == "failed" and flood.stderr.endswith(b"the end") and len(flood.stderr) == 4096

    on_node(scenario, output_bytes_kept=4096)


def test_fuel_is_cpu_time_and_bounded() -> None:
    async def scenario(node: ProcessNode) -> None:
        exit = await (await node.start("endless", "", fuel=200_000_000)).exited()
        assert exit.reason == "fuel" and exit.fuel >= 200_000_000

    on_node(scenario)


def test_memory_is_bounded_with_a_leaf_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start(python("greedy", memory_bytes_max=96 << 20), 400)
        exit = await run.exited()
        told = (exit.output or b"").decode() + exit.message
        assert exit.reason in ("failed", "memory") and ("MemoryError" in told or "memory" in told), exit

    on_node(scenario)  # in whatever leaf there is, be it one that bounds no memory
    monkeypatch.setattr(shared_tree, "acquire", no_tree)
    on_node(scenario)


def no_tree(wanted: str) -> Any:
    raise CgroupError("there is none")


@pytest.mark.parametrize(
    "line",
    [
        "nothing",
        '{"ready":1}',
        '{"ask":2,"op":"emit"}',
        '{"ask":0,"op":"emit"}',
        '{"ask":1,"op":"log"}',
        '{"ask":1,"op":"no.such"}',
        '{"wait":[]}',
        '{"wait":[1]}',
        '{"wait":[1,1]}',
        '{"unwinding":true}',
        '{"unwound":true}',
        '{"fail":{"code":"x"}}',
        '{"return":1,"fail":{"code":"a","message":"b"}}',
        '{"ask":0,"op":"random.bytes","request":{"count":65537}}',
        '{"ask":1,"op":"emit"}\n{"wait":[1]}\n{"wait":[1]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_line_ends_the_run_and_not_the_node(line: str) -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start("says", line, reply=hold)
        assert (await run.failure())["code"] == "protocol"
        assert await (await node.start("double", 1)).result() == 2

    on_node(scenario)


def test_a_program_of_another_kind_is_no_agent() -> None:
    def saying(line: str) -> Command:
        code = f"import os, time; os.write(int(os.environ['AGENTRT_SOCKET']), {line.encode()} + b'\\n'); time.sleep(60)"
        return Command((sys.executable, "-c", code))

    async def scenario(node: ProcessNode) -> None:
        other = await node.start(saying('{"ready":2}'))
        assert "ABI 2" in (await other.failure())["message"]
        unready = await node.start(saying('{"wait":[1]}'))
        assert "first line" in (await unready.failure())["message"]

    async def silent(node: ProcessNode) -> None:
        run = await node.start(Command(("sleep", "60")))
        assert "ready" in (await run.failure())["message"]

    on_node(scenario)
    on_node(silent, start_timeout_ns=100_000_000)


def test_a_line_without_an_end_is_not_kept() -> None:
    async def scenario(node: ProcessNode) -> None:
        run = await node.start("says", '{"return":"' + "x" * 20_000)
        assert "bytes" in (await run.failure())["message"]

    on_node(scenario, request_bytes_max=4096, result_bytes_max=4096)


def test_who_asks_and_does_not_listen_is_not_heard_on() -> None:
    """Answers that nobody reads are bounded: the node reads no further questions."""

    async def scenario(node: ProcessNode) -> None:
        ask = '{"ask":0,"op":"random.bytes","request":{"count":65536}}\n'
        run = await node.start("says", ask * 1_000)
        guest: Any = run.guest
        await until(lambda: guest._out and not guest._reading)
        assert len(guest._out) < 4 << 20
        guest.kill()
        assert (await run.exited()).reason == "killed"

    on_node(scenario)


# --- the process ---------------------------------------------------------------------------------


def test_fault_P72_a_process_gets_nothing_of_the_node_and_signals_do_not_come_back(monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET_OF_THE_NODE", "x")
    monkeypatch.setenv("WANTED", "y")

    async def scenario(node: ProcessNode) -> None:
        got: list[int] = []
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, got.append, 1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        read, write = os.pipe()
        os.set_inheritable(write, True)
        try:
            command = python("looks")
            command = msgspec.structs.replace(command, environment=(*command.environment, "WANTED", "NOT_THERE"))
            seen = await (await node.start(command)).result()
            # the listing's own descriptor is not counted; the socket is above the standard three
            assert seen["fds"] == [0, 1, 2, 3]
            allowed = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "TMPDIR"}
            allowed |= {"PYTHONPATH", "PYTHONHASHSEED", "WANTED"}
            assert set(seen["environment"]) <= allowed and "WANTED" in seen["environment"]
            assert (seen["blocked"], seen["leader"], seen["nice"]) == ([], True, 19)
            assert seen["folder"] == seen["home"] and "agentrt-processes-" in seen["folder"]
            assert set(seen["ignored"]) <= {signal.SIGPIPE, signal.SIGXFSZ}  # Python's own
            run = await node.start("unwinds", [])
            await run.until(lambda: len(run.requests) == 2)
            os.killpg(pid_of(run), signal.SIGTERM)
            assert (await run.exited()).reason == "evicted"
            assert not got, "the node has got its child's signal"
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            os.close(read)
            os.close(write)

    on_node(scenario)


def test_fault_P73_a_process_that_is_gone_is_not_signalled_by_its_number() -> None:
    """Whatever is done to it after it was reaped reaches nobody, whoever has its number."""

    async def scenario(node: ProcessNode) -> None:
        run = await node.start("double", 1)
        await run.exited()
        process: Any = run.guest.process  # type: ignore[attr-defined]
        await until(lambda: process._process.ended)
        process._process.pid = os.getpid()  # as if its number were ours by now
        process.kill()
        process.freeze()
        process.send_signal(signal.SIGKILL)
        assert process.cpu_ns() > 0

    on_node(scenario)


def test_what_a_process_has_started_goes_with_it() -> None:
    async def scenario(node: ProcessNode) -> None:
        for how in ("stays", "ends"):
            run = await node.start("children", how)
            if how == "stays":
                await run.until(lambda run=run: len(run.requests) == 2)
                run.guest.kill()
            await run.exited()
            child = run.asked()[0][1]["args"]["pid"]
            await until(lambda child=child: not alive(child))

    on_node(scenario)


def test_a_changed_program_is_not_run(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)

    async def scenario(node: ProcessNode) -> None:
        command = Command((str(script),))
        before = await node.backend.prepare(command.encode())
        assert (await node.backend.prepare(command.encode())).version == before.version
        script.write_text("#!/bin/sh\nexit 1\n")
        assert before.changed() == str(script)
        after = await node.backend.prepare(command.encode())
        assert after.version != before.version
        run = ScriptedProcess("run_test", double_tool, None)
        arguments: dict[str, Any] = {"tenant": "a", "tier": 1, "input": b"null", "fuel": 10**15, "seed": b"s" * 16}
        node.backend.start(before, run, clock_ns=1, admitted=True, replay=False, **arguments)
        exit = await run.exited()
        assert exit.reason == "missing" and str(script) in exit.message

    on_node(scenario)


def test_what_cannot_be_an_agent_is_refused(tmp_path: Path) -> None:
    async def scenario(node: ProcessNode) -> None:
        for module in (b"", b"{}", b'{"command":[]}', b'{"command":[""]}', b'{"command":["a\\u0000b"]}'):
            with pytest.raises(InputError):
                await node.backend.prepare(module)
        for environment in ("AGENTRT_SOCKET=1", "=x"):
            with pytest.raises(InputError):
                await node.backend.prepare(Command(("true",), environment=(environment,)).encode())
        with pytest.raises(ModuleError, match="no program"):
            await node.backend.prepare(Command(("/no/such/program",)).encode())
        with pytest.raises(ModuleError, match="cannot be read"):
            await node.backend.prepare(Command(("true",), files=(str(tmp_path / "gone"),)).encode())

    on_node(scenario)


def test_a_word_of_a_command_may_be_long() -> None:
    """A program's text, as of `python -c`: longer than any file's name."""
    code = (
        "import os, socket; s = socket.socket(fileno=int(os.environ['AGENTRT_SOCKET'])); s.sendall(b'{\"ready\":1}\\n')"
    )
    code += "; s.recv(65536); s.sendall(b'{\"return\":5}\\n')  # " + "x" * 5000

    async def scenario(node: ProcessNode) -> None:
        assert await (await node.start(Command((sys.executable, "-c", code)))).result() == 5

    on_node(scenario)


def test_without_isolation_it_takes_the_operators_word() -> None:
    async def scenario(node: ProcessNode) -> None:
        node.backend._launcher.means = Means(why="this machine has nothing")
        with pytest.raises(SandboxError, match="this machine has nothing"):
            await node.start("double", 1)

    on_node(scenario, confined=True)


# --- places -----------------------------------------------------------------------------------


def test_a_waiting_process_makes_room_for_more_urgent_work() -> None:
    async def scenario(node: ProcessNode) -> None:
        low = [await node.start("unwinds", [], tier=3, run_id=f"run_{n}") for n in range(2)]
        for run in low:
            await run.until(lambda run=run: len(run.requests) == 2)
        urgent = await node.start("double", 4, tier=0, run_id="run_urgent")
        assert await urgent.result() == 8
        assert [run.exit.reason for run in low if run.exit is not None] == ["evicted"]

    on_node(scenario, processes_max=2, reserved=0)


def test_some_places_are_kept_for_urgent_work() -> None:
    async def scenario(node: ProcessNode) -> None:
        low = [await node.start("sleeps", 60, tier=3, run_id=f"run_{n}", reply=double_tool) for n in range(4)]
        await until(lambda: sum(len(run.requests) for run in low) == 2)
        urgent = await node.start("double", 4, tier=0, run_id="run_urgent")
        assert await urgent.result() == 8
        assert sum(len(run.requests) for run in low) == 2 and all(run.exit is None for run in low)

    on_node(scenario, processes_max=3, reserved=1)


def test_a_run_waits_until_there_are_descriptors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for the null device, then none for the socket."""
    failures = {"open": 1, "socketpair": 1}

    def failing(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*given: Any, **named: Any) -> Any:
            if name == "open" and given[0] != os.devnull:
                return real(*given, **named)
            if failures[name]:
                failures[name] -= 1
                raise OSError(errno.EMFILE, "no descriptor left")
            return real(*given, **named)

        monkeypatch.setattr(module, name, call)

    async def scenario(node: ProcessNode) -> None:
        failing(os, "open")
        failing(socket, "socketpair")
        run = await node.start("double", 4)
        assert await run.result() == 8
        assert failures == {"open": 0, "socketpair": 0}

    on_node(scenario)


def test_the_line_of_those_without_a_process_is_bounded() -> None:
    async def scenario(node: ProcessNode) -> None:
        await node.start("double", 1)
        with pytest.raises(QueueFullError):
            await node.start("double", 1)

    on_node(scenario, guests_max=1)


def test_the_interpreter_is_part_of_the_version() -> None:
    async def scenario(node: ProcessNode) -> None:
        program = await node.backend.prepare(python("double").encode())
        assert {path for path, *_ in program.seen} == set(program.command[:2])
        other = await node.backend.prepare(python("hog").encode())
        assert other.version != program.version

    on_node(scenario)
