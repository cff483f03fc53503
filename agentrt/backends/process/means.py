"""What this machine lets the node do to confine a process, found by doing it once to a program that does nothing."""

import os
import platform
import shutil
import stat
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from agentrt._sys import lib
from agentrt.backends.process.filter import filter_here
from agentrt.backends.process.spawn import (
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUSER,
    Confinement,
    Plan,
    SpawnError,
    spawn,
)
from agentrt.sandbox import SandboxError, landlock

PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_NOBODY: Final = 65534
_LANDLOCK_SIGNALS: Final = 6  # the first ABI that keeps signals inside

_READ: Final = landlock.EXECUTE | landlock.READ_FILE | landlock.READ_DIR
_USE: Final = landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE
#: What any program needs. Nothing of /proc: it tells of other processes.
_PATHS: Final = {
    **dict.fromkeys(("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store"), _READ),
    **dict.fromkeys(("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"), _READ),
    **dict.fromkeys(("/etc/localtime", "/etc/ssl", "/etc/pki", "/etc/ca-certificates"), _READ),
    **dict.fromkeys(("/dev/urandom", "/dev/random"), landlock.READ_FILE),
    **dict.fromkeys(("/dev/null", "/dev/zero", "/dev/full"), _USE),
}
#: With network granted.
_NETWORK_PATHS: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/services", "/etc/gai.conf")


class Means(msgspec.Struct, frozen=True):
    """``why``: the boundary that cannot be drawn; empty: all can. ``degraded``: what else is not as it could be."""

    abi: int = 0  # of landlock; 0: none
    namespaces: int = 0
    entered_net: bool = False  # network namespaces are made ahead and entered
    drops_uid: bool = False
    why: str = ""
    degraded: tuple[str, ...] = ()

    @property
    def tmpfs(self) -> bool:
        """The working folder is a file system of its own, bounded in bytes and files."""
        return bool(self.namespaces & NEWNS)

    def maps(self, uid: int) -> tuple[str | None, str | None, int]:
        """(uid_map, gid_map, the user's id as the process sees it)."""
        if not self.namespaces & NEWUSER:
            return None, None, uid
        inner = os.geteuid() or _NOBODY
        return f"{inner} {os.geteuid()} 1\n", f"{inner} {os.getegid()} 1\n", inner


class Paths:
    """Descriptors of the paths that processes may use, for their landlock rules. One thread; `close` lets go."""

    def __init__(self, abi: int) -> None:
        self._abi = abi
        self._opened: dict[str, tuple[int, int]] = {}  # path -> descriptor, the rights that a rule for it may name

    def confinement(self, read: Iterable[str], write: Iterable[str], *, network: bool, sockets: bool) -> Confinement:
        """For a process that may read and execute ``read``, and change ``write``. What does not exist is left out.
        Raises SandboxError (no list of system calls for this machine)."""
        everything = landlock.file_rights(self._abi)
        inside = everything & ~(landlock.MAKE_CHAR | landlock.MAKE_BLOCK | landlock.IOCTL_DEV)
        rules = []
        paths = {**_PATHS, **dict.fromkeys(read, _READ), **dict.fromkeys(write, inside)}
        if network:
            paths |= dict.fromkeys(_NETWORK_PATHS, landlock.READ_FILE)
        if self._abi:
            for path, rights in paths.items():
                opened = self._open(path)
                if opened is not None:
                    rules.append((rights & everything & opened[1], opened[0]))
        scopes = landlock.scopes(self._abi)
        return Confinement(everything, scopes, tuple(rules), inside if self._abi else 0, filter_here(sockets))

    def _open(self, path: str) -> tuple[int, int] | None:
        known = self._opened.get(path)
        if known is None:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                return None
            folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            known = self._opened[path] = fd, ~0 if folder else landlock.OF_FILES
        return known

    def close(self) -> None:
        for fd, _ in self._opened.values():
            os.close(fd)
        self._opened.clear()


def find_means(folder: str, uid: int) -> Means:
    """Try the ways there are, the tightest first. ``folder``: an empty one, where working folders are to be."""
    abi = lib.art_sys_landlock_abi()
    ways = []
    root = os.geteuid() == 0
    if root:
        ways.append(Means(max(0, abi), NEWPID | NEWNS, entered_net=True, drops_uid=True))
    ways.append(Means(max(0, abi), NEWUSER | NEWPID | NEWNS | NEWNET))
    ways.append(Means(max(0, abi), 0, drops_uid=root))
    if abi < 1:
        return msgspec.structs.replace(_first(ways, folder, uid), why=f"no landlock: {os.strerror(-abi)}")
    return _first(ways, folder, uid)


def _first(ways: Sequence[Means], folder: str, uid: int) -> Means:
    failures = []
    for means in ways:
        try:
            _try(means, folder, uid)
        except (SandboxError, SpawnError, OSError) as error:
            failures.append(str(error))
            continue
        if means.namespaces:
            return means
        degraded = ("no namespaces: working folders are bounded by file only", *failures)
        if not (means.drops_uid or means.abi >= _LANDLOCK_SIGNALS):
            why = f"a process could send signals to the node ({'; '.join(failures)})"
            return msgspec.structs.replace(means, why=why, degraded=degraded)
        return msgspec.structs.replace(means, degraded=degraded)
    return Means(why="; ".join(failures) or "nothing can be confined")


def _try(means: Means, folder: str, uid: int) -> None:
    program = shutil.which("true", path=PATH)
    if program is None:
        raise SpawnError("there is no program true")
    net_fd = -1
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    paths = Paths(means.abi)
    try:
        if means.entered_net and (net_fd := lib.art_spawn_network()) < 0:
            raise SandboxError(f"no network namespace: {os.strerror(-net_fd)}")
        user_map, group_map, inner = means.maps(uid)
        plan = Plan(
            path=program,
            argv=[program],
            environment={},
            fds=[null] * 3,
            folder=folder,
            namespaces=means.namespaces,
            net_fd=net_fd,
            tmpfs=tmpfs_options(1 << 20, 16, inner) if means.tmpfs else None,
            user_map=user_map,
            group_map=group_map,
            uid=uid if means.drops_uid else -1,
            gid=uid if means.drops_uid else -1,
            confinement=paths.confinement((), (), network=False, sockets=bool(means.namespaces)),
        )
        _, pidfd = spawn(plan)
        try:
            ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        finally:
            os.close(pidfd)
        if ended is None or ended.si_code != os.CLD_EXITED or ended.si_status != 0:
            raise SandboxError(f"{program} does not run confined on {platform.release()}")
    finally:
        paths.close()
        os.close(null)
        if net_fd >= 0:
            os.close(net_fd)


def tmpfs_options(size_bytes: int, files: int, uid: int) -> str:
    """As mount(8) takes them."""
    return f"size={size_bytes},nr_inodes={files},mode=0700,uid={uid},gid={uid}"
