"""docs/plugins: the first plugin is written outside the repository as its page says, installed, loaded and tested."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentrt import hooks
from agentrt.config import load_config
from agentrt.manual import named

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "plugins"
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of a page's code blocks."""
    return _BLOCK.findall((DOCS / page).read_text())


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """An environment in which the page's commands mean what they say, on a throw-away place for packages."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    site = tmp_path / "site"
    commands = {
        "agentrt": f"exec {sys.executable} -c 'from agentrt.cli.main import main; main()' \"$@\"",
        "python": f'exec {sys.executable} "$@"',
        # Nothing is fetched: what the package depends on is there.
        "pip": f'exec {sys.executable} -m pip "$@" -q --no-deps --no-build-isolation --target {site}',
    }
    for name, command in commands.items():
        (binaries / name).write_text(f"#!/bin/sh\n{command}\n")
        (binaries / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": f"{site}:{ROOT}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@pytest.mark.timeout(300)
def test_the_first_plugin_is_what_its_page_says(tmp_path: Path, outside: dict[str, str]) -> None:
    place = tmp_path / "acme"
    place.mkdir()
    printed: dict[str, str] = {}
    for language, text in blocks("first-plugin.md"):
        if language in ("python", "toml"):
            name = re.match(r"# (\S+)\n", text)
            assert name is not None, text
            (place / name[1]).write_text(text)
            continue
        assert language == "sh"
        for command in text.splitlines():
            done = subprocess.run(
                ["sh", "-c", command], cwd=place, env=outside, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            printed[command] = done.stdout
    assert "acme-allow:allow" in printed["agentrt plugins ls"]
    shown = printed["agentrt plugins show acme-allow"]
    assert "policy: allow" in shown and "[plugins.allow]\n# Which tenant may start which agents." in shown
    assert " passed" in printed["python -m pytest -q -p no:faulthandler"]
    assert printed["python try_it.py"] == "Hooli is worth a call\n"
    # The file that the page shows is what decides.
    (place / "node.toml").write_text((place / "node.toml").read_text().replace('["qualifier"]', "[]"))
    done = subprocess.run(["python", "try_it.py"], cwd=place, env=outside, capture_output=True, text=True, timeout=60)
    assert "default may not start qualifier" in done.stdout, done.stderr


def test_settings_in_the_pages_are_settings(tmp_path: Path) -> None:
    for language, text in blocks("ingress.md"):
        if language == "toml":
            tomllib.loads(text)
            (tmp_path / "node.toml").write_text(text)
            assert load_config(tmp_path / "node.toml", env={}).ingress.sources


def test_the_manual_names_what_there_is() -> None:
    for facts in hooks.FACTS.values():
        for reference in (*facts.contract, *((facts.suite,) if facts.suite else ())):
            assert named(reference) is not None
    page = (DOCS / "hooks.md").read_text()
    assert "0x" not in page and " object at " not in page
