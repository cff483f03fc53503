"""Images as agents of a runtime: runs that leave memory come back by replay from where the image begins."""

import hashlib
import sys
from pathlib import Path

import pytest
import wasmtime
from frames_kit import in_memory, loop, runtime, until

from agentrt import RunState
from agentrt.backends import wasi
from agentrt.capture.image import make_image
from agentrt.config import load_config
from agentrt.errors import ModuleError
from agentrt.records import RunAccepted
from agentrt.sizing import core_parameters

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from image_kit import IMPORTS

# Boots for a while, reads its input, waits for an event, and says what it has read, and a number of the boot's.
PROGRAM = f"""(module {IMPORTS} (memory (export "memory") 1)
  (data (i32.const 600) "{{\\"key\\":\\"go\\"}}")
  (func $stir (param $left i32)
    (loop $l (i32.store (i32.const 500) (i32.add (i32.mul (i32.load (i32.const 500)) (i32.const 31)) (local.get $left)))
      (br_if $l (local.tee $left (i32.sub (local.get $left) (i32.const 1))))))
  (func (export "_start") (local $got i32)
    (call $stir (i32.const 5000))
    (i32.store (i32.const 64) (i32.const 256)) (i32.store (i32.const 68) (i32.const 32))
    (drop (call $fd_read (i32.const 0) (i32.const 64) (i32.const 1) (i32.const 72)))
    (local.set $got (i32.load (i32.const 72)))
    (drop (call $call (i32.const 4) (i32.const 600) (i32.const 12) (i32.const 700) (i32.const 100)))
    (i32.store8 (i32.const 255) (i32.const 0x5b))
    (i32.store8 (i32.add (i32.const 256) (local.get $got)) (i32.const 0x2c))
    (i32.store8 (i32.add (i32.const 257) (local.get $got))
      (i32.add (i32.const 0x31) (i32.rem_u (i32.load (i32.const 500)) (i32.const 9))))
    (i32.store8 (i32.add (i32.const 258) (local.get $got)) (i32.const 0x5d))
    (i32.store (i32.const 64) (i32.const 255)) (i32.store (i32.const 68) (i32.add (local.get $got) (i32.const 4)))
    (drop (call $fd_write (i32.const 1) (i32.const 64) (i32.const 1) (i32.const 72)))))"""


def test_runs_of_an_image_are_those_of_the_program_through_waits_and_restarts(tmp_path: Path) -> None:
    plain = bytes(wasmtime.wat2wasm(PROGRAM))
    parameters = core_parameters(load_config(env={}))
    image = make_image(plain, parameters, cache_folder=tmp_path / "images", cache_bytes_max=1 << 30).module
    ids: dict[str, str] = {}
    results: dict[str, object] = {}

    async def first() -> None:
        async with runtime(tmp_path) as made:
            for name, module in (("plain", plain), ("image", image)):
                await made.register(name, module)
                ids[name] = (await made.submit(name, "of a run")).run_id
            await until(lambda: not any(in_memory(made, run_id) for run_id in ids.values()))

    async def second() -> None:
        async with runtime(tmp_path) as made:
            await made.register("plain", plain)
            await made.register("image", image)
            for name, run_id in ids.items():
                await made.send(run_id=run_id, key="go")
                ended = await made.run(run_id).wait()
                assert ended.state is RunState.SUCCEEDED, ended.error
                results[name] = await made.run(run_id).result()
            accepted = (await made.read_store(lambda store: store.read_records(ids["image"])))[0]
            assert isinstance(accepted, RunAccepted)
            assert accepted.version == hashlib.sha256(image).hexdigest()

    loop(first)
    loop(second)
    assert results["image"] == results["plain"]
    assert isinstance(results["plain"], list) and results["plain"][0] == "of a run"


def test_an_image_with_other_arguments_is_no_agent(tmp_path: Path) -> None:
    plain = wasi.pack(bytes(wasmtime.wat2wasm(PROGRAM)), args=["one"])
    parameters = core_parameters(load_config(env={}))
    image = make_image(plain, parameters, cache_folder=tmp_path / "images", cache_bytes_max=1 << 30).module

    async def main() -> None:
        async with runtime(tmp_path) as made:
            with pytest.raises(ModuleError, match="other arguments"):
                await made.register("image", wasi.pack(image, args=["two"]))
            await made.register("image", image)

    loop(main)
