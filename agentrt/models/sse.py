"""Server-sent events, as far as model providers use them: the ``data`` of each event. Pure, fed with bytes.

https://html.spec.whatwg.org/multipage/server-sent-events.html; ``event``, ``id`` and ``retry`` are read over.
"""

from typing import Final

#: One event, which is a few words of an answer; a provider that sends more without an end is cut off.
EVENT_BYTES_MAX: Final = 4 * 1024 * 1024


class StreamTooLongError(ValueError):
    """An event that does not end."""


class SseParser:
    """``feed`` gives the data of the events that are complete; an unfinished one at the end of a stream is no event."""

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False
        self._begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises StreamTooLongError."""
        if self._after_cr and chunk[:1] == b"\n":  # the second half of a line end
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        events: list[bytes] = []
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            if self._line:
                self._line += line
                line = bytes(self._line)
                self._line.clear()
            self._take(line, events)
        self._line += rest
        if len(self._line) + self._data_bytes > self._event_bytes_max:
            raise StreamTooLongError(f"an event has more than {self._event_bytes_max} bytes")
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data, self._data_bytes = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
            if self._data_bytes > self._event_bytes_max:
                raise StreamTooLongError(f"an event has more than {self._event_bytes_max} bytes")
