"""What a model provider is to the gateway. Plugins bring further ones (agentrt/hooks.py)."""

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from agentrt.models.chat import Completion, Sampling
from agentrt.models.messages import Conversation
from agentrt.models.schema import Schema
from agentrt.models.settings import ModelConfig, ProviderConfig


class ProviderCall(msgspec.Struct, frozen=True):
    """One attempt. ``model`` is what the provider calls it; ``key`` stays the same through all attempts of a step."""

    model: str
    config: ModelConfig
    conversation: Conversation
    schema: Schema | None
    sampling: Sampling
    key: str
    attempt: int
    attempts_max: int
    tenant: str
    on_text: Callable[[str], None] | None = None  # called with each piece of the answer's text, as it comes


class ModelProvider(Protocol):
    """Made, used and closed on the loop of the gateway's own thread. Calls run side by side."""

    async def generate(self, call: ProviderCall) -> Completion:
        """One attempt: it does not retry. Raises ModelFailure. A cancelled one closes its connection at once, so that
        the other side stops working for it."""

    async def close(self) -> None: ...


#: ``secret(tenant, name)`` gives the value behind ``secret://name``; raises SecretError.
Secrets = Callable[[str, str], Awaitable[str]]
#: ``factory(name, config, secret)``; called on the gateway's thread, inside its loop.
ModelProviderFactory = Callable[[str, ProviderConfig, Secrets], ModelProvider]
