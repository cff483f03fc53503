"""The hookspecs: the manual for plugin authors.

A plugin is a package with an entry point in the group ``agentrt`` that names a module (or object) with functions marked
by `hookimpl`, and with ``AGENTRT_HOOKS = 1``, the version of this file that it was written for:

    from agentrt.hooks import hookimpl

    AGENTRT_HOOKS = 1

    @hookimpl
    def agentrt_stores():
        from acme.store import open_store          # import late: naming a store must not load its driver
        return {"acme": open_store}

There are seven kinds of plugin and one hook for each. What holds for all of them:

- A hook returns a dict: name -> factory. It says what there is; nothing is opened, started or connected before the
  configuration asks for that name. Names are global per kind; one that two plugins bring is an error that names both.
- Every plugin's hook is called, none stops the chain (no ``firstresult``), and there is nothing to wrap: hook wrappers
  are refused at load.
- Hooks are called once, from the thread that makes the runtime, before its control loop exists. Factories are called on
  the control loop's thread; they and what they return must not block it, unless the text below says otherwise.
- Wrong plugins fail at load with PluginError naming the plugin: an import that fails, an unknown or misspelt hook,
  wrong arguments, another hook version, a hook that raises or returns something else.
- Built-in stores, backends and tools come through the same hooks (agentrt/builtin.py); no name is special.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pluggy

if TYPE_CHECKING:
    from agentrt.backends.base import Backend, Surroundings
    from agentrt.config import Config, StoreConfig
    from agentrt.engine.ports import Tools
    from agentrt.models.provider import ModelProvider, Secrets
    from agentrt.models.settings import ProviderConfig
    from agentrt.policy import Policy
    from agentrt.stores.base import Store
    from agentrt.tools.spec import ToolRegistry

#: Version of the specs below. Raised when a hook or a contract changes so that old plugins must not load.
HOOKS_VERSION: Final = 1
#: Entry-point group and pluggy project name.
GROUP: Final = "agentrt"

hookspec: Final = pluggy.HookspecMarker(GROUP)
hookimpl: Final = pluggy.HookimplMarker(GROUP)

StoreFactory = Callable[["StoreConfig", asyncio.AbstractEventLoop], "Store"]
BackendFactory = Callable[["Config", "Surroundings"], "Backend"]
ToolProviderFactory = Callable[["Config", "ToolRegistry", asyncio.AbstractEventLoop], "Tools"]
ModelProviderFactory = Callable[[str, "ProviderConfig", "Secrets"], "ModelProvider"]
PolicyFactory = Callable[["Config"], "Policy"]
Factory = Callable[..., Any]


# --- served by this release ----------------------------------------------------


@hookspec
def agentrt_stores() -> Mapping[str, StoreFactory]:  # type: ignore[empty-body]
    """Stores: where runs are kept. Chosen by ``store.kind``.

    ``factory(config, loop)`` opens the store named by ``config.path`` and returns a `Store` (agentrt/stores/base.py;
    the suite in `agentrt.testing.stores` checks one). Called before the node accepts anything; it may block. ``loop``
    is where the `done` callbacks of commits run. Raises StoreError kinds: the runtime then does not start. Later, an
    error fails the operation it belongs to, and the runs concerned are read again from the store.
    """


@hookspec
def agentrt_backends() -> Mapping[str, BackendFactory]:  # type: ignore[empty-body]
    """Backends: what runs an agent's code. An agent's spec names one; default ``wasm``.

    ``factory(config, surroundings)`` returns a `Backend` (agentrt/backends/base.py, as `Surroundings`); it is called
    on a thread of its own, since importing what is behind it may take long. The backend's ``open`` is awaited on the
    control loop before the first agent is registered. An exception of ``prepare`` fails that registration, of
    ``start`` that run.
    """


@hookspec
def agentrt_tool_providers() -> Mapping[str, ToolProviderFactory]:  # type: ignore[empty-body]
    """Tool providers: what executes ``tool.call``. The built-in one, ``python``, runs Python tools in tool hosts.

    ``factory(config, registry, loop)`` gets the node's `ToolRegistry` (agentrt/tools/spec.py) and returns what has the
    methods of `ToolPool` (agentrt/tools/pool.py) that the engine uses (`Tools` in agentrt/engine/ports.py). A call that
    raises, or whose outcome is not ok, fails that step as the tool's error; the provider itself is not blamed.
    """


@hookspec
def agentrt_policies() -> Mapping[str, PolicyFactory]:  # type: ignore[empty-body]
    """Policies: what may be accepted and may go on. Those in force are named by ``node.policies``.

    ``factory(config)`` returns a `Policy` (agentrt/policy.py): ``decide(kind, facts)``, pure and under 1 ms, answers
    `Allow`, `Deny` or `Defer`; ``version`` is what runs are pinned to. One that raises or overruns has answered deny; a
    factory that raises keeps the runtime from starting, for a policy that is missing would allow everything.
    """


@hookspec
def agentrt_model_providers() -> Mapping[str, ModelProviderFactory]:  # type: ignore[empty-body]
    """Model providers: what answers ``model.generate``. ``models.providers.NAME.kind`` names one; the built-in one,
    ``openai``, speaks the OpenAI-compatible HTTP protocol.

    ``factory(name, config, secrets)`` returns a `ModelProvider` (agentrt/models/provider.py). It is called when the
    first call goes to that provider, on the gateway's own thread and loop, on which all of it runs: blocking there
    keeps other calls to models waiting, and nothing else. Failures are `ModelFailure`; anything else that a factory or
    a call raises fails that step with ``model_provider`` and the exception's name; its text is not shown.
    """


# --- specified, not called by this release -------------------------------------


@hookspec
def agentrt_ingresses() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Ingresses: doors through which runs come in (HTTP, a bus). ``factory(config)``. One that raises is named and
    disabled; what it had not acknowledged was not accepted. Not called by this release."""


@hookspec
def agentrt_notifiers() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Notifiers: told when runs end or wait for a person. ``factory(config)``. One that raises is named and disabled;
    runs do not wait for it. Not called by this release."""


#: Kind of plugin -> its hook.
KINDS: Final[Mapping[str, str]] = {
    "store": "agentrt_stores",
    "backend": "agentrt_backends",
    "tool provider": "agentrt_tool_providers",
    "model provider": "agentrt_model_providers",
    "ingress": "agentrt_ingresses",
    "notifier": "agentrt_notifiers",
    "policy": "agentrt_policies",
}
