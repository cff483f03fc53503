"""The run engine over the model store and scripted guests: accept, steps, the joined commit, failures, endings."""

import asyncio
import gc
from functools import partial
from typing import Any

import msgspec
import pytest
from engine_kit import DIED, Ctx, MemoryReader, Node, World, run, settle

from agentrt.engine.group import Group
from agentrt.engine.info import EngineLimits
from agentrt.engine.steps import StepInFlight
from agentrt.errors import (
    ClosedError,
    IdempotencyConflictError,
    InputError,
    QueueFullError,
    UnknownAgentError,
    UnknownRunError,
)
from agentrt.ids import new_run_id
from agentrt.records import (
    RunAccepted,
    RunEnded,
    StepAborted,
    StepCommitted,
    StepPrepared,
)
from agentrt.states import RunState
from agentrt.stores.memory import MemoryDisk


def sequential(ctx: Ctx, input: Any) -> Any:
    """``input`` keyed steps, one after the other."""
    got = []
    for number in range(input):
        handle = ctx.tool("put", n=number)
        yield ctx.wait(handle)
        got.append(ctx.read(handle)["put"]["n"])
        ctx.close(handle)
    return {"got": got, "clock": ctx.clock_ns}


def parallel(ctx: Ctx, input: Any) -> Any:
    """Keyed and pure steps at once, taken as they come."""
    left = [ctx.tool("put", n=number) if number % 2 else ctx.tool("add", a=number, b=1) for number in range(input)]
    order = []
    while left:
        handle = yield ctx.wait(*left)
        order.append([handle, ctx.read(handle), ctx.clock_ns])
        left.remove(handle)
        if handle % 3 == 0:
            left.append(ctx.tool("put", after=handle))
    return order


def test_steps_leave_nothing_for_the_garbage_collector() -> None:
    """A cycle for each step cost a node a sixth of its control loop's time."""

    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("steps", sequential)
        node.engine._effects._tools_call = partial(_kept, node.engine._effects._tools_call)
        await node.result(await node.submit("steps", 2))  # what is made once
        gc.collect()
        gc.disable()
        try:
            await node.result(await node.submit("steps", 30))
            left = sum(type(each) is StepInFlight for each in gc.get_objects())
        finally:
            gc.enable()
        assert left < 5  # those of the last turn may be on the stack
        await node.close()

    run(main())


def _kept(call: Any, *given: Any, done: Any, **named: Any) -> Any:
    """What is returned refers to ``done``, as calls of tool hosts do."""
    call(*given, done=done, **named)
    return [done]


def nothing(ctx: Ctx, input: Any) -> Any:
    return input
    yield ()


def kinds(records: list[Any]) -> list[str]:
    return [type(record).__name__ for record in records]


def test_a_run_is_durable_before_it_is_acknowledged_and_its_result_after_its_end() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("echo", nothing)
        seen: list[str] = []
        node.engine.observe(lambda event, data: seen.append(event))
        run_id = await node.submit("echo", {"x": 1})
        first = node.records(run_id)[0]
        assert isinstance(first, RunAccepted)
        assert first.input == b'{"x":1}' and len(first.seed) == 16 and first.pins["agent"] == "v-echo"
        result = await node.result(run_id)
        assert result.state is RunState.SUCCEEDED and result.value() == {"x": 1}
        assert isinstance(node.records(run_id)[-1], RunEnded)
        assert await node.result(run_id) == result  # asked once more, after its end
        assert seen == ["accepted", "ended"]
        node.check_disk()

    run(main())


