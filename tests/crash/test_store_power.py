"""kill -9 and power cuts under load: what the LMDB store acknowledged is there, and nothing is there in part.

kill -9 alone tests little: the page cache survives it. So the killed process runs under dropwrites.c, and then the
power goes, too (powercut.py). The mutants show that the test bites: a store that does not sync fails it.
"""

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
from powercut import Policy, build_shim, cut_power, shim_environment
from store_child import row_version

from agentrt.errors import StoreError
from agentrt.fold import fold, head_of
from agentrt.stores.base import OUTBOX, READY
from agentrt.stores.keys import ready_key, run_prefix
from agentrt.stores.lmdb import LmdbStore

CHILD: Final = Path(__file__).with_name("store_child.py")
CUTS: Final = int(os.environ.get("AGENTRT_TEST_CUTS", "12"))
#: A cut shows it if something was acknowledged and not synced just then: of those of the tail, one in three to six.
MUTANT_CUTS_MAX: Final = 60


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = build_shim(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("no C compiler")
    return library


class Place:
    """A store's folder, the log beside it, and all that was ever acknowledged."""

    def __init__(self, base: Path, shim: Path | None) -> None:
        self.folder = base / "store"
        self.folder.mkdir()
        self.log = base / "log"
        self.shim = shim
        self.acknowledged: dict[str, int] = {}

    def run_and_kill(self, rng: random.Random, off: tuple[str, ...] = ()) -> int:
        """Starts the child and kills it after a random number of acknowledgements, or at a random moment of its start;
        how many there were."""
        environment = shim_environment(self.shim, self.folder, self.log) if self.shim else dict(os.environ)
        child = subprocess.Popen(
            [sys.executable, str(CHILD), str(self.folder), "12", *off],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdout is not None and child.stderr is not None
        count_max = rng.choice((0, 1, 2, rng.randrange(400), rng.randrange(400)))
        deadline = time.monotonic() + 30
        text = b""
        while text.count(b"\n") < count_max and time.monotonic() < deadline and child.poll() is None:
            if select.select([child.stdout], [], [], 0.05)[0]:
                text += os.read(child.stdout.fileno(), 65536)
        if count_max == 0:
            # Anywhere from before the file exists to the first commits.
            select.select([child.stdout], [], [], rng.uniform(0, 0.6))
        child.send_signal(signal.SIGKILL)
        rest, errors = child.communicate()
        assert child.returncode == -signal.SIGKILL, errors.decode()
        lines = (text + rest).decode().split("\n")
        for line in lines[:-1]:  # the last is empty or was cut off
            run_id, version = line.split()
            self.acknowledged[run_id] = max(self.acknowledged.get(run_id, 0), int(version))
        return len(lines) - 1

    def faults(self) -> list[str]:
        """What is wrong with the store; [] when it keeps its word."""
        loop = asyncio.new_event_loop()
        try:
            store = LmdbStore(self.folder, loop, map_bytes_max=2**28, free_bytes_min=0, force_place=True)
        except StoreError as error:
            return [f"it cannot be opened: {error}"]
        try:
            return self._faults(store)
        except StoreError as error:
            return [f"it cannot be read: {error}"]
        finally:
            store.close()
            loop.close()

    def _faults(self, store: LmdbStore) -> list[str]:
        found: list[str] = []
        heads = {head.run_id: head for head in store.scan_heads(limit=100_000)}
        for run_id, version in self.acknowledged.items():
            if run_id not in heads or heads[run_id].version < version:
                found.append(f"{run_id} was acknowledged at {version}, is {heads.get(run_id)}")
        for run_id, head in heads.items():
            state = fold(store.read_records(run_id))
            if head_of(state, run_id) != head:
                found.append(f"{run_id}: the head is not the fold")
            if store.read_row(OUTBOX, run_prefix(run_id)) != str(row_version(head)).encode():
                found.append(f"{run_id}: the side row is not of version {row_version(head)}")
            ready = store.read_row(READY, ready_key(head.base_tier, head.accepted_ns, run_id))
            if (ready is None) != (head.ended_ns != 0):
                found.append(f"{run_id}: {head.state}, and its ready row is {ready!r}")
        return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["mix", "lose"])
def test_fault_D01_power_cuts_lose_nothing_acknowledged(tmp_path: Path, shim: Path, policy: Policy) -> None:
    place = Place(tmp_path, shim)
    acknowledged = lost = 0
    for seed in range(CUTS):
        acknowledged += place.run_and_kill(random.Random(seed))
        lost += cut_power(place.log, seed, policy)
        assert place.faults() == [], f"cut {seed}"
    assert acknowledged > 20 and lost > 0  # there was something to lose


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "off",
    [("sync", "metasync"), ("metasync",), ("tail",), ("blobs.sync", "blobs.metasync")],
    ids=["no-fsync", "no-metasync", "tail", "no-fsync of blobs"],
)
def test_a_store_that_does_not_sync_is_found_out(tmp_path: Path, shim: Path, off: tuple[str, ...]) -> None:
    place = Place(tmp_path, shim)
    for seed in range(MUTANT_CUTS_MAX):
        place.run_and_kill(random.Random(1000 + seed), off)
        cut_power(place.log, seed, "lose")
        if place.faults():
            return
    pytest.fail(f"{MUTANT_CUTS_MAX} power cuts did not show that nothing is synced")


@pytest.mark.timeout(300)
def test_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    place = Place(tmp_path, None)
    acknowledged = 0
    for seed in range(CUTS):
        acknowledged += place.run_and_kill(random.Random(2000 + seed))
        assert place.faults() == [], f"kill {seed}"
    assert acknowledged > 20
