"""docs/models.md: its configuration is one, its program runs, and its codes are those there are."""

import re
import subprocess
import sys
from pathlib import Path

from agentrt.config import load_config
from agentrt.models.catalog import Catalog
from agentrt.models.context import STRATEGIES
from agentrt.models.messages import decode_request

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
CODE = Path(__file__).parents[2] / "agentrt" / "models"


def test_the_configuration_is_one(tmp_path: Path) -> None:
    ((name, text),) = re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / name).write_text(text)
    catalog = Catalog.of(load_config(tmp_path / name, env={}).models)
    plan = catalog.plan(decode_request(b'{"profile":"work","messages":[],"task":"report"}'), tenant="any", tier=1)
    assert (plan.profile, plan.tier, [each.name for each in plan.candidates]) == ("night", 2, ["small"])


def test_the_program_runs(tmp_path: Path) -> None:
    ((name, text),) = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "Sunny (42 tokens)\n"), done.stderr


def test_codes_and_strategies_are_all_there() -> None:
    told = set(re.findall(r"`(model_\w+)`", PAGE.partition("## When a call fails")[2]))
    made = {code for file in CODE.glob("*.py") for code in re.findall(r'"(model_[a-z_]+)"', file.read_text())}
    assert told == made - {"model_profiles"}  # which is a pin
    assert set(re.findall(r"`(\w+@\d+)`", PAGE)) == set(STRATEGIES)
