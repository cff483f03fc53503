"""An ensemble's queue: random families that may always go on, and the bounds that they keep."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrt.errors import InputError
from agentrt.flow.children import Ensemble, EnsembleLimits


class Model(RuleBasedStateMachine):
    """A scheduler that starts what it may, and runs that spawn, end, park and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.live: list[str] = []
        self.parked: list[str] = []
        self.queued: dict[str, int] = {}  # accepted and not begun, with their size
        self.held: set[str] = set()  # told not to start
        self.blocked: dict[str, tuple[str, int]] = {}  # spawns that wait: who, size
        self.refused = 0
        self.over = 0, 0  # what was queued when the limits were made less

    @initialize(queued=st.integers(1, 3), size=st.integers(4, 10), live=st.integers(0, 3))
    def begin(self, queued: int, size: int, live: int) -> None:
        self.limits = EnsembleLimits(queued, size, live)
        self.idle: set[str] = set()
        self.ensemble = Ensemble(self.limits, self.idle.__contains__)
        self.ensemble.add("root", 1)
        self.queued["root"] = 1
        self.settle()

    def settle(self) -> None:
        moves = self.ensemble.settle()
        for key in moves.placed:
            _, size = self.blocked.pop(key)
            self.accept(key, size)
        for key in moves.refused:
            run_id, size = self.blocked.pop(key)
            self.refused += 1
            if size > self.limits.queued_bytes_max:
                continue  # the limits were made less while it waited
            blocked = {who for who, _ in [*self.blocked.values(), (run_id, 0)]}
            assert all(run in blocked or run in self.idle for run in self.live)
            assert not any(run not in self.held for run in self.queued)  # nobody else could have moved
            younger = self.live[self.live.index(run_id) + 1 :] if run_id in self.live else []
            assert not [run for run in younger if run in blocked]
        self.held -= set(moves.start)
        if moves.placed or moves.refused or moves.start:
            self.settle()

    def accept(self, key: str, size: int) -> None:
        self.number += 1
        child = f"c{self.number}"
        self.ensemble.queue(key, child)
        self.queued[child] = size

    @rule(queued=st.integers(1, 3), size=st.integers(1, 10), live=st.integers(0, 3))
    def others_limits(self, queued: int, size: int, live: int) -> None:
        self.limits = EnsembleLimits(queued, size, live)
        self.ensemble.configure(self.limits)
        self.settle()
        assert all(size <= self.limits.queued_bytes_max for _, size in self.blocked.values())
        self.over = len(self.queued), sum(self.queued.values())
        if not live:
            assert not self.held

    @precondition(lambda self: self.live)
    @rule(data=st.data(), size=st.integers(1, 6), wait=st.booleans())
    def spawn(self, data: st.DataObject, size: int, wait: bool) -> None:
        run_id = data.draw(st.sampled_from(self.live), label="run")
        self.idle.discard(run_id)
        self.number += 1
        key = f"{run_id}/{self.number}"
        answer = self.ensemble.spawn(key, run_id, size, wait=wait)
        if answer:
            self.accept(key, size)
        elif answer is None:
            assert wait
            self.blocked[key] = (run_id, size)
        else:
            assert not wait or size > self.limits.queued_bytes_max
        self.settle()

    @precondition(lambda self: any(run not in self.held for run in self.queued))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from([run for run in self.queued if run not in self.held]), label="child")
        if self.ensemble.may_start(run_id):
            self.ensemble.begin(run_id)
            del self.queued[run_id]
            self.live.append(run_id)
        else:
            self.held.add(run_id)
        self.settle()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), park=st.booleans())
    def end_or_park(self, data: st.DataObject, park: bool) -> None:
        run_id = data.draw(st.sampled_from(self.live), label="run")
        self.live.remove(run_id)
        self.idle.discard(run_id)
        if park:
            self.parked.append(run_id)
        self.ensemble.leave(run_id)
        self.blocked = {key: spawn for key, spawn in self.blocked.items() if spawn[0] != run_id}
        self.settle()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def wait_for_something_else_or_not(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(self.live), label="run")
        blocked = {who for who, _ in self.blocked.values()}
        if run_id in self.idle:
            self.idle.remove(run_id)
        elif run_id not in blocked:
            self.idle.add(run_id)
        self.settle()

    @precondition(lambda self: not (self.live or self.queued or self.parked))
    @rule()
    def begin_again(self) -> None:
        assert self.ensemble.empty
        self.ensemble.add("root", 1)
        self.queued["root"] = 1

    @precondition(lambda self: self.parked)
    @rule()
    def come_back(self) -> None:
        run_id = self.parked.pop(0)
        self.ensemble.begin(run_id)
        self.live.append(run_id)
        self.settle()

    @invariant()
    def the_queue_is_bounded_and_counted(self) -> None:
        assert self.ensemble.queued == len(self.queued) <= max(self.limits.queued_max, self.over[0])
        assert (
            self.ensemble.queued_bytes == sum(self.queued.values()) <= max(self.limits.queued_bytes_max, self.over[1])
        )

    @invariant()
    def something_can_always_move(self) -> None:
        """A live run that is not blocked, a queued child that may start, or nobody but those that are parked."""
        blocked = {run_id for run_id, _ in self.blocked.values()}
        free = [run for run in self.live if run not in blocked and run not in self.idle]
        startable = [run for run in self.queued if run not in self.held]
        assert free or startable or not (self.blocked or self.held)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_if_all_live_runs_block_in_spawn_the_youngest_is_refused() -> None:
    ensemble = Ensemble(EnsembleLimits(queued_max=1, live_max=2))
    for run_id in ("old", "young"):
        ensemble.begin(run_id)
    assert ensemble.spawn("old/1", "old", 1, wait=True) is True
    ensemble.queue("old/1", "child")
    assert ensemble.may_start("child") is False  # two are live
    assert ensemble.spawn("old/2", "old", 1, wait=True) is None
    assert ensemble.settle().refused == []
    assert ensemble.spawn("young/1", "young", 1, wait=True) is None
    assert ensemble.settle().refused == ["young/1"]
    ensemble.leave("young")
    moves = ensemble.settle()
    assert moves.start == ["child"]
    ensemble.begin("child")
    assert ensemble.settle().placed == ["old/2"]


def test_live_children_take_no_place_in_the_queue() -> None:
    ensemble = Ensemble(EnsembleLimits(queued_max=1))
    ensemble.begin("root")
    for number in range(50):
        assert ensemble.spawn(f"root/{number}", "root", 1, wait=False) is True
        ensemble.queue(f"root/{number}", f"c{number}")
        assert ensemble.spawn("root/more", "root", 1, wait=False) is False
        assert ensemble.may_start(f"c{number}")
        ensemble.begin(f"c{number}")


def test_what_was_accepted_before_is_never_refused() -> None:
    ensemble = Ensemble(EnsembleLimits(queued_max=1))
    for run_id in ("a", "b", "a"):
        ensemble.add(run_id, 5)
    assert (ensemble.queued, ensemble.queued_bytes) == (2, 10)
    ensemble.begin("a")
    assert ensemble.spawn("a/1", "a", 1, wait=True) is None
    ensemble.leave("b")
    assert ensemble.settle().placed == ["a/1"]
    ensemble.give_up("a/1")
    ensemble.leave("a")
    assert ensemble.empty and ensemble.queued_bytes == 0


def test_a_queue_has_room_for_one() -> None:
    for wrong in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(InputError):
            EnsembleLimits(*wrong)
