"""Sections of the configuration that belong to plugins, and `agentrt plugins`."""

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt import Runtime
from agentrt.cli import exits
from agentrt.cli.config import as_toml, json_schema
from agentrt.cli.main import run
from agentrt.config import Config, load_config
from agentrt.errors import ConfigError, PluginError
from agentrt.hooks import HOOKS_VERSION, hookimpl
from agentrt.plugins import Plugins


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 4222


class AcmeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where acme is."""

    servers: Annotated[list[Server], msgspec.Meta(description="Tried in turn.")] = []
    retries: Annotated[int, msgspec.Meta(ge=0, le=10, description="After the first attempt.")] = 3
    label: str = ""


class Acme:
    AGENTRT_HOOKS = HOOKS_VERSION

    def __init__(self, kind: Any = AcmeSettings) -> None:
        self._kind = kind

    @hookimpl
    def agentrt_settings(self) -> Any:
        return {"acme": self._kind}


def test_a_plugin_gets_its_section(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[plugins.acme]\nretries = 5\nservers = [{host = "a"}, {host = "b", port = 1}]\n')
    config = load_config(
        file, env={"AGENTRT_PLUGINS__ACME__RETRIES": "7"}, arguments={"plugins.acme.label": "x", "store.kind": "memory"}
    )
    Plugins({"a": Acme()}).check(config)
    assert config.plugin("acme", AcmeSettings) == AcmeSettings([Server("a"), Server("b", 1)], 7, "x")
    assert Config().plugin("acme", AcmeSettings) == AcmeSettings()


def test_lists_and_tables_come_from_the_environment_as_json() -> None:
    config = load_config(env={"AGENTRT_PLUGINS__ACME__SERVERS": '[{"host": "a"}]'})
    assert config.plugin("acme", AcmeSettings).servers == [Server("a")]
    with pytest.raises(ConfigError, match="AGENTRT_PLUGINS__ACME__SERVERS: is no JSON"):
        load_config(env={"AGENTRT_PLUGINS__ACME__SERVERS": "[{"})


@pytest.mark.parametrize(
    ("given_settings", "said"),
    [
        ({"acme": {"retrys": 1}}, "plugins.acme: Object contains unknown field `retrys`.*Settings: servers, retries"),
        ({"acme": {"retries": 11}}, r"plugins.acme: .*<= 10.*retries"),
        ({"acme": {"servers": [{"port": 3}]}}, r"plugins.acme: .*`host`"),
        ({"amce": {}}, "no plugin has a section plugins.amce. There is: acme"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(given_settings: dict[str, Any], said: str) -> None:
    config = Config(plugins=given_settings)
    plugins = Plugins.load({"a": Acme()}, entry_points=False)
    for start in (lambda: plugins.check(config), lambda: Runtime(config=config, plugins=plugins)):
        with pytest.raises(ConfigError, match=said):
            start()


@pytest.mark.parametrize("text", ["plugins = 3\n", "[plugins]\nacme = 3\n", "[plugins.'A b']\n"])
def test_a_section_is_a_table_with_a_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"node.toml"):
        load_config(file, env={})


class Open(msgspec.Struct):
    """Takes what it does not know."""


@pytest.mark.parametrize("kind", [Open, dict, AcmeSettings(), None])
def test_settings_are_structs_that_refuse_what_they_do_not_know(kind: Any) -> None:
    with pytest.raises(PluginError, match="plugin a: agentrt_settings must return names and msgspec Structs"):
        Plugins({"a": Acme(kind)})


def test_one_section_from_two_plugins_names_both() -> None:
    with pytest.raises(PluginError, match=r"plugins a and b both have a section plugins.acme"):
        Plugins({"a": Acme(), "b": Acme()})


def test_the_schema_has_the_sections_of_plugins() -> None:
    schema = json_schema(Plugins({"a": Acme()}))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"plugins": {"acme": {"servers": [{"host": "a"}], "retries": 1}}})
    for wrong in ({"acme": {"retries": 11}}, {"acme": {"retrys": 1}}, {"amce": {}}):
        assert not validator.is_valid({"plugins": wrong})


_TEXT = st.text(st.sampled_from("a.'\"\\ \n=#é☃\x7f"), max_size=4)
_VALUES = st.recursive(
    st.integers(-(2**63), 2**63 - 1) | st.booleans() | _TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=4,
)
_NAMES = st.sampled_from(["a", "acme", "acme-2"])


@settings(max_examples=50)
@given(st.dictionaries(_NAMES, st.dictionaries(st.sampled_from(["a", "B-1", "c_d"]), _VALUES, max_size=3), max_size=2))
def test_what_is_shown_as_toml_is_read_back(plugins: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(as_toml(Config(plugins=plugins))).get("plugins", {}) == plugins


# --- the command line -------------------------------------------------------------


GOOD = """
import msgspec
from agentrt.hooks import hookimpl

