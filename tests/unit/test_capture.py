"""Guests captured and gone on with: equal in everything to guests that nobody touched."""

import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wasmtime
from capture_kit import Driver, artifact, opened, state, work
from core_fixture import LIBRARY, LIMITS
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt import _core
from agentrt.backends.base import Exit
from agentrt.capture.instrument import Preempt
from agentrt.errors import FrameError

WORKS = (("sort", 60, 23), ("regex", 40, 29), ("json", 2, 61), ("loop", 150, 11))
#: The same, all computing: from thousands of rounds of loops on.
COMPUTES = (("sort", 300), ("regex", 30), ("json", 1), ("loop", 300))


@pytest.fixture
def driver() -> Iterator[Callable[[str, Preempt], Driver]]:
    """Makes cores with a guest, closed afterwards."""
    made: list[Driver] = []

    def make(name: str, preempt: Preempt) -> Driver:
        made.append(Driver(artifact(name, preempt)))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[[str, Preempt], Driver]


def outcome(exit: Exit | None) -> tuple[Any, ...]:
    assert exit is not None
    return exit.reason, exit.output, exit.stdout, exit.fuel


def undisturbed(driver: Driver, data: bytes) -> tuple[Any, ...]:
    """How a guest ends that is left alone."""
    driver.start(data)
    while (stop := driver.next()).kind == "waiting":
        driver.answer(stop)
    end = outcome(stop.exit)
    assert end[0] == "returned", stop.exit
    return end


# --- the equality oracle --------------------------------------------------------


@pytest.mark.parametrize("preempt", list(Preempt))
@pytest.mark.parametrize("what", WORKS, ids=lambda what: what[0])
def test_suspended_at_any_syscall_it_ends_as_it_would_have(
    driver: Make, what: tuple[str, int, int], preempt: Preempt
) -> None:
    """Memory, stack, globals, clock and fuel at each syscall, the result and all fuel: of a guest that is captured and
    goes on in place, and of one that goes from core to core, they are those of one that nobody touched."""
    one, two = driver("works", preempt), driver("works", preempt)
    data = work(*what)
    end = undisturbed(one, data)
    one.start(data)
    frames = []
    while (stop := one.next()).kind == "waiting":
        frames.append(one.capture(keep=True))
        one.answer(stop)
    assert outcome(stop.exit) == end
    assert len(frames) > 8

    dice = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    here, there = one, two
    there.start(data)
    while (stop := there.next()).kind == "waiting":
        if dice.random() < 0.3:
            frame = there.capture(keep=False)
            assert state(frame) == state(frames[there.calls])
            here.start(data, opened(frame), calls=there.calls)
            assert here.next() == stop
            here, there = there, here
        there.answer(stop)
    assert outcome(stop.exit) == end


@pytest.mark.parametrize("what", COMPUTES, ids=lambda what: what[0])
def test_suspended_in_its_loops_it_ends_as_it_would_have(driver: Make, what: tuple[str, int]) -> None:
    """A guest that only computes stops in each of its first rounds, and mostly goes on elsewhere."""
    one = driver("works", Preempt.ANYWHERE)
    data = work(*what, 0)
    end = undisturbed(one, data)
    one.start(data, safe_point=True)
    fuel = -1
    for number in range(40):
        assert one.next().kind == "safe_point"
        keep = number % 4 == 3
        frame = opened(one.capture(keep=keep))
        assert frame.fuel > fuel
        fuel = frame.fuel
        again = number < 39
        if keep:
            one.guest.leave_safe_point(again)
        else:
            one.start(data, frame, safe_point=again)
    assert outcome(one.next().exit) == end


def test_a_wasi_program_goes_on_with_its_files_and_streams(driver: Make) -> None:
    one = driver("wasi_works", Preempt.ANYWHERE)
    end = undisturbed(one, b"")
    assert end[2].count(b"read") == 400
    one.start(b"", safe_point=True)
    moves = 0
    while (stop := one.next()).kind == "safe_point":
        moves += 1
        one.start(b"", opened(one.capture(keep=False)), safe_point=moves < 600)
    assert moves == 600
    assert outcome(stop.exit) == end


ELSEWHERE = """
import json, sys
from pathlib import Path
from capture_kit import Driver, opened, work
driver = Driver(Path(sys.argv[1]).read_bytes())
driver.start(work("sort", 60, 23), opened(Path(sys.argv[2]).read_bytes()), calls=int(sys.argv[3]))
while (stop := driver.next()).kind == "waiting":
    driver.answer(stop)
print(json.dumps([stop.exit.reason, stop.exit.output.decode(), stop.exit.fuel]))
driver.close()
"""


