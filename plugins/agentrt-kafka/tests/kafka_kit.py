"""The mock cluster as a process, and the bus that the suite asks for."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from agentrt_kafka.ingress import KafkaIngress
from agentrt_kafka.settings import KafkaSettings
from confluent_kafka import Message, Producer

from agentrt.testing.model_providers import no_secrets

SECRETS = no_secrets


class KafkaCluster:
    """Use it as a context manager. ``restart``: all brokers are gone for a second; what they have stays."""

    def __init__(self, brokers: int = 2) -> None:
        self._brokers = brokers
        self._topics: set[str] = set()

    def __enter__(self) -> Self:
        script = Path(__file__).with_name("mock_kafka.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(self._brokers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.servers = tuple(self._process.stdout.readline().strip().split(","))
        self._producer = Producer({"bootstrap.servers": ",".join(self.servers), "log_level": 0})
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def tell(self, command: str) -> None:
        """A line of the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer == "ok", answer

    def make_topic(self, name: str, partitions: int) -> None:
        if name not in self._topics:
            self._topics.add(name)
            self.tell(f"topic {name} {partitions}")

    def produce(self, topic: str, payloads: Sequence[bytes], partitions: int, headers: Any = None) -> None:
        """All are there when this returns; the order of each partition is theirs."""
        errors: list[Any] = []

        def told(error: Any, message: Message) -> None:
            if error is not None:
                errors.append(error)

        for number, payload in enumerate(payloads):
            while True:
                try:
                    self._producer.produce(
                        topic, payload, partition=number % partitions, headers=headers, on_delivery=told
                    )
                    break
                except BufferError:
                    self._producer.poll(0.1)
        assert self._producer.flush(60) == 0 and not errors, errors

    def restart(self) -> None:
        """All brokers at once."""
        self.tell("down")
        time.sleep(1)
        self.tell("up")


class KafkaBus:
    """See `agentrt.testing.ingresses.Bus`."""

    def __init__(self, cluster: KafkaCluster, partitions: int = 3, session_timeout_ms: int = 6_000) -> None:
        self.cluster, self._partitions = cluster, partitions
        self.settings = KafkaSettings(servers=cluster.servers, session_timeout_ms=session_timeout_ms, batch=100)

    def publish(self, topic: str, payloads: Sequence[bytes]) -> None:
        self.cluster.make_topic(topic, self._partitions)
        self.cluster.produce(topic, payloads, self._partitions)

    def ingress(self, topic: str) -> KafkaIngress:
        self.cluster.make_topic(topic, self._partitions)
        return KafkaIngress(self.settings, topic, topic, SECRETS)

    def restart(self) -> None:
        self.cluster.restart()
