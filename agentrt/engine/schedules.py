"""Runs by the clock: cron expressions, and what is made up for after a downtime.

A schedule is a row of SCHEDULES and one timer for its next time. When that falls due the run is accepted under the
idempotency key of (schedule, time), and only then does the timer move on: a crash in between accepts the same run
again, which is none. Times are UTC. After a downtime ``once`` runs the latest missed time, ``skip`` none of them.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal, Protocol

import msgspec
from cronsim import CronSim, CronSimError

from agentrt.engine.accept import Via
from agentrt.engine.lanes import Lanes
from agentrt.engine.profiling import Asked
from agentrt.errors import AgentrtError, InputError
from agentrt.ids import new_run_id
from agentrt.stores.base import SCHEDULES, TIMERS, Row, Store, scan_all
from agentrt.stores.keys import schedule_key, schedules_prefix, timer_key

#: The path of a schedule's timer; the id in its place of a run is the schedule's.
SCHEDULE_PATH: Final = "!schedule"
_LATE_NS: Final = 60 * 10**9  # later than this, a time counts as missed
#: The tenant of schedules that are the node's.
NOBODYS: Final = ""
_RETRY_S: Final = 1.0


class Schedule(msgspec.Struct, frozen=True, array_like=True):
    """One schedule. ``input`` is JSON; times are Unix ns. ``id`` has the form of a run id."""

    id: str
    tenant: str
    name: str
    cron: str
    agent: str
    input: bytes
    tier: int | None
    catch_up: str  # skip, once
    next_ns: int
    action: str = "run"  # or apply, roll_back: then ``agent`` is the name of a profile


_encode: Final = msgspec.msgpack.encode
_decode: Final = msgspec.msgpack.Decoder(Schedule).decode
Done = Callable[[BaseException | None], None]


def next_time(cron: str, after_ns: int) -> int:
    """The first time (Unix ns) of the expression after ``after_ns``. Raises InputError."""
    try:
        found = next(CronSim(cron, datetime.fromtimestamp(after_ns // 10**9, UTC)))
    except CronSimError as error:
        raise InputError(f"{cron!r} is no cron expression: {error}") from None
    except StopIteration:
        raise InputError(f"{cron!r} never comes") from None
    return round(found.timestamp()) * 10**9


def due_times(schedule: Schedule, now_ns: int) -> tuple[int | None, int]:
    """(the time to run for, or None; the next time) of a schedule whose time has come."""
    due = schedule.next_ns
    following = next_time(schedule.cron, due)
    if following > now_ns:  # only this one
        missed = now_ns - due > _LATE_NS
        return (None if missed and schedule.catch_up == "skip" else due), following
    latest = due
    while following <= now_ns:
        latest, following = following, next_time(schedule.cron, following)
    fresh = now_ns - latest <= _LATE_NS
    return (latest if fresh or schedule.catch_up == "once" else None), following


class Runs(Protocol):
    """What schedules need of the engine."""

    now_ns: Callable[[], int]

    def read(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...

    def look(self, function: Callable[[Store], Any], done: Callable[[Any, BaseException | None], None]) -> None: ...

    def commit_rows(self, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]) -> None: ...

    def arm(self, due_ns: int, run_id: str, path: str) -> None: ...

    def accept(
        self,
        agent_name: str,
        input: bytes,
        done: Callable[[str | None, BaseException | None], None],
        *,
        tenant: str,
        tier: int | str | None,
        idempotency_key: str | None,
        via: Via,
    ) -> None: ...


class ProfileChanges(Protocol):
    """What they need of `Profiles`."""

    def change(
        self, asked: Asked, by: str, rows: tuple[Row, ...], done: Callable[[AgentrtError | None], None]
    ) -> None: ...


class Schedules:
    """Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: Runs, profiles: ProfileChanges) -> None:
        self._loop = loop
        self._runs = runs
        self._profiles = profiles
        self._lanes = Lanes()  # by key: whoever changes a schedule has read it before

    def put(
        self,
        tenant: str,
        name: str,
        cron: str,
        agent: str,
        input: bytes,
        tier: int | None,
        catch_up: Literal["skip", "once"],
        done: Done,
        action: Literal["run", "apply", "roll_back"] = "run",
    ) -> None:
        """Make or change the tenant's schedule of that name; ``done(None)`` once it is durable. Other than to run, it
        changes profiles: ``agent`` is the name of one, or empty for the last one that was applied."""
        if catch_up not in ("skip", "once"):
            raise InputError(f"catch_up is skip or once, not {catch_up!r}")
        key = schedule_key(tenant, name)
        now = self._runs.now_ns()
        next_ns = next_time(cron, now)
        schedule = Schedule(new_run_id(now // 10**6), tenant, name, cron, agent, input, tier, catch_up, next_ns, action)

        def look() -> None:
            self._runs.look(lambda store: store.read_row(SCHEDULES, key), found)

        def found(row: bytes | None, error: BaseException | None) -> None:
            if error is not None:
                kept(error)
                return
            rows = [*_timer(_decode(row), None)] if row is not None else []
            rows += [Row(SCHEDULES, key, _encode(schedule)), *_timer(schedule, key)]
            self._runs.commit_rows(tuple(rows), kept)

        def kept(error: BaseException | None) -> None:
            if error is None:
                self._runs.arm(next_ns, schedule.id, SCHEDULE_PATH)
            self._lanes.leave(key)
            done(error)

        self._lanes.enter(key, look)

    def drop(self, tenant: str, name: str, done: Done) -> None:
        """Remove it; runs that it has started go on. ``done(InputError)`` if there is none."""
        key = schedule_key(tenant, name)

        def look() -> None:
            self._runs.look(lambda store: store.read_row(SCHEDULES, key), found)

        def found(row: bytes | None, error: BaseException | None) -> None:
            if error is None and row is None:
                error = InputError(f"there is no schedule {name!r}")
            if error is not None or row is None:
                gone(error)
                return
            self._runs.commit_rows((Row(SCHEDULES, key, None), *_timer(_decode(row), None)), gone)

        def gone(error: BaseException | None) -> None:
            self._lanes.leave(key)
            done(error)

        self._lanes.enter(key, look)

    def list(self, tenant: str | None, done: Callable[[Any, BaseException | None], None]) -> None:
        """``done(schedules, None)``."""

        def look(store: Store) -> Any:
            # No look at others': by its time a tenant would learn of them.
            prefix = b"" if tenant is None else schedules_prefix(tenant)
            return [_decode(value) for _, value in scan_all(store, SCHEDULES, prefix)]

        self._runs.look(look, done)

    def fire(self, schedule_id: str) -> None:
        """Its timer has run out."""

        def look(store: Store) -> tuple[bytes, Schedule] | None:
            for key, value in scan_all(store, SCHEDULES):
                schedule = _decode(value)
                if schedule.id == schedule_id:
                    return key, schedule
            return None

        def found(read: tuple[bytes, Schedule] | None, error: BaseException | None) -> None:
            if error is not None:
                self._loop.call_later(_RETRY_S, self.fire, schedule_id)
            elif read is not None:
                self._lanes.enter(read[0], partial(self._look_again, read[0], schedule_id))

        self._runs.read(look, found)

    def _look_again(self, key: bytes, schedule_id: str) -> None:
        """In the schedule's lane, where nobody changes it."""

        def found(row: bytes | None, error: BaseException | None) -> None:
            schedule = None if row is None else _decode(row)
            if error is not None:
                self._loop.call_later(_RETRY_S, self.fire, schedule_id)
            elif schedule is not None and schedule.id == schedule_id:
                self._due(key, schedule)
                return
            self._lanes.leave(key)

        self._runs.read(lambda store: store.read_row(SCHEDULES, key), found)

    def _due(self, key: bytes, schedule: Schedule) -> None:
        now = self._runs.now_ns()
        if schedule.next_ns > now:
            self._lanes.leave(key)  # fired twice
            return
        due_ns, next_ns = due_times(schedule, now)

        def accepted(run_id: str | None, error: BaseException | None) -> None:
            if error is not None and not isinstance(error, InputError):
                after_s = getattr(error, "retry_after_s", None) or _RETRY_S  # of a full queue; else a closed door
                self._loop.call_later(after_s, self.fire, schedule.id)
                self._lanes.leave(key)
                return
            # An agent that is not there, or an input it refuses: the next time may be better.
            self._runs.commit_rows(rows, lambda error: moved_on(error))

        def moved_on(error: AgentrtError | None) -> None:
            if error is None:
                self._runs.arm(next_ns, schedule.id, SCHEDULE_PATH)
            else:
                self._loop.call_later(_RETRY_S, self.fire, schedule.id)
            self._lanes.leave(key)

        moved = msgspec.structs.replace(schedule, next_ns=next_ns)
        rows = (*_timer(schedule, None), Row(SCHEDULES, key, _encode(moved)), *_timer(moved, key))
        if due_ns is None:
            accepted(None, None)
            return
        if schedule.action != "run":
            action: Literal["apply", "roll_back"] = "apply" if schedule.action == "apply" else "roll_back"
            asked = Asked(schedule.agent or None, action, f"due at {due_ns}")
            self._profiles.change(asked, f"schedule {schedule.name}", rows, moved_on)
            return
        self._runs.accept(
            schedule.agent,
            schedule.input,
            accepted,
            tenant=schedule.tenant,
            tier=schedule.tier,
            idempotency_key=f"schedule {schedule.id} {due_ns}",
            via=Via("schedule", schedule.name),
        )


def _timer(schedule: Schedule, key: bytes | None) -> tuple[Row]:
    return (Row(TIMERS, timer_key(schedule.next_ns, schedule.id, SCHEDULE_PATH), key),)
