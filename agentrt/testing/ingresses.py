"""The contract suite of ingresses: every sentence of agentrt/ingress/port.py as a test; and fakes of both sides.

    class TestAcmeIngress(IngressContract):
        @pytest.fixture
        def bus(self, tmp_path):
            with AcmeServer(tmp_path) as server:       # a real one if there is one
                yield AcmeBus(server)                  # see `Bus`

`FakeNode` stands for a node: what it accepted is durable, it refuses and hangs on demand. `MemoryBus` is a bus in
memory; its ingress passes this suite.
"""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import pytest
import uvloop

from agentrt.engine.accept import Asked, Origin
from agentrt.errors import AgentrtError, InputError, QueueFullError
from agentrt.ids import new_run_id
from agentrt.ingress.deadletters import DeadLetter
from agentrt.ingress.port import Delivery, Inbox, Ingress
from agentrt.ingress.service import Source, origin_of
from agentrt.ingress.settings import SourceConfig

_WAIT_S: Final = 60.0


class Bus(Protocol):
    """What the suite needs of a bus, from a plain thread. Topics are made by the first use; each test has new ones."""

    def publish(self, topic: str, payloads: Sequence[bytes]) -> None:
        """All are on the bus, for good, when this returns."""

    def ingress(self, topic: str) -> Ingress:
        """The plugin's ingress for the topic, always as the same consumer. Called inside the ingress loop."""

    def restart(self) -> None:
        """Stop the bus hard and start it again with what it has on disk; NotImplementedError if it cannot be."""


class FakeNode:
    """An `Acceptor` whose store is a dict. ``runs``: event's name -> (payload, run id)."""

    def __init__(self) -> None:
        self.runs: dict[str, tuple[bytes, str]] = {}
        self.letters: dict[str, DeadLetter] = {}
        self.digests: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        #: An error for what is not to be accepted.
        self.refuse: Callable[[bytes], AgentrtError | None] = lambda payload: None
        self._hangs = False
        self._unanswered: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    @property
    def hangs(self) -> bool:
        """Nothing is answered while this is set; what was asked meanwhile is answered afterwards."""
        return self._hangs

    @hangs.setter
    def hangs(self, value: bool) -> None:
        self._hangs = value
        if not value:
            unanswered, self._unanswered = self._unanswered, []
            for loop, answer in unanswered:
                if not loop.is_closed():  # of one that was killed
                    loop.call_soon_threadsafe(answer)

    def accept_event(self, asked: Asked) -> "asyncio.Future[str]":
        """Answers in the loop's next turn, as the node does later."""
        origin = asked.origin
        assert origin is not None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        self.asked[origin.text] += 1
        answer = partial(self._answer, future, asked.input, origin)
        if self._hangs:
            self._unanswered.append((loop, answer))
        else:
            loop.call_soon(answer)
        return future

    def _answer(self, future: "asyncio.Future[str]", payload: bytes, origin: Origin) -> None:
        if future.done():
            return
        assert self.digests.setdefault(origin.text, origin.digest) == origin.digest, f"{origin.text} changed"
        known = self.runs.get(origin.text)
        try:
            msgspec.json.decode(payload)
        except msgspec.DecodeError:
            error: AgentrtError | None = InputError("the input is not JSON")
        else:
            error = None if known is not None else self.refuse(payload)
        if error is not None:
            future.set_exception(error)
            return
        run_id = new_run_id() if known is None else known[1]
        self.runs[origin.text] = (payload, run_id)
        future.set_result(run_id)

    async def keep_letter(self, letter: DeadLetter) -> None:
        self.letters[origin_of(letter.delivery).text] = letter

    @property
    def payloads(self) -> list[bytes]:
        """Of the runs, in the order in which they were accepted."""
        return [payload for payload, _ in self.runs.values()]


class Watched:
    """An ingress whose acknowledgements are held to law 3; ``mute``: they are not passed on."""

    def __init__(self, inner: Ingress, node: FakeNode, mute: bool) -> None:
        self.inner, self._node = inner, node
        self.acknowledged = 0
        self.mute = mute
        self.paused: set[str] = set()
        self.wrong: list[str] = []

    async def run(self, inbox: Inbox) -> None:
        await self.inner.run(inbox)

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            name = origin_of(delivery).text
            if name not in self._node.runs and name not in self._node.letters:
                self.wrong.append(name)
        if not self.mute:
            await self.inner.acknowledge(deliveries)
            self.acknowledged += len(deliveries)

    def pause(self, partition: str) -> None:
        self.paused.add(partition)
        self.inner.pause(partition)

    def resume(self, partition: str) -> None:
        self.paused.discard(partition)
        self.inner.resume(partition)

    async def close(self) -> None:
        await self.inner.close()


