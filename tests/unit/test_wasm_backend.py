"""The wasm backend over the real core: modules in, guests' events out, and what bad modules and guests cost."""

import asyncio
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import uvloop
from wasm_bench import EXAMPLES, MIB, Bench, Run, bench, settings

from agentrt import _core
from agentrt.backends.cache import ArtifactCache
from agentrt.backends.compiler import Compiler
from agentrt.backends.tenants import TenantIndex
from agentrt.backends.wasm import WasmBackend
from agentrt.errors import (
    AgentrtError,
    ConfigError,
    InputError,
    ModuleError,
    ModuleLimitError,
    NoEntryError,
    QueueFullError,
    UnknownImportError,
)
from agentrt.sizing import engine_library


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.artifact"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the module, so that the guests are compiled once."""
    return tmp_path_factory.mktemp("cache")


# --- guests that work ----------------------------------------------------------


def test_a_guest_runs_and_says_what_it_cost(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        before = time.monotonic_ns()
        exit = await bench.run("hog", {"rounds": 1_000_000})
        assert exit.reason == "returned" and exit.code == 0
        assert exit.output is not None and msgspec.json.decode(exit.output)["rounds"] == 1_000_000
        assert exit.fuel > 1_000_000 and exit.slot_ns > 0
        assert before <= exit.submitted_ns <= exit.first_ns <= time.monotonic_ns()
        again = await bench.run("hog", {"rounds": 1_000_000})
        assert (again.fuel, again.output) == (exit.fuel, exit.output)

    bench(settings(cache), test)


def test_the_programs_version_is_the_modules_digest(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("steps")
        assert program.version == hashlib.sha256((EXAMPLES / "steps.wasm").read_bytes()).hexdigest()
        assert program.pins == {"engine": f"wasmtime {_core.engine_version()}", "abi": "1"}

    bench(settings(cache), test)


def test_many_guests_of_many_tenants_end_though_more_is_ready_than_one_turn_takes(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("steps")
        runs = [
            bench.begin(program, {"order": f"o{i}", "steps": 3}, {"ledger_add": lambda args: True}, tenant=f"t{i % 7}")
            for i in range(900)
        ]
        for i, run in enumerate(runs):
            exit = await asyncio.wait_for(run.ended, 60)
            assert exit.output == b'{"order":"o%d","steps":3}' % i
            assert run.calls == [("ledger_add", {"order": f"o{i}", "place": place}) for place in (1, 2, 3)]
        assert bench.backend.statistics()["tenants"] == 7

    bench(settings(cache), test)


def test_a_handler_that_raises_is_reported_and_harms_no_other_guest(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        reported: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        program = await bench.prepare("steps")
        runs = [bench.begin(program, {"order": "o"}, {"ledger_add": lambda args: 1}) for _ in range(20)]

        def bad(*_: object) -> None:
            raise RuntimeError("in on_syscalls")

        runs[3].on_syscalls = bad  # type: ignore[method-assign]
        for run in (*runs[:3], *runs[4:]):
            assert (await asyncio.wait_for(run.ended, 60)).reason == "returned"
        runs[3].guest.kill()
        assert (await asyncio.wait_for(runs[3].ended, 60)).reason == "killed"
        assert set(reported) == {"in on_syscalls"}

    bench(settings(cache), test)


def test_a_full_queue_refuses_and_admitted_work_is_never_refused(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("spin")
        runs = [bench.begin(program) for _ in range(4)]
        with pytest.raises(QueueFullError):
            bench.begin(program, tenant="other")
        assert bench.backend.statistics()["tenants"] <= 2
        runs.append(bench.begin(program, admitted=True))
        for run in runs:
            run.guest.kill()
            assert (await asyncio.wait_for(run.ended, 60)).reason == "killed"
        assert (await bench.run("return_seven")).code == 7

    bench(settings(cache, scheduler__queue_items_max=4), test)


# --- guests that do wrong ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason", "text"),
    [
        ("trap", "trap", "unreachable"),
        ("out_of_bounds", "trap", "out of bounds"),
        ("deep", "trap", "stack"),
        ("start_trap", "trap", "unreachable"),
        ("return_seven", "failed", ""),
    ],
)
def test_a_guest_that_fails_ends_alone_with_the_reason(cache: Path, name: str, reason: str, text: str) -> None:
    async def test(bench: Bench) -> None:
        spinning = bench.begin(await bench.prepare("spin"), tier=3)
        exit = await bench.run(name)
        assert exit.reason == reason and text in exit.message
        if name == "trap":
            assert "inner" in exit.message  # the backtrace
        if name == "return_seven":
            assert (exit.code, exit.output) == (7, b'"seven"')
        assert (await bench.run("hog", {"rounds": 10})).reason == "returned"
        assert not spinning.ended.done()
        spinning.guest.kill()
        await asyncio.wait_for(spinning.ended, 60)

    bench(settings(cache), test)


@pytest.mark.parametrize(("name", "fuel"), [("spin", 3 * 10**8), ("start_spin", 3 * 10**8), ("fill", 2 * 10**9)])
def test_endless_work_ends_with_its_fuel_and_urgent_work_passes_it(cache: Path, name: str, fuel: int) -> None:
    async def test(bench: Bench) -> None:
        program, urgent = await bench.prepare(name), await bench.prepare("qualifier")
        runs = [bench.begin(program, tier=3, fuel=fuel, tenant=f"t{i}") for i in range(4)]
        delays = []
        for _ in range(20):
            run = bench.begin(urgent, {"order": "o", "company": "Hooli"}, {"ledger_add": lambda args: 1}, tier=0)
            exit = await asyncio.wait_for(run.ended, 60)
            assert exit.reason == "returned"
            delays.append(exit.first_ns - exit.submitted_ns)
        # Loose, since other processes share the cores: an uninterruptible fill of 64 MiB alone takes 38 ms.
        assert sorted(delays)[len(delays) // 2] < 10_000_000
        for run in runs:
            exit = await asyncio.wait_for(run.ended, 60)
            if name == "fill":
                assert exit.reason == "returned"
            else:
                assert exit.reason == "fuel" and exit.fuel <= fuel

    bench(settings(cache), test)


def test_memory_grows_up_to_the_limit_and_no_further(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        exit = await bench.run("grow")
        assert exit.reason == "returned" and exit.output == b"127"  # MiB; a page was there before

    bench(settings(cache), test)


def test_wrong_arguments_get_a_status_each(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        exit = await bench.run("abuse", {})
        assert exit.reason == "returned", f"abuse.c:{exit.code} {exit.message}"
        assert exit.output == b'"well"'
        assert (await bench.run("no_memory")).code == 0
        assert (await bench.run("start_call")).code == 0

    bench(settings(cache), test)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("no_entry", NoEntryError, "agentrt_run"),
        ("entry_type", NoEntryError, "agentrt_run"),
        ("entry_v128", NoEntryError, "agentrt_run"),  # once aborted the process
        ("entry_kind", NoEntryError, "agentrt_run"),
        ("unknown_import", UnknownImportError, "launch_missiles"),
        ("wasi_import", UnknownImportError, "fd_frobnicate"),
        ("import_type", UnknownImportError, "call"),
        ("import_memory", UnknownImportError, "memory"),
        ("big_memory", ModuleLimitError, "memory"),
        ("big_table", ModuleLimitError, "table"),
        ("memory64", ModuleError, "64"),
        ("two_memories", ModuleError, "memor"),
        ("shared_memory", ModuleError, "shared"),
        ("invalid", ModuleError, ""),
    ],
)
def test_a_module_that_cannot_run_is_refused_with_its_kind(
    cache: Path, name: str, error: type[ModuleError], text: str
) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ModuleError) as caught:
            await bench.prepare(name)
        assert type(caught.value) is error and text in str(caught.value)
        kept = entries(cache)
        with pytest.raises(error):  # not remembered as good
            await bench.prepare(name)
        assert entries(cache) == kept

    bench(settings(cache), test)


@pytest.mark.parametrize(
    "module",
    [b"", b"\0as", b"\0asm", b"\0asm\2\0\0\0", b"\0asm\1\0\0\0\xff", b"\x7fELF" + bytes(60), b"(module)", b"\0asm" * 9],
)
def test_what_is_no_module_is_refused(cache: Path, module: bytes) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ModuleError):
            await bench.backend.prepare(module)

    bench(settings(cache), test)


def test_every_cut_and_many_flips_of_a_module_are_refused_or_run(cache: Path) -> None:
    """The compiler is only ever given hostile bytes in a child, so this is about the errors being typed."""
    whole = (EXAMPLES / "qualifier.wasm").read_bytes()

    async def test(bench: Bench) -> None:
        for cut in range(8, len(whole), len(whole) // 12):
            with pytest.raises(ModuleError):
                await bench.backend.prepare(whole[:cut])
        for place in range(9, len(whole), len(whole) // 12):
            try:
                await bench.backend.prepare(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            except ModuleError:
                continue

    bench(settings(cache), test)


def test_a_module_above_the_size_limit_is_refused_before_it_is_read(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ModuleLimitError, match="the limit is 1048576"):
            await bench.backend.prepare(b"\0asm\1\0\0\0" + bytes(MIB))

    bench(settings(cache, wasm__module_bytes_max=MIB), test)


def leb(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def section(number: int, body: bytes) -> bytes:
    return bytes([number]) + leb(len(body)) + body


def module_with_body(code: bytes, locals_: bytes = b"\0") -> bytes:
    """A module with one function, agentrt_run, of the given code."""
    function = locals_ + code + b"\x0b"
    return (
        b"\0asm\1\0\0\0"
        + section(1, b"\1\x60\0\1\x7f")
        + section(3, b"\1\0")
        + section(7, b"\1\x0bagentrt_run\0\0")
        + section(10, b"\1" + leb(len(function)) + function)
    )


def bomb() -> bytes:
    """Many live values across many blocks: time and memory of the compiler grow faster than the module."""
    locals_ = b"\1" + leb(1000) + b"\x7e"
    block = b"".join(
        b"\x20" + leb(i) + b"\x20" + leb((i * 7 + 1) % 1000) + b"\x7c\x22" + leb(i) + b"\x1a" for i in range(1000)
    )
    return module_with_body((b"\x03\x40" + block + b"\x20\0\xa7\x0d\0\x0b") * 400 + b"\x41\0", locals_)


@pytest.mark.stress
def test_a_module_built_to_exhaust_the_compiler_ends_with_its_child(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        slow = asyncio.ensure_future(bench.backend.prepare(bomb()))
        runs = 0
        while not slow.done():  # all else running
            assert (await bench.run("qualifier", {"order": "o", "company": "c"}, {"ledger_add": lambda _: 1})).code == 0
            runs += 1
            await asyncio.sleep(0.01)
        assert runs > 3
        with pytest.raises(ModuleLimitError, match="compiling took more than"):
            await slow
        assert (await bench.prepare("parallel")).version

    bench(settings(cache, wasm__compile_timeout_ms=1000), test)


def test_the_compile_childs_limits_are_told_apart(cache: Path) -> None:
    limits = {
        "guests_max": 1,
        "stacks_max": 1,
        "memory_bytes_max": MIB,
        "wasm_stack_bytes": 65536,
        "table_elements_max": 100,
        "request_bytes_max": 100,
        "result_bytes_max": 100,
        "inflight_max": 1,
    }

    async def run() -> None:
        starved = Compiler(engine_library(), limits, timeout_ms=60_000, memory_bytes=200 * MIB)
        with pytest.raises(ModuleLimitError, match="memory") as caught:
            await starved.compile(bomb())
        assert caught.value.limit == "wasm.compile_memory_bytes_max"
        hurried = Compiler(engine_library(), limits, timeout_ms=100, memory_bytes=2 << 30)
        with pytest.raises(ModuleLimitError, match=r"0\.2 s") as caught:
            await hurried.compile(bomb())
        assert caught.value.limit == "wasm.compile_timeout_ms"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


# --- preparing and the cache ---------------------------------------------------


def test_closing_ends_a_compilation_at_work(tmp_path: Path) -> None:
    async def run() -> None:
        backend = WasmBackend(settings(tmp_path))
        await backend.open()
        slow = asyncio.ensure_future(backend.prepare(bomb()))
        while backend._compiler._child is None:
            await asyncio.sleep(0.005)
        pid = backend._compiler._child.pid
        await backend.close()
        with pytest.raises((AgentrtError, asyncio.CancelledError)):
            await slow
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_one_module_asked_for_many_times_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        compiled = []
        compile = bench.backend._compiler.compile
        bench.backend._compiler.compile = lambda wasm: compiled.append(1) or compile(wasm)  # type: ignore
        tasks = [asyncio.ensure_future(bench.prepare("hog")) for _ in range(5)]
        while not compiled:
            await asyncio.sleep(0)
        tasks[0].cancel()
        programs = await asyncio.gather(*tasks[1:])
        assert len({id(program.module) for program in programs}) == 1
        assert tasks[0].cancelled() and compiled == [1]
        await bench.prepare("hog")
        assert compiled == [1]  # from the cache

    bench(settings(tmp_path), test)


def test_the_loop_goes_on_while_a_module_is_compiled(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        used = time.thread_time()
        task = asyncio.ensure_future(bench.prepare("indexer"))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        await task
        assert turns > 10 and time.thread_time() - used < 0.5

    bench(settings(tmp_path), test)


def test_the_cache_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    umask = os.umask(0)
    try:
        ArtifactCache(folder, b"core", MIB).put("digest", b"code")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    folder.chmod(0o755)
    ArtifactCache(folder, b"core", MIB)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_entry_that_is_not_authentic_is_ignored_and_written_anew(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, b"core", MIB)
    cache.put("digest", b"code")
    (path,) = entries(tmp_path)
    good = path.read_bytes()
    bad = [b"", good[:10], good[:32], good[:-1], good + b"x", bytes(32) + b"code", good[:40] + b"\xff" + good[41:]]
    bad += [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    for content in bad:
        path.write_bytes(content)
        assert cache.get("digest") is None
    cache.put("digest", b"code")
    assert cache.get("digest") == b"code"


def test_an_entry_under_another_name_is_not_authentic(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, b"core", MIB)
    cache.put("one", b"code of one")
    (one,) = entries(tmp_path)
    cache.put("two", b"code of two")
    (two,) = set(entries(tmp_path)) - {one}
    two.write_bytes(one.read_bytes())
    assert cache.get("two") is None and cache.get("one") == b"code of one"


def test_another_engine_or_key_finds_nothing(tmp_path: Path) -> None:
    ArtifactCache(tmp_path, b"core", MIB).put("digest", b"code")
    assert ArtifactCache(tmp_path, b"core", MIB).get("digest") == b"code"
    assert ArtifactCache(tmp_path, b"other", MIB).get("digest") is None
    (tmp_path / "key").unlink()
    assert ArtifactCache(tmp_path, b"core", MIB).get("digest") is None


@pytest.mark.parametrize("spoil", [lambda key: key.chmod(0o644), lambda key: key.write_bytes(b"short")])
def test_a_key_that_others_may_know_is_replaced(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    ArtifactCache(tmp_path, b"core", MIB).put("digest", b"code")
    key = (tmp_path / "key").read_bytes()
    spoil(tmp_path / "key")
    assert ArtifactCache(tmp_path, b"core", MIB).get("digest") is None
    assert (tmp_path / "key").read_bytes() != key and stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_nodes_that_make_the_key_at_once_agree(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    caches: list[ArtifactCache] = []

    def open_cache() -> None:
        barrier.wait()
        caches.append(ArtifactCache(tmp_path, b"core", MIB))

    threads = [threading.Thread(target=open_cache) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    caches[0].put("digest", b"code")
    assert [cache.get("digest") for cache in caches] == [b"code"] * 8
    assert {path.name for path in tmp_path.iterdir()} == {"key", entries(tmp_path)[0].name}


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path, b"core", 10_000)
    for i in range(3):
        cache.put(f"d{i}", bytes([i]) * 3000)
        for age, path in enumerate(sorted(entries(tmp_path), key=lambda path: path.stat().st_mtime_ns, reverse=True)):
            os.utime(path, ns=(0, 10**18 - age * 10**9))
    assert cache.get("d0") is not None  # now the last used
    cache.put("d3", b"3" * 3000)
    assert [cache.get(f"d{i}") is not None for i in range(4)] == [True, False, True, True]
    cache.put("huge", bytes(10_001))
    assert cache.get("huge") is None and cache.get("d3") is not None


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    ArtifactCache(tmp_path, b"core", MIB)
    old, young = tmp_path / ".a.123", tmp_path / ".b.123"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    ArtifactCache(tmp_path, b"core", MIB)
    assert not old.exists() and young.exists()


def test_a_cache_that_cannot_be_private_is_refused_and_zero_bytes_keep_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="wasm.cache_path"):
        ArtifactCache(tmp_path / "file" / "cache", b"core", MIB)
    nothing = ArtifactCache(tmp_path / "unused", b"core", 0)
    nothing.put("digest", b"code")
    assert nothing.get("digest") is None and not (tmp_path / "unused").exists()


def test_an_authentic_artifact_that_the_engine_refuses_is_compiled_again(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        version = (await bench.prepare("hog")).version  # the program itself is gone, or its code would be used
        bench.backend._cache.put(version, b"not native code at all")
        assert (await bench.run("hog", {"rounds": 5})).reason == "returned"
        assert bench.backend._cache.get(version) != b"not native code at all"

    bench(settings(tmp_path), test)


# --- tenants -------------------------------------------------------------------


def test_tenants_keep_their_index_while_they_have_guests() -> None:
    index = TenantIndex(2)
    a, b = index.acquire("a", admitted=False), index.acquire("b", admitted=False)
    assert {a, b} == {0, 1} and index.acquire("a", admitted=False) == a
    with pytest.raises(QueueFullError, match="'c'"):
        index.acquire("c", admitted=False)
    assert index.acquire("c", admitted=True) in (0, 1)  # recovered work shares one
    index.release("c")
    index.release("a")
    with pytest.raises(QueueFullError):
        index.acquire("c", admitted=False)
    index.release("a")
    assert index.acquire("c", admitted=False) == a
    assert index.acquire("b", admitted=False) == b
    with pytest.raises(QueueFullError):
        index.acquire("a", admitted=False)


def test_more_tenants_than_indices_are_served_one_after_the_other(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("hog")
        for i in range(30):
            exit = await asyncio.wait_for(bench.begin(program, {"rounds": 1}, tenant=f"t{i}").ended, 60)
            assert exit.reason == "returned"
        runs = [bench.begin(program, {"rounds": 1}, tenant=f"r{i}", admitted=True) for i in range(30)]
        for run in runs:
            assert (await asyncio.wait_for(run.ended, 60)).reason == "returned"

    bench(settings(cache, scheduler__tenants_max=4), test)


def test_input_errors_of_the_core_leave_no_trace(cache: Path) -> None:
    async def test(bench: Bench) -> None:
        program = await bench.prepare("hog")
        with pytest.raises(InputError):
            bench.backend.start(
                program,
                Run({}, 0),
                tenant="x",
                tier=1,
                input=b"{}",
                fuel=1,
                seed=b"short",
                clock_ns=0,
                admitted=False,
                replay=False,
            )
        assert bench.backend._tenants._live == {}

    bench(settings(cache), test)