def test_it_goes_on_in_another_process(driver: Make, tmp_path: Path) -> None:
    one = driver("works", Preempt.SYSCALLS)
    data = work("sort", 60, 23)
    reason, output, _, fuel = undisturbed(one, data)
    one.start(data)
    for _ in range(20):
        one.answer(one.next())
    assert one.next().kind == "waiting"
    (tmp_path / "code").write_bytes(artifact("works", Preempt.SYSCALLS))
    (tmp_path / "frame").write_bytes(one.capture(keep=False))
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, tmp_path / "code", tmp_path / "frame", "20"],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": ":".join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [reason, output.decode(), fuel]


def test_frames_with_an_image_and_deltas(driver: Make) -> None:
    one = driver("works", Preempt.SYSCALLS)
    image = one.module.image(b"i" * 32)
    data = work("json", 2, 61)
    end = undisturbed(one, data)
    one.start(data)
    one.answer(one.next())
    stop = one.next()
    plain, first = one.capture(keep=True), one.capture(keep=True, image=image)
    base = opened(first)
    assert len(first) < len(plain)
    assert base.memory(image=image) == opened(plain).memory()
    one.answer(stop)
    stop = one.next()
    expected = state(one.capture(keep=True))
    delta = one.capture(keep=False, image=image, base=base, frame_id=b"2" * 16)
    assert len(delta) < len(first)
    one.start(data, opened(delta), calls=one.calls, frame_base=base, frame_image=image)
    assert one.next() == stop
    assert state(one.capture(keep=True)) == expected
    one.answer(stop)
    while (stop := one.next()).kind == "waiting":
        one.answer(stop)
    assert outcome(stop.exit) == end


def test_answers_that_come_while_it_is_captured_are_not_missed(driver: Make) -> None:
    one = driver("works", Preempt.SYSCALLS)
    data = work("loop", 150, 11)
    end = undisturbed(one, data)
    one.start(data)
    while (stop := one.next()).kind == "waiting":
        one.answer(stop)
        try:
            one.capture(keep=True)  # it may be caught before it has taken the answer, or be gone
        except FrameError as error:
            assert "not suspended" in str(error)
    assert outcome(stop.exit) == end


# --- what is refused ------------------------------------------------------------


def test_what_cannot_be_captured_says_why(driver: Make) -> None:
    one = driver("works", Preempt.SYSCALLS)
    one.start(work("loop", 10**9, 0))
    one.guest.want_safe_point()  # it has none: nothing happens
    with pytest.raises(FrameError, match="not suspended"):
        one.capture(keep=True)
    one.guest.kill()
    assert one.next().kind == "exit"
    with pytest.raises(FrameError, match="ended"):
        one.capture(keep=True)
    wat = (
        '(module (import "agentrt" "call" (func (param i32 i32 i32 i32 i32) (result i32))) (memory (export "memory") 1)'
    )
    wat += ' (func (export "agentrt_run") (result i32) (call 0 (i32.const 1) (i32.const 0) (i32.const 2) (i32.const 0)'
    wat += " (i32.const 0))))"
    plain = Driver(_core.compile_module(LIBRARY, bytes(wasmtime.wat2wasm(wat)), **LIMITS))
    assert not plain.module.captures
    plain.start(b"")
    assert plain.next().kind == "waiting"
    with pytest.raises(FrameError, match="agentrt build"):
        plain.capture(keep=True)
    plain.close()


IMPOSTOR = """(module (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (global (export "agentrt:state") (mut i32) (i32.const 0))
  (global (export "agentrt:data") (mut {kind}) ({kind}.const 0))
  (func $wait (result i32) (call $call (i32.const 1) (i32.const 0) (i32.const 2) (i32.const 0) (i32.const 0)))
  (func (export "agentrt_run") (result i32) {body}))"""


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("(loop $l (drop (call $wait)) (br $l)) (i32.const 0)", "i32"),  # waits again
        ("(drop (call $wait)) (loop $l (br $l)) (i32.const 0)", "i32"),  # never returns
        ("(drop (call $wait)) unreachable", "i32"),
        ("(drop (call $wait)) (i32.const 0)", "i64"),
    ],
)
def test_a_module_that_only_claims_to_unwind_harms_itself_alone(body: str, kind: str) -> None:
    wasm = bytes(wasmtime.wat2wasm(IMPOSTOR.format(body=body, kind=kind)))
    one = Driver(_core.compile_module(LIBRARY, wasm, **LIMITS))
    assert one.module.captures
    one.start(b"")
    assert one.next().kind == "waiting"
    with pytest.raises(FrameError):
        one.capture(keep=True)
    stop = one.next()
    assert stop.exit is not None and stop.exit.reason == "engine"
    one.start(b"")
    assert one.next().kind == "waiting"
    one.close()


