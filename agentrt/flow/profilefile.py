"""The file of limits and profiles: TOML with a ``[base]`` and ``[profiles.NAME]`` tables. Pure."""

import tomllib
from typing import NamedTuple

from agentrt.errors import ConfigError, InputError
from agentrt.flow.profiles import Profile, check_profile


class ProfileFile(NamedTuple):
    base: Profile
    profiles: dict[str, Profile]


def read_profiles(text: str, source: str) -> ProfileFile:
    """Raises ConfigError naming ``source``, the profile and what is wrong."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: is not TOML: {error}") from error
    if unknown := set(tables) - {"base", "profiles"}:
        raise ConfigError(f"{source}: there is no table {sorted(unknown)[0]!r}", hint="Use [base] and [profiles.NAME]")
    said, named = tables.get("base", {}), tables.get("profiles", {})
    if not all(
        isinstance(table, dict) for table in (said, named, *(named.values() if isinstance(named, dict) else ()))
    ):
        raise ConfigError(f"{source}: [base] and [profiles.NAME] are tables")
    try:
        base = check_profile("base", said)
        return ProfileFile(base, {name: check_profile(name, each) for name, each in named.items()})
    except InputError as error:
        raise ConfigError(f"{source}: {error}") from error
