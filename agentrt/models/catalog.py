"""Which model answers a call: profiles, routes, needs. Pure.

A call asks for a profile; a route may send it to another one, by its task class and what it is estimated to cost. Of
the profile's models only those that meet every need of profile and call are asked, in the profile's order: a fallback
never goes to a model that lacks one.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from agentrt.digest import digest
from agentrt.errors import ConfigError, InputError
from agentrt.models.context import STRATEGIES
from agentrt.models.messages import ModelRequest, Needs
from agentrt.models.prices import Usage, cost_micro_usd, input_estimate
from agentrt.models.settings import ModelConfig, ProfileConfig, ProviderConfig, RouteConfig

if TYPE_CHECKING:
    from agentrt.config import ModelsConfig

_NO_BOUND: Final = 2**62
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
SECRET_PREFIX: Final = "secret://"


class Candidate(NamedTuple):
    """A model that may answer a call, and what is reserved for one attempt with it."""

    name: str
    model: ModelConfig
    reserved: Usage
    reserved_micro_usd: int


class Plan(NamedTuple):
    """How a call is answered. ``candidates``: which models are asked, in turn; not empty."""

    profile: str
    tier: int  # of the call, never above its run's
    context: str  # strategy for too long conversations; empty: they fail
    context_tokens_max: int  # of input, whatever the window holds
    output_tokens_max: int
    candidates: tuple[Candidate, ...]
    routed: str = ""  # the route that chose the profile


class NoModelError(InputError):
    """No model of the profile meets the needs of the call; nothing was sent."""

    code = "model_needs"


class UnknownProfileError(InputError):
    """There is no such profile, or not for this tenant."""

    code = "unknown_profile"


class Catalog:
    """The configured models. Made once; any thread may ask it."""

    def __init__(
        self,
        providers: Mapping[str, ProviderConfig],
        models: Mapping[str, ModelConfig],
        profiles: Mapping[str, ProfileConfig],
        routes: Mapping[str, RouteConfig],
    ) -> None:
        """Raises ConfigError naming the table that is wrong."""
        self.providers: Final = dict(providers)
        self.models: Final = dict(models)
        self.profiles: Final = dict(profiles)
        self._routes: Final = sorted(routes.items())
        for problem in self._problems():
            raise ConfigError(problem)

    @classmethod
    def of(cls, config: "ModelsConfig") -> "Catalog":
        """The catalog of a configuration."""
        return cls(
            {name: ProviderConfig(**table) for name, table in config.providers.items()},
            {name: ModelConfig(**table) for name, table in config.catalog.items()},
            {name: ProfileConfig(**table) for name, table in config.profiles.items()},
            {name: RouteConfig(**table) for name, table in config.routes.items()},
        )

    @property
    def pins(self) -> dict[str, str]:
        """What runs are pinned to: what profiles and routes say of which models, and the strategies by which
        conversations are shortened. Where a provider is reached is not part of it. {}: there are no profiles."""
        if not self.profiles:
            return {}
        said = [
            {name: msgspec.structs.asdict(table) for name, table in tables.items()}
            for tables in (self.models, self.profiles, dict(self._routes))
        ]
        strategies = {profile.context for profile in self.profiles.values() if profile.context}
        return {
            "model_profiles": digest(msgspec.json.encode(said, order="deterministic")).hex()[:16],
            "context_strategy": ", ".join(sorted(strategies)) or "none",
        }

    def _problems(self) -> Iterator[str]:
        for name, provider in self.providers.items():
            wrong = _wrong_provider(provider)
            if wrong:
                yield f"models.providers.{name}.{wrong}"
        for name, model in self.models.items():
            if model.provider not in self.providers:
                yield f"models.catalog.{name}.provider: there is no provider {model.provider!r}"
            if model.output_tokens_max > model.context_tokens:
                yield f"models.catalog.{name}.output_tokens_max is more than its context_tokens"
        for name, profile in self.profiles.items():
            if not profile.models:
                yield f"models.profiles.{name}.models is empty"
            for listed in profile.models:
                if listed not in self.models:
                    yield f"models.profiles.{name}.models: there is no model {listed!r}"
            if profile.order not in ("listed", "cheapest"):
                yield f"models.profiles.{name}.order is listed or cheapest, not {profile.order!r}"
            if profile.context and profile.context not in STRATEGIES:
                yield f"models.profiles.{name}.context: there is no strategy {profile.context!r}"
            if not any(_unmet(model, _needs_of(profile)) is None for model in self._listed(profile)):
                yield f"models.profiles.{name}: none of its models meets its own needs"
        for name, route in self._routes:
            if route.use not in self.profiles:
                yield f"models.routes.{name}.use: there is no profile {route.use!r}"
            if route.profile and route.profile not in self.profiles:
                yield f"models.routes.{name}.profile: there is no profile {route.profile!r}"

    def _listed(self, profile: ProfileConfig) -> list[ModelConfig]:
        return [self.models[name] for name in profile.models if name in self.models]

    def plan(self, request: ModelRequest, *, tenant: str, tier: int, context_tokens_max: int = _NO_BOUND) -> Plan:
        """How the call is answered. ``context_tokens_max``: of its input, by the run's budget. Raises
        UnknownProfileError, NoModelError, InputError (an unknown strategy)."""
        asked = self._profile(request.profile, tenant)
        first = self._candidates(asked, request, context_tokens_max, shortened=True)
        cost = min((each.reserved_micro_usd for each in first), default=0)
        name, routed = request.profile, ""
        for route_name, route in self._routes:
            if (
                route.profile in ("", request.profile)
                and route.task in ("", request.task)
                and (not route.tenants or tenant in route.tenants)
                and cost >= route.cost_micro_usd_min
            ):
                name, routed = route.use, route_name
                break
        profile = asked if name == request.profile else self._profile(name, tenant)
        context = profile.context if request.context is None else request.context
        if context and context not in STRATEGIES:
            raise InputError(f"there is no context strategy {context!r}", hint=f"There are: {', '.join(STRATEGIES)}")
        candidates = self._candidates(profile, request, context_tokens_max, shortened=bool(context))
        if not candidates:
            raise self._none_fits(name, profile, request, context_tokens_max, shortened=bool(context))
        return Plan(
            name,
            max(tier, profile.tier),
            context,
            context_tokens_max,
            min(request.output_tokens_max or profile.output_tokens_max, profile.output_tokens_max),
            tuple(candidates),
            routed,
        )

    def _profile(self, name: str, tenant: str) -> ProfileConfig:
        profile = self.profiles.get(name)
        if profile is None or (profile.tenants and tenant not in profile.tenants):
            there = sorted(
                each for each, found in self.profiles.items() if not found.tenants or tenant in found.tenants
            )
            raise UnknownProfileError(
                f"there is no model profile {name!r}", hint=f"There are: {', '.join(there[:20]) or 'none'}"
            )
        return profile

    def _candidates(
        self, profile: ProfileConfig, request: ModelRequest, tokens_max: int, *, shortened: bool
    ) -> list[Candidate]:
        """The models that may answer. ``shortened``: what does not fit the window is left out by a strategy."""
        found: list[Candidate] = []
        for name in profile.models:
            model = self.models[name]
            candidate = _reserve(name, model, profile, request)
            if _refusal(candidate, profile, request, tokens_max, shortened=shortened) is None:
                if shortened:
                    candidate = _fitted(candidate, tokens_max)
                found.append(candidate)
        if profile.order == "cheapest":
            found.sort(key=lambda each: each.reserved_micro_usd)  # stable: as listed among equals
        return found

    def _none_fits(
        self, name: str, profile: ProfileConfig, request: ModelRequest, tokens_max: int, *, shortened: bool
    ) -> NoModelError:
        whys = []
        for listed in profile.models:
            candidate = _reserve(listed, self.models[listed], profile, request)
            whys.append(f"{listed}: {_refusal(candidate, profile, request, tokens_max, shortened=shortened)}")
        return NoModelError(
            f"no model of profile {name!r} meets the needs of the call: {'; '.join(whys)}",
            hint="Ask for less, or for another profile",
        )


def _reserve(name: str, model: ModelConfig, profile: ProfileConfig, request: ModelRequest) -> Candidate:
    """The most that one attempt may use: all of its text as input, and the longest output."""
    # The text holds the names of its fields, which are more than what a message adds to it.
    input_tokens = input_estimate(request.size_bytes, 0, model.token_bytes)
    output_tokens = min(
        request.output_tokens_max or profile.output_tokens_max, profile.output_tokens_max, model.output_tokens_max
    )
    usage = Usage(input_tokens, output_tokens)
    return Candidate(name, model, usage, cost_micro_usd(model, usage))


def _fitted(candidate: Candidate, tokens_max: int) -> Candidate:
    """With no more input than the window holds beside the output."""
    model, reserved = candidate.model, candidate.reserved
    room = min(model.context_tokens - reserved.output_tokens, tokens_max)
    if reserved.input_tokens <= room:
        return candidate
    usage = Usage(max(0, room), reserved.output_tokens)
    return candidate._replace(reserved=usage, reserved_micro_usd=cost_micro_usd(model, usage))


def _refusal(
    candidate: Candidate, profile: ProfileConfig, request: ModelRequest, tokens_max: int, *, shortened: bool
) -> str | None:
    """Why the model may not answer this call; None if it may."""
    model = candidate.model
    unmet = _unmet(model, _needs_of(profile)) or _unmet(model, request.needs)
    if unmet is not None:
        return unmet
    if request.asks_for_schema and not model.structured:
        return "it keeps to no schema"
    if request.asks_for_tools and not model.tools:
        return "it cannot ask for tools"
    input_tokens = candidate.reserved.input_tokens
    if not shortened and input_tokens > tokens_max:
        return f"{input_tokens} tokens of input, as estimated, are more than context_tokens {tokens_max}"
    if not shortened and candidate.reserved.tokens > model.context_tokens:
        return (
            f"{input_tokens} tokens of input, as estimated, and "
            f"{candidate.reserved.output_tokens} of output are more than its window of {model.context_tokens}"
        )
    return None


def _needs_of(profile: ProfileConfig) -> Needs:
    return Needs(
        structured=profile.structured,
        tools=profile.tools,
        context_tokens_min=profile.context_tokens_min,
        latency_ms_max=profile.latency_ms_max,
        quality_min=profile.quality_min,
        write_risk=profile.write_risk,
        safety=profile.safety,
        regions=profile.regions,
        data_policies=profile.data_policies,
    )


def _unmet(model: ModelConfig, needs: Needs) -> str | None:
    """The first need that the model does not meet; None if it meets all. What is not known of it is not met."""
    if needs.structured and not model.structured:
        return "it keeps to no schema"
    if needs.tools and not model.tools:
        return "it cannot ask for tools"
    if model.context_tokens < needs.context_tokens_min:
        return f"its window of {model.context_tokens} tokens is less than {needs.context_tokens_min}"
    if needs.latency_ms_max and not 0 < model.latency_ms <= needs.latency_ms_max:
        return f"it is not known to answer within {needs.latency_ms_max} ms"
    if model.quality < needs.quality_min:
        return f"its quality of {model.quality} is less than {needs.quality_min}"
    if model.write_risk < needs.write_risk:
        return f"it may decide effects of risk {model.write_risk}, not {needs.write_risk}"
    for what, label, allowed in (
        ("safety policy", model.safety, needs.safety),
        ("region", model.region, needs.regions),
        ("data policy", model.data_policy, needs.data_policies),
    ):
        if allowed and label not in allowed:
            return f"its {what} is {label or 'not known'}, not {' or '.join(allowed)}"
    return None


def _wrong_provider(provider: ProviderConfig) -> str | None:
    if provider.api_key and not (provider.api_key.startswith(SECRET_PREFIX) and len(provider.api_key) > 9):
        return "api_key is not secret://NAME"  # whatever it is, it may be the key: it is not shown
    if provider.kind != "openai":
        return None
    try:
        url = urlsplit(provider.base_url)
        url.port  # noqa: B018, which raises
    except ValueError as error:
        return f"base_url: {error}"
    if url.scheme not in ("http", "https") or not url.hostname:
        return f"base_url is no http or https address: {provider.base_url!r:.100}"
    if url.username is not None or url.password is not None or url.query or url.fragment:
        return "base_url holds more than host and path; keys belong into api_key"
    if url.scheme == "http" and url.hostname not in _LOOPBACK and not provider.allow_plain:
        return "base_url is http to another machine, which allow_plain must allow"
    return None
