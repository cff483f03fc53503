"""The pure parts of the model gateway: schemas, streams, prices, contexts, failures, routes."""

import json
import math
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt import tool
from agentrt.config import load_config
from agentrt.errors import ConfigError, InputError
from agentrt.models.catalog import Catalog, NoModelError, UnknownProfileError
from agentrt.models.chat import Sampling, StreamedAnswer, read_answer, request_body
from agentrt.models.context import STRATEGIES, ContextTooLongError, message_tokens, shorten
from agentrt.models.declare import schema_of, tool_definition
from agentrt.models.failures import FailureKind, ModelFailure, failure_of, retry_after
from agentrt.models.messages import Conversation, Message, ModelAnswer, ToolUse, decode_request
from agentrt.models.prices import Usage, checked_usage, cost_micro_usd, input_estimate
from agentrt.models.schema import BadSchemaError, MismatchError, Schema
from agentrt.models.settings import ModelConfig
from agentrt.models.sse import SseParser, StreamTooLongError

# --- schemas -----------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.sampled_from(["", "a", "ab", "abc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=6,
)
TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"]


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True),
            "properties": named,
            "required": st.lists(st.sampled_from(["a", "b"]), unique=True),
            "additionalProperties": inner | st.booleans(),
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "enum": st.lists(VALUES, max_size=3),
            "const": VALUES,
            "minLength": st.integers(0, 3),
            "maxItems": st.integers(0, 3),
            "minProperties": st.integers(0, 2),
            "minimum": st.integers(-3, 3),
            "exclusiveMaximum": st.integers(-3, 3),
            "multipleOf": st.integers(1, 3),
            "$ref": st.just("#/$defs/leaf"),
        },
    )


SCHEMAS = st.recursive(st.booleans() | st.just({}), _schemas, max_leaves=6)


@settings(max_examples=400, deadline=None)
@given(schema=SCHEMAS, value=VALUES)
def test_a_schema_means_what_json_schema_says(schema: Any, value: Any) -> None:
    whole = {"$defs": {"leaf": {"type": ["string", "integer"]}}, "allOf": [schema]}
    expected = jsonschema.Draft202012Validator(whole).is_valid(value)
    try:
        Schema(whole).check(value)
        found = True
    except MismatchError:
        found = False
    assert found is expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        [],
        {"pattern": "(a+)+$"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/properties/a"},
        {"type": "text"},
        {"type": []},
        {"properties": []},
        {"anyOf": []},
        {"required": [1]},
        {"minLength": -1},
        {"multipleOf": 0},
        {"minimum": True},
        {"items": [{}]},
        {"not": {}},
        {"properties": {"a": {"items": {"uniqueItems": True}}}},
    ],
)
def test_what_a_schema_may_not_have_is_refused_before_the_call(schema: Any) -> None:
    with pytest.raises(BadSchemaError):
        Schema(schema)


def test_hostile_schemas_and_values_end_soon() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    branching = {
        "anyOf": [
            {"type": "array", "items": {"$ref": "#/$defs/a"}},
            {"type": "array", "items": {"$ref": "#/$defs/a"}},
            False,
        ]
    }
    loop = {"$ref": "#/$defs/a"}
    for schema, value in (
        ({"$defs": {"a": branching}, "$ref": "#/$defs/a", "type": "array"}, [deep, 1]),
        ({"$defs": {"a": {"anyOf": [loop, loop, False]}}, "$ref": "#/$defs/a"}, 1),
        ({"enum": [[0] * 1000] * 1000}, [[1] * 1000] * 3),
        ({"items": {"required": ["a"] * 9000}}, [{"a": 1}] * 9000),
    ):
        with pytest.raises(MismatchError):
            Schema(schema).check(value, 100_000)
    nested: Any = {}
    for _ in range(200):
        nested = {"items": nested}
    with pytest.raises(BadSchemaError, match="deep"):
        Schema(nested)


def test_strict_is_what_providers_take_as_binding() -> None:
    closed = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    assert Schema(closed).strict
    assert Schema({"type": "array", "items": closed}).strict
    assert not Schema(closed | {"required": []}).strict
    assert not Schema({"anyOf": [closed, {"type": "object"}]}).strict


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    n: int


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner
    names: list[str] = []