def test_a_sequential_step_costs_one_commit_and_two_records() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("seq", sequential)
        run_id = await node.submit("seq", 5)
        result = await node.result(run_id)
        assert result.value()["got"] == [0, 1, 2, 3, 4]
        records = node.records(run_id)
        assert kinds(records) == ["RunAccepted", *["StepPrepared", "StepCommitted"] * 5, "RunEnded"]
        # accept + 5 prepares (each with the outcome before it) + the end (with the last outcome)
        assert node.store.commits == 7
        assert node.engine.statistics().commits_alone == 0
        prepared = [record for record in records if isinstance(record, StepPrepared)]
        assert [record.path for record in prepared] == ["1:1", "1:2", "1:3", "1:4", "1:5"]
        assert prepared[0].key == f"{run_id}/1:1/put" and prepared[0].request == b'{"tool":"put","args":{"n":0}}'
        node.check_disk()

    run(main())


def test_an_outcome_without_company_is_committed_alone_within_the_delay() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())

        def lonely(ctx: Ctx, input: Any) -> Any:
            handle = ctx.tool("put", n=1)
            yield ctx.wait(handle)
            yield ctx.wait(ctx.tool("add", a=1, b=1))  # pure and held: nothing to join
            return 0

        node.register("lonely", lonely)
        run_id = await node.submit("lonely")
        node.tools.hold = True
        await node.until(lambda: len(node.tools.held) == 1)
        node.tools.answer_one()
        await node.until(lambda: len(node.tools.held) == 1)
        began = node.loop.time()
        while len(node.records(run_id)) < 3:
            await asyncio.sleep(0)
            assert node.loop.time() - began < 1.0
        assert isinstance(node.records(run_id)[2], StepCommitted)
        assert node.engine.statistics().commits_alone == 1
        node.tools.answer_one()
        assert (await node.result(run_id)).state is RunState.SUCCEEDED

    run(main())


def test_a_guest_that_has_gone_on_and_stopped_again_is_unheard_until_it_has_said_so() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())

        def two(ctx: Ctx, input: Any) -> Any:
            for number in range(2):
                yield ctx.wait(ctx.tool("put", n=number))

        node.register("two", two)
        node.tools.hold = True
        run_id = await node.submit("two")
        await node.until(lambda: len(node.tools.held) == 1)
        machine = node.engine._runs[run_id]
        guest: Any = machine.guest
        assert not machine.unheard  # of this backend nothing is known
        guest.scheduler_state = None
        assert not machine.unheard  # it has said what it waits for
        answers: list[tuple[Any, ...]] = []
        complete, guest.complete = guest.complete, lambda *answer: answers.append(answer)
        node.tools.answer_one()
        await node.until(lambda: bool(answers))
        for state, unheard in (("QUEUED", False), ("RUNNING", False), (None, True)):
            guest.scheduler_state = state
            assert machine.unheard is unheard
        guest.complete = complete
        complete(*answers[0])
        await node.until(lambda: len(node.tools.held) == 1)
        assert not machine.unheard
        node.tools.answer_one()
        assert (await node.result(run_id)).state is RunState.SUCCEEDED

    run(main())


def test_a_keyed_tool_is_called_only_after_its_phase_one_is_durable() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("seq", sequential)
        run_id = await node.submit("seq", 1)
        real_call = node.tools.call
        states: list[list[str]] = []

        def call(name: str, *args: Any, **how: Any) -> None:
            states.append(kinds(node.records(run_id)))
            real_call(name, *args, **how)

        node.engine._effects._tools_call = call
        await node.result(run_id)
        assert states == [["RunAccepted", "StepPrepared"]]

    run(main())


def test_a_pure_step_keeps_its_digest_only() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("par", parallel)
        run_id = await node.submit("par", 4)
        await node.result(run_id)
        committed = [record for record in node.records(run_id) if isinstance(record, StepCommitted)]
        pure = [record for record in committed if record.result is None]
        assert len(pure) == 2 and all(len(record.result_digest) == 16 for record in pure)
        prepared = {record.path for record in node.records(run_id) if isinstance(record, StepPrepared)}
        assert not prepared & {record.path for record in pure}
        node.check_disk()

    run(main())


