"""The example guests: what is committed is what builds, and each does what its first lines say."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wasm_bench import BAD, EXAMPLES, Bench, bench
from wasm_bench import settings as config

from agentrt.backends.base import Exit

#: Where the committed modules were built; another compiler may build others.
BUILT_WITH = (EXAMPLES / "BUILT_WITH").read_text().strip()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def output(exit: Exit) -> Any:
    assert exit.reason == "returned" and exit.output is not None, exit
    return msgspec.json.decode(exit.output)


def compiler() -> str:
    clang = shutil.which("clang")
    if clang is None or shutil.which("wasm-ld") is None:
        pytest.skip("needs clang and wasm-ld")
    version = subprocess.run([clang, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    if version != BUILT_WITH:
        pytest.skip(f"{version} is not {BUILT_WITH}")
    return clang


def test_the_committed_examples_are_what_their_sources_build(tmp_path: Path) -> None:
    compiler()
    subprocess.run([EXAMPLES / "build.sh", tmp_path], check=True, cwd="/")
    built = {path.name: path.read_bytes() for path in tmp_path.glob("*.wasm")}
    assert built == {path.name: path.read_bytes() for path in EXAMPLES.glob("*.wasm")}
    assert {path.stem for path in EXAMPLES.glob("*.c")} == {Path(name).stem for name in built}
    assert all(len(module) < 16 * 1024 for module in built.values())


def test_the_committed_test_guests_are_what_their_sources_build(tmp_path: Path) -> None:
    compiler()
    if shutil.which("wat2wasm") is None:
        pytest.skip("needs wat2wasm")
    subprocess.run([BAD / "build.sh", tmp_path], check=True, cwd="/")
    built = {path.name: path.read_bytes() for path in tmp_path.glob("*.wasm")}
    assert built == {path.name: path.read_bytes() for path in BAD.glob("*.wasm")}
    sources = (*BAD.glob("*.c"), *BAD.glob("*.wat"))
    assert {path.stem for path in sources} == {Path(name).stem for name in built}


def test_steps_makes_each_step_once_and_in_order(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("steps")
        for input in ({"order": 'ü\n"\\', "steps": 3}, {"order": "o"}, {"steps": 0, "order": "o"}):
            steps = input.get("steps", 6)
            run = bench.begin(program, input, {"ledger_add": lambda args: {"new": True}})
            assert output(await run.ended) == {"order": input["order"], "steps": steps}
            assert run.calls == [("ledger_add", {"order": input["order"], "place": n + 1}) for n in range(steps)]

    bench(config(cache), test)


@pytest.mark.parametrize("name", ["steps", "indexer", "qualifier", "parallel"])
def test_input_that_makes_no_sense_fails_with_its_code(cache: Path, name: str) -> None:
    async def test(bench: Bench) -> None:
        for input in (None, [], "text", {}, {"order": "o", "steps": -1, "calls": 33, "chunk_bytes": 1}):
            exit = await bench.run(name, input)
            assert (exit.reason, exit.code, exit.output) == ("failed", 1, None)
        exit = await bench.run(name, {"order": "x" * 100_000, "company": "c", "text": 0})
        assert (exit.reason, exit.code) == ("failed", 1)

    bench(config(cache), test)


@pytest.mark.parametrize(
    ("name", "input"),
    [
        ("steps", {"order": "o"}),
        ("indexer", {"order": "o", "text": 1}),
        ("qualifier", {"order": "o", "company": "c"}),
    ],
)
def test_a_tool_that_fails_ends_the_run_with_code_2(cache: Path, name: str, input: Any) -> None:
    async def test(bench: Bench) -> None:
        exit = await bench.run(name, input)  # there are no tools
        assert (exit.reason, exit.code) == ("failed", 2)

    bench(config(cache), test)


def test_steps_logs_the_error_of_its_tool(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        run = bench.begin(await bench.prepare("steps"), {"order": "o"})
        assert (await run.ended).code == 2
        (line,) = run.logs
        decoded = msgspec.json.decode(line)
        assert decoded["level"] == "error"
        assert decoded["message"].startswith('steps: ledger_add failed: {"code":"tool_failed"')

    bench(config(cache), test)


def test_qualifier_scores(cache: Path) -> None:
    leads = [
        ({"company": "Hooli", "employees": 5000, "budget": 50000, "message": "URGENT: a demo please"}, 95, "hot"),
        ({"company": "Wonka", "employees": 50}, 35, "warm"),
        ({"company": "Initech", "message": "unsubscribe"}, 0, "cold"),
    ]

    async def test(bench: Bench) -> None:
        program = await bench.prepare("qualifier")
        for lead, score, verdict in leads:
            run = bench.begin(program, {"order": "q"} | lead, {"ledger_add": lambda args: 1}, tier=0)
            assert output(await run.ended) == {"company": lead["company"], "score": score, "verdict": verdict}
            assert run.calls == [("ledger_add", {"order": "q", "place": 1})]

    bench(config(cache), test)


def test_hog_makes_no_syscall_between_start_and_end(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        run = bench.begin(await bench.prepare("hog"), {"rounds": 100_000}, tier=3)
        value = 0x9E3779B97F4A7C15
        for _ in range(100_000):
            value ^= value << 13 & (1 << 64) - 1
            value ^= value >> 7
            value ^= value << 17 & (1 << 64) - 1
        assert output(await run.ended) == {"rounds": 100_000, "value": value & 0x7FFFFFFF}
        assert run.calls == [] and run.waits == []
        endless = bench.begin(await bench.prepare("hog"), {}, tier=3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(endless.ended), 0.2)
        endless.guest.kill()
        assert (await endless.ended).reason == "killed"

    bench(config(cache), test)


def test_parallel_takes_answers_in_the_order_in_which_they_come(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        run = bench.begin(await bench.prepare("parallel"), {"order": "o", "calls": 5})
        requests: list[Any] = []
        arrived = asyncio.Event()

        def hold(new: list[Any], waiting: Any) -> None:
            requests.extend(new)
            if len(requests) == 5:
                arrived.set()

        run.on_syscalls = hold  # type: ignore[method-assign]
        await asyncio.wait_for(arrived.wait(), 30)
        assert [request.handle for request in requests] == [1, 2, 3, 4, 5]
        for seq, handle in enumerate((4, 2, 5, 1, 3)):
            failed = handle == 5
            run.guest.complete(handle, int(failed), b'{"code":"tool_failed","message":"no"}', 10**18 + seq, seq + 1)
        assert output(await run.ended) == {"places": [4, 2, 5, 1, 3], "failed": 1}

    bench(config(cache), test)


# --- the indexer against a model -----------------------------------------------

WORD = re.compile(rb"[A-Za-z_\x80-\xff][A-Za-z_\x80-\xff0-9]*")


def model(text: str, chunk_bytes: int) -> dict[str, Any]:
    """The same index, the simple way."""
    data = text.encode()
    chunks = []
    while data:
        end = len(data) if len(data) <= chunk_bytes else chunk_bytes
        if end < len(data):
            end = data.rfind(b"\n", 0, end) + 1 or end
            while data[end : end + 1] and data[end] & 0xC0 == 0x80:
                end -= 1
        chunks.append(data[:end])
        data = data[end:]
    count: dict[bytes, int] = {}
    spread: dict[bytes, int] = {}
    for chunk in chunks:
        words = WORD.findall(chunk)
        for word in words:
            count[word] = count.get(word, 0) + 1
        for word in set(words):
            spread[word] = spread.get(word, 0) + 1
    order = sorted((word for word in count if len(word) <= 64), key=lambda word: (-spread[word], -count[word], word))
    return {
        "bytes": len(text.encode()),
        "chunks": len(chunks),
        "words": sum(count.values()),
        "distinct": len(count),
        "top": order[:16],
    }


def check_index(bench: Bench, program: Any, text: str, chunk_bytes: int) -> Any:
    async def check() -> None:
        run = bench.begin(
            program,
            {"order": "i", "text": 7, "chunk_bytes": chunk_bytes},
            {"read_text": lambda args: {"name": "ä/x.py", "text": text}, "index_put": lambda args: {"new": True}},
        )
        exit = await run.ended
        expected = model(text, chunk_bytes)
        top = [word.decode() for word in expected["top"]]
        told = output(exit)
        assert told == expected | {"name": "ä/x.py", "top": top}
        assert run.calls == [
            ("read_text", {"text": 7}),
            ("index_put", {"order": "i", "words": expected["words"], "top": top}),
        ]

    return check()


def test_indexer_indexes_real_sources_as_the_model_does(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("indexer")
        for name in ("ast.py", "asyncio/tasks.py", "enum.py", "typing.py", "this.py"):
            text = (Path(asyncio.__file__).parents[1] / name).read_text(encoding="utf-8")
            await check_index(bench, program, text, 4096)

    bench(config(cache), test)


@settings(max_examples=30)
@given(st.lists(st.text(alphabet=st.sampled_from('ab_1 \n\t"\\/é€𝄞\x00\x1f\x7f'), max_size=300), max_size=5))
def test_indexer_reads_any_text_that_json_can_carry(parts: list[str]) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("indexer")
        await check_index(bench, program, "\n".join(parts), 256)

    bench(config(SHARED_CACHE), test)


@pytest.fixture(scope="module", autouse=True)
def _shared_cache(cache: Path) -> None:
    global SHARED_CACHE
    SHARED_CACHE = cache


SHARED_CACHE = Path()


def test_indexer_refuses_what_does_not_fit(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("indexer")
        for text, code in (
            ("\n".join(f"w{i}" for i in range(24_001)), 4),
            ("x" * ((1 << 20) - 20), 4),
            (7, 3),
        ):
            tools = {"read_text": lambda args, text=text: {"name": "n", "text": text}, "index_put": lambda args: 1}
            exit = await bench.begin(program, {"order": "i", "text": 7}, tools).ended
            assert (exit.reason, exit.code) == ("failed", code)

    bench(config(cache), test)


def test_relay_and_non_deterministic_do_as_told(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        told = output(
            await bench.run("relay", {"tool": "t", "args": {"a": [1]}, "times": 3}, {"t": lambda args: args["a"]})
        )
        assert told == {"calls": 3, "failed": 0, "last": [1]}
        told = output(await bench.run("relay", {"tool": "none", "args": {}}))
        assert told["failed"] == 1 and told["last"]["code"] == "tool_failed"
        throws = iter((4, 2, 6))
        tools = {"dice": lambda args: next(throws), "ledger_add": lambda args: 1}
        run = bench.begin(await bench.prepare("non_deterministic"), {}, tools)
        assert (await run.ended).reason == "returned"
        assert [args["place"] for name, args in run.calls if name == "ledger_add"] == [4, 2, 6]

    bench(config(cache), test)
