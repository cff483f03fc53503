"""The program in docs/durable-runs.md runs."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "durable-runs.md"


def test_the_program_runs(tmp_path: Path) -> None:
    ((name, text),) = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "['packed A-1', 'shipped A-1']\n"), done.stderr
