"""The ingress against agentrt's contract suite, on librdkafka's mock brokers."""

from collections.abc import Iterator

import pytest
from kafka_kit import KafkaBus, KafkaCluster

from agentrt.testing.ingresses import Bus, IngressContract


class TestKafkaIngress(IngressContract):
    batch_max = 3 * 100

    @pytest.fixture
    def bus(self) -> Iterator[Bus]:
        with KafkaCluster() as cluster:
            yield KafkaBus(cluster)
