"""The clients: `AsyncClient` on the caller's loop, `Client` for plain threads.

Both ask again by the server's rules: after Retry-After where it refused, after a pause with jitter where the connection
failed and asking again is safe (a run carries an idempotency key, an event its id).
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

import httpx
import msgspec

from agentrt.client import ask as asks
from agentrt.client.answers import Attempts, Following, error_of, value_of
from agentrt.client.ask import Ask
from agentrt.client.events import Event, EventReader
from agentrt.errors import InputError, UnreachableError
from agentrt.http import types as t
from agentrt.nodeplace import KEY_VARIABLE, URL_DEFAULT, URL_VARIABLE
from agentrt.states import TERMINAL

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS_MAX: Final = 8
#: The server says something at least every 15 s.
_STREAM_SILENCE_S: Final = 45.0
_LIVE: Final = "/v1/live"
_STREAM_TIMEOUT: Final = httpx.Timeout(30.0, read=_STREAM_SILENCE_S)
_TIMEOUT: Final = httpx.Timeout(30.0, read=90.0)


def _later(build: Callable[P, Ask[T]]) -> Callable[Concatenate["AsyncClient", P], Awaitable[T]]:
    def call(self: "AsyncClient", /, *arguments: P.args, **named: P.kwargs) -> Awaitable[T]:
        return self.send_ask(build(*arguments, **named))

    return _named(call, build)


def _now(build: Callable[P, Ask[T]]) -> Callable[Concatenate["Client", P], T]:
    def call(self: "Client", /, *arguments: P.args, **named: P.kwargs) -> T:
        return self.send_ask(build(*arguments, **named))

    return _named(call, build)


def _named(call: Callable[P, T], build: Callable[..., Any]) -> Callable[P, T]:
    call.__name__, call.__doc__ = build.__name__, build.__doc__
    return call


class AsyncClient:
    """``async with AsyncClient("http://127.0.0.1:8420", key=…) as client``; without a URL or a key those of AGENTRT_URL
    and AGENTRT_KEY, as for the commands. Raises InputError for a URL or a key that can be none."""

    def __init__(
        self, url: str | None = None, *, key: str | None = None, attempts_max: int = ATTEMPTS_MAX, **httpx_options: Any
    ) -> None:
        self._http = httpx.AsyncClient(base_url=_address(url), headers=_headers(key), timeout=_TIMEOUT, **httpx_options)
        self._attempts_max = attempts_max
        self._chance = random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    submit = _later(asks.submit)
    run = _later(asks.run)
    runs = _later(asks.runs)
    steps = _later(asks.steps)
    decisions = _later(asks.decisions)
    frame = _later(asks.frame)
    cancel = _later(asks.cancel)
    approve = _later(asks.approve)
    settle = _later(asks.settle)
    settle_failed = _later(asks.settle_failed)
    retry = _later(asks.retry)
    resume = _later(asks.resume)
    send = _later(asks.send)
    callback_secret = _later(asks.callback_secret)
    rotate_callback_secret = _later(asks.rotate_callback_secret)
    agents = _later(asks.agents)
    queues = _later(asks.queues)
    tiers = _later(asks.tiers)
    budgets = _later(asks.budgets)
    breakers = _later(asks.breakers)
    profiles = _later(asks.profiles)
    apply_profile = _later(asks.apply_profile)
    roll_back_profile = _later(asks.roll_back_profile)
    tenants = _later(asks.tenants)
    disable_tenant = _later(asks.disable_tenant)
    enable_tenant = _later(asks.enable_tenant)
    schedules = _later(asks.schedules)
    schedule = _later(asks.schedule)
    unschedule = _later(asks.unschedule)
    ingresses = _later(asks.ingresses)
    dead_letters = _later(asks.dead_letters)
    dead_letter = _later(asks.dead_letter)
    retry_dead_letter = _later(asks.retry_dead_letter)
    drop_dead_letter = _later(asks.drop_dead_letter)
    keys = _later(asks.keys)
    make_key = _later(asks.make_key)
    remove_key = _later(asks.remove_key)
    drain = _later(asks.drain)

    async def events(self, run_id: str, *, after: int = 0, text: bool = False) -> AsyncIterator[Event]:
        """What happens to the run after event ``after``, until its end; goes on where it was when a connection
        breaks. ``text``: also what models answer, as it comes: kind ``text``, which no record has and which does not
        come again."""
        following = Following(run_id, after, self._attempts_max, self._chance, text)
        while True:
            try:
                async with self._http.stream(**_request(following.ask), timeout=_STREAM_TIMEOUT) as answer:
                    if answer.status_code == 200:
                        following.begin()
                        async for data in answer.aiter_bytes():
                            for event in following.feed(data):
                                yield event
                            if following.ended:
                                return
                        pause = following.broken()
                    else:
                        pause = following.refused(answer.status_code, _retry_after(answer), await answer.aread())
            except httpx.TransportError as error:
                pause = following.broken(_unreachable(error))
            await asyncio.sleep(pause)

    async def live(self) -> AsyncIterator[Event]:
        """The node once a second (``data``: as ``GET /v1/live``), until the stream breaks: UnreachableError."""
        try:
            async with self._http.stream("GET", _LIVE, timeout=_STREAM_TIMEOUT) as answer:
                if answer.status_code != 200:
                    raise error_of(answer.status_code, await answer.aread())
                reader = EventReader()
                async for data in answer.aiter_bytes():
                    for event in reader.feed(data):
                        yield event
        except httpx.TransportError as error:
            raise _unreachable(error) from error
        raise UnreachableError("the node has ended the stream")

    async def result(self, run_id: str) -> Any:
        """The run's result, once it has ended. Raises the error it ended with (RunError kinds), UnknownRunError."""
        async for _ in self.events(run_id):
            pass
        return result_of(await self.run(run_id))

    async def send_ask(self, ask: Ask[T]) -> T:
        """Send a request that `agentrt.client.ask` made, as often as it takes. Raises what the node answers."""
        attempts = Attempts(ask, self._attempts_max, self._chance)
        while True:
            pause: float | None
            try:
                answer = await self._http.request(**_request(ask))
            except httpx.TransportError as error:
                pause = attempts.failed(_unreachable(error), sent=_may_be_sent(error))
            else:
                pause = attempts.answered(answer.status_code, _retry_after(answer))
                if pause is None:
                    return value_of(ask, answer.status_code, answer.content)
            await asyncio.sleep(pause)


