"""What must hold, checked as things become durable, as effects leave, as answers are given, and at the end.

`Laws` folds every run's records as they are applied, record by record, and keeps a mirror of the side rows by run; so
after each batch the rows of the runs it touched are compared with what their folds imply. What it knows outlives nodes.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from agentrt import records as r
from agentrt.engine.budget import wall_end_ns
from agentrt.engine.downtime import moved
from agentrt.engine.machine import DEADLINE_PATH, HOLD_PATH, START_PATH
from agentrt.engine.mailbox import Event
from agentrt.engine.schedules import SCHEDULE_PATH, Schedule
from agentrt.engine.steps import Held, registration, wait_address
from agentrt.errors import StoreCorruptError, StoreError
from agentrt.fold import RunFold, apply, head_of
from agentrt.records import StepCommitted
from agentrt.states import TERMINAL, RunState, StepState
from agentrt.stores.base import (
    DECISIONS,
    EVENT_IDS,
    EVENTS,
    IDEMPOTENCY,
    INBOX,
    LOCKS,
    READY,
    SCHEDULES,
    TIMERS,
    WAITS,
    Batch,
    Row,
)
from agentrt.stores.keys import (
    event_id_key,
    parse_inbox_key,
    parse_ready_key,
    parse_timer_key,
    parse_wait_key,
    ready_key,
    run_prefix,
    schedule_key,
    timer_key,
)
from agentrt.stores.memory import MemoryDisk
from tests.sim.tools import DEDUPLICATES, Ledger

_decode_held = msgspec.msgpack.Decoder(Held).decode
_decode_event = msgspec.msgpack.Decoder(Event).decode
_decode_schedule = msgspec.msgpack.Decoder(Schedule).decode
_decode_json = msgspec.json.decode

_RUN_OF: dict[str, Callable[[bytes], str]] = {
    READY: lambda key: parse_ready_key(key)[2],
    TIMERS: lambda key: parse_timer_key(key)[1],
    WAITS: lambda key: parse_wait_key(key)[2],
}


class Violation(AssertionError):
    """A law does not hold."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law


def check(condition: object, law: str, what: str) -> None:
    if not condition:
        raise Violation(law, what)


