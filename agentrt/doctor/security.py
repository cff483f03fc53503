"""Checks of what confines processes: landlock, seccomp, and the process descriptors used to signal them."""

import errno
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agentrt._sys import lib
from agentrt.doctor import Check, Examined, Examiner
from agentrt.machine import read_text

#: The first ABI that also rules truncation, so that a read-only rule is one.
LANDLOCK_ABI_GOOD: Final = 3
_REASONS: Final = {errno.ENOSYS: "not built into this kernel, or filtered", errno.EOPNOTSUPP: "switched off at boot"}


def landlock_abi() -> tuple[int, str]:
    """(ABI, "") or (0, why there is none)."""
    abi = lib.art_sys_landlock_abi()
    return (abi, "") if abi > 0 else (0, _REASONS.get(-abi, os.strerror(-abi)))


def check_landlock(examined: Examined) -> Iterator[Check]:
    abi, why = landlock_abi()
    yield Check(
        name="landlock",
        state="works" if abi >= LANDLOCK_ABI_GOOD else "degraded",
        found=f"ABI {abi}" if abi else "none",
        why=""
        if abi >= LANDLOCK_ABI_GOOD
        else "truncating files cannot be forbidden"
        if abi
        else f"{why}: processes cannot be confined to folders",
        hint="" if abi else "Boot with lsm=landlock,… on Linux 5.13 or later",
        data={"abi": abi},
    )


def check_seccomp(examined: Examined) -> Iterator[Check]:
    actions = (read_text("/proc/sys/kernel/seccomp/actions_avail") or "").split()
    ok = "errno" in actions and "kill_process" in actions
    status = read_text("/proc/self/status") or ""
    mode = next((line.split()[1] for line in status.splitlines() if line.startswith("Seccomp:")), "?")
    found = "filters are available" if ok else "none"
    if mode == "2":
        found += ", and this process is already under one"
    yield Check(
        name="seccomp",
        state="works" if ok else "degraded",
        found=found,
        why="" if ok else "processes cannot be kept from making certain system calls",
        data={"actions": actions, "mode": mode, "machine": platform.machine()},
    )


def check_pidfd(examined: Examined) -> Iterator[Check]:
    """Processes are signalled through descriptors: a reused process id must never be hit."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Check(name="pidfd", state="works", found="processes can be signalled by descriptor")
    except OSError as error:
        yield Check(
            name="pidfd",
            state="refused",
            found="none",
            why=f"{error.strerror}: tool hosts cannot be stopped safely",
            hint="A seccomp filter of the container may forbid pidfd_open",
        )


def check_native_processes(examined: Examined) -> Iterator[Check]:
    """What confines them is put on a program that does nothing."""
    from agentrt.backends.process.means import find_means

    with tempfile.TemporaryDirectory(prefix="agentrt-doctor-") as folder:
        os.chmod(folder, 0o711)
        means = find_means(folder, examined.config.process.uid_base)
    parts = ["landlock and seccomp"] if means.abi else []
    parts += ["namespaces", "a file system of their own"] if means.namespaces else []
    parts += ["a user of their own"] if means.drops_uid else []
    yield Check(
        name="native processes",
        state="refused" if means.why else "degraded" if means.degraded else "works",
        found="kept inside by " + ", ".join(parts) if parts else "nothing keeps them inside",
        why=means.why or "; ".join(means.degraded),
        hint="Run the node as root, or allow user namespaces" if means.why or means.degraded else "",
        data={"landlock_abi": means.abi, "namespaces": bool(means.namespaces), "own_users": means.drops_uid},
    )


def check_host_users(examined: Examined) -> Iterator[Check]:
    """Whether hosts of Python agents may be other users, as far as the interpreter is concerned."""
    from agentrt.agents.confine import readable_paths
    from agentrt.users import open_to_all

    root = os.geteuid() == 0
    closed = next((path for path in readable_paths(()) if not open_to_all(Path(path))), "") if root else ""
    why = f"only its owner may read {closed}" if closed else "" if root else "the node is not root"
    on = examined.config.python.uid_base > 0
    yield Check(
        name="host users",
        state="degraded" if why or not on else "works",
        found="hosts run as the node's user" if why or not on else "each host is a user of its own",
        why=why or ("" if on else "python.uid_base is 0"),
        hint="Install Python where any user may read it" if closed else "",
        data={"closed": closed},
    )


EXAMINERS: Final[tuple[Examiner, ...]] = (
    check_landlock,
    check_seccomp,
    check_pidfd,
    check_native_processes,
    check_host_users,
)
