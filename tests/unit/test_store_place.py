import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrt.errors import StoreInUseError, StorePlaceError
from agentrt.stores import place
from agentrt.stores.lock import FolderLock

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:30 / /mnt/nfs rw,relatime shared:2 master:1 - nfs4 host:/x rw
31 30 8:1 / /mnt/nfs/local rw - xfs /dev/sda rw
32 27 0:33 / /mnt/with\\040space rw - fuse.sshfs host: rw
33 27 0:34 / /over rw - ext4 /dev/vdb rw
34 33 0:35 / /over rw - overlay overlay rw
35 27 0:36 / /win rw - fuseblk /dev/sdb rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/store", "ext4"),
        ("/", "ext4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs/a/b", "nfs4"),
        ("/mnt/nfsx", "ext4"),
        ("/mnt/nfs/local/s", "xfs"),
        ("/mnt/with space/s", "fuse.sshfs"),
        ("/over/s", "overlay"),  # the later mount is on top
        ("/win/s", "fuseblk"),
        ("/mnt/nfs/local/../x", "nfs4"),
    ],
)
def test_the_innermost_and_latest_mount_counts(path: str, kind: str) -> None:
    assert place.file_system_of(Path(path), MOUNTS) == kind


def test_this_machines_mounts_can_be_read() -> None:
    assert place.file_system_of(Path("/proc/self")) == "proc"
    assert place.file_system_of(Path("/nowhere"), "") is None


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "overlay", "fuse", "fuse.sshfs", "virtiofs"]
)
def test_fault_D21_network_and_overlay_file_systems_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "file_system_of", lambda path: kind)
    with pytest.raises(StorePlaceError, match=kind):
        place.check_place(Path("/x"))


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "fuseblk", None])
def test_local_file_systems_are_not(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "file_system_of", lambda path: kind)
    place.check_place(Path("/x"))


def test_one_holder_in_one_process(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(StoreInUseError, match=str(os.getpid())):
        FolderLock(tmp_path)
    with pytest.raises(StoreInUseError):  # the refused attempt did not drop the lock
        _in_child(tmp_path)
    lock.release()
    again = FolderLock(tmp_path)
    again.release()


def test_fault_M58_the_holder_in_another_process_is_named(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from agentrt.stores.lock import FolderLock;"
        "lock = FolderLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreInUseError, match=f"process {holder.pid}"):
            FolderLock(tmp_path)
        holder.kill()
        holder.wait()
    FolderLock(tmp_path).release()


def test_a_child_that_outlives_the_holder_does_not_hold_the_lock(tmp_path: Path) -> None:
    """Hosts are forked, and one that hangs must not keep the next node out."""
    program = (
        "import os, sys, pathlib, signal; from agentrt.stores.lock import FolderLock;"
        "lock = FolderLock(pathlib.Path(sys.argv[1])); child = os.fork();\n"
        "if child == 0: signal.pause()\n"
        "print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    read, write = os.pipe()
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=write)
    os.close(write)
    holder.wait()
    child = int(os.read(read, 20))
    os.close(read)
    try:
        FolderLock(tmp_path).release()
    finally:
        os.kill(child, 9)


def _in_child(folder: Path) -> None:
    program = "import sys, pathlib; from agentrt.stores.lock import FolderLock; FolderLock(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    if "StoreInUseError" in done.stderr:
        raise StoreInUseError(done.stderr)
    assert done.returncode == 0, done.stderr
