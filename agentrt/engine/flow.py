"""The shell of flow control for amounts: the engine's ledger, quotas and bounds of families, and who waits for them.

Loop thread only. What is decided is decided in `agentrt.flow`; here it is asked with the time, stored with the run's
records, and those who wait are woken. Rows of ACCOUNTS, by the first byte of their keys: ``e`` a run that counts, and
``s`` what is below it (both under the root of its ensemble, so that a prefix finds all of them), ``a`` what ended runs
used of an account, ``q`` a quota's counter.

A step that may not begin is held by its machine, without a record. After a while the run is parked with the reason and
a timer; here only a bounded index of who waits for what is kept, most urgent first, so that room is given on at once.
Who is not in it looks again when the timer fires.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Protocol

import msgspec

from agentrt.engine.decisionlog import DecisionLog, saved
from agentrt.engine.machine import HOLD_PATH, Phase, RunMachine
from agentrt.engine.ports import Hold, Refusal, Runs
from agentrt.engine.steps import Spawn, StepInFlight, decode
from agentrt.errors import (
    AgentrtError,
    BudgetExhaustedError,
    EnsembleFullError,
    LimitReachedError,
    StoreCorruptError,
    StoreError,
)
from agentrt.flow.accounts import (
    Account,
    BaseRow,
    BelowRow,
    Entry,
    EntryRow,
    decode_base,
    decode_below,
    decode_entry,
    encode_row,
)
from agentrt.flow.amounts import (
    COUNTED,
    FUEL,
    MICRODOLLARS,
    MODEL_CALLS,
    NO_LIMIT,
    NOTHING,
    ONE_TOOL_CALL,
    RETRIES,
    TOKENS,
    TOOL_CALLS,
    Amounts,
)
from agentrt.flow.budgets import Ended, Exhausted, Ledger, Wait, decision_of
from agentrt.flow.capacity import Headroom, Room, StepEstimate, capacity
from agentrt.flow.children import Ensemble
from agentrt.flow.decisions import WAIT_REASON, Action, Control, Decision, Scope
from agentrt.flow.estimates import CHILD, Estimate, Estimates
from agentrt.flow.profiles import InForce, Profile, decode_applied
from agentrt.flow.quotas import CounterRow, Quotas, decode_counter, encode_counter
from agentrt.fold import Step
from agentrt.ids import run_id_to_bytes
from agentrt.records import Cost, RunAccepted
from agentrt.states import RunState
from agentrt.stores.base import ACCOUNTS, NODE, Row, Store, scan_all
from agentrt.stores.keys import below_key, entry_key

#: When a wait whose end nobody knows is looked at again, should the index have lost it. Picked by feel.
_LOOK_AGAIN_NS: Final = 60 * 10**9
#: Runs of lower tiers come this much later to a window that begins for all of them.
_TIER_STEP_NS: Final = 20_000_000
_WAITERS_MAX: Final = 10_000
_WAKES_PER_TURN: Final = 64
#: Row of NODE: the profiles in force.
APPLIED_KEY: Final = b"flow/applied"
_COUNTED_OPS: Final = frozenset({"tool.call", "model.generate"})
_MODEL: Final = "model.generate"
_GIVE_UP: Final = Action.GIVE_UP
_SPAWN: Final = "run.spawn"
_NO_COST: Final = Cost()


class FlowRuns(Runs, Protocol):
    """What flow control needs of the engine."""

    def in_memory(self, run_id: str) -> RunMachine | None: ...

    def arm(self, due_ns: int, run_id: str, path: str) -> None:
        """`RunMachine.fall_due` at that time, if the node lives."""

    def reserve_model(self, step: StepInFlight) -> None:
        """See RunPort."""

    def start_held(self, machine: RunMachine) -> None:
        """Start the guest of a run that `Flow.may_start` kept."""


class EnsembleRows(msgspec.Struct, frozen=True):
    """The rows of one ensemble."""

    entries: tuple[EntryRow, ...] = ()
    below: tuple[BelowRow, ...] = ()
    root_agent: str = ""  # "": the root is not there any more
    decided: int = 0  # rows of decisions about the run that is read


class Flow:
    """See above. ``base``: the limits of the configuration. The accounts are read when it is made, which blocks: a node
    that has not read them must not begin a step."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: FlowRuns,
        store: Store,
        base: Profile,
        *,
        depth_max: int,
        fan_out_max: int,
        tell: Callable[[str, Any], None],
        configured: Callable[[bool, InForce], None],
        decisions: DecisionLog,
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._depth_max = depth_max
        self._fan_out_max = fan_out_max
        self._tell = tell
        self._configured = configured
        self.force = InForce(base)
        self._limits: dict[tuple[str, ...], dict[str, int]] = {}  # of `force`, by account
        self._counts: dict[tuple[str, str], bool] = {}  # whether runs of (tenant, agent) count, without a budget
        self.ledger: Final = Ledger(self._limits_of)
        self.quotas: Final = Quotas()
        self.estimates: Final = Estimates()
        self.decisions: Final = decisions
        self._ensembles: dict[str, Ensemble] = {}
        self._ensembles_of: dict[str, tuple[str, str]] = {}  # of these, tenant and agent of the root
        self._root_agents: dict[str, str] = {}  # by run in memory that is a child
        self._places: set[str] = set()  # spawns that have been given one
        self._kept: dict[str, set[str]] = {}  # by run: spawns that have one, and wait for something else
        self._waiting: dict[Hashable, OrderedDict[tuple[str, int], int]] = {}  # run, handle -> tier
        self._waits_for: dict[tuple[str, int], tuple[Hashable, Account | None]] = {}
        self._waking = False
        self._woken: set[Hashable] = set()
        self._reading = 0
        self._drops = 0
        self._dropped: dict[str, int] = {}  # ensembles that left memory while rows are read, by number of `_drops`
        self._store = store
        self._adopted = False
        self._configure()
        self.ready()

    def ready(self) -> bool:
        """Whether the accounts have been read. If not they are read now, which may fail again; until then no run may
        begin or be brought back. Raises StoreCorruptError."""
        if not self._adopted:
            try:
                self._adopt(self._store)
            except StoreCorruptError:
                raise
            except StoreError:
                return False
            self._adopted = True
        return True

    # --- limits ------------------------------------------------------------------

    def _limits_of(self, id: tuple[str, ...]) -> dict[str, int]:
        limits = self._limits.get(id)
        if limits is None:
            if len(self._limits) >= _WAITERS_MAX:
                self._limits.clear()
            limits = self._limits[id] = self.force.limits_of(id)
        return limits

    def budget_of(self, tenant: str, agent: str) -> dict[str, int | float]:
        """What the profiles in force say of runs of the agent that have no budget of their own."""
        return {**self.force.budget_of(tenant, agent)} if self._budgets else {}

    def _configure(self) -> None:
        self._budgets = any(layer.budgets for layer in self.force.layers)
        self._limits.clear()
        self._counts.clear()
        self.quotas.configure(self.force.quotas())
        #: Whether anything but a budget of a run may keep a step from beginning.
        self.limited = any(layer.limits or layer.quotas for layer in self.force.layers)
        self._configured(self.limited, self.force)

    def switch(self, force: InForce, live: Iterable[RunMachine], now_ns: int) -> None:
        """Other limits from now on, all in this turn of the loop."""
        self.force = force
        self._configure()
        self.ledger.limits_changed(now_ns)
        for machine in live:
            if machine.account is None and machine.phase in (Phase.REPLAY, Phase.LIVE):
                self._open(machine, None)
        for root, ensemble in [*self._ensembles.items()]:
            ensemble.configure(force.ensemble(*self._ensembles_of[root]))
            self._settle_family(root)
        for key in [*self._waiting]:
            self._wake(key)

    def _counts_of(self, accepted: RunAccepted, parent: Entry | None) -> bool:
        if (parent is not None and parent.chain) or any(key in COUNTED for key in accepted.budget):
            return True
        key = accepted.tenant, accepted.agent
        known = self._counts.get(key)
        if known is None:
            if len(self._counts) >= _WAITERS_MAX:
                self._counts.clear()
            known = self._counts[key] = self.ledger.counts(*key, budgeted=False)
        return known

    # --- runs come and go -----------------------------------------------------------

    def accept(self, machine: RunMachine, parent: RunMachine | None) -> tuple[Row, ...]:
        """A new run: rows that go with its acceptance. Raises BudgetExhaustedError if its fuel is not to be had: then
        nothing is taken."""
        return self._open(machine, parent.account if parent is not None else None)

    def _open(self, machine: RunMachine, parent: Entry | None) -> tuple[Row, ...]:
        accepted, run_id = machine.accepted, machine.run_id
        if not self._counts_of(accepted, parent):
            return ()
        budget = {key: int(limit) for key, limit in accepted.budget.items() if key in COUNTED}
        now = self._runs.now_ns()
        entry = self.ledger.open(run_id, accepted.tenant, accepted.agent, budget, parent, accepted.root or run_id, now)
        if self.ledger.left(entry, FUEL, now) != NO_LIMIT:
            refused = self.ledger.reserve(entry, ((FUEL, accepted.fuel_max),), now)
            if refused is not None:
                self.ledger.never_was(entry)
                error = self._error_of(refused, machine, None)
                error.hint = f"The run asks for {accepted.fuel_max} fuel: submit it with less (fuel=)"
                raise error
        machine.account = entry
        return (_entry_row(self.ledger.row(entry)),)

    def refused(self, machine: RunMachine, *, exists: bool) -> None:
        """The store refused the run's acceptance, perhaps because it was accepted before."""
        if machine.account is not None:
            self.ledger.never_was(machine.account, exists=exists)
            machine.account = None
            self._freed()
        self._leave_family(machine)

    def reading(self) -> int:
        """A run and the rows of its ensemble are being read; `done_reading` follows. What to ask `stale` with."""
        self._reading += 1
        return self._drops

    def read(self, store: Store, root: str, run_id: str) -> EnsembleRows:
        """On a reader thread: the rows of the run's ensemble."""
        entries = [decode_entry(value) for _, value in scan_all(store, ACCOUNTS, b"e" + run_id_to_bytes(root))]
        below = [decode_below(value) for _, value in scan_all(store, ACCOUNTS, b"s" + run_id_to_bytes(root))]
        first = store.read_records(root, 0, 1)
        agent = first[0].agent if first and isinstance(first[0], RunAccepted) else ""
        return EnsembleRows(tuple(entries), tuple(below), agent, saved(store, run_id)[0])

    def stale(self, root: str, began: int) -> bool:
        """The rows of the ensemble may be older than what it was when it left memory, which it has since they were
        read."""
        return self._dropped.get(root, 0) > began and not self.ledger.attached(root)

    def done_reading(self) -> None:
        """See `reading`."""
        self._reading -= 1
        if not self._reading:
            self._dropped.clear()

    def loaded(self, machine: RunMachine, rows: EnsembleRows) -> None:
        """A run came back from the store, with the rows of its ensemble."""
        accepted, run_id = machine.accepted, machine.run_id
        root = accepted.root or run_id
        self.decisions.returned(run_id, rows.decided)
        if accepted.root is not None:
            self._root_agents[run_id] = rows.root_agent
        now = self._runs.now_ns()
        entry = self.ledger.entry(run_id, root)
        if entry is None:
            machine.account = self.ledger.attach(run_id, root, rows.entries, rows.below, now)
            if machine.account is None:
                self._open(machine, None)  # it is counted from now on
            return
        row = next((row for row in rows.entries if row.run_id == run_id), None)  # its last transaction was refused
        if row is None:
            self.ledger.never_was(entry)
        else:
            self.ledger.reread(entry, row)
            machine.account = entry
        self._freed()

    def parked(self, machine: RunMachine) -> None:
        """The run goes out of memory, and everything it did is durable."""
        self.decisions.left(machine.run_id)
        entry, machine.account = machine.account, None
        if entry is not None:
            self.ledger.leave(entry)
            self._left_memory(entry.root)
        self._leave_family(machine)

    def discarded(self, machine: RunMachine) -> tuple[Row, ...]:
        """The store refused something of the run, which is read again: rows to make durable, that belong to no run."""
        machine.account = None
        self.decisions.left(machine.run_id)
        rows = self.ledger.take_back(machine.run_id)
        return () if rows is None else _ended_rows(rows, machine.accepted.root or machine.run_id)

    def end_account(self, machine: RunMachine) -> tuple[Row, ...]:
        """See RunPort."""
        entry = machine.account
        assert entry is not None
        now = self._runs.now_ns()
        if entry.held[FUEL]:
            held = ((FUEL, entry.held[FUEL]),)
            used = min(machine.cost.fuel, entry.held[FUEL])
            self.ledger.settle(entry, held, ((FUEL, used),) if used else NOTHING, now)
        spent = entry.used.total
        rows = _ended_rows(self.ledger.end(entry, now), entry.root)
        entry.dirty = False
        if machine.accepted.parent is not None:
            parent = self._runs.in_memory(machine.accepted.parent.partition("/")[0])
            if parent is not None:
                took_ns = max(0, now - machine.accepted.at_ns)
                self.estimates.observe(parent.accepted.agent, CHILD, spent[TOKENS], spent[MICRODOLLARS], took_ns)
        return (*rows, Row(ACCOUNTS, entry_key(entry.root, entry.run_id), None))

    def ended(self, machine: RunMachine) -> None:
        """The run's end is durable."""
        self.decisions.left(machine.run_id)
        entry, machine.account = machine.account, None
        if entry is not None:
            self.ledger.ended(machine.run_id)
            self._left_memory(entry.root)
        self._leave_family(machine)
        self._freed()

    def exported(self, run_id: str) -> None:
        """The run goes on elsewhere, durably. What it has used stays counted in the accounts above it, what it held is
        given back, and its row goes."""

        def look(store: Store) -> tuple[str, EnsembleRows] | None:
            first = store.read_records(run_id, 0, 1)
            if not first or not isinstance(first[0], RunAccepted):
                return None
            root = first[0].root or run_id
            return root, self.read(store, root, run_id)

        def found(read: tuple[str, EnsembleRows] | None, error: BaseException | None) -> None:
            if error is not None:
                self._runs.later(partial(self.exported, run_id))
            elif read is not None:
                self._take_out(run_id, *read)

        self._runs.read(look, found)

    def _take_out(self, run_id: str, root: str, rows: EnsembleRows) -> None:
        if self.ledger.entry(run_id, root) is not None or self._runs.in_memory(run_id) is not None:
            return  # it has come back meanwhile
        now = self._runs.now_ns()
        entry = self.ledger.attach(run_id, root, rows.entries, rows.below, now)
        if entry is None:
            return
        self.ledger.release(entry, tuple((index, value) for index, value in enumerate(entry.held) if value))
        gone = (*_ended_rows(self.ledger.end(entry, now), root), Row(ACCOUNTS, entry_key(root, run_id), None))

        def durable(error: AgentrtError | None) -> None:
            if error is None:
                self.ledger.ended(run_id)
                self._left_memory(root)
                self._freed()
            else:
                self.ledger.take_back(run_id)
                self._runs.later(partial(self.exported, run_id))

        self._runs.commit_rows(gone, durable)

    def _left_memory(self, root: str) -> None:
        if self._reading and not self.ledger.attached(root):
            self._drops += 1
            self._dropped[root] = self._drops

    def account_rows(self, machine: RunMachine) -> tuple[Row, ...]:
        """See RunPort."""
        assert machine.account is not None
        return (_entry_row(self.ledger.row(machine.account)),)

    # --- steps -----------------------------------------------------------------------

    def admit(self, machine: RunMachine, step: StepInFlight) -> Hold | Refusal | None:
        """See RunPort. For a further attempt: what it may use beyond what is held for the step already."""
        if step.op == _SPAWN:
            return self._admit_child(machine, step)
        entry = machine.account
        if entry is None and not self.quotas.any:
            return None
        now = self._runs.now_ns()
        wanted = amounts_of(step.op, step.reserved)
        amounts = _beyond(wanted, step.held) if step.held else wanted
        if entry is not None:
            if machine.ending is not None:  # its handlers have an allowance of their own, which is counted all the same
                self.ledger.charge(entry, amounts, now)
                step.held = NOTHING
                return None
            refused = self.ledger.reserve(entry, amounts, now)
            if refused is not None:
                return self._not_now(machine, step, refused, now)
        if self.quotas.any and machine.ending is None and step.attempt == 1:
            full = self._take_quota(machine, step, now)
            if full is not None:
                if entry is not None:
                    self.ledger.release(entry, amounts)
                return full
        if entry is not None:
            if step.kind == "pure":  # no record says that it is under way
                self.ledger.settle(entry, amounts, amounts, now)
                step.held = NOTHING
            else:
                step.held = _both(amounts, step.held) if step.held else wanted
        return None

    def _take_quota(self, machine: RunMachine, step: StepInFlight, now: int) -> Hold | Refusal | None:
        scope = Scope.MODEL if step.op == _MODEL else Scope.TOOL
        taken = self.quotas.take(((scope, step.tool), (Scope.TENANT, machine.accepted.tenant)), now)
        if isinstance(taken, list):
            machine.add_rows(tuple(_counter_row(counter.row()) for counter in taken))
            return None
        counter, quota = taken.counter, taken.counter.quota
        self.decide(taken.decision(now, machine.run_id, step.path))
        who = f"{quota.scope.value} {counter.name}"
        if taken.never:  # a quota of less than one call is refused where it is made
            return Refusal(LimitReachedError(f"{who} has no {quota.limit}", run=machine.run_id, step=step.path))
        key = ("quota", quota.scope.value, counter.name, quota.span.value)
        until_ns = counter.next_free_ns(len(self._waiting.get(key, ())), 1)
        hold = Hold(
            "quota",
            f"{who} has used its {quota.count} {quota.limit}; the next place is free at {until_ns}",
            until_ns + machine.tier * _TIER_STEP_NS,
        )
        return self._held(machine, step, key, hold)

    def _not_now(self, machine: RunMachine, step: StepInFlight, refused: Wait | Exhausted, now: int) -> Hold | Refusal:
        self.decide(decision_of(refused, machine.run_id, step.path, now))
        if isinstance(refused, Exhausted):
            if refused.ends_run:
                return Refusal(self._error_of(refused, machine, None), ends=True)
            if refused.never:
                return Refusal(self._error_of(refused, machine, step.path))
        account = refused.account
        until_ns = getattr(refused, "until_ns", 0) or now + _LOOK_AGAIN_NS
        what = "is spent" if isinstance(refused, Exhausted) else "is reserved by others"
        detail = f"{refused.key} of {_name_of(refused)} {what}: {refused.value} of {refused.limit}"
        if isinstance(refused, Exhausted) and refused.until_ns:
            detail += f"; it begins again at {refused.until_ns}"
        hold = Hold(WAIT_REASON[Control.BUDGET], detail, until_ns + machine.tier * _TIER_STEP_NS)
        return self._held(machine, step, account.id, hold, account)

    def _error_of(self, refused: Wait | Exhausted, machine: RunMachine, step: str | None) -> BudgetExhaustedError:
        if refused.account.id == ("run", machine.run_id) and refused.value >= refused.limit:
            text = f"the run has used its {refused.limit} {refused.key.replace('_', ' ')}"
            return BudgetExhaustedError(text, run=machine.run_id, step=step, limit=refused.key)
        return BudgetExhaustedError(
            f"{refused.key} of {_name_of(refused)} would pass {refused.limit}: {refused.value} used or reserved",
            run=machine.run_id,
            step=step,
            limit=refused.key,
        )

    def may_repeat(self, machine: RunMachine, step: StepInFlight) -> AgentrtError | None:
        """See RunPort. An attempt that nobody saw the end of keeps its reservation; the next one needs its own."""
        entry = machine.account
        assert entry is not None
        now = self._runs.now_ns()
        if step.held is None:
            step.held = _clamped(entry, amounts_of(step.op, step.reserved))
        more = [(RETRIES, 1)]
        if step.op == _MODEL:
            before = step.reserved
            step.attempt += 1
            self._runs.reserve_model(step)
            step.attempt -= 1
            for index, value in ((TOKENS, step.reserved.tokens), (MICRODOLLARS, step.reserved.micro_usd)):
                if (grown := value - dict(step.held).get(index, 0)) > 0:
                    more.append((index, grown))
        refused = self.ledger.reserve(entry, tuple(more), now)
        if refused is not None:
            if step.op == _MODEL:
                step.reserved = before
            self.decide(msgspec.structs.replace(decision_of(refused, machine.run_id, step.path, now), action=_GIVE_UP))
            return self._error_of(refused, machine, step.path)
        self.ledger.settle(entry, tuple(more[:1]), tuple(more[:1]), now)
        held = dict(step.held)
        for index, value in more[1:]:
            held[index] = held.get(index, 0) + value
        step.held = tuple(sorted(held.items()))
        return None

    def settled(self, machine: RunMachine, step: StepInFlight) -> None:
        """See RunPort."""
        entry = machine.account
        if entry is None or step.op not in _COUNTED_OPS:
            return
        if step.held is None:
            if step.key is None:  # refused before anything was held for it
                return
            step.held = _clamped(entry, amounts_of(step.op, step.reserved))
        now = self._runs.now_ns()
        if (fuel := min(step.cost.fuel, entry.held[FUEL])) > 0:  # of what is held for the whole run
            self.ledger.settle(entry, ((FUEL, fuel),), ((FUEL, fuel),), now)
        if step.held:
            passed = self.ledger.settle(entry, step.held, amounts_of(step.op, step.cost), now)
            step.held = NOTHING
            for each in passed:
                self._overspent(machine, step.path, each, now)
            self._freed()

    def learn(self, machine: RunMachine, step: StepInFlight, executed_ns: int) -> None:
        """A step has an outcome: what it cost goes into the estimates. ``executed_ns``: what its process saw of it,
        which is all that is known of one that is not prepared."""
        if not step.unwinding and step.recorded is None:
            what = f"model:{step.tool}" if step.op == _MODEL else f"tool:{step.tool}"
            pure = step.kind == "pure"
            cost, took_ns = step.cost, executed_ns if pure else max(0, self._runs.now_ns() - step.prepared_ns)
            self.estimates.observe(machine.accepted.agent, what, cost.tokens, cost.micro_usd, took_ns)

    def _overspent(self, machine: RunMachine, path: str, passed: Exhausted, now: int) -> None:
        decision = decision_of(passed, machine.run_id, path, now)
        self.decide(msgspec.structs.replace(decision, action=Action.OVERSPEND))

    def settled_recorded(self, machine: RunMachine, step: Step) -> None:
        """See RunPort."""
        entry = machine.account
        if entry is not None and step.op in _COUNTED_OPS:
            held = _clamped(entry, amounts_of(step.op, step.reserved))
            self.ledger.settle(entry, held, held, self._runs.now_ns())
            self._freed()

    def released(self, machine: RunMachine, step: StepInFlight) -> None:
        """See RunPort."""
        entry = machine.account
        if entry is None or step.op not in _COUNTED_OPS:
            return
        held = _clamped(entry, amounts_of(step.op, step.reserved)) if step.held is None else step.held
        self.ledger.release(entry, held)
        step.held = NOTHING
        self._freed()

    # --- children -----------------------------------------------------------------------

    def _admit_child(self, machine: RunMachine, step: StepInFlight) -> Hold | Refusal | None:
        accepted, run_id = machine.accepted, machine.run_id
        bounds = machine.account.bounds if machine.account is not None else {}
        depth = min(
            self._depth_max,
            bounds.get("depth", self._depth_max),
            accepted.depth + int(accepted.budget.get("depth", self._depth_max)),
        )
        fan_out = min(
            self._fan_out_max,
            bounds.get("fan_out", self._fan_out_max),
            int(accepted.budget.get("fan_out", self._fan_out_max)),
        )
        now = self._runs.now_ns()
        for limit, value, most in (("depth", accepted.depth, depth), ("fan_out", machine.spawned, fan_out)):
            if value >= most:
                bound = Decision(
                    at_ns=now,
                    control=Control.CAPACITY,
                    action=Action.REFUSE,
                    scope=Scope.RUN,
                    name=run_id,
                    limit=limit,
                    value=value,
                    bound=most,
                    run=run_id,
                    step=step.path,
                )
                self.decide(bound)
                what = "is that deep in its family" if limit == "depth" else "has started that many children"
                return Refusal(LimitReachedError(f"the run {what}: {value}", run=run_id, step=step.path, limit=limit))
        root = accepted.root or run_id
        ensemble = self._ensembles.get(root)
        if ensemble is None:
            ensemble = self._new_ensemble(root, machine)
            ensemble.begin(run_id)
        key = f"{run_id}/{step.path}"
        if key in self._places or key in self._kept.get(run_id, ()):
            self._places.discard(key)
            self._unkeep(run_id, key)
            return None
        request = decode(step.op, step.request)
        assert isinstance(request, Spawn)
        waits = ensemble.waits(key)  # it looks again, since another step of its run may
        answer = ensemble.spawn(key, run_id, len(request.input), wait=request.when_full == "block")
        if answer:
            return None
        decision = Decision(
            at_ns=now, control=Control.CAPACITY, action=Action.REFUSE if answer is False else Action.WAIT,
            scope=Scope.ENSEMBLE, name=root, limit="queued", value=ensemble.queued,
            bound=ensemble.limits.queued_max, run=run_id, step=step.path,
        )  # fmt: skip
        if not waits:
            self.decide(decision)
        detail = f"the ensemble of {root} has {ensemble.queued} children that have not begun"
        if answer is False:
            return Refusal(EnsembleFullError(detail, run=run_id, step=step.path, limit="ensemble.queued_max"))
        self._settle_family(root)
        hold = Hold(WAIT_REASON[Control.CAPACITY], detail, now + _LOOK_AGAIN_NS)
        return self._held(machine, step, ("spawn", key), hold)

    def child_accepted(self, parent_id: str, path: str, child: RunMachine) -> None:
        """The place in the queue of its ensemble is the child's now."""
        root, parent = child.accepted.root, self._runs.in_memory(parent_id)
        if parent is not None:
            self._root_agents[child.run_id] = self._root_agent_of(parent)
        if root is not None and (ensemble := self._ensembles.get(root)) is not None:
            ensemble.queue(f"{parent_id}/{path}", child.run_id)
            ensemble.add(child.run_id, len(child.accepted.input))

    def _new_ensemble(self, root: str, machine: RunMachine) -> Ensemble:
        """That the run, which is in memory, belongs to."""
        whose = self._ensembles_of[root] = machine.accepted.tenant, self._root_agent_of(machine)
        ensemble = self._ensembles[root] = Ensemble(self.force.ensemble(*whose), self._is_idle)
        return ensemble

    def _root_agent_of(self, machine: RunMachine) -> str:
        accepted = machine.accepted
        return accepted.agent if accepted.root is None else self._root_agents.get(machine.run_id, "")

    def child_refused(self, parent: RunMachine, path: str) -> None:
        """It was not accepted, or was accepted before."""
        root, key = parent.accepted.root or parent.run_id, f"{parent.run_id}/{path}"
        self._unkeep(parent.run_id, key)
        if (ensemble := self._ensembles.get(root)) is not None:
            ensemble.give_up(key)
            self._settle_family(root)

    def keep_place(self, run_id: str, path: str) -> None:
        """The spawn that was let through just now has to wait for something else: it has its place when it comes
        again."""
        self._kept.setdefault(run_id, set()).add(f"{run_id}/{path}")

    def _unkeep(self, run_id: str, key: str) -> None:
        kept = self._kept.get(run_id)
        if kept is not None:
            kept.discard(key)
            if not kept:
                del self._kept[run_id]

    def may_start(self, machine: RunMachine) -> bool:
        """The guest of a run is about to start. False: later, by `FlowRuns.start_held`."""
        root = machine.accepted.root or machine.run_id
        ensemble = self._ensembles.get(root)
        if ensemble is None:
            if machine.accepted.parent is None:
                return True
            ensemble = self._new_ensemble(root, machine)
        if machine.loaded_version == 0 and not ensemble.may_start(machine.run_id):
            self._settle_family(root)
            return False
        ensemble.begin(machine.run_id)
        self._settle_family(root)
        return True

    def awaited_by(self, run_id: str) -> str | None:
        """What keeps the guest of a run from starting; None: nothing here."""
        machine = self._runs.in_memory(run_id) if self._ensembles else None
        root = None if machine is None else machine.accepted.root or run_id
        ensemble = None if root is None else self._ensembles.get(root)
        if ensemble is None or not ensemble.keeps_back(run_id):
            return None
        return f"its turn in the ensemble of {root}, of which {ensemble.limits.live_max} runs may be at work"

    def _is_idle(self, run_id: str) -> bool:
        machine = self._runs.in_memory(run_id)
        return machine is None or machine.idle

    def idle(self, machine: RunMachine) -> None:
        """The guest of a run is suspended and waits are all it has: others of its ensemble may start."""
        if self._ensembles:
            root = machine.accepted.root or machine.run_id
            ensemble = self._ensembles.get(root)
            if ensemble is not None and ensemble.keeps:
                self._loop.call_soon(self._settle_family, root)

    def _leave_family(self, machine: RunMachine) -> None:
        root = machine.accepted.root or machine.run_id
        ensemble = self._ensembles.get(root)
        kept = self._kept.pop(machine.run_id, ())
        self._root_agents.pop(machine.run_id, None)
        if ensemble is not None:
            for key in sorted(kept):
                ensemble.give_up(key)
            ensemble.leave(machine.run_id)
            self._settle_family(root)

    def _settle_family(self, root: str) -> None:
        ensemble = self._ensembles.get(root)
        if ensemble is None:
            return
        if ensemble.empty:
            del self._ensembles[root], self._ensembles_of[root]
            return
        moves = ensemble.settle()
        if moves.placed or moves.refused or moves.start:
            self._loop.call_soon(self._moved, moves.placed, moves.refused, moves.start)

    def _moved(self, placed: list[str], refused: list[str], start: list[str]) -> None:
        for key in placed:
            self._places.add(key)
            self._wake(("spawn", key))
            self._unplaced(key)
        for key in refused:
            run_id, _, path = key.partition("/")
            machine = self._runs.in_memory(run_id)
            if machine is not None:
                machine.refuse_held(
                    path,
                    EnsembleFullError(
                        "all runs of the ensemble wait for a place in its queue, and this one is the youngest",
                        run=run_id,
                        step=path,
                        limit="ensemble.queued_max",
                    ),
                )
        for run_id in start:
            machine = self._runs.in_memory(run_id)
            if machine is not None and machine.guest is None and machine.phase is Phase.LIVE:
                self._runs.start_held(machine)

    def _unplaced(self, key: str) -> None:
        """The spawn that was given a place has gone meanwhile."""
        if key in self._places:
            self._places.discard(key)
            machine = self._runs.in_memory(key.partition("/")[0])
            root = None if machine is None else machine.accepted.root or machine.run_id
            ensemble = None if root is None else self._ensembles.get(root)
            if ensemble is not None and root is not None:
                ensemble.give_up(key)
                self._settle_family(root)

    # --- who waits ------------------------------------------------------------------------

    def _held(
        self, machine: RunMachine, step: StepInFlight, key: Hashable, hold: Hold, account: Account | None = None
    ) -> Hold:
        waiter = machine.run_id, step.handle
        self._forget(waiter)
        if len(self._waits_for) < _WAITERS_MAX:
            self._waiting.setdefault(key, OrderedDict())[waiter] = machine.tier
            self._waits_for[waiter] = key, account
            if account is not None:
                account.wanted += 1
        self._runs.arm(hold.until_ns, machine.run_id, HOLD_PATH)
        return hold

    def _forget(self, waiter: tuple[str, int]) -> None:
        found = self._waits_for.pop(waiter, None)
        if found is None:
            return
        key, account = found
        waiting = self._waiting[key]
        del waiting[waiter]
        if not waiting:
            del self._waiting[key]
        if account is not None:
            account.wanted -= 1

    def unheld(self, machine: RunMachine, step: StepInFlight) -> None:
        """See RunPort."""
        self._forget((machine.run_id, step.handle))
        if step.op == _SPAWN:
            self.child_refused(machine, step.path)

    def _freed(self) -> None:
        if self.ledger.freed:
            self._woken.update(self.ledger.freed)
            self.ledger.freed.clear()
            if not self._waking:
                self._waking = True
                self._loop.call_soon(self._wake_some)

    def _wake_some(self) -> None:
        self._waking = False
        woken, self._woken = self._woken, set()
        for key in sorted(woken, key=str):
            self._wake(key)

    def _wake(self, key: Hashable) -> None:
        """Let those who wait look again, the most urgent first, until one of them has to wait on."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        order = sorted(waiting, key=lambda waiter: waiting[waiter])  # stable: in a tier who came first
        for waiter in order[:_WAKES_PER_TURN]:
            self._forget(waiter)
            machine = self._runs.in_memory(waiter[0])
            if machine is not None:
                machine.unhold()
                if waiter in self._waits_for:
                    return
            else:
                self._runs.with_run(waiter[0], _unhold, _ignore)
        if len(order) > _WAKES_PER_TURN:
            self._loop.call_later(0.05, self._wake, key)

    # --- what people and agents see ----------------------------------------------------------

    def decide(self, decision: Decision) -> None:
        """Keep, count and tell an event."""
        self.decisions.add(decision)
        self._tell("decision", decision)

    def capacity(self, machine: RunMachine, known: dict[str, Estimate], rates: list[Headroom]) -> bytes:
        """See RunPort. ``known``: what its agent's steps have cost; ``rates``: what is left of those of its calls."""
        accepted, entry = machine.accepted, machine.account
        now = self._runs.now_ns()
        left: dict[str, int] = {}
        bounds = dict(entry.bounds) if entry is not None else {}
        if entry is not None:
            left = {key: self.ledger.left(entry, index, now) for index, key in enumerate(COUNTED)}
        for key in ("context_tokens", "result_bytes", "fan_out", "depth"):
            if key in accepted.budget:
                own = int(accepted.budget[key]) + (accepted.depth if key == "depth" else 0)
                bounds[key] = min(own, bounds.get(key, own))
        ensemble = self._ensembles.get(accepted.root or machine.run_id)
        whose = accepted.tenant, self._root_agent_of(machine)
        limits = ensemble.limits if ensemble is not None else self.force.ensemble(*whose)
        room = Room(
            accepted.depth,
            min(self._depth_max, bounds.get("depth", self._depth_max)),
            machine.spawned,
            min(self._fan_out_max, bounds.get("fan_out", self._fan_out_max)),
            ensemble.queued if ensemble is not None else 0,
            limits.queued_max,
        )
        child = known.get(CHILD)
        answer = capacity(
            now,
            left,
            bounds,
            room,
            deadline_ns=accepted.deadline_ns,
            rates=rates,
            per_child=None if child is None else {"tokens": child.tokens, "microdollars": child.microdollars},
            estimates=[_told(what, estimate) for what, estimate in known.items()],
        )
        return msgspec.json.encode(answer)

    def _adopt(self, store: Store) -> None:
        applied = store.read_row(NODE, APPLIED_KEY)
        bases: list[BaseRow] = []
        entries: list[EntryRow] = []
        counters: list[CounterRow] = []
        for key, value in scan_all(store, ACCOUNTS):
            kind = key[:1]
            if kind == b"a":
                bases.append(decode_base(value))
            elif kind == b"e":
                entries.append(decode_entry(value))
            elif kind == b"q":
                counters.append(decode_counter(value))
        if applied is not None:
            self.force = decode_applied(self.force.base, applied)
            self._configure()
        self.quotas.adopt(counters)
        self.ledger.adopt(bases, entries, self._runs.now_ns())
        for entry in entries:
            head = store.read_head(entry.run_id)
            if head is not None and head.state == RunState.EXPORTED:  # by a command, or before the node was killed
                self._loop.call_soon(self.exported, entry.run_id)


