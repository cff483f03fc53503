"""Hosts of Python agents, and of tools, as users of their own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agentrt import tempfolders, users
from agentrt.config import PythonConfig
from agentrt.tools.users import HostUsers
from agentrt.users import open_to_all

pytestmark = pytest.mark.timeout(120)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASE = PythonConfig().uid_base


def python_of_everybody() -> str | None:
    """This interpreter, or the system's if it is the same version and root alone may read this one."""
    if open_to_all(Path(sys.base_prefix)):
        return sys.executable
    found = shutil.which("python3", path="/usr/bin:/bin")
    if found is None:
        return None
    version = subprocess.run([found, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
    return found if version.stdout.split() == [str(part) for part in sys.version_info[:2]] else None


def said_by(script: str, *arguments: str, timeout_s: float = 110) -> Any:
    """What a node of root says that any user may read."""
    python = python_of_everybody()
    packages = sysconfig.get_paths()["purelib"]
    if python is None or not (open_to_all(ROOT) and open_to_all(Path(packages))):
        pytest.skip("root alone may read Python, or this checkout")
    done = subprocess.run(
        [python, str(HERE / script), *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{packages}"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_host_is_nobody_else_if_any_user_may_read_what_it_needs() -> None:
    said = said_by("own_uid_node.py")
    assert said["said"] == "1/7"
    own = [f"{uid}\t{uid}\t{uid}\t{uid}" for uid in (BASE, BASE + 1)]
    assert said["hosts"] == [[each, each, ""] for each in own]


def test_what_root_alone_may_read_is_not_open_to_all(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir(mode=0o755)
    (folder / "agents.py").write_text("")
    assert open_to_all(Path("/usr/lib")) and open_to_all(tmp_path / "gone")
    assert not open_to_all(folder / "agents.py"), "the folders of pytest are its user's alone"
    (folder / "link").symlink_to("/usr/lib")
    assert not open_to_all(folder / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_no_two_hosts_that_live_have_the_same() -> None:
    first, second = users.take(7), users.take(7)
    users.give(first)
    third, other = users.take(7), users.take(70)
    for uid in (second, third, other):
        users.give(uid)
    assert (first, second, third, other, users.take(0)) == (7, 8, 7, 70, 0)


TOOLS_BASE = 1_960_000_000


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("template", ["import", "exec"])
def test_a_host_of_tools_is_nobody_else_at_home_in_its_own_folder(template: str) -> None:
    said = said_by("own_uid_tool_node.py", template, str(TOOLS_BASE))
    assert said["mode"] == template
    users_of = {}
    for tenant, (plain, looped, heard) in said["said"].items():
        assert heard == "the right one", "its secret, through a socket"
        assert plain.pop("third") == "1/3"
        assert plain == looped, "the worker of a host is as its host"
        (uid,) = set(plain["uid"])
        assert TOOLS_BASE <= uid < TOOLS_BASE + users.USERS and plain["groups"] == []
        assert plain["home"] == plain["folder"] == plain["temporary"] and plain["mode"] == "0o700"
        users_of[tenant] = uid
    assert len(set(users_of.values())) == 2, "tenants are nobody to each other"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_root_alone_may_read_starts_no_host_as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrt.tools.users.users.open_to_all", lambda path: False)
    with pytest.raises(OSError, match="only its owner may read"):
        HostUsers().take(TOOLS_BASE)
    assert HostUsers().take(0) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_users_of_tool_hosts_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "_next", users.USERS - 2)
    taken = []
    for _ in range(3):
        taken.append(users.take_next(500))
        users.give(taken[-1])
    held = users.take(501)  # whoever lives keeps his
    monkeypatch.setattr(users, "_next", 0)
    taken.append(users.take_next(500))
    for uid in (held, taken[-1]):
        users.give(uid)
    assert [uid - 500 for uid in taken] == [users.USERS - 1, 0, 1, 2]
    assert users.take_next(0) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_that_a_killed_node_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.run(
        [sys.executable, "-c", "from agentrt import tempfolders; print(tempfolders.make('agentrt-tools-'))"],
        env=dict(os.environ, TMPDIR=str(tmp_path)), cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    left, ours = Path(gone.stdout.strip()), Path(tempfolders.make("agentrt-tools-"))
    other = tmp_path / "agentrt-tools"
    other.mkdir()
    (left / "home").mkdir()
    tempfolders.sweep("agentrt-tools-")
    assert not left.exists() and ours.is_dir() and other.is_dir()
