"""The contract suite of model providers: every sentence of `agentrt.models.provider.ModelProvider` as a test.

class TestAcmeModels(ModelProviderContract):
    model = "acme-large"

    @pytest.fixture
    def opener(self, server):                      # a fake of the provider's API
        return lambda secrets: AcmeProvider("acme", ProviderConfig(base_url=server.url, …), secrets)

    @pytest.fixture
    def break_down(self, server):
        return server.refuse_everything            # from now on every call fails, by the server's fault

    @pytest.fixture
    def stall(self, server):
        return server.answer_nothing               # from now on calls get no answer, until their client gives up
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from agentrt.models.chat import Completion, Sampling
from agentrt.models.failures import ModelFailure
from agentrt.models.messages import Conversation, Message
from agentrt.models.provider import ModelProvider, ProviderCall, Secrets
from agentrt.models.settings import ModelConfig
from agentrt.tools.secrets import SecretError

Opener = Callable[[Secrets], ModelProvider]
_WAIT_S: Final = 60.0


async def no_secrets(tenant: str, name: str) -> str:
    """A node without a source of secrets."""
    raise SecretError(f"there is no secret {name}")


class ModelProviderContract:
    """Subclass it, give it ``opener``, ``break_down`` and ``stall``, and pytest runs it all. ``secrets``: if it needs
    some."""

    model = "test"

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError("the subclass says how its provider is made")

    @pytest.fixture
    def break_down(self) -> Callable[[], None]:
        raise NotImplementedError("the subclass says how its server is made to fail")

    @pytest.fixture
    def stall(self) -> Callable[[], None]:
        raise NotImplementedError("the subclass says how its server is made to say nothing")

    @pytest.fixture
    def secrets(self) -> Secrets:
        return no_secrets

    def call(self, text: str, **more: Any) -> ProviderCall:
        """A call as the gateway makes it."""
        return ProviderCall(
            self.model,
            ModelConfig(provider="yours"),
            Conversation([Message("user", text)], [], None),
            None,
            Sampling(100),
            more.pop("key", "key"),
            1,
            5,
            "acme",
            **more,
        )

    @pytest.fixture
    def run(self, opener: Opener, secrets: Secrets) -> Callable[[Callable[[ModelProvider], Awaitable[None]]], None]:
        """``run(test)``: awaits the test with a provider, and closes it."""

        def run(test: Callable[[ModelProvider], Awaitable[None]]) -> None:
            async def main() -> None:
                provider = opener(secrets)
                try:
                    await test(provider)
                finally:
                    await asyncio.wait_for(provider.close(), _WAIT_S)

            asyncio.run(main())

        return run

    def test_an_answer_is_whole(self, run: Any) -> None:
        async def test(provider: ModelProvider) -> None:
            answer = await asyncio.wait_for(provider.generate(self.call("hello")), _WAIT_S)
            assert isinstance(answer, Completion) and answer.text
            assert answer.finish in ("stop", "length", "tool_calls", "filter")
            assert answer.output_bytes >= len(answer.text.encode())
            assert answer.usage is None or answer.usage.output_tokens >= 0

        run(test)

    def test_text_that_is_told_as_it_comes_is_the_answers(self, run: Any) -> None:
        async def test(provider: ModelProvider) -> None:
            pieces: list[str] = []
            answer = await asyncio.wait_for(provider.generate(self.call("hello", on_text=pieces.append)), _WAIT_S)
            assert "".join(pieces) in ("", answer.text)

        run(test)

    def test_calls_run_side_by_side(self, run: Any) -> None:
        async def test(provider: ModelProvider) -> None:
            calls = [provider.generate(self.call(f"hello {n}", key=f"k{n}")) for n in range(8)]
            answers = await asyncio.wait_for(asyncio.gather(*calls), _WAIT_S)
            assert all(answer.text for answer in answers)

        run(test)

    def test_what_goes_wrong_is_a_model_failure(self, run: Any, break_down: Callable[[], None]) -> None:
        async def test(provider: ModelProvider) -> None:
            break_down()
            with pytest.raises(ModelFailure) as caught:
                await asyncio.wait_for(provider.generate(self.call("hello")), _WAIT_S)
            assert caught.value.code and caught.value.message

        run(test)

    def test_one_that_is_cancelled_ends_at_once(self, run: Any, stall: Callable[[], None]) -> None:
        async def test(provider: ModelProvider) -> None:
            stall()
            task = asyncio.create_task(provider.generate(self.call("hello")))
            await asyncio.sleep(0.2)  # most of the ways a call can be under way
            assert not task.done()
            task.cancel()
            await asyncio.wait([task], timeout=_WAIT_S)
            assert task.cancelled()

        run(test)

    def test_closing_one_that_was_never_used(self, run: Any) -> None:
        async def test(provider: ModelProvider) -> None:
            """Nothing."""

        run(test)
