"""docs/tools.md: its programs run, and what it says of them is so."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tool_kit import Node, node

from agentrt.config import load_config
from agentrt.sizing import tool_class_limits
from agentrt.tools import EnvironmentSecrets, ToolOutcome, describe_tools
from agentrt.tools.commands import command_specs
from agentrt.tools.secrets import provider_from

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"


def programs() -> dict[str, str]:
    """The page's programs by the file name in their first line."""
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return dict(blocks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in programs().items():
        (tmp_path / name).write_text(text)
    return tmp_path


def value(outcome: ToolOutcome) -> Any:
    assert outcome.ok, outcome
    return msgspec.json.decode(outcome.payload)


def test_every_program_of_the_page_has_a_name_and_runs(folder: Path) -> None:
    assert len(programs()) == PAGE.read_text().count("```python")
    for name in programs():
        done = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), name


def test_the_tools_do_what_the_page_says(folder: Path) -> None:
    files = ("crm.py", "billing.py", "prices.py", "stripe_tool.py")
    specs = [spec for file in files for spec in describe_tools(str(folder / file))]

    async def test(node: Node) -> None:
        assert await node.value("lookup", domain="x") == {"employees": 120, "years": 1}
        assert (await node.begin("lookup", domain=1)).code == "tool_args"
        assert (await node.begin("send_mail", to="a", text="b", idempotency_key="forged")).code == "tool_args"
        mail = node.call("send_mail", {"to": "a", "text": "b"}, key="k", attempt=2)[1]
        assert value(await mail) == "accepted k at attempt 2"

        args = {"account": "a", "cents": 5}
        assert value(await node.call("charge", args, key="c", reconcile=True)[1])["found"] == "no"
        assert value(await node.call("charge", args, key="c")[1]) == 5
        assert value(await node.call("charge", args, key="c", reconcile=True)[1]) == {"found": "yes", "result": 5}
        away = {"account": "unreachable", "cents": 5}
        assert value(await node.call("charge", away, key="c", reconcile=True)[1])["found"] == "unknown"

        assert await node.value("price", sku="a") == 1
        prices = await asyncio.gather(*(node.begin("price", sku=sku) for sku in ("a", "?", "b")))
        assert [value(prices[0]), prices[1].code, value(prices[2])] == [3, "tool_failed", 3]

        assert value(await node.begin("balance", tenant="acme", api_key="secret://stripe")) == len("sk_live_1234")
        assert (await node.begin("balance", tenant="other", api_key="secret://stripe")).code == "tool_secret"

    secrets = EnvironmentSecrets("ACME_SECRET_", {"ACME_SECRET_acme__stripe": "sk_live_1234"})
    node(test, specs=specs, made_with={"secrets": secrets})


def test_the_configuration_of_the_page_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n# agentrt.toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "agentrt.toml").write_text(text)
    config = load_config(tmp_path / "agentrt.toml", env={})
    limits = tool_class_limits(config)
    assert (limits["browser"].hosts_max, limits["code"].spares, limits["code"].host_memory_bytes_max) == (4, 2, 1 << 29)
    assert isinstance(provider_from(config.secrets), EnvironmentSecrets)


def test_the_codes_of_failures_are_all_there() -> None:
    told = set(re.findall(r"`((?:tool_|cancel)\w+)`", PAGE.read_text().partition("## Failures")[2]))
    assert ToolOutcome.__doc__ is not None
    assert told == set(re.findall(r"\b(tool_\w+|cancelled)\b", ToolOutcome.__doc__.partition("Codes:")[2]))


def test_the_notice_of_the_page_is_heeded(folder: Path) -> None:
    async def test(node: Node) -> None:
        assert await node.value("reindex", begin=1, end=3) == 3
        future = node.begin("reindex", begin=0, end=2**62)
        while not future.done():  # the first notice may come before it has its handler
            node.pool.stop()
            await asyncio.sleep(0.01)
        assert value(future.result()) > 0

    node(test, specs=describe_tools(str(folder / "reindex.py")))


def test_the_commands_of_the_page(folder: Path, tmp_path: Path) -> None:
    (toml,) = re.findall(r"```toml\n# commands.toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "commands.toml").write_text(toml)
    config = load_config(tmp_path / "commands.toml", env={})
    (thumbnail,) = command_specs(config.tools.commands)
    assert thumbnail.command is not None and thumbnail.command.memory_bytes_max == 256 << 20
    specs = describe_tools(str(folder / "commands.py"))
    assert [spec.name for spec in specs] == ["count_words", "run_script"]

    async def test(node: Node) -> None:
        assert await node.value("count_words", text="one two three") == 3
        assert (await node.begin("count_words", words="one")).code == "tool_args"

    process = msgspec.structs.replace(config.process, allow_unsandboxed=True)
    node(test, specs=specs, made_with={"process": process}, spares=0, template="exec")
