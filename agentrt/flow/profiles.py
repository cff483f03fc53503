"""Profiles: named, validated sets of limits that are applied and rolled back as one. Pure.

What is in force is one immutable `InForce`: the base from the configuration with the applied profiles over it, the
last one on top. Applying or rolling back makes a new one or raises and changes nothing, so that whoever takes it over
in one turn of the loop never shows a mixture. Each change is a `Change`, the audit record: who, what, when, from which
digest to which.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.digest import digest
from agentrt.errors import InputError, StoreCorruptError
from agentrt.flow.accounts import AccountId, agent_id, node_id, tenant_id
from agentrt.flow.amounts import check_limits
from agentrt.flow.children import EnsembleLimits
from agentrt.flow.decisions import Scope
from agentrt.flow.profilebounds import check_queues, check_rates
from agentrt.flow.quotas import Quota
from agentrt.flow.windows import Span

NAME_CHARS_MAX: Final = 128
#: Profiles over the base; more is a mistake, not a wish.
APPLIED_MAX: Final = 16
PRELOADED_MAX: Final = 1000
_SCOPES_OF_TARGETS: Final = ("class", "tool", "provider", "model")  # a class of tools is a pool of hosts


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a profile says; what it leaves out stays as it is below.

    - ``limits``: of the node (``node``), tenants (``tenant:NAME``) and agents (``agent:TENANT/NAME``); ``*`` is any
      name. A limit given here replaces the same limit below, others of that account stay.
    - ``budgets``: of runs of agents (``agent:TENANT/NAME``), where the run has no own.
    - ``quotas``: calls by the calendar. ``concurrency``: how many calls at once (``provider:NAME``, ``model:P/M``,
      ``tool:NAME``, ``class:NAME``: its pool).
    - ``rates``: calls and tokens per minute, of the same and of tenants. ``queues``: what may be accepted and not
      ended, and who waits at the door (profilebounds.py).
    - ``tier_weights``: shares of tiers 0 to 3 between processes. ``prewarm``: guests kept ready, by agent, and hosts of
      tools, by class (``class:NAME``).
    - ``ensemble``: bounds of each ensemble; ``ensembles``: of those whose root run is of an agent
      (``agent:TENANT/NAME``). ``preload``: agents of which every version that a run may still need is made ready ahead.
    """

    name: str
    limits: dict[str, dict[str, int]] = {}
    budgets: dict[str, dict[str, int]] = {}
    quotas: tuple[Quota, ...] = ()
    concurrency: dict[str, int] = {}
    tier_weights: tuple[int, ...] = ()
    prewarm: dict[str, int] = {}
    ensemble: EnsembleLimits | None = None
    ensembles: dict[str, dict[str, int]] = {}
    rates: dict[str, dict[str, int]] = {}
    queues: dict[str, dict[str, int]] = {}
    preload: tuple[str, ...] = ()

    def digest_hex(self) -> str:
        """The content address of what it says."""
        return digest(msgspec.json.encode(self, order="deterministic")).hex()


class InForce(msgspec.Struct, frozen=True):
    """The base and the profiles over it."""

    base: Profile
    applied: tuple[Profile, ...] = ()

    @property
    def layers(self) -> tuple[Profile, ...]:
        return (self.base, *self.applied)

    def digest_hex(self) -> str:
        """Of all layers."""
        return digest(msgspec.json.encode(self.layers, order="deterministic")).hex()

    def limits_of(self, id: AccountId) -> dict[str, int]:
        """The limits of an account above runs; {}: it has none. Exact names win over ``*``, layer by layer."""
        found: dict[str, int] = {}
        for layer in self.layers:
            for name in _names_of(id):
                found |= layer.limits.get(name, {})
        return found

    def budget_of(self, tenant: str, agent: str) -> dict[str, int]:
        """The budget of a run that has no own."""
        found: dict[str, int] = {}
        for layer in self.layers:
            for name in _names_of(agent_id(tenant, agent)):
                found |= layer.budgets.get(name, {})
        return found

    def quotas(self) -> tuple[Quota, ...]:
        """A quota replaces one of the same name and span below."""
        found: dict[tuple[str, str, str], Quota] = {}
        for layer in self.layers:
            found |= {(quota.scope.value, quota.name, quota.span.value): quota for quota in layer.quotas}
        return tuple(found.values())

    def concurrency(self) -> dict[str, int]:
        """By ``scope:name``."""
        found: dict[str, int] = {}
        for layer in self.layers:
            found |= layer.concurrency
        return found

    def tier_weights(self) -> tuple[int, ...]:
        """Empty: as the node has them."""
        return next((layer.tier_weights for layer in reversed(self.layers) if layer.tier_weights), ())

    def rates(self) -> dict[str, dict[str, int]]:
        """By ``scope:name``."""
        return _merged(layer.rates for layer in self.layers)

    def queues(self) -> dict[str, dict[str, int]]:
        """By what is bounded."""
        return _merged(layer.queues for layer in self.layers)

    def prewarm(self) -> dict[str, int]:
        """Guests kept ready, by agent; hosts of tools by ``class:name``."""
        found: dict[str, int] = {}
        for layer in self.layers:
            found |= layer.prewarm
        return found

    def preload(self) -> frozenset[str]:
        """Agents, of any layer."""
        return frozenset(name for layer in self.layers for name in layer.preload)

    def ensemble(self, tenant: str = "", agent: str = "") -> EnsembleLimits:
        """Bounds of an ensemble whose root run is of the agent; "": nobody knows of which."""
        found: dict[str, int] = {}
        for layer in self.layers:
            if layer.ensemble is not None:
                found = msgspec.structs.asdict(layer.ensemble)
            for name in _names_of(agent_id(tenant, agent)) if agent else ():
                found |= layer.ensembles.get(name, {})
        return EnsembleLimits(**found)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The audit record. ``action``: apply or roll_back; ``by`` says who asked, ``at_ns`` when (Unix ns)."""

    action: str
    profile: str
    by: str
    at_ns: int
    digest_before: str
    digest_after: str
    reason: str = ""


def _merged(tables: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Number by number."""
    found: dict[str, dict[str, int]] = {}
    for layer in tables:
        for name, table in layer.items():
            found[name] = found.get(name, {}) | table
    return found


