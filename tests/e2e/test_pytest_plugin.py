"""The fixtures that come with agentrt, used as their users do."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = """
from agentrt.agents import agent
from agentrt.hooks import hookimpl
from agentrt.policy import Deny
from agentrt.errors import DeniedError
import pytest

@agent
async def greet(ctx, input):
    return f"hello {input}"

@agent
async def ask(ctx, input):
    return (await ctx.model("work", messages=[{"role": "user", "content": input}])).text

class Never:
    AGENTRT_HOOKS = 2

    @hookimpl
    def agentrt_policies(self):
        return {"never": lambda config: self}

    version = "1"

    def decide(self, kind, facts):
        return Deny("never")

def test_an_agent(agentrt_runtime):
    runtime = agentrt_runtime(greet)
    assert runtime.submit_sync("greet", "you").wait_sync(30).value() == "hello you"
    assert runtime.config.store.kind == "memory"

def test_a_plugin(agentrt_runtime):
    runtime = agentrt_runtime(greet, plugins={"never": Never()}, node__policies="never")
    with pytest.raises(DeniedError):
        runtime.submit_sync("greet", "you")

def test_a_model(agentrt_runtime, agentrt_models):
    settings = {name.replace(".", "__"): value for name, value in agentrt_models.config().items()}
    runtime = agentrt_runtime(ask, **settings)
    assert runtime.submit_sync("ask", "one").wait_sync(30).value() == "one"

def test_settings(agentrt_config):
    assert agentrt_config(limits__hot_ms=5).limits.hot_ms == 5
"""


def test_the_fixtures_work_in_somebody_elses_suite(tmp_path: Path) -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    (tmp_path / "test_theirs.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:faulthandler", "-p", points["agentrt"], "test_theirs.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_it_costs_those_who_do_not_use_it_nothing() -> None:
    code = (
        "import sys, agentrt.testing.pytest_plugin; "
        "print([name for name in ('uvloop', 'msgspec', 'agentrt.runtime', 'aiohttp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
