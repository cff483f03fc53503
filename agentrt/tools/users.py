"""A user of its own for each tool host of a node of root, if `tools.uid_base` says so, and the folder that is his.

Tools may do what their user may, so who wants them apart gives them users that may nothing. What such a host has to
read, any user must be able to; if not, it is refused: a tool that ran as root after all would be a surprise.
"""

import errno
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from agentrt import tempfolders, users

_FOLDER: Final = "agentrt-tools-"
_remover: Final = ThreadPoolExecutor(1, "agentrt-tool-folders")


class HostUser:
    """``uid``, and ``folder``: his home and the host's working folder, empty at first."""

    def __init__(self, uid: int, folder: str) -> None:
        self.uid: Final = uid
        self.folder: Final = folder
        self._left = False

    def leave(self) -> None:
        """The host is gone. Does not block."""
        if not self._left:
            self._left = True
            _remover.submit(self._remove)

    def _remove(self) -> None:
        shutil.rmtree(os.path.dirname(self.folder), ignore_errors=True)
        users.give(self.uid)


class HostUsers:
    """Gives them out. On the loop's thread."""

    def __init__(self) -> None:
        self._swept = False
        self._looked: tuple[str, ...] | None = None  # sys.path, as it was
        self._closed = ""

    def take(self, base: int) -> HostUser | None:
        """One for a host that is about to start; None: it runs as the node, which is not root, or ``base`` is 0. Raises
        OSError: others may not read what it needs, or there is no place for its folder."""
        if not base or os.geteuid() != 0:
            return None
        if closed := self._closed_path():
            raise OSError(errno.EACCES, f"tools.uid_base is set, and only its owner may read {closed}")
        if not self._swept:
            self._swept = True
            _remover.submit(tempfolders.sweep, _FOLDER)
        outer = tempfolders.make(_FOLDER)
        uid = users.take_next(base)
        try:
            folder = os.path.join(outer, "home")
            os.mkdir(folder, 0o700)
            os.chown(folder, uid, uid)
        except OSError:
            users.give(uid)
            shutil.rmtree(outer, ignore_errors=True)
            raise
        return HostUser(uid, folder)

    def _closed_path(self) -> str:
        """What of the interpreter and of the code on sys.path others may not read."""
        path = tuple(sys.path)
        if path != self._looked:
            from agentrt.agents.confine import readable_paths

            self._closed = next((each for each in readable_paths(()) if not users.open_to_all(Path(each))), "")
            self._looked = path
        return self._closed
