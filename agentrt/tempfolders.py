"""Folders of a node for what is temporary: named after it, so that the next one removes what a killed one left."""

import contextlib
import os
import shutil
import tempfile

from agentrt.cgroup.tree import lives, started


def make(prefix: str) -> str:
    """A new folder, which others may pass through and not list. Raises OSError."""
    folder = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-{started(os.getpid())}-")
    os.chmod(folder, 0o711)
    return folder


def sweep(prefix: str) -> None:
    """Remove what nodes of this user left that are gone. Raises OSError."""
    with os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            mark = entry.name.removeprefix(prefix)
            if mark != entry.name and entry.is_dir(follow_symlinks=False) and not lives(mark):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        shutil.rmtree(entry.path, ignore_errors=True)
