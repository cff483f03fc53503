"""`agentrt build`: what is made, proven, kept and refused."""

import json
from pathlib import Path

import pytest
import wasmtime

from agentrt import _core
from agentrt.backends import wasi
from agentrt.capture import proof
from agentrt.capture.build import build
from agentrt.capture.instrument import Preempt
from agentrt.cli.main import run
from agentrt.config import load_config
from agentrt.errors import ModuleError
from agentrt.sizing import core_parameters

GUESTS = Path(__file__).parents[1] / "guests"
IMPORT = '(import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))'


def wat(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(text))


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str, str]:
    """How it ended, stdout, stderr."""
    code = run(arguments)
    out, err = capfd.readouterr()
    return code.name, out, err


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentrt" / "captured"


@pytest.mark.parametrize(
    ("preempt", "work", "reached"),
    [
        ("syscalls", {"work": "json", "every": 97}, "syscall"),
        ("anywhere", {"work": "loop", "size": 1000}, "safe_point"),
        ("syscalls", {"work": "loop"}, None),
    ],
)
def test_a_module_is_made_proven_and_kept(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, cache: Path, preempt: str, work: dict[str, object], reached: str
) -> None:
    out, data = tmp_path / "out.wasm", tmp_path / "in.json"
    data.write_text(json.dumps(work))
    arguments = (
        "build",
        str(GUESTS / "works.wasm"),
        "-o",
        str(out),
        "--preempt",
        preempt,
        "--input",
        str(data),
        "--json",
    )
    code, printed, said = call(capfd, *arguments)
    assert code == "ok", said
    report = json.loads(printed)
    assert report["proof"]["reached"] == reached
    assert (report["proof"]["frame_bytes"] > 0) == (reached is not None)
    assert report["bytes"] == out.stat().st_size
    assert not report["cached"]
    assert report["proof"]["as_plain"] is True
    assert not [line for line in said.splitlines() if "safe points" not in line]  # nothing beside JSON
    assert len(list(cache.glob("*.artifact"))) == 1

    first = out.read_bytes()
    code, printed, said = call(capfd, *arguments)
    assert json.loads(printed)["cached"]
    assert "instrumenting" not in said
    assert out.read_bytes() == first

    code, _, said = call(capfd, "build", str(out), "-o", str(tmp_path / "again.wasm"))
    assert code == "input"
    assert "already" in said


