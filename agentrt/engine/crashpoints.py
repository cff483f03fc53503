"""Named places at which a crash test kills the process, so that a sweep can enumerate every durable edge.

``AGENTRT_CRASH_AT="name:n"`` ends the process with SIGKILL when it passes the place for the n-th time (1 is the first).
Unset, a place costs one test of a constant.
"""

import os
import signal
from typing import Final

from agentrt.errors import ConfigError

VARIABLE: Final = "AGENTRT_CRASH_AT"

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
    "end.before_commit",
    "end.after_commit",
    "end.durable",
)


def parse(text: str) -> tuple[str, int]:
    """(name, pass) of the variable's value. Raises ConfigError."""
    name, _, number = text.partition(":")
    if name not in POINTS or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{VARIABLE}={text!r} is no crash point", hint="name:n, name one of " + ", ".join(POINTS))
    return name, int(number)


_name, _left = parse(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else ("", 0)
#: Whether a point is armed in this process; hot paths look at it before they call `hit`.
ARMED: Final = bool(_name)


def hit(name: str) -> None:
    """Pass the place called ``name``."""
    global _left
    if name == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