class Consumer:
    """A source at work on a thread of its own, as in a node. ``mute``: it acknowledges nothing."""

    def __init__(self, bus: Bus, topic: str, node: FakeNode, *, mute: bool = False, **settings: Any) -> None:
        self.node, self.peak = node, 0
        self.ingress: Watched | None = None
        self._mute = mute
        self._started = threading.Event()
        self._bus, self._topic = bus, topic
        config = SourceConfig(kind="yours", topic=topic, agent="agent", **settings)
        self.source = Source(topic, config, self._make, node, again_s=0.01, remake_s=0.05)
        self._loop = uvloop.new_event_loop()
        self._task: asyncio.Task[None]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait()

    def _make(self) -> Ingress:
        self.ingress = Watched(self._bus.ingress(self._topic), self.node, self._mute)
        return self.ingress

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._task = asyncio.create_task(self.source.serve())
        watching = asyncio.create_task(self._watch())
        self._started.set()
        try:
            await self._task
        except asyncio.CancelledError:
            pass
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.source.statistics().held)
            await asyncio.sleep(0.001)

    def until(self, condition: Callable[[], bool], what: str = "that") -> None:
        """Blocks until the condition holds."""
        end = time.monotonic() + _WAIT_S
        while not condition():
            assert time.monotonic() < end, f"{what} never came: {self.source.statistics()}"
            assert self._thread.is_alive(), "the source has ended"
            time.sleep(0.005)

    def close(self) -> None:
        """As a node that stops."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive(), "the ingress does not end when it is cancelled"
        assert self.ingress is None or not self.ingress.wrong, "acknowledged before it was durable"

    def kill(self) -> None:
        """As a node that dies: what was not acknowledged by now never is."""
        assert self.ingress is not None
        self.ingress.mute = True
        self.close()


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Payloads, each another one."""
    return [b'{"n":%d}' % n for n in range(start, start + count)]


def _full(payload: bytes) -> AgentrtError:
    return QueueFullError("the queue is full")


