"""Tier lending as a graph, against the sentence that defines it."""

from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine.lending import NOT_LENT, Lending

Edge = tuple[int, str, int, int]  # source, key, target, tier


def naive(edges: dict[tuple[int, str], tuple[int, int]], node: int) -> int:
    """The highest tier of its own of an edge on any way that ends here."""
    best, seen, todo = NOT_LENT, {node}, [node]
    while todo:
        current = todo.pop()
        for (source, _), (target, tier) in edges.items():
            if target == current:
                best = min(best, tier)
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
    return best


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.sampled_from("ab"), st.integers(0, 8), st.sampled_from((0, 1, 2, 3, NOT_LENT))),
        max_size=60,
    )
)
def test_everyone_is_lent_the_highest_tier_that_waits_for_it(changes: list[Edge]) -> None:
    told: set[str] = set()
    lending = Lending(told.add)
    edges: dict[tuple[int, str], tuple[int, int]] = {}
    before = [NOT_LENT] * 9
    for source, key, target, tier in changes:
        told.clear()
        if target <= source:  # none from there: edges lead upwards only, so there is no circle
            gone = lending.disconnect(f"r{source}", key)
            there = edges.pop((source, key), None)
            assert gone == (None if there is None else f"r{there[0]}")
        else:
            lending.connect(f"r{source}", key, f"r{target}", tier)
            edges[source, key] = target, tier
        now = [naive(edges, node) for node in range(9)]
        assert [lending.tier(f"r{node}") for node in range(9)] == now
        changed = {f"r{node}" for node in range(9) if now[node] != before[node]}
        assert changed <= told  # one that only took another's place may be told for nothing
        before = now
    for source, key in [*edges]:
        lending.disconnect(f"r{source}", key)
    assert not lending._out and not lending._in


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12), st.integers(0, 5), st.integers(0, 5))
def test_a_way_is_found_if_there_is_one(pairs: list[tuple[int, int]], start: int, goal: int) -> None:
    lending = Lending(lambda run: None)
    for source, target in pairs:
        lending.connect(f"r{source}", f"to{target}", f"r{target}", 1)
    reachable, todo = {start}, [start]
    while todo:
        node = todo.pop()
        for source, target in pairs:
            if source == node and target not in reachable:
                reachable.add(target)
                todo.append(target)
    way = lending.way(f"r{start}", f"r{goal}")
    assert (way is not None) is (goal in reachable)
    at = f"r{start}"
    for source, key in way or ():
        assert source == at
        at = "r" + key.removeprefix("to")
    assert way is None or at == f"r{goal}"


def test_a_broken_circle_lets_go_of_what_it_kept_up() -> None:
    lending = Lending(lambda run: None)
    lending.connect("urgent", "1:1", b"a", 0)
    lending.connect(b"a", "holder", "x")
    lending.connect("x", "1:1", b"b", 2)
    lending.connect(b"b", "holder", "y")
    lending.connect("y", "1:1", b"a", 2)
    assert (lending.tier("x"), lending.tier("y")) == (0, 0)
    assert lending.way(b"a", "y") == [(b"a", "holder"), ("x", "1:1"), (b"b", "holder")]
    lending.disconnect("y", "1:1")  # refused
    lending.disconnect("urgent", "1:1")
    assert (lending.tier("x"), lending.tier("y")) == (NOT_LENT, 2)


def test_a_join_passes_on_and_lends_nothing_itself() -> None:
    lending = Lending(lambda run: None)
    lending.connect("parent", "1:2", "child")
    assert lending.tier("child") == NOT_LENT
    lending.connect("waiter", "1:1", b"lock", 1)
    lending.connect(b"lock", "holder", "parent")
    assert (lending.tier("parent"), lending.tier("child")) == (1, 1)
    lending.disconnect(b"lock", "holder")
    assert (lending.tier("parent"), lending.tier("child"), lending.tier(b"lock")) == (NOT_LENT, NOT_LENT, 1)
