"""The rewritten bulk operations against the original ones, both run by the engine.

``csrc/rewrite.c`` is built alone into a shared library, so these tests need a C compiler but no built package.
"""

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wasmtime
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from wasmtime import _bindings as capi

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PAGE = 65536
ENTRIES_MAX = 2000

HEADER = Path(__file__).parents[2] / "csrc" / "rewrite.h"
EMODULE = -7
ELIMIT = -10


class Config(ctypes.Structure):
    _fields_ = [
        ("memory_chunk_bytes", ctypes.c_uint32),
        ("table_chunk_entries", ctypes.c_uint32),
        ("table_elements_max", ctypes.c_uint32),
        ("bytes_max", ctypes.c_size_t),
        ("loop_export", ctypes.c_char_p),
        ("keep_bulk", ctypes.c_bool),
        ("copied", ctypes.POINTER(ctypes.c_uint32)),
        ("copied_count", ctypes.c_uint32),
        ("copies_first", ctypes.c_uint32),
    ]


def test_the_structs_here_are_those_of_the_header() -> None:
    """Or C would read beyond them."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    for kind, name in ((Config, "art_rewrite_config"), (Facts, "art_rewrite_facts")):
        (members,) = re.findall(rf"typedef struct {name} {{(.*?)}}", text, re.DOTALL)
        assert [field[0] for field in kind._fields_] == re.findall(r"(\w+)\s*(?=[,;])", members)


class Facts(ctypes.Structure):
    _fields_ = [
        ("exceptions", ctypes.c_bool),
        ("tail_calls", ctypes.c_bool),
        ("tables_change", ctypes.c_bool),
        ("segments_drop", ctypes.c_bool),
        ("references", ctypes.c_bool),
        ("start", ctypes.c_bool),
        ("loops", ctypes.c_uint32),
    ]


class Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


Rewrite = Callable[..., bytes]


@pytest.fixture(scope="module")
def rewrite(tmp_path_factory: pytest.TempPathFactory) -> Rewrite:
    """``rewrite(wasm, memory_chunk_bytes, table_chunk_entries, table_elements_max)`` -> rewritten wasm."""
    library = tmp_path_factory.mktemp("rewrite") / "librewrite.so"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run(
        [*compiler, "-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-o", str(library), str(CSRC / "rewrite.c")],
        check=True,
    )
    lib = ctypes.CDLL(str(library))
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    lib.art_rewrite.argtypes = [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(Config),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]

    def call(
        wasm: bytes, memory_chunk_bytes: int = 8192, table_chunk_entries: int = 1000, elements_max: int = 20000
    ) -> bytes:
        config = Config(memory_chunk_bytes, table_chunk_entries, elements_max, 64 << 20)
        out, out_len = ctypes.c_void_p(), ctypes.c_size_t()
        message = ctypes.create_string_buffer(256)
        code = lib.art_rewrite(
            wasm, len(wasm), ctypes.byref(config), ctypes.byref(out), ctypes.byref(out_len), message, len(message)
        )
        if code != 0:
            raise Refused(code, message.value.decode())
        assert out.value is not None
        result = ctypes.string_at(out.value, out_len.value)
        libc.free(out)
        return result

    return call


def wat(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(text))


def signed(value: int) -> int:
    """The u32 operand as the i32 the engine's binding wants."""
    return value - (1 << 32) if value >= 1 << 31 else value


# ---- the same operations, original and rewritten ----------------------------------------------------------------

