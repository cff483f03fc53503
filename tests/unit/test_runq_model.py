"""The run queue of the C core against a naive model in Python.

``csrc/runq.c`` is compiled into a shared library of its own and driven through cffi from the declarations in
its header, so the test needs neither the extension module nor a second copy of the structures. The model
follows ``docs/decisions/0001-run-queue.md`` and shares no code with the C model beside the queue.
"""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cffi
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

CSRC = Path(__file__).resolve().parents[2] / "csrc"
TIERS = 4
TENANTS = 4
TASKS = 16
EFULL = -3

RELAXED = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def declarations() -> str:
    """The header as cffi reads it: no comments, no preprocessor, no inline functions."""
    text = (CSRC / "runq.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    text = re.sub(r"static inline .*?\n}\n", "", text, flags=re.S)
    return re.sub(r"^#(?!define ART_TIERS).*$", "", text, flags=re.M)


@dataclass
class Library:
    ffi: Any
    lib: Any


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """``runq.c`` alone, built with the compiler that builds the project."""
    target = tmp_path_factory.mktemp("runq") / "librunq.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, str(CSRC / "runq.c"), "-o", str(target)], check=True)
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    return Library(ffi, ffi.dlopen(str(target)))


class Queue:
    """The C queue with its tasks; tasks are indices, nothing is None."""

    def __init__(self, library: Library, tasks: int = TASKS, **config: Any) -> None:
        self.ffi, self.lib = library.ffi, library.lib
        self.config = self.ffi.new("art_runq_config *")
        self.lib.art_runq_config_default(self.config)
        self.config.max_tenants = 16
        for name, value in config.items():
            setattr(self.config, name, value)
        out = self.ffi.new("art_runq **")
        assert self.lib.art_runq_create(self.config, out) == 0
        self.q = out[0]
        self.tasks = self.ffi.new("art_task[]", tasks)

    def close(self) -> None:
        self.lib.art_runq_destroy(self.q)

    def index(self, task: Any) -> int | None:
        return None if task == self.ffi.NULL else int(task - self.tasks)

    def place(self, task: int, tenant: int, tier: int) -> None:
        record = self.tasks[task]
        record.tenant, record.tier, record.base_tier, record.promoted = tenant, tier, tier, False

    def push(self, task: int, now: int) -> None:
        self.lib.art_runq_push(self.q, self.tasks + task, now)

    def pop(self, now: int) -> int | None:
        return self.index(self.lib.art_runq_pop(self.q, now))

    def take(self, now: int) -> int:
        task = self.pop(now)
        assert task is not None
        return task

    def preempt(self, task: int, now: int) -> int | None:
        return self.index(self.lib.art_runq_preempt(self.q, self.tasks + task, now))

    def yield_(self, task: int, now: int) -> int | None:
        return self.index(self.lib.art_runq_yield(self.q, self.tasks + task, now))

    def charge(self, task: int, slot_ns: int, now: int) -> None:
        self.lib.art_runq_charge(self.q, self.tasks + task, slot_ns, now)

    def cancel(self, task: int) -> bool:
        return bool(self.lib.art_runq_cancel(self.q, self.tasks + task))

    def unpromote(self, task: int) -> None:
        record = self.tasks[task]
        if record.promoted:
            record.tier, record.promoted = record.aged_from, False

    def statistics(self) -> Any:
        out = self.ffi.new("art_runq_stats *")
        self.lib.art_runq_statistics(self.q, out)
        return out

    def promotions(self, tier: int) -> int:
        stats = self.statistics()
        return int(stats.promotions_count[tier] + stats.promotions_wait[tier])


# ---------------------------------------------------------------- the model


@dataclass
class Task:
    tenant: int = 0
    tier: int = 0
    promoted: bool = False
    aged_from: int = 0
    promoted_us: int = 0
    enqueued: int = 0
    queued: bool = False


@dataclass
class Account:
    """One tenant in one tier."""

    fifo: list[int] = field(default_factory=list)
    deficit: int = 0
    in_turn: bool = False