@pytest.mark.parametrize(
    ("op", "payload", "code"),
    [
        (1, b"{", "bad_request"),
        (1, b'{"tool":1}', "bad_request"),
        (1, b'{"tool":"put","args":{},"more":1}', "bad_request"),
        (1, b'\xff{"tool":"put"}', "bad_request"),
        (1, b'{"tool":"nope","args":{}}', "unknown_tool"),
        (1, b'{"tool":"boom","args":{}}', "tool_failed"),
        (1, b'{"tool":"fail","args":{}}', "tool_failed"),
        (2, b"{}", "unsupported"),
        (14, b'{"x":1}', "bad_request"),
        (3, b"{}", "bad_request"),
        (3, b'{"seconds":-1}', "bad_request"),
        (3, b'{"seconds":1e300}', "bad_request"),
        (4, b'{"topic":"\\u0000run"}', "bad_request"),
        (6, b'{"agent":"nobody"}', "unknown_agent"),
        (7, b'{"run_id":"run_x"}', "bad_request"),
        (7, b'{"run_id":"run_01ARZ3NDEKTSV4RRFFQ69G5FAV"}', "not_a_child"),
        (10, b'{"data":1}', "bad_request"),
        (10, b'{"topic":"t","run_id":"r"}', "bad_request"),
    ],
)
def test_a_syscall_that_fails_is_a_typed_answer_and_replays(op: int, payload: bytes, code: str) -> None:
    def agent(ctx: Ctx, input: Any) -> Any:
        handle = ctx.submit(op, payload)
        yield ctx.wait(handle)
        last = ctx.tool("put", last=True)
        yield ctx.wait(last)
        return ctx.read(handle)

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("a", agent)
        run_id = await node.submit("a")
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held))
        if code == "tool_failed":
            node.tools.answer_one()
            await node.until(lambda: bool(node.tools.held))
        node.check_disk()
        calls = len(world.attempts)
        node.crash()
        node = Node(disk, world)
        node.register("a", agent)
        node.engine.recover()
        value = (await node.result(run_id)).value()
        assert value["error"]["code"] == code
        assert len(world.attempts) == calls + 1  # the last step only
        node.check_disk()

    run(main())


def test_the_guest_may_end_before_its_step_and_the_outcome_is_still_recorded() -> None:
    def hasty(ctx: Ctx, input: Any) -> Any:
        ctx.tool("put", n=1)
        return "done"
        yield ()

    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("hasty", hasty)
        run_id = await node.submit("hasty")
        await node.result(run_id)
        assert kinds(node.records(run_id)) == ["RunAccepted", "StepPrepared", "StepCommitted", "RunEnded"]

    run(main())


def test_how_guests_end() -> None:
    def wrong(ctx: Ctx, input: Any) -> Any:
        if input == "trap":
            raise ValueError("ouch")
        if input == "hang":
            yield ctx.wait(99)
        return b"{not json" if input == "json" else b'"\xff"' if input == "utf8" else b"1" * 100
        yield ()

    async def main() -> None:
        node = Node(MemoryDisk(), World(), limits=EngineLimits(result_bytes_max=64))
        node.register("wrong", wrong)
        for input, code in (("trap", "trap"), ("json", "run_failed"), ("utf8", "run_failed"), ("big", "run_failed")):
            result = await node.result(await node.submit("wrong", input))
            assert result.state is RunState.FAILED
            assert msgspec.json.decode(result.error or b"")["code"] == code
        run_id = await node.submit("wrong", "hang")
        await node.until(lambda: node.backend.starts == 5)
        node.backend.guests[-1].end("fuel", 0, None)
        result = await node.result(run_id)
        assert result.state is RunState.BUDGET_EXHAUSTED
        run_id = await node.submit("wrong", "hang")
        await node.until(lambda: node.backend.starts == 6)
        node.backend.guests[-1].end("failed", 7, b'"why"')
        error = msgspec.json.decode((await node.result(run_id)).error or b"")
        assert (error["code"], error["exit_code"], error["output"]) == ("run_failed", 7, '"why"')
        node.check_disk()

    run(main())


