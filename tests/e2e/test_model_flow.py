"""Calls to models through flow control: the engine, the gateway and a provider with limits, over real HTTP."""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from engine_kit import Ctx, MemoryReader, Node, World, run
from model_kit import Gateway

from agentrt.engine.info import EngineLimits
from agentrt.flow.buckets import RateLimit
from agentrt.flow.decisions import Scope
from agentrt.flow.limits import BulkheadRule, GateLimits, RateRule
from agentrt.flow.loopguard import LoopLimits
from agentrt.flow.retry import RetryLimits
from agentrt.fold import sum_costs
from agentrt.records import Cost, StepPrepared
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk
from agentrt.testing.models import ModelServer, Reply

GENERATE, SPAWN, JOIN = 2, 6, 7
WEIGHTS = {"a": 1, "b": 3}


def ask(ctx: Ctx, text: str, **how: Any) -> int:
    return ctx.op(GENERATE, profile="work", messages=[{"role": "user", "content": text}], **how)


def leaf(ctx: Ctx, input: Any) -> Any:
    handle = ask(ctx, input)
    yield ctx.wait(handle)
    answer = ctx.read(handle)
    return answer.get("text") or answer


def parent(ctx: Ctx, input: Any) -> Any:
    spawned = [ctx.op(SPAWN, agent="leaf", input=input) for _ in range(5)]
    children = []
    for handle in spawned:
        yield ctx.wait(handle)
        children.append(ctx.read(handle)["run_id"])
    answers = []
    for child in children:
        handle = ctx.op(JOIN, run_id=child)
        yield ctx.wait(handle)
        answers.append(ctx.read(handle))
    return answers


def chain(ctx: Ctx, left: int) -> Any:
    handle = ask(ctx, f"link {left}")
    yield ctx.wait(handle)
    if not left:
        return [ctx.read(handle)["text"]]
    spawned = ctx.op(SPAWN, agent="chain", input=left - 1)
    yield ctx.wait(spawned)
    joined = ctx.op(JOIN, run_id=ctx.read(spawned)["run_id"])
    yield ctx.wait(joined)
    return [ctx.read(handle)["text"], *ctx.read(joined)]


def fork_join(ctx: Ctx, count: int) -> Any:
    handles = [ask(ctx, f"part {number}") for number in range(count)]
    left = set(handles)
    while left:
        left.discard((yield ctx.wait(*sorted(left))))
    last = ask(ctx, "join " + " ".join(ctx.read(handle)["text"] for handle in handles))
    yield ctx.wait(last)
    return ctx.read(last)["text"]


def reflect(ctx: Ctx, rounds_max: int) -> Any:
    draft = "draft"
    for number in range(rounds_max):
        handle = ask(ctx, f"critique {draft}")
        yield ctx.wait(handle)
        verdict = ctx.read(handle)["text"]
        if verdict == "good":
            return [draft, number]
        draft = f"draft {number + 1} ({verdict})"
    return None


def conflicting(task: str, other: str) -> Any:
    """An agent that rewrites a text by its own lights and hands it to the other, who does the opposite."""

    def agent(ctx: Ctx, text: str) -> Any:
        handle = ask(ctx, f"{task}: {text}", output_tokens_max=50)
        yield ctx.wait(handle)
        answer = ctx.read(handle)
        if "error" in answer:
            return answer["error"]["code"]
        spawned = ctx.op(SPAWN, agent=other, input=answer["text"])
        yield ctx.wait(spawned)
        child = ctx.read(spawned)
        if "error" in child:
            return child["error"]["code"]
        joined = ctx.op(JOIN, run_id=child["run_id"])
        yield ctx.wait(joined)
        told = ctx.read(joined)
        return told["error"]["state"] if isinstance(told, dict) else told

    return agent


writer, editor = conflicting("make it longer", "editor"), conflicting("make it shorter", "writer")

AGENTS = {
    "writer": writer,
    "editor": editor,
    "leaf": leaf,
    "parent": parent,
    "chain": chain,
    "fork_join": fork_join,
    "reflect": reflect,
}


