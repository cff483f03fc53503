"""What flow control decides, as events: who, which limit, which value, what was done. One vocabulary for all controls.

Pure data. A control returns its decisions to whoever called it; who keeps, counts or shows them is the caller's
business. A grant that was never in doubt is no decision. Metrics may use ``control``, ``action`` and ``scope`` as
labels, since these are fixed sets; ``name`` and ``limit`` hold names of users and must never be one.
"""

from enum import StrEnum
from typing import Final

import msgspec


class Control(StrEnum):
    """Which control has decided."""

    BUDGET = "budget"
    QUOTA = "quota"
    CAPACITY = "capacity"
    PROFILE = "profile"
    RATE = "rate"
    CONCURRENCY = "concurrency"  # AIMD
    BREAKER = "breaker"
    BULKHEAD = "bulkhead"
    RETRY = "retry"
    LOOP = "loop"
    ADMISSION = "admission"
    CLASSIFIER = "classifier"
    TIMEOUT = "timeout"
    POLICY = "policy"
    ROUTING = "routing"


class Action(StrEnum):
    """What was done."""

    WAIT = "wait"  # later: nothing is taken, nothing is lost
    GRANT = "grant"  # to one that waited, or that was in doubt
    REFUSE = "refuse"  # an error for the caller; nothing was begun
    DEFER = "defer"  # put off by the caller's choice
    CONSOLIDATE = "consolidate"  # several made one by the caller's choice
    CUT = "cut"  # stopped at its limit while under way
    END = "end"  # the run ends
    PARK = "park"  # the run waits without a slot
    SHED = "shed"  # given up before it was accepted
    RETRY = "retry"
    GIVE_UP = "give_up"  # no further attempt
    OPEN = "open"  # a breaker
    PROBE = "probe"  # a breaker lets one call through
    CLOSE = "close"  # a breaker
    RAISE = "raise"  # a limit that adapts
    LOWER = "lower"
    RESET = "reset"  # a window begins
    OVERSPEND = "overspend"  # more was used than was reserved: the provider's usage is the truth
    APPLY = "apply"  # a profile
    ROLL_BACK = "roll_back"
    CLASSIFY = "classify"
    FALL_BACK = "fall_back"  # to another agent or model


class Scope(StrEnum):
    """What ``name`` names. The first five are the levels of the budgets, from the top down."""

    NODE = "node"
    TENANT = "tenant"
    AGENT = "agent"  # tenant/agent
    ENSEMBLE = "ensemble"  # its root run
    RUN = "run"
    CLASS = "class"
    POOL = "pool"
    TOOL = "tool"
    PROVIDER = "provider"
    MODEL = "model"  # provider/model
    PAIR = "pair"  # caller>target, agents
    TIER = "tier"
    DOOR = "door"
    PROFILE = "profile"


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision. Money is in micro-dollars, times are Unix ns (``at_ns``, ``until_ns``), other values in the unit of
    their limit."""

    at_ns: int
    control: Control
    action: Action
    scope: Scope
    name: str = ""  # "" for the node
    limit: str = ""  # which limit, e.g. "tokens/day", "requests/60s"
    value: int = 0  # what it stood at, or what was asked for on top of ``bound`` being used up
    bound: int = 0  # what the limit is; 0 if it has no number
    run: str | None = None
    step: str | None = None
    until_ns: int = 0  # when it may be otherwise; 0: nobody knows
    detail: str = ""  # for people, at most DETAIL_CHARS_MAX

    @property
    def who(self) -> str:
        """``scope:name``, for people and histories."""
        return f"{self.scope.value}:{self.name}" if self.name else self.scope.value


DETAIL_CHARS_MAX: Final = 500

#: How a run's wait is called while a control keeps it (`agentrt.states.WAIT_REASONS`).
WAIT_REASON: Final = {
    Control.BUDGET: "quota",
    Control.QUOTA: "quota",
    Control.RATE: "rate",
    Control.CONCURRENCY: "rate",
    Control.BREAKER: "breaker",
    Control.BULKHEAD: "pool",
    Control.RETRY: "rate",
    Control.CAPACITY: "space",
    Control.ADMISSION: "space",
}
