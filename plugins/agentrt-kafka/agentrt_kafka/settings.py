"""Settings of the plugin: ``[plugins.kafka]``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

#: What begins so is the name of a secret.
SECRET_PREFIX = "secret://"

Secret = Annotated[str, Meta(pattern=r"^(secret://.+)?$")]


class KafkaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where Kafka is, and how the node's consumers behave there."""

    servers: Annotated[tuple[str, ...], Meta(description="Some brokers, as 127.0.0.1:9092.")] = ("127.0.0.1:9092",)
    cluster: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            description="What names of events call the cluster. One that is made anew gets a new name.",
        ),
    ] = "kafka"
    group_prefix: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            description="Consumer groups are called PREFIX-SOURCE, SOURCE as in [ingress.sources.SOURCE]. Nodes that "
            "share a prefix share the partitions.",
        ),
    ] = "agentrt"
    security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    ca_file: Annotated[str, Meta(description="Authorities for TLS; empty: the system's.")] = ""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    user: str = ""
    password: Annotated[Secret, Meta(description="secret://NAME, a secret of the node.")] = ""
    session_timeout_ms: Annotated[
        int, Meta(ge=1_000, le=3_600_000, description="After how long a dead node's partitions are given to others.")
    ] = 10_000
    batch: Annotated[int, Meta(ge=1, le=10_000, description="Events taken at once.")] = 500