class Model:
    """Everything in lists, every rule as the decision page words it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.tasks = [Task() for _ in range(TASKS)]
        self.weights = [1] * TENANTS
        self.accounts = [[Account() for _ in range(TENANTS)] for _ in range(TIERS)]
        self.ring: list[list[int]] = [[] for _ in range(TIERS)]
        self.arrivals: list[list[int]] = [[] for _ in range(TIERS)]
        self.passed = [0] * TIERS
        self.passed_ns = [0] * TIERS  # slot time of those
        self.picks = 0
        self.promoted_at: list[int | None] = [None] * TIERS
        self.promotions = [0] * TIERS
        self.urgent: list[tuple[int, int]] = []  # tier-0 slot time, (start, end)

    def link(self, task: int, *, interrupted: bool = False) -> None:
        record = self.tasks[task]
        account = self.accounts[record.tier][record.tenant]
        if not account.fifo:
            if not interrupted:  # debt is kept, credit is not
                account.in_turn, account.deficit = False, min(account.deficit, 0)
            self.ring[record.tier].insert(0 if interrupted else len(self.ring[record.tier]), record.tenant)
        account.fifo.insert(0 if interrupted else len(account.fifo), task)
        self.arrivals[record.tier].append(task)
        record.queued = True

    def unlink(self, task: int) -> None:
        record = self.tasks[task]
        account = self.accounts[record.tier][record.tenant]
        account.fifo.remove(task)
        self.arrivals[record.tier].remove(task)
        if not account.fifo:
            self.ring[record.tier].remove(record.tenant)
        record.queued = False

    def push(self, task: int, now: int, *, interrupted: bool = False) -> None:
        self.tasks[task].enqueued = now
        self.link(task, interrupted=interrupted)

    def head(self, tier: int) -> Account:
        ring = self.ring[tier]
        while True:
            account = self.accounts[tier][ring[0]]
            if not account.in_turn:
                account.in_turn = True
                account.deficit += self.config.drr_quantum_ns * self.weights[ring[0]]
            if account.deficit > 0:
                return account
            account.in_turn = False
            ring.append(ring.pop(0))

    def pick(self, tier: int) -> int:
        account = self.head(tier)
        task = account.fifo[0]
        account.deficit -= self.config.pick_charge_ns
        self.unlink(task)
        self.picks += 1
        for lower in range(tier + 1, TIERS):
            self.passed[lower] += bool(self.arrivals[lower])
        return task

    def age(self, tier: int, now: int) -> None:
        if not self.arrivals[tier]:
            return
        threshold, wait = self.config.aging_threshold, self.config.aging_wait_ns[tier]
        last = self.promoted_at[tier]
        waited = now - self.tasks[self.arrivals[tier][0]].enqueued
        by_count = threshold > 0 and self.passed[tier] >= threshold
        apart = last is None or self.picks - last >= (threshold or 50)
        if not by_count and not (wait and waited >= wait and apart):
            return
        account = self.head(tier)
        task = account.fifo[0]
        account.deficit -= self.config.drr_quantum_ns
        self.unlink(task)
        record = self.tasks[task]
        record.tier, record.promoted, record.aged_from = 1, True, tier
        record.promoted_us = 2**32 - 1
        if by_count:
            all_ns = max(self.passed_ns[tier], self.passed[tier] * self.config.pick_charge_ns)
            record.promoted_us = max(all_ns // self.passed[tier], min(all_ns, 10**6)) // 1000 + 1
        self.link(task)
        self.passed[tier], self.passed_ns[tier], self.promoted_at[tier] = 0, 0, self.picks
        self.promotions[tier] += 1

    def pick_lower(self, tier_max: int, now: int) -> int | None:
        if not any(self.arrivals[1 : tier_max + 1]):
            return None
        self.age(2, now)
        self.age(3, now)
        return self.pick(next(tier for tier in range(1, TIERS) if self.arrivals[tier]))

    def capped(self, now: int) -> bool:
        if self.config.tier0_share_pct >= 100:
            return False
        step = self.config.tier0_window_ns // 8
        since = (now // step - 7) * step
        used = sum(max(0, end - max(start, since)) for start, end in self.urgent)
        return bool(used * 100 > self.config.tier0_share_pct * self.config.slots * (now - since))

    def pop(self, now: int) -> int | None:
        if self.arrivals[0] and not (any(self.arrivals[1:]) and self.capped(now)):
            return self.pick(0)
        return self.pick_lower(3, now)

    def preempt(self, task: int, now: int) -> int | None:
        tier = self.tasks[task].tier
        if tier == 0:
            return None
        urgent = bool(self.arrivals[0]) and not self.capped(now)
        got = self.pick(0) if urgent else self.pick_lower(tier - 1, now)
        if got is not None:
            self.push(task, now, interrupted=True)
        return got

    def yield_(self, task: int, now: int) -> int | None:
        if self.tasks[task].tier == 0:
            lower = self.pick_lower(3, now) if self.capped(now) else None
            self.push(task, now)
            return self.pick(0) if lower is None else lower
        if self.arrivals[0] and not self.capped(now):
            got = self.pick(0)
            self.push(task, now)
            return got
        self.push(task, now)
        return self.pick_lower(3, now)

    def charge(self, task: int, slot_ns: int, now: int) -> None:
        record = self.tasks[task]
        self.accounts[record.tier][record.tenant].deficit -= slot_ns
        for lower in range(record.tier + 1, TIERS):
            self.passed_ns[lower] += slot_ns * bool(self.arrivals[lower])
        if record.tier == 0:
            self.urgent.append((max(0, now - slot_ns), now))

    def cancel(self, task: int) -> bool:
        queued = self.tasks[task].queued
        if queued:
            self.unlink(task)
        return queued


# ---------------------------------------------------------------- machine

configs = st.fixed_dictionaries(
    {
        "aging_threshold": st.sampled_from([0, 1, 2, 3, 5, 50]),
        "aging_wait_ns": st.tuples(st.just(0), st.just(0), st.sampled_from([0, 1, 300]), st.sampled_from([0, 1, 900])),
        "tier0_share_pct": st.sampled_from([0, 10, 50, 80, 100]),
        "tier0_window_ns": st.integers(8, 2000),
        "slots": st.integers(1, 3),
        "drr_quantum_ns": st.integers(1, 50),
        "pick_charge_ns": st.integers(0, 2),
    }
)
indices = st.integers(0, TASKS - 1)
tiers = st.integers(0, TIERS - 1)
tenants = st.integers(0, TENANTS - 1)


class RunQueueMachine(RuleBasedStateMachine):
    """Every operation on both; same answers, same visible state, law 2's distance between promotions."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library
        self.queue: Queue | None = None
        self.now = 0

    @initialize(config=configs, weights=st.lists(st.integers(1, 3), min_size=TENANTS, max_size=TENANTS))
    def begin(self, config: dict[str, Any], weights: list[int]) -> None:
        self.queue = Queue(self.library, **config)
        self.model = Model(self.queue.config)
        for tenant, weight in enumerate(weights):
            self.set_weight(tenant, weight)

    @property
    def c(self) -> Queue:
        assert self.queue is not None
        return self.queue

    def owned(self) -> list[int]:
        return [index for index, task in enumerate(self.model.tasks) if not task.queued]

    def any_owned(self) -> bool:
        return self.queue is not None and bool(self.owned())

    def same(self, got: int | None, want: int | None) -> None:
        assert got == want
        if want is not None:
            record, expected = self.c.tasks[want], self.model.tasks[want]
            assert (record.tenant, record.tier) == (expected.tenant, expected.tier)
            assert (record.promoted, record.enqueued_ns) == (expected.promoted, expected.enqueued)
            assert not record.promoted or record.promoted_us == expected.promoted_us

    @precondition(any_owned)
    @rule(choice=indices, tenant=tenants, tier=tiers)
    def push(self, choice: int, tenant: int, tier: int) -> None:
        task = self.owned()[choice % len(self.owned())]
        self.c.place(task, tenant, tier)
        record = self.model.tasks[task]
        record.tenant, record.tier, record.promoted = tenant, tier, False
        self.c.push(task, self.now)
        self.model.push(task, self.now)

    @rule()
    def pop(self) -> None:
        self.same(self.c.pop(self.now), self.model.pop(self.now))

    @precondition(any_owned)
    @rule(choice=indices)
    def preempt(self, choice: int) -> None:
        task = self.owned()[choice % len(self.owned())]
        self.same(self.c.preempt(task, self.now), self.model.preempt(task, self.now))

    @precondition(any_owned)
    @rule(choice=indices, demote=st.booleans())
    def yield_(self, choice: int, demote: bool) -> None:
        task = self.owned()[choice % len(self.owned())]
        record = self.model.tasks[task]
        self.c.unpromote(task)
        if record.promoted:
            record.tier, record.promoted = record.aged_from, False
        if demote:
            record.tier = min(record.tier + 1, TIERS - 1)
            self.c.tasks[task].tier = record.tier
        self.same(self.c.yield_(task, self.now), self.model.yield_(task, self.now))

    @precondition(any_owned)
    @rule(choice=indices, slot_ns=st.integers(0, 500))
    def charge(self, choice: int, slot_ns: int) -> None:
        task = self.owned()[choice % len(self.owned())]
        self.c.charge(task, slot_ns, self.now)
        self.model.charge(task, slot_ns, self.now)

    @rule(task=indices)
    def cancel(self, task: int) -> None:
        assert self.c.cancel(task) == self.model.cancel(task)

    @rule(tenant=tenants, weight=st.integers(1, 3))
    def set_weight(self, tenant: int, weight: int) -> None:
        assert self.c.lib.art_runq_tenant_set(self.c.q, tenant, weight) == 0
        self.model.weights[tenant] = weight

    @rule(by_ns=st.one_of(st.integers(0, 50), st.integers(0, 3000)))
    def time_passes(self, by_ns: int) -> None:
        self.now += by_ns

    @invariant()
    def visible_state(self) -> None:
        if self.queue is None:
            return
        queued = [len(arrivals) for arrivals in self.model.arrivals]
        stats = self.c.statistics()
        assert list(stats.queued) == queued
        assert self.c.lib.art_runq_tiers(self.c.q) == sum(bool(n) << tier for tier, n in enumerate(queued))
        assert self.c.lib.art_runq_tier0_capped(self.c.q, self.now) == self.model.capped(self.now)
        assert [self.c.promotions(tier) for tier in range(TIERS)] == self.model.promotions
        for tier, arrivals in enumerate(self.model.arrivals):
            oldest = self.model.tasks[arrivals[0]].enqueued if arrivals else 0
            assert self.c.lib.art_runq_oldest_ns(self.c.q, tier) == oldest

    def teardown(self) -> None:
        if self.queue is not None:
            self.queue.lib.art__runq_verify(self.queue.q)
            self.queue.close()


