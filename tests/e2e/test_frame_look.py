"""Looking at runs that are suspended: what is told of them by a node, to whom, and that nothing becomes of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wasmtime
from frames_kit import counters, files, frames_named, go, in_memory, loop, parked, runtime, until
from serve_kit import Serving, agentrt

from agentrt import _core
from agentrt.capture.instrument import Preempt, instrument
from agentrt.client import Client
from agentrt.engine import framelook
from agentrt.errors import ForbiddenError, FrameError, InputError, UnknownRunError

GUESTS = Path(__file__).parents[1] / "guests"
PLAIN = (GUESTS / "works.wasm").read_bytes()
WORK: dict[str, Any] = {"work": "sort", "size": 60, "every": 400, "wait": 1}
NOBODY = "run_01ARZ3NDEKTSV4RRFFQ69G5FAV"
_EVENT = '{"topic":null,"key":"go"}'
_EVENT_DATA = _EVENT.replace('"', '\\"')
#: Has 512 KiB of memory of which it changes a page between waits.
CHANGES = f"""(module
  (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 10)
  (data (i32.const 16) "{_EVENT_DATA}")
  (func (export "agentrt_run") (result i32) (local $round i32)
    (memory.fill (i32.const 65536) (i32.const 7) (i32.const 524288))
    (loop $again
      (local.set $round (i32.add (local.get $round) (i32.const 1)))
      (i32.store (i32.const 131072) (local.get $round))
      (drop (call $call (i32.const 4) (i32.const 16) (i32.const {len(_EVENT)}) (i32.const 0) (i32.const 0)))
      (br $again))
    (i32.const 0)))"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "works.wasm").write_bytes(instrument(PLAIN, Preempt.SYSCALLS))
    (folder / "plain.wasm").write_bytes(PLAIN)
    load = ", ".join(f'"{folder / name}"' for name in ("works.wasm", "plain.wasm"))
    with Serving(folder, f"[node]\nload = [{load}]\n[limits]\nhot_ms = 600_000\n") as serving:
        yield serving


def waiting(client: Client, agent: str, seen: int = 0, run_id: str = "") -> str:
    """A run of it, that waits for an event after more than ``seen`` records."""
    run_id = run_id or client.submit(agent, WORK).run_id
    while (now := client.run(run_id)).state not in ("SUCCEEDED", "FAILED"):
        if now.version > seen and any(step.op == "event.wait" for step in now.steps):
            break
    return run_id


def test_a_run_that_is_looked_at_goes_on_as_if_nobody_had_looked(node: Serving) -> None:
    with node.client() as client:
        alone, looked_at = waiting(client, "works"), waiting(client, "works")
        module = str(Path(node.stderr).with_name("works.wasm"))
        looks = 0
        for run_id in (alone, looked_at):
            while (now := client.run(run_id)).state not in ("SUCCEEDED", "FAILED"):
                if run_id == looked_at:
                    code, out, err = agentrt(node, "frame", "show", "--run", run_id, "--module", module, "--json")
                    assert code == 0, err
                    told = json.loads(out)
                    assert told["seq"] == now.version and told["fuel"] > 0 and told["calls"]
                    assert "__stack_pointer" in [each["name"] for each in told["globals"]]
                    assert sum(each["bytes"] for each in told["memory"]) == told["memory_bytes"]
                    assert client.run(run_id).version == now.version
                    looks += 1
                client.send(None, run_id=run_id, key="go")
                waiting(client, "works", now.version, run_id)
        ends = [client.run(run_id) for run_id in (alone, looked_at)]
        assert looks > 1
        assert ends[0].state == "SUCCEEDED"
        assert [bytes(end.result) for end in ends] == [bytes(ends[0].result)] * 2  # type: ignore[arg-type]
        assert ends[0].cost == ends[1].cost or ends[0].cost.fuel == ends[1].cost.fuel  # type: ignore[union-attr]


def test_who_may_not_look_is_told_nothing(node: Serving) -> None:
    with node.client() as admin:
        run_id = waiting(admin, "works")
        reader = admin.make_key("default", ["runs:read", "runs:write", "node:read"]).secret
        other = admin.make_key("other", ["admin"]).secret
        with Client(node.url, key=str(reader)) as client, pytest.raises(ForbiddenError):
            client.frame(run_id)
        with Client(node.url, key=str(other)) as client, pytest.raises(UnknownRunError):
            client.frame(run_id)


def test_what_cannot_be_shown_is_said(node: Serving) -> None:
    with node.client() as client:
        with pytest.raises(UnknownRunError):
            client.frame(NOBODY)
        plain = waiting(client, "plain")
        with pytest.raises(FrameError, match="no frame") as raised:
            client.frame(plain)
        assert raised.value.hint is not None and "agentrt build" in raised.value.hint
        for odd in ("../../data.mdb", "", "0" * 31):
            with pytest.raises(InputError, match="no frame's id"):
                client.frame(plain, odd)
        with pytest.raises(FrameError, match="no frame"):
            client.frame(plain, "0" * 32)
    code, _, err = agentrt(node, "frame", "show")
    assert code == 2 and "--run" in err


def test_a_run_that_has_left_memory_shows_the_frame_that_it_left_as(tmp_path: Path) -> None:
    async def main() -> None:
        async with runtime(tmp_path) as made:
            await made.register("changes", instrument(bytes(wasmtime.wat2wasm(CHANGES)), Preempt.SYSCALLS))
            run = await made.submit("changes")
            await parked(made, run.run_id)
            await go(made, run)
            await parked(made, run.run_id, 1)
            await until(lambda: len(files(tmp_path, run.run_id)) == 2)
            named = (await frames_named(made, run.run_id))[-1].frame
            frame = _core.Frame(await made.frame_now(run.run_id), memory_bytes_max=1 << 30)
            assert frame.id.hex() == named and frame.base_id is not None
            base = _core.Frame(await made.frame_now(run.run_id, frame.base_id.hex()), memory_bytes_max=1 << 30)
            assert base.is_base_of(frame)
            assert not in_memory(made, run.run_id) and counters(made).taken == 2
            await run.cancel()

    loop(main)


def test_a_state_that_is_too_large_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framelook, "LOOK_BYTES_MAX", 1000)

    async def main() -> None:
        for hot_ms in (0, 600_000):
            async with runtime(tmp_path / str(hot_ms), **{"limits.hot_ms": hot_ms}) as made:
                await made.register("changes", instrument(bytes(wasmtime.wat2wasm(CHANGES)), Preempt.SYSCALLS))
                run = await made.submit("changes")
                if hot_ms:
                    machine = made._engine._runs[run.run_id]
                    await until(lambda machine=machine: machine.suspended)  # type: ignore[misc]
                else:
                    await parked(made, run.run_id)
                with pytest.raises(FrameError, match="may be looked at"):
                    await made.frame_now(run.run_id)
                await run.cancel()

    loop(main)
