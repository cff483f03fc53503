"""The loop guard: ensembles that do a lot and get nowhere, found by what their steps are, not by what they say.

Four signs, each kept per ensemble (the root run and all it spawned), so that a fresh child or a fresh session resets
nothing (fault B79):

- *iterations*: steps of the whole ensemble since its last output;
- *spend*: micro-dollars since its last output;
- *repetition*: a run asks for the same step (same digest), or the same short cycle of steps, again and again;
- *ping-pong*: agents of the ensemble hand the same work to and fro: a cycle of (agent, digest of what was handed over),
  found both along the chain of ancestors and in the order in which the ensemble's agents address each other.

An output is what somebody outside can see: an ensemble that emits progress is not taken to stand still. Repetition and
ping-pong are the same work again; progress does not excuse them. Pure; bounded in runs per ensemble and in digests.
"""

from collections import OrderedDict, deque
from enum import StrEnum
from typing import Final

import msgspec

from agentrt.errors import ConfigError
from agentrt.flow.decisions import Action, Control, Decision, Scope

#: The longest cycle that is looked for: four agents in a ring, or a loop over four tools.
PERIOD_MAX: Final = 4
#: Runs of one ensemble whose last steps are kept; those that did nothing for longest are forgotten first.
RUNS_MAX: Final = 1_000


class Sign(StrEnum):
    ITERATIONS = "iterations"
    SPEND = "spend"
    REPETITION = "repetition"
    PING_PONG = "ping_pong"


class LoopLimits(msgspec.Struct, frozen=True):
    """0 switches a sign off. ``repeats``: of a cycle of one or more steps in one run; ``rallies``: of a cycle between
    agents. Picked by feel: polling tools are called dozens of times, stuck agents hundreds."""

    iterations: int = 10_000
    spend_micro_usd: int = 0
    repeats: int = 50
    rallies: int = 8

    def __post_init__(self) -> None:
        if min(self.iterations, self.spend_micro_usd, self.repeats, self.rallies) < 0 or 1 in (
            self.repeats,
            self.rallies,
        ):
            raise ConfigError(
                f"a loop guard of {self.iterations} iterations, {self.repeats} repeats, {self.rallies} rallies",
                hint="0 (off) or more; repeats and rallies at least 2",
            )


class Found(msgspec.Struct, frozen=True):
    """The evidence. ``cycle``: (agent, what, digest in hex) of one turn, ``count``: how often it came in a row."""

    sign: Sign
    count: int
    limit: int
    cycle: tuple[tuple[str, str, str], ...] = ()

    @property
    def text(self) -> str:
        """For people and for the parent."""
        if self.sign is Sign.ITERATIONS:
            return f"{self.count} steps without any output"
        if self.sign is Sign.SPEND:
            return f"{self.count} micro-dollars spent without any output"
        steps = ", ".join(f"{agent}: {what}" for agent, what, _ in self.cycle)
        return f"{self.count} times in a row: {steps}"

    def decision(self, root: str, run: str, step: str | None, now_ns: int) -> Decision:
        """As an event."""
        return Decision(
            at_ns=now_ns,
            control=Control.LOOP,
            action=Action.END,
            scope=Scope.ENSEMBLE,
            name=root,
            limit=self.sign.value,
            value=self.count,
            bound=self.limit,
            run=run,
            step=step,
            detail=self.text[:500],
        )


#: (agent, what it does in words, digest)
_Event = tuple[str, str, bytes]