FUNCS = 6
ALL_OPERATIONS = f"""
(module
  (type $id (func (result i32)))
  (memory (export "memory") 1 2)
  (table $a (export "a") 12 funcref)
  (table $b (export "b") 9 40 funcref)
  (table $x (export "x") 5 externref)
  {" ".join(f"(func $f{i} (type $id) (i32.const {i + 1}))" for i in range(FUNCS))}
  (elem $e0 func {" ".join(f"$f{i % FUNCS}" for i in range(14))})
  (elem $e1 funcref (ref.func $f0) (ref.null func) (ref.func $f1) (ref.func $f2) (ref.func $f3) (ref.null func))
  (elem (table $a) (i32.const 1) func $f0 $f1 $f2 $f3 $f4)
  (data $d0 "{"".join(chr(65 + i % 60) if chr(65 + i % 60) != chr(92) else "_" for i in range(90))}")
  (data $d1 "tiny")
  (data (i32.const 3) "active segments count as dropped")

  (func (export "fill") (param i32 i32 i32) (memory.fill (local.get 0) (local.get 1) (local.get 2)))
  (func (export "copy") (param i32 i32 i32) (memory.copy (local.get 0) (local.get 1) (local.get 2)))
  (func (export "init0") (param i32 i32 i32) (memory.init $d0 (local.get 0) (local.get 1) (local.get 2)))
  (func (export "init1") (param i32 i32 i32) (memory.init $d1 (local.get 0) (local.get 1) (local.get 2)))
  (func (export "init2") (param i32 i32 i32) (memory.init 2 (local.get 0) (local.get 1) (local.get 2)))
  (func (export "drop0") data.drop $d0)
  (func (export "memory_grow") (param i32) (result i32) (memory.grow (local.get 0)))

  (func $ref (param $k i32) (result funcref)
    (if (result funcref) (i32.ge_u (local.get $k) (i32.const {FUNCS})) (then (ref.null func))
      (else (table.get $refs (local.get $k)))))
  (table $refs funcref (elem {" ".join(f"$f{i}" for i in range(FUNCS))}))

  (func (export "fill_a") (param i32 i32 i32)
    (table.fill $a (local.get 0) (call $ref (local.get 1)) (local.get 2)))
  (func (export "fill_x") (param i32 externref i32) (table.fill $x (local.get 0) (local.get 1) (local.get 2)))
  (func (export "copy_aa") (param i32 i32 i32) (table.copy $a $a (local.get 0) (local.get 1) (local.get 2)))
  (func (export "copy_ab") (param i32 i32 i32) (table.copy $a $b (local.get 0) (local.get 1) (local.get 2)))
  (func (export "copy_ba") (param i32 i32 i32) (table.copy $b $a (local.get 0) (local.get 1) (local.get 2)))
  (func (export "copy_xx") (param i32 i32 i32) (table.copy $x $x (local.get 0) (local.get 1) (local.get 2)))
  (func (export "init_a0") (param i32 i32 i32) (table.init $a $e0 (local.get 0) (local.get 1) (local.get 2)))
  (func (export "init_b0") (param i32 i32 i32) (table.init $b $e0 (local.get 0) (local.get 1) (local.get 2)))
  (func (export "init_b1") (param i32 i32 i32) (table.init $b $e1 (local.get 0) (local.get 1) (local.get 2)))
  (func (export "edrop0") elem.drop $e0)
  (func (export "grow_a") (param i32 i32) (result i32) (table.grow $a (call $ref (local.get 0)) (local.get 1)))
  (func (export "grow_b") (param i32 i32) (result i32) (table.grow $b (call $ref (local.get 0)) (local.get 1)))
  (func (export "grow_x") (param externref i32) (result i32) (table.grow $x (local.get 0) (local.get 1)))

  {
    "".join(
        f'''
  (func (export "digest_{t}") (result i64) (local $i i32) (local $h i64)
    (loop $next
      (if (i32.lt_u (local.get $i) (table.size ${t}))
        (then
          (local.set $h (i64.add (i64.mul (local.get $h) (i64.const 1000003))
            (if (result i64) (ref.is_null (table.get ${t} (local.get $i)))
              (then (i64.const 99))
              (else (i64.extend_i32_u (call_indirect ${t} (type $id) (local.get $i)))))))
          (local.set $i (i32.add (local.get $i) (i32.const 1)))
          (br $next))))
    (local.get $h))'''
        for t in "ab"
    )
})
"""

CHUNKS = [(1, 1), (3, 2), (16, 3), (8192, 1000)]
#: Names of operations by shape of their operands.
RANGES = ("fill", "copy", "init0", "init1", "init2")
TABLE_RANGES = ("fill_a", "copy_aa", "copy_ab", "copy_ba", "copy_xx", "init_a0", "init_b0", "init_b1")

Call = tuple[str, tuple[Any, ...]]


