"""fold against a naive reading of the same journal, and the sequences that no run can have written."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt import records as r
from agentrt.errors import StoreCorruptError
from agentrt.fold import RunFold, apply, fold, head_of, sum_costs
from agentrt.ids import new_run_id
from agentrt.records import decode_record, encode_record
from agentrt.states import TERMINAL, WAIT_REASONS, RunState, StepState
from agentrt.syscalls import BY_OP

REQUEST, DIGEST = b'{"tool":"t"}', b"d" * 16


def accepted(seq: int = 1) -> r.RunAccepted:
    return r.RunAccepted(seq, seq, "acme", "agent", "v", b"{}", 2, b"s" * 16, 100, {"abi": "1"})


def prepared(seq: int, path: str = "1:1", attempt: int = 1, kind: str = "keyed") -> r.StepPrepared:
    return r.StepPrepared(
        seq, seq, path, "tool.call", kind, REQUEST, DIGEST, f"k/{path}", attempt, r.Cost(fuel=attempt)
    )


def committed(seq: int, path: str = "1:1", attempt: int = 1, ok: bool = True) -> r.StepCommitted:
    return r.StepCommitted(seq, seq, path, "tool.call", DIGEST, ok, b"1", b"e" * 16, attempt, r.Cost(2, 3, 4, 5))


def pure(seq: int, path: str = "1:1") -> r.StepCommitted:
    return r.StepCommitted(seq, seq, path, "tool.call", DIGEST, True, None, b"e" * 16, 1)


def ended(seq: int, state: str = "SUCCEEDED") -> r.RunEnded:
    return r.RunEnded(seq, seq, state, b"1", None)


# --- what a fold says --------------------------------------------------------------------


def test_a_run_from_accept_to_end() -> None:
    records = [
        accepted(),
        prepared(2),
        committed(3),
        prepared(4, "1:2"),
        r.Waiting(5, 5, "step", "1:2"),
        r.Resumed(6, 6, "1:2"),
        committed(7, "1:2"),
        pure(8, "1:3"),
        r.TierChanged(9, 9, 3, "demoted"),
        r.CancelRequested(10, 10, "user"),
        r.Upgraded(11, 11, {"engine": "2"}),
        r.Spawned(12, 12, "1:4", "run_child", True),
        r.LockBroken(13, 13, "db", 7),
        r.FrameTaken(14, 14, "f1", 50),
        r.Ending(15, 15, "CANCELLED", "user"),
        prepared(16, "1:5"),
        committed(17, "1:5"),
        ended(18, "CANCELLED"),
    ]
    state = fold(records)
    assert state.committed == ["1:1", "1:2", "1:3", "1:5"]
    assert list(state.steps) == ["1:1", "1:2", "1:3", "1:5"]
    assert [state.steps[path].pure for path in state.committed] == [False, False, True, False]
    step = state.steps["1:1"]
    assert (step.request, step.digest, step.key, step.kind) == (REQUEST, DIGEST, "k/1:1", "keyed")
    assert (step.attempt, step.ok, step.result, step.seq) == (1, True, b"1", 3)
    assert state.open == {}
    assert state.pins == {"abi": "1", "engine": "2"}
    assert state.spent == r.Cost(6, 9, 12, 15)
    assert state.children["1:4"].run_id == "run_child"
    assert (state.cancel_requested, state.tier, state.version, state.at_ns) == ("user", 3, 18, 18)
    assert state.frame == records[13] and state.broken_locks == [records[12]]
    assert state.ended == records[-1] and state.wait is None
    run_id = new_run_id()
    head = head_of(state, run_id)
    assert (head.run_id, head.version, head.state, head.tier, head.base_tier) == (run_id, 18, "CANCELLED", 3, 2)
    assert (head.accepted_ns, head.ended_ns, head.cancel_requested, head.wait_reason) == (1, 18, True, None)


def test_waiting_shows_in_the_head() -> None:
    state = fold([accepted(), r.Waiting(2, 2, "approval", "1:1")])
    head = head_of(state, new_run_id())
    assert (head.state, head.wait_reason, head.ended_ns) == ("WAITING", "approval", 0)


def test_open_steps_hold_their_reservation_until_settled() -> None:
    state = fold([accepted(), prepared(2, "1:1"), prepared(3, "1:2"), r.OutcomeUnknown(4, 4, "1:1", "host died")])
    assert list(state.open) == ["1:1", "1:2"]
    assert state.reserved == r.Cost(fuel=2)
    assert state.open["1:1"].state is StepState.OUTCOME_UNKNOWN
    apply(state, committed(5, "1:1"))
    apply(state, r.StepAborted(6, 6, "1:2", "never sent"))
    assert state.open == {} and state.reserved == r.Cost()


def test_retries_keep_the_key_and_count_attempts() -> None:
    state = fold(
        [
            accepted(),
            prepared(2),
            r.OutcomeUnknown(3, 3, "1:1", "killed"),
            prepared(4, attempt=2),
            r.StepEvicted(5, 5, "1:1", "preempted"),
            prepared(6, attempt=2),  # an eviction is no attempt
            committed(7, attempt=2),
        ]
    )
    step = state.steps["1:1"]
    assert (step.attempt, step.key, step.prepared_ns, step.reason) == (2, "k/1:1", 2, "preempted")
    assert state.committed == ["1:1"]


def test_fault_D06_of_parallel_steps_only_the_one_in_flight_is_open() -> None:
    paths = ["1:1.1", "1:1.2", "1:1.3"]
    state = fold(
        [
            accepted(),
            *[prepared(2 + n, path) for n, path in enumerate(paths)],
            committed(5, "1:1.3"),
            committed(6, "1:1.1"),
        ]
    )
    assert list(state.open) == ["1:1.2"]
    assert state.committed == ["1:1.3", "1:1.1"]  # as they came, not as they were asked for


def test_a_checkpoint_starts_over_and_keeps_open_steps() -> None:
    state = fold(
        [
            accepted(),
            prepared(2),
            committed(3),
            prepared(4, "1:2"),
            r.Checkpoint(5, 5, 2, b'{"n":1}'),
            prepared(6, "2:1"),
        ]
    )
    assert (state.segment, state.restored, state.checkpoint_seq) == (2, b'{"n":1}', 5)
    assert list(state.steps) == ["1:2", "2:1"] and state.committed == []
    apply(state, committed(7, "1:2"))  # settled in the background; not delivered to the new segment
    assert list(state.steps) == ["2:1"] and state.committed == []
    apply(state, committed(8, "2:1"))
    assert state.committed == ["2:1"]


@pytest.mark.parametrize("op", [row.op for row in BY_OP.values() if row.step and not row.prepare])
def test_steps_without_phase_one_keep_their_result(op: str) -> None:
    result = b'{"name":"l","owner":"o","held":true}' if op == "lock.foreign" else b"null"
    record = r.StepCommitted(2, 2, "1:1", op, DIGEST, True, result, b"e" * 16, 1)
    assert fold([accepted(), record]).steps["1:1"].result == result


def test_locks_elsewhere_are_those_declared_and_not_given_up() -> None:
    def said(seq: int, owner: str, held: bool) -> r.StepCommitted:
        result = msgspec.json.encode({"name": "l", "owner": owner, "held": held})
        return r.StepCommitted(seq, seq, f"1:{seq}", "lock.foreign", DIGEST, True, result, b"e" * 16, 1)

    state = fold([accepted(), said(2, "a", True), said(3, "b", True), said(4, "a", False), said(5, "c", False)])
    assert state.foreign_locks == {"b": "l"}


@pytest.mark.parametrize(
    ("op", "request_", "result"),
    [
        ("lock.foreign", None, b"null"),
        ("lock.acquire", b'{"name":"l"}', b'{"token":"x"}'),
        ("lock.acquire", b"{", b'{"token":1}'),
        ("lock.release", b"7", b"null"),
    ],
)
def test_an_answer_about_locks_that_cannot_be_read_is_refused(op: str, request_: bytes | None, result: bytes) -> None:
    records: list[r.Record] = [accepted()]
    if request_ is not None:
        records.append(r.StepPrepared(2, 2, "1:1", op, "keyed", request_, DIGEST, "key", 1))
    state = fold(records)
    before = deepcopy(state)
    seq = len(records) + 1
    with pytest.raises(StoreCorruptError):
        apply(state, r.StepCommitted(seq, seq, "1:1", op, DIGEST, True, result, b"e" * 16, 1))
    assert state == before


def test_a_failure_needs_no_phase_one_and_is_kept() -> None:
    record = r.StepCommitted(2, 2, "1:1", "tool.call", DIGEST, False, b'{"code":"x"}', b"e" * 16, 1)
    step = fold([accepted(), record]).steps["1:1"]
    assert (step.ok, step.result) == (False, b'{"code":"x"}')


def lock(seq: int, op: str, name: str, token: int | None = None) -> list[r.Record]:
    """A step about a lock of the store, asked for and answered."""
    request, result = msgspec.json.encode({"name": name}), msgspec.json.encode({"token": token})
    path = f"1:{seq}"
    return [
        r.StepPrepared(seq, seq, path, op, "keyed", request, DIGEST, path, 1),
        r.StepCommitted(seq + 1, seq + 1, path, op, DIGEST, True, result, b"e" * 16, 1),
    ]


def test_locks_are_held_from_their_answer_until_given_up_or_broken() -> None:
    state = fold(
        [
            accepted(),
            *lock(2, "lock.acquire", "a", 7),
            *lock(4, "lock.acquire", "b", 8),
            *lock(6, "lock.acquire", "c", 9),
            *lock(8, "lock.release", "b"),
        ]
    )
    assert state.locks == {"a": 7, "c": 9}
    apply(state, r.LockBroken(10, 10, "a", 6))  # an earlier hold of it
    assert state.locks == {"a": 7, "c": 9}
    apply(state, r.LockBroken(11, 11, "a", 7))
    assert state.locks == {"c": 9} and [record.token for record in state.broken_locks] == [6, 7]


def test_a_step_that_fails_changes_no_lock() -> None:
    asked, answered = lock(2, "lock.acquire", "a", 7)
    assert isinstance(answered, r.StepCommitted)
    assert fold([accepted(), asked, msgspec.structs.replace(answered, ok=False)]).locks == {}


def test_what_is_counted_of_steps() -> None:
    """Calls of all segments; when and by what each was prepared first; the time at work, which never shrinks."""
    state = fold([accepted(), prepared(2), r.StepAborted(3, 3, "1:1", "x"), prepared(4, attempt=2), pure(5, "1:2")])
    assert (state.tier, state.pins) == (2, {"abi": "1"})
    assert (state.tool_calls, state.segment_ns, state.active_ns) == (2, 1, 0)
    assert (state.steps["1:1"].first_seq, state.steps["1:1"].prepared_ns) == (2, 2)
    assert (state.steps["1:1"].seq, state.steps["1:1"].attempt) == (4, 2)
    apply(state, msgspec.structs.replace(committed(6, attempt=2), active_ns=50))
    apply(state, r.FrameTaken(7, 7, "f", 1))
    apply(state, r.Checkpoint(8, 8, 2, b"{}"))
    assert (state.tool_calls, state.segment_ns, state.active_ns, state.frame) == (2, 8, 50, None)
    apply(state, r.Waiting(9, 9, "step", active_ns=40))
    assert state.active_ns == 50
    apply(state, r.Resumed(10, 10))
    apply(state, r.Waiting(11, 11, "step", active_ns=60))
    assert state.active_ns == 60
    apply(state, r.Resumed(12, 12))
    apply(state, msgspec.structs.replace(pure(13, "2:1"), active_ns=59))
    assert (state.tool_calls, state.active_ns) == (3, 60)
    apply(state, r.StepCommitted(14, 14, "2:2", "timer.sleep", DIGEST, False, b"{}", b"e" * 16, 1))
    assert state.tool_calls == 3


def test_costs_are_summed_field_by_field() -> None:
    assert sum_costs([r.Cost(1, 20, 300, 4000), r.Cost(5, 60, 700, 8000), r.Cost()]) == r.Cost(6, 80, 1000, 12000)
    held = [other(prepared(2 + n, f"1:{n}"), reserved=r.Cost(1, 2, 3, 4)) for n in range(2)]
    assert fold([accepted(), *held]).reserved == r.Cost(2, 4, 6, 8)
    assert fold([accepted(), held[0], r.StepEvicted(3, 3, "1:0", "x")]).reserved == r.Cost(1, 2, 3, 4)


def test_what_an_operator_lets_run_again_is_remembered_until_it_does() -> None:
    unknown = [accepted(), prepared(2), r.OutcomeUnknown(3, 3, "1:1", "x"), r.Waiting(4, 4, "operator", "1:1")]
    state = fold([*unknown, r.Resumed(5, 5, retry=("1:1",))])
    assert state.retry == {"1:1"}
    for after in (
        [prepared(6, attempt=2)],
        [committed(6)],
        [r.StepAborted(6, 6, "1:1", "it did not happen")],
    ):
        assert fold([*unknown, r.Resumed(5, 5, retry=("1:1",)), *after]).retry == set()
    state = fold([*unknown, r.Resumed(5, 5)])
    assert state.retry == set() and list(state.open) == ["1:1"]


def test_what_is_aborted_may_be_tried_at_the_same_attempt() -> None:
    """It certainly had no effect."""
    state = fold([*ABORTED, prepared(4)])
    assert (state.steps["1:1"].attempt, state.steps["1:1"].state) == (1, StepState.PREPARED)


def test_an_ending_is_told_once_more_when_its_place_is_known() -> None:
    told = r.Ending(2, 2, "CANCELLED", "user")
    placed = r.Ending(3, 3, "CANCELLED", "user", answers=0)
    state = fold([accepted(), told, placed])
    assert state.ending == placed and state.state is RunState.ENDING


@pytest.mark.parametrize("before", [[], [r.Waiting(2, 2, "approval", "1:1")]], ids=["active", "waiting"])
def test_an_exported_run_is_nobodys_until_it_comes_in(before: list[r.Record]) -> None:
    at = 2 + len(before)
    state = fold([accepted(), *before, r.Exported(at, at, "e1")])
    head = head_of(state, "run_x")
    assert (head.state, head.wait_reason) == ("EXPORTED", None)
    assert state.wait == (before[0] if before else None)
    for wrong in (r.Imported(at + 1, at + 1, "e2"), prepared(at + 1), ended(at + 1, "CANCELLED")):
        untouched = deepcopy(state)
        with pytest.raises(StoreCorruptError):
            apply(state, wrong)
        assert state == untouched
    apply(state, r.Imported(at + 1, at + 1, "e1"))
    assert (state.state, state.exported, state.exported_from) == ("WAITING" if before else "ACTIVE", None, None)
    assert head_of(state, "run_x").wait_reason == ("approval" if before else None)
    with pytest.raises(StoreCorruptError):
        apply(state, r.Imported(at + 2, at + 2, "e1"))


def test_a_run_without_records_has_none() -> None:
    with pytest.raises(StoreCorruptError):
        RunFold().run()


@pytest.mark.parametrize("of", ["emit", "tool.call"])
def test_what_the_guest_was_told(of: str) -> None:
    def step(ok: bool, result: bytes | None) -> bytes:
        record = r.StepCommitted(2, 2, "1:1", of, DIGEST, ok, result, b"e" * 16, 1)
        return fold([accepted(), record]).steps["1:1"].told

    assert step(False, b'{"code":"x"}') == b'{"code":"x"}'
    if of == "emit":
        assert step(True, b"7") == b"null"  # what it has emitted is no answer
    else:
        assert step(True, None) == b"null"


# --- what no run can have written -----------------------------------------------------------


def other(record: r.StepPrepared, **changes: object) -> r.StepPrepared:
    values = {name: getattr(record, name) for name in record.__struct_fields__} | changes
    return r.StepPrepared(**values)


ABORTED = [accepted(), prepared(2), r.StepAborted(3, 3, "1:1", "x")]

IMPOSSIBLE: dict[str, list[r.Record]] = {
    "nothing accepted": [prepared(1)],
    "ended before accepted": [ended(1)],
    "accepted twice": [accepted(), accepted(2)],
    "a gap": [accepted(), prepared(3)],
    "a repeated seq": [accepted(), prepared(2), committed(2)],
    "starts late": [accepted(2)],
    "a base tier that is none": [r.RunAccepted(1, 1, "t", "a", "v", b"", 4, b"", 1)],
    "committed twice": [accepted(), prepared(2), committed(3), committed(4)],
    "pure committed twice": [accepted(), pure(2), pure(3)],
    "prepared after commit": [accepted(), prepared(2), committed(3), prepared(4, attempt=2)],
    "prepared twice": [accepted(), prepared(2), prepared(3, attempt=2)],
    "a keyed step never prepared": [accepted(), committed(2)],
    "a prepared step committed as pure": [accepted(), prepared(2), pure(3)],
    "a pure step prepared": [accepted(), prepared(2, kind="pure")],
    "an unknown kind": [accepted(), prepared(2, kind="maybe")],
    "an unknown op": [accepted(), other(prepared(2), op="rm.rf")],
    "no step at all": [accepted(), r.StepCommitted(2, 2, "1:1", "log", DIGEST, True, None, b"e" * 16, 1)],
    "a first attempt that is the second": [accepted(), prepared(2, attempt=2)],
    "an attempt skipped": [*ABORTED, prepared(4, attempt=3)],
    "an attempt taken back": [*ABORTED, prepared(4, attempt=2), r.StepAborted(5, 5, "1:1", "x"), prepared(6)],
    "another request": [*ABORTED, other(prepared(4), request=b"other")],
    "another digest": [*ABORTED, other(prepared(4), digest=b"x" * 16)],
    "another key": [*ABORTED, other(prepared(4), key="k2")],
    "another kind later": [*ABORTED, other(prepared(4), kind="reconcilable")],
    "another op later": [*ABORTED, other(prepared(4), op="model.generate")],
    "committed at another attempt": [accepted(), prepared(2), committed(3, attempt=2)],
    "success without effect": [*ABORTED, committed(4)],
    "aborted out of nothing": [accepted(), r.StepAborted(2, 2, "1:1", "x")],
    "aborted after commit": [accepted(), prepared(2), committed(3), r.StepAborted(4, 4, "1:1", "x")],
    "evicted after abort": [*ABORTED, r.StepEvicted(4, 4, "1:1", "x")],
    "unknown after commit": [accepted(), prepared(2), committed(3), r.OutcomeUnknown(4, 4, "1:1", "x")],
    "a path without segment": [accepted(), prepared(2, "1")],
    "an empty path": [accepted(), prepared(2, "")],
    "a path of a later segment": [accepted(), prepared(2, "2:1")],
    "a new step in an old segment": [accepted(), r.Checkpoint(2, 2, 2, b""), prepared(3, "1:1")],
    "segment one again": [accepted(), r.Checkpoint(2, 2, 1, b"")],
    "a segment left out": [accepted(), r.Checkpoint(2, 2, 3, b"")],
    "an unknown reason to wait": [accepted(), r.Waiting(2, 2, "coffee")],
    "resumed without waiting": [accepted(), r.Resumed(2, 2)],
    "waiting while ending": [accepted(), r.Ending(2, 2, "FAILED", "x"), r.Waiting(3, 3, "step")],
    "ending twice": [accepted(), r.Ending(2, 2, "FAILED", "x"), r.Ending(3, 3, "FAILED", "x")],
    "unwinding at two places": [
        accepted(),
        r.Ending(2, 2, "FAILED", "x", answers=1),
        r.Ending(3, 3, "FAILED", "x", answers=2),
    ],
    "ending towards another": [accepted(), r.Ending(2, 2, "FAILED", "x"), r.Ending(3, 3, "TIMED_OUT", "x", answers=2)],
    "ending towards no end": [accepted(), r.Ending(2, 2, "WAITING", "x")],
    "another end than announced": [accepted(), r.Ending(2, 2, "CANCELLED", "x"), ended(3)],
    "success out of a wait": [accepted(), r.Waiting(2, 2, "step"), ended(3)],
    "no terminal state": [accepted(), ended(2, "ACTIVE")],
    "an unknown state": [accepted(), ended(2, "GREAT")],
    "a tier that is none": [accepted(), r.TierChanged(2, 2, 4, "x")],
    "a tier below all": [accepted(), r.TierChanged(2, 2, -1, "x")],
    "a base tier below all": [r.RunAccepted(1, 1, "t", "a", "v", b"", -1, b"", 1)],
    "a lock got without asking": [
        accepted(),
        r.StepCommitted(2, 2, "1:1", "lock.acquire", DIGEST, True, b'{"token":1}', b"e" * 16, 1),
    ],
    "run again what is not open": [accepted(), r.Waiting(2, 2, "operator"), r.Resumed(3, 3, retry=("1:1",))],
    "a path with more behind it": [accepted(), prepared(2, "1:1x")],
    "an unknown op without phase one": [accepted(), msgspec.structs.replace(pure(2), op="rm.rf")],
    "spawned twice": [accepted(), r.Spawned(2, 2, "1:1", "a", False), r.Spawned(3, 3, "1:1", "a", False)],
} | {
    f"{type(record).__name__} after the end": [accepted(), ended(2), record]
    for record in (
        prepared(3),
        committed(3),
        pure(3),
        r.Waiting(3, 3, "step"),
        r.Resumed(3, 3),
        r.Checkpoint(3, 3, 2, b""),
        r.TierChanged(3, 3, 1, "x"),
        r.CancelRequested(3, 3, "x"),
        r.Ending(3, 3, "CANCELLED", "x"),
        r.Upgraded(3, 3, {}),
        ended(3, "CANCELLED"),
    )
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_sequences_are_refused_at_their_last_record(name: str) -> None:
    *before, last = IMPOSSIBLE[name]
    state = fold(before)
    untouched = deepcopy(state)
    with pytest.raises(StoreCorruptError) as caught:
        apply(state, last)
    assert f"record {last.seq}" in caught.value.message
    assert state == untouched


@pytest.mark.parametrize("first", sorted(TERMINAL))
@pytest.mark.parametrize("second", sorted(TERMINAL))
def test_fault_C24_no_end_overwrites_another(first: RunState, second: RunState) -> None:
    state = fold([accepted(), ended(2, first)])
    with pytest.raises(StoreCorruptError):
        apply(state, ended(3, second))
    assert state.state is first


# --- against a naive reading --------------------------------------------------------------------


@dataclass
class Naive:
    """The same rules, written as questions to the whole history."""

    history: list[r.Record] = field(default_factory=list)

    def segment(self) -> int:
        return 1 + sum(isinstance(record, r.Checkpoint) for record in self.history)

    def of(self, path: str) -> list[r.Record]:
        return [record for record in self.history if getattr(record, "path", None) == path and _about_step(record)]

    def state(self) -> str:
        state = ""
        for record in self.history:
            match record:
                case r.RunAccepted() | r.Resumed():
                    state = "ACTIVE"
                case r.Waiting():
                    state = "WAITING"
                case r.Ending():
                    state = "ENDING"
                case r.RunEnded():
                    state = record.state
        return state

    def takes(self, record: r.Record) -> bool:
        state = self.state()
        if not self.history:
            return isinstance(record, r.RunAccepted)
        if state in TERMINAL:
            return False
        match record:
            case r.RunAccepted():
                return False
            case r.Waiting():
                return state in ("ACTIVE", "WAITING") and record.reason in WAIT_REASONS
            case r.Resumed():
                return state == "WAITING"
            case r.Ending():
                return state in ("ACTIVE", "WAITING")
            case r.RunEnded():
                towards = [old.towards for old in self.history if isinstance(old, r.Ending)]
                if towards:
                    return record.state == towards[0]
                return state == "ACTIVE" or record.state != "SUCCEEDED"
            case r.Checkpoint():
                return record.segment == self.segment() + 1
            case _ if _about_step(record):
                return self._takes_step(record)
        return True

    def _takes_step(self, record: r.Record) -> bool:
        path: str = record.path  # type: ignore[union-attr]
        before = self.of(path)
        attempts = [old.attempt for old in before if isinstance(old, r.StepPrepared)]
        here = path.startswith(f"{self.segment()}:")
        last = type(before[-1]) if before else None
        if last is r.StepAborted and not here:
            return False  # dropped with its segment
        match record:
            case r.StepPrepared():
                if last is None:
                    return here and record.attempt == 1
                again = last in (r.StepAborted, r.StepEvicted, r.OutcomeUnknown)
                return again and attempts[-1] <= record.attempt <= attempts[-1] + 1
            case r.StepCommitted(result=None):
                return last is None and here
            case r.StepCommitted(ok=False) if last is None:  # refused, or pure and failed: its error is kept
                return here
            case r.StepCommitted():
                if last in (None, r.StepCommitted) or record.attempt != attempts[-1]:
                    return False
                return not (last is r.StepAborted and record.ok)
            case r.StepAborted():
                return last in (r.StepPrepared, r.StepEvicted, r.OutcomeUnknown)
            case r.StepEvicted():
                return last is r.StepPrepared
            case _:
                return last in (r.StepPrepared, r.StepEvicted)

    def committed(self) -> list[str]:
        prefix = f"{self.segment()}:"
        return [
            record.path
            for record in self.history
            if isinstance(record, r.StepCommitted) and record.path.startswith(prefix)
        ]

    def open(self) -> set[str]:
        paths = {record.path for record in self.history if _about_step(record)}  # type: ignore[union-attr]
        settled = (r.StepCommitted, r.StepAborted)
        return {path for path in paths if not isinstance(self.of(path)[-1], settled)}


def _about_step(record: r.Record) -> bool:
    kinds = (r.StepPrepared, r.StepCommitted, r.StepAborted, r.StepEvicted, r.OutcomeUnknown)
    return isinstance(record, kinds)


paths = st.sampled_from(["1:1", "1:2", "1:2.1", "2:1"])
attempts = st.integers(1, 3)
ends = st.sampled_from(["SUCCEEDED", "CANCELLED", "FAILED"])

#: Functions from seq to a record. Steps come most often, so that their life has a chance to go on.
candidates: st.SearchStrategy[Callable[[int], r.Record]] = st.one_of(
    st.builds(lambda path, attempt: lambda n: prepared(n, path, attempt), paths, attempts),
    st.builds(lambda path, attempt: lambda n: prepared(n, path, attempt), paths, st.just(1)),
    st.builds(lambda path, attempt, ok: lambda n: committed(n, path, attempt, ok), paths, attempts, st.booleans()),
    st.builds(lambda path: lambda n: committed(n, path), paths),
    st.builds(lambda path: lambda n: pure(n, path), paths),
    st.builds(
        lambda kind, path: lambda n: kind(n, n, path, "x"),
        st.sampled_from([r.StepAborted, r.StepEvicted, r.OutcomeUnknown]),
        paths,
    ),
    st.builds(lambda reason: lambda n: r.Waiting(n, n, reason), st.sampled_from(sorted(WAIT_REASONS))),
    st.just(lambda n: r.Resumed(n, n)),
    st.builds(lambda segment: lambda n: r.Checkpoint(n, n, segment, b"s"), st.integers(2, 3)),
    st.builds(lambda tier: lambda n: r.TierChanged(n, n, tier, "x"), st.integers(0, 3)),
    st.just(lambda n: r.CancelRequested(n, n, f"reason {n}")),
    st.builds(lambda end: lambda n: r.Ending(n, n, end, "x"), ends),
    st.builds(lambda end: lambda n: ended(n, end), ends),
    st.just(lambda n: accepted(n)),
)


@settings(max_examples=300)
@given(st.lists(candidates, max_size=30), st.data())
def test_fold_agrees_with_the_naive_reading(tries: list[Callable[[int], r.Record]], data: st.DataObject) -> None:
    naive, state = Naive(), RunFold()
    for make in [accepted, *tries]:
        record = make(len(naive.history) + 1)
        if naive.takes(record):
            apply(state, record)
            naive.history.append(record)
        else:
            untouched = deepcopy(state)
            with pytest.raises(StoreCorruptError):
                apply(state, record)
            assert state == untouched
    assert state.state == naive.state()
    assert state.committed == naive.committed()
    assert set(state.open) == naive.open()
    assert state.segment == naive.segment()
    assert (state.wait is not None) == (naive.state() == "WAITING")
    reasons = [record.reason for record in naive.history if isinstance(record, r.CancelRequested)]
    assert state.cancel_requested == (reasons[0] if reasons else None)
    costs = [record.cost for record in naive.history if isinstance(record, r.StepCommitted)]
    assert state.spent == sum_costs(costs)
    # Folding a prefix and going on is folding the whole, and the codec changes nothing.
    cut = data.draw(st.integers(0, len(naive.history)))
    stored = [decode_record(encode_record(record)) for record in naive.history]
    later = fold(stored[:cut])
    for record in stored[cut:]:
        apply(later, record)
    assert later == fold(naive.history) == state
    assert head_of(later, "run_x") == head_of(state, "run_x")


def test_fold_shares_nothing_between_runs() -> None:
    one = fold([accepted(), prepared(2)])
    two = fold([accepted()])
    assert two.steps == {} and two.open == {} and one.steps != {}
