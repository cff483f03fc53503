"""What authors and embedders say about upgrades of an agent, checked; what it means stands in engine/upgrade.py."""

import inspect
from collections.abc import Callable
from typing import Any, Final

from agentrt.errors import InputError
from agentrt.tools.declare import declaration_of
from agentrt.tools.spec import ToolRegistry

ON_UPGRADE: Final = ("pin", "continue", "migrate", "fail")
_PARAMETERS: Final = ("state", "from_version")

Migration = Callable[..., Any] | str


def check_upgrade(agent: str, on_upgrade: str | None, migrate: Migration | None) -> tuple[str, Migration | None]:
    """(on_upgrade, migrate) with the default filled in. Raises InputError."""
    policy = "pin" if on_upgrade is None else on_upgrade
    if policy not in ON_UPGRADE:
        raise InputError(f"agent {agent}: on_upgrade is one of {', '.join(ON_UPGRADE)}, not {policy!r}")
    if (policy == "migrate") is (migrate is None):
        raise InputError(f"agent {agent}: on_upgrade='migrate' and a migrate function go together")
    if callable(migrate):
        declaration = declaration_of(migrate)
        if declaration is None or declaration.kind != "pure":
            raise InputError(
                f"agent {agent}: its migrate function is no pure tool",
                hint="Decorate it with @tool(kind='pure'); it runs in a tool host, as tools do",
            )
        names = tuple(inspect.signature(migrate).parameters)
        if names != _PARAMETERS:
            raise InputError(f"agent {agent}: a migrate function takes state and from_version, not {', '.join(names)}")
    return policy, migrate


def migration_tool(registry: ToolRegistry, migrate: Migration) -> str:
    """The name of the tool, which is registered if it was not. Raises UnknownToolError, InputError."""
    spec = registry.get(migrate) if isinstance(migrate, str) else registry.add(migrate)
    if spec.kind != "pure":
        raise InputError(f"tool {spec.name} migrates states, so it must be pure")
    return spec.name
