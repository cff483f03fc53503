"""The file of limits and rules: TOML with ``[base]`` and ``[profiles.NAME]`` tables, and ``[[rules]]`` of the ingress
classifier. Pure."""

import tomllib
from typing import NamedTuple

import msgspec

from agentrt.errors import ConfigError, InputError
from agentrt.flow.classifier import Rule
from agentrt.flow.profiles import Profile, check_profile
from agentrt.tiers import parse_tier


class ProfileFile(NamedTuple):
    base: Profile
    profiles: dict[str, Profile]
    rules: tuple[Rule, ...] = ()


def read_profiles(text: str, source: str) -> ProfileFile:
    """Raises ConfigError naming ``source``, the profile and what is wrong."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: is not TOML: {error}") from error
    if unknown := set(tables) - {"base", "profiles", "rules"}:
        hint = "Use [base], [profiles.NAME] and [[rules]]"
        raise ConfigError(f"{source}: there is no table {sorted(unknown)[0]!r}", hint=hint)
    said, named = tables.get("base", {}), tables.get("profiles", {})
    if not all(
        isinstance(table, dict) for table in (said, named, *(named.values() if isinstance(named, dict) else ()))
    ):
        raise ConfigError(f"{source}: [base] and [profiles.NAME] are tables")
    try:
        rules = tuple(msgspec.convert(tables.get("rules", []), list[Rule]))
        for number, rule in enumerate(rules):
            if rule.set_tier is not None:
                try:
                    parse_tier(rule.set_tier)
                except InputError as error:
                    raise InputError(f"rule {number}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: [[rules]]: {error}", hint="See flow-control.md") from error
    except InputError as error:
        raise ConfigError(f"{source}: {error}") from error
    try:
        base = check_profile("base", said)
        return ProfileFile(base, {name: check_profile(name, each) for name, each in named.items()}, rules)
    except InputError as error:
        raise ConfigError(f"{source}: {error}") from error
