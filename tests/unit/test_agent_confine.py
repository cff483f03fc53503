"""The seccomp filter, run by a small interpreter: what it lets through on both machines."""

import errno
import os

import pytest

from agentrt.agents import confine
from agentrt.agents.confine import filter_program, readable_paths
from agentrt.sandbox import SandboxError
from tests.unit.bpf_kit import interpret

PID = 4711
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000


def verdict(machine: str, number: int, *args: int, forking: bool = False, arch: int | None = None) -> int:
    """What the kernel would do with the call."""
    return interpret(filter_program(machine, PID, forking), machine, number, *args, arch=arch)


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_hosts_may_compute_and_talk_to_their_node(machine: str, column: int) -> None:
    for numbers in ((0, 63), (1, 64), (45, 207), (44, 206), (9, 222), (202, 98), (228, 113), (231, 94)):
        assert verdict(machine, numbers[column]) == ALLOW


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_hosts_may_not_reach_anything_else(machine: str, column: int) -> None:
    refused = {
        "socket": (41, 198),
        "connect": (42, 203),
        "clone": (56, 220),
        "execve": (59, 221),
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "prctl": (157, 167),
        "io_uring_setup": (425, 425),
        "memfd_create": (319, 279),
        "bpf": (321, 280),
        "mount": (165, 40),
        "sendmsg": (46, 211),
        "unlinkat": (263, 35),
        "pidfd_open": (434, 434),
        "pidfd_send_signal": (424, 424),
    }
    for name, numbers in refused.items():
        assert verdict(machine, numbers[column]) == EPERM, name
    assert verdict(machine, 435) == ENOSYS  # clone3: the C library then tries clone
    assert verdict(machine, 0, arch=0x40000003) == KILL


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_arguments_are_looked_at(machine: str, column: int) -> None:
    kill, tgkill, openat, fcntl, ioctl, prlimit = (
        pair[column] for pair in ((62, 129), (234, 131), (257, 56), (72, 25), (16, 29), (302, 261))
    )
    assert verdict(machine, kill, PID) == verdict(machine, tgkill, PID) == ALLOW
    for other in (PID + 1, 1, 0, -1, -PID):
        assert verdict(machine, kill, other) == verdict(machine, tgkill, other) == EPERM
    assert verdict(machine, openat, 0, 0, os.O_RDONLY | os.O_CLOEXEC) == ALLOW
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_CREAT, os.O_RDONLY | os.O_TRUNC):
        assert verdict(machine, openat, 0, 0, flags) == EPERM
    assert verdict(machine, fcntl, 3, 3) == ALLOW
    assert verdict(machine, fcntl, 3, 8) == EPERM  # F_SETOWN: signals to others
    assert verdict(machine, ioctl, 0, 0x5401) == ALLOW
    assert verdict(machine, ioctl, 0, 0x5412) == EPERM  # TIOCSTI: typing into the operator's terminal
    assert verdict(machine, prlimit, 0) == ALLOW
    assert verdict(machine, prlimit, 1) == EPERM


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_templates_may_fork_but_start_no_thread(machine: str, column: int) -> None:
    clone = (56, 220)[column]
    assert verdict(machine, clone, 17, forking=True) == ALLOW
    assert verdict(machine, clone, 0x3D0F00, forking=True) == EPERM
    assert verdict(machine, (59, 221)[column], forking=True) == EPERM
    assert verdict(machine, (41, 198)[column], forking=True) == EPERM
    assert verdict(machine, (62, 129)[column], PID, forking=True) == EPERM


def test_x32_calls_are_refused() -> None:
    assert verdict("x86_64", 0x40000000) == EPERM


def test_a_kernel_without_landlock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrt.sandbox.landlock.CREATE_RULESET", 100_000)  # a call that no kernel has
    with pytest.raises(SandboxError, match="landlock is not available"):
        confine.restrict_files({})


def test_unknown_machines_are_refused() -> None:
    with pytest.raises(SandboxError):
        filter_program("riscv64", 1, False)


def test_only_code_is_readable_in_folders_of_code(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import pathlib

    folder = pathlib.Path(str(tmp_path))
    (folder / "helper.py").write_text("")
    (folder / ".env").write_text("SECRET=1")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "data").mkdir()
    monkeypatch.syspath_prepend(str(folder))
    paths = readable_paths([])
    inside = {path for path in paths if path.startswith(str(folder))}
    assert inside == {str(folder), str(folder / "helper.py"), str(folder / "package")}
    assert paths[str(folder)] == 1 << 3  # names only
    assert not any(path in paths for path in ("/", "/etc", "/home", "/root", "/tmp", "/proc", "/usr"))
