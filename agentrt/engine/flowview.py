"""What flow control has in force, as operators see it: profiles, the accounts that are fullest, breakers that are not
closed. Pure."""

from collections.abc import Iterable
from heapq import nlargest
from typing import TYPE_CHECKING, Final

import msgspec

from agentrt.flow.accounts import Account
from agentrt.flow.amounts import COUNTED, NO_LIMIT

if TYPE_CHECKING:
    from agentrt.engine.flow import Flow
    from agentrt.engine.gates import Gates

#: Rows of each kind: what is left out is further from its limit.
ROWS_MAX: Final = 200


class BudgetView(msgspec.Struct, frozen=True):
    """One limit of an account above runs. ``scope``: node, tenant or agent; ``tenant``: whose it is, "" for the node's;
    ``key``: what is counted, with its window, as limits are written."""

    scope: str
    name: str
    tenant: str
    key: str
    used: int
    held: int  # reserved by steps under way
    limit: int

    @property
    def filled(self) -> float:
        """The share of the limit that is used or held."""
        return (self.used + self.held) / self.limit if self.limit else 1.0


class BreakerView(msgspec.Struct, frozen=True):
    """A breaker that is not closed: ``state`` is open or half_open, until ``until_ns`` (Unix ns)."""

    scope: str
    name: str
    state: str
    until_ns: int


class FlowView(msgspec.Struct, frozen=True):
    """``known``: profiles that may be applied by name; ``applied``: those in force, the last one over the others."""

    known: tuple[str, ...]
    applied: tuple[str, ...]
    budgets: tuple[BudgetView, ...]
    breakers: tuple[BreakerView, ...]


def flow_view(flow: "Flow", gates: "Gates | None", known: Iterable[str]) -> FlowView:
    """As it is now, the fullest accounts first."""
    budgets = [view for account in flow.ledger.accounts() for view in _limits_of(account)]
    breakers = [] if gates is None else gates.gate.breakers()
    return FlowView(
        tuple(sorted(known)),
        tuple(profile.name for profile in flow.force.applied),
        tuple(nlargest(ROWS_MAX, budgets, key=lambda view: view.filled)),
        tuple(
            BreakerView(scope.value, name, breaker.state.name.lower(), breaker.until_ns)
            for scope, name, breaker in breakers[:ROWS_MAX]
        ),
    )


def _limits_of(account: Account) -> list[BudgetView]:
    tenant = account.id[1] if len(account.id) > 1 else ""
    found = []
    for window, limits, used in (
        ("", account.total, account.used),
        *((f"/{each.span.value}", each.limits, each.sums) for each in account.windows),
    ):
        for index, key in enumerate(COUNTED):
            if limits[index] != NO_LIMIT:
                found.append(
                    BudgetView(
                        account.scope.value,
                        account.name,
                        tenant,
                        key + window,
                        used[index],
                        account.held[index],
                        limits[index],
                    )
                )
    return found