def test_fault_D13_same_key_same_request_is_the_same_run_and_another_request_a_conflict() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("echo", nothing)
        node.register("other", nothing)
        first = await node.submit("echo", {"a": 1, "b": 2}, idempotency_key="k")
        assert await node.submit("echo", {"b": 2, "a": 1.0}, idempotency_key="k") == first
        assert await node.submit("echo", {"a": 1, "b": 2}, idempotency_key="k", tenant="t2") != first
        both = await asyncio.gather(*(node.submit("echo", 5, idempotency_key="q") for _ in range(3)))
        assert len(set(both)) == 1
        for agent, input in (("echo", {"a": 2}), ("other", {"a": 1, "b": 2})):
            with pytest.raises(IdempotencyConflictError) as caught:
                await node.submit(agent, input, idempotency_key="k")
            assert caught.value.run == first and caught.value.message.count(" then, ") == 1
        assert (await node.result(first)).value() == {"a": 1, "b": 2}
        assert await node.submit("echo", {"a": 1, "b": 2}, idempotency_key="k") == first  # ended: still the same
        stats = node.engine.statistics()
        assert stats.live == 0 and stats.queued_bytes == 0 and stats.duplicates == 4
        node.check_disk()

    run(main())


def test_the_door() -> None:
    async def main() -> None:
        limits = EngineLimits(request_bytes_max=64, queue_items_max=2, queue_bytes_max=100)
        node = Node(MemoryDisk(), World(), limits=limits)
        node.register("seq", sequential)
        node.tools.hold = True
        for how, error in (
            ({"agent": "nope"}, UnknownAgentError),
            ({"input": "x" * 64}, InputError),
            ({"tenant": ""}, InputError),
            ({"tenant": "a\0b"}, InputError),
            ({"tier": 4}, InputError),
            ({"tier": "soon"}, InputError),
            ({"fuel_max": 0}, InputError),
            ({"idempotency_key": ""}, InputError),
            ({"idempotency_key": "k", "input": 2**60}, InputError),
        ):
            with pytest.raises(error):
                await node.submit(**({"agent": "seq", "input": 1} | how))  # type: ignore[arg-type]
        future = node.loop.create_future()
        node.engine.accept("seq", b"[1", lambda run_id, error: future.set_result(error))
        assert isinstance(await future, InputError)
        assert not node.disk.heads
        one = await node.submit("seq", 1, tier="urgent")
        await node.submit("seq", 1, tier=3)
        with pytest.raises(QueueFullError):
            await node.submit("seq", 1)
        assert node.engine.statistics().refused == 1
        node.tools.hold = False
        for _ in range(2):
            node.tools.answer_one()
        await node.result(one)
        await node.submit("seq", 0)  # there is room again
        for bad in ("", "run_", "run_" + "Z" * 26, "x"):
            with pytest.raises(InputError):
                await node.result(bad)
            with pytest.raises(InputError):
                await node.cancel(bad)
        with pytest.raises(UnknownRunError):
            await node.result("run_" + "0" * 26)
        with pytest.raises(UnknownRunError):
            await node.cancel("run_" + "0" * 26)
        await node.engine.drain(5)
        with pytest.raises(ClosedError):
            await node.submit("seq", 1)

    run(main())


def test_a_call_gets_no_more_time_than_its_run_has_left() -> None:
    async def main() -> None:
        now = [1_700_000_000 * 10**9]
        node = Node(MemoryDisk(), World(), now_ns=lambda: now[0])
        node.register("seq", sequential)
        await node.result(await node.submit("seq", 1))
        await node.result(await node.submit("seq", 1, timeout_ns=3600 * 10**9))
        assert set(node.tools.timeouts) == {None}  # the tools' own are shorter
        await node.result(await node.submit("seq", 1, timeout_ns=10**8))
        assert 10**8 <= (node.tools.timeouts[-1] or 0) <= 2 * 10**8
        await node.close()

    run(main())


