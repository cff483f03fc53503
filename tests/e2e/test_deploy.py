"""deploy/: units that systemd takes and that start a node, and settings that kernels have and the page explains."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrt.cli.serve import command as serve_command
from agentrt.config import load_config

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
SYSCTL = ROOT / "deploy" / "sysctl.d" / "agentrt.conf"
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def settings(unit: Path) -> list[tuple[str, str]]:
    lines = (line for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#"))
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_unit_and_finds_it_hardened(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")
    name = unit.name.replace("@", "@1")
    # systemd looks for the program, too
    (tmp_path / name).write_text(unit.read_text().replace("/opt/agentrt/bin/agentrt", shutil.which("true") or ""))
    for command in (["verify"], ["security", "--offline=true", "--threshold=40", "--no-pager"]):
        done = subprocess.run([analyze, *command, f"./{name}"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        if command == ["verify"]:
            assert not done.stderr, "an unknown setting is only a warning"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_unit_starts_a_node(unit: Path) -> None:
    """Its command line and its environment are what agentrt understands; what isolates processes is left possible."""
    found = settings(unit)
    ((_, line),) = [setting for setting in found if setting[0] == "ExecStart"]
    words = line.replace("%i", "1").split()[1:]
    config, serve = words[words.index("--config") + 1], words[words.index("serve") + 1 :]
    assert config == "/etc/agentrt/node.toml"
    with serve_command.make_context("serve", serve) as context:
        assert context.params["numa_node"] == ("1" if "@" in unit.name else None)
    variables = dict(value.split("=", 1) for name, value in found if name == "Environment")
    load_config(env={name: value.replace("%i", "1") for name, value in variables.items()})
    values = dict(found)
    assert values["OOMPolicy"] == "continue", "the end of one process must not end the node"
    assert {"cpu", "cpuset", "memory", "pids"} <= set(values["Delegate"].split())
    assert not {"MemoryDenyWriteExecute", "ProtectControlGroups", "RestrictNamespaces"} & values.keys()
    assert values["Type"] == "notify" and int(values["WatchdogSec"]) > 0


def test_the_kernel_has_the_settings_that_the_page_explains() -> None:
    wanted = dict(re.findall(r"^([a-z_.]+) = (\d+)$", SYSCTL.read_text(), re.MULTILINE))
    explained = dict(re.findall(r"^\| `([a-z_.]+) = (\d+)` \|", PAGE, re.MULTILINE))
    assert wanted and explained == wanted
    if sys.platform == "linux":
        for name in wanted.keys() - {"kernel.numa_balancing"}:  # not in every kernel
            assert Path("/proc/sys", *name.split(".")).exists(), name
