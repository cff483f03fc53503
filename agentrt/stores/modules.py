"""Modules of agents, kept as long as a run may need them, so that a run of an old version goes on after an upgrade.

Not in the store's own tables: a module has megabytes, and a journal that waits for them stalls. A folder of files
beside the store instead, each written under another name, synced, and renamed: a file that is there is whole. File:

    offset  size  what
    0       8     "agentrtM"
    8       1     format, 1
    9       1     n, bytes of the backend's name
    10      n     the backend's name, UTF-8
    10+n          the module as it was registered

Its name is the version, sha256 of the module as hex, which is compared when it is read.
"""

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from agentrt.errors import StoreError

_MAGIC: Final = b"agentrtM\x01"
_NAME: Final = re.compile(r"[0-9a-f]{64}")
#: A module that was registered this lately stays: a run of it may be about to be accepted.
_FRESH_S: Final = 3600.0


class KeptModule(NamedTuple):
    backend: str
    module: bytes


class Modules(Protocol):
    """Blocking; any thread."""

    def put(self, version: str, kept: KeptModule) -> None:
        """Durable when it returns; again is cheap. Raises StoreError."""

    def get(self, version: str) -> KeptModule | None:
        """None if it is not kept, or damaged. Raises StoreError if it cannot be read."""

    def versions(self) -> list[str]:
        """All that are kept."""

    def sweep(self, needed: Collection[str]) -> list[str]:
        """Remove those that nobody needs and nobody has registered lately; returns them."""


class MemoryModules:
    """For stores in memory."""

    def __init__(self) -> None:
        self._kept: dict[str, KeptModule] = {}

    def put(self, version: str, kept: KeptModule) -> None:
        self._kept[version] = kept

    def get(self, version: str) -> KeptModule | None:
        return self._kept.get(version)

    def versions(self) -> list[str]:
        return sorted(self._kept)

    def sweep(self, needed: Collection[str]) -> list[str]:
        gone = [version for version in self._kept if version not in needed]
        for version in gone:
            del self._kept[version]
        return gone


def modules_beside(kind: str, path: str) -> Modules:
    """Where a store of that kind, at the path, has its modules."""
    return MemoryModules() if kind == "memory" or not path else FolderModules(Path(path) / "modules")


class FolderModules:
    """A folder, made at the first `put`. ``now_s``: wall time, as files have it."""

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now_s = now_s
        self._lock = threading.Lock()  # between who registers a module and who removes it

    def put(self, version: str, kept: KeptModule) -> None:
        path = self._path(version)
        name = kept.backend.encode()
        content = _MAGIC + bytes([len(name)]) + name + kept.module
        try:
            with self._lock:
                now = self._now_s()
                with suppress(FileNotFoundError):
                    if path.stat().st_size == len(content) and path.read_bytes() == content:
                        os.utime(path, (now, now))
                        return
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write(path, content)
                os.utime(path, (now, now))
        except OSError as error:
            raise StoreError(f"module {version} cannot be kept: {error}", hint="Look at the store's folder") from error

    def _write(self, path: Path, content: bytes) -> None:
        made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(made, path)
        except OSError:
            made.unlink(missing_ok=True)
            raise
        for folder in (self._folder, self._folder.parent):  # the names have to be durable, too
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def get(self, version: str) -> KeptModule | None:
        try:
            content = self._path(version).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"module {version} cannot be read: {error}") from error
        start = len(_MAGIC)
        if not content.startswith(_MAGIC) or len(content) <= start:
            return None
        end = start + 1 + content[start]
        name, module = content[start + 1 : end], content[end:]
        if hashlib.sha256(module).hexdigest() != version:
            return None
        try:
            return KeptModule(name.decode(), module)
        except UnicodeDecodeError:
            return None

    def versions(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return sorted(path.name for path in self._folder.iterdir() if _NAME.fullmatch(path.name))

    def sweep(self, needed: Collection[str]) -> list[str]:
        gone: list[str] = []
        for version in self.versions():
            if version not in needed:
                with self._lock, suppress(FileNotFoundError):
                    path = self._path(version)
                    if self._now_s() - path.stat().st_mtime > _FRESH_S:
                        path.unlink()
                        gone.append(version)
        for left in self._folder.glob(".*") if self._folder.is_dir() else ():  # by writers that were killed
            with suppress(FileNotFoundError):
                if self._now_s() - left.stat().st_mtime > _FRESH_S:
                    left.unlink()
        return gone

    def _path(self, version: str) -> Path:
        if not _NAME.fullmatch(version):
            raise StoreError(f"{version!r} is no version of a module")
        return self._folder / version
