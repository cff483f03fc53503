"""The provider for servers that speak OpenAI's chat completions: vendors, vLLM, llama.cpp, gateways.

aiohttp is the HTTP client: its parser is C, and its timeouts, limits and closing of connections can be said call by
call. Everything that a server sends is bounded: headers by aiohttp, the body by ``answer_bytes_max``, time by three
time-outs. Redirects are not followed, compressed answers not read, cookies not kept, proxies of the environment not
used; and nothing is sent twice (for POST aiohttp does not, and neither does this).
"""

import asyncio
import contextlib
import time
from typing import Final

import aiohttp

from agentrt.models.catalog import SECRET_PREFIX
from agentrt.models.chat import Completion, StreamedAnswer, read_answer, request_body
from agentrt.models.failures import FailureKind, ModelFailure, failure_of, retry_after
from agentrt.models.provider import ProviderCall, Secrets
from agentrt.models.settings import ProviderConfig
from agentrt.models.sse import SseParser, StreamTooLongError
from agentrt.tools.secretrefs import redact
from agentrt.tools.secrets import SecretError

#: The node's own secrets; no tenant has that name.
_NODE: Final = ""
_ERROR_BYTES_MAX: Final = 64 * 1024
#: A stream is cut when its tokens must be more than were asked for. They cannot be counted from outside; but no text
#: has so many bytes a token on average, and no server splits one into so many pieces.
_CUT_BYTES: Final = 16
_CUT_PIECES: Final = 4
_SLACK_TOKENS: Final = 32
_DRAIN_S: Final = 0.02


class OpenAiProvider:
    """Implements agentrt.models.provider.ModelProvider."""

    def __init__(self, name: str, config: ProviderConfig, secrets: Secrets) -> None:
        self._name = name
        self._config = config
        self._secrets = secrets
        self._url = config.base_url.rstrip("/") + "/chat/completions"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=config.connections_max, keepalive_timeout=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(
                total=config.total_timeout_ms / 1e3,
                sock_connect=config.connect_timeout_ms / 1e3,
                sock_read=config.idle_timeout_ms / 1e3,
            ),
        )

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, call: ProviderCall) -> Completion:
        """See ModelProvider."""
        key = await self._key(call.tenant)
        try:
            return await self._generate(call, key)
        except ModelFailure as failure:
            if key:  # servers repeat what they were sent
                failure.message = redact(failure.message, {self._secret_name: key})
            raise

    @property
    def _secret_name(self) -> str:
        return self._config.api_key.removeprefix(SECRET_PREFIX)

    async def _key(self, tenant: str) -> str:
        if not self._config.api_key:
            return ""
        try:
            key = await self._secrets(tenant if self._config.tenant_keys else _NODE, self._secret_name)
        except SecretError as error:
            raise ModelFailure(FailureKind.FATAL, "model_auth", f"provider {self._name}: {error.message}") from None
        if not key.isascii() or not key.isprintable():
            raise ModelFailure(FailureKind.FATAL, "model_auth", f"secret {self._secret_name} is no key for a header")
        return key

    async def _generate(self, call: ProviderCall, key: str) -> Completion:
        stream = call.config.stream
        body = request_body(
            call.model,
            call.conversation,
            call.schema,
            call.sampling,
            stream=stream,
            ask_usage=call.config.usage_in_stream,
        )
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if stream else "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "agentrt",
            "Idempotency-Key": call.key,
            "Agentrt-Attempt": f"{call.attempt}/{call.attempts_max}",
        }
        if key:
            headers["Authorization"] = f"Bearer {key}"
        sent = False
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                sent = True
                try:
                    return await self._read(call, response)
                finally:
                    if not response.content.at_eof():
                        response.close()  # and the connection with it: the server sees that nobody listens
        except TimeoutError as error:
            # One that timed out while connecting was not sent; the others may be at work still.
            connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
            raise ModelFailure(
                FailureKind.TRANSPORT,
                "model_timeout",
                f"provider {self._name} did not {'take the connection' if connecting else 'answer'} in time",
                unseen=not connecting,
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise ModelFailure(
                FailureKind.TRANSPORT, "model_transport", f"provider {self._name} cannot be reached: {error.strerror}"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            what = "broke off its answer" if sent else "closed the connection"
            raise ModelFailure(
                FailureKind.TRANSPORT,
                "model_transport",
                f"provider {self._name} {what} ({type(error).__name__})",
                unseen=True,
            ) from None

    async def _read(self, call: ProviderCall, response: aiohttp.ClientResponse) -> Completion:
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise self._broken("sends compressed answers although it was told not to")
        if response.status != 200:
            said = response.headers
            wait_ns = retry_after(
                said.get("Retry-After"),
                said.get("Retry-After-Ms"),
                time.time_ns(),
                self._config.retry_after_max_ms * 1_000_000,
            )
            body = await self._body(response, _ERROR_BYTES_MAX, cut=True)
            failure = failure_of(response.status, body, wait_ns)
            failure.unseen = failure.kind is FailureKind.TRANSPORT
            raise failure
        if response.content_type == "text/event-stream":
            return await self._stream(call, response)
        return read_answer(await self._body(response, self._config.answer_bytes_max))

    async def _body(self, response: aiohttp.ClientResponse, bytes_max: int, *, cut: bool = False) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > bytes_max:
                if cut:
                    break
                raise self._broken(f"sends an answer of more than {bytes_max} bytes")
        return bytes(body[:bytes_max])

    async def _stream(self, call: ProviderCall, response: aiohttp.ClientResponse) -> Completion:
        parser, answer = SseParser(), StreamedAnswer(call.on_text)
        size, bytes_max = 0, self._config.answer_bytes_max
        tokens_max = call.sampling.output_tokens_max + _SLACK_TOKENS
        try:
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > bytes_max:
                    raise self._broken(f"sends an answer of more than {bytes_max} bytes")
                for data in parser.feed(chunk):
                    answer.feed(data)
                    if answer.done:
                        break
                if answer.done:
                    await self._drain(response)
                    break
                if (
                    answer.pieces > _CUT_PIECES * tokens_max
                    or answer.output_bytes > _CUT_BYTES * tokens_max
                    or (not answer.ended and answer.usage is not None and answer.usage.output_tokens > tokens_max)
                ):
                    raise ModelFailure(
                        FailureKind.FATAL,
                        "model_overrun",
                        f"the answer was cut: it went beyond {call.sampling.output_tokens_max} tokens of output",
                        usage=answer.usage,
                        unseen=answer.usage is None,
                    )
        except StreamTooLongError as error:
            raise self._broken(str(error)) from None
        return answer.finish()  # servers that do not say [DONE]

    async def _drain(self, response: aiohttp.ClientResponse) -> None:
        """Read the end of the body, which comes with the end of the stream, so that the connection can be used again.
        Who takes longer loses it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while not response.content.at_eof():
                    if await response.content.readany():
                        break  # more than an end: it is not used again

    def _broken(self, what: str) -> ModelFailure:
        return ModelFailure(
            FailureKind.TRANSPORT, "model_transport", f"provider {self._name} {what}", unseen=True, usage=None
        )