class Machine:
    """One instance; what it holds after each call is what the test compares."""

    def __init__(self, engine: wasmtime.Engine, module: wasmtime.Module) -> None:
        self.store = wasmtime.Store(engine)
        # The original asks the engine how far a table may grow; the rewritten one must give the same answer itself.
        self.store.set_limits(table_elements=ENTRIES_MAX)
        instance = wasmtime.Instance(self.store, module, [])
        self.exports = instance.exports(self.store)
        memory, table = self.exports["memory"], self.exports["x"]
        assert isinstance(memory, wasmtime.Memory) and isinstance(table, wasmtime.Table)
        self.memory, self.table = memory, table

    def call(self, name: str, *args: Any) -> object:
        func = self.exports[name]
        assert isinstance(func, wasmtime.Func)
        try:
            return func(self.store, *(signed(a) if isinstance(a, int) else a for a in args))
        except wasmtime.Trap as trap:
            return trap.trap_code

    def state(self) -> tuple[object, ...]:
        externs = [self.table.get(self.store, i) for i in range(self.table.size(self.store))]
        return (
            bytes(self.memory.read(self.store)),
            self.call("digest_a"),
            self.call("digest_b"),
            externs,
        )


@pytest.fixture(scope="module")
def engine() -> wasmtime.Engine:
    return wasmtime.Engine()


@pytest.fixture(scope="module")
def modules(
    engine: wasmtime.Engine, rewrite: Rewrite
) -> tuple[wasmtime.Module, dict[tuple[int, int], wasmtime.Module]]:
    wasm = wat(ALL_OPERATIONS)
    rewritten = {chunks: rewrite(wasm, *chunks, ENTRIES_MAX) for chunks in CHUNKS}
    assert all(len(r) > len(wasm) for r in rewritten.values())
    return wasmtime.Module(engine, wasm), {c: wasmtime.Module(engine, r) for c, r in rewritten.items()}


def near(*values: int) -> st.SearchStrategy[int]:
    return st.builds(
        lambda base, delta: max(0, min(base + delta, (1 << 32) - 1)), st.sampled_from(values), st.integers(-3, 3)
    )


HUGE = (1 << 31, (1 << 32) - 1, (1 << 32) - PAGE)
memory_places = st.integers(0, 120) | near(0, PAGE - 100, PAGE, 2 * PAGE, *HUGE) | st.integers(0, (1 << 32) - 1)
memory_counts = st.integers(0, 120) | near(0, 8192, 16384, PAGE, *HUGE)
table_places = st.integers(0, 20) | near(0, 12, 40, *HUGE)
table_counts = st.integers(0, 20) | near(0, 12, 40, 1000, *HUGE)
picks = st.integers(0, FUNCS)
externs = st.none() | st.integers(1, 9).map(str)

calls: st.SearchStrategy[Call] = st.one_of(
    st.tuples(st.sampled_from(RANGES), st.tuples(memory_places, memory_places, memory_counts)),
    # Overlapping copies with short distances, in both directions.
    st.builds(
        lambda s, shift, n: ("copy", (max(0, s + shift), s, n)),
        st.integers(0, 300),
        st.integers(-40, 40),
        st.integers(0, 9000),
    ),
    st.tuples(st.sampled_from(TABLE_RANGES), st.tuples(table_places, table_places, table_counts)),
    st.tuples(st.just("fill_a"), st.tuples(table_places, picks, table_counts)),
    st.tuples(st.just("fill_x"), st.tuples(table_places, externs, table_counts)),
    st.tuples(st.sampled_from(["grow_a", "grow_b"]), st.tuples(picks, table_counts | near(ENTRIES_MAX - 12))),
    st.tuples(st.just("grow_x"), st.tuples(externs, table_counts | near(ENTRIES_MAX - 5))),
    st.tuples(st.just("memory_grow"), st.tuples(st.integers(0, 2))),
    st.tuples(st.sampled_from(["drop0", "edrop0"]), st.just(())),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.sampled_from(CHUNKS), program=st.lists(calls, min_size=1, max_size=12))
