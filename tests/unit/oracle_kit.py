"""Frames taken at random places, and what becomes of guests that go on from them; also as a program, so that they do so
in another process:

    python oracle_kit.py FOLDER      frames and `manifest.json` of `Points.write`; prints what it found as JSON
"""

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

from capture_kit import Driver, artifact, opened, state, work
from core_fixture import LIBRARY, LIMITS

from agentrt import _core
from agentrt.backends import wasi
from agentrt.capture.instrument import Preempt

#: Of ``works``: what, size, a call in so many operations.
WORKS = {"sort": (60, 23), "regex": (40, 29), "json": (2, 61), "loop": (150, 11)}
_WAITS = slice(32, 40)  # of the guest's section: `waits` of csrc/capture.c
_ROUNDS_MAX = 60  # of loops that a guest passes before it is captured in one


class Kind(NamedTuple):
    """A guest: its compiled module, what it is given, and what it starts with."""

    code: bytes
    data: bytes
    packed: bytes | None  # a module packed with arguments, whose image and entry are those of the guest


class Seen(NamedTuple):
    """What can be seen of a guest from some place on: how it ends, and a digest of its state (fuel, clock, sections,
    all of its memory) at its next syscall, "" if it makes none."""

    end: tuple[Any, ...]
    next_state: str


def of_works(name: str, preempt: Preempt = Preempt.ANYWHERE) -> Kind:
    return Kind(artifact("works", preempt), work(name, *WORKS[name]), None)


def of_packed(packed: bytes) -> Kind:
    """Of an interpreter that was instrumented, with a script."""
    code, _ = wasi.unpack(packed)
    return Kind(_core.compile_module(LIBRARY, code, **LIMITS), b"", packed)


def driver_of(kind: Kind) -> Driver:
    if kind.packed is None:
        return Driver(kind.code)
    _, packed = wasi.unpack(kind.packed)
    assert packed is not None
    made = Driver(kind.code, entry=None if packed.entry is None else packed.entry.encode())
    made.image = packed.image()
    return made


def digest(frame: bytes) -> str:
    fuel, clock_ns, sections, memory = state(frame)
    guest = bytearray(sections[_core.FRAME_SECTIONS["guest"]])
    guest[_WAITS] = bytes(8)  # how often the core was told that it waits: stops at safe points count
    sections[_core.FRAME_SECTIONS["guest"]] = bytes(guest)
    return hashlib.blake2b(repr((fuel, clock_ns, sections, memory)).encode(), digest_size=16).hexdigest()


def to_the_end(driver: Driver) -> Seen:
    """Let it go on, and see."""
    next_state = ""
    while (stop := driver.next()).kind != "exit":
        assert stop.kind == "waiting"
        next_state = next_state or digest(driver.capture(keep=True))
        driver.answer(stop)
    assert stop.exit is not None
    exit = stop.exit
    streams = (exit.output or b"").decode(), exit.stdout.decode(errors="replace")
    return Seen((exit.reason, *streams, exit.fuel), next_state)


class Point(NamedTuple):
    """A frame, how many calls its guest had had answered, and what must be seen of one that goes on from it."""

    frame: bytes
    calls: int
    expected: Seen


def random_points(driver: Driver, data: bytes, count: int, dice: random.Random) -> list[Point]:
    """Frames of one guest at random syscalls and in random rounds of its loops, each in a life that nothing else
    happens to."""
    driver.start(data)
    alone: list[str] = []  # digests of its states
    while (stop := driver.next()).kind == "waiting":
        alone.append(digest(driver.capture(keep=True)))
        driver.answer(stop)
    driver.start(data)
    end = to_the_end(driver).end
    assert end[0] == "returned", end
    found: list[Point] = []
    while len(found) < count:
        in_loop = dice.random() < 0.6 or not alone
        calls = dice.randrange(len(alone) + (1 if in_loop else 0))
        driver.start(data, safe_point=in_loop and calls == 0)
        stop = driver.next()
        while stop.kind == "waiting" and driver.calls < calls:
            if in_loop and driver.calls + 1 == calls:
                driver.guest.want_safe_point()
            driver.answer(stop)
            stop = driver.next()
        rounds = dice.randrange(_ROUNDS_MAX) if in_loop else 0
        while stop.kind == "safe_point" and rounds:
            rounds -= 1
            driver.guest.leave_safe_point(again=True)
            stop = driver.next()
        if stop.kind == "exit":
            continue
        calls = driver.calls
        frame = driver.capture(keep=False)
        found.append(Point(frame, calls, Seen(end, alone[calls] if calls < len(alone) else "")))
    return found


def go_on(driver: Driver, data: bytes, frame: bytes, calls: int) -> Seen:
    driver.start(data, opened(frame), calls=calls)
    return to_the_end(driver)


def write(folder: Path, kind: Kind, points: list[Point]) -> None:
    """For a process that runs this file."""
    (folder / "code").write_bytes(kind.code)
    (folder / "data").write_bytes(kind.data)
    if kind.packed is not None:
        (folder / "packed").write_bytes(kind.packed)
    for number, point in enumerate(points):
        (folder / f"{number}.frame").write_bytes(point.frame)
    (folder / "manifest.json").write_text(json.dumps([point.calls for point in points]))


def _main(folder: Path) -> None:
    packed = (folder / "packed").read_bytes() if (folder / "packed").exists() else None
    kind = Kind((folder / "code").read_bytes(), (folder / "data").read_bytes(), packed)
    driver = driver_of(kind)
    found = []
    for number, calls in enumerate(json.loads((folder / "manifest.json").read_text())):
        found.append(go_on(driver, kind.data, (folder / f"{number}.frame").read_bytes(), calls))
    driver.close()
    print(json.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
