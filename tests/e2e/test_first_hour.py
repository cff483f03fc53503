"""docs/first-hour.md, followed to the letter, and what its neighbours say."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_kit import BLOCK, DOCS, agrees, follow, program
from serve_kit import Serving, command_line

from agentrt.config import SECTIONS
from agentrt.settings import check_value

PAGE = DOCS / "first-hour.md"


@given(st.text("ab …\n", max_size=20))
def test_what_agrees(text: str) -> None:
    assert agrees("…", text) and agrees(text.replace("…", ""), text.replace("…", ""))
    assert not agrees("x" + text, text.replace("…", ""))


def test_the_first_hour(tmp_path: Path) -> None:
    assert follow(PAGE, tmp_path, [8420]) >= 15


def test_the_client_of_the_http_page(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(program(PAGE, "shop.py"))
    (tmp_path / "client.py").write_text(program(DOCS / "http.md", "client.py"))
    with Serving(tmp_path, f'[node]\nload = ["{tmp_path / "shop.py"}"]\n') as node:
        for _ in range(2):  # the key makes them one run
            done = subprocess.run(
                [sys.executable, "client.py"],
                cwd=tmp_path,
                env=os.environ | {"AGENTRT_URL": node.url, "AGENTRT_KEY": node.key},
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert done.returncode == 0, done.stderr
            lines = done.stdout.splitlines()
            assert (lines[0], lines[-1]) == ("1 accepted", "SUCCEEDED")
        with node.client() as client:
            assert len(client.runs().runs) == 1


def test_a_lost_key_is_made_anew(tmp_path: Path) -> None:
    with Serving(tmp_path, "[node]\n") as node:
        assert node.stop() == 0
    code, secret, err = command_line("keys", "recover", "--store", str(tmp_path / "store"))
    assert code == 0, err
    with Serving(tmp_path, "[node]\n", key=secret.strip()) as node, node.client() as client:
        assert len(client.keys().keys) == 2


def test_the_settings_of_the_operations_page_are_settings() -> None:
    (text,) = [text for language, text in BLOCK.findall((DOCS / "operations.md").read_text()) if language == "toml"]
    for section, table in tomllib.loads(text).items():
        for key, value in table.items():
            check_value(SECTIONS[section], key, value, "docs/operations.md")


@pytest.mark.parametrize("page", ["operations.md", "http.md"])
def test_the_commands_of_the_pages_exist(page: str) -> None:
    import click

    from agentrt.cli.main import group

    lines = [
        line
        for language, text in BLOCK.findall((DOCS / page).read_text())
        if language in ("sh", "ini")
        for line in text.splitlines()
        if re.search(r"agentrt (?!agentrt|&&|/)", line) and not line.startswith(("useradd ", "python3 -m venv "))
    ]
    for line in lines:
        words = line.partition("agentrt ")[2].replace("--config /etc/agentrt/node.toml ", "").split()
        command: click.Command = group
        context = click.Context(group)
        while isinstance(command, click.Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None, line
            command = found
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
