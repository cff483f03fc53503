"""kill -9 and SIGTERM under load: what a client was told is accepted ends, once, and a restart that was announced shows
clients nothing but errors that say to try again. The client keeps its own books."""

import itertools
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from serve_kit import Serving

from agentrt.client import Client

FIXTURE = Path(__file__).with_name("kills_fixture.py")
SETTINGS = f'[node]\nload = ["{FIXTURE}"]\n'


class Customers:
    """Threads that order until they are told to stop; each order is asked for until it is acknowledged."""

    def __init__(self, url: str, key: str, book: Path, threads: int) -> None:
        self.acknowledged: dict[str, str] = {}
        self.raised: list[BaseException] = []
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._told = threading.Condition()
        self._threads = [threading.Thread(target=self._order, args=(url, key, book)) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _order(self, url: str, key: str, book: Path) -> None:
        try:
            with Client(url, key=key, attempts_max=10_000) as client:
                while not self._stop.is_set():
                    order = f"order-{next(self._numbers)}"
                    given = {"path": str(book), "order": order}
                    accepted = client.submit("errand", given, idempotency_key=order)
                    with self._told:
                        self.acknowledged[order] = accepted.run_id
                        self._told.notify_all()
        except BaseException as error:
            self.raised.append(error)
            with self._told:
                self._told.notify_all()

    def until(self, more: int) -> None:
        """So many more orders were acknowledged."""
        with self._told:
            wanted = len(self.acknowledged) + more
            assert self._told.wait_for(lambda: len(self.acknowledged) >= wanted or self.raised, 100)
        assert not self.raised, self.raised

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(100)
            assert not thread.is_alive()
        assert not self.raised, self.raised


def lives(folder: Path, ends: list[int], *, threads: int, orders: int, chance: random.Random) -> None:
    book = folder / "book"
    node = Serving(folder, SETTINGS)
    customers = Customers(node.url, node.key, book, threads)
    try:
        for end in ends:
            with node:
                customers.until(orders)
                time.sleep(chance.random() * 0.2)  # not to wait for anything: to end at another place each time
                assert node.stop(end) == (0 if end == signal.SIGTERM else -end)
            node = Serving(folder, SETTINGS, key=node.key, port=node.port)
        customers.until(orders)
    finally:
        customers._stop.set()
    customers.stop()
    with node, node.client() as client:
        for order, run_id in customers.acknowledged.items():
            assert client.result(run_id) == order
        runs, after = [], None
        while True:
            page = client.runs(limit=500, after=after)
            runs += page.runs
            after = page.next
            if after is None:
                break
        assert sorted(run.run_id for run in runs) == sorted(customers.acknowledged.values())
        assert node.stop() == 0
    written = set(book.read_text().splitlines())
    # The same order under two keys would be two effects; under one, repeating it is the callee's to see.
    assert sorted(line.split()[0] for line in written) == sorted(customers.acknowledged)


def test_what_was_acknowledged_ends_once(tmp_path: Path) -> None:
    ends = [signal.SIGKILL, signal.SIGTERM]
    lives(tmp_path, ends, threads=4, orders=15, chance=random.Random(1))


@pytest.mark.sweep
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(5))
def test_many_lives(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ends = chance.choices([signal.SIGKILL, signal.SIGTERM], k=12)
    lives(tmp_path, ends, threads=16, orders=100, chance=chance)