def test_its_stages_are_told(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, said = call(capfd, "build", str(GUESTS / "works.wasm"), "-o", str(tmp_path / "out.wasm"))
    assert code == "ok", said
    stages = [line.partition(": ")[2] for line in said.splitlines()]
    assert stages[:4] == ["reading", "instrumenting", "writing", "proving"]


def test_what_is_packed_with_it_stays(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    packed, out = tmp_path / "packed.wasm", tmp_path / "out.wasm"
    packed.write_bytes(wasi.pack((GUESTS / "wasi_works.wasm").read_bytes(), args=["a", "b"], files={"/text": b"abc"}))
    code, printed, said = call(capfd, "build", str(packed), "-o", str(out), "--preempt", "anywhere", "--json")
    assert code == "ok", said
    report = json.loads(printed)["proof"]
    assert report["reached"] == "safe_point"
    assert report["as_plain"] is False  # it tells the time
    _, kept = wasi.unpack(out.read_bytes())
    assert kept is not None
    assert (kept.args, kept.files) == (["a", "b"], {"/text": b"abc"})


REFUSED = {
    "exception handling": '(tag $t) (func (export "agentrt_run") (result i32) (throw $t))',
    "tail calls": '(func $f (result i32) (i32.const 0)) (func (export "agentrt_run") (result i32) (return_call $f))',
    "changes its tables": """(table 2 funcref) (func $f (table.set (i32.const 0) (ref.null func)))
        (func (export "agentrt_run") (result i32) (call $f) (i32.const 0))""",
    "drops segments": """(memory (export "memory") 1) (data $d "abc")
        (func (export "agentrt_run") (result i32) (data.drop $d) (i32.const 0))""",
    "references in globals": """(global (mut funcref) (ref.null func))
        (func (export "agentrt_run") (result i32) (i32.const 0))""",
    "start function": '(func $s) (start $s) (func (export "agentrt_run") (result i32) (i32.const 0))',
    "--preempt anywhere": '(memory (export "memory") 1) (func (export "agentrt_run") (result i32) (i32.const 0))',
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_captured_is_refused_with_the_reason(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, reason: str, cache: Path
) -> None:
    module, out = tmp_path / "module.wasm", tmp_path / "out.wasm"
    before = IMPORT if reason != "--preempt anywhere" else ""
    module.write_bytes(wat(f"(module {before} {REFUSED[reason]})"))
    code, _, said = call(capfd, "build", str(module), "-o", str(out))
    assert code == "input"
    assert reason in said
    if reason != "--preempt anywhere":
        assert "replayed" in said
    assert not out.exists()
    assert not list(cache.glob("*.artifact"))


def test_what_binaryen_does_not_like_is_an_error_of_the_module(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = tmp_path / "module.wasm"
    good = (GUESTS / "works.wasm").read_bytes()
    module.write_bytes(good[:-100])
    code, _, said = call(capfd, "build", str(module), "-o", str(tmp_path / "out.wasm"))
    assert code == "input"
    module.write_bytes(
        b"\0asm\1\0\0\0" + b"\x01\x04\x01\x60\0\0" + b"\x03\x02\x01\0" + b"\x0a\x06\x01\x04\0\x6a\x1a\x0b"
    )
    code, _, said = call(capfd, "build", str(module), "-o", str(tmp_path / "out.wasm"), "--preempt", "anywhere")
    assert code == "input", said


def test_a_module_that_was_made_wrong_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binaryen or we may have a bug: another module in the place of what was made is found by the proof."""
    parameters = core_parameters(load_config(env={}))
    plain = (GUESTS / "works.wasm").read_bytes()
    folder = tmp_path / "kept"
    made = build(plain, Preempt.SYSCALLS, parameters, cache_folder=folder, cache_bytes_max=1 << 20)
    other = wat(f"""(module {IMPORT} (memory (export "memory") 1)
        (global (export "agentrt:state") (mut i32) (i32.const 0))
        (global (export "agentrt:data") (mut i32) (i32.const 0))
        (func (export "agentrt_run") (result i32)
          (drop (call $call (i32.const 1) (i32.const 0) (i32.const 2) (i32.const 0) (i32.const 0)))
          (loop $l (br $l)) (i32.const 0)))""")
    data = json.dumps({"work": "json", "every": 97}).encode()
    assert proof.prove(plain, made.module, Preempt.SYSCALLS, parameters, data).reached == "syscall"
    with pytest.raises(ModuleError, match="unwind"):
        proof.prove(plain, other, Preempt.SYSCALLS, parameters, data)


def test_facts_of_a_module() -> None:
    text = f"""(module {IMPORT} (memory 1) (func $f (export "f"))
      (func (loop $a (loop $b (br_if $a (i32.const 0)))) (block (loop (nop))))
      (func (memory.fill (i32.const 0) (i32.const 0) (i32.const 100000))))"""
    module = wat(text)
    same, facts = _core.module_facts(module)
    assert facts.pop("loops") == 3
    assert not any(facts.values())
    assert b"\xfc\x0b" in same  # bulk operations stay
    calling, _ = _core.module_facts(module, b"f")
    assert wasmtime.Module.validate(wasmtime.Engine(), calling) is None
    again, facts = _core.module_facts(calling)
    assert (again, facts["loops"]) == (calling, 3)
    assert len(calling) == len(same) + 3 * 2  # a call of a function with a small number
    with pytest.raises(ModuleError, match="exported as g"):
        _core.module_facts(module, b"g")
