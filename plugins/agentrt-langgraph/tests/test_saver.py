"""The saver beyond LangGraph's own suite: against its saver in memory, under kills, from threads, bad input."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from agentrt_langgraph import AgentrtSaver
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.base import CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, _DeltaSnapshot

from agentrt.errors import InputError
from agentrt.stores.memory import MemoryStore
from agentrt.stores.plugin_rows import PluginRows

Config = dict[str, Any]


def checkpoint(number: int, **values: Any) -> Any:
    made = empty_checkpoint()
    made["id"] = f"{number:032x}"
    made["channel_values"] = values
    made["channel_versions"] = dict.fromkeys(values, f"{number:032}")
    return made


def at(thread: str, checkpoint_id: str | None = None, namespace: str = "") -> Any:
    config: Config = {"configurable": {"thread_id": thread, "checkpoint_ns": namespace}}
    if checkpoint_id is not None:
        config["configurable"]["checkpoint_id"] = checkpoint_id
    return config


def metadata(step: int, **more: Any) -> Any:
    return {"source": "loop", "step": step, "parents": {}} | more


threads = st.sampled_from(["a", "b", "a" * 700, "\N{SNOWMAN}"])
namespaces = st.sampled_from(["", "inner:1"])
tasks = st.sampled_from(["t1", "t2"])
# what LangGraph's own encoding takes
values = st.integers(-(1 << 63), (1 << 64) - 1) | st.text()
writes = st.lists(st.tuples(st.sampled_from(["x", "y", ERROR, INTERRUPT]), values), max_size=3)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("put"), threads, namespaces, st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.just("writes"), threads, namespaces, writes, tasks),
        st.tuples(st.just("delete"), threads),
    ),
    max_size=25,
)


def plain(found: CheckpointTuple) -> tuple[Any, ...]:
    return (found.config["configurable"], found.checkpoint, found.metadata, found.parent_config, found.pending_writes)


def place(found: tuple[Any, ...]) -> list[str]:
    return list(found[0].values())


@settings(max_examples=60, deadline=None)
@given(calls, st.integers(0, 9), st.integers(1, 4))
def test_it_says_what_langgraphs_saver_in_memory_says(calls: list[Any], before: int, limit: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop)
        ours, theirs = AgentrtSaver(PluginRows(store, loop, "langgraph")), InMemorySaver()
        last: dict[tuple[str, str], str] = {}
        for call in calls:
            if call[0] == "put":
                _, thread, namespace, number, value = call
                made = checkpoint(number, value=value)
                config = at(thread, last.get((thread, namespace)), namespace)
                if made["id"] == last.get((thread, namespace)):
                    continue  # it would be its own parent
                last[thread, namespace] = made["id"]
                saved = await ours.aput(config, made, metadata(value), made["channel_versions"])
                assert saved == await theirs.aput(config, made, metadata(value), made["channel_versions"])
            elif call[0] == "writes":
                _, thread, namespace, written, task = call
                if (thread, namespace) not in last:
                    continue
                config = at(thread, last[thread, namespace], namespace)
                await ours.aput_writes(config, written, task, f"path {task}")
                await theirs.aput_writes(config, written, task, f"path {task}")
            else:
                last = {place: known for place, known in last.items() if place[0] != call[1]}
                await ours.adelete_thread(call[1])
                await theirs.adelete_thread(call[1])
        for thread in ("a", "b", "a" * 700, "\N{SNOWMAN}"):
            for namespace in ("", "inner:1"):
                for how in (
                    {},
                    {"limit": limit},
                    {"before": at(thread, f"{before:032x}")},
                    {"filter": {"step": 1, "source": "loop"}},
                ):
                    mine = [plain(found) async for found in ours.alist(at(thread, None, namespace), **how)]  # type: ignore[arg-type]
                    assert mine == [plain(found) for found in theirs.list(at(thread, None, namespace), **how)]  # type: ignore[arg-type]
                newest, known = (
                    ours.get_tuple(at(thread, None, namespace)),
                    theirs.get_tuple(at(thread, None, namespace)),
                )
                assert (newest is None) == (known is None)
                if newest is not None and known is not None:
                    assert plain(newest) == plain(known)
        everything = sorted(map(plain, theirs.list(None)), key=place)
        assert sorted(map(plain, ours.list(None)), key=place) == everything
        store.close()

    asyncio.run(main())


def test_what_cannot_be_encoded_is_refused_and_nothing_is_stored() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop)
        saver = AgentrtSaver(PluginRows(store, loop, "langgraph"))
        made = checkpoint(1, value=1)
        await saver.aput(at("a"), made, metadata(1), made["channel_versions"])
        before = list(map(plain, saver.list(None)))
        for impossible in (1 << 64, -(1 << 63) - 1):
            with pytest.raises(TypeError, match="64-bit"):
                await saver.aput_writes(at("a", made["id"]), [("x", 1), ("y", impossible)], "t1", "")
            with pytest.raises(TypeError, match="64-bit"):
                await saver.aput(at("a"), checkpoint(2, value=impossible), metadata(2), {"value": "2"})
        assert list(map(plain, saver.list(None))) == before
        store.close()

    asyncio.run(main())


_WRITER = """
import sys
from test_saver import AgentrtSaver, at, checkpoint, metadata
with AgentrtSaver.open_sync(sys.argv[1]) as saver:
    config = at("thread")
    for number in range(1, 10_000):
        config = saver.put(config, checkpoint(number, value=number), metadata(number), {})
        saver.put_writes(config, [("x", number)], "task")
        print(number, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    acknowledged = 0
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            acknowledged = int(line)
            if acknowledged == 50:
                writer.kill()
    with AgentrtSaver.open_sync(tmp_path) as saver:
        found = list(saver.list(at("thread")))
        ids = [each.checkpoint["channel_values"]["value"] for each in found]
        assert ids == list(range(len(ids), 0, -1)) and len(ids) >= acknowledged >= 50
        assert all(
            each.pending_writes == [("task", "x", number)] for each, number in zip(found[1:], ids[1:], strict=True)
        )


def test_threads_and_loops_write_at_once(tmp_path: Path) -> None:
    def work(saver: AgentrtSaver, thread: int) -> None:
        config = at(str(thread))
        for number in range(1, 21):
            config = saver.put(config, checkpoint(number, value=thread), metadata(number), {})

    async def elsewhere(saver: AgentrtSaver) -> None:
        await saver.aput(at("loop"), checkpoint(1, value="loop"), metadata(1), {})
        await asyncio.gather(*[saver.aput_writes(at("loop", f"{1:032x}"), [("x", n)], "task") for n in range(20)])

    with AgentrtSaver.open_sync(tmp_path) as saver:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, saver, thread) for thread in range(16)]:
                done.result()
        asyncio.run(elsewhere(saver))
        assert [len(list(saver.list(at(str(thread))))) for thread in range(16)] == [20] * 16
        found = saver.get_tuple(at("loop"))
        assert found is not None and found.pending_writes is not None and len(found.pending_writes) == 1


