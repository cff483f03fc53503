"""The demo as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = [sys.executable, "-c", "from agentrt.cli.main import main; main()", "demo"]
KEYS = {
    "accepted", "finished", "lost", "duplicates", "kills", "urgent_p50_us", "urgent_p99_us", "urgent_max_us",
    "preemptions", "demotions", "agings", "runs_per_s_by_tier", "dropped_by_ledger", "passed",
}  # fmt: skip


def run(*options: str, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*DEMO[:-1], *([] if config is None else ["--config", str(config)]), DEMO[-1], *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)


@pytest.mark.stress
def test_the_demo_kills_its_node_and_loses_nothing(tmp_path: Path) -> None:
    done = run("--seconds", "4", "--hogs", "4", "--json", "--store", str(tmp_path / "store"))
    assert done.returncode == 0, done.stdout + done.stderr
    *progress, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert set(last) >= KEYS
    assert last["passed"] is True
    assert last["accepted"] == last["finished"] > 20
    assert (last["lost"], last["duplicates"], last["kills"]) == (0, 0, 1)
    assert last["urgent_p50_us"] > 0 and last["urgent_runs"] > 0
    assert all(rate > 0 for rate in last["runs_per_s_by_tier"]), "a tier did nothing"
    assert last["preemptions"] > 0
    assert {line["kills"] for line in progress} == {0, 1}


@pytest.mark.stress
def test_hogs_that_are_native_processes(tmp_path: Path) -> None:
    config = tmp_path / "agentrt.toml"
    config.write_text("[process]\nallow_unsandboxed = true\n")
    done = run("--backend", "process", "--seconds", "4", "--hogs", "4", "--json", config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["lost"], last["duplicates"], last["kills"]) == (0, 0, 1)
    assert last["runs_per_s_by_tier"][3] > 0


@pytest.mark.stress
def test_the_live_view_says_what_a_person_wants_to_know(tmp_path: Path) -> None:
    (tmp_path / "agentrt.toml").write_text(f"[wasm]\ncache_path = '{tmp_path / 'modules'}'\n")
    done = run("--seconds", "2", "--hogs", "2", config=tmp_path / "agentrt.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("urgent latency", "preemptions", "lost 0, duplicates 0", "node kills 1"):
        assert words in done.stdout
    assert any((tmp_path / "modules").iterdir()), "the node has not read the settings"


@pytest.mark.parametrize("options", [("--seconds", "0"), ("--hogs", "-1"), ("--seconds", "soon")])
def test_options_out_of_range_start_nothing(options: tuple[str, str]) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert options[0] in done.stderr