class _Cycles:
    """Counts how often a sequence has gone round at its end, for each period, one comparison per event and period."""

    __slots__ = ("_agent", "_digest", "_digests", "_last", "_runs", "_same", "_turns")

    def __init__(self) -> None:
        self._agent, self._digest = "", b""  # of the last event
        self._same = 0  # events in a row that equal it
        self._last: deque[_Event] = deque(maxlen=PERIOD_MAX)  # the newest first
        self._digests: deque[bytes] = deque(maxlen=PERIOD_MAX)  # of these
        self._runs = [0] * (PERIOD_MAX + 1)  # events in a row that equal the one ``period`` before
        self._turns = False  # one of them is not 0

    def add(self, event: _Event, turns_max: int, *, agents_min: int) -> tuple[int, tuple[_Event, ...]] | None:
        """(turns, one turn) if a cycle with ``agents_min`` agents or more has gone round ``turns_max`` times."""
        agent, _, digest = event
        if digest == self._digest and agent == self._agent:
            same = self._same = self._same + 1
            if same > PERIOD_MAX:  # all that is kept equals it: who goes on with the same has no other cycle
                return (same, (event,)) if same >= turns_max and agents_min < 2 else None
        else:
            self._agent, self._digest, self._same = agent, digest, 1
        last, runs = self._last, self._runs
        found = None
        if digest in self._digests:
            self._turns = True
            for period, known in enumerate(last, 1):
                if known[2] == digest and known[0] == agent:
                    times = runs[period] = runs[period] + 1
                    if found is None and times + period >= turns_max * period:
                        cycle = (*[*last][period - 2 :: -1], event) if period > 1 else (event,)
                        if len({each for each, _, _ in cycle}) >= agents_min:
                            found = (times // period + 1, cycle)
                else:
                    runs[period] = 0
        elif self._turns:  # something new: the common case, and the quick one
            self._turns = False
            self._runs = [0] * (PERIOD_MAX + 1)
        last.appendleft(event)
        self._digests.append(digest)
        return found


class _Ensemble:
    __slots__ = ("chains", "iterations", "spend", "steps", "talk")

    def __init__(self) -> None:
        self.iterations = 0  # since the last output
        self.spend = 0
        self.steps: OrderedDict[str, _Cycles] = OrderedDict()  # by run
        self.chains: OrderedDict[str, tuple[_Event, ...]] = OrderedDict()  # by run: what was handed to its ancestors
        self.talk = _Cycles()


class LoopGuard:
    """Of a node; one caller at a time. Ensembles are forgotten when their caller says that they have ended."""

    def __init__(self, limits: LoopLimits | None = None) -> None:
        self.limits = LoopLimits() if limits is None else limits
        self._ensembles: dict[str, _Ensemble] = {}

    def __len__(self) -> int:
        return len(self._ensembles)

    def step(self, root: str, run: str, agent: str, what: str, digest: bytes) -> Found | None:
        """A run is about to make a step. ``what`` is for people (``tool.call search``)."""
        limits = self.limits
        ensemble = self._ensembles.get(root)
        if ensemble is None:
            ensemble = self._of(root)
        ensemble.iterations += 1
        if ensemble.iterations > limits.iterations > 0:
            return Found(Sign.ITERATIONS, ensemble.iterations, limits.iterations)
        if ensemble.spend > limits.spend_micro_usd > 0:
            return Found(Sign.SPEND, ensemble.spend, limits.spend_micro_usd)
        if not limits.repeats:
            return None
        cycles = ensemble.steps.get(run)
        if cycles is None:
            cycles = ensemble.steps[run] = _Cycles()
            if len(ensemble.steps) > RUNS_MAX:
                ensemble.steps.popitem(last=False)
        found = cycles.add((agent, what, digest), limits.repeats, agents_min=1)
        return None if found is None else _found(Sign.REPETITION, found, limits.repeats)

    def hand_over(
        self, root: str, run: str, agent: str, what: str, digest: bytes, child: str | None = None
    ) -> Found | None:
        """The agent gives work to another: it spawns ``child``, or sends an event. Beside `step`."""
        limits = self.limits
        if not limits.rallies:
            return None
        ensemble = self._of(root)
        event = (agent, what, digest)
        if child is not None:
            # Only the end of the chain is kept: no cycle that counts is longer.
            chain = (*ensemble.chains.get(run, ()), event)[-PERIOD_MAX * limits.rallies :]
            ensemble.chains[child] = chain
            if len(ensemble.chains) > RUNS_MAX:
                ensemble.chains.popitem(last=False)
            along, found = _Cycles(), None
            for link in chain:
                found = along.add(link, limits.rallies, agents_min=2)
            if found is not None:
                return _found(Sign.PING_PONG, found, limits.rallies)
        return _found(Sign.PING_PONG, ensemble.talk.add(event, limits.rallies, agents_min=2), limits.rallies)

    def spent(self, root: str, micro_usd: int) -> Found | None:
        """A step has cost money. What it has found, the next `step` finds as well."""
        ensemble = self._of(root)
        ensemble.spend += micro_usd
        bound = self.limits.spend_micro_usd
        return Found(Sign.SPEND, ensemble.spend, bound) if bound and ensemble.spend > bound else None

    def output(self, root: str) -> None:
        """Somebody outside has seen something of the ensemble."""
        ensemble = self._ensembles.get(root)
        if ensemble is not None:
            ensemble.iterations = ensemble.spend = 0

    def run_ended(self, root: str, run: str) -> None:
        """What only the run could repeat is forgotten; what it has added to its ensemble's sums is not. The end of the
        root is the end of the ensemble."""
        if run == root:
            self._ensembles.pop(root, None)
            return
        ensemble = self._ensembles.get(root)
        if ensemble is not None:
            ensemble.steps.pop(run, None)
            ensemble.chains.pop(run, None)

    def snapshot(self, root: str) -> tuple[int, int]:
        """(iterations, spend) of an ensemble: what must survive a restart beside the runs' journals."""
        ensemble = self._ensembles.get(root)
        return (0, 0) if ensemble is None else (ensemble.iterations, ensemble.spend)

    def is_far(self, root: str, share: int) -> bool:
        """Whether the ensemble has come the ``share``-th part of its way to one of the limits."""
        ensemble, limits = self._ensembles.get(root), self.limits
        return ensemble is not None and (
            ensemble.iterations * share >= limits.iterations > 0 or ensemble.spend * share >= limits.spend_micro_usd > 0
        )

    def restore(self, root: str, iterations: int, spend: int) -> None:
        """Go on from a snapshot. The steps of runs are shown again as their journals are read (`remember`)."""
        ensemble = self._of(root)
        ensemble.iterations = max(ensemble.iterations, iterations)
        ensemble.spend = max(ensemble.spend, spend)

    def remember(self, root: str, run: str, agent: str, steps: list[tuple[str, bytes]]) -> None:
        """The last (what, digest) of a run's journal: counted for repetition only."""
        cycles = self._of(root).steps[run] = _Cycles()
        for what, digest in steps:
            cycles.add((agent, what, digest), 1 << 60, agents_min=1)

    def _of(self, root: str) -> _Ensemble:
        ensemble = self._ensembles.get(root)
        if ensemble is None:
            ensemble = self._ensembles[root] = _Ensemble()
        return ensemble


def _found(sign: Sign, found: tuple[int, tuple[_Event, ...]] | None, limit: int) -> Found | None:
    if found is None:
        return None
    turns, cycle = found
    return Found(sign, turns, limit, tuple((agent, what, digest.hex()) for agent, what, digest in cycle))