def _told(what: str, known: Estimate) -> StepEstimate:
    return StepEstimate(
        what,
        known.count,
        known.tokens,
        known.tokens_upper,
        known.microdollars,
        known.microdollars_upper,
        known.wall_ns // 10**6,
        known.wall_ns_upper // 10**6,
    )


def amounts_of(op: str, cost: Cost) -> Amounts:
    """What a step of the op counts for, beside what its ``cost`` says."""
    if op != _MODEL and cost == _NO_COST:
        return ONE_TOOL_CALL
    found = [(MODEL_CALLS if op == _MODEL else TOOL_CALLS, 1)]
    if cost.tokens:
        found.append((TOKENS, cost.tokens))
    if cost.micro_usd:
        found.append((MICRODOLLARS, cost.micro_usd))
    return tuple(found)


def _clamped(entry: Entry, amounts: Amounts) -> Amounts:
    """Of these, what the entry holds: a run that began to be counted while it was under way holds less."""
    found = ((index, min(value, entry.held[index])) for index, value in amounts)
    return tuple((index, value) for index, value in found if value)


def _beyond(wanted: Amounts, held: Amounts) -> Amounts:
    """What is wanted more than is held."""
    known = dict(held)
    found = ((index, value - known.get(index, 0)) for index, value in wanted)
    return tuple((index, value) for index, value in found if value > 0)