class Life:
    """A node with gateway and gate."""

    def __init__(
        self,
        disk: MemoryDisk,
        server: ModelServer,
        retry: RetryLimits | None = None,
        *,
        loops: LoopLimits | None = None,
        model: dict[str, Any] | None = None,
        rate: tuple[int, float] | None = None,
        calls_max: int | None = None,
    ) -> None:
        settings = server.config(**(model or {}))
        self.gateway = Gateway(settings)
        rates = () if rate is None else (RateRule(Scope.PROVIDER, "server", RateLimit(rate[0], round(rate[1] * 1e9))),)
        places = () if calls_max is None else (BulkheadRule(Scope.PROVIDER, "server", calls_max),)
        gate = GateLimits(
            rates=rates, bulkheads=places, weights=WEIGHTS, retry=RetryLimits(base_ns=10**7) if retry is None else retry
        )
        self.node = Node(
            disk, World(), models=self.gateway.service, limits=EngineLimits(depth_max=1000), gates=gate, loops=loops
        )
        for name, agent in AGENTS.items():
            self.node.register(name, agent)
        self.node.engine.recover()

    async def end(self, run_id: str, timeout_s: float = 60) -> Any:
        return await asyncio.wait_for(self.node.result(run_id), timeout_s)

    async def value(self, agent: str, input: Any, **how: Any) -> Any:
        return (await self.end(await self.node.submit(agent, input, **how))).value()

    async def close(self) -> None:
        await self.node.close()
        await self.gateway.service.close()

    async def crash(self) -> None:
        self.node.crash()
        await self.gateway.service.close()


def lives(test: Callable[[MemoryDisk, ModelServer], Awaitable[None]], **server: Any) -> None:
    with ModelServer(**server) as running:
        run(test(MemoryDisk(), running))


def attempts(node: Node, run_id: str) -> list[int]:
    return [record.attempt for record in node.records(run_id) if isinstance(record, StepPrepared)]


def burst(agents: int, requests: int, window_s: float) -> None:
    """All agents with their five sub-agents at once."""
    served: list[tuple[float, str]] = []

    def answer(body: dict[str, Any]) -> Reply:
        tenant = body["messages"][0]["content"]
        served.append((asyncio.get_running_loop().time(), tenant))
        return Reply(text=tenant, pieces=1)

    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server, rate=(requests, window_s))
        runs = [await life.node.submit("parent", "ab"[n % 2], tenant="ab"[n % 2]) for n in range(agents)]
        for number, run_id in enumerate(runs):
            result = await life.end(run_id, 120)
            assert result.value() == ["ab"[number % 2]] * 5
        assert len(served) == 5 * agents
        # Each window of the provider's saw a tenth more than it allows, at most, and so all of them together.
        assert len(server.requests) <= 1.1 * len(served)
        # Until one of the tenants is done they share as they weigh.
        both = [tenant for _, tenant in served[: round(len(served) * 0.55)]]
        share = Counter(both[requests // 10 :])
        assert share["b"] / sum(share.values()) == pytest.approx(0.75, rel=0.1)
        await life.close()

    lives(test, answer=answer, rate=(requests, window_s))


def test_a_burst_of_sub_agents_keeps_to_the_providers_rate_and_the_tenants_weights() -> None:
    burst(20, 30, 0.5)


@pytest.mark.stress
def test_200_agents_with_5_sub_agents_against_60_requests_per_2_s() -> None:
    burst(200, 60, 2.0)


def test_a_chain_a_fork_join_and_a_reflection_end_under_a_rate() -> None:
    verdicts = iter(["weak", "better", "good"])

    def answer(body: dict[str, Any]) -> Reply:
        text = body["messages"][-1]["content"]
        return Reply(text=next(verdicts) if text.startswith("critique") else text[:40], pieces=1)

    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server, rate=(20, 0.2))
        assert await life.value("chain", 5) == [f"link {n}" for n in range(5, -1, -1)]
        assert (await life.value("fork_join", 12)).startswith("join part 0 part 1")
        assert await life.value("reflect", 9) == ["draft 2 (better)", 2]
        await life.close()

    lives(test, answer=answer)


@pytest.mark.parametrize("reply", [Reply(status=429), Reply(status=503), Reply(text="long", cut_after=2)])
def test_what_may_work_later_is_tried_again_by_one_owner(reply: Reply) -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server)
        server.script = [reply, reply, Reply(text="at last")]
        run_id = await life.node.submit("leaf", "x")
        assert (await life.end(run_id)).value() == "at last"
        assert attempts(life.node, run_id) == [1, 2, 3]
        assert [seen.headers["Agentrt-Attempt"] for seen in server.requests] == ["1/5", "2/5", "3/5"]
        assert len({seen.headers["Idempotency-Key"] for seen in server.requests}) == 1
        await life.close()

    lives(test)


