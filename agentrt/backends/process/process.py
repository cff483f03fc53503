"""One native process and all that it starts, as the control loop sees it."""

import os
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from agentrt.backends.process.family import Family
from agentrt.backends.process.rank import PROCESS_NICE, rank_session
from agentrt.cgroup.leaf import Leaf, MemoryEvents
from agentrt.cgroup.pressure import StallWatch
from agentrt.errors import AgentrtError
from agentrt.spawn import describe_status, exit_status

if TYPE_CHECKING:
    from agentrt.backends.process.launcher import Launcher


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started. ``domain``: whose it is; processes of one may share a network namespace. ``read`` and
    ``write``: paths beside what every process may use. Bounds that are None are the configuration's. ``uid``: as whom,
    if the node is root; 0: as a user of its own, of no other process."""

    argv: tuple[str, ...]  # the first: an absolute path, or a name to be looked for in the usual folders
    domain: str
    tier: int
    environment: Mapping[str, str] = {}
    network: bool = False
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    memory_max_bytes: int | None = None
    pids_max: int | None = None
    folder_bytes_max: int | None = None
    uid: int = 0
    in_slot: bool = False  # it computes in a CPU slot of the core, which ranks it
    confined: bool = True  # False: for measuring what confinement costs


class Ended(msgspec.Struct, frozen=True):
    """Nothing of the process is left. ``status`` is negative for a signal. ``error``: it was never started. ``memory``:
    None where the kernel does not count it. ``stalled``: it stood still above memory.high and was killed for it."""

    status: int
    error: AgentrtError | None = None
    memory: MemoryEvents | None = None
    cpu_us: int | None = None
    stalled: bool = False

    @property
    def out_of_memory(self) -> bool:
        return self.stalled or (self.memory is not None and self.memory.oom_kill > 0)

    def describe(self) -> str:
        """How it ended, in words, with the numbers of an OOM kill."""
        if self.error is not None:
            return self.error.message
        if self.memory is None or not self.out_of_memory:
            return describe_status(self.status)
        what = "stood still at memory.high" if self.stalled else "was killed by the kernel for memory"
        peak = self.memory.peak_bytes or self.memory.current_bytes
        return (
            f"{what}: peak {peak} bytes of memory.max {self.memory.limit_bytes}, "
            f"oom_kill {self.memory.oom_kill}, memory.high passed {self.memory.high} times"
        )


class Process:
    """Made by `Launcher.start`; its methods are for the control loop's thread. What is asked of it before it runs
    happens once it does; when it has ended, nothing happens."""

    def __init__(
        self,
        launcher: "Launcher",
        order: Order,
        on_end: Callable[[Ended], None],
        on_start: Callable[[], None] | None,
        stall_ns: int,
    ) -> None:
        self._launcher = launcher
        self._on_end = on_end
        self._on_start = on_start
        self.order: Final = order
        self.pid = 0
        self.tier = order.tier
        self.ended = False
        self.stalled = False
        self.frozen = False
        self.watch: Final = StallWatch(stall_ns)
        #: What to do when urgent work wants the machine, and when it does not any more; None: freeze, thaw.
        self.on_preempt: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        #: It stands still for lack of memory: whether it was asked for its state, for which it then has a moment.
        self.on_stall: Callable[[], bool] | None = None
        self.preempted = False
        self.begun = False  # it has run: there may be something to hand over, or to lose
        # Of the launcher:
        self.slot = -1
        self.folder = ""
        self.in_network = False
        self.leaf: Leaf | None = None
        self.family: Family | None = None  # where neither a leaf nor a namespace holds what it starts
        self.pidfd = -1
        self._killed = False
        self._exited = False

    # --- what can be asked of it ----------------------------------------------------

    def kill(self) -> None:
        """End it and all that it started, whatever they do. `on_end` follows."""
        self._killed = True
        if self.pid and not self._exited:
            self._launcher.in_thread(self._kill)

    def freeze(self) -> None:
        """Stop all of it where it is: by its leaf, or its session with SIGSTOP where there is none."""
        self.frozen = True
        if self.pid and not self._exited:
            self._launcher.in_thread(self._apply_frozen)

    def thaw(self) -> None:
        self.frozen = False
        if self.pid and not self._exited:
            self._launcher.in_thread(self._apply_frozen)

    def preempt(self) -> None:
        """Urgent work wants the machine. Again is harmless."""
        if not self.preempted and not self.ended:
            self.preempted = True
            (self.on_preempt or self.freeze)()

    def resume(self) -> None:
        """It does not any more."""
        if self.preempted:
            self.preempted = False
            (self.on_resume or self.thaw)()

    def signal(self, number: int) -> None:
        """Signal the process itself, not what it started."""
        if self.pidfd >= 0 and not self._exited:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                return

    def notice(self) -> bool:
        """SIGUSR1, if the process has a handler for it: it is about to be stopped. Whether it had."""
        handles = self.pid != 0 and not self._exited and _catches(self.pid, signal.SIGUSR1)
        if handles:
            self.signal(signal.SIGUSR1)
        return handles

    def change_tier(self, tier: int) -> None:
        """Its weight follows, in place."""
        if tier != self.tier:
            self.tier = tier
            self._launcher.in_thread(self._reweigh)

    # --- on the launcher's thread ---------------------------------------------------

    def _kill(self) -> None:
        """Not reaped yet, so its id and its session's are its own."""
        if self._exited or self.pidfd < 0:
            return
        if self.leaf is None or not self.leaf.kill():
            if self.family is not None:
                self.signal(signal.SIGSTOP)  # so that it starts nobody, and stays above them until they are gone
                self.family.end(self.pid)
            kill_session(self.pid)
        self.signal(signal.SIGKILL)

    def _apply_frozen(self) -> None:
        if self._exited or self.pidfd < 0:
            return
        frozen = self.frozen
        self.watch.restart()
        if self.leaf is not None and (self.leaf.freeze() if frozen else self.leaf.thaw()):
            return
        number = signal.SIGSTOP if frozen else signal.SIGCONT
        signal_session(self.pid, number)
        if self.family is not None:
            self.family.signal(self.pid, number)

    def _reweigh(self) -> None:
        tree = self._launcher.tree
        if self.leaf is not None and tree is not None:
            tree.change_tier(self.leaf, self.tier)
        if self._launcher.ranks_sessions and not (self._exited or self.order.in_slot):
            rank_session(self.pid, PROCESS_NICE[self.tier])

    # --- from the launcher ----------------------------------------------------------

    def started(self, pid: int, pidfd: int) -> None:
        """On the loop: it runs."""
        self.pid, self.pidfd = pid, pidfd
        if self._on_start is not None:
            self._on_start()
        if self.tier != self.order.tier:
            self._launcher.in_thread(self._reweigh)
        if self.frozen:
            self.freeze()
        if self._killed:
            self.kill()

    def reap(self) -> int | None:
        """On the loop, when the pidfd is readable: its status. What is left of its session goes first, while the id is
        its own."""
        if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._exited = True
        kill_session(self.pid)
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert ended is not None
        os.close(self.pidfd)
        self.pidfd = -1
        return exit_status(ended)

    def gone(self, ended: Ended) -> None:
        """On the loop: nothing of it is left."""
        self.ended = self._exited = True
        self._on_end(ended)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal; others it would kill."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:")).split()[1]
    except (OSError, StopIteration, IndexError):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def kill_session(pid: int) -> None:
    signal_session(pid, signal.SIGKILL)


def signal_session(pid: int, number: int) -> None:
    """The process group that it made when it was born; who left it is the leaf's, its namespace's or its family's."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return
