"""The model gateway over real HTTP: what servers do wrong, and what a call then is."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from model_kit import Gateway, gateway

from agentrt.errors import ClosedError, InputError, QueueFullError
from agentrt.models.failures import FailureKind
from agentrt.models.prices import Usage
from agentrt.models.service import ModelLimits
from agentrt.testing.models import ModelServer, Reply
from agentrt.tools.secrets import EnvironmentSecrets

PRICES = {"input_price": 1_000_000, "output_price": 2_000_000, "cached_price": 500_000}
SECRETS = EnvironmentSecrets("ACME_SECRET_", {"ACME_SECRET___key": "sk-topsecret", "ACME_SECRET_a__key": "sk-own-key"})


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_priced_by_the_providers_usage(stream: bool) -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [Reply(text="four words of it", usage=(1000, 10), cached_tokens=400)]
        outcome = await gate.ask()
        answer = msgspec.json.decode(outcome.payload)
        assert (answer["text"], answer["finish"], answer["model"]) == ("four words of it", "stop", "test")
        assert answer["usage"] == {"input_tokens": 1000, "output_tokens": 10, "cached_tokens": 400}
        assert outcome.cost_micro_usd == 600 + 200 + 20 == answer["cost_micro_usd"]
        assert outcome.reported and not outcome.unseen
        (seen,) = server.requests
        assert seen.body["model"] == "test"
        assert seen.headers["Idempotency-Key"] == "key" and seen.headers["Agentrt-Attempt"] == "1/5"
        assert "Authorization" not in seen.headers
        assert bool(seen.body.get("stream")) is stream

    gateway(test, model=PRICES | {"stream": stream})


@pytest.mark.parametrize("stream", [True, False])
def test_tools_and_schemas_go_there_and_come_back(stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }

    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [
            Reply(text="", tool_calls=[("look", '{"a":1}'), ("look", "{broken")]),
            Reply(text='{"n": 7}'),
            Reply(text='{"n": "seven"}'),
            Reply(text='{"n": 7', finish="length"),
        ]
        tools = [{"name": "look", "description": "looks", "parameters": {"type": "object"}}]
        answer = await gate.value(tools=tools, tool_choice="look")
        assert answer["finish"] == "tool_calls"
        assert [(use["name"], use["arguments"]) for use in answer["tool_calls"]] == [
            ("look", {"a": 1}),
            ("look", "{broken"),
        ]
        assert server.requests[0].body["tools"][0]["function"]["name"] == "look"
        assert server.requests[0].body["tool_choice"]["function"]["name"] == "look"

        again = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": answer["tool_calls"]},
            {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "found"},
        ]
        assert (await gate.value(messages=again, schema=schema))["data"] == {"n": 7}
        body = server.requests[1].body
        assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a":1}'}
        assert body["response_format"]["json_schema"]["strict"] is True

        wrong = await gate.ask(schema=schema)
        assert (wrong.code, wrong.kind, wrong.unseen) == ("model_schema", FailureKind.CONFLICT, False)
        assert wrong.usage.tokens > 0  # it is paid for all the same
        assert msgspec.json.decode(wrong.payload)["text"] == '{"n": "seven"}'
        assert "cut" in (await gate.error(schema=schema))["message"]

    gateway(test, model={"stream": stream})


@pytest.mark.parametrize(
    "status, headers, code, kind, retry_ns",
    [
        (429, {"Retry-After": "2"}, "model_rate", FailureKind.RATE, 2_000_000_000),
        (429, {"Retry-After": "0.25"}, "model_rate", FailureKind.RATE, 250_000_000),
        (429, {"Retry-After-Ms": "7"}, "model_rate", FailureKind.RATE, 7_000_000),
        (429, {}, "model_rate", FailureKind.RATE, None),
        (429, {"Retry-After": "999999999999999"}, "model_rate", FailureKind.RATE, 60_000_000_000),
        (429, {"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}, "model_rate", FailureKind.RATE, 60_000_000_000),
        (429, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, "model_rate", FailureKind.RATE, 0),
        (429, {"Retry-After": "soon"}, "model_rate", FailureKind.RATE, None),
        (500, {}, "model_transport", FailureKind.TRANSPORT, None),
        (503, {"Retry-After": "1"}, "model_transport", FailureKind.TRANSPORT, 1_000_000_000),
        (529, {}, "model_transport", FailureKind.TRANSPORT, None),
        (409, {}, "model_conflict", FailureKind.CONFLICT, None),
        (400, {}, "model_refused", FailureKind.FATAL, None),
        (401, {}, "model_auth", FailureKind.FATAL, None),
        (307, {"Location": "http://127.0.0.1:1/"}, "model_refused", FailureKind.FATAL, None),
    ],
)
def test_statuses_are_failures_of_a_kind(
    status: int, headers: dict[str, str], code: str, kind: FailureKind, retry_ns: int | None
) -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [Reply(status=status, headers=headers)]
        outcome = await gate.ask()
        assert (outcome.code, outcome.kind, outcome.retry_after_ns) == (code, kind, retry_ns)
        assert outcome.unseen is (kind is FailureKind.TRANSPORT)
        assert outcome.usage == Usage() or outcome.unseen  # what is refused costs nothing
        assert len(server.requests) == 1  # nothing is sent twice

    gateway(test)


def test_a_spent_quota_is_fatal_whatever_the_status() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [Reply(status=429, error_code="insufficient_quota", headers={"Retry-After": "1"})]
        outcome = await gate.ask()
        assert (outcome.code, outcome.kind, outcome.retry_after_ns) == ("model_quota", FailureKind.FATAL, None)

    gateway(test)


@pytest.mark.parametrize(
    "reply, code",
    [
        (Reply(text="a long answer", cut_after=2), "model_transport"),
        (Reply(text="a long answer", stall_after=2), "model_timeout"),
        (Reply(text="late", delay=3600), "model_timeout"),
        (Reply(text="x" * 100, endless=True), "model_transport"),  # beyond answer_bytes_max
        (Reply(body=b'{"choices": []}'), "model_transport"),
        (Reply(body=b'{"choices": [{"message"'), "model_transport"),
        (Reply(body=b'{"error": {"message": "at work", "type": "server_error"}}'), "model_transport"),
        (Reply(body=b"[" * 100_000), "model_transport"),
        (Reply(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}), "model_transport"),
        (Reply(body=b"data: {\n\n", headers={"Content-Type": "text/event-stream"}), "model_transport"),
        (Reply(body=b"data: [DONE]\n\n", headers={"Content-Type": "text/event-stream"}), "model_transport"),
    ],
)
def test_broken_answers_are_failures_of_the_way(reply: Reply, code: str) -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [reply]
        outcome = await gate.ask()
        assert (outcome.code, outcome.kind, outcome.unseen) == (code, FailureKind.TRANSPORT, True)
        assert outcome.usage.output_tokens == 4096  # nobody saw what it cost: the reservation

    gateway(test, provider={"idle_timeout_ms": 200, "answer_bytes_max": 100_000})


def test_a_server_that_is_not_there_costs_nothing() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        outcome = await gate.ask()
        assert (outcome.code, outcome.kind, outcome.unseen) == ("model_transport", FailureKind.TRANSPORT, False)
        assert outcome.usage == Usage()

    gateway(test, provider={"base_url": "http://127.0.0.1:1/v1"})


def test_a_stream_that_passes_its_reservation_is_cut() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [Reply(text="word", pieces=1, endless=True)]
        outcome = await gate.ask(output_tokens_max=100)
        assert (outcome.code, outcome.kind) == ("model_overrun", FailureKind.FATAL)
        assert outcome.usage.output_tokens == 100
        server.wait_for(lambda: server.requests[0].gave_up)

    gateway(test)


@pytest.mark.parametrize(
    "usage", [(-1, 5), (10**12, 5), (10, -5), (10, 0), (10, 10**12), None, (2**63, 2**63), (10**30, 1)]
)
@pytest.mark.parametrize("piece_delay", [0, 0.01])  # the end of the answer, its usage and [DONE] at once, or apart
def test_usage_that_cannot_be_is_not_believed(usage: Any, piece_delay: float) -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [Reply(text="some words", usage=usage, piece_delay=piece_delay)]
        outcome = await gate.ask()
        assert outcome.ok and not outcome.reported
        assert outcome.usage == Usage(outcome.usage.input_tokens, 4096)
        assert 0 < outcome.usage.input_tokens < 1000

    gateway(test)


def test_text_comes_while_it_is_made_and_in_order() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        text = "".join(chr(ord("a") + n % 26) for n in range(1000))
        pieces: list[str] = []
        server.script = [Reply(text=text, pieces=500), Reply(text="not told")]
        future = gate.begin(on_text=pieces.append, stream=True)[1]
        assert (await future).ok
        assert "".join(pieces) == text
        pieces.clear()
        assert (await gate.begin(on_text=pieces.append)[1]).ok
        assert not pieces

    gateway(test)


def test_a_cancel_closes_the_connection_in_mid_stream() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [Reply(text="word", endless=True, piece_delay=0.01)]
        begun = asyncio.Event()
        call, future = gate.begin(on_text=lambda text: begun.set(), stream=True)
        await begun.wait()
        gate.service.cancel(call)
        outcome = await future
        assert (outcome.code, outcome.unseen) == ("cancelled", True)
        await asyncio.to_thread(server.wait_for, lambda: server.requests[0].gave_up)
        assert gate.service.statistics().running == 0
        gate.service.cancel(call)  # it has ended: nothing happens

    gateway(test)


def test_a_cancel_before_the_beginning_sends_nothing() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        calls = [gate.begin() for _ in range(20)]
        for call, _ in calls:
            gate.service.cancel(call)
        outcomes = [await future for _, future in calls]
        assert len(server.requests) <= sum(outcome.unseen or outcome.ok for outcome in outcomes)

    gateway(test)


@pytest.mark.parametrize("tenant_keys, key", [(False, "sk-topsecret"), (True, "sk-own-key")])
def test_keys_are_sent_and_never_shown(tenant_keys: bool, key: str) -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [
            Reply(),
            Reply(status=401, body=msgspec.json.encode({"error": {"message": f"Incorrect API key provided: {key}"}})),
        ]
        assert (await gate.begin(tenant="a")[1]).ok
        assert server.requests[0].headers["Authorization"] == f"Bearer {key}"
        outcome = await gate.begin(tenant="a")[1]
        assert outcome.code == "model_auth"
        assert key.encode() not in outcome.payload and b"secret://key" in outcome.payload
        if tenant_keys:
            assert (await gate.begin(tenant="b")[1]).code == "model_auth"
            assert len(server.requests) == 2

    gateway(test, provider={"api_key": "secret://key", "tenant_keys": tenant_keys}, secrets=SECRETS)


def test_a_conversation_that_is_too_long_is_shortened_by_a_strategy_only() -> None:
    messages = [{"role": "system", "content": "be brief"}]
    messages += [{"role": "user", "content": f"{n} " + "x" * 500} for n in range(20)]

    async def test(gate: Gateway, server: ModelServer) -> None:
        with pytest.raises(InputError, match="window"):
            gate.begin(messages=messages)
        assert (await gate.ask(messages=messages, context="recent@1")).ok
        sent = server.requests[0].body["messages"]
        assert sent[0] == messages[0] and sent[1:] == messages[-len(sent) + 1 :] and 3 < len(sent) < 12
        huge = [messages[0], {"role": "user", "content": "x" * 9000}]
        assert (await gate.error(messages=huge, context="ends@1"))["code"] == "model_context"
        with pytest.raises(InputError, match=r"recent@1, ends@1"):
            gate.begin(messages=messages, context="recent@9")

    gateway(test, model={"context_tokens": 8192, "output_tokens_max": 4096})


def test_what_is_wrong_with_a_request_is_said_and_nothing_sent() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        for wrong, text in (
            ({"profile": "none"}, "no model profile"),
            ({"temperature": 3}, "temperature"),
            ({"output_tokens_max": 0}, "output_tokens_max"),
            ({"stop": []}, "stop"),
            ({"unknown": 1}, "unknown"),
        ):
            with pytest.raises(InputError, match=text):
                gate.begin(**wrong)
        for wrong, text in (
            ({"messages": []}, "0 messages"),
            ({"messages": [{"role": "king", "content": "x"}]}, "king"),
            ({"messages": [{"role": "user"}]}, "neither"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
            ({"tools": [{"name": "a"}, {"name": "a"}]}, "same name"),
            ({"tool_choice": "b"}, "tool_choice"),
            ({"schema": {"type": "string", "pattern": "(a+)+$"}}, "pattern"),
            ({"schema": {"$ref": "http://127.0.0.1/"}}, "ref"),
            ({"schema": []}, "object"),
        ):
            error = await gate.error(**wrong)
            assert error["code"] == "bad_request" and text in error["message"], error
        assert not server.requests

    gateway(test)


def test_calls_are_bounded_in_number_and_bytes() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.answer = lambda body: Reply(delay=3600)
        big = [{"role": "user", "content": "x" * 600}]
        gate.begin(messages=big)
        with pytest.raises(QueueFullError):
            gate.begin(messages=big)
        gate.begin()
        with pytest.raises(QueueFullError):
            gate.begin()
        with pytest.raises(InputError, match="more than 2000"):
            gate.begin(messages=[{"role": "user", "content": "x" * 3000}])

    gateway(test, limits=ModelLimits(calls_max=2, calls_bytes_max=1000, request_bytes_max=2000))


def test_an_answer_above_the_limit_is_paid_for_and_fails() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.script = [Reply(text="x" * 5000, usage=(10, 1000))]
        outcome = await gate.ask()
        assert (outcome.code, outcome.usage) == ("model_too_big", Usage(10, 1000))

    gateway(test, limits=ModelLimits(result_bytes_max=2000))


def test_attempts_go_to_the_models_in_turn() -> None:
    def two(server: ModelServer) -> dict[str, Any]:
        found = server.config()
        found["models.catalog"] |= {
            "other": {"provider": "server"},
            "third": {"provider": "server", "structured": True},
        }
        found["models.profiles"]["work"] = {"models": ("test", "other", "third")}
        return found

    async def test(gate: Gateway, server: ModelServer) -> None:
        for attempt in (1, 2, 3, 4):
            await gate.ask(attempt)
        assert [seen.body["model"] for seen in server.requests] == ["test", "other", "third", "test"]
        server.requests.clear()
        for attempt in (1, 2, 3):
            server.script = [Reply(text="{}")]
            await gate.ask(attempt, schema={"type": "object"})
        assert [seen.body["model"] for seen in server.requests] == ["test", "third", "test"]

    gateway(test, arguments=two)


def test_a_provider_that_raises_fails_that_call_and_shows_nothing() -> None:
    class Broken:
        async def generate(self, call: Any) -> Any:
            raise RuntimeError("sk-topsecret")

        async def close(self) -> None:
            raise RuntimeError

    async def test(gate: Gateway, server: ModelServer) -> None:
        outcome = await gate.ask()
        assert (outcome.code, outcome.kind) == ("model_provider", FailureKind.FATAL)
        assert b"sk-topsecret" not in outcome.payload and b"RuntimeError" in outcome.payload

    gateway(test, factories={"openai": lambda *given: Broken()})


def test_closing_ends_calls_and_nothing_is_delivered_afterwards() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        server.answer = lambda body: Reply(delay=3600)
        _, future = gate.begin()
        await asyncio.to_thread(server.wait_for, lambda: bool(server.requests))
        await gate.service.close()
        await asyncio.to_thread(server.wait_for, lambda: server.requests[0].gave_up)
        await asyncio.sleep(0)
        assert not future.done()
        with pytest.raises(ClosedError):
            gate.begin()

    gateway(test)


def test_connections_are_used_again() -> None:
    async def test(gate: Gateway, server: ModelServer) -> None:
        for _ in range(5):
            assert (await gate.ask()).ok
        assert len({seen.peer for seen in server.requests}) == 1

    gateway(test)
