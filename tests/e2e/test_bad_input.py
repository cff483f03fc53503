"""Bad input through the public API, of Python and of wasm agents: a clear typed error, nothing lost, the node unharmed.

Each table is a list of (what is given, which error it is). After each the same node still does its work, and no table
leaves a run, a row or a turn of the loop behind.
"""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bad_input_fixture as fixture
import pytest

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.errors import (
    AgentrtError,
    BudgetExhaustedError,
    InputError,
    StepSettledError,
    UnknownAgentError,
    UnknownRunError,
)
from agentrt.states import RunState

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from interpreters import script

MISSING = "run_00000000000000000000000000"
LIMIT_S = 30.0
# Makes the syscall that its input says, with that text as request, and says how it was answered.
ASKER = """
import host, json, sys
op, request = json.loads(sys.stdin.read())
try:
    answer = json.loads(host.call(op, request))
    print(json.dumps("fine" if answer["ok"] else answer["error"]["code"]))
except (ValueError, OSError) as error:
    print(json.dumps("refused"))
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("bad")
    settings = {"store.path": folder / "store", "wasm.cache_path": folder / "modules", "wasm.guests_max": 100}
    tools = [fixture.strict, fixture.returns]
    with Runtime(config=load_config(env={}, arguments=settings), tools=tools) as runtime:
        for agent in (fixture.asks, fixture.hinted, fixture.gives, fixture.patient):
            runtime.register_sync(agent)
        runtime.register_sync("asker", script("micropython", ASKER), backend="wasm")
        yield runtime
        engine = runtime.statistics_sync().engine
        assert (engine.live, engine.parked, engine.queued_bytes) == (0, 0, 0)


@pytest.fixture(autouse=True)
def unharmed(runtime: Runtime) -> Iterator[None]:
    before = threading.active_count()
    yield
    assert runtime.submit_sync("asks", ["returns", "fine"]).result_sync(LIMIT_S) == "fine"
    assert threading.active_count() <= before + 4  # executors grow to their size, once


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"agent": "nobody"}, UnknownAgentError, "Registered: "),
        ({"agent": ["asks"]}, UnknownAgentError, "there is no agent"),
        ({"agent": "x" * 10**6}, UnknownAgentError, "there is no agent"),
        ({"input": float("nan")}, InputError, "the input holds nan"),
        ({"input": {"deep": [float("inf")]}}, InputError, "the input holds inf"),
        ({"input": 2**70}, InputError, "beyond 64 bits"),
        ({"input": -(2**64)}, InputError, "beyond 64 bits"),
        ({"input": object()}, InputError, "the input cannot be turned into JSON"),
        ({"input": "\ud800"}, InputError, "the input cannot be turned into JSON"),
        ({"input": {1.5: [b"x", {2}]}, "idempotency_key": "\ud800"}, InputError, "UTF-8"),
        ({"input": "x" * (2 << 20)}, InputError, "limits.request_bytes_max|more than 1048576"),
        ({"input": 2**60, "idempotency_key": "k"}, InputError, "beyond 2\\^53"),
        ({"tier": 4}, InputError, "no tier"),
        ({"tier": True}, InputError, "no tier"),
        ({"tier": "9" * 5000}, InputError, "no tier"),
        ({"tier": []}, InputError, "no tier"),
        ({"tenant": ""}, InputError, "tenant"),
        ({"tenant": 5}, InputError, "tenant"),
        ({"tenant": "a\n"}, InputError, "tenant"),
        ({"tenant": "x" * 129}, InputError, "tenant"),
        ({"idempotency_key": ""}, InputError, "idempotency key"),
        ({"idempotency_key": 7}, InputError, "idempotency key"),
        ({"idempotency_key": "x" * 5000}, InputError, "idempotency key"),
        ({"fuel": 0}, InputError, "fuel is"),
        ({"fuel": "many"}, InputError, "fuel is"),
        ({"fuel": 2**80}, InputError, "fuel is"),
        ({"fuel": 1.5}, InputError, "fuel is"),
        ({"timeout_s": -1}, InputError, "timeout_s"),
        ({"timeout_s": float("nan")}, InputError, "timeout_s"),
        ({"timeout_s": "soon"}, InputError, "timeout_s"),
        ({"timeout_s": 0}, InputError, "timeout"),
        ({"run_at": float("inf")}, InputError, "run_at"),
        ({"budget": ["tool_calls"]}, InputError, "a budget is a mapping"),
        ({"budget": {"token": 5}}, InputError, "there is no budget 'token'. Use model_calls"),
        ({"budget": {5: 5}}, InputError, "no budget 5"),
        ({"budget": {"tool_calls": -1}}, InputError, "tool_calls"),
        ({"budget": {"tool_calls": 1.5}}, InputError, "tool_calls"),
        ({"budget": {"tool_calls": True}}, InputError, "tool_calls"),
        ({"budget": {"tool_calls": 10**400}}, InputError, "tool_calls"),
        ({"budget": {"wall_s": 0}}, InputError, "wall_s"),
        ({"budget": {"wall_s": float("nan")}}, InputError, "wall_s"),
        ({"budget": {"wall_s": 1e300}}, InputError, "wall_s"),
        ({"budget": {"result_bytes": "all"}}, InputError, "result_bytes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_submit_refuses(runtime: Runtime, given: dict[str, Any], kind: type[AgentrtError], text: str) -> None:
    accepted = runtime.statistics_sync().engine.accepted
    how = dict(given)
    with pytest.raises(kind, match=text):
        runtime.submit_sync(how.pop("agent", "asks"), how.pop("input", ["returns", "fine"]), **how)
    assert runtime.statistics_sync().engine.accepted == accepted


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda runtime: runtime.run("run_x"), InputError),
        (lambda runtime: runtime.run(5), InputError),
        (lambda runtime: runtime.run("x" * 10**6), InputError),
        (lambda runtime: runtime.describe_run_sync(MISSING), UnknownRunError),
        (lambda runtime: runtime.run(MISSING).wait_sync(LIMIT_S), UnknownRunError),
        (lambda runtime: runtime.run(MISSING).cancel_sync(timeout_s=LIMIT_S), UnknownRunError),
        (lambda runtime: runtime.run(MISSING).approve_sync(), StepSettledError),
        (lambda runtime: runtime.run(MISSING).approve_sync(step="1:" + "9" * 5000), InputError),
        (lambda runtime: runtime.run(MISSING).approve_sync(step="1:9"), StepSettledError),
        (lambda runtime: runtime.run(MISSING).approve_sync(comment="x" * (2 << 20)), InputError),
        (lambda runtime: runtime.run(MISSING).approve_sync(by="\ud800"), InputError),
        (lambda runtime: runtime.run(MISSING).cancel_sync("x" * 2000), InputError),
        (lambda runtime: runtime.run(MISSING).cancel_sync("\ud800"), InputError),
        (lambda runtime: runtime.run(MISSING).cancel_sync(5), InputError),
        (lambda runtime: runtime.send_sync(1), InputError),
        (lambda runtime: runtime.send_sync(1, topic="t", run_id=MISSING), InputError),
        (lambda runtime: runtime.send_sync(1, topic="x" * 600), InputError),
        (lambda runtime: runtime.send_sync(1, topic=""), InputError),
        (lambda runtime: runtime.send_sync(1, topic="\0run"), InputError),
        (lambda runtime: runtime.send_sync(1, topic="\ud800"), InputError),
        (lambda runtime: runtime.send_sync(1, topic=5), InputError),
        (lambda runtime: runtime.send_sync(1, topic="t", key=None), InputError),
        (lambda runtime: runtime.send_sync(1, topic="t", id=""), InputError),
        (lambda runtime: runtime.send_sync(1, topic="t", tenant=[]), InputError),
        (lambda runtime: runtime.send_sync(float("nan"), topic="t"), InputError),
        (lambda runtime: runtime.send_sync("x" * (2 << 20), topic="t"), InputError),
        (lambda runtime: runtime.send_sync(1, run_id="nobody"), InputError),
        (lambda runtime: runtime.submit_many_sync("asks", [1, object()]), InputError),
        (lambda runtime: runtime.submit_many_sync("asks", [1, 2], idempotency_keys=["a"]), InputError),
        (lambda runtime: runtime.register_sync("x y\n", b""), InputError),
        (lambda runtime: runtime.register_sync("x"), InputError),
        (lambda runtime: runtime.register_sync("x", b"no module"), InputError),
        (lambda runtime: runtime.register_sync("x", Path("/nowhere/x.wasm")), InputError),
        (lambda runtime: runtime.register_sync(fixture.asks, budget={"token": 1}), InputError),
        (lambda runtime: runtime.register_sync(fixture.asks, fuel="much"), InputError),
        (lambda runtime: runtime.register_sync(fixture.asks, tier=9), InputError),
        (lambda runtime: runtime.register_sync(fixture.asks, backend="none"), AgentrtError),
    ],
)
def test_what_the_other_calls_refuse(runtime: Runtime, call: Any, kind: type[AgentrtError]) -> None:
    with pytest.raises(kind) as caught:
        call(runtime)
    assert caught.value.code != "internal" and len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "how",
    [
        {"cron": "every day"},
        {"cron": "0 0 31 2 *"},
        {"cron": "* " * 10**5},
        {"cron": 5},
        {"name": ""},
        {"agent": ""},
        {"input": float("nan")},
        {"input": "x" * (2 << 20)},
        {"tier": "soon"},
        {"tenant": "\0"},
        {"catch_up": "all"},
    ],
    ids=str,
)
def test_what_schedules_refuse(runtime: Runtime, how: dict[str, Any]) -> None:
    import asyncio

    async def main() -> None:
        given: dict[str, Any] = {"name": "n", "cron": "* * * * *", "agent": "asks", "input": None} | how
        with pytest.raises(InputError):
            await runtime.schedule(**given)
        with pytest.raises(InputError):
            await runtime.unschedule("never made")
        assert await runtime.schedules() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("step", "code"),
    [
        *[
            ((call, what), "value")
            for call in ("tool", "spawn", "send", "approval", "checkpoint", "emit", "lock", "topic")
            for what in ("nan", "huge", "object", "surrogate", "loop", "big")
        ],
        (("tool", "text"), "tool_args"),
        *[(("returns", what), "tool_result") for what in ("nan", "infinity", "huge", "object", "surrogate")],
        (("returns", "big"), "tool_result_too_big"),
        (("unknown", "nobody"), "unknown_tool"),
        (("unknown", ""), "unknown_tool"),
        (("unknown", "x" * 10_000), "unknown_tool"),
        (("spawn", "nobody"), "unknown_agent"),
        (("budget", '{"token": 5}'), "input"),
        (("budget", '{"tool_calls": -5}'), "input"),
        (("budget", '{"tool_calls": "x"}'), "bad_request"),
        (("sleep", "1e12"), "agent_raised"),
        (("join", MISSING), "not_a_child"),
        (("join", "nobody"), "bad_request"),
    ],
    ids=lambda value: ":".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_what_a_python_agent_is_answered(runtime: Runtime, step: tuple[str, str], code: str) -> None:
    if step == ("sleep", "1e12"):  # a timer is nothing to catch: the run ends
        with pytest.raises(AgentrtError, match="seconds is 0 to"):
            runtime.submit_sync("asks", step).result_sync(LIMIT_S)
        return
    assert runtime.submit_sync("asks", step).result_sync(LIMIT_S) == code


@pytest.mark.parametrize(
    ("op", "request_text", "code"),
    [
        ("tool.call", "", "bad_request"),
        ("tool.call", "nonsense", "bad_request"),
        ("tool.call", "[" * 20_000, "bad_request"),
        ("tool.call", '{"args": {}}', "bad_request"),
        ("tool.call", '{"tool": 5}', "bad_request"),
        ("tool.call", '{"tool": "strict", "more": 1}', "bad_request"),
        ("tool.call", '{"tool": "nobody"}', "unknown_tool"),
        ("tool.call", '{"tool": "strict"}', "tool_args"),
        ("tool.call", '{"tool": "strict", "args": {"number": NaN}}', "bad_request"),
        ("tool.call", '{"tool": "strict", "args": {"number": 1e400}}', "tool_args"),
        ("tool.call", '{"tool": "strict", "args": {"number": 1' + "0" * 5000 + "}}", "tool_args"),
        ("tool.call", '{"tool": "strict", "args": {"number": "1"}}', "tool_args"),
        ("tool.call", '{"tool": "strict", "args": [1]}', "tool_args"),
        ("tool.call", '{"tool": "strict", "args": {"number": 1, "idempotency_key": "k"}}', "tool_args"),
        ("tool.call", '{"tool": "returns", "args": {"what": "nan"}}', "tool_result"),
        ("tool.call", '{"tool": "returns", "args": {"what": "fine"}}', "fine"),
        ("timer.sleep", "{}", "bad_request"),
        ("timer.sleep", '{"seconds": -1}', "bad_request"),
        ("timer.sleep", '{"seconds": 1e12}', "bad_request"),
        ("timer.sleep", '{"seconds": 1e400}', "bad_request"),
        ("event.wait", '{"topic": "", "timeout_s": 1}', "bad_request"),
        ("event.wait", '{"topic": "t", "timeout_s": 0.001}', "timeout"),
        ("event.send", "{}", "bad_request"),
        ("event.send", '{"topic": "t", "run_id": "x"}', "bad_request"),
        ("event.send", '{"run_id": "x"}', "bad_request"),
        ("run.spawn", '{"agent": "nobody"}', "unknown_agent"),
        ("run.spawn", '{"agent": "asks", "tier": 9}', "input"),
        ("run.spawn", '{"agent": "asks", "budget": {"token": 5}}', "input"),
        ("run.spawn", '{"agent": "asks", "budget": {"tool_calls": 1.5}}', "input"),
        ("run.spawn", '{"agent": "asks", "max_result_bytes": 0}', "bad_request"),
        ("run.join", '{"run_id": "x"}', "bad_request"),
        ("run.join", f'{{"run_id": "{MISSING}"}}', "not_a_child"),
        ("lock.acquire", '{"name": ""}', "bad_request"),
        ("lock.release", '{"name": "never had", "token": 1}', "lock_lost"),
        ("approval.request", "{}", "bad_request"),
        ("checkpoint", '{"state": NaN}', "bad_request"),
        ("emit", '{"data": NaN}', "bad_request"),
        ("emit", '{"data": 1e400}', "fine"),  # JSON all the same: what it means is the reader's business
        ("no.such.op", "{}", "unknown_op"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_wasm_agent_is_answered(runtime: Runtime, op: str, request_text: str, code: str) -> None:
    assert runtime.submit_sync("asker", [op, request_text]).result_sync(LIMIT_S) == code


def test_hints_are_kept(runtime: Runtime) -> None:
    for given in (None, 5, {}, {"count": 1}, {"count": "1", "names": []}, {"count": 1, "names": [1]}, [1, ["a"]]):
        with pytest.raises(AgentrtError, match="the input does not fit"):
            runtime.submit_sync("hinted", given).result_sync(LIMIT_S)
    assert runtime.submit_sync("hinted", {"count": 2, "names": ["a"]}).result_sync(LIMIT_S) == ["a", "a"]


@pytest.mark.parametrize("what", ["nan", "huge", "object", "surrogate", "loop", "text"])
def test_results_are_checked(runtime: Runtime, what: str) -> None:
    run = runtime.submit_sync("gives", what)
    ended = run.wait_sync(LIMIT_S)
    assert ended.state is RunState.FAILED and json.loads(ended.error or b"")["code"] == "result"


def test_a_result_above_the_budget(runtime: Runtime) -> None:
    with pytest.raises(BudgetExhaustedError) as caught:
        runtime.submit_sync("hinted", {"count": 500, "names": ["a"]}, budget={"result_bytes": 1000}).result_sync(
            LIMIT_S
        )
    assert caught.value.limit == "result_bytes"


def test_answers_to_waits_that_are_answered_late_or_gone(runtime: Runtime) -> None:
    run = runtime.submit_sync("patient")

    def until(reason: str) -> None:
        for _ in range(3000):
            if runtime.describe_run_sync(run.run_id).wait_reason == reason:
                return
            threading.Event().wait(0.01)
        raise AssertionError(reason)

    until("approval")
    with pytest.raises(StepSettledError):
        run.approve_sync(step="1:7")
    with pytest.raises(StepSettledError):
        run.approve_sync(step="2:1")
    with pytest.raises(StepSettledError):
        run.approve_sync(step="nonsense:x")
    step = run.approve_sync(by="ann")
    with pytest.raises(StepSettledError) as caught:
        run.approve_sync(False, step=step)
    assert caught.value.run == run.run_id
    assert run.result_sync(LIMIT_S) == [True, False]  # the second one was too late
    for late in (None, step, "1:2"):
        with pytest.raises(StepSettledError):
            run.approve_sync(step=late)
    run.cancel_sync(timeout_s=LIMIT_S)  # too late as well, and no error
    assert run.result_sync(LIMIT_S) == [True, False]
