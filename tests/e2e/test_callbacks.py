"""Callbacks over real sockets: delivered, repeated, signed, after a restart too, and never where they may not go."""

import asyncio
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import http_fixture
import pytest
from serve_kit import AGENTS, Serving, agentrt, lines, make_certificate

from agentrt import Runtime
from agentrt.callbacks import sender as sending
from agentrt.callbacks.address import parse_networks
from agentrt.callbacks.secrets import CallbackSecrets
from agentrt.callbacks.sender import Sender
from agentrt.callbacks.signing import secret_text
from agentrt.client import Client
from agentrt.engine.callbacks import callback_key
from agentrt.errors import ForbiddenError
from agentrt.stores.base import OUTBOX

LOOPBACK = parse_networks(["127.0.0.0/8"])


class Receiver:
    """A server that answers with what it is told to, the last one for ever."""

    def __init__(self, *answers: int, tls: tuple[Path, Path] | None = None) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.came = threading.Semaphore(0)
        pending = list(answers)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(pending.pop(0) if len(pending) > 1 else pending[0])
                self.send_header("location", "/elsewhere")
                self.end_headers()
                outer.came.release()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receive() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def make(*answers: int, **options: Any) -> Receiver:
        made.append(Receiver(*answers, **options))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


async def owed(runtime: Runtime, run_id: str) -> bool:
    row = await runtime.read_store(lambda store: store.read_row(OUTBOX, callback_key(run_id)))
    return row is not None


async def until_paid(runtime: Runtime, run_id: str) -> None:
    async with asyncio.timeout(60):
        while await owed(runtime, run_id):
            await asyncio.sleep(0.01)


