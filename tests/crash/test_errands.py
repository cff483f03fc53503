"""kill -9 of a node, of its hosts or of their templates, at every durable point of a twelve-step agent.

The errand (errand_agents.py, examples/guests/errand.c) has effects of every kind, a checkpoint, a lock that a child
waits for, a timer, an approval and two children. A dry run lists what it passes; each pass is then a case of its own, so
no durable edge is left out. The effects are counted in a ledger outside. The ordinary suite takes a sample.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from errand_kit import EFFECTS, Case, Errands

from agentrt.engine.crashpoints import POINTS

BACKENDS = ("python", "wasm")
HOSTS = {"python": ("agents", "agents_template", "tools", "tools_template"), "wasm": ("tools", "tools_template")}
#: What an errand passes when it is neither cancelled nor keeps a lock too long.
NAMES = [name for name in POINTS if name.split(".")[0] not in ("cancel", "lock", "ending")]
SAMPLE = 5


def passes(backend: str, folder: Path) -> list[str]:
    """All that an errand passes, each ``name:pass``; of two, since waits that are short are not always journaled."""
    environment = {"ERRAND_COMMIT_DELAY_US": "0"}
    with Errands(backend, folder, environment) as errands:
        found = [place for number in range(2) for place in errands.errand(Case(), f"dry {number}")["passed"]]
        errands.check()
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module", params=BACKENDS)
def passed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A backend, and what an errand passes there."""
    backend: str = request.param
    return backend, passes(backend, tmp_path_factory.mktemp(f"dry-{backend}"))


def run_all(backend: str, folder: Path, cases: list[Case]) -> Errands:
    with Errands(backend, folder, {"ERRAND_COMMIT_DELAY_US": "0"}) as errands:
        for case in cases:
            errands.errand(case)
        errands.check()
    return errands


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*NAMES, "effect"])
def test_fault_D01_a_node_killed_at_any_pass_loses_and_doubles_nothing(
    name: str, passed: tuple[str, list[str]], tmp_path: Path
) -> None:
    backend, all_passes = passed
    places = EFFECTS if name == "effect" else [place for place in all_passes if place.startswith(f"{name}:")]
    assert places, f"{name} is never passed: the sweep misses it"
    errands = run_all(backend, tmp_path, [Case(place, "node") for place in places])
    # how many waits are journaled, and so how often a point is passed, varies a little
    assert errands.kills >= len(places) * 2 // 3


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", HOSTS["python"])
def test_fault_D01_hosts_killed_at_any_pass_lose_and_double_nothing(
    victim: str, passed: tuple[str, list[str]], tmp_path: Path
) -> None:
    backend, all_passes = passed
    if victim not in HOSTS[backend]:
        pytest.skip("a wasm guest has no host")
    places = all_passes + (EFFECTS if victim == "tools" else [])
    errands = run_all(backend, tmp_path, [Case(place, victim) for place in places])
    assert errands.kills == 0, "the node went with its hosts"


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
    backend, all_passes = passed
    errands = run_all(backend, tmp_path, [*sample(backend, all_passes, random.Random(20261129))])
    assert errands.kills >= SAMPLE
