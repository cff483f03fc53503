"""The ingress against agentrt's contract suite, on a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from nats_kit import NatsBus, NatsServer

from agentrt.testing.ingresses import Bus, IngressContract


class TestNatsIngress(IngressContract):
    batch_max = 2 * 100

    @pytest.fixture
    def bus(self, tmp_path: Path) -> Iterator[Bus]:
        with NatsServer(tmp_path) as server:
            yield NatsBus(server)
