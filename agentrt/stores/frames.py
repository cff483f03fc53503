"""Where the frames of suspended runs are: one for a run, the newest, beside the store.

A frame may be missing at any time: its run is then replayed. So none is synced twice, and what does not fit is refused.
"""

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from agentrt.errors import InputError, StoreError, StoreFullError
from agentrt.ids import parse_run_id

_PAUSE_BYTES: Final = 1 << 20  # written at once; then others have a turn at the disk


class Frames(Protocol):
    """Blocking, from any thread, but one thread at a time for one run."""

    def put(self, run_id: str, frame: bytes) -> None:
        """Keep it, durable on return, in place of the run's last one, which else stays. Raises StoreError kinds."""

    def get(self, run_id: str) -> bytes | None:
        """The run's frame, as far as it can be read."""

    def drop(self, run_id: str) -> None:
        """It is not needed any more."""

    def sweep(self, needed: Callable[[str], bool]) -> list[str]:
        """Drop those of runs that do not need theirs; which."""


class MemoryFrames:
    """For a store in memory: gone with it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._frames: dict[str, bytes] = {}

    def put(self, run_id: str, frame: bytes) -> None:
        others = sum(len(kept) for of, kept in self._frames.items() if of != run_id)
        if others + len(frame) > self._bytes_max:
            raise _full(self._bytes_max)
        self._frames[run_id] = frame

    def get(self, run_id: str) -> bytes | None:
        return self._frames.get(run_id)

    def drop(self, run_id: str) -> None:
        self._frames.pop(run_id, None)

    def sweep(self, needed: Callable[[str], bool]) -> list[str]:
        gone = [run_id for run_id in [*self._frames] if not needed(run_id)]
        for run_id in gone:
            self.drop(run_id)
        return gone


class FolderFrames:
    """A folder with a file for each run, made at the first `put`."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._lock = threading.Lock()  # of what follows
        self._sizes: dict[str, int] | None = None  # by run; None: to be looked up
        self._used_bytes = 0

    def put(self, run_id: str, frame: bytes) -> None:
        path = self._path(run_id)
        try:
            self._resize(run_id, len(frame))
            self._write(path, frame)
        except OSError as error:
            self._look_again()
            raise StoreError(f"the frame of {run_id} cannot be kept: {error}") from error

    def _write(self, path: Path, frame: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                for at in range(0, len(frame), _PAUSE_BYTES):
                    file.write(frame[at : at + _PAUSE_BYTES])
                    os.fdatasync(file.fileno())
            os.replace(made, path)
        except OSError:
            made.unlink(missing_ok=True)
            raise
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _look_again(self) -> None:
        with self._lock:
            self._sizes = None

    def _resize(self, run_id: str, size_bytes: int) -> None:
        """The run's frame has so many bytes from now on. Raises StoreFullError, and nothing is changed; OSError."""
        with self._lock:
            if self._sizes is None:
                self._sizes = self._look()
                self._used_bytes = sum(self._sizes.values())
            before = self._sizes.get(run_id, 0)
            used_bytes = self._used_bytes + size_bytes - before
            if size_bytes > before and used_bytes > self._bytes_max:
                raise _full(self._bytes_max)
            self._used_bytes = used_bytes
            if size_bytes:
                self._sizes[run_id] = size_bytes
            else:
                self._sizes.pop(run_id, None)

    def _look(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat().st_size
        return found

    def get(self, run_id: str) -> bytes | None:
        try:
            return self._path(run_id).read_bytes()
        except OSError:
            return None

    def drop(self, run_id: str) -> None:
        with suppress(OSError):
            self._path(run_id).unlink()
            self._resize(run_id, 0)

    def sweep(self, needed: Callable[[str], bool]) -> list[str]:
        gone = []
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name.startswith("."):
                with suppress(FileNotFoundError):  # of a writer that was killed; one at work only loses a frame
                    path.unlink()
            elif _is_run_id(path.name) and not needed(path.name):
                self.drop(path.name)
                gone.append(path.name)
        self._look_again()  # others may have removed some
        return gone

    def _path(self, run_id: str) -> Path:
        if not _is_run_id(run_id):
            raise StoreError(f"{run_id!r:.100} is no run")
        return self._folder / run_id


def _full(bytes_max: int) -> StoreFullError:
    return StoreFullError(f"there are {bytes_max} bytes of frames", limit="wasm.frames_bytes_max")


def frames_beside(kind: str, path: str, bytes_max: int) -> Frames | None:
    """Where a store of that kind, at the path, has its frames; None: nowhere, for there shall be none."""
    if not bytes_max:
        return None
    return MemoryFrames(bytes_max) if kind == "memory" or not path else FolderFrames(Path(path) / "frames", bytes_max)


def _is_run_id(name: str) -> bool:
    try:
        return parse_run_id(name) == name
    except InputError:
        return False