# --- cancel ---------------------------------------------------------------------------


def test_fault_C23_cancel_is_durable_and_a_step_in_flight_is_still_recorded() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("seq", sequential)
        run_id = await node.submit("seq", 3)
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held))
        waiter = node.result(run_id)
        await node.cancel(run_id)
        assert node.fold(run_id).cancel_requested and not waiter.done()
        assert (await node.engine.queries.describe(run_id)).cancel_requested
        node.tools.answer_one()
        result = await waiter
        assert result.state is RunState.CANCELLED
        assert kinds(node.records(run_id)) == [
            "RunAccepted", "StepPrepared", "CancelRequested", "StepCommitted", "RunEnded"
        ]  # fmt: skip
        assert not node.tools.held
        await node.cancel(run_id)  # of an ended run: nothing happens
        assert node.fold(run_id).ended is not None
        node.check_disk()

    run(main())


def test_a_step_whose_phase_one_becomes_durable_after_the_cancel_is_not_executed() -> None:
    async def main() -> None:
        world = World()
        node = Node(MemoryDisk(), world)
        node.register("seq", sequential)
        run_id = await node.submit("seq", 3)
        node.store.slow = True
        await node.until(lambda: len(node.records(run_id)) == 2)
        cancelled = asyncio.ensure_future(node.cancel(run_id))
        await node.until(lambda: len(node.records(run_id)) == 3)
        node.store.speak()
        await cancelled
        result = await node.result(run_id)
        assert result.state is RunState.CANCELLED and not world.attempts
        assert any(isinstance(record, StepAborted) for record in node.records(run_id))
        node.check_disk()

    run(main())


def test_fault_C24_a_late_success_does_not_overwrite_cancelled() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())

        def hasty(ctx: Ctx, input: Any) -> Any:
            ctx.tool("put", n=1)
            return "success"
            yield ()

        node.register("hasty", hasty)
        run_id = await node.submit("hasty")
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held))
        await node.until(lambda: node.engine._runs[run_id].exit is not None)  # the guest has returned
        await node.cancel(run_id)
        node.tools.answer_one()
        result = await node.result(run_id)
        assert result.state is RunState.CANCELLED and result.result is None
        node.check_disk()

    run(main())


# --- dead hosts, refused appends -----------------------------------------------------------


def test_a_dead_host_means_another_attempt_with_the_same_key_and_then_an_operator() -> None:
    async def main() -> None:
        world = World()
        node = Node(MemoryDisk(), world, limits=EngineLimits(attempts_max=3))
        node.register("seq", sequential)
        run_id = await node.submit("seq", 1)
        node.tools.hold = True
        for _ in range(3):
            await node.until(lambda: bool(node.tools.held))
            node.tools.held.pop()[4](DIED)
        await node.until(lambda: node.engine.statistics().parked == 1)
        key = f"{run_id}/1:1/put"
        assert world.attempts == [(key, 1), (key, 2), (key, 3)]
        state = node.fold(run_id)
        assert state.state is RunState.WAITING and state.wait is not None and state.wait.reason == "operator"
        info = await node.engine.queries.describe(run_id)
        assert info.wait_reason == "operator" and "3 attempts" in (info.detail or "")
        node.check_disk()
        node.tools.hold = False
        await node.resume(run_id)
        assert (await node.result(run_id)).value()["got"] == [0]
        assert world.attempts[-1] == (key, 4)
        node.check_disk()

    run(main())


def test_a_pure_step_is_repeated_when_its_host_dies_and_fails_typed_in_the_end() -> None:
    def pure(ctx: Ctx, input: Any) -> Any:
        handle = ctx.tool("add", a=1, b=2)
        yield ctx.wait(handle)
        return ctx.read(handle)

    async def main() -> None:
        node = Node(MemoryDisk(), World(), limits=EngineLimits(attempts_max=3))
        node.register("pure", pure)
        node.tools.hold = True
        for deaths, expected in ((2, 3), (3, {"error": {"code": "tool_host_died", "message": "gone"}})):
            run_id = await node.submit("pure")
            for _ in range(deaths):
                await node.until(lambda: bool(node.tools.held))
                node.tools.held.pop()[4](DIED)
            if deaths < 3:
                await node.until(lambda: bool(node.tools.held))
                node.tools.answer_one()
            assert (await node.result(run_id)).value() == expected
        node.check_disk()

    run(main())


