"""Accounts and entries: the numbers of the ledger (`agentrt.flow.budgets`), and the rows that they are rebuilt from.

An **account** has limits: the node, a tenant, an agent of a tenant, or a run with a budget, which bounds what it starts
too. An **entry** is one run's part of them all. For every account, at every moment,

    used = what ended runs used (its *base*) + what the entries under it have used
    held = what the entries under it have reserved and not settled

and each window of an account holds the same sums for what was used in it. What is held counts against the window that
is now, whenever it was reserved; it is charged to the window in which it is settled.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError
from agentrt.flow.amounts import NO_LIMIT, WIDTH, Amounts, bounds_of, vector
from agentrt.flow.decisions import Scope
from agentrt.flow.windows import Span, window_of

#: A scope with the names in it: ("node",), ("tenant", t), ("agent", t, a), ("run", run_id).
AccountId = tuple[str, ...]
_NEVER: Final = 2**63 - 1
SPANS: Final = tuple(Span)


def node_id() -> AccountId:
    return (Scope.NODE.value,)


def tenant_id(tenant: str) -> AccountId:
    return (Scope.TENANT.value, tenant)


def agent_id(tenant: str, agent: str) -> AccountId:
    return (Scope.AGENT.value, tenant, agent)


def run_account_id(run_id: str) -> AccountId:
    return (Scope.RUN.value, run_id)


class Used(msgspec.Struct, array_like=True):
    """What was used: ever, and in the windows that were last written to. A window has (start, sums)."""

    total: list[int]
    windows: list[tuple[int, list[int]]]  # by SPANS

    @classmethod
    def nothing(cls) -> "Used":
        return cls([0] * WIDTH, [(0, [0] * WIDTH) for _ in SPANS])

    def add(self, other: "Used") -> None:
        """Of two windows the later one counts."""
        for index, value in enumerate(other.total):
            self.total[index] += value
        for place, (start, sums) in enumerate(other.windows):
            mine, mine_sums = self.windows[place]
            if start > mine:
                self.windows[place] = (start, [*sums])
            elif start == mine:
                for index, value in enumerate(sums):
                    mine_sums[index] += value

    def take(self, other: "Used") -> None:
        """The opposite of `add`, for what was added before."""
        for index, value in enumerate(other.total):
            self.total[index] -= value
        for place, (start, sums) in enumerate(other.windows):
            mine, mine_sums = self.windows[place]
            if start == mine:
                for index, value in enumerate(sums):
                    mine_sums[index] -= value

    def charge(self, values: Amounts, starts: tuple[int, ...]) -> None:
        """Count it now; ``starts`` are those of the windows that are now, by SPANS."""
        for index, value in values:
            self.total[index] += value
        for place, start in enumerate(starts):
            mine, sums = self.windows[place]
            if start > mine:
                sums = [0] * WIDTH
                self.windows[place] = (start, sums)
            for index, value in values:
                sums[index] += value

    def charge_one(self, index: int, value: int, starts: tuple[int, ...]) -> None:
        """`charge` of one amount."""
        self.total[index] += value
        windows = self.windows
        for place, start in enumerate(starts):
            mine, sums = windows[place]
            if start > mine:
                sums = [0] * WIDTH
                windows[place] = (start, sums)
            sums[index] += value

    def copy(self) -> "Used":
        return Used([*self.total], [(start, [*sums]) for start, sums in self.windows])


class Window:
    """A limited window of an account. ``sums`` is what was used since ``start_ns``."""

    __slots__ = ("end_ns", "limits", "place", "span", "start_ns", "sums")

    def __init__(self, span: Span, limits: list[int]) -> None:
        self.span = span
        self.place = SPANS.index(span)
        self.limits = limits
        self.start_ns = self.end_ns = 0
        self.sums = [0] * WIDTH


class Account:
    """Numbers with limits. Changed by the ledger only; read by everyone."""

    __slots__ = ("bounds", "held", "id", "limits", "name", "rolls_ns", "total", "used", "wanted", "windows")

    def __init__(self, id: AccountId, limits: dict[str, int], now_ns: int) -> None:
        self.id = id
        self.name = "/".join(id[1:])
        self.used = [0] * WIDTH
        self.held = [0] * WIDTH
        self.wanted = 0  # who waits for its reservations, counted by whoever lets them wait
        self.windows: tuple[Window, ...] = ()
        self.rolls_ns = _NEVER  # when the first of its windows ends
        self.limit(limits, now_ns)

    @property
    def scope(self) -> Scope:
        return Scope(self.id[0])

    def limit(self, limits: dict[str, int], now_ns: int) -> None:
        """Other limits from now on. What was used stays; a window that it did not have begins with 0."""
        self.limits = limits
        self.total = vector(limits) or [NO_LIMIT] * WIDTH
        self.bounds = bounds_of(limits)
        old = {window.span: window for window in self.windows}
        windows = []
        for span in SPANS:
            of_span = vector(limits, span)
            if of_span is not None:
                window = old.get(span) or Window(span, of_span)
                window.limits = of_span
                windows.append(window)
        self.windows = tuple(windows)
        self.roll(now_ns)

    def roll(self, now_ns: int) -> bool:
        """Begin the windows that are now; false if none began. Time that goes back changes nothing."""
        began = False
        for window in self.windows:
            if now_ns >= window.end_ns:
                began = True
                window.start_ns, window.end_ns = window_of(window.span, now_ns)
                window.sums = [0] * WIDTH
        self.rolls_ns = min((window.end_ns for window in self.windows), default=_NEVER)
        return began

    def add(self, used: Used, sign: int = 1) -> None:
        """Count what somebody has used (with -1: no longer)."""
        for index, value in enumerate(used.total):
            self.used[index] += sign * value
        for window in self.windows:
            start, sums = used.windows[window.place]
            if start == window.start_ns:
                for index, value in enumerate(sums):
                    window.sums[index] += sign * value

    def hold(self, held: list[int], sign: int = 1) -> None:
        """The same for what somebody holds."""
        for index, value in enumerate(held):
            self.held[index] += sign * value


class Entry:
    """One run's part of the accounts in ``path``, the top first. ``chain``: the runs with a budget above it and itself,
    from the root down. ``dirty``: changed since its row was last made."""

    __slots__ = (
        "agent", "bounds", "budget", "chain", "dirty", "ended", "held", "path", "root", "run_id", "tenant", "used",
    )  # fmt: skip

    def __init__(
        self, run_id: str, root: str, tenant: str, agent: str, chain: tuple[str, ...], budget: dict[str, int]
    ) -> None:
        self.run_id = run_id
        self.root = root
        self.tenant = tenant
        self.agent = agent
        self.chain = chain
        self.budget = budget
        self.path: tuple[Account, ...] = ()
        self.bounds: dict[str, int] = {}
        self.used = Used.nothing()
        self.held = [0] * WIDTH
        self.dirty = True
        self.ended = False


# --- rows ----------------------------------------------------------------------


class EntryRow(msgspec.Struct, frozen=True, array_like=True):
    """A run that has not ended, as stored; written in the run's own transactions only."""

    run_id: str
    root: str
    tenant: str
    agent: str
    chain: tuple[str, ...]
    budget: dict[str, int]
    used: Used
    held: list[int]


