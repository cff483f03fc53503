"""A template: ``python -P -m agentrt.agents.template FD NODE_PID NICE``, started by a node, one per bundle.

It confines itself, imports the agents' module, freezes what it has, and forks a host whenever it is asked to. It has
one thread and runs no agent, so that a fork finds nothing half done; it is started by exec, so that nothing of the node
is in it. It dies with its node, and its hosts die with it.
"""

import array
import gc
import inspect
import mmap
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from agentrt import users
from agentrt.agents import confine, determinism
from agentrt.agents.bundle import Bundle
from agentrt.agents.declare import Entry, agent_declaration_of
from agentrt.agents.host import BundleProgram, rehearse, serve
from agentrt.agents.protocol import (
    PAGE_BYTES,
    AgentInfo,
    Fork,
    Forked,
    FromTemplate,
    Gone,
    HostLimits,
    Prepare,
    Prepared,
    Ready,
    Refused,
    encode_packet,
    host_frame,
    to_template_decoder,
)
from agentrt.agents.run import described
from agentrt.errors import AgentrtError, InputError
from agentrt.sandbox import SandboxError
from agentrt.spawn import die_with_parent, enter_leaf
from agentrt.tools.importing import import_source

PACKET_BYTES_MAX: Final = 1 << 20


class Template:
    """Its main loop, and what its hosts start with."""

    def __init__(self, sock: socket.socket, prepare: Prepare) -> None:
        self._sock = sock
        self._limits = prepare.limits
        self._confined = prepare.confine
        self._programs: dict[str, BundleProgram] = {}
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._poll = select.poll()
        self._source = prepare.source
        self._bundle: Bundle | None = None
        self._for_others = False  # whatever hosts read, any user may read

    def load(self) -> Prepared:
        """Confine this process and import the source. Raises AgentrtError, or what the module's code raises."""
        confinement: dict[str, str] = {}
        if self._confined:
            paths = confine.readable_paths(_bundle_paths(self._source))
            self._for_others = all(users.open_to_all(Path(path)) for path in paths)
            abi = confine.restrict_files(paths)
            confine.restrict_calls(forking=True)
            confinement = {"landlock": f"ABI {abi}", "seccomp": "allow list"}
        threads = os.open("/proc/self/task", os.O_RDONLY | os.O_DIRECTORY) if not self._confined else -1
        module = import_source(self._source)
        if threads >= 0:
            if len(os.listdir(threads)) > 1:
                raise InputError("the module starts threads when it is imported", hint="Start none at a module's top")
            os.close(threads)
        self._bundle = bundle = Bundle(module)
        bundle.compile(list(sys.modules))
        agents, broken = self._agents(module, bundle)
        files = []
        for source in bundle.sources.values():
            found = source.path.stat()
            files.append((str(source.path), found.st_mtime_ns, found.st_size))
        return Prepared(bundle.digest, agents, broken, confinement, files)

    def _agents(self, module: ModuleType, bundle: Bundle) -> tuple[list[AgentInfo], dict[str, str]]:
        found: list[AgentInfo] = []
        broken: dict[str, str] = {}
        for value in list(vars(module).values()):
            declaration = agent_declaration_of(value)
            if declaration is None or not inspect.isfunction(value) or value.__module__ != module.__name__:
                continue
            qualname = value.__qualname__
            try:
                entry = Entry(value)
            except (AgentrtError, TypeError, NameError, AttributeError) as error:
                broken[qualname] = described(error)
                continue
            self._programs[qualname] = BundleProgram(bundle, qualname, entry)
            found.append(AgentInfo(qualname, declaration.name, int(declaration.tier), dict(declaration.budget)))
        return found, broken

    def run(self) -> NoReturn:
        """Fork on request until the node closes the socket."""
        self._poll.register(self._sock, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._reap(fd)
                elif fd == self._sock.fileno():
                    self._receive()

    def _receive(self) -> None:
        data, descriptors = _receive_packet(self._sock)
        if not data:
            os._exit(0)
        message = to_template_decoder.decode(data)
        if isinstance(message, Fork) and len(descriptors) in (2, 3):
            self._fork(message, *descriptors)
        for fd in descriptors:
            os.close(fd)

    def _fork(self, asked: Fork, host_end: int, page: int, leaf: int = -1) -> None:
        own, ticket = os.getpid(), asked.ticket
        try:
            pid = os.fork()
        except OSError as error:
            self._send(Forked(ticket, 0, f"fork: {error.strerror}"))
            return
        if pid == 0:
            status = 1
            try:
                if leaf >= 0:
                    enter_leaf(leaf)
                if asked.uid and self._for_others:
                    users.become(asked.uid)  # before it is bound to the template: that would be lost
                self._be_host(own, host_end, page)
            except BaseException as error:
                print(f"a Python host could not start: {described(error)}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self._send(Forked(ticket, pid), pidfd)

    def _be_host(self, template_pid: int, host_end: int, page: int) -> NoReturn:
        die_with_parent(template_pid)
        os.setsid()
        words = mmap.mmap(page, PAGE_BYTES)
        null = os.open(os.devnull, os.O_RDONLY)
        for standard in (0, 1):
            os.dup2(null, standard)
        low = 3
        if host_end != low:
            os.dup2(host_end, low)
        os.closerange(low + 1, 65_536)
        sock = socket.socket(fileno=low)
        confine.limit_resources(self._limits.memory_bytes_max)
        if self._confined:
            confine.restrict_calls(forking=False)
        if self._bundle is not None:
            rehearse(self._bundle, self._limits)
        sock.sendall(host_frame([Ready(os.getpid())]))
        serve(sock, memoryview(words).cast("Q"), self._programs, self._limits)

    def _reap(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._send(Gone(pid, os.waitstatus_to_exitcode(status)))

    def _send(self, message: FromTemplate, *descriptors: int) -> None:
        _send_packet(self._sock, message, *descriptors)


def _send_packet(sock: socket.socket, message: FromTemplate, *descriptors: int) -> None:
    control: list[tuple[int, int, Any]] = []
    if descriptors:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    try:
        sock.sendmsg([encode_packet(message)], control)
    except ConnectionError:
        os._exit(0)


def _receive_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(sock, PACKET_BYTES_MAX, 4)
    return data, descriptors


def _bundle_paths(source: str) -> list[Path]:
    """What of the agents' own code must be readable, before any of it is imported."""
    if source.endswith(".py"):
        # Its folder comes onto sys.path when it is imported, with the modules beside it.
        path = Path(source).resolve()
        return [path, *(Path(each) for each in confine.code_in(path.parent))]
    top = source.partition(".")[0]
    for entry in sys.path:
        folder = Path(entry) / top
        if folder.is_dir():
            return [folder]
        if (single := folder.with_suffix(".py")).is_file():
            return [single]
    return []


def _enter_process(node_pid: int, nice: int) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    die_with_parent(node_pid)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # kept by the C library
            continue
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a notice that comes before a host is ready
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def main() -> NoReturn:
    """Import, report, fork on request."""
    fd, node_pid, nice = map(int, sys.argv[1:4])
    _enter_process(node_pid, nice)
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    prepare = to_template_decoder.decode(_receive_packet(sock)[0])
    assert isinstance(prepare, Prepare)
    sys.path[:] = prepare.sys_path
    sys.argv[1:] = []
    sys.dont_write_bytecode = True
    time.tzset()
    template = Template(sock, prepare)
    try:
        prepared = template.load()
    except SandboxError as error:
        _send_packet(sock, Refused("sandbox", str(error)))
        os._exit(0)
    except BaseException as error:
        _send_packet(sock, Refused("import", f"{prepare.source} cannot be imported: {described(error)}"[:4_000]))
        os._exit(0)
    determinism.install()
    gc.collect()
    gc.freeze()
    _send_packet(sock, prepared)
    template.run()


if __name__ == "__main__":
    main()


__all__ = ["HostLimits", "Template", "main"]
