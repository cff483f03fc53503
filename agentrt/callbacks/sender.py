"""Delivers callbacks from the outbox, on the ingress thread's loop.

At least once: a row goes when the receiver has answered 2xx; who dies in between delivers again, under the same
``webhook-id``. Other answers, redirects included, are repeated with growing pauses, at most `ATTEMPTS_MAX` times.
"""

import asyncio
import logging
import random
import ssl
import time
from typing import Any, Final

import httpx
import msgspec

from agentrt.callbacks.address import Address, Network, Target, UnreachableTargetError, check_url, resolve
from agentrt.callbacks.queue import CallbackQueue
from agentrt.callbacks.secrets import CallbackSecrets
from agentrt.callbacks.signing import headers_of
from agentrt.engine.callbacks import Callback, CallbackDue, callback_key, callback_row, is_callback, read_callback
from agentrt.errors import AgentrtError, ClosedError, InputError, StoreCorruptError, UnknownRunError
from agentrt.http.runs import run_now
from agentrt.ids import run_id_from_bytes
from agentrt.runtime import Runtime
from agentrt.stores.base import OUTBOX, Store

ATTEMPTS_MAX: Final = 12  # over some eight hours
_FIRST_PAUSE_S: Final = 5.0
_PAUSE_S_MAX: Final = 3_600.0
_ATTEMPT_S: Final = 15.0
_RESOLVE_S: Final = 5.0
_AGAIN_S: Final = 5.0  # after an error of the store
_ITEMS_MAX: Final = 100_000
_UNDER_WAY_MAX: Final = 32
_PER_TENANT_MAX: Final = 4

_log: Final = logging.getLogger(__name__)
_encode: Final = msgspec.json.Encoder().encode


