"""Hosts of Python agents as users of their own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from agentrt.agents.confine import open_to_all
from agentrt.backends.python import uids
from agentrt.config import PythonConfig

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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_host_is_nobody_else_if_any_user_may_read_what_it_needs() -> None:
    python = python_of_everybody()
    packages = sysconfig.get_paths()["purelib"]
    if python is None or not (open_to_all(ROOT) and open_to_all(Path(packages))):
        pytest.skip("root alone may read Python, or this checkout")
    done = subprocess.run(
        [python, str(HERE / "own_uid_node.py")],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{packages}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
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
    first, second = uids.take(7), uids.take(7)
    uids.give(first)
    third, other = uids.take(7), uids.take(70)
    for uid in (second, third, other):
        uids.give(uid)
    assert (first, second, third, other, uids.take(0)) == (7, 8, 7, 70, 0)
