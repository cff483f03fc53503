"""What all child processes of a node have in common, on both sides of exec."""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def import_path() -> list[str]:
    """sys.path with relative parts made absolute: a child may be started from elsewhere."""
    return [os.path.abspath(part) if part else os.getcwd() for part in sys.path]


def child_environment() -> dict[str, str]:
    """The environment in which ``python -P -m agentrt.…`` finds what this process finds, installed or not."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(import_path())}


def die_with_parent(parent_pid: int) -> None:
    """In the child: be killed when the *thread* that started it ends; end now if its process has already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


def exit_status(ended: os.waitid_result) -> int:
    """As subprocess has it: negative for a signal."""
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def describe_status(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "status not known"
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def enter_leaf(fd: int) -> None:
    """In the child: go into the cgroup behind this descriptor of its cgroup.procs, which is closed."""
    try:
        os.write(fd, b"0")
    except OSError as error:
        print(f"a host runs outside its cgroup: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os.close(fd)
