"""The built-in stores against the contract suite."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrt.stores.lmdb import LmdbStore
from agentrt.stores.memory import MemoryDisk, MemoryStore
from agentrt.testing.stores import Opener, StoreContract


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: thousands of syncs, and what the disk keeps is not what is tested here."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="agentrt-test-", dir=shared) as name:
        yield Path(name)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        disk = MemoryDisk()
        return lambda loop: MemoryStore(loop, disk)

    @pytest.fixture
    def fresh_opener(self) -> Callable[[], Opener]:
        def fresh() -> Opener:
            disk = MemoryDisk()
            return lambda loop: MemoryStore(loop, disk)

        return fresh


class TestLmdbStore(StoreContract):
    @pytest.fixture
    def opener(self, folder: Path) -> Opener:
        return lambda loop: _open(folder / "store", loop)

    @pytest.fixture
    def fresh_opener(self, folder: Path) -> Callable[[], Opener]:
        numbers = itertools.count()

        def fresh() -> Opener:
            place = folder / f"store{next(numbers)}"
            return lambda loop: _open(place, loop)

        return fresh


class TestSmallMapLmdbStore(TestLmdbStore):
    """The same while the map grows under it."""

    @pytest.fixture
    def opener(self, folder: Path) -> Opener:
        return lambda loop: _open(folder / "store", loop, map_bytes=65536)


class TestSmallLogLmdbStore(TestLmdbStore):
    """The same while batches are filed beside every group."""

    @pytest.fixture
    def opener(self, folder: Path) -> Opener:
        return lambda loop: _open(folder / "store", loop, log_bytes_max=1)

    @pytest.fixture
    def fresh_opener(self, folder: Path) -> Callable[[], Opener]:
        numbers = itertools.count()

        def fresh() -> Opener:
            place = folder / f"store{next(numbers)}"
            return lambda loop: _open(place, loop, log_bytes_max=600)

        return fresh


def _open(
    folder: Path, loop: asyncio.AbstractEventLoop, map_bytes: int = 2**24, log_bytes_max: int = 2**24
) -> LmdbStore:
    return LmdbStore(
        folder,
        loop,
        map_bytes=map_bytes,
        map_bytes_max=2**28,
        free_bytes_min=0,
        force_place=True,
        log_bytes_max=log_bytes_max,
    )
