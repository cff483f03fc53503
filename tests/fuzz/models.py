"""What model servers send, and what agents ask of them."""

from agentrt.decoding import UNREADABLE
from agentrt.models.chat import StreamedAnswer, read_answer
from agentrt.models.failures import ModelFailure, failure_of, retry_after
from agentrt.models.messages import BadConversationError, decode_request, read_conversation
from agentrt.models.schema import BadSchemaError, MismatchError, Schema
from agentrt.models.sse import SseParser, StreamTooLongError

from .kit import JSON, target


@target()
def model_stream(data: bytes) -> None:
    """A streamed answer: the same however it arrives."""
    count = data[0] % 8 if data else 0
    sizes, stream = data[1 : 1 + count], data[1 + count :]
    assert _streamed(stream, sizes) == _streamed(stream, b"")


def _streamed(stream: bytes, sizes: bytes) -> object:
    parser, answer, at, turn = SseParser(), StreamedAnswer(), 0, 0
    try:
        while at < len(stream):
            size = sizes[turn % len(sizes)] + 1 if sizes else len(stream)
            for event in parser.feed(stream[at : at + size]):
                answer.feed(event)
            at, turn = at + size, turn + 1
        return answer.finish()
    except StreamTooLongError:
        return None
    except ModelFailure as failure:
        return failure.message


@target(JSON)
def model_answer(data: bytes) -> None:
    """An answer in one piece, and the same as an error."""
    try:
        completion = read_answer(data)
    except ModelFailure:
        pass
    else:
        assert completion.output_bytes >= 0
    for status in (400, 429, 500):
        failure_of(status, data, None).to_dict()
    text = data.decode(errors="replace")
    assert (retry_after(text, text, 10**18, 10**9) or 0) <= 10**9


@target(JSON)
def model_request(data: bytes) -> None:
    """A request of model.generate."""
    try:
        read_conversation(decode_request(data))
    except BadConversationError:
        return


@target(JSON)
def model_schema(data: bytes) -> None:
    """A schema and a value: ``[schema, value]``."""
    try:
        value = JSON.decode(data)
    except UNREADABLE:
        return
    if not isinstance(value, list) or len(value) != 2:
        return
    try:
        Schema(value[0]).check(value[1], 10_000)
    except (BadSchemaError, MismatchError):
        return
