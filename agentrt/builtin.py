"""What agentrt brings itself, registered like any plugin's. Everything is imported when it is asked for."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentrt.errors import ConfigError
from agentrt.hooks import (
    HOOKS_VERSION,
    BackendFactory,
    ModelProviderFactory,
    StoreFactory,
    ToolProviderFactory,
    hookimpl,
)

if TYPE_CHECKING:
    from agentrt.backends.base import Backend, Surroundings
    from agentrt.config import Config
    from agentrt.engine.ports import Tools
    from agentrt.models.provider import ModelProvider, Secrets
    from agentrt.models.settings import ProviderConfig
    from agentrt.stores.base import Store
    from agentrt.tools.spec import ToolRegistry

AGENTRT_HOOKS: Final = HOOKS_VERSION


@hookimpl
def agentrt_stores() -> Mapping[str, StoreFactory]:
    return {"lmdb": _lmdb_store, "memory": _memory_store}


@hookimpl
def agentrt_backends() -> Mapping[str, BackendFactory]:
    return {"wasm": _wasm_backend, "python": _python_backend, "process": _process_backend}


@hookimpl
def agentrt_tool_providers() -> Mapping[str, ToolProviderFactory]:
    return {"python": _python_tools}


@hookimpl
def agentrt_model_providers() -> Mapping[str, ModelProviderFactory]:
    return {"openai": _openai_provider}


def _lmdb_store(config: "Config", loop: asyncio.AbstractEventLoop) -> "Store":
    from agentrt.stores.lmdb import LmdbStore

    store = config.store
    return LmdbStore(
        store.path,
        loop,
        map_bytes=store.map_bytes,
        map_bytes_max=store.map_bytes_max,
        free_bytes_min=store.free_bytes_min,
        force_place=store.force_place,
        blob_bytes_max=store.blob_bytes_max,
    )


def _memory_store(config: "Config", loop: asyncio.AbstractEventLoop) -> "Store":
    from agentrt.stores.memory import MemoryStore

    return MemoryStore(loop)


def _wasm_backend(config: "Config", surroundings: "Surroundings") -> "Backend":
    from agentrt.backends.wasm import WasmBackend

    return WasmBackend(config)


def _python_backend(config: "Config", surroundings: "Surroundings") -> "Backend":
    from agentrt.backends.python.backend import PythonBackend
    from agentrt.sizing import python_limits

    if surroundings.slots is None:
        raise ConfigError("the python backend needs the slots of another one")
    return PythonBackend(python_limits(config, surroundings.secret), surroundings.slots)


def _process_backend(config: "Config", surroundings: "Surroundings") -> "Backend":
    from agentrt.backends.process.agents.backend import ProcessBackend
    from agentrt.sizing import process_limits

    if surroundings.slots is None:
        raise ConfigError("the process backend needs the slots of another one")
    share = config.scheduler.tier0_share_pct
    return ProcessBackend(process_limits(config), surroundings.slots, config.process, share)


def _python_tools(config: "Config", registry: "ToolRegistry", loop: asyncio.AbstractEventLoop) -> "Tools":
    from agentrt.sizing import tool_class_limits, tool_limits
    from agentrt.tools.pool import ToolPool
    from agentrt.tools.secrets import provider_from

    return ToolPool(
        registry,
        loop,
        tool_limits(config),
        classes=tool_class_limits(config),
        secrets=provider_from(config.secrets),
        process=config.process,
        tier0_share_pct=config.scheduler.tier0_share_pct,
        folder=Path(config.store.path) if config.store.kind == "lmdb" and config.store.path else None,
    )


def _openai_provider(config: "Config", name: str, provider: "ProviderConfig", secrets: "Secrets") -> "ModelProvider":
    from agentrt.models.openai import OpenAiProvider

    return OpenAiProvider(name, provider, secrets)