@example(chunks=(16, 3), program=[("fill", (PAGE - 50, 7, 51)), ("fill", (PAGE - 50, 7, 50))])
@example(chunks=(16, 3), program=[("fill", (PAGE, 1, 0)), ("fill", (PAGE + 1, 1, 0)), ("copy", (0, PAGE + 1, 0))])
@example(chunks=(16, 3), program=[("init0", (0, 0, 90)), ("copy", (10, 0, 80)), ("copy", (0, 17, 80))])
@example(chunks=(16, 3), program=[("drop0", ()), ("init0", (0, 0, 90)), ("init0", (0, 0, 0)), ("init0", (0, 1, 0))])
@example(chunks=(16, 3), program=[("init0", (0, 1, 90)), ("init0", (PAGE - 30, 0, 90)), ("init0", (0, 5, 85))])
@example(chunks=(16, 3), program=[("memory_grow", (1,)), ("fill", (0, 9, 2 * PAGE)), ("copy", (1, 0, 2 * PAGE - 1))])
@example(chunks=(16, 3), program=[("edrop0", ()), ("init_a0", (0, 0, 12)), ("init_a0", (0, 0, 0))])
@example(chunks=(16, 3), program=[("init_a0", (0, 1, 12)), ("copy_aa", (1, 0, 11)), ("copy_aa", (0, 2, 10))])
@example(chunks=(16, 3), program=[("grow_a", (0, ENTRIES_MAX - 12)), ("grow_a", (1, 0)), ("grow_a", (1, 1))])
@example(chunks=(16, 3), program=[("grow_a", (0, ENTRIES_MAX - 11)), ("grow_b", (1, 31)), ("grow_b", (2, 1))])
@example(chunks=(8192, 1000), program=[("grow_a", (3, 1900)), ("fill_a", (0, 2, 1912)), ("copy_aa", (5, 0, 1907))])
@example(chunks=(16, 3), program=[("grow_x", ("k", 7)), ("copy_xx", (1, 0, 11)), ("fill_x", (2, None, 10))])
def test_same_result_traps_and_contents(
    engine: wasmtime.Engine,
    modules: tuple[wasmtime.Module, dict[tuple[int, int], wasmtime.Module]],
    chunks: tuple[int, int],
    program: list[Call],
) -> None:
    original, rewritten = Machine(engine, modules[0]), Machine(engine, modules[1][chunks])
    for name, args in program:
        expected, actual = original.call(name, *args), rewritten.call(name, *args)
        assert actual == expected, (name, args)
        assert rewritten.state() == original.state(), (name, args)


def test_trap_leaves_everything_as_it_was(
    engine: wasmtime.Engine, modules: tuple[wasmtime.Module, dict[tuple[int, int], wasmtime.Module]]
) -> None:
    machine = Machine(engine, modules[1][16, 3])
    machine.call("init0", 100, 0, 90)
    machine.call("init_a0", 0, 0, 12)
    before = machine.state()
    out_of_memory, out_of_table = wasmtime.TrapCode.MEMORY_OUT_OF_BOUNDS, wasmtime.TrapCode.TABLE_OUT_OF_BOUNDS
    assert machine.call("fill", 0, 1, PAGE + 1) == out_of_memory
    assert machine.call("copy", 1, 0, PAGE) == out_of_memory
    assert machine.call("init0", 0, 0, 91) == out_of_memory
    assert machine.call("fill_a", 0, 0, 13) == out_of_table
    assert machine.call("copy_ab", 0, 0, 10) == out_of_table
    assert machine.call("init_a0", 0, 3, 12) == out_of_table
    assert machine.call("grow_a", 0, ENTRIES_MAX) == -1
    assert machine.state() == before


def test_grow_that_the_engine_refuses_half_way_traps(engine: wasmtime.Engine, rewrite: Rewrite) -> None:
    """The engine granting less than table_elements_max is a fault of configuration: -1 would be a lie, so it traps."""
    module = wasmtime.Module(engine, rewrite(wat(ALL_OPERATIONS), 16, 3, ENTRIES_MAX))
    machine = Machine(engine, module)
    machine.store.set_limits(table_elements=19)
    assert machine.call("grow_a", 0, 8) == wasmtime.TrapCode.UNREACHABLE
    machine = Machine(engine, module)
    machine.store.set_limits(table_elements=14)
    assert machine.call("grow_a", 0, 8) == -1  # refused at the first chunk: nothing has changed
    assert machine.call("grow_a", 0, 3) == -1
    assert machine.call("grow_a", 0, 2) == 12


# ---- chunking ---------------------------------------------------------------------------------------------------


def poll_progress(
    wasm: bytes, name: str, args: list[int], interval: int, progress: Callable[..., int]
) -> Iterator[int]:
    """Runs an export on a fiber that yields every `interval` fuel; gives `progress(memory, store)` at each yield."""
    config = wasmtime.Config()
    config.consume_fuel = True
    engine = wasmtime.Engine(config)
    store = wasmtime.Store(engine)
    store.set_fuel(1 << 40)
    exports = wasmtime.Instance(store, wasmtime.Module(engine, wasm), []).exports(store)
    func, memory = exports[name], exports["memory"]
    assert isinstance(func, wasmtime.Func) and isinstance(memory, wasmtime.Memory)
    context = store._context()
    assert not capi.wasmtime_context_fuel_async_yield_interval(context, interval)
    raw = (capi.wasmtime_val_t * len(args))()
    for slot, value in zip(raw, args, strict=True):
        slot.kind = 0  # i32
        slot.of.i32 = signed(value)
    trap = ctypes.POINTER(capi.wasm_trap_t)()
    error = ctypes.POINTER(capi.wasmtime_error_t)()
    future = capi.wasmtime_func_call_async(
        context, ctypes.byref(func._func), raw, len(args), None, 0, ctypes.byref(trap), ctypes.byref(error)
    )
    try:
        while not capi.wasmtime_call_future_poll(future):
            yield progress(memory, store)
    finally:
        capi.wasmtime_call_future_delete(future)
    assert not trap and not error
    yield progress(memory, store)