class Sender:
    """Between `start` and `close`, both on the loop it works on. ``allowed``: networks beside the public ones."""

    def __init__(
        self,
        runtime: Runtime,
        allowed: tuple[Network, ...],
        secrets: CallbackSecrets | None = None,
        *,
        pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._runtime = runtime
        self._secrets = CallbackSecrets(runtime) if secrets is None else secrets
        self._allowed = allowed
        self._pause_s = pause_s
        self._queue = CallbackQueue(_ITEMS_MAX, _UNDER_WAY_MAX, _PER_TENANT_MAX)
        self._changed = asyncio.Event()
        self._chance = random.Random()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None

    def start(self) -> None:
        """Begin with what the store has, then deliver as runs end."""
        loop = self._loop = asyncio.get_running_loop()
        self._http = httpx.AsyncClient(
            # No connection is kept: the next one to this address may be for another name, checked for itself.
            limits=httpx.Limits(max_connections=_UNDER_WAY_MAX, max_keepalive_connections=0),
            timeout=_ATTEMPT_S,
            # The system's authorities, or those of SSL_CERT_FILE; no proxies and passwords of the environment.
            verify=ssl.create_default_context(),
            trust_env=False,
            follow_redirects=False,
        )

        def observe(event: str, data: Any) -> None:
            if event == "callback" and not loop.is_closed():
                loop.call_soon_threadsafe(self._add, data)

        self._runtime.observe(observe)
        self._spawn(self._work())

    def close(self) -> None:
        """Attempts under way are given up; the next node repeats them."""
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _add(self, due: CallbackDue) -> None:
        self._queue.add(due.tenant, due.run_id, due.due_ns)
        self._changed.set()

    async def _work(self) -> None:
        queue, rescan = self._queue, True
        while True:
            if rescan or (queue.overflowed and not len(queue)):
                queue.overflowed = False
                rescan = not await self._scan()
            self._changed.clear()
            while (found := queue.take(time.time_ns())) is not None:
                self._spawn(self._deliver(*found))
            next_ns = queue.next_ns()
            wait_s = _AGAIN_S if rescan else None if next_ns is None else max(0.0, (next_ns - time.time_ns()) / 1e9)
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _scan(self) -> bool:
        """Everything that the store owes; False if it could not be read."""
        after = b""
        while True:

            def look(store: Store, after: bytes = after) -> list[tuple[bytes, bytes]]:
                return store.scan_rows(OUTBOX, b"", after)

            try:
                rows = await self._runtime.read_store(look)
                for key, value in rows:
                    if is_callback(key):
                        self._found(run_id_from_bytes(key[:16]), value)
            except AgentrtError as error:
                _log.error("the outbox cannot be read: %s", error)
                return isinstance(error, ClosedError)
            if not rows:
                return True
            after = rows[-1][0]

    def _found(self, run_id: str, value: bytes) -> None:
        try:
            callback = read_callback(value)
        except StoreCorruptError as error:
            _log.error("the callback of run %s is left out: %s", run_id, error)
        else:
            self._queue.add(callback.tenant, run_id, callback.due_ns)

    async def _deliver(self, tenant: str, run_id: str) -> None:
        again_ns: int | None = time.time_ns() + round(_AGAIN_S * 1e9)
        try:
            again_ns = await self._attempt(run_id)
        except StoreCorruptError as error:
            again_ns = None
            _log.error("the callback of run %s is left out: %s", run_id, error)
        except AgentrtError as error:
            _log.error("the callback of run %s waits: %s", run_id, error)
        finally:
            self._queue.finish(tenant, run_id, again_ns)
            self._changed.set()

    async def _attempt(self, run_id: str) -> int | None:
        """One; when the next one is due, None if there is none. Raises AgentrtError kinds of the store."""
        key = callback_key(run_id)
        value = await self._runtime.read_store(lambda store: store.read_row(OUTBOX, key))
        if value is None:
            return None
        callback = read_callback(value)
        try:
            run = await run_now(self._runtime, run_id)
        except UnknownRunError:  # it was erased meanwhile
            return None
        why = await self._post(callback, run_id, _encode(run))
        if why is None:
            await self._runtime.commit_rows((callback_row(run_id, None),))
            return None
        attempts = callback.attempts + 1
        if attempts >= ATTEMPTS_MAX:
            _log.warning("the callback of run %s is given up after %d attempts: %s", run_id, attempts, why)
            await self._runtime.commit_rows((callback_row(run_id, None),))
            return None
        pause_s = min(_PAUSE_S_MAX, self._pause_s * 2.0 ** (attempts - 1)) * (0.5 + self._chance.random())
        due_ns = time.time_ns() + round(pause_s * 1e9)
        later = msgspec.structs.replace(callback, attempts=attempts, due_ns=due_ns)
        await self._runtime.commit_rows((callback_row(run_id, later),))
        return due_ns

    async def _post(self, callback: Callback, run_id: str, body: bytes) -> str | None:
        """None if it was taken, else why not."""
        secrets = self._secrets.valid(callback.tenant, time.time_ns())
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                target = check_url(callback.url, self._allowed)
                addresses = await resolve(target, self._allowed, _RESOLVE_S)
                headers = headers_of(secrets, run_id, int(time.time()), body)
                status = await self._send(httpx.URL(callback.url), target, addresses, headers, body)
        except (TimeoutError, httpx.TimeoutException):
            return "no answer in time"
        except (InputError, UnreachableTargetError) as error:  # settings may have changed since it was accepted
            return str(error)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return f"no connection: {type(error).__name__}"
        return None if 200 <= status < 300 else f"the answer was {status}"

    async def _send(
        self, url: httpx.URL, target: Target, addresses: list[Address], headers: dict[str, str], body: bytes
    ) -> int:
        """The status that the first address answers that can be connected to."""
        assert self._http is not None
        headers |= {
            "host": url.netloc.decode("ascii"),
            "content-type": "application/json",
            "user-agent": "agentrt-callback",
        }
        for number, address in enumerate(addresses, 1):
            request = self._http.build_request(
                "POST",
                url.copy_with(host=str(address)),
                content=body,
                headers=headers,
                extensions={"sni_hostname": target.host},
            )
            try:
                answer = await self._http.send(request, stream=True)
            except httpx.ConnectError:
                if number == len(addresses):
                    raise
            else:
                await answer.aclose()  # what it says beside the status is not wanted
                return answer.status_code
        raise UnreachableTargetError("the name has no address")
