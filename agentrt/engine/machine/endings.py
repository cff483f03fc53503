"""How a run ends, unwinds before that, waits for an operator, or leaves memory."""

from collections.abc import Callable
from typing import Any

import msgspec

from agentrt.backends.base import Exit
from agentrt.engine.budget import deadline_limit
from agentrt.engine.callbacks import Callback, callback_row
from agentrt.engine.crashpoints import ARMED, hit
from agentrt.engine.machine.replay import Replaying
from agentrt.engine.machine.state import (
    ACCEPTING,
    DEADLINE_PATH,
    DISCARDED,
    ENDED,
    ENDING,
    GONE,
    LIVE,
    NO_COST,
    PARKING,
    REPLAY,
    START_PATH,
    THE_RUN_ENDS,
    encode,
)
from agentrt.engine.outcome import Outcome, failed, outcome_of
from agentrt.engine.steps import dirty_row
from agentrt.errors import (
    AgentrtError,
    DeniedError,
    NonDeterminismError,
    RunCancelledError,
    RunError,
    RunTimedOutError,
    StoreError,
)
from agentrt.records import CancelRequested, Cost, Ending, RunEnded, Waiting
from agentrt.states import RunState
from agentrt.stores.base import INBOX, READY, TIMERS, Row
from agentrt.stores.keys import inbox_key, timer_key


