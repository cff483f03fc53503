"""The mini loop: asyncio's own tools on steps, and that the same answers give the same requests."""

import asyncio
from typing import Any

import msgspec
import pytest
from agent_kit import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.agents import Context, agent
from agentrt.agents.errors import NotReplayableError, StepFailedError, WaitTimeoutError
from agentrt.agents.loop import mixed

# --- one construct each ----------------------------------------------------------------


def test_a_step_waits_for_its_answer() -> None:
    @agent
    async def entry(ctx: Context, x: int) -> int:
        return await ctx.tool("double", x=x) + 1

    driver = Driver(entry, 3).start()
    assert driver.requests() == [("tool.call", {"tool": "double", "args": {"x": 3}})]
    assert driver.waiting == (1,)
    assert driver.answer(1, 6).result() == 7


def test_gather_asks_for_all_before_the_first_answer() -> None:
    @agent
    async def entry(ctx: Context) -> list[str]:
        return await asyncio.gather(*(ctx.tool("t", n=n) for n in range(3)))

    driver = Driver(entry).start()
    assert driver.waiting == (1, 2, 3)
    assert driver.answer(2, "b").answer(1, "a").answer(3, "c").result() == ["a", "b", "c"]


def test_sleep_is_a_timer_step() -> None:
    @agent
    async def entry(ctx: Context) -> str:
        return await asyncio.sleep(3600, "woken")

    driver = Driver(entry).start()
    assert driver.requests() == [("timer.sleep", {"seconds": 3600.0})]
    assert driver.answer(1).result() == "woken"


def test_sleep_of_nothing_is_no_step() -> None:
    @agent
    async def entry(ctx: Context) -> None:
        await asyncio.sleep(0)

    assert Driver(entry).start().result() is None


def test_wait_for_abandons_the_timer_that_lost() -> None:
    @agent
    async def entry(ctx: Context) -> str:
        return await asyncio.wait_for(ctx.tool("slow"), 5)

    driver = Driver(entry).start()
    assert sorted(op for op, _ in driver.requests()) == ["timer.sleep", "tool.call"]
    tool = next(ask.handle for ask in driver.asked if ask.op == 1)
    timer = 3 - tool
    assert driver.answer(tool, "done").result() == "done"
    assert driver.abandoned == [timer]


def test_wait_for_abandons_the_step_when_the_timer_wins() -> None:
    @agent
    async def entry(ctx: Context) -> str:
        try:
            return str(await asyncio.wait_for(ctx.tool("slow"), 5))
        except TimeoutError:
            return "late"

    driver = Driver(entry).start()
    tool = next(ask.handle for ask in driver.asked if ask.op == 1)
    assert driver.answer(3 - tool).result() == "late"
    assert driver.abandoned == [tool]
    assert driver.give(driver.answers[0]).result() == "late"  # what comes after the end changes nothing


def test_a_late_answer_of_an_abandoned_step_is_not_delivered() -> None:
    @agent
    async def entry(ctx: Context) -> int:
        async with asyncio.timeout(5) as bound:
            try:
                await ctx.tool("slow")
            except asyncio.CancelledError:
                pass
        assert bound.expired()
        return int(await ctx.tool("next"))

    driver = Driver(entry).start()
    tool = next(ask.handle for ask in driver.asked if ask.op == 1)
    driver.answer(3 - tool)
    assert driver.abandoned == [tool]
    driver.answer(tool, "late")
    assert driver.run.exit is None
    assert driver.waiting == (3,)


def test_task_group_cancels_its_other_tasks() -> None:
    @agent
    async def entry(ctx: Context) -> str:
        count = 0
        try:
            async with asyncio.TaskGroup() as group:
                for n in range(4):
                    group.create_task(ctx.tool("t", n=n))
        except* StepFailedError as caught:
            count = len(caught.exceptions)
        return str(count)

    driver = Driver(entry).start()
    driver.fail(3, "tool_failed")
    assert driver.result() == "1"
    assert sorted(driver.abandoned) == [1, 2, 4]


