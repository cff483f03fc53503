"""How hosts start: forked from a template with the tools imported, from one without, or each executed from nothing.

It begins with what `ToolLimits.template` says and steps down where that does not work: a template whose imports are
unsafe to share, hang or kill it is replaced by a bare one; one that does not come up at all, by executing. A template
that has hosts stays until they are gone.
"""

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable
from typing import Final

from agentrt.spawn import child_environment, import_path
from agentrt.tools.forking import ForkClient, Import
from agentrt.tools.process import ExecutedHost, ForkedHost, HostProcess, OnGone, start_python
from agentrt.tools.protocol import ToolRef
from agentrt.tools.spec import ToolRegistry
from agentrt.tools.users import HostUsers

_REFS_PER_PACKET: Final = 200
_IMPORT_TIMEOUT_MAX_S: Final = 10.0
#: Templates that end by themselves, after which hosts are executed.
_LOSSES_MAX: Final = 3
_MODES: Final = ("import", "bare", "exec")


class HostStarter:
    """Lives on the node's loop. ``on_change``: another way may work now; ask again."""

    def __init__(
        self,
        registry: ToolRegistry,
        loop: asyncio.AbstractEventLoop,
        *,
        mode: str,
        nice: int,
        start_timeout_ns: int,
        hidden_prefix: str,
        on_change: Callable[[], None],
    ) -> None:
        self.mode = mode
        self.why = ""  # it stepped down
        self._registry = registry
        self._loop = loop
        self._nice = nice
        self._import_timeout_s = min(start_timeout_ns / 3e9, _IMPORT_TIMEOUT_MAX_S)
        self._hidden_prefix = hidden_prefix
        self._on_change = on_change
        self.held_fd = -1  # every process from which tools run has it; see orphans.py
        self._template: _Template | None = None
        self._old: set[_Template] = set()
        self._losses = 0
        self._users = HostUsers()
        self._closed = False

    def environment(self) -> dict[str, str]:
        """Of hosts: the node's, without its secrets."""
        environment = child_environment()
        if self._hidden_prefix:
            environment = {
                name: value for name, value in environment.items() if not name.startswith(self._hidden_prefix)
            }
        return environment

    def prepare(self) -> None:
        """Start the template, so that the first host need not wait for it."""
        if self.mode != "exec" and self._template is None and not self._closed:
            try:
                self._template = _Template(self, self._loop, self._nice, self.environment(), self.held_fd)
                if self.mode == "import":
                    self._template.import_new()
            except OSError as error:
                self._step_down("exec", f"no template could be started: {error.strerror}")

    def sweep(self) -> None:
        """End old templates that have no hosts any more."""
        for template in tuple(self._old):
            if not template.client.children:
                self._old.discard(template)
                template.close()

    def start(
        self,
        on_gone: OnGone,
        on_doomed: Callable[[], None],
        nice: int,
        memory_bytes_max: int = 0,
        uid_base: int = 0,
    ) -> HostProcess:
        """Start a host. ``on_doomed``: it will die soon, of no fault of its own. Raises OSError."""
        self.prepare()
        template = self._template
        if template is not None:
            try:
                if self.mode == "import":
                    template.import_new()
                user = self._users.take(uid_base)
                return ForkedHost(self._loop, on_gone, on_doomed, template.client, nice, memory_bytes_max, user)
            except OSError:  # it has not kept up, or is gone and not yet noticed: this one goes without it
                pass
        user = self._users.take(uid_base)
        return ExecutedHost(self._loop, on_gone, nice, self.environment(), memory_bytes_max, self.held_fd, user)

    @property
    def tools_count(self) -> int:
        """How many there are, also those that no host executes."""
        return len(self._registry)

    def new_tools(self, known: int) -> list[ToolRef]:
        return [ToolRef(number, spec.name, spec.ref) for number, spec in self._registry.importable_from(known)]

    @property
    def import_timeout_s(self) -> float:
        return self._import_timeout_s

    def close(self) -> None:
        """End the templates, and with them every host that is left."""
        self._closed = True
        for template in (*self._old, *([self._template] if self._template is not None else ())):
            template.close()
        self._old.clear()
        self._template = None

    # --- from templates ----------------------------------------------------------

    def on_unsafe(self, template: "_Template", why: str) -> None:
        """Nothing can be forked from it any more."""
        if template is self._template:
            self._template = None
            self._old.add(template)
            self._step_down("bare", why)

    def on_lost(self, template: "_Template") -> None:
        """It ended by itself."""
        self._old.discard(template)
        if template is not self._template:
            return
        self._template = None
        if self._closed:
            return
        if template.importing:
            self._step_down("bare", "it ended while it imported the tools")
            return
        self._losses += 1
        if self._losses >= _LOSSES_MAX:
            self._step_down("exec", f"{self._losses} templates ended")
        else:
            self._on_change()

    def _step_down(self, mode: str, why: str) -> None:
        if _MODES.index(mode) > _MODES.index(self.mode):
            self.mode, self.why = mode, why
        self._on_change()


class _Template:
    """One template process."""

    def __init__(
        self,
        starter: HostStarter,
        loop: asyncio.AbstractEventLoop,
        nice: int,
        environment: dict[str, str],
        held_fd: int,
    ) -> None:
        """Raises OSError."""
        self._starter = starter
        self._loop = loop
        self._known = 0  # tools it was told of
        self._imports = 0  # requests not answered
        self._timer: asyncio.TimerHandle | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process: subprocess.Popen[bytes] = start_python(
                "agentrt.tools.template", (theirs.fileno(),), nice, environment, held_fd
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.client = ForkClient(ours, loop, on_lost=self._on_lost, on_imported=self._on_imported)
        if starter.mode != "import":
            self._send([])  # the path only

    @property
    def importing(self) -> bool:
        return self._imports > 0

    def import_new(self) -> None:
        """Tell it of tools registered since. Raises OSError."""
        tools = self._starter.new_tools(self._known)
        for first in range(0, len(tools), _REFS_PER_PACKET):
            self._send(tools[first : first + _REFS_PER_PACKET])
        self._known = self._starter.tools_count

    def _send(self, tools: list[ToolRef]) -> None:
        self.client.import_tools(Import(import_path(), os.environ.get("PYTHONPATH"), tools))
        if tools:
            self._known = tools[-1].number + 1
        self._imports += bool(tools)
        if tools and self._timer is None:
            self._timer = self._loop.call_later(self._starter.import_timeout_s, self._on_overdue)

    def _on_imported(self, unsafe: str) -> None:
        self._imports = max(0, self._imports - 1)
        if self._imports == 0 and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if unsafe:
            self._starter.on_unsafe(self, unsafe)

    def _on_overdue(self) -> None:
        self._timer = None
        self._starter.on_unsafe(self, f"the tools were not imported within {self._starter.import_timeout_s:g} seconds")
        self.client.drop_unforked()
        self._starter.sweep()

    def _on_lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._starter.on_lost(self)
        self._reap()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.client.close()
        self._process.kill()
        self._reap()

    def _reap(self) -> None:
        self._process.kill()
        self._process.wait()
