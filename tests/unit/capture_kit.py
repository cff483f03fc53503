"""Guests that can be captured, and a core with one at a time, driven by hand."""

import functools
import json
import select
from pathlib import Path
from typing import Any, NamedTuple

from core_fixture import LIBRARY, LIMITS, core_arguments

from agentrt import _core
from agentrt.backends import wasi
from agentrt.backends.base import Exit
from agentrt.capture.instrument import Preempt, instrument

GUESTS = Path(__file__).parents[1] / "guests"
FUEL = 10**12
MODULE = b"m" * 32
TEXT = b"".join(b"line %d of a text that is read in parts\n" % number for number in range(300))


@functools.cache
def made(name: str, preempt: Preempt) -> bytes:
    """A module of tests/guests, instrumented."""
    return instrument((GUESTS / f"{name}.wasm").read_bytes(), preempt)


@functools.cache
def artifact(name: str, preempt: Preempt) -> bytes:
    return _core.compile_module(LIBRARY, made(name, preempt), **LIMITS)


def work(what: str, size: int, every: int) -> bytes:
    """Input of ``works``."""
    return json.dumps({"work": what, "size": size, "every": every}).encode()


def answer(number: int) -> bytes:
    """To the guest's n-th call."""
    return b"%d" % (number * 7919 % 1000)


class Stop(NamedTuple):
    """Where a guest came to a halt: "waiting" for a handle, at a "safe_point", or at its "exit"."""

    kind: str
    handle: int = 0
    exit: Exit | None = None


class Driver:
    """One guest after the other, in a core of their own."""

    def __init__(self, code: bytes, entry: bytes | None = None, **over: Any) -> None:
        self.core = _core.Core(**core_arguments(workers=1, **over))
        self.module = self.core.load(code, entry)
        self.image = _core.WasiImage([b"works"], [], [(b"text", TEXT)])
        self.guest: Any = None
        self.calls = 0

    def start(self, data: bytes, frame: _core.Frame | None = None, *, calls: int = 0, **over: Any) -> None:
        """``calls``: how many were answered before."""
        self.calls = calls
        arguments: dict[str, Any] = {
            "fuel": FUEL, "seed": b"seed" * 4, "clock_ns": 5, "admitted": False, "replay": False, "wasi": self.image,
        }  # fmt: skip
        self.guest = self.core.submit(
            self.module, self, 0, 1, input=data, restored=None, frame=frame, **(arguments | over)
        )

    def next(self) -> Stop:
        poll = select.poll()
        poll.register(self.core.fd, select.POLLIN)
        while True:
            for _, kind, _, detail in self.core.drain(1):
                if kind == "exit":
                    return Stop("exit", exit=Exit(*detail))
                if kind == "safe_point":
                    return Stop("safe_point")
                if detail:
                    return Stop("waiting", detail[0])
            assert poll.poll(60_000), "the core says nothing"

    def answer(self, stop: Stop) -> None:
        self.calls += 1
        self.guest.complete(stop.handle, 0, answer(self.calls), 1000 + self.calls, self.calls)

    def capture(self, *, keep: bool, frame_id: bytes = b"1" * 16, **over: Any) -> bytes:
        """A frame; without ``keep`` the guest is then gone."""
        encoder = _core.FrameEncoder()
        module: bytes = over.pop("module", MODULE)
        self.guest.capture(encoder, module=module, id=frame_id, segment=3, seq=self.calls, keep=keep, **over)
        if not keep:
            stop = self.next()
            assert stop.exit is not None and stop.exit.reason == "killed"
        return bytes(memoryview(encoder))

    def close(self) -> None:
        if self.guest is not None:
            self.guest.kill()
        self.core.close()


def opened(data: bytes) -> _core.Frame:
    return _core.Frame(data, memory_bytes_max=1 << 32)


def state(data: bytes) -> tuple[Any, ...]:
    """What two guests at the same place have in common, whatever became of them before."""
    frame = opened(data)
    return frame.fuel, frame.clock_ns, frame.sections, frame.memory()


def packed(name: str, preempt: Preempt) -> bytes:
    return wasi.pack(made(name, preempt), files={"/text": TEXT})
