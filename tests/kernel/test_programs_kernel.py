"""Agents as programs in real leaves: memory that is used up ends one run; what a program has started goes with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel


def test_memory_ends_one_run_with_its_numbers_and_nothing_stays() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("program_node.py"))], capture_output=True, text=True, timeout=330
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    message = said["greedy"]["error"]["message"]
    assert said["greedy"]["state"] == "FAILED"
    assert "memory.max 100663296" in message and "killed by the kernel" in message, said["greedy"]
    assert "oom_kill 0" not in message, "numbers of the kernel"
    assert said["leaves"]["state"] == "SUCCEEDED"
    assert said["greedy"]["left"] == said["leaves"]["left"] == 0, "a session of its own is no way out"
    assert said["bystander"] == "unharmed", "one call ends, not its neighbours"
    assert said["statistics"]["evictions"] == 0, "an OOM kill is the run's own end"