def test_attempts_come_to_an_end_and_the_agent_is_told() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server, RetryLimits(attempts_max=3, base_ns=10**7))
        server.answer = lambda body: Reply(status=503)
        run_id = await life.node.submit("leaf", "x")
        answer = (await life.end(run_id)).value()
        assert answer["error"]["code"] == "model_transport" and len(server.requests) == 3
        await life.close()

    lives(test)


@pytest.mark.parametrize(
    "reply", [Reply(status=400), Reply(status=409), Reply(status=429, error_code="insufficient_quota")]
)
def test_what_will_not_get_better_is_not_tried_again(reply: Reply) -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server)
        server.answer = lambda body: reply
        assert "error" in await life.value("leaf", "x")
        assert len(server.requests) == 1
        await life.close()

    lives(test)


def test_retry_after_is_waited_for_by_everybody() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server)
        server.script = [Reply(status=429, headers={"Retry-After": "0.5"})]
        assert await life.value("leaf", "x") == "x"
        assert server.requests[1].at_s - server.requests[0].at_s >= 0.5
        await life.close()

    lives(test)


def test_an_open_breaker_refuses_at_once_and_is_typed() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server, RetryLimits(attempts_max=1))
        server.answer = lambda body: Reply(status=503)
        codes = [(await life.value("leaf", "x"))["error"]["code"] for _ in range(30)]
        assert codes[0] == "model_transport" and codes[-1] == "breaker_open"
        assert len(server.requests) < 30
        await life.close()

    lives(test)


def test_what_waits_for_its_rate_survives_a_restart_and_costs_nothing() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server, rate=(2, 60.0))
        runs = [await life.node.submit("leaf", f"{n}") for n in range(6)]
        await asyncio.to_thread(server.wait_for, lambda: len(server.requests) >= 1)
        for run_id in runs[1:]:
            await life.node.until(lambda run_id=run_id: run_id in life.node.engine._runs)
        await life.crash()
        asked = len(server.requests)
        life = Life(disk, server)  # without the limit
        for number, run_id in enumerate(runs):
            assert (await life.end(run_id)).value() == f"{number}"
        assert len(server.requests) <= asked + len(runs)
        waited = [run_id for run_id in runs if attempts(life.node, run_id) == [1]]
        assert len(waited) >= 4  # those that only waited were never sent, and count one attempt
        await life.close()

    lives(test)


def test_a_cancelled_run_leaves_its_place_in_the_line() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server, calls_max=1)
        server.script = [Reply(text="slow", delay=0.3)]
        first = await life.node.submit("leaf", "first")
        await asyncio.to_thread(server.wait_for, lambda: bool(server.requests))
        second = await life.node.submit("leaf", "second")
        third = await life.node.submit("leaf", "third")
        await life.node.cancel(second)
        assert (await life.end(second)).state is RunState.CANCELLED
        assert (await life.end(first)).value() == "slow"
        assert (await life.end(third)).value() == "third"
        assert len(server.requests) == 2
        await life.close()

    lives(test)


def test_a_fallback_goes_to_a_model_that_meets_the_needs() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        settings = server.config()
        settings["models.catalog"] |= {
            "other": {"provider": "server"},
            "spare": {"provider": "server", "structured": True},
        }
        settings["models.profiles"]["work"] = {"models": ("test", "other", "spare")}
        server.config = lambda **model: settings  # type: ignore[method-assign]
        life = Life(disk, server)
        server.answer = lambda body: Reply(status=503) if body["model"] == "test" else Reply(text="{}")
        assert await life.value("leaf", "x") == "{}"
        assert [seen.body["model"] for seen in server.requests] == ["test", "other"]
        server.requests.clear()

        def typed(ctx: Ctx, input: Any) -> Any:
            handle = ask(ctx, "x", schema={"type": "object"})
            yield ctx.wait(handle)
            return ctx.read(handle)["data"]

        life.node.register("typed", typed)
        assert await life.value("typed", None) == {}
        assert [seen.body["model"] for seen in server.requests] == ["test", "spare"]
        await life.close()

    lives(test)


