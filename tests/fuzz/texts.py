"""Texts from outside: configuration, and JSON in its canonical form."""

import json
import tempfile
from pathlib import Path
from typing import Final

from agentrt.config import Config, load_config
from agentrt.digest import canonical_json, canonical_text
from agentrt.engine.accept import check_json
from agentrt.errors import ConfigError, InputError

from .kit import JSON, target

_FOLDER: Final = tempfile.TemporaryDirectory(prefix="agentrt-fuzz-")


def _check_config(config: Config) -> None:
    given = {f"{section}.{key}": value for section, keys in config.to_dict().items() for key, value in keys.items()}
    assert load_config(env={}, arguments=given) == config


@target()
def config_file(data: bytes) -> None:
    """A configuration file."""
    file = Path(_FOLDER.name) / "agentrt.toml"
    file.write_bytes(data)
    try:
        config = load_config(file, env={})
    except ConfigError:
        return
    _check_config(config)


@target()
def config_environment(data: bytes) -> None:
    """Settings from the environment: a line for each."""
    lines = data.replace(b"\0", b"").decode(errors="surrogateescape").split("\n")
    env = {f"AGENTRT_{name}": value for name, _, value in (line.partition("=") for line in lines)}
    env.pop("AGENTRT_CONFIG", None)
    try:
        config = load_config(env=env)
    except ConfigError:
        return
    _check_config(config)


@target(JSON)
def canonical(data: bytes) -> None:
    """JSON text: its canonical form is one, and means the same."""
    try:
        made = canonical_text(data)
    except InputError:
        return
    check_json("accepted with an idempotency key, so also without", data)
    try:
        assert canonical_text(made) == made
    except InputError as error:  # 9e17 is written as an integer, and read as one it is refused
        assert "beyond 2^53" in error.message
    value = json.loads(data)
    assert json.loads(made, parse_int=float) == json.loads(data, parse_int=float)
    assert canonical_json(value) == made
