"""A store as JSON lines, for people and their tools: heads, records and rows; no secrets, payloads only on demand."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from agentrt.errors import StoreCorruptError
from agentrt.records import Record
from agentrt.stores.base import NODE, TABLES, scan_all
from agentrt.stores.lmdb import LmdbReader
from agentrt.stores.payloads import PAYLOADS

_PAGE: Final = 500
#: Never shown: what random.bytes follows from.
_SECRET: Final = frozenset({"seed"})
#: Tables whose values are never shown: the node's secret is among them.
_SECRET_TABLES: Final = frozenset({NODE})


def dump(folder: Path, *, payloads: bool = False) -> Iterator[dict[str, Any]]:
    """One object per head ({"head": ...}), record ({"run_id", "record", ...}) and row ({"table", "key", ...}), runs in
    order of acceptance. Inputs, requests, results and the values of rows appear as {"bytes": length}, with ``payloads``
    as JSON, or as base64 if they are none. Raises InputError, StoreError kinds."""
    reader = LmdbReader(folder)
    try:
        after = ""
        while heads := reader.scan_heads(after, _PAGE):
            for head in heads:
                yield {"head": msgspec.structs.asdict(head)}
                for record in reader.read_records(head.run_id):
                    yield {"run_id": head.run_id, **_record(record, payloads)}
            after = heads[-1].run_id
        for table in TABLES:
            for key, value in scan_all(reader, table):
                shown = _payload(value, payloads and table not in _SECRET_TABLES)
                yield {"table": table, "key": key.hex(), "value": shown}
    finally:
        reader.close()


def _record(record: Record, payloads: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"record": type(record).__name__}
    apart = PAYLOADS.get(type(record), ())
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name in _SECRET:
            continue
        if name in apart:
            shown[name] = None if value is None else _payload(value, payloads)
        elif isinstance(value, bytes):
            shown[name] = value.hex()
        else:
            shown[name] = msgspec.to_builtins(value)
    return shown


def _payload(value: bytes, shown: bool) -> Any:
    if not shown:
        return {"bytes": len(value)}
    try:
        return {"json": json.loads(value)}
    except (ValueError, RecursionError):
        return {"base64": base64.b64encode(value).decode()}


def write_line(value: dict[str, Any]) -> str:
    """The object on one line."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(f"what is stored cannot be shown: {error}") from error
