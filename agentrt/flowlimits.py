"""What the gate and the loop guard get, from the settings."""

from typing import Final

from agentrt.config import Config, FlowConfig
from agentrt.flow.breaker import BreakerLimits
from agentrt.flow.buckets import RateLimit
from agentrt.flow.decisions import Scope
from agentrt.flow.limits import BREAKER_SCOPES, BreakerRule, BulkheadRule, GateLimits, RateRule
from agentrt.flow.loopguard import LoopLimits
from agentrt.flow.retry import RetryLimits
from agentrt.settings import Overrides

_MS: Final = 1_000_000
_OPEN_NS_MAX: Final = 300_000 * _MS
_ANY: Final = 10**12  # a limit that nobody meets
_NONE: Final = {"requests_per_minute": 0, "tokens_per_minute": 0, "at_once": 0}


def gate_limits(config: Config) -> GateLimits:
    """Rates, places, breakers, retries and weights."""
    flow = config.flow
    tables: dict[Scope, Overrides] = {
        Scope.TENANT: {"*": _base(flow), **{name: _base(flow) | table for name, table in flow.tenants.items()}},
        Scope.TOOL: flow.tools,
        Scope.CLASS: flow.classes,
        Scope.PROVIDER: flow.providers,
        Scope.MODEL: {f"{config.models.catalog[name]['provider']}/{name}": flow.models[name] for name in flow.models},
    }
    rates: list[RateRule] = []
    bulkheads: list[BulkheadRule] = []
    for scope, table in tables.items():
        base = table.get("*", _NONE)
        for name, limits in table.items():
            # A table that says 0 is an exception from what holds for all.
            requests, tokens, at_once = (limits.get(key) or (base[key] and _ANY) for key in _NONE)
            if requests:
                rates.append(RateRule(scope, name, RateLimit(requests)))
            if tokens:
                rates.append(RateRule(scope, name, RateLimit(tokens, unit="tokens")))
            if at_once:
                bulkheads.append(BulkheadRule(scope, name, at_once))
    failures = flow.breaker_failures or 1
    breaker = BreakerLimits(failures, 50, max(20, failures), flow.breaker_open_ms * _MS, _OPEN_NS_MAX)
    return GateLimits(
        rates=tuple(rates),
        bulkheads=tuple(bulkheads),
        breakers=tuple(BreakerRule(scope, "*", breaker) for scope in BREAKER_SCOPES) if flow.breaker_failures else (),
        retry=RetryLimits(
            config.limits.step_attempts_max,
            flow.retry_base_ms * _MS,
            flow.retry_cap_ms * _MS,
            flow.retry_after_max_ms * _MS,
        ),
        weights={name: table["weight"] for name, table in flow.tenants.items() if "weight" in table},
        waiting_max=flow.waiting_max,
    )


def loop_limits(config: Config) -> LoopLimits:
    """What the loop guard takes for a loop."""
    flow = config.flow
    return LoopLimits(flow.loop_iterations, 0, flow.loop_repeats, flow.loop_rallies)


def _base(flow: FlowConfig) -> dict[str, int]:
    """What holds for each tenant."""
    return {
        "requests_per_minute": flow.requests_per_minute,
        "tokens_per_minute": flow.tokens_per_minute,
        "at_once": flow.at_once,
    }
