"""deploy/systemd under a real systemd: a node divides the group that it is given, comes back, and leaves nothing."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
GROUP = Path("/sys/fs/cgroup/systemd-test")
UNIT = "agentrt@1.service"

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SYSTEMD.exists(), reason="no systemd"),
]


class Systemd:
    """A booted one. What is asked of it is asked in its namespaces."""

    def __init__(self, log: Path) -> None:
        self.log = log
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "BASE": sys.base_prefix,
            "VERSION": f"{sys.version_info[0]}.{sys.version_info[1]}",
            "LIBRARIES": sysconfig.get_paths()["purelib"],
            "SOURCE": str(ROOT),
        }
        GROUP.mkdir()

        def enter() -> None:
            (GROUP / "cgroup.procs").write_text("0")

        boot = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--cgroup"]
        with log.open("wb") as out:
            self._outer = subprocess.Popen(
                [*boot, "sh", Path(__file__).with_name("systemd_boot.sh"), UNIT],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=enter,
            )
        self._first = 0
        until(self._is_up, "systemd has booted", self)

    def _is_up(self) -> bool:
        assert self._outer.poll() is None, self.log.read_text(errors="replace")
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        if not children:
            return False
        if not self._first:
            self._first = int(children[0])
            (GROUP.parent / "cgroup.procs").write_text(str(self._outer.pid))
        return self.ask("is-active", "test.target") == "active"

    def ask(self, *words: str, timeout_s: float = 60) -> str:
        """What systemctl says."""
        inside = ["nsenter", "-t", str(self._first), "-m", "-p", "-C"]
        done = subprocess.run(
            [*inside, "systemctl", "--no-pager", *words], capture_output=True, text=True, timeout=timeout_s
        )
        return (done.stdout + done.stderr).strip()

    def show(self, name: str) -> str:
        return self.ask("show", "--value", "-p", name, UNIT)

    def said(self) -> str:
        """What the node wrote, and systemd."""
        log = Path(f"/proc/{self._first}/root/run/log-{UNIT}")
        return (log.read_text() if log.exists() else "") + self.log.read_text(errors="replace")

    def stop(self) -> None:
        self._outer.kill()
        self._outer.wait()
        until(lambda: removed(GROUP), "its group is gone", None)


def removed(group: Path) -> bool:
    (group / "cgroup.kill").write_text("1")
    for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
        try:
            folder.rmdir()
        except OSError:
            return False
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def until(condition: Callable[[], bool], what: str, systemd: Systemd | None, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not so: {what}; {'' if systemd is None else systemd.said()[-4000:]}")
        time.sleep(0.2)


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("needs unshare, and root")
    booted = Systemd(tmp_path / "systemd.log")
    yield booted
    booted.stop()


def test_a_node_is_a_service_that_divides_its_group_and_comes_back(systemd: Systemd) -> None:
    systemd.ask("start", "--no-block", UNIT)
    until(lambda: systemd.show("ActiveState") == "active", "it is ready", systemd)
    group = GROUP / systemd.show("ControlGroup").lstrip("/")
    first = systemd.show("MainPID")
    assert (group / "node" / "cgroup.procs").read_text(), "the node has moved aside"
    given = set((group / "cgroup.subtree_control").read_text().split())
    assert {"cpu", "memory", "pids"} <= given, systemd.said()
    assert systemd.show("User") == "agentrt"

    systemd.ask("kill", "--kill-whom=main", "-s", "KILL", UNIT)
    until(
        lambda: systemd.show("ActiveState") == "active" and systemd.show("MainPID") not in ("0", first),
        "it has been started again",
        systemd,
    )
    assert systemd.show("NRestarts") == "1"

    systemd.ask("stop", UNIT, timeout_s=300)
    assert systemd.show("ActiveState") == "inactive" and systemd.show("Result") == "success", systemd.said()
    assert not group.exists() or not (group / "cgroup.procs").read_text()
