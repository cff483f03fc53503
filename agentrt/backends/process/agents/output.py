"""The end of what a process writes to stdout and stderr, at a rate that no writer makes the loop feel."""

import asyncio
import os
from typing import Final

_BLOCK_BYTES: Final = 16 * 1024
_PIPE_BYTES: Final = 64 * 1024  # the kernel's default
#: After a full block the writer waits this long: what is read is bounded by about 3 MiB a second for each process.
_PAUSE_S: Final = 0.005


class Tail:
    """Owns the read end of a pipe, which does not block; keeps the last ``kept_bytes``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, kept_bytes: int) -> None:
        self._loop = loop
        self._fd = fd
        self._kept_bytes = kept_bytes
        self._kept = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        count = self._read()
        if count == 0 or count == _BLOCK_BYTES:
            self._loop.remove_reader(self._fd)
            if count:
                self._timer = self._loop.call_later(_PAUSE_S, self._listen)

    def _read(self) -> int | None:
        """Take what is there, at most a block. None: nothing; 0: nothing will come."""
        try:
            data = os.read(self._fd, _BLOCK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return 0
        self._kept += data
        del self._kept[: -self._kept_bytes]
        return len(data)

    def close(self) -> bytes:
        """What was kept, with what the pipe still holds."""
        for _ in range(_PIPE_BYTES // _BLOCK_BYTES + 1):
            if not self._read():
                break
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        return bytes(self._kept)
