"""A LangGraph checkpoint saver on an agentrt store: a checkpoint is durable when `put` returns, and many threads share
one sync of the disk."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import msgspec
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from agentrt.errors import DuplicateError, InputError
from agentrt.stores.lmdb import LmdbStore
from agentrt.stores.plugin_rows import Change, PluginRows
from agentrt_langgraph.keys import (
    CHECKPOINT,
    RUN,
    checkpoint_key,
    checkpoint_of,
    name_hash,
    namespace_prefix,
    run_key,
    thread_prefix,
    write_key,
    writes_prefix,
)

#: The saver's name among the plugins that keep rows in the store.
PLUGIN: Final = "langgraph"
_PAGE: Final = 256
#: Rows in one transaction of those that remove or copy many.
_CHANGES: Final = 1024


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint's row. Values are (type, bytes) of the serializer."""

    thread: str
    namespace: str
    checkpoint_id: str
    parent: str | None
    run_id: str | None
    metadata: tuple[str, bytes]
    checkpoint: tuple[str, bytes]


class _Write(msgspec.Struct, frozen=True, array_like=True):
    """A pending write's row."""

    task_id: str
    task_path: str
    index: int
    channel: str
    value: tuple[str, bytes]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_saved: Final = msgspec.msgpack.Decoder(_Saved).decode
_decode_write: Final = msgspec.msgpack.Decoder(_Write).decode