class Laws:
    """``wall_ns``: the node's clock; ``note(text)``: one line of the trace."""

    def __init__(
        self,
        disk: MemoryDisk,
        ledger: Ledger,
        wall_ns: Callable[[], int],
        note: Callable[..., None],
    ) -> None:
        self.disk, self.ledger, self.wall_ns, self.note = disk, ledger, wall_ns, note
        self.attempts_max = 5
        self.event_ttl_ns = 0
        self.retention_ns = 0
        self.unwinds: set[str] = set()  # agents
        self.versions: dict[str, str] = {}  # of agents: the newest, whose code is there
        self.died_in_replay: set[str] = set()  # runs whose host died before they were where they had been
        self.may_fail = {
            "trap",
            "host_died",
        }  # codes of errors with which a run may fail here: as its program was written
        self.folds: dict[str, RunFold] = {}
        self.erased: set[str] = set()
        self.open = 0  # runs accepted and not ended
        self.clock_set_back = False
        self.last_ns = 0  # wall time of the last record
        self.batches = 0
        self.in_flight: set[str] = set()  # idempotency keys of calls that have not returned in this life
        self.lock_hold_ns = self.lock_grace_ns = 0
        self.ran_ns: Callable[[str], int] = lambda run_id: 0  # slot time of its guests in this life
        self._rows: dict[str, set[tuple[str, bytes]]] = {}  # by run: of READY, TIMERS, WAITS
        self._events: dict[bytes, Event] = {}
        self._sent: dict[bytes, int] = {}  # event id key -> when it was last fresh
        self._taken: set[bytes] = set()  # rows of EVENTS that somebody was given
        self._held: dict[bytes, Held] = {}
        self._locks: dict[str, dict[str, int]] = {}  # by run: name -> token
        self._token = 0
        self._acquired: dict[int, int] = {}  # by token: the record that gave it
        self._untold: dict[str, list[str]] = {}  # by run: locks that it has lost
        self._inbox: set[tuple[str, str]] = set()
        self._joined: set[tuple[str, str]] = set()
        self._idempotency: dict[tuple[str, str], str] = {}
        self._cancel_seq: dict[str, int] = {}
        self._over: set[str] = set()  # whose children were told that they have ended
        self._first_seq: dict[tuple[str, str], int] = {}  # of the step's first StepPrepared
        self._approvals: dict[tuple[str, str], bytes] = {}
        self._approved: set[tuple[str, str]] = set()
        self.emits: dict[tuple[str, str], int] = {}  # durable emits -> how often observed
        self.decided: set[tuple[str, str]] = set()
        self.more_attempts: dict[str, int] = {}  # by run: given by operators
        self.guests: set[str] = set()
        self._guest_version: dict[str, str] = {}
        self.down: list[tuple[int, int]] = []  # when there was no node
        self.tenants_off: set[str] = set()  # acknowledged, and not switched since
        self.schedules: dict[str, Schedule] = {}
        self._schedules_touched = False
        self._schedule_timers: set[tuple[int, str]] = set()
        self.scheduled: dict[str, set[int]] = {}  # by schedule: times that have a run

    # --- what becomes durable ---

    def held(self) -> list[Held]:
        """The rows of LOCKS."""
        return list(self._held.values())

    def applied(self, batch: Batch) -> None:
        """The batch has taken effect on the disk."""
        self.batches += 1
        touched: set[str] = set()
        run_id = batch.run_id
        if batch.erase is not None:
            self._erased(batch.erase)
        if run_id is not None:
            touched.add(run_id)
            if batch.records:
                self._records(run_id, batch)
        for row in batch.unique + batch.rows:
            self._row(row, batch, touched)
        for touched_id in touched:
            self._compare(touched_id)
        if batch.erase is not None:
            rest = [key for key in self.disk.tables[DECISIONS] if key.startswith(run_prefix(batch.erase))]
            check(not rest, "what was decided about a run goes with it", batch.erase)
        if self._schedules_touched:
            self._schedules_touched = False
            wanted = {(schedule.next_ns, schedule.id) for schedule in self.schedules.values()}
            check(self._schedule_timers == wanted, "a schedule has one timer", f"{self._schedule_timers} {wanted}")
        if run_id is not None:
            self.note("commit", run_id, batch.after_version, *(type(record).__name__ for record in batch.records))
        else:
            self.note("rows", batch.erase, len(batch.rows))

    def _records(self, run_id: str, batch: Batch) -> None:
        fold = self.folds.get(run_id)
        if fold is None:
            fold = self.folds[run_id] = RunFold()
        for record in batch.records:
            kind = type(record)
            if fold.ended is not None:
                raise Violation("terminal states absorb", f"{run_id}: {kind.__name__} after RunEnded")
            try:
                before = _BEFORE.get(kind)
                if before is not None:
                    before(self, run_id, fold, record, batch)
                apply(fold, record)
            except StoreCorruptError as error:
                raise Violation("the journal folds", f"{run_id}: {error.message}") from error
            self.last_ns = record.at_ns
        head = head_of(fold, run_id)
        check(head == batch.head, "the head is the fold", f"{run_id}: {batch.head} is not {head}")

    def _on_accepted(self, run_id: str, fold: RunFold, record: r.RunAccepted, batch: Batch) -> None:
        self.open += 1
        check(run_id not in self.erased, "runs are erased for good", run_id)
        if record.idempotency_key is not None:
            key = (record.tenant, record.idempotency_key)
            earlier = self._idempotency.get(key)
            check(
                earlier is None or earlier in self.erased,
                "an idempotency key makes one run",
                f"{key}: {earlier} and {run_id}",
            )
            self._idempotency[key] = run_id
            check(any(row.table == IDEMPOTENCY for row in batch.unique), "the key's row is unique", run_id)
            if record.idempotency_key.startswith("schedule "):
                self._on_scheduled(record)
        if record.parent is not None:
            parent_id, _, path = record.parent.partition("/")
            parent = self.folds.get(parent_id)
            check(parent is not None, "a parent is durable before its child", run_id)
            assert parent is not None
            known = parent.children.get(path)
            check(
                known is not None and known.run_id == run_id,
                "a spawn is durable before the child",
                f"{run_id} of {record.parent}",
            )
            if not record.detached:
                check(parent.ended is None, "children end before their parents", f"{run_id} begins after {parent_id}")
            given = parent.run()
            spent = wall_end_ns(given.budget, given.start_ns or given.at_ns)
            for name, limit in given.budget.items():
                if name != "wall_s":
                    within = record.budget.get(name, limit + 1) <= limit
                else:  # one that is asked for too late ends at once
                    within = 0 < record.deadline_ns <= max(spent, record.at_ns + 1_000)
                check(within, "a child has no more than its parent", f"{run_id}: {name}, {record.budget}")

    def _on_scheduled(self, record: r.RunAccepted) -> None:
        _, schedule_id, text = (record.idempotency_key or "").split()
        due_ns = int(text)
        schedule = self.schedules.get(schedule_id)
        check(schedule is not None, "a schedule that is gone starts nothing", record.idempotency_key or "")
        assert schedule is not None
        check(due_ns % (60 * 10**9) == 0, "a schedule runs at its times", text)
        late = record.at_ns - due_ns
        check(late >= 0 or self.clock_set_back, "a schedule runs at its times", f"{text}: {late} ns late")
        # It may have been decided in time and refused by a full queue, or lost with its node, for a while.
        lost = late > 60 * 10**9 + 30 * 10**9 and schedule.catch_up == "skip" and not self.clock_set_back
        check(not lost, "what was missed is skipped", f"{text}: {late} ns late")
        times = self.scheduled.setdefault(schedule_id, set())
        check(due_ns not in times, "a schedule's time is one run", text)
        times.add(due_ns)

    def _on_checkpoint(self, run_id: str, fold: RunFold, record: r.Checkpoint, batch: Batch) -> None:
        before = batch.records[batch.records.index(record) - 1]
        if isinstance(before, r.Upgraded) and before.seq == record.seq - 1:
            begun = bool(fold.committed or fold.open)
            check(not begun, "a state is migrated at the start of a segment", f"{run_id}: {fold.committed}")

    def _on_prepared(self, run_id: str, fold: RunFold, record: r.StepPrepared, batch: Batch) -> None:
        allowed = self.attempts_max + self.more_attempts.get(run_id, 0)
        check(record.attempt <= allowed, "attempts are bounded", f"{run_id}/{record.path}: {record.attempt}")
        if record.kind == "at_most_once":
            check(
                record.attempt <= 1 + self.more_attempts.get(run_id, 0),
                "at_most_once is not repeated",
                f"{run_id}/{record.path}: attempt {record.attempt}",
            )
        first = self._first_seq.setdefault((run_id, record.path), record.seq)
        untold = first == record.seq and fold.ending is None and self._untold.get(run_id)
        check(not untold, "who has lost a lock is told", f"{run_id}/{record.path}: {untold}")
        if fold.ending is None and record.op == "tool.call" and run_id not in self.more_attempts:
            for lost in fold.broken_locks:
                under = self._acquired.get(lost.token, lost.seq) < first < lost.seq
                check(not under, "what was begun under a lock is not begun again without it", f"{run_id}/{record.path}")
        if fold.ending is not None and first < fold.ending.seq:
            raise Violation("who was told to end begins nothing", f"{run_id}/{record.path} attempt {record.attempt}")
        accepted = fold.run()
        begins = record.at_ns >= accepted.start_ns or self.clock_set_back
        check(begins, "a run does not begin before its start", run_id)
        if fold.cancel_requested is not None and record.attempt == 1 and accepted.agent not in self.unwinds:
            raise Violation("a cancelled run begins no step", f"{run_id}/{record.path}")
        if run_id in self._over and fold.ending is None and first == record.seq:
            raise Violation("who has told its children to end begins nothing", f"{run_id}/{record.path}")

    def _on_committed(self, run_id: str, fold: RunFold, record: StepCommitted, batch: Batch) -> None:
        step = fold.steps.get(record.path)
        place = (run_id, record.path)
        if record.op == "lock.acquire" and record.ok:
            self._acquired[_decode_json(record.result or b"")["token"]] = record.seq
        self._check_told(run_id, fold, step is None, record)
        if record.op == "tool.call":
            if step is not None and step.key is not None and record.ok and place not in self.decided:
                count = self.ledger.done.get(step.key, 0)
                if count < 1 or count > 1 + self.more_attempts.get(run_id, 0):
                    raise Violation("an effect happens exactly once", f"{step.key}: {count} times, and it is committed")
        elif record.op == "approval.request":
            check(place not in self._approvals, "an approval is answered once", f"{place}")
            if step is not None and b'"timeout"' in (record.result or b"") and not self.clock_set_back:
                seconds = _decode_json(step.request or b"")["timeout_s"]
                due_ns = moved(self.down, step.prepared_ns, step.prepared_ns + round(seconds * 1e9))
                early = record.at_ns < due_ns
                check(not early, "an approval's deadline moves by the downtime", f"{place}: {due_ns - record.at_ns} ns")
            self._approvals[place] = record.result or b""
        elif record.op == "emit":
            if record.ok:
                self.emits[place] = 0
        elif record.op == "event.wait":
            if record.ok:
                self._event_taken(run_id, fold, record, batch)
        elif record.op == "run.join":
            if step is not None and step.request is not None:
                child = _decode_json(step.request)["run_id"]
                self._joined.add((run_id, child))
                self._check_join(child, record)
        elif record.op == "lock.acquire" and record.ok:
            check(
                any(row.table == LOCKS and row.value is not None for row in batch.rows),
                "a lock's holder is in its row",
                f"{run_id}/{record.path}",
            )

    def _check_told(self, run_id: str, fold: RunFold, new: bool, record: StepCommitted) -> None:
        """Whether a run that has lost a lock hears so of its next step."""
        answer = record.result or b""
        told = b"was held too long" in answer or record.op == "lock.release"
        if not record.ok and b'"lock_lost"' in answer and told:
            for name in [name for name in self._untold.get(run_id, ()) if repr(name).encode() in answer]:
                self._untold[run_id].remove(name)
        elif new and record.op != "tool.call" and fold.ending is None and self._untold.get(run_id):
            raise Violation("who has lost a lock is told", f"{run_id}/{record.path}: {self._untold[run_id]}")

    def _check_join(self, child: str, record: StepCommitted) -> None:
        answer = _decode_json(record.result or b"null")
        if not record.ok and answer.get("code") != "child_failed":
            return
        ended = self.folds[child].ended if child in self.folds else None
        if child in self.erased:
            return
        check(ended is not None, "a join is answered after the child's end", child)
        assert ended is not None
        if record.ok:
            check(
                ended.state == "SUCCEEDED" and (ended.result or b"null") == record.result,
                "a join is answered with the child's result",
                f"{child}: {record.result!r}",
            )
        else:
            check(ended.state == answer["state"], "a join is answered with the child's end", child)

    def _event_taken(self, run_id: str, fold: RunFold, record: StepCommitted, batch: Batch) -> None:
        step = fold.steps[record.path]
        answer = _decode_json(record.result or b"")
        accepted = fold.run()
        request = msgspec.json.decode(step.request or b"", type=_EventWait)
        address = wait_address(run_id, accepted.tenant, request)  # type: ignore[arg-type]
        for row in batch.rows:
            if row.table == EVENTS and row.value is None and row.key.startswith(address):
                event = self._events.get(row.key)
                if event is not None and event.id == answer["id"] and row.key not in self._taken:
                    check(event.data == msgspec.json.encode(answer["data"]), "an event arrives as sent", event.id)
                    self._taken.add(row.key)
                    return
        raise Violation(
            "an event is delivered once", f"{run_id}/{record.path} was given {answer['id']}, not its to take"
        )

    def _on_cancel(self, run_id: str, fold: RunFold, record: r.CancelRequested, batch: Batch) -> None:
        self._cancel_seq.setdefault(run_id, record.seq)
        parent = (fold.run().parent or "").partition("/")[0]
        if parent and record.reason == f"its parent {parent} ended":
            self._over.add(parent)

    def _on_waiting(self, run_id: str, fold: RunFold, record: r.Waiting, batch: Batch) -> None:
        cancelled = fold.cancel_requested is not None and record.reason == "operator"
        check(not cancelled, "a cancelled run waits for nobody", f"{run_id}: {record.detail}")

    def _on_lock_broken(self, run_id: str, fold: RunFold, record: r.LockBroken, batch: Batch) -> None:
        self._untold.setdefault(run_id, []).append(record.lock)
        held = next((held for held in self._held.values() if held.token == record.token), None)
        check(held is not None and held.run_id == run_id, "a lock is broken for a reason", f"{run_id} does not hold it")
        assert held is not None
        ran_ns = self.ran_ns(run_id)
        overdue = record.at_ns - held.since_ns > self.lock_hold_ns or self.clock_set_back
        check(
            overdue or ran_ns >= self.lock_grace_ns,
            "a lock is broken for a reason",
            f"{run_id} held {held.name} for {(record.at_ns - held.since_ns) / 1e9} s and ran {ran_ns} ns",
        )

    def _on_ended(self, run_id: str, fold: RunFold, record: r.RunEnded, batch: Batch) -> None:
        self.open -= 1
        for child in fold.children.values():
            found = self.folds.get(child.run_id)
            if not child.detached and found is not None and found.ended is None:
                raise Violation("children end before their parents", f"{run_id} ends before {child.run_id}")
        for step in fold.open.values():
            if step.op != "tool.call" and step.state is StepState.PREPARED:
                raise Violation("no wait outlives its run", f"{run_id}/{step.path}: {step.op}")
        cancelled = self._cancel_seq.get(run_id)
        if cancelled is not None and record.state != RunState.CANCELLED:
            first = fold.ending
            check(
                first is not None and first.seq < cancelled,
                "a cancel is honoured",
                f"{run_id} was cancelled at {cancelled} and ends {record.state}",
            )
        if record.state == RunState.FAILED:
            error = _decode_json(record.error or b"{}")
            check(error.get("code") in self.may_fail, "runs fail as they were written to", f"{run_id}: {error}")
            code_is_there = fold.run().pins["agent"] == self.versions.get(fold.run().agent)
            if error.get("code") == "host_died" and code_is_there and run_id not in self.died_in_replay:
                asked = b"".join(step.request or b"" for step in fold.steps.values())
                left = [owner for owner in fold.foreign_locks if b'"take":"%s"' % owner.encode() in asked]
                check(not left, "who loses its host releases what it holds elsewhere", f"{run_id}: {left}")
        elif record.state == RunState.SUCCEEDED:
            for step in fold.open.values():
                raise Violation("a run that succeeds has settled its steps", f"{run_id}/{step.path}")
        elif record.state == RunState.TIMED_OUT:
            deadline = fold.run().deadline_ns
            if (fold.ending is not None and fold.ending.limit == "active_s") or b'"active_s"' in (record.error or b""):
                # It has worked for no longer than it has lived, and for so long at least as the journal says.
                limit_ns = int(fold.run().budget["active_s"] * 1e9)
                lived_ns = record.at_ns - fold.run().at_ns
                check(lived_ns >= limit_ns or self.clock_set_back, "nobody is timed out early", run_id)
                return
            check(deadline and (record.at_ns >= deadline or self.clock_set_back), "nobody is timed out early", run_id)
        if record.state != RunState.CANCELLED:
            return
        check(cancelled is not None, "only what is cancelled is CANCELLED", run_id)

    def _erased(self, run_id: str) -> None:
        fold = self.folds.get(run_id)
        check(fold is not None and fold.ended is not None, "only what has ended is erased", run_id)
        assert fold is not None and fold.ended is not None
        if run_id in self.erased:
            return
        check(self.wall_ns() - fold.ended.at_ns >= self.retention_ns, "ended runs are kept for a time", run_id)
        self.erased.add(run_id)

    # --- side rows ---

    def _row(self, row: Row, batch: Batch, touched: set[str]) -> None:
        table, key, value, run_id = row.table, row.key, row.value, batch.run_id
        if table == TIMERS and parse_timer_key(key)[2] == SCHEDULE_PATH:
            due_ns, schedule_id, _ = parse_timer_key(key)
            (self._schedule_timers.discard if value is None else self._schedule_timers.add)((due_ns, schedule_id))
            self._schedules_touched = True
            return
        if table == SCHEDULES:
            self._schedule_row(key, value)
            return
        run_of = _RUN_OF.get(table)
        if run_of is not None:
            owner = run_of(key)
            rows = self._rows.setdefault(owner, set())
            if value is None:
                rows.discard((table, key))
            else:
                rows.add((table, key))
            touched.add(owner)
        elif table == EVENTS:
            if value is None:
                self._event_goes(key)
            else:
                self._event_comes(key, _decode_event(value))
        elif table == LOCKS:
            self._lock_row(key, None if value is None else _decode_held(value), batch, touched)
        elif table == DECISIONS and batch.erase is None:
            mine = run_id is not None and key[:-1] == run_prefix(run_id)
            check(mine, "what was decided about a run is written with it", str(run_id))
        elif table == INBOX:
            pair = parse_inbox_key(key)
            if value is None:
                self._inbox.discard(pair)
            else:
                self._inbox.add(pair)

    def _schedule_row(self, key: bytes, value: bytes | None) -> None:
        for schedule in [*self.schedules.values()]:
            if schedule_key(schedule.tenant, schedule.name) == key:
                del self.schedules[schedule.id]
        if value is not None:
            schedule = _decode_schedule(value)
            self.schedules[schedule.id] = schedule
        self._schedules_touched = True

    def _event_comes(self, key: bytes, event: Event) -> None:
        check(key not in self._events, "an event is published once", event.id)
        id_key = event_id_key(key[:16], event.id)
        last = self._sent.get(id_key)
        check(
            last is None or event.sent_ns - last >= self.event_ttl_ns,
            "an event's id is used once",
            f"{event.id} at {key[:16].hex()}",
        )
        check(id_key in self.disk.tables[EVENT_IDS], "an event's id is known with the event", event.id)
        self._sent[id_key] = event.sent_ns
        self._events[key] = event

    def _event_goes(self, key: bytes) -> None:
        event = self._events.pop(key, None)
        if event is None or key in self._taken:
            return
        age = self.wall_ns() - event.sent_ns
        check(age >= self.event_ttl_ns, "no event is lost", f"{event.id} after {age / 1e9} s")

    def _lock_row(self, key: bytes, held: Held | None, batch: Batch, touched: set[str]) -> None:
        before = self._held.get(key)
        holder = None if before is None else before.run_id
        if held is not None and held.run_id is not None:
            check(holder is None, "one holds a lock", f"{held.name}: {holder} and {held.run_id}")
            check(held.token > self._token, "tokens grow", f"{held.name}: {held.token} after {self._token}")
            check(held.run_id == batch.run_id, "a lock is given in its holder's transaction", held.run_id)
            self._token = held.token
            self._locks.setdefault(held.run_id, {})[held.name] = held.token
            touched.add(held.run_id)
            for record in batch.records:
                if isinstance(record, StepCommitted) and record.op == "lock.acquire" and record.ok:
                    answer = _decode_json(record.result or b"")
                    if answer["token"] == held.token:
                        check(answer["dirty"] is (before is not None), "dirt is told", f"{held.name}: {answer}")
                        break
            else:
                raise Violation("a lock's holder is told", f"{held.name}: {held.token}")
        elif holder is not None and before is not None:
            fold = self.folds.get(holder)
            if held is None:
                check(batch.run_id == holder, "only its holder releases a lock", before.name)
            else:
                there = fold is None or fold.ended is not None or before.name not in fold.locks
                check(there, "a lock is taken from who lost it", f"{before.name} of {holder}")
            self._locks.get(holder, {}).pop(before.name, None)
            touched.add(holder)
        if held is None:
            self._held.pop(key, None)
        else:
            self._held[key] = held

    def _compare(self, run_id: str) -> None:
        """The run's side rows are what its fold implies."""
        fold = self.folds.get(run_id)
        there = self._rows.get(run_id, set())
        if fold is None or fold.accepted is None:
            check(not there, "rows belong to runs", f"{run_id}: {there}")
            return
        expected: set[tuple[str, bytes]] = set()
        locks = self._locks.get(run_id, {})
        if fold.ended is None:
            accepted = fold.accepted
            if fold.wait is None or fold.wait.reason == "operator":
                expected.add((READY, ready_key(accepted.base_tier, accepted.at_ns, run_id)))
            for step in fold.open.values():
                if step.op != "tool.call":
                    rows = registration(
                        run_id, accepted.tenant, step.op, step.path, step.request or b"", step.prepared_ns
                    ).rows
                    expected.update([(row.table, row.key) for row in rows])
            if accepted.deadline_ns:
                expected.add((TIMERS, timer_key(accepted.deadline_ns, run_id, DEADLINE_PATH)))
            if fold.wait is not None and fold.wait.path == START_PATH:
                expected.add((TIMERS, timer_key(accepted.start_ns, run_id, START_PATH)))
            if fold.wait is not None and fold.wait.until_ns:
                expected.add((TIMERS, timer_key(fold.wait.until_ns, run_id, HOLD_PATH)))
            check(locks == fold.locks, "locks are what the fold says", f"{run_id}: {locks} and {fold.locks}")
        else:
            check(not locks, "who has ended holds no lock", f"{run_id}: {locks}")
        if there != expected:
            missing, more = expected - there, there - expected
            what = [f"no {table} {key.hex()}" for table, key in missing] + [f"{table} {key!r}" for table, key in more]
            raise Violation("side rows are what the fold implies", f"{run_id}: {', '.join(what)}")

    # --- what leaves the runtime ---

    def told(self, batch: Batch, error: StoreError | None) -> None:
        """The engine has been told of a commit."""
        if error is None and batch.run_id is not None:
            for record in batch.records:
                if type(record) is StepCommitted and record.op == "emit" and record.ok:
                    count = self.emits[batch.run_id, record.path]
                    check(count == 1, "an emit is observed once", f"{batch.run_id}/{record.path}: {count} times")

    def emitted(self, run_id: str, path: str, data: bytes) -> None:
        count = self.emits.get((run_id, path))
        check(count is not None, "an emit is durable before it is observed", f"{run_id}/{path}")
        assert count is not None
        self.emits[run_id, path] = count + 1
        check(count == 0, "an emit is observed once", f"{run_id}/{path}")

    def tool_called(self, name: str, key: str | None, attempt: int, reconcile: bool) -> None:
        self.note("call", name, key, attempt, reconcile)
        if key is None:
            check(name in ("hash", "boom", "moved"), "a tool with an effect has a key", name)
            check(attempt <= self.attempts_max, "attempts are bounded", f"{name}: {attempt}")
            return
        run_id, path, tool = key.split("/")
        fold = self.folds.get(run_id)
        step = None if fold is None else fold.steps.get(path)
        where = f"{key} attempt {attempt}"
        check(step is not None and tool == name, "a step is durable before it begins", where)
        assert step is not None and fold is not None
        check(step.key == key, "a step keeps its key", f"{where}: {step.key}")
        version = self._guest_version.get(run_id)
        known = reconcile or version == fold.pins["agent"]
        check(known, "an upgrade is durable before its steps", f"{where}: {version}")
        check(fold.ended is None, "an ended run does nothing", where)
        if fold.ending is not None and self._first_seq[run_id, path] > fold.ending.seq:
            for other in self.in_flight:
                other_id, other_path, _ = other.split("/")
                doing = other_id == run_id and self._first_seq[run_id, other_path] < fold.ending.seq
                check(not doing, "what undoes a call comes after it", f"{where} while {other} has not returned")
        told = fold.ending is not None and step.seq < fold.ending.seq and not reconcile
        check(not told, "who was told to end begins nothing", where)
        if reconcile:
            check(step.state is not StepState.COMMITTED, "a settled step is not asked about", where)
        else:
            check(
                step.state is StepState.PREPARED and step.attempt == attempt,
                "a step is durable before it begins",
                f"{where}: it is {step.state}, attempt {step.attempt}",
            )

    def effect(self, name: str, key: str) -> None:
        self.note("effect", key)
        count = self.ledger.done[key]
        if name in DEDUPLICATES or name == "fail":
            if name == "fail":
                return  # an error says that nothing was done
            allowed = 1 + (self.more_attempts.get(key.partition("/")[0], 0) if name != "put" else 0)
            check(count <= allowed, "a keyed effect happens once", f"{key}: {count} times")
        else:
            run_id = key.partition("/")[0]
            allowed = 1 + self.more_attempts.get(run_id, 0)
            check(count <= allowed, "an effect is not repeated", f"{key}: {count} times")

    def guest_started(self, run_id: str, replay: bool, version: str, wanted: str, ending: bool) -> None:
        self.note("start", run_id, replay, version)
        check(version == wanted, "a guest is of its run's version", f"{run_id}: {version}, not {wanted}")
        self._guest_version[run_id] = version
        if replay and self.folds[run_id].ending is None and not ending:
            tenant = self.folds[run_id].run().tenant
            check(tenant not in self.tenants_off, "a disabled tenant's runs do not go on", f"{run_id} of {tenant}")
        fold = self.folds.get(run_id)
        check(fold is not None and fold.ended is None, "a guest belongs to a run that has not ended", run_id)
        check(run_id not in self.guests, "a run has one guest", run_id)
        self.guests.add(run_id)

    def guest_ended(self, run_id: str, reason: str) -> None:
        self.note("exit", run_id, reason)
        self.guests.discard(run_id)

    def killed_while_ending(self, run_id: str, for_good: bool) -> None:
        """``for_good``: it is not to be brought back."""
        check(not for_good, "who unwinds is let unwind", run_id)

    # --- what is acknowledged ---

    def accepted_ack(self, run_id: str) -> None:
        self.note("accepted", run_id)
        check(run_id in self.disk.heads or run_id in self.erased, "what is acknowledged is durable", run_id)

    def cancel_ack(self, run_id: str) -> None:
        self.note("cancelled", run_id)
        fold = self.folds.get(run_id)
        known = fold is not None and (fold.cancel_requested is not None or fold.ended is not None)
        check(known or run_id in self.erased, "what is acknowledged is durable", f"the cancel of {run_id}")

    def sent_ack(self, address: bytes, event_id: str) -> None:
        self.note("sent", event_id)
        known = event_id_key(address, event_id) in self._sent
        check(known, "what is acknowledged is durable", f"event {event_id}")

    def approved_ack(self, run_id: str, path: str, answer: bytes) -> None:
        self.note("approved", run_id, path)
        found = self._approvals.get((run_id, path))
        check(found == answer, "what is acknowledged is durable", f"approval {run_id}/{path}: {found!r}")
        check((run_id, path) not in self._approved, "an approval is used once", f"{run_id}/{path}")
        self._approved.add((run_id, path))

    def result_told(self, result: Any) -> None:
        run_id = result.run_id
        self.note("result", run_id, result.state)
        fold = self.folds.get(run_id)
        ended = None if fold is None else fold.ended
        check(ended is not None, "what is acknowledged is durable", f"the end of {run_id}")
        assert ended is not None
        told = (result.state, result.result, result.error)
        check(told == (ended.state, ended.result, ended.error), "a result is what the journal says", run_id)

    # --- the end ---

    def has_event(self, address: bytes) -> bool:
        """Whether an event that has not expired lies there."""
        now = self.wall_ns()
        return any(
            key.startswith(address) and now - event.sent_ns < self.event_ttl_ns for key, event in self._events.items()
        )

    def unended(self) -> list[str]:
        return [run_id for run_id, fold in self.folds.items() if fold.ended is None]

    def at_the_end(self) -> None:
        """Every run has ended and nothing is under way."""
        tables = self.disk.tables
        for run_id, fold in self.folds.items():
            check(fold.ended is not None and fold.state in TERMINAL, "every run ends", run_id)
        for table in (READY, TIMERS, WAITS, SCHEDULES):
            check(not tables[table], "no row is left", f"{table}: {list(tables[table])[:3]}")
        for pair in self._inbox:
            raise Violation("no row is left", f"inbox: {pair}")
        for held in self._held.values():
            check(held.run_id is None, "no lock is left", f"{held}")
        check(not self.guests, "no guest is left", f"{self.guests}")
        for key, count in self.ledger.done.items():
            if key.endswith("/fail"):
                continue
            run_id = key.partition("/")[0]
            check(count <= 1 + self.more_attempts.get(run_id, 0), "an effect happens at most once", key)


class _EventWait(msgspec.Struct):
    topic: str | None = None
    key: str = ""
    timeout_s: float | None = None


_BEFORE: dict[type, Any] = {
    r.RunAccepted: Laws._on_accepted,
    r.StepPrepared: Laws._on_prepared,
    r.StepCommitted: Laws._on_committed,
    r.CancelRequested: Laws._on_cancel,
    r.Checkpoint: Laws._on_checkpoint,
    r.LockBroken: Laws._on_lock_broken,
    r.Waiting: Laws._on_waiting,
    r.RunEnded: Laws._on_ended,
}