def test_fault_D11_a_refused_append_discards_the_guest_and_replays_it() -> None:
    from agentrt.errors import StaleWriteError

    async def main() -> None:
        world = World()
        node = Node(MemoryDisk(), world)
        node.register("par", parallel)
        run_id = await node.submit("par", 6)
        refused = 0

        def refuse(batch: Any) -> StaleWriteError | None:
            nonlocal refused
            if batch.after_version >= 4:
                refused += 1
                node.loop.call_later(0.001, node.store.accept_again)
                return StaleWriteError("not yours")
            return None

        node.store.refuse = refuse
        result = await node.result(run_id)
        assert refused == 1 and node.engine.statistics().discarded == 1
        assert result.state is RunState.SUCCEEDED
        assert node.backend.starts == 2
        node.check_disk()

    run(main())


def test_a_run_whose_appends_are_always_refused_is_parked_and_its_waiters_told() -> None:
    from agentrt.errors import StaleWriteError

    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("seq", sequential)
        run_id = await node.submit("seq", 3)
        waiter = node.result(run_id)
        node.store.refuse = lambda batch: StaleWriteError("not yours")
        calls: list[float] = []
        real = node.loop.call_later

        class Impatient:
            def __getattr__(self, name: str) -> Any:
                return getattr(node.loop, name)

            def call_later(self, delay: float, *args: Any) -> Any:
                calls.append(delay)
                return real(0, *args)

        node.engine._loader._loop = Impatient()  # type: ignore[assignment]
        with pytest.raises(Exception, match=r"refused|not yours"):
            await waiter
        assert calls == sorted(calls) and max(calls) <= 5.0
        assert (await node.engine.queries.describe(run_id)).wait_reason == "operator"

    run(main())


def test_a_journal_that_grows_beyond_its_bound_ends_the_run() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World(), limits=EngineLimits(journal_bytes_max=500))
        node.register("seq", sequential)
        run_id = await node.submit("seq", 1000)
        result = await node.result(run_id)
        error = msgspec.json.decode(result.error or b"")
        assert result.state is RunState.FAILED and error["limit"] == "limits.journal_bytes_max"
        assert len(node.records(run_id)) < 40
        node.check_disk()

    run(main())


def test_closing_records_steps_in_flight_and_leaves_the_run_to_the_next_start() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("seq", sequential)
        run_id = await node.submit("seq", 3)
        waiter = node.result(run_id)
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held))
        node.loop.call_later(0.02, node.tools.answer_one)
        await node.close()
        with pytest.raises(ClosedError):
            await waiter
        assert kinds(node.records(run_id)) == ["RunAccepted", "StepPrepared", "StepCommitted"]
        node = Node(disk, world)
        node.register("seq", sequential)
        node.engine.recover()
        assert (await node.result(run_id)).value()["got"] == [0, 1, 2]
        assert world.asked[f"{run_id}/1:1/put"] == 1
        node.check_disk()

    run(main())