class AgentrtSaver(BaseCheckpointSaver[str]):
    """LangGraph's saver on rows of an agentrt store. Open one with `open` (asyncio) or `open_sync` (threads).

    Async methods may be called on any loop, the others from any thread but the one whose loop the store was opened
    with. Errors are agentrt's: StoreError kinds, ClosedError, InputError for ids that cannot be.
    """

    def __init__(self, rows: PluginRows, *, serde: SerializerProtocol | None = None) -> None:
        super().__init__(serde=serde)
        self._rows = rows

    @classmethod
    @asynccontextmanager
    async def open(
        cls, folder: str | os.PathLike[str], *, serde: SerializerProtocol | None = None
    ) -> AsyncIterator["AgentrtSaver"]:
        """The store in ``folder``, made if it is missing, for programs on asyncio. One process at a time may have it
        open. Raises StoreError kinds."""
        loop = asyncio.get_running_loop()
        store = await asyncio.to_thread(LmdbStore, folder, loop)
        try:
            yield cls(PluginRows(store, loop, PLUGIN), serde=serde)
        finally:
            await asyncio.to_thread(store.close)

    @classmethod
    @contextmanager
    def open_sync(
        cls, folder: str | os.PathLike[str], *, serde: SerializerProtocol | None = None
    ) -> Iterator["AgentrtSaver"]:
        """`open` for programs without a loop: the store's acknowledgements come on a thread of its own."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="agentrt-langgraph", daemon=True)
        thread.start()
        try:
            store = LmdbStore(folder, loop)
            try:
                yield cls(PluginRows(store, loop, PLUGIN), serde=serde)
            finally:
                store.close()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    # --- writing --------------------------------------------------------------------

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Keep a checkpoint, durably; its config."""
        changes, saved = self._put(config, checkpoint, metadata)
        await self._rows.write(changes)
        return saved

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """`aput` for threads."""
        changes, saved = self._put(config, checkpoint, metadata)
        self._rows.begin(changes).result()
        return saved

    def _put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata
    ) -> tuple[list[Change], RunnableConfig]:
        thread, namespace, parent = _place(config)
        checkpoint_id = checkpoint["id"]
        known = get_checkpoint_metadata(config, metadata)
        run_id = known.get("run_id")
        if not isinstance(run_id, str):
            run_id = None
        key = checkpoint_key(thread, namespace, checkpoint_id)
        saved = _Saved(
            thread,
            namespace,
            checkpoint_id,
            parent,
            run_id,
            self.serde.dumps_typed(known),
            self.serde.dumps_typed(checkpoint),
        )
        changes: list[Change] = [(key, _encode(saved))]
        if run_id is not None:
            changes.append((run_key(run_id, key), b""))
        return changes, _config(thread, namespace, checkpoint_id)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Keep what a task wrote, durably. What it wrote before under the same number stays; errors, interrupts and the
        like are replaced."""
        always, once = self._writes(config, writes, task_id, task_path)
        while True:
            try:
                await self._rows.write(always, self._new(once))
                return
            except DuplicateError:
                continue  # the same task at the same time: what is there now stays

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """`aput_writes` for threads."""
        always, once = self._writes(config, writes, task_id, task_path)
        while True:
            try:
                self._rows.begin(always, self._new(once)).result()
                return
            except DuplicateError:
                continue

    def _writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> tuple[list[Change], dict[bytes, bytes]]:
        """What replaces what is there, and what does not."""
        thread, namespace, checkpoint_id = _place(config)
        if checkpoint_id is None:
            raise InputError("writes belong to a checkpoint: configurable.checkpoint_id is missing")
        checkpoint = checkpoint_key(thread, namespace, checkpoint_id)
        always: dict[bytes, bytes | None] = {}
        once: dict[bytes, bytes] = {}
        for number, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, number)
            key = write_key(checkpoint, task_id, index)
            row = _encode(_Write(task_id, task_path, index, channel, self.serde.dumps_typed(value)))
            if index < 0:
                always[key] = row
            else:
                once[key] = row
        return list(always.items()), once

    def _new(self, once: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        return [(key, row) for key, row in once.items() if self._rows.read(key) is None]

    # --- reading --------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that the config names, or the newest of its thread and namespace."""
        thread, namespace, checkpoint_id = _place(config)
        if checkpoint_id is not None:
            key = checkpoint_key(thread, namespace, checkpoint_id)
            row = self._rows.read(key)
            return None if row is None else self._tuple(key, _decode_saved(row))
        found = self._rows.scan(namespace_prefix(CHECKPOINT, thread, namespace), limit=1)
        return self._tuple(found[0][0], _decode_saved(found[0][1])) if found else None

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """`get_tuple`: a look into the store's memory map."""
        return self.get_tuple(config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, of each thread and namespace the newest first; of all threads without a config. ``filter``:
        what their metadata must say; ``before``: only those older than that one's checkpoint."""
        prefix, wanted = CHECKPOINT, None
        if config is not None:
            thread, namespace = config["configurable"]["thread_id"], config["configurable"].get("checkpoint_ns")
            prefix = thread_prefix(CHECKPOINT, str(thread))
            if namespace is not None:
                prefix = namespace_prefix(CHECKPOINT, str(thread), namespace)
            wanted = get_checkpoint_id(config)
        bound = get_checkpoint_id(before) if before is not None else None
        left = limit
        for key, row in self._scan(prefix):
            if left is not None and left <= 0:
                return
            saved = _decode_saved(row)
            if (wanted and saved.checkpoint_id != wanted) or (bound and saved.checkpoint_id >= bound):
                continue
            if filter:
                known = self.serde.loads_typed(saved.metadata)
                if any(known.get(name) != value for name, value in filter.items()):
                    continue
            if left is not None:
                left -= 1
            yield self._tuple(key, saved)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """`list`; other tasks run between two of its items."""
        for found in self.list(config, filter=filter, before=before, limit=limit):
            yield found
            await asyncio.sleep(0)

    def _scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        after = b""
        while page := self._rows.scan(prefix, after, _PAGE):
            yield from page
            after = page[-1][0]

    def _tuple(self, key: bytes, saved: _Saved) -> CheckpointTuple:
        writes = [_decode_write(row) for _, row in self._scan(writes_prefix(key))]
        writes.sort(key=lambda write: writes_sort_key(write.task_path, write.task_id, write.index))
        parent = saved.parent
        return CheckpointTuple(
            config=_config(saved.thread, saved.namespace, saved.checkpoint_id),
            checkpoint=self.serde.loads_typed(saved.checkpoint),
            metadata=self.serde.loads_typed(saved.metadata),
            parent_config=None if parent is None else _config(saved.thread, saved.namespace, parent),
            pending_writes=[(write.task_id, write.channel, self.serde.loads_typed(write.value)) for write in writes],
        )

    # --- removing and copying -------------------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        """Remove a thread with all its checkpoints and writes."""
        for changes in _some(self._gone(self._scan(thread_prefix(CHECKPOINT, thread_id)))):
            self._rows.begin(changes).result()

    async def adelete_thread(self, thread_id: str) -> None:
        """`delete_thread` for asyncio."""
        for changes in _some(self._gone(self._scan(thread_prefix(CHECKPOINT, thread_id)))):
            await self._rows.write(changes)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints that these runs made, with their writes."""
        for changes in _some(self._gone(self._of_runs(run_ids))):
            self._rows.begin(changes).result()

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """`delete_for_runs` for asyncio."""
        for changes in _some(self._gone(self._of_runs(run_ids))):
            await self._rows.write(changes)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Remove the threads' checkpoints: all (``delete``), or (``keep_latest``) all that the newest of each namespace
        can do without; of channels that are kept as deltas it needs ancestors, which stay."""
        for changes in _some(self._gone(self._prunable(thread_ids, strategy))):
            self._rows.begin(changes).result()

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """`prune` for asyncio."""
        for changes in _some(self._gone(self._prunable(thread_ids, strategy))):
            await self._rows.write(changes)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all of a thread to another."""
        for changes in _some(self._copies(source_thread_id, target_thread_id)):
            self._rows.begin(changes).result()

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """`copy_thread` for asyncio."""
        for changes in _some(self._copies(source_thread_id, target_thread_id)):
            await self._rows.write(changes)

    def _gone(self, rows: Iterator[tuple[bytes, bytes]]) -> Iterator[Change]:
        """What removes these checkpoints; writes first, so that one cut off in between is found again."""
        for key, row in rows:
            for write, _ in self._scan(writes_prefix(key)):
                yield write, None
            run_id = _decode_saved(row).run_id
            if run_id is not None:
                yield run_key(run_id, key), None
            yield key, None

    def _of_runs(self, run_ids: Sequence[str]) -> Iterator[tuple[bytes, bytes]]:
        for run_id in run_ids:
            for key, _ in self._scan(RUN + name_hash(run_id)):
                checkpoint = checkpoint_of(key)
                row = self._rows.read(checkpoint)
                if row is not None and _decode_saved(row).run_id == run_id:
                    yield checkpoint, row

    def _prunable(self, thread_ids: Sequence[str], strategy: str) -> Iterator[tuple[bytes, bytes]]:
        if strategy not in ("keep_latest", "delete"):
            raise InputError(f"{strategy!r} is no way to prune: keep_latest or delete")
        for thread_id in thread_ids:
            needed: dict[str, set[str]] = {}  # by namespace: ids
            for key, row in self._scan(thread_prefix(CHECKPOINT, thread_id)):
                saved = _decode_saved(row)
                if strategy == "keep_latest":
                    if saved.namespace not in needed:
                        needed[saved.namespace] = self._needs(saved)
                    if saved.checkpoint_id in needed[saved.namespace]:
                        continue
                yield key, row

    def _needs(self, newest: _Saved) -> set[str]:
        """The newest checkpoint and the ancestors without which channels kept as deltas cannot be put together."""
        needed: set[str] = set()
        missing: set[str] | None = None
        saved: _Saved | None = newest
        while saved is not None and saved.checkpoint_id not in needed:
            needed.add(saved.checkpoint_id)
            checkpoint: Checkpoint = self.serde.loads_typed(saved.checkpoint)
            if missing is None:
                missing = self._deltas(saved)
            missing -= checkpoint["channel_values"].keys()
            if not missing or saved.parent is None:
                break
            row = self._rows.read(checkpoint_key(saved.thread, saved.namespace, saved.parent))
            saved = None if row is None else _decode_saved(row)
        return needed

    def _deltas(self, saved: _Saved) -> set[str]:
        """Names of the channels that the checkpoint keeps as deltas."""
        known = self.serde.loads_typed(saved.metadata)
        return set(known.get("counters_since_delta_snapshot") or ())

    def _copies(self, source: str, target: str) -> Iterator[Change]:
        """Writes before the checkpoint that they belong to."""
        for key, row in self._scan(thread_prefix(CHECKPOINT, source)):
            saved = _decode_saved(row)
            copied = checkpoint_key(target, saved.namespace, saved.checkpoint_id)
            for _, write_row in self._scan(writes_prefix(key)):
                write = _decode_write(write_row)
                yield write_key(copied, write.task_id, write.index), write_row
            if saved.run_id is not None:
                yield run_key(saved.run_id, copied), b""
            yield copied, _encode(msgspec.structs.replace(saved, thread=target))

    def get_next_version(self, current: str | int | float | None, channel: None) -> str:
        """Versions that sort as text: a number of 32 digits."""
        number = 0 if current is None else int(str(current).split(".")[0])
        return f"{number + 1:032}"


def _place(config: RunnableConfig) -> tuple[str, str, str | None]:
    """(thread, namespace, checkpoint id or None). Raises InputError."""
    configurable = config.get("configurable", {})
    thread = configurable.get("thread_id")
    if thread is None:
        raise InputError("the config names no thread: configurable.thread_id is missing")
    return str(thread), configurable.get("checkpoint_ns", ""), configurable.get("checkpoint_id") or None


def _config(thread: str, namespace: str, checkpoint_id: str) -> RunnableConfig:
    return {
        "configurable": {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id},
    }


def _some(changes: Iterator[Change]) -> Iterator[list[Change]]:
    """As many at a time as go into one transaction. They are read while earlier ones are written."""
    some: list[Change] = []
    for change in changes:
        some.append(change)
        if len(some) == _CHANGES:
            yield some
            some = []
    if some:
        yield some