def test_types_become_schemas() -> None:
    schema = schema_of(Outer)
    assert schema["type"] == "object" and schema["required"] == ["inner"]
    Schema(schema).check({"inner": {"n": 1}})
    with pytest.raises(MismatchError):
        Schema(schema).check({"inner": {"n": "1"}})
    assert "$defs" not in schema_of(Inner)
    assert schema_of({"type": "string"}) == {"type": "string"}
    with pytest.raises(InputError):
        schema_of(object())


@tool(kind="keyed")
def pay(account: str, cents: int = 5, *, idempotency_key: str, attempt: int) -> None:
    """Pays.

    Twice is once."""


def test_tools_are_told_by_their_functions() -> None:
    told = tool_definition(pay)
    assert (told["name"], told["description"]) == ("pay", "Pays.\n\nTwice is once.")
    assert set(told["parameters"]["properties"]) == {"account", "cents"} and told["parameters"]["required"] == [
        "account"
    ]
    Schema(told["parameters"])
    with pytest.raises(InputError):
        tool_definition(len)


# --- streams -----------------------------------------------------------------------

LINES = st.lists(
    st.sampled_from([b"data: a", b"data:b", b"data:  c", b"", b"event: x", b": note", b"data", b"id: 1", b"\xff"]),
    max_size=12,
)