MEGABYTE = 1 << 20
BIG = """
(module (memory (export "memory") 33)
  (func (export "fill") (param i32 i32 i32) (memory.fill (local.get 0) (local.get 1) (local.get 2)))
  (func (export "copy") (param i32 i32 i32) (memory.copy (local.get 0) (local.get 1) (local.get 2))))
"""


def filled(memory: wasmtime.Memory, store: wasmtime.Store) -> int:
    return bytes(memory.read(store, 0, MEGABYTE)).count(7)


def longest_stretch(seen: list[int]) -> int:
    return max(b - a for a, b in zip([0, *seen], seen, strict=False))


def test_a_yield_is_never_more_than_one_chunk_away(rewrite: Rewrite) -> None:
    wasm, args = wat(BIG), [0, 7, MEGABYTE]
    # A fuel interval below a chunk's fuel: the guest yields as often as it can.
    seen = list(poll_progress(rewrite(wasm), "fill", args, 1000, filled))
    assert seen[-1] == MEGABYTE
    assert longest_stretch(seen) <= 8192
    assert len(seen) >= MEGABYTE // 8192
    # Without rewriting it is one stretch, which is why this exists; if that changes, this whole step can go.
    assert longest_stretch(list(poll_progress(wasm, "fill", args, 1000, filled))) == MEGABYTE


@pytest.mark.parametrize("distance", [1, MEGABYTE], ids=["overlapping, backward", "apart"])
def test_copy_yields_too(rewrite: Rewrite, distance: int) -> None:
    polls = list(poll_progress(rewrite(wat(BIG)), "copy", [distance, 0, MEGABYTE], 1000, lambda *_: 0))
    assert len(polls) >= MEGABYTE // 8192


EVERY_LONG = f"""
(module (memory (export "memory") 1)
  (table $a 2000 2000 funcref) (table $b 2000 funcref)
  (elem $e func {"$f " * 2000})
  (data $d "{"x" * PAGE}")
  (func $f)
  (func (export "memory.fill") (memory.fill (i32.const 0) (i32.const 1) (i32.const {PAGE})))
  (func (export "memory.copy") (memory.copy (i32.const 0) (i32.const 0) (i32.const {PAGE})))
  (func (export "memory.init") (memory.init $d (i32.const 0) (i32.const 0) (i32.const {PAGE})))
  (func (export "table.fill") (table.fill $a (i32.const 0) (ref.func $f) (i32.const 2000)))
  (func (export "table.copy") (table.copy $a $b (i32.const 0) (i32.const 0) (i32.const 2000)))
  (func (export "table.init") (table.init $b $e (i32.const 0) (i32.const 0) (i32.const 2000)))
  (func (export "table.grow") (drop (table.grow $b (ref.func $f) (i32.const 2000)))))
"""


@pytest.mark.parametrize(
    "name", ["memory.fill", "memory.copy", "memory.init", "table.fill", "table.copy", "table.init", "table.grow"]
)
def test_every_operation_yields_at_each_chunk(rewrite: Rewrite, name: str) -> None:
    """Over its whole range, to the last entry: the range that fits exactly is not mistaken for one out of bounds."""
    memory = name.startswith("memory")
    chunk, total = (1024, PAGE) if memory else (100, 2000)
    rewritten = rewrite(wat(EVERY_LONG), 1024, 100, 4000)
    polls = list(poll_progress(rewritten, name, [], 1, lambda *_: 0))
    # One poll less than chunks: the last chunk follows the loop. Yields at function entries come on top.
    assert len(polls) >= total // chunk - 1


