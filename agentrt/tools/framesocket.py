"""Writing frames to a non-blocking socket on a loop: what does not fit now goes when there is room."""

import asyncio
import socket
from collections.abc import Callable


class FrameSocket:
    """Frames out, in order. ``on_drained``: called when everything is written after it was not."""

    __slots__ = ("_loop", "_on_drained", "_out", "_sock", "bytes_waiting")

    def __init__(
        self, sock: socket.socket, loop: asyncio.AbstractEventLoop, on_drained: Callable[[], None] | None = None
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._on_drained = on_drained
        self._out: list[memoryview] = []
        self.bytes_waiting = 0

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._out)

    def put(self, frame: bytearray) -> None:
        """Write the frame, or what fits of it. A peer that is gone is noticed by who reads."""
        self._out.append(memoryview(frame))
        self.bytes_waiting += len(frame)
        if len(self._out) == 1 and not self._write():
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        if self._write():
            self._loop.remove_writer(self._sock.fileno())
        if self._on_drained is not None:
            self._on_drained()

    def _write(self) -> bool:
        """Whether everything is written."""
        try:
            while self._out:
                first = self._out[0]
                sent = self._sock.send(first)
                self.bytes_waiting -= sent
                if sent < len(first):
                    self._out[0] = first[sent:]
                    return False
                del self._out[0]
        except BlockingIOError:
            return False
        except OSError:
            self._out.clear()
            self.bytes_waiting = 0
        return True