def _names_of(id: AccountId) -> tuple[str, ...]:
    """The names under which limits for the account may stand, the least exact first."""
    if id == node_id():
        return ("node",)
    if id[0] == Scope.TENANT:
        return "tenant:*", f"tenant:{id[1]}"
    if id[0] == Scope.AGENT:
        return "agent:*/*", f"agent:{id[1]}/*", f"agent:*/{id[2]}", f"agent:{id[1]}/{id[2]}"
    return ()


# --- checking ------------------------------------------------------------------


def check_profile(name: str, said: Mapping[str, Any]) -> Profile:
    """A profile from plain data, as TOML or JSON have it. Raises InputError naming the profile and what is wrong."""
    what = f"profile {name!r}"
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX or not name.isprintable():
        raise InputError(f"{what:.200}: a name has 1 to {NAME_CHARS_MAX} printable characters")
    known = set(Profile.__struct_fields__) - {"name"}
    for key in said:
        if key not in known:
            raise InputError(f"{what}: there is no {key!r}", hint="Use " + ", ".join(sorted(known)))
    try:
        ensemble = said.get("ensemble")
        return Profile(
            name=name,
            limits=_limits(what, said.get("limits", {}), windows=True),
            budgets=_limits(what, said.get("budgets", {}), windows=False),
            quotas=tuple(_quota(what, key, each) for key, each in _table(what, "quotas", said)),
            concurrency={
                _target(what, key): _count(f"{what}: concurrency of {key}", value, 1, 1_000_000)
                for key, value in _table(what, "concurrency", said)
            },
            tier_weights=_weights(what, said.get("tier_weights", ())),
            prewarm={
                key: _count(f"{what}: prewarm of {key}", value, 0, 10_000)
                for key, value in _table(what, "prewarm", said)
            },
            ensemble=None if ensemble is None else _ensemble(what, ensemble),
            ensembles={key: _ensemble_of(what, key, each) for key, each in _table(what, "ensembles", said)},
            rates=check_rates(what, dict(_table(what, "rates", said))),
            queues=check_queues(what, dict(_table(what, "queues", said))),
            preload=_agents(f"{what}: preload", said.get("preload", ())),
        )
    except msgspec.ValidationError as error:
        raise InputError(f"{what}: {error}") from error


