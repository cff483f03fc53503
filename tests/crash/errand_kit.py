"""Nodes that run errands, are killed and started again, and what must be true of their store and ledger afterwards."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from errand_tools import KINDS, given_up, read_ledger

from agentrt.engine.crashpoints import EVERY, VARIABLE
from agentrt.fold import fold, head_of
from agentrt.stores.base import INBOX, LOCKS, OUTBOX, READY, TIMERS, WAITS
from agentrt.stores.lmdb import LmdbStore

NODE: Final = Path(__file__).with_name("errand_node.py")
#: Tool calls around which the tool itself kills.
EFFECTS: Final = [f"effect.{when}:{place}" for place in KINDS for when in ("before", "after")]
_RUNS: Final = 3  # of an errand: it and its two children


#: A sequential agent's outcomes always join its next step, unless each has to go alone.
ALONE: Final = {"AGENTRT_STORE__COMMIT_DELAY_US": "0"}


class Case(NamedTuple):
    """SIGKILL for the victim at a pass. "" and "": nobody is killed; "never": nobody, and passes count from here."""

    at: str = ""
    victim: str = ""

    @property
    def order(self) -> str:
        return f"{self.victim} {self.at}"


class Errands:
    """The lives of one store. Errands are run one after the other; a node that was killed is started again."""

    def __init__(self, backend: str, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.lives = self.kills = 0
        self.operated: Counter[str] = Counter()
        self._orders: set[str] = set()
        self._backend = backend
        self._environment = os.environ | {VARIABLE: EVERY} | (environment or {})
        self._node: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._node is not None:
            self._node.kill()
            self._node.communicate()

    def _start(self, *, killed: bool = False) -> subprocess.Popen[str] | None:
        """A node; None if it was ``killed``, as it may be, before it was ready."""
        self.lives += 1
        node = subprocess.Popen(
            [sys.executable, str(NODE), self._backend, str(self.folder)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert node.stdout is not None
        said = node.stdout.readline()
        if said != "ready\n":
            self._node = node
            assert killed, f"the node did not start: {said!r}"
            self.was_killed()
            return None
        return node

    def live(self, order: str, case: Case) -> dict[str, Any] | None:
        """The errand in the node that is up, or a new one; None: the node was killed."""
        node = self._node = self._node or self._start()
        assert node is not None
        assert node.stdin is not None and node.stdout is not None
        node.stdin.write(json.dumps({"order": order, "at": case.at, "victim": case.victim}) + "\n")
        node.stdin.flush()
        line = node.stdout.readline()
        if line:
            said: dict[str, Any] = json.loads(line)
            return said
        self.was_killed()
        return None

    def was_killed(self) -> None:
        """The node has ended, as a kill ends it."""
        node, self._node = self._node, None
        assert node is not None
        node.communicate()
        assert node.returncode == -signal.SIGKILL, f"the node ended by itself: {node.returncode}"
        self.kills += 1

    def errand(self, case: Case, order: str = "") -> dict[str, Any]:
        """One errand from its beginning to its end, with what the case kills; it must succeed. What the node said."""
        order = order or case.order
        self._orders.add(order)
        said = self.live(order, case)
        while said is None:
            said = self.live(order, Case())
        assert "found out" not in said["operated"], f"nobody asked the tool again: {said}"  # after one kill
        self._ended(said)
        return said

    def errands(self, orders: list[str]) -> None:
        """All at once, however often the node is killed meanwhile; all must succeed."""
        self._orders.update(orders)
        left = dict.fromkeys(orders)
        while left:
            node = self._node = self._node or self._start(killed=True)
            if node is None:
                continue
            assert node.stdin is not None and node.stdout is not None
            try:
                for order in left:
                    node.stdin.write(json.dumps({"order": order, "at": "", "victim": ""}) + "\n")
                node.stdin.flush()
            except BrokenPipeError:
                pass  # its stdout says the same
            while left and (line := node.stdout.readline()):
                said = json.loads(line)
                self._ended(said)
                del left[said["order"]]
            if left:
                self.was_killed()

    def _ended(self, said: dict[str, Any]) -> None:
        """The node says how an errand ended."""
        order = said["order"]
        self.operated.update(said["operated"])
        children = [5, 6]
        assert said["state"] == "SUCCEEDED", said
        assert said["result"] == {"order": order, "approved": True, "children": children}, said

    def close(self) -> None:
        """End the node as it ends by itself."""
        if (node := self._node) is not None:
            self._node = None
            _, _ = node.communicate()
            assert node.returncode == 0, node.returncode

    # --- what must hold ------------------------------------------------------------------

    def check(self) -> None:
        """Ends the node; then the ledger has every effect as its kind promises, and the store nothing left over."""
        self.close()
        faults = ledger_faults(self.folder, self._orders) + self.store_faults()
        assert not faults, faults

    def store_faults(self) -> list[str]:
        """[] when every run ended well, its head is its fold, and nobody waits, holds, is ready or is to be told."""
        found: list[str] = []
        runs = 0
        with open_store(self.folder / "store") as store:
            after = ""
            while page := store.scan_heads(after):
                after = page[-1].run_id
                for head in page:
                    runs += 1
                    if head.state != "SUCCEEDED":
                        found.append(f"{head.run_id} is {head.state}")
                    folded = fold(store.read_records(head.run_id))
                    if head_of(folded, head.run_id) != head:
                        found.append(f"{head.run_id}: its head is not its fold")
            for table in (READY, INBOX, OUTBOX, TIMERS, WAITS, LOCKS):
                found += [f"a row of {table} is left: {key!r}" for key, _ in store.scan_rows(table, b"", b"", 10)]
        if runs != _RUNS * len(self._orders):
            found.append(f"{runs} runs for {len(self._orders)} errands")
        return found


def in_lanes(errands: list[Errands], cases: list[Case]) -> int:
    """Each case as an errand of its own, the stores side by side; all are checked. How often nodes were killed."""

    def lane(number: int) -> int:
        with errands[number] as mine:
            for case in cases[number :: len(errands)]:
                mine.errand(case)
            mine.check()
        return mine.kills

    with ThreadPoolExecutor(len(errands)) as pool:
        return sum(pool.map(lane, range(len(errands))))


def passes(backend: str, folder: Path) -> list[str]:
    """All that an errand passes, each ``name:pass``; of two, since waits that are short are not always journaled."""
    with Errands(backend, folder, ALONE) as errands:
        found = [place for number in range(2) for place in errands.errand(Case("never"), f"dry {number}")["passed"]]
        errands.check()
    return list(dict.fromkeys(found))


def ledger_faults(folder: Path, orders: set[str]) -> list[str]:
    """[] when, of all these errands, keyed and reconcilable effects happened once, and at_most_once at most once."""
    effects: Counter[tuple[str, int]] = Counter()
    found: list[str] = []
    gave_up = given_up(folder)
    for entry in read_ledger(folder):
        if not entry["again"]:
            effects[entry["order"], entry["place"]] += 1
        if entry["kind"] == "at_most_once" and entry["attempt"] != 1:
            found.append(f"at_most_once in attempt {entry['attempt']}: {entry['order']}")
    for order in sorted(orders):
        for place, kind in KINDS.items():
            times = effects.pop((order, place), 0)
            least = 0 if kind == "at_most_once" and order in gave_up else 1
            if not least <= times <= 1:
                found.append(f"{order}: the {kind} effect {place} happened {times} times")
    return found + [f"nobody has ordered {key}" for key in effects]


@contextmanager
def open_store(folder: Path) -> Iterator[LmdbStore]:
    """The store of a node that has ended."""
    loop = asyncio.new_event_loop()
    store = LmdbStore(folder, loop, force_place=True)
    try:
        yield store
    finally:
        store.close()
        loop.close()