# --- amounts -----------------------------------------------------------------------

PRICES = {"input_price": 1_000_000, "output_price": 1_000_000}  # a micro-dollar a token


def spent(node: Node) -> Cost:
    """By all runs there are."""
    return sum_costs(node.fold(head.run_id).spent for head in MemoryReader(node.disk).scan_heads(limit=10_000))


def test_parallel_calls_never_spend_more_than_the_budget() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server, model=PRICES)
        server.answer = lambda body: Reply(text="ok", usage=(50, 100))

        def many(ctx: Ctx, input: Any) -> Any:
            handles = [ask(ctx, f"{n}", output_tokens_max=100) for n in range(30)]
            left = set(handles)
            while left:
                left.discard((yield ctx.wait(*sorted(left))))
            return len(handles)

        life.node.register("many", many)
        run_id = await life.node.submit("many", None, budget={"microdollars": 1_000})
        assert (await life.end(run_id)).state is RunState.BUDGET_EXHAUSTED
        assert 0 < spent(life.node).micro_usd <= 1_000
        assert len(server.requests) <= 1_000 // 150  # what was reserved for one held the others back
        enough = await life.node.submit("many", None, budget={"microdollars": 10_000})
        assert (await life.end(enough)).value() == 30
        await life.close()

    lives(test)


def test_a_call_that_could_never_fit_ends_the_run_before_it_is_sent() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        life = Life(disk, server, model=PRICES)
        run_id = await life.node.submit("leaf", "x", budget={"tokens": 100})
        assert (await life.end(run_id)).state is RunState.BUDGET_EXHAUSTED
        assert not server.requests and spent(life.node) == Cost()
        await life.close()

    lives(test)


def test_lost_and_repeated_attempts_stay_within_the_budget() -> None:
    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        budget = {"microdollars": 600}

        def careful(ctx: Ctx, input: Any) -> Any:
            for _ in range(10):
                handle = ask(ctx, "x", output_tokens_max=100)
                yield ctx.wait(handle)
            return "all"

        server.script = [Reply(status=429), Reply(delay=3600)]
        server.answer = lambda body: Reply(text="ok", usage=(40, 60))
        life = Life(disk, server, model=PRICES)
        life.node.register("careful", careful)
        run_id = await life.node.submit("careful", None, budget=budget)
        await asyncio.to_thread(server.wait_for, lambda: len(server.requests) == 2)
        await life.crash()
        life = Life(disk, server, model=PRICES)
        life.node.register("careful", careful)
        assert (await life.end(run_id)).state is RunState.BUDGET_EXHAUSTED
        assert attempts(life.node, run_id)[:3] == [1, 2, 3]
        once = next(r for r in life.node.records(run_id) if isinstance(r, StepPrepared)).reserved.micro_usd
        paid = 100 * sum(seen.status == 200 and not seen.gave_up for seen in server.requests)
        assert spent(life.node).micro_usd == paid + once <= budget["microdollars"]
        await life.close()

    lives(test)


@pytest.mark.parametrize("guarded", [True, False])
def test_agents_with_conflicting_instructions_stop_and_overspend_nothing(guarded: bool) -> None:
    """Once by the loop guard, once by nothing but the budget of the ensemble."""

    def answer(body: dict[str, Any]) -> Reply:
        longer = body["messages"][0]["content"].startswith("make it longer")
        return Reply(text="a long text" if longer else "short", usage=(60, 50), pieces=1)

    async def test(disk: MemoryDisk, server: ModelServer) -> None:
        loops = LoopLimits(rallies=4) if guarded else LoopLimits(iterations=0, repeats=0, rallies=0)
        life = Life(disk, server, loops=loops, model=PRICES)
        run_id = await life.node.submit("writer", "short", budget={"microdollars": 5_000})
        result = await life.end(run_id)
        if guarded:
            assert result.value() == "LOOP_DETECTED"  # of the innermost; those above it are told
            assert len(server.requests) <= 2 * 4 + 2
        else:
            assert result.state is RunState.BUDGET_EXHAUSTED or result.value() == "BUDGET_EXHAUSTED"
            assert len(server.requests) > 20
        total = spent(life.node)
        assert total.micro_usd == 110 * len(server.requests) <= 5_000
        await life.close()

    lives(test, answer=answer)
