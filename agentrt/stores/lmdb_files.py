"""The LMDB environment of a store's journal, heads and rows: its databases and schema.

Folder:

    lock            held by the node that has the store open (stores/lock.py)
    journal.mdb     records, heads and rows; made under another name and renamed, so it is there whole or not at all
    journal.tail    records that were written since the last transaction (stores/tail.py)
    blobs.mdb       large payloads (lmdb_blobs.py)
    *.mdb-lock      LMDB's reader tables
"""

from pathlib import Path
from typing import Any, Final

import lmdb

from agentrt.errors import InputError, StoreCorruptError, StoreVersionError
from agentrt.progress import Progress, no_progress
from agentrt.stores.base import TABLES
from agentrt.stores.lmdb_env import Environment, make, translate
from agentrt.stores.lmdb_tenants import NAME as _TENANT_RUNS
from agentrt.stores.lmdb_tenants import SINCE_SCHEMA, Indexing
from agentrt.stores.tail import read_tail
from agentrt.stores.unfiled import concatenate

#: Raised when older code must not touch the data. 1: a row per record, no log. 2: no blobs. 3: no rows of plugins. 4:
#: no index by tenant. Such stores are brought up at open.
SCHEMA: Final = 5
DATA_NAME: Final = "journal.mdb"

_FIRST: Final = ("meta", "heads", "journal")  # databases of every schema
_LOG: Final = "log"  # since schema 2
#: Who has which blob: run (16) | digest (32), the same turned round, and digest (32) | hash of the row (16); since
#: schema 3.
_REFS: Final = ("run_blobs", "blob_runs", "blob_rows")
_NEW: Final = (_LOG, *_REFS, *TABLES, _TENANT_RUNS)
_DBS_MAX: Final = len(_FIRST) + len(_NEW) + 8  # a newer schema's may be there, too
_LIMIT: Final = "store.map_bytes_max"


