"""Events of NATS while the node is killed every few seconds and the server once: each is exactly one run."""

import asyncio
from pathlib import Path

import pytest
from nats.js import JetStreamContext
from nats_kit import NatsServer

from agentrt.doctor import selftest
from agentrt.testing.ingress_kills import KilledNode, site_of

PLUGIN = Path(__file__).parents[1]

SETTINGS = """
[node.agents.nothing]
source = "{agent}"

[store]
force_place = true
free_bytes_min = 0

[ingress.sources.orders]
kind = "nats"
topic = "orders"
agent = "nothing"
tier = 2

[plugins.nats]
servers = ["{url}"]
ack_wait_s = 1
"""


@pytest.mark.parametrize(
    ("count", "kills_min"),
    [(2_000, 3), pytest.param(100_000, 20, marks=[pytest.mark.sweep, pytest.mark.timeout(1_800)])],
)
def test_every_event_is_one_run_whatever_is_killed(tmp_path: Path, count: int, kills_min: int) -> None:
    agent = tmp_path / "nothing.wasm"
    agent.write_bytes(selftest.module(selftest.RETURNS))
    with NatsServer(tmp_path) as server:

        async def publish(stream: JetStreamContext) -> None:
            await stream.add_stream(name="ORDERS", subjects=["orders"])
            for start in range(0, count, 500):
                await asyncio.gather(
                    *(stream.publish("orders", b'{"n":%d}' % n) for n in range(start, min(start + 500, count)))
                )

        def acknowledged() -> bool:
            async def look(stream: JetStreamContext) -> bool:
                found = await stream.consumer_info("ORDERS", "agentrt-orders")
                return not found.num_pending and not found.num_ack_pending

            return bool(server.ask(look))

        server.ask(publish)
        node = KilledNode(tmp_path, SETTINGS.format(agent=agent, url=server.url), site_of(PLUGIN, tmp_path / "site"))
        node.drive(count, server.restart, acknowledged, seed=count, kills_min=kills_min, timeout_s=count / 100 + 80)
        assert node.kills >= kills_min
