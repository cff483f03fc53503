"""Calendar quotas: so many calls of a tool, provider, model or tenant per hour, day or month, from a reset time on that
is the other side's. Pure.

Work is scheduled around them: what finds no place is told when the next one is free, counting those that wait before
it, so that a run can wait in the store until then. A quota counts calls that were begun, attempts included; nothing is
given back.

A counter changes in the turn of the loop in which its row goes to the store, with the record that says why
(StepPrepared): so the row is never older than what it counts.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import InputError, StoreCorruptError
from agentrt.flow.decisions import Action, Control, Decision, Scope
from agentrt.flow.windows import SHORTEST_NS, Span, later_window, window_of

SCOPES: Final = (Scope.TENANT, Scope.TOOL, Scope.PROVIDER, Scope.MODEL)
#: Windows ahead that `next_free` looks at; what would be later is said to be then.
AHEAD_MAX: Final = 1_000


class Quota(msgspec.Struct, frozen=True):
    """At most ``count`` calls per ``span``. ``name`` "*": every name has its own. ``reset_s``: how long after the full
    hour, midnight, or the first of the month (UTC) it begins again. Raises InputError."""

    scope: Scope
    name: str
    count: int
    span: Span
    reset_s: int = 0

    def __post_init__(self) -> None:
        what = f"the quota of {self.scope.value} {self.name}"
        if self.scope not in SCOPES:
            raise InputError(f"{what}: quotas are of " + ", ".join(SCOPES))
        if not 1 <= self.count < 2**53:
            raise InputError(f"{what}: a count of {self.count}")
        if not 0 <= self.reset_s * 10**9 < SHORTEST_NS[self.span]:
            raise InputError(f"{what}: reset_s is within every {self.span.value}, not {self.reset_s}")

    @property
    def limit(self) -> str:
        """As decisions call it."""
        return f"calls/{self.span.value}"


class CounterRow(msgspec.Struct, frozen=True, array_like=True):
    """A counter as stored."""

    scope: str
    name: str
    span: str
    reset_s: int
    start_ns: int
    used: int


class Counter:
    """A quota of one name. Time that goes back changes nothing."""

    __slots__ = ("end_ns", "name", "quota", "start_ns", "used")

    def __init__(self, quota: Quota, name: str) -> None:
        self.quota = quota
        self.name = name
        self.start_ns = self.end_ns = 0
        self.used = 0

    def roll(self, now_ns: int) -> None:
        """Begin the window that is now."""
        if now_ns >= self.end_ns:
            self.start_ns, self.end_ns = window_of(self.quota.span, now_ns, self.quota.reset_s * 10**9)
            self.used = 0

    def next_free_ns(self, ahead: int, count: int) -> int:
        """When ``count`` calls have a place, if ``ahead`` calls go before them; after `roll`. The start of the window
        that is now: at once."""
        quota = self.quota
        if self.used + ahead + count <= quota.count:
            return self.start_ns
        # Each later window takes `quota.count`; the last of ours needs the place of this number after this window's.
        missing = ahead + count - max(0, quota.count - self.used)
        windows = -(-missing // quota.count)
        return later_window(quota.span, self.start_ns, min(windows, AHEAD_MAX), quota.reset_s * 10**9)

    def row(self) -> CounterRow:
        """As it is now."""
        quota = self.quota
        return CounterRow(quota.scope.value, self.name, quota.span.value, quota.reset_s, self.start_ns, self.used)


class Full(msgspec.Struct, frozen=True):
    """The counter has no place left; the next is free at ``until_ns``. ``never``: more was asked for than the quota."""

    counter: Counter
    until_ns: int
    never: bool = False

    def decision(self, now_ns: int, run: str | None, step: str | None) -> Decision:
        """As an event."""
        counter = self.counter
        return Decision(
            at_ns=now_ns,
            control=Control.QUOTA,
            action=Action.REFUSE if self.never else Action.WAIT,
            scope=counter.quota.scope,
            name=counter.name,
            limit=counter.quota.limit,
            value=counter.used,
            bound=counter.quota.count,
            run=run,
            step=step,
            until_ns=0 if self.never else self.until_ns,
        )


Name = tuple[Scope, str]


class Quotas:
    """The counters of a node. ``names_max`` bounds the names that "*" quotas have counters for: those whose window is
    over go first, others are kept as rows."""

    def __init__(self, quotas: Iterable[Quota] = (), names_max: int = 100_000) -> None:
        self._names_max = names_max
        self._counters: dict[Name, tuple[Counter, ...]] = {}
        self._rules: dict[Name, tuple[Quota, ...]] = {}
        self._kept: dict[tuple[str, str, str, int], CounterRow] = {}  # of the store, not asked for yet
        self.configure(quotas)

    def configure(self, quotas: Iterable[Quota]) -> None:
        """Other quotas from now on. A counter whose span and reset time stay keeps what it has counted."""
        for counters in self._counters.values():
            for counter in counters:
                row = counter.row()
                self._kept[row.scope, row.name, row.span, row.reset_s] = row
        self._counters.clear()
        rules: dict[Name, list[Quota]] = {}
        for quota in quotas:
            rules.setdefault((quota.scope, quota.name), []).append(quota)
        self._rules = {name: tuple(found) for name, found in rules.items()}

    @property
    def any(self) -> bool:
        """Whether there are quotas at all."""
        return bool(self._rules)

    def adopt(self, rows: Iterable[CounterRow]) -> None:
        """At start: what was counted before."""
        for row in rows:
            self._kept[row.scope, row.name, row.span, row.reset_s] = row

    def counters(self, names: Iterable[Name], now_ns: int) -> list[Counter]:
        """Those that a call under these names counts against, in the windows that are now."""
        found: list[Counter] = []
        for name in names:
            counters = self._counters.get(name)
            if counters is None:
                rules = self._rules.get(name) or self._rules.get((name[0], "*"))
                if rules is None:
                    continue
                counters = self._made(name, rules, now_ns)
            for counter in counters:
                if now_ns >= counter.end_ns:
                    counter.roll(now_ns)
            found += counters
        return found

    def _made(self, name: Name, rules: tuple[Quota, ...], now_ns: int) -> tuple[Counter, ...]:
        if len(self._counters) >= self._names_max:
            self._let_go(now_ns)
        made = []
        for quota in rules:
            counter = Counter(quota, name[1])
            counter.roll(now_ns)
            row = self._kept.pop((quota.scope.value, name[1], quota.span.value, quota.reset_s), None)
            if row is not None and row.start_ns >= counter.start_ns:  # later: the clock was set back
                counter.start_ns, counter.used = row.start_ns, row.used
                counter.end_ns = later_window(quota.span, row.start_ns, 1, quota.reset_s * 10**9)
            made.append(counter)
        self._counters[name] = tuple(made)
        return tuple(made)

    def _let_go(self, now_ns: int) -> None:
        over = [name for name, counters in self._counters.items() if all(now_ns >= each.end_ns for each in counters)]
        for name in over or [*self._counters][: self._names_max // 10 or 1]:
            for counter in self._counters.pop(name):
                if now_ns < counter.end_ns:
                    row = counter.row()
                    self._kept[row.scope, row.name, row.span, row.reset_s] = row

    def take(self, names: Iterable[Name], now_ns: int, count: int = 1) -> list[Counter] | Full:
        """Count the calls in all quotas of the names: those that changed. Or in none: the one that has its next free
        place last."""
        counters = self.counters(names, now_ns)
        refused = [
            Full(counter, counter.next_free_ns(0, count), count > counter.quota.count)
            for counter in counters
            if counter.used + count > counter.quota.count
        ]
        if refused:
            return max(refused, key=lambda full: (full.never, full.until_ns))
        for counter in counters:
            counter.used += count
        return counters


def encode_counter(row: CounterRow) -> bytes:
    """As stored."""
    return msgspec.msgpack.encode(row)


_decode: Final = msgspec.msgpack.Decoder(CounterRow).decode


def decode_counter(data: bytes) -> CounterRow:
    """Raises StoreCorruptError."""
    try:
        row = _decode(data)
    except UNREADABLE as error:
        raise StoreCorruptError(f"a row of the quotas cannot be read: {error}") from error
    if row.span not in tuple(Span) or row.used < 0 or row.start_ns < 0:
        raise StoreCorruptError("a row of the quotas says what cannot be")
    return row