def test_queue_event_lock_and_condition_work() -> None:
    @agent
    async def entry(ctx: Context) -> list[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue(1)
        lock, event, out = asyncio.Lock(), asyncio.Event(), []

        async def produce() -> None:
            for n in range(3):
                await queue.put(await ctx.tool("t", n=n))
            event.set()

        async def consume() -> None:
            for _ in range(3):
                async with lock:
                    out.append(await queue.get())

        await asyncio.gather(produce(), consume(), event.wait())
        return out

    driver = Driver(entry).start()
    for handle in (1, 2, 3):
        driver.answer(handle, handle * 10)
    assert driver.result() == [10, 20, 30]


def test_async_generators_are_closed_in_the_run() -> None:
    @agent
    async def entry(ctx: Context) -> list[int]:
        closed: list[int] = []

        async def numbers() -> Any:
            try:
                while True:
                    yield await ctx.tool("next")
            finally:
                closed.append(1)

        async for number in numbers():
            closed.append(number)
            break
        await ctx.tool("last")
        return closed

    assert Driver(entry).start().answer(1, 5).answer(2).result() == [5, 1]


def test_time_follows_the_records() -> None:
    @agent
    async def entry(ctx: Context) -> list[float]:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await ctx.tool("t")
        return [before, loop.time()]

    assert Driver(entry).start().answer(1, after_ns=2_500_000_000).result() == [0.0, 2.5]


def test_task_names_do_not_count_other_runs() -> None:
    @agent
    async def entry(ctx: Context) -> list[str]:
        async def name() -> str:
            task = asyncio.current_task()
            assert task is not None
            return task.get_name()

        return [await asyncio.create_task(name()), await asyncio.create_task(name(), name="own")]

    assert Driver(entry).start().result() == Driver(entry).start().result()


@pytest.mark.parametrize(
    ("what", "hint"),
    [
        (lambda: asyncio.to_thread(int), "tool"),
        (lambda: asyncio.get_running_loop().run_in_executor(None, int), "tool"),
        (lambda: asyncio.open_connection("localhost", 1), "tool"),
        (lambda: asyncio.create_subprocess_exec("true"), "tool"),
        (lambda: asyncio.get_running_loop().run_until_complete(None), "await"),
    ],
)
def test_what_cannot_be_replayed_says_what_to_use(what: Any, hint: str) -> None:
    @agent
    async def entry(ctx: Context) -> None:
        await what()

    failure = Driver(entry).start().failure()
    assert failure["code"] == "not_replayable"
    assert hint in failure["hint"]


def test_a_task_that_fails_unseen_is_a_log_line() -> None:
    @agent
    async def entry(ctx: Context) -> None:
        async def wrong() -> None:
            raise ValueError("nobody looks")

        task = asyncio.create_task(wrong())
        await asyncio.sleep(0)
        del task
        await ctx.tool("t")

    driver = Driver(entry).start()
    assert ["nobody looks" in line["message"] for line in driver.logs] == [True]


def test_sets_of_tasks_have_the_order_of_the_run_and_not_of_memory() -> None:
    @agent
    async def entry(ctx: Context) -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(0), name=str(n)) for n in range(50)}
        order = [task.get_name() for task in tasks]
        await asyncio.wait(tasks)
        return order

    keep: list[Any] = []
    seen = set()
    for n in range(5):
        keep.append([object() for _ in range(n * 13)])  # other addresses
        seen.add(tuple(Driver(entry).start().result()))
    assert len(seen) == 1
    assert tuple(Driver(entry, seed=b"another seed 123").start().result()) not in seen


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_hashes_of_a_run_are_distinct(salt: int, count: int) -> None:
    assert len({mixed(salt + n) for n in range(count)}) == count


# --- random programs ---------------------------------------------------------------------

