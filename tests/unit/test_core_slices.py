"""What workers remember of the last slices in their slots."""

import struct

import pytest
from core_fixture import Control, control, script

KEPT = 4095  # of 4,096 one is being written
Slices = list[tuple[int, int, int, str, int, bool]]


def of_slot(c: Control, worker: int = 0, since_ns: int = 0, most: int = KEPT) -> tuple[Slices, int]:
    found, _ = c.core.slices(since_ns, most)
    return found[worker]


def check(slices: Slices) -> None:
    """A slot has one slice at a time."""
    before_ns = 0
    for start_ns, end_ns, tier, end, number, _ in slices:
        assert before_ns <= start_ns <= end_ns
        assert 0 <= tier < 4 and end and number > 0
        before_ns = end_ns
    assert all(end != "open" for _, _, _, end, *_ in slices[:-1])


def test_a_slot_remembers_who_had_it_and_why_that_ended() -> None:
    with control(workers=1) as c:
        assert c.core.slices(0) == ([([], 0)], {})
        hog = c.submit("hog", tier=3)
        c.until(lambda: bool(of_slot(c)[0]), events=False)
        ((start_ns, end_ns, tier, end, number, foreign),), total = of_slot(c)
        assert (tier, end, foreign, total) == (3, "open", False, 1) and end_ns > start_ns
        assert c.core.slices(0)[1] == {number: hog}
        urgent = c.submit("hello", b"x", tier=0)
        c.until(lambda: urgent.exit is not None)
        c.until(lambda: len(of_slot(c)[0]) == 3, events=False)
        slices, total = of_slot(c)
        assert [(tier, end) for _, _, tier, end, *_ in slices] == [(3, "preempted"), (0, "over"), (3, "open")]
        assert slices[0][0] == start_ns and slices[0][4] == slices[2][4] == number != slices[1][4] and total == 3
        check(slices)
        assert c.core.slices(0)[1] == {number: hog}  # the other has ended
        asker = c.submit("script", script(("call", 1, 0, 0, 0, 0)), tier=0)
        c.until(lambda: bool(asker.waits))
        c.until(lambda: "blocked" in [end for *_, end, _, _ in of_slot(c)[0]], events=False)
        hog.guest.kill()
        c.until(lambda: hog.exit is not None)
        assert of_slot(c)[0][-1][3] == "over"
        slot = c.foreign(tier=2)
        c.until(lambda: slot.state == "granted")
        assert [(tier, end, foreign) for _, _, tier, end, _, foreign in of_slot(c)[0]][-1] == (2, "open", True)
        slot.foreign.release()
        c.until(lambda: slot.state == "released")
        c.until(lambda: of_slot(c)[0][-1][3:6:2] == ("over", True), events=False)
        check(of_slot(c)[0])
        asker.reply(asker.waits[-1][0])
        c.until(lambda: asker.exit is not None)


def test_a_quantum_ends_a_slice_also_where_nobody_else_wants_the_slot() -> None:
    with control(workers=1, quantum_ns=(2_000_000,) * 4) as c:
        hog = c.submit("hog", tier=1)
        c.until(lambda: len(of_slot(c)[0]) >= 4, events=False)
        slices, _ = of_slot(c)
        assert [(tier, end) for _, _, tier, end, *_ in slices[:2]] == [(1, "spent"), (2, "spent")]
        assert {tier for _, _, tier, *_ in slices[2:]} == {3}
        check(slices)
        hog.guest.kill()
        c.until(lambda: hog.exit is not None)


def test_as_many_are_kept_as_there_is_room_for_and_the_longest_are_told() -> None:
    with control(workers=1) as c:
        for _ in range(KEPT // 100 + 2):
            runs = [c.submit("hello", b"x", tier=2) for _ in range(100)]
            c.until(lambda: all(run.exit for run in runs))  # noqa: B023
        slices, total = of_slot(c)
        assert len(slices) == total == KEPT
        check(slices)
        numbers = [number for *_, number, _ in slices]
        assert numbers == sorted(numbers) and len(set(numbers)) == KEPT
        few, total = of_slot(c, most=7)
        assert total == KEPT and few == sorted(few) and len(few) == 7
        took = sorted((end_ns - start_ns for start_ns, end_ns, *_ in slices), reverse=True)
        assert sorted((end_ns - start_ns for start_ns, end_ns, *_ in few), reverse=True) == took[:7]
        since_ns = slices[-100][1]
        late, total = of_slot(c, since_ns=since_ns)
        assert late == slices[-total:] and all(end_ns >= since_ns for _, end_ns, *_ in late)
        assert of_slot(c, since_ns=slices[-1][1] + 1) == ([], 0)


@pytest.mark.parametrize("workers", [1, 3])
def test_who_looks_on_sees_whole_slices(workers: int) -> None:
    """While they are overwritten all the time: none is put together from two."""
    rounds = struct.pack("<I", 10)
    with control(workers=workers) as c:
        for n in range(120):
            runs = [c.submit("compute", rounds, tier=n % 4) for _ in range(100)]
            while not all(run.exit for run in runs):
                c.take()
                for slices, total in c.core.slices(0, KEPT)[0]:
                    assert total == len(slices)
                    check(slices)
        c.audit()
