"""The README's first agent does what the README says: run, and run again from its store."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_first_agent(tmp_path: Path) -> None:
    (program,) = blocks("python")
    (tmp_path / "hello.py").write_text(program)
    for _ in range(2):  # the second time the idempotency key gives the run there is
        done = subprocess.run([sys.executable, "hello.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "hello, world\n"), done.stderr
    agentrt = [sys.executable, "-c", "from agentrt.cli.main import main; main()"]
    listing = [*agentrt, "runs", "ls", "--store", "runs", "--json"]
    done = subprocess.run(listing, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    (run,) = map(json.loads, done.stdout.splitlines())
    assert (run["agent"], run["state"], run["base_tier"]) == ("hello", "SUCCEEDED", 0)


def test_the_commands_are_those_promised() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert "pip install . && agentrt demo" in commands
    assert "pip install '.[test]' && python -m pytest -q" in commands
    assert "python -m pytest -q" in (ROOT / ".ci" / "run").read_text().replace('"$venv/bin/python"', "python")
