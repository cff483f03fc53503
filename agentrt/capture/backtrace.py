"""What a suspended guest was doing: the functions on its stack. Blocking.

The stack in a frame is the locals of functions, without their names. So a guest goes on from the frame in a core of its
own, as far as where it stands, and fails there: the engine then says where that was.
"""

import re
import select
from typing import Final, NamedTuple

from agentrt import _core
from agentrt.backends import wasi
from agentrt.backends.base import Exit
from agentrt.capture.boot import Bench
from agentrt.errors import FrameError
from agentrt.sizing import CoreParameters

#: `` 3:  0x1a2b - module!function``, as the engine writes them.
_LINE: Final = re.compile(r"^ *\d+: +0x([0-9a-f]+) - .*?!(.+)$", re.MULTILINE)
_SILENCE_MS: Final = 60_000
#: Beyond what its guest has used; nothing of it is spent.
_FUEL: Final = 1_000_000


class Call(NamedTuple):
    """A function on the stack, by its name in the module, and where it is: bytes from the module's beginning."""

    function: str
    offset: int


def backtrace(
    module: bytes, frame: "_core.Frame", parameters: CoreParameters, base: "_core.Frame | None" = None
) -> list[Call]:
    """The innermost functions, 20 at most, the innermost first. ``module``: as it was registered. Raises ModuleError,
    and FrameError: the frame is not of this module, or its pages are damaged."""
    code, packed = wasi.unpack(module)
    bench = Bench(code, packed, parameters)
    try:
        guest = bench.go_on(frame, frame.fuel + _FUEL, base)
        said = _next(bench)
        if said is None:
            guest.fail()
            said = _next(bench)
        if said is None or said.reason != "trap":
            raise FrameError("nothing is known of its stack" if said is None else said.message)
    finally:
        bench.close()
    return [Call(name, int(offset, 16)) for offset, name in _LINE.findall(said.message)]


def _next(bench: Bench) -> Exit | None:
    """How the guest ended; None: it stands where it was."""
    poll = select.poll()
    poll.register(bench.fd, select.POLLIN)
    while poll.poll(_SILENCE_MS):
        for kind, detail in bench.events():
            if kind == "exit":
                return Exit(*detail)
            if kind == "safe_point" or (kind == "syscalls" and detail):
                return None
    raise FrameError("its guest does not come to where it was")