def test_parked_runs_can_be_looked_at_and_not_changed() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("seq", sequential)
        ended = await node.submit("seq", 1)
        value = (await node.result(ended)).value()
        node.engine._waiters._recent.clear()  # as if it had ended long ago
        node.tools.hold = True
        run_id = await node.submit("seq", 3)
        waiter = node.result(run_id)
        await node.until(lambda: bool(node.tools.held))
        parking = asyncio.ensure_future(node.engine.park(30))
        await asyncio.sleep(0)
        assert not node.engine.parked
        node.tools.answer_one()
        await parking
        await node.engine.park(30)
        assert node.engine.parked
        with pytest.raises(ClosedError):
            await waiter
        assert (await node.engine.queries.describe(run_id)).state == "ACTIVE"
        assert (await node.result(ended)).value() == value
        assert len(await node.engine.queries.list_runs()) == 2
        read: asyncio.Future[Any] = node.loop.create_future()
        node.engine.look(lambda store: store.read_head(run_id).state, partial(settle, read))  # type: ignore[union-attr]
        assert await read == "ACTIVE"
        for refused in (
            node.result(run_id),
            node.submit("seq", 1),
            node.cancel(run_id),
            node.resume(run_id),
            node.decide(run_id, "1:1", True),
            node.approve(run_id),
            node.send(run_id=run_id),
        ):
            with pytest.raises(ClosedError):
                await refused
        await node.close()
        node.check_disk()
        node = Node(disk, world)
        node.register("seq", sequential)
        node.engine.recover()
        assert (await node.result(run_id)).value()["got"] == [0, 1, 2]
        await node.close()

    run(main())


def test_who_asked_before_the_node_stopped_is_answered() -> None:
    """What they asked for waits for a run that is being read, which does not go on any more."""

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("ask", lambda ctx, input: (yield ctx.wait(ctx.op(8, prompt="?"))))
        run_id = await node.submit("ask")
        await node.until(lambda: bool(node.records(run_id)[1:]))
        node.crash()
        node = Node(disk, world)
        node.register("other", sequential)
        asked = [
            asyncio.ensure_future(node.approve(run_id)),
            asyncio.ensure_future(node.send(run_id=run_id)),
            asyncio.ensure_future(node.cancel(run_id)),
        ]
        await asyncio.sleep(0)
        await node.close()
        for each in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20):
            assert isinstance(each, ClosedError), each
        assert not len(node.engine.orders._callers)

    run(main())


def test_runs_are_described_and_listed() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("seq", sequential)
        run_id = await node.submit("seq", 1)
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held))
        info = await node.engine.queries.describe(run_id)
        assert (info.state, info.wait_reason, info.detail) == (RunState.ACTIVE, "step", "1:1 put")
        others = [await node.submit("seq", 0, tenant="t") for _ in range(5)]
        for other in others:
            await node.result(other)
        ids = [info.run_id for info in await node.engine.queries.list_runs()]
        assert ids == sorted([run_id, *others])
        done = await node.engine.queries.list_runs(state="SUCCEEDED", tenant="t", limit=2)
        assert len(done) == 2 and all(info.ended_ns >= info.accepted_ns for info in done)
        assert [info.run_id for info in await node.engine.queries.list_runs(after=ids[2])] == ids[3:]
        node.crash()

    run(main())


def test_log_lines_go_to_the_logger_with_their_run(caplog: pytest.LogCaptureFixture) -> None:
    def chatty(ctx: Ctx, input: Any) -> Any:
        ctx.log("one")
        yield ctx.wait(ctx.tool("put", n=1))
        ctx.log("two")
        yield ctx.wait(ctx.tool("put", n=2))
        return None

    async def main() -> str:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("chatty", chatty)
        run_id = await node.submit("chatty")
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held))
        node.tools.answer_one()
        await node.until(lambda: bool(node.tools.held))
        await node.until(lambda: len(node.records(run_id)) == 4)
        node.engine._logs.close()
        node.crash()
        node = Node(disk, world)
        node.register("chatty", chatty)
        node.engine.recover()
        await node.result(run_id)
        node.engine._logs.close()
        return run_id

    caplog.set_level("INFO", "agentrt.agent")
    run_id = run(main())
    lines = [record.getMessage() for record in caplog.records if record.name == "agentrt.agent"]
    # silent while the journal still had answers: "one" is not repeated; "two" comes after them and is
    assert lines.count(f"{run_id}: one") == 1
    assert lines.count(f"{run_id}: two") == 2


