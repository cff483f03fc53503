"""What a server offers, and what it offered before: versions of its tools, and their names. Pure.

A tool ``log`` of the server ``git`` is called ``git.log``, and each of its versions ``git.log-3f2a91c0``. What a name
stands for does not change while a node runs, whatever the server says: a running run goes on with the kind and the
schema that it began with. A server that changes a tool adds a version; ``git.log`` becomes that one when the node
starts again. What is called by an old version is told so if the server would not take it any more.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import InputError
from agentrt.tools.declare import check_name
from agentrt_mcp.schemas import SchemaError, Validator, compiled
from agentrt_mcp.settings import ServerSettings

TOOLS_MAX: Final = 500
VERSIONS_MAX: Final = 8
DESCRIPTION_CHARS_MAX: Final = 4_000
#: Kinds by how much may be repeated.
_REPEATABLE: Final = ("at_most_once", "keyed", "pure")


class Offered(msgspec.Struct, frozen=True):
    """A tool as a server lists it."""

    name: str
    description: str
    input_schema: Any
    output_schema: Any = None
    read_only: bool = False
    idempotent: bool = False


class Version(msgspec.Struct, frozen=True):
    """One version of a tool. ``tool``: what the server calls it."""

    tool: str
    version: str
    kind: str
    description: str
    input_schema: Any
    output_schema: Any = None


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """The catalog's file: versions by tool, the oldest first."""

    format: int = 1
    tools: dict[str, list[Version]] = {}


def kind_of(offered: Offered, settings: ServerSettings) -> str:
    """What is safe when nobody saw how a call ended.

    A tool that only reads may be repeated, but it is not pure: that its result depends on the arguments alone is
    nothing that a hint says (docs/decisions/0025-mcp.md).
    """
    if (said := settings.kinds.get(offered.name)) is not None:
        return said
    if settings.trust_hints and (offered.read_only or offered.idempotent):
        return "keyed"
    return "at_most_once"


def version_of(offered: Offered, settings: ServerSettings) -> Version:
    kind = kind_of(offered, settings)
    told = msgspec.json.encode([kind, offered.input_schema, offered.output_schema], order="deterministic")
    return Version(
        offered.name,
        blake2b(told, digest_size=4).hexdigest(),
        kind,
        offered.description[:DESCRIPTION_CHARS_MAX],
        offered.input_schema,
        offered.output_schema,
    )


class Entry(msgspec.Struct):
    """What a name stands for, ready to be called."""

    name: str
    version: Version
    arguments: Validator
    result: Validator | None


class Catalog:
    """Of one server. ``entries`` by the name that agents call; it only grows."""

    def __init__(self, server: str, settings: ServerSettings) -> None:
        self._server = server
        self._settings = settings
        self._versions: dict[str, list[Version]] = {}
        self.entries: Final[dict[str, Entry]] = {}
        #: What the server offers now, by its own names; None before it was heard.
        self.current: dict[str, Version] | None = None

    # --- what is kept -----------------------------------------------------------

    def load(self, data: bytes) -> None:
        """What was kept. Raises nothing: what cannot be read is not there. Before `absorb`."""
        try:
            kept = msgspec.json.decode(data, type=Kept)
        except UNREADABLE:
            return
        for tool, versions in list(kept.tools.items())[:TOOLS_MAX]:
            if self._wanted(tool):
                self._versions[tool] = [version for version in versions if version.tool == tool][-VERSIONS_MAX:]

    def dump(self) -> bytes:
        return msgspec.json.encode(Kept(tools=self._versions), order="deterministic")

    # --- what is offered ---------------------------------------------------------

    def remembered(self) -> tuple[list[Entry], list[str]]:
        """Entries for all that is kept, for a start without the server, and what is wrong with the rest."""
        return self._enter()

    def absorb(self, listing: Iterable[Offered]) -> tuple[list[Entry], list[str]]:
        """The server's listing. Returns the entries that are new, and what was left out and why."""
        found: dict[str, Version] = {}
        problems: list[str] = []
        for offered in listing:
            if not self._wanted(offered.name):
                continue
            if len(found) >= TOOLS_MAX:
                problems.append(f"it offers more than {TOOLS_MAX} tools: the others are left out")
                break
            try:
                if not offered.name:
                    raise InputError("it has no name")
                check_name(f"{self._server}.{offered.name}-00000000")
                compiled(offered.input_schema)
                if offered.output_schema is not None:
                    compiled(offered.output_schema)
            except (InputError, SchemaError) as error:
                problems.append(f"tool {offered.name!r:.200} is left out: {error}")
                continue
            found[offered.name] = version_of(offered, self._settings)
        for tool in self._settings.tools:
            if tool not in found:
                problems.append(f"it does not offer {tool!r}, which plugins.mcp.servers.{self._server}.tools names")
        self.current = found
        for tool, version in found.items():
            known = self._versions.setdefault(tool, [])
            self._versions[tool] = [*(each for each in known if each.version != version.version), version][
                -VERSIONS_MAX:
            ]
        entered, more = self._enter()
        return entered, problems + more

    def _wanted(self, tool: str) -> bool:
        return not self._settings.tools or tool in self._settings.tools

    def _enter(self) -> tuple[list[Entry], list[str]]:
        entered: list[Entry] = []
        problems: list[str] = []
        for tool, versions in self._versions.items():
            plain = f"{self._server}.{tool}"
            names = [(f"{plain}-{version.version}", version) for version in versions]
            if versions:
                names.append((plain, versions[-1]))
            for name, version in names:
                if name in self.entries:
                    continue
                try:
                    arguments = compiled(version.input_schema)
                    result = None if version.output_schema is None else compiled(version.output_schema)
                except SchemaError as error:
                    problems.append(f"tool {name} is left out: {error}")
                    continue
                entry = self.entries[name] = Entry(name, version, arguments, result)
                entered.append(entry)
        return entered, problems

    # --- asked of it ---------------------------------------------------------------

    def superseded(self, entry: Entry) -> str:
        """Why a call by this version must not go to the server as it is now; empty: it may. A version that may be
        repeated more freely than the present one would be repeated wrongly."""
        now = None if self.current is None else self.current.get(entry.version.tool)
        if now is None or now.version == entry.version.version:
            return ""
        if _REPEATABLE.index(now.kind) < _REPEATABLE.index(entry.version.kind):
            return f"it is {now.kind} now, not {entry.version.kind}; the new version is {self._call(now)}"
        return ""

    def changed_to(self, entry: Entry) -> Entry | None:
        """The present version, if it is another one than the entry's."""
        now = None if self.current is None else self.current.get(entry.version.tool)
        if now is None or now.version == entry.version.version:
            return None
        return self.entries.get(self._call(now))

    def listing(self) -> Iterator[dict[str, Any]]:
        """What is offered now, for ``mcp.tools``."""
        offered = self.current
        if offered is None:
            offered = {tool: versions[-1] for tool, versions in self._versions.items() if versions}
        for tool, version in sorted(offered.items()):
            yield {
                "name": f"{self._server}.{tool}",
                "call": self._call(version),
                "version": version.version,
                "kind": version.kind,
                "description": version.description,
                "input_schema": version.input_schema,
                "output_schema": version.output_schema,
            }

    def _call(self, version: Version) -> str:
        return f"{self._server}.{version.tool}-{version.version}"
