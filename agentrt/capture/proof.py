"""Proof that a module can be captured: a guest of it is taken out of one core and put into another, and is there what
it was; and up to there it does what a guest of the plain module does. Blocking; with cores of its own, which are small.
"""

import hashlib
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from agentrt import _core
from agentrt.backends import wasi
from agentrt.backends.base import Exit, Request
from agentrt.capture.instrument import Preempt
from agentrt.errors import FrameError, ModuleError
from agentrt.sizing import CoreParameters, engine_limits

#: Of a guest that is proven with: some seconds of work.
_FUEL: Final = 10**10
_SILENCE_S: Final = 60.0
_SEED: Final = bytes(16)
_SHOWN_MAX: Final = 300


class Proof(NamedTuple):
    """``reached``: where the guest was suspended, "syscall" or "safe_point"; None: it ended before it came to either,
    with ``exit``, and nothing is proven. ``stack_bytes``: of its stack then; ``frame_bytes``: of the whole frame.
    ``as_plain``: it did what a guest of the plain module did, given the same; one that looks at the clock need not, for
    the clock goes with fuel, and None: one of the two ran out of that."""

    reached: str | None
    exit: str | None
    stack_bytes: int
    frame_bytes: int
    as_plain: bool | None


class _Stop(NamedTuple):
    kind: str  # "syscall", "safe_point", "exit"
    requests: list[Request]
    exit: Exit | None


class _Guest:
    """A guest of a module in a core of its own."""

    def __init__(
        self, core: "_core.Core", module: "_core.Module", image: "_core.WasiImage | None", data: bytes
    ) -> None:
        self._core, self._module, self._image, self._data = core, module, image, data
        self.guest: _core.Guest
        self.requests: list[Request] = []

    def start(self, frame: "_core.Frame | None" = None, *, safe_point: bool = False) -> None:
        self.guest = self._core.submit(
            self._module, self, 0, 1, self._data, None, _FUEL, _SEED, 0, True, False, True, self._image, frame,
            safe_point=safe_point,
        )  # fmt: skip

    def stop(self) -> _Stop:
        """Where it comes to a halt."""
        poll = select.poll()
        poll.register(self._core.fd, select.POLLIN)
        while True:
            for _, kind, requests, detail in self._core.drain():
                self.requests += requests
                if kind == "exit":
                    return _Stop("exit", self.requests, Exit(*detail))
                if kind == "safe_point":
                    return _Stop("safe_point", self.requests, None)
                if detail:
                    return _Stop("syscall", self.requests, None)
            if not poll.poll(_SILENCE_S * 1000):
                raise ModuleError("the guest that should prove it does not come to a halt")

    def go_on(self) -> None:
        """Leave the safe point; what it asked for until there is forgotten."""
        self.requests = []
        self.guest.leave_safe_point()

    def capture(self, digest: bytes, *, keep: bool) -> bytes:
        encoder = _core.FrameEncoder()
        try:
            self.guest.capture(encoder, module=digest, id=bytes(16), segment=0, seq=0, keep=keep)
        except FrameError as error:
            raise ModuleError(f"a guest cannot be captured: {error.message}") from None
        return bytes(memoryview(encoder))


def prove(plain: bytes, made: bytes, preempt: Preempt, parameters: CoreParameters, data: bytes) -> Proof:
    """Prove it with a guest or two of each, given ``data``. Raises ModuleError if that fails."""
    digest = hashlib.sha256(made).digest()
    with _guest(plain, parameters, data) as other:
        other.start()
        expected = other.stop()
    with _guest(made, parameters, data) as first, _guest(made, parameters, data) as second:
        first.start(safe_point=preempt is Preempt.ANYWHERE)
        stop = first.stop()
        if stop.exit is not None:
            return Proof(None, stop.exit.reason, 0, 0, _alike(expected, stop))
        frame_data = first.capture(digest, keep=True)  # and it is there as before, or what follows differs
        frame = _core.Frame(frame_data, memory_bytes_max=1 << 32)
        second.start(frame)
        if stop.kind == "safe_point":
            before = list(stop.requests)
            first.go_on()
            one, two = first.stop(), second.stop()
            if _told(one, fuel=True) != _told(two, fuel=True):
                raise ModuleError(
                    f"a guest that goes on from its frame does other things: {_shown(two)}, not {_shown(one)}"
                )
            stop = one._replace(requests=before + one.requests)
            reached = "safe_point"
        else:
            two = second.stop()
            if two.exit is not None:
                raise ModuleError(f"a guest does not go on from its frame: {two.exit.message}")
            for guest in (first, second):
                again = _core.Frame(guest.capture(digest, keep=False), memory_bytes_max=1 << 32)
                if _state(again) != _state(frame):
                    raise ModuleError("a guest that was captured is not what it was")
            reached = "syscall"
    stack = frame.sections[_core.FRAME_SECTIONS["stack"]]
    return Proof(reached, None, len(stack), len(frame_data), _alike(expected, stop))


def _state(frame: "_core.Frame") -> tuple[Any, ...]:
    return frame.fuel, frame.clock_ns, frame.sections, frame.memory()


def _told(stop: _Stop, *, fuel: bool) -> tuple[Any, ...]:
    """What it did, as far as it tells."""
    how = stop.exit
    end = how and (how.reason, how.code, how.output, how.stdout, how.stderr, how.fuel if fuel else 0)
    return stop.kind, [(request.op, request.payload) for request in stop.requests], end


def _alike(one: _Stop, two: _Stop) -> bool | None:
    if any(stop.exit is not None and stop.exit.reason == "fuel" for stop in (one, two)):
        return None
    return _told(one, fuel=False) == _told(two, fuel=False)


def _shown(stop: _Stop) -> str:
    text = repr(_told(stop, fuel=True))
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


@contextmanager
def _guest(module: bytes, parameters: CoreParameters, data: bytes) -> Iterator[_Guest]:
    code, packed = wasi.unpack(module)
    small = parameters | {"guests_max": 2, "stacks_max": 2, "workers": 1, "queue_items_max": 16}
    artifact = _core.compile_module(parameters["engine_lib"], code, **engine_limits(small))
    core = _core.Core(**small)
    try:
        entry = None if packed is None or packed.entry is None else packed.entry.encode()
        loaded = core.load(artifact, entry)
        yield _Guest(core, loaded, None if packed is None else packed.image(), data)
    finally:
        core.close()
