"""Images: a program that has been booted once, as a module whose guests begin there. Blocking.

A guest is booted with what every run of it has in common (arguments, environment, files), until what comes next may
differ from run to run. *At rest* that is when a function that the module exports has returned; without one it is when
the program reads its *input* for the first time, in the middle of a call. Its memory becomes the module's data, which
the engine clones copy-on-write; its globals get their values; the stack, if there is one, becomes a section of the
module that each guest rewinds before it does anything (csrc/boot.h).

What differs from run to run must not be in an image. So a boot that has looked at the input, the seed or the clock, or
has asked the runtime for something, is refused.
"""

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from agentrt import _core
from agentrt.backends import wasi
from agentrt.backends.cache import ArtifactCache
from agentrt.backends.images import SECTION, given, is_image
from agentrt.capture.binaryen import version as binaryen_version
from agentrt.capture.boot import INIT_HINT, Bench, Booted, boot
from agentrt.capture.build import in_child
from agentrt.capture.instrument import GLOBAL, is_instrumented, refuse, refuse_at_rest
from agentrt.capture.sections import FUNC_EXPORT, GLOBAL_EXPORT, MEMORY_EXPORT, Export, Sections, leb
from agentrt.capture.stack import stack_at_input
from agentrt.errors import ModuleError
from agentrt.sizing import CoreParameters

#: Changes when images come out differently.
_RECIPE: Final = 1
_ENTRY: Final = "agentrt_run"
_I32: Final = b"\x7f"


class Image(NamedTuple):
    """An image. ``at``: "rest" or "input"; ``boot_fuel``: what its runs are spared; ``memory_bytes``: of a guest when
    it begins; ``cached``: it was made before."""

    module: bytes
    at: str
    boot_fuel: int
    memory_bytes: int
    cached: bool


