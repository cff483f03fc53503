"""What an agent's author sees: the requests that `Context` makes, the failures it raises, and how a run ends."""

import asyncio
import gc
from typing import Any

import msgspec
import pytest
from agent_kit import Driver

from agentrt import tool
from agentrt.agents import (
    ChildFailedError,
    Context,
    DeadlockError,
    LockLostError,
    StepFailedError,
    ValueRefusedError,
    agent,
)
from agentrt.agents.protocol import HostLimits
from agentrt.errors import InputError, ToolError, ToolTimeoutError


@tool(kind="pure")
def look_up(domain: str) -> str:
    return domain


@agent(name="helper")
async def helper_agent(ctx: Context) -> None: ...


# --- requests -------------------------------------------------------------------------------


def test_each_method_asks_for_its_step() -> None:
    @agent
    async def entry(ctx: Context) -> list[Any]:
        out: list[Any] = [await ctx.tool(look_up, domain="x.org")]
        event = await ctx.event("paid", key="7", timeout="15m")
        out.append([event.id, event.data])
        out.append(await ctx.send({"a": 1}, topic="t", key="k", id="e1"))
        out.append(await ctx.send(2, run="run_x"))
        answer = await ctx.approval("send?", {"to": "x"}, timeout="2d")
        out.append([bool(answer), answer.by, answer.comment])
        child = await ctx.spawn(helper_agent, {"n": 1}, tier="batch", max_result_bytes=10, budget={"tool_calls": 1})
        out.append([child.run_id, await child.result()])
        async with ctx.lock("crm", timeout=5) as lock:
            out.append([lock.token, lock.dirty])
        return out

    answers: list[Any] = [
        "found",
        {"id": "e", "data": 5},
        {"id": "e1"},
        {"id": "e2"},
        {"approved": True, "by": "me", "comment": None},
        {"run_id": "run_c"},
        [1],
        {"token": 7, "dirty": True},
        None,
    ]
    driver = Driver(entry).start()
    for handle, answer in enumerate(answers, 1):
        assert driver.waiting == (handle,)
        driver.answer(handle, answer)
    assert driver.result() == ["found", ["e", 5], "e1", "e2", [True, "me", None], ["run_c", [1]], [7, True]]
    assert driver.requests() == [
        ("tool.call", {"tool": "look_up", "args": {"domain": "x.org"}}),
        ("event.wait", {"topic": "paid", "key": "7", "timeout_s": 900.0}),
        ("event.send", {"run_id": None, "topic": "t", "key": "k", "data": {"a": 1}, "id": "e1"}),
        ("event.send", {"run_id": "run_x", "topic": None, "key": "", "data": 2, "id": None}),
        ("approval.request", {"question": "send?", "data": {"to": "x"}, "timeout_s": 172800.0}),
        (
            "run.spawn",
            {
                "agent": "helper",
                "input": {"n": 1},
                "tier": "batch",
                "detached": False,
                "max_result_bytes": 10,
                "budget": {"tool_calls": 1},
            },
        ),
        ("run.join", {"run_id": "run_c"}),
        ("lock.acquire", {"name": "crm", "timeout_s": 5.0}),
        ("lock.release", {"name": "crm", "token": 7}),
    ]


@agent
async def elsewhere(ctx: Context, ends: str) -> str:
    async with ctx.foreign_lock("redis", release=lambda lock: ctx.tool("unlock", name=lock.name, owner=lock.owner)):
        await ctx.tool("lock")
        if ends == "raises":
            raise ValueError("no")
    return "done"


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_a_foreign_lock_is_declared_taken_released_and_given_up(ends: str) -> None:
    driver = Driver(elsewhere, ends).start()
    driver.answer(1, {"name": "redis", "owner": "run_1/1:1", "held": True}).answer(2).answer(3, failed=False)
    assert driver.requests() == [
        ("lock.foreign", {"name": "redis", "owner": None}),
        ("tool.call", {"tool": "lock", "args": {}}),
        ("tool.call", {"tool": "unlock", "args": {"name": "redis", "owner": "run_1/1:1"}}),
        ("lock.foreign", {"name": "redis", "owner": "run_1/1:1"}),
    ]
    driver.answer(4, {"name": "redis", "owner": "run_1/1:1", "held": False})
    assert not driver.run.handlers
    if ends == "returns":
        assert driver.result() == "done"
    else:
        assert driver.run.exit is not None and driver.run.exit.reason == "failed"