@pytest.mark.parametrize(("entries", "helpers"), [(10, 0), (11, 4)])
def test_only_what_can_exceed_a_chunk_is_replaced(rewrite: Rewrite, entries: int, helpers: int) -> None:
    table_operations = f"""(module
        (table $t 1 {entries} funcref)
        (elem $e func {"$f " * entries})
        (func $f (param i32)
          (table.fill $t (i32.const 0) (ref.func $f) (local.get 0))
          (table.copy $t $t (i32.const 0) (i32.const 0) (local.get 0))
          (table.init $t $e (i32.const 0) (i32.const 0) (local.get 0))
          (drop (table.grow $t (ref.func $f) (local.get 0)))))"""
    assert rewrite(wat(table_operations), 10, 10).count(b"agentrt.table.") == helpers
    memory_init = f"""(module (memory 1) (data $d "{"x" * entries}")
        (func $f (param i32) (memory.init $d (i32.const 0) (i32.const 0) (local.get 0))))"""
    assert rewrite(wat(memory_init), 10, 10).count(b"agentrt.memory.init 0") == min(helpers, 1)


def test_micro_slice_interval_and_default_chunk(rewrite: Rewrite) -> None:
    """At the default 50,000 fuel a slice overshoots by at most one chunk."""
    seen = list(poll_progress(rewrite(wat(BIG)), "fill", [0, 7, MEGABYTE], 50_000, filled))
    assert longest_stretch(seen) <= 50_000 + 8192
    assert len(seen) >= MEGABYTE // (50_000 + 8192)


def test_loop_costs_little_fuel(rewrite: Rewrite) -> None:
    """The loop adds fuel in proportion to the chunks: some, since it loops, and less than 1 % of the bytes."""
    config = wasmtime.Config()
    config.consume_fuel = True
    engine = wasmtime.Engine(config)

    def fuel(wasm: bytes, count: int) -> int:
        store = wasmtime.Store(engine)
        store.set_fuel(1 << 40)
        func = wasmtime.Instance(store, wasmtime.Module(engine, wasm), []).exports(store)["fill"]
        assert isinstance(func, wasmtime.Func)
        func(store, 0, 7, count)
        return (1 << 40) - store.get_fuel()

    wasm = wat(BIG)
    rewritten = rewrite(wasm)
    extra = fuel(rewritten, MEGABYTE) - fuel(wasm, MEGABYTE)
    one_chunk = fuel(rewritten, 8192) - fuel(wasm, 8192)
    assert MEGABYTE // 8192 <= extra - one_chunk < MEGABYTE // 100


# ---- what stands around the operations --------------------------------------------------------------------------

FILL = "(memory.fill (i32.const 0) (i32.const 1) (i32.const 90000))"
#: Instructions with immediates, each in front of an operation that must still be found.
BODIES = {
    "numeric": "(drop (i64.const -9000000000)) (drop (f32.const 1.5)) (drop (f64.const 2.5)) (drop (i32.const -1))",
    "sign extension": "(drop (i32.extend8_s (i32.const 1))) (drop (i32.trunc_sat_f64_u (f64.const 1)))",
    "memory": "(i64.store offset=300 align=4 (i32.const 0) (i64.load8_u (i32.const 1))) (drop (memory.size))",
    "multi-value": "(block (type $pair) (i32.const 1) (i64.const 2)) drop drop",
    "br_table": "(block (block (br_table 0 1 1 0 (i32.const 300))))",
    "select": "(drop (select (result externref) (ref.null extern) (ref.null extern) (i32.const 1)))",
    "references": "(drop (ref.is_null (ref.func $self))) (table.set 0 (i32.const 0) (ref.null func))",
    "indirect": "(if (i32.const 0) (then (call_indirect (type $void) (i32.const 0)) (call $self)))",
    "simd": """(drop (i8x16.shuffle 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 31
                 (v128.load32_zero offset=252 (i32.const 0)) (v128.const i64x2 252 0xfc0bfc0b)))
               (v128.store16_lane offset=252 7 (i32.const 0) (v128.const i64x2 0 0))""",
    "relaxed simd": "(drop (i32x4.relaxed_dot_i8x16_i7x16_add_s {v} {v} {v}))".format(v="(v128.const i64x2 0 0)"),
    "atomics": "(drop (i32.atomic.rmw.cmpxchg (i32.const 0) (i32.const 0) (i32.const 1))) (atomic.fence)",
    "tail call": "(block (br_if 0 (i32.const 1)) (return_call $self))",
    "typed references": """(block $null (drop (br_on_null $null (ref.null $void))))
        (if (i32.const 0) (then (call_ref $void (ref.func $self)) (return_call_ref $void (ref.func $self))))""",
    "exceptions": """(block $h (result i32)
        (try_table (catch $tag $h) (catch_all 1) (throw $tag (i32.const 3))) (i32.const 1)) drop
        (block (block $r (result exnref) (try_table (catch_all_ref $r) (br 2)) (unreachable)) (throw_ref))""",
    "wide arithmetic": "(drop (drop (i64.mul_wide_u (i64.const 1) (i64.const 2))))",
    "unreachable": "(if (i32.const 0) (then (unreachable)))",
}


