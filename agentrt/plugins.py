"""Finding, checking and asking plugins; what they may do stands in agentrt/hooks.py."""

import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import pluggy

from agentrt import about, hooks
from agentrt.errors import ConfigError, PluginError
from agentrt.hooks import (
    HOOKS,
    OBSERVER,
    BackendFactory,
    Factory,
    IngressFactory,
    ModelProviderFactory,
    NotifierFactory,
    ObserverFactory,
    PolicyFactory,
    StoreFactory,
    ToolProviderFactory,
)
from agentrt.settings import is_section_name

if TYPE_CHECKING:
    from agentrt.config import Config

#: The built-ins, registered like any plugin.
BUILTIN: Final = "agentrt.builtin"
_VERSION_NAME: Final = "AGENTRT_HOOKS"
_SETTINGS_HOOK: Final = "agentrt_settings"


class PluginInfo(msgspec.Struct, frozen=True):
    """A plugin that is installed. ``brings``: names by kind; ``settings``: its sections; ``error``: why it cannot be
    loaded, alone."""

    name: str
    version: str
    brings: dict[str, list[str]] = {}
    settings: list[str] = []
    error: str = ""


class Plugins:
    """The loaded plugins. Made once, with `load`; afterwards read-only, so any thread may ask it."""

    def __init__(self, plugins: Mapping[str, object]) -> None:
        """``plugins``: name -> module or object. Raises PluginError naming the first one that is wrong."""
        self._manager = pluggy.PluginManager(hooks.GROUP)
        self._manager.add_hookspecs(hooks)
        for name, plugin in plugins.items():
            self._register(name, plugin)
        self._factories = {kind: self._collect(kind, hook) for kind, hook in HOOKS.items()}
        self._settings = self._collect_settings()

    @classmethod
    def load(cls, extra: Mapping[str, object] | None = None, *, entry_points: bool = True) -> "Plugins":
        """The built-ins, the installed plugins (unless ``entry_points`` is false) and ``extra`` ones.

        Raises PluginError.
        """
        found: dict[str, object] = {BUILTIN: _imported(BUILTIN, BUILTIN)}
        for name, _, point in _installed() if entry_points else ():
            found[name] = _imported(name, point)
        return cls(found | dict(extra or {}))

    @staticmethod
    def survey() -> list[PluginInfo]:
        """What is installed, the built-in one first. Each is loaded for itself: one that is wrong hides no other."""
        found: list[PluginInfo] = []
        points: list[tuple[str, str, str | importlib.metadata.EntryPoint]] = [(BUILTIN, about.version(), BUILTIN)]
        for name, version, source in [*points, *_installed()]:
            try:
                alone = Plugins({name: _imported(name, source)})
            except PluginError as error:
                found.append(PluginInfo(name, version, error=error.message))
            else:
                brings = {kind: alone.names(kind) for kind in HOOKS if alone.names(kind)}
                found.append(PluginInfo(name, version, brings, sorted(alone._settings)))
        return found

    def names(self, kind: str) -> list[str]:
        """What there is of a kind ("store", "backend", …), sorted."""
        return sorted(self._factories[kind])

    def owner(self, kind: str, name: str) -> str:
        """The plugin that brought it. Raises ConfigError if there is none."""
        return self._find(kind, name)[0]

    def store(self, name: str) -> StoreFactory:
        """A store's factory. Raises ConfigError naming what there is."""
        return cast(StoreFactory, self._find("store", name)[1])

    def backend(self, name: str) -> BackendFactory:
        """A backend's factory. Raises ConfigError naming what there is."""
        return cast(BackendFactory, self._find("backend", name)[1])

    def tool_provider(self, name: str) -> ToolProviderFactory:
        """A tool provider's factory. Raises ConfigError naming what there is."""
        return cast(ToolProviderFactory, self._find("tool provider", name)[1])

    def model_provider(self, name: str) -> ModelProviderFactory:
        """A model provider's factory. Raises ConfigError naming what there is."""
        return cast(ModelProviderFactory, self._find("model provider", name)[1])

    def policy(self, name: str) -> PolicyFactory:
        """A policy's factory. Raises ConfigError naming what there is."""
        return cast(PolicyFactory, self._find("policy", name)[1])

    def ingress(self, name: str) -> IngressFactory:
        """An ingress's factory. Raises ConfigError naming what there is."""
        return cast(IngressFactory, self._find("ingress", name)[1])

    def notifier(self, name: str) -> NotifierFactory:
        """A notifier's factory. Raises ConfigError naming what there is."""
        return cast(NotifierFactory, self._find("notifier", name)[1])

    def observer(self, name: str) -> ObserverFactory:
        """An observer's factory. Raises ConfigError naming what there is."""
        return cast(ObserverFactory, self._find(OBSERVER, name)[1])

    def settings(self) -> dict[str, type[msgspec.Struct]]:
        """The sections of plugins, by name."""
        return {name: kind for name, (_, kind) in sorted(self._settings.items())}

    def check(self, config: "Config") -> None:
        """Hold ``[plugins.NAME]`` of the configuration to what the plugins say. Raises ConfigError."""
        for name in config.plugins:
            if name not in self._settings:
                there = ", ".join(sorted(self._settings)) or "none"
                raise ConfigError(f"no plugin has a section plugins.{name}", hint=f"There is: {there}")
            config.plugin(name, self._settings[name][1])

    def _find(self, kind: str, name: str) -> tuple[str, Factory]:
        try:
            return self._factories[kind][name]
        except KeyError:
            there = ", ".join(self.names(kind)) or "none"
            raise ConfigError(f"no plugin brings a {kind} {name!r}", hint=f"There is: {there}") from None

    def _register(self, name: str, plugin: object) -> None:
        version = getattr(plugin, _VERSION_NAME, None)
        if version != hooks.HOOKS_VERSION:
            says = f"was written for hooks version {version!r}" if version is not None else f"lacks {_VERSION_NAME}"
            raise PluginError(
                f"plugin {name} {says}; this agentrt has version {hooks.HOOKS_VERSION}",
                hint="Install a release of the plugin that fits",
            )
        try:
            # register checks arguments against the specs, check_pending names: at once, so that the right one is named.
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {name} is refused: {_first_line(error)}") from error
        for caller in self._manager.get_hookcallers(plugin) or []:
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin and (impl.hookwrapper or impl.wrapper):
                    raise PluginError(f"plugin {name} is refused: {caller.name} cannot be wrapped")

    def _offers(self, hook: str) -> Iterator[tuple[str, Any]]:
        """(plugin, what its hook returned)."""
        # Implementations are called one by one, oldest first, because pluggy's own call does not say who raised.
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            owner = impl.plugin_name
            try:
                offered = impl.function()
            except Exception as error:
                raise PluginError(f"plugin {owner} failed in {hook}: {type(error).__name__}: {error}") from error
            yield owner, offered

    def _collect_settings(self) -> dict[str, tuple[str, type[msgspec.Struct]]]:
        found: dict[str, tuple[str, type[msgspec.Struct]]] = {}
        for owner, offered in self._offers(_SETTINGS_HOOK):
            if not isinstance(offered, Mapping) or not all(
                isinstance(name, str) and is_section_name(name) and _is_section(kind) for name, kind in offered.items()
            ):
                raise PluginError(
                    f"plugin {owner}: {_SETTINGS_HOOK} must return names and msgspec Structs, not {offered!r:.500}",
                    hint="Declare them with forbid_unknown_fields=True; names have lower-case letters, digits and -",
                )
            for name, kind in offered.items():
                if name in found:
                    raise PluginError(f"plugins {found[name][0]} and {owner} both have a section plugins.{name}")
                found[name] = (owner, kind)
        return found

    def _collect(self, kind: str, hook: str) -> dict[str, tuple[str, Factory]]:
        found: dict[str, tuple[str, Factory]] = {}
        for owner, offered in self._offers(hook):
            if not isinstance(offered, Mapping) or not all(
                isinstance(name, str) and name and callable(factory) for name, factory in offered.items()
            ):
                raise PluginError(f"plugin {owner}: {hook} must return a dict of names and factories, not {offered!r}")
            for name, factory in offered.items():
                if name in found:
                    raise PluginError(f"plugins {found[name][0]} and {owner} both bring a {kind} {name!r}")
                found[name] = (owner, factory)
        return found


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.forbid_unknown_fields


def _installed() -> Iterator[tuple[str, str, importlib.metadata.EntryPoint]]:
    """(plugin, version, entry point)."""
    for point in importlib.metadata.entry_points(group=hooks.GROUP):
        # Two distributions with a point of the same name are two plugins.
        distribution, version = (point.dist.name, point.dist.version) if point.dist else ("?", "?")
        yield f"{distribution}:{point.name}", version, point


def _imported(name: str, source: str | importlib.metadata.EntryPoint) -> object:
    try:
        return importlib.import_module(source) if isinstance(source, str) else source.load()
    except Exception as error:
        raise PluginError(f"plugin {name} cannot be imported: {type(error).__name__}: {error}") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])
