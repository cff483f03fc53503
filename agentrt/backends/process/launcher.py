"""Starts native processes and sees them to their end. One per node.

    start -> a thread: a leaf, a folder, a slot -> clone3 -> the loop: `on_start` … pidfd readable
          -> a thread: what is left is killed, its numbers are read, leaf and folder are removed -> the loop: `on_end`

Threads: one starts processes of tiers 0 and 1, one those of tiers 2 and 3 (on a full machine a start takes as long as
the newborn waits for the CPU), one does all else. They are the parents: they live as long as any process does, which
die with them. Nothing here waits for a process but its pidfd, and nothing signals one but through that or its leaf.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from agentrt import tempfolders
from agentrt._sys import lib
from agentrt.backends.process.family import Family
from agentrt.backends.process.means import PATH, Means, Paths, find_means, tmpfs_options
from agentrt.backends.process.preempt import Preemption, Room
from agentrt.backends.process.process import Ended, Order, Process
from agentrt.backends.process.rank import IDLE_TIER, PROCESS_NICE, may_rank_sessions, node_group, sessions_are_groups
from agentrt.backends.process.settings import ProcessConfig
from agentrt.backends.process.spawn import NEWNET, NEWPID, NO_CORE, Plan, SpawnError, spawn
from agentrt.cgroup import shared
from agentrt.cgroup.files import CgroupError
from agentrt.cgroup.leaf import Leaf, LeafLimits
from agentrt.cgroup.tree import Tree
from agentrt.errors import AgentrtError, ClosedError, QueueFullError
from agentrt.machine import memory_nodes, number_list
from agentrt.sandbox import SandboxError

_log: Final = logging.getLogger(__name__)

_FOLDER: Final = "agentrt-processes-"
_FILES_MAX: Final = 256  # descriptors of a process
_MS: Final = 1_000_000
_SAMPLES: Final = 10  # looks at a process within the time that it may stand still
#: A killed group is empty within milliseconds, unless something in it waits for a disk.
_CLEAR_PATIENCE_S: Final = 20.0
_CLOSE_GRACE_S: Final = 20.0
#: The node's group stays raised for so long after the last process.
_RAISED_S: Final = 1.0
#: For the state of one that stands still at its limit of memory.
_STATE_OUT_S: Final = 1.0
#: Network namespaces kept for domains that have no process now.
_NETWORKS_KEPT: Final = 16
_PROGRAMS_KEPT: Final = 256  # whose paths are known


class Launcher:
    """Make, open, use and close it on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: ProcessConfig, tier0_share_pct: int = 80) -> None:
        self.loop: Final = loop
        self.config: Final = config
        self.tree: Tree | None = None
        self.no_tree = ""  # why there is none
        self.means = Means(why="not open")
        self.ranks_sessions = False  # no leaf has a share of the CPU, and sessions are groups of the scheduler
        self._shares = False  # leaves have
        self._thread = ThreadPoolExecutor(1, "agentrt-process")
        self._starters = tuple(ThreadPoolExecutor(1, f"agentrt-start-{kind}") for kind in ("urgent", "batch"))
        self._lock = threading.Lock()  # of networks and paths
        self._processes: set[Process] = set()
        self._slots = list(range(config.processes_max - 1, -1, -1))
        self._networks: dict[str, list[int]] = {}  # domain -> [descriptor, users]
        self._paths: Paths | None = None
        self._folder = ""
        self._folders = itertools.count()
        self._spare_folders: deque[str] = deque(maxlen=1)
        self._programs: dict[str, str] = {}  # name -> path
        self._opened: asyncio.Future[None] | None = None
        self._closed = False
        self._empty: asyncio.Event = asyncio.Event()
        self._chores: deque[Callable[[], None]] = deque()
        self._chores_due = False
        self._sampling = False
        self._preemption = Preemption(tier0_share_pct)
        self._wanted: Callable[[], bool] | None = None  # by urgent work, now
        self._look: asyncio.TimerHandle | None = None
        self._room = Room(False, False, None)
        self._preemptions = 0
        self._raised = False  # the group of the node's session
        self._started = self._refused = self._killed_for_memory = 0

    # --- life ------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the cgroup and find out what can be confined. Raises nothing: what is missing is said by `refusal` and
        ``no_tree``. Again is harmless."""
        self.open_soon()
        assert self._opened is not None
        await asyncio.shield(self._opened)

    def open_soon(self) -> None:
        """Begin to. Raises ClosedError."""
        if self._closed:
            raise ClosedError("native processes are closed")
        if self._opened is None:
            self._opened = self.loop.run_in_executor(self._thread, self._open_in_thread)

    def _open_in_thread(self) -> None:
        try:
            self._find_out()
        except OSError as error:
            self.means = Means(why=f"no folder for them: {error.strerror}")

    def _find_out(self) -> None:
        tempfolders.sweep(_FOLDER)
        self._folder = tempfolders.make(_FOLDER)  # each working folder in it is its user's
        self._mount_point = os.path.join(self._folder, "work")
        os.mkdir(self._mount_point, 0o711)
        try:
            self.tree = shared.acquire(self.config.cgroup)
        except (CgroupError, OSError) as error:
            self.no_tree = str(error)
        self._shares = self.tree is not None and "cpu" in self.tree.controllers
        groups = sessions_are_groups()
        self.ranks_sessions = groups and not self._shares
        self._preemption.outranked = self._shares or not groups or may_rank_sessions()
        self.means = find_means(self._mount_point, self.config.uid_base)
        self._paths = Paths(self.means.abi)
        self._prepare(self._leaf_limits(None, None))

    @property
    def refusal(self) -> SandboxError | None:
        """Why no process is started; None: they are."""
        if self.means.why and not self.config.allow_unsandboxed:
            return SandboxError(
                f"native processes cannot be confined here: {self.means.why}",
                hint="See `agentrt doctor`; process.allow_unsandboxed runs them all the same",
            )
        return None

    async def close(self) -> None:
        """Kill all processes, remove all that is theirs, give the cgroup back."""
        if self._closed:
            return
        self._closed = True
        if self._look is not None:
            self._look.cancel()
        if self._opened is not None:
            await self._opened
        for process in tuple(self._processes):
            process.kill()
        if self._processes:
            with contextlib.suppress(TimeoutError):  # one in an uninterruptible sleep is left to the tree
                await asyncio.wait_for(self._empty.wait(), _CLOSE_GRACE_S)
        await self.loop.run_in_executor(self._thread, self._close_in_thread)
        for thread in (self._thread, *self._starters):
            thread.shutdown(wait=False)

    def _close_in_thread(self) -> None:
        for fd, _ in self._networks.values():
            os.close(fd)
        self._networks.clear()
        if self._paths is not None:
            self._paths.close()
        self._raise(False)
        if self.tree is not None:
            shared.release()
            self.tree = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- processes -------------------------------------------------------------------

    def start(
        self,
        order: Order,
        fds: Sequence[int],
        on_end: Callable[[Ended], None],
        on_start: Callable[[], None] | None = None,
    ) -> Process:
        """Start a process. ``fds``: its descriptors 0, 1, 2, …, the caller's to close once ``on_start`` or ``on_end``
        is called; it gets no others. Both are called on the loop, never from inside this call; ``on_end`` once, when
        nothing of it is left. Raises QueueFullError (as many as may are running), SandboxError, ClosedError."""
        if self._closed or self._opened is None:
            raise ClosedError("native processes are not open")
        if self._opened.done() and (refusal := self.refusal) is not None:
            raise refusal
        if not self._slots:
            raise QueueFullError(f"{self.config.processes_max} native processes are running")
        process = Process(self, order, on_end, on_start, self.config.stall_ms * _MS)
        process.slot = self._slots.pop()
        self._processes.add(process)
        self._empty.clear()
        given = tuple(fds)
        if self._opened.done():
            self._submit(process, given)
        else:  # nothing is started before it is known how
            self._opened.add_done_callback(lambda _: self._submit(process, given))
        if not order.tier:
            self._make(self._preemption.arrived(time.monotonic_ns()))
        return process

    def _submit(self, process: Process, fds: tuple[int, ...]) -> None:
        self._starters[process.order.tier > 1].submit(self._start_in_thread, process, fds)

    def in_thread(self, action: Callable[[], None]) -> None:
        """Do it on the thread; what it raises is logged."""
        self._chores.append(action)
        if not self._chores_due and not self._thread._shutdown:
            self._chores_due = True
            self._thread.submit(self._do_chores)

    def _do_chores(self) -> None:
        self._chores_due = False  # before they are looked at: what comes from now on is submitted again
        while self._chores:
            self._guarded(self._chores.popleft())

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CgroupError as error:
            _log.warning("a native process: %s", error)
        except Exception:
            _log.exception("a native process")

    def _start_in_thread(self, process: Process, fds: tuple[int, ...]) -> None:
        try:
            pid, pidfd = self._spawn(process, fds)
        except AgentrtError as error:
            self._discard(process)
            self._tell(partial(self._never_started, process, error))
            return
        except Exception as error:
            self._discard(process)
            self._tell(partial(self._never_started, process, SpawnError(f"{type(error).__name__}: {error}")))
            return
        self._tell(partial(self._on_started, process, pid, pidfd))

    def _spawn(self, process: Process, fds: tuple[int, ...]) -> tuple[int, int]:
        order, config, means = process.order, self.config, self.means
        if (refusal := self.refusal) is not None:  # it was not known yet
            raise refusal
        path = self._program(order.argv[0])
        uid = order.uid or config.uid_base + process.slot
        confined = order.confined
        user_map, group_map, inner = means.maps(uid)
        own_net = bool(means.namespaces & NEWNET) and not order.network
        namespaces = (means.namespaces & ~NEWNET) | (NEWNET if own_net else 0) if confined else 0
        net_fd = self._network(process) if confined and means.entered_net and not order.network else -1
        drops = confined and means.drops_uid
        folder_bytes = order.folder_bytes_max or config.folder_bytes_max
        tmpfs = None
        if confined and means.tmpfs:
            process.folder = ""
            folder = self._mount_point
            tmpfs = tmpfs_options(folder_bytes, config.folder_files_max, inner)
        else:
            folder = process.folder = self._empty_folder()
            if drops:
                os.chown(folder, uid, uid)
        process.leaf = self._leaf(process)
        cgroup_fd = -1
        limits = self._limits(process, folder_bytes) if confined else NO_CORE
        if process.leaf is None and not namespaces & NEWPID:
            process.family = Family()
            limits = {**limits, **process.family.limits}
        if process.leaf is not None:
            cgroup_fd = os.open(process.leaf.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        sockets = order.network or net_fd >= 0 or own_net
        confinement = None
        if confined and (means.abi or not config.allow_unsandboxed):
            assert self._paths is not None
            read = (*config.read, *order.read)
            with self._lock:
                confinement = self._paths.confinement(read, order.write, network=order.network, sockets=sockets)
        try:
            return spawn(
                Plan(
                    path=path,
                    argv=order.argv,
                    environment=environment(folder) | dict(order.environment),
                    fds=fds,
                    folder=folder,
                    cgroup_fd=cgroup_fd,
                    namespaces=namespaces,
                    net_fd=net_fd,
                    tmpfs=tmpfs,
                    user_map=user_map if namespaces else None,
                    group_map=group_map if namespaces else None,
                    uid=uid if drops else -1,
                    gid=uid if drops else -1,
                    nice=config.nice,
                    group_nice=PROCESS_NICE[order.tier] if self.ranks_sessions and not order.in_slot else 0,
                    idle=order.tier >= IDLE_TIER and not (self._shares or order.in_slot),
                    reaper=process.family is not None,
                    limits=limits,
                    confinement=confinement,
                )
            )
        finally:
            if cgroup_fd >= 0:
                os.close(cgroup_fd)

    def _empty_folder(self) -> str:
        """For one process, which removes it."""
        with contextlib.suppress(IndexError):
            return self._spare_folders.pop()
        return self._new_folder()

    def _new_folder(self) -> str:
        folder = os.path.join(self._folder, f"call-{next(self._folders)}")
        os.mkdir(folder, 0o700)
        return folder

    def _program(self, name: str) -> str:
        known = self._programs.get(name)
        if known is not None and os.access(known, os.X_OK):
            return known
        path = shutil.which(name, path=PATH)
        if path is None:
            raise SpawnError(f"there is no program {name}", hint=f"An absolute path, or a name in {PATH}")
        if len(self._programs) >= _PROGRAMS_KEPT:
            self._programs.clear()
        self._programs[name] = path
        return path

    def _leaf(self, process: Process) -> Leaf | None:
        if self.tree is None:
            return None
        limits = self._leaf_limits(process.order.memory_max_bytes, process.order.pids_max)
        return self.tree.make(process.tier, limits)[0]

    def _leaf_limits(self, memory_max_bytes: int | None, pids_max: int | None) -> LeafLimits:
        config = self.config
        memory_max, memory_high = config.memory_max_bytes, config.memory_high_bytes
        if memory_max_bytes is not None:
            room = memory_max - memory_high
            memory_max = memory_max_bytes
            memory_high = memory_max - min(room, memory_max // 2)
        bound = memory_nodes()  # of this thread: a node on one NUMA node
        return LeafLimits(
            memory_high_bytes=memory_high,
            memory_max_bytes=memory_max,
            swap_max_bytes=config.swap_bytes_max,
            pids_max=pids_max or config.pids_max,
            cpu_max_pct=config.cpu_pct_max or None,
            cpus=number_list(os.sched_getaffinity(0)) if bound else None,
            memory_nodes=number_list(bound) or None,
        )

    def _prepare(self, limits: LeafLimits) -> None:
        """On the thread: the next process like this one finds its leaf made."""
        if self.tree is not None and not self._closed:
            try:
                self.tree.prepare(limits)
            except CgroupError as error:
                _log.warning("no leaf ahead: %s", error)

    def _limits(self, process: Process, folder_bytes: int) -> dict[int, int]:
        """What `setrlimit` can do; of memory and processes only where no leaf bounds them."""
        order, config = process.order, self.config
        limits = NO_CORE | {resource.RLIMIT_NOFILE: _FILES_MAX, resource.RLIMIT_FSIZE: folder_bytes}
        controllers = frozenset() if self.tree is None else self.tree.controllers
        if "memory" not in controllers:
            limits[resource.RLIMIT_DATA] = order.memory_max_bytes or config.memory_max_bytes
        if "pids" not in controllers and (self.means.drops_uid or self.means.namespaces):  # counted per user
            limits[resource.RLIMIT_NPROC] = order.pids_max or config.pids_max
        return limits

    def _network(self, process: Process) -> int:
        """The namespace of its domain, which is its until `_leave_network`."""
        domain = process.order.domain
        with self._lock:
            known = self._networks.get(domain)
            if known is None:
                fd = lib.art_spawn_network()
                if fd < 0:
                    raise SandboxError(f"no network namespace: {os.strerror(-fd)}")
                known = self._networks[domain] = [fd, 0]
            known[1] += 1
            process.in_network = True
            return known[0]

    def _leave_network(self, process: Process) -> None:
        if not process.in_network:
            return
        process.in_network = False
        with self._lock:
            self._networks[process.order.domain][1] -= 1
            idle = [domain for domain, (_, users) in self._networks.items() if not users]
            if len(idle) > _NETWORKS_KEPT:
                os.close(self._networks.pop(idle[0])[0])

    # --- the end of one ----------------------------------------------------------------

    def _never_started(self, process: Process, error: AgentrtError) -> None:
        self._refused += 1
        self._let_go(process, Ended(-1, error))

    def _on_started(self, process: Process, pid: int, pidfd: int) -> None:
        self._started += 1
        if self.ranks_sessions and not (self._raised or process.order.in_slot):
            self.in_thread(partial(self._raise, True))
        self.loop.add_reader(pidfd, self._on_exit, process, pidfd)
        process.started(pid, pidfd)
        if self._look is None:  # nobody was there to make room
            wanted = self._is_wanted()
            if self._room.stop or wanted:
                self._make(self._preemption.look(time.monotonic_ns(), wanted))
        self._make_room(process)
        process.begun = True
        self._sample_later()

    def _on_exit(self, process: Process, pidfd: int) -> None:
        try:
            status = process.reap()
        except OSError:  # somebody else's wait took it: a bug of whoever embeds the node
            status = -1
        if status is None:
            return
        self.loop.remove_reader(pidfd)
        self._thread.submit(self._clean, process, status)

    def _clean(self, process: Process, status: int) -> None:
        """On the thread: nothing of it stays."""
        memory = cpu_us = None
        try:
            if process.leaf is not None:
                process.leaf.kill()
                memory, cpu_us = process.leaf.memory(), process.leaf.cpu_us()
            self._discard(process)
        except Exception:
            _log.exception("what native process %d left", process.pid)
        self._tell(partial(self._let_go, process, Ended(status, None, memory, cpu_us, process.stalled)))
        self._prepare(self._leaf_limits(process.order.memory_max_bytes, process.order.pids_max))
        if process.folder and not (self._spare_folders or self._closed):
            with contextlib.suppress(OSError):
                self._spare_folders.append(self._new_folder())

    def _discard(self, process: Process) -> None:
        if process.family is not None and process.pid and not process.family.end():
            _log.warning("native process %d has left some that cannot be ended", process.pid)
        if process.leaf is not None and self.tree is not None:
            self.tree.clear(process.leaf, _CLEAR_PATIENCE_S)
            process.leaf = None
        if process.folder:
            shutil.rmtree(process.folder, ignore_errors=True)
        self._leave_network(process)

    def _let_go(self, process: Process, ended: Ended) -> None:
        self._slots.append(process.slot)
        self._processes.discard(process)
        self._killed_for_memory += ended.out_of_memory
        if not self._processes:
            self._empty.set()
            if self._raised:
                self.loop.call_later(_RAISED_S, self._lower)
        process.gone(ended)

    def _tell(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to hear it
            self.loop.call_soon_threadsafe(action)

    # --- the node's rank -----------------------------------------------------------------

    def _lower(self) -> None:
        if not (self._processes or self._closed):
            self.in_thread(partial(self._raise, False))

    def _raise(self, raised: bool) -> None:
        """On the thread."""
        if raised != self._raised:
            self._raised = raised
            (node_group.raised if raised else node_group.lowered)()

    # --- urgent work ---------------------------------------------------------------------

    def urgent(self, wanted: Callable[[], bool]) -> None:
        """A run of tier 0 begins: processes of lower tiers make room, for as long as ``wanted()``."""
        self._wanted = wanted  # also for who starts while it computes
        if self._processes and not self._closed:
            self.loop.call_soon(self._on_urgent)  # first it is started itself

    def _on_urgent(self) -> None:
        if not self._closed:
            self._make(self._preemption.arrived(time.monotonic_ns()))

    def _make(self, room: Room) -> None:
        self._room = room
        for process in tuple(self._processes):
            self._make_room(process)
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if room.look_ns is not None:
            self._look = self.loop.call_later(max(0, room.look_ns - time.monotonic_ns()) / 1e9, self._on_look)

    def _make_room(self, process: Process) -> None:
        if process.tier > 0 and (self._room.stop_network if process.order.network else self._room.stop):
            self._preemptions += not process.preempted
            process.preempt()
        else:
            process.resume()

    def _on_look(self) -> None:
        self._look = None
        if self._processes:  # else the next one looks when it starts
            wanted = not self._closed and self._is_wanted()
            self._make(self._preemption.look(time.monotonic_ns(), wanted))

    def _is_wanted(self) -> bool:
        if any(not process.tier for process in self._processes):
            return True
        return self._wanted is not None and self._wanted()

    # --- memory ------------------------------------------------------------------------

    def _sample_later(self) -> None:
        if not self._sampling and self.tree is not None and "memory" in self.tree.controllers:
            self._sampling = True
            self.loop.call_later(self.config.stall_ms / 1e3 / _SAMPLES, self._sample)

    def _sample(self) -> None:
        self._sampling = False
        running = [process for process in self._processes if process.pid and not process.frozen]
        if running and not self._closed:
            self._thread.submit(self._guarded, partial(self._sample_in_thread, running))
        if self._processes:
            self._sample_later()

    def _sample_in_thread(self, running: list[Process]) -> None:
        for process in running:
            leaf = process.leaf
            if leaf is None or process.frozen or process.stalled:
                continue
            sample = leaf.sample(time.monotonic_ns())
            if sample is not None and process.watch.feed(sample):
                leaf.freeze()  # at once: it holds memory and takes the kernel's time
                process.stalled = True
                self._tell(partial(self._on_stalled, process))

    def _on_stalled(self, process: Process) -> None:
        """It is frozen. What it has done comes out, if it can say that; then it is killed."""
        if process.ended or process.on_stall is None or not process.on_stall():
            process.kill()
            return
        self._thread.submit(self._guarded, partial(self._let_out, process))
        self.loop.call_later(_STATE_OUT_S, process.kill)

    def _let_out(self, process: Process) -> None:
        """On the thread: between memory.high and memory.max there is room for its state."""
        leaf = process.leaf
        if leaf is not None:
            leaf.lift()
            leaf.thaw()

    def statistics(self) -> dict[str, Any]:
        return {
            "running": len(self._processes),
            "started": self._started,
            "refused": self._refused,
            "killed_for_memory": self._killed_for_memory,
            "preemptions": self._preemptions,
            "leaves": self.tree is not None,
            "controllers": sorted(self.tree.controllers) if self.tree is not None else [],
        }


def environment(folder: str) -> dict[str, str]:
    """What every process has, whatever else it is given."""
    return {"PATH": PATH, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
