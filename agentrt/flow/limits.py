"""Which limits a gate has, as data: rules by scope and name. A profile or the configuration makes them.

A rule's name is exact, or ``*``: then every name has a limit of its own with these numbers; the exact one wins. Names:
a tenant, tool, provider, pool or class; ``provider/model`` for a model; ``caller>target`` for a pair of agents.
"""

from typing import Final

import msgspec

from agentrt.errors import ConfigError
from agentrt.flow.aimd import AimdLimits
from agentrt.flow.breaker import BreakerLimits
from agentrt.flow.buckets import RateLimit
from agentrt.flow.decisions import Scope
from agentrt.flow.retry import RetryLimits

#: What calls are limited by. An agent's own sums are budgets.
SCOPES: Final = (Scope.TENANT, Scope.CLASS, Scope.POOL, Scope.TOOL, Scope.PROVIDER, Scope.MODEL)
BREAKER_SCOPES: Final = (Scope.TOOL, Scope.PROVIDER, Scope.PAIR)


class RateRule(msgspec.Struct, frozen=True):
    scope: Scope
    name: str
    rate: RateLimit


class BulkheadRule(msgspec.Struct, frozen=True):
    """At most ``limit`` calls at once."""

    scope: Scope
    name: str
    limit: int
    kept_pct: int = 20


class AimdRule(msgspec.Struct, frozen=True):
    """Of calls of a model (``provider/model``), each class apart."""

    name: str
    limits: AimdLimits = AimdLimits()


class BreakerRule(msgspec.Struct, frozen=True):
    scope: Scope
    name: str
    limits: BreakerLimits = BreakerLimits()


class GateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """All limits of a gate. ``weights``: shares of tenants under one limit, 1 unless named. ``waiting_max``: calls that
    may wait; each takes some 500 bytes, payloads not counted, which the caller keeps. ``names_max``: names with a state
    of their own; those that nobody uses are let go first."""

    rates: tuple[RateRule, ...] = ()
    bulkheads: tuple[BulkheadRule, ...] = ()
    aimd: tuple[AimdRule, ...] = (AimdRule("*"),)
    breakers: tuple[BreakerRule, ...] = (
        BreakerRule(Scope.PROVIDER, "*"),
        BreakerRule(Scope.TOOL, "*"),
        BreakerRule(Scope.PAIR, "*"),
    )
    retry: RetryLimits = RetryLimits()
    weights: dict[str, int] = {}
    waiting_max: int = 100_000
    names_max: int = 10_000

    def __post_init__(self) -> None:
        for scope in (*(rule.scope for rule in self.rates), *(rule.scope for rule in self.bulkheads)):
            if scope not in SCOPES:
                raise ConfigError(f"a limit of {scope.value}s", hint="Use " + ", ".join(SCOPES))
        for breaker in self.breakers:
            if breaker.scope not in BREAKER_SCOPES:
                raise ConfigError(f"a breaker of {breaker.scope.value}s", hint="Use " + ", ".join(BREAKER_SCOPES))
        for bulkhead in self.bulkheads:
            if bulkhead.limit < 1 or not 0 <= bulkhead.kept_pct <= 90:
                raise ConfigError(f"a bulkhead {bulkhead.name} of {bulkhead.limit}, {bulkhead.kept_pct} % kept")
        for tenant, weight in self.weights.items():
            if not 1 <= weight <= 10_000:
                raise ConfigError(f"tenant {tenant} with weight {weight}", hint="1 to 10,000")
