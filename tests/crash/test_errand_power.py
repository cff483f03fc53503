"""The power goes at every commit of the twelve-step agent: what had not been synced is lost, or torn.

The node runs under dropwrites.c; it is killed when a batch was given to the store, and when the store had said that it
is durable; then powercut.py takes back what was not synced, and the next life goes on with what is left. The effects
are in a ledger that the power cut does not touch.
"""

from itertools import count
from pathlib import Path

import pytest
from errand_kit import ALONE, Case, Errands, in_lanes, passes
from powercut import Policy, build_shim, cut_power, shim_environment

LANES = 3


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = build_shim(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("no C compiler")
    return library


class PowerCuts(Errands):
    """Errands of a node whose every end is a power cut."""

    def __init__(self, backend: str, folder: Path, shim: Path, policy: Policy) -> None:
        (folder / "store").mkdir()
        self._log = folder / "writes"
        super().__init__(backend, folder, ALONE | _added(shim_environment(shim, folder / "store", self._log)))
        self._policy = policy
        self._seeds = count()
        self.lost = 0

    def was_killed(self) -> None:
        super().was_killed()
        self.lost += cut_power(self._log, next(self._seeds), self._policy)


def _added(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(("LD_", "DROPWRITES_"))}


def commits(places: list[str]) -> list[str]:
    return [place for place in places if place.partition(":")[0].endswith((".after_commit", ".durable"))]


def cut_all(backend: str, folder: Path, shim: Path, policy: Policy, cases: list[Case], lanes: int) -> None:
    made = [PowerCuts(backend, place, shim, policy) for place in _folders(folder, lanes)]
    kills = in_lanes(made, cases)
    assert kills >= len(cases) * 3 // 4
    assert sum(each.lost for each in made) > 0  # there was something to lose


def _folders(folder: Path, lanes: int) -> list[Path]:
    found = [folder / str(number) for number in range(lanes)]
    for place in found:
        place.mkdir()
    return found


@pytest.mark.parametrize("backend", ["python", "wasm", "process"])
def test_power_cuts_at_some_commits_lose_and_double_nothing(backend: str, shim: Path, tmp_path: Path) -> None:
    places = ["checkpoint.after_commit:1", "prepare.durable:5", "accept.after_commit:2", "prepare.after_commit:9"]
    cut_all(backend, tmp_path, shim, "mix", [Case(place, "node") for place in places], 1)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["mix", "lose"])
@pytest.mark.parametrize("backend", ["python", "wasm", "process"])
def test_fault_D01_power_cuts_at_any_commit_lose_and_double_nothing(
    backend: str, policy: Policy, shim: Path, tmp_path: Path
) -> None:
    (dry := tmp_path / "dry").mkdir()
    cases = [Case(place, "node") for place in commits(passes(backend, dry))]
    assert len(cases) > 40
    cut_all(backend, tmp_path, shim, policy, cases, LANES)
