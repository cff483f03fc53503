"""Whether a folder's file system keeps LMDB's promises, and how much room it has left.

LMDB needs locks, shared mappings and syncs that mean what they say. Network file systems share none of them reliably;
an overlay copies a file up behind an open mapping and is usually thrown away with its container.
"""

import os
from pathlib import Path
from typing import Final

from agentrt.errors import StorePlaceError

#: File system types, as mountinfo spells them, that are refused; fuse and all fuse.* are too.
REFUSED: Final = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "vboxsf", "ceph", "glusterfs", "lustre", "afs"),
        *("ocfs2", "gfs2", "beegfs", "gpfs", "pvfs2", "coda", "ncpfs", "overlay", "overlayfs", "aufs", "unionfs"),
    }
)


def file_system_of(path: Path, mountinfo: str | None = None) -> str | None:
    """Type of the file system that holds ``path``; None if it cannot be told. ``mountinfo``: the text of
    /proc/self/mountinfo, read by default."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    where = os.path.realpath(path)
    best = -1
    found: str | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        mount = _unescape(fields[4]).rstrip("/")
        # Of two mounts on one point the later one is on top.
        if len(mount) >= best and (where == mount or where.startswith(mount + "/")):
            best, found = len(mount), after.split(" ")[0]
    return found


def check_place(folder: Path) -> None:
    """Raises StorePlaceError if a store must not live there."""
    kind = file_system_of(folder)
    if kind is not None and (kind in REFUSED or kind == "fuse" or kind.startswith("fuse.")):
        raise StorePlaceError(
            f"{folder} is on {kind}, which does not keep a store's promises",
            hint="Use a folder on a local disk (in a container: a volume), or set store.force_place",
        )


def free_bytes(folder: Path) -> int:
    """Bytes that an unprivileged process may still write there."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _unescape(text: str) -> str:
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, plain)
    return text
