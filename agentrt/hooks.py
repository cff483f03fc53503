"""The hookspecs: the manual for plugin authors (docs/plugins/hooks.md is made from them).

A plugin is a package with an entry point in the group ``agentrt`` that names a module (or object) with functions marked
by `hookimpl`, and with ``AGENTRT_HOOKS = 2``, the version of this file that it was written for:

    from agentrt.hooks import hookimpl

    AGENTRT_HOOKS = 2

    @hookimpl
    def agentrt_stores():
        from acme.store import open_store          # import late: naming a store must not load its driver
        return {"acme": open_store}

There are seven kinds of plugin and one hook for each, one for observers, and one for settings. What holds for all:

- A hook returns a dict: name -> factory. It says what there is; nothing is opened, started or connected before the
  configuration asks for that name. Names are global per kind; one that two plugins bring is an error that names both.
- Every plugin's hook is called, none stops the chain (no ``firstresult``), and there is nothing to wrap: hook wrappers
  are refused at load.
- Hooks are called once, from the thread that makes the runtime, before its control loop exists. A factory is called on
  the thread that its hook names below; it and what it returns must not block that thread, unless the text says
  otherwise.
- Every factory gets the node's `Config` first; ``config.plugin("acme", AcmeSettings)`` is the plugin's own section
  (`agentrt_settings`). Names of secrets belong there, never their values: what gets ``secrets`` asks for those.
- Wrong plugins fail at load with PluginError naming the plugin: an import that fails, an unknown or misspelt hook,
  wrong arguments, another hook version, a hook that raises or returns something else.
- Built-in stores, backends and tools come through the same hooks (agentrt/builtin.py); no name is special.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pluggy

if TYPE_CHECKING:
    from agentrt.backends.base import Backend, Surroundings
    from agentrt.config import Config
    from agentrt.engine.ports import Tools
    from agentrt.ingress.port import Ingress
    from agentrt.ingress.settings import SourceConfig
    from agentrt.models.provider import ModelProvider, Secrets
    from agentrt.models.settings import ProviderConfig
    from agentrt.notifiers.port import Notifier, Observer
    from agentrt.policy import Policy
    from agentrt.stores.base import Store
    from agentrt.tools.spec import ToolRegistry

#: Version of the specs below. Raised when a hook or a contract changes so that old plugins must not load.
HOOKS_VERSION: Final = 2
#: Entry-point group and pluggy project name.
GROUP: Final = "agentrt"

hookspec: Final = pluggy.HookspecMarker(GROUP)
hookimpl: Final = pluggy.HookimplMarker(GROUP)

StoreFactory = Callable[["Config", asyncio.AbstractEventLoop], "Store"]
BackendFactory = Callable[["Config", "Surroundings"], "Backend"]
ToolProviderFactory = Callable[["Config", "ToolRegistry", asyncio.AbstractEventLoop], "Tools"]
ModelProviderFactory = Callable[["Config", str, "ProviderConfig", "Secrets"], "ModelProvider"]
IngressFactory = Callable[["Config", str, "SourceConfig", "Secrets"], "Ingress"]
NotifierFactory = Callable[["Config", "Secrets"], "Notifier"]
PolicyFactory = Callable[["Config"], "Policy"]
ObserverFactory = Callable[["Config"], "Observer"]
Factory = Callable[..., Any]


@hookspec
def agentrt_settings() -> Mapping[str, type[msgspec.Struct]]:  # type: ignore[empty-body]
    """Sections of the configuration that belong to plugins: ``[plugins.NAME]``.

    Not factories but msgspec Structs, declared with ``forbid_unknown_fields=True``: names, types, defaults and, with
    ``Annotated[…, msgspec.Meta(description=…)]``, bounds and what each is for. ``agentrt config schema`` shows them,
    ``agentrt config check`` and the start of every runtime hold the file to them. A section that no plugin has is
    refused. From the environment, ``AGENTRT_PLUGINS__NAME__SETTING``.
    """


@hookspec
def agentrt_stores() -> Mapping[str, StoreFactory]:  # type: ignore[empty-body]
    """Stores: where runs are kept.

    ``factory(config, loop)`` opens the store named by ``config.store.path`` and returns a `Store`. It is called before
    the node accepts anything, and may block. ``loop`` is where the `done` callbacks of commits run. Raises StoreError
    kinds: the runtime then does not start. Later, an error fails the operation it belongs to, and the runs concerned
    are read again from the store.
    """


@hookspec
def agentrt_backends() -> Mapping[str, BackendFactory]:  # type: ignore[empty-body]
    """Backends: what runs an agent's code.

    ``factory(config, surroundings)`` returns a `Backend`; importing what is behind it may take long. The backend's
    ``open`` is awaited on the control loop before the first agent is registered. An exception of ``prepare`` fails that
    registration, of ``start`` that run.
    """


@hookspec
def agentrt_tool_providers() -> Mapping[str, ToolProviderFactory]:  # type: ignore[empty-body]
    """Tool providers: what executes ``tool.call``. The built-in one, ``python``, runs Python tools in tool hosts.

    ``factory(config, registry, loop)`` adds a `ToolSpec` to the node's `ToolRegistry` for each tool it brings, and
    returns `Tools`, to which calls of those tools go. A call that raises, or whose outcome is not ok, fails that step
    as the tool's error; the provider itself is not blamed. A factory that raises keeps the runtime from starting. One
    that must ask others which tools there are has ``async open()`` as well: the node waits for it before it accepts
    anything, and before runs go on; tools may be added later, too.

    A provider may have a method ``attach(backend)``, called before ``start`` with the node's `WasmBackend`, which is a
    `Backend`: it can run calls as guests on the node's CPU slots, in the tier and the tenant's share of whoever calls.
    """


@hookspec
def agentrt_model_providers() -> Mapping[str, ModelProviderFactory]:  # type: ignore[empty-body]
    """Model providers: what answers ``model.generate``. The built-in one, ``openai``, speaks the OpenAI-compatible HTTP
    protocol.

    ``factory(config, name, provider, secrets)`` returns a `ModelProvider` for ``[models.providers.NAME]``, whose
    settings ``provider`` holds. It is called when the first call goes to that provider, on the gateway's own thread and
    loop, on which all of it runs: blocking there keeps other calls to models waiting, and nothing else. Failures are
    `ModelFailure`; anything else that a factory or a call raises fails that step with ``model_provider`` and the
    exception's name; its text is not shown.
    """


@hookspec
def agentrt_ingresses() -> Mapping[str, IngressFactory]:  # type: ignore[empty-body]
    """Ingresses: doors through which runs come in from a bus. The HTTP API is no plugin.

    ``factory(config, name, source, secrets)`` returns an `Ingress` for ``[ingress.sources.NAME]``, whose settings
    ``source`` holds: one topic, one tier. It is called inside the loop of the ingress thread, on which all of it runs,
    after the node's agents are registered. If the factory or `Ingress.run` raises, the ingress is named in the log,
    closed, and made again in a while: what it had not acknowledged is delivered again, and is still one run.
    """


@hookspec
def agentrt_notifiers() -> Mapping[str, NotifierFactory]:  # type: ignore[empty-body]
    """Notifiers: told when runs end or wait for a person, to tell somebody.

    ``factory(config, secrets)`` returns a `Notifier`. It is called inside the loop of the notifier thread, on which all
    of it runs. Runs do not wait for it, and nothing is kept for it: up to 10,000 notifications wait, more are counted
    and lost, and so are those of a node that dies. What must arrive is a callback (docs/http.md). One that raises is
    named in the log and disabled.
    """


@hookspec
def agentrt_policies() -> Mapping[str, PolicyFactory]:  # type: ignore[empty-body]
    """Policies: what may be accepted and may go on.

    ``factory(config)`` returns a `Policy`: ``decide(kind, facts)``, pure and under 1 ms, answers `Allow`, `Deny` or
    `Defer`; ``version`` is what runs are pinned to. One that raises or overruns has answered deny; a factory that
    raises keeps the runtime from starting, for a policy that is missing would allow everything.
    """


@hookspec
def agentrt_observers() -> Mapping[str, ObserverFactory]:  # type: ignore[empty-body]
    """Observers of the life of runs, for dashboards and statistics.

    ``factory(config)`` returns a function ``observer(event, data)``. It is called on the notifier thread, in order, for
    runs that are accepted, are parked, emit something or end. It sees what notifiers see, and more, and is bounded like
    them. An event that it does not know is to be ignored. One that raises is named in the log and disabled.
    """


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
#: The same of what is no kind of its own.
OBSERVER: Final = "observer"
HOOKS: Final[Mapping[str, str]] = {**KINDS, OBSERVER: "agentrt_observers"}


class Facts(NamedTuple):
    """What the manual's table says of a hook. ``contract``: what its factories return, and what else an author needs to
    know, each ``module:name``; ``suite``: the contract suite of `agentrt.testing`."""

    chosen_by: str
    thread: str
    on_error: str
    contract: tuple[str, ...]
    suite: str


FACTS: Final[Mapping[str, Facts]] = {
    "agentrt_stores": Facts(
        "`store.kind`",
        "the control loop's",
        "the operation fails",
        (
            "agentrt.stores.base:Store",
            "agentrt.stores.base:Batch",
            "agentrt.stores.base:Head",
            "agentrt.stores.base:Row",
            "agentrt.stores.base:check_batch",
            "agentrt.records:encode_record",
            "agentrt.records:decode_record",
        ),
        "agentrt.testing.stores:StoreContract",
    ),
    "agentrt_backends": Facts(
        "an agent's `backend`",
        "one of its own for the factory, the control loop's for the rest",
        "the registration or the run fails",
        (
            "agentrt.backends.base:Backend",
            "agentrt.backends.base:Program",
            "agentrt.backends.base:Guest",
            "agentrt.backends.base:GuestEvents",
            "agentrt.backends.base:Request",
            "agentrt.backends.base:Exit",
            "agentrt.backends.base:Surroundings",
        ),
        "agentrt.testing.backends:BackendContract",
    ),
    "agentrt_tool_providers": Facts(
        "`tools.providers`",
        "the control loop's",
        "the step fails",
        ("agentrt.engine.ports:Tools", "agentrt.tools.outcome:ToolOutcome", "agentrt.tools.spec:ToolSpec"),
        "agentrt.testing.tools:ToolProviderContract",
    ),
    "agentrt_model_providers": Facts(
        "`models.providers.NAME.kind`",
        "the gateway's",
        "the step fails",
        (
            "agentrt.models.provider:ModelProvider",
            "agentrt.models.provider:ProviderCall",
            "agentrt.models.messages:Conversation",
            "agentrt.models.messages:Message",
            "agentrt.models.messages:Tool",
            "agentrt.models.messages:ToolUse",
            "agentrt.models.schema:Schema",
            "agentrt.models.chat:Sampling",
            "agentrt.models.settings:ModelConfig",
            "agentrt.models.settings:ProviderConfig",
            "agentrt.models.provider:Secrets",
            "agentrt.models.chat:Completion",
            "agentrt.models.prices:Usage",
            "agentrt.models.failures:ModelFailure",
            "agentrt.models.failures:FailureKind",
        ),
        "agentrt.testing.model_providers:ModelProviderContract",
    ),
    "agentrt_ingresses": Facts(
        "`ingress.sources.NAME.kind`",
        "the ingress thread's",
        "made again in a while",
        (
            "agentrt.ingress.port:Ingress",
            "agentrt.ingress.port:Inbox",
            "agentrt.ingress.port:Delivery",
            "agentrt.ingress.settings:SourceConfig",
        ),
        "agentrt.testing.ingresses:IngressContract",
    ),
    "agentrt_notifiers": Facts(
        "`node.notifiers`",
        "the notifier thread's",
        "named and disabled",
        ("agentrt.notifiers.port:Notifier", "agentrt.notifiers.port:Notification"),
        "agentrt.testing.notifiers:NotifierContract",
    ),
    "agentrt_policies": Facts(
        "`node.policies`",
        "the control loop's",
        "the answer is deny",
        ("agentrt.policy:Policy", "agentrt.policy:Allow", "agentrt.policy:Deny", "agentrt.policy:Defer"),
        "agentrt.testing.policies:PolicyContract",
    ),
    "agentrt_observers": Facts(
        "`node.observers`",
        "the notifier thread's",
        "named and disabled",
        (
            "agentrt.notifiers.port:Observer",
            "agentrt.engine.info:RunInfo",
            "agentrt.engine.info:Emitted",
            "agentrt.engine.info:RunResult",
        ),
        "agentrt.testing.observers:ObserverContract",
    ),
}
