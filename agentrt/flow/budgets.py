"""The ledger: what the node, tenants, agents and runs may use, have used, and hold. Pure.

Levels: node > tenant > agent > the budgets of a run's ancestors, its root's first > its own. The root's budget is the
ensemble's, since a run's budget bounds what it starts as well; so no run has more than what is left to its parent.

Before a step begins, what it may use at most is **reserved** in every account of its path, or in none. When it has
ended, the reservation is **settled** with what was used. As long as nothing uses more than was reserved for it, no
account ever passes a limit, in whatever order things happen. A step that nobody saw the end of keeps its reservation;
when its run ends with it, it counts as used.

Rows. A run with anything to count has an *entry row*, which changes only in transactions of that run, together with
the records (StepPrepared, StepCommitted, …) that say why. What it used goes into the *base rows* of the accounts above
it, and the *below rows* of the budgets above it, in the transaction of its end, which removes its own. So the accounts
are the sum of the rows, after any crash; `adopt` makes that sum at start, `attach` gives the entries of an ensemble
their accounts back when one of its runs comes into memory.

If the store refuses a transaction, the run is read again and its entry replaced (`reread`); an end is taken back
(`take_back`).
"""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from agentrt.flow.accounts import (
    SPANS,
    Account,
    AccountId,
    BaseRow,
    BelowRow,
    Entry,
    EntryRow,
    Used,
    agent_id,
    node_id,
    run_account_id,
    tenant_id,
)
from agentrt.flow.amounts import COUNTED, NO_LIMIT, Amounts
from agentrt.flow.decisions import Action, Control, Decision, Scope
from agentrt.flow.windows import window_of

#: Limits of an account above runs by its id; empty: it has none and is no account.
LimitsOf = Callable[[AccountId], dict[str, int]]
_NO_LIMITS: Final[dict[str, int]] = {}


class Wait(msgspec.Struct, frozen=True):
    """Reservations of others hold what is left: it may be otherwise when one of them is settled."""

    account: Account
    key: str
    limit: int
    value: int  # used and held


class Exhausted(msgspec.Struct, frozen=True):
    """The account has nothing left for this. ``until_ns``: when its window ends, 0 if it has none. ``never``: it was
    asked for more than the limit, which no window will ever have."""

    account: Account
    key: str  # with its window, as limits are written
    limit: int
    value: int  # used
    until_ns: int = 0
    never: bool = False

    @property
    def ends_run(self) -> bool:
        """A budget of a run is spent, not an account that others share."""
        return self.account.scope is Scope.RUN


class Ended(msgspec.Struct, frozen=True):
    """The rows that go with the end of a run, and whose below rows are removed (run ids)."""

    bases: tuple[BaseRow, ...]
    below: tuple[BelowRow, ...]
    gone_below: tuple[str, ...]


class _Ensemble:
    """The budgets of an ensemble while a run of it is in memory."""

    __slots__ = ("accounts", "below", "live", "loaded")

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}  # by the run whose budget it is
        self.below: dict[str, Used] = {}
        self.live: set[str] = set()  # runs that have not ended, in memory or not
        self.loaded: dict[str, Entry] = {}