AGENTRT_HOOKS = 2

class Settings(msgspec.Struct, forbid_unknown_fields=True):
    "What acme needs."
    size: int = 3

@hookimpl
def agentrt_settings():
    return {"acme": Settings}

@hookimpl
def agentrt_policies():
    return {"acme-rules": print}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("acme_"):
            del sys.modules[name]


def install(site: Path, name: str, code: str) -> None:
    (site / f"{name}.py").write_text(code)
    info = site / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[agentrt]\nmain = {name}\n")


def test_plugins_are_listed_and_shown(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "acme_good", GOOD)
    install(site, "acme_broken", "import a_module_that_is_not_there\n")
    install(site, "acme_old", "AGENTRT_HOOKS = 1\n")
    assert run(["plugins", "ls", "--json"]) is exits.OK
    found = {info["name"]: info for info in map(json.loads, capsys.readouterr().out.splitlines())}
    good = found["acme_good:main"]
    assert (good["version"], good["brings"], good["settings"]) == ("1.2", {"policy": ["acme-rules"]}, ["acme"])
    assert "lmdb" in found["agentrt.builtin"]["brings"]["store"]
    assert "ModuleNotFoundError" in found["acme_broken:main"]["error"]
    assert "hooks version 1" in found["acme_old:main"]["error"]
    assert run(["plugins", "ls"]) is exits.OK
    assert "policy acme-rules; settings [plugins.acme]" in capsys.readouterr().out
    assert run(["plugins", "show", "acme_broken"]) is exits.OK  # one that is wrong hides no other, nor itself
    assert "cannot be loaded" in capsys.readouterr().out
    assert run(["plugins", "show", "acme_nobody"]) is exits.INPUT
    # A node does not start beside a plugin that is broken, and says which one it is.
    assert run(["plugins", "check"]) is exits.CONFIG
    assert "plugin acme_broken:main cannot be imported" in capsys.readouterr().err


def test_a_sound_plugin_is_shown_with_its_settings_and_checked(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "acme_good", GOOD)
    assert run(["plugins", "show", "acme_good"]) is exits.OK
    assert "[plugins.acme]\n# What acme needs.\nsize = 3\n" in capsys.readouterr().out
    assert run(["plugins", "show", "acme_good:main", "--json"]) is exits.OK
    assert json.loads(capsys.readouterr().out)["settings"]["acme"]["$ref"] == "#/$defs/Settings"
    file = site / "node.toml"
    for text, code in (
        ("", exits.OK),
        ("[plugins.acme]\nsize = 4\n", exits.OK),
        ('[node]\npolicies = "acme-rules"\n', exits.OK),
        ("[plugins.acme]\nsize = 'four'\n", exits.CONFIG),
        ('[node]\npolicies = "acme-rule"\n', exits.CONFIG),
        ('[node]\nnotifiers = ["acme"]\n', exits.CONFIG),
        ('[node]\nobservers = ["acme"]\n', exits.CONFIG),
        ('[tools]\nproviders = ["acme"]\n', exits.CONFIG),
        ('[ingress.sources.a]\nkind = "acme"\ntopic = "t"\nagent = "a"\n', exits.CONFIG),
        ('[ingress.sources.a]\nkind = "acme"\ntopic = "t"\n', exits.CONFIG),
        ('[store]\nkind = "acme"\n', exits.CONFIG),
    ):
        file.write_text(text)
        for command in (["plugins", "check"], ["config", "check"]):
            assert run(["--config", str(file), *command]) is code, (text, capsys.readouterr().err)
    assert run(["config", "schema"]) is exits.OK
    assert "acme" in json.loads(capsys.readouterr().out.splitlines()[-1])["properties"]["plugins"]["properties"]
