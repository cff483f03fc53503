"""Nodes that run errands, are killed and started again, and what must be true of their store and ledger afterwards."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from errand_tools import KINDS, read_ledger

from agentrt.engine.crashpoints import EVERY, VARIABLE
from agentrt.fold import fold, head_of
from agentrt.stores.base import INBOX, LOCKS, OUTBOX, READY, TIMERS, WAITS
from agentrt.stores.lmdb import LmdbStore

NODE: Final = Path(__file__).with_name("errand_node.py")
#: Tool calls around which the tool itself kills.
EFFECTS: Final = [f"effect.{when}:{place}" for place in KINDS for when in ("before", "after")]
_RUNS: Final = 3  # of an errand: it and its two children


class Case(NamedTuple):
    """SIGKILL for the victim at a pass. "" and "": nobody is killed."""

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
        self._gave_up: set[str] = set()
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

    def _start(self) -> subprocess.Popen[str]:
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
        assert said == "ready\n", f"the node did not start: {said!r}"
        return node

    def live(self, order: str, case: Case) -> dict[str, Any] | None:
        """The errand in the node that is up, or a new one; None: the node was killed."""
        node = self._node = self._node or self._start()
        assert node.stdin is not None and node.stdout is not None
        node.stdin.write(json.dumps({"order": order, "at": case.at, "victim": case.victim}) + "\n")
        node.stdin.flush()
        line = node.stdout.readline()
        if line:
            said: dict[str, Any] = json.loads(line)
            return said
        self._node = None
        node.communicate()
        assert node.returncode == -signal.SIGKILL, node.returncode
        self.kills += 1
        return None

    def errand(self, case: Case, order: str = "") -> dict[str, Any]:
        """One errand from its beginning to its end, with what the case kills; it must succeed. What the node said."""
        order = order or case.order
        self._orders.add(order)
        said = self.live(order, case)
        while said is None:
            said = self.live(order, Case())
        self.operated.update(said["operated"])
        if "gave up" in said["operated"]:
            self._gave_up.add(order)
        children = [5, 6]
        assert said["state"] == "SUCCEEDED", (case, said)
        assert said["result"] == {"order": order, "approved": True, "children": children}, (case, said)
        return said

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
        assert self.ledger_faults() == []
        assert self.store_faults() == []

    def ledger_faults(self) -> list[str]:
        """[] when keyed and reconcilable effects happened once, and at_most_once at most once."""
        effects: Counter[tuple[str, int]] = Counter()
        found: list[str] = []
        for entry in read_ledger(self.folder):
            if not entry["again"]:
                effects[entry["order"], entry["place"]] += 1
            if entry["kind"] == "at_most_once" and entry["attempt"] != 1:
                found.append(f"at_most_once in attempt {entry['attempt']}: {entry['order']}")
        for order in sorted(self._orders):
            for place, kind in KINDS.items():
                times = effects.pop((order, place), 0)
                least = 0 if kind == "at_most_once" and order in self._gave_up else 1
                if not least <= times <= 1:
                    found.append(f"{order}: the {kind} effect {place} happened {times} times")
        return found + [f"nobody has ordered {key}" for key in effects]

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
