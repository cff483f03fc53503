"""With a whole runtime: the README's agent, the journal, tiers, and a restart."""

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import Any

import agentrt_sandbox
import msgspec
import pytest
from agentrt_sandbox.settings import SandboxSettings

from agentrt import RunState, Runtime
from agentrt.config import Config, load_config
from agentrt.errors import ConfigError
from agentrt.plugins import Plugins

README = Path(__file__).parents[1] / "README.md"
pytestmark = pytest.mark.timeout(1_800)

AGENTS = """
from agentrt import agent


@agent
async def runs(ctx, calls):
    return [(await ctx.tool(name, **args))["value"] for name, args in calls]


@agent
async def answers(ctx, call):
    first = (await ctx.tool(call[0], **call[1]))["value"]
    await ctx.event("go")
    return [first, (await ctx.tool(call[0], **call[1]))["value"]]
"""


def plugins() -> Plugins:
    return Plugins.load({"sandbox": agentrt_sandbox}, entry_points=False)


def config_of(cache: Path, **arguments: Any) -> Config:
    return load_config(
        env={},
        arguments={
            "store.kind": "memory",
            "wasm.cache_path": str(cache),
            "wasm.guests_max": 64,
            "tools.providers": ["sandbox"],
            "tools.spares": 0,
        }
        | arguments,
    )


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "sandbox_agents.py").write_text(AGENTS)
    (tmp_path / "analyst.py").write_text(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sandbox_agents", "analyst"):
        sys.modules.pop(name, None)
    import analyst
    import sandbox_agents

    return sandbox_agents, analyst


def test_the_readmes_settings_are_settings(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "node.toml").write_text(text)
    config = load_config(tmp_path / "node.toml", env={})
    plugins().check(config)
    known = {field.name for field in msgspec.structs.fields(SandboxSettings)}
    assert set(config.plugins["sandbox"]) <= known


def test_the_readmes_agent_works(cache: Path, agents: Any) -> None:
    with Runtime(config=config_of(cache), plugins=plugins()) as runtime:
        runtime.register_sync(agents[1].analyst)
        run = runtime.submit_sync("analyst", "a,1.5\nb,2.5\n")
        assert run.result_sync(120) == [2.0, "done\n", {"total.txt": "4.0"}]


def test_calls_of_all_tiers_and_both_languages(cache: Path, agents: Any) -> None:
    calls = [["python.exec", {"code": "n * 2", "variables": {"n": 4}}], ["js.exec", {"code": "2 ** 10"}]]
    with Runtime(config=config_of(cache), plugins=plugins()) as runtime:
        runtime.register_sync(agents[0].runs)
        runs = [runtime.submit_sync("runs", calls, tier=tier) for tier in range(4) for _ in range(3)]
        for run in runs:
            assert run.result_sync(120) == [8, 1024]


def test_what_a_call_gave_is_in_the_journal_and_not_done_again(cache: Path, tmp_path: Path, agents: Any) -> None:
    """A clock that is real tells executions apart."""
    call = ["python.exec", {"code": "import time\ntime.time_ns()"}]
    config = config_of(
        cache, **{"store.kind": "lmdb", "store.path": str(tmp_path / "store"), "store.force_place": True}
    )
    config = msgspec.structs.replace(config, plugins={"sandbox": {"clock": "real"}})

    async def main() -> None:
        async with Runtime(config=config, plugins=plugins()) as runtime:
            await runtime.register(agents[0].answers)
            run_id = (await runtime.submit("answers", call)).run_id
            while (state := (await runtime.run(run_id).describe()).state) is not RunState.WAITING:
                assert state is RunState.ACTIVE
                await asyncio.sleep(0.01)
        stopped_ns = time.time_ns()
        async with Runtime(config=config, plugins=plugins()) as runtime:
            await runtime.register(agents[0].answers)
            await runtime.send("hello", topic="go")
            first, second = await asyncio.wait_for(runtime.run(run_id).result(), 120)
            assert first < stopped_ns < second

    asyncio.run(main())


def test_an_interpreter_that_is_another_one_is_refused(cache: Path, agents: Any) -> None:
    config = msgspec.structs.replace(config_of(cache), plugins={"sandbox": {"digests": {"micropython": "0" * 64}}})
    with Runtime(config=config, plugins=plugins()) as runtime:
        runtime.register_sync(agents[0].runs)
        failed = runtime.submit_sync("runs", [["python.exec", {"code": "1"}]]).wait_sync(120)
        assert failed.error is not None and b"tool_import" in failed.error
        assert runtime.submit_sync("runs", [["js.exec", {"code": "1"}]]).result_sync(120) == [1]


@pytest.mark.parametrize(
    "wrong",
    [{"fuel": 0}, {"memory_bytes": 1}, {"python": "quickjs"}, {"clock": "no"}, {"fuels": 1}, {"output_bytes": 1 << 20}],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.sandbox"):
        plugins().check(Config(plugins={"sandbox": wrong}))
