"""What is installed: the versions that decide what this agentrt can read, load and go on with."""

import importlib.metadata


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("agentrt")
    except importlib.metadata.PackageNotFoundError:
        return "0+uninstalled"


def versions() -> dict[str, str]:
    """agentrt's; the engine's, which artifacts and frames belong to; the guest ABI's, which modules are built for; the
    store's schema, which ``agentrt store migrate`` brings up; and the hooks', which plugins are written for."""
    from agentrt import _core
    from agentrt.hooks import HOOKS_VERSION
    from agentrt.stores.lmdb_files import SCHEMA

    return {
        "agentrt": version(),
        "wasmtime": importlib.metadata.version("wasmtime"),
        "guest ABI": str(_core.abi_version()),
        "store schema": str(SCHEMA),
        "hooks": str(HOOKS_VERSION),
    }
