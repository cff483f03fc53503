"""What systemd is told: sd_notify's protocol, datagrams to the socket named by NOTIFY_SOCKET. Nothing elsewhere."""

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends to the service manager, if there is one. Failures are ignored: it may be gone, and the node works on."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        path = env.get("NOTIFY_SOCKET", "")
        self._address = ("\0" + path[1:]) if path.startswith("@") else path
        self._socket: socket.socket | None = None
        if self._address.startswith(("/", "\0")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        #: Seconds in which a sign of life is due; None: nobody asks.
        self.watchdog_s = _watchdog_s(env)

    def send(self, *lines: str) -> None:
        """As ``READY=1``, ``STOPPING=1``, ``WATCHDOG=1``, ``STATUS=…``."""
        if self._socket is not None:
            try:
                self._socket.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                pass

    def close(self) -> None:
        """Let go of the socket."""
        if self._socket is not None:
            self._socket.close()


def _watchdog_s(env: Mapping[str, str]) -> float | None:
    text, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(text) / 1e6
