"""Seccomp filters as lists of BPF instructions, on x86_64 and aarch64."""

import errno
import struct
from typing import Final

from agentrt.sandbox import SandboxError

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
_MACHINES: Final = {"x86_64": X86_64, "aarch64": AARCH64}
_X32_BIT: Final = 0x4000_0000

# struct seccomp_data: nr at 0, arch at 4, args at 16, 8 bytes each; low half first on both machines.
NR, ARCH = 0, 4
LOAD, JUMP_EQUAL, JUMP_SET, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, DENY, NOT_BUILT_IN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
KILL_PROCESS: Final = 0x80000000
INSTRUCTION_BYTES: Final = 8

#: Code, jump if true, jump if false, operand.
Instruction = tuple[int, int, int, int]
#: A call's number on x86_64, on aarch64; None: there is no such call.
Numbers = tuple[int | None, int | None]


def argument(index: int) -> Instruction:
    """Load the low half of an argument."""
    return (LOAD, 0, 0, 16 + 8 * index)


def verdict(what: int) -> Instruction:
    return (RETURN, 0, 0, what)


def one_of(index: int, values: tuple[int, ...], then: int = ALLOW, otherwise: int = DENY) -> list[Instruction]:
    """A body: whether the argument is one of the values."""
    count = len(values)
    tests = [(JUMP_EQUAL, count - place, 0, value) for place, value in enumerate(values)]
    return [argument(index), *tests, verdict(otherwise), verdict(then)]


def any_bit(index: int, bits: int, then: int = DENY, otherwise: int = ALLOW) -> list[Instruction]:
    """A body: whether the argument has one of the bits."""
    return [argument(index), (JUMP_SET, 0, 1, bits), verdict(then), verdict(otherwise)]


class Filter:
    """A program under construction: rules are asked in order; the first for a call decides. Raises SandboxError."""

    def __init__(self, machine: str) -> None:
        if machine not in _MACHINES:
            raise SandboxError(f"there is no list of system calls for {machine}")
        self._column = 0 if machine == "x86_64" else 1
        self.program: list[Instruction] = [
            *((LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, _MACHINES[machine]), verdict(KILL_PROCESS)),
            (LOAD, 0, 0, NR),
        ]
        if machine == "x86_64":
            self.program += [(JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), verdict(DENY)]

    def rule(self, numbers: Numbers, body: list[Instruction]) -> None:
        """If it is this call: the body, which returns in each branch."""
        number = numbers[self._column]
        if number is not None:
            self.program += [(JUMP_EQUAL, 0, len(body), number), *body]

    def from_number(self, number: int, what: int) -> None:
        """All calls from this number on."""
        self.program += [(JUMP_GREATER_EQUAL, 0, 1, number), verdict(what)]

    def otherwise(self, what: int) -> list[Instruction]:
        """The finished program."""
        return [*self.program, verdict(what)]


def packed(program: list[Instruction]) -> bytes:
    """struct sock_filter[]."""
    return b"".join(struct.pack("=HBBI", *each) for each in program)