class BelowRow(msgspec.Struct, frozen=True, array_like=True):
    """What ended runs have used of a run's budget; it stays until the whole ensemble has ended."""

    run_id: str
    root: str
    budget: dict[str, int]
    used: Used


class BaseRow(msgspec.Struct, frozen=True, array_like=True):
    """What ended runs have used of the node's, a tenant's or an agent's account."""

    id: tuple[str, ...]
    used: Used


def carried(entries: Iterable[EntryRow], below: Iterable[BelowRow]) -> tuple[list[EntryRow], list[BelowRow]]:
    """The rows of runs that move to another node, as they are there. What was used stays counted in the accounts above
    runs that it was used from, so it counts for the budgets of runs only, as what ended runs have used does; what is
    held is held there."""
    entries = [*entries]
    sums = {row.run_id: row.used.copy() for row in below}
    budgets = {row.run_id: (row.root, row.budget) for row in below}
    budgets |= {row.run_id: (row.root, row.budget) for row in entries if row.budget}
    for row in entries:
        for run_id in row.chain:
            if run_id in budgets:
                sums.setdefault(run_id, Used.nothing()).add(row.used)
    fresh = [msgspec.structs.replace(row, used=Used.nothing()) for row in entries]
    return fresh, [BelowRow(run_id, *budgets[run_id], used) for run_id, used in sums.items()]


_encode: Final = msgspec.msgpack.Encoder().encode


def encode_row(row: EntryRow | BelowRow | BaseRow) -> bytes:
    """As stored."""
    return _encode(row)


def _decoder(kind: Any) -> Any:
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(data: bytes) -> Any:
        try:
            row = decode(data)
        except UNREADABLE as error:
            raise StoreCorruptError(f"a row of the accounts cannot be read: {error}") from error
        vectors = [row.used.total, *(sums for _, sums in row.used.windows)]
        if kind is EntryRow:
            vectors.append(row.held)
        if len(row.used.windows) != len(SPANS) or any(
            len(each) > WIDTH or min(each, default=0) < 0 for each in vectors
        ):
            raise StoreCorruptError("a row of the accounts was not written by this release or an earlier one")
        for each in vectors:  # keys that came later
            each.extend([0] * (WIDTH - len(each)))
        return row

    return checked


#: Raise StoreCorruptError.
decode_entry: Final = _decoder(EntryRow)
decode_below: Final = _decoder(BelowRow)
decode_base: Final = _decoder(BaseRow)
