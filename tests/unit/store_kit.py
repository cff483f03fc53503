"""Stores as older agentrts have left them."""

import lzma
from pathlib import Path
from typing import Final

_DATA: Final = Path(__file__).parent / "data"


def schema_4(folder: Path) -> None:
    """Written by the last agentrt of schema 4 and left as by a kill: six runs are filed, two are in the log and the
    tail."""
    folder.mkdir()
    (folder / "journal.mdb").write_bytes(lzma.decompress((_DATA / "store_schema4.mdb.xz").read_bytes()))
    (folder / "journal.tail").write_bytes(lzma.decompress((_DATA / "store_schema4.tail.xz").read_bytes()))
