"""Agents that use MCP servers on a whole runtime: what the README shows, and what becomes of runs whose server or node
dies in the middle."""

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mcp_kit import Place, config, lines, plugins, until

from agentrt import Runtime
from agentrt.config import Config

pytestmark = pytest.mark.timeout(180)
README = Path(__file__).parents[1] / "README.md"

AGENTS = """
from agentrt.agents import agent


@agent
async def survivor(ctx, input):
    first = await ctx.tool("f.meta")
    second = await ctx.tool("f.die_once", name="died")
    return [first["structured"]["agentrt/attempt"], second["structured"]["result"]]


@agent
async def risky(ctx, input):
    return await ctx.tool("f.die_always")


@agent
async def waits(ctx, input):
    before = await ctx.tool("f.add", x=1, y=2)
    after = await ctx.tool("f.wait", name="go")
    return [before["structured"]["result"], after["structured"]["result"]]


@agent
async def asks(ctx, input):
    found = await ctx.tool("mcp.tools", server="f")
    (add,) = [tool for tool in found["f"] if tool["name"] == "f.add"]
    return (await ctx.tool(add["call"], x=1, y=2))["structured"]["result"]
"""


def stored(settings: Config, folder: Path) -> Config:
    store = msgspec.structs.replace(settings.store, kind="lmdb", path=str(folder / "store"), force_place=True)
    return msgspec.structs.replace(settings, store=store)


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "mcp_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mcp_agents", None)
    import mcp_agents

    yield mcp_agents
    sys.modules.pop("mcp_agents", None)


def test_the_readmes_agent(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "readme_mcp_agents.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import readme_mcp_agents

    settings = config({"time": place.server(["-m", "mcp_server_time", "--local-timezone", "UTC"], [])})
    with Runtime(config=settings, plugins=plugins()) as runtime:
        runtime.register_sync(readme_mcp_agents.clock)
        told = runtime.submit_sync("clock", "12:00").wait_sync(60).value()
        assert re.search("T(19|20):00", told), told  # summer in Vienna, or winter


def test_a_call_that_may_be_repeated_survives_its_server(place: Place, folder: Path, agents: Any) -> None:
    async def main() -> None:
        async with Runtime(config=config({"f": place.faulty(folder)}), plugins=plugins()) as runtime:
            await runtime.register(agents.survivor)
            await runtime.register(agents.asks)
            run = await runtime.submit("survivor", None)
            assert await asyncio.wait_for(run.result(), 60) == [1, "alive"]
            assert lines(folder).count("die_once died") == 2
            assert await asyncio.wait_for((await runtime.submit("asks", None)).result(), 60) == 3

    asyncio.run(main())


def test_one_that_may_not_waits_for_an_operator(place: Place, folder: Path, agents: Any) -> None:
    async def main() -> None:
        async with Runtime(config=config({"f": place.faulty(folder)}), plugins=plugins()) as runtime:
            await runtime.register(agents.risky)
            run = await runtime.submit("risky", None)
            deadline = time.monotonic() + 60
            while (await run.describe()).wait_reason != "operator":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert lines(folder).count("die_always") == 1
            await run.cancel()

    asyncio.run(main())


NODE = """
import asyncio, sys
sys.path[:0] = {paths!r}
import msgspec
from mcp_kit import config, plugins
from test_runtime import stored
from pathlib import Path
from agentrt import Runtime
import mcp_agents

async def main():
    settings = msgspec.json.decode({servers!r})
    async with Runtime(config=stored(config(settings), Path({folder!r})), plugins=plugins()) as runtime:
        await runtime.register(mcp_agents.waits)
        print((await runtime.submit("waits", None)).run_id, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_a_run_goes_on_after_its_node_was_killed(place: Place, folder: Path, tmp_path: Path, agents: Any) -> None:
    """The call that was under way is done again, with the tools as they were known, before the server is there."""
    servers = {"f": place.faulty(folder)}
    text = NODE.format(
        paths=[str(Path(__file__).parent), str(tmp_path), *sys.path],
        servers=msgspec.json.encode(servers).decode(),
        folder=str(tmp_path),
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        run_id = node.stdout.readline().strip()
        assert run_id.startswith("run_")
        asyncio.run(until(lambda: "wait go" in lines(folder), "the call has not begun"))
        node.kill()
        node.wait()

    async def main() -> None:
        settings = stored(config(servers), tmp_path)
        async with Runtime(config=settings, plugins=plugins()) as runtime:
            await runtime.register(agents.waits)
            await until(lambda: lines(folder).count("wait go") == 2, "the call was not done again")
            (folder / "go").touch()
            run = runtime.run(run_id)
            assert await asyncio.wait_for(run.result(), 60) == [3, "go"]

    asyncio.run(main())
