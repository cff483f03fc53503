"""Who waits for a place: against a model that looks at all of it."""

from agentrt_sandbox.lines import TIERS, Lines
from hypothesis import given
from hypothesis import strategies as st

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, TIERS - 1), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["take", "free", "remove"]), st.integers(0, 99)),
    ),
    max_size=60,
)


@given(st.integers(1, 20), STEPS)
def test_by_tier_then_by_turns_of_tenants(places: int, steps: list[tuple[object, ...]]) -> None:
    lines: Lines[int] = Lines(places, 30, 100)
    waiting: list[tuple[int, int, str, int]] = []  # number, tier, tenant, size
    served: dict[tuple[int, str], int] = {}  # when a tenant of a tier was served, or began to wait, last
    held = 0
    for number, step in enumerate(steps):
        clock = number
        if step[0] == "add":
            _, tier, tenant, size = step
            assert isinstance(tier, int) and isinstance(tenant, str) and isinstance(size, int)
            full = len(waiting) + 1 > 30 or sum(each[3] for each in waiting) + size > 100
            assert lines.full(size) is full
            if not full:
                lines.add(number, tier=tier, tenant=tenant, size=size)
                if not any(each[1:3] == (tier, tenant) for each in waiting):
                    served[tier, tenant] = clock
                waiting.append((number, tier, tenant, size))
        elif step[0] == "take":
            found = lines.take()
            tier = min((each[1] for each in waiting), default=None)
            if tier is None or held >= max(1, places - tier * (places // 8)):
                assert found is None
            else:
                first = min((each for each in waiting if each[1] == tier), key=lambda of: (served[of[1], of[2]], of[0]))
                assert found == first[0]
                waiting.remove(first)
                served[first[1], first[2]] = clock
                held += 1
        elif step[0] == "free" and held:
            lines.free()
            held -= 1
        elif step[0] == "remove" and waiting:
            assert isinstance(step[1], int)
            gone = waiting[step[1] % len(waiting)]
            assert lines.remove(gone[0], tier=gone[1], tenant=gone[2])
            assert not lines.remove(gone[0], tier=gone[1], tenant=gone[2])
            waiting.remove(gone)
        assert (lines.held, lines.items, lines.bytes) == (held, len(waiting), sum(each[3] for each in waiting))
    assert sorted(lines.drain()) == sorted(each[0] for each in waiting)
    assert lines.take() is None and (lines.items, lines.bytes) == (0, 0)


def test_urgent_calls_find_a_place_when_others_hold_theirs() -> None:
    lines: Lines[str] = Lines(8, 100, 100)
    for number in range(20):
        lines.add(f"batch{number}", tier=2, tenant="acme", size=1)
    assert [lines.take() for _ in range(7)] == [f"batch{number}" for number in range(6)] + [None]
    lines.add("normal", tier=1, tenant="acme", size=1)
    lines.add("urgent", tier=0, tenant="acme", size=1)
    assert (lines.take(), lines.take(), lines.take()) == ("urgent", None, None)