def _table(what: str, key: str, said: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    table = said.get(key, {})
    if not isinstance(table, Mapping) or not all(isinstance(name, str) and name for name in table):
        raise InputError(f"{what}: {key} is a table of names")
    return table.items()


def _limits(what: str, said: Any, *, windows: bool) -> dict[str, dict[str, int]]:
    found = {}
    for name, limits in _table(what, "limits", {"limits": said}):
        if _parse(name) is None or (not windows and not name.startswith("agent:")):
            scopes = "node, tenant:NAME and agent:TENANT/NAME" if windows else "agent:TENANT/NAME"
            raise InputError(f"{what}: limits of {name!r}", hint=f"Limits are of {scopes}; * is any name")
        if not isinstance(limits, Mapping):
            raise InputError(f"{what}: the limits of {name} are a table")
        found[name] = check_limits(f"{what}, {name}", limits, windows=windows)
    return found


def _parse(name: str) -> AccountId | None:
    scope, _, rest = name.partition(":")
    if name == "node":
        return node_id()
    if scope == "tenant" and rest:
        return tenant_id(rest)
    tenant, slash, agent = rest.rpartition("/")
    if scope == "agent" and slash and tenant and agent:
        return agent_id(tenant, agent)
    return None


def _target(what: str, name: str) -> str:
    scope, _, rest = name.partition(":")
    if scope not in _SCOPES_OF_TARGETS or not rest:
        raise InputError(f"{what}: concurrency of {name!r}", hint="Use " + ":NAME, ".join(_SCOPES_OF_TARGETS) + ":NAME")
    return name


def _quota(what: str, key: str, said: Any) -> Quota:
    """``"tool:search/day" = {count = 100, reset_s = 32400}``."""
    head, _, span = key.rpartition("/")
    scope, _, name = head.partition(":")
    if not isinstance(said, Mapping) or set(said) - {"count", "reset_s"} or "count" not in said:
        raise InputError(f"{what}: the quota {key!r} has a count, and may have a reset_s")
    if scope not in tuple(Scope) or span not in tuple(each.value for each in Span) or not name:
        raise InputError(f"{what}: the quota {key!r}", hint="Write scope:name/span, as in tool:search/day")
    what = f"{what}: the quota {key}"
    count, reset_s = _count(what, said["count"], 1, 2**53 - 1), _count(what, said.get("reset_s", 0), 0, 2**32)
    return Quota(Scope(scope), name, count, Span(span), reset_s)


def _count(what: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"{what} is {low} to {high}, not {value!r}")
    return value


def _agents(what: str, said: Any) -> tuple[str, ...]:
    are_names = isinstance(said, list | tuple) and all(isinstance(name, str) and name for name in said)
    if not are_names or len(said) > PRELOADED_MAX:
        raise InputError(f"{what} is a list of at most {PRELOADED_MAX} names of agents")
    return tuple(said)


def _weights(what: str, said: Any) -> tuple[int, ...]:
    if not isinstance(said, list | tuple) or len(said) not in (0, 4):
        raise InputError(f"{what}: tier_weights are four numbers, of tiers 0 to 3")
    weights = tuple(_count(f"{what}: a tier weight", value, 1, 10_000) for value in said)
    if list(weights) != sorted(weights, reverse=True):
        raise InputError(f"{what}: no tier weighs more than a more urgent one")
    return weights


def _ensemble(what: str, said: Any) -> EnsembleLimits:
    if not isinstance(said, Mapping) or set(said) - set(EnsembleLimits.__struct_fields__):
        raise InputError(f"{what}: ensemble has " + ", ".join(EnsembleLimits.__struct_fields__))
    return EnsembleLimits(**{key: _count(f"{what}: {key}", value, 0, 2**53) for key, value in said.items()})


def _ensemble_of(what: str, name: str, said: Any) -> dict[str, int]:
    if not name.startswith("agent:") or _parse(name) is None:
        raise InputError(f"{what}: ensembles of {name!r}", hint="Write agent:TENANT/NAME; * is any name")
    _ensemble(f"{what}, ensembles of {name}", said)
    return dict(said)


# --- changing --------------------------------------------------------------------


def apply(now: InForce, profile: Profile, by: str, at_ns: int, reason: str = "") -> tuple[InForce, Change]:
    """The profile on top; one of its name that is applied is taken out first, so that applying twice is once. Raises
    InputError."""
    rest = tuple(each for each in now.applied if each.name != profile.name)
    if len(rest) >= APPLIED_MAX:
        raise InputError(f"{len(rest)} profiles are applied", hint="Roll one back first")
    after = InForce(now.base, (*rest, profile))
    return after, _change("apply", now, after, profile.name, by, at_ns, reason)


def roll_back(now: InForce, name: str | None, by: str, at_ns: int, reason: str = "") -> tuple[InForce, Change]:
    """Without the profile of that name, or (None) without the last one. Raises InputError if there is none."""
    name = name if name is not None else (now.applied[-1].name if now.applied else "")
    rest = tuple(each for each in now.applied if each.name != name)
    if len(rest) == len(now.applied):
        applied = ", ".join(each.name for each in now.applied) or "none"
        raise InputError(f"profile {name!r} is not applied", hint=f"Applied: {applied}")
    after = InForce(now.base, rest)
    return after, _change("roll_back", now, after, name, by, at_ns, reason)


def _change(action: str, now: InForce, after: InForce, name: str, by: str, at_ns: int, reason: str) -> Change:
    return Change(
        action=action,
        profile=name,
        by=by[:NAME_CHARS_MAX],
        at_ns=at_ns,
        digest_before=now.digest_hex(),
        digest_after=after.digest_hex(),
        reason=reason[:1000],
    )


# --- as stored ---------------------------------------------------------------------


def encode_applied(now: InForce) -> bytes:
    """The applied profiles; the base is the configuration's."""
    return msgspec.msgpack.encode(now.applied)


def decode_applied(base: Profile, data: bytes) -> InForce:
    """Raises StoreCorruptError."""
    try:
        return InForce(base, msgspec.msgpack.decode(data, type=tuple[Profile, ...]))
    except (*UNREADABLE, InputError) as error:
        raise StoreCorruptError(f"the applied profiles cannot be read: {error}") from error