class IngressContract:
    """Subclass it, give it ``bus``, and pytest runs it all. ``batch_max``: the most events that it delivers of a
    partition after it was told to pause, which it may have fetched before."""

    batch_max = 1_000

    @pytest.fixture
    def bus(self) -> Bus:
        raise NotImplementedError("the subclass says where the bus is")

    @pytest.fixture
    def topic(self) -> str:
        """A new one."""
        return "t" + new_run_id().lower().replace("_", "")

    @pytest.fixture
    def node(self) -> FakeNode:
        return FakeNode()

    @pytest.fixture
    def consume(self, bus: Bus, node: FakeNode) -> Iterator[Callable[..., Consumer]]:
        """``consume(topic, **settings)``: a consumer, which is closed after the test."""
        made: list[Consumer] = []

        def consume(topic: str, **settings: Any) -> Consumer:
            made.append(Consumer(bus, topic, node, **settings))
            return made[-1]

        yield consume
        for consumer in made:
            consumer.close()

    def test_every_event_becomes_one_run(self, bus: Bus, topic: str, node: FakeNode, consume: Any) -> None:
        bus.publish(topic, numbered(150))
        consumer = consume(topic)
        consumer.until(lambda: len(node.runs) >= 150)
        bus.publish(topic, numbered(150, 150))  # while it listens
        consumer.until(lambda: len(node.runs) >= 300)
        consumer.until(lambda: consumer.source.statistics().acknowledged >= 300, "an acknowledgement")
        assert sorted(node.payloads) == sorted(numbered(300))
        assert set(node.asked.values()) == {1}

    def test_what_was_acknowledged_does_not_come_again(
        self, bus: Bus, topic: str, node: FakeNode, consume: Any
    ) -> None:
        bus.publish(topic, numbered(50))
        first = consume(topic)
        first.until(lambda: len(node.runs) >= 50)
        first.close()  # acknowledges what it has
        second = consume(topic)
        bus.publish(topic, numbered(1, 50))
        second.until(lambda: len(node.runs) >= 51)
        assert second.source.statistics().delivered == 1

    def test_what_was_not_accepted_comes_again(self, bus: Bus, topic: str, node: FakeNode, consume: Any) -> None:
        """The node dies with all of it under way."""
        node.hangs = True
        bus.publish(topic, numbered(50))
        first = consume(topic)
        first.until(lambda: len(node.asked) > 0)
        first.kill()
        assert not node.runs
        node.hangs = False
        consume(topic).until(lambda: len(node.runs) >= 50)
        assert sorted(node.payloads) == sorted(numbered(50))

    def test_what_was_accepted_and_not_acknowledged_comes_again_under_its_name(
        self, bus: Bus, topic: str, node: FakeNode, consume: Any
    ) -> None:
        """The node dies between the two: the event has the same name, stamp and payload, so no second run comes of
        it."""
        bus.publish(topic, numbered(50))
        first = consume(topic, mute=True)
        first.until(lambda: len(node.runs) >= 50)
        first.kill()
        second = consume(topic)
        second.until(lambda: second.source.statistics().accepted >= 50, "what was not acknowledged")
        assert sorted(node.payloads) == sorted(numbered(50))

    def test_events_of_a_partition_come_in_order(self, bus: Bus, topic: str, node: FakeNode, consume: Any) -> None:
        bus.publish(topic, numbered(100))
        consume(topic).until(lambda: len(node.runs) >= 100)
        places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for name, (payload, _) in node.runs.items():
            source, partition, offset = name.split(" ")
            places[f"{source} {partition}"].append((int(offset), msgspec.json.decode(payload)["n"]))
        for found in places.values():
            assert found == sorted(found) and [n for _, n in found] == sorted(n for _, n in found)

    def test_under_pressure_it_is_paused_and_nothing_is_dropped(
        self, bus: Bus, topic: str, node: FakeNode, consume: Any
    ) -> None:
        node.refuse = _full
        consumer = consume(topic, held_items_max=100)
        bus.publish(topic, numbered(2_000))
        consumer.until(lambda: consumer.ingress is not None and bool(consumer.ingress.paused), "a pause")
        consumer.until(lambda: consumer.source.statistics().refused > 20)
        assert not node.runs and consumer.source.statistics().acknowledged == 0
        node.refuse = lambda payload: None
        consumer.until(lambda: len(node.runs) >= 2_000)
        assert sorted(node.payloads) == sorted(numbered(2_000))
        assert consumer.peak <= 100 + self.batch_max
        consumer.until(lambda: not consumer.ingress.paused, "a resumption")

    def test_how_much_is_left_is_told_if_the_bus_knows(
        self, bus: Bus, topic: str, node: FakeNode, consume: Any
    ) -> None:
        """`Inbox.behind`, which is for operators: an ingress that never calls it passes."""
        node.refuse = _full
        bus.publish(topic, numbered(2_000))
        consumer = consume(topic, held_items_max=100)
        consumer.until(lambda: consumer.ingress is not None and bool(consumer.ingress.paused), "a pause")
        consumer.until(lambda: consumer.source.statistics().refused > 20)
        found = consumer.source.statistics()
        assert found.held <= found.lag <= 2_000
        if found.lag == found.held:
            pytest.skip("this bus does not tell")
        node.refuse = lambda payload: None
        consumer.until(lambda: len(node.runs) >= 2_000)
        consumer.until(lambda: consumer.source.statistics().lag == 0, "an end")

    def test_a_topic_that_waits_keeps_no_other_one_waiting(
        self, bus: Bus, topic: str, node: FakeNode, consume: Any
    ) -> None:
        """A full tier 2 beside tier 0."""
        node.refuse = lambda payload: None if b"urgent" in payload else _full(payload)
        low, urgent = f"{topic}low", f"{topic}urgent"
        bus.publish(low, numbered(500))
        below = consume(low, tier=2, held_items_max=50)
        below.until(lambda: below.ingress is not None and bool(below.ingress.paused), "a pause")
        above = consume(urgent, tier=0)
        bus.publish(urgent, [b'{"urgent":%d}' % n for n in range(100)])
        above.until(lambda: len(node.runs) >= 100)
        assert not any(b'"n"' in payload for payload in node.payloads)
        node.refuse = lambda payload: None
        below.until(lambda: len(node.runs) >= 600)

    def test_poison_goes_to_the_dead_letters_and_the_rest_goes_on(
        self, bus: Bus, topic: str, node: FakeNode, consume: Any
    ) -> None:
        poison = [b"{broken", b"\xff\xfe", b"x" * 10_000]
        good = numbered(20)
        bus.publish(topic, [*good[:10], *poison, *good[10:]])
        consumer = consume(topic)
        consumer.until(lambda: len(node.runs) >= 20 and len(node.letters) >= len(poison))
        consumer.until(lambda: consumer.source.statistics().acknowledged >= 20 + len(poison), "an acknowledgement")
        assert sorted(node.payloads) == sorted(good)
        letters = node.letters.values()
        assert sorted(letter.delivery.payload for letter in letters) == sorted(poison)
        assert all(letter.code == "input" and letter.message for letter in letters)
        consumer.close()
        again = consume(topic)
        bus.publish(topic, numbered(1, 20))
        again.until(lambda: len(node.runs) >= 21)
        assert again.source.statistics().delivered == 1

    def test_it_ends_when_it_is_cancelled_whatever_it_does(self, bus: Bus, topic: str, consume: Any) -> None:
        idle = consume(topic)
        idle.close()
        at_once = consume(topic)
        at_once.close()

    def test_it_goes_on_after_the_bus_was_restarted(self, bus: Bus, topic: str, node: FakeNode, consume: Any) -> None:
        bus.publish(topic, numbered(50))
        consumer = consume(topic)
        consumer.until(lambda: len(node.runs) >= 50)
        try:
            bus.restart()
        except NotImplementedError:
            pytest.skip("this bus cannot be restarted")
        bus.publish(topic, numbered(50, 50))
        consumer.until(lambda: len(node.runs) >= 100)
        assert sorted(node.payloads) == sorted(numbered(100))


