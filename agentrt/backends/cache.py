"""The cache of compiled modules.

An artifact is native code that the engine runs as it is, so an entry must be authentic: the folder and its key are the
user's alone (0700, 0600), and each entry carries an HMAC over its name and content. What does not fit is ignored and
written anew. An entry's name is the digest of the module and of everything else that its code depends on.

File: 32 bytes HMAC-SHA256(key, name | artifact), then the artifact.
"""

import hashlib
import hmac
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentrt.errors import ConfigError

_KEY_NAME: Final = "key"
_KEY_BYTES: Final = 32
_SUFFIX: Final = ".artifact"
_TAG_BYTES: Final = 32
_LEFTOVER_AGE_S: Final = 3600


class ArtifactCache:
    """Artifacts by module digest, for one core. Blocking file work: use it off the control loop."""

    def __init__(self, folder: Path, core_key: bytes, bytes_max: int) -> None:
        """``core_key``: what artifacts depend on besides their module. ``bytes_max`` 0 keeps nothing.
        Raises ConfigError if the folder cannot be made private."""
        self._folder = folder
        self._core_key = core_key
        self._bytes_max = bytes_max
        if bytes_max:
            self._key = self._open()

    def _open(self) -> bytes:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = self._folder.stat()
            if state.st_uid != os.geteuid():
                raise ConfigError(f"{self._folder} belongs to another user", hint="Set wasm.cache_path")
            if state.st_mode & 0o077:
                self._folder.chmod(0o700)
            self._sweep()
            return self._read_or_make_key()
        except OSError as error:
            raise ConfigError(f"no cache of compiled modules: {error}", hint="Set wasm.cache_path") from error

    def _sweep(self) -> None:
        """Remove what writers that were killed have left; one at work is younger."""
        for path in self._folder.glob(".*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _LEFTOVER_AGE_S:
                    path.unlink()

    def _read_or_make_key(self) -> bytes:
        path = self._folder / _KEY_NAME
        with suppress(FileNotFoundError):
            key = path.read_bytes()
            if len(key) == _KEY_BYTES and not path.stat().st_mode & 0o077:
                return key
            path.unlink()
        made = self._write(path.name, secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(made, path)  # two nodes may start at once: the first key stays
        made.unlink()
        return path.read_bytes()

    def _write(self, name: str, content: bytes) -> Path:
        """A new private file with the content, durable."""
        path = self._folder / f".{name}.{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)  # a full disk must not be filled further
            raise
        return path

    def _entry(self, module_digest: str) -> Path:
        name = hashlib.blake2b(module_digest.encode(), key=self._core_key, digest_size=24).hexdigest()
        return self._folder / (name + _SUFFIX)

    def _tag(self, path: Path, artifact: bytes) -> bytes:
        return hmac.digest(self._key, path.name.encode() + artifact, "sha256")

    def get(self, module_digest: str) -> bytes | None:
        """The artifact, or None if there is no authentic one."""
        if not self._bytes_max:
            return None
        path = self._entry(module_digest)
        try:
            content = path.read_bytes()
            os.utime(path)  # the longest unused go first
        except OSError:
            return None
        tag, artifact = content[:_TAG_BYTES], content[_TAG_BYTES:]
        return artifact if hmac.compare_digest(tag, self._tag(path, artifact)) else None

    def put(self, module_digest: str, artifact: bytes) -> None:
        """Keep an artifact. A full disk or the like is no error: it is compiled again next time."""
        if not self._bytes_max or len(artifact) > self._bytes_max:
            return
        path = self._entry(module_digest)
        with suppress(OSError):
            written = self._write(path.name, self._tag(path, artifact) + artifact)
            os.replace(written, path)
            self._evict()

    def _evict(self) -> None:
        entries = []
        for path in self._folder.glob("*" + _SUFFIX):
            with suppress(FileNotFoundError):  # another node on the same cache removed it
                entries.append((path.stat(), path))
        total = sum(state.st_size for state, _ in entries)
        for state, path in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
            if total <= self._bytes_max:
                break
            path.unlink(missing_ok=True)
            total -= state.st_size
