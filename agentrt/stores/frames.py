"""Where the frames of suspended runs are: files beside the store, each under its run and its own id.

A frame may be missing at any time: its run is then replayed. So what does not fit is refused. Which of a run's frames
counts is said by its journal, so a new one never takes the place of another: who has had its name journaled has the
others removed (`keep`). One that a run could hardly do without has a second copy.
"""

import os
import re
import secrets
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from agentrt import _core
from agentrt._sys import ffi, lib
from agentrt.errors import FrameError, InputError, StoreError, StoreFullError
from agentrt.ids import parse_run_id

#: The most there are of a frame.
COPIES_MAX: Final = 2
_PAUSE_BYTES: Final = 256 << 10  # written at once; then others have the disk for as long as that took
_PAUSE_NS_MAX: Final = 20_000_000
_SPARE_BYTES_MAX: Final = 8 << 20  # of the memory that is kept to read into
_SECOND: Final = ".2"
_MEMORY_BYTES_MAX: Final = 4 << 30  # of any 32-bit guest
_ID: Final = re.compile(r"[0-9a-f]{32}\Z")


#: A frame's bytes; large ones are not copied with the GIL held.
FrameData = bytes | memoryview


class Kept(NamedTuple):
    """A frame as it was kept, unopened, and the one that it is a delta to. ``copy``: which of its copies, from 0."""

    frame: FrameData
    base: FrameData | None = None
    copy: int = 0


class Frames(Protocol):
    """Blocking, from any thread, but one thread at a time for one run. Frames' ids are 32 hex digits."""

    def put(self, run_id: str, frame_id: str, frame: FrameData, copies: int = 1) -> None:
        """Keep it, durable on return, beside the run's others. Raises StoreError kinds, and nothing is changed."""

    def get(self, run_id: str, frame_id: str, copy: int = 0) -> FrameData | None:
        """That copy of the frame, as far as it can be read."""

    def keep(self, run_id: str, frame_ids: Collection[str]) -> None:
        """The run needs no others any more."""

    def drop(self, run_id: str) -> None:
        """The run needs none any more."""

    def sweep(self, needed: Callable[[str], bool]) -> list[str]:
        """Drop those of runs that do not need theirs; which."""


