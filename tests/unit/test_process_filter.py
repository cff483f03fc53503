"""The seccomp profile of native processes, run by a small interpreter; what the kernel makes of it is tested by
tests/e2e/test_process_escapes.py."""

import errno

import pytest

from agentrt.backends.process.filter import DENIED, filter_program
from agentrt.sandbox import SandboxError
from tests.unit.bpf_kit import interpret

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
COLUMNS = [("x86_64", 0), ("aarch64", 1)]


def verdict(machine: str, number: int, *args: int, sockets: bool = True, arch: int | None = None) -> int:
    return interpret(filter_program(machine, sockets), machine, number, *args, arch=arch)


@pytest.mark.parametrize(("machine", "column"), COLUMNS)
def test_ordinary_calls_are_allowed(machine: str, column: int) -> None:
    calls = {
        "read": (0, 63), "openat": (257, 56), "execve": (59, 221), "mmap": (9, 222), "futex": (202, 98),
        "kill": (62, 129), "wait4": (61, 260), "connect": (42, 203), "prctl": (157, 167), "pipe2": (293, 59),
        "unlinkat": (263, 35), "memfd_create": (319, 279), "getrandom": (318, 278), "rseq": (334, 293),
        "close_range": (436, 436), "faccessat2": (439, 439), "landlock_restrict_self": (446, 446),
    }  # fmt: skip
    for name, numbers in calls.items():
        assert verdict(machine, numbers[column]) == ALLOW, name


@pytest.mark.parametrize(("machine", "column"), COLUMNS)
def test_what_is_listed_is_refused_and_what_is_newer_does_not_exist(machine: str, column: int) -> None:
    for name, numbers in DENIED.items():
        if (number := numbers[column]) is not None:
            assert verdict(machine, number) == EPERM, name
    assert verdict(machine, 435) == ENOSYS  # clone3: the C library then tries clone
    assert verdict(machine, 463) == verdict(machine, 5000) == ENOSYS
    assert verdict(machine, 0, arch=0x40000003) == KILL


@pytest.mark.parametrize(("machine", "column"), COLUMNS)
def test_arguments_are_looked_at(machine: str, column: int) -> None:
    clone, socket, ioctl, personality = (pair[column] for pair in ((56, 220), (41, 198), (16, 29), (135, 92)))
    assert verdict(machine, clone, 0x3D0F00) == verdict(machine, clone, 17) == ALLOW  # a thread, a fork
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, namespace | 17) == EPERM
    for family in (1, 2, 10, 16):
        assert verdict(machine, socket, family) == ALLOW
        assert verdict(machine, socket, family, sockets=False) == (ALLOW if family == 1 else EPERM)
    for family in (17, 38, 40):
        assert verdict(machine, socket, family) == EPERM
    assert verdict(machine, ioctl, 0, 0x5401) == ALLOW
    assert verdict(machine, ioctl, 0, 0x5412) == verdict(machine, ioctl, 0, 0x1_0000_5412) == EPERM
    assert verdict(machine, personality, 0xFFFFFFFF) == ALLOW
    assert verdict(machine, personality, 0x0400000) == EPERM  # READ_IMPLIES_EXEC


def test_x32_calls_are_refused() -> None:
    assert verdict("x86_64", 0x40000000) == EPERM


def test_unknown_machines_are_refused() -> None:
    with pytest.raises(SandboxError):
        filter_program("riscv64", False)
