"""WASI programs on the wasm backend: what is packed with a module, what comes back, and interpreters of others."""

import asyncio
import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import wasmtime
from hypothesis import given
from hypothesis import strategies as st
from interpreters import INTERPRETERS, interpreter, script, script_file
from wasm_bench import MIB, ROOT, Bench, Run, bench, settings

from agentrt.backends import wasi
from agentrt.backends.base import Exit
from agentrt.errors import ModuleError, ModuleLimitError, NoEntryError
from agentrt.syscalls import TABLE

IMPORTS = """
 (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
 (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
 (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
 (memory (export "memory") 4)
"""


def module(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(f"(module {text})"))


# Copies its input to stdout, and its first 3 bytes to stderr.
ECHO = module(
    IMPORTS
    + """(func (export "_start")
     (i32.store (i32.const 0) (i32.const 64)) (i32.store (i32.const 4) (i32.const 65536))
     (drop (call $read (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 4)))
     (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
     (i32.store (i32.const 4) (i32.const 3))
     (drop (call $write (i32.const 2) (i32.const 0) (i32.const 1) (i32.const 8))))"""
)
EXITS = module(IMPORTS + '(func (export "_start") (call $exit (i32.const 70000)))')


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


async def ended(run: Run) -> Exit:
    return await asyncio.wait_for(run.ended, 60)


async def run_module(bench: Bench, code: bytes, input: Any = None, **how: Any) -> Exit:
    return await ended(bench.begin(await bench.backend.prepare(code), input, **how))


# --- packing -------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=9)
PACKED = st.fixed_dictionaries(
    {
        "args": st.lists(TEXTS, max_size=4),
        "env": st.dictionaries(TEXTS.filter(lambda name: name and "=" not in name), TEXTS, max_size=3),
        "files": st.dictionaries(st.from_regex(r"[ab]{1,3}", fullmatch=True), st.binary(max_size=20), max_size=3),
        "entry": st.none() | TEXTS.filter(bool),
    }
)


@given(PACKED)
def test_what_is_packed_is_unpacked(what: dict[str, Any]) -> None:
    packed = wasi.pack(ECHO, **what)
    assert wasi.unpack(packed) == (ECHO, wasi.Packed(**what))
    assert wasi.unpack(wasi.pack(packed, args=["other"])) == (ECHO, wasi.Packed(args=["other"]))
    wasmtime.Module.validate(wasmtime.Engine(), packed)  # to others it is the same module


def test_a_module_with_nothing_packed_is_itself() -> None:
    assert wasi.unpack(ECHO) == (ECHO, None)
    named = b"\0asm\x01\0\0\0\0\x05\x04name"
    assert wasi.unpack(named) == (named, None)


