"""What this process may do with cgroups: where its group is, whether it may divide it, and which controllers it has."""

import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from agentrt.machine import read_machine, read_text, unified_group

#: Every controller that a leaf may use. None is required: what is not there is a limit that does not hold, and said.
CONTROLLERS: Final = ("cpu", "cpuset", "io", "memory", "pids")
_V1_NAMES: Final = {"io": "blkio"}


class Layout(msgspec.Struct, frozen=True):
    """``kind``: v2, hybrid (controllers of both versions), v1, none. ``group``: the v2 group of this process.
    ``whole``: it is the top of the hierarchy, where processes and controllers may meet. ``usable``: groups can be made
    below it and nobody else manages it, else ``why`` says what is in the way. ``missing``: controller -> why it is not
    to be had there; unknown is not unlimited, so each is named."""

    kind: str
    group: Path | None
    whole: bool
    usable: bool
    why: str
    controllers: frozenset[str]
    missing: dict[str, str]


def read_layout(root: str = "", *, group: Path | None = None) -> Layout:
    """The layout as this process sees it, or as it would in ``group``, which an operator has named. ``root`` is put
    before every path, as in `agentrt.machine`."""
    seen = read_machine(root).cgroups
    versions = {each.version for each in seen}
    own = unified_group(root)
    named = group is not None
    if group is None:
        group = own
    if versions == {1, 2} or (versions == {1} and own is not None):
        kind = "hybrid"
    elif own is not None:
        kind = "v2"
    else:
        kind = "v1" if versions == {1} else "none"
    controllers = frozenset((read_text(group / "cgroup.controllers") or "").split() if group else ())
    v1 = {each.controller for each in seen if each.version == 1}
    missing = {}
    for name in CONTROLLERS:
        if name not in controllers:
            elsewhere = _V1_NAMES.get(name, name) in v1
            missing[name] = "bound to cgroup v1 on this host" if elsewhere else "not given to this group"
    whole = group is not None and (group / "cgroup.procs").exists() and not (group / "cgroup.events").exists()
    why = _hindrance(group, whole, named)
    return Layout(kind, group, whole, not why, why, controllers & frozenset(CONTROLLERS), missing)


def _hindrance(group: Path | None, whole: bool, named: bool) -> str:
    if group is None:
        return "there is no cgroup v2 hierarchy"
    if not (group / "cgroup.procs").exists():
        return f"{group} is no cgroup"
    for path in (group, group / "cgroup.procs", group / "cgroup.subtree_control"):
        if not os.access(path, os.W_OK):
            return f"{path} may not be written"
    if named or whole or _delegated(group):
        return ""
    return f"{group} is not delegated to this process: who manages it may take it back"


def _delegated(group: Path) -> bool:
    """systemd marks what it delegates; what belongs to an ordinary user was given to it; at the top of what a container
    sees nobody else is."""
    for mark in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(group, mark) == b"1":
                return True
        except OSError:
            continue
    owner = group.stat()
    if owner.st_uid != 0 and owner.st_uid == os.geteuid() and owner.st_mode & stat.S_IWUSR:
        return True
    return os.path.ismount(group)
