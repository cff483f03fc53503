"""Events of NATS JetStream become runs of agentrt, each exactly one. What it brings; the work is in `ingress`."""

from typing import TYPE_CHECKING, Any

import msgspec

from agentrt.hooks import hookimpl
from agentrt_nats.settings import NatsSettings

if TYPE_CHECKING:
    from agentrt.config import Config
    from agentrt.ingress.port import Ingress
    from agentrt.ingress.settings import SourceConfig
    from agentrt.models.provider import Secrets

AGENTRT_HOOKS = 2


@hookimpl
def agentrt_settings() -> dict[str, type[msgspec.Struct]]:
    return {"nats": NatsSettings}


@hookimpl
def agentrt_ingresses() -> dict[str, Any]:
    return {"nats": _make}


def _make(config: "Config", name: str, source: "SourceConfig", secrets: "Secrets") -> "Ingress":
    from agentrt_nats.ingress import NatsIngress

    return NatsIngress(config.plugin("nats", NatsSettings), name, source.topic, source.held_items_max, secrets)
