"""Tokens and money: what a call may cost before it, and what it did cost. Pure, integers only.

Money is in micro-dollars. A cost is rounded up, so that many small calls never cost less than they do.
"""

from typing import Final

import msgspec

from agentrt.models.settings import ModelConfig

MILLION: Final = 1_000_000
#: What a message, a tool or a schema adds around its text in the formats of all known models, and then some.
MESSAGE_TOKENS: Final = 16
#: The most bytes of text that any tokenizer makes one token of.
TOKEN_BYTES_MAX: Final = 256


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one call; ``cached_tokens`` are among ``input_tokens``."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Input and output."""
        return self.input_tokens + self.output_tokens


def cost_micro_usd(model: ModelConfig, usage: Usage) -> int:
    """What the usage costs, rounded up."""
    cached_price = model.input_price if model.cached_price < 0 else model.cached_price
    fresh = usage.input_tokens - usage.cached_tokens
    total = fresh * model.input_price + usage.cached_tokens * cached_price + usage.output_tokens * model.output_price
    return -(-total // MILLION)


def input_estimate(size_bytes: int, pieces: int, token_bytes: int) -> int:
    """Tokens of an input of so many bytes in so many messages, tools and schemas. With one byte a token it is never
    too few: a tokenizer makes at most one token of each byte."""
    return -(-size_bytes // token_bytes) + MESSAGE_TOKENS * (pieces + 1)


def checked_usage(
    reported: Usage | None, *, reserved: Usage, text_bytes: int, context_tokens: int
) -> tuple[Usage, bool]:
    """The usage to settle with, and whether it is the provider's own.

    A report that cannot be is not believed: negative numbers, more cached than there was, fewer output tokens than the
    ``text_bytes`` of the answer take, more tokens than the model's window holds. Then, as without a report, what was
    ``reserved`` is taken: never less than what was used. One that is above the reservation and possible is the truth.
    """
    if reported is None:
        return reserved, False
    low = -(-text_bytes // TOKEN_BYTES_MAX)
    high = max(context_tokens, reserved.tokens)
    possible = (
        reported.input_tokens >= 0
        and 0 <= reported.cached_tokens <= reported.input_tokens
        and reported.output_tokens >= low
        and reported.tokens <= high
    )
    return (reported, True) if possible else (reserved, False)