def _both(more: Amounts, held: Amounts) -> Amounts:
    """The sum."""
    found = dict(held)
    for index, value in more:
        found[index] = found.get(index, 0) + value
    return tuple(sorted(found.items()))


def _name_of(refused: Wait | Exhausted) -> str:
    account = refused.account
    return f"{account.scope.value} {account.name}" if account.name else account.scope.value


def _unhold(machine: RunMachine) -> None:
    machine.unhold()


def _ignore(error: BaseException | None) -> None:
    """Its timer looks again."""


def _entry_row(row: EntryRow) -> Row:
    return Row(ACCOUNTS, entry_key(row.root, row.run_id), encode_row(row))


def _short(*parts: str) -> bytes:
    hashed = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode()
        hashed.update(len(raw).to_bytes(4, "big") + raw)
    return hashed.digest()


def _counter_row(row: CounterRow) -> Row:
    return Row(ACCOUNTS, b"q" + _short(row.scope, row.name, row.span, str(row.reset_s)), encode_counter(row))


def _ended_rows(rows: Ended, root: str) -> tuple[Row, ...]:
    return (
        *(Row(ACCOUNTS, b"a" + _short(*base.id), encode_row(base)) for base in rows.bases),
        *(Row(ACCOUNTS, below_key(root, below.run_id), encode_row(below)) for below in rows.below),
        *(Row(ACCOUNTS, below_key(root, run_id), None) for run_id in rows.gone_below),
    )