@pytest.fixture(scope="module")
def wide_engine() -> wasmtime.Engine:
    config = wasmtime.Config()
    config.wasm_exceptions = True
    config.wasm_threads = True
    config.wasm_tail_call = True
    config.wasm_relaxed_simd = True
    if hasattr(config, "wasm_function_references"):
        config.wasm_function_references = True
    set_wide = getattr(capi, "wasmtime_config_wasm_wide_arithmetic_set", None)
    if set_wide is not None:
        set_wide(config.ptr(), True)
    return wasmtime.Engine(config)


def validates(engine: wasmtime.Engine, wasm: bytes) -> bool:
    try:
        wasmtime.Module.validate(engine, wasm)
    except wasmtime.WasmtimeError:
        return False
    return True


@pytest.mark.parametrize("name", BODIES)
def test_operation_is_found_behind(rewrite: Rewrite, wide_engine: wasmtime.Engine, name: str) -> None:
    wasm = wat(f"""(module
        (type $void (func)) (type $pair (func (result i32 i64)))
        (table 1 funcref) (memory 3) (tag $tag (param i32))
        (func $self (export "run") (type $void) {BODIES[name]} {FILL}))""")
    rewritten = rewrite(wasm)
    assert rewritten.count(b"agentrt.memory.fill") == 1
    if name == "wide arithmetic" and not validates(wide_engine, wasm):
        return  # this release of the engine has it switched off for good
    wasmtime.Module.validate(wide_engine, wasm)
    wasmtime.Module.validate(wide_engine, rewritten)


def test_typed_tables(rewrite: Rewrite, wide_engine: wasmtime.Engine) -> None:
    """The helpers' types come from the table: nullable, non-nullable with an initialiser, and imported."""
    wasm = wat("""(module
        (type $t (func (param i32) (result i32)))
        (import "m" "t" (table $i 2 externref))
        (table $n 1 2000 (ref null $t))
        (table $r 1 2000 (ref $t) (ref.func $f))
        (func $f (export "f") (type $t) (local.get 0))
        (func (export "run") (param i32) (result i32)
          (drop (table.grow $n (ref.null $t) (local.get 0)))
          (drop (table.grow $r (ref.func $f) (local.get 0)))
          (drop (table.grow $i (ref.null extern) (local.get 0)))
          (table.fill $r (i32.const 0) (ref.func $f) (table.size $r))
          (table.fill $i (i32.const 0) (ref.null extern) (table.size $i))
          (table.copy $n $r (i32.const 0) (i32.const 0) (table.size $n))
          (call_ref $t (i32.const 42) (ref.as_non_null (table.get $n (local.get 0))))))""")
    store = wasmtime.Store(wide_engine)
    table = wasmtime.Table(store, wasmtime.TableType(wasmtime.ValType.externref(), wasmtime.Limits(2, None)), None)
    instance = wasmtime.Instance(store, wasmtime.Module(wide_engine, rewrite(wasm, 16, 3)), [table])
    run = instance.exports(store)["run"]
    assert isinstance(run, wasmtime.Func)
    assert run(store, 100) == 42
    assert table.size(store) == 102


def test_growing_an_imported_table_that_is_above_the_limit(rewrite: Rewrite, engine: wasmtime.Engine) -> None:
    wasm = wat("""(module (import "m" "t" (table 2 externref))
        (func (export "run") (param i32) (result i32) (table.grow (ref.null extern) (local.get 0))))""")
    store = wasmtime.Store(engine)
    table = wasmtime.Table(store, wasmtime.TableType(wasmtime.ValType.externref(), wasmtime.Limits(50, None)), None)
    run = wasmtime.Instance(store, wasmtime.Module(engine, rewrite(wasm, 16, 3, 40)), [table]).exports(store)["run"]
    assert isinstance(run, wasmtime.Func)
    assert [run(store, 1), run(store, 0), table.size(store)] == [-1, 50, 50]


