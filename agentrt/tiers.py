"""The four tiers and the names by which callers may ask for them."""

from enum import IntEnum
from typing import Final

from agentrt.errors import InputError


class Tier(IntEnum):
    """Lower number, more urgent."""

    CRITICAL = 0
    INTERACTIVE = 1
    BATCH = 2
    MAINTENANCE = 3


_ALIASES: Final = {tier.name.lower(): tier for tier in Tier} | {"urgent": Tier.CRITICAL, "normal": Tier.INTERACTIVE}


def parse_tier(value: int | str) -> Tier:
    """A tier from its number, name or alias (urgent 0, normal 1, batch 2). Raises InputError."""
    if isinstance(value, str):
        if value in ("0", "1", "2", "3"):
            value = int(value)
        elif (tier := _ALIASES.get(value.lower())) is not None:
            return tier
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3:
        return Tier(value)
    raise InputError(f"{value!r:.200} is no tier", hint="Use 0 to 3, or " + ", ".join(_ALIASES))
