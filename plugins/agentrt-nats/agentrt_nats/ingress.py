"""The ingress: a durable pull consumer with explicit acknowledgements.

An event's name is its stream, when that was made, and its sequence in it; its stamp is when it was stored. JetStream
acknowledges one by one, so positions are not used. What is held is reported as in progress three times in
``ack_wait_s``, so that only a node that died has its events delivered again.
"""

import asyncio
import logging
import ssl
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from agentrt.errors import ConfigError
from agentrt.ingress.port import Delivery, Inbox
from agentrt.models.provider import Secrets
from agentrt_nats.settings import SECRET_PREFIX, NatsSettings

#: The consumer's one partition.
PARTITION = "0"
_FETCH_S = 2.0
_CONNECT_S = 5
_FLUSH_S = 10

_log = logging.getLogger(__name__)


class NatsIngress:
    """See `agentrt.ingress.port.Ingress`. ``held_max``: of events that the node holds."""

    def __init__(self, settings: NatsSettings, name: str, subject: str, held_max: int, secrets: Secrets) -> None:
        self._settings, self._name, self._subject, self._secrets = settings, name, subject, secrets
        self._held_max = held_max
        self._client: Client | None = None
        self._held: dict[int, Msg] = {}  # by sequence in the stream
        self._may_fetch = asyncio.Event()
        self._may_fetch.set()

    async def run(self, inbox: Inbox) -> None:
        """Connect and deliver. Raises what NATS says: no such stream, not authorized, the consumer is gone."""
        settings = self._settings
        client = self._client = await nats.connect(
            [*settings.servers],
            name=f"agentrt {self._name}",
            error_cb=self._on_error,
            connect_timeout=_CONNECT_S,
            reconnect_time_wait=1,
            max_reconnect_attempts=-1,
            **await self._identity(),
        )
        stream = client.jetstream()
        subscription, source = await self._subscribe(stream)
        inbox.assign([PARTITION])
        in_progress = asyncio.ensure_future(self._report_progress())
        try:
            while True:
                await self._may_fetch.wait()
                try:
                    messages = await subscription.fetch(settings.batch, timeout=_FETCH_S)
                except TimeoutError:  # there was nothing, or the connection broke and is made again
                    if client.is_closed:
                        raise ConnectionError("the connection to NATS is closed") from None
                    if in_progress.done():
                        in_progress.result()
                    continue
                for message in messages:
                    self._deliver(inbox, source, message)
                if messages:
                    inbox.behind(PARTITION, messages[-1].metadata.num_pending)
                await asyncio.sleep(0)  # what was fetched before comes without a pause
        finally:
            in_progress.cancel()

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """One by one, and a round trip, so that the server has them when this returns."""
        client = self._client
        assert client is not None
        for delivery in deliveries:
            message = self._held.pop(delivery.offset, None)
            if message is not None:
                await message.ack()
        await client.flush(_FLUSH_S)

    def pause(self, partition: str) -> None:
        """No further fetch."""
        self._may_fetch.clear()

    def resume(self, partition: str) -> None:
        """Fetch again."""
        self._may_fetch.set()

    async def close(self) -> None:
        """What is held is delivered again after ``ack_wait_s``."""
        if self._client is not None and not self._client.is_closed:
            await self._client.close()

    # --- inside ---

    async def _identity(self) -> dict[str, Any]:
        settings = self._settings
        found: dict[str, Any] = {}
        for key, value in (("password", settings.password), ("token", settings.token)):
            if value:
                found[key] = await self._secrets("", value.removeprefix(SECRET_PREFIX))
        if settings.user:
            found["user"] = settings.user
        if settings.credentials_file:
            found["user_credentials"] = settings.credentials_file
        if settings.ca_file:
            try:
                found["tls"] = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:
                raise ConfigError(f"plugins.nats.ca_file cannot be read: {error.strerror}") from error
        return found

    async def _subscribe(self, stream: JetStreamContext) -> tuple[JetStreamContext.PullSubscription, str]:
        """The subscription, and the name of the stream's incarnation."""
        settings = self._settings
        name = settings.streams.get(self._subject) or await stream.find_stream_name_by_subject(self._subject)
        found = await stream.stream_info(name)
        consumer = f"{settings.consumer_prefix}-{self._name}"
        await stream.add_consumer(  # or change it, if the settings have changed
            name,
            ConsumerConfig(
                durable_name=consumer,
                deliver_policy=DeliverPolicy.ALL,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=settings.ack_wait_s,
                max_deliver=-1,
                filter_subject=self._subject,
                max_ack_pending=self._held_max + settings.batch,
            ),
        )
        subscription = await stream.pull_subscribe_bind(consumer, name)
        return subscription, f"nats:{name}@{_time(found.created)}"

    def _deliver(self, inbox: Inbox, source: str, message: Msg) -> None:
        metadata = message.metadata
        sequence = metadata.sequence.stream
        self._held[sequence] = message  # the newest delivery of it is the one to be acknowledged
        headers = {str(key): str(value) for key, value in (message.headers or {}).items()}
        inbox.deliver(
            Delivery(
                source,
                PARTITION,
                sequence,
                message.data,
                message.subject,
                headers.get("Type", ""),
                headers,
                _time(metadata.timestamp),
            )
        )

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(self._settings.ack_wait_s / 3)
            if self._client is not None and self._client.is_connected:
                for message in [*self._held.values()]:
                    await message.in_progress()

    async def _on_error(self, error: Exception) -> None:
        _log.warning("nats, ingress %s: %s", self._name, error or type(error).__name__)


def _time(at: datetime | None) -> str:
    return "" if at is None else at.isoformat(timespec="microseconds")
