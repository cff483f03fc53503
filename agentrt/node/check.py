"""Whether a node of these settings would find what they name: files, modules, programs. Starts nothing."""

import os
from pathlib import Path
from typing import Final

from agentrt.backends.process.agents.command import decode_command, make_program
from agentrt.callbacks.address import parse_networks
from agentrt.config import Config
from agentrt.errors import ConfigError, InputError, ModuleError
from agentrt.http.server import check_certificate
from agentrt.node.sources import AgentSpec, Described, load_sources
from agentrt.observe.tracing import otlp
from agentrt.runtime import profiles_of

_WASM_MAGIC: Final = b"\0asm"


def check_files(config: Config) -> None:
    """The certificate, the profiles, the store's folder and where traces go to are what they should be. Raises
    ConfigError, and InputError of addresses for callbacks."""
    if config.http.certificate:
        check_certificate(Path(config.http.certificate), Path(config.http.private_key))
    parse_networks(config.http.callback_networks)
    profiles_of(config)
    if config.traces.endpoint:
        otlp(config.traces)
    if config.store.kind == "lmdb" and (path := Path(config.store.path or ".")).exists() and not path.is_dir():
        raise ConfigError(f"store.path is a folder, and {path} is none")


def check_sources(config: Config) -> Described:
    """What ``node.load`` and ``node.agents`` name is there: modules are imported in a child, which is given a minute,
    files of wasm begin like such, programs are found and can be read. Blocks. Raises ConfigError."""
    try:
        described = load_sources(config)
    except InputError as error:
        raise ConfigError(f"node.load, node.agents: {error.message}", hint=error.hint) from error
    for agent in described.agents:
        try:
            _look(agent)
        except (InputError, ModuleError) as error:
            raise ConfigError(f"agent {agent.name}: {error.message}", hint=error.hint) from error
    return described


def _look(agent: AgentSpec) -> None:
    if agent.backend == "process":
        make_program(decode_command(agent.module.encode()), os.environ)
    elif agent.backend == "wasm":
        try:
            with Path(agent.module).open("rb") as file:
                magic = file.read(len(_WASM_MAGIC))
        except OSError as error:
            raise InputError(f"{agent.module} cannot be read: {error.strerror}") from None
        if magic != _WASM_MAGIC:
            raise InputError(f"{agent.module} is not a wasm module: it does not begin with \\0asm")
