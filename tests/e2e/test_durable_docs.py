"""The program in docs/durable-runs.md runs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentrt import Context, agent, tool
from agentrt.agents.declare import agent_declaration_of

PAGE = Path(__file__).parents[2] / "docs" / "durable-runs.md"


def test_the_program_runs(tmp_path: Path) -> None:
    ((name, text),) = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "['packed A-1', 'shipped A-1']\n"), done.stderr


def test_the_upgrade_is_declared_as_shown() -> None:
    (text,) = re.findall(r"```python\n(@tool.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"agent": agent, "tool": tool, "Context": Context}
    exec(text, names)
    declared = agent_declaration_of(names["shop"])
    assert declared is not None and declared.migrate is names["renamed"]
    assert names["renamed"]({"items": [1]}, "v1") == {"orders": [1]}