@pytest.mark.parametrize("answers", range(5))
def test_unwinding_releases_a_foreign_lock_that_was_declared(answers: int) -> None:
    driver = Driver(elsewhere, "returns").start()
    given = [{"name": "redis", "owner": "run_1/1:1", "held": True}, None, None, None]
    for handle, answer in enumerate(given[:answers], 1):
        driver.answer(handle, answer)
    if answers == 4:
        assert driver.result() == "done"
        return
    before = len(driver.asked)
    driver.unwind()
    if answers in (1, 2):  # declared: whether it was taken nobody needs to know
        assert driver.requests()[before:] == [
            ("tool.call", {"tool": "unlock", "args": {"name": "redis", "owner": "run_1/1:1"}})
        ]
        driver.answer(before + 1)
        assert driver.requests()[before + 1 :] == [("lock.foreign", {"name": "redis", "owner": "run_1/1:1"})]
        driver.answer(before + 2)
    assert len(driver.asked) == before + (2 if answers in (1, 2) else 0)
    assert driver.run.exit is not None and driver.run.exit.reason == "unwound"


def test_requests_do_not_depend_on_the_order_of_arguments() -> None:
    @agent
    async def entry(ctx: Context, flip: bool) -> None:
        await ctx.tool("t", **({"a": {2, 1}, "b": 2} if flip else {"b": 2, "a": {1, 2}}))

    assert Driver(entry, True).start().asked == Driver(entry, False).start().asked


def test_emit_and_log_do_not_wait() -> None:
    @agent
    async def entry(ctx: Context) -> str:
        ctx.emit({"n": 1})
        ctx.log("hello")
        await asyncio.sleep(0)
        return "done"

    driver = Driver(entry).start()
    assert driver.result() == "done"
    assert driver.requests() == [("emit", {"data": {"n": 1}})]
    assert driver.logs == [{"level": "info", "message": "hello"}]


