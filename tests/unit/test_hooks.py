"""Plugins: what is wrong with one fails at load and names it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrt import hooks
from agentrt.errors import ConfigError, PluginError
from agentrt.hooks import HOOKS_VERSION, hookimpl
from agentrt.plugins import Plugins


def plugin(version: object = HOOKS_VERSION, **implementations: Any) -> SimpleNamespace:
    return SimpleNamespace(
        AGENTRT_HOOKS=version, **{name: hookimpl(function) for name, function in implementations.items()}
    )


def nothing() -> dict[str, Any]:
    return {}


def test_what_plugins_bring_is_found_by_name() -> None:
    plugins = Plugins(
        {
            "a": plugin(agentrt_stores=lambda: {"one": int, "two": float}),
            "b": plugin(agentrt_stores=lambda: {"three": str}, agentrt_backends=lambda: {"one": complex}),
        }
    )
    assert plugins.names("store") == ["one", "three", "two"]
    assert plugins.names("policy") == []
    assert plugins.store("three") is str
    assert plugins.backend("one") is complex
    assert plugins.owner("store", "two") == "a"
    with pytest.raises(ConfigError, match=r"no plugin brings a store 'four'\. There is: one, three, two"):
        plugins.store("four")


def test_misspelt_hook_fails_at_load() -> None:
    with pytest.raises(PluginError, match=r"plugin speller is refused: .*agentrt_storse"):
        Plugins({"fine": plugin(agentrt_stores=nothing), "speller": plugin(agentrt_storse=nothing)})


def test_wrong_arguments_fail_at_load() -> None:
    with pytest.raises(PluginError, match=r"plugin arguer is refused: .*agentrt_stores"):
        Plugins({"arguer": plugin(agentrt_stores=lambda config: {})})


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_wrong_version_is_refused(version: object) -> None:
    with pytest.raises(PluginError, match=r"plugin old .*this agentrt has version 2"):
        Plugins({"old": plugin(version, agentrt_stores=nothing)})


def test_missing_version_is_refused() -> None:
    with pytest.raises(PluginError, match=r"plugin vague lacks AGENTRT_HOOKS"):
        Plugins({"vague": SimpleNamespace(agentrt_stores=hookimpl(nothing))})


def test_a_raising_plugin_is_named() -> None:
    def agentrt_backends() -> dict[str, Any]:
        raise RuntimeError("no GPU")

    with pytest.raises(PluginError, match=r"plugin gpu failed in agentrt_backends: RuntimeError: no GPU"):
        Plugins({"fine": plugin(agentrt_backends=nothing), "gpu": plugin(agentrt_backends=agentrt_backends)})


@pytest.mark.parametrize("offered", [None, [], {"x": 3}, {3: int}, {"": int}])
def test_a_wrong_answer_is_refused(offered: object) -> None:
    with pytest.raises(PluginError, match="plugin odd: agentrt_stores must return a dict"):
        Plugins({"odd": plugin(agentrt_stores=lambda: offered)})


def test_one_name_from_two_plugins_names_both() -> None:
    with pytest.raises(PluginError, match="plugins a and b both bring a store 'x'"):
        Plugins({"a": plugin(agentrt_stores=lambda: {"x": int}), "b": plugin(agentrt_stores=lambda: {"x": int})})


@pytest.mark.parametrize("marks", [{"wrapper": True}, {"hookwrapper": True}])
def test_wrappers_are_refused(marks: dict[str, bool]) -> None:
    """A wrapper that raises in its tear-down would skip other plugins."""

    def agentrt_stores() -> Any:
        yield

    wrapper = SimpleNamespace(AGENTRT_HOOKS=HOOKS_VERSION, agentrt_stores=hookimpl(agentrt_stores, **marks))
    with pytest.raises(PluginError, match="plugin wrap is refused: agentrt_stores cannot be wrapped"):
        Plugins({"wrap": wrapper})


def test_every_kind_has_a_documented_hook() -> None:
    specs = {name for name, value in vars(hooks).items() if hasattr(value, "agentrt_spec")}
    assert {*hooks.HOOKS.values(), "agentrt_settings"} == specs
    assert set(hooks.FACTS) == set(hooks.HOOKS.values())
    assert len(hooks.KINDS) == 7
    for name in hooks.HOOKS.values():
        assert "factory(" in (getattr(hooks, name).__doc__ or "")


def install(folder: Path, name: str, code: str) -> None:
    """A distribution with an entry point, as pip would leave it."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[agentrt]\nmain = {name}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_installed_plugins_are_loaded(site: Path) -> None:
    install(
        site,
        "acme_store",
        "from agentrt.hooks import hookimpl\nAGENTRT_HOOKS = 2\n"
        "@hookimpl\ndef agentrt_stores():\n    return {'acme': open}\n",
    )
    try:
        plugins = Plugins.load()
        assert plugins.store("acme") is open
        assert plugins.owner("store", "acme") == "acme_store:main"
        assert "acme" not in Plugins.load(entry_points=False).names("store")
    finally:
        sys.modules.pop("acme_store", None)


def test_an_installed_plugin_that_cannot_be_imported_is_named(site: Path) -> None:
    install(site, "acme_broken", "import a_module_that_is_not_there\n")
    with pytest.raises(PluginError, match=r"plugin acme_broken:main cannot be imported: ModuleNotFoundError"):
        Plugins.load()


def test_built_ins_come_through_the_hooks() -> None:
    plugins = Plugins.load(entry_points=False)
    assert {"lmdb", "memory"} <= set(plugins.names("store"))
    assert "wasm" in plugins.names("backend")
    assert "python" in plugins.names("tool provider")
    assert plugins.owner("store", "lmdb") == "agentrt.builtin"


def test_naming_the_built_ins_loads_no_drivers() -> None:
    import subprocess

    code = (
        "import sys; from agentrt.plugins import Plugins; Plugins.load(entry_points=False); "
        "print([name for name in ('lmdb', 'agentrt._core', 'uvloop', 'wasmtime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
