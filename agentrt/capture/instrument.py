"""What makes a module one that can be captured.

Binaryen's pass *asyncify* gives every function that may be on the stack during a syscall two ways more to run:
*unwinding* it saves its locals to memory and returns, *rewinding* it takes them back and calls on to where it was. The
core starts these by two globals that the pass adds, exported here (`STATE`, `DATA`); with the other mutable globals,
exported as well, and the memory, all that a guest is can be read and put back. For `Preempt.ANYWHERE` each loop calls
`CHECK` first, which calls the import `agentrt.safe_point` when the core has set `FLAG`.

Fuel is that of the module as it is made here: with and without being captured the same, but more than the plain one
takes.
"""

import enum
from collections.abc import Callable
from typing import Final

from agentrt import _core
from agentrt.capture.binaryen import Module
from agentrt.capture.sections import Sections
from agentrt.errors import ModuleError

#: Exports; csrc/capture.c knows them, too.
STATE: Final = "agentrt:state"
DATA: Final = "agentrt:data"
GLOBAL: Final = "agentrt:global:"
CHECK: Final = "agentrt:check"
FLAG: Final = "agentrt:flag"

#: Of the pass.
_STATE_NAME: Final = "__asyncify_state"
_DATA_NAME: Final = "__asyncify_data"
_PASS_EXPORT: Final = "asyncify_start_unwind"

#: The same of images (csrc/boot.c), whose guests are not captured again.
IMAGE_STATE: Final = "agentrt:image-state"
IMAGE_DATA: Final = "agentrt:image-data"
IMAGE_FLAG: Final = "agentrt:image-flag"

#: Imports in which a guest may be suspended. MicroPython's is not among them: it uses exceptions.
_SUSPENDING: Final = ("agentrt.call", "agentrt.wait_any", "agentrt.safe_point")

#: The import at which a boot ends.
_BOOTED_IN: Final = "wasi_snapshot_preview1.fd_read"

#: How the first two stand in a module: each name with its length before it.
_IMPORTED: Final = (b"\x07agentrt\x04call", b"\x07agentrt\x08wait_any")

_REFUSED: Final = {
    "exceptions": "it uses exception handling, which the stack cannot be unwound through",
    "tail_calls": "it uses tail calls",
    "tables_change": "it changes its tables, whose entries cannot be read from outside",
    "segments_drop": "it drops segments, which cannot be seen from outside",
    "references": "it keeps references in globals, which cannot be read from outside",
    "start": "it has a start function, which would run again",
}


class Preempt(enum.StrEnum):
    """Where guests of the module can be captured."""

    SYSCALLS = "syscalls"
    ANYWHERE = "anywhere"


def is_instrumented(wasm: bytes) -> bool:
    """Whether the module has been through `instrument`, or another's asyncify. A quick look: it may be wrong for a
    module with such a text in it."""
    return STATE.encode() in wasm or _PASS_EXPORT.encode() in wasm


def refuse(facts: dict[str, bool | int], what: str = "be captured") -> None:
    """Raises ModuleError if a module that does this cannot be captured."""
    for name, reason in _REFUSED.items():
        if facts[name]:
            raise ModuleError(
                f"the module cannot {what}: {reason}",
                hint="Use it as it is: its runs are replayed instead, which any module can be",
            )


def refuse_at_rest(facts: dict[str, bool | int]) -> None:
    """The same for one that is captured while nothing of it is on the stack."""
    stack = ("exceptions", "tail_calls", "start")
    refuse({name: bool(value) and name not in stack for name, value in facts.items()}, "be an image")


def instrument(wasm: bytes, preempt: Preempt, progress: Callable[[str], None] = lambda _: None) -> bytes:
    """The module made capturable, without its debug info but with its functions' names. ``progress`` is told what is
    begun.

    Takes a second for a small module, a minute for an interpreter of tens of megabytes; runs on all cores. In a process
    of its own: see `agentrt.capture.binaryen`. Raises ModuleError with the reason, EngineError without Binaryen."""
    if is_instrumented(wasm):
        raise ModuleError("the module can be captured already", hint="Use it as it is")
    code, facts = _core.module_facts(wasm)
    refuse(facts)
    if preempt is Preempt.SYSCALLS and not any(name in code for name in _IMPORTED):
        raise ModuleError(
            "the module never waits for the runtime, so there is no syscall at which it could be captured",
            hint="agentrt build --preempt anywhere",
        )
    progress("reading")
    if preempt is Preempt.ANYWHERE:
        with Module(code) as module:
            module.run("strip-dwarf")
            module.add_check(export=CHECK, flag=FLAG, module="agentrt", base="safe_point")
            code = module.write()
        progress(f"putting safe points into {facts['loops']} loops")
        code, _ = _core.module_facts(code, CHECK.encode())
    with Module(code) as module:
        plain = module.mutable_globals()
        progress("instrumenting")
        module.run("strip-dwarf", "asyncify", optimize=1, asyncify_imports=",".join(_SUSPENDING))
        for index, name in enumerate(plain):  # the flag among them, which is 0 whenever a guest is suspended
            module.export_global(name, f"{GLOBAL}{index}")
        module.export_global(_STATE_NAME, STATE)
        module.export_global(_DATA_NAME, DATA)
        progress("writing")
        return module.write()


def instrument_for_image(wasm: bytes, stack: list[int], progress: Callable[[str], None] = lambda _: None) -> bytes:
    """The module made so that its stack can be moved once, where it reads its input for the first time; ``stack``: the
    functions, ascending, that may be on it then. As `instrument`.

    Code that can be unwound is several times slower, and an interpreter's loop is on the stack when its script reads
    the input. So each function of the stack gets a copy, which calls copies, and it is the copies that are changed. The
    functions call their copies while the global `IMAGE_FLAG` is not 0: during the boot, and until the stack is rewound.
    What is on the stack then ends as copies; whatever is called from there on is as fast as ever."""
    code, facts = _core.module_facts(wasm)
    refuse(facts, "be an image in the middle of a call")
    progress("reading")
    sections = Sections(code)
    sections.custom = []  # function names and code offsets would be of other functions
    flag = sections.add_flag(IMAGE_FLAG)
    first = sections.copy_functions(stack, flag)
    code, _ = _core.module_facts(sections.write(), copied=stack, copies_first=first)
    with Module(code) as module:
        plain = module.mutable_globals()
        copies = module.functions()[-len(stack) :]
        progress("instrumenting")
        module.run("asyncify", optimize=1, asyncify_imports=_BOOTED_IN, asyncify_onlylist=",".join(copies))
        for index, name in enumerate(plain):
            module.export_global(name, f"{GLOBAL}{index}")
        module.export_global(_STATE_NAME, IMAGE_STATE)
        module.export_global(_DATA_NAME, IMAGE_DATA)
        progress("writing")
        return module.write()
