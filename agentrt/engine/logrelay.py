"""Log lines of guests on their way to Python's logging, off the control loop: handlers may block.

Lines are bounded in number and length; what does not fit is dropped and counted, since nothing depends on it.
"""

import logging
import threading
from collections import deque
from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE

_LINES_MAX: Final = 10_000
_LINE_CHARS_MAX: Final = 4_096

_logger: Final = logging.getLogger("agentrt.agent")
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class LogLine(msgspec.Struct, frozen=True):
    """Request of ``log``."""

    message: str
    level: str = "info"


_decode: Final = msgspec.json.Decoder(LogLine).decode


class LogRelay:
    """`put` from the loop; a thread of its own hands the lines to the logger ``agentrt.agent``."""

    def __init__(self) -> None:
        self.dropped = 0
        self._lines: deque[tuple[str, bytes]] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, run_id: str, payload: bytes) -> None:
        """Payload is the request as the guest sent it."""
        if len(self._lines) >= _LINES_MAX or self._closed:
            self.dropped += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agentrt-log", daemon=True)
            self._thread.start()
        self._lines.append((run_id, payload))
        self._wake.set()

    def close(self, timeout_s: float = 1.0) -> None:
        """Hand over what is there, within the time-out. Blocks."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed or self._lines:
            self._wake.wait()
            self._wake.clear()
            while self._lines:
                run_id, payload = self._lines.popleft()
                try:
                    line = _decode(payload[: 4 * _LINE_CHARS_MAX])
                    level, text = _LEVELS.get(line.level.lower(), 20), line.message
                except UNREADABLE:
                    level, text = 30, payload[:_LINE_CHARS_MAX].decode(errors="replace")
                _logger.log(level, "%s: %s", run_id, text[:_LINE_CHARS_MAX], extra={"run_id": run_id})
