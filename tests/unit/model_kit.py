"""What tests of the model gateway share: a service on the test's own loop, against a real server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from agentrt.config import load_config
from agentrt.models.catalog import Catalog
from agentrt.models.openai import OpenAiProvider
from agentrt.models.service import ModelLimits, ModelOutcome, ModelService
from agentrt.testing.models import ModelServer
from agentrt.tools.secrets import SecretProvider


class Gateway:
    """`ModelService` with what a test asks it."""

    def __init__(
        self,
        arguments: dict[str, Any],
        *,
        limits: ModelLimits | None = None,
        secrets: SecretProvider | None = None,
        factories: dict[str, Any] | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        catalog = Catalog.of(load_config(env={}, arguments=arguments).models)
        self.service = ModelService(
            catalog, factories or {"openai": OpenAiProvider}, self.loop, limits=limits, secrets=secrets
        )

    def begin(
        self, attempt: int = 1, on_text: Callable[[str], None] | None = None, tenant: str = "acme", **request: Any
    ) -> "tuple[object, asyncio.Future[ModelOutcome]]":
        request = {"profile": "work", "messages": [{"role": "user", "content": "hello"}]} | request
        planned = self.service.plan(msgspec.json.encode(request), tenant=tenant, tier=1)
        future: asyncio.Future[ModelOutcome] = self.loop.create_future()
        candidates = planned.plan.candidates
        call = self.service.call(
            planned,
            candidates[(attempt - 1) % len(candidates)],
            key="key",
            tenant=tenant,
            attempt=attempt,
            attempts_max=5,
            done=future.set_result,
            on_text=on_text,
        )
        return call, future

    async def ask(self, attempt: int = 1, **request: Any) -> ModelOutcome:
        return await asyncio.wait_for(self.begin(attempt, **request)[1], 30)

    async def value(self, **request: Any) -> Any:
        outcome = await self.ask(**request)
        assert outcome.ok, outcome
        return msgspec.json.decode(outcome.payload)

    async def error(self, **request: Any) -> Any:
        outcome = await self.ask(**request)
        assert not outcome.ok, outcome
        return msgspec.json.decode(outcome.payload)


def gateway(
    test: Callable[[Gateway, ModelServer], Awaitable[None]],
    *,
    provider: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    arguments: Callable[[ModelServer], dict[str, Any]] | None = None,
    server: ModelServer | None = None,
    **how: Any,
) -> None:
    """Run ``test(gateway, server)``; nothing of it may be left behind."""

    async def main(server: ModelServer) -> None:
        found = server.config(**(model or {})) if arguments is None else arguments(server)
        found["models.providers"]["server"] |= provider or {}
        gate = Gateway(found, **how)
        met: list[Any] = []
        gate.loop.set_exception_handler(lambda loop, context: met.append(context))
        try:
            await asyncio.wait_for(test(gate, server), 60)
        finally:
            await gate.service.close()
        assert not met, met

    with ModelServer() if server is None else server as running:
        asyncio.run(main(running))