def test_a_restored_run_sees_its_state() -> None:
    @agent
    async def entry(ctx: Context) -> Any:
        if ctx.restored is None:
            await ctx.checkpoint({"round": 1})
            raise AssertionError("nothing after a checkpoint runs")
        return ctx.restored

    first = Driver(entry).start()
    assert first.requests() == [("checkpoint", {"state": {"round": 1}})]
    assert Driver(entry, restored={"round": 1}).start().result() == {"round": 1}


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx: ctx.send(1),
        lambda ctx: ctx.send(1, run="run_x", topic="t"),
        lambda ctx: ctx.event("t", timeout="soon"),
        lambda ctx: ctx.event("t", timeout=-1),
        lambda ctx: ctx.tool(len),
        lambda ctx: ctx.spawn(len),
        lambda ctx: ctx.tool("t", x=object()),
        lambda ctx: ctx.tool("t", x=float("nan")),
        lambda ctx: ctx.tool("t", x=[{"a": float("inf")}]),
        lambda ctx: ctx.tool("t", x=2**64),
        lambda ctx: ctx.tool("t", x="\ud800"),
        lambda ctx: ctx.tool("t", x="y" * 200),
        lambda ctx: ctx.log("x", "loud"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_given(call: Any) -> None:
    @agent
    async def entry(ctx: Context) -> str:
        try:
            await call(ctx)
        except InputError as error:
            return error.code
        return "accepted"

    driver = Driver(entry, limits=HostLimits(request_bytes_max=100)).start()
    assert driver.result() in ("input", "value")
    assert driver.asked == []


@pytest.mark.parametrize("value", [2**53 + 1, 2**64 - 1, -(2**63), None, [None, {"null": "null"}], 0.1 + 0.2, "9" * 40])
def test_what_json_can_carry_is_carried_unchanged(value: Any) -> None:
    @agent
    async def entry(ctx: Context) -> Any:
        return await ctx.tool("t", x=value)

    driver = Driver(entry).start()
    assert driver.requests()[0][1]["args"]["x"] == value
    assert driver.answer(1, value).result() == value


def test_unanswered_steps_are_bounded() -> None:
    @agent
    async def entry(ctx: Context) -> int:
        results = await asyncio.gather(*(ctx.tool("t") for _ in range(8)), return_exceptions=True)
        return sum(isinstance(each, StepFailedError) for each in results)

    driver = Driver(entry, limits=HostLimits(inflight_max=5)).start()
    for handle in range(1, 6):
        driver.answer(handle)
    assert driver.result() == 3


# --- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("tool_failed", ToolError),
        ("tool_timeout", ToolTimeoutError),
        ("tool_args", ToolError),
        ("timeout", TimeoutError),
        ("child_failed", ChildFailedError),
        ("deadlock", DeadlockError),
        ("lock_lost", LockLostError),
        ("queue_full", StepFailedError),
    ],
)
def test_failed_steps_have_their_type_and_code(code: str, kind: type[Exception]) -> None:
    caught: list[Any] = []

    @agent
    async def entry(ctx: Context) -> str:
        try:
            await ctx.tool("t")
        except StepFailedError as error:
            caught.append(error)
            return error.code
        return "no"

    assert Driver(entry).start().fail(1, code, state="FAILED", error={"code": "x"}).result() == code
    assert isinstance(caught[0], kind)
    if isinstance(caught[0], ChildFailedError):
        assert (caught[0].state, caught[0].error) == ("FAILED", {"code": "x"})


def test_a_lost_lock_is_told_unless_something_worse_is_under_way() -> None:
    @agent
    async def entry(ctx: Context, wrong: bool) -> str:
        try:
            async with ctx.lock("l"):
                if wrong:
                    raise ValueError("worse")
        except (LockLostError, ValueError) as error:
            return type(error).__name__
        return "kept"

    for wrong, expected in ((False, "LockLostError"), (True, "ValueError")):
        driver = Driver(entry, wrong).start().answer(1, {"token": 1, "dirty": False})
        assert driver.fail(2, "lock_lost").result() == expected


def test_what_an_agent_raises_is_its_failure() -> None:
    @agent
    async def entry(ctx: Context, how: str) -> None:
        if how == "value":
            raise ValueError("bad \ud800 thing")
        if how == "step":
            await ctx.tool("t")
        if how == "cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)
        raise SystemExit(3)

    assert Driver(entry, "value").start().failure()["message"] == "ValueError: bad ? thing"
    failure = Driver(entry, "step").start().fail(1, "tool_args", extra=1).failure()
    assert (failure["code"], failure["details"]) == ("tool_args", {"extra": 1})
    assert "cancelled" in Driver(entry, "cancel").start().failure()["message"]
    assert Driver(entry, "exit").start().failure()["code"] == "agent_raised"


# --- input and result ------------------------------------------------------------------------------


class Order(msgspec.Struct):
    id: int
    lines: list[str] = []


def test_one_parameter_is_the_input_and_several_are_its_members() -> None:
    @agent
    async def one(ctx: Context, order: Order) -> int:
        return order.id

    @agent
    async def several(ctx: Context, id: int, lines: list[str], note: str = "none") -> list[Any]:
        return [id, lines, note]

    @agent
    async def none(ctx: Context) -> Order:
        return Order(3)

    assert Driver(one, {"id": 1}).start().result() == 1
    assert Driver(several, {"id": 1, "lines": ["a"]}).start().result() == [1, ["a"], "none"]
    assert Driver(none, "anything").start().result() == {"id": 3, "lines": []}
    for wrong in ({"id": "1", "lines": []}, {"lines": []}, {"id": 1, "lines": [], "more": 1}, None):
        assert Driver(several, wrong).start().failure()["code"] == "input"


