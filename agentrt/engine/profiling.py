"""Profiles in force: changed one after the other, each change durable before it holds; `Flow` reads them at start.

Whoever asks for a change, a caller, a schedule or an event, its rows are committed with it: so it is made once.
Rows of NODE: the applied profiles, and under their times the changes, which are the audit record.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, Protocol

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.engine.flow import APPLIED_KEY, Flow
from agentrt.engine.machine import RunMachine
from agentrt.errors import AgentrtError, InputError, InternalError
from agentrt.flow.decisions import Action, Control, Decision, Scope
from agentrt.flow.profiles import NAME_CHARS_MAX, Change, InForce, Profile, apply, encode_applied, roll_back
from agentrt.stores.base import NODE, Row, Store

_CHANGE: Final = b"flow/change/"
#: Changes that are listed at most.
CHANGES_MAX: Final = 1_000
#: Where events that change profiles are sent, by the tenant that may.
APPLY_TOPIC: Final = "APPLY_PROFILE"

Done = Callable[[Any, BaseException | None], None]


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event that changes profiles. ``profile`` None: the last one, for roll_back."""

    profile: str | None = None
    action: Literal["apply", "roll_back"] = "apply"
    reason: str = ""


_decode_asked: Final = msgspec.json.Decoder(Asked).decode


class ProfileRuns(Protocol):
    """What profiles need of the engine."""

    now_ns: Callable[[], int]

    def commit_rows(self, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]) -> None: ...

    def look(self, function: Callable[[Store], Any], done: Done) -> None: ...

    def machines(self) -> list[RunMachine]: ...


class Profiles:
    """Loop thread only. ``known``: those that may be applied by name."""

    def __init__(self, runs: ProfileRuns, flow: Flow, known: dict[str, Profile]) -> None:
        self._runs = runs
        self._flow = flow
        self.known: Final = known
        self._queue: deque[tuple[Callable[[InForce, int], tuple[InForce, Change]], tuple[Row, ...], Done]] = deque()
        self._at_ns = 0

    def apply(self, profile: str | Profile, by: str, reason: str, done: Done, rows: tuple[Row, ...] = ()) -> None:
        """``done(change, None)`` once it is durable, with the ``rows``, and in force. InputError: there is none of that
        name."""
        if isinstance(profile, str):
            found = self.known.get(profile)
            if found is None:
                known = ", ".join(sorted(self.known)) or "none"
                done(None, InputError(f"there is no profile {profile!r:.200}", hint=f"Known: {known}"))
                return
            profile = found
        self._change(partial(apply, profile=profile, by=by, reason=reason), rows, done)

    def roll_back(self, name: str | None, by: str, reason: str, done: Done, rows: tuple[Row, ...] = ()) -> None:
        """The same for taking one off; None: the last one."""
        self._change(partial(roll_back, name=name, by=by, reason=reason), rows, done)

    def change(self, asked: Asked, by: str, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]) -> None:
        """The same for what nobody waits for: what cannot be done is told as a decision, and the ``rows`` become
        durable all the same. ``done(error)``: the store has refused."""

        def made(change: Change | None, error: BaseException | None) -> None:
            if not isinstance(error, InputError):
                done(error if error is None or isinstance(error, AgentrtError) else InternalError(repr(error)))
                return
            self._refuse(asked.profile or "", error.message, by)
            self._runs.commit_rows(rows, done)

        if asked.action == "apply":
            self.apply(asked.profile or "", by, asked.reason, made, rows)
        else:
            self.roll_back(asked.profile, by, asked.reason, made, rows)

    def on_event(self, event_id: str, data: bytes, row: Row, done: Callable[[AgentrtError | None], None]) -> None:
        """An event at `APPLY_TOPIC`; the ``row`` takes it away. ``done(error)``: it is still there."""
        by = f"event {event_id}"
        try:
            asked = _decode_asked(data)
        except UNREADABLE as error:
            self._refuse("", f"an event that is none: {error}", by)
            self._runs.commit_rows((row,), done)
        else:
            self.change(asked, by, (row,), done)

    def _refuse(self, profile: str, why: str, by: str) -> None:
        self._flow.decide(
            Decision(
                at_ns=self._runs.now_ns(),
                control=Control.PROFILE,
                action=Action.REFUSE,
                scope=Scope.PROFILE,
                name=profile[:NAME_CHARS_MAX],
                detail=f"by {by}: {why}"[:500],
            )
        )

    def changes(self, done: Done) -> None:
        """``done(changes, None)``: the latest of them, the newest last."""

        def look(store: Store) -> list[Change]:
            found: list[Change] = []
            after = b""
            while page := store.scan_rows(NODE, _CHANGE, after):
                found += [msgspec.msgpack.decode(value, type=Change) for _, value in page]
                found = found[-CHANGES_MAX:]
                after = page[-1][0]
            return found

        self._runs.look(look, done)

    def _change(self, make: Callable[..., tuple[InForce, Change]], rows: tuple[Row, ...], done: Done) -> None:
        self._queue.append((lambda force, at_ns: make(force, at_ns=at_ns), rows, done))
        if len(self._queue) == 1:
            self._next()

    def _next(self) -> None:
        make, more, done = self._queue[0]
        self._at_ns = max(self._at_ns + 1, self._runs.now_ns())
        try:
            force, change = make(self._flow.force, self._at_ns)
        except AgentrtError as error:
            self._finish(done, None, error)
            return
        rows = (
            Row(NODE, APPLIED_KEY, encode_applied(force)),
            Row(NODE, _CHANGE + change.at_ns.to_bytes(8, "big"), msgspec.msgpack.encode(change)),
            *more,
        )

        def durable(error: AgentrtError | None) -> None:
            if error is not None:
                self._finish(done, None, error)
                return
            self._flow.switch(force, self._runs.machines(), self._runs.now_ns())
            self._flow.decide(
                Decision(
                    at_ns=change.at_ns,
                    control=Control.PROFILE,
                    action=Action(change.action),
                    scope=Scope.PROFILE,
                    name=change.profile,
                    detail=f"by {change.by}: {change.reason}"[:500],
                )
            )
            self._finish(done, change, None)

        self._runs.commit_rows(rows, durable)

    def _finish(self, done: Done, change: Change | None, error: AgentrtError | None) -> None:
        self._queue.popleft()
        done(change, error)
        if self._queue:
            self._next()
