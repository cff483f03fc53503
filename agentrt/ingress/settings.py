"""Settings of ingresses."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from agentrt.settings import MIB, Section, Tables, setting


class SourceConfig(Section, frozen=True, kw_only=True):
    """`[ingress.sources.NAME]`: a topic whose events become runs. Give each tier a topic of its own: sources are held
    up one by one, so that a low tier that waits never keeps a higher one waiting."""

    kind: Annotated[str, setting("Which plugin's ingress: `agentrt plugins ls` names them.")] = ""
    topic: Annotated[str, setting("What the bus calls it: a Kafka topic, a NATS subject.")] = ""
    agent: Annotated[str, setting("The agent that gets the events as inputs; they are JSON.")] = ""
    tenant: Annotated[str, setting("Whose runs they are.")] = "default"
    tier: Annotated[int, setting("Tier of the runs. -1: the agent's.", "tier", -1, 3)] = -1
    key: Annotated[
        str,
        setting(
            "Makes an idempotency key of an event, beside its place on the bus: `{header:NAME}`, `{field:PATH}`, "
            "`{source}` (the topic), `{type}`. Two events with one key are one run. Empty: none.",
        ),
    ] = ""
    held_items_max: Annotated[
        int,
        setting(
            "Events that are fetched and no runs yet. At so many partitions are paused, each at its share.",
            "events",
            1,
            1_000_000,
        ),
    ] = 2_000
    held_bytes_max: Annotated[int, setting("The same in bytes of events.", "bytes", 64 * 1024, 16 * 1024 * MIB)] = (
        64 * MIB
    )


class IngressConfig(Section, frozen=True, kw_only=True):
    """Doors for a bus (docs/plugins/ingress.md), opened by `agentrt serve`. Plugins bring them."""

    tables: ClassVar[Mapping[str, type[Section]]] = {"sources": SourceConfig}

    sources: Annotated[Tables, setting("`[ingress.sources.NAME]`: topics whose events become runs.")] = {}  # noqa: RUF012
    dead_letters_items_max: Annotated[
        int,
        setting(
            "Events that became no runs and are kept with the reason. When there are so many, partitions pause.",
            "events",
            1,
            1_000_000,
        ),
    ] = 10_000
    dead_letters_bytes_max: Annotated[int, setting("The same in bytes of events.", "bytes", MIB, 64 * 1024 * MIB)] = (
        256 * MIB
    )