class Files(Environment):
    """The open environment. Raises what `Environment` raises; ``create`` makes the store if there is none. A store of
    an older schema is brought up, unless this is a reader: to it databases that are missing are None."""

    def __init__(
        self,
        folder: Path,
        *,
        map_bytes: int,
        map_bytes_max: int,
        create: bool,
        read_only: bool = False,
        flags: dict[str, Any] | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self.folder = folder
        data = folder / DATA_NAME
        if not data.exists():
            if not create:
                raise InputError(f"there is no store in {folder}")
            make(data, (*_FIRST, *_NEW), {b"schema": SCHEMA.to_bytes(4, "big")}, _LIMIT)
        super().__init__(
            data,
            dbs_max=_DBS_MAX,
            map_bytes=map_bytes,
            map_bytes_max=map_bytes_max,
            limit=_LIMIT,
            read_only=read_only,
            flags=flags,
        )
        with self.opening():
            self.meta, self.heads, self.journal = (self.env.open_db(name.encode(), create=False) for name in _FIRST)
            self._new: dict[str, Any] = {}
            with self.env.begin() as txn:
                self.schema = self.schema_in(txn)
            if self.schema > SCHEMA:
                raise StoreVersionError(
                    f"the store has schema {self.schema}, this agentrt knows {SCHEMA}",
                    hint="Use the agentrt that wrote it",
                )
            if not self.schema:
                raise StoreCorruptError("the store has schema 0, which never was")
            if self.schema < SCHEMA and not read_only:
                self._bring_up(progress)
            self._open_new()

    def _bring_up(self, progress: Progress) -> None:
        """In steps, the last of which sets the schema. Whoever is killed in between leaves a store of the old schema,
        with databases that only the new one knows."""
        indexing = Indexing(self.meta, self.heads)
        runs = 0
        first, done = True, False
        while not done:
            try:
                with self.env.begin(write=True) as txn:
                    dbs = {name: self.env.open_db(name.encode(), txn=txn) for name in _NEW}
                    if first:
                        self._take_tail(txn, dbs[_LOG])  # which means nothing after this transaction
                    count, done = indexing.step(txn, dbs[_TENANT_RUNS], dbs[_LOG], self.generation_in(txn))
                    if done:
                        txn.put(b"schema", SCHEMA.to_bytes(4, "big"), db=self.meta)
                    total = int(txn.stat(self.heads)["entries"])
            except lmdb.MapFullError:
                self.grow()
                continue
            first = False
            runs += count
            progress("runs brought up", runs, total)
        self.schema = SCHEMA

    def _open_new(self) -> None:
        for name in _NEW:
            if name not in self._new:
                try:
                    self._new[name] = self.env.open_db(name.encode(), create=False)
                except lmdb.NotFoundError:
                    if self.schema == SCHEMA:
                        raise

    def _db(self, name: str) -> Any:
        """A database; None if this is a reader and the store's schema has none of the name."""
        found = self._new.get(name)
        if found is None and self.read_only:
            self.read(lambda txn: None)  # the map is as large as the file
            with self.inside():
                try:
                    self._open_new()  # a node may have brought the store up meanwhile
                except lmdb.Error as error:
                    raise translate(error, _LIMIT) from error
            found = self._new.get(name)
        return found

    @property
    def log(self) -> Any:
        """The log's database; None as `table`."""
        return self._db(_LOG)

    def table(self, name: str) -> Any:
        """A side table's database; None if this is a reader and the store's schema has none of the name."""
        return self._db(name)

    @property
    def tenant_runs(self) -> Any:
        """hash of the tenant (16) | run (16) -> nothing; None as `table`."""
        return self._db(_TENANT_RUNS)

    def indexed(self, txn: lmdb.Transaction) -> bool:
        """Whether the index by tenant is whole: a reader may look on while it is being made."""
        return self.schema >= SINCE_SCHEMA or self.schema_in(txn) >= SINCE_SCHEMA

    @property
    def run_blobs(self) -> Any:
        """run (16) | digest (32) -> nothing."""
        return self._db(_REFS[0])

    @property
    def blob_runs(self) -> Any:
        """digest (32) | run (16) -> nothing."""
        return self._db(_REFS[1])

    @property
    def blob_rows(self) -> Any:
        """digest (32) | hash of table and key (16) -> nothing."""
        return self._db(_REFS[2])

    def begin_session(self) -> tuple[int, int]:
        """The new session's generation and the transaction that made it durable; what the last session left in its tail
        is in the log then. Raises StoreCorruptError."""
        try:
            with self.env.begin(write=True) as txn:
                number = int(txn.id())
                generation = self.generation_in(txn)
                self._take_tail(txn, self.log)
                txn.put(b"generation", (generation + 1).to_bytes(8, "big"), db=self.meta)
        except lmdb.Error as error:
            raise translate(error, _LIMIT) from error
        return generation + 1, number

    def names_blob(self, digest: bytes) -> bool:
        """Whether a run or a row names the blob."""

        def look(txn: lmdb.Transaction) -> bool:
            return any(_has_prefix(txn, db, digest) for db in (self.blob_runs, self.blob_rows))

        return self.read(look)

    def _take_tail(self, txn: lmdb.Transaction, log: Any) -> None:
        """Puts what the last session left in its tail into the log."""
        number = int(txn.id())
        if rows := read_tail(self.folder, self.generation_in(txn), number - 1):
            txn.put(number.to_bytes(8, "big"), concatenate(rows), db=log)

    def read_generation(self) -> int:
        """The generation of the last session."""
        return self.read(self.generation_in)

    def generation_in(self, txn: lmdb.Transaction) -> int:
        """The generation of the last session, as the transaction sees it."""
        return int.from_bytes(txn.get(b"generation", b"", db=self.meta), "big")

    def schema_in(self, txn: lmdb.Transaction) -> int:
        """The store's schema, as the transaction sees it."""
        return int.from_bytes(txn.get(b"schema", b"", db=self.meta), "big")

    def last_transaction(self) -> int:
        """Number of the last one that changed something."""
        return int(self.env.info()["last_txnid"])


def _has_prefix(txn: lmdb.Transaction, db: Any, prefix: bytes) -> bool:
    with txn.cursor(db=db) as cursor:
        return bool(cursor.set_range(prefix)) and bytes(cursor.key()).startswith(prefix)
