"""docs/guest-abi.md says what the header says, and its examples build and run as written."""

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from wasm_bench import ROOT, Bench, bench, settings

from agentrt.config import Config
from agentrt.settings import GIB, KIB, MIB
from agentrt.syscalls import BY_NUMBER, TABLE
from agentrt.tools import describe_tools

MANUAL = (ROOT / "docs" / "guest-abi.md").read_text()
HEADER = (ROOT / "csrc" / "agentrt_guest.h").read_text()
BINDING = (ROOT / "csrc" / "abi.c").read_text()


def block(name: str) -> str:
    """The manual's code block with that file name."""
    (text,) = re.findall(rf"^```\w+ {re.escape(name)}\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
    return str(text)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table that begins with that heading."""
    lines = MANUAL[MANUAL.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_imports_are_the_headers() -> None:
    declared = re.findall(
        r"AGENTRT_IMPORT\((\w+)\)\s*(int32_t|int64_t) agentrt_(\w+)\(([^)]*)\);", re.sub(r"/\*.*?\*/", "", HEADER)
    )
    assert len(declared) == HEADER.count("AGENTRT_IMPORT(") - 2  # its own definitions
    expected = {}
    for name, result, symbol, parameters in declared:
        assert name == symbol
        names = [] if parameters == "void" else [re.findall(r"\w+", part)[-1] for part in parameters.split(",")]
        expected[name] = (
            f"`agentrt_{name}({', '.join(names)})`",
            f"({' '.join(['i32'] * len(names))}) → {'i64' if result == 'int64_t' else 'i32'}",
        )
    written = {row[0].strip("`"): (row[1], row[2]) for row in rows("import")}
    assert written == expected


def test_imports_are_what_the_core_links() -> None:
    table = re.search(r"#define ABI\(X\)(.*?)\n\n", BINDING, re.DOTALL)
    assert table is not None
    linked = {
        name: f"({' '.join(['i32'] * len(parameters))}) → {'i64' if result == 'l' else 'i32'}"
        for name, parameters, result in re.findall(r"X\((\w+), \"(i*)\", '(\w)'\)", table[1])
    }
    assert linked == {row[0].strip("`"): row[2] for row in rows("import")}


def test_statuses_are_the_headers() -> None:
    declared = dict(re.findall(r"(AGENTRT_E\w+) = (-\d+),", HEADER))
    assert declared == {row[0].strip("`"): row[1] for row in rows("status")} and len(declared) == 7


def test_ops_of_the_header_are_the_syscall_table() -> None:
    declared = {int(number): name for name, number in re.findall(r"(AGENTRT_[A-Z_]+) = (\d+),", HEADER)}
    assert declared == {row.number: "AGENTRT_" + row.op.upper().replace(".", "_") for row in TABLE}
    served = re.findall(r"\*\*`(AGENTRT_\w+)` \((\d+)\)\*\*", MANUAL)
    assert [(name, int(number)) for name, number in served] == [
        (declared[number], number) for number in declared if BY_NUMBER[number].served and number not in (15, 16)
    ]


def test_limits_are_the_configurations_defaults() -> None:
    config = Config()

    def show(setting: str) -> str:
        section, _, key = setting.partition(".")
        value = getattr(getattr(config, section), key)
        if key.endswith("_ms"):
            return f"{value // 1000} s of CPU"
        if "bytes" in key:
            unit, factor = next((u, f) for u, f in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if value % f == 0)
            return f"{value // factor} {unit}"
        return "10^13" if value == 10**13 else f"{value:,}"

    table = rows("limit")
    assert len(table) == 9
    for what, default, _ in table:
        names = re.findall(r"`(\w+\.\w+)`", what)
        assert default == ", ".join(show(name) for name in names), what


def test_the_error_codes_of_tools_are_listed() -> None:
    listed = {code for row in rows("code") for code in re.findall(r"`(\w+)`", row[0])}
    sources = "".join(path.read_text() for path in (ROOT / "agentrt" / "tools").glob("*.py"))
    raised = set(re.findall(r'"(tool_[a-z_]+)"', sources))
    assert raised - {"tool_failed"} <= listed and listed - raised == {
        *("bad_request", "sandbox", "unknown_tool", "unsupported")
    }


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for text in blocks for line in text.splitlines()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_the_guest_in_c_builds_with_the_manuals_command_and_runs(tmp_path: Path, cache: Path) -> None:
    if shutil.which("clang") is None or shutil.which("wasm-ld") is None:
        pytest.skip("needs clang and wasm-ld")
    (tmp_path / "weather.c").write_text(block("weather.c"))
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    command = next(command for command in commands() if command[0] == "clang")
    built = subprocess.run([*command, "-Wall", "-Wextra", "-Werror"], cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr

    async def test(bench: Bench) -> None:
        program = await bench.backend.prepare((tmp_path / "weather.wasm").read_bytes())

        async def ask(input: Any) -> Any:
            run = bench.begin(program, input, {"weather": lambda args: {"Oslo": "rain", "Rome": [1, 2]}[args["city"]]})
            exit = await asyncio.wait_for(run.ended, 30)
            assert exit.reason == "returned" and exit.output is not None
            return msgspec.json.decode(exit.output)

        assert await ask(["Oslo", "Rome"]) == ["rain", [1, 2]]
        assert await ask(["Oslo", "Paris"]) == ["rain", None]
        assert await ask([]) == []

    bench(settings(cache), test)


def test_the_tool_of_the_manual_is_one(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(block("weather.py"))
    (spec,) = describe_tools(str(tmp_path / "weather.py"))
    assert (spec.name, spec.kind, spec.is_async) == ("weather", "keyed", True)
    assert ["agentrt", "run", "weather.wasm", "--input", '["Oslo", "Rome"]', "--tool", "weather.py"] in commands()


def test_the_guest_in_wat_assembles_with_the_manuals_command_and_runs(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "echo.wat").write_text(block("echo.wat"))
    command = next(command for command in commands() if command[0] == "python")
    assert command[3:] == [">", "echo.wasm"]
    # In a process of its own: the wasmtime package must not meet the core's engine in this one.
    module = subprocess.run([sys.executable, *command[1:3]], cwd=tmp_path, capture_output=True, check=True).stdout

    async def test(bench: Bench) -> None:
        program = await bench.backend.prepare(module)
        exit = await asyncio.wait_for(bench.begin(program, {"any": ["ü", 1.5]}).ended, 30)
        assert exit.output is not None and msgspec.json.decode(exit.output) == {"any": ["ü", 1.5]}

    bench(settings(cache), test)