class EndingRun(Replaying):
    """Layer: the ways out."""

    __slots__ = ()

    def time_out(self) -> None:
        """End the run as TIMED_OUT: its deadline has passed."""
        limit = deadline_limit(self.accepted)
        what = "the run's deadline has passed"
        if limit == "wall_s":
            what = f"the run has used its {self.accepted.budget['wall_s']:g} seconds of wall time"
        self._end_by_time(what, limit)

    def _end_by_time(self, what: str, limit: str) -> None:
        if self.phase is ACCEPTING or self.phase >= ENDING or self.ending is not None:
            return
        if self.cancel_reason is not None:  # it was cancelled first, and loaded just now
            self._cancelled()
            return
        error = RunTimedOutError(what, run=self.run_id, limit=limit)
        self._end(Outcome(RunState.TIMED_OUT, None, encode(error.to_dict())), error.message, limit)

    def refuse(self, error: DeniedError) -> None:
        """End the run as FAILED: it may not go on."""
        if self.phase is ACCEPTING or self.phase >= ENDING or self.ending is not None:
            return
        if self.cancel_reason is not None:
            self._cancelled()
            return
        self._end(failed(error), error.message, code=error.code)

    def cancel(self, reason: str) -> None:
        """End the run as CANCELLED. The guest unwinds, or goes at once; a step in flight is still recorded.

        `RunPort.on_cancelled` follows when the request is durable, unless the run is cancelled or ended already."""
        if self.phase >= ENDED or self.phase is ACCEPTING or self.cancel_reason is not None:
            return
        self.cancel_reason = reason
        self._pending.append(CancelRequested(self._next_seq(), self._time(), reason))
        self._commit(self._on_cancelled, "cancel")
        self._cancelled()

    def end_cancelled(self) -> None:
        """For a run that was loaded with its cancel flag set: end it. If it still has something to unwind, it is not
        past LIVE afterwards and needs a guest."""
        if self.ending is None:
            self._cancelled()

    def end_told(self) -> None:
        """For a run that was loaded while it ended, and whose agent has nothing to unwind."""
        if self.phase <= LIVE:
            self._end_guest()

    def fail(self, error: AgentrtError) -> None:
        """End the run as FAILED: its guest cannot be started."""
        if self.phase <= LIVE:
            self._fail(error, {})

    def wait_for_operator(self, path: str | None, detail: str) -> None:
        """Let the run wait until somebody steps in, and drop its guest. `RunPort.on_parked` follows. A run that was
        told to end does not wait: it ends without unwinding."""
        if self.phase >= ENDING:
            return
        if self.ending is not None:
            self._end_guest()
            return
        wait = self.wait
        if wait is None or (wait.reason, wait.path, wait.detail) != ("operator", path, detail):
            self._lose_prepared()
            if self.state is RunState.WAITING:
                self._stop_waiting()
                self._rows.append(self._ready_row())
            self.wait = Waiting(self._next_seq(), self._time(), "operator", path, detail)
            self.state = RunState.WAITING
            self._pending.append(self.wait)
            self._commit(None, "wait")
        self.phase = PARKING
        self._kill()
        self._maybe_parked()

    def child_gone(self, child: str) -> None:
        """The child has ended, durably."""
        if child in self._children:
            self._children.remove(child)
            self._maybe_end()

    def _cancelled(self) -> None:
        error = RunCancelledError(self.cancel_reason or "cancelled", run=self.run_id)
        self._end(Outcome(RunState.CANCELLED, None, encode(error.to_dict())), error.message)

    def _check_journal(self) -> None:
        limit = self._port.journal_bytes_max
        if self.phase > LIVE or self.ending is not None:
            return  # unwinding has an allowance of its own
        self._fail(
            RunError(
                f"the run's journal has more than {limit} bytes since its last checkpoint",
                run=self.run_id,
                limit="limits.journal_bytes_max",
            ),
            {},
        )

    def _fail(self, error: AgentrtError, details: dict[str, Any]) -> None:
        """End the run as FAILED, wherever its guest is, which is not trusted to unwind."""
        if self.ending is None:
            self.outcome = failed(error, details)
            self._sudden = not isinstance(error, NonDeterminismError)
        self._returned = False
        self._end_guest()

    def _end(
        self,
        outcome: Outcome,
        reason: str,
        limit: str | None = None,
        code: str | None = None,
        place: tuple[int, int, Cost] = (-1, -1, NO_COST),
    ) -> None:
        """End the run: its guest unwinds first if its agent has something to unwind. ``place``: as in `Ending`."""
        if self.ending is not None:
            return
        self.outcome = outcome
        self._returned = False
        waits_to_begin = self.wait is not None and self.wait.path == START_PATH
        begun = not waits_to_begin and (self.guest is not None or self.phase is PARKING or self.loaded_version > 0)
        if not self.unwinds or self.phase not in (LIVE, REPLAY, PARKING) or self._restarting or not begun:
            self._sudden = True
            self._end_guest()
            return
        self._drop_waits(THE_RUN_ENDS)
        self._abort([step for step in self.open.values() if step.tool and not step.called], THE_RUN_ENDS)
        self._drop_pure()
        self._stop_models(self.open.values())
        self._commit_ending(None, outcome.state, reason, limit, code, place)
        if self.phase is PARKING:
            pass  # it is read again once it is parked, and unwinds then
        elif self.guest is None:
            self.phase = REPLAY  # its guest starts yet, and unwinds where it would go live
        elif self.phase is LIVE:
            self._begin_unwinding()
        elif self.phase is REPLAY:
            self._advance()
        # else it is read again once it is parked, and unwinds then

    def _outcome_of(self, exit: Exit) -> Outcome:
        if self._history:
            self._missed(f"ended ({exit.reason})")
            assert self.outcome is not None
            return self.outcome
        return outcome_of(exit, self.run_id, self.accepted, self._port.result_bytes_max)

    def _end_guest(self) -> None:
        self.phase = ENDING
        self._drop_waits(THE_RUN_ENDS)
        self._lose_prepared()
        self._history = {}
        self._drop_pure()
        self._stop_models(self.open.values())
        self._kill()
        self._maybe_end()

    def _kill(self) -> None:
        if self.guest is not None:
            self.guest.kill()

    def on_cut_short(self, reason: str, message: str, answers: int) -> bool:
        """See `GuestEvents`."""
        if self.phase not in (REPLAY, LIVE) or not self._may_be_brought_back:
            return False
        if self.ending is not None:
            if not self._history:
                self._unwind_after(answers, self._asked, Cost())
        elif self._history:
            return False  # what its handlers ask for would be taken for steps that it has not asked for again
        else:
            self._cut_short(Exit(reason, 0, None, message, 0, 0, 0, 0, 0, 0, answers=answers, steps=self._asked))
        if not self._unwinding:
            self._begin_unwinding()
        return True

    @property
    def _may_be_brought_back(self) -> bool:
        """Whether its guest, which cannot go on, has something to unwind, and is brought back for that the first
        time."""
        again = self.ending is not None and self.ending.answers >= 0
        return self.unwinds and not (self._handlers or self._restarting or again)

    def _cut_short(self, exit: Exit) -> None:
        """End the run as the guest's end says, which did not come by itself."""
        outcome = outcome_of(exit, self.run_id, self.accepted, self._port.result_bytes_max)
        told = msgspec.json.decode(outcome.error or b"{}", type=dict[str, Any])
        cost = Cost(exit.fuel, exit.slot_ns)
        self._end(outcome, told["message"], told.get("limit"), told["code"], (exit.answers, exit.steps, cost))

    def _unwind_after(self, answers: int, steps: int, cost: Cost) -> None:
        """It was told to end, and did not come to that: it unwinds where it waited last."""
        assert self.ending is not None
        place = {"seq": self._next_seq(), "at_ns": self._time(), "answers": answers, "steps": steps, "cost": cost}
        self.ending = msgspec.structs.replace(self.ending, **place)
        self._pending.append(self.ending)
        self._commit(None, "ending")

    def _comes_back_to_unwind(self, exit: Exit) -> bool:
        """The guest is gone, wherever its run was: whether another one unwinds, from where this one waited last."""
        if exit.answers < 0 or self._history or not self._may_be_brought_back:
            return False
        self.phase = PARKING  # what is in flight is recorded first
        if self.ending is None:
            self._cut_short(exit)
        else:
            self._unwind_after(exit.answers, exit.steps, Cost(exit.fuel, exit.slot_ns))
        self._maybe_parked()
        return True

    @property
    def cost(self) -> Cost:
        """What its guests have used of what counts, as far as they are gone."""
        before = Cost() if self.ending is None else self.ending.cost
        if self.exit is None:
            return before
        return Cost(max(self.exit.fuel, before.fuel), max(self.exit.slot_ns, before.slot_ns))

    def _after_end(self) -> None:
        phase = self.phase
        self.flush()
        if phase is ENDING:
            self._maybe_end()
        elif phase is PARKING:
            self._maybe_parked()

    def _maybe_end(self) -> None:
        if self.phase is not ENDING or self.guest is not None or self._keyed_open or self.outcome is None:
            return
        if self._children:
            if not self._children_told:
                self._children_told = True
                if self._sudden and self.ending is None and self.cancel_reason is None:
                    self._journal_ending(self.outcome)
                elif self._pending or self._inflight:  # a replay without them might end in another way
                    self._commit(self._end_children, "outcomes")
                else:
                    self._end_children()
            return
        outcome, cost = self.outcome, self.cost
        self.phase = ENDED
        self.state = outcome.state
        self._stop_waiting()
        self._pending.append(
            RunEnded(self._next_seq(), self._time(), outcome.state._value_, outcome.result, outcome.error, cost)
        )
        accepted = self.accepted
        self._rows.append(Row(READY, self.ready_key(), None))
        if accepted.deadline_ns:
            self._rows.append(Row(TIMERS, timer_key(accepted.deadline_ns, self.run_id, DEADLINE_PATH), None))
        self._rows += (Row(INBOX, inbox_key(self.run_id, child), None) for child in sorted(self._unjoined))
        self._rows += (dirty_row(accepted.tenant, name, token) for name, token in self.locks.items())
        if self.account is not None:
            self._rows += self._port.end_account(self)
        if accepted.callback_url is not None:
            due = Callback(accepted.tenant, accepted.callback_url, 0, self._pending[-1].at_ns)
            self._rows.append(callback_row(self.run_id, due))
        if accepted.parent is not None:
            parent, _, path = accepted.parent.partition("/")
            self._rows.append(Row(INBOX, inbox_key(parent, self.run_id), path.encode()))
        self._commit(self._on_ended, "end")

    def _journal_ending(self, outcome: Outcome) -> None:
        """Nothing unwinds, but the children are to end for this run's end: that it ends is durable before they are
        told, or a run whose node goes meanwhile would go on and find them cancelled."""
        told = msgspec.json.decode(outcome.error or b"{}", type=dict[str, Any])
        reason, limit, code = str(told.get("message", "")), told.get("limit"), told.get("code")
        self._commit_ending(self._end_children, outcome.state, reason, limit, code, (-1, -1, self.cost))

    def _commit_ending(
        self,
        after: Callable[[], None] | None,
        towards: RunState,
        reason: str,
        limit: str | None,
        code: str | None,
        place: tuple[int, int, Cost],
    ) -> None:
        """That the run ends, and how, is on its way to the journal; ``after`` happens when it is durable."""
        if self.state is RunState.WAITING:
            self._rows.append(self._ready_row())
        self.state = RunState.ENDING
        self._stop_waiting()
        self.ending = Ending(self._next_seq(), self._time(), towards.value, reason, limit, code, *place)
        self._pending.append(self.ending)
        self._commit(after, "ending")

    def _end_children(self) -> None:
        if self.phase is ENDING and self._children:
            self._port.end_children(self, tuple(sorted(self._children)))  # `child_gone` follows for each

    def _on_cancelled(self) -> None:
        if ARMED:
            hit("cancel.durable")
        self._port.on_cancelled(self)

    def _on_ended(self) -> None:
        if ARMED:
            hit("end.durable")
        self._port.on_ended(self)

    def _maybe_parked(self) -> None:
        if self.phase is PARKING and self.settled:
            if self._pending:
                self.flush()
            else:
                self.phase = GONE  # what still refers to it gets no answer in any more
                self._port.on_parked(self)

    def _refused(self, error: StoreError) -> None:
        if self.phase is not DISCARDED:
            self._discard(error)
        else:
            self._maybe_gone()

    def _discard(self, error: AgentrtError) -> None:
        self.phase = DISCARDED
        self._error = error
        self._pending.clear()
        self._rows.clear()
        told, self._told = self._told, []
        for tell in told:
            tell(error)
        self._kill()
        self._maybe_gone()

    def _maybe_gone(self) -> None:
        if self.settled and self._error is not None:
            self._port.on_discarded(self, self._error)
