"""What an agent says to a model and gets back. Pure, and light: agents import it in their hosts."""

from typing import Any, Final, Literal

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.models.prices import Usage

TOOLS_MAX: Final = 128
MESSAGES_MAX: Final = 10_000


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    image_url: ImageUrl


class ToolUse(msgspec.Struct, frozen=True):
    """A model asks for a tool. ``arguments`` are as the model wrote them: nothing has checked them."""

    id: str
    name: str
    arguments: Any = msgspec.field(default_factory=dict)


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation. ``tool_call_id``: of the `ToolUse` that a ``tool`` message answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolUse] | None = None
    tool_call_id: str | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tool that the model may ask for; ``parameters`` is a JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})


class Needs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a call needs of its model, beyond what its profile does. See `ProfileConfig`."""

    structured: bool = False
    tools: bool = False
    context_tokens_min: int = 0
    latency_ms_max: int = 0  # 0: any
    quality_min: int = 0
    write_risk: int = 0
    safety: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    data_policies: tuple[str, ...] = ()


_NONE: Final = msgspec.Raw(b"null")


class ModelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Request of ``model.generate``. What is long stays text until a thread beside the control loop reads it."""

    profile: str
    messages: msgspec.Raw
    tools: msgspec.Raw = _NONE  # a list of Tool, or null
    tool_choice: str | None = None  # auto, none, required, or a tool's name
    schema: msgspec.Raw = _NONE  # a JSON schema of the answer, or null
    task: str = ""
    output_tokens_max: int | None = None
    temperature: float | None = None
    stop: list[str] | None = None
    context: str | None = None  # a strategy of `context`; None: the profile's
    stream: bool = False  # whether observers are told the answer as it comes
    needs: Needs = Needs()

    @property
    def asks_for_tools(self) -> bool:
        return self.tools != _NONE

    @property
    def asks_for_schema(self) -> bool:
        return self.schema != _NONE

    @property
    def size_bytes(self) -> int:
        """Of what will be read and sent."""
        return len(self.messages) + len(self.tools) + len(self.schema)


class ModelAnswer(msgspec.Struct, frozen=True):
    """What a model answered. ``finish``: stop, length (it was cut at its longest output), tool_calls, filter (by the
    provider's policy). ``data``: the answer as JSON, if a schema was asked for. ``model``: which one of the catalog it
    was. ``usage`` and ``cost_micro_usd`` are what was charged."""

    text: str | None
    finish: str
    model: str
    usage: Usage
    cost_micro_usd: int
    tool_calls: tuple[ToolUse, ...] = ()
    data: Any = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to go on with the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = msgspec.to_builtins(self.tool_calls)
        return message


class Conversation(msgspec.Struct, frozen=True):
    """A request as a provider needs it."""

    messages: list[Message]
    tools: list[Tool]
    schema: Any  # None, or a JSON schema


class BadConversationError(ValueError):
    """A request that no provider could be sent; the text is for the agent."""


_decode_request: Final = msgspec.json.Decoder(ModelRequest).decode
_decode_messages: Final = msgspec.json.Decoder(list[Message]).decode
_decode_tools: Final = msgspec.json.Decoder(list[Tool]).decode
_decode_any: Final = msgspec.json.Decoder().decode


def decode_request(payload: bytes) -> ModelRequest:
    """The request's outside. Raises BadConversationError."""
    try:
        request = _decode_request(payload)
    except UNREADABLE as error:
        raise BadConversationError(str(error)) from None
    wrong = _wrong(request)
    if wrong is not None:
        raise BadConversationError(wrong)
    return request


def _wrong(request: ModelRequest) -> str | None:
    if request.output_tokens_max is not None and request.output_tokens_max < 1:
        return "output_tokens_max is at least 1"
    if request.temperature is not None and not 0 <= request.temperature <= 2:  # NaN too
        return "temperature is 0 to 2"
    if request.stop is not None and not (1 <= len(request.stop) <= 4 and all(request.stop)):
        return "stop is one to four texts"
    return None


def read_conversation(request: ModelRequest) -> Conversation:
    """Messages, tools and schema of a request. Takes milliseconds for a megabyte. Raises BadConversationError."""
    try:
        messages = _decode_messages(request.messages)
        tools = [] if not request.asks_for_tools else _decode_tools(request.tools)
        schema = _decode_any(request.schema)
    except UNREADABLE as error:
        raise BadConversationError(str(error)) from None
    if not 1 <= len(messages) <= MESSAGES_MAX:
        raise BadConversationError(f"there are {len(messages)} messages, 1 to {MESSAGES_MAX} are possible")
    if len(tools) > TOOLS_MAX:
        raise BadConversationError(f"there are {len(tools)} tools, at most {TOOLS_MAX} are possible")
    names = {tool.name for tool in tools}
    if len(names) != len(tools):
        raise BadConversationError("two tools have the same name")
    if request.tool_choice not in (None, "auto", "none", "required", *names):
        raise BadConversationError(f"tool_choice names {request.tool_choice!r}, which is none of the tools")
    for message in messages:
        if message.role == "tool" and message.tool_call_id is None:
            raise BadConversationError("a message of role tool needs the tool_call_id that it answers")
        if message.content is None and not message.tool_calls:
            raise BadConversationError("a message has neither content nor tool_calls")
    return Conversation(messages, tools, schema)
