"""kill -9 of a node, of its hosts or of their templates, at every durable point of a twelve-step agent.

The errand (errand_agents.py, examples/guests/errand.c) has effects of every kind, a checkpoint, a lock that a child
waits for, a timer, an approval and two children. A dry run lists what it passes; each pass is then a case of its own,
so no durable edge is left out. The effects are counted in a ledger outside. The ordinary suite takes a sample.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from errand_kit import ALONE, EFFECTS, Case, Errands, in_lanes, passes

from agentrt.engine.crashpoints import POINTS

BACKENDS = ("python", "wasm", "process")
TOOLS = ("tools", "tools_template")
HOSTS = {"python": ("agents", "agents_template", *TOOLS), "wasm": TOOLS, "process": ("programs", *TOOLS)}
#: What an errand passes when it is neither cancelled nor upgraded, nor keeps a lock too long.
NAMES = [name for name in POINTS if name.split(".")[0] not in ("cancel", "upgrade", "lock", "ending", "frame")]
SAMPLE = 4
LANES = 3  # a life waits for timers and for processes to start about as long as it computes


@pytest.fixture(scope="module", params=BACKENDS)
def passed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A backend, and what an errand passes there."""
    backend: str = request.param
    return backend, passes(backend, tmp_path_factory.mktemp(f"dry-{backend}"))


def run_all(backend: str, folder: Path, cases: list[Case], lanes: int = 1) -> int:
    """Each case in one of ``lanes`` nodes. How often a node was killed."""
    places = [folder / str(number) for number in range(lanes)]
    for place in places:
        place.mkdir()
    return in_lanes([Errands(backend, place, ALONE) for place in places], cases)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["node", "programs", *HOSTS["python"]])
def test_fault_D01_a_kill_at_any_pass_loses_and_doubles_nothing(
    victim: str, passed: tuple[str, list[str]], tmp_path: Path
) -> None:
    backend, places = passed
    if victim not in ("node", *HOSTS[backend]):
        pytest.skip("this backend has none")
    names = {place.partition(":")[0] for place in places}
    assert names == set(NAMES), f"the sweep misses {set(NAMES) ^ names}"
    cases = [Case(place, victim) for place in places + (EFFECTS if victim in ("node", "tools") else [])]
    kills = run_all(backend, tmp_path, cases, LANES)
    if victim == "node":  # how many waits are journaled, and so how often a point is passed, varies a little
        assert len(cases) * 3 // 4 <= kills <= len(cases)
    else:
        assert kills == 0, "the node went with its hosts"


def sample(backend: str, places: list[str], rng: random.Random) -> Iterator[Case]:
    for place in rng.sample(places, SAMPLE):
        yield Case(place, "node")
    for place in rng.sample(EFFECTS, 2):
        yield Case(place, "node")
    for victim in HOSTS[backend]:
        for place in rng.sample(places, SAMPLE):
            yield Case(place, victim)
    for place in rng.sample(EFFECTS, 2):
        yield Case(place, "tools")


def test_kills_at_some_passes_lose_and_double_nothing(passed: tuple[str, list[str]], tmp_path: Path) -> None:
    backend, places = passed
    assert run_all(backend, tmp_path, [*sample(backend, places, random.Random(20261129))]) >= SAMPLE
