"""Crash, restart, replay: nothing accepted is lost, no effect happens twice, every answer comes in the same order."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from engine_kit import DIED, Ctx, Node, World, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_run import kinds, nothing, parallel, sequential

from agentrt.engine.info import EngineLimits
from agentrt.errors import StaleWriteError
from agentrt.records import OutcomeUnknown, StepCommitted, StepPrepared
from agentrt.states import RunState, StepState
from agentrt.stores.memory import MemoryDisk

SPAWN, JOIN = 6, 7


def chaotic(ctx: Ctx, input: Any) -> Any:
    """A guest that decides by what it got so far: any other order of answers leads to other syscalls."""
    choose = random.Random(input)
    left: list[int] = []
    trace: list[Any] = []
    for _ in range(choose.randrange(2, 9)):
        for _ in range(choose.randrange(0, 4)):
            kind = choose.randrange(5)
            if kind < 2:
                left.append(ctx.tool("put", n=choose.randrange(1000), seen=len(trace)))
            elif kind == 2:
                left.append(ctx.tool("add", a=choose.randrange(1000), b=1))
            elif kind == 3:
                left.append(ctx.tool("nope"))
            else:
                left.append(ctx.tool("boom", seen=len(trace)))
        if left:
            some = choose.sample(left, choose.randrange(1, len(left) + 1))
            handle = yield ctx.wait(*some)
            trace.append([handle, ctx.read(handle), ctx.clock_ns])
            choose = random.Random(f"{input} {trace}")
            if choose.random() < 0.8:  # else it may be waited for again
                left.remove(handle)
                ctx.close(handle)
    return trace


AGENTS = {"seq": sequential, "par": parallel, "chaotic": chaotic, "echo": nothing}


def register_all(node: Node) -> None:
    for name, agent in AGENTS.items():
        node.register(name, agent)


async def finish(disk: MemoryDisk, world: World, runs: list[str], **how: Any) -> dict[str, Any]:
    """A node that is not killed brings all runs to their end."""
    node = Node(disk, world, **how)
    register_all(node)
    waiters = {run_id: node.result(run_id) for run_id in runs}
    node.engine.recover()
    values = {run_id: (await waiter).value() for run_id, waiter in waiters.items()}
    assert await node.engine.drain(5)
    node.check_disk()
    assert node.engine.statistics().queued_bytes == 0
    await node.close()
    return values


def check_effects(node_disk: MemoryDisk, world: World, run_id: str, commits: int | None = None) -> None:
    """Each key was executed for one request only, and everything the journal has prepared was done."""
    from engine_kit import MemoryReader

    records = MemoryReader(node_disk).read_records(run_id)
    prepared = {r.key: r for r in records if isinstance(r, StepPrepared)}
    committed = {r.path: r for r in records if isinstance(r, StepCommitted) and r.ok and r.result is not None}
    for record in prepared.values():
        if record.path in committed:
            assert world.effects[record.key] == msgspec.json.decode(record.request)["args"]
    asked = {key for key in world.asked if key.startswith(run_id)}
    assert asked <= set(prepared)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("agent", "input", "commits"), [("seq", 6, 8), ("par", 6, 14), ("echo", 1, 2)])
def test_fault_D01_a_crash_at_every_commit_loses_nothing_and_doubles_nothing(
    agent: str, input: Any, commits: int, applied: bool
) -> None:
    async def main() -> None:
        for at in range(commits):
            disk, world = MemoryDisk(), World()
            node = Node(disk, world, crash_at=at, applied=applied)
            register_all(node)
            submitted = asyncio.ensure_future(node.submit(agent, input))
            crashed = asyncio.ensure_future(node.store.crashed.wait())
            done, _ = await asyncio.wait([crashed], timeout=0.5)
            if not done:
                assert at >= 3  # this order of events needed fewer commits
                break
            node.crash()
            runs = [*disk.heads]
            if at == 0:
                assert not submitted.done() and len(runs) == applied
                submitted.cancel()
            elif at > 0:
                assert submitted.result() in runs
            values = await finish(disk, world, runs)
            for run_id in runs:
                check_effects(disk, world, run_id)
                if agent == "seq":
                    assert values[run_id]["got"] == list(range(6))
                    assert len(world.effects) == 6
                    assert sum(world.asked.values()) <= 7  # only the one in flight may be asked for again

    run(main())


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), crashes=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=4))
def test_any_crashes_and_interleavings_end_with_one_history(seed: int, crashes: list[tuple[int, bool]]) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        runs: list[str] = []
        for number, (at, applied) in enumerate(crashes):
            node = Node(disk, world, crash_at=at, applied=applied, seed=seed + number)
            register_all(node)
            node.engine.recover()
            if number == 0:
                for index in range(3):
                    node.engine.accept(
                        "chaotic", msgspec.json.encode(seed + index), lambda run_id, error: runs.append(run_id or "")
                    )
            for _ in range(3000):
                await asyncio.sleep(0)
                if node.store.crashed.is_set():
                    break
            node.crash()
        known = [*disk.heads]
        assert set(runs) <= set(known)
        values = await finish(disk, world, known, seed=seed, limits=EngineLimits(attempts_max=50))
        from engine_kit import MemoryReader

        for run_id in known:
            check_effects(disk, world, run_id)
            records = MemoryReader(disk).read_records(run_id)
            # Replayed from its complete journal, the guest asks for the same and gets the same in the same order.
            await replays_to(run_id, records, values[run_id])

    run(main())


async def replays_to(run_id: str, records: list[Any], value: Any) -> None:
    """Cut RunEnded off a finished journal, and recover: no tool of kind keyed runs, the result is the same."""
    from agentrt.records import encode_record
    from agentrt.stores.base import READY, Head
    from agentrt.stores.keys import ready_key

    disk, world = MemoryDisk(), World()
    accepted, last = records[0], records[-1]
    disk.heads[run_id] = Head(
        run_id, last.seq - 1, "ACTIVE", accepted.tenant, accepted.agent, accepted.version, accepted.base_tier,
        accepted.base_tier, accepted.at_ns,
    )  # fmt: skip
    disk.journals[run_id] = [encode_record(record) for record in records[:-1]]
    key = ready_key(accepted.base_tier, accepted.at_ns, run_id)
    disk.tables[READY][key] = accepted.version.encode()
    node = Node(disk, world, limits=EngineLimits(attempts_max=50))
    register_all(node)
    waiter = node.result(run_id)
    node.engine.recover()
    assert (await waiter).value() == value
    assert not world.asked
    # Nothing is recorded again. Pure steps that nobody waited for may have had their outcomes recorded this time.
    again = node.records(run_id)
    assert again[: len(records) - 1] == records[:-1]
    assert {r.path for r in again[len(records) - 1 : -1]}.isdisjoint({getattr(r, "path", "") for r in records})
    await node.close()


def test_open_steps_are_settled_with_their_stored_request_key_and_another_attempt() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        register_all(node)
        run_id = await node.submit("seq", 2)
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held))
        node.crash()
        await finish(disk, world, [run_id])
        records = node.records(run_id)
        assert kinds(records)[:5] == ["RunAccepted", "StepPrepared", "OutcomeUnknown", "StepPrepared", "StepCommitted"]
        first, again = records[1], records[3]
        assert isinstance(first, StepPrepared) and isinstance(again, StepPrepared)
        assert (again.key, again.request, again.attempt) == (first.key, first.request, 2)
        assert world.attempts[:2] == [(first.key, 1), (first.key, 2)]

    run(main())


def test_attempts_are_counted_through_restarts_and_then_the_run_waits_for_an_operator() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        register_all(node)
        run_id = await node.submit("seq", 1)
        for _ in range(5):
            node.tools.hold = True
            await node.until(lambda: bool(node.tools.held))  # noqa: B023
            node.crash()
            node = Node(disk, world)
            register_all(node)
            node.tools.hold = True
            node.engine.recover()
        await node.until(lambda: node.engine.statistics().parked == 1)
        assert [attempt for _, attempt in world.attempts] == [1, 2, 3, 4, 5]
        state = node.fold(run_id)
        assert state.state is RunState.WAITING and state.wait is not None
        assert (state.wait.reason, state.wait.path) == ("operator", "1:1")
        assert state.steps["1:1"].state is StepState.OUTCOME_UNKNOWN
        assert node.engine.statistics().parked == 1 and node.engine.statistics().live == 0
        node.check_disk()
        # The parking survives a restart without a further record.
        version = state.version
        node.crash()
        node = Node(disk, world)
        register_all(node)
        node.engine.recover()
        await node.until(lambda: node.engine.statistics().parked == 1)
        assert node.fold(run_id).version == version
        await node.resume(run_id)
        assert (await node.result(run_id)).value()["got"] == [0]
        assert world.attempts[-1][1] == 6
        node.check_disk()
        await node.close()

    run(main())


def test_fault_D15_only_committed_entries_are_replayed() -> None:
    """An outcome that the guest saw and the store did not is forgotten: the step is done again with its key."""

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world, crash_at=2)  # accept, prepare 1, [commit 1, prepare 2]
        register_all(node)
        run_id = await node.submit("seq", 2)
        await node.store.crashed.wait()
        assert len(node.backend.guests[0].delivered) == 1
        node.crash()
        assert kinds(node.records(run_id)) == ["RunAccepted", "StepPrepared"]
        await finish(disk, world, [run_id])
        assert world.asked[f"{run_id}/1:1/put"] == 2 and world.asked[f"{run_id}/1:2/put"] == 1
        assert len(world.effects) == 2

    run(main())


def test_fault_D06_a_batch_of_parallel_calls_issues_only_the_unfinished_ones_again() -> None:
    def batch(ctx: Ctx, input: Any) -> Any:
        handles = [ctx.tool("put", n=number) for number in range(4)]
        for handle in handles:
            yield ctx.wait(handle)
        return [ctx.read(handle)["put"]["n"] for handle in handles]

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("batch", batch)
        run_id = await node.submit("batch")
        node.tools.hold = True
        await node.until(lambda: len(node.tools.held) == 4)
        assert node.store.commits == 2  # one for all four
        node.tools.answer_one()
        node.tools.held[1][4](node.tools.execute(*node.tools.held[1][:3]))
        await node.until(lambda: kinds(node.records(run_id)).count("StepCommitted") == 2, 200_000)
        node.crash()
        node = Node(disk, world)
        node.register("batch", batch)
        node.engine.recover()
        assert (await node.result(run_id)).value() == [0, 1, 2, 3]
        assert sorted(attempt for _, attempt in world.attempts) == [1, 1, 1, 1, 2, 2]
        await node.close()

    run(main())


@pytest.mark.parametrize("change", ["request", "op", "less", "wait"])
def test_divergence_names_the_step_and_both_requests(change: str) -> None:
    def before(ctx: Ctx, input: Any) -> Any:
        first = ctx.tool("put", n=1)
        yield ctx.wait(first)
        yield ctx.wait(ctx.tool("put", n=2))
        yield ctx.wait(ctx.tool("put", n=3))

    def after(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.tool("put", n=1))
        if change == "less":
            return 0
        if change == "op":
            yield ctx.wait(ctx.submit(3, b'{"seconds":1}'))
        elif change == "request":
            yield ctx.wait(ctx.tool("put", n="other"))
        else:
            yield ctx.wait(1)
            yield ctx.wait(1)
        return 0

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("a", before)
        run_id = await node.submit("a")
        node.tools.hold = True
        for _ in range(2):
            await node.until(lambda: bool(node.tools.held))
            node.tools.answer_one()
        await node.until(lambda: bool(node.tools.held))
        node.crash()
        node = Node(disk, world)
        node.register("a", after)
        if change == "wait":
            # It never asks for the recorded step: nothing tells, until it waits where nothing was recorded, or ends.
            pass
        node.engine.recover()
        result = await node.result(run_id)
        error = msgspec.json.decode(result.error or b"")
        assert result.state is RunState.FAILED and error["code"] == "non_determinism"
        assert error["step"] == "1:2" and '"n":2' in error["recorded_request"]
        if change in ("request", "op"):
            assert error["digest"] != error["recorded_digest"]
            assert ("other" if change == "request" else "seconds") in error["request"]
        assert isinstance(result.exception(), Exception) and result.exception().step == "1:2"
        state = node.fold(run_id)
        assert state.steps["1:3"].state is StepState.OUTCOME_UNKNOWN
        node.check_disk()
        await node.close()

    run(main())


def test_a_pure_tool_that_is_not_pure_is_found_out() -> None:
    def agent(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.tool("flaky"))
        yield ctx.wait(ctx.tool("put", n=1))

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("a", agent)
        run_id = await node.submit("a")
        await node.until(lambda: len(node.tools.held) == 1)
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held) and node.tools.held[0][0] == "put")
        node.crash()
        node = Node(disk, world, seed=5)
        node.register("a", agent)
        node.engine.recover()
        result = await node.result(run_id)
        error = msgspec.json.decode(result.error or b"")
        assert error["code"] == "non_determinism" and error["step"] == "1:1"
        assert error["digest"] != error["recorded_digest"]
        await node.close()

    run(main())


def test_a_recorded_pure_step_that_cannot_be_repeated_waits_for_an_operator() -> None:
    def agent(ctx: Ctx, input: Any) -> Any:
        one = ctx.tool("add", a=1, b=1)
        yield ctx.wait(one)
        yield ctx.wait(ctx.tool("put", n=1))
        return ctx.read(one)

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("a", agent)
        run_id = await node.submit("a")
        await node.until(lambda: len(node.tools.held) == 1)
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held) and node.tools.held[0][0] == "put")
        node.crash()
        node = Node(disk, world, limits=EngineLimits(attempts_max=2))
        node.register("a", agent)
        node.tools.hold = True
        node.engine.recover()
        for _ in range(2):
            await node.until(lambda: bool(node.tools.held))
            node.tools.held.pop()[4](DIED)
        await node.until(lambda: node.engine.statistics().parked == 1)
        assert node.fold(run_id).wait is not None
        node.tools.hold = False
        await node.resume(run_id)
        assert (await node.result(run_id)).value() == 2
        node.check_disk()
        await node.close()

    run(main())


def test_the_cancel_flag_is_honoured_by_recovery() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        register_all(node)
        run_id = await node.submit("seq", 3)
        node.tools.hold = True
        await node.until(lambda: bool(node.tools.held))
        await node.cancel(run_id)
        node.crash()
        asked = len(world.attempts)
        node = Node(disk, world)  # the agent need not be registered for this
        waiter = node.result(run_id)
        node.engine.recover()
        node.engine._loop.call_soon(node.engine.load, run_id)
        assert (await waiter).state is RunState.CANCELLED
        assert len(world.attempts) == asked and node.backend.starts == 0
        assert any(isinstance(record, OutcomeUnknown) for record in node.records(run_id))
        node.check_disk()
        await node.close()

    run(main())


def test_runs_of_unregistered_agents_wait_and_go_on_when_somebody_registers_them() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        register_all(node)
        runs = [await node.submit("seq", 2) for _ in range(3)]
        cancelled = await node.submit("seq", 2)
        node.crash()
        node = Node(disk, world, limits=EngineLimits(register_grace_ns=20_000_000))
        waiters = [node.result(run_id) for run_id in runs]
        node.engine.recover()
        await node.until(lambda: node.engine.statistics().unclaimed == 4)
        info = await node.engine.queries.describe(runs[0])
        assert info.state is RunState.ACTIVE and info.wait_reason == "operator" and "v-seq" in (info.detail or "")
        await node.until(lambda: node.engine.statistics().parked == 4, 10**6)
        assert all(node.fold(run_id).state is RunState.WAITING for run_id in runs)
        node.check_disk()
        await node.cancel(cancelled)
        assert node.fold(cancelled).cancel_requested
        register_all(node)
        for waiter in waiters:
            assert (await waiter).value()["got"] == [0, 1]
        assert (await node.result(cancelled)).state is RunState.CANCELLED
        assert await node.engine.drain(5)
        node.check_disk()
        await node.close()

    run(main())


def test_a_run_pinned_to_another_engine_waits_for_an_operator() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("seq", sequential, pins={"engine": "50.0.1"})
        run_id = await node.submit("seq", 2)
        node.crash()
        node = Node(disk, world)
        node.register("seq", sequential, pins={"engine": "50.0.2"})
        node.engine.recover()
        await node.until(lambda: node.engine.statistics().parked == 1)
        assert "50.0.1" in ((await node.engine.queries.describe(run_id)).detail or "")
        assert node.backend.starts == 0
        node.check_disk()
        await node.close()

    run(main())


def test_fault_D12_recovery_leaves_the_runs_of_this_process_alone() -> None:
    async def main() -> None:
        node = Node(MemoryDisk(), World())
        register_all(node)
        runs = [await node.submit("seq", 5) for _ in range(20)]
        node.engine.recover()
        runs += [await node.submit("seq", 5) for _ in range(20)]
        for run_id in runs:
            await node.result(run_id)
        assert node.backend.starts == 40 and node.engine.statistics().recovered == 0
        assert await node.engine.drain(5)
        assert node.engine.statistics().live == 0 and node.engine._intake.admission.items == 0

    run(main())


def test_fault_L41_recovery_is_paced_and_starts_the_most_urgent_first() -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        register_all(node)
        node.tools.hold = True
        for number in range(60):
            await node.submit("seq", 1, tier=number % 4)
        node.crash()
        node = Node(disk, world, limits=EngineLimits(rehydrate_per_s=1000))
        order: list[int] = []
        real = node.backend.start

        def start(program: Any, events: Any, **given: Any) -> Any:
            order.append(given["tier"])
            return real(program, events, **given)

        node.backend.start = start  # type: ignore[method-assign]
        register_all(node)
        began = node.loop.time()
        node.engine.recover()
        await node.until(lambda: len(order) == 60, 10**6)
        assert node.loop.time() - began >= 0.03
        # Reads overlap, so neighbours may swap; the tiers as a whole may not.
        assert [sum(order[:15]), sum(order[45:])] == [0, 45]
        assert await node.engine.drain(5)
        await node.close()

    run(main())


def test_a_pure_step_that_is_repeated_keeps_its_place_among_the_answers() -> None:
    """The journal has the pure step's outcome first; that its repetition takes longer must not change the history."""

    def agent(ctx: Ctx, input: Any) -> Any:
        pure, keyed = ctx.tool("add", a=1, b=1), ctx.tool("put", n=1)
        yield ctx.wait(keyed)
        another = ctx.tool("put", n=2)
        first = yield ctx.wait(pure, another)
        yield ctx.wait(ctx.tool("put", first=first))
        return first

    def answer(node: Node, name: str) -> None:
        index = next(index for index, call in enumerate(node.tools.held) if call[0] == name)
        call = node.tools.held.pop(index)
        call[4](node.tools.execute(*call[:3]))

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("a", agent)
        run_id = await node.submit("a")
        node.tools.hold = True
        await node.until(lambda: len(node.tools.held) == 2)
        answer(node, "add")
        await node.until(lambda: "StepCommitted" in kinds(node.records(run_id)), 10**6)
        node.crash()
        node = Node(disk, world)
        node.register("a", agent)
        node.tools.hold = True
        node.engine.recover()
        await node.until(lambda: len(node.tools.held) == 2, 10**6)
        answer(node, "put")
        await node.until(lambda: len(node.tools.held) == 2)
        answer(node, "put")  # the other one, before the pure step
        for _ in range(20):
            await asyncio.sleep(0)
        assert node.backend.guests[0].delivered == [2]
        answer(node, "add")
        await node.until(lambda: node.backend.guests[0].delivered == [2, 1])
        node.crash()
        node = Node(disk, world)
        node.register("a", agent)
        node.engine.recover()
        assert (await node.result(run_id)).value() == 1
        await node.close()

    run(main())


