"""The shell of admission: who may come in at all, and who waits at the door until there is room.

Loop thread only. What is decided is decided in `agentrt.flow.admission`. A run counts from its acceptance to its end
while it is in memory or on its way there; not while it waits in the store, nor while its guest only waits for children
of its own, started or about to be: so parents never keep the place that their children need. What was accepted before
counts again without being asked.

Requests of callers who may wait stand at the door with what is to be done then. A child stands there for as long as it
takes, since its parent is what would be told; its place is kept until the step that starts it has been journaled.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from agentrt.engine.edge import Edge
from agentrt.engine.machine import RunMachine
from agentrt.engine.ports import Hold
from agentrt.engine.ports import Refusal as StepRefusal
from agentrt.errors import AgentrtError, ClosedError, EnsembleFullError, InputError, QueueFullError
from agentrt.flow.admission import FOREVER_NS, Admission, AdmissionLimits, Applicant, News, Refusal, Waits, Why
from agentrt.flow.decisions import WAIT_REASON, Control, Decision
from agentrt.flow.profilebounds import queues_over
from agentrt.flow.profiles import InForce

#: How long a place is kept for a child whose parent has not asked for it: it may be on its way from the store.
_CLAIM_S: Final = 10.0
#: A child at the door looks again by itself this often, should it have been forgotten.
_LOOK_NS: Final = 60 * 10**9

_SETTINGS: Final = {
    "node.items": "scheduler.queue_items_max",
    "node.bytes": "scheduler.queue_bytes_max",
    "tier.items": "flow.queue_tier_items_max",
    "tier.bytes": "flow.queue_tier_bytes_max",
    "class.items": "flow.classes.queue_items_max",
    "class.bytes": "flow.classes.queue_bytes_max",
    "tenant.items": "flow.queue_items_max",
    "tenant.bytes": "flow.queue_bytes_max",
    "door.items": "flow.door_items_max",
}


_NOBODY: Final[dict[str, Waits]] = {}


class _AtDoor(msgspec.Struct):
    """A caller: one of the two is called, later."""

    go: Callable[[Applicant], None]
    refuse: Callable[[AgentrtError], None]


class Intake:
    """``tell``: a decision was made. ``wake(run_id)``: have the run look at its held steps again. ``monotonic_ns``
    counts the waits, ``now_ns`` (Unix ns) is what others are told."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: AdmissionLimits,
        monotonic_ns: Callable[[], int],
        now_ns: Callable[[], int],
        tell: Callable[[Decision], None],
        wake: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._monotonic_ns = monotonic_ns
        self._now_ns = now_ns
        self._tell = tell
        self._wake = wake
        self._configured = self._limits = limits
        self.admission: Final = Admission(limits)
        self.edge: Final = Edge(loop, self.admission, monotonic_ns, self._refused)
        self.refused = 0
        self._told: tuple[Refusal, Decision, AgentrtError] | None = None  # the last refusal, what was said of it
        self._callers: dict[Any, Waits] = {}  # by what they are known as
        self._children: dict[str, dict[str, Waits]] = {}  # by run of the parent, and run and step
        self._promised: dict[str, Applicant] = {}  # children that are in and have not been accepted
        self._entering = 0  # callers that were let in and do not know yet
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def apply(self, force: InForce) -> None:
        """What the profiles in force say of queues holds from now on; what is in stays in, and those at the door look
        again."""
        limits = queues_over(self._configured, force.queues())
        if limits != self._limits:
            self._limits = limits
            self._follow(self.admission.configure(limits, self._monotonic_ns()))

    @property
    def promised(self) -> int:
        """Of those that count, those of which no run is there yet."""
        return len(self._promised) + self._entering

    # --- callers ------------------------------------------------------------------------

    def enter(self, applicant: Applicant) -> Applicant:
        """A new run comes in; `leave` or `withdraw` is owed. Raises QueueFullError, InputError (it would not fit into
        an empty queue): nothing is taken then."""
        answer = self.admission.enter(applicant, self._monotonic_ns())
        if answer is None:
            return applicant
        assert isinstance(answer, Refusal)
        raise self._error(answer)

    def wait(
        self,
        applicant: Applicant,
        known_as: Any,
        go: Callable[[Applicant], None],
        refuse: Callable[[AgentrtError], None],
    ) -> Applicant | None:
        """The same for a caller who waits: None, and ``go(applicant)`` or ``refuse(error)`` follows, unless `give_up`
        is called with what it is ``known_as``. Raises as `enter`."""
        now = self._monotonic_ns()
        standing = msgspec.structs.replace(applicant, ref=(known_as, _AtDoor(go, refuse)))
        answer = self.admission.enter(standing, now, wait=True)
        if isinstance(answer, Refusal) and answer.why is Why.DOOR_FULL:
            news = self.admission.shed(standing, now)
            if news:
                self._follow(news)
                answer = self.admission.enter(standing, now, wait=True)
        if answer is None:
            return applicant
        if isinstance(answer, Refusal):
            raise self._error(answer)
        self._callers[known_as] = answer
        self._arm()
        return None

    def give_up(self, known_as: Any) -> bool:
        """The caller has gone. False: he did not wait any more."""
        waits = self._callers.pop(known_as, None)
        if waits is not None:
            self._follow(self.admission.give_up(waits, self._monotonic_ns()))
        return waits is not None

    def close(self) -> None:
        """Nobody comes in any more; those at the door are told."""
        self._closed = True
        self.edge.close()
        for timer in (self._timer, self._sweep):
            if timer is not None:
                timer.cancel()
        for known_as, waits in [*self._callers.items()]:
            del self._callers[known_as]
            self.admission.give_up(waits, self._monotonic_ns())
            _, caller = waits.applicant.ref
            self._loop.call_soon(caller.refuse, ClosedError("the runtime accepts no more runs"))

    # --- children -----------------------------------------------------------------------

    def admit_child(self, key: str, applicant: Applicant, *, block: bool) -> Hold | StepRefusal | None:
        """May the run ``key`` (run and step of its parent) be started? None: yes, and `claim` follows. ``block``:
        rather than be refused, the parent waits."""
        if key in self._promised:
            return None
        run_id, _, path = key.partition("/")
        waits = self._children.get(run_id, _NOBODY).get(key)
        if waits is None:
            applicant = msgspec.structs.replace(applicant, ref=key)
            until_ns = FOREVER_NS if block else 0
            answer = self.admission.enter(applicant, self._monotonic_ns(), wait=block, until_ns=until_ns)
            if answer is None:
                self._promise(key, applicant)
                return None
            if isinstance(answer, Refusal):
                error = self._error(answer)
                if not block or answer.why is Why.TOO_LARGE:
                    full = EnsembleFullError(error.message, run=run_id, step=path, limit=error.limit, hint=error.hint)
                    return StepRefusal(full if answer.why is not Why.TOO_LARGE else error)
                detail = f"{error.message}, and as many wait as may"
                return Hold(WAIT_REASON[Control.ADMISSION], detail, self._now_ns() + answer.retry_after_ns)
            waits = self._children.setdefault(run_id, {})[key] = answer
        detail = f"there is no room for another run: {_SETTINGS[waits.limit]}"
        return Hold(WAIT_REASON[Control.ADMISSION], detail, self._now_ns() + _LOOK_NS)

    def claim(self, key: str) -> Applicant | None:
        """The place that was promised to the run; None: none was, in this life of the node."""
        return self._promised.pop(key, None)

    def drop_child(self, key: str) -> None:
        """It will not be started."""
        waits = self._away(key)
        if waits is not None:
            self._follow(self.admission.give_up(waits, self._monotonic_ns()))
        applicant = self._promised.pop(key, None)
        if applicant is not None:
            self.withdraw(applicant)

    def _away(self, key: str) -> Waits | None:
        """The child does not stand at the door any more."""
        run_id = key.partition("/")[0]
        children = self._children.get(run_id, _NOBODY)
        waits = children.pop(key, None)
        if waits is not None and not children:
            del self._children[run_id]
        return waits

    def _promise(self, key: str, applicant: Applicant) -> None:
        self._promised[key] = applicant
        if self._sweep is None and not self._closed:
            self._sweep = self._loop.call_later(_CLAIM_S, self._unclaimed, [*self._promised])

    def _unclaimed(self, keys: list[str]) -> None:
        """Their parents have ended, or are elsewhere. One that comes after all is accepted all the same."""
        self._sweep = None
        for key in keys:
            applicant = self._promised.pop(key, None)
            if applicant is not None:
                self.withdraw(applicant)
        if self._promised and not self._closed:
            self._sweep = self._loop.call_later(_CLAIM_S, self._unclaimed, [*self._promised])

    # --- runs ---------------------------------------------------------------------------

    def adopt(self, applicant: Applicant) -> Applicant:
        """A run that was accepted before counts from now on."""
        self.admission.adopt(applicant)
        return applicant

    def withdraw(self, applicant: Applicant) -> None:
        """It counts no more, and has not ended."""
        news = self.admission.withdraw(applicant, self._monotonic_ns())
        if news:
            self._follow(news)

    def leave(self, applicant: Applicant) -> None:
        """It has ended."""
        news = self.admission.leave(applicant, self._monotonic_ns())
        if news:
            self._follow(news)

    def ended(self, machine: RunMachine) -> None:
        """The run has ended, whether or not it counted."""
        assert machine.place is not None
        if machine.rests:
            self.admission.adopt(machine.place)
        self.leave(machine.place)
        machine.place, machine.rests = None, False
        for key in [*self._children.get(machine.run_id, ())]:
            self.drop_child(key)

    def gone(self, machine: RunMachine) -> None:
        """It has not ended, and is not in memory any more."""
        assert machine.place is not None
        if not machine.rests:
            self.withdraw(machine.place)
        machine.place, machine.rests = None, False

    def idle(self, machine: RunMachine) -> None:
        """Its guest is suspended: does it only wait for children?"""
        rests = machine.waits_for_children
        if rests is not machine.rests and machine.place is not None:
            machine.rests = rests
            if rests:
                self.withdraw(machine.place)
            else:
                self.admission.adopt(machine.place)

    def woken(self, machine: RunMachine) -> None:
        """What it waited for is there."""
        machine.rests = False
        if machine.place is not None:
            self.admission.adopt(machine.place)

    # --- within -------------------------------------------------------------------------

    def _follow(self, news: News) -> None:
        """Tell those who were at the door. Not at once: whoever called us is not called back before it has returned."""
        for applicant in news.admitted:
            ref = applicant.ref
            if isinstance(ref, str):
                self._away(ref)
                self._promise(ref, applicant)
                self._loop.call_soon(self._wake, ref.partition("/")[0])
            else:
                known_as, caller = ref
                del self._callers[known_as]
                self._entering += 1
                self._loop.call_soon(self._go, caller, applicant)
        for applicant, refusal in news.refused:
            ref = applicant.ref
            error = self._error(refusal)
            if isinstance(ref, str):  # shed: its parent asks again
                self._away(ref)
                self._loop.call_later(refusal.retry_after_ns / 1e9, self._wake, ref.partition("/")[0])
            else:
                known_as, caller = ref
                del self._callers[known_as]
                self._loop.call_soon(caller.refuse, error)
        self._arm()

    def _go(self, caller: _AtDoor, applicant: Applicant) -> None:
        self._entering -= 1
        caller.go(applicant)

    def _arm(self) -> None:
        next_ns = self.admission.next_ns()
        if next_ns is None or next_ns >= FOREVER_NS or self._closed:
            return
        if self._timer is not None:
            if self._timer_ns <= next_ns:
                return
            self._timer.cancel()
        self._timer_ns = next_ns
        delay_s = max(0, next_ns - self._monotonic_ns()) / 1e9
        self._timer = self._loop.call_later(delay_s + 0.001, self._due)

    def _due(self) -> None:
        self._timer = None
        if not self._closed:
            self._follow(self.admission.due(self._monotonic_ns()))

    def _refused(self, decision: Decision) -> None:
        self.refused += 1
        self._tell(decision)

    def _error(self, refusal: Refusal) -> AgentrtError:
        """Counted and told; for whoever is refused."""
        if self._told is None or self._told[0] is not refusal:
            now, after_ns = self._now_ns(), refusal.retry_after_ns
            until_ns = now + after_ns if after_ns else 0
            decision = msgspec.structs.replace(refusal.decision, at_ns=now, until_ns=until_ns)
            self._told = refusal, decision, refusal_error(refusal)
        _, decision, error = self._told
        self._refused(decision)
        if not isinstance(error, QueueFullError):
            return refusal_error(refusal)
        self.edge.refused(refusal, error, decision)
        return error.for_another()


_WHYS: Final = {Why.TOO_LATE: ", for as long as one may wait", Why.SHED: ", and more urgent ones came"}


def refusal_error(refusal: Refusal) -> AgentrtError:
    """What the caller is told: which bound is full, how full, and when it is worth coming back."""
    made = refusal.decision
    kind, _, unit = refusal.limit.partition(".")
    whose = f"the {kind}" if kind in ("node", "door") else f"{kind} {made.name}"
    limit = _SETTINGS[refusal.limit]
    if refusal.why is Why.TOO_LARGE:
        return InputError(f"the input alone is more than {whose} may have: {made.bound} {unit}", limit=limit)
    after_s = refusal.retry_after_ns / 1e9
    what = "wait to be accepted" if kind == "door" else f"{unit} accepted and not ended"
    why = _WHYS.get(refusal.why, "")
    return QueueFullError(
        f"{whose} is full{why}: {made.value} of {made.bound} {what}",
        limit=limit,
        hint=f"Try again in {after_s:.0f} s",
        retry_after_s=after_s,
    )