#: A program is a tree: ("tool",), ("sleep", s), ("seq", …), ("gather", …), ("group", …), ("wait_for", s, p),
#: ("first", …): the first of several, the others cancelled; ("catch", p).
programs = st.recursive(
    st.one_of(
        st.tuples(st.just("tool")),
        st.tuples(st.just("event")),
        st.tuples(st.just("emit")),
        st.tuples(st.just("sleep"), st.integers(0, 5)),
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["seq", "gather", "group", "first"]), st.lists(inner, min_size=1, max_size=4)),
        st.tuples(st.just("wait_for"), st.integers(1, 5), inner),
        st.tuples(st.just("catch"), inner),
    ),
    max_leaves=12,
)


async def interpret(ctx: Context, program: Any, out: list[Any]) -> Any:
    match program:
        case ["tool"]:
            out.append(await ctx.tool("t", n=len(out)))
        case ["event"]:
            out.append((await ctx.event("topic", timeout=9)).data)
        case ["emit"]:
            ctx.emit(len(out))
        case ["sleep", seconds]:
            await asyncio.sleep(seconds)
            out.append(asyncio.get_running_loop().time())
        case ["seq", parts]:
            for part in parts:
                await interpret(ctx, part, out)
        case ["gather", parts]:
            await asyncio.gather(*(interpret(ctx, part, out) for part in parts), return_exceptions=True)
        case ["group", parts]:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(interpret(ctx, part, out))
        case ["first", parts]:
            tasks = {asyncio.create_task(interpret(ctx, part, out)) for part in parts}
            done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            for task in done:
                task.exception()
        case ["wait_for", seconds, part]:
            await asyncio.wait_for(interpret(ctx, part, out), seconds)
        case ["catch", part]:
            try:
                await interpret(ctx, part, out)
            except (TimeoutError, StepFailedError, BaseExceptionGroup) as error:
                out.append(type(error).__name__)


@agent
async def random_program(ctx: Context, program: Any) -> list[Any]:
    out: list[Any] = []
    await interpret(ctx, program, out)
    return out


@settings(max_examples=200)
@given(program=programs, data=st.data())
def test_the_same_answers_give_the_same_requests(program: Any, data: st.DataObject) -> None:
    plain = msgspec.json.decode(msgspec.json.encode(program))
    live = Driver(random_program, plain).start()
    abandoned_at: list[list[int]] = [list(live.abandoned)]
    while live.run.exit is None:
        assert live.waiting, "an agent that waits for nothing"
        handle = data.draw(st.sampled_from(live.waiting))
        op = live.asked[handle - 1].op
        if op in (3, 12):
            live.answer(handle)
        elif data.draw(st.booleans()):
            live.answer(handle, {"id": "e", "data": handle} if op == 4 else handle)
        else:
            live.fail(handle, data.draw(st.sampled_from(["timeout", "tool_failed"])))
        abandoned_at.append(list(live.abandoned))
    keep = [object() for _ in range(len(live.answers) * 7)]  # what follows gets other addresses
    again = Driver(random_program, plain).start()
    for step, answer in enumerate(live.answers):
        assert again.run.exit is None
        assert again.abandoned == abandoned_at[step]
        assert answer.handle in again.waiting
        again.give(answer)
    assert again.asked == live.asked
    assert again.abandoned == live.abandoned
    assert again.run.exit == live.run.exit
    answered = {answer.handle for answer in live.answers}
    assert not answered & set(live.abandoned)
    del keep
    if live.run.exit is not None and live.run.exit.reason == "returned":
        assert answered | set(live.abandoned) | set(live.waiting) == set(range(1, len(live.asked) + 1))


def test_wait_timeout_is_pythons_own() -> None:
    @agent
    async def entry(ctx: Context) -> str:
        try:
            await ctx.event("t", timeout="1s")
        except TimeoutError as error:
            assert isinstance(error, WaitTimeoutError)
            return error.code
        return "no"

    assert Driver(entry).start().fail(1, "timeout").result() == "timeout"


def test_refusals_are_typed() -> None:
    assert issubclass(NotReplayableError, Exception)
    assert not issubclass(NotReplayableError, StepFailedError)
