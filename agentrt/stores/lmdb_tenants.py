"""Which runs are whose: an index of the runs by tenant, so that looking at one tenant's reads no row of another's.

Database ``tenant_runs``: hash of the tenant (16) | run (16) -> nothing. A row comes in the transaction that accepts the
run, before the run is filed, and goes in the one that erases it. Since schema 5; the index of an older store is made in
steps, each a transaction, so that a store of millions of runs needs neither memory for all of them nor to begin again
when it is killed on the way.
"""

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, cast

import lmdb

from agentrt.decoding import UNREADABLE
from agentrt.ids import run_id_from_bytes, run_id_to_bytes
from agentrt.stores.base import Head
from agentrt.stores.unfiled import decode_head, heads_of_row

#: Since which schema the index is there.
SINCE_SCHEMA: Final = 5
NAME: Final = "tenant_runs"
TENANT_BYTES: Final = 16
#: Heads indexed in one transaction: some 50 ms.
STEP_RUNS: Final = 10_000

#: In ``meta`` while the index is being made: generation (8) | the last run that is in it (16), or nothing.
_MARK: Final = b"indexing"


@lru_cache(4096)
def tenant_prefix(tenant: str) -> bytes:
    """What the keys of a tenant's rows begin with. A hash: names are of any length."""
    return blake2b(tenant.encode(errors="surrogatepass"), digest_size=TENANT_BYTES, person=b"agentrt tenant").digest()


def tenant_run_key(head: Head) -> bytes:
    """The key of a run's row."""
    return tenant_prefix(head.tenant) + run_id_to_bytes(head.run_id)


def page_of_tenant(
    txn: lmdb.Transaction, db: Any, tenant: str, after: bytes, limit: int, newest_first: bool
) -> list[bytes]:
    """The first ``limit`` of the tenant's runs (16 bytes each) after that one, or the last ones before it, the last
    first; an empty ``after`` is before the first and behind the last."""
    prefix = tenant_prefix(tenant)
    with txn.cursor(db=db) as cursor:
        keys = _back(cursor, prefix, after) if newest_first else _forth(cursor, prefix, after)
        return [key[TENANT_BYTES:] for key in islice(keys, max(0, limit))]


def _forth(cursor: lmdb.Cursor, prefix: bytes, after: bytes) -> Iterator[bytes]:
    start = prefix + after
    if cursor.set_range(start):
        for key in cast(Iterator[bytes], cursor.iternext(values=False)):
            if not key.startswith(prefix):
                return
            if key != start:
                yield key


def _back(cursor: lmdb.Cursor, prefix: bytes, before: bytes) -> Iterator[bytes]:
    behind = prefix + (before or b"\xff" * 17)  # longer than any run's
    if cursor.prev() if cursor.set_range(behind) else cursor.last():
        for key in cast(Iterator[bytes], cursor.iterprev(values=False)):
            if not key.startswith(prefix):
                return
            yield key


class Indexing:
    """Makes the index of a store that has none, or goes on with what a killed process has made of it."""

    def __init__(self, meta: Any, heads: Any) -> None:
        self._meta = meta
        self._heads = heads

    def step(self, txn: lmdb.Transaction, index: Any, log: Any, generation: int) -> tuple[int, bool]:
        """A part of it: how many filed runs that were, and whether it was the last one."""
        life = generation.to_bytes(8, "big")
        mark = cast(bytes, txn.get(_MARK, b"", db=self._meta))
        if mark[:8] != life:
            # Nobody began, or an older agentrt, which knows no index, had the store meanwhile.
            txn.drop(index, delete=False)
            mark = life
        page = list(islice(_after(txn, self._heads, mark[8:]), STEP_RUNS))
        with txn.cursor(db=index) as cursor:
            cursor.putmulti(sorted((tenant_run_key(head), b"") for _, head in page if head is not None))
        if len(page) == STEP_RUNS:
            txn.put(_MARK, life + page[-1][0], db=self._meta)
            return STEP_RUNS, False
        with txn.cursor(db=log) as cursor:
            for number, row in cast(Iterator[tuple[bytes, bytes]], cursor.iternext()):
                for head in heads_of_row(int.from_bytes(number, "big"), row):
                    txn.put(tenant_run_key(head), b"", db=index)
        txn.delete(_MARK, db=self._meta)
        return len(page), True


def _after(txn: lmdb.Transaction, db: Any, after: bytes) -> Iterator[tuple[bytes, Head | None]]:
    """Rows of the heads behind that one; None: it cannot be read, which concerns that run only."""
    with txn.cursor(db=db) as cursor:
        if cursor.set_range(after) if after else cursor.first():
            for key, value in cast(Iterator[tuple[bytes, bytes]], cursor.iternext()):
                if key != after:
                    try:
                        head = decode_head(value)
                        yield key, head if head.run_id == run_id_from_bytes(key) else None
                    except UNREADABLE:
                        yield key, None
