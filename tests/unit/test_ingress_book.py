"""What becomes of the events of a bus: the book against a naive model, and the promises one by one."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrt.ingress.book import Book, Held
from agentrt.ingress.port import Delivery


def event(partition: str, offset: int, payload: bytes = b"1") -> Delivery:
    return Delivery("bus", partition, offset, payload)


def take_all(book: Book, now_ns: int = 0) -> list[Held]:
    found = []
    while (held := book.take(now_ns)) is not None:
        found.append(held)
    return found


def test_the_most_urgent_tier_is_next_then_tenants_take_turns_then_the_oldest() -> None:
    book = Book(100, 10**6)
    for offset, (tier, tenant) in enumerate([(2, "a"), (2, "a"), (2, "a"), (2, "b"), (0, "b"), (2, "b"), (0, "a")]):
        book.deliver(event("p", offset), tier, tenant)
    assert [held.delivery.offset for held in take_all(book)] == [4, 6, 0, 3, 1, 5, 2]


def test_a_refused_tier_keeps_no_higher_one_and_no_other_tenant_waiting() -> None:
    book = Book(100, 10**6)
    for offset in range(3):
        book.deliver(event("p", offset), 2, "a")
    (first, *rest) = take_all(book)
    for held in (first, *rest):
        book.refuse(held, 0, lambda refusals: 1_000)
    assert book.take(0) is None and book.next_ns() == 1_000
    book.deliver(event("p", 3), 0, "a")
    book.deliver(event("p", 4), 2, "b")
    assert [held.delivery.offset for held in take_all(book)] == [3, 4]
    again = take_all(book, 1_000)
    assert [held.delivery.offset for held in again] == [0]  # half of what was under way
    book.settle(again[0])
    assert [held.delivery.offset for held in take_all(book, 1_000)] == [1, 2]


def test_refusals_in_a_row_are_counted_once_for_all_that_were_under_way() -> None:
    book = Book(100, 10**6)
    for offset in range(10):
        book.deliver(event("p", offset), 2, "a")
    counted: list[int] = []

    def pause_ns(refusals: int) -> int:
        counted.append(refusals)
        return 10

    now_ns = 0
    for _ in range(3):
        for held in take_all(book, now_ns):
            book.refuse(held, now_ns, pause_ns)
        now_ns += 10
    assert counted == [0, 1, 2]
    (one,) = take_all(book, now_ns)
    book.settle(one)
    for held in take_all(book, now_ns):
        book.refuse(held, now_ns, pause_ns)
    assert counted == [0, 1, 2, 0]


def test_each_tier_has_its_own_bound_of_what_is_under_way() -> None:
    book = Book(100, 10**6, sent_max=2)
    for offset in range(4):
        book.deliver(event("p", offset), 2, "a")
    assert len(take_all(book)) == 2 and book.next_ns() is None
    book.deliver(event("p", 9), 0, "a")
    assert [held.delivery.offset for held in take_all(book)] == [9]


def test_fault_d20_the_position_never_passes_what_is_not_settled() -> None:
    """Offsets with gaps, as compacted topics have them, settled in another order."""
    book = Book(100, 10**6)
    assert book.position("p") is None
    held = [book.deliver(event("p", offset), 1, "a") for offset in (3, 4, 7, 9)]
    take_all(book)
    positions = []
    for place in (1, 3, 0, 2):
        found = held[place]
        assert found is not None and book.settle(found)
        positions.append(book.position("p"))
    assert positions == [3, 3, 7, 10]


def test_fault_d20_a_partition_that_is_taken_away_is_asked_for_by_nobody() -> None:
    book = Book(100, 10**6)
    for offset in range(3):
        book.deliver(event("p", offset), 1, "a")
    under_way = book.take(0)
    assert under_way is not None
    book.revoke("p")
    assert book.take(0) is None and book.held == book.held_bytes == 0
    assert not book.settle(under_way)
    # It comes back, and with it what was under way; the old answer is not the new one's.
    book.assign(["p"])
    again = book.deliver(event("p", 0), 1, "a")
    assert again is not None and book.take(0) is again
    assert book.settle(again) and book.position("p") == 1


def test_a_partition_is_paused_at_its_share_and_resumed_at_half_of_it() -> None:
    book = Book(8, 10**6)
    book.assign(["p", "q"])
    for offset in range(4):
        book.deliver(event("p", offset), 1, "a")
    assert book.changes() == (["p"], []) and book.changes() == ([], [])
    first, second, *_ = take_all(book)
    book.settle(first)
    assert book.changes() == ([], [])
    book.settle(second)
    assert book.changes() == ([], ["p"])


def test_one_event_larger_than_the_bound_passes() -> None:
    book = Book(8, 100)
    held = book.deliver(event("p", 0, b"x" * 1_000), 1, "a")
    assert held is not None and book.changes() == (["p"], [])
    assert book.take(0) is held and book.settle(held)
    assert book.changes() == ([], ["p"])


def test_a_position_that_does_not_move_is_bounded_too() -> None:
    """One event waits for ever, and those behind it are settled: each is remembered."""
    book = Book(1_000, 10**6, behind_max=5)
    stuck = book.deliver(event("p", 0), 2, "a")
    assert stuck is not None
    for offset in range(1, 6):
        book.deliver(event("p", offset), 0, "a")
    for held in take_all(book):
        if held is stuck:
            book.refuse(held, 0, lambda refusals: 10**18)
        else:
            book.settle(held)
    assert book.changes() == (["p"], []) and book.position("p") == 0


class Model(RuleBasedStateMachine):
    """Nothing is lost, nothing is there twice, and what is told of partitions is so."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(items_max=6, bytes_max=200, sent_max=3, behind_max=7)
        self.now_ns = 0
        self.waiting: dict[tuple[str, int], tuple[int, str]] = {}  # (partition, offset) -> tier, tenant
        self.lines: dict[tuple[int, str], list[int]] = {}  # (tier, tenant) -> again_ns, sent_max
        self.sent: list[tuple[Held, int]] = []  # with the epoch of its partition
        self.delivered: dict[str, list[int]] = {}
        self.settled: dict[str, set[int]] = {}
        self.epoch: dict[str, int] = {}
        self.paused: set[str] = set()
        self.behind: dict[str, int] = {}

    @rule(
        partition=st.sampled_from("pq"), step=st.integers(-5, 2), tier=st.integers(0, 3), tenant=st.sampled_from("ab"),
        size=st.integers(0, 60),
    )  # fmt: skip
    def deliver(self, partition: str, step: int, tier: int, tenant: str, size: int) -> None:
        offsets = self.delivered.setdefault(partition, [])
        offset = max(0, (max(offsets) if offsets else 0) + step)
        known = offset in offsets
        held = self.book.deliver(event(partition, offset, b"x" * size), tier, tenant)
        settled = self.settled.setdefault(partition, set())
        if known and offset not in settled:
            assert held is None
            return
        if known and held is None:  # settled, and still remembered
            return
        assert held is not None
        if not known:
            offsets.append(offset)
        settled.discard(offset)
        self.waiting[partition, offset] = (tier, tenant)
        self.lines.setdefault((tier, tenant), [0, 3])

    @rule(partition=st.sampled_from("pq"), events=st.integers(0, 9))
    def more_is_left(self, partition: str, events: int) -> None:
        self.book.behind(partition, events)
        if partition in self.book.partitions():
            self.behind[partition] = events

    @rule(then=st.integers(0, 50))
    def time_passes(self, then: int) -> None:
        self.now_ns += then

    @rule()
    def take(self) -> None:
        held = self.book.take(self.now_ns)
        under_way = [found.tier for found, _ in self.sent]
        ready = [
            (tier, tenant)
            for tier, tenant in self.waiting.values()
            if under_way.count(tier) < 3
            and self.lines[tier, tenant][0] <= self.now_ns
            and self.under_way(tier, tenant) < self.lines[tier, tenant][1]
        ]
        if held is None:
            assert not ready
            return
        place = (held.delivery.partition, held.delivery.offset)
        assert self.waiting.pop(place) == (held.tier, held.tenant)
        assert held.tier == min(tier for tier, _ in ready)
        self.sent.append((held, self.epoch.get(place[0], 0)))

    def under_way(self, tier: int, tenant: str) -> int:
        return sum((found.tier, found.tenant) == (tier, tenant) for found, _ in self.sent)

    def forget_lines(self) -> None:
        used = {*self.waiting.values(), *((found.tier, found.tenant) for found, _ in self.sent)}
        self.lines = {line: state for line, state in self.lines.items() if line in used}

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), well=st.booleans(), later=st.integers(0, 60))
    def answer(self, data: Any, well: bool, later: int) -> None:
        held, epoch = self.sent[data.draw(st.integers(0, len(self.sent) - 1))]
        line = self.lines[held.tier, held.tenant]
        sent = self.under_way(held.tier, held.tenant)
        self.sent.remove((held, epoch))
        partition, offset = held.delivery.partition, held.delivery.offset
        current = epoch == self.epoch.get(partition, 0)
        if well:
            assert self.book.settle(held) is current
            line[1] = min(3, line[1] + 1)
            if current:
                self.settled[partition].add(offset)
        else:
            assert self.book.refuse(held, self.now_ns, lambda refusals: later) is current
            if line[0] <= self.now_ns:
                line[:] = [self.now_ns + later, max(1, min(line[1], sent) // 2)]
            if current:
                self.waiting[partition, offset] = (held.tier, held.tenant)
        self.forget_lines()

    @rule(partition=st.sampled_from("pq"))
    def revoke(self, partition: str) -> None:
        self.book.revoke(partition)
        self.epoch[partition] = self.epoch.get(partition, 0) + 1
        self.waiting = {place: found for place, found in self.waiting.items() if place[0] != partition}
        self.forget_lines()
        self.delivered.pop(partition, None)
        self.settled.pop(partition, None)
        self.paused.discard(partition)
        self.behind.pop(partition, None)
        assert self.book.position(partition) is None

    @rule()
    def look_at_pauses(self) -> None:
        pause, resume = self.book.changes()
        assert not self.paused & {*pause} and {*resume} <= self.paused
        self.paused = (self.paused | {*pause}) - {*resume}
        assert set(self.book.paused()) == self.paused
        share = 6 // (len(self.book.partitions()) or 1)
        for partition in self.book.partitions():
            held = len(self.held(partition))
            if held >= share:
                assert partition in self.paused
            if not held and len(self.settled.get(partition, ())) == len(self.delivered.get(partition, ())):
                assert partition not in self.paused  # or it would wait for ever

    def held(self, partition: str) -> list[int]:
        waits = [offset for name, offset in self.waiting if name == partition]
        return waits + [
            found.delivery.offset
            for found, epoch in self.sent
            if found.delivery.partition == partition and epoch == self.epoch.get(partition, 0)
        ]

    @invariant()
    def everything_is_somewhere(self) -> None:
        for partition, offsets in self.delivered.items():
            held = self.held(partition)
            assert sorted(held) == sorted({*offsets} - self.settled.get(partition, set()))
            position = self.book.position(partition)
            assert position is not None
            assert all(offset in self.settled[partition] for offset in offsets if offset < position)
            assert self.book.under_way(partition) == sum(
                found.delivery.partition == partition and epoch == self.epoch.get(partition, 0)
                for found, epoch in self.sent
            )
        assert self.book.held == sum(len(self.held(partition)) for partition in self.delivered)
        assert self.book.lag == self.book.held + sum(self.behind.values())


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
