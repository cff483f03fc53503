"""Named places at which a crash test kills the process, so that a sweep can enumerate every durable edge.

``AGENTRT_CRASH_AT="name:n"`` ends the process with SIGKILL when it passes the place for the n-th time (1 is the first).
``every`` does so at every pass, which makes sense once `act_with` has put something else in the place of SIGKILL: a
sweep then lists what is passed, or kills another process. Unset, a place costs one test of a constant.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Final

from agentrt.errors import ConfigError

VARIABLE: Final = "AGENTRT_CRASH_AT"
EVERY: Final = "every"

#: ``before_commit``: the batch is made, the store does not have it; ``after_commit``: the store has it, it may or may
#: not be durable; ``durable``: the store has said so and nothing followed from it yet.
POINTS: Final = (
    "accept.before_commit",
    "accept.after_commit",
    "accept.durable",
    "prepare.before_commit",
    "prepare.after_commit",
    "prepare.durable",
    "tool.before_dispatch",
    "tool.after_dispatch",
    "tool.outcome",
    "guest.before_complete",
    "guest.after_complete",
    "outcome.before_commit",
    "outcome.after_commit",
    "cancel.before_commit",
    "cancel.after_commit",
    "cancel.durable",
    "wait.before_commit",
    "wait.after_commit",
    "upgrade.before_commit",
    "upgrade.after_commit",
    "recover.before_start",
    "recover.after_start",
    "lock.before_commit",
    "lock.after_commit",
    "ending.before_commit",
    "ending.after_commit",
    "checkpoint.before_commit",
    "checkpoint.after_commit",
    "checkpoint.durable",
    "frame.write",
    "frame.sync",
    "frame.rename",
    "frame.remove",
    "frame.before_name",
    "frame.named",
    "end.before_commit",
    "end.after_commit",
    "end.durable",
)


def parse(text: str) -> tuple[str, int]:
    """(name, pass) of the variable's value; (EVERY, 0). Raises ConfigError."""
    if text == EVERY:
        return EVERY, 0
    name, _, number = text.partition(":")
    if name not in POINTS or not number.isdecimal() or int(number) < 1:
        raise ConfigError(
            f"{VARIABLE}={text!r} is no crash point", hint="every, or name:n, name one of " + ", ".join(POINTS)
        )
    return name, int(number)


def kill_self(name: str, count: int) -> None:
    """What happens at the pass that is asked for, unless `act_with` says otherwise."""
    os.kill(os.getpid(), signal.SIGKILL)


_name, _count = parse(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else ("", 0)
#: Whether a point is armed in this process; hot paths look at it before they call `hit`.
ARMED: Final = bool(_name)
_passes: Counter[str] = Counter()
_act: Callable[[str, int], None] = kill_self


def act_with(act: Callable[[str, int], None]) -> None:
    """Have ``act(name, pass)`` called instead, on the thread that passes; passes are counted from 1 again."""
    global _act
    _act = act
    _passes.clear()


def at_disk(what: str) -> None:
    """Pass the place at which that is about to be done to the file of a frame."""
    hit(f"frame.{what}")


def hit(name: str) -> None:
    """Pass the place called ``name``."""
    _passes[name] += 1
    if _name == EVERY or (name == _name and _passes[name] == _count):
        _act(name, _passes[name])
