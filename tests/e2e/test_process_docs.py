"""The programs in docs/process-abi.md run."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from process_kit import IMPORTS
from runtime_tools import double

from agentrt import Command, Runtime, load_config
from agentrt.node.settings import AgentConfig
from agentrt.syscalls import TABLE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "process-abi.md").read_text(encoding="utf-8")


def snippet(name: str) -> str:
    (text,) = re.findall(rf"```(?:python|c)\n((?:# |/\* ){re.escape(name)}.*?)```", PAGE, re.DOTALL)
    return str(text)


def test_the_first_example_runs(tmp_path: Path) -> None:
    for name in ("total.py", "node.py"):
        (tmp_path / name).write_text(snippet(name))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = (tmp_path / "node.py").read_text().replace('"total.py")', f'"total.py"), environment=("{IMPORTS}",)')
    (tmp_path / "node.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "node.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "{'total': 12}\n"), done.stderr


def test_the_settings_are_some() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    config = load_config(arguments={"node.agents": tomllib.loads(text)["node"]["agents"]})
    settings = AgentConfig(**config.node.agents["total"])
    assert settings.preempt == "freeze" and settings.command[0] == "/usr/bin/python3"


@pytest.mark.parametrize("name", ["raw.py", "greet.c"])
def test_other_examples_run(name: str, tmp_path: Path) -> None:
    source = tmp_path / name
    source.write_text(snippet(name))
    command = Command((sys.executable, str(source)))
    if name.endswith(".c"):
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        subprocess.run(
            [compiler, "-Wall", "-Wextra", "-Werror", "-I", ROOT / "csrc", "-o", tmp_path / "greet", source], check=True
        )
        command = Command((str(tmp_path / "greet"),))
    config = load_config(arguments={"programs.confined": False})
    with Runtime(store=tmp_path / "store", config=config, tools=[double]) as runtime:
        runtime.register_sync("agent", command)
        assert runtime.submit_sync("agent", 21).result_sync(60) == 42


def test_the_page_names_the_ops_that_have_no_handle() -> None:
    assert all(f"`{row.op}`" in PAGE for row in TABLE if not row.step)
