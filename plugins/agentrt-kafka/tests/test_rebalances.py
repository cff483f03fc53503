"""Partitions that come and go while events are under way.

The mock brokers' groups are simpler than a broker's (librdkafka's rdkafka_mock_cgrp.c). They elect when a session less
a second is over, whoever has joined by then, and the oldest member leads even if it has not. Once the leader has handed
out the partitions they refuse the others' SyncGroup as InvalidRequest, where a broker answers it. So all get time here.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.consumer.group_coordinator import CoordinatorGroupRebalance
from kafka_kit import KafkaBus, KafkaCluster

from agentrt.errors import AgentrtError, QueueFullError
from agentrt.testing.ingresses import Consumer, FakeNode, numbered

PARTITIONS = 6
#: A heartbeat, what is under way, and some more.
SESSION_MS = 9_000
_LEADER_S = 1.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def patient_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are given time to ask for their partitions."""
    lead = CoordinatorGroupRebalance._on_join_leader

    async def later(rebalance: Any, response: Any) -> Any:
        await asyncio.sleep(_LEADER_S)
        return await lead(rebalance, response)

    monkeypatch.setattr(CoordinatorGroupRebalance, "_on_join_leader", later)


@pytest.fixture
def bus() -> Iterator[KafkaBus]:
    with KafkaCluster() as cluster:
        yield KafkaBus(cluster, PARTITIONS, SESSION_MS)


def shares(*consumers: Consumer) -> list[int]:
    """How many partitions each has."""
    return [len(consumer.ingress.inner._assigned) if consumer.ingress else 0 for consumer in consumers]  # type: ignore[attr-defined]


def test_fault_d20_partitions_are_shared_and_handed_over_without_loss(bus: KafkaBus) -> None:
    """A second node of the group comes, the first one dies, a third one comes: with one store behind them, as a cluster
    store would be, each event is one run; what a node was told to give away it has acknowledged."""
    node, chance = FakeNode(), random.Random(1)

    def sometimes(payload: bytes) -> AgentrtError | None:
        return QueueFullError("the queue is full") if chance.random() < 0.05 else None

    node.refuse = sometimes
    bus.publish("orders", numbered(600))
    first = Consumer(bus, "orders", node)
    first.until(lambda: len(node.runs) >= 600)
    second = Consumer(bus, "orders", node)
    second.until(lambda: sorted(shares(first, second)) == [3, 3], "a share of the partitions")
    bus.publish("orders", numbered(600, 600))
    second.until(lambda: len(node.runs) >= 1_200)
    assert second.source.statistics().accepted > 0
    first.kill()
    second.until(lambda: shares(second) == [PARTITIONS], "the rest of the partitions")
    bus.publish("orders", numbered(300, 1_200))
    second.until(lambda: len(node.runs) >= 1_500)
    third = Consumer(bus, "orders", node)
    third.until(lambda: sorted(shares(second, third)) == [3, 3], "a share of the partitions")
    bus.publish("orders", numbered(300, 1_500))
    third.until(lambda: len(node.runs) >= 1_800)
    second.close()
    third.close()
    assert sorted(node.payloads) == sorted(numbered(1_800)) and not node.letters


def test_what_is_under_way_when_partitions_go_is_not_lost(bus: KafkaBus) -> None:
    """The node answers nothing while the group hands partitions out anew: it is not waited for for ever, nothing that
    has no answer is acknowledged, and all of it comes again."""
    node = FakeNode()
    node.hangs = True
    bus.publish("orders", numbered(60))
    first = Consumer(bus, "orders", node)
    first.until(lambda: len(node.asked) >= 60)
    second = Consumer(bus, "orders", node)
    second.until(lambda: sorted(shares(first, second)) == [3, 3], "a share of the partitions")
    assert not node.runs
    node.hangs = False
    end = time.monotonic() + 60
    while len(node.runs) < 60 and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(node.payloads) == sorted(numbered(60))
    first.close()
    second.close()
