"""How large a store is, and who reads it; also while a node has it open."""

from collections import Counter
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from agentrt.stores.base import TABLES
from agentrt.stores.lmdb import LmdbReader
from agentrt.stores.lmdb_env import Environment, Reader
from agentrt.stores.tail import TAIL_NAME

_PAGE: Final = 1000


class Table(msgspec.Struct, frozen=True):
    """``size_bytes``: of the pages that hold its rows."""

    name: str
    rows: int
    size_bytes: int


class Stats(msgspec.Struct, frozen=True):
    """``runs``: by state. ``log_batches``, ``log_bytes``: committed and not filed yet. ``readers``: who is in a read
    transaction, and how many transactions behind; a reader far behind makes the file grow."""

    schema: int
    generation: int
    file_bytes: dict[str, int]
    free_bytes: int  # of the journal's file: pages that will be used again
    tables: tuple[Table, ...]
    runs: dict[str, int]
    log_batches: int
    log_bytes: int
    blobs: int
    blob_bytes: int
    readers: tuple[Reader, ...]


def stats(folder: Path) -> Stats:
    """Reads all heads and the sizes of all blobs. Raises InputError, StoreError kinds."""
    reader = LmdbReader(folder)
    try:
        files, blobs = reader.files, reader.blobs
        names = {"heads": files.heads, "journal": files.journal, "log": files.log}
        names |= {table: files.table(table) for table in TABLES}
        names["tenant_runs"] = files.tenant_runs
        tables = [_table(files, name, db) for name, db in names.items() if db is not None]
        sizes: list[int] = []
        if blobs is not None:
            tables.append(_table(blobs, "chunks", blobs.chunks))
            after = b""
            while page := blobs.sizes(after, _PAGE):
                sizes += (size_bytes for _, size_bytes in page)
                after = page[-1][0]
        runs: Counter[str] = Counter()
        last = ""
        while heads := reader.scan_heads(last, _PAGE):
            runs.update(head.state for head in heads)
            last = heads[-1].run_id
        unfiled = reader.unfiled
        return Stats(
            files.schema,
            reader.generation,
            {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if _is_data(path)},
            _free_bytes(files),
            tuple(tables),
            dict(sorted(runs.items())),
            unfiled.batch_count(),
            unfiled.size_bytes,
            len(sizes),
            sum(sizes),
            tuple(reader for env in (files, blobs) if env is not None for reader in env.readers()),
        )
    finally:
        reader.close()


def _is_data(path: Path) -> bool:
    return path.suffix == ".mdb" or path.name == TAIL_NAME


def _table(env: Environment, name: str, db: Any) -> Table:
    def look(txn: lmdb.Transaction) -> Table:
        stat = txn.stat(db)
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return Table(name, int(stat["entries"]), int(pages * stat["psize"]))

    return env.read(look)


def _free_bytes(files: Environment) -> int:
    """What is in the file and in no table: free pages, and the few that LMDB needs itself."""

    def look(txn: lmdb.Transaction) -> int:
        main = txn.stat()
        used = main["branch_pages"] + main["leaf_pages"] + main["overflow_pages"]
        with txn.cursor() as cursor:
            names = [bytes(name) for name in cursor.iternext(values=False)]
        for name in names:
            stat = txn.stat(files.env.open_db(name, txn=txn, create=False))
            used += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int(files.used_bytes() - used * main["psize"])

    return files.read(look)
