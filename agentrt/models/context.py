"""What of a conversation is sent when it is longer than the model's window: strategies, each fixed for good under a
name with a version. Pure.

A strategy that is improved gets a new version: a run that asked for ``recent@1`` is shortened the same way for ever.
What every strategy keeps: system messages at the beginning, the last message, and that a tool's answer stands behind
the message that asked for the tool. The order never changes. If what must stay does not fit, that is an error: nothing
is cut within a message.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from agentrt.models.messages import Message
from agentrt.models.prices import input_estimate

_SYSTEM: Final = ("system", "developer")
_encode: Final = msgspec.json.encode

Measure = Callable[[Message], int]


class ContextTooLongError(ValueError):
    """What must be sent is more than the window; ``needed`` tokens, of which there are ``tokens_max``."""

    def __init__(self, needed: int, tokens_max: int) -> None:
        super().__init__(
            f"{needed} tokens that cannot be left out are more than the {tokens_max} that there are for them"
        )
        self.needed = needed
        self.tokens_max = tokens_max


def message_tokens(message: Message, token_bytes: int = 1) -> int:
    """An estimate, with one byte a token never too low."""
    return input_estimate(len(_encode(message)), 0, token_bytes)


def shorten(
    messages: Sequence[Message], tokens_max: int, strategy: str, measure: Measure = message_tokens
) -> list[Message]:
    """The messages to send, within ``tokens_max`` by ``measure``. Raises ContextTooLongError, KeyError (no such
    strategy)."""
    groups = _groups(messages)
    sizes = [sum(measure(message) for message in group) for group in groups]
    if sum(sizes) <= tokens_max:
        return [*messages]
    keep = STRATEGIES[strategy](groups)
    used = sum(sizes[place] for place in keep)
    if used > tokens_max:
        raise ContextTooLongError(used, tokens_max)
    kept = set(keep)
    for place in range(len(groups) - 1, -1, -1):  # the most recent ones that fit, without gaps
        if place in kept:
            continue
        if used + sizes[place] > tokens_max:
            break
        used += sizes[place]
        kept.add(place)
    return [message for place in sorted(kept) for message in groups[place]]


def _groups(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages that stay or go together: one that asks for tools, with the tools' answers behind it."""
    groups: list[list[Message]] = []
    for message in messages:
        if message.role == "tool" and groups and (groups[-1][0].tool_calls or groups[-1][0].role == "tool"):
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def _leading(groups: list[list[Message]]) -> list[int]:
    places = []
    for place, group in enumerate(groups):
        if group[0].role not in _SYSTEM:
            break
        places.append(place)
    return places


def _recent(groups: list[list[Message]]) -> list[int]:
    """The leading system messages and the latest message."""
    return sorted({*_leading(groups), len(groups) - 1})


def _ends(groups: list[list[Message]]) -> list[int]:
    """The same and the first message of a user: the task, usually."""
    first = next((place for place, group in enumerate(groups) if group[0].role == "user"), len(groups) - 1)
    return sorted({*_recent(groups), first})


#: Name -> what of the groups must stay; what else fits is kept from the end on.
STRATEGIES: Final[Mapping[str, Callable[[list[list[Message]]], list[int]]]] = {"recent@1": _recent, "ends@1": _ends}