def is_genuine(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """As docs/http.md has it."""
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n# verify\.py\n(.*?)```", page, re.DOTALL)
    space: dict[str, Any] = {}
    exec(text, space)
    found: bool = space["is_genuine"](secret, headers, body)
    return found


def test_a_callback_is_repeated_until_it_is_taken(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    receiver = receive(500, 302, 429, 204)

    async def main() -> tuple[str, bytes]:
        async with Runtime(store=tmp_path / "store", tools=http_fixture.TOOLS) as runtime:
            await runtime.register(http_fixture.greet)
            sender = Sender(runtime, LOOPBACK, pause_s=0.01)
            sender.start()
            url = f"http://127.0.0.1:{receiver.port}/done?x=1"
            run = await runtime.submit("greet", "Ada", tenant="acme", callback_url=url)
            assert await run.result() == "hello Ada"
            await until_paid(runtime, run.run_id)
            sender.close()
            return run.run_id, CallbackSecrets(runtime).valid("acme", 0)[0]

    run_id, secret = asyncio.run(main())
    assert len(receiver.got) == 4
    for path, headers, body in receiver.got:
        assert path == "/done?x=1"  # the redirect was not followed
        assert headers["host"] == f"127.0.0.1:{receiver.port}"
        told = json.loads(body)
        assert (told["run_id"], told["state"], told["result"], told["tenant"]) == (
            run_id,
            "SUCCEEDED",
            "hello Ada",
            "acme",
        )
        assert headers["webhook-id"] == run_id
        assert is_genuine(secret_text(secret), headers, body)
        assert not is_genuine(secret_text(secret), headers, body + b" ")
        assert not is_genuine(secret_text(bytes(32)), headers, body)


def test_a_secret_is_rotated_without_a_message_that_nobody_can_check(
    tmp_path: Path, receive: Callable[..., Receiver]
) -> None:
    """For as long as both are valid messages carry both signatures; another life of the node knows of it."""
    receiver = receive(204)
    settings = f'[node]\nload = ["{AGENTS}"]\n[http]\ncallback_networks = ["127.0.0.0/8"]\n'
    url = f"http://127.0.0.1:{receiver.port}/"

    def told(client: Client) -> tuple[dict[str, str], bytes]:
        client.submit("greet", "Ada", tenant="acme", callback_url=url)
        assert receiver.came.acquire(timeout=60)
        return receiver.got[-1][1:]

    with Serving(tmp_path, settings) as node, node.client() as client:
        first = client.callback_secret(tenant="acme")
        others = client.callback_secret(tenant="rival")
        assert first.previous_until is None
        assert is_genuine(first.secret, *told(client))
        second = client.rotate_callback_secret(tenant="acme", overlap_s=3_600)
        assert second.secret != first.secret and second.previous_until is not None
        assert client.callback_secret(tenant="acme") == second
        assert client.callback_secret(tenant="rival") == others
        message = told(client)
        assert is_genuine(first.secret, *message) and is_genuine(second.secret, *message)
        assert node.stop() == 0
    with Serving(tmp_path, settings, key=node.key) as again, again.client() as client:
        message = told(client)
        assert is_genuine(first.secret, *message) and is_genuine(second.secret, *message)
        code, out, _ = agentrt(again, "keys", "callbacks", "acme", "--rotate", "--overlap", "0", "--json")
        (third,) = lines(out)
        assert code == 0 and "previous_until" not in third
        message = told(client)
        assert is_genuine(third["secret"], *message)
        assert not is_genuine(first.secret, *message) and not is_genuine(second.secret, *message)
        assert agentrt(again, "keys", "callbacks", "acme")[1].strip() == third["secret"]
        with Client(again.url, key=client.make_key("rival", ["runs:write"]).secret) as rival:  # type: ignore[arg-type]
            with pytest.raises(ForbiddenError):
                rival.rotate_callback_secret(tenant="acme")
            assert rival.rotate_callback_secret().secret != others.secret
        assert again.stop() == 0


def test_a_callback_of_an_earlier_life_is_delivered(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    """The row is written with the end, so a node that dies right after owes it still."""
    receiver = receive(200)
    url = f"http://127.0.0.1:{receiver.port}/"

    async def first() -> list[str]:
        async with Runtime(store=tmp_path / "store", tools=http_fixture.TOOLS) as runtime:
            await runtime.register(http_fixture.count)
            runs = [await runtime.submit("count", 1, callback_url=url, tenant=f"t{n % 3}") for n in range(20)]
            for run in runs:
                await run.wait()
                assert await owed(runtime, run.run_id)
            return [run.run_id for run in runs]

    async def second(run_ids: list[str]) -> None:
        async with Runtime(store=tmp_path / "store") as runtime:
            sender = Sender(runtime, LOOPBACK, pause_s=0.01)
            sender.start()
            for run_id in run_ids:
                await until_paid(runtime, run_id)
            sender.close()

    run_ids = asyncio.run(first())
    asyncio.run(second(run_ids))
    assert sorted(headers["webhook-id"] for _, headers, _ in receiver.got) == sorted(run_ids)


def test_who_never_takes_it_is_given_up_and_holds_nobody_up(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "ATTEMPTS_MAX", 3)
    refusing, taking = receive(503), receive(200)

    async def main() -> None:
        async with Runtime(store=tmp_path / "store", tools=http_fixture.TOOLS) as runtime:
            await runtime.register(http_fixture.count)
            sender = Sender(runtime, LOOPBACK, pause_s=0.01)
            sender.start()
            refused = f"http://127.0.0.1:{refusing.port}/"
            noisy = [await runtime.submit("count", 1, callback_url=refused, tenant="noisy") for _ in range(10)]
            taken = f"http://127.0.0.1:{taking.port}/"
            quiet = await runtime.submit("count", 1, callback_url=taken, tenant="quiet")
            nobody = await runtime.submit("count", 1, callback_url="http://127.0.0.1:9/", tenant="quiet")
            for run in (*noisy, quiet, nobody):
                await run.wait()
                await until_paid(runtime, run.run_id)
            sender.close()

    asyncio.run(main())
    assert len(refusing.got) == 30 and len(taking.got) == 1


def test_nothing_is_sent_where_it_may_not_go(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the URL was accepted, by settings of then or because a name was public then."""
    monkeypatch.setattr(sending, "ATTEMPTS_MAX", 2)
    receiver = receive(200)

    async def main() -> None:
        async with Runtime(store=tmp_path / "store", tools=http_fixture.TOOLS) as runtime:
            await runtime.register(http_fixture.count)
            sender = Sender(runtime, (), pause_s=0.01)
            sender.start()
            for url in (
                f"http://127.0.0.1:{receiver.port}/",
                f"https://127.0.0.1:{receiver.port}/",
                f"https://localhost:{receiver.port}/",
            ):
                run = await runtime.submit("count", 1, callback_url=url)
                await run.wait()
                await until_paid(runtime, run.run_id)
            sender.close()

    asyncio.run(main())
    assert receiver.got == []


def test_a_certificate_is_checked_for_the_name(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the connection goes to the address that was checked."""
    monkeypatch.setattr(sending, "ATTEMPTS_MAX", 1)
    certificate, private_key = make_certificate(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    receiver = receive(200, tls=(certificate, private_key))

    async def main() -> None:
        async with Runtime(store=tmp_path / "store", tools=http_fixture.TOOLS) as runtime:
            await runtime.register(http_fixture.count)
            sender = Sender(runtime, parse_networks(["127.0.0.0/8", "::1/128"]), pause_s=0.01)
            sender.start()
            for host in ("127.0.0.1", "localhost"):
                run = await runtime.submit("count", 1, callback_url=f"https://{host}:{receiver.port}/")
                await run.wait()
                await until_paid(runtime, run.run_id)
            sender.close()

    asyncio.run(main())
    assert [headers["host"] for _, headers, _ in receiver.got] == [f"localhost:{receiver.port}"]