def test_a_run_that_died_before_its_node_did_not_go_on_and_find_its_children_cancelled() -> None:
    """Its process died, which does not repeat; the node as well, before the run's children had ended."""

    def parent(ctx: Ctx, input: Any) -> Any:
        spawn = ctx.op(SPAWN, agent="child", input=None)
        yield ctx.wait(spawn)
        join = ctx.op(JOIN, run_id=ctx.read(spawn)["run_id"])
        yield ctx.wait(join)
        return ctx.read(join)

    def child(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.tool("put", n=1))
        return 7

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("a", parent)
        node.register("child", child)
        node.tools.hold = True
        run_id = await node.submit("a")
        await node.until(lambda: bool(node.tools.held), 10**6)
        await node.until(lambda: kinds(node.records(run_id))[-1] == "StepPrepared", 10**6)
        node.backend.guests[0].end("trap", 1, None, "its process died")
        await node.until(lambda: kinds(node.records(run_id))[-2:] == ["StepAborted", "Ending"], 10**6)
        node.crash()
        node = Node(disk, world)
        node.register("a", parent)
        node.register("child", child)
        node.engine.recover()
        result = await node.result(run_id)
        assert result.state is RunState.FAILED and b"its process died" in (result.error or b"")
        node.check_disk()
        await node.close()

    run(main())


