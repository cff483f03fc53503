"""The ingress: a consumer in a group, which commits positions by itself and never what is not settled.

An event's name is cluster and topic, partition and offset; its stamp is its time. Kafka's positions count, so what is
committed is the node's position of the partition: everything before it is a run or a dead letter. Before a partition is
given away, what is under way is seen to its end and the position is committed.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.helpers import create_ssl_context

from agentrt.errors import ConfigError
from agentrt.ingress.port import Delivery, Inbox
from agentrt.models.provider import Secrets
from agentrt_kafka.settings import SECRET_PREFIX, KafkaSettings

_FETCH_MS = 1_000
#: A group waits so long for its members to let go of their partitions.
_REBALANCE_MS = 60_000
#: A source that is paused for long is alive all the same: heartbeats say so.
_POLL_INTERVAL_MS = 24 * 3_600_000
#: Headers that name an event's type; the first is CloudEvents'.
_TYPE_HEADERS = ("ce_type", "type")

_log = logging.getLogger(__name__)


class KafkaIngress:
    """See `agentrt.ingress.port.Ingress`."""

    def __init__(self, settings: KafkaSettings, name: str, topic: str, secrets: Secrets) -> None:
        self._settings, self._name, self._topic, self._secrets = settings, name, topic, secrets
        self._source = f"kafka:{settings.cluster}/{topic}"
        self._consumer: AIOKafkaConsumer | None = None
        self._inbox: Inbox | None = None
        self._assigned: set[int] = set()
        self._paused: set[int] = set()
        self._changed = asyncio.Event()  # what may be fetched
        self._uncommitted: set[int] = set()
        self._committing = asyncio.Lock()

    async def run(self, inbox: Inbox) -> None:
        """Join the group and deliver. Raises what Kafka says: nobody there, no such topic, not authorized."""
        self._inbox = inbox
        consumer = self._consumer = AIOKafkaConsumer(
            bootstrap_servers=[*self._settings.servers],
            client_id=f"agentrt-{self._name}",
            group_id=f"{self._settings.group_prefix}-{self._name}",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            session_timeout_ms=self._settings.session_timeout_ms,
            # a member hears of a rebalance from its next heartbeat, and has less than a session to join again
            heartbeat_interval_ms=self._settings.session_timeout_ms // 10,
            max_poll_interval_ms=_POLL_INTERVAL_MS,
            rebalance_timeout_ms=_REBALANCE_MS,
            **await self._security(),
        )
        consumer.subscribe([self._topic], listener=_Listener(self))
        await consumer.start()
        while True:
            self._changed.clear()
            fetch = [self._place(number) for number in self._assigned - self._paused]
            if fetch:
                found = await consumer.getmany(*fetch, timeout_ms=_FETCH_MS, max_records=self._settings.batch)
                for place, records in found.items():
                    if place.partition in self._assigned:
                        for record in records:
                            inbox.deliver(self._delivery(record))
                        end = consumer.highwater(place)
                        if records and end is not None:
                            inbox.behind(str(place.partition), end - records[-1].offset - 1)
            else:
                await self._change()
            await asyncio.sleep(0)  # what was fetched before comes without a pause
            if self._uncommitted and not self._committing.locked():
                await self._commit_quietly()

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Commit how far their partitions are."""
        self._uncommitted |= {int(delivery.partition) for delivery in deliveries}
        await self._commit()

    def pause(self, partition: str) -> None:
        """Fetch nothing more of it."""
        number = int(partition)
        self._paused.add(number)
        if self._consumer is not None and number in self._assigned:
            self._consumer.pause(self._place(number))

    def resume(self, partition: str) -> None:
        """Fetch it again."""
        number = int(partition)
        self._paused.discard(number)
        if self._consumer is not None and number in self._assigned:
            self._consumer.resume(self._place(number))
        self._changed.set()

    async def close(self) -> None:
        """Leave the group."""
        if self._consumer is not None:
            await self._consumer.stop()

    # --- partitions that come and go ---

    async def revoked(self, numbers: Iterable[int]) -> None:
        """Before the group hands out partitions anew; all of them are revoked."""
        assert self._inbox is not None and self._consumer is not None
        names = [str(number) for number in numbers]
        # The group expels a member that takes longer than its session; then the partitions would go to and fro.
        positions = await self._inbox.revoke(names, self._settings.session_timeout_ms / 3e3)
        try:
            async with self._committing:
                if positions:
                    await self._consumer.commit({self._place(int(name)): place for name, place in positions.items()})
        except KafkaError as error:  # they come again, and are found to be runs
            _log.warning("kafka, ingress %s: positions are not committed: %r", self._name, error)
        self._assigned.clear()
        self._paused.clear()
        self._uncommitted.clear()

    async def assigned(self, numbers: Iterable[int]) -> None:
        """These are the node's now."""
        assert self._inbox is not None
        self._assigned = set(numbers)
        self._inbox.assign(str(number) for number in self._assigned)
        self._changed.set()

    # --- inside ---

    def _place(self, number: int) -> TopicPartition:
        return TopicPartition(self._topic, number)

    async def _change(self) -> None:
        """What may be fetched has changed, or it is time to look at commits again."""
        try:
            async with asyncio.timeout(_FETCH_MS / 1e3):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _commit(self) -> None:
        assert self._inbox is not None and self._consumer is not None
        async with self._committing:
            numbers = self._uncommitted & self._assigned
            positions = {number: self._inbox.position(str(number)) for number in numbers}
            known = {self._place(number): place for number, place in positions.items() if place is not None}
            if known:
                await self._consumer.commit(known)
            # What was settled meanwhile is told by another call.
            self._uncommitted -= {n for n in numbers if self._inbox.position(str(n)) == positions[n]}

    async def _commit_quietly(self) -> None:
        """What could not be committed when it was settled."""
        try:
            await self._commit()
        except KafkaError as error:
            _log.warning("kafka, ingress %s: positions are not committed: %r", self._name, error)

    async def _security(self) -> dict[str, Any]:
        settings = self._settings
        found: dict[str, Any] = {"security_protocol": settings.security}
        if settings.security.endswith("SSL"):
            try:
                found["ssl_context"] = create_ssl_context(cafile=settings.ca_file or None)
            except OSError as error:
                raise ConfigError(f"plugins.kafka.ca_file cannot be read: {error.strerror}") from error
        if settings.security.startswith("SASL"):
            found |= {"sasl_mechanism": settings.mechanism, "sasl_plain_username": settings.user}
            if settings.password:
                secret = settings.password.removeprefix(SECRET_PREFIX)
                found["sasl_plain_password"] = await self._secrets("", secret)
        return found

    def _delivery(self, record: Any) -> Delivery:
        headers = {key: value.decode(errors="replace") for key, value in record.headers if value is not None}
        kind = next((headers[name] for name in _TYPE_HEADERS if name in headers), "")
        # A record without a value, which says that its key is gone, is an event, too.
        payload = b"null" if record.value is None else record.value
        stamp = f"{record.timestamp_type} {record.timestamp}"
        return Delivery(self._source, str(record.partition), record.offset, payload, self._topic, kind, headers, stamp)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Tells the ingress what the group does."""

    def __init__(self, ingress: KafkaIngress) -> None:
        self._ingress = ingress

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._ingress.revoked(place.partition for place in revoked)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        await self._ingress.assigned(place.partition for place in assigned)
