"""`agentrt frame`: what it says of frames, sound and not."""

import hashlib
import json
from pathlib import Path

import pytest
from capture_kit import Driver, artifact, made, work

from agentrt.backends.wasm import image_digest
from agentrt.capture.instrument import Preempt
from agentrt.cli.main import run


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str, str]:
    """How it ended, stdout, stderr."""
    code = run(arguments)
    out, err = capfd.readouterr()
    return code.name, out, err


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two frames of a guest, one call apart, and its module."""
    folder = tmp_path_factory.mktemp("frames")
    module = made("works", Preempt.SYSCALLS)
    (folder / "module.wasm").write_bytes(module)
    driver = Driver(artifact("works", Preempt.SYSCALLS))
    image = driver.module.image(image_digest(hashlib.sha256(module).hexdigest()))
    driver.start(work("json", 2, 61))
    for name in ("one", "two"):
        stop = driver.next()
        frame = driver.capture(keep=True, image=image, module=hashlib.sha256(module).digest())
        (folder / name).write_bytes(frame)
        driver.answer(stop)
    driver.close()
    return folder / "one", folder / "two", folder / "module.wasm"


def test_show_says_whose_state_it_is(capfd: pytest.CaptureFixture[str], frames: tuple[Path, Path, Path]) -> None:
    one, _, _ = frames
    code, out, _ = call(capfd, "frame", "show", str(one), "--json")
    assert code == "ok"
    told = json.loads(out)
    assert (told["segment"], told["seq"], told["id"], told["base_id"]) == (3, 0, b"1".hex() * 16, None)
    assert told["fuel"] > 0
    assert sum(told["pages"].values()) * 4096 == told["memory_bytes"]
    assert told["sections"]["stack"] > 0
    assert told["globals"][0]["kind"] == "i32" and 0 < told["globals"][0]["value"] <= 16384  # the stack pointer
    code, out, _ = call(capfd, "frame", "show", str(one))
    assert code == "ok"
    assert "wasmtime" not in out and told["id"] in out and "image" in out


def test_show_with_the_module_says_what_its_guest_was_doing(
    capfd: pytest.CaptureFixture[str], frames: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    one, _, module = frames
    code, out, _ = call(capfd, "frame", "show", str(one), "--module", str(module), "--json")
    assert code == "ok"
    told = json.loads(out)
    assert len(told["calls"]) > 2 and all(each["function"] and each["offset"] > 0 for each in told["calls"])
    assert "__stack_pointer" in [each["name"] for each in told["globals"]]
    memory = told["memory"]
    assert sum(each["bytes"] for each in memory) == told["memory_bytes"]
    assert [each["from"] for each in memory] == [sum(e["bytes"] for e in memory[:n]) for n in range(len(memory))]
    code, out, _ = call(capfd, "frame", "show", str(one), "--module", str(module))
    assert code == "ok" and f"in {told['calls'][-1]['function']} at" in out and "memory 0x00000000" in out
    other = tmp_path / "other.wasm"
    other.write_bytes(module.read_bytes() + b"\0\1\0")  # an empty section more
    code, _, err = call(capfd, "frame", "show", str(one), "--module", str(other))
    assert code == "input" and "not of this one" in err


def test_verify_finds_damage(
    capfd: pytest.CaptureFixture[str], frames: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    one, two, module = frames
    code, out, _ = call(capfd, "frame", "verify", str(one), str(two), "--module", str(module), "--json")
    assert (code, json.loads(out)) == ("ok", {"checked": 2, "damaged": {}})
    code, _, err = call(capfd, "frame", "verify", str(one))
    assert code == "input" and "--module" in err
    data = bytearray(one.read_bytes())
    data[len(data) // 2] ^= 1
    bad, cut = tmp_path / "bad", tmp_path / "cut"
    bad.write_bytes(data)
    cut.write_bytes(one.read_bytes()[:-3])
    code, out, _ = call(capfd, "frame", "verify", str(bad), str(two), str(cut), "--module", str(module), "--json")
    assert code == "failed"
    assert set(json.loads(out)["damaged"]) == {str(bad), str(cut)}
    code, _, err = call(capfd, "frame", "show", str(cut))
    assert code == "input" and "bytes are there" in err


def test_diff_says_in_what_they_differ(capfd: pytest.CaptureFixture[str], frames: tuple[Path, Path, Path]) -> None:
    one, two, module = frames
    code, out, _ = call(capfd, "frame", "diff", str(one), str(two), "--module", str(module), "--json")
    assert code == "ok"
    told = json.loads(out)
    assert {"seq", "fuel", "clock_ns"} <= set(told["fields"])
    assert told["fields"]["seq"] == [0, 1]
    assert told["memory"] and all(each["bytes"] % 4096 == 0 for each in told["memory"])
    code, out, _ = call(capfd, "frame", "diff", str(one), str(one), "--module", str(module), "--json")
    assert json.loads(out) == {"fields": {}, "memory": []}