def make_image(
    module: bytes,
    parameters: CoreParameters,
    *,
    init: str | None = None,
    clock: bool = False,
    cache_folder: Path,
    cache_bytes_max: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Image:
    """The image of a module, packed or not.

    ``parameters``: of the core that it is booted in. ``init``: the exported function, () -> () or () -> i32, that makes
    it ready; None: it is booted until it reads its input, for which Binaryen is needed (``agentrt[capture]``) and
    half a minute at most if the program is large. ``clock``: the boot may look at the clock, which it finds at
    1970. ``progress`` is told what is begun. Raises ModuleError with the reason, EngineError without Binaryen."""
    code, packed = wasi.unpack(module)
    if is_image(code):
        raise ModuleError("the module is an image already", hint="Use it as it is")
    digest = hashlib.sha256(module).hexdigest()
    cache = ArtifactCache(cache_folder, _recipe(init, clock), cache_bytes_max)
    kept = cache.get(digest)
    if kept is not None:
        fuel, memory_bytes = struct.unpack_from("<QQ", kept)
        return Image(kept[16:], "input" if init is None else "rest", fuel, memory_bytes, True)
    booted: Booted
    if init is None:
        made, booted = _at_input(code, packed, parameters, clock, progress)
    else:
        made, booted = _at_rest(code, packed, init, parameters, clock, progress)
    if packed is not None:
        made = wasi.pack(made, args=packed.args, env=packed.env, files=packed.files, entry=packed.entry)
    fuel, memory_bytes = booted.frame.fuel, booted.frame.memory_bytes
    cache.put(digest, struct.pack("<QQ", fuel, memory_bytes) + made)
    return Image(made, "input" if init is None else "rest", fuel, memory_bytes, False)


def _recipe(init: str | None, clock: bool) -> bytes:
    binaryen = "" if init is not None else binaryen_version()
    what = f"image {_RECIPE} {init!r} {clock} {binaryen} {_core.engine_version()}"
    return hashlib.blake2b(what.encode(), digest_size=16).digest()


# --- at rest ------------------------------------------------------------------------


def _at_rest(
    code: bytes,
    packed: wasi.Packed | None,
    init: str,
    parameters: CoreParameters,
    clock: bool,
    progress: Callable[[str], None],
) -> tuple[bytes, Booted]:
    _, facts = _core.module_facts(code)
    refuse_at_rest(facts)
    progress("booting")
    to_boot = _to_boot(Sections(code), init)
    own = None if packed is None else wasi.Packed(packed.args, packed.env, packed.files)
    booted = boot(to_boot, own, "rest", parameters)
    _check(booted, clock)
    _check_files(booted.frame, own)
    progress("writing")
    image = Sections(code)
    image.drop_start()  # it is part of what was booted, as is _initialize
    image.exports = [each for each in image.exports if each.name != "_initialize"]
    _set_state(image, booted.frame)
    made = image.write()
    progress("proving")
    bench = Bench(made, packed, parameters)
    try:
        memory = booted.frame.memory()
        if bench.module.image(b"1" * 32).memory.ljust(len(memory), b"\0") != memory:
            raise ModuleError("the image does not begin with the memory that was booted")
    finally:
        bench.close()
    return made, booted


def _to_boot(sections: Sections, init: str) -> bytes:
    """The module with ``init`` in the place of its entry, and all that is its state exported."""
    found = sections.find(init, FUNC_EXPORT)
    if found is None:
        raise ModuleError(f"the module does not export a function {init}")
    index = found.number
    match sections.function_type(index):
        case (b"", b""):
            index = sections.add_function(_I32, b"\x10" + leb(index) + b"\x41\0\x0b")  # call it, return 0
        case (b"", results) if results == _I32:
            pass
        case _:
            raise ModuleError(
                f"{init} is no function that makes the module ready: it must take nothing and return nothing or an i32"
            )
    kept = [each for each in sections.exports if each.name == "_initialize"]
    kept += [Export("memory", MEMORY_EXPORT, 0), Export(_ENTRY, FUNC_EXPORT, index)]
    kept += [Export(f"{GLOBAL}{number}", GLOBAL_EXPORT, at) for number, at in enumerate(sections.mutable_globals)]
    sections.exports = kept
    return sections.write()


def _check_files(frame: "_core.Frame", packed: wasi.Packed | None) -> None:
    """At rest there is nothing to remember what WASI knows, so it must know nothing."""
    if frame.sections[_core.FRAME_SECTIONS["output"]] or not _untouched(
        frame.sections[_core.FRAME_SECTIONS["wasi"]], packed
    ):
        raise ModuleError(
            "the boot has written something, or has files open", hint="Let it close its files, and be silent"
        )


def _untouched(state: bytes, packed: wasi.Packed | None) -> bool:
    """Whether that is how WASI begins (csrc/wasi.c): stdio and the root open, nothing read or written."""
    fds = [struct.pack("<BBHIQ", kind, 0, 0, 0, 0) for kind in (1, 2, 3)]
    fds.append(struct.pack("<BBHIQ", 5, 1, 0, 0, 0) if packed is not None and packed.files else bytes(16))
    return not state or state == bytes(8) + b"".join(fds).ljust(64 * 16, b"\0") + bytes(16)


# --- in the middle of a call --------------------------------------------------------


def _at_input(
    code: bytes,
    packed: wasi.Packed | None,
    parameters: CoreParameters,
    clock: bool,
    progress: Callable[[str], None],
) -> tuple[bytes, Booted]:
    if is_instrumented(code):
        raise ModuleError(
            "the module can be captured already, and its image could not", hint="Make the image from the plain module"
        )
    _, facts = _core.module_facts(code)
    refuse(facts, "be an image in the middle of a call")
    if b"fd_read" not in code:
        raise ModuleError("the module never reads standard input", hint=INIT_HINT)
    progress("looking for its stack")
    stack = stack_at_input(code, packed, parameters)
    to_boot = in_child(code, None, progress, sorted(stack))
    progress("booting")
    booted = boot(to_boot, packed, "input", parameters)
    _check(booted, clock)
    progress("writing")
    image = Sections(to_boot)
    _set_state(image, booted.frame)
    image.exports = [each for each in image.exports if not each.name.startswith(GLOBAL)]
    begin = _begin(booted.frame)
    image.custom.append((SECTION, given(packed) + begin))
    made = image.write()
    progress("proving")
    again = boot(made, packed, "input", parameters, begin)  # which is there at once
    if again.frame.fuel or _state(again.frame) != _state(booted.frame):
        raise ModuleError("a guest of the image is not what was booted")
    return made, booted


def _state(frame: "_core.Frame") -> tuple[bytes, ...]:
    """What an image begins with."""
    return frame.memory(), *(frame.sections[_core.FRAME_SECTIONS[name]] for name in ("stack", "wasi", "output", "boot"))


def _begin(frame: "_core.Frame") -> bytes:
    """As csrc/boot.c reads it."""
    stack, state, seen = (frame.sections[_core.FRAME_SECTIONS[name]] for name in ("stack", "wasi", "boot"))
    return seen + struct.pack("<QQ", len(stack), len(state)) + stack + bytes(-len(stack) % 8) + state


# --- both ---------------------------------------------------------------------------


_SEEN: Final = {
    "input": "has looked at its input",
    "seed": "has asked for random numbers, which would be the same in all runs",
    "steps": "has asked the runtime for something",
    "clock": "has looked at the clock",
}
_SEEN_HINTS: Final = {
    "clock": "Allow it (--clock) if it does not matter that the boot finds 1970",
    "seed": "CPython does not with the variable PYTHONHASHSEED=0, unless it imports random",
}


def _check(booted: Booted, clock: bool) -> None:
    for name, what in _SEEN.items():
        if name in booted.seen and not (name == "clock" and clock):
            raise ModuleError(f"the boot {what}", hint=_SEEN_HINTS.get(name))


def _set_state(image: Sections, frame: "_core.Frame") -> None:
    """The module begins with the frame's memory and globals."""
    values = frame.sections[_core.FRAME_SECTIONS["globals"]]
    for number, index in enumerate(image.mutable_globals):
        at = 24 * number
        if at + 24 > len(values):
            break  # the pass's own, which are 0
        image.set_global(index, int.from_bytes(values[at : at + 8], "little"), values[at + 8 : at + 24])
    image.set_memory(frame.memory())