@given(st.binary(max_size=60), st.integers(0, 40))
def test_any_section_is_a_module_error_or_something(junk: bytes, at: int) -> None:
    packed = wasi.pack(ECHO, args=["x"], files={"y": b"z"})
    for broken in (packed[:8] + junk, packed[: 8 + at] + junk, packed[: 23 + at] + junk + packed[30 + at :]):
        try:
            code, what = wasi.unpack(broken)
            assert code == broken if what is None else len(code) < len(broken)
        except ModuleError:
            pass


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ({"args": ["a\0b"]}, ModuleError),
        ({"args": ["\ud800"]}, ModuleError),
        ({"env": {"": "x"}}, ModuleError),
        ({"files": {"../x": b""}}, ModuleError),
        ({"files": {"a": b"", "a/b": b""}}, ModuleError),
        ({"files": {"a": b"", "/a": b""}}, ModuleError),
        ({"files": {"x" * 256: b""}}, ModuleLimitError),
        ({"args": ["x" * MIB]}, ModuleLimitError),
        ({"entry": ""}, ModuleLimitError),
        ({"entry": "x" * 201}, ModuleLimitError),
        ({"entry": "x\0"}, ModuleError),
    ],
)
def test_what_cannot_be_packed_is_refused_before_and_after(
    cache: Path, what: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        wasi.pack(ECHO, **what)
    with pytest.raises(ModuleError):
        wasi.pack(b"no module", **what)
    if what.get("args") == ["\ud800"]:
        return  # cannot be written down at all
    body = wasi._leb(12) + b"agentrt.wasi" + msgspec.msgpack.encode(wasi.Packed(**what))
    forged = ECHO[:8] + b"\0" + wasi._leb(len(body)) + body + ECHO[8:]

    async def test(bench: Bench) -> None:
        with pytest.raises(error):
            await bench.backend.prepare(forged)

    bench(settings(cache), test)


# --- what comes back -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stdout", "result"),
    [
        (b"", None),
        (b'{"a": 1}\n', b'{"a": 1}'),
        (b" 12 \r\n", b"12"),
        (b"hello\n", b'"hello\\n"'),
        (b"1 2\n", b'"1 2\\n"'),
        (b"NaN\n", b'"NaN\\n"'),
        (b"\n", b'"\\n"'),
        (b'"\xff"', '"\\"\ufffd\\""'.encode()),
        (b"[" * 100_000, b'"' + b"[" * 100_000 + b'"'),
    ],
)
def test_stdout_is_the_result(stdout: bytes, result: bytes | None) -> None:
    assert wasi.result_of(stdout) == result


