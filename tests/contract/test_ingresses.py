"""The ingress of the bus in memory against the contract suite."""

import pytest

from agentrt.testing.ingresses import Bus, IngressContract, MemoryBus


class TestMemoryIngress(IngressContract):
    batch_max = 2 * 50

    @pytest.fixture
    def bus(self) -> Bus:
        return MemoryBus()
