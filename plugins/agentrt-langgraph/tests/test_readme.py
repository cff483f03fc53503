"""What the README shows works; the benchmark runs."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_graphs import interrupted

from agentrt import Runtime

_README = Path(__file__).parents[1] / "README.md"
_ROOT = Path(__file__).parents[3]

#: With the agentrt that is installed, not the one that stands beside perf.
_PERF = (
    "import sys; sys.path.append(sys.argv[1]); from perf.__main__ import main; main(['langgraph', '--tiny', '--json'])"
)


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)


def test_the_saver_of_the_readme(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", blocks()[0]], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "{'count': 2}\n", done.stderr


def test_the_graph_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "readme_trip.py").write_text(blocks()[1])
    monkeypatch.syspath_prepend(tmp_path)
    import readme_trip

    async def main() -> None:
        async with Runtime(store=tmp_path / "store", tools=[readme_trip.trip_node]) as runtime:
            await runtime.register(readme_trip.trip)
            run = await runtime.submit("trip", "Rome")
            asked = await interrupted(runtime, run.run_id, 1)
            assert asked["value"] == {"question": "book Rome?"}
            assert asked["topic"] == f"langgraph.{run.run_id}" and asked["key"] == "1"
            await runtime.send("yes", topic=asked["topic"], key=asked["key"])
            assert await run.result() is True

    asyncio.run(main())


@pytest.mark.skipif(not (_ROOT / "perf").exists(), reason="the benchmark is in agentrt's repository")
def test_the_benchmark_runs() -> None:
    pytest.importorskip("langgraph.checkpoint.sqlite")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PERF, str(_ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["figures"]) == {"saver_ratio", "saver_checkpoints_per_s", "graph_steps_per_s", "graph_ratio"}
    assert all(value > 0 for value in (found["figures"] | found["baselines"]).values())
