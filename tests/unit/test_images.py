"""Images: guests that begin where another's boot was over do what they would have done after booting themselves."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from capture_kit import made as captured
from hypothesis import given, settings
from hypothesis import strategies as st
from image_kit import IMPORTS, PARAMETERS, agent, bench, image, outcome, reader, wat
from interpreters import script

from agentrt.backends import wasi
from agentrt.backends.images import begin_of
from agentrt.capture.boot import Bench
from agentrt.capture.instrument import Preempt
from agentrt.capture.sections import Sections, leb, signed_leb, stretches
from agentrt.cli.main import run
from agentrt.errors import ModuleError

# --- at rest --------------------------------------------------------------------


@pytest.mark.parametrize("type", ["", "(result i32)"])
def test_at_rest_it_is_what_it_would_have_become(tmp_path: Path, type: str) -> None:
    """All memory and globals of each kind; what the boot took is not charged."""
    init = "(i32.const 0)" if type else ""
    call = "(drop (call $ready))" if type else "(call $ready)"
    made = image(agent(init, type=type), tmp_path, init="ready")
    plain, booted = bench(agent(init, type=type, before=call)), bench(made.module)
    try:
        one, two = outcome(plain), outcome(booted)
        assert one.reason == two.reason == "returned", two.message
        assert one.output == two.output
        assert made.boot_fuel > 20
        assert abs(one.fuel - two.fuel - made.boot_fuel) < 20  # how it is called differs
        assert outcome(booted) == two
    finally:
        plain.close()
        booted.close()


def test_at_rest_any_module_may_be_an_image(tmp_path: Path) -> None:
    """Exceptions and a start function are no hindrance where nothing is on the stack."""
    module = wat(f"""(module {IMPORTS} (memory (export "memory") 1) (tag $t)
      (func $start (i32.store (i32.const 4) (i32.add (i32.load (i32.const 4)) (i32.const 1)))) (start $start)
      (func (export "ready") (block $caught (try_table (catch $t $caught) (throw $t)) (unreachable))
        (i32.store (i32.const 0) (i32.const 9)))
      (func (export "agentrt_run") (result i32) (call $output (i32.const 0) (i32.const 8))))""")
    made = bench(image(module, tmp_path, init="ready").module)
    try:
        assert outcome(made).output == b"\x09\0\0\0\x01\0\0\0"
    finally:
        made.close()


REST_REFUSED = {
    "does not export a function": ("", "", "other"),
    "no function that makes the module ready": ("(i32.const 0)", "(param i32) (result i32)", "ready"),
    "failed (failed) before it was ready": ("(i32.const 3)", "(result i32)", "ready"),
    "failed (trap) before it was ready": ("unreachable", "", "ready"),
    "looked at its input": ("(drop (call $input (i32.const 0) (i32.const 0) (i32.const 4)))", "", "ready"),
    "random numbers": ("(drop (call $random_get (i32.const 0) (i32.const 4)))", "", "ready"),
    "looked at the clock": ("(drop (call $clock_time_get (i32.const 0) (i64.const 1) (i32.const 0)))", "", "ready"),
    "asked the runtime": ("(drop (call $submit (i32.const 12) (i32.const 0) (i32.const 2)))", "", "ready"),
    "waits for a step": (
        "(drop (call $call (i32.const 1) (i32.const 0) (i32.const 2) (i32.const 0) (i32.const 0)))",
        "",
        "ready",
    ),
    "has written something": (
        "(i32.store (i32.const 4) (i32.const 5)) "
        "(drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))",
        "",
        "ready",
    ),
    "files open": (
        "(drop (call $path_open (i32.const 3) (i32.const 0) (i32.const 100) (i32.const 4) (i32.const 0) (i64.const 2)"
        " (i64.const 0) (i32.const 0) (i32.const 8))) (i32.store (i32.const 100) (i32.const 0))",
        "",
        "ready",
    ),
    "changes its tables": ("(table.set (i32.const 1) (ref.null func))", "", "ready"),
}


@pytest.mark.parametrize("reason", REST_REFUSED)
def test_a_boot_that_is_none_is_refused_with_the_reason(tmp_path: Path, reason: str) -> None:
    init, type, name = REST_REFUSED[reason]
    module = agent(init, type=type)
    if reason == "files open":
        module = wasi.pack(
            agent(
                init.replace(
                    "(drop (call $path", "(i32.store (i32.const 100) (i32.const 0x74786574)) (drop (call $path"
                )
            ),
            files={"/text": b"abc"},
        )
    with pytest.raises(ModuleError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        image(module, tmp_path, init=name)
    if reason == "looked at the clock":
        assert image(module, tmp_path, init=name, clock=True).module


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("references in globals", "(global (mut funcref) (ref.null func))"),
        ("drops segments", '(data $d "abc") (func (data.drop $d))'),
    ],
)
def test_state_that_cannot_be_read_is_refused(tmp_path: Path, reason: str, more: str) -> None:
    with pytest.raises(ModuleError, match=reason):
        image(agent(more=more), tmp_path, init="ready")


def test_passive_segments_stay_what_they_are(tmp_path: Path) -> None:
    module = wat(f"""(module {IMPORTS} (memory (export "memory") 1)
      (data (i32.const 10) "active") (data $later "passive") (data (i32.const 20) "more")
      (func (export "ready") (i32.store (i32.const 12) (i32.const 0)))
      (func (export "agentrt_run") (result i32)
        (memory.init $later (i32.const 40) (i32.const 1) (i32.const 3))
        (call $output (i32.const 10) (i32.const 40))))""")
    made = bench(image(module, tmp_path, init="ready").module)
    try:
        assert outcome(made).output == b"ac\0\0\0\0" + bytes(4) + b"more" + bytes(16) + b"ass" + bytes(7)
    finally:
        made.close()


# --- at the input ---------------------------------------------------------------

INPUTS = (b"", b"a", b"the input of a run", bytes(range(200, 232)) + b"not read any more")


@pytest.mark.parametrize("depth", [0, 1, 2, 7, 60])
def test_in_the_middle_of_a_call_it_goes_on_as_it_would_have(tmp_path: Path, depth: int) -> None:
    """Frames of direct and indirect calls, locals and globals of each kind, memory that was grown."""
    made = image(reader(depth), tmp_path)
    assert made.at == "input" and made.memory_bytes == 3 << 16
    plain, booted = bench(reader(depth)), bench(made.module)
    try:
        for data in INPUTS:
            one, two = outcome(plain, data), outcome(booted, data)
            assert (two.reason, two.stdout) == ("returned", one.stdout), two.message
            assert len(one.stdout) == 64
            assert two.fuel < one.fuel
            assert outcome(booted, data) == two
        assert len({outcome(booted, data).stdout for data in INPUTS}) == len(INPUTS)
        # with less fuel than arriving takes by itself, for that is nobody's
        assert outcome(booted, b"a", fuel=1).reason == "fuel"
        guest, exit = booted.run("input")
        assert exit is None
        assert booted.end(guest).fuel == 0
    finally:
        plain.close()
        booted.close()


INPUT_REFUSED = {
    "never reads standard input": '(module (func (export "_start")))',
    "ended before it was ready": f'(module {IMPORTS} (memory (export "memory") 1) (func (export "_start")))',
    "failed (trap) before": f'(module {IMPORTS} (memory (export "memory") 1) (func (export "_start") unreachable))',
    "exception handling": f"""(module {IMPORTS} (memory (export "memory") 1) (tag $t)
        (func (export "_start") (throw $t)))""",
}


@pytest.mark.parametrize("reason", INPUT_REFUSED)
def test_what_does_not_read_its_input_is_refused(tmp_path: Path, reason: str) -> None:
    with pytest.raises(ModuleError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        image(wat(INPUT_REFUSED[reason]), tmp_path)


def test_what_was_seen_before_the_input_is_refused(tmp_path: Path) -> None:
    dice = "(drop (call $random_get (i32.const 0) (i32.const 4)))"
    clock = "(drop (call $clock_time_get (i32.const 0) (i64.const 1) (i32.const 8)))"
    with pytest.raises(ModuleError, match="random numbers"):
        image(reader(1, boot=dice), tmp_path, clock=True)
    with pytest.raises(ModuleError, match="clock"):
        image(reader(1, before_read=clock), tmp_path)
    made = image(reader(1, before_read=clock), tmp_path, clock=True)
    with pytest.raises(ModuleError, match="image already"):
        image(made.module, tmp_path)


def test_an_image_is_kept_by_what_it_was_made_of(tmp_path: Path) -> None:
    first, again = image(reader(2), tmp_path), image(reader(2), tmp_path)
    assert again == first._replace(cached=True)
    assert not image(reader(3), tmp_path).cached
    assert image(wasi.pack(reader(2), args=["a"]), tmp_path).module != first.module


# --- what is packed with it -----------------------------------------------------


def test_files_may_be_others_arguments_may_not(tmp_path: Path) -> None:
    opens = """(i32.store (i32.const 400) (i32.const 0x74786574))
      (if (i32.eqz (call $path_open (i32.const 3) (i32.const 0) (i32.const 400) (i32.const 4) (i32.const 0)
          (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 404)))
        (then (i32.store (i32.const 64) (i32.const 410)) (i32.store (i32.const 68) (i32.const 9))
          (drop (call $fd_read (i32.load (i32.const 404)) (i32.const 64) (i32.const 1) (i32.const 72)))
          (drop (call $fd_write (i32.const 1) (i32.const 64) (i32.const 1) (i32.const 72)))))"""
    text = f"""(module {IMPORTS} (memory (export "memory") 1) (func (export "_start")
      (i32.store (i32.const 64) (i32.const 256)) (i32.store (i32.const 68) (i32.const 32))
      (drop (call $fd_read (i32.const 0) (i32.const 64) (i32.const 1) (i32.const 72))) {opens}))"""
    made = image(wasi.pack(wat(text), args=["name"], files={"/nothing": b""}), tmp_path)
    other = wasi.pack(made.module, args=["name"], files={"/text": b"of a run "})
    booted = bench(other)
    try:
        assert outcome(booted).stdout == b"of a run "
    finally:
        booted.close()
    for wrong in (wasi.pack(made.module, args=["other"]), wasi.pack(made.module, args=["name"], env={"A": "b"})):
        code, packed = wasi.unpack(wrong)
        with pytest.raises(ModuleError, match="other arguments"):
            begin_of(code, packed)
    without = bench(wasi.pack(made.module, args=["name"]))  # what was open is not there any more
    try:
        exit = outcome(without)
        assert exit.reason == "engine" and "other files" in exit.message
    finally:
        without.close()


# --- hostile images -------------------------------------------------------------


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[bytes, bytes, Bench]]:
    """An image's code, where its guests begin, and a core with the image."""
    made = image(reader(5), tmp_path_factory.mktemp("images"))
    begin = begin_of(made.module, None)
    assert begin is not None
    whole = bench(made.module)
    yield made.module, begin, whole
    whole.close()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4000), st.sampled_from([0, 1, 2, 127, 128, 255]) | st.integers(0, 255)), max_size=6
    ),
    st.none() | st.integers(0, 4000),
)
def test_a_hostile_beginning_ends_its_guests_at_worst(
    victim: tuple[bytes, bytes, Bench], changes: list[tuple[int, int]], cut: int | None
) -> None:
    _, begin, whole = victim
    changed = bytearray(begin)
    for at, value in changes:
        changed[at % len(changed)] = value
    try:
        whole.load(bytes(changed if cut is None else changed[:cut]))
    except ModuleError:
        return
    assert outcome(whole, b"abc", fuel=10**7).reason in ("returned", "engine", "trap", "fuel")
    whole.load(begin)
    assert outcome(whole, b"abc").reason == "returned"