def test_a_command_reads_its_input_and_says_its_result(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        exit = await run_module(bench, ECHO, {"a": [1, 2]})
        assert (exit.reason, exit.code, exit.output) == ("returned", 0, b'{"a":[1,2]}')
        assert (exit.stdout, exit.stderr) == (b'{"a":[1,2]}', b'{"a')
        exit = await run_module(bench, EXITS)
        assert (exit.reason, exit.code, exit.output, exit.stdout) == ("failed", 70_000, None, b"")

    bench(settings(cache), test)


def test_what_an_agent_gives_as_output_comes_before_what_it_writes(cache: Path) -> None:
    code = module(
        """(import "agentrt" "output" (func $output (param i32 i32) (result i32)))"""
        + IMPORTS
        + """(data (i32.const 64) "[1][2]")
        (func $both (i32.store (i32.const 0) (i32.const 64)) (i32.store (i32.const 4) (i32.const 3))
          (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
          (drop (call $output (i32.const 67) (i32.const 3))))
        (func (export "_start") (call $both))"""
    )
    agent = module(
        IMPORTS
        + """(func (export "agentrt_run") (result i32)
          (i32.store (i32.const 0) (i32.const 64)) (i32.store (i32.const 4) (i32.const 3))
          (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
        (func (export "_start") unreachable)"""
    )

    async def test(bench: Bench) -> None:
        exit = await run_module(bench, code)
        assert (exit.output, exit.stdout) == (b"[2]", b"[1]")
        exit = await run_module(bench, agent)
        assert (exit.reason, exit.output, exit.stdout) == ("returned", None, b"\0\0\0")

    bench(settings(cache), test)


def test_what_is_written_to_the_result_is_the_result(cache: Path) -> None:
    """In parts, beside stdout, behind what agentrt.output gave; a file of that name is a file."""
    code = module(
        """(import "agentrt" "output" (func $output (param i32 i32) (result i32)))
        (import "wasi_snapshot_preview1" "path_open"
          (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))"""
        + IMPORTS
        + """(data (i32.const 64) "dev/result") (data (i32.const 80) "[12]")
        (func $put (param $fd i32) (param $at i32) (param $len i32)
          (i32.store (i32.const 0) (local.get $at)) (i32.store (i32.const 4) (local.get $len))
          (drop (call $write (local.get $fd) (i32.const 0) (i32.const 1) (i32.const 8))))
        (func (export "_start")
          (drop (call $output (i32.const 80) (i32.const 1)))
          (if (call $open (i32.const 3) (i32.const 0) (i32.const 64) (i32.const 10) (i32.const 9) (i64.const 64)
              (i64.const 0) (i32.const 0) (i32.const 16)) (then (call $exit (i32.const 1))))
          (call $put (i32.const 1) (i32.const 80) (i32.const 4))
          (call $put (i32.load (i32.const 16)) (i32.const 81) (i32.const 1))
          (call $put (i32.load (i32.const 16)) (i32.const 82) (i32.const 2)))"""
    )

    async def test(bench: Bench) -> None:
        exit = await run_module(bench, wasi.pack(code, files={"x": b""}))
        assert (exit.reason, exit.output, exit.stdout) == ("returned", b"[12]", b"[12]")
        assert (await run_module(bench, wasi.pack(code, files={"dev/result": b""}))).code == 1
        assert (await run_module(bench, code)).code == 1
        program = await bench.backend.prepare(code)
        started = bench.backend.started_with(program, wasi.Packed(files={"y": b""}))
        assert (await ended(bench.begin(started))).output == b"[12]"
        with pytest.raises(ModuleError):
            bench.backend.started_with(program, wasi.Packed(files={"../y": b""}))

    bench(settings(cache), test)


def test_a_guest_may_have_less_memory_than_others(cache: Path) -> None:
    """`memory.grow` fails by its own bound; a module that begins with more does not begin."""
    code = module(
        IMPORTS + """(func (export "_start") (call $exit (i32.add (memory.grow (i32.const 4)) (i32.const 1))))"""
    )

    async def test(bench: Bench) -> None:
        program = await bench.backend.prepare(code)
        for pages, reason, code_ in ((8, "failed", 5), (7, "returned", 0), (0, "failed", 5), (3, "engine", 0)):
            exit = await ended(bench.begin(program, memory_bytes_max=pages << 16))
            assert (exit.reason, exit.code) == (reason, code_)

    bench(settings(cache), test)


def test_what_is_cut_from_the_output_is_said(cache: Path) -> None:
    twice = module(
        IMPORTS
        + """(func (export "_start")
        (i32.store (i32.const 0) (i32.const 64)) (i32.store (i32.const 4) (i32.const 65536))
        (memory.fill (i32.const 64) (i32.const 0x31) (i32.const 65536))
        (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
        (i32.store (i32.const 4) (i32.const 10))
        (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8))))"""
    )

    async def test(bench: Bench) -> None:
        exit = await run_module(bench, twice)
        assert exit.stdout == b"[10 bytes cut]\n" + b"1" * 65536
        assert exit.output == msgspec.json.encode(exit.stdout.decode())

    bench(settings(cache), test)


def test_scripts_of_one_interpreter_share_its_code(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        one, two = (wasi.pack(ECHO, args=["echo", name]) for name in ("one", "two"))
        first, second, plain = await asyncio.gather(*(bench.backend.prepare(code) for code in (one, two, ECHO)))
        assert first.module is second.module is plain.module
        versions = [hashlib.sha256(code).hexdigest() for code in (one, two, ECHO)]
        assert [first.version, second.version, plain.version] == versions
        again = await bench.backend.prepare(one)
        assert again.module is first.module and not bench.backend._preparing
        with pytest.raises(NoEntryError, match="main"):
            await bench.backend.prepare(wasi.pack(ECHO, entry="main"))

    bench(settings(cache), test)


# --- interpreters ------------------------------------------------------------------------

PYTHON_SUM = """
import sys, json
order = json.loads(sys.stdin.read())
total = 0
for i in range(order["rounds"]):
    total += i * i % 7
print(json.dumps({"total": total, "name": order["name"]}))
"""
JAVASCRIPT_SUM = """
const order = JSON.parse(std.in.readAsString());
let total = 0;
for (let i = 0; i < order.rounds; i++) total += i * i % 7;
console.log(JSON.stringify({total, name: order.name}));
"""
SUMS = {"micropython": PYTHON_SUM, "quickjs": JAVASCRIPT_SUM, "cpython": PYTHON_SUM}
NAMES = [pytest.param(name, marks=[pytest.mark.stress] if name == "cpython" else []) for name in INTERPRETERS]


def order(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The input and the result of a sum."""
    return {"rounds": rounds, "name": "ü"}, {"total": sum(i * i % 7 for i in range(rounds)), "name": "ü"}


def value(exit: Exit) -> Any:
    assert exit.reason == "returned" and exit.output is not None, exit
    return msgspec.json.decode(exit.output)


@pytest.mark.parametrize("name", NAMES)
def test_an_interpreter_computes(cache: Path, name: str) -> None:
    async def test(bench: Bench) -> None:
        input, result = order(10_000)
        first = await run_module(bench, script(name, SUMS[name]), input)
        assert value(first) == result and first.stderr == b""
        second = await run_module(bench, script(name, SUMS[name]), input)
        assert (second.fuel, second.output) == (first.fuel, first.output)

    bench(settings(cache), test)


@pytest.mark.parametrize("name", NAMES)
def test_an_interpreter_finds_its_files_and_changes_none(cache: Path, name: str) -> None:
    python = b"""
import os, sys, time, helper
before = time.time()
time.sleep(3600)
assert 3600 <= time.time() - before < 3601
sys.stderr.write("said\\n")
try:
    open("/app/new", "w")
except OSError as error:
    print([helper.answer(), sorted(os.listdir("/app")), error.args[0]])
sys.exit(3)
"""
    javascript = b"""
import {answer} from "./helper.js";
const [names, err] = os.readdir("/app");
std.err.puts("said\\n");
console.log(JSON.stringify([answer(), names.filter(n => n[0] != ".").sort(), std.open("/app/new", "w") ? 0 : 69]));
std.exit(3);
"""
    helper = ("helper.js", b"export function answer() { return 42 }") if name == "quickjs" else (
        "helper.py", b"def answer(): return 42"
    )  # fmt: skip
    main = "main.js" if name == "quickjs" else "main.py"
    files = {f"app/{main}": javascript if name == "quickjs" else python, f"app/{helper[0]}": helper[1]}

    async def test(bench: Bench) -> None:
        exit = await run_module(bench, script_file(name, f"/app/{main}", files))
        assert (exit.reason, exit.code, exit.stderr) == ("failed", 3, b"said\n"), exit
        found = msgspec.json.decode(exit.stdout.replace(b"'", b'"'))
        assert found == [42, sorted(path.removeprefix("app/") for path in files), 69]

    bench(settings(cache), test)


def test_micropythons_ops_are_the_syscall_table() -> None:
    source = (ROOT / "csrc" / "micropython.c").read_text()
    ops = dict(re.findall(r'\{"([a-z.]+)", AGENTRT_([A-Z_]+)\}', source))
    assert ops == {row.op: row.op.upper().replace(".", "_") for row in TABLE if row.number not in (15, 16)}


def test_micropython_calls_tools(cache: Path) -> None:
    text = """
import host, json
def call(op, **request):
    return json.loads(host.call(op, json.dumps(request)))
print(call("tool.call", tool="weather", args={"city": "Oslo"}))
print(call("tool.call", tool="broken", args={})["error"]["code"], call("nope")["error"]["code"])
print(call("log", level="info", message="here")["ok"])
print(len(call("tool.call", tool="long", args={"n": 200000})["value"]))
try:
    call("tool.call", tool="long", args={"n": 300000})
except Exception as error:
    print(type(error).__name__)
host.call("output", json.dumps({"done": True}))
"""

    async def test(bench: Bench) -> None:
        tools = {"weather": lambda args: {"sunny": args["city"]}, "long": lambda args: "x" * args["n"]}
        run = bench.begin(await bench.backend.prepare(script("micropython", text)), None, tools)
        exit = await ended(run)
        assert exit.output == b'{"done": true}', exit
        said = exit.stdout.decode().splitlines()
        assert "Oslo" in said[0] and said[1:4] == ["tool_failed unknown_op", "True", "200000"] and said[4]
        assert [call[0] for call in run.calls] == ["weather", "broken", "long", "long"]
        assert msgspec.json.decode(run.logs[0]) == {"level": "info", "message": "here"}

    bench(settings(cache), test)


def test_the_manuals_script_runs_as_packed_there(cache: Path, tmp_path: Path) -> None:
    manual = (ROOT / "docs" / "guest-abi.md").read_text()
    for name in ("pack.py", "cities.py"):
        (text,) = re.findall(rf"^```python {re.escape(name)}\n(.*?)^```", manual, re.DOTALL | re.MULTILINE)
        (tmp_path / name).write_text(text)
    (tmp_path / "interpreter.wasm").write_bytes(interpreter("micropython"))
    subprocess.run([sys.executable, "pack.py", "interpreter.wasm", "cities.py", "agent.wasm"], cwd=tmp_path, check=True)
    (line,) = re.findall(r"^```sh\nagentrt (pack .*)\n```", manual, re.MULTILINE)
    command = [sys.executable, "-c", "from agentrt.cli.main import main; main()", *line.split()]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    async def test(bench: Bench) -> None:
        program = await bench.backend.prepare((tmp_path / "cities.wasm").read_bytes())
        exit = await ended(bench.begin(program, ["Oslo"], {"weather": lambda args: args["city"] + ": sunny"}))
        assert value(exit) == ["Oslo: sunny"]
        program = await bench.backend.prepare((tmp_path / "agent.wasm").read_bytes())
        exit = await ended(bench.begin(program, ["Oslo", "Rome"], {"weather": lambda args: args["city"] + ": sunny"}))
        assert value(exit) == ["Oslo: sunny", "Rome: sunny"]
        exit = await ended(bench.begin(program, ["Oslo"]))
        assert exit.reason == "failed" and b"tool_failed" in exit.stderr

    bench(settings(cache), test)


@pytest.mark.parametrize("micro_slice_fuel", [1_000, 50_000])
def test_interpreters_preempt_each_other_and_each_is_as_alone(cache: Path, micro_slice_fuel: int) -> None:
    interpreter("micropython"), interpreter("quickjs")

    async def test(bench: Bench) -> None:
        input, result = order(60_000)
        programs = [await bench.backend.prepare(script(name, SUMS[name])) for name in ("micropython", "quickjs")]
        alone = [await ended(bench.begin(program, input)) for program in programs]
        before = bench.backend.statistics()
        # One worker and quanta of a millisecond: side by side they take turns in the middle of their loops,
        runs = [bench.begin(program, input, tier=3) for program in programs for _ in range(2)]
        # and in the middle of those, more urgent ones come in between.
        urgent = [bench.begin(program, input, tier=1) for program in programs]
        together = [await ended(run) for run in runs]
        first = [await ended(run) for run in urgent]
        after = bench.backend.statistics()
        assert after["slices"] - before["slices"] > 10
        assert sum(exit.preemptions + exit.demotions for exit in (*together, *first)) > 0
        for exit, same in zip((*together, *first), (alone[0], alone[0], alone[1], alone[1], *alone), strict=True):
            assert value(exit) == result
            assert (exit.fuel, exit.output, exit.stdout) == (same.fuel, same.output, same.stdout)

    bench(
        settings(
            cache,
            scheduler__workers=1,
            scheduler__quantum_ms=(1, 1, 1, 1),
            scheduler__micro_slice_fuel=micro_slice_fuel,
        ),
        test,
    )


def test_the_micro_slice_does_not_show_in_fuel(cache: Path) -> None:
    interpreter("micropython")
    fuel = set()

    async def test(bench: Bench) -> None:
        fuel.add((await run_module(bench, script("micropython", PYTHON_SUM), order(5_000)[0])).fuel)

    for micro_slice_fuel in (1_000, 7_777, 50_000, 10_000_000):
        bench(settings(cache, scheduler__micro_slice_fuel=micro_slice_fuel), test)
    assert len(fuel) == 1
