"""The template of tool hosts: ``python -m agentrt.tools.template FD NODE_PID NICE HELD_FD``, of a node's `HostStarter`.

A clean process with one thread that imports the tools' modules once; hosts are forked from it in a few milliseconds.
Forking is safe as long as importing left nothing behind that two processes must not share. If it left a thread or an
open descriptor, nothing is forked from this process: the node starts another that imports nothing, and hosts import for
themselves.
"""

import gc
import os
import socket
import stat
import sys
from typing import NoReturn

from agentrt import users
from agentrt.spawn import enter_leaf
from agentrt.tools.forking import Fork, Forker, Import
from agentrt.tools.host import enter_process, hold, serve_node, set_import_path
from agentrt.tools.loading import Loader


class _Template:
    def __init__(self) -> None:
        self._loader = Loader()

    def load(self, request: Import) -> str:
        set_import_path(request.sys_path, request.environment_path)
        before = _descriptors()
        for ref in request.tools:
            self._loader.load(ref)  # a failure is a host's to report: it tries again
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            return f"importing the tools started {threads - 1} threads"
        opened = _descriptors() - before
        if opened:
            return f"importing the tools opened {', '.join(sorted(path for _, path in opened))}"
        gc.collect()
        gc.freeze()
        return ""


def _descriptors() -> set[tuple[str, str]]:
    """What is open, but for character devices: /dev/null and the like may be shared."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISCHR(os.stat(f"/proc/self/fd/{name}").st_mode):
                found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:  # the listing's own
            continue
    return found


def _become_host(asked: Fork, fds: list[int], template_pid: int) -> NoReturn:
    os.setsid()
    sock_fd, life_fd, *leaf = fds
    for fd in leaf:
        enter_leaf(fd)
    if asked.uid:
        users.become(asked.uid, asked.folder)
    enter_process(template_pid, asked.argument)
    _draw_new_numbers()
    serve_node(socket.socket(fileno=sock_fd), life_fd)


def _draw_new_numbers() -> None:
    """Python's own generator is seeded anew after a fork; numpy's is not."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def main() -> NoReturn:
    """Fork hosts until the node is gone."""
    fd, node_pid, nice, held_fd = map(int, sys.argv[1:5])
    sys.argv[1:] = []
    enter_process(node_pid, nice)
    hold(held_fd)
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    gc.freeze()
    pid = os.getpid()
    template = _Template()
    Forker(sock, lambda asked, fds: _become_host(asked, fds, pid), template.load).run()


if __name__ == "__main__":
    main()
