"""Planted bugs: realistic mistakes in the engine, each made by patching one place. The simulation must find each."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from agentrt.engine import accept, schedules
from agentrt.engine.downtime import Downtime
from agentrt.engine.effects import Effects
from agentrt.engine.engine import Engine
from agentrt.engine.family import Family
from agentrt.engine.grace import Grace
from agentrt.engine.loading import Loader
from agentrt.engine.locks import Locks
from agentrt.engine.machine import Phase, RunMachine
from agentrt.engine.machine.state import Tell
from agentrt.engine.mailbox import Mailbox
from agentrt.engine.timers import Timers
from agentrt.engine.wakes import Wakes
from agentrt.ids import idempotency_key
from agentrt.stores.base import EVENTS, READY, TIMERS, Row

Patch = tuple[Any, str, Any]
_m: Any = RunMachine
_e: Any = Engine


def _step_before_it_is_durable() -> list[Patch]:
    """A tool is called when its StepPrepared is given to the store, not when it is durable."""
    commit = _m._commit

    def early(self: Any, after: Any, *args: Any, **how: Any) -> None:
        if isinstance(after, list):
            commit(self, None, *args, **how)
            self._start(after)
        else:
            commit(self, after, *args, **how)

    return [(_m, "_commit", early)]


def _refusal_ignored() -> list[Patch]:
    """A refused append is taken for done: whoever waits is answered."""

    def deaf(self: Any, error: Any) -> None:
        committed(self, None)

    committed = _m.on_committed
    return [(_m, "on_committed", deaf)]


def _guest_goes_on_after_refusal() -> list[Patch]:
    """The guest has seen an answer whose append was refused, and is not discarded."""

    def keep(self: Any, error: Any) -> None: ...

    return [(_m, "_refused", keep)]


def _timer_row_stays() -> list[Patch]:
    """The row of a timer is not removed with its step."""
    unregister = _m._unregister

    def lazy(self: Any, *args: Any, **how: Any) -> None:
        before = len(self._rows)
        unregister(self, *args, **how)
        self._rows[before:] = [row for row in self._rows[before:] if row.table != TIMERS]

    return [(_m, "_unregister", lazy)]


def _lock_given_twice() -> list[Patch]:
    """Who holds a lock is not looked at when it is handed on."""
    hand_over = Locks._hand_over

    def blind(self: Any, address: bytes) -> None:
        held = self._held.pop(address, None)
        hand_over(self, address)
        if held is not None:
            self._held.setdefault(address, held)

    return [(Locks, "_hand_over", blind)]


def _event_removed_apart() -> list[Patch]:
    """An event's row is removed after the answer, in a transaction of its own: a crash between delivers it twice."""
    answer = _m.answer

    def apart(self: Any, path: str, ok: bool, payload: bytes, rows: tuple[Row, ...] = (), told: Any = None) -> Any:
        events = tuple(row for row in rows if row.table == EVENTS and row.value is None)
        if not events:
            return answer(self, path, ok, payload, rows, told)
        rest = tuple(row for row in rows if row not in events)

        def then(error: Any) -> None:
            if error is None:
                self._port.commit_rows(events, lambda error: told(error))
            else:
                told(error)

        return answer(self, path, ok, payload, rest, then)

    return [(_m, "answer", apart)]


def _child_budget_of_its_own() -> list[Patch]:
    """A child gets what it asks for, whatever its parent has left."""
    return [(accept, "child_budget", lambda asked, parent, used, now: asked)]


def _parent_ends_first() -> list[Patch]:
    """The end of a run does not wait for its children."""
    end = _m._maybe_end

    def hasty(self: Any) -> None:
        self._children = set()
        end(self)

    return [(_m, "_maybe_end", hasty)]


def _at_most_once_again() -> list[Patch]:
    """An at_most_once step whose outcome nobody saw is done again."""
    settle, stuck = _m._settle_lost, _m.stuck_step

    def again(self: Any, step: Any, spec: Any) -> Any:
        if step.kind == "at_most_once" and step.attempt < self._port.attempts_max:
            step.attempt += 1
            self._prepare_again(step)
            return "again"
        return settle(self, step, spec)

    def never(self: Any) -> Any:
        found = stuck(self)
        return None if found is not None and "twice" in found[1] else found

    return [(_m, "_settle_lost", again), (_m, "stuck_step", never)]