def test_a_run_that_is_cancelled_in_its_replay_undoes_what_it_did_before() -> None:
    """It is brought to where it was first, repeated pure steps included: only there it knows what to undo."""

    def undo(ctx: Ctx, reason: Any) -> Any:
        yield ctx.wait(ctx.tool("put", undo=True))

    def agent(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.tool("add", a=1, b=1))
        yield ctx.wait(ctx.tool("put", n=1))
        ctx.on_unwind(undo)
        yield ctx.wait(ctx.tool("put", n=2))

    async def main() -> None:
        disk, world = MemoryDisk(), World()
        node = Node(disk, world)
        node.register("a", agent, unwinds=True)
        node.tools.hold = True
        run_id = await node.submit("a")
        for _ in range(2):
            await node.until(lambda: bool(node.tools.held), 10**6)
            node.tools.answer_one()
        await node.until(lambda: bool(node.tools.held), 10**6)
        assert node.tools.held[0][1] == {"n": 2}
        node.crash()
        node = Node(disk, world)
        node.register("a", agent, unwinds=True)
        node.tools.hold = True
        node.engine.recover()
        await node.until(lambda: len(node.tools.held) == 1, 10**6)
        assert node.tools.held[0][0] == "add"
        await node.cancel(run_id)
        node.tools.hold = False
        node.tools.answer_one()
        assert (await node.result(run_id)).state is RunState.CANCELLED
        assert [args for args in world.effects.values() if "undo" in args] == [{"undo": True}]
        await node.close()

    run(main())


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    lives=st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=3),
    die_share=st.sampled_from([0.0, 0.1, 0.4]),
    refuse_share=st.sampled_from([0.0, 0.05]),
    cancels=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 3)), max_size=4),
)
def test_cancels_dead_hosts_refusals_and_crashes_leave_every_run_in_one_durable_end(
    seed: int,
    lives: list[tuple[int, bool]],
    die_share: float,
    refuse_share: float,
    cancels: list[tuple[int, int]],
) -> None:
    async def main() -> None:
        disk, world = MemoryDisk(), World()
        limits = EngineLimits(attempts_max=3)
        chance = random.Random(seed)

        def new_node(number: int) -> Node:
            node = Node(disk, world, seed=seed + number, limits=limits)
            node.store.random = random.Random(seed + number)
            node.store.refuse_share, node.tools.die_share = refuse_share, die_share
            register_all(node)
            node.engine.recover()
            return node

        cancelled: list[str] = []
        for number, (turns, closes) in enumerate(lives):
            node = new_node(number)
            if number == 0:
                for index in range(4):
                    node.engine.accept("chaotic", str(seed % 1000 + index).encode(), lambda run_id, error: None)
            for turn in range(turns):
                await asyncio.sleep(0)
                for at, index in cancels:
                    if at == turn and index < len(disk.heads):
                        run_id = sorted(disk.heads)[index]

                        def done(error: BaseException | None, run_id: str = run_id) -> None:
                            if error is None:
                                cancelled.append(run_id)

                        node.engine.orders.cancel(run_id, done)
            if closes:
                await node.close()
            node.crash()
        node = new_node(99)
        waiting = {run_id: node.result(run_id) for run_id in disk.heads}
        results = {}
        for run_id, waiter in waiting.items():
            while not waiter.done():
                await asyncio.wait([waiter], timeout=0.01)
                info = await node.engine.queries.describe(run_id)
                if not waiter.done() and info.wait_reason == "operator" and chance.random() < 0.5:
                    try:
                        await node.resume(run_id)
                    except Exception as error:
                        # It went on meanwhile, or the store refused: then nothing was acknowledged.
                        assert "does not wait" in str(error) or isinstance(error, StaleWriteError)
            results[run_id] = waiter.result()
        assert await node.engine.drain(5)
        node.check_disk()
        stats = node.engine.statistics()
        assert (stats.live, stats.parked, stats.queued_bytes, node.engine._intake.admission.items) == (0, 0, 0, 0)
        for run_id, result in results.items():
            check_effects(disk, world, run_id)
            if run_id in cancelled:
                state = node.fold(run_id)
                assert state.cancel_requested is None or result.state is RunState.CANCELLED
            else:
                assert result.state in (RunState.SUCCEEDED, RunState.CANCELLED), result
            if result.state is RunState.SUCCEEDED:
                await replays_to(run_id, node.records(run_id), result.value())
        await node.close()

    run(main())
