"""The ingress thread: plugins' ingresses at work, and the way from their events to runs.

One loop for all of them, beside the control loop; each source has a `Book` that says what is next, so what one source
waits for holds up no other. An event's way: delivered, named (`Origin`), classified, accepted by the engine in one
transaction with its name, acknowledged. What the engine refuses for now waits; what it refuses for good is a dead
letter, durable before it is acknowledged.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future as ThreadFuture
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import uvloop

from agentrt.digest import digest
from agentrt.engine.accept import Asked, Origin, Via
from agentrt.errors import AgentrtError, ClosedError, DeniedError, InputError, InternalError, QueueFullError
from agentrt.flow.classifier import Classified, Classifier, Rule
from agentrt.flow.classifier import Ingress as Event
from agentrt.ingress.book import Book, Held
from agentrt.ingress.deadletters import DeadLetter
from agentrt.ingress.port import OFFSET_MAX, Delivery, Ingress
from agentrt.ingress.settings import SourceConfig
from agentrt.tiers import Tier

#: What was refused for a reason of the node's own is tried again after so long, longer each time.
AGAIN_S: Final = 0.05
_AGAIN_S_MAX: Final = 5.0
#: The most that the engine's own word about when to ask again is believed.
_AFTER_S_MAX: Final = 60.0
#: An ingress that raised is made again after so long, longer each time.
_REMAKE_S: Final = 0.5
_REMAKE_S_MAX: Final = 30.0
_CLOSE_S: Final = 5.0
#: Attempts at an event on which the node itself fails; then it is a dead letter.
_INTERNAL_ATTEMPTS_MAX: Final = 5
_NAME_CHARS_MAX: Final = 200

_log: Final = logging.getLogger(__name__)

Accepted = Callable[[str | None, BaseException | None], None]


class Acceptor(Protocol):
    """What the service needs of a node. `Runtime` has it; `agentrt.testing.ingresses` has one for tests."""

    def accept_event(self, asked: Asked) -> "asyncio.Future[str]":
        """The run that the event has become, durably. Fails with what `Runtime.submit` raises."""

    async def keep_letter(self, letter: DeadLetter) -> None:
        """Make it durable. Raises QueueFullError when there are too many, StoreError kinds."""


class SourceStatistics(msgspec.Struct, frozen=True):
    """``state``: connecting, running, or why it is not. ``failures``: how often it was made again."""

    state: str
    delivered: int
    repeated: int  # deliveries of what was here already
    accepted: int
    dead: int
    refused: int  # attempts that were refused for now
    held: int
    held_bytes: int
    acknowledged: int
    failures: int
    lag: int  # events that are held, or were on the bus at its last word
    paused: list[str]


class Source:
    """One source at work: the `Inbox` of its ingress. On the ingress loop only."""

    def __init__(
        self,
        name: str,
        config: SourceConfig,
        make: Callable[[], Ingress],
        node: Acceptor,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        chance: Callable[[], float] = random.random,
        again_s: float = AGAIN_S,
        remake_s: float = _REMAKE_S,
    ) -> None:
        """Raises ConfigError for a key that cannot be made."""
        self.name, self.config = name, config
        self._make, self._node, self._now_ns, self._chance = make, node, now_ns, chance
        self._again_s, self._remake_s = again_s, remake_s
        rules = [Rule(door="bus", set_key=config.key)] if config.key else []
        self._classifier = Classifier(rules)
        self._book = Book(config.held_items_max, config.held_bytes_max)
        self._ingress: Ingress | None = None
        self._settled: list[Delivery] = []
        self._work = asyncio.Event()  # something was settled
        self._idle = asyncio.Event()  # an event is not under way any more
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._state = "connecting"
        self._stopping = False
        self._delivered = self._repeated = self._accepted = self._dead = self._refused = 0
        self._acknowledged = self._acknowledging = self._failures = 0

    def statistics(self) -> SourceStatistics:
        """Counters since the start, and what there is now."""
        book = self._book
        return SourceStatistics(
            self._state,
            self._delivered,
            self._repeated,
            self._accepted,
            self._dead,
            self._refused,
            book.held,
            book.held_bytes,
            self._acknowledged,
            self._failures,
            book.lag,
            book.paused(),
        )

    # --- life ---

    async def serve(self) -> None:
        """Make the ingress, and make it again when it fails, until cancelled."""
        pause_s = self._remake_s
        while True:
            began = time.monotonic()
            try:
                await self._serve_once()
                why = "it ended"
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:500]
            self._failures += 1
            self._state = f"failed: {why}"
            if time.monotonic() - began > _REMAKE_S_MAX:
                pause_s = self._remake_s
            _log.error("ingress %s (%s) is made again in %.1f s: %s", self.name, self.config.kind, pause_s, why)
            await asyncio.sleep(pause_s * (0.5 + self._chance()))
            pause_s = min(_REMAKE_S_MAX, pause_s * 2)

    async def _serve_once(self) -> None:
        self._state = "connecting"
        self._book = Book(self.config.held_items_max, self.config.held_bytes_max)
        self._settled = []
        ingress = self._make()
        self._ingress = ingress
        running = asyncio.ensure_future(ingress.run(self))
        acknowledging = asyncio.ensure_future(self._acknowledge(ingress))
        try:
            done, _ = await asyncio.wait((running, acknowledging), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            self._stopping = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._finish(ingress)
            raise
        finally:
            self._ingress = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for task in (running, acknowledging):
                task.cancel()
            await asyncio.gather(running, acknowledging, return_exceptions=True)
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await ingress.close()
            except Exception as error:
                _log.error("ingress %s (%s) could not be closed: %r", self.name, self.config.kind, error)

    async def _finish(self, ingress: Ingress) -> None:
        """What is under way comes to its end, and is acknowledged."""
        for name in self._book.partitions():
            ingress.pause(name)
        book = self._book
        while self._settled or self._acknowledging or any(book.under_way(name) for name in book.partitions()):
            self._idle.clear()
            await self._idle.wait()

    async def _acknowledge(self, ingress: Ingress) -> None:
        while True:
            if not self._settled:
                self._work.clear()
                await self._work.wait()
            settled, self._settled = self._settled, []
            self._acknowledging = len(settled)
            try:
                await ingress.acknowledge(settled)
                self._acknowledged += len(settled)
            except Exception as error:  # they come again, which is harmless
                _log.warning("ingress %s could not acknowledge %d events: %r", self.name, len(settled), error)
            self._acknowledging = 0
            self._idle.set()

    # --- Inbox ---

    def assign(self, partitions: Iterable[str]) -> None:
        """See `Inbox`."""
        self._state = "running"
        self._book.assign(partitions)

    def deliver(self, delivery: Delivery) -> None:
        """See `Inbox`."""
        check_name(delivery)
        self._state = "running"
        found = self._classified(delivery)
        tier = int(Tier.INTERACTIVE) if found.tier is None else found.tier
        if self._book.deliver(delivery, tier, found.tenant, found) is None:
            self._repeated += 1
            return
        self._delivered += 1
        if self._book.must_pause(delivery.partition):
            self._react()  # at once: an ingress may have much at hand
        self._soon()

    def behind(self, partition: str, events: int) -> None:
        """See `Inbox`."""
        self._book.behind(partition, max(0, events))

    def position(self, partition: str) -> int | None:
        """See `Inbox`."""
        return self._book.position(partition)

    async def revoke(self, partitions: Iterable[str], timeout_s: float) -> dict[str, int]:
        """See `Inbox`."""
        names = [*partitions]
        positions: dict[str, int] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while any(self._book.under_way(name) for name in names):
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass  # what is not settled by now comes again, elsewhere
        for name in names:
            position = self._book.position(name)
            if position is not None:
                positions[name] = position
            self._book.revoke(name)
        gone = set(names)
        self._settled = [found for found in self._settled if found.partition not in gone]
        self._react()
        return positions

    # --- from events to runs ---

    def _pump(self) -> None:
        self._pumping = False
        if self._ingress is None or self._stopping:
            return
        now = self._now_ns()
        while (held := self._book.take(now)) is not None:
            self._send(held)
        self._react()

    def _react(self) -> None:
        """Pause, resume, and look again when something may be tried."""
        ingress = self._ingress
        if ingress is None:
            return
        pause, resume = self._book.changes()
        for name in pause:
            ingress.pause(name)
        for name in resume:
            ingress.resume(name)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (again_ns := self._book.next_ns()) is not None:
            wait_s = max(0.001, (again_ns - self._now_ns()) / 1e9)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._pump)

    def _send(self, held: Held) -> None:
        delivery = held.delivery
        found: Classified = held.token
        if found.refused:
            self._bury(held, InputError(found.refused))
            return
        try:
            sending = self._node.accept_event(self._asked(delivery, found))
        except AgentrtError as error:  # ClosedError
            self._again(held, error)
        else:
            sending.add_done_callback(partial(self._answered, held, self._book))

    def _asked(self, delivery: Delivery, found: Classified) -> Asked:
        headers = {name.lower(): value for name, value in delivery.headers.items()}
        return Asked(
            found.agent,
            delivery.payload,
            found.tenant,
            found.tier,
            found.key,
            # At the door it stands among all others, by tier and tenant.
            via=Via("bus", delivery.topic or self.config.topic, delivery.type, headers, wait=True),
            origin=origin_of(delivery),
        )

    def _classified(self, delivery: Delivery) -> Classified:
        config = self.config
        payload: Any = None
        if config.key:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                payload = msgspec.json.decode(delivery.payload)
        event = Event(
            "bus",
            config.tenant,
            delivery.topic or config.topic,
            delivery.type,
            {name.lower(): value for name, value in delivery.headers.items()},
            payload,
            config.agent,
            None if config.tier < 0 else config.tier,
        )
        return self._classifier.classify(event, self._now_ns())

    def _answered(self, held: Held, book: Book, answer: "asyncio.Future[str]") -> None:
        self._idle.set()
        if book is not self._book:
            return  # of an ingress that has failed since: it is delivered again
        if answer.cancelled():
            self._again(held, None)
            return
        error = answer.exception()
        if error is None:
            self._accepted += 1
            self._settle(held)
        elif is_for_good(error) or (isinstance(error, InternalError) and held.again >= _INTERNAL_ATTEMPTS_MAX):
            self._bury(held, error)
        else:
            self._again(held, error)

    def _settle(self, held: Held) -> None:
        if self._book.settle(held):
            self._settled.append(held.delivery)
            self._work.set()
        self._soon()

    def _again(self, held: Held, error: BaseException | None) -> None:
        self._refused += 1
        after_s = getattr(error, "retry_after_s", None)
        least_s = min(float(after_s), _AFTER_S_MAX) if isinstance(after_s, int | float) else 0.0

        def pause_ns(refusals: int) -> int:
            pause_s = min(_AGAIN_S_MAX, self._again_s * 2.0 ** min(refusals, 10)) * (0.5 + self._chance())
            return round(max(pause_s, least_s) * 1e9)

        if held.again == 0 and not isinstance(error, QueueFullError | ClosedError):
            _log.warning("ingress %s waits: %s", self.name, error)
        self._book.refuse(held, self._now_ns(), pause_ns)
        self._soon()

    def _soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _bury(self, held: Held, error: BaseException) -> None:
        found: Classified = held.token
        code = error.code if isinstance(error, AgentrtError) else "internal"
        tier = -1 if found.tier is None else found.tier
        letter = DeadLetter(
            self.name,
            held.delivery,
            found.agent,
            found.tenant,
            tier,
            code,
            str(error)[:1000],
            self._now_ns(),
            found.key,
        )
        keeping = asyncio.ensure_future(self._node.keep_letter(letter))
        keeping.add_done_callback(partial(self._buried, held, self._book))

    def _buried(self, held: Held, book: Book, kept: "asyncio.Future[None]") -> None:
        self._idle.set()
        if book is not self._book:
            return
        if kept.cancelled() or (error := kept.exception()) is not None:
            self._again(held, None if kept.cancelled() else error)
            return
        self._dead += 1
        _log.warning("ingress %s: %s is a dead letter", self.name, origin_of(held.delivery).text)
        self._settle(held)


def check_name(delivery: Delivery) -> None:
    """Raises InputError unless the event's name is one."""
    for part in (delivery.source, delivery.partition):
        if not 0 < len(part) <= _NAME_CHARS_MAX or not part.isprintable() or " " in part:
            raise InputError(f"{part!r:.100} names no source or partition of a bus")
    if not 0 <= delivery.offset <= OFFSET_MAX:
        raise InputError(f"{delivery.offset} is no offset")