def _emit_lost() -> list[Patch]:
    """Observers are told of what waits with a commit only if nothing else does."""

    def first_only(self: Any, error: Any) -> None:
        after = self._inflight[0]
        if type(after) is Tell and len(after.told) > 1:
            self._inflight[0] = Tell(after.after, after.told[:1])
        committed(self, error)

    committed = _m.on_committed
    return [(_m, "on_committed", first_only)]


def _key_changes() -> list[Patch]:
    """A repeated step gets a fresh idempotency key, in the journal and for its tool."""
    call = Effects.call_tool

    def fresh(self: Any, machine: Any, step: Any) -> None:
        if step.attempt > 1 and step.key is not None:
            step.key = idempotency_key(machine.run_id, f"{step.path}.{step.attempt}", step.tool)
        call(self, machine, step)

    return [(Effects, "call_tool", fresh)]


def _not_ready_again() -> list[Patch]:
    """A run that was woken does not get its READY row back."""
    resumed = _m._resumed

    def forgets(self: Any) -> None:
        before = len(self._rows)
        resumed(self)
        self._rows[before:] = [row for row in self._rows[before:] if row.table != READY]

    return [(_m, "_resumed", forgets)]


def _cancel_forgotten_in_replay() -> list[Patch]:
    """A run that is brought back does not look at its cancel flag."""
    return [(_m, "end_cancelled", lambda self: None)]


def _started_twice() -> list[Patch]:
    """A run that is brought back is started once for each page of the scan and each who asks for it."""
    load = Loader.load

    def twice(self: Any, run_id: str, action: Any = None, missing: Any = None) -> None:
        load(self, run_id, action, missing)
        if action is None and run_id in self._places.loading:
            self._read_for_loading(run_id)

    return [(Loader, "load", twice)]


def _timers_not_read() -> list[Patch]:
    """After a start nobody reads the timers of the runs that wait."""
    return [(Timers, "open", lambda self: None)]


def _ended_children_not_read() -> list[Patch]:
    """After a start nobody reads which children have ended."""
    return [(Wakes, "_find_ended_children", lambda self, after: None)]


def _accepted_before_durable() -> list[Patch]:
    """A submit is acknowledged when it is given to the store."""
    accept = _m.accept

    def early(self: Any, *args: Any, **how: Any) -> None:
        accept(self, *args, **how)
        tag = self.tag
        tag.done(self.run_id, None)
        tag.done = lambda run_id, error: None

    return [(_m, "accept", early)]


def _event_comes_second() -> list[Patch]:
    """An event that is sent when somebody waits already does not look for who that is."""
    publish, match = Mailbox.publish, Mailbox._match

    def quiet(self: Any, address: bytes, event_id: str, data: bytes, write: Any, done: Any) -> None:
        def told(fresh: bool, error: Any) -> None:
            self.quiet = address if fresh else None
            done(fresh, error)

        publish(self, address, event_id, data, write, told)

    def looks(self: Any, address: bytes) -> None:
        if getattr(self, "quiet", None) == address:
            self.quiet = None
            self._lanes.leave(address)
        else:
            match(self, address)

    return [(Mailbox, "publish", quiet), (Mailbox, "_match", looks)]


def _waits_not_read() -> list[Patch]:
    """After a start nobody looks for events that came before the node ended, nor for who waits for locks."""
    return [(Wakes, "_find_waits", lambda self, after: None)]


def _reconcile_not_believed() -> list[Patch]:
    """A reconcile function that finds the effect is not believed."""
    reconciled = _m.on_reconciled

    def doubt(self: Any, step: Any, outcome: Any) -> None:
        payload = outcome.payload.replace(b'"found":"yes"', b'"found":"no"')
        reconciled(self, step, outcome._replace(payload=payload))

    return [(_m, "on_reconciled", doubt)]


