"""The group writer by itself: groups, bounds, backlog, idleness, closing."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from agentrt.errors import ClosedError, StoreError
from agentrt.stores import writer as writer_module
from agentrt.stores.writer import Given, GroupWriter


class Item(Given):
    __slots__ = ("number",)

    def __init__(self, number: int, size_bytes: int, told: list[tuple[int, StoreError | None]]) -> None:
        super().__init__(size_bytes, lambda error: told.append((number, error)))
        self.number = number


class Bench:
    """A writer whose groups wait until they may be committed."""

    def __init__(self, idle_seconds: float = 30.0) -> None:
        self.loop = asyncio.new_event_loop()
        self.groups: list[list[int]] = []
        self.told: list[tuple[int, StoreError | None]] = []
        self.taken = threading.Semaphore(0)
        self.may = threading.Semaphore(0)
        self.idle = threading.Semaphore(0)
        self.fails = False
        self.count = 0
        self.writer: GroupWriter[Item] = GroupWriter(self.loop, self.apply, self.idle.release, idle_seconds)

    def apply(self, group: list[Item]) -> None:
        self.groups.append([item.number for item in group])
        self.taken.release()
        assert self.may.acquire(timeout=60)
        if self.fails:
            raise StoreError("no")

    def give(self, *sizes_bytes: int) -> None:
        for size_bytes in sizes_bytes:
            self.writer.give(Item(self.count, size_bytes, self.told))
            self.count += 1

    def go_on(self, groups: int) -> None:
        """Lets so many groups go; after each the next one has been taken."""
        for _ in range(groups):
            self.may.release()
            assert self.taken.acquire(timeout=60)

    def close(self) -> None:
        self.may.release(1000)
        self.writer.close()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    if not bench.loop.is_closed():
        bench.close()


def test_what_comes_during_a_commit_is_the_next_group(bench: Bench) -> None:
    bench.give(1)
    assert bench.taken.acquire(timeout=60)
    bench.give(10, 20, 30)
    assert bench.writer.backlog() == (4, 61)
    bench.go_on(1)
    assert bench.groups == [[0], [1, 2, 3]]
    assert bench.writer.backlog() == (3, 60)
    bench.give(5)
    assert bench.writer.backlog() == (4, 65)
    bench.go_on(1)
    bench.close()
    assert bench.writer.backlog() == (0, 0)
    assert bench.told == [(number, None) for number in range(5)]


def test_groups_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "GROUP_BATCHES_MAX", 4)
    monkeypatch.setattr(writer_module, "GROUP_BYTES_MAX", 100)
    bench.give(1)
    assert bench.taken.acquire(timeout=60)
    bench.give(*[1] * 9, 60, 60, 1, 500, 1)
    assert bench.writer.backlog() == (15, 632)
    bench.go_on(5)
    # By number, by bytes (reached with the last one), and one that is larger than any group goes as it is.
    assert bench.groups == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11], [12, 13], [14]]
    assert bench.writer.backlog() == (1, 1)
    bench.close()
    assert bench.writer.backlog() == (0, 0)


def test_a_group_that_fails_is_refused_and_the_next_is_not(bench: Bench) -> None:
    bench.fails = True
    bench.give(1)
    assert bench.taken.acquire(timeout=60)
    bench.give(1, 1)
    bench.go_on(1)
    bench.fails = False
    bench.close()
    assert [type(error) for _, error in bench.told] == [StoreError, type(None), type(None)]
    assert bench.writer.backlog() == (0, 0)


def test_it_is_idle_when_nothing_comes() -> None:
    bench = Bench(idle_seconds=0.01)
    assert bench.idle.acquire(timeout=60) and bench.idle.acquire(timeout=60)
    for number in range(50):  # at any moment of its wait
        bench.give(1)
        assert bench.taken.acquire(timeout=60)
        bench.may.release()
        if number % 10 == 0:
            assert bench.idle.acquire(timeout=60)
    bench.close()
    assert bench.told == [(number, None) for number in range(50)]


def test_close_commits_what_was_given_and_takes_no_more(bench: Bench) -> None:
    bench.give(1)
    assert bench.taken.acquire(timeout=60)
    bench.give(*[1] * 100)
    bench.close()
    assert sum(len(group) for group in bench.groups) == 101
    with pytest.raises(ClosedError):
        bench.give(1)
    bench.writer.close()


def test_close_of_one_that_sleeps(bench: Bench) -> None:
    bench.close()
    assert bench.groups == []
