"""Rows of plugins: theirs alone, all or none, on both stores and from both sides of the loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.errors import DuplicateError, InputError
from agentrt.stores.base import Store
from agentrt.stores.lmdb import LmdbStore
from agentrt.stores.memory import MemoryStore
from agentrt.stores.plugin_rows import PLUGIN_KEY_BYTES_MAX, PluginRows

Open = Callable[[], Store]


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Store]:
    loop = asyncio.get_running_loop()
    store: Store = LmdbStore(folder, loop) if kind == "lmdb" else MemoryStore(loop)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(params=["lmdb", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_plugin_sees_its_own_rows_in_order_and_no_others(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path) as store:
            loop = asyncio.get_running_loop()
            mine, longer = PluginRows(store, loop, "acme"), PluginRows(store, loop, "acme-2")
            await longer.write([(b"a", b"other"), (b"c", b"other")])
            await mine.write([(b"b\0", b"2"), (b"a", b"1"), (b"b", b"")])
            assert mine.scan() == [(b"a", b"1"), (b"b", b""), (b"b\0", b"2")]
            assert mine.scan(b"b") == [(b"b", b""), (b"b\0", b"2")]
            assert mine.scan(after=b"a", limit=1) == [(b"b", b"")]
            assert mine.read(b"a") == b"1" and mine.read(b"c") is None
            await mine.write([(b"a", None), (b"b", b"new"), (b"never", None)])
            assert mine.scan() == [(b"b", b"new"), (b"b\0", b"2")]
            assert longer.scan() == [(b"a", b"other"), (b"c", b"other")]

    asyncio.run(main())


def test_a_row_that_is_there_refuses_the_whole_call(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path) as store:
            rows = PluginRows(store, asyncio.get_running_loop(), "acme")
            await rows.write([], [(b"a", b"1")])
            with pytest.raises(DuplicateError) as met:
                await rows.write([(b"b", b"2")], [(b"a", b"3"), (b"c", b"4")])
            assert met.value.value == b"1"
            assert rows.scan() == [(b"a", b"1")]

    asyncio.run(main())


def test_other_loops_and_threads_may_write(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path) as store:
            rows = PluginRows(store, asyncio.get_running_loop(), "acme")

            def elsewhere() -> None:
                asyncio.run(rows.write([(b"a", b"1")]))
                rows.begin([(b"b", b"2")]).result()
                rows.begin([]).result()
                with pytest.raises(DuplicateError):
                    rows.begin([], [(b"a", b"")]).result()

            await asyncio.to_thread(elsewhere)
            assert rows.scan() == [(b"a", b"1"), (b"b", b"2")]

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "A", "1a", "a\0b", "a/b", "a" * 41])
def test_names_that_would_reach_into_others(name: str) -> None:
    with pytest.raises(InputError):
        PluginRows(MemoryStore(asyncio.new_event_loop()), asyncio.new_event_loop(), name)


@pytest.mark.parametrize("key", [b"", b"k" * (PLUGIN_KEY_BYTES_MAX + 1)])
def test_keys_that_cannot_be_change_nothing(kind: str, key: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(kind, tmp_path) as store:
            rows = PluginRows(store, asyncio.get_running_loop(), "a" * 40)
            with pytest.raises(InputError):
                await rows.write([(b"good", b""), (key, b"")])
            await rows.write([(b"k" * PLUGIN_KEY_BYTES_MAX, b"longest")])
            assert rows.scan() == [(b"k" * PLUGIN_KEY_BYTES_MAX, b"longest")]

    asyncio.run(main())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.none() | st.binary(max_size=40_000)))))
def test_against_a_dict(calls: list[list[tuple[bytes, bytes | None]]]) -> None:
    async def main() -> None:
        store = MemoryStore(asyncio.get_running_loop())
        rows, known = PluginRows(store, asyncio.get_running_loop(), "acme"), dict[bytes, bytes]()
        for changes in calls:
            await rows.write(changes)
            for key, value in changes:
                if value is None:
                    known.pop(key, None)
                else:
                    known[key] = value
            assert rows.scan() == sorted(known.items())
        store.close()

    asyncio.run(main())
