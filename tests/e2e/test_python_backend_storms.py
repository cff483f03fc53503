"""Many runs while hosts are killed and runs overrun, are killed or unwound: each asks for everything once, in order."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from python_kit import Hold, Node, ScriptedRun, core_node
from test_python_backend_slots import core_fixture

from agentrt import _core
from agentrt.backends.base import Request

RUNS = 60
STEPS = 25


@pytest.mark.parametrize("seed", range(4))
def test_runs_survive_a_storm(seed: int) -> None:
    rng = random.Random(seed)

    def late(run: ScriptedRun, request: Request) -> Any:
        """Answers some at once and others in a while."""
        asked = msgspec.json.decode(request.payload)
        if rng.random() < 0.5:
            return 2 * asked["args"]["x"]

        def answer() -> None:
            if run.exit is None:
                run.answer(request.handle, 2 * asked["args"]["x"])

        asyncio.get_running_loop().call_later(rng.random() * 0.02, answer)
        raise Hold

    async def storm(node: Node) -> None:
        loop = asyncio.get_running_loop()
        raised: list[Any] = []
        loop.set_exception_handler(lambda loop, context: raised.append(context))
        await node.program("steps")
        good: list[ScriptedRun] = []
        slow: list[ScriptedRun] = []
        ended: list[ScriptedRun] = []
        pool = node.backend._pool
        assert pool is not None
        while len(good) < RUNS:
            tenant, tier = f"t{rng.randrange(2)}", rng.choice((1, 1, 2))
            what = rng.random()
            if what < 0.7:
                good.append(await node.start("steps", STEPS, tenant=tenant, tier=tier, reply=late))
            elif what < 0.8:
                slow.append(await node.start("busy", rng.choice((2, 8, 30)), tenant=tenant, tier=tier, reply=late))
            elif what < 0.9:
                ended.append(await node.start(rng.choice(("spin", "stubborn", "leave")), tenant=tenant, tier=tier))
            if rng.random() < 0.25:
                await asyncio.sleep(rng.random() * 0.03)
            if rng.random() < 0.2 and pool._hosts:
                rng.choice(sorted(pool._hosts, key=lambda host: host.pid)).kill()  # by us: nobody is charged
            victim = rng.choice(ended) if ended else None
            if victim is not None and victim.exit is None and victim.guest is not None and rng.random() < 0.5:
                if rng.random() < 0.5:
                    victim.guest.kill()
                else:
                    victim.guest.unwind("storm")
        for run in ended:
            if run.exit is None and run.guest is not None:
                run.guest.kill()
        for run in good:
            assert await run.result() == STEPS * (STEPS - 1)
            assert [asked["args"]["x"] for _, asked in run.asked()] == list(range(STEPS))
        for run in slow:
            assert await run.result() == "done"
            assert len(run.requests) == 2
        for run in ended:
            assert (await run.exited()).reason in ("killed", "unwound", "host_died")
        assert raised == []
        statistics = node.statistics()
        assert statistics["guests"] == statistics["waiting"] == 0
        async with asyncio.timeout(20):
            while any(host._lease is not None for host in pool._hosts):
                await asyncio.sleep(0.005)
        assert node.core is not None
        assert node.core.statistics()["queued"] == [0, 0, 0, 0]
        for bundle in pool._bundles.values():
            assert bundle.starting >= 0

    async def run() -> None:
        core = _core.Core(**core_fixture.core_arguments(workers=2))
        async with core_node(core, deaths_max=10_000, hosts_max=12, hosts_per_domain_max=2) as node:
            await asyncio.wait_for(storm(node), 100)

    asyncio.run(run())
