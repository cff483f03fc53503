"""kill -9 and SIGTERM under load: what a client was told is accepted ends, once, and a restart that was announced shows
clients nothing but errors that say to try again. The client keeps its own books."""

import contextlib
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from serve_kit import AGENTS, Serving

from agentrt.client import Client
from agentrt.errors import StepSettledError, UnreachableError

FIXTURE = Path(__file__).with_name("kills_fixture.py")
SETTINGS = f'[node]\nload = ["{FIXTURE}"]\n'


class Callers:
    """Threads that do their work over and over until they are told to stop."""

    def __init__(self, url: str, key: str, works: Sequence[Callable[[Client], None]]) -> None:
        self.raised: list[BaseException] = []
        self._stop = threading.Event()
        self._told = threading.Condition()
        self._made = 0
        self._threads = [threading.Thread(target=self._guard, args=(url, key, work)) for work in works]
        for thread in self._threads:
            thread.start()

    def _guard(self, url: str, key: str, work: Callable[[Client], None]) -> None:
        try:
            with Client(url, key=key, attempts_max=10_000) as client:
                while not self._stop.is_set():
                    work(client)
                    with self._told:
                        self._made += 1
                        self._told.notify_all()
        except BaseException as error:
            self.raised.append(error)
            with self._told:
                self._told.notify_all()

    def until(self, more: int) -> None:
        """So many more rounds were made."""
        with self._told:
            wanted = self._made + more
            assert self._told.wait_for(lambda: self._made >= wanted or self.raised, 100)
        assert not self.raised, self.raised

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(100)
            assert not thread.is_alive()
        assert not self.raised, self.raised


class Customers(Callers):
    """They order; each order is asked for until it is acknowledged."""

    def __init__(self, url: str, key: str, book: Path, threads: int) -> None:
        self.acknowledged: dict[str, str] = {}
        self._book = book
        self._numbers = itertools.count()
        super().__init__(url, key, [self._order] * threads)

    def _order(self, client: Client) -> None:
        order = f"order-{next(self._numbers)}"
        given = {"path": str(self._book), "order": order}
        self.acknowledged[order] = client.submit("errand", given, idempotency_key=order).run_id


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


class Staff(Callers):
    """One of each kind of caller; all keep what they were told. Whatever the client may ask again it does; what it may
    not is asked again here, by the books."""

    def __init__(self, url: str, key: str) -> None:
        self.results: dict[str, object] = {}
        super().__init__(url, key, (self._order, self._decide, self._look, self._send))

    def _order(self, client: Client) -> None:
        run_id = client.submit("greet", "Ada").run_id
        self.results[run_id] = client.result(run_id)
        assert self.results[run_id] == "hello Ada"

    def _decide(self, client: Client) -> None:
        run_id = client.submit("ask").run_id
        while True:
            if any(event.kind == "step_prepared" for event in itertools.islice(client.events(run_id), 2)):
                break
        try:
            client.approve(run_id, by="Grace")
        except UnreachableError:  # the one error that says: nobody knows; looking tells
            if client.run(run_id).state != "SUCCEEDED":
                with contextlib.suppress(StepSettledError):
                    client.approve(run_id, by="Grace")
        assert client.result(run_id) == {"approved": True, "by": "Grace"}
        cancelled = client.submit("ask").run_id
        client.cancel(cancelled)
        for _ in client.events(cancelled):
            pass
        assert client.run(cancelled).state == "CANCELLED"

    def _look(self, client: Client) -> None:
        assert {agent.name for agent in client.agents().agents} >= {"greet", "ask"}
        for run in client.runs(limit=5).runs:
            assert client.run(run.run_id).run_id == run.run_id
            client.steps(run.run_id)
        client.queues()

    def _send(self, client: Client) -> None:
        assert client.send({"n": 1}, topic="news", id="the-same").id == "the-same"


def rolling(folder: Path, restarts: int, rounds: int) -> None:
    """One node after the other on the same store and port, by SIGTERM, every second time drained before."""
    settings = f'[node]\nload = ["{AGENTS}"]\n'
    node = Serving(folder, settings)
    staff = Staff(node.url, node.key)
    try:
        for number in range(restarts):
            with node:
                staff.until(rounds)
                if number % 2:
                    with node.client() as client:
                        client.drain(park=True)
                assert node.stop() == 0
            node = Serving(folder, settings, key=node.key, port=node.port)
        with node:
            staff.until(rounds)
            staff.stop()
            assert staff.results
            assert node.stop() == 0
    finally:
        staff._stop.set()


def test_a_rolling_restart_shows_clients_nothing_but_what_they_may_ask_again(tmp_path: Path) -> None:
    rolling(tmp_path, 2, 8)


@pytest.mark.sweep
@pytest.mark.timeout(3_600)
def test_many_rolling_restarts(tmp_path: Path) -> None:
    rolling(tmp_path, 20, 40)


@pytest.mark.sweep
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(5))
def test_many_lives(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ends = chance.choices([signal.SIGKILL, signal.SIGTERM], k=12)
    lives(tmp_path, ends, threads=16, orders=100, chance=chance)
