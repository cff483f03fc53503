"""API keys: who may do what for which tenant.

A key is ``agentrt_ID_SECRET``. The store holds the id and a hash of the secret (32 random bytes, so one hash is
enough), never the secret. All keys are in memory: checking one touches nothing that another tenant's traffic could slow
down.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import ForbiddenError, InputError, StoreCorruptError, UnauthorizedError
from agentrt.http.problems import NotFoundError
from agentrt.stores.base import NODE, Row, Store, scan_all
from agentrt.tiers import Tier, parse_tier

PREFIX: Final = b"key/"
ANY_TENANT: Final = "*"
#: What a key may be allowed. ``admin``: everything, other keys included.
SCOPES: Final = ("runs:read", "runs:write", "runs:decide", "node:read", "admin")
KEYS_MAX: Final = 10_000

_ID_BYTES: Final = 9
_SECRET_BYTES: Final = 32
_FORM: Final = re.compile(r"agentrt_([A-Za-z0-9_-]{12})_([A-Za-z0-9_-]{43})")
_NOBODY: Final = hashlib.sha256(b"").digest()


class StoredKey(msgspec.Struct, frozen=True, array_like=True):
    """A key as the store keeps it."""

    id: str
    tenant: str
    scopes: tuple[str, ...]
    max_tier: int
    label: str
    created_ns: int
    hash: bytes

    def require(self, scope: str) -> None:
        """Raises ForbiddenError."""
        if scope not in self.scopes and "admin" not in self.scopes:
            raise ForbiddenError(f"this key may not do that: it lacks the scope {scope}")

    def tenant_for(self, asked: str | None) -> str:
        """The tenant to act for. Raises ForbiddenError, InputError."""
        if self.tenant == ANY_TENANT:
            return "default" if asked is None else asked
        if asked is not None and asked != self.tenant:
            raise ForbiddenError("this key acts for its own tenant only")
        return self.tenant

    def tier_for(self, asked: int | str | None, default: int | None) -> int:
        """The tier to ask for: what the caller wants, or the agent's own (``default``; None: it is not known) as far as
        the key allows. Raises ForbiddenError, InputError."""
        if asked is None:
            return max(Tier.INTERACTIVE if default is None else default, self.max_tier)
        tier = int(parse_tier(asked))
        if tier < self.max_tier:
            raise ForbiddenError(f"this key's runs have tier {self.max_tier} at best, not {tier}", limit="max_tier")
        return tier

    def sees(self, tenant: str) -> bool:
        """Whether that tenant's runs are this key's business."""
        return self.tenant in (ANY_TENANT, tenant)


class KeyStore(Protocol):
    """Where keys are kept; `Runtime` has both."""

    async def read_store(self, look: Callable[[Store], Any]) -> Any:
        """``look(store)`` on a reader thread."""

    async def commit_rows(self, rows: tuple[Row, ...]) -> None:
        """Durable when it returns."""


_decode: Final = msgspec.msgpack.Decoder(StoredKey).decode


class KeyRing:
    """The node's keys. One loop's."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._keys: dict[str, StoredKey] = {}

    async def load(self) -> None:
        """Raises StoreError kinds."""
        rows = await self._store.read_store(lambda store: list(scan_all(store, NODE, PREFIX)))
        try:
            keys = [_decode(value) for _, value in rows]
        except UNREADABLE as error:
            raise StoreCorruptError(f"a stored API key cannot be read: {error}") from error
        self._keys = {key.id: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def has(self, key_id: str) -> bool:
        """Whether the key is still of use."""
        return key_id in self._keys

    def all(self) -> list[StoredKey]:
        """Oldest first."""
        return sorted(self._keys.values(), key=lambda key: (key.created_ns, key.id))

    async def make(self, tenant: str, scopes: list[str], max_tier: int, label: str = "") -> tuple[StoredKey, str]:
        """A new key and its text, which nobody can see again; durable. Raises InputError, StoreError kinds."""
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown or not scopes:
            raise InputError(
                f"no such scope: {', '.join(unknown) or 'none was given'}", hint=f"One of {', '.join(SCOPES)}"
            )
        if len(self._keys) >= KEYS_MAX:
            raise InputError(f"there are {KEYS_MAX} keys", limit="keys_max", hint="Remove some")
        key_id = secrets.token_urlsafe(_ID_BYTES)
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        key = StoredKey(key_id, tenant, tuple(sorted(set(scopes))), max_tier, label, time.time_ns(), _hash(secret))
        await self._store.commit_rows((Row(NODE, PREFIX + key_id.encode(), msgspec.msgpack.encode(key)),))
        self._keys[key_id] = key
        return key, f"agentrt_{key_id}_{secret}"

    async def remove(self, key_id: str) -> None:
        """It is of no use any more, durably. Raises NotFoundError."""
        if key_id not in self._keys:
            raise NotFoundError(f"there is no key {key_id[:64]}")
        await self._store.commit_rows((Row(NODE, PREFIX + key_id.encode(), None),))
        self._keys.pop(key_id, None)

    def check(self, authorization: str | None) -> StoredKey:
        """The key of an Authorization header. The same work is done for every header of the right form. Raises
        UnauthorizedError."""
        scheme, _, text = (authorization or "").partition(" ")
        form = _FORM.fullmatch(text.strip())
        if scheme.lower() != "bearer" or form is None:
            raise UnauthorizedError(
                "an API key is needed" if not text.strip() else "this is no API key",
                hint="Send it whole, as Authorization: Bearer agentrt_…",
            )
        key = self._keys.get(form[1])
        if not hmac.compare_digest(_hash(form[2]), _NOBODY if key is None else key.hash) or key is None:
            raise UnauthorizedError("this API key is not known here", hint="It may have been removed")
        return key


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
