"""A small interpreter of seccomp filters."""

from agentrt.sandbox.seccomp import Instruction

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def interpret(program: list[Instruction], machine: str, number: int, *args: int, arch: int | None = None) -> int:
    """What the kernel would do with the call."""
    data = {0: number, 4: ARCH[machine] if arch is None else arch}
    data |= {16 + 8 * index: value & 0xFFFFFFFF for index, value in enumerate((*args, 0, 0, 0, 0, 0, 0))}
    assert len(program) < 4096
    accumulator = place = 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:
            accumulator = data[operand]
        elif code == 0x06:
            return operand
        else:
            met = {0x15: accumulator == operand, 0x45: bool(accumulator & operand), 0x35: accumulator >= operand}[code]
            place += if_true if met else if_false