def test_a_module_that_only_claims_to_rewind_harms_itself_alone(victim: tuple[bytes, bytes, Bench]) -> None:
    _, begin, _ = victim
    bodies = (
        "(loop $l (br $l))",
        "(drop (call $fd_read (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0)))",
        "nop",
        "unreachable",
        "(drop (call $random_get (i32.const 0) (i32.const 4))) (loop $l (br $l))",
    )
    for body in bodies:
        code = wat(f"""(module {IMPORTS} (memory (export "memory") 2)
          (global (export "agentrt:image-state") (mut i32) (i32.const 0))
          (global (export "agentrt:image-data") (mut i32) (i32.const 0))
          (func (export "_start") {body}))""")
        made = Bench(code, None, PARAMETERS, begin)
        try:
            exit = outcome(made)
            assert (exit.reason, exit.fuel) in (("engine", 0), ("returned", exit.fuel)), (body, exit)
            assert exit.reason == "engine" or "fd_read" in body
        finally:
            made.close()
    with pytest.raises(ModuleError, match="damaged"):
        Bench(reader(1), None, PARAMETERS, begin)


def test_a_guest_that_is_killed_on_its_way_is_charged_nothing(victim: tuple[bytes, bytes, Bench]) -> None:
    _, begin, _ = victim
    code = wat(f"""(module {IMPORTS} (memory (export "memory") 2)
      (global (export "agentrt:image-state") (mut i32) (i32.const 0))
      (global (export "agentrt:image-data") (mut i32) (i32.const 0))
      (func (export "_start") (loop $l (br $l))))""")
    made = Bench(code, None, PARAMETERS, begin)
    try:
        guest = made.submit(None, 10**6, b"")
        assert made.end(guest).fuel == 0
    finally:
        made.close()


