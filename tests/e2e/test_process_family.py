"""Without a cgroup and without a process namespace: what a process starts ends and stops with it all the same."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command_kit import Running, begin, launcher_with, run
from tool_kit import wait_until

from agentrt.backends.process.family import Family

pytestmark = pytest.mark.timeout(120)

#: A daemon by the book: its parent is gone, it has a session of its own, and it heeds no signal that can be ignored.
DAEMON = "(setsid sh -c \"trap '' TERM HUP INT; env -i sleep {marker}; true\" </dev/null >/dev/null 2>&1 &)"
UNMARKED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_RTTIME, (1, 1))
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for fd in range(3):
    os.close(fd)
os.execv("/bin/sleep", ["sleep", sys.argv[1]])
"""


@pytest.fixture
def marker() -> Iterator[str]:
    text = f"{79_000_000 + os.getpid()}"
    yield text
    for pid in sleepers(text):  # of a test that has failed
        os.kill(pid, signal.SIGKILL)


def sleepers(marker: str) -> list[int]:
    return [pid for pid, line in processes() if line == f"sleep\0{marker}\0"]


def processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                yield int(entry.name), (entry / "cmdline").read_text()
            except OSError:
                continue


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def alone(*argv: str, then: Callable[[Running], object] | None = None) -> tuple[int, str]:
    """Run it where nothing holds it together: its status, and what it wrote."""

    async def go() -> tuple[int, str]:
        async with launcher_with(cgroup="none", allow_unsandboxed=True) as launcher:
            running = begin(launcher, *argv, confined=False)
            await running.started.wait()
            assert running.process.leaf is None and running.process.family is not None
            if then is not None:
                await then(running)  # type: ignore[misc]
            ended, text = await running.output()
            return ended.status, text

    return asyncio.run(go())


def test_a_daemon_is_gone_when_the_process_has_ended(marker: str) -> None:
    wait = f"until pgrep -f '^sleep {marker}' >/dev/null; do sleep 0.01; done"
    status, text = alone("sh", "-c", f"{DAEMON.format(marker=marker)}; {wait}; echo over")
    assert (status, text) == (0, "over\n")
    assert sleepers(marker) == []


@pytest.mark.parametrize("script", ["marked", "unmarked"])
def test_a_killed_process_takes_its_daemons_along(marker: str, script: str) -> None:
    async def then(running: Running) -> None:
        await wait_until(lambda: len(sleepers(marker)) == 1, "it sleeps")
        running.process.kill()

    if script == "marked":
        argv = ["sh", "-c", f"{DAEMON.format(marker=marker)}; sleep 1000; true"]
    else:  # it has taken off what all bear, and is found beneath who started it
        hides = f"subprocess.run([sys.executable, '-c', {UNMARKED!r}, sys.argv[1]])"
        argv = [sys.executable, "-c", f"import subprocess, sys, time; {hides}; time.sleep(1000)", marker]
    status, _ = alone(*argv, then=then)
    assert status == -signal.SIGKILL
    assert sleepers(marker) == []


def test_daemons_stop_and_go_on_with_the_process(marker: str) -> None:
    async def then(running: Running) -> None:
        await wait_until(lambda: len(sleepers(marker)) == 1, "it sleeps")
        (pid,) = sleepers(marker)
        running.process.freeze()
        await wait_until(lambda: state(pid) == state(running.process.pid) == "T", "both stand still")
        running.process.thaw()
        await wait_until(lambda: "T" not in (state(pid), state(running.process.pid)), "both go on")
        running.process.kill()

    alone("sh", "-c", f"{DAEMON.format(marker=marker)}; sleep 1000; true", then=then)
    assert sleepers(marker) == []


def test_others_are_left_alone(marker: str) -> None:
    """Two processes of one launcher, and a child of the node's own."""
    other = subprocess.Popen(["sleep", "1000"])

    async def go() -> None:
        async with launcher_with(cgroup="none", allow_unsandboxed=True) as launcher:
            kept = begin(launcher, "sh", "-c", f"{DAEMON.format(marker=marker)}; sleep 1000; true", confined=False)
            await wait_until(lambda: len(sleepers(marker)) == 1, "it sleeps")
            for _ in range(5):
                ended, _ = await run(launcher, "sh", "-c", "(setsid sleep 1000 &); true", confined=False)
                assert ended.status == 0
            assert len(sleepers(marker)) == 1 and not kept.ended.done() and other.poll() is None
            kept.process.kill()
            await kept.output()

    try:
        asyncio.run(go())
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert sleepers(marker) == []


def test_a_number_that_has_become_anothers_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It bore the mark when it was looked for, and is somebody else when it is signalled."""
    family, other = Family(), subprocess.Popen(["sleep", "1000"])
    seen: list[int] = []

    def members(pid: int = 0) -> list[int]:
        seen.append(pid)
        return [other.pid] if len(seen) == 1 else []

    monkeypatch.setattr(family, "members", members)
    try:
        assert family.end()
        assert other.poll() is None and len(seen) >= 2
    finally:
        other.kill()
        other.wait()


def test_a_storm_of_forks_is_ended() -> None:
    """Each starts two in sessions of their own; there are never more than the bound of processes allows."""

    families = []

    async def then(running: Running) -> None:
        family = running.process.family
        assert family is not None
        families.append(family)
        await wait_until(lambda: len(family.members()) > 8, "they spread")
        running.process.kill()

    storm = (
        "i=0; while :; do setsid sh -c 'sleep 0.2; setsid sleep 5 & setsid sleep 5 &' & i=$((i+1)); sleep 0.01; done"
    )
    status, _ = alone("sh", "-c", storm, then=then)
    assert status == -signal.SIGKILL and families[0].members() == []


def test_the_mark_is_a_bound_that_a_process_cannot_raise(marker: str) -> None:
    script = "import resource; print(*resource.getrlimit(resource.RLIMIT_RTTIME))"
    status, text = alone(sys.executable, "-c", script)
    soft, hard = map(int, text.split())
    assert status == 0 and soft == hard >= 1 << 61
    assert resource.getrlimit(resource.RLIMIT_RTTIME)[0] != soft