def test_extended_const_and_segments_keep_their_indices(rewrite: Rewrite, engine: wasmtime.Engine) -> None:
    wasm = wat(f"""(module
        (import "m" "g" (global $g i32))
        (memory (export "memory") 2)
        (global $h (export "h") i32 (i32.add (global.get $g) (i32.mul (i32.const 2) (i32.const 5))))
        (data (offset (i32.add (global.get $g) (i32.const 1))) "placed")
        (data $late "passive")
        (start $go)
        (func $go {FILL} (memory.init $late (i32.const 8) (i32.const 0) (i32.const 7)) (data.drop $late)))""")
    store = wasmtime.Store(engine)
    base_type = wasmtime.GlobalType(wasmtime.ValType.i32(), False)
    base = wasmtime.Global(store, base_type, wasmtime.Val.i32(100))
    exports = wasmtime.Instance(store, wasmtime.Module(engine, rewrite(wasm, 16, 3)), [base]).exports(store)
    memory, late = exports["memory"], exports["h"]
    assert isinstance(memory, wasmtime.Memory) and isinstance(late, wasmtime.Global)
    assert late.value(store) == 110
    assert bytes(memory.read(store, 0, 16)) == b"\x01" * 8 + b"passive" + b"\x01"
    assert bytes(memory.read(store, 90000, 90001)) == b"\x00"


def test_helpers_are_named_in_backtraces(rewrite: Rewrite, engine: wasmtime.Engine) -> None:
    wasm = wat(f'(module (memory 1) (func $guest (export "run") {FILL}))')
    store = wasmtime.Store(engine)
    run = wasmtime.Instance(store, wasmtime.Module(engine, rewrite(wasm)), []).exports(store)["run"]
    assert isinstance(run, wasmtime.Func)
    with pytest.raises(wasmtime.Trap) as caught:
        run(store)
    assert [frame.func_name for frame in caught.value.frames] == ["agentrt.memory.fill", "guest"]


def test_modules_without_bulk_operations_come_back_as_they_are(rewrite: Rewrite) -> None:
    wasm = wat('(module (memory 1) (table 2 funcref) (func (export "run") (drop (memory.grow (i32.const 1)))))')
    assert rewrite(wasm) == wasm
    debug = b"\x00\x0e\x0b.debug_info\x01\x02"
    branch_hints = b"\x00\x1b\x19metadata.code.branch_hint\x00"
    assert rewrite(wasm[:8] + debug + wasm[8:] + branch_hints + debug) == wasm + branch_hints
    changed = wat(f"(module (memory 1) (func {FILL}))")
    assert b"metadata" not in rewrite(changed + branch_hints)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(component)", "component"),
        ("(module (memory i64 1))", "64-bit memories"),
        ("(module (table i64 1 funcref))", "64-bit tables"),
        ("(module (memory 1) (memory 1))", "only one memory"),
        ("(module (memory 1 1 shared))", "shared memories"),
        ("(module (type (struct (field i32))))", "type form 0x5f"),
        ("(module (func (drop (ref.i31 (i32.const 1)))))", "garbage-collection"),
    ],
)
def test_unsupported_is_refused_with_the_reason(rewrite: Rewrite, text: str, reason: str) -> None:
    with pytest.raises(Refused, match=rf"byte \d+: .*{reason}") as caught:
        rewrite(wat(text))
    assert caught.value.code == EMODULE


def test_table_above_the_limit_is_refused(rewrite: Rewrite) -> None:
    with pytest.raises(Refused, match="starts with 30000 entries") as caught:
        rewrite(wat("(module (table 30000 funcref))"))
    assert caught.value.code == ELIMIT


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_invalid_module_never_becomes_valid(rewrite: Rewrite, engine: wasmtime.Engine, data: st.DataObject) -> None:
    """Bytes changed at random: what the engine thinks of the module before and after is the same."""
    wasm = bytearray(wat(ALL_OPERATIONS))
    for _ in range(data.draw(st.integers(1, 2))):
        wasm[data.draw(st.integers(8, len(wasm) - 1))] = data.draw(st.integers(0, 255))
    try:
        rewritten = rewrite(bytes(wasm), 16, 3, 10_000_000)
    except Refused as refused:
        # 64-bit, shared and GC forms may be valid and refused all the same.
        assert refused.code in (EMODULE, ELIMIT)
        return
    assert validates(engine, rewritten) == validates(engine, bytes(wasm))