def test_a_burst_of_accepted_runs_starts_over_several_turns_the_most_urgent_first() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("echo", nothing)
        order: list[int] = []
        turns: list[int] = []
        real, turn = node.backend.start, 0

        def start(program: Any, events: Any, **given: Any) -> Any:
            order.append(given["tier"])
            turns.append(turn)
            return real(program, events, **given)

        node.backend.start = start  # type: ignore[method-assign]
        waiters = []
        for number in range(400):
            node.engine.accept("echo", b"1", lambda run_id, error: waiters.append(run_id), tier=3 - number // 100)
        while len(order) < 400:
            turn += 1
            await asyncio.sleep(0)
        assert order == sorted(order)
        assert max(turns.count(number) for number in set(turns)) <= 64
        for run_id in waiters:
            await node.result(run_id)

    run(main())


def test_a_lone_urgent_run_starts_before_its_caller_is_told_others_in_the_next_turn() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.register("echo", nothing)
        order: list[str] = []
        real = node.backend.start

        def start(program: Any, events: Any, **given: Any) -> Any:
            order.append(f"start {given['tier']}")
            return real(program, events, **given)

        node.backend.start = start  # type: ignore[method-assign]
        node.engine.observe(lambda event, data: order.append(event) if event == "accepted" else None)
        for tier in (0, 1):
            accepted: asyncio.Future[str] = node.loop.create_future()

            def told(found: str | None, error: BaseException | None, of: "asyncio.Future[str]" = accepted) -> None:
                order.append("told")
                settle(of, found, error)

            node.engine.accept("echo", b"1", told, tier=tier)
            await node.result(await accepted)
        assert order == ["start 0", "accepted", "told", "accepted", "told", "start 1"]

    run(main())


def test_many_are_accepted_and_awaited_in_one_go_each_for_itself() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World(), limits=EngineLimits(queue_items_max=300))
        node.register("echo", nothing)
        accepted: asyncio.Future[Any] = node.loop.create_future()
        inputs = [b"[1" if number == 7 else str(number).encode() for number in range(400)]
        before = node.engine.statistics().accepted
        node.engine.entrance.accept_many(Group(400, partial(settle, accepted)), "echo", inputs)
        assert len(node.engine._runs) <= 128  # a turn of the loop takes no more
        found = await accepted
        assert [index for index, item in enumerate(found) if isinstance(item, InputError)] == [7]
        refused = [index for index, item in enumerate(found) if isinstance(item, QueueFullError)]
        run_ids = [item for item in found if isinstance(item, str)]
        assert len(refused) + len(run_ids) == 399 and len(set(run_ids)) == len(run_ids)
        # What was accepted is durable, what was refused is not there: no third thing.
        assert node.engine.statistics().accepted - before == len(run_ids)
        assert {head.run_id for head in MemoryReader(node.disk).scan_heads(limit=1000)} == set(run_ids)

        ended: asyncio.Future[Any] = node.loop.create_future()
        unknown = new_run_id()
        asked = [*run_ids, unknown, run_ids[0]]
        node.engine.queries.wait_many(Group(len(asked), partial(settle, ended)), asked)
        results = await ended
        values = [number for number, item in enumerate(found) if isinstance(item, str)]
        assert [result.value() for result in results[: len(run_ids)]] == values
        assert isinstance(results[-2], UnknownRunError) and results[-1] == results[0]
        assert len(node.engine._waiters) == 0

    run(main())


def test_who_stops_waiting_for_many_leaves_no_waiter() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        node.tools.hold = True
        node.register("seq", sequential)
        run_ids = [await node.submit("seq", 1) for _ in range(3)]
        asked = run_ids * 1000  # several turns of the loop
        group: Group[Any] = Group(len(asked), lambda found, error: None)
        node.engine.queries.wait_many(group, asked)
        node.engine.queries.stop_waiting_many(group, asked)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(node.engine._waiters) == 0
        await node.close()

    run(main())
