"""Several tool providers as one: each call goes to the provider that its tool's spec names."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from agentrt.engine.ports import Tools
from agentrt.errors import ConfigError
from agentrt.tools.outcome import Done
from agentrt.tools.spec import PROVIDER_DEFAULT, ToolRegistry


class _Routed(NamedTuple):
    """What `ToolRouter.call` returned."""

    provider: Tools
    call: Any


class ToolRouter:
    """Loop thread only. ``others``: providers by name, beside the built-in one."""

    def __init__(self, registry: ToolRegistry, builtin: Tools, others: Mapping[str, Tools]) -> None:
        """Raises ConfigError for a tool whose provider is not there."""
        self.registry: Final = registry
        self._builtin = builtin
        self._providers: dict[str, Tools] = {PROVIDER_DEFAULT: builtin, **others}
        for spec in registry:
            if spec.provider not in self._providers:
                raise ConfigError(
                    f"tool {spec.name} is of the provider {spec.provider!r}, which is not in force",
                    limit="tools.providers",
                )

    def call(
        self,
        name: str,
        args: bytes,
        *,
        key: str | None,
        tenant: str,
        tier: int,
        attempt: int,
        done: Done,
        timeout_ns: int | None = None,
        reconcile: bool = False,
    ) -> object:
        """As `Tools.call`."""
        provider = self._providers[self.registry.get(name).provider]
        call = provider.call(
            name,
            args,
            key=key,
            tenant=tenant,
            tier=tier,
            attempt=attempt,
            done=done,
            timeout_ns=timeout_ns,
            reconcile=reconcile,
        )
        return _Routed(provider, call)

    def cancel(self, call: Any) -> None:
        if isinstance(call, _Routed):
            call.provider.cancel(call.call)

    async def open(self) -> None:
        """Those that have to ask somebody which tools there are do so; see `Tools`."""
        for provider in self._providers.values():
            if (opened := getattr(provider, "open", None)) is not None:
                await opened()

    def start(self) -> None:
        for provider in self._providers.values():
            provider.start()

    def urgent(self, wanted: Callable[[], bool]) -> None:
        """To all that have processes which could make room."""
        for provider in self._providers.values():
            if (urgent := getattr(provider, "urgent", None)) is not None:
                urgent(wanted)

    def prewarm(self, counts: Mapping[str, int]) -> None:
        """To all that keep processes ready."""
        for provider in self._providers.values():
            if (prewarm := getattr(provider, "prewarm", None)) is not None:
                prewarm(counts)

    def statistics(self) -> Any:
        """Those of the built-in one: counters of tool hosts."""
        return self._builtin.statistics()

    def stop(self) -> None:
        for provider in self._providers.values():
            provider.stop()

    def evict(self) -> None:
        for provider in self._providers.values():
            provider.evict()

    async def close(self) -> None:
        """Each is closed, whatever the one before it did; the first error is raised."""
        errors: list[Exception] = []
        for provider in self._providers.values():
            try:
                await provider.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
