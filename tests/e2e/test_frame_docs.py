"""The commands in docs/frames.md work, in their order: what is built is run, and its frames are looked at."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import wasmtime
from frames_kit import files, loop, parked, runtime

from agentrt.cli.main import run

PAGE = Path(__file__).parents[2] / "docs" / "frames.md"
WORKS = Path(__file__).parents[1] / "guests" / "works.wasm"
#: Stands for an interpreter: reads its input, after it has seen its arguments.
READER = """(module
  (import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "_start")
    (i32.store (i32.const 16) (i32.const 64)) (i32.store (i32.const 20) (i32.const 64))
    (drop (call $read (i32.const 0) (i32.const 16) (i32.const 1) (i32.const 24)))))"""
REACTOR = """(module (memory (export "memory") 1)
  (func (export "make_ready") (i32.store (i32.const 8) (i32.const 7)))
  (func (export "agentrt_run") (result i32) (i32.sub (i32.load (i32.const 8)) (i32.const 7))))"""


def blocks() -> list[list[list[str]]]:
    """The words of each command of each block; what is installed is there already."""
    found = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [block.replace("\\\n", " ").splitlines() for block in found]
    return [
        [words[1:] for line in block if (words := shlex.split(line, comments=True)) and words[0] == "agentrt"]
        for block in lines
    ]


def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copy(WORKS, "agent.wasm")
    Path("python.wasm").write_bytes(wasmtime.wat2wasm(READER))
    Path("reactor.wasm").write_bytes(wasmtime.wat2wasm(REACTOR))
    Path("data.json").write_text("{}")

    def works(words: list[str]) -> str:
        code = run(words)
        said, complaints = capfd.readouterr()
        assert code.name == "ok", (words, complaints)
        return said

    building, looking, imaging = blocks()
    assert len(building) == 2 and len(looking) == 4 and len(imaging) == 3
    for words in building:
        works(words)
    taken: list[Path] = []

    async def main() -> None:
        work: dict[str, Any] = {"work": "sort", "size": 60, "every": 150, "wait": 1}
        async with runtime(tmp_path) as made:
            await made.register("works", tmp_path / "agent.captured.wasm")
            for number in range(2):
                one = await made.submit("works", work | {"every": 150 - 50 * number})
                await parked(made, one.run_id, number)
                taken.extend(files(tmp_path, one.run_id))

    loop(main)
    one, two = (str(path.relative_to(tmp_path)) for path in taken)
    names = {"store/frames/RUN.ID": [one], "store/frames/*": [one, two], "ONE": [one], "TWO": [two]}
    said = [works([each for word in words for each in names.get(word, [word])]) for words in looking]
    assert "globals" in said[0] and "in agentrt_run" not in said[0]
    assert re.search(r"^in \S+ at 0x", said[1], re.MULTILINE)
    assert "memory" in said[3]
    for words in imaging:
        works(words)
    assert Path("agent.wasm").read_bytes().startswith(b"\0asm")
