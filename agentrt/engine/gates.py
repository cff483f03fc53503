"""Rates, breakers, places, retries and the loop guard in the way of a run's steps: the shell around `agentrt.flow`.

A tool step asks before its StepPrepared (`admit`): so what waits has no open step, and a run that waits for long can
leave memory and ask again when it is replayed. What is executed again after a restart or a loss asks before its call
(`dispatch`). Each attempt that was granted gives back what it holds when its outcome is there, and a failure that is
worth another attempt goes back to the machine (`RunMachine.try_again`) instead of the guest.

Loop thread only. What is kept per waiting or running call goes with the call, or with its run (`forget`).
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.digest import digest
from agentrt.engine.history import History
from agentrt.engine.ports import Hold, Refusal, Runs
from agentrt.engine.steps import EventSend, decode
from agentrt.errors import (
    AgentrtError,
    BreakerOpenError,
    LoopDetectedError,
    QueueFullError,
    RateTooLargeError,
    ToolUnavailableError,
    UnknownToolError,
)
from agentrt.flow.capacity import Headroom
from agentrt.flow.decisions import Decision, Scope
from agentrt.flow.gate import NOTHING_MOVED, SUCCESS, Call, Gate, Moved, Outcome, Refused, State, Ticket, Waiting
from agentrt.flow.limits import BulkheadRule, GateLimits
from agentrt.flow.loopguard import Found, LoopGuard, LoopLimits
from agentrt.flow.profilebounds import rates_over
from agentrt.flow.profiles import InForce
from agentrt.flow.retry import Again, Failure
from agentrt.ids import child_run_id, run_id_from_bytes, run_id_to_bytes
from agentrt.records import Cost
from agentrt.states import RunState
from agentrt.stores.base import NODE, Row, Store, scan_all
from agentrt.tools.outcome import ToolOutcome

if TYPE_CHECKING:
    from agentrt.engine.machine import RunMachine
    from agentrt.engine.steps import StepInFlight
    from agentrt.models.service import ModelOutcome

_NO_COST: Final = Cost()
#: How long a granted step may keep its places before its run has come back into memory and asked for it.
_CLAIM_S: Final = 10.0
#: A run that waits in the store for what nobody knows the end of looks again this often: lines do not survive a node.
_LOOK_NS: Final = 60 * 10**9
#: How much of what has been taken a crash may forget.
_SAVE_S: Final = 1.0
_KEY: Final = b"gates"
#: Agents whose last model is known.
_AGENTS_MAX: Final = 10_000
#: A clock that is set forward is noticed within this.
_SLEEP_S_MAX: Final = 1.0
#: What an ensemble has done since its last output is kept from so much of a limit on: few come that far.
_KEPT_SHARE: Final = 100
#: Steps of a journal that are shown to the loop guard again: no cycle that it looks for is longer.
_REMEMBERED: Final = 400

_decode_loop: Final = msgspec.msgpack.Decoder(tuple[int, int]).decode
_Row = tuple[str, tuple[int, ...]]
_decode_rows: Final = msgspec.msgpack.Decoder(list[_Row]).decode

_FAILURES: Final = {
    "tool_unavailable": Failure.TRANSPORT,
    "tool_rate_limited": Failure.RATE,
    "tool_conflict": Failure.CONFLICT,
    "tool_timeout": Failure.TRANSPORT,
    "tool_host_died": Failure.TRANSPORT,
    "tool_host_start": Failure.TRANSPORT,
}
#: Kinds that may be repeated although nobody knows whether the attempt had its effect.
_REPEATABLE: Final = frozenset({"pure", "keyed"})


#: Ends of a child that say something about its agent, and those that say that it does not work.
_CHILD_FAILED: Final = frozenset({RunState.FAILED, RunState.TIMED_OUT, RunState.LOOP_DETECTED})
_CHILD_ENDS: Final = _CHILD_FAILED | {RunState.SUCCEEDED}


class _RetryAfter(msgspec.Struct):
    retry_after_s: float | None = None


class _Tool(msgspec.Struct):
    tool: str


class _Target(msgspec.Struct):
    agent: str


_decode_target: Final = msgspec.json.Decoder(_Target).decode
_decode_tool: Final = msgspec.json.Decoder(_Tool).decode
_decode_retry_after: Final = msgspec.json.Decoder(_RetryAfter).decode


class _Claim:
    """A call at the gate. ``begin`` is set if it is a call that only waits to be made."""

    __slots__ = ("begin", "refused", "ticket", "timer", "waits")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.begin: Callable[[Ticket], None] | None = None
        self.refused: Callable[[Refused], None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.waits: Hold | None = None


class Gates:
    """``wake(run_id)``: have the run look at its held steps again, from the store if need be. ``tell``: a decision was
    made. ``draw()``: random, 0 <= draw < 1. ``class_of(tool)``: whose limits its calls have. ``learn``: a step has
    got its outcome, whose cost is known, after so many ns of execution."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        draw: Callable[[], float],
        limits: GateLimits,
        loops: LoopLimits,
        class_of: Callable[[str], str],
        wake: Callable[[str], None],
        tell: Callable[[Decision], None],
        learn: Callable[["RunMachine", "StepInFlight", int], None],
    ) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._draw = draw
        self._class_of = class_of
        self._limits = limits
        self._wake = wake
        self._tell = tell
        self._learn = learn
        self.gate: Final = Gate(limits)
        self.guard: Final = LoopGuard(loops)
        self._claims: dict[str, dict[str, _Claim]] = {}  # run -> path of the step
        self._asked_last: dict[str, tuple[str, str]] = {}  # agent -> provider and model of its last call
        self._children: dict[str, Ticket] = {}  # runs that others have started, and that have not ended
        self._by_ticket: dict[Ticket, tuple[str, str]] = {}  # of those that wait
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._changed = False
        self._saver: asyncio.TimerHandle | None = None
        self._save: Callable[[tuple[Row, ...], Callable[[AgentrtError | None], None]], None] | None = None
        self._loops: set[str] = set()  # ensembles of which more is known than their row says
        self._loops_kept: set[str] = set()  # that have a row
        self._drop_rows: Callable[[tuple[Row, ...]], None] = lambda rows: None
        self._closed = False

    # --- its life ---------------------------------------------------------------------

    def open(self, runs: Runs) -> None:
        """Go on from what the last life of the node has left, as soon as it can be read."""
        self._save = runs.commit_rows
        self._drop_rows = runs.drop

        def found(data: bytes | None, error: BaseException | None) -> None:
            if error is not None:
                runs.later(partial(self.open, runs))
            elif data is not None:
                try:
                    rows = _decode_rows(data)
                except UNREADABLE:
                    return  # limits begin full, as on a new node
                self.gate.restore(rows, self._now_ns())

        def forget(rows: tuple[Row, ...], error: BaseException | None) -> None:
            if error is None and rows:
                runs.drop(rows)

        runs.read(lambda store: store.read_row(NODE, _KEY), found)
        runs.read(_loops_of_nobody, forget)

    def read_loops(self, store: Store, root: str) -> tuple[int, int] | None:
        """On a reader thread: what the ensemble had done without an output, (iterations, spend), when that was kept."""
        value = store.read_row(NODE, _loop_key(root))
        try:
            return None if value is None else _decode_loop(value)
        except UNREADABLE:
            return 0, 0

    def close(self) -> None:
        """What is known now is saved; nothing is granted from now on."""
        self._closed = True
        for timer in (self._timer, self._saver):
            if timer is not None:
                timer.cancel()
        if self._changed:
            self._write()

    def apply(self, force: InForce) -> None:
        """What the profiles in force say of calls at once and of rates holds from now on."""
        rules = {(rule.scope, rule.name): rule for rule in self._limits.bulkheads}
        for target, limit in force.concurrency().items():
            scope, _, name = target.partition(":")
            rules[Scope(scope), name] = BulkheadRule(Scope(scope), name, limit)
        rates = rates_over(self._limits.rates, force.rates())
        limits = msgspec.structs.replace(self._limits, bulkheads=tuple(rules.values()), rates=rates)
        if limits != self.gate.limits:
            self._follow(self.gate.configure(limits, self._now_ns()))

    # --- steps ------------------------------------------------------------------------

    def admit(self, machine: "RunMachine", step: "StepInFlight") -> Hold | Refusal | None:
        """May the step begin? Asked again after a hold, and after the run was replayed."""
        if step.unwinding:
            return None  # it has an allowance of its own, and no time to wait
        if step.op == "event.send":
            return self._talks_in_circles(machine, step)
        claim = self._claims.get(machine.run_id, _NO_CLAIMS).get(step.path)
        if claim is None and not step.guarded:
            step.guarded = True
            if (found := self._looks_stuck(machine, step)) is not None:
                return found
        if not step.tool:
            return self._ask_child(machine, step)
        if claim is None:
            if step.plan is None and not step.not_before_ns:
                tenant = machine.accepted.tenant
                step.ticket = self.gate.free(tenant, step.tool, self._class_of, self._now_ns())
                if step.ticket is not None:
                    return None
            return self._ask(machine, step)
        ticket = claim.ticket
        if ticket.state is State.WAITING:
            return claim.waits
        if ticket.state is State.GRANTED:
            if claim.timer is not None:
                claim.timer.cancel()
                claim.timer = None
            return None
        self._drop(machine.run_id, step.path)
        assert ticket.refusal is not None
        return Refusal(_error(ticket.refusal, machine.run_id, step.path))

    def unheld(self, run_id: str, path: str, *, child: bool = False) -> None:
        """A step that was held, or granted and has not begun, is not wanted any more. ``child``: it would have started
        one."""
        if child:
            ticket = self._children.pop(child_run_id(run_id, path), None)
        else:
            claim = self._drop(run_id, path)
            ticket = None if claim is None else claim.ticket
        if ticket is not None:
            self._follow(self.gate.cancel(ticket, self._now_ns()))

    def dispatch(
        self,
        machine: "RunMachine",
        step: "StepInFlight",
        call: Callable[["RunMachine", "StepInFlight", Callable[..., None]], None],
    ) -> None:
        """Make the step's call, ``call(machine, step, done)``, when it may be made; its outcome, for which ``done`` is
        called as of tools or of models, goes to the machine."""
        if step.ticket is not None:
            ticket, step.ticket = step.ticket, None
            call(machine, step, partial(self._ended, machine, step, ticket, step.cost.micro_usd))
            return
        run_id, path = machine.run_id, step.path
        claim = self._claims.get(run_id, _NO_CLAIMS).get(path)
        if claim is not None and claim.ticket.state is State.GRANTED and claim.begin is None:
            call(machine, step, partial(self._ended, machine, step, claim.ticket, step.cost.micro_usd))
            return
        if claim is not None:
            self.unheld(run_id, path)  # of an earlier attempt that nobody saw the end of
        now_ns = self._now_ns()

        def begin(ticket: Ticket) -> None:
            call(machine, step, partial(self._ended, machine, step, ticket, step.cost.micro_usd))

        def refused(refusal: Refused) -> None:
            error = _error(refusal, run_id, path)
            payload = msgspec.json.encode(error.to_dict())
            self._loop.call_soon(machine.on_outcome, step, ToolOutcome(False, payload, error.code, 0, False))

        # It has been let in once: it waits for what would refuse a first attempt.
        answer = self.gate.request(self._call_of(machine, step, max(2, step.attempt)), now_ns)
        if isinstance(answer, Refused):
            self._tell(answer.decision)
            refused(answer)
            return
        if isinstance(answer, Waiting):
            claim = self._keep(run_id, path, answer.ticket)
            claim.begin, claim.refused = begin, refused
            self._by_ticket[answer.ticket] = run_id, path
            self._tell(answer.decision)
            self._arm()
            return
        self._keep(run_id, path, answer)
        begin(answer)

    def withdraw(self, run_id: str, path: str) -> bool:
        """A call that was given to `dispatch` and only waits to be made is not wanted. False: it was made."""
        claim = self._claims.get(run_id, _NO_CLAIMS).get(path)
        if claim is None or claim.begin is None:
            return False
        self.unheld(run_id, path)
        return True

    def parked(self, run_id: str, *, waits: bool) -> None:
        """The run goes out of memory, and none of its calls is under way. What it holds is given back; ``waits``: what
        it waits for it keeps its place for."""
        for path, claim in [*self._claims.get(run_id, _NO_CLAIMS).items()]:
            if not waits or claim.ticket.state is not State.WAITING:
                self.unheld(run_id, path)

    def headroom(self, machine: "RunMachine", whats: Iterable[str]) -> list[Headroom]:
        """What is left of the rates and places that calls of the run go through: of its tenant's, and of those of the
        tools (``tool:NAME``) and the model that its agent has used lately."""
        accepted, now_ns = machine.accepted, self._now_ns()
        calls = [Call(accepted.tenant, machine.tier, "")]
        for what in whats:
            kind, _, name = what.partition(":")
            if kind == "tool":
                with contextlib.suppress(UnknownToolError):
                    calls.append(Call(accepted.tenant, machine.tier, self._class_of(name), name))
        provider, model = self._asked_last.get(accepted.agent, ("", ""))
        if model:
            calls.append(Call(accepted.tenant, machine.tier, "model", "", provider, model))
        rooms = [room for call in calls for room in self.gate.headroom(call, now_ns)]
        return [*{(room.scope, room.name, room.limit): room for room in rooms}.values()]

    # --- the loop guard ------------------------------------------------------------------

    def output(self, machine: "RunMachine") -> None:
        """Somebody outside has seen something of the run's ensemble."""
        root = _root(machine)
        self.guard.output(root)
        if root in self._loops_kept:
            self._loops.add(root)
            self._save_soon()

    def ended(self, machine: "RunMachine", state: RunState) -> None:
        """The run has ended."""
        ticket = self._children.pop(machine.run_id, None)
        if ticket is not None:
            if state in _CHILD_ENDS:
                told = Outcome(Failure.TRANSPORT if state in _CHILD_FAILED else None, retried=False)
                self._follow(self.gate.finish(ticket, told, self._now_ns()))
            else:  # it was stopped, which says nothing about it
                self._follow(self.gate.cancel(ticket, self._now_ns()))
        root = _root(machine)
        self.guard.run_ended(root, machine.run_id)
        if root == machine.run_id:
            self._loops.discard(root)
            if root in self._loops_kept:
                self._loops_kept.discard(root)
                self._drop_rows((Row(NODE, _loop_key(root), None),))
        self.parked(machine.run_id, waits=False)

    def loaded(self, machine: "RunMachine", history: History, done: tuple[int, int] | None) -> None:
        """The run came back into memory. ``done``: what `read_loops` has found."""
        root = _root(machine)
        if done is not None and root not in self._loops_kept:
            self._loops_kept.add(root)
            self.guard.restore(root, *done)
        if not self.guard.limits.repeats:
            return
        steps = [step for step in history.run.steps.values() if step.op in ("tool.call", "model.generate", "run.spawn")]
        shown = [(_name(step.op, step.request), step.digest) for step in steps[-_REMEMBERED:]]
        # Also if there are none: what it asks for again is not to be counted twice.
        self.guard.remember(_root(machine), machine.run_id, machine.accepted.agent, shown)

    def _talks_in_circles(self, machine: "RunMachine", step: "StepInFlight") -> Refusal | None:
        """Runs of an ensemble may hand work on by events to each other's mailboxes, too. Events at topics are for
        whoever waits there, and say nothing of who talks to whom."""
        event = decode(step.op, step.request)
        assert isinstance(event, EventSend)
        if event.run_id is None:
            return None
        root, run_id = _root(machine), machine.run_id
        found = self.guard.hand_over(root, run_id, machine.accepted.agent, step.op, digest(bytes(event.data)))
        return None if found is None else self._ends(found, root, run_id, step.path)

    def _note_loop(self, root: str) -> None:
        """An ensemble that has come far on its way to a limit is saved, so that a restart does not begin anew."""
        if root not in self._loops and self.guard.is_far(root, _KEPT_SHARE):
            self._loops.add(root)
            self._save_soon()

    def _ends(self, found: Found, root: str, run_id: str, path: str) -> Refusal:
        self._tell(found.decision(root, run_id, path, self._now_ns()))
        return Refusal(_loop_error(found, run_id, path), ends=True)

    def _looks_stuck(self, machine: "RunMachine", step: "StepInFlight") -> Refusal | None:
        root, run_id, agent = _root(machine), machine.run_id, machine.accepted.agent
        what = step.tool or step.op
        found = self.guard.step(root, run_id, agent, what, step.digest)
        self._note_loop(root)
        if found is None and step.op == "run.spawn":
            child = child_run_id(run_id, step.path)
            found = self.guard.hand_over(root, run_id, agent, what, step.digest, child)
        return None if found is None else self._ends(found, root, run_id, step.path)

    # --- within -------------------------------------------------------------------------

    def _ask(self, machine: "RunMachine", step: "StepInFlight") -> Hold | Refusal | None:
        run_id, path = machine.run_id, step.path
        choice = step.plan
        # A back-off is for the model that has failed; whether another one has to wait, its own limits say.
        not_before_ns = step.not_before_ns if choice is None or choice.asks_again(step.attempt) else 0
        answer = self.gate.request(self._call_of(machine, step, step.attempt), self._now_ns(), not_before_ns)
        while isinstance(answer, Refused) and choice is not None and choice.pass_on():
            self._tell(answer.decision)
            answer = self.gate.request(self._call_of(machine, step, step.attempt), self._now_ns())
        if choice is not None and (other := choice.fell_back(step.attempt)) is not None:
            self._tell(other.decision(run_id, path, self._now_ns()))
        if isinstance(answer, Refused):
            self._tell(answer.decision)
            return Refusal(_error(answer, run_id, path))
        if isinstance(answer, Ticket):
            self._keep(run_id, path, answer)
            return None
        claim = self._keep(run_id, path, answer.ticket)
        self._by_ticket[answer.ticket] = run_id, path
        self._tell(answer.decision)
        self._arm()
        now_ns = self._now_ns()
        until_ns = answer.until_ns or 0
        claim.waits = Hold(answer.reason, _waits_for(answer.decision), until_ns or now_ns + _LOOK_NS)
        return claim.waits

    def _ask_child(self, machine: "RunMachine", step: "StepInFlight") -> Refusal | None:
        """May the run start another of that agent? Only the breaker of the two agents has a say."""
        child = child_run_id(machine.run_id, step.path)
        if child in self._children:
            return None
        accepted = machine.accepted
        call = Call(
            "",
            machine.tier,
            "",
            caller=accepted.agent,
            target=_target(step.request),
            run=machine.run_id,
            step=step.path,
        )
        answer = self.gate.request(call, self._now_ns())
        if isinstance(answer, Refused):
            self._tell(answer.decision)
            return Refusal(_error(answer, machine.run_id, step.path))
        assert isinstance(answer, Ticket), "a breaker keeps a first attempt waiting"
        self._children[child] = answer
        return None

    def _call_of(self, machine: "RunMachine", step: "StepInFlight", attempt: int) -> Call:
        accepted = machine.accepted
        cls, tool, provider, model, tokens = "", step.tool, "", "", 0
        if step.plan is None:
            cls = self._class_of(tool)
        else:
            candidate = step.plan.candidate(step.attempt)
            cls, tool = "model", ""
            provider, model, tokens = candidate.model.provider, candidate.name, candidate.reserved.tokens
            if len(self._asked_last) >= _AGENTS_MAX:
                self._asked_last.clear()
            self._asked_last[accepted.agent] = provider, f"{provider}/{model}"
        return Call(
            accepted.tenant,
            machine.tier if step.plan is None else max(machine.tier, step.plan.tier),
            cls,
            tool,
            provider,
            model,
            tokens=tokens,
            attempt=attempt,
            deadline_ns=accepted.deadline_ns,
            run=machine.run_id,
            step=step.path,
        )

    def _ended(
        self,
        machine: "RunMachine",
        step: "StepInFlight",
        ticket: Ticket,
        cost_before: int,
        outcome: ToolOutcome,
        model: "ModelOutcome | None" = None,
    ) -> None:
        """The call has an outcome. ``cost_before``: micro-dollars of the attempts before."""
        if not ticket.free:
            self._drop(machine.run_id, step.path)
        if step.cost.micro_usd > cost_before:
            self.guard.spent(_root(machine), step.cost.micro_usd - cost_before)
        if outcome.ok and model is None:
            moved = self.gate.finish(ticket, SUCCESS, self._now_ns())
            self._learn(machine, step, outcome.cost_ns)
            machine.on_outcome(step, outcome)
            self._follow(moved)
            return
        if ticket.free:
            ticket.call = self._call_of(machine, step, step.attempt)
        if outcome.evicted or (model is not None and model.code == "cancelled"):  # by us, which says nothing of it
            machine.on_outcome(step, outcome)
            self._follow(self.gate.cancel(ticket, self._now_ns(), begun=outcome.unknown or model is not None))
            return
        told, known = _told_of_model(model, step.cost) if model is not None else _told_of_tool(outcome, step.kind)
        more = told.retried and machine.may_try_again(step)
        told = msgspec.structs.replace(told, retried=more, draw=self._draw() if more else 0.0)
        moved = self.gate.finish(ticket, told, self._now_ns())
        retry = moved.retry
        if isinstance(retry, Again):
            machine.try_again(step, retry.at_ns, outcome.code or "", known=known)
        else:
            self._learn(machine, step, outcome.cost_ns)
            machine.on_outcome(step, outcome)
        self._follow(moved)

    def _follow(self, moved: Moved) -> None:
        """Tell those whose calls have moved."""
        self._changed = True
        if moved is NOTHING_MOVED:
            return
        self._save_soon()
        for decision in moved.decisions:
            self._tell(decision)
        for ticket in moved.tickets:
            where = self._by_ticket.pop(ticket, None)
            if where is None:
                continue
            run_id, path = where
            claim = self._claims[run_id][path]
            if claim.begin is None:
                if ticket.state is State.GRANTED:
                    claim.timer = self._loop.call_later(_CLAIM_S, self._unclaimed, run_id, path, ticket)
                self._loop.call_soon(self._wake, run_id)
            elif ticket.state is State.GRANTED:
                begin, claim.begin, claim.refused = claim.begin, None, None
                self._loop.call_soon(begin, ticket)
            else:
                self._drop(run_id, path)
                assert claim.refused is not None and ticket.refusal is not None
                claim.refused(ticket.refusal)
        self._arm()

    def _unclaimed(self, run_id: str, path: str, ticket: Ticket) -> None:
        """Its run is still on its way from the store, or asks for something else: others may have it."""
        claim = self._claims.get(run_id, _NO_CLAIMS).get(path)
        if claim is not None and claim.ticket is ticket:
            self.unheld(run_id, path)

    def _keep(self, run_id: str, path: str, ticket: Ticket) -> _Claim:
        claim = self._claims.setdefault(run_id, {})[path] = _Claim(ticket)
        self._save_soon()
        return claim

    def _save_soon(self) -> None:
        self._changed = True
        if self._saver is None and self._save is not None and not self._closed:
            self._saver = self._loop.call_later(_SAVE_S, self._save_some)

    def _drop(self, run_id: str, path: str) -> _Claim | None:
        claims = self._claims.get(run_id)
        if claims is None:
            return None
        claim = claims.pop(path, None)
        if not claims:
            del self._claims[run_id]
        if claim is not None:
            self._by_ticket.pop(claim.ticket, None)
            if claim.timer is not None:
                claim.timer.cancel()
        return claim

    def _arm(self) -> None:
        next_ns = self.gate.next_ns()
        if next_ns is None or self._closed or (self._timer is not None and self._timer_ns <= next_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = next_ns
        # Half a millisecond more than asked for: the loop's clock is not the wall's, and early is too early.
        delay_s = max(0, next_ns - self._now_ns()) / 1e9 + 0.0005
        self._timer = self._loop.call_later(min(delay_s, _SLEEP_S_MAX), self._due)

    def _due(self) -> None:
        self._timer = None
        if not self._closed:
            self._follow(self.gate.due(self._now_ns()))

    def _save_some(self) -> None:
        self._saver = None
        if self._changed:
            self._write()
        if self._claims and not self._closed:
            self._saver = self._loop.call_later(_SAVE_S, self._save_some)

    def _write(self) -> None:
        self._changed = False
        if self._save is not None:
            loops, self._loops = self._loops, set()
            self._loops_kept |= loops
            kept = (Row(NODE, _loop_key(root), msgspec.msgpack.encode(self.guard.snapshot(root))) for root in loops)
            self._save((Row(NODE, _KEY, msgspec.msgpack.encode(self.gate.snapshot())), *kept), _nobody)


def _nobody(error: AgentrtError | None) -> None:
    """What was not saved is saved with the next change."""


_NO_CLAIMS: Final[dict[str, _Claim]] = {}


def _name(op: str, request: bytes | None) -> str:
    """What the loop guard calls a step; of a pure one the journal does not have the tool."""
    if op != "tool.call" or request is None:
        return op
    try:
        return _decode_tool(request).tool
    except UNREADABLE:
        return op


def _target(request: bytes) -> str:
    """The agent that a spawn names; it has been decoded before."""
    return _decode_target(request).agent


def _loop_key(root: str) -> bytes:
    """NODE: "loop/" | root (16)."""
    return b"loop/" + run_id_to_bytes(root)


def _loops_of_nobody(store: Store) -> tuple[Row, ...]:
    """On a reader thread: rows of ensembles whose root had ended when the node was killed."""
    found = []
    for key, _ in scan_all(store, NODE, b"loop/"):
        head = store.read_head(run_id_from_bytes(key[5:]))
        if head is None or head.ended_ns:
            found.append(Row(NODE, key, None))
    return tuple(found)


def _root(machine: "RunMachine") -> str:
    return machine.accepted.root or machine.run_id


def _waits_for(decision: Decision) -> str:
    """For people: who keeps it."""
    return f"{decision.limit} of {decision.who}" if decision.limit else decision.who


def _error(refusal: Refused, run_id: str, path: str) -> AgentrtError:
    kind: type[AgentrtError] = {
        "breaker_open": BreakerOpenError,
        "rate_too_large": RateTooLargeError,
    }.get(refusal.code, QueueFullError)
    after_ns = refusal.retry_after_ns
    hint = None if after_ns is None else f"Try again in {after_ns / 1e9:.3g} s, or do without"
    return kind(refusal.message, run=run_id, step=path, limit=_waits_for(refusal.decision), hint=hint)


def _loop_error(found: Found, run_id: str, path: str) -> LoopDetectedError:
    evidence: dict[str, Any] = {"sign": found.sign.value, "count": found.count, "limit": found.limit}
    if found.cycle:
        evidence["cycle"] = [{"agent": agent, "step": what, "digest": digest} for agent, what, digest in found.cycle]
    return LoopDetectedError(
        f"the run looks stuck: {found.text}",
        evidence=evidence,
        run=run_id,
        step=path,
        limit=f"loop.{found.sign.value}",
        hint="Let the agent emit what it has got done, or raise the limit",
    )


def _told_of_tool(outcome: ToolOutcome, kind: str) -> tuple[Outcome, bool]:
    """What a failure of a tool's call tells the gate, and whether the call certainly had no effect."""
    failure = _FAILURES.get(outcome.code or "", Failure.FATAL)
    rate = failure is Failure.RATE
    # What nobody saw the end of is settled by its kind, by the machine; so is what the tool does not name.
    retried = rate or (outcome.code == ToolUnavailableError.code and kind in _REPEATABLE)
    after_ns = _retry_after_ns(outcome.payload) if rate else None
    return Outcome(failure, outcome.code == "tool_timeout", None, after_ns, retried=retried), rate


def _told_of_model(outcome: "ModelOutcome", cost: Cost) -> tuple[Outcome, bool]:
    """The same of a call of a model, which is worth another attempt if that may go better. ``cost``: of all attempts,
    which must not be forgotten with an attempt that cost nothing."""
    tokens = outcome.usage.tokens
    if outcome.ok or outcome.kind is None:
        return Outcome(tokens=tokens), False
    failure = Failure(outcome.kind.value)
    retried = failure in (Failure.RATE, Failure.TRANSPORT)
    overloaded = outcome.code in ("model_timeout", "model_context")
    return Outcome(failure, overloaded, tokens, outcome.retry_after_ns, retried=retried), cost == _NO_COST


def _retry_after_ns(payload: bytes) -> int | None:
    try:
        after_s = _decode_retry_after(payload).retry_after_s
    except UNREADABLE:
        return None
    return None if after_s is None or not 0 <= after_s <= 10**9 else int(after_s * 1e9)
