"""Calls of tools that are native programs: each is a process of its own, from `Launcher`; there is a pool per class.

    call -> the line of its class: by tier, then tenants in turn -> a process -> its output -> `finish`
              ^------------ from the top, or from the state that it handed over ------'

When urgent work needs the machine a process stands still, unless its command says otherwise: ``discard``, it is killed,
``snapshot``, it is told with SIGUSR1, and may within 50 ms exit with status 75, its state on its standard output. Both
begin again, as the same attempt; nobody was told of them. A state is kept in memory only.

A pool is bounded like one of hosts: ``hosts_max`` processes, of which the last places are for the higher tiers, and
``queue_items_max`` and ``queue_bytes_max`` of what is waiting or running. All on the control loop; nothing here blocks.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from agentrt.backends.process.launcher import Launcher
from agentrt.backends.process.process import Ended, Order, Process
from agentrt.decoding import UNREADABLE
from agentrt.errors import AgentrtError, QueueFullError
from agentrt.flow.fair import Fair
from agentrt.tools.binding import encode_result, error_payload
from agentrt.tools.execution import timed_out
from agentrt.tools.outcome import EVICTED_RUNNING, EVICTED_WAITING, ClassStatistics, ToolLimits, ToolOutcome
from agentrt.tools.secretrefs import redact, redact_payload, substitute
from agentrt.tools.spec import Command, ToolSpec

_READ_BYTES: Final = 256 * 1024
_ERRORS_BYTES_MAX: Final = 4096  # of what a command wrote to its standard error: the end
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_KEY, _ATTEMPT, _STATE = "AGENTRT_IDEMPOTENCY_KEY", "AGENTRT_ATTEMPT", "AGENTRT_STATE_FD"
_STATE_FD: Final = 3
#: EX_TEMPFAIL of sysexits.h.
HANDS_OVER: Final = 75
_NOTICE_S: Final = 0.05
#: Of one call, before its process is stopped instead: one longer than the quiet between would never get through.
_DISCARDS_MAX: Final = 3


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class CommandCall:
    """A call, from when it is accepted to its outcome."""

    def __init__(
        self,
        number: int,
        spec: ToolSpec,
        args: bytes,
        *,
        key: str | None,
        attempt: int,
        timeout_ns: int,
        tenant: str,
        domain: str,
        tier: int,
        done: Callable[[ToolOutcome], None],
    ) -> None:
        self.number = number
        self.spec = spec
        self.args = args
        self.key = key
        self.attempt = attempt
        self.timeout_ns = timeout_ns
        self.tenant = tenant
        self.domain = domain
        self.tier = tier
        self.done = done
        self.secrets: dict[str, str] | None = None
        self.cancelled = self.ended = self.waiting = self.discarded = self.evicted = False
        self.discards = 0
        self.told = False  # the process that runs has had its notice
        self.notice: asyncio.TimerHandle | None = None  # until it stands still
        self.state: bytes | None = None  # what the last process handed over
        self.began_ns = 0
        self.process: Process | None = None
        self.stop: tuple[bytes, str] | None = None  # why it was ended by us
        self.out = bytearray()
        self.errors = bytearray()
        self.fds: list[int] = []  # our ends of its pipes
        self.deadline: asyncio.TimerHandle | None = None
        self.left_ns = timeout_ns  # when its clock was last stopped

    @property
    def command(self) -> Command:
        assert self.spec.command is not None
        return self.spec.command


class CommandPool:
    """The processes of one class. ``launcher`` may still be opening."""

    def __init__(self, launcher: Launcher, limits: ToolLimits) -> None:
        self._launcher = launcher
        self._loop = launcher.loop
        self.limits: Final = limits
        self._line: Fair[CommandCall] = Fair()
        self.running: set[CommandCall] = set()
        self._pump_due = False
        self._closed = self._stopping = False
        self._items = self._bytes = 0  # calls accepted and not ended; their arguments
        self._calls = self._failures = self._timeouts = self._started = self._died = 0

    def accept(self, call: CommandCall) -> None:
        """Count it. Raises QueueFullError: it was not accepted."""
        size = len(call.args)
        if self._items >= self.limits.queue_items_max or self._bytes + size > self.limits.queue_bytes_max:
            raise QueueFullError(f"{self._items} calls of commands with {self._bytes} bytes are waiting or running")
        self._items += 1
        self._bytes += size
        self._calls += 1

    def put(self, call: CommandCall, secrets: dict[str, str] | None = None) -> None:
        """Have it done when there is a place. ``secrets``: values that its arguments refer to."""
        if call.ended:
            return
        if self._stopping:
            self._loop.call_soon(self._finish, call, EVICTED_WAITING)
            return
        call.secrets = secrets
        call.waiting = True
        self._line.put(call.tier, call.tenant, 1, call.number, call)
        self.pump_soon()

    def cancel(self, call: CommandCall) -> None:
        """Nobody wants it any more: a waiting one ends, a running one is killed if it is pure, and left to finish
        else."""
        if call.ended or call.cancelled:
            return
        call.cancelled = True
        if call.waiting:
            self._line.remove(call.tier, call.tenant, call.number)
            call.waiting = False
        if call.process is None:
            self._loop.call_soon(self.refuse, call, "cancelled", "the call was cancelled")
        elif call.spec.kind == "pure":
            self._stop(call, (error_payload("cancelled", "the call was cancelled"), "cancelled"))

    def stop(self) -> None:
        """Begin nothing more: what waits ends as evicted, what runs and handles it gets SIGUSR1."""
        self._stopping = True
        for call in list(self._line):
            self._line.remove(call.tier, call.tenant, call.number)
            call.waiting = False
            self._finish(call, EVICTED_WAITING)
        for call in self.running:
            if call.process is not None:
                call.told = call.process.notice() or call.told

    def evict(self) -> None:
        """After `stop`: end what runs; the outcomes follow."""
        for call in self.running:
            call.evicted = True
            if call.process is not None:
                call.process.kill()

    def statistics(self) -> ClassStatistics:
        """As it is now; a process counts as a host."""
        running = len(self.running)
        return ClassStatistics(
            running,
            running,
            max(0, self._items - running),
            self._bytes,
            self._calls,
            self._failures,
            self._timeouts,
            self._started,
            self._died,
        )

    def close(self) -> None:
        """Start nothing more; what runs is the launcher's to end."""
        self._closed = True
        for call in self.running:
            self._stop_clock(call)
            self._stop_notice(call)
            self._close_pipes(call)

    def pump_soon(self) -> None:
        if not self._pump_due and not self._closed:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    # --- beginning -------------------------------------------------------------------

    def _pump(self) -> None:
        self._pump_due = False
        while self._line and not self._closed:
            for tier in self._line.order():
                if len(self.running) < max(1, self.limits.hosts_max - min(tier, 2)):
                    break
            else:
                return
            call = self._line.take(tier, 1)
            call.waiting = False
            self._begin(call)

    def _begin(self, call: CommandCall) -> None:
        command = call.command
        try:
            given = substitute(call.args, call.secrets) if call.secrets else call.args
            if command.input == "text":
                given = msgspec.json.decode(given, type=_Text).text.encode()
        except UNREADABLE as error:
            self.refuse(call, "tool_args", f"the arguments do not fit: {error}")
            return
        theirs: list[int] = []
        try:
            theirs = self._open_pipes(call, given)
            order = Order(
                argv=command.argv,
                domain=call.domain,
                tier=call.tier,
                environment=self._environment(call),
                network=command.network,
                read=command.read,
                write=command.write,
                memory_max_bytes=command.memory_bytes_max or None,
                pids_max=command.processes_max or None,
            )

            def end(ended: Ended) -> None:
                _close_all(theirs)
                self._on_end(call, ended)

            def start() -> None:
                _close_all(theirs)
                self._on_start(call)

            process = call.process = self._launcher.start(order, theirs, end, start)
            process.on_preempt = partial(self._preempt, call, process)
            process.on_resume = partial(self._resume, call, process)
            process.on_stall = partial(self._ask_for_state, call, process)
        except (AgentrtError, OSError) as error:
            _close_all(theirs)
            self._close_pipes(call)
            if isinstance(error, AgentrtError):
                code = "sandbox" if error.code == "sandbox" else "tool_host_start"
                self.refuse(call, code, str(error))
            else:
                self.refuse(call, "tool_host_start", f"it cannot be started: {error.strerror}")
            return
        self.running.add(call)

    def _environment(self, call: CommandCall) -> dict[str, str]:
        environment = dict(call.command.environment) | {_ATTEMPT: str(call.attempt)}
        if call.state is not None:
            environment[_STATE] = str(_STATE_FD)
        return environment if call.key is None else environment | {_KEY: call.key}

    def _open_pipes(self, call: CommandCall, given: bytes) -> list[int]:
        """Its descriptors 0, 1 and 2, and 3 if there is a state to go on from. Input and state are files in memory:
        nobody needs to feed them. Raises OSError."""
        theirs: list[int] = []
        try:
            theirs.append(_in_memory("agentrt-input", given))
            for _ in (1, 2):
                ours, its = os.pipe2(os.O_CLOEXEC)
                call.fds.append(ours)
                theirs.append(its)
                os.set_blocking(ours, False)
            if call.state is not None:
                theirs.append(_in_memory("agentrt-state", call.state))
        except OSError:
            _close_all(theirs)
            self._close_pipes(call)
            raise
        return theirs

    def _on_start(self, call: CommandCall) -> None:
        call.began_ns = self._now_ns()
        self._started += 1
        if self._closed:
            return
        for fd, read in zip(call.fds, (self._read_out, self._read_errors), strict=True):
            self._loop.add_reader(fd, read, call, fd)
        if call.process is None or not call.process.preempted:
            self.run_clock(call)

    # --- running ---------------------------------------------------------------------

    def run_clock(self, call: CommandCall) -> None:
        """Its time-out counts."""
        if call.deadline is None and not call.ended:
            call.deadline = self._loop.call_later(call.left_ns / 1e9, self._on_deadline, call)

    def stop_clock(self, call: CommandCall) -> None:
        """Its time-out does not count: it is frozen."""
        if call.deadline is not None:
            call.left_ns = max(0, int((call.deadline.when() - self._loop.time()) * 1e9))
            self._stop_clock(call)

    def _stop_clock(self, call: CommandCall) -> None:
        if call.deadline is not None:
            call.deadline.cancel()
            call.deadline = None

    def _on_deadline(self, call: CommandCall) -> None:
        call.deadline = None
        self._stop(call, timed_out(call.timeout_ns))

    def _stop(self, call: CommandCall, why: tuple[bytes, str]) -> None:
        if call.stop is None:
            call.stop = why
            if call.process is not None:
                call.process.kill()

    def _read_out(self, call: CommandCall, fd: int) -> None:
        if self._receive(call, fd, call.out) == 0:
            self._loop.remove_reader(fd)
        elif len(call.out) > self.limits.result_bytes_max:
            call.out.clear()
            self._loop.remove_reader(fd)  # it waits, and is killed
            self._stop(call, self._too_big())

    def _read_errors(self, call: CommandCall, fd: int) -> None:
        if self._receive(call, fd, call.errors) == 0:
            self._loop.remove_reader(fd)
        del call.errors[:-_ERRORS_BYTES_MAX]

    def _receive(self, call: CommandCall, fd: int, into: bytearray) -> int | None:
        """Bytes read, 0 at the end, None if there are none now."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return None
        into += data
        return len(data)

    def _preempt(self, call: CommandCall, process: Process) -> None:
        """Urgent work wants the machine."""
        policy = call.command.preempt if process.begun and not call.cancelled and call.stop is None else "freeze"
        if policy == "discard" and call.discards < _DISCARDS_MAX:
            call.discards += 1
            call.discarded = True
            process.kill()
        elif policy == "snapshot" and self._ask_for_state(call, process):
            call.notice = self._loop.call_later(_NOTICE_S, self._stand_still, call, process)
        else:
            self._stand_still(call, process)

    def _ask_for_state(self, call: CommandCall, process: Process) -> bool:
        if call.command.preempt != "snapshot" or call.cancelled or call.stop is not None:
            return False
        call.told = process.notice() or call.told
        return call.told

    def _stand_still(self, call: CommandCall, process: Process) -> None:
        self._stop_notice(call)
        self.stop_clock(call)
        process.freeze()

    def _stop_notice(self, call: CommandCall) -> None:
        if call.notice is not None:
            call.notice.cancel()
            call.notice = None

    def _resume(self, call: CommandCall, process: Process) -> None:
        self._stop_notice(call)
        process.thaw()
        if call.began_ns:
            self.run_clock(call)

    # --- ending ----------------------------------------------------------------------

    def _on_end(self, call: CommandCall, ended: Ended) -> None:
        self.running.discard(call)
        self.stop_clock(call)
        self._stop_notice(call)
        if call.evicted and not self._closed:
            self._close_pipes(call)
            self._finish(call, EVICTED_WAITING if ended.error is not None else EVICTED_RUNNING)
        elif call.discarded and not self._closed and ended.error is None and call.stop is None and ended.status < 0:
            call.state, call.left_ns = None, call.timeout_ns
            self._again(call)
        elif not self._closed:
            self._drain(call)
            if self._handed_over(call, ended):
                self._go_on_later(call)
                return
            self._close_pipes(call)
            self._answer(call, ended)
            self.pump_soon()

    def _handed_over(self, call: CommandCall, ended: Ended) -> bool:
        """It has made room by itself, and left a state to go on from."""
        asked = call.told and call.command.preempt == "snapshot" and call.stop is None and not call.cancelled
        return asked and ended.error is None and ended.status == HANDS_OVER

    def _go_on_later(self, call: CommandCall) -> None:
        if len(call.out) > self.limits.result_bytes_max:
            self._close_pipes(call)
            self._finish(call, ToolOutcome(False, *self._too_big(), self._cost_ns(call), False))
        elif self._stopping:  # a state does not outlive the node: its kind says what then
            self._close_pipes(call)
            self._finish(call, EVICTED_RUNNING)
        else:
            call.state = bytes(call.out)
            self._again(call)

    def _again(self, call: CommandCall) -> None:
        """It went to make room: no attempt of its step, which nobody was told of. Its kind allows that, or itself."""
        self._close_pipes(call)
        call.discarded, call.told, call.process, call.began_ns = False, False, None, 0
        call.out.clear()
        call.errors.clear()
        self.put(call, call.secrets)
        self.pump_soon()

    def _drain(self, call: CommandCall) -> None:
        """What it wrote before it went. A program that nobody confines may have left somebody who still writes."""
        if call.stop is None and len(call.fds) == 2:
            while len(call.out) <= self.limits.result_bytes_max and self._receive(call, call.fds[0], call.out):
                pass
            for _ in range(_ERRORS_BYTES_MAX):
                if not self._receive(call, call.fds[1], call.errors):
                    break
                del call.errors[:-_ERRORS_BYTES_MAX]

    def _close_pipes(self, call: CommandCall) -> None:
        for fd in call.fds:
            self._loop.remove_reader(fd)
        _close_all(call.fds)

    def _answer(self, call: CommandCall, ended: Ended) -> None:
        cost_ns = self._cost_ns(call)
        if ended.error is not None:
            code = "sandbox" if ended.error.code == "sandbox" else "tool_host_start"
            self.refuse(call, code, str(ended.error))
        elif call.stop is not None:
            payload, code = call.stop
            self._finish(call, ToolOutcome(False, payload, code, cost_ns, False, code != "tool_result_too_big"))
        elif ended.out_of_memory:
            text = f"{call.command.argv[0]} {ended.describe()}"
            more = {} if ended.memory is None else {"memory": msgspec.structs.asdict(ended.memory)}
            payload = error_payload("tool_memory", text, more)
            self._finish(call, ToolOutcome(False, payload, "tool_memory", cost_ns, False, True))
        elif ended.status < 0:
            text = self._with_errors(call, f"{call.command.argv[0]} was ended from outside ({ended.describe()})")
            payload = error_payload("tool_host_died", text)
            self._died += 1
            self._finish(call, ToolOutcome(False, payload, "tool_host_died", cost_ns, True, True))
        elif ended.status > 0:
            text = self._with_errors(call, f"{call.command.argv[0]} ended with status {ended.status}")
            payload = error_payload("tool_failed", text, {"status": ended.status})
            self._finish(call, ToolOutcome(False, payload, "tool_failed", cost_ns, False))
        else:
            self._succeed(call, cost_ns)

    def _succeed(self, call: CommandCall, cost_ns: int) -> None:
        try:
            if len(call.out) > self.limits.result_bytes_max:
                payload, code = self._too_big()
            else:
                text = call.out.decode(errors="replace" if call.command.output == "text" else "strict")
                result = text if call.command.output == "text" else msgspec.json.decode(text or "null")
                payload, failed = encode_result(result, self.limits.result_bytes_max)
                code = failed or ""
        except UNREADABLE as error:
            payload, code = error_payload("tool_result", f"its standard output is no JSON: {error}"), "tool_result"
        if call.secrets and not code:
            payload = redact_payload(payload, call.secrets)
        self._finish(call, ToolOutcome(not code, payload, code or None, cost_ns, False))

    def _too_big(self) -> tuple[bytes, str]:
        text = f"it wrote more than {self.limits.result_bytes_max} bytes to its standard output"
        return error_payload("tool_result_too_big", text), "tool_result_too_big"

    def _cost_ns(self, call: CommandCall) -> int:
        return self._now_ns() - call.began_ns if call.began_ns else 0

    def _with_errors(self, call: CommandCall, text: str) -> str:
        told = call.errors.decode(errors="replace").strip()
        if told and call.secrets:
            told = redact(told, call.secrets)
        return f"{text}: {told[-1500:]}" if told else text

    def refuse(self, call: CommandCall, code: str, message: str) -> None:
        """It has not begun, and will not."""
        self._finish(call, ToolOutcome(False, error_payload(code, message), code, 0, False))

    def _finish(self, call: CommandCall, outcome: ToolOutcome) -> None:
        if not call.ended:
            call.ended = True
            call.secrets = None
            self._items -= 1
            self._bytes -= len(call.args)
            self._failures += not outcome.ok
            self._timeouts += outcome.code == "tool_timeout"
            call.done(outcome)

    def _now_ns(self) -> int:
        return int(self._loop.time() * 1e9)


def _in_memory(name: str, data: bytes) -> int:
    """A file that holds this and cannot be changed. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], written)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _close_all(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
