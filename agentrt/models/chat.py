"""The OpenAI-compatible protocol (chat completions): bodies of requests, answers and streams. Pure.

Answers of servers are read as what they are, input of others: unknown fields are read over, everything else has a type
and a bound. What does not fit is a failure of kind transport: another attempt may get a whole answer.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.models.failures import FailureKind, ModelFailure, failure_of
from agentrt.models.messages import Conversation, Message, ToolUse
from agentrt.models.prices import Usage
from agentrt.models.schema import Schema

TOOL_CALLS_MAX: Final = 128
DONE: Final = b"[DONE]"
_encode: Final = msgspec.json.encode
_decode_any: Final = msgspec.json.Decoder().decode

#: What servers call the ends of an answer -> what agentrt does.
_FINISH: Final = {
    "stop": "stop", "length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls",
    "content_filter": "filter",
}  # fmt: skip


class Sampling(msgspec.Struct, frozen=True):
    """What a call says beside its conversation."""

    output_tokens_max: int
    tool_choice: str | None = None
    temperature: float | None = None
    stop: list[str] | None = None


class Completion(msgspec.Struct):
    """A whole answer as the server gave it; ``usage`` None: it did not say."""

    text: str | None
    finish: str
    tool_calls: list[ToolUse]
    usage: Usage | None
    output_bytes: int  # of text and arguments


# --- requests ---------------------------------------------------------------------


def request_body(
    model: str, conversation: Conversation, schema: Schema | None, sampling: Sampling, *, stream: bool, ask_usage: bool
) -> bytes:
    """The body of ``POST /chat/completions``."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in conversation.messages],
        "max_completion_tokens": sampling.output_tokens_max,
    }
    if conversation.tools:
        body["tools"] = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in conversation.tools]
        choice = sampling.tool_choice
        if choice in ("auto", "none", "required"):
            body["tool_choice"] = choice
        elif choice is not None:
            body["tool_choice"] = {"type": "function", "function": {"name": choice}}
    if schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema.schema, "strict": schema.strict},
        }
    if sampling.temperature is not None:
        body["temperature"] = sampling.temperature
    if sampling.stop is not None:
        body["stop"] = sampling.stop
    if stream:
        body["stream"] = True
        if ask_usage:
            body["stream_options"] = {"include_usage": True}
    return _encode(body)


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(message)
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": use.id,
                "type": "function",
                "function": {"name": use.name, "arguments": _encode(use.arguments).decode()},
            }
            for use in message.tool_calls
        ]
    return found


# --- answers ----------------------------------------------------------------------


class _Cached(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _Function = _Function()


class _Content(msgspec.Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    message: _Content | None = None
    delta: _Content | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_decode: Final = msgspec.json.Decoder(_Answer).decode


def _read(data: bytes) -> _Answer:
    try:
        answer = _decode(data)
    except UNREADABLE as error:
        raise _broken(f"the provider's answer cannot be read: {error}") from None
    if answer.error is not None and bytes(answer.error) != b"null":
        # Some servers answer 200 and then an error.
        failure = failure_of(502, b'{"error":' + bytes(answer.error) + b"}", None)
        failure.unseen = True
        raise failure
    return answer


def _broken(message: str) -> ModelFailure:
    return ModelFailure(FailureKind.TRANSPORT, "model_transport", message, unseen=True)


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
    return Usage(usage.prompt_tokens, usage.completion_tokens, cached or 0)


def read_answer(body: bytes) -> Completion:
    """The answer that came in one piece. Raises ModelFailure."""
    answer = _read(body)
    if not answer.choices or answer.choices[0].message is None:
        raise _broken("the provider's answer holds no message")
    choice = answer.choices[0]
    message = choice.message
    assert message is not None
    calls = message.tool_calls or []
    if len(calls) > TOOL_CALLS_MAX:
        raise _broken(f"the model asks for {len(calls)} tools at once")
    text = message.content if message.content is not None else message.refusal
    raw = [(call.id, call.function.name, call.function.arguments or "") for call in calls]
    size = len((text or "").encode()) + sum(len(arguments.encode()) for _, _, arguments in raw)
    return Completion(text, _finish(choice.finish_reason), _uses(raw), _usage(answer.usage), size)


class StreamedAnswer:
    """An answer as it comes: `feed` the data of each event, then `finish`."""

    def __init__(self, on_text: Callable[[str], None] | None = None) -> None:
        self.pieces = 0  # with content: each holds a token or more
        self.output_bytes = 0
        self.done = False
        self.usage: Usage | None = None
        self._on_text = on_text
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, list[Any]] = {}  # index -> id, name, parts of the arguments
        self._reason: str | None = None

    def feed(self, data: bytes) -> None:
        """Raises ModelFailure."""
        if data.strip() == DONE:
            self.done = True
            return
        answer = _read(data)
        usage = _usage(answer.usage)
        if usage is not None:
            self.usage = usage
        for choice in answer.choices or ():
            if choice.index == 0:
                self._take(choice)

    def _take(self, choice: _Choice) -> None:
        if choice.finish_reason is not None:
            self._reason = choice.finish_reason
        delta = choice.delta
        if delta is None:
            return
        size = 0
        if delta.content:
            self._text.append(delta.content)
            size += len(delta.content.encode())
            if self._on_text is not None:
                self._on_text(delta.content)
        if delta.refusal:
            self._refusal.append(delta.refusal)
            size += len(delta.refusal.encode())
        for call in delta.tool_calls or ():
            if not 0 <= call.index < TOOL_CALLS_MAX:
                raise _broken(f"the model asks for tool number {call.index}")
            known = self._calls.setdefault(call.index, [None, None, []])
            known[0] = call.id or known[0]
            known[1] = call.function.name or known[1]
            if call.function.arguments:
                known[2].append(call.function.arguments)
                size += len(call.function.arguments.encode())
        if size:
            self.pieces += 1
            self.output_bytes += size

    @property
    def ended(self) -> bool:
        """No more of it comes; how much it was may still be told."""
        return self._reason is not None

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._text)

    def finish(self) -> Completion:
        """The whole answer. Raises ModelFailure if the stream ended before it."""
        if self._reason is None:
            raise _broken("the provider's stream ended in the middle of the answer")
        raw = [(known[0], known[1], "".join(known[2])) for _, known in sorted(self._calls.items())]
        text = "".join(self._text) if self._text else ("".join(self._refusal) or None)
        return Completion(text, _finish(self._reason), _uses(raw), self.usage, self.output_bytes)


def _finish(reason: str | None) -> str:
    return _FINISH.get(reason or "stop", "stop")


def _uses(raw: list[tuple[str | None, str | None, str]]) -> list[ToolUse]:
    uses = []
    for number, (identity, name, arguments) in enumerate(raw):
        if not name:
            raise _broken("the model asks for a tool without a name")
        uses.append(ToolUse(identity or f"call_{number}", name, _arguments(arguments)))
    return uses


def _arguments(text: str) -> Any:
    """What the model wrote: an object, or the text itself if it is no JSON, for the agent to judge."""
    try:
        return _decode_any(text) if text.strip() else {}
    except UNREADABLE:
        return text
