"""Where the values behind ``secret://name`` come from.

A node asks its provider when a call needs a value, in a thread of its own, and sends it to the host with that call.
Values are kept nowhere. Hosts are started without the environment variables that hold secrets.
"""

import asyncio
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import quote

from agentrt.errors import ConfigError, ToolError
from agentrt.tools.declare import is_secret_name

if TYPE_CHECKING:
    from agentrt.config import SecretsConfig

VALUE_BYTES_MAX: Final = 64 * 1024


class SecretError(ToolError):
    """A secret is missing, not to be had, or not for this tool. Never holds a value."""

    code = "tool_secret"


class SecretProvider(Protocol):
    """Gives values of secrets. One thread calls it; it may block, and a call waits for it."""

    #: Environment variables that begin so are kept from hosts. Empty: none.
    environment_prefix: str

    def get(self, tenant: str, name: str) -> str:
        """The value of a tenant's secret, with an empty tenant of the node's own. Raises SecretError; anything else it
        raises counts as one, its text is not shown."""


class EnvironmentSecrets:
    """``<prefix><tenant>__<name>`` of the environment, as it was when this was made; ``<prefix>__<name>`` for the node.
    A tenant whose name has ``__`` in it, or ``_`` at its end, has none here: it could be read as another one's.

    The variables stay readable for whoever may read the node's own memory and ``/proc``; tools may, if they run as the
    node's user and nothing confines them.
    """

    def __init__(self, prefix: str, environment: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError if the prefix is empty or one of agentrt's settings."""
        if not prefix or prefix.startswith("AGENTRT_"):
            raise ConfigError(f"{prefix!r} is no prefix for secrets", hint="For example ACME_SECRET_")
        environment = os.environ if environment is None else environment
        self.environment_prefix = prefix
        self._values = {name: value for name, value in environment.items() if name.startswith(prefix)}

    def get(self, tenant: str, name: str) -> str:
        try:
            if "__" in tenant or tenant.endswith("_"):
                raise KeyError
            return self._values[f"{self.environment_prefix}{tenant}__{name}"]
        except KeyError:
            raise SecretError(f"there is no secret {name}") from None


class FileSecrets:
    """``<folder>/<tenant>/<name>``, ``<folder>/<name>`` for the node: files of the node's user that nobody else may
    read; one final newline is dropped.

    Read at each call that needs one, so a replaced file holds from the next call on. A tenant's folder is its name,
    percent-encoded but for letters, digits and ``_.-~``.
    """

    environment_prefix = ""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises ConfigError if the folder is none, or others may write to it."""
        self._folder = Path(folder)
        try:
            found = self._folder.stat()
        except OSError as error:
            raise ConfigError(f"{self._folder}: no folder of secrets: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode) or _others_may(found, 0o022):
            raise ConfigError(
                f"{self._folder}: not a folder of this user's that only it may write to", hint="chmod 700"
            )

    def get(self, tenant: str, name: str) -> str:
        part = quote(tenant, safe="")
        if not is_secret_name(name) or part in (".", ".."):
            raise SecretError(f"there is no secret {name}")
        place = self._folder / part
        try:
            if _others_may(place.stat(), 0o022):
                raise SecretError(f"secret {name}: others may write to its folder")
            file = os.open(place / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            raise SecretError(f"there is no secret {name}") from None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or _others_may(found, 0o077):
                raise SecretError(f"secret {name}: its file is not one that only this user may read (mode 0600)")
            data = os.read(file, VALUE_BYTES_MAX + 1)
        finally:
            os.close(file)
        if len(data) > VALUE_BYTES_MAX:
            raise SecretError(f"secret {name} has more than {VALUE_BYTES_MAX} bytes")
        try:
            return data.decode().removesuffix("\n")
        except UnicodeDecodeError:
            raise SecretError(f"secret {name} is not UTF-8") from None


class SecretAsker:
    """Asks a provider, which may block, on a thread of its own: ``await asker(tenant, name)``. What plugins get as
    ``secrets``. ``tenant`` "": the node's own."""

    def __init__(self, provider: SecretProvider | None, thread_name: str) -> None:
        self._provider = provider
        self._thread_name = thread_name
        self._thread: ThreadPoolExecutor | None = None

    async def __call__(self, tenant: str, name: str) -> str:
        """The secret's value. Raises SecretError, never with a value in it."""
        if self._provider is None:
            raise SecretError(f"there is no secret {name}: no source of secrets is configured")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._thread_name)
        get = partial(self._provider.get, tenant, name)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, get)
        except SecretError:
            raise
        except Exception:  # its text may hold a value
            raise SecretError(f"secret {name} cannot be had: its source failed") from None

    def close(self) -> None:
        """Nobody waits for what is under way."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def provider_from(config: "SecretsConfig") -> SecretProvider | None:
    """The provider that the configuration asks for, None if it asks for none. Raises ConfigError."""
    if config.folder:
        return FileSecrets(config.folder)
    if config.environment_prefix:
        return EnvironmentSecrets(config.environment_prefix)
    return None


def _others_may(found: os.stat_result, bits: int) -> bool:
    return found.st_uid != os.geteuid() or bool(found.st_mode & bits)