# --- a bus in memory --------------------------------------------------------------


class MemoryBus:
    """Topics with partitions, and how far their one consumer has acknowledged; outlives its ingresses. Any thread."""

    def __init__(self, partitions: int = 2, batch: int = 50) -> None:
        self._count, self._batch = partitions, batch
        self._lock = threading.Lock()
        self.events: dict[str, list[list[bytes]]] = {}
        self.positions: dict[tuple[str, str], int] = {}
        self.epoch = 0  # counts restarts
        self._listeners: list[Callable[[], None]] = []

    def publish(self, topic: str, payloads: Sequence[bytes]) -> None:
        """In turn to the partitions."""
        with self._lock:
            partitions = self.events.setdefault(topic, [[] for _ in range(self._count)])
            for payload in payloads:
                min(partitions, key=len).append(payload)
            for listener in self._listeners:
                listener()

    def ingress(self, topic: str) -> "MemoryIngress":
        """A consumer of the topic."""
        return MemoryIngress(self, topic, self._batch)

    def restart(self) -> None:
        """Everybody who listens is thrown out."""
        with self._lock:
            self.epoch += 1
            for listener in self._listeners:
                listener()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """``listener()`` after each publish, on the thread that did; what ends it."""
        with self._lock:
            self._listeners.append(listener)
        return partial(self._unlisten, listener)

    def _unlisten(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def read(self, topic: str, partition: int, start: int, count: int) -> list[bytes]:
        """Events from an offset on."""
        with self._lock:
            found = self.events.get(topic)
            return [] if found is None else found[partition][start : start + count]

    def size(self, topic: str, partition: int) -> int:
        """How many events it has."""
        with self._lock:
            found = self.events.get(topic)
            return 0 if found is None else len(found[partition])

    def acknowledge(self, topic: str, positions: Mapping[str, int]) -> None:
        """So far for each partition."""
        with self._lock:
            for partition, position in positions.items():
                place = (topic, partition)
                self.positions[place] = max(position, self.positions.get(place, 0))

    @property
    def partitions(self) -> range:
        return range(self._count)


class MemoryIngress:
    """The ingress of a `MemoryBus`: the smallest that keeps the contract."""

    def __init__(self, bus: MemoryBus, topic: str, batch: int) -> None:
        self._bus, self._topic, self._batch = bus, topic, batch
        self._paused: set[str] = set()
        self._inbox: Inbox | None = None
        self._news = asyncio.Event()

    async def run(self, inbox: Inbox) -> None:
        """See `Ingress`."""
        loop, bus, epoch = asyncio.get_running_loop(), self._bus, self._bus.epoch
        self._inbox = inbox

        def listener() -> None:
            loop.call_soon_threadsafe(self._news.set)

        unlisten = bus.listen(listener)
        places = {str(number): bus.positions.get((self._topic, str(number)), 0) for number in bus.partitions}
        inbox.assign(places)
        try:
            while bus.epoch == epoch:
                self._news.clear()
                if not self._fetch(inbox, places):
                    await self._news.wait()
                await asyncio.sleep(0)
            raise ConnectionResetError("the bus was restarted")
        finally:
            unlisten()

    def _fetch(self, inbox: Inbox, places: dict[str, int]) -> int:
        count = 0
        for partition in places:
            if partition in self._paused:
                continue
            for payload in self._bus.read(self._topic, int(partition), places[partition], self._batch):
                inbox.deliver(Delivery(f"memory:{self._topic}", partition, places[partition], payload, self._topic))
                places[partition] += 1
                count += 1
            inbox.behind(partition, self._bus.size(self._topic, int(partition)) - places[partition])
        return count

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """See `Ingress`: this bus counts, so the position is what is told."""
        assert self._inbox is not None
        positions = {found.partition: self._inbox.position(found.partition) for found in deliveries}
        self._bus.acknowledge(self._topic, {name: place for name, place in positions.items() if place is not None})

    def pause(self, partition: str) -> None:
        """See `Ingress`."""
        self._paused.add(partition)

    def resume(self, partition: str) -> None:
        """See `Ingress`."""
        self._paused.discard(partition)
        self._news.set()

    async def close(self) -> None:
        """See `Ingress`."""