class MemoryFrames:
    """For a store in memory: gone with it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._frames: dict[str, dict[str, FrameData]] = {}

    def put(self, run_id: str, frame_id: str, frame: FrameData, copies: int = 1) -> None:
        used = sum(len(each) for kept in [*self._frames.values()] for each in [*kept.values()])
        if used + len(frame) > self._bytes_max:
            raise _full(self._bytes_max)
        self._frames.setdefault(run_id, {})[frame_id] = frame

    def get(self, run_id: str, frame_id: str, copy: int = 0) -> FrameData | None:
        return None if copy else self._frames.get(run_id, {}).get(frame_id)

    def keep(self, run_id: str, frame_ids: Collection[str]) -> None:
        kept = self._frames.get(run_id, {})
        for frame_id in [*kept]:
            if frame_id not in frame_ids:
                del kept[frame_id]

    def drop(self, run_id: str) -> None:
        self._frames.pop(run_id, None)

    def sweep(self, needed: Callable[[str], bool]) -> list[str]:
        gone = [run_id for run_id in [*self._frames] if not needed(run_id)]
        for run_id in gone:
            self.drop(run_id)
        return gone


class FolderFrames:
    """A folder with a file for each copy of each frame, named RUN.ID and RUN.ID.2; made at the first `put`."""

    def __init__(self, folder: Path, bytes_max: int, passing: Callable[[str], None] | None = None) -> None:
        """``passing`` is told what is about to be done to the disk: write, sync, rename, remove."""
        self._folder = folder
        self._bytes_max = bytes_max
        self._passing = passing
        self._lock = threading.Lock()  # of what follows
        self._sizes: dict[str, dict[str, int]] | None = None  # by run and file; None: to be looked up
        self._used_bytes = 0
        self._spare: _core.FrameBytes | None = None

    def put(self, run_id: str, frame_id: str, frame: FrameData, copies: int = 1) -> None:
        names = [_name(run_id, frame_id, copy) for copy in range(copies)]
        try:
            self._take_room(run_id, dict.fromkeys(names, len(frame)))
            for name in names:
                self._write(name, frame)
            self._sync_folder()
        except OSError as error:
            for name in names:
                with suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
            self._look_again()
            raise StoreError(f"the frame of {run_id} cannot be kept: {error}") from error

    def _write(self, name: str, frame: FrameData) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / name
        made = path.with_name(f".{name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, len(frame))  # a full disk says so before anything is written
                step = len(frame) or 1 if self._passing is None else _PAUSE_BYTES
                for at in range(0, len(frame), step):
                    self._pass("write")
                    self._write_paced(file.fileno(), memoryview(frame)[at : at + step], at)
                self._pass("sync")
                os.fdatasync(file.fileno())
            self._pass("rename")
            os.replace(made, path)
        except OSError:
            made.unlink(missing_ok=True)
            raise

    @staticmethod
    def _write_paced(fd: int, data: memoryview, at: int) -> None:
        """All of it in one call, so that a thread of low priority does not take the GIL for each piece: while it waits
        for a core with it, the control thread waits for both. Raises OSError."""
        error = lib.art_sys_file_write_paced(fd, ffi.from_buffer(data), len(data), at, _PAUSE_BYTES, _PAUSE_NS_MAX)
        if error:
            raise OSError(-error, os.strerror(-error))

    def _sync_folder(self) -> None:
        self._pass("sync")
        handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _pass(self, what: str) -> None:
        if self._passing is not None:
            self._passing(what)

    def _look_again(self) -> None:
        with self._lock:
            self._sizes = None

    def _known(self) -> dict[str, dict[str, int]]:
        """With the lock held. Raises OSError."""
        if self._sizes is None:
            self._sizes = self._look()
            self._used_bytes = sum(sum(files.values()) for files in self._sizes.values())
        return self._sizes

    def _take_room(self, run_id: str, files: dict[str, int]) -> None:
        """Raises StoreFullError, and nothing is changed; OSError."""
        with self._lock:
            mine = self._known().setdefault(run_id, {})
            more = sum(files.values()) - sum(mine.get(name, 0) for name in files)
            if self._used_bytes + more > self._bytes_max:
                raise _full(self._bytes_max)
            self._used_bytes += more
            mine.update(files)

    def _look(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found.setdefault(entry.name.partition(".")[0], {})[entry.name] = entry.stat().st_size
        return found

    def get(self, run_id: str, frame_id: str, copy: int = 0) -> FrameData | None:
        try:
            with open(self._folder / _name(run_id, frame_id, copy), "rb", buffering=0) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                data = self._room(size_bytes)[:size_bytes]
                at = 0
                while at < size_bytes and (read := file.readinto(data[at:])):
                    at += read
                return data[:at].toreadonly()
        except (OSError, MemoryError):
            return None

    def _room(self, size_bytes: int) -> memoryview:
        """For so much at least. What the last frame was in if nobody has that any more: to be given memory, and to give
        it back, takes longer than to read into it."""
        with self._lock:
            spare, self._spare = self._spare, None
            if spare is None or spare.looked_at or len(spare) < size_bytes:
                spare = _core.FrameBytes(size_bytes)
            room = memoryview(spare)
            if len(spare) <= _SPARE_BYTES_MAX:
                self._spare = spare
            return room

    def keep(self, run_id: str, frame_ids: Collection[str]) -> None:
        wanted = {_name(run_id, frame_id, copy) for frame_id in frame_ids for copy in range(COPIES_MAX)}
        with suppress(OSError):
            with self._lock:
                gone = self._known().get(run_id, {}).keys() - wanted
            self._remove(run_id, gone)

    def drop(self, run_id: str) -> None:
        self.keep(run_id, ())

    def _remove(self, run_id: str, names: Collection[str]) -> None:
        for name in sorted(names):
            with suppress(FileNotFoundError):
                self._pass("remove")
                (self._folder / name).unlink()
        with self._lock:
            files = self._known().get(run_id, {})
            self._used_bytes -= sum(files.pop(name, 0) for name in names)
            if not files:
                self._known().pop(run_id, None)

    def sweep(self, needed: Callable[[str], bool]) -> list[str]:
        self._look_again()  # others may have removed some
        with suppress(OSError):
            with self._lock:
                runs = {run_id: [*files] for run_id, files in self._known().items()}
            gone = []
            for run_id, names in runs.items():
                if not run_id:  # of a writer that was killed; one at work only loses a frame
                    self._remove(run_id, names)
                elif _is_run_id(run_id) and not needed(run_id):
                    self._remove(run_id, names)
                    gone.append(run_id)
            return gone
        return []


def _name(run_id: str, frame_id: str, copy: int) -> str:
    if not _is_run_id(run_id) or _ID.match(frame_id) is None:
        raise StoreError(f"{run_id!r:.100} is no run, or {frame_id!r:.100} no frame of one")
    return f"{run_id}.{frame_id}{_SECOND if copy else ''}"


def family_of(frames: Frames, run_id: str, frame_id: str) -> list[tuple[str, bytes]]:
    """The frame, and before it what it is a delta to: (id, frame) each; nothing if they are not there whole."""
    for copy in range(COPIES_MAX):
        data = frames.get(run_id, frame_id, copy)
        try:
            base = None if data is None else opened(data).base_id
        except FrameError:
            continue
        if data is None:
            continue
        if base is None:
            return [(frame_id, bytes(data))]
        before = family_of(frames, run_id, base.hex())
        if len(before) == 1:
            return [*before, (frame_id, bytes(data))]
    return []


def opened(frame: FrameData) -> "_core.Frame":
    """Raises FrameError: it is damaged, its pages left aside."""
    return _core.Frame(frame, memory_bytes_max=_MEMORY_BYTES_MAX)


def _full(bytes_max: int) -> StoreFullError:
    return StoreFullError(f"there are {bytes_max} bytes of frames", limit="wasm.frames_bytes_max")


def frames_beside(kind: str, path: str, bytes_max: int, passing: Callable[[str], None] | None = None) -> Frames | None:
    """Where a store of that kind, at the path, has its frames; None: nowhere, for there shall be none. ``passing``: see
    `FolderFrames`."""
    if not bytes_max:
        return None
    if kind == "memory" or not path:
        return MemoryFrames(bytes_max)
    return FolderFrames(Path(path) / "frames", bytes_max, passing)


def _is_run_id(name: str) -> bool:
    try:
        return parse_run_id(name) == name
    except InputError:
        return False
