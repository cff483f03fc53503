"""What a node is to load: agents and tools of Python modules and files, wasm files, and programs.

Python sources are imported in a throw-away child that says what they declare; their code never runs in the node.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from agentrt.agents.declare import agent_declaration_of, agent_reference
from agentrt.backends.process.agents.command import Command
from agentrt.config import Config
from agentrt.errors import ConfigError, InputError
from agentrt.node.settings import AgentConfig
from agentrt.tools.declare import declaration_of
from agentrt.tools.importing import import_source, run_describer, tools_in
from agentrt.tools.spec import ToolSpec, spec_of

_WASM: Final = ".wasm"


class AgentSpec(msgspec.Struct, frozen=True):
    """An agent to register. ``module`` is a path for wasm, the function's reference for Python, and for a program its
    encoded `Command`."""

    name: str
    backend: str
    module: str
    tier: int | None = None
    fuel: int | None = None
    budget: dict[str, int | float] = {}
    on_upgrade: str | None = None
    migrate: str | None = None
    short: bool = False

    def arguments(self) -> dict[str, Any]:
        """Of `Runtime.register`, besides the name."""
        return {
            "module": self.module if self.backend == "wasm" else self.module.encode(),
            "tier": self.tier,
            "fuel": self.fuel,
            "budget": self.budget,
            "backend": self.backend,
            "on_upgrade": self.on_upgrade,
            "migrate": self.migrate,
            "short": self.short,
        }


class Described(msgspec.Struct, frozen=True):
    """What sources declare."""

    agents: list[AgentSpec]
    tools: list[ToolSpec]


def load_sources(config: Config) -> Described:
    """What ``node.load`` and ``node.agents`` name. Blocks while Python sources are imported. Raises InputError of a
    source, ConfigError of how it is named."""
    agents: dict[str, AgentSpec] = {}
    tools: list[ToolSpec] = []
    for source in config.node.load:
        for agent in (found := describe(source)).agents:
            _add(agents, agent, source)
        tools += [tool for tool in found.tools if tool not in tools]
    for name, table in config.node.agents.items():
        settings = AgentConfig(**table)
        if settings.command:
            agents[name] = _program(name, settings)
            continue
        if not settings.source:
            raise ConfigError(
                f"node.agents.{name} has no source",
                hint='Write source = "file.wasm" or "module:function", or command = ["program", "argument"]',
            )
        found = describe(settings.source)
        tools += [tool for tool in found.tools if tool not in tools]
        if len(found.agents) != 1:
            raise ConfigError(
                f"node.agents.{name}: {settings.source} has {len(found.agents)} agents",
                hint="Name one: module:function",
            )
        agent = _with(found.agents[0], name, settings)
        _add(agents, agent, settings.source)
        agents[name] = agent  # also in place of the same one as it was loaded
    return Described([*agents.values()], tools)


def _add(agents: dict[str, AgentSpec], agent: AgentSpec, source: str) -> None:
    there = agents.setdefault(agent.name, agent)
    if there is not agent and there.module != agent.module:
        raise ConfigError(f"two agents are called {agent.name}: one is in {source}, the other is {there.module}")


def _program(name: str, settings: AgentConfig) -> AgentSpec:
    if settings.source:
        raise ConfigError(f"node.agents.{name} has both a source and a command")
    command = Command(
        settings.command,
        settings.preempt,
        settings.unwinds,
        settings.environment,
        settings.files,
        settings.read,
        settings.write,
        settings.network,
        settings.memory_bytes_max,
    )
    declared = settings.on_upgrade == "declared"
    return AgentSpec(
        name,
        "process",
        command.encode().decode(),
        None if settings.tier < 0 else settings.tier,
        settings.fuel_max or None,
        {},
        None if declared else settings.on_upgrade,
        None,
        settings.short,
    )


def _with(agent: AgentSpec, name: str, settings: AgentConfig) -> AgentSpec:
    """The agent as the configuration wants it."""
    return msgspec.structs.replace(
        agent,
        name=name,
        tier=agent.tier if settings.tier < 0 else settings.tier,
        fuel=settings.fuel_max or None,
        on_upgrade=settings.on_upgrade if settings.on_upgrade != "declared" else agent.on_upgrade,
        migrate=agent.migrate if settings.on_upgrade in ("declared", "migrate") else None,
        short=agent.short or settings.short,
    )


def describe(source: str) -> Described:
    """What one source declares: a wasm file is an agent; a module or a Python file declares agents and tools; of one
    function of either (``source:function``) it is that tool, or that agent with the tools beside it. Raises
    InputError."""
    if source.endswith(_WASM):
        if not Path(source).is_file():
            raise InputError(f"there is no file {source}")
        return Described([AgentSpec(Path(source).stem, "wasm", source)], [])
    place, colon, function = source.rpartition(":")
    try:
        found = msgspec.json.decode(
            run_describer(place if colon else source, f"{__name__}:describe_main"), type=Described
        )
    except msgspec.MsgspecError as error:
        raise InputError(f"{source} ended before it was known what it declares") from error
    if colon:
        agents = [agent for agent in found.agents if agent.module.rpartition(":")[2] == function]
        tools = found.tools if agents else [tool for tool in found.tools if tool.ref.rpartition(":")[2] == function]
        found = Described(agents, tools)
    if not found.agents and not found.tools:
        raise InputError(f"{source} declares no agents and no tools", hint="Decorate functions with @agent or @tool")
    return found


def describe_main(source: str) -> bytes:
    """In the child: `Described` as JSON."""
    module = import_source(source)
    tools = {tool.name: tool for tool in tools_in(module)}
    agents: dict[str, AgentSpec] = {}
    for value in vars(module).values():
        declared = agent_declaration_of(value)
        if declared is None:
            continue
        migrate = declared.migrate
        if callable(migrate):
            spec = spec_of(migrate)
            tools.setdefault(spec.name, spec)
            declaration = declaration_of(migrate)
            assert declaration is not None  # of a tool, or there would be no spec
            migrate = declaration.name
        agents.setdefault(
            declared.name,
            AgentSpec(
                declared.name,
                "python",
                agent_reference(value),
                int(declared.tier),
                None,
                declared.budget,
                declared.on_upgrade,
                migrate,
                declared.short,
            ),
        )
    return msgspec.json.encode(Described([*agents.values()], [*tools.values()]))
