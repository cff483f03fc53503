"""Unwinding through the binding: what is reported when, and what a guest shows of itself meanwhile."""

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from core_fixture import FUEL, LIBRARY, LIMITS, Control, Run, artifact, control, results, script

from agentrt import _core, errors

ROOT = Path(__file__).resolve().parents[2]

CALL = ("call", 1, 0x10000, 24, 0x100, 64)
SUBMIT = ("submit", 1, 0, 8)
LOG = ("submit", 13, 0, 8)
SPIN = ("spin", 200_000_000)  # longer than this thread is ever kept waiting


def parts(program: list[tuple[Any, ...]], handlers: list[tuple[Any, ...]]) -> bytes:
    """Input of the guest ``unwinder``: what the program does, and what its handlers do."""
    return script(*program) + struct.pack("<6i", 254, 0, 0, 0, 0, 0) + script(*handlers)


class Told(Control):
    """Keeps the events of its one run in order, as a list of (kind, handles asked for, detail), and what is asked."""

    def __init__(self, **over: Any) -> None:
        super().__init__(**over)
        self.story: list[tuple[str, list[int], Any]] = []
        self.asked: list[Any] = []

    def take(self) -> int:
        events = self.core.drain()
        for _, kind, requests, detail in events:
            self.story.append((kind, [request.handle for request in requests], detail))
            self.asked += [request.payload for request in requests if request.handle]
        return len(events)

    def until_waits_for(self, *handles: int) -> None:
        self.until(lambda: bool(self.story) and self.story[-1][2] == handles)

    def until_exit(self) -> Any:
        self.until(lambda: bool(self.story) and self.story[-1][0] == "exit")
        return self.story[-1][2]


@contextmanager
def told(**over: Any) -> Iterator[Told]:
    made = Told(**over)
    try:
        yield made
    finally:
        made.core.close()


def test_the_program_is_silent_then_its_handlers_speak() -> None:
    with told() as made:
        data = parts([CALL, CALL], [CALL, ("peek", 0x100), CALL, ("return", 5)])
        run = made.submit("unwinder", data)
        made.until_waits_for(1)
        run.reply(1, b"one")
        made.until_waits_for(2)
        run.guest.unwind("cancelled")
        run.guest.unwind("again", unwind_ns=1)
        made.until_waits_for(3)
        run.reply(2, b"too late")
        run.reply(3, b"abcd")
        made.until_waits_for(4)
        run.reply(4)
        exit = made.until_exit()
        asked = [(kind, handles) for kind, handles, _ in made.story if kind != "syscalls" or handles]
        assert asked == [
            ("syscalls", [1]),
            ("syscalls", [2]),
            ("unwinding", []),
            ("syscalls", [3]),
            ("syscalls", [4]),
            ("exit", []),
        ]
        assert (exit.reason, exit.code, exit.message) == ("unwound", 5, "")
        assert results(exit.output)[1:3] == [4, 0x64636261]
        run.guest.unwind("ended")
        made.audit()


def test_requests_on_the_way_to_the_wait_are_not_reported_but_log_lines_are() -> None:
    with told() as made:
        program = [SUBMIT, SPIN, LOG, SUBMIT, SUBMIT, CALL]
        run = made.submit("unwinder", parts(program, [LOG, SUBMIT, CALL]))
        made.until(lambda: bool(made.story))  # its first; it computes now
        run.guest.unwind("cancelled", unwind_ns=60_000_000_000)
        made.until_waits_for(6)
        kinds = [kind for kind, _, _ in made.story]
        at = kinds.index("unwinding")
        assert [handle for _, handles, _ in made.story[:at] for handle in handles] == [1, 0]
        assert [handle for _, handles, _ in made.story[at:] for handle in handles] == [0, 5, 6]
        run.reply(6)
        assert made.until_exit().reason == "unwound"
        made.audit()


def test_without_handlers_or_a_first_instruction_there_is_only_the_exit() -> None:
    with control(workers=1) as c:
        run = c.submit("script", script(CALL))
        c.until(lambda: run.waits == [(1,)])
        run.guest.unwind("cancelled")
        c.until(lambda: run.exit is not None)
        assert run.exit is not None and run.exit[:2] == ("unwound", 0) and run.exit[3] == ""
        hog = c.submit("asker", tier=0)
        c.until(lambda: bool(hog.requests))
        queued = c.submit("unwinder", parts([("unreachable",)], [("unreachable",)]))
        assert queued.guest.scheduler_state == "QUEUED"
        queued.guest.unwind("cancelled")
        c.until(lambda: queued.exit is not None)
        assert queued.exit is not None and queued.exit[0] == "unwound" and queued.exit[7] == 0
        assert queued.guest.scheduler_state is None
        assert hog.guest.scheduler_state == "RUNNING"
        hog.guest.kill()
        c.until(lambda: hog.exit is not None)
        c.audit()


