"""Events of Kafka become runs of agentrt, each exactly one. What it brings; the work is in `ingress`."""

from typing import TYPE_CHECKING, Any

import msgspec

from agentrt.hooks import hookimpl
from agentrt_kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from agentrt.config import Config
    from agentrt.ingress.port import Ingress
    from agentrt.ingress.settings import SourceConfig
    from agentrt.models.provider import Secrets

AGENTRT_HOOKS = 2


@hookimpl
def agentrt_settings() -> dict[str, type[msgspec.Struct]]:
    return {"kafka": KafkaSettings}


@hookimpl
def agentrt_ingresses() -> dict[str, Any]:
    return {"kafka": _make}


def _make(config: "Config", name: str, source: "SourceConfig", secrets: "Secrets") -> "Ingress":
    from agentrt_kafka.ingress import KafkaIngress

    return KafkaIngress(config.plugin("kafka", KafkaSettings), name, source.topic, secrets)
