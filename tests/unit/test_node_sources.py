"""What a node loads of the sources that its configuration names."""

from pathlib import Path

import pytest

from agentrt.config import load_config
from agentrt.errors import InputError
from agentrt.node.sources import describe, load_sources

SHOP = """
from agentrt import Context, agent, tool

@tool(kind="pure")
def price(name: str) -> int: return len(name)

@tool(kind="pure")
def stock(name: str) -> int: return 5

@agent
async def sells(ctx: Context, name: str) -> int: return await ctx.tool(price, name=name)

@agent
async def counts(ctx: Context, name: str) -> int: return await ctx.tool(stock, name=name)
"""


@pytest.fixture
def shop(tmp_path: Path) -> str:
    (tmp_path / "shop.py").write_text(SHOP)
    return str(tmp_path / "shop.py")


@pytest.mark.parametrize(
    ("function", "agents", "tools"),
    [
        ("", ["sells", "counts"], ["price", "stock"]),
        (":sells", ["sells"], ["price", "stock"]),  # an agent's tools are beside it, which it calls is not known
        (":stock", [], ["stock"]),
    ],
)
def test_one_function_or_all(shop: str, function: str, agents: list[str], tools: list[str]) -> None:
    found = describe(shop + function)
    assert [agent.name for agent in found.agents] == agents
    assert [tool.name for tool in found.tools] == tools


def test_a_function_that_is_none_is_refused(shop: str) -> None:
    with pytest.raises(InputError, match="declares no agents and no tools"):
        describe(shop + ":price_of")


def test_tools_that_several_sources_bring_are_there_once(shop: str) -> None:
    settings = {
        "node.load": (f"{shop}:sells", f"{shop}:counts", f"{shop}:price"),
        "node.agents": {"again": {"source": f"{shop}:sells"}},
    }
    found = load_sources(load_config(arguments=settings, env={}))
    assert [agent.name for agent in found.agents] == ["sells", "counts", "again"]
    assert [tool.name for tool in found.tools] == ["price", "stock"]