def test_time_is_bounded() -> None:
    with control() as c:
        hog = c.submit("unwind_hog")
        c.until(lambda: hog.guest.scheduler_state == "RUNNING", events=False)
        hog.guest.unwind("cancelled", unwind_ns=3_000_000)
        slow = c.submit("unwinder", parts([CALL], [("spin", -1), ("spin", -1), ("spin", -1)]))
        c.until(lambda: slow.waits == [(1,)])
        slow.guest.unwind("cancelled", unwind_ns=3_000_000)
        c.until(lambda: hog.exit is not None and slow.exit is not None)
        assert hog.exit is not None and slow.exit is not None
        assert hog.exit[0] == slow.exit[0] == "unwound"
        assert "its handlers did not run" in hog.exit[3]
        assert "handlers had not ended" in slow.exit[3]
        c.audit()


def live_run(c: Control, data: bytes, answers: int) -> tuple[list[Any], Any]:
    """A run that is told after so many answers: what its handlers asked for, and its exit."""
    run = c.submit("unwinder", data)
    for handle in range(1, answers + 1):
        c.until(lambda handle=handle: (handle,) in run.waits)  # type: ignore[misc]
        run.reply(handle, b"x" * handle)
    run.guest.unwind("cancelled")
    return finished(c, run)


def finished(c: Control, run: Run) -> tuple[list[Any], Any]:
    answered = [len(run.waits)]
    while run.exit is None:
        c.until(lambda: run.exit is not None or len(run.waits) > answered[-1])
        if run.exit is None:
            answered.append(len(run.waits))
            run.reply(run.waits[-1][0], b"undone")
    return run.requests, run.exit


@pytest.mark.parametrize("answers", [1, 2, 3])
def test_replay_comes_to_the_same_place_and_end(answers: int) -> None:
    """The live run is told wherever it is on its way from the last answer; replay gives the same answers and tells."""
    data = parts(
        [CALL, ("spin", 2_000_000), CALL, ("spin", 1000), CALL, SUBMIT, CALL],
        [("peek", 0x100), CALL, ("spin", 9), CALL],
    )
    with control() as c:
        _, live = live_run(c, data, answers)
        run = c.submit("unwinder", data, replay=True)
        for handle in range(1, answers + 1):
            c.until(lambda handle=handle: (handle,) in run.waits)  # type: ignore[misc]
            run.reply(handle, b"x" * handle)
        run.guest.unwind("cancelled")
        first = answers + 2 + (answers == 3)
        c.until(lambda: (first,) in run.waits)
        run.reply(first, b"undone")
        c.until(lambda: (first + 1,) in run.waits)
        run.guest.go_live()
        run.reply(first + 1, b"undone")
        c.until(lambda: run.exit is not None)
        assert run.exit is not None
        assert live[0] == run.exit[0] == "unwound"
        assert live[1:5] == run.exit[1:5]  # code, output, message, fuel
        c.audit()


@pytest.mark.parametrize(
    ("last", "reason", "fuel"), [(("unreachable",), "trap", FUEL), (SPIN, "fuel", 1_000_000)], ids=["trap", "fuel"]
)
def test_who_is_cut_short_says_where_it_waited_last_and_can_be_brought_back_to_there(
    last: tuple[Any, ...], reason: str, fuel: int
) -> None:
    data = parts([CALL, CALL, SUBMIT, last], [CALL])
    with control() as c:
        run = c.submit("unwinder", data, fuel=fuel)
        for handle in (1, 2):
            c.until(lambda handle=handle: (handle,) in run.waits)  # type: ignore[misc]
            run.reply(handle, b"x")
        c.until(lambda: run.exit is not None)
        assert run.exit is not None and run.exit[0] == reason
        assert (run.exit.answers, run.exit.steps) == (1, 3)
        again = c.submit("unwinder", data, fuel=fuel, replay=True)
        c.until(lambda: (1,) in again.waits)
        again.reply(1, b"x")
        c.until(lambda: (2,) in again.waits)
        again.guest.unwind("ended", 1)  # one more step was made than it comes to
        again.guest.go_live()
        c.until(lambda: (4,) in again.waits)
        again.reply(4, b"undone")
        c.until(lambda: again.exit is not None)
        assert again.exit is not None and again.exit[0] == "unwound"
        c.audit()


