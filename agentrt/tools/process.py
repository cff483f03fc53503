"""Start and end of a tool host process, seen from the node."""

import os
import signal
import socket
import subprocess
import sys
from typing import Final

from agentrt.spawn import child_environment, import_path
from agentrt.tools.protocol import Init, ToolRef, encode_frame

#: Room for a full frame, so that a batch is one write.
_SOCKET_BUFFER_BYTES: Final = 1 << 20


class HostProcess:
    """A child in its own session with one inherited descriptor. Its pidfd is the only thing that waits for it.

    Must be started on a thread that lives as long as the host may: the kernel kills the child when that *thread* ends.
    """

    def __init__(self, nice: int) -> None:
        """Blocks for about a millisecond (vfork and exec). Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            ours.setblocking(False)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrt.tools.host", str(theirs.fileno()), str(os.getpid()), str(nice)],
                stdin=subprocess.DEVNULL,
                stdout=_error_stream(),
                stderr=_error_stream(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=child_environment(),  # the host puts back the node's own PYTHONPATH once it runs
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.socket = ours
        self.pid = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            ours.close()
            self._process.kill()
            self._process.wait()
            raise
        os.setpriority(os.PRIO_PROCESS, self.pid, nice)  # from its first instruction; it repeats this for itself

    def kill(self) -> None:
        """End it and what it started in its process group. It is not reaped yet, so the group's id is still its own."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # not its own leader yet: killed between fork and setsid
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """The exit status (negative: signal), or None while it lives. Ends what it left behind in its group."""
        if self._process.returncode is not None:
            return self._process.returncode
        if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.kill()
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._process.returncode = status  # tells subprocess that there is nothing left to wait for
        return status

    def close(self) -> None:
        """Let go of the descriptors. The process must be reaped or about to be by `wait`."""
        self.socket.close()
        os.close(self.pidfd)


def init_frame(tools: list[ToolRef], result_bytes_max: int, out_bytes_max: int, memory_bytes_max: int) -> bytearray:
    """The first frame for a host of this node."""
    path = os.environ.get("PYTHONPATH")
    return encode_frame(Init(import_path(), path, result_bytes_max, out_bytes_max, memory_bytes_max, tools))


def _error_stream() -> int:
    """What tools print goes to the node's standard error; its standard output belongs to its own results."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
