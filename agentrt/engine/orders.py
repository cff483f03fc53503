"""What is told to runs from outside: that they end, go on, or what they wait for. Loop thread only.

Whoever tells is answered once, durably, or with an error, also when the node stops in between.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from agentrt.engine.access import CLOSING, StoreAccess
from agentrt.engine.callers import Callers
from agentrt.engine.machine import Phase, RunMachine
from agentrt.engine.mailbox import Mailbox
from agentrt.engine.places import Action, Missing, Places
from agentrt.engine.revalidate import Go, Revalidation, Verdict
from agentrt.engine.steps import EventSend, send_address
from agentrt.errors import AgentrtError, ClosedError, InputError, StepSettledError, UnknownRunError
from agentrt.ids import new_run_id, parse_run_id
from agentrt.stores.base import Row

Plain = Callable[[BaseException | None], None]


class OrderRuns(Protocol):
    """What it needs of the engine."""

    now_ns: Callable[[], int]

    @property
    def closing(self) -> bool: ...

    def with_run(self, run_id: str, action: Action, missing: Missing) -> None: ...

    def load(self, run_id: str, action: Action | None = None, missing: Missing | None = None) -> None:
        """Read a run from the store and go on with it, also one that waits for an operator."""

    def follow(self, machine: RunMachine, verdict: Verdict) -> bool:
        """Do what was decided of the run; whether its guest may go on."""


class Orders:
    """Of one node."""

    def __init__(
        self,
        runs: OrderRuns,
        access: StoreAccess,
        places: Places,
        mailbox: Mailbox,
        revalidation: Revalidation,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._runs = runs
        self._access = access
        self._places = places
        self._mailbox = mailbox
        self._revalidation = revalidation
        self._random_bytes = random_bytes
        self._callers = Callers()
        self._cancels: dict[str, list[Plain]] = {}

    def fail_all(self, error: AgentrtError) -> None:
        """The node stops: nobody else will answer those who wait."""
        self._callers.fail_all(error)
        for run_id in [*self._cancels]:
            self.answer_cancels(run_id, error)

    def cancel(self, run_id: str, done: Plain, reason: str = "cancelled by request") -> None:
        """Cancel a run; ``done(None)`` once the request is durable or the run has ended, ``done(error)`` otherwise."""
        try:
            parse_run_id(run_id)
            if self._runs.closing:
                raise ClosedError(CLOSING)
        except AgentrtError as error:
            done(error)
            return
        machine = self._places.runs.get(run_id)
        if machine is None:
            self._cancels.setdefault(run_id, []).append(done)
            self._runs.load(run_id, lambda machine: machine.cancel(reason))
            return
        if machine.cancel_reason is not None and machine.phase < Phase.ENDED:
            # Its request may still be on its way; the end follows it in any case.
            self._cancels.setdefault(run_id, []).append(done)
        elif machine.phase is Phase.ACCEPTING:  # see `with_run`
            self._cancels.setdefault(run_id, []).append(done)

            def missing(error: BaseException | None) -> None:
                gone = UnknownRunError(f"there is no run {run_id}", run=run_id)
                self.answer_cancels(run_id, gone if error is None else error)

            self._runs.with_run(run_id, lambda machine: machine.cancel(reason), missing)
        else:
            self._cancels.setdefault(run_id, []).append(done)
            machine.cancel(reason)

    def resume(self, run_id: str, done: Plain) -> None:
        """An operator lets a parked run go on: its exhausted step gets one more attempt. ``done`` as for `cancel`."""
        parked = self._places.parked.get(run_id)
        if self._runs.closing or parked is None:
            hint = "Look at what it waits for; a run that has ended is begun again by submitting it"
            gone = InputError(f"run {run_id} does not wait for an operator", run=run_id, hint=hint)
            done(ClosedError(CLOSING) if self._runs.closing else gone)
            return
        done = self._callers.add(done, done)
        self._runs.load(run_id, lambda machine: machine.allow_retry(done), done)

    def decide(self, run_id: str, path: str, done: Plain, *, ok: bool | None, payload: bytes = b"null") -> None:
        """An operator settles a step whose outcome nobody saw: with its result, with an error, or (``ok`` None) by
        letting it run once more. ``done(StepSettledError)`` if the step does not wait for that."""
        parked = self._places.parked.get(run_id)
        if self._runs.closing or parked is None:
            gone = StepSettledError(f"run {run_id} does not wait for an operator", run=run_id, step=path)
            done(ClosedError(CLOSING) if self._runs.closing else gone)
            return
        done = self._callers.add(done, done)

        def decided(machine: RunMachine) -> None:
            try:
                machine.decide(path, ok, payload, done)
            except AgentrtError as error:
                done(error)

        self._runs.load(run_id, decided, done)

    def send(
        self,
        tenant: str,
        event: EventSend,
        done: Callable[[str | None, BaseException | None], None],
    ) -> None:
        """An event from outside; ``done(id, None)`` once it is durable, or was before under the same id."""
        if self._runs.closing:
            done(None, ClosedError(CLOSING))
            return
        done = self._callers.add(done, partial(done, None))
        event_id = event.id or new_run_id(self._runs.now_ns() // 1_000_000, self._random_bytes(10)).replace(
            "run_", "evt_"
        )

        def written(fresh: bool, error: BaseException | None) -> None:
            done(None if error is not None else event_id, error)

        def write(rows: tuple[Row, ...], told: Callable[[AgentrtError | None], None]) -> bool:
            self._access.commit_rows(rows, told)
            return True

        self._mailbox.publish(send_address(tenant, event), event_id, bytes(event.data), write, written)

    def approve(
        self, run_id: str, path: str | None, answer: bytes, done: Callable[[str | None, BaseException | None], None]
    ) -> None:
        """Answer an approval; ``done(path, None)`` once that is durable. Without a path the run must wait for exactly
        one. ``done(None, error)``: InputError if it waits for several, StepSettledError if it waits for none any
        more."""

        def give(machine: RunMachine) -> None:
            open_paths = [step[0] for step in machine.open_steps() if step[1] == "approval.request"]
            if path is None and len(open_paths) > 1:
                done(None, InputError(f"run {run_id} waits for {len(open_paths)} approvals", hint="Name the step"))
                return
            chosen = path if path is not None else (open_paths[0] if open_paths else "")

            def told(error: AgentrtError | None) -> None:
                done(None if error is not None else chosen, error)

            # A guest that may not go on does not get its answer. One that is not there is asked about when it is.
            there = machine.guest is not None and machine.phase <= Phase.LIVE
            verdict = self._revalidation.verdict(machine) if there and chosen in open_paths else Go()
            goes = isinstance(verdict, Go)
            if chosen not in open_paths or not machine.answer(chosen, True, answer, (), told, deliver=goes):
                done(None, StepSettledError("the approval is gone, answered, or too late", run=run_id, step=path))
            elif there:
                self._runs.follow(machine, verdict)

        def missing(error: BaseException | None) -> None:
            gone = StepSettledError("the run has ended, or there is none", run=run_id, step=path)
            done(None, error if error is not None else gone)

        try:
            parse_run_id(run_id)
            if self._runs.closing:
                raise ClosedError(CLOSING)
        except AgentrtError as error:
            done(None, error)
            return
        done = self._callers.add(done, partial(done, None))
        self._runs.with_run(run_id, give, missing)

    def answer_cancels(self, run_id: str, error: BaseException | None) -> None:
        """Who asked for the run's cancellation hears that it is durable, or why it will not be."""
        for done in self._cancels.pop(run_id, ()):
            done(error)

    def cancel_again(self, run_id: str, reason: str) -> None:
        """The request may have been refused with the rest, and whoever made it waits for the run's end."""

        def missing(error: BaseException | None) -> None:
            if error is not None:
                self._access.later(partial(self.cancel_again, run_id, reason))

        self._runs.with_run(run_id, lambda machine: machine.cancel(reason), missing)