# --- sections -------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=40)), max_size=12))
def test_stretches_are_all_that_is_not_zero(parts: list[tuple[int, bytes]]) -> None:
    memory = b"".join(bytes(gap) + data for gap, data in parts)
    found, again = list(stretches(memory)), bytearray(len(memory))
    for start, data in found:
        again[start : start + len(data)] = data
        assert data[0] and data[-1] and bytes(64) not in data
    assert again == memory
    assert all(two[0] - one[0] - len(one[1]) >= 64 for one, two in pairwise(found))


@given(st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1))
def test_numbers_are_written_as_the_engine_reads_them(unsigned: int, signed: int) -> None:
    module = wat(f'(module (global (export "g") (mut i64) (i64.const {signed})))')
    assert signed_leb(signed) in module
    assert leb(unsigned)[-1] < 128


def test_a_module_that_is_taken_apart_is_put_together_the_same() -> None:
    for module in (reader(2), agent()):
        assert Sections(module).write() == module


@settings(deadline=None)
@given(st.data())
def test_a_damaged_module_is_refused_or_read(data: st.DataObject) -> None:
    module = bytearray(reader(1))
    for _ in range(data.draw(st.integers(1, 4))):
        module[data.draw(st.integers(8, len(module) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(module)))
    for each in (bytes(module), bytes(module[:cut])):
        try:
            sections = Sections(each)
            sections.add_function(b"\x7f", b"\x41\0\x0b")
            sections.copy_functions([*sections.defined_functions[:1]], sections.add_flag("flag"))
            sections.set_memory(bytes(65536))
            sections.write()
        except ModuleError:
            continue


# --- the command, and real programs ---------------------------------------------


def test_the_command_makes_an_agent_that_runs_anywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By one process made, by another run."""
    plain, out = tmp_path / "plain.wasm", tmp_path / "image.wasm"
    plain.write_bytes(agent())
    config = tmp_path / "agentrt.toml"
    config.write_text(f'[wasm]\ncache_path = "{tmp_path / "cache"}"\n')
    code = run(("--config", str(config), "image", str(plain), "--init", "ready", "-o", str(out), "--json"))
    printed, said = capfd.readouterr()
    assert code.name == "ok", said
    report = json.loads(printed)
    assert (report["at"], report["cached"], report["bytes"]) == ("rest", False, out.stat().st_size)
    assert report["boot_fuel"] > 20
    code = run(("--config", str(config), "image", str(plain), "--init", "nothing", "-o", str(tmp_path / "no.wasm")))
    assert code.name == "input" and "does not export" in capfd.readouterr().err
    assert not (tmp_path / "no.wasm").exists()
    text = "import sys; from image_kit import bench, outcome; from pathlib import Path; made = bench(Path(sys.argv[1])"
    text += ".read_bytes()); sys.stdout.buffer.write(outcome(made).output or b''); made.close()"
    there = subprocess.run(
        [sys.executable, "-c", text, str(out)], capture_output=True, check=False, timeout=100,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    here = bench(out.read_bytes())
    try:
        assert there.stdout == outcome(here).output, there.stderr
    finally:
        here.close()


def test_a_captured_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModuleError, match="plain module"):
        image(captured("wasi_works", Preempt.ANYWHERE), tmp_path)


@pytest.mark.stress
def test_a_script_of_quickjs_goes_on_where_it_reads_its_input(tmp_path: Path) -> None:
    text = "const table = []; for (let i = 0; i < 100; i++) table.push(i * i);"
    text += "globalThis.table = table; const given = std.in.readAsString(); std.evalScript(given);"
    module = script("quickjs", text, files={"/nothing": b""})
    made = image(module, tmp_path, clock=True)
    plain, booted = bench(module), bench(made.module)
    try:
        dice = random.Random(seed := random.randrange(2**32))
        print("seed", seed)
        for _ in range(5):
            number = dice.randrange(100)
            data = (
                f"print(table[{number}], [3, 1, 2].sort().join(), JSON.stringify({{a: /b+/.exec('abbc')[0]}}))".encode()
            )
            one, two = outcome(plain, data), outcome(booted, data)
            assert one.stdout == two.stdout == b'%d 1,2,3 {"a":"bb"}\n' % number**2
            assert two.fuel < one.fuel - made.boot_fuel // 2
        assert (
            outcome(booted, b"throw new Error('of a run')").stderr
            == outcome(plain, b"throw new Error('of a run')").stderr
        )
    finally:
        plain.close()
        booted.close()


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_a_script_of_cpython_goes_on_where_it_reads_its_input(tmp_path: Path) -> None:
    text = "import json, re, sys\nexec(sys.stdin.read())"
    module = wasi.pack(script("cpython", text), args=["python", "-c", text], env={"PYTHONHASHSEED": "0"})
    with pytest.raises(ModuleError, match="random numbers"):
        image(script("cpython", text), tmp_path, clock=True)  # its hashes
    made = image(module, tmp_path, clock=True)
    plain, booted = bench(module), bench(made.module)
    try:
        for data in (
            b"print(json.dumps({'a': re.findall('b+', 'abbcb')}))",
            b"import decimal; print(decimal.Decimal(1) / 7)",
        ):
            one, two = outcome(plain, data), outcome(booted, data)
            assert one.stdout == two.stdout and one.stdout
            assert two.fuel < one.fuel / 2
    finally:
        plain.close()
        booted.close()