def test_runq_equals_model(library: Library) -> None:
    class Machine(RunQueueMachine):
        def __init__(self) -> None:
            super().__init__(library)

    run_state_machine_as_test(Machine, settings=settings(RELAXED, max_examples=120, stateful_step_count=60))


# ---------------------------------------------------------------- faults


@RELAXED
@given(
    threshold=st.integers(1, 60),
    weights=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    per_tenant=st.integers(1, 4),
    hot=st.integers(1, 6),
    share_pct=st.integers(10, 80),
    urgent=st.booleans(),
)
def test_fault_S30_bound_of_waiting(
    library: Library,
    threshold: int,
    weights: list[int],
    per_tenant: int,
    hot: int,
    share_pct: int,
    urgent: bool,
) -> None:
    """Tiers 0 and 1 never run dry, still every task of tier 3 runs within the bound, in picks and in time.

    Slices last one quantum, one worker, a fake clock. Formula: docs/decisions/0001-run-queue.md, "The bound".
    """
    slice_ns, window_ns, tenant_count = 1_000_000, 100_000_000, len(weights)
    low = tenant_count * per_tenant
    queue = Queue(
        library,
        low + hot + 2,
        aging_threshold=threshold,
        aging_wait_ns=(0, 0, 0, 0),
        tier0_share_pct=share_pct,
        tier0_window_ns=window_ns,
        drr_quantum_ns=slice_ns,
        pick_charge_ns=0,
    )
    for tenant, weight in enumerate(weights):
        assert queue.lib.art_runq_tenant_set(queue.q, tenant, weight) == 0
    for task in range(low):
        queue.place(task, task % tenant_count, 3)
        queue.push(task, 0)
    for task in range(low, low + hot):
        queue.place(task, task % tenant_count, 1)
        queue.push(task, 0)
    if urgent:
        for task in range(low + hot, low + hot + 2):
            queue.place(task, 0, 0)
            queue.push(task, 0)

    worst_picks = 0
    for weight in weights:
        others = sum(weights) - weight
        departures = per_tenant + ((per_tenant - 1) // weight + 2) * others
        ahead = hot + per_tenant
        in_tier1 = ahead + (ahead // weight + 3) * (others + tenant_count)
        worst_picks = max(worst_picks, (threshold + 1) * departures + in_tier1)
    free = 1 - share_pct / 100 - 8 * slice_ns / (7 * window_ns) if urgent else 1.0
    worst_ns = (worst_picks * slice_ns + window_ns + slice_ns) / free

    now, lower_picks = 0, 0
    since = dict.fromkeys(range(low), (0, 0))
    ran: set[int] = set()
    while len(ran) < low or lower_picks < 2 * worst_picks:
        task = queue.take(now)
        if task < low:
            picks_at, pushed_at = since[task]
            assert lower_picks - picks_at <= worst_picks
            assert now - pushed_at <= worst_ns
        now += slice_ns
        queue.charge(task, slice_ns, now)
        lower_picks += task < low + hot
        assert lower_picks <= 3 * worst_picks, "somebody starves"
        queue.unpromote(task)
        queue.push(task, now)
        if task < low:
            since[task] = (lower_picks, now)
            ran.add(task)
    queue.close()


@RELAXED
@given(
    threshold=st.integers(0, 12),
    waits=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    steps=st.lists(st.tuples(st.integers(0, 15), tiers, tenants, st.integers(0, 30)), max_size=300),
)
def test_fault_S30_promotions_keep_their_distance(
    library: Library, threshold: int, waits: tuple[int, int], steps: list[tuple[int, int, int, int]]
) -> None:
    """Never more than one promotion per tier per ``aging_threshold`` picks, by whichever rule."""
    queue = Queue(library, aging_threshold=threshold, aging_wait_ns=(0, 0, *waits), tier0_share_pct=100)
    now, picks = 0, 0
    last: dict[int, int] = {}
    owned = list(range(TASKS))
    for burst, tier, tenant, by_ns in steps:
        now += by_ns
        for _ in range(min(burst, len(owned))):
            task = owned.pop()
            queue.place(task, tenant, tier)
            queue.push(task, now)
        before = [queue.promotions(t) for t in range(TIERS)]
        got = queue.pop(now)
        for t in (2, 3):
            fresh = queue.promotions(t) - before[t]
            assert fresh in (0, 1)
            if fresh:
                assert t not in last or picks - last[t] >= (threshold or 50)
                last[t] = picks
        if got is not None:
            picks += 1
            owned.append(got)
    queue.close()


@RELAXED
@given(tier=tiers, ops=st.lists(st.sampled_from(["push", "preempt", "yield"]), min_size=1, max_size=40))
def test_fault_S31_tier_survives_requeue(library: Library, tier: int, ops: list[str]) -> None:
    """However a task comes back, it is found in its own tier, for its own tenant."""
    queue = Queue(library)
    queue.place(0, 3, tier)
    for op in ops:
        queue.place(1, 2, 0)
        if op == "push":
            queue.push(0, 0)
        elif op == "preempt":
            queue.push(1, 0)
            assert queue.preempt(0, 0) == (1 if tier else None)
            if tier == 0:
                assert queue.cancel(1)
                queue.push(0, 0)
        else:
            assert queue.yield_(0, 0) == 0
            queue.push(0, 0)
        assert queue.lib.art_runq_tiers(queue.q) == 1 << tier
        assert queue.pop(0) == 0
        record = queue.tasks[0]
        assert (record.tier, record.base_tier, record.tenant, record.promoted) == (tier, tier, 3, False)
    queue.close()


@RELAXED
@given(
    items_max=st.integers(1, 6),
    bytes_max=st.integers(0, 300),
    tenant_items_max=st.integers(0, 4),
    tenant_bytes_max=st.integers(0, 200),
    ops=st.lists(st.tuples(st.booleans(), tenants, st.integers(0, 120)), max_size=80),
)
def test_fault_S33_bounds_count_holders(
    library: Library,
    items_max: int,
    bytes_max: int,
    tenant_items_max: int,
    tenant_bytes_max: int,
    ops: list[tuple[bool, int, int]],
) -> None:
    """Admission refuses exactly when one more holder would break a bound, whatever the tasks are doing."""
    queue = Queue(
        library,
        items_max=items_max,
        bytes_max=bytes_max,
        tenant_items_max=tenant_items_max,
        tenant_bytes_max=tenant_bytes_max,
    )
    holders: list[tuple[int, int]] = []
    refused = 0
    queue.place(0, 0, 2)
    for admit, tenant, size in ops:
        queue.push(0, 0)
        assert queue.pop(0) == 0  # requeues are not admissions
        if not admit and holders:
            queue.lib.art_runq_release(queue.q, *holders.pop(size % len(holders)))
        else:
            own = [held for owner, held in holders if owner == tenant]
            fits = (
                len(holders) < items_max
                and sum(held for _, held in holders) + size <= bytes_max
                and (not tenant_items_max or len(own) < tenant_items_max)
                and (not tenant_bytes_max or sum(own) + size <= tenant_bytes_max)
            )
            assert queue.lib.art_runq_admit(queue.q, tenant, size) == (0 if fits else EFULL)
            refused += not fits
            if fits:
                holders.append((tenant, size))
        stats = queue.statistics()
        assert (stats.admitted_items, stats.refusals) == (len(holders), refused)
        assert stats.admitted_bytes == sum(held for _, held in holders)
    queue.close()


@settings(RELAXED, max_examples=25)
@given(
    weight=st.integers(1, 5),
    threshold=st.integers(1, 10),
    slices=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch=st.integers(1, 8),
)
def test_fault_S35_aging_stays_in_the_tenants_share(
    library: Library, weight: int, threshold: int, slices: tuple[int, int], batch: int
) -> None:
    """Tenant 0 floods tier 2 with work that ages into tier 1; tenant 1 still gets its part, w / (w + 1)."""
    queue = Queue(library, batch + 4, aging_threshold=threshold, aging_wait_ns=(0, 0, 1, 1), drr_quantum_ns=1_000_000)
    assert queue.lib.art_runq_tenant_set(queue.q, 1, weight) == 0
    for task, (tenant, tier) in enumerate([(0, 1), (0, 1), (1, 1), (1, 1)] + [(0, 2)] * batch):
        queue.place(task, tenant, tier)
        queue.push(task, 0)
    used = [0, 0]
    for now in range(6000):
        task = queue.take(now)
        tenant = queue.tasks[task].tenant
        slot_ns = slices[tenant] * 500_000
        used[tenant] += slot_ns
        queue.charge(task, slot_ns, now)
        queue.unpromote(task)
        queue.push(task, now)
    assert queue.promotions(2) > 0
    assert used[1] / sum(used) == pytest.approx(weight / (weight + 1), abs=0.02)
    queue.close()
