"""When native processes make room, in model time."""

from hypothesis import given
from hypothesis import strategies as st

from agentrt.backends.process.preempt import LOOK_NS, OUTRANKED_NS, PATIENCE_NS, Preemption

S = 1_000_000_000


def test_an_arrival_stops_those_without_network_at_once_and_quiet_lets_them_go_on() -> None:
    made = Preemption()
    room = made.arrived(5 * S)
    assert room == (True, False, 5 * S + LOOK_NS)
    assert made.look(5 * S + LOOK_NS, True)[:2] == (True, False)
    assert made.look(5 * S + 2 * LOOK_NS, False) == (False, False, None)


def test_those_with_network_have_a_second() -> None:
    made = Preemption(100)
    made.arrived(0)
    assert not made.look(PATIENCE_NS - 1, True).stop_network
    assert made.look(PATIENCE_NS + LOOK_NS, True).stop_network
    assert not made.look(PATIENCE_NS + 2 * LOOK_NS, False).stop_network
    assert not made.arrived(PATIENCE_NS + 3 * LOOK_NS).stop_network  # the second begins anew


def test_who_is_outranked_is_stopped_only_if_urgent_work_stays() -> None:
    made = Preemption(100, outranked=True)
    assert made.arrived(S) == (False, False, S + OUTRANKED_NS)
    assert made.look(S + OUTRANKED_NS - 1, False) == (False, False, None)  # it was short: nobody has noticed
    begins = 2 * S
    assert made.arrived(begins).look_ns == begins + OUTRANKED_NS
    assert made.arrived(begins + OUTRANKED_NS // 2).look_ns == begins + OUTRANKED_NS, "another does not begin it anew"
    assert made.look(begins + OUTRANKED_NS, True).stop
    assert made.arrived(begins + OUTRANKED_NS + 1).stop, "they stay stopped"
    assert made.look(begins + PATIENCE_NS, True).stop_network


@given(
    st.booleans(),
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(1, 50_000_000), st.booleans(), st.booleans()), min_size=1, max_size=400),
)
def test_urgent_work_never_has_more_than_its_share_of_a_second(
    outranked: bool, share: int, steps: list[tuple[int, bool, bool]]
) -> None:
    """Looks may come late by as much as one step: that much more, once a second."""
    made = Preemption(share, outranked)
    now, stopped, began, held, longest = 0, False, 0, 0, 0
    for step_ns, arrives, wanted in steps:
        now += step_ns
        held += step_ns if stopped else 0
        longest = max(longest, step_ns)
        assert held <= S * share // 100 + longest
        if now - began >= S:
            began, held = now, 0
        room = made.arrived(now) if arrives else made.look(now, wanted)
        assert room.stop or not room.stop_network
        assert room.look_ns is None or room.look_ns > now
        if not (arrives or wanted):
            assert not room.stop
        stopped = room.stop
