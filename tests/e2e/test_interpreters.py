"""Interpreters as agents of a real runtime: scripts with durable steps, through restarts."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrt import RunState, Runtime, load_config
from agentrt.config import Config
from agentrt.errors import RunError

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import runtime_tools
from interpreters import script
from runtime_tools import entries

TOOLS = [runtime_tools.ledger_add]
# Indexes its order in its own loop, step by step.
INDEXER = """
import host, json, sys, time

def tool(name, **args):
    answer = json.loads(host.call("tool.call", json.dumps({"tool": name, "args": args})))
    if not answer["ok"]:
        raise RuntimeError(answer["error"]["code"])
    return answer["value"]

order = json.loads(sys.stdin.read())
began, seen = time.time(), 0
for place in range(1, order["steps"] + 1):
    for i in range(2000):
        seen = (seen * 31 + i) % 1000003
    tool("ledger_add", order=order["order"], place=place)
print(json.dumps({"order": order["order"], "seen": seen, "forward": time.time() >= began}))
"""


def seen(steps: int) -> int:
    value = 0
    for _ in range(steps):
        for i in range(2000):
            value = (value * 31 + i) % 1000003
    return value


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(
        arguments={
            "store.path": str(tmp_path / "store"),
            "store.force_place": True,
            "wasm.cache_path": str(tmp_path.parent / "modules"),
            "wasm.guests_max": 100,
            "node.close_timeout_ms": 0,
        }
    )


def test_scripts_go_on_after_a_restart_in_the_middle(
    config: Config, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, steps = script("micropython", INDEXER), 12
    gate = tmp_path / "gate"
    monkeypatch.setenv("LEDGER_GATE", str(gate))

    async def main() -> dict[str, Any]:
        ids: list[str] = []
        for life in range(3):
            # Fewer steps than one run has can end in the first lives: every run is still under way in the last.
            most = [steps // 2, steps - 1, 10_000][life]
            gate.write_text(str(most))
            async with Runtime(config=config, tools=TOOLS) as runtime:
                await runtime.register("indexer", agent)
                if not ids:
                    orders = [{"order": f"o{number}", "steps": steps} for number in range(8)]
                    ids = [(await runtime.submit("indexer", order, tier=2)).run_id for order in orders]
                if life == 2:
                    results = {run_id: await runtime.run(run_id).result() for run_id in ids}
                    assert (await runtime.statistics()).engine.recovered == 8
                    return results
                for _ in range(5000):
                    if len(entries(ledger)) >= most:
                        break
                    await asyncio.sleep(0.002)
        raise AssertionError

    results = asyncio.run(main())
    assert list(results.values()) == [{"order": f"o{n}", "seen": seen(steps), "forward": True} for n in range(8)]
    lines = entries(ledger)
    assert len({key for key, *_ in lines}) == 8 * steps
    assert {(order, int(place)) for _, order, place, _ in lines} == {
        (f"o{n}", place) for n in range(8) for place in range(1, steps + 1)
    }


def test_a_script_that_fails_says_why(config: Config, ledger: Path) -> None:
    async def main() -> None:
        async with Runtime(config=config, tools=TOOLS) as runtime:
            await runtime.register("bad", script("micropython", "1/0"))
            run = await runtime.submit("bad", None)
            with pytest.raises(RunError):
                await run.result()
            ended = await run.wait()
            assert ended.state is RunState.FAILED and ended.error is not None
            error = json.loads(ended.error)
            assert error["exit_code"] == 1 and "ZeroDivisionError" in error["stderr"]
            await runtime.register("text", script("micropython", "print('not', 'JSON')"))
            assert await (await runtime.submit("text", None)).result() == "not JSON\n"

    asyncio.run(main())
