"""Steps of model.generate in the engine: records, costs, recovery, replay; a real gateway and a real server."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from engine_kit import Ctx, Node, World, run
from model_kit import Gateway

from agentrt.config import load_config
from agentrt.engine.info import EngineLimits
from agentrt.flow.limits import GateLimits
from agentrt.flow.loopguard import LoopLimits
from agentrt.models.catalog import Catalog
from agentrt.records import Cost, OutcomeUnknown, StepCommitted, StepPrepared
from agentrt.states import RunState, StepState
from agentrt.stores.memory import MemoryDisk
from agentrt.testing.models import ModelServer, Reply

GENERATE = 2
PRICES = {"input_price": 1_000_000, "output_price": 1_000_000}
ONE = [{"role": "user", "content": "hello"}]


def one(ctx: Ctx, input: Any) -> Any:
    handle = ctx.op(GENERATE, profile="work", messages=ONE, **(input or {}))
    yield ctx.wait(handle)
    answer = ctx.read(handle)
    return answer.get("text") or answer


def two(ctx: Ctx, input: Any) -> Any:
    first = ctx.op(GENERATE, profile="work", messages=ONE)
    second = ctx.op(GENERATE, profile="work", messages=ONE)
    done = yield ctx.wait(first, second)
    rest = yield ctx.wait(second if done == first else first)
    return [ctx.read(done)["text"], ctx.read(rest)["text"]]


def hasty(ctx: Ctx, input: Any) -> Any:
    """Ends without waiting for its model."""
    ctx.op(GENERATE, profile="work", messages=ONE)
    handle = ctx.tool("add", a=1, b=2)
    yield ctx.wait(handle)
    return ctx.read(handle)


class Life:
    def __init__(self, disk: MemoryDisk, server: ModelServer, attempts_max: int = 5) -> None:
        self.gateway = Gateway(server.config(**PRICES))
        self.node = Node(disk, World(), models=self.gateway.service, limits=EngineLimits(attempts_max=attempts_max))
        for name, agent in (("one", one), ("two", two), ("hasty", hasty)):
            self.node.register(name, agent)
        self.node.engine.recover()

    async def end(self, run_id: str) -> Any:
        return await asyncio.wait_for(self.node.result(run_id), 30)

    async def close(self) -> None:
        await self.node.close()
        await self.gateway.service.close()

    async def crash(self) -> None:
        self.node.crash()
        await self.gateway.service.close()


def lives(test: Callable[[MemoryDisk, ModelServer], Awaitable[None]]) -> None:
    with ModelServer() as server:
        run(test(MemoryDisk(), server))


def prepared(node: Node, run_id: str) -> list[StepPrepared]:
    return [record for record in node.records(run_id) if isinstance(record, StepPrepared)]


def test_the_reservation_is_prepared_and_the_cost_committed() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server)
        server.script = [Reply(text="fine", usage=(30, 7))]
        run_id = await life.node.submit("one")
        assert (await life.end(run_id)).value() == "fine"
        (step,) = prepared(life.node, run_id)
        assert (step.op, step.kind, step.attempt) == ("model.generate", "keyed", 1)
        assert step.reserved.tokens > 4096 and step.reserved.micro_usd == step.reserved.tokens
        (done,) = [record for record in life.node.records(run_id) if isinstance(record, StepCommitted)]
        assert done.cost == Cost(0, 0, 37, 37)
        state = life.node.fold(run_id)
        assert (state.spent, state.reserved, state.tool_calls) == (Cost(0, 0, 37, 37), Cost(), 0)
        life.node.check_disk()
        await life.close()

    lives(test)


def test_money_that_brings_no_output_ends_the_run_that_asks_for_more() -> None:
    def spends(ctx: Ctx, input: Any) -> Any:
        for number in range(20):
            yield ctx.wait(ctx.op(GENERATE, profile="work", messages=[{"role": "user", "content": f"try {number}"}]))
            if input == number:
                yield ctx.wait(ctx.op(12, data="something"))
        return "done"

    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        gateway = Gateway(server.config(**PRICES))
        loops = LoopLimits(spend_micro_usd=100, repeats=0)
        node = Node(disk, World(), models=gateway.service, gates=GateLimits(), loops=loops)
        node.register("spends", spends)
        told: list[Any] = []
        node.engine.observe(lambda event, data: told.append(data) if event == "decision" else None)
        result = await asyncio.wait_for(node.result(await node.submit("spends", -1)), 30)
        assert result.state is RunState.LOOP_DETECTED and "without any output" in str(result.exception())
        found = next(each for each in told if each.control == "loop")
        assert found.limit == "spend" and found.value > found.bound == 100
        spent = sum(each.cost.micro_usd for each in node.records(result.run_id) if isinstance(each, StepCommitted))
        assert spent == found.value
        one = found.value // sum(isinstance(each, StepCommitted) for each in node.records(result.run_id))
        assert found.value - one <= 100  # not one call more
        await node.close()
        await gateway.service.close()

    lives(test)


def test_runs_are_pinned_to_profiles_and_strategies() -> None:
    with ModelServer() as server:
        plain = Catalog.of(load_config(env={}, arguments=server.config(**PRICES)).models).pins
        assert set(plain) == {"model_profiles", "context_strategy"} and plain["context_strategy"] == "none"
        dearer = Catalog.of(load_config(env={}, arguments=server.config(**(PRICES | {"output_price": 2}))).models).pins
        assert dearer["model_profiles"] != plain["model_profiles"]
    with ModelServer() as elsewhere:  # where a provider is reached is no version of anything
        assert Catalog.of(load_config(env={}, arguments=elsewhere.config(**PRICES)).models).pins == plain
    assert Catalog.of(load_config(env={}).models).pins == {}


def test_an_unseen_attempt_is_repeated_and_charged_in_full() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        server.script = [Reply(delay=3600), Reply(delay=3600), Reply(text="at last", usage=(20, 5))]
        life = Life(disk, server)
        run_id = await life.node.submit("one")
        for count in (1, 2):
            await asyncio.to_thread(server.wait_for, lambda count=count: len(server.requests) == count)
            await life.crash()
            life = Life(disk, server)
        assert (await life.end(run_id)).value() == "at last"
        steps = prepared(life.node, run_id)
        assert [step.attempt for step in steps] == [1, 2, 3]
        assert len({step.key for step in steps}) == 1
        once = steps[0].reserved
        assert [step.reserved.tokens for step in steps] == [once.tokens, 2 * once.tokens, 3 * once.tokens]
        assert life.node.fold(run_id).spent == Cost(0, 0, 2 * once.micro_usd + 25, 2 * once.tokens + 25)
        assert [seen.headers["Agentrt-Attempt"] for seen in server.requests] == ["1/5", "2/5", "3/5"]
        assert len([r for r in life.node.records(run_id) if isinstance(r, OutcomeUnknown)]) == 2
        await life.close()

    lives(test)


def test_attempts_end_and_an_operator_decides() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        server.answer = lambda body: Reply(delay=3600)
        life = Life(disk, server, attempts_max=2)
        run_id = await life.node.submit("one")
        for count in (1, 2):
            await asyncio.to_thread(server.wait_for, lambda count=count: len(server.requests) == count)
            await life.crash()
            life = Life(disk, server, attempts_max=2)
        await life.node.until(lambda: run_id in life.node.engine._places.parked)
        assert "2 attempts" in (await life.node.engine.queries.describe(run_id)).detail
        assert life.node.fold(run_id).reserved.tokens > 2 * 4096  # held until it is settled
        await life.node.decide(run_id, "1:1", True, {"text": "from a person"})
        assert (await life.end(run_id)).value() == "from a person"
        await life.close()

    lives(test)


def test_answers_come_in_the_order_of_their_records_again() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        server.script = [Reply(text="slow", delay=0.1), Reply(text="quick")]
        life = Life(disk, server)
        run_id = await life.node.submit("two")
        value = (await life.end(run_id)).value()
        assert sorted(value) == ["quick", "slow"]
        await life.close()

    lives(test)


def test_a_returned_agent_does_not_wait_for_its_model() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        server.script = [Reply(delay=3600)]
        life = Life(disk, server)
        run_id = await life.node.submit("hasty")
        assert (await life.end(run_id)).value() == 3
        step = life.node.fold(run_id).steps["1:1"]
        assert step.state in (StepState.COMMITTED, StepState.ABORTED)
        await life.close()

    lives(test)


def test_a_cancel_settles_the_step_at_its_reservation() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        server.script = [Reply(text="word", endless=True, piece_delay=0.01)]
        life = Life(disk, server)
        run_id = await life.node.submit("one")
        await asyncio.to_thread(server.wait_for, lambda: bool(server.requests))
        await life.node.cancel(run_id)
        assert (await life.end(run_id)).state is RunState.CANCELLED
        await asyncio.to_thread(server.wait_for, lambda: server.requests[0].gave_up)
        state = life.node.fold(run_id)
        assert not state.open and state.spent.tokens > 4096
        await life.close()

    lives(test)


def test_a_node_that_closes_leaves_the_call_to_its_next_start() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        server.script = [Reply(delay=3600), Reply(text="again")]
        life = Life(disk, server)
        run_id = await life.node.submit("one")
        await asyncio.to_thread(server.wait_for, lambda: bool(server.requests))
        await life.close()
        life = Life(disk, server)
        assert (await life.end(run_id)).value() == "again"
        await life.close()

    lives(test)


def test_a_node_without_the_profile_keeps_the_run_for_an_operator() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        server.script = [Reply(delay=3600)]
        life = Life(disk, server)
        run_id = await life.node.submit("one")
        await asyncio.to_thread(server.wait_for, lambda: bool(server.requests))
        await life.crash()
        node = Node(disk, World())
        node.register("one", one)
        node.engine.recover()
        await node.until(lambda: run_id in node.engine._places.parked)
        await node.close()
        life = Life(disk, server)
        assert (await life.end(run_id)).value() == "hello"
        await life.close()

    lives(test)


@pytest.mark.parametrize("wrong", [{"temperature": 9}, {"needs": {"quality_min": 99}}, {"context": "none@1"}])
def test_what_no_model_may_answer_is_refused_and_recorded(wrong: dict[str, Any]) -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server)
        run_id = await life.node.submit("one", wrong)
        result = (await life.end(run_id)).value()
        assert result["error"]["code"] in ("input", "model_needs")
        assert not prepared(life.node, run_id) and not server.requests
        await life.close()

    lives(test)
