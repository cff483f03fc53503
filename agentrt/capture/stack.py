"""Which functions are on a program's stack when it reads its input for the first time. Blocking.

The engine tells the stack of a guest that fails, and of that the innermost functions. So guests are started with less
fuel than the reading takes, which ends them earlier on the same way. Fuel is looked at whenever a function is entered:
what is on the stack at the last look before the reading is all that is there at the reading, and perhaps what has
returned since. The functions outside of those that are told are put together from ends that are earlier still. Some
functions too many cost nothing to speak of; if one is missing, the stack cannot be unwound, and there is no image.
"""

import re
from typing import Final

from agentrt.backends import wasi
from agentrt.capture.boot import Bench, ended
from agentrt.capture.sections import FUNC_EXPORT, Sections
from agentrt.errors import ModuleError
from agentrt.sizing import CoreParameters

#: As wasmtime shows a function without a name.
_FUNCTION: Final = re.compile(r"<wasm function (\d+)>")
#: The first steps back from the reading, in fuel.
_NEAR_FUEL: Final = 1 << 13
#: Guests that are started to find the outer functions.
_FAR_MAX: Final = 400


def stack_at_input(code: bytes, packed: wasi.Packed | None, parameters: CoreParameters) -> set[int]:
    """Indices of functions, a few more than are there. Raises ModuleError: it does not read its input, or no stack is
    found."""
    sections = Sections(code)
    sections.custom = []  # no names, so that it is numbers that are told
    entry = packed.entry if packed is not None and packed.entry is not None else None
    names = (entry,) if entry is not None else ("agentrt_run", "_start")
    outermost = next((found.number for name in names if (found := sections.find(name, FUNC_EXPORT))), None)
    bench = Bench(sections.write(), packed, parameters)
    try:
        guest, exit = bench.run("input")
        if exit is not None:
            raise ended(exit, "input")
        search = _Search(bench, bench.end(guest).fuel, outermost)
        search.near()
        search.far()
    finally:
        bench.close()
    own = sections.defined_functions  # others are helpers of the core's
    return {index for index in search.found if index in own}


class _Search:
    def __init__(self, bench: Bench, at_fuel: int, outermost: int | None) -> None:
        self._bench, self._at_fuel, self._outermost = bench, at_fuel, outermost
        self._stacks: dict[int, tuple[int, ...]] = {}  # by the fuel that the guest had
        self._known: tuple[int, ...] = ()  # at the reading
        self.found: set[int] = set() if outermost is None else {outermost}

    def _stack(self, fuel: int) -> tuple[int, ...]:
        """Innermost first, of a guest that was given so much."""
        if fuel not in self._stacks:
            _, exit = self._bench.run(None, max(1, fuel))
            told = exit.message if exit is not None and exit.reason == "fuel" else ""
            self._stacks[fuel] = tuple(int(number) for number in _FUNCTION.findall(told))
        return self._stacks[fuel]

    def near(self) -> None:
        """The stack at the last look at the fuel before the reading."""
        low, high = 0, self._at_fuel + 1  # the most that is known not to suffice, the least that is known to
        back = 1
        while high - low > 1:  # near the reading first: there it is
            fuel = max((low + high) // 2, high - back)
            back *= 2
            if self._arrives(fuel):
                high = fuel
            else:
                low = fuel
        self._known = self._stack(low)
        self.found |= set(self._known)

    def _arrives(self, fuel: int) -> bool:
        guest, exit = self._bench.run("input", max(1, fuel))
        if exit is None:
            self._bench.end(guest)
        return exit is None

    def far(self) -> None:
        """The functions outside of those that the engine shows."""
        step, tried = 2 * _NEAR_FUEL, 0
        last = self._known[-1] if self._known else None
        while last is not None and last != self._outermost and tried < _FAR_MAX:
            outer = self._outside(last)
            if outer:
                self.found |= set(outer)
                last = outer[-1]
                continue
            # halves, then quarters, and so on of the way
            tried += 1
            self._stack(self._at_fuel - step if step < self._at_fuel else self._at_fuel * (2 * tried % 97) // 97)
            step *= 2
        if last is not None and last != self._outermost:
            raise ModuleError("the functions on the module's stack cannot be found")

    def _outside(self, function: int) -> tuple[int, ...]:
        """What was seen outside of its outermost call, the most there is."""
        seen = (stack for stack in self._stacks.values() if function in stack)
        return max((stack[len(stack) - stack[::-1].index(function) :] for stack in seen), key=len, default=())