def origin_of(delivery: Delivery) -> Origin:
    """The event's name, and the digest of what must be the same at each delivery of it."""
    text = f"{delivery.source} {delivery.partition} {delivery.offset}"
    return Origin(text, digest(delivery.stamp.encode() + b"\0" + delivery.payload))


def is_for_good(error: BaseException) -> bool:
    """Whether trying again would end the same, as far as anybody can tell without a person."""
    return isinstance(error, InputError | DeniedError)


class IngressService:
    """All sources of a node. ``makes``: name -> (settings, what makes the ingress)."""

    def __init__(self, makes: Mapping[str, tuple[SourceConfig, Callable[[], Ingress]]], node: Acceptor) -> None:
        """Raises ConfigError."""
        self._sources = {name: Source(name, config, make, node) for name, (config, make) in makes.items()}
        self._thread = threading.Thread(target=self._run, name="agentrt-ingress", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: ThreadFuture[None] = ThreadFuture()
        self._stop = asyncio.Event()

    def start(self) -> None:
        """Returns when the loop runs; buses may still be connecting."""
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """Take no more, see what is under way to its end, acknowledge it, let go of the buses. Blocks, boundedly."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def statistics(self) -> dict[str, SourceStatistics]:
        """By source; from any thread, a moment old."""
        return {name: source.statistics() for name, source in self._sources.items()}

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(source.serve(), name=name) for name, source in self._sources.items()]
        self._started.set_result(None)
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
