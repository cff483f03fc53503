"""What the plugin says of itself, its settings, and what of a record goes into an event."""

import re
from pathlib import Path

import agentrt_kafka
import msgspec
import pytest
from agentrt_kafka.settings import KafkaSettings
from kafka_kit import KafkaBus, KafkaCluster

from agentrt.config import Config, load_config
from agentrt.errors import ConfigError
from agentrt.ingress.port import Delivery
from agentrt.plugins import Plugins
from agentrt.testing.ingresses import Consumer, FakeNode

README = Path(__file__).parents[1] / "README.md"


def plugins() -> Plugins:
    return Plugins({"kafka": agentrt_kafka})


def test_the_readmes_settings_are_settings(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "node.toml").write_text(text)
    config = load_config(tmp_path / "node.toml", env={})
    plugins().check(config)
    assert config.ingress.sources["orders"]["kind"] in plugins().names("ingress")


@pytest.mark.parametrize(
    "wrong",
    [
        {"servers": "one"},
        {"password": "hunter2"},
        {"security": "TLS"},
        {"session_timeout_ms": 0},
        {"group_prefix": "a b"},
        {"server": []},
        {"batch": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.kafka"):
        plugins().check(Config(plugins={"kafka": wrong}))


def test_every_setting_is_read() -> None:
    code = (Path(agentrt_kafka.__file__).parent / "ingress.py").read_text()
    for field in msgspec.structs.fields(KafkaSettings):
        assert f"settings.{field.name}" in code, field.name


class Keeping(FakeNode):
    """Keeps the deliveries of dead letters, which show all of an event."""

    @property
    def deliveries(self) -> list[Delivery]:
        return [letter.delivery for letter in self.letters.values()]


def test_headers_type_and_time_are_the_events_and_a_record_without_value_is_null() -> None:
    node = Keeping()
    with KafkaCluster() as cluster:
        bus = KafkaBus(cluster, 1)
        cluster.make_topic("orders", 1)
        cluster.produce("orders", [b"no json"], 1, headers=[("ce_type", b"order.placed"), ("bad", b"\xff")])
        cluster.produce("orders", [None], 1)  # type: ignore[list-item]
        consumer = Consumer(bus, "orders", node)
        consumer.until(lambda: len(node.letters) == 1 and len(node.runs) == 1)
        consumer.close()
    (delivery,) = node.deliveries
    assert (delivery.source, delivery.partition, delivery.offset) == ("kafka:kafka/orders", "0", 0)
    assert (delivery.topic, delivery.type) == ("orders", "order.placed")
    assert delivery.headers == {"ce_type": "order.placed", "bad": "\N{REPLACEMENT CHARACTER}"}
    assert re.fullmatch(r"0 \d{13}", delivery.stamp)
    assert node.payloads == [b"null"]
