"""Every label of every metric, with the values that it may have.

Ids of runs, tenants, agents, tools, models are never labels: each value of a label is a series that is kept for ever.
Names in the configuration (of service-level targets, of classes of tools, of sources of events) are bounded by it and
may be.
"""

from typing import Final

from agentrt.flow.decisions import Action, Control, Scope
from agentrt.states import TERMINAL
from agentrt.syscalls import TABLE
from agentrt.tiers import Tier
from agentrt.tools.declare import CLASSES_DEFAULT

TIERS: Final = tuple(str(int(tier)) for tier in Tier)
#: Of runs: `agent`, or `code` for native commands.
CLASSES: Final = ("agent", "code")
STATES: Final = tuple(sorted(state.value for state in TERMINAL))
OPS: Final = tuple(sorted(call.op for call in TABLE if call.step))
OUTCOMES: Final = ("ok", "failed")

LABELS: Final[dict[str, frozenset[str]]] = {
    "tier": frozenset(TIERS),
    "class": frozenset((*CLASSES, *CLASSES_DEFAULT)),
    "state": frozenset(STATES),
    "op": frozenset(OPS),
    "outcome": frozenset(OUTCOMES),
    "control": frozenset(item.value for item in Control),
    "action": frozenset(item.value for item in Action),
    "scope": frozenset(item.value for item in Scope),
}

_NATIVE_BACKENDS: Final = frozenset({"process"})


def class_of(backend: str | None) -> str:
    """The class of runs of agents of that backend; None: it is not known any more."""
    return "code" if backend in _NATIVE_BACKENDS else "agent"
