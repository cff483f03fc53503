"""What the plugin says of itself, and its settings."""

import re
from pathlib import Path

import agentrt_nats
import msgspec
import pytest
from agentrt_nats.ingress import NatsIngress
from agentrt_nats.settings import NatsSettings
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from nats_kit import NatsServer

from agentrt.config import Config, load_config
from agentrt.errors import ConfigError
from agentrt.plugins import Plugins

README = Path(__file__).parents[1] / "README.md"


def plugins() -> Plugins:
    return Plugins({"nats": agentrt_nats})


def test_the_readmes_settings_are_settings(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "node.toml").write_text(text)
    config = load_config(tmp_path / "node.toml", env={})
    plugins().check(config)
    assert config.ingress.sources["orders"]["kind"] in plugins().names("ingress")
    for word in re.findall(r"`([a-z]+_[a-z_]+)`", README.read_text()):
        assert word in {field.name for field in msgspec.structs.fields(NatsSettings)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"servers": "one"},
        {"password": "hunter2"},
        {"ack_wait_s": 0},
        {"consumer_prefix": "a.b"},
        {"server": []},
        {"batch": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.nats"):
        plugins().check(Config(plugins={"nats": wrong}))


class Inbox:
    """Nothing is expected to come."""

    def assign(self, partitions: object) -> None:
        raise AssertionError("it was assigned")


async def _secret(tenant: str, name: str) -> str:
    assert (tenant, name) == ("", "nats")
    return "s3cret"


@pytest.mark.parametrize(("password", "error"), [("secret://nats", NotFoundError), ("", Exception)])
def test_it_says_who_it_is(tmp_path: Path, password: str, error: type[Exception]) -> None:
    """With the right password it gets as far as the missing stream, without one it does not."""
    import asyncio

    with NatsServer(tmp_path, "--user", "node", "--pass", "s3cret") as server:
        settings = NatsSettings(servers=(server.url,), user="node" if password else "", password=password)

        async def run() -> None:
            ingress = NatsIngress(settings, "orders", "orders", 10, _secret)
            try:
                async with asyncio.timeout(5):
                    await ingress.run(Inbox())  # type: ignore[arg-type]
            finally:
                await ingress.close()

        with pytest.raises(error) as caught:
            asyncio.run(run())
        assert isinstance(caught.value, NotFoundError) is bool(password)


def test_a_stream_that_is_made_anew_has_other_names(tmp_path: Path) -> None:
    """Sequences begin again; the events are others."""
    from nats_kit import NatsBus

    from agentrt.testing.ingresses import Consumer, FakeNode

    with NatsServer(tmp_path) as server:
        bus, node = NatsBus(server), FakeNode()
        for _ in range(2):

            async def renew(stream: JetStreamContext) -> None:
                try:
                    await stream.delete_stream("orders")
                except NotFoundError:
                    pass

            server.ask(renew)
            bus.publish("orders", [b'{"n":1}', b'{"n":2}'])
            consumer = Consumer(bus, "orders", node)
            consumer.until(lambda: consumer.source.statistics().acknowledged >= 2)  # noqa: B023
            consumer.close()
        assert len(node.runs) == 4 and not node.letters
        assert {name.split(" ")[2] for name in node.runs} == {"1", "2"}