def test_declarations_are_checked() -> None:
    def plain(ctx: Context) -> None: ...

    async def no_parameters() -> None: ...

    async def many(ctx: Context, *rest: int) -> None: ...

    for function in (plain, no_parameters, many, 3):
        with pytest.raises(InputError):
            agent(function)  # type: ignore[type-var]
    for options in ({"tier": "soon"}, {"budget": {"tool_calls": 0}}, {"budget": {"x": "1"}}, {"name": "a b"}):
        with pytest.raises(InputError):

            @agent(**options)  # type: ignore[call-overload]
            async def entry(ctx: Context) -> None: ...


# --- ends from outside ----------------------------------------------------------------------------------


def test_unwinding_calls_the_handlers_last_in_first_out() -> None:
    called: list[str] = []

    async def declared(ctx: Context, reason: str) -> None:
        called.append(f"declared {reason}")
        await ctx.tool("undo", last=True)

    @agent(on_unwind=declared)
    async def entry(ctx: Context) -> None:
        ctx.on_unwind(lambda: called.append("first set"))

        @ctx.on_unwind
        async def broken() -> None:
            await ctx.tool("undo", last=False)
            raise ValueError("in a handler")

        try:
            await ctx.tool("t")
        finally:
            called.append("finally")

    driver = Driver(entry).start()
    driver.unwind("cancelled")
    assert driver.abandoned == [1]
    assert driver.waiting == (2,)
    driver.answer(2)
    assert called == ["first set", "declared cancelled"]
    assert "in a handler" in driver.logs[0]["message"]
    driver.answer(3)
    assert driver.run.exit is not None
    assert driver.run.exit.reason == "unwound"
    driver.run.drop()
    assert called == ["first set", "declared cancelled", "finally"]


def test_an_unwound_program_takes_no_answer_any_more() -> None:
    @agent
    async def entry(ctx: Context) -> None:
        ctx.on_unwind(lambda: None)
        await ctx.tool("t")
        await ctx.tool("never")

    driver = Driver(entry).start()
    driver.unwind()
    driver.answer(1)
    assert len(driver.asked) == 1


def test_dropping_a_run_lets_its_code_ask_for_nothing() -> None:
    seen: list[str] = []

    @agent
    async def entry(ctx: Context) -> None:
        async def inner() -> None:
            try:
                await ctx.event("never")
            finally:
                try:
                    await ctx.tool("undo")
                except BaseException as error:
                    seen.append(type(error).__name__)
                    raise

        async with asyncio.TaskGroup() as group:
            group.create_task(inner())
            group.create_task(inner())

    driver = Driver(entry).start()
    driver.run.drop()
    gc.collect()
    assert seen == ["GuestEndedError", "GuestEndedError"]
    assert driver.run.requests == []
    driver.answer(1, {"id": "e", "data": 1})
    assert driver.run.exit is not None
    assert driver.run.exit.reason == "killed"


def test_time_and_randomness_come_from_the_run() -> None:
    @agent
    async def entry(ctx: Context) -> None:
        await ctx.tool("t")

    first, second = Driver(entry).start().run, Driver(entry).start().run
    assert first.now_ns() < first.now_ns()
    assert second.now_ns() < first.now_ns()
    assert first.random_bytes(100) == second.random_bytes(100)
    assert first.generator.random() == second.generator.random()
    other = Driver(entry, seed=b"another seed 123").start().run
    assert other.random_bytes(100) != Driver(entry).start().run.random_bytes(100)


def test_the_clock_never_goes_back() -> None:
    @agent
    async def entry(ctx: Context) -> None:
        await ctx.tool("t")
        await ctx.tool("t")

    driver = Driver(entry).start()
    before = [driver.run.now_ns() for _ in range(100)][-1]
    driver.answer(1, after_ns=10)  # the record is older than what the ticks came to
    assert driver.run.now_ns() > before


def test_refused_values_are_typed() -> None:
    assert issubclass(ValueRefusedError, InputError)
