"""A confined native process: whatever it tries to reach is refused, and nothing of it stays."""

import asyncio
import gc
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from command_kit import begin, escapes, launcher_with, public_folder, run

from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.settings import ProcessConfig
from agentrt.cgroup.tree import started
from agentrt.sandbox import SandboxError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def program() -> Iterator[Path]:
    with escapes() as built:
        yield built


def attempt(program: Path, *argv: object, **more: object) -> str:
    """What the program says of its attempt."""

    async def go() -> str:
        async with launcher_with() as launcher:
            if launcher.refusal is not None:
                pytest.skip(f"nothing can be confined here: {launcher.refusal.message}")
            ended, text = await run(launcher, program, *argv, read=(str(program),), **more)
            assert ended.error is None and ended.status == 0, (ended, text)
            return text.strip()

    return uvloop.run(go())


PERMISSION = {"refused EPERM", "refused EACCES"}


@pytest.mark.parametrize(
    ("what", "allowed"),
    [
        ("packet", PERMISSION),
        ("vsock", PERMISSION),
        ("alg", PERMISSION),
        ("userns", PERMISSION),
        ("clone_userns", PERMISSION),
        ("clone3", {"refused ENOSYS"}),
        ("mount", PERMISSION),
        ("umount", PERMISSION),
        ("chroot", PERMISSION),
        ("setuid", PERMISSION | {"refused EINVAL"}),
        ("nice", PERMISSION),
        ("core", {"refused EINVAL"}),
        ("io_uring", PERMISSION),
        ("bpf", PERMISSION),
        ("keyctl", PERMISSION),
        ("shmget", PERMISSION),
        ("new_call", {"refused ENOSYS"}),
        ("tty", PERMISSION),
        ("tty_high", PERMISSION),
    ],
)
def test_doors_into_the_kernel_are_shut(program: Path, what: str, allowed: set[str]) -> None:
    assert attempt(program, what) in allowed


def test_network(program: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert attempt(program, "connect", port) in PERMISSION | {"refused ECONNREFUSED", "refused ENETUNREACH"}
        assert attempt(program, "connect", port, network=True) == "done 0"


def test_abstract_sockets_of_the_node(program: Path) -> None:
    name = f"agentrt-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        assert attempt(program, "abstract", name) in PERMISSION | {"refused ECONNREFUSED"}


@pytest.mark.parametrize("what", ["ptrace", "peek", "kill"])
def test_the_node(program: Path, what: str) -> None:
    assert attempt(program, what, os.getpid()) in PERMISSION | {"refused ESRCH"}


def test_signals_to_everybody_reach_nobody_outside(program: Path) -> None:
    """Under its uid and in its namespace there is nobody else."""
    child = os.fork()
    if not child:
        while True:
            os.sched_yield()
    try:
        attempt(program, "kill_all")
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("what", "path"),
    [
        ("read", "/etc/passwd"),
        ("read", "/proc/self/environ"),
        ("read", "/proc/{node}/environ"),
        ("read", "/sys/kernel/vmcoreinfo"),
        ("list", "/proc"),
        ("list", "/"),
        ("list", "/tmp"),
        ("list", ".."),
        ("list", "/sys/fs/cgroup"),
        ("write", "/tmp/agentrt-escape"),
        ("write", "/dev/shm/agentrt-escape"),
        ("write", "/usr/agentrt-escape"),
        ("write", "/dev/kmsg"),
    ],
)
def test_files(program: Path, what: str, path: str) -> None:
    said = attempt(program, what, path.format(node=os.getpid()))
    assert said in PERMISSION | ({"refused ENOENT"} if "/sys/kernel" in path else set())
    assert not Path("/tmp/agentrt-escape").exists()


def test_paths_that_are_granted(program: Path) -> None:
    with public_folder() as folder:
        (folder / "data").write_text("x")
        granted = (str(program), str(folder))
        with pytest.raises(AssertionError):  # `attempt` looks at the exit status: its own program may not be read
            attempt_with(program, "read", folder / "data", read=())
        assert attempt_with(program, "read", folder / "data", read=granted).startswith("done")
        assert attempt_with(program, "write", folder / "new", read=granted) in PERMISSION
        folder.chmod(0o777)
        assert attempt_with(program, "write", folder / "new", read=granted, write=(str(folder),)).startswith("done")
        assert (folder / "new").exists()
        assert attempt_with(program, "unlink", folder / "data", read=granted) in PERMISSION


