"""Many children at once: what is asked for, and what to do when the ensemble's queue is full."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agentrt.agents.errors import EnsembleFullError
from agentrt.errors import InputError

if TYPE_CHECKING:
    from agentrt.agents.context import ChildRun

#: What `Context.spawn_many` may do when the queue is full.
WHEN_FULL: Final = ("block", "defer", "refuse", "consolidate")


class Task(msgspec.Struct, frozen=True):
    """A child to be started; the fields are those of `Context.spawn`."""

    agent: Callable[..., Any] | str
    input: Any = None
    tier: int | str | None = None
    detached: bool = False
    max_result_bytes: int | None = None
    budget: dict[str, int | float] | None = None


class Spawned:
    """The children that were started, in the order of their tasks; ``deferred`` are the tasks that were not."""

    def __init__(self, children: "list[ChildRun]", deferred: list[Task]) -> None:
        self.children: Final = children
        self.deferred: Final = deferred

    async def results(self) -> list[Any]:
        """Wait for all of them. Raises ChildFailedError for the first that did not succeed."""
        return [await child.result() for child in self.children]


Merge = Callable[[list[Task]], Task]
#: Starts a task and says what came of it: the child, or the error if there was no place for it.
Start = Callable[[list[Task], str], Any]


def checked_tasks(tasks: Iterable[Task | tuple[Callable[..., Any] | str, Any]]) -> list[Task]:
    """Pairs of agent and input are tasks as well. Raises InputError."""
    found = []
    for task in tasks:
        if isinstance(task, tuple) and len(task) == 2:
            task = Task(*task)
        if not isinstance(task, Task):
            raise InputError(f"{task!r:.200} is no task", hint="Give Task(agent, input), or (agent, input)")
        found.append(task)
    return found


async def spawn_many(start: Start, tasks: list[Task], when_full: str, merge: Merge | None) -> Spawned:
    """See `Context.spawn_many`. ``start(tasks, when_full)`` gives for each its child or its EnsembleFullError."""
    if when_full not in WHEN_FULL:
        raise InputError(f"when_full is no {when_full!r}", hint=", ".join(WHEN_FULL))
    if (merge is not None) is not (when_full == "consolidate"):
        raise InputError("merge= belongs to when_full='consolidate', which needs it")
    answers = await start(tasks, "block" if when_full == "block" else "refuse")
    children = [answer for answer in answers if not isinstance(answer, EnsembleFullError)]
    left = [task for task, answer in zip(tasks, answers, strict=True) if isinstance(answer, EnsembleFullError)]
    if not left or when_full == "defer":
        return Spawned(children, left)
    if merge is None:
        raise _with_started(next(answer for answer in answers if isinstance(answer, EnsembleFullError)), children)
    (merged,) = checked_tasks([merge(left)])
    (answer,) = await start([merged], "block")
    if isinstance(answer, EnsembleFullError):
        raise _with_started(answer, children)
    return Spawned([*children, answer], [])


def _with_started(error: EnsembleFullError, children: "list[ChildRun]") -> EnsembleFullError:
    error.details["started"] = [child.run_id for child in children]
    return error
