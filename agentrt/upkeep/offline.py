"""A store's folder for somebody who is no node."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from agentrt.errors import InputError, StoreError, StoreInUseError
from agentrt.stores.lmdb_files import DATA_NAME
from agentrt.stores.lock import FolderLock


@contextlib.contextmanager
def held(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """The folder, which no node can open meanwhile. Raises InputError if it holds no store, StoreInUseError if a node
    has it open."""
    path = Path(folder)
    if not (path / DATA_NAME).is_file():
        raise InputError(f"there is no store in {path}")
    try:
        lock = FolderLock(path)
    except StoreInUseError as error:
        raise StoreInUseError(
            error.message, hint="Stop the node first; `agentrt runs` and `store stats` need not"
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error.strerror}") from error
    try:
        yield path
    finally:
        lock.release()