def attempt_with(program: Path, *argv: object, **more: object) -> str:
    async def go() -> str:
        async with launcher_with() as launcher:
            if launcher.refusal is not None:
                pytest.skip(f"nothing can be confined here: {launcher.refusal.message}")
            ended, text = await run(launcher, program, *argv, **more)
            assert ended.error is None and ended.status == 0, (ended, text)
            return text.strip()

    return uvloop.run(go())


def test_descriptors_of_the_node(program: Path) -> None:
    with tempfile.TemporaryFile() as leaked:
        os.set_inheritable(leaked.fileno(), True)
        os.dup2(leaked.fileno(), 2000, inheritable=True)
        try:
            assert attempt(program, "fds") == "0 1 2"
        finally:
            os.close(2000)


def test_a_fork_bomb(program: Path) -> None:
    async def go() -> None:
        async with launcher_with(pids_max=20) as launcher:
            if launcher.refusal is not None:
                pytest.skip(f"nothing can be confined here: {launcher.refusal.message}")
            _, text = await run(launcher, program, "bomb", read=(str(program),))
            assert text.startswith("refused EAGAIN after ")
            assert int(text.split()[3]) < 20
            # Who ran it has all its processes again.
            ended, _ = await run(launcher, program, "fds", read=(str(program),))
            assert ended.status == 0

    uvloop.run(go())


def test_a_full_folder(program: Path) -> None:
    async def go() -> None:
        async with launcher_with(folder_bytes_max=1 << 20, folder_files_max=50) as launcher:
            if launcher.refusal is not None:
                pytest.skip(f"nothing can be confined here: {launcher.refusal.message}")
            _, text = await run(launcher, program, "fill", "big", read=(str(program),))
            assert text.split()[1] in ("ENOSPC", "EFBIG")
            assert int(text.split()[3]) <= 1 << 20
            if launcher.means.tmpfs:
                _, text = await run(launcher, program, "files", read=(str(program),))
                assert text.split()[1] == "ENOSPC"
                assert int(text.split()[3]) < 50

    uvloop.run(go())


def test_where_nothing_confines_nothing_is_started(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security boundaries refuse; they do not degrade."""

    async def go(allow: bool) -> str:
        async with launcher_with(allow_unsandboxed=allow) as launcher:
            launcher.means = type(launcher.means)(why="no landlock: for this test")
            ended, text = await run(launcher, program, "read", "/etc/passwd")
            return text.strip() if ended.error is None else str(ended.error)

    with pytest.raises(SandboxError, match="for this test"):
        uvloop.run(go(False))
    assert uvloop.run(go(True)).startswith("done")


def test_what_is_started_before_it_is_known_how_waits_for_that(program: Path) -> None:
    """With a boundary less than there could be nothing is started, not even where that is allowed."""

    async def go() -> None:
        launcher = Launcher(asyncio.get_running_loop(), ProcessConfig(allow_unsandboxed=True))
        launcher.open_soon()
        try:
            first = begin(launcher, program, "read", "/etc/passwd", read=(str(program),))
            ended, text = await first.output()
            assert ended.error is None
            if not launcher.means.why:
                assert text.strip() in PERMISSION
        finally:
            await launcher.close()

    uvloop.run(go())


def test_an_open_launcher_leaves_nothing_behind(program: Path) -> None:
    async def go() -> None:
        async with launcher_with() as launcher:
            if launcher.refusal is not None:
                pytest.skip(f"nothing can be confined here: {launcher.refusal.message}")
            await asyncio.gather(
                *(run(launcher, program, "fds", domain=f"d{n}", read=(str(program),)) for n in range(9))
            )

    uvloop.run(go())
    gc.collect()
    before = left()
    uvloop.run(go())
    gc.collect()
    assert left() == before


def left() -> tuple[int, int]:
    """Descriptors of this process, and folders of its launchers."""
    folders = list(Path(tempfile.gettempdir()).glob(f"agentrt-processes-{os.getpid()}-*"))
    return len(os.listdir("/proc/self/fd")), len(folders)


def test_what_a_killed_node_left_is_removed_by_the_next() -> None:
    mine = Path(tempfile.gettempdir()) / f"agentrt-processes-{os.getpid()}-{started(os.getpid())}-test"
    gone = Path(tempfile.gettempdir()) / "agentrt-processes-2147483646-17-test"
    for folder in (mine, gone):
        (folder / "call-x").mkdir(parents=True)

    async def go() -> None:
        async with launcher_with():
            pass

    uvloop.run(go())
    assert mine.exists() and not gone.exists()
    shutil.rmtree(mine)


def test_a_launcher_that_was_never_opened_may_be_closed() -> None:
    async def go() -> None:
        await Launcher(asyncio.get_running_loop(), ProcessConfig()).close()

    uvloop.run(go())