def _replay_in_order_of_asking() -> list[Patch]:
    """Replay gives the first recorded answer that the guest waits for, not the one it got first."""

    def wrong(self: Any) -> None:
        waiting = self._waiting
        if self.phase is Phase.REPLAY and waiting is not None and self.ending is None and not self._awaited:
            known = [handle for handle in waiting if handle in self._known]
            if len(known) > 1:
                best = min(known)
                self._waiting = None
                self._undelivered.discard(best)
                seq, status, payload, at = self._known[best]
                self._complete(best, status, payload, at, seq)
                return
        advance(self)

    advance = _m._advance
    return [(_m, "_advance", wrong)]


def _attempts_not_counted() -> list[Patch]:
    """After a restart a step's attempts start again."""
    again = _m._asked_again

    def forgetful(self: Any, step: Any, recorded: Any) -> Any:
        recorded.step.attempt = min(recorded.step.attempt, 1) if not recorded.committed else recorded.step.attempt
        return again(self, step, recorded)

    return [(_m, "_asked_again", forgetful), (_m, "stuck_step", lambda self: None)]


def _key_ttl_ignored() -> list[Patch]:
    """However old an idempotency key is, its tool is called again with it."""
    settle = _m._settle_lost

    def trusting(self: Any, step: Any, spec: Any) -> Any:
        return settle(self, step, msgspec.structs.replace(spec, key_ttl_ns=10**18))

    return [(_m, "_settle_lost", trusting)]


def _parked_parent_not_told() -> list[Patch]:
    """Who waits for a child that ends is told only if it is in memory."""
    ended = Family.ended

    def here_only(self: Any, child: str, accepted: Any, end: Any) -> None:
        if accepted.parent is not None and self._runs.in_memory(accepted.parent.partition("/")[0]) is None:
            return
        ended(self, child, accepted, end)

    return [(Family, "ended", here_only)]


def _deadlines_stay() -> list[Patch]:
    """A downtime is not added to the deadlines of approvals."""
    return [(Downtime, "moved", lambda self, since_ns, due_ns: due_ns)]


def _silent_upgrade() -> list[Patch]:
    """A run goes on with another version and its journal does not say so."""

    def silent(self: Any, pins: dict[str, str], state: bytes | None = None) -> None:
        self.pins = self.pins | pins
        self.agent_version = self.pins["agent"]

    return [(_m, "upgrade", silent)]


def _upgrade_after_the_start() -> list[Patch]:
    """The record of an upgrade waits for company: its guest may be told first what it has done."""
    upgrade = _m.upgrade

    def late(self: Any, pins: dict[str, str], state: bytes | None = None) -> None:
        before = self.agent_version
        upgrade(self, pins, state)
        self.agent_version = before

    return [(_m, "upgrade", late)]


def _migrates_in_the_middle() -> list[Patch]:
    """A state is migrated although steps have been made since."""
    return [(_m, "at_segment_start", property(lambda self: self.guest is None and self.phase <= Phase.LIVE))]


def _schedule_keeps_its_timer() -> list[Patch]:
    """The old timer of a schedule stays when the next one is made."""

    def keeps(schedule: Any, key: bytes | None) -> tuple[Row, ...]:
        return () if key is None else timer(schedule, key)

    timer: Any = schedules._timer
    return [(schedules, "_timer", keeps)]


def _nobody_is_lent_a_tier() -> list[Patch]:
    """The journal is told that the holder's tier has changed, its guest is not."""
    return [(_e, "_lend", lambda self, machine: None)]


def _lent_tier_stays_after_release() -> list[Patch]:
    """A lock that is released is still waited for through its old holder."""
    set_holder = Locks._set

    def keeps(self: Any, address: bytes, held: Any) -> None:
        holder = self._lending.waits_of(address).get("holder")
        set_holder(self, address, held)
        if held is None and holder is not None and address in self._waiting:
            self._lending.connect(address, "holder", holder)

    return [(Locks, "_set", keeps)]


