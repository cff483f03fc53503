"""Settings of the plugin: ``[plugins.nats]``."""

from typing import Annotated

import msgspec
from msgspec import Meta

#: What begins so is the name of a secret.
SECRET_PREFIX = "secret://"

Secret = Annotated[str, Meta(pattern=r"^(secret://.+)?$")]


class NatsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where NATS is, and how the node's consumers behave there."""

    servers: Annotated[
        tuple[str, ...], Meta(description="URLs, as nats://127.0.0.1:4222 or tls://nats.acme.example.")
    ] = ("nats://127.0.0.1:4222",)
    consumer_prefix: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_-]{1,64}$",
            description="Durable consumers are called PREFIX-SOURCE, SOURCE as in [ingress.sources.SOURCE]. Nodes that "
            "share a prefix share the events.",
        ),
    ] = "agentrt"
    streams: Annotated[
        dict[str, str],
        Meta(description="Stream by subject, where asking for it is not allowed."),
    ] = {}
    user: str = ""
    password: Annotated[Secret, Meta(description="secret://NAME, a secret of the node.")] = ""
    token: Annotated[Secret, Meta(description="secret://NAME, a secret of the node.")] = ""
    credentials_file: Annotated[str, Meta(description="JWT and seed, as `nsc` writes them.")] = ""
    ca_file: Annotated[str, Meta(description="Authorities for TLS; empty: the system's.")] = ""
    ack_wait_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="After how long a dead node's events are delivered again; a live one says that it is at it.",
        ),
    ] = 30.0
    batch: Annotated[int, Meta(ge=1, le=10_000, description="Events fetched at once.")] = 200
