"""What profiles say of queues (what may be accepted and not ended, who waits at the door) and of rates: checked, and
put over what the configuration has. Pure.

As in limits, a number given here replaces the same number below, and others of the same name stay.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agentrt.errors import InputError
from agentrt.flow.admission import AdmissionLimits, Bound
from agentrt.flow.buckets import RateLimit
from agentrt.flow.decisions import Scope
from agentrt.flow.limits import SCOPES, RateRule

Said = Mapping[str, Mapping[str, int]]

_MS: Final = 1_000_000
#: Of what calls may have rates: a class of tools is a pool of hosts.
_RATED: Final = tuple(scope for scope in SCOPES if scope is not Scope.POOL)
_MOST: Final = 2**53 - 1
#: A rate that nobody meets: an exception from one of any name.
NO_RATE: Final = 10**12
_UNITS: Final = {"requests_per_minute": "requests", "tokens_per_minute": "tokens"}
_TIERS: Final = tuple(f"tier:{tier}" for tier in range(4))
#: What each kind of queue may have: the least and the most of each number. 0 items or bytes: not bounded.
_SIZES: Final = {"items": (0, _MOST), "bytes": (0, _MOST)}
_BOUNDED: Final = {"items": (1, _MOST), "bytes": (1, _MOST)}
_OF_TIER: Final = {**_SIZES, "pct": (1, 100), "wait_ms": (0, 86_400_000)}


def check_queues(what: str, said: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Of ``node``, ``door``, ``tier:0`` to ``tier:3``, ``class:NAME`` and ``tenant:NAME`` (``*``: each that has no
    bound of its own). Raises InputError."""
    found = {}
    for name, table in said.items():
        scope, _, rest = name.partition(":")
        if name in ("node", "door"):
            known = _BOUNDED
        elif name in _TIERS:
            known = _OF_TIER
        elif scope in ("class", "tenant") and rest:
            known = _SIZES
        else:
            hint = "Use node, door, tier:0 to tier:3, class:NAME, tenant:NAME or tenant:*"
            raise InputError(f"{what}: queues of {name!r}", hint=hint)
        found[name] = _numbers(f"{what}: the queue of {name}", table, known)
    return found


def check_rates(what: str, said: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Of ``scope:NAME``, the scopes being those of calls. Raises InputError."""
    found = {}
    for name, table in said.items():
        scope, _, rest = name.partition(":")
        if scope not in _RATED or not rest:
            raise InputError(f"{what}: rates of {name!r}", hint="Use " + ":NAME, ".join(_RATED) + ":NAME")
        found[name] = _numbers(f"{what}: the rate of {name}", table, dict.fromkeys(_UNITS, (0, NO_RATE)))
    return found


def _numbers(what: str, table: Any, known: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    if not isinstance(table, Mapping) or set(table) - set(known):
        raise InputError(f"{what} is a table", hint="It may have " + ", ".join(known))
    for key, value in table.items():
        low, high = known[key]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError(f"{what}: {key} is {low} to {high}, not {value!r:.80}")
    return dict(table)


def queues_over(limits: AdmissionLimits, said: Said) -> AdmissionLimits:
    """Admission's limits with what profiles say over them. The node's own bounds are never above the configuration's,
    which is what the core was made for."""
    tiers = [_over(bound, said.get(name, {})) for name, bound in zip(_TIERS, limits.tiers, strict=True)]
    pct = [said.get(name, {}).get("pct", of) for name, of in zip(_TIERS, limits.tier_pct, strict=True)]
    wait_ns = [
        said[name]["wait_ms"] * _MS if "wait_ms" in said.get(name, {}) else of
        for name, of in zip(_TIERS, limits.wait_ns, strict=True)
    ]
    node, tenant = _over(limits.node, said.get("node", {})), _over(limits.tenant, said.get("tenant:*", {}))
    return msgspec.structs.replace(
        limits,
        node=Bound(min(node.items, limits.node.items), min(node.bytes, limits.node.bytes)),
        tiers=tuple(tiers),
        tier_pct=tuple(pct),
        wait_ns=tuple(wait_ns),
        classes=limits.classes | _named(said, "class", limits.classes, Bound()),
        tenant=tenant,
        tenants=limits.tenants | _named(said, "tenant", limits.tenants, tenant),
        door=_over(limits.door, said.get("door", {})),
    )


def _over(bound: Bound, said: Mapping[str, int]) -> Bound:
    return Bound(said.get("items", bound.items), said.get("bytes", bound.bytes)) if said else bound


def _named(said: Said, scope: str, below: Mapping[str, Bound], others: Bound) -> dict[str, Bound]:
    found = {}
    for key, table in said.items():
        kind, _, name = key.partition(":")
        if kind == scope and name != "*":
            found[name] = _over(below.get(name, others), table)
    return found


def rates_over(rules: tuple[RateRule, ...], said: Said) -> tuple[RateRule, ...]:
    """The rules of a gate with what profiles say over them; 0: no such rate."""
    found = {(rule.scope, rule.name, rule.rate.unit): rule for rule in rules}
    for key, table in said.items():
        kind, _, name = key.partition(":")
        scope = Scope(kind)
        for setting, limit in table.items():
            unit = _UNITS[setting]
            if limit or ((scope, "*", unit) in found and name != "*"):
                found[scope, name, unit] = RateRule(scope, name, RateLimit(limit or NO_RATE, unit=unit))
            else:
                found.pop((scope, name, unit), None)
    return tuple(found.values())