class Ledger:
    """One node's ledger. Not thread-safe. ``now_ns`` is Unix time; when it goes back, windows stay where they are."""

    def __init__(self, limits_of: LimitsOf) -> None:
        self._limits_of = limits_of
        self._accounts: dict[AccountId, Account] = {}  # those above runs
        self._bases: dict[AccountId, Used] = {}  # of accounts with limits, and of all that had some when a run ended
        self._ensembles: dict[str, _Ensemble] = {}
        self._ending: dict[str, Entry] = {}
        self._away: dict[str, tuple[str, str, list[int]]] = {}  # runs out of memory that hold something
        self._now_ns = 0  # the latest that anybody has named
        self._starts: tuple[int, ...] = ()  # of the windows that are now
        self._starts_end_ns = 0
        #: Accounts with ``wanted`` where something was given back since this was last emptied.
        self.freed: dict[AccountId, Account] = {}

    # --- what there is -----------------------------------------------------------

    def accounts(self) -> list[Account]:
        """All with limits above runs."""
        return list(self._accounts.values())

    def entry(self, run_id: str, root: str) -> Entry | None:
        """The entry of a run in memory."""
        ensemble = self._ensembles.get(root)
        return None if ensemble is None else ensemble.loaded.get(run_id)

    def counts(self, tenant: str, agent: str, budgeted: bool) -> bool:
        """Whether a run has anything to count: a budget (its own or above it), or limits above runs."""
        limits_of = self._limits_of
        return budgeted or any(limits_of(id) for id in _upper(tenant, agent))

    def left(self, entry: Entry, index: int, now_ns: int) -> int:
        """What the run may still reserve of a counted key; NO_LIMIT if nothing bounds it."""
        least = NO_LIMIT
        now_ns = self._windows_now(now_ns)
        for account in entry.path:
            if now_ns >= account.rolls_ns:
                account.roll(now_ns)
            if account.total[index] != NO_LIMIT:
                least = min(least, account.total[index] - account.used[index] - account.held[index])
            for window in account.windows:
                if window.limits[index] != NO_LIMIT:
                    least = min(least, window.limits[index] - window.sums[index] - account.held[index])
        return max(0, least)

    def _windows_now(self, now_ns: int) -> int:
        """``now_ns``, or the latest that was named before."""
        if now_ns < self._now_ns:
            now_ns = self._now_ns
        else:
            self._now_ns = now_ns
        if now_ns >= self._starts_end_ns:
            found = [window_of(span, now_ns) for span in SPANS]
            self._starts = tuple(start for start, _ in found)
            self._starts_end_ns = min(end for _, end in found)
        return now_ns

    # --- reserve, settle, release ---------------------------------------------------

    def reserve(self, entry: Entry, amounts: Amounts, now_ns: int) -> Wait | Exhausted | None:
        """Hold the amounts in all accounts of the run: None. Otherwise nothing is held, and the answer says why: an
        exhausted budget of a run first, then what takes longest to change."""
        if now_ns >= self._starts_end_ns or now_ns < self._now_ns:
            now_ns = self._windows_now(now_ns)
        path = entry.path
        if len(amounts) == 1:  # as nearly all are: this is in the way of every step
            index, value = amounts[0]
            for account in path:
                if now_ns >= account.rolls_ns and account.roll(now_ns):
                    self._free(account)
                wanted = account.held[index] + value
                if account.used[index] + wanted > account.total[index]:
                    return self._why_not(entry, amounts, now_ns)
                for window in account.windows:
                    if window.sums[index] + wanted > window.limits[index]:
                        return self._why_not(entry, amounts, now_ns)
            for account in path:
                account.held[index] += value
            entry.held[index] += value
            entry.dirty = True
            return None
        for account in path:
            if now_ns >= account.rolls_ns and account.roll(now_ns):
                self._free(account)
            total, used, held = account.total, account.used, account.held
            for index, value in amounts:
                if used[index] + held[index] + value > total[index]:
                    return self._why_not(entry, amounts, now_ns)
            for window in account.windows:
                limits, sums = window.limits, window.sums
                for index, value in amounts:
                    if sums[index] + held[index] + value > limits[index]:
                        return self._why_not(entry, amounts, now_ns)
        for account in path:
            held = account.held
            for index, value in amounts:
                held[index] += value
        held = entry.held
        for index, value in amounts:
            held[index] += value
        entry.dirty = True
        return None

    def _why_not(self, entry: Entry, amounts: Amounts, now_ns: int) -> Wait | Exhausted:
        found: list[Wait | Exhausted] = []
        for account in entry.path:
            if now_ns >= account.rolls_ns and account.roll(now_ns):
                self._free(account)
            for index, value in amounts:
                found += _refusals(account, COUNTED[index], index, value, account.total[index], account.used[index], 0)
                for window in account.windows:
                    key = f"{COUNTED[index]}/{window.span.value}"
                    found += _refusals(
                        account, key, index, value, window.limits[index], window.sums[index], window.end_ns
                    )
        return max(reversed(found), key=_weight)  # of equals the lowest: the run's own

    def settle(self, entry: Entry, held: Amounts, used: Amounts, now_ns: int) -> list[Exhausted]:
        """Give the reservation back and count what was used. Returns the limits that are passed by it: none, unless
        more was used than was held."""
        if used == held and len(held) == 1:
            self._use(entry, *held[0], now_ns)
            return []
        self.release(entry, held)
        return self.charge(entry, used, now_ns) if used else []

    def _use(self, entry: Entry, index: int, value: int, now_ns: int) -> None:
        """Exactly what was held is used, in one pass: no limit can be passed by that."""
        now_ns = self._windows_now(now_ns)
        holds = entry.held
        holds[index] -= value
        if holds[index] < 0:
            raise AssertionError(f"run {entry.run_id} uses more {COUNTED[index]} than it holds")
        for account in entry.path:
            if now_ns >= account.rolls_ns:
                account.roll(now_ns)
            account.held[index] -= value
            account.used[index] += value
            for window in account.windows:
                window.sums[index] += value
            if account.wanted:  # who waits for what is reserved may learn that it is spent
                self._free(account)
        entry.used.charge_one(index, value, self._starts)
        entry.dirty = True

    def charge(self, entry: Entry, used: Amounts, now_ns: int) -> list[Exhausted]:
        """Count what was used without a reservation; as `settle`."""
        passed: list[Exhausted] = []
        now_ns = self._windows_now(now_ns)
        for account in entry.path:
            if now_ns >= account.rolls_ns and account.roll(now_ns):
                self._free(account)
            for index, value in used:
                account.used[index] += value
                if account.used[index] > account.total[index]:
                    passed.append(Exhausted(account, COUNTED[index], account.total[index], account.used[index]))
            for window in account.windows:
                for index, value in used:
                    window.sums[index] += value
                    if window.sums[index] > window.limits[index]:
                        key = f"{COUNTED[index]}/{window.span.value}"
                        passed.append(Exhausted(account, key, window.limits[index], window.sums[index], window.end_ns))
        entry.used.charge(used, self._starts)
        entry.dirty = True
        return passed

    def release(self, entry: Entry, held: Amounts) -> None:
        """Give a reservation back: its step certainly had no effect."""
        if not held:
            return
        for account in entry.path:
            holds = account.held
            for index, value in held:
                holds[index] -= value
            if account.wanted:
                self._free(account)
        holds = entry.held
        for index, value in held:
            holds[index] -= value
            if holds[index] < 0:
                raise AssertionError(f"run {entry.run_id} gives back more {COUNTED[index]} than it holds")
        entry.dirty = True

    def _free(self, account: Account) -> None:
        if account.wanted:
            self.freed[account.id] = account

    # --- runs come and go --------------------------------------------------------------

    def open(
        self,
        run_id: str,
        tenant: str,
        agent: str,
        budget: dict[str, int],
        parent: Entry | None,
        root: str,
        now_ns: int,
    ) -> Entry:
        """A new run: it is accepted with the entry's row. ``parent``: of a child, if it has one (an entry)."""
        chain = parent.chain if parent is not None else ()
        if budget:
            chain = (*chain, run_id)
        entry = Entry(run_id, root, tenant, agent, chain, budget)
        ensemble = self._ensembles.setdefault(root, _Ensemble())
        if budget and run_id not in ensemble.accounts:
            ensemble.accounts[run_id] = Account(run_account_id(run_id), budget, now_ns)
        self._join(ensemble, entry, now_ns)
        return entry

    def _join(self, ensemble: _Ensemble, entry: Entry, now_ns: int) -> None:
        self._away.pop(entry.run_id, None)
        ensemble.live.add(entry.run_id)
        ensemble.loaded[entry.run_id] = entry
        now_ns = self._windows_now(now_ns)
        upper = [self._account(id, now_ns) for id in _upper(entry.tenant, entry.agent)]
        budgets = [ensemble.accounts[run_id] for run_id in entry.chain if run_id in ensemble.accounts]
        entry.path = (*(account for account in upper if account is not None), *budgets)
        entry.bounds = {}
        for account in entry.path:
            for key, bound in account.bounds.items():
                entry.bounds[key] = min(bound, entry.bounds.get(key, bound))

    def _account(self, id: AccountId, now_ns: int) -> Account | None:
        account = self._accounts.get(id)
        if account is None:
            limits = self._limits_of(id)
            if not limits:
                return None
            account = self._accounts[id] = Account(id, limits, now_ns)
            if (base := self._bases.get(id)) is not None:
                account.add(base)
            for tenant, agent, held in self._away.values():
                if id in _upper(tenant, agent):
                    account.hold(held)
        return account

    def row(self, entry: Entry) -> EntryRow:
        """The entry's row as it is now; ``dirty`` is cleared, for it goes with the run's next transaction."""
        entry.dirty = False
        return EntryRow(
            entry.run_id, entry.root, entry.tenant, entry.agent, entry.chain, entry.budget, entry.used, entry.held
        )

    def end(self, entry: Entry, now_ns: int) -> Ended:
        """The run ends; what it still holds counts as used. The rows go with its RunEnded and remove its entry row;
        `ended` or `take_back` follows."""
        holds = tuple((index, value) for index, value in enumerate(entry.held) if value)
        if holds:
            self.settle(entry, holds, holds, now_ns)
        self._ending[entry.run_id] = entry
        ensemble = self._ensembles[entry.root]
        ensemble.live.discard(entry.run_id)
        return self._move(entry, 1)

    def _move(self, entry: Entry, sign: int) -> Ended:
        ensemble = self._ensembles[entry.root]
        bases = []
        for id in _upper(entry.tenant, entry.agent):
            if id in self._accounts or id in self._bases:
                base = self._bases.setdefault(id, Used.nothing())
                _shift(base, entry.used, sign)
                bases.append(BaseRow(id, base.copy()))
        below = []
        for run_id in entry.chain:
            if run_id in ensemble.accounts:
                used = ensemble.below.setdefault(run_id, Used.nothing())
                _shift(used, entry.used, sign)
                limits = ensemble.accounts[run_id].limits
                below.append(BelowRow(run_id, entry.root, limits, used.copy()))
        if not ensemble.live:
            return Ended(tuple(bases), (), tuple(ensemble.below))
        return Ended(tuple(bases), tuple(below), ())

    def ended(self, run_id: str) -> None:
        """The end is durable."""
        entry = self._ending.pop(run_id, None)
        if entry is not None:
            entry.ended = True
            self._leave(entry)

    def take_back(self, run_id: str) -> Ended | None:
        """The store refused the end: the accounts are what they were, and the rows say so (they belong to no run).
        `reread` or `leave` follows. None: no end is under way."""
        entry = self._ending.pop(run_id, None)
        if entry is None:
            return None
        self._ensembles[entry.root].live.add(run_id)
        return self._move(entry, -1)

    def leave(self, entry: Entry) -> None:
        """The run goes out of memory and has not ended: its part of the accounts above runs stays."""
        if any(entry.held):
            self._away[entry.run_id] = (entry.tenant, entry.agent, entry.held)
        self._leave(entry)

    def _leave(self, entry: Entry) -> None:
        ensemble = self._ensembles[entry.root]
        del ensemble.loaded[entry.run_id]
        if not ensemble.loaded:
            del self._ensembles[entry.root]

    def never_was(self, entry: Entry, *, exists: bool = False) -> None:
        """The store refused the acceptance of the run: nothing of it stays. ``exists``: it was accepted before, and is
        where it was."""
        self._ending.pop(entry.run_id, None)
        for account in entry.path:
            account.add(entry.used, -1)
            account.hold(entry.held, -1)
            self._free(account)
        ensemble = self._ensembles[entry.root]
        if not exists:
            ensemble.live.discard(entry.run_id)
            ensemble.accounts.pop(entry.run_id, None)
        self._leave(entry)

    # --- from the store -------------------------------------------------------------------

    def adopt(self, bases: Iterable[BaseRow], entries: Iterable[EntryRow], now_ns: int) -> None:
        """At start, before anything is reserved: the sum of the rows, in the accounts above runs."""
        now_ns = self._windows_now(now_ns)
        for base in bases:
            self._bases[base.id] = base.used
        for id in self._bases:
            self._account(id, now_ns)
        for row in entries:
            for id in _upper(row.tenant, row.agent):
                account = self._account(id, now_ns)
                if account is not None:
                    account.add(row.used)
                    account.hold(row.held)
            if any(row.held):
                self._away[row.run_id] = (row.tenant, row.agent, row.held)

    def attached(self, root: str) -> bool:
        """Whether runs of the ensemble are in memory, so that its rows need not be read."""
        return root in self._ensembles

    def attach(
        self, run_id: str, root: str, entries: Iterable[EntryRow], below: Iterable[BelowRow], now_ns: int
    ) -> Entry | None:
        """A run came back into memory; the rows are all those of its ensemble, and are not looked at if others of it
        are there already, since they may be older. None: the run has nothing to count."""
        now_ns = self._windows_now(now_ns)
        rows = {row.run_id: row for row in entries}
        ensemble = self._ensembles.get(root)
        if ensemble is None:
            ensemble = _Ensemble()
            for passed in below:
                ensemble.below[passed.run_id] = passed.used.copy()
                account = Account(run_account_id(passed.run_id), passed.budget, now_ns)
                account.add(passed.used)
                ensemble.accounts[passed.run_id] = account
            for row in rows.values():
                ensemble.live.add(row.run_id)
                if row.budget and row.run_id not in ensemble.accounts:
                    ensemble.accounts[row.run_id] = Account(run_account_id(row.run_id), row.budget, now_ns)
            for row in rows.values():
                for ancestor in row.chain:
                    if (budget := ensemble.accounts.get(ancestor)) is not None:
                        budget.add(row.used)
                        budget.hold(row.held)
        found = rows.get(run_id)
        if found is None:
            return None
        self._ensembles[root] = ensemble
        if any(found.held) and run_id not in self._away:  # it has come from another node, with what it holds
            for id in _upper(found.tenant, found.agent):
                if (upper := self._account(id, now_ns)) is not None:
                    upper.hold(found.held)
        entry = Entry(run_id, root, found.tenant, found.agent, found.chain, found.budget)
        entry.used, entry.held, entry.dirty = found.used.copy(), [*found.held], False
        self._join(ensemble, entry, now_ns)
        return entry

    def reread(self, entry: Entry, row: EntryRow) -> None:
        """The store refused something of the run: its entry is what its row says again."""
        for account in entry.path:
            account.add(entry.used, -1)
            account.hold(entry.held, -1)
            account.add(row.used)
            account.hold(row.held)
            self._free(account)
        entry.used, entry.held, entry.dirty = row.used.copy(), [*row.held], False

    # --- other limits ----------------------------------------------------------------------

    def limits_changed(self, now_ns: int) -> list[Entry]:
        """``limits_of`` answers otherwise from now on. What was used stays. An account that had no limits begins with
        what is known: what ended runs used while it had some, and the runs in memory. Returns their entries."""
        now_ns = self._windows_now(now_ns)
        for id, account in [*self._accounts.items()]:
            account.limit(self._limits_of(id), now_ns)
            self._free(account)
        entries = [entry for ensemble in self._ensembles.values() for entry in ensemble.loaded.values()]
        for entry in entries:
            before = set(entry.path)
            self._join(self._ensembles[entry.root], entry, now_ns)
            for account in entry.path:
                if account not in before:
                    account.hold(entry.held)
                    account.add(entry.used)
        return entries