class Client:
    """``with Client("http://127.0.0.1:8420", key=…) as client``; without a URL or a key those of AGENTRT_URL and
    AGENTRT_KEY, as for the commands. Any thread, one call at a time each. Raises InputError for a URL or a key that can
    be none."""

    def __init__(
        self, url: str | None = None, *, key: str | None = None, attempts_max: int = ATTEMPTS_MAX, **httpx_options: Any
    ) -> None:
        self._http = httpx.Client(base_url=_address(url), headers=_headers(key), timeout=_TIMEOUT, **httpx_options)
        self._attempts_max = attempts_max
        self._chance = random.Random()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    submit = _now(asks.submit)
    run = _now(asks.run)
    runs = _now(asks.runs)
    steps = _now(asks.steps)
    decisions = _now(asks.decisions)
    frame = _now(asks.frame)
    cancel = _now(asks.cancel)
    approve = _now(asks.approve)
    settle = _now(asks.settle)
    settle_failed = _now(asks.settle_failed)
    retry = _now(asks.retry)
    resume = _now(asks.resume)
    send = _now(asks.send)
    callback_secret = _now(asks.callback_secret)
    rotate_callback_secret = _now(asks.rotate_callback_secret)
    agents = _now(asks.agents)
    queues = _now(asks.queues)
    tiers = _now(asks.tiers)
    budgets = _now(asks.budgets)
    breakers = _now(asks.breakers)
    profiles = _now(asks.profiles)
    apply_profile = _now(asks.apply_profile)
    roll_back_profile = _now(asks.roll_back_profile)
    tenants = _now(asks.tenants)
    disable_tenant = _now(asks.disable_tenant)
    enable_tenant = _now(asks.enable_tenant)
    schedules = _now(asks.schedules)
    schedule = _now(asks.schedule)
    unschedule = _now(asks.unschedule)
    ingresses = _now(asks.ingresses)
    dead_letters = _now(asks.dead_letters)
    dead_letter = _now(asks.dead_letter)
    retry_dead_letter = _now(asks.retry_dead_letter)
    drop_dead_letter = _now(asks.drop_dead_letter)
    keys = _now(asks.keys)
    make_key = _now(asks.make_key)
    remove_key = _now(asks.remove_key)
    drain = _now(asks.drain)

    def events(self, run_id: str, *, after: int = 0, text: bool = False) -> Iterator[Event]:
        """As of `AsyncClient.events`."""
        following = Following(run_id, after, self._attempts_max, self._chance, text)
        while True:
            try:
                with self._http.stream(**_request(following.ask), timeout=_STREAM_TIMEOUT) as answer:
                    if answer.status_code == 200:
                        following.begin()
                        for data in answer.iter_bytes():
                            yield from following.feed(data)
                            if following.ended:
                                return
                        pause = following.broken()
                    else:
                        pause = following.refused(answer.status_code, _retry_after(answer), answer.read())
            except httpx.TransportError as error:
                pause = following.broken(_unreachable(error))
            time.sleep(pause)

    def live(self) -> Iterator[Event]:
        """As of `AsyncClient.live`."""
        try:
            with self._http.stream("GET", _LIVE, timeout=_STREAM_TIMEOUT) as answer:
                if answer.status_code != 200:
                    raise error_of(answer.status_code, answer.read())
                reader = EventReader()
                for data in answer.iter_bytes():
                    yield from reader.feed(data)
        except httpx.TransportError as error:
            raise _unreachable(error) from error
        raise UnreachableError("the node has ended the stream")

    def result(self, run_id: str) -> Any:
        """As of `AsyncClient.result`."""
        for _ in self.events(run_id):
            pass
        return result_of(self.run(run_id))

    def send_ask(self, ask: Ask[T]) -> T:
        """As of `AsyncClient.send_ask`."""
        attempts = Attempts(ask, self._attempts_max, self._chance)
        while True:
            pause: float | None
            try:
                answer = self._http.request(**_request(ask))
            except httpx.TransportError as error:
                pause = attempts.failed(_unreachable(error), sent=_may_be_sent(error))
            else:
                pause = attempts.answered(answer.status_code, _retry_after(answer))
                if pause is None:
                    return value_of(ask, answer.status_code, answer.content)
            time.sleep(pause)