def test_who_ended_by_itself_or_never_waited_is_not_brought_back() -> None:
    with control() as c:
        for program in ([("unreachable",)], [CALL, ("return", 0)], [CALL, ("return", 3)]):
            run = c.submit("unwinder", parts(program, [CALL]), answer=lambda handle, op, data: (0, b"x"))
            c.until(lambda run=run: run.exit is not None)  # type: ignore[misc]
            assert run.exit is not None and (run.exit.answers, run.exit.steps) == (-1, -1)
        run = c.submit("unwinder", parts([CALL], [CALL]))
        with pytest.raises(errors.InputError):
            run.guest.unwind("ended", -1)
        run.guest.kill()
        c.until(lambda: run.exit is not None)
        assert run.exit is not None and run.exit.answers == -1
        c.audit()


def test_handlers_of_another_type_are_refused() -> None:
    with control() as c:
        for name in ("unwind_parameter", "unwind_i64", "unwind_global"):
            with pytest.raises(errors.NoEntryError, match="agentrt_unwind must take nothing"):
                c.core.load(artifact(name))


def test_unwind_wants_a_reason() -> None:
    with control() as c:
        run = c.submit("script", script(CALL))
        with pytest.raises(TypeError):
            run.guest.unwind(None)
        run.guest.kill()
        c.until(lambda: run.exit is not None)


def calls(made: Told) -> list[tuple[str, Any]]:
    return [(call["tool"], call["args"]) for call in map(json.loads, made.asked)]


def test_the_example_cancels_what_it_booked_the_last_first() -> None:
    code = (ROOT / "examples" / "guests" / "trip.wasm").read_bytes()
    with told() as made:
        made.modules["trip"] = made.core.load(_core.compile_module(LIBRARY, code, **LIMITS))
        trip = json.dumps({"order": "o", "parts": ["flight", "hotel", "car"]}).encode()
        run = made.submit("trip", trip)
        for handle in (1, 2, 3):
            made.until_waits_for(handle)
            run.reply(handle, b"null")
        output = made.until_exit().output
        assert json.loads(output) == {"order": "o", "booked": 3}
        made.story.clear()
        made.asked.clear()
        run = made.submit("trip", trip)
        made.until_waits_for(1)
        run.reply(1, b"null")
        made.until_waits_for(2)
        run.guest.unwind("cancelled")
        made.until_waits_for(3)
        run.reply(3, b"null")
        made.until_waits_for(4)
        run.reply(4, b'{"code":"tool_failed","message":"no"}', status=1)
        exit = made.until_exit()
        assert (exit.reason, exit.code) == ("unwound", 1)
        assert calls(made) == [
            ("trip_book", {"order": "o", "part": "flight"}),
            ("trip_book", {"order": "o", "part": "hotel"}),
            ("trip_cancel", {"order": "o", "part": "hotel"}),
            ("trip_cancel", {"order": "o", "part": "flight"}),
        ]


def test_the_manuals_example_builds_and_undoes(tmp_path: Path) -> None:
    if shutil.which("clang") is None or shutil.which("wasm-ld") is None:
        pytest.skip("needs clang and wasm-ld")
    manual = (ROOT / "docs" / "guest-abi.md").read_text()
    text = re.search(r"^```c seat\.c\n(.*?)^```", manual, re.DOTALL | re.MULTILINE)
    assert text is not None
    (tmp_path / "seat.c").write_text(text[1])
    command = (
        "clang --target=wasm32 -O2 -ffreestanding -nostdlib -Wl,--no-entry -Wl,--stack-first -Wall -Wextra -Werror"
    )
    subprocess.run([*command.split(), "-I", ROOT / "csrc", "seat.c", "-o", "seat.wasm"], cwd=tmp_path, check=True)
    code = (tmp_path / "seat.wasm").read_bytes()
    with told() as made:
        made.modules["seat"] = made.core.load(_core.compile_module(LIBRARY, code, **LIMITS))
        run = made.submit("seat")
        made.until_waits_for(1)
        run.reply(1, b"null")
        made.until_waits_for(2)
        run.guest.unwind("cancelled")
        made.until_waits_for(3)
        run.reply(3, b"null")
        exit = made.until_exit()
        assert (exit.reason, exit.code) == ("unwound", 0)
        assert [tool for tool, _ in calls(made)] == ["seat_reserve", "seat_pay", "seat_release"]
