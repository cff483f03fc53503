"""Parents and children: spawning, joining, and ending together.

A child's id follows from its parent's step, so spawning twice makes one run. A child that ends leaves a row in INBOX,
in the transaction of its RunEnded; its parent removes it with the outcome of its join. So an end that was durable
before a crash is found at the next start, whether the parent was in memory or not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from agentrt.engine.machine import RunMachine
from agentrt.engine.ports import Runs
from agentrt.engine.steps import Join, Spawn, StepInFlight, decode
from agentrt.errors import AgentrtError, InputError
from agentrt.ids import child_run_id
from agentrt.records import RunAccepted, RunEnded
from agentrt.states import TERMINAL
from agentrt.stores.base import INBOX, Row, Store
from agentrt.stores.keys import inbox_key

_encode: Final = msgspec.json.encode


class FamilyRuns(Runs, Protocol):
    """What the family needs of the engine."""

    def in_memory(self, run_id: str) -> RunMachine | None: ...

    def accept_child(
        self, parent: RunMachine, run_id: str, path: str, spawn: Spawn, done: Callable[[AgentrtError | None], None]
    ) -> None:
        """Accept the run; a child that exists already is accepted. Raises what `Door.enter_child` raises."""

    def cancel_child(self, run_id: str, reason: str, gone: Callable[[], None]) -> None:
        """Cancel it; ``gone`` is called if it has ended already or never was."""


class Ended(msgspec.Struct, frozen=True):
    """How a child ended."""

    state: str
    result: bytes | None
    error: bytes | None

    def answer(self) -> tuple[bool, bytes]:
        """What a join of it is answered."""
        if self.state == "SUCCEEDED":
            return True, self.result or b"null"
        error = msgspec.Raw(self.error or b"null")
        return False, _encode(
            {"code": "child_failed", "message": f"the child ended {self.state}", "state": self.state, "error": error}
        )


class Family:
    """Loop thread only."""

    def __init__(self, runs: FamilyRuns) -> None:
        self._runs = runs

    def spawn(self, parent: RunMachine, step: StepInFlight) -> None:
        """The parent's step is durable."""
        spawn = decode(step.op, step.request)
        assert isinstance(spawn, Spawn)
        path, run_id = step.path, child_run_id(parent.run_id, step.path)

        def done(error: AgentrtError | None) -> None:
            if error is None:
                parent.answer(path, True, _encode({"run_id": run_id}))
            else:
                parent.answer(path, False, _encode(error.to_dict()))

        try:
            self._runs.accept_child(parent, run_id, path, spawn, done)
        except AgentrtError as error:
            done(error)

    def join(self, parent: RunMachine, step: StepInFlight) -> None:
        """The parent's step is durable."""
        join = decode(step.op, step.request)
        assert isinstance(join, Join)
        self._join(parent.run_id, step.path, join.run_id)

    def _join(self, parent_id: str, path: str, child: str) -> None:
        def answer(ok: bool, payload: bytes) -> None:
            def answer_it(machine: RunMachine) -> None:
                machine.answer(path, ok, payload)

            # The parent may have been parked meanwhile, and its machine with it.
            self._runs.with_run(parent_id, answer_it, missing)

        def missing(error: BaseException | None) -> None:
            if error is not None:
                self._runs.later(partial(self._join, parent_id, path, child))

        def found(read: Any, error: BaseException | None) -> None:
            if error is not None:
                missing(error)
            elif read is None or not _is_parent(parent_id, read[0]):
                answer(*_not_its_child(parent_id, path, child))
            elif read[1] is not None:
                answer(*read[1].answer())

        machine = self._runs.in_memory(child)
        if machine is None:
            self._runs.read(lambda store: _read_child(store, child), found)
        elif not _is_parent(parent_id, machine.accepted):
            answer(*_not_its_child(parent_id, path, child))
        # else its end tells the parent

    def ended(self, child: str, accepted: RunAccepted, ended: Ended) -> None:
        """A run has ended, durably: tell its parent."""
        if accepted.parent is None:
            return
        parent_id = accepted.parent.partition("/")[0]

        def tell(parent: RunMachine) -> None:
            for path in parent.joins(child):
                parent.answer(path, *ended.answer())
            parent.child_gone(child)

        def missing(error: BaseException | None) -> None:
            if error is None:  # the parent has ended: nobody will ask
                self._runs.drop((Row(INBOX, inbox_key(parent_id, child), None),))
            else:
                self._runs.later(lambda: self.ended(child, accepted, ended))

        self._runs.with_run(parent_id, tell, missing)

    def ended_before(self, parent_id: str, child: str) -> None:
        """After a start: INBOX says that the child has ended."""

        def found(read: Any, error: BaseException | None) -> None:
            if error is not None:
                self._runs.later(lambda: self.ended_before(parent_id, child))
            elif read is not None and read[1] is not None:
                self.ended(child, read[0], read[1])

        self._runs.read(lambda store: _read_child(store, child), found)

    def end_children(self, parent: RunMachine, children: tuple[str, ...]) -> None:
        """The parent ends: what it started and nobody joined ends first."""
        for child in children:
            self._runs.cancel_child(child, f"its parent {parent.run_id} ended", partial(parent.child_gone, child))


def _not_its_child(run_id: str, path: str, child: str) -> tuple[bool, bytes]:
    error = InputError(f"{child} is no run that this run has started", run=run_id, step=path)
    return False, _encode(error.to_dict() | {"code": "not_a_child"})


def _is_parent(run_id: str, child: RunAccepted) -> bool:
    return child.parent is not None and child.parent.partition("/")[0] == run_id


def _read_child(store: Store, child: str) -> tuple[RunAccepted, Ended | None] | None:
    """On a reader thread: how it was accepted, and how it ended."""
    head = store.read_head(child)
    if head is None:
        return None
    first = store.read_records(child, 0, 1)[0] if head.state not in TERMINAL else None
    if isinstance(first, RunAccepted):
        return first, None
    records = store.read_records(child)
    accepted, last = records[0], records[-1]
    if not isinstance(accepted, RunAccepted) or not isinstance(last, RunEnded):
        return None
    return accepted, Ended(last.state, last.result, last.error)
