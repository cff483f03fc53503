"""From what is wanted of a process to `art_spawn`: one call, on the launcher's thread."""

import errno
import os
import resource
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentrt._sys import ffi, lib
from agentrt.errors import AgentrtError
from agentrt.sandbox import SandboxError
from agentrt.sandbox.seccomp import INSTRUCTION_BYTES

NEWNS, NEWUSER, NEWPID, NEWNET = 0x0002_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000

_STAGES: Final = {
    lib.ART_SPAWN_CLONE: "no process could be made",
    lib.ART_SPAWN_USER: "its user namespace could not be set up",
    lib.ART_SPAWN_MOUNT: "its working folder could not be mounted",
    lib.ART_SPAWN_NETWORK: "its network namespace could not be entered",
    lib.ART_SPAWN_FOLDER: "its working folder could not be entered",
    lib.ART_SPAWN_LIMIT: "its limits could not be set",
    lib.ART_SPAWN_FDS: "its descriptors could not be set up",
    lib.ART_SPAWN_LANDLOCK: "landlock could not be put on it",
    lib.ART_SPAWN_IDS: "its user could not be set",
    lib.ART_SPAWN_PARENT: "the node is ending",
    lib.ART_SPAWN_SECCOMP: "seccomp could not be put on it",
}
#: Stages at which a boundary could not be drawn, rather than a program not be started.
_OF_SANDBOX: Final = frozenset(
    {
        lib.ART_SPAWN_USER,
        lib.ART_SPAWN_MOUNT,
        lib.ART_SPAWN_NETWORK,
        lib.ART_SPAWN_LANDLOCK,
        lib.ART_SPAWN_IDS,
        lib.ART_SPAWN_SECCOMP,
    }
)


class SpawnError(AgentrtError):
    """A native process could not be started; it has not run."""

    code = "process_start"


class Confinement(msgspec.Struct, frozen=True):
    """What is withheld from a process. ``rules``: (rights, descriptor of a path); both stay with who made them."""

    files: int
    scopes: int
    rules: tuple[tuple[int, int], ...]
    folder_rights: int
    filter: bytes  # struct sock_filter[]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One process to be. ``fds``: its descriptors 0, 1, 2, …; it gets no others."""

    path: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    fds: Sequence[int]
    folder: str
    cgroup_fd: int = -1
    namespaces: int = 0
    net_fd: int = -1
    tmpfs: str | None = None
    user_map: str | None = None
    group_map: str | None = None
    uid: int = -1
    gid: int = -1
    nice: int = 0
    group_nice: int = 0  # of its session, where sessions are groups of the scheduler; 0: none
    idle: bool = False  # SCHED_IDLE
    reaper: bool = False  # of what it starts
    limits: Mapping[int, int] = {}  # RLIMIT_… -> bound
    confinement: Confinement | None = None


def spawn(plan: Plan) -> tuple[int, int]:
    """Start it: (pid, pidfd). Blocks the thread, which must outlive the process, for about half a millisecond; the GIL
    is not held. Raises SpawnError, or SandboxError if a boundary could not be drawn."""
    keep: list[Any] = []

    def text(value: str | None) -> Any:
        if value is None:
            return ffi.NULL
        held = ffi.new("char[]", os.fsencode(value))
        keep.append(held)
        return held

    def array(kind: str, values: Sequence[Any]) -> Any:
        held = ffi.new(kind, values)
        keep.append(held)
        return held

    args = ffi.new("art_spawn_args *")
    args.path = text(plan.path)
    args.argv = array("char *[]", [*map(text, plan.argv), ffi.NULL])
    environment = (text(f"{name}={value}") for name, value in plan.environment.items())
    args.envp = array("char *[]", [*environment, ffi.NULL])
    args.fds = array("int[]", list(plan.fds))
    args.fd_count = len(plan.fds)
    args.folder = text(plan.folder)
    args.cgroup_fd, args.namespaces, args.net_fd = plan.cgroup_fd, plan.namespaces, plan.net_fd
    args.tmpfs, args.user_map, args.group_map = text(plan.tmpfs), text(plan.user_map), text(plan.group_map)
    args.uid, args.gid, args.nice, args.reaper = plan.uid, plan.gid, plan.nice, plan.reaper
    args.group_nice, args.idle = plan.group_nice, plan.idle
    limits = [(bound, bound, kind) for kind, bound in plan.limits.items()]
    args.limits, args.limit_count = array("art_spawn_limit[]", limits), len(limits)
    if (confinement := plan.confinement) is not None:
        args.confined = True
        args.landlock_files, args.landlock_scopes = confinement.files, confinement.scopes
        args.rules = array("art_spawn_rule[]", list(confinement.rules))
        args.rule_count, args.folder_rights = len(confinement.rules), confinement.folder_rights
        instructions = ffi.from_buffer(confinement.filter)
        keep.append(instructions)
        args.filter, args.filter_count = instructions, len(confinement.filter) // INSTRUCTION_BYTES
    spawned = ffi.new("art_spawned *")
    code = lib.art_spawn(args, spawned)
    if code == 0:
        return spawned.pid, spawned.pidfd
    why = os.strerror(-code)
    if spawned.stage == lib.ART_SPAWN_EXEC:
        raise SpawnError(f"{plan.path} cannot be executed: {why}")
    message = f"{_STAGES.get(spawned.stage, 'it could not be started')}: {why}"
    denied = spawned.stage == lib.ART_SPAWN_CLONE and plan.namespaces and -code in _NOT_PERMITTED
    boundary = (spawned.stage in _OF_SANDBOX or denied) and -code not in _NO_ROOM
    raise (SandboxError if boundary else SpawnError)(f"{plan.path}: {message}")


#: Also EINVAL and ENOSYS, for what is not built in, and ENOSPC, of user.max_…_namespaces.
_NOT_PERMITTED: Final = (errno.EPERM, errno.EINVAL, errno.ENOSPC, errno.ENOSYS)
#: Of the moment, whatever the stage.
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


#: Of every process, beside those of a plan.
NO_CORE: Final = {resource.RLIMIT_CORE: 0}