def result_of(run: t.Run) -> Any:
    """The result of a run that has ended, as plain data. Raises the RunError kind that it ended with."""
    from agentrt.engine.info import run_error

    assert run.state in TERMINAL
    if isinstance(run.error, msgspec.Raw):
        raise run_error(run.run_id, run.state, bytes(run.error))
    return None if isinstance(run.result, msgspec.UnsetType) else msgspec.json.decode(run.result)


def _address(url: str | None) -> str:
    if url is None:
        url = os.environ.get(URL_VARIABLE) or URL_DEFAULT
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        found = None
    if found is None or found.scheme not in ("http", "https") or not found.host:
        raise InputError(f"{url!r:.200} is no address of a node", hint="It is http:// or https://, a host and a port")
    return url


def _headers(key: str | None) -> dict[str, str]:
    if key is None and not (key := os.environ.get(KEY_VARIABLE)):
        raise InputError("no API key was given", hint=f"Give key=…, or set {KEY_VARIABLE}")
    if not (key.isascii() and key.isprintable()):
        raise InputError("this is no API key", hint="A key is agentrt_ and some sixty letters, digits, - and _")
    return {"authorization": f"Bearer {key}", "user-agent": "agentrt-client"}


def _request(ask: Ask[Any]) -> dict[str, Any]:
    headers = dict(ask.headers)
    if ask.body is not None:
        headers["content-type"] = "application/json"
    return {"method": ask.method, "url": ask.path, "params": dict(ask.query), "headers": headers, "content": ask.body}


def _retry_after(answer: httpx.Response) -> str | None:
    said: str | None = answer.headers.get("retry-after")
    return said


def _unreachable(error: httpx.TransportError) -> UnreachableError:
    try:
        where = f" at {error.request.url.copy_with(raw_path=b'/')}"
    except RuntimeError:  # it broke before there was a request
        where = ""
    why = str(error) or type(error).__name__
    return UnreachableError(f"the node{where} cannot be reached: {why}", hint=_unreachable_hint(why))


def _unreachable_hint(why: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in why:
        return "Its certificate is not one that this machine trusts; SSL_CERT_FILE names others"
    if "WRONG_VERSION_NUMBER" in why:
        return "What answers there does not speak TLS: try http://"
    return "Is `agentrt serve` running there, and is that its address (http.listen)?"


def _may_be_sent(error: httpx.TransportError) -> bool:
    """Whether the node may have got the request."""
    return not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