def _lent_tier_stays_after_timeout() -> list[Patch]:
    """Who stops waiting for a lock without getting it is not noticed."""
    over = Locks.wait_over

    def deaf(self: Any, run_id: str, path: str) -> None:
        address = self._lending.waits_of(run_id).get(path)
        held = self._held.get(address)
        if held is None or held.run_id == run_id or held.run_id is None:
            over(self, run_id, path)
        else:
            self._not_waiting(address, run_id, path)

    return [(Locks, "wait_over", deaf)]


def _lending_stops_at_the_holder() -> list[Patch]:
    """Whoever the holder waits for by a join is not lent the tier."""
    return [(_e, "find_joins", lambda self, machine: None)]


def _lending_is_forgotten_in_a_restart() -> list[Patch]:
    """A run that is brought back from the store is not lent what it was."""
    lend = _e._lend

    def forgets(self: Any, machine: Any) -> None:
        if not machine.loaded_version:
            lend(self, machine)

    return [(_e, "_lend", forgets)]


def _busy_guest_is_not_asked_again() -> list[Patch]:
    """A guest that could not be moved just then keeps its tier."""

    def once(self: Any, machine: Any) -> None:
        if machine.guest is not None:
            machine.guest.lend(self._locks.lent(machine.run_id))

    return [(_e, "_lend", once)]


def _undoes_while_it_is_done() -> list[Patch]:
    """Unwinding handlers do not wait for the program's calls."""
    return [(_m, "_program_works", property(lambda self: False))]


def _grace_counts_always() -> list[Patch]:
    """A lock is broken once its holder has run for long, whoever waited meanwhile."""

    def always(self: Any, guest: Any) -> None:
        look(self, guest)
        self.used_ns = 0 if guest is None else guest.ran_ns * 100

    look = Grace.look
    return [(Grace, "look", always)]


def _asked_to_park_once() -> list[Patch]:
    """A run that cannot be parked when its time comes is not asked again."""

    def once(self: Any) -> bool:
        park(self)
        return True

    park = _m.park
    return [(_m, "park", once)]


def _dies_without_unwinding() -> list[Patch]:
    """A run whose host died ends at once, whatever it holds elsewhere."""
    return [(_m, "on_cut_short", lambda self, reason, message, answers: False)]


def _children_told_first() -> list[Patch]:
    """A run that dies tells its children before that is durable."""
    return [(_m, "_journal_ending", lambda self, outcome: self._end_children())]


def _lost_lock_is_forgotten_in_a_restart() -> list[Patch]:
    """Who has lost a lock and was not told before a restart is not told after it."""
    load = _m._load_locks

    def forgets(self: Any, run: Any) -> None:
        load(self, run)
        self._lost_locks = []

    return [(_m, "_load_locks", forgets)]


MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    function.__name__.lstrip("_"): function
    for function in (
        _step_before_it_is_durable,
        _refusal_ignored,
        _guest_goes_on_after_refusal,
        _timer_row_stays,
        _lock_given_twice,
        _event_removed_apart,
        _parent_ends_first,
        _at_most_once_again,
        _emit_lost,
        _key_changes,
        _not_ready_again,
        _cancel_forgotten_in_replay,
        _started_twice,
        _timers_not_read,
        _ended_children_not_read,
        _accepted_before_durable,
        _event_comes_second,
        _waits_not_read,
        _reconcile_not_believed,
        _replay_in_order_of_asking,
        _attempts_not_counted,
        _key_ttl_ignored,
        _parked_parent_not_told,
        _deadlines_stay,
        _silent_upgrade,
        _upgrade_after_the_start,
        _migrates_in_the_middle,
        _schedule_keeps_its_timer,
        _nobody_is_lent_a_tier,
        _lent_tier_stays_after_release,
        _lent_tier_stays_after_timeout,
        _lending_stops_at_the_holder,
        _lending_is_forgotten_in_a_restart,
        _busy_guest_is_not_asked_again,
        _undoes_while_it_is_done,
        _grace_counts_always,
        _asked_to_park_once,
        _child_budget_of_its_own,
        _dies_without_unwinding,
        _children_told_first,
        _lost_lock_is_forgotten_in_a_restart,
    )
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is in the engine while this is entered."""
    patches = MUTANTS[name]()
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    for owner, attribute, value in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)
