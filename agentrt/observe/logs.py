"""Logs of a node: lines for people or JSON objects for programs, each with the ids of what it is about.

Whoever has such ids passes them as ``extra=``, under the names in `FIELDS`; nothing else of a record's attributes is
written, so that what a library attaches cannot leak. Lines go through a bounded queue to a thread that writes them:
the control loop never waits for a terminal, a pipe or a disk.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Final, TextIO

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.engine.outcome import Outcome
from agentrt.observe.settings import LogsConfig
from agentrt.records import RunAccepted
from agentrt.states import RunState

FIELDS: Final = ("run_id", "step", "tenant", "agent", "tier", "state", "code", "limit", "took_ms", "parent")
#: Logger of the ends of runs: INFO, those that succeeded at DEBUG.
RUNS: Final = "agentrt.runs"

_LIBRARIES: Final = ("httpx", "uvicorn", "asyncio")
_STOP_S: Final = 2.0
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_RUN_LEVELS: Final = {"none": logging.CRITICAL, "failed": logging.INFO, "all": logging.DEBUG}
_encode: Final = msgspec.json.Encoder(order="deterministic", enc_hook=str).encode


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, and the known `FIELDS`."""

    def format(self, record: logging.LogRecord) -> str:
        at_s, ms = int(record.created), int(record.msecs)
        line: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s)) + f".{ms:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _clean(record.getMessage()),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = _clean(value) if isinstance(value, str) else value
        if record.exc_info:
            line["exception"] = _clean(self.formatException(record.exc_info))
        elif record.exc_text:
            line["exception"] = _clean(record.exc_text)
        return _encode(line).decode()


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which text of others may have and UTF-8 has not."""
    return text.encode(errors="replace").decode()


class _Bounded(QueueHandler):
    """Drops and counts what does not fit."""

    def __init__(self, items_max: int) -> None:
        self.lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        super().__init__(self.lines)
        self._items_max = items_max
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The text is made here, where what it is made of has not changed; the form later, in the writer's thread."""
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        # The queue itself has no bound, so that there is always room for the mark that ends it.
        if self.lines.qsize() >= self._items_max:
            self.dropped += 1
        else:
            self.lines.put_nowait(record)


def start_logging(config: LogsConfig, stream: TextIO) -> Callable[[], None]:
    """Have everything that is logged in this process written to ``stream``. What is given writes what waits, says how
    much was dropped, and puts back what was."""
    writer = logging.StreamHandler(stream)
    writer.setFormatter(JsonFormatter() if config.format == "json" else logging.Formatter(_TEXT))
    handler = _Bounded(config.queue_items_max)
    listener = QueueListener(handler.lines, writer)
    root, runs = logging.getLogger(), logging.getLogger(RUNS)
    before = (root.handlers[:], root.level, runs.level)
    root.handlers = [handler]
    root.setLevel(_LEVELS[config.level])
    runs.setLevel(_RUN_LEVELS[config.runs])
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    listener.start()

    def stop() -> None:
        root.handlers, runs.level = before[0], before[2]
        root.setLevel(before[1])
        ending = threading.Thread(target=listener.stop, daemon=True)
        ending.start()
        ending.join(_STOP_S)
        if ending.is_alive():  # nobody reads: what is left is lost, and the node ends all the same
            return
        if handler.dropped:
            writer.handle(logging.getLogger(__name__).makeRecord(
                __name__, logging.WARNING, __file__, 0, "%d log lines were dropped", (handler.dropped,), None
            ))  # fmt: skip

    return stop


class _Error(msgspec.Struct):
    code: str | None = None
    limit: str | None = None


_decode_error: Final = msgspec.json.Decoder(_Error).decode


def _error_of(data: bytes | None) -> _Error:
    try:
        return _Error() if data is None else _decode_error(data)
    except UNREADABLE:
        return _Error()


def log_end(logger: logging.Logger, run_id: str, accepted: RunAccepted, outcome: Outcome, took_ns: int) -> None:
    """The end of a run. Of its error only the code and the limit: what a guest says of it may hold anything."""
    level = logging.DEBUG if outcome.state is RunState.SUCCEEDED else logging.INFO
    if not logger.isEnabledFor(level):
        return
    error = _error_of(outcome.error)
    extra = {
        "run_id": run_id,
        "tenant": accepted.tenant,
        "agent": accepted.agent,
        "tier": accepted.base_tier,
        "state": outcome.state.value,
        "took_ms": took_ns // 1_000_000,
        "parent": accepted.parent,
        "code": error.code,
        "limit": error.limit,
    }
    why = f" ({error.code})" if error.code else ""
    logger.log(level, "run %s of %s ended: %s%s", run_id, accepted.agent, outcome.state.value, why, extra=extra)