@given(lines=LINES, end=st.sampled_from([b"\n", b"\r\n", b"\r"]), cuts=st.lists(st.integers(1, 5), min_size=1))
def test_events_are_the_same_however_they_arrive(lines: list[bytes], end: bytes, cuts: list[int]) -> None:
    stream = b"".join(line + end for line in lines) + end
    expected, data = [], []
    for line in [*lines, b""]:
        if not line:
            if data:
                expected.append(b"\n".join(data))
            data = []
        elif line.split(b":")[0] == b"data":
            value = line.partition(b":")[2]
            data.append(value[1:] if value[:1] == b" " else value)
    parser, found, at, turn = SseParser(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found += parser.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == expected


def test_an_event_without_an_end_is_bounded() -> None:
    for chunk in (b"x" * 50, b"data: x\n"):
        parser = SseParser(event_bytes_max=200)
        with pytest.raises(StreamTooLongError):
            for _ in range(300):
                parser.feed(chunk)


def _chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode()


@given(
    text=st.text(max_size=60),
    cuts=st.lists(st.integers(1, 7), min_size=1),
    arguments=st.dictionaries(st.text(max_size=3), st.integers()),
)
def test_a_stream_and_a_whole_answer_say_the_same(text: str, cuts: list[int], arguments: dict[str, int]) -> None:
    raw = json.dumps(arguments)
    stream, at, turn = StreamedAnswer(), 0, 0
    while at < len(text):
        stream.feed(_chunk({"content": text[at : at + cuts[turn % len(cuts)]]}))
        at, turn = at + cuts[turn % len(cuts)], turn + 1
    stream.feed(_chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": raw[:5]}}]}))
    stream.feed(_chunk({"tool_calls": [{"index": 0, "function": {"arguments": raw[5:]}}]}, "tool_calls"))
    stream.feed(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}')
    stream.feed(b"[DONE]")
    call = {"id": "c", "function": {"name": "f", "arguments": raw}}
    message = {"content": text or None, "tool_calls": [call]}
    body = {
        "choices": [{"message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    }
    assert stream.done and stream.finish() == read_answer(json.dumps(body).encode())
    assert stream.finish().tool_calls == [ToolUse("c", "f", arguments)]


def test_messages_go_out_as_the_protocol_wants_them() -> None:
    answer = ModelAnswer("t", "tool_calls", "m", Usage(), 0, (ToolUse("1", "f", {"a": [1]}),))
    message = msgspec.convert(answer.message, Message)
    body = json.loads(
        request_body("m", Conversation([message], [], None), None, Sampling(5), stream=True, ask_usage=False)
    )
    assert body["messages"] == [
        {
            "role": "assistant",
            "content": "t",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":[1]}'}}],
        }
    ]
    assert "stream_options" not in body and "tools" not in body and "response_format" not in body


# --- money -------------------------------------------------------------------------


@given(
    fresh=st.integers(0, 10**9),
    cached=st.integers(0, 10**9),
    made=st.integers(0, 10**9),
    prices=st.tuples(st.integers(0, 10**9), st.integers(-1, 10**9), st.integers(0, 10**9)),
)
def test_costs_are_rounded_up_and_never_lost(fresh: int, cached: int, made: int, prices: tuple[int, int, int]) -> None:
    model = ModelConfig(input_price=prices[0], cached_price=prices[1], output_price=prices[2])
    cost = cost_micro_usd(model, Usage(fresh + cached, made, cached))
    exact = fresh * prices[0] + cached * (prices[0] if prices[1] < 0 else prices[1]) + made * prices[2]
    assert cost == math.ceil(exact / 10**6) or abs(cost * 10**6 - exact) < 10**6 <= cost * 10**6 - exact + 10**6
    parts = [Usage(fresh, 0), Usage(cached, 0, cached), Usage(0, made)]
    assert sum(cost_micro_usd(model, part) for part in parts) >= cost


@given(text=st.text(max_size=200), pieces=st.integers(0, 5))
def test_an_estimate_by_bytes_is_never_too_low(text: str, pieces: int) -> None:
    # The finest that a tokenizer can be: a token for each byte, and the frame around each piece.
    assert input_estimate(len(text.encode()), pieces, 1) >= len(text.encode()) + 4 * pieces


@given(
    reported=st.none() | st.builds(Usage, st.integers(-5, 10**6), st.integers(-5, 10**6), st.integers(-5, 10**6)),
    text=st.integers(0, 10**5),
)
def test_what_is_settled_is_possible(reported: Usage | None, text: int) -> None:
    reserved = Usage(1000, 500)
    usage, own = checked_usage(reported, reserved=reserved, text_bytes=text, context_tokens=8000)
    assert own is (usage is reported)
    assert 0 <= usage.cached_tokens <= usage.input_tokens and usage.tokens <= 8000
    if own:
        assert usage.output_tokens * 256 >= text
    else:
        assert usage == reserved


# --- contexts ----------------------------------------------------------------------

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages = []
    for number, role in enumerate(draw(st.lists(ROLES, min_size=1, max_size=12))):
        text = f"{number}" + "x" * draw(st.integers(0, 40))
        calls = [ToolUse(f"c{number}", "f")] if role == "assistant" and draw(st.booleans()) else None
        messages.append(
            Message(role, text, tool_calls=calls, tool_call_id=f"c{number}" if role == "tool" else None)  # type: ignore[arg-type]
        )
    return messages


@given(messages=conversations(), tokens_max=st.integers(0, 1200), strategy=st.sampled_from(sorted(STRATEGIES)))
def test_a_shortened_conversation_fits_and_keeps_what_must_stay(
    messages: list[Message], tokens_max: int, strategy: str
) -> None:
    whole = sum(message_tokens(message) for message in messages)
    try:
        kept = shorten(messages, tokens_max, strategy)
    except ContextTooLongError as error:
        assert error.needed > tokens_max and whole > tokens_max
        return
    assert sum(message_tokens(message) for message in kept) <= tokens_max
    assert (kept == messages) is (whole <= tokens_max) or len(kept) < len(messages)
    places = [messages.index(message) for message in kept]
    assert places == sorted(places) and places[-1] == len(messages) - 1
    leading = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    assert places[:leading] == [*range(leading)]
    for before, message in zip([None, *kept], kept, strict=False):
        if message.role == "tool" and messages.index(message) > 0:
            assert (before is not None and messages.index(before) == messages.index(message) - 1) or (
                messages[messages.index(message) - 1].role not in ("assistant", "tool")
                or not (
                    messages[messages.index(message) - 1].tool_calls
                    or messages[messages.index(message) - 1].role == "tool"
                )
            )
    if strategy == "ends@1":
        first = next((n for n, message in enumerate(messages) if message.role == "user"), None)
        assert first is None or first in places


def test_strategies_are_what_they_were() -> None:
    """A version never changes: runs were promised it."""
    messages = [Message("system", "rules"), Message("user", "task")]
    messages += [Message("user" if n % 2 else "assistant", f"{n}" + "x" * 60) for n in range(8)]
    kept = {name: [messages.index(each) for each in shorten(messages, 500, name)] for name in STRATEGIES}
    assert kept == {"recent@1": [0, 6, 7, 8, 9], "ends@1": [0, 1, 7, 8, 9]}


# --- failures ----------------------------------------------------------------------


@given(status=st.integers(201, 599), body=st.binary(max_size=60), wait=st.none() | st.integers(0, 10**9))
def test_every_answer_is_a_failure_of_some_kind(status: int, body: bytes, wait: int | None) -> None:
    failure = failure_of(status, body, wait)
    assert isinstance(failure, ModelFailure) and failure.code.startswith("model_")
    assert failure.retry_after_ns in (None, wait)
    if failure.kind in (FailureKind.CONFLICT, FailureKind.FATAL):
        assert failure.retry_after_ns is None
    msgspec.json.encode(failure.to_dict())


@given(seconds=st.text(max_size=40), milliseconds=st.none() | st.text(max_size=20))
def test_retry_after_is_capped_whatever_it_says(seconds: str, milliseconds: str | None) -> None:
    found = retry_after(seconds, milliseconds, 10**18, 60 * 10**9)
    assert found is None or 0 <= found <= 60 * 10**9


# --- routes ------------------------------------------------------------------------

TABLES: dict[str, Any] = {
    "models.providers": {"p": {"base_url": "https://models.example/v1"}},
    "models.catalog": {
        "cheap": {"provider": "p", "input_price": 1_000_000, "quality": 20, "region": "us", "latency_ms": 300},
        "good": {"provider": "p", "input_price": 9_000_000, "quality": 80, "region": "eu", "structured": True,
                 "tools": True, "write_risk": 2, "data_policy": "no_retention", "safety": "strict", "latency_ms": 2000},
        "wide": {"provider": "p", "input_price": 5_000_000, "quality": 60, "context_tokens": 1_000_000, "tools": True},
    },
    "models.profiles": {
        "work": {"models": ("cheap", "good", "wide")},
        "thrifty": {"models": ("good", "wide", "cheap"), "order": "cheapest"},
        "batch": {"models": ("cheap",), "tier": 2, "context": "recent@1"},
        "own": {"models": ("good",), "tenants": ("acme",)},
    },
    "models.routes": {
        "a-plans": {"task": "plan", "use": "own", "tenants": ("acme",)},
        "b-dear": {"profile": "work", "cost_micro_usd_min": 100_000, "use": "batch"},
    },
}  # fmt: skip


def catalog(**changed: Any) -> Catalog:
    return Catalog.of(load_config(env={}, arguments=TABLES | changed).models)


def planned(
    found: Catalog, profile: str = "work", tenant: str = "any", tier: int = 1, size: int = 10, **request: Any
) -> Any:
    messages = [{"role": "user", "content": "x" * size}]
    payload = msgspec.json.encode({"profile": profile, "messages": messages} | request)
    return found.plan(decode_request(payload), tenant=tenant, tier=tier)


def names(plan: Any) -> list[str]:
    return [candidate.name for candidate in plan.candidates]


@pytest.mark.parametrize(
    "request_, expected",
    [
        ({}, ["cheap", "good", "wide"]),
        ({"profile": "thrifty"}, ["cheap", "wide", "good"]),
        ({"schema": {}}, ["good"]),
        ({"tools": [{"name": "f"}]}, ["good", "wide"]),
        ({"needs": {"quality_min": 50}}, ["good", "wide"]),
        ({"needs": {"write_risk": 2}}, ["good"]),
        ({"needs": {"regions": ["eu", "ch"]}}, ["good"]),
        ({"needs": {"data_policies": ["no_retention"]}}, ["good"]),
        ({"needs": {"safety": ["strict"]}}, ["good"]),
        ({"needs": {"latency_ms_max": 500}}, ["cheap"]),
        ({"needs": {"latency_ms_max": 5000}}, ["cheap", "good"]),
        ({"needs": {"context_tokens_min": 500_000}}, ["wide"]),
        ({"size": 200_000, "profile": "thrifty"}, ["wide"]),
    ],
)
def test_only_models_that_meet_all_needs_answer(request_: dict[str, Any], expected: list[str]) -> None:
    assert names(planned(catalog(), **request_)) == expected


def test_a_budget_of_context_holds_for_each_call() -> None:
    request = decode_request(
        msgspec.json.encode({"profile": "work", "messages": [{"role": "user", "content": "x" * 500}]})
    )
    with pytest.raises(NoModelError, match="context_tokens 300"):
        catalog().plan(request, tenant="any", tier=1, context_tokens_max=300)
    short = msgspec.structs.replace(request, context="recent@1")
    plan = catalog().plan(short, tenant="any", tier=1, context_tokens_max=300)
    assert plan.context_tokens_max == 300 and plan.candidates[0].reserved.input_tokens == 300


def test_needs_that_nobody_meets_are_named() -> None:
    with pytest.raises(
        NoModelError, match=r"good: .*window.*; wide: its region is not known.*; cheap: its quality of 20 is less"
    ):
        planned(catalog(), size=200_000, needs={"quality_min": 50, "regions": ["eu", "us"]}, profile="thrifty")


def test_routes_go_by_task_tenant_and_cost() -> None:
    found = catalog()
    assert planned(found, task="plan", tenant="acme").profile == "own"
    assert planned(found, task="plan", tenant="other").profile == "work"
    dear = planned(found, size=1_000_000, tier=0)
    assert (dear.profile, dear.routed, dear.tier, dear.context) == ("batch", "b-dear", 2, "recent@1")
    assert dear.candidates[0].reserved.tokens <= 128_000  # no more than the window is sent
    assert planned(found, profile="batch", tier=3).tier == 3
    with pytest.raises(UnknownProfileError, match="batch, thrifty, work"):
        planned(found, profile="own", tenant="other")


def test_a_call_may_ask_for_less_output_and_not_for_more() -> None:
    assert planned(catalog(), output_tokens_max=7).candidates[0].reserved.output_tokens == 7
    assert planned(catalog(), output_tokens_max=10**6).candidates[0].reserved.output_tokens == 4096


@pytest.mark.parametrize(
    "key, name, table, text",
    [
        ("providers", "p", {"base_url": "https://models.example", "api_key": "sk-shown-nowhere"}, "secret://NAME"),
        ("providers", "p", {"base_url": "http://models.example"}, "allow_plain"),
        ("providers", "p", {"base_url": "ftp://models.example"}, "no http"),
        ("providers", "p", {"base_url": "https://user:pw@models.example"}, "api_key"),
        ("providers", "p", {"base_url": "https://models.example:99999"}, "Port|port"),
        ("providers", "p", {}, "base_url"),
        ("catalog", "x", {"provider": "none"}, "no provider 'none'"),
        ("catalog", "x", {"provider": "p", "context_tokens": 10}, "context_tokens"),
        ("profiles", "x", {"models": ("none",)}, "no model 'none'"),
        ("profiles", "x", {}, "empty"),
        ("profiles", "x", {"models": ("cheap",), "order": "best"}, "listed or cheapest"),
        ("profiles", "x", {"models": ("cheap",), "structured": True}, "own needs"),
        ("profiles", "x", {"models": ("cheap",), "context": "none@1"}, "strategy"),
        ("routes", "x", {"use": "none"}, "no profile 'none'"),
        ("routes", "x", {"use": "work", "profile": "none"}, "no profile 'none'"),
        ("routes", "x", {"user": "work"}, "no setting 'user'"),
    ],
)
def test_a_wrong_table_is_named_and_no_key_is_shown(key: str, name: str, table: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        catalog(**{f"models.{key}": TABLES[f"models.{key}"] | {name: table}})
    assert name in str(raised.value) and "sk-shown-nowhere" not in str(raised.value)


def test_tables_come_from_files_and_the_environment(tmp_path: Any) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        '[models.providers.local]\nbase_url = "http://127.0.0.1:8000/v1"\n'
        '[models.catalog.small]\nprovider = "local"\n[models.profiles.work]\nmodels = ["small"]\n'
    )
    env = {"AGENTRT_MODELS__PROVIDERS__LOCAL__IDLE_TIMEOUT_MS": "123", "AGENTRT_MODELS__CALLS_MAX": "7"}
    config = load_config(file, env=env)
    assert config.models.calls_max == 7
    provider = Catalog.of(config.models).providers["local"]
    assert (provider.base_url, provider.idle_timeout_ms) == ("http://127.0.0.1:8000/v1", 123)
