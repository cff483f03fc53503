"""Events: one side publishes, another waits, in either order.

An event is a row under its address (tenant, topic and key; or a run's own mailbox), a wait is a row under the same
address. Whoever comes second finds the other: everything that concerns one address happens one after the other here, so
no event is taken twice and none is overlooked. An event goes to who waits longest; what nobody takes is kept for a
time; an id that was used at the address lately makes the second event the first one. At an address that the node itself
serves, events go to it, oldest first.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from agentrt.engine.lanes import Lanes
from agentrt.engine.machine import RunMachine
from agentrt.engine.ports import Runs
from agentrt.errors import AgentrtError
from agentrt.stores.base import EVENT_IDS, EVENTS, WAITS, Row, Store
from agentrt.stores.keys import event_id_key, event_key, parse_wait_key

_PAGE: Final = 64


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A row of EVENTS. ``data`` is JSON."""

    id: str
    sent_ns: int
    data: bytes


_encode: Final = msgspec.msgpack.encode
_decode: Final = msgspec.msgpack.Decoder(Event).decode

Told = Callable[[AgentrtError | None], None]
#: ``write(rows, told)``: make the rows durable and call ``told``; false, and ``told`` is never called: it is too late.
Write = Callable[[tuple[Row, ...], Told], bool]
#: ``serve(id, data, row, told)``: act on an event; ``told(None)`` once that is durable with the ``row``, which takes
#: the event away.
Serve = Callable[[str, bytes, Row, Told], None]


class Mailbox:
    """Loop thread only. ``ttl_ns``: how long an event that nobody takes, and the memory of its id, are kept."""

    def __init__(self, runs: Runs, ttl_ns: int) -> None:
        self._runs = runs
        self._ttl_ns = ttl_ns
        self._lanes = Lanes()  # by address
        self._served: dict[bytes, Serve] = {}

    def publish(
        self,
        address: bytes,
        event_id: str,
        data: bytes,
        write: Write,
        done: Callable[[bool, BaseException | None], None],
    ) -> None:
        """Have ``write`` make the event durable, then find who waits for it. ``done(fresh, None)``: it is durable, or
        an event of this id was (not fresh: nothing was written); ``done(False, error)`` otherwise."""

        def look() -> None:
            self._runs.read(lambda store: store.read_row(EVENT_IDS, id_key), found)

        def found(row: bytes | None, error: BaseException | None) -> None:
            now = self._runs.now_ns()
            known = row is not None and now - int.from_bytes(row, "big") < self._ttl_ns
            if error is not None or known:
                done(False, error)
                self._lanes.leave(address)
                return
            event = Event(event_id, now, data)
            rows = (
                Row(EVENTS, event_key(address, now, event_id), _encode(event)),
                Row(EVENT_IDS, id_key, now.to_bytes(8, "big")),
            )
            if not write(rows, published):
                self._lanes.leave(address)

        def published(error: AgentrtError | None) -> None:
            done(error is None, error)
            self._match(address)

        id_key = event_id_key(address, event_id)
        self._lanes.enter(address, look)

    def serve(self, address: bytes, serve: Serve) -> None:
        """From now on events at the address are the node's; those that are there already come first."""
        self._served[address] = serve
        self.match(address)

    def match(self, address: bytes) -> None:
        """Somebody waits at the address, durably."""
        self._lanes.enter(address, lambda: self._match(address))

    def _look_later(self, address: bytes) -> None:
        self._runs.later(lambda: self.match(address))

    def _match(self, address: bytes) -> None:
        if (serve := self._served.get(address)) is not None:
            self._serve(address, serve)
            return

        def look(store: Store) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
            waits = store.scan_rows(WAITS, address, b"", _PAGE)
            return (store.scan_rows(EVENTS, address, b"", _PAGE) if waits else []), waits

        def found(rows: Any, error: BaseException | None) -> None:
            if error is not None or not rows[0] or not rows[1]:
                if error is not None:
                    self._look_later(address)
                self._lanes.leave(address)
            else:
                self._pair(address, deque(rows[0]), deque(rows[1]))

        self._runs.read(look, found)

    def _serve(self, address: bytes, serve: Serve) -> None:
        def found(rows: Any, error: BaseException | None) -> None:
            if error is not None:
                self._look_later(address)
                self._lanes.leave(address)
            elif not rows:
                self._lanes.leave(address)
            else:
                event = _decode(rows[0][1])
                serve(event.id, event.data, Row(EVENTS, rows[0][0], None), taken)

        def taken(error: AgentrtError | None) -> None:
            if error is None:
                self._serve(address, serve)
            else:
                self._look_later(address)
                self._lanes.leave(address)

        self._runs.read(lambda store: store.scan_rows(EVENTS, address, b"", 1), found)

    def _pair(
        self,
        address: bytes,
        events: deque[tuple[bytes, bytes]],
        waits: deque[tuple[bytes, bytes]],
        passed: bool = False,
    ) -> None:
        """Give the oldest event to who waits longest, and so on. ``passed``: somebody has a row and does not wait."""
        now = self._runs.now_ns()
        expired: list[Row] = []
        while events and now - _decode(events[0][1]).sent_ns >= self._ttl_ns:
            expired.append(Row(EVENTS, events.popleft()[0], None))
        if expired:
            self._runs.commit_rows(tuple(expired), _ignore)
        if not events or not waits:
            if passed:
                self._lanes.leave(address)
            else:
                self._match(address)  # until one of the two has no rows left
            return
        event_row, stored = events[0]
        wait_row, _ = waits.popleft()
        _, _, run_id, path = parse_wait_key(wait_row)
        event = _decode(stored)
        answer = msgspec.json.encode({"id": event.id, "data": msgspec.Raw(event.data)})

        def give(machine: RunMachine) -> None:
            if not machine.answer(path, True, answer, (Row(EVENTS, event_row, None),), taken):
                # Its step is settled and takes the row with it, once that is durable; it asks again if it is refused.
                self._pair(address, events, waits, True)

        def taken(error: AgentrtError | None) -> None:
            if error is None:
                events.popleft()
            else:  # it is read again, which takes its time; whoever else waits does not wait for that
                self._look_later(address)
            self._pair(address, events, waits, passed or error is not None)

        def gone(error: BaseException | None) -> None:
            """The run has ended, or it cannot be read."""
            if error is None:
                self._runs.drop((Row(WAITS, wait_row, None),))
            else:
                self._look_later(address)
            self._pair(address, events, waits, passed or error is not None)

        self._runs.with_run(run_id, give, gone)


def _ignore(error: AgentrtError | None) -> None:
    """A row that stays is met again."""