def test_pruning_keeps_what_deltas_need(tmp_path: Path) -> None:
    with AgentrtSaver.open_sync(tmp_path) as saver:
        config = at("thread")
        for number in range(1, 9):
            values: dict[str, Any] = {"plain": number}
            if number == 3:
                values["log"] = _DeltaSnapshot(["one", "two"])
            known = metadata(number, counters_since_delta_snapshot={"log": [number, number]})
            config = saver.put(config, checkpoint(number, **values), known, {})
            saver.put_writes(config, [("log", f"w{number}")], "task")
        before = saver.get_delta_channel_history(config=config, channels=["log"])
        saver.prune(["thread"])
        assert [each.metadata["step"] for each in saver.list(at("thread"))] == [8, 7, 6, 5, 4, 3]
        assert saver.get_delta_channel_history(config=config, channels=["log"]) == before
        assert [value for _, _, value in before["log"]["writes"]] == ["w3", "w4", "w5", "w6", "w7"]
        saver.prune(["thread"], strategy="delete")
        assert not list(saver.list(None))
        assert not saver._rows.scan()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda saver: saver.put({"configurable": {}}, checkpoint(1), metadata(1), {}),
        lambda saver: saver.put(at("a"), checkpoint(1) | {"id": ""}, metadata(1), {}),
        lambda saver: saver.put(at("a"), checkpoint(1) | {"id": "x\0"}, metadata(1), {}),
        lambda saver: saver.put(at("a"), checkpoint(1) | {"id": "x" * 301}, metadata(1), {}),
        lambda saver: saver.put_writes(at("a"), [("x", 1)], "task"),
        lambda saver: saver.prune(["a"], strategy="some"),
        lambda saver: saver.get_tuple({"configurable": {}}),
    ],
)
def test_bad_input_is_an_error_and_changes_nothing(wrong: Callable[[AgentrtSaver], Any], tmp_path: Path) -> None:
    with AgentrtSaver.open_sync(tmp_path) as saver:
        saver.put(at("a"), checkpoint(1, value=1), metadata(1), {})
        before = saver._rows.scan()
        with pytest.raises(InputError):
            wrong(saver)
        assert saver._rows.scan() == before


def test_large_states_are_kept_whole(tmp_path: Path) -> None:
    text = "word " * 100_000
    with AgentrtSaver.open_sync(tmp_path) as saver:
        saver.put(at("a"), checkpoint(1, text=text), metadata(1), {})
    with AgentrtSaver.open_sync(tmp_path) as saver:
        found = saver.get_tuple(at("a"))
        assert found is not None and found.checkpoint["channel_values"]["text"] == text
