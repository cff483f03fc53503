"""Kept modules: whole or not there, gone when no run needs them."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Ctx, Node, World, run
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt.engine.modulekeep import ModuleKeep, needed_versions
from agentrt.errors import StoreError
from agentrt.stores.memory import MemoryDisk
from agentrt.stores.modules import FolderModules, KeptModule, MemoryModules, Modules, modules_beside

CODE = [b"\0asm one", b"\0asm two", b""]
NAMES = [hashlib.sha256(code).hexdigest() for code in CODE]


@pytest.fixture(params=["folder", "memory"])
def modules(request: pytest.FixtureRequest, tmp_path: Path) -> Modules:
    if request.param == "memory":
        return MemoryModules()
    return FolderModules(tmp_path / "store" / "modules")


def test_what_is_kept_is_found_again(modules: Modules) -> None:
    assert modules.versions() == [] and modules.get(NAMES[0]) is None
    for name, code in zip(NAMES, CODE, strict=True):
        modules.put(name, KeptModule("wasm", code))
        modules.put(name, KeptModule("wasm", code))
        assert modules.get(name) == KeptModule("wasm", code)
    assert modules.versions() == sorted(NAMES)


def test_a_folder_is_private_and_survives_its_node(tmp_path: Path) -> None:
    FolderModules(tmp_path / "modules").put(NAMES[0], KeptModule("wasm", CODE[0]))
    assert (tmp_path / "modules").stat().st_mode & 0o077 == 0
    assert FolderModules(tmp_path / "modules").get(NAMES[0]) == KeptModule("wasm", CODE[0])
    assert isinstance(modules_beside("lmdb", str(tmp_path)), FolderModules)
    assert isinstance(modules_beside("memory", str(tmp_path)), MemoryModules)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_not_believed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("m")
    modules = FolderModules(folder)
    modules.put(NAMES[0], KeptModule("wasm", CODE[0]))
    path = folder / NAMES[0]
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    found = modules.get(NAMES[0])
    assert found is None or found.module == CODE[0]  # only the backend's name is not covered by the version
    modules.put(NAMES[0], KeptModule("wasm", CODE[0]))
    assert modules.get(NAMES[0]) == KeptModule("wasm", CODE[0])


def test_a_name_that_is_no_version_never_becomes_a_path(tmp_path: Path) -> None:
    modules = FolderModules(tmp_path / "modules")
    for name in ("../x", "", "a" * 63, "A" * 64, "a" * 64 + "/x"):
        with pytest.raises(StoreError):
            modules.put(name, KeptModule("wasm", b""))
        with pytest.raises(StoreError):
            modules.get(name)


def test_the_sweep_leaves_what_is_needed_or_fresh_and_takes_what_writers_left(tmp_path: Path) -> None:
    now = [10_000.0]
    modules = FolderModules(tmp_path / "modules", lambda: now[0])
    for name, code in zip(NAMES, CODE, strict=True):
        modules.put(name, KeptModule("wasm", code))
    left = tmp_path / "modules" / f".{NAMES[0]}.0123"
    left.write_bytes(b"half")
    os.utime(left, (now[0], now[0]))
    assert modules.sweep({NAMES[0]}) == []
    now[0] += 4000
    modules.put(NAMES[1], KeptModule("wasm", CODE[1]))  # registered again, a moment ago
    assert modules.sweep({NAMES[0]}) == [NAMES[2]]
    assert modules.versions() == sorted(NAMES[:2]) and not left.exists()


def test_modules_go_when_the_last_run_that_needs_them_has_ended() -> None:
    def asks(ctx: Ctx, input: Any) -> Any:
        yield ctx.wait(ctx.op(4, topic="t"))

    async def main() -> None:
        node = Node(MemoryDisk(), World())
        modules = MemoryModules()
        keep = ModuleKeep(node.loop, node.engine, modules)
        for name, code in zip(NAMES, CODE, strict=True):
            modules.put(name, KeptModule("wasm", code))
        node.register("asks", asks, version=NAMES[0])
        run_id = await node.submit("asks")
        node.register("asks", asks, version=NAMES[1])

        async def swept(expected: list[str]) -> None:
            keep.walk()
            await node.until(lambda: modules.versions() == sorted(expected))

        await swept(NAMES[:2])
        assert needed_versions(node.store) == {NAMES[0]}  # type: ignore[arg-type]
        await node.send(topic="t")
        await node.result(run_id)
        await swept(NAMES[1:2])
        keep.close()
        await node.close()

    run(main())
