"""What the gate, the loop guard and admission get, from the settings."""

from collections.abc import Sequence
from typing import Final

from agentrt.config import Config, FlowConfig
from agentrt.flow.admission import AdmissionLimits, Bound
from agentrt.flow.aimd import AimdLimits
from agentrt.flow.breaker import BreakerLimits
from agentrt.flow.buckets import RateLimit
from agentrt.flow.classifier import Classifier, Rule
from agentrt.flow.decisions import Scope
from agentrt.flow.limits import BREAKER_SCOPES, AimdRule, BreakerRule, BulkheadRule, GateLimits, RateRule
from agentrt.flow.loopguard import LoopLimits
from agentrt.flow.retry import RetryLimits
from agentrt.flow.urgent import UrgentRates
from agentrt.settings import Overrides

_MS: Final = 1_000_000
_OPEN_NS_MAX: Final = 300_000 * _MS
_QUEUES: Final = {"queue_items_max", "queue_bytes_max"}
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
        weights=_weights(flow),
        waiting_max=flow.waiting_max,
        aimd=(
            AimdRule("*", AimdLimits(latency_ns=flow.latency_ms * _MS)),
            *(
                AimdRule(f"{config.models.catalog[name]['provider']}/{name}", AimdLimits(latency_ns=ms * _MS))
                for name, table in flow.models.items()
                if (ms := table.get("latency_ms")) is not None
            ),
        ),
    )


def admission_limits(config: Config) -> AdmissionLimits:
    """Who may be accepted, and who waits at the door."""
    flow, scheduler = config.flow, config.scheduler

    def bounds(tables: Overrides, items: int, size: int) -> dict[str, Bound]:
        return {
            name: Bound(table.get("queue_items_max", items), table.get("queue_bytes_max", size))
            for name, table in tables.items()
            if _QUEUES & table.keys()
        }

    tiers = [Bound(*pair) for pair in zip(flow.queue_tier_items_max, flow.queue_tier_bytes_max, strict=True)]
    return AdmissionLimits(
        node=Bound(scheduler.queue_items_max, scheduler.queue_bytes_max),
        tiers=(tiers[0], tiers[1], tiers[2], tiers[3]),
        classes=bounds(flow.classes, 0, 0),
        tenant=Bound(flow.queue_items_max, flow.queue_bytes_max),
        tenants=bounds(flow.tenants, flow.queue_items_max, flow.queue_bytes_max),
        tier_pct=flow.queue_tier_pct,
        wait_ns=per_tier(flow.admission_wait_ms),
        door=Bound(flow.door_items_max, flow.door_bytes_max),
        weights=_weights(flow),
    )


def classifier(config: Config, rules: Sequence[Rule]) -> Classifier:
    """The rules of the file, under the tiers that tenants may have. Raises ConfigError."""
    flow = config.flow
    most = {name: table["max_tier"] for name, table in flow.tenants.items() if "max_tier" in table}
    return Classifier(rules, most, flow.max_tier)


def urgent_rates(config: Config) -> UrgentRates:
    """How often tenants may begin urgent runs."""
    flow = config.flow
    own = {name: table["urgent_per_minute"] for name, table in flow.tenants.items() if "urgent_per_minute" in table}
    return UrgentRates(flow.urgent_per_minute, own)


def per_tier(each_ms: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The same in ns."""
    return each_ms[0] * _MS, each_ms[1] * _MS, each_ms[2] * _MS, each_ms[3] * _MS


def _weights(flow: FlowConfig) -> dict[str, int]:
    return {name: table["weight"] for name, table in flow.tenants.items() if "weight" in table}


def loop_limits(config: Config) -> LoopLimits:
    """What the loop guard takes for a loop."""
    flow = config.flow
    return LoopLimits(flow.loop_iterations, flow.loop_spend_microdollars, flow.loop_repeats, flow.loop_rallies)


def _base(flow: FlowConfig) -> dict[str, int]:
    """What holds for each tenant."""
    return {
        "requests_per_minute": flow.requests_per_minute,
        "tokens_per_minute": flow.tokens_per_minute,
        "at_once": flow.at_once,
    }
