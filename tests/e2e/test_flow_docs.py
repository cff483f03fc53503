"""docs/flow-control.md: its settings are settings, its tool behaves as it says, its figures are what the code does."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from flow_agents import asks, breaks, delegates, works

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.flow.classifier import Classifier, Ingress
from agentrt.flow.profilefile import read_profiles
from agentrt.flowlimits import admission_limits, gate_limits, loop_limits
from agentrt.tools import describe_tools
from perf.flow_plots import FIGURES, MEASURED

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "flow-control.md").read_text(encoding="utf-8")


def test_the_settings_of_the_page_are_settings(tmp_path: Path) -> None:
    texts = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (rules,) = [text for text in texts if "[[rules]]" in text]
    made = Classifier(read_profiles(rules, "the page").rules)
    asked = Ingress("http", "acme", type="order.new", payload={"order": {"kind": "rush", "id": 7}})
    found = made.classify(asked)
    assert (found.agent, found.tier, found.key) == ("rush", 0, "order 7")
    assert made.classify(Ingress("cli", "acme", headers={"x-source": "crawler 3"}, agent="a")).tier == 2
    assert "gone" in made.classify(Ingress("spawn", "t", agent="old-one")).refused
    for text in [text for text in texts if "queue_items_max" in text]:
        (tmp_path / "node.toml").write_text(text)
        admits = admission_limits(load_config(tmp_path / "node.toml", env={}))
        assert admits.tenants["free"].items == 100 and admits.classes["code"].items == 50
        assert admits.tenant.items == 20_000 and admits.tiers[3].items == 1000
    (tmp_path / "node.toml").write_text(texts[0])
    config = load_config(tmp_path / "node.toml", env={})
    limits = gate_limits(config)
    assert limits.weights == {"acme": 3} and loop_limits(config).repeats == 100
    assert {(rule.scope.value, rule.name, rule.rate.limit) for rule in limits.rates} == {
        ("tenant", "*", 600),
        ("tenant", "acme", 6000),
        ("tool", "search", 60),
        ("provider", "openai", 500),
        ("provider", "openai", 200_000),
    }


def test_the_tool_of_the_page_is_tried_again_as_it_says(tmp_path: Path) -> None:
    ((name, text),) = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / name).write_text(text)

    async def main() -> list[Any]:
        config = load_config(env={}, arguments={"store.kind": "memory", "flow.retry_base_ms": 10})
        async with Runtime(config=config, tools=describe_tools(str(tmp_path / name))) as runtime:
            await runtime.register(asks)
            run = await runtime.submit("asks", ["berlin", "busy", "away", "moved"])
            found: list[Any] = await run.result()
            return found

    assert asyncio.run(main()) == [21, 20, 20, "tool_conflict"]


def test_another_agent_takes_over_while_children_of_the_first_fail() -> None:
    async def main() -> list[Any]:
        async with Runtime(config=load_config(env={}, arguments={"store.kind": "memory"})) as runtime:
            for each in (breaks, works, delegates):
                await runtime.register(each)
            run = await runtime.submit("delegates", 7)
            found: list[Any] = await run.result()
            return found

    assert asyncio.run(main()) == ["child_failed"] * 5 + ["done instead"] * 2


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_what_the_code_does(name: str, tmp_path: Path) -> None:
    FIGURES[name](tmp_path / "made.svg")
    made = (tmp_path / "made.svg").read_text()
    assert made == (DOCS / "plots" / f"flow-{name}.svg").read_text(), "run: python -m perf.flow_plots docs/plots"


def test_every_figure_is_shown() -> None:
    assert set(re.findall(r"plots/flow-(\w+)\.svg", PAGE)) == set(FIGURES) | set(MEASURED)
