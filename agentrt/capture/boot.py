"""Booting: a guest runs in a core of its own until it is where an image of it shall begin. Blocking."""

import select
from typing import Any, Final, NamedTuple

from agentrt import _core
from agentrt.backends import wasi
from agentrt.backends.base import Exit
from agentrt.errors import FrameError, ModuleError
from agentrt.sizing import CoreParameters, engine_limits

#: Of a boot: minutes of work. What takes longer is no boot.
_FUEL: Final = 10**12
_SILENCE_S: Final = 300.0
_SHOWN_BYTES_MAX: Final = 500


class Booted(NamedTuple):
    """``frame``: the guest's state; ``seen``: what it has looked at that differs from run to run ("input", "clock",
    "seed"), and "steps" if it has asked the runtime for something."""

    frame: "_core.Frame"
    seen: frozenset[str]


def core_for_one(parameters: CoreParameters) -> CoreParameters:
    """Of a core for a guest or two."""
    return parameters | {"guests_max": 2, "stacks_max": 2, "workers": 1, "queue_items_max": 16}


class Bench:
    """A core with one module, whose guests are booted one after the other. Raises ModuleError: it cannot be loaded."""

    def __init__(
        self, code: bytes, packed: wasi.Packed | None, parameters: CoreParameters, begin: bytes | None = None
    ) -> None:
        small = core_for_one(parameters)
        artifact = _core.compile_module(parameters["engine_lib"], code, **engine_limits(small))
        self._image = None if packed is None else packed.image()
        self._core = _core.Core(**small)
        try:
            entry = None if packed is None or packed.entry is None else packed.entry.encode()
            self._artifact, self._entry = artifact, entry
            self.load(begin)
        except BaseException:
            self._core.close()
            raise

    def load(self, begin: bytes | None) -> None:
        """Load the module, its guests beginning there."""
        self.module = self._core.load(self._artifact, self._entry, begin)

    def close(self) -> None:
        self._core.close()

    def submit(self, where: str | None, fuel: int, data: bytes) -> "_core.Guest":
        return self._core.submit(
            self.module, self, 0, 1, data, None, fuel, bytes(16), 0, True, False, True, self._image, boot=where
        )

    def go_on(
        self, frame: "_core.Frame", fuel: int, base: "_core.Frame | None", image: "_core.FrameImage | None" = None
    ) -> "_core.Guest":
        """A guest that goes on from a frame, and stops there if that is a safe point."""
        if image is None and any(frame.image):
            image = self.module.image(frame.image)
        return self._core.submit(
            self.module, self, 0, 1, b"", None, fuel, bytes(16), 0, True, False, True, self._image, frame, base, image,
            stays=True,
        )  # fmt: skip

    @property
    def fd(self) -> int:
        """Readable when there are events."""
        return self._core.fd

    def events(self) -> list[tuple[str, Any]]:
        """What has happened: kinds and details."""
        return [(kind, detail) for _, kind, _, detail in self._core.drain()]

    def run(self, where: str | None, fuel: int = _FUEL, data: bytes = b"") -> tuple["_core.Guest", Exit | None]:
        """A guest, given ``data``, that stands at "rest" or its "input", as ``where`` says, or has ended, and how. With
        none to stand at it is killed when it waits for a step."""
        guest = self.submit(where, fuel, data)
        poll = select.poll()
        poll.register(self._core.fd, select.POLLIN)
        while True:
            for _, kind, _, detail in self._core.drain():
                if kind == "exit":
                    return guest, Exit(*detail)
                if kind == "safe_point":
                    return guest, None
                if kind == "syscalls" and detail:
                    killed = self.end(guest)
                    if where is None:
                        return guest, killed
                    raise ModuleError("the boot waits for a step of the runtime, so it cannot be finished here")
            if not poll.poll(_SILENCE_S * 1000):
                raise ModuleError("the boot does not come to an end")

    def end(self, guest: "_core.Guest") -> Exit:
        """Kill it, and wait until it is gone."""
        guest.kill()
        poll = select.poll()
        poll.register(self._core.fd, select.POLLIN)
        while True:
            for _, kind, _, detail in self._core.drain():
                if kind == "exit":
                    return Exit(*detail)
            poll.poll(_SILENCE_S * 1000)


def boot(
    code: bytes, packed: wasi.Packed | None, where: str, parameters: CoreParameters, begin: bytes | None = None
) -> Booted:
    """Boot a guest of a module that was made for it. Raises ModuleError: it does not come there, or cannot be captured
    there."""
    bench = Bench(code, packed, parameters, begin)
    try:
        guest, exit = bench.run(where)
        if exit is not None:
            raise ended(exit, where)
        encoder = _core.FrameEncoder()
        try:
            guest.capture(encoder, module=bytes(32), id=bytes(16), segment=0, seq=0, keep=False)
        except FrameError as error:
            raise ModuleError(f"what was booted cannot be captured: {error.message}") from None
        frame = _core.Frame(bytes(memoryview(encoder)), memory_bytes_max=1 << 32)
    finally:
        bench.close()
    bits = int.from_bytes(frame.sections[_core.FRAME_SECTIONS["boot"]][4:8], "little")
    return Booted(frame, frozenset(name for name, bit in _core.BOOT_SEEN.items() if bits & bit))


INIT_HINT: Final = "The program must read its standard input; or name the function that makes it ready, with --init"
_HINTS: Final = {
    "input": INIT_HINT,
    "rest": "The function must return, and 0 if it returns a number",
}


def ended(exit: Exit, where: str) -> ModuleError:
    """That the boot ended before it was there."""
    said = exit.stderr[-_SHOWN_BYTES_MAX:].decode(errors="replace").strip()
    how = {"returned": "ended", "fuel": "has taken all of its fuel"}.get(exit.reason, f"failed ({exit.reason})")
    detail = exit.message.partition("\n")[0] or (f"exit code {exit.code}" if exit.code else "")
    text = ": ".join(filter(None, (f"the boot {how} before it was ready", detail, said)))
    return ModuleError(text, hint=_HINTS[where])