def _upper(tenant: str, agent: str) -> tuple[AccountId, ...]:
    return node_id(), tenant_id(tenant), agent_id(tenant, agent)


def _shift(to: Used, by: Used, sign: int) -> None:
    if sign > 0:
        to.add(by)
    else:
        to.take(by)


def _refusals(
    account: Account, key: str, index: int, value: int, limit: int, used: int, until_ns: int
) -> list[Wait | Exhausted]:
    if used + value > limit:
        return [Exhausted(account, key, limit, used, until_ns, value > limit)]
    if used + account.held[index] + value > limit:
        return [Wait(account, key, limit, used + account.held[index])]
    return []


def _weight(refusal: Wait | Exhausted) -> tuple[bool, bool, bool, int]:
    if isinstance(refusal, Wait):
        return False, False, False, 0
    endless = refusal.never or not refusal.until_ns
    return refusal.ends_run, endless, True, refusal.until_ns


def decision_of(refusal: Wait | Exhausted, run: str, step: str | None, now_ns: int) -> Decision:
    """The refusal as an event: the run ends, waits for the window, or for others."""
    action, until_ns = Action.WAIT, 0
    if isinstance(refusal, Exhausted):
        until_ns = refusal.until_ns
        action = Action.END if refusal.ends_run else Action.REFUSE if refusal.never else Action.PARK
    return Decision(
        at_ns=now_ns,
        control=Control.BUDGET,
        action=action,
        scope=refusal.account.scope,
        name=refusal.account.name,
        limit=refusal.key,
        value=refusal.value,
        bound=refusal.limit,
        run=run,
        step=step,
        until_ns=until_ns,
    )