def test_frames_of_something_else_end_the_guest_and_say_so(driver: Make) -> None:
    one, other = driver("works", Preempt.SYSCALLS), driver("wasi_works", Preempt.ANYWHERE)
    data = work("loop", 150, 11)
    one.start(data)
    assert one.next().kind == "waiting"
    first = one.capture(keep=True)
    image = one.module.image(b"i" * 32)
    with_image = one.capture(keep=True, image=image)
    delta = one.capture(keep=False, base=opened(first), frame_id=b"2" * 16)
    refused = [
        (other, {}, first, "does not fit the module"),
        (one, {}, delta, "base is missing"),
        (one, {"frame_base": opened(with_image)}, delta, "base is another"),
        (one, {}, with_image, "image is missing"),
        (one, {"fuel": 1000}, first, "more fuel than the run has"),
    ]
    for to, arguments, frame, why in refused:
        to.start(data, opened(frame), **arguments)
        stop = to.next()
        assert stop.exit is not None and stop.exit.reason == "engine"
        assert why in stop.exit.message
    with pytest.raises(FrameError, match="image is another"):
        one.start(data, opened(with_image), frame_image=one.module.image(b"j" * 32))
    one.start(data, opened(first))
    assert one.next().kind == "waiting"


class Victims:
    """A guest's frame and a core to abuse, by module."""

    def __init__(self) -> None:
        self.frames: dict[str, bytes] = {}
        self.drivers: dict[str, Driver] = {}

    def of(self, name: str, data: bytes) -> tuple[Driver, _core.Frame]:
        if name not in self.frames:
            source = self.drivers[name] = Driver(artifact(name, Preempt.ANYWHERE))
            source.start(data, safe_point=True)
            for _ in range(30):
                if source.next().kind != "safe_point":
                    break
                source.guest.leave_safe_point(again=True)
            source.next()
            self.frames[name] = source.capture(keep=False)
        return self.drivers[name], opened(self.frames[name])


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    made = Victims()
    yield made
    for driver in made.drivers.values():
        driver.close()


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(_core.FRAME_SECTIONS.values())),
    st.lists(
        st.tuples(st.integers(0, 2**16), st.sampled_from([0, 1, 2, 127, 128, 255]) | st.integers(0, 255)), max_size=6
    ),
    st.none() | st.integers(0, 600),
    st.sampled_from(["works", "wasi_works"]),
)
def test_a_hostile_frame_ends_its_guest_at_worst(
    victims: Victims, tag: int, changes: list[tuple[int, int]], cut: int | None, name: str
) -> None:
    """Right by its checks, wrong by what it says: whatever is in it, the guest goes on or ends, and the core stays."""
    data = work("loop", 150, 11) if name == "works" else b""
    one, frame = victims.of(name, data)
    sections = frame.sections
    changed = bytearray(sections.get(tag, b""))
    for at, value in changes:
        if changed:
            changed[at % len(changed)] = value
    sections[tag] = bytes(changed if cut is None else changed[:cut])
    encoder = _core.FrameEncoder()
    encoder.encode(
        frame.memory(), module=frame.module, engine=frame.engine, id=frame.id, segment=0, seq=0, fuel=frame.fuel,
        clock_ns=frame.clock_ns, sections=sections,
    )  # fmt: skip
    one.start(data, opened(bytes(memoryview(encoder))), fuel=frame.fuel + 10**7)
    stop = one.next()
    if stop.kind != "exit":
        one.guest.kill()
        stop = one.next()
    assert stop.kind == "exit"


def test_a_global_of_each_kind_comes_back() -> None:
    from agentrt.capture.instrument import instrument

    kinds = {"i32": "7", "i64": "-9", "f32": "1.5", "f64": "-2.25"}
    globals_ = " ".join(f"(global ${kind} (mut {kind}) ({kind}.const 0))" for kind in kinds)
    sets = " ".join(f"(global.set ${kind} ({kind}.const {value}))" for kind, value in kinds.items())
    gets = " ".join(f"({kind}.store (i32.const {64 + 8 * at}) (global.get ${kind}))" for at, kind in enumerate(kinds))
    wat = f"""(module (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
      (import "agentrt" "output" (func $output (param i32 i32) (result i32)))
      (memory (export "memory") 1) {globals_} (global $v (mut v128) (v128.const i64x2 0 0))
      (func (export "agentrt_run") (result i32) {sets} (global.set $v (v128.const i64x2 3 4))
        (drop (call $call (i32.const 1) (i32.const 0) (i32.const 2) (i32.const 0) (i32.const 0)))
        {gets} (v128.store (i32.const 96) (global.get $v))
        (call $output (i32.const 64) (i32.const 48))))"""
    one = Driver(_core.compile_module(LIBRARY, instrument(bytes(wasmtime.wat2wasm(wat)), Preempt.SYSCALLS), **LIMITS))
    one.start(b"")
    stop = one.next()
    one.start(b"", opened(one.capture(keep=False)))
    assert one.next() == stop
    one.answer(stop)
    end = one.next().exit
    assert end is not None and end.output is not None
    i32, i64, f32, f64, low, high = struct.unpack("<i4xqf4xdqq", end.output)
    assert (i32, i64, f32, f64, low, high) == (7, -9, 1.5, -2.25, 3, 4)
    one.close()
