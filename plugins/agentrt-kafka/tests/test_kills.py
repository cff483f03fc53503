"""Events of Kafka while the node is killed every few seconds and the brokers are gone once: each is exactly one run."""

from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from kafka_kit import KafkaCluster

from agentrt.doctor import selftest
from agentrt.testing.ingress_kills import KilledNode, site_of

PLUGIN = Path(__file__).parents[1]
PARTITIONS = 3

SETTINGS = """
[node.agents.nothing]
source = "{agent}"

[store]
force_place = true
free_bytes_min = 0

[ingress.sources.orders]
kind = "kafka"
topic = "orders"
agent = "nothing"
tier = 2

[plugins.kafka]
servers = {servers}
session_timeout_ms = 3000
"""


@pytest.mark.parametrize(
    ("count", "kills_min"),
    [(2_000, 3), pytest.param(100_000, 20, marks=[pytest.mark.sweep, pytest.mark.timeout(1_800)])],
)
def test_every_event_is_one_run_whatever_is_killed(tmp_path: Path, count: int, kills_min: int) -> None:
    agent = tmp_path / "nothing.wasm"
    agent.write_bytes(selftest.module(selftest.RETURNS))
    with KafkaCluster() as cluster:
        cluster.make_topic("orders", PARTITIONS)
        cluster.produce("orders", [b'{"n":%d}' % n for n in range(count)], PARTITIONS)
        places = [TopicPartition("orders", number) for number in range(PARTITIONS)]
        looker = Consumer(
            {"bootstrap.servers": ",".join(cluster.servers), "group.id": "agentrt-orders", "log_level": 0}
        )

        def acknowledged() -> bool:
            try:
                committed = looker.committed(places, timeout=10)
                return all(found.offset == looker.get_watermark_offsets(found, timeout=10)[1] for found in committed)
            except KafkaException:  # while the brokers are gone
                return False

        settings = SETTINGS.format(agent=agent, servers=[*cluster.servers])
        node = KilledNode(tmp_path, settings, site_of(PLUGIN, tmp_path / "site"))
        node.drive(
            count, cluster.restart, acknowledged, seed=count, life_s=(6.0, 9.0), kills_min=kills_min,
            timeout_s=count / 100 + 80,
        )  # fmt: skip
        assert node.kills >= kills_min
        looker.close()
