"""Guests through the binding: errors, events, answers, ends; and that nothing is left behind."""

import gc
import random
import threading
import time
import weakref
from typing import Any

import pytest
from core_fixture import LIBRARY, LIMITS, Control, Run, artifact, control, core_arguments, results, script, wasm

from agentrt import _core, errors

# --- errors ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (b"garbage", errors.ModuleError),
        (b"", errors.ModuleError),
        (wasm("hello")[:100], errors.ModuleError),
        (wasm("memory_second"), errors.ModuleError),
        (wasm("table_large"), errors.ModuleLimitError),
    ],
)
def test_compile_errors_are_typed(code: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        _core.compile_module(LIBRARY, code, **LIMITS)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("import_unknown", errors.UnknownImportError),
        ("import_wasi", errors.UnknownImportError),
        ("import_type", errors.UnknownImportError),
        ("import_memory", errors.UnknownImportError),
        ("entry_none", errors.NoEntryError),
        ("entry_i64", errors.NoEntryError),
        ("memory_large", errors.ModuleLimitError),
        ("memory_large_hidden", errors.ModuleLimitError),
    ],
)
def test_load_errors_are_typed(name: str, error: type[Exception]) -> None:
    with control() as c, pytest.raises(error) as raised:
        c.module(name)
    assert type(raised.value) is error


def test_artifacts_are_checked() -> None:
    with control() as c:
        whole = artifact("hello")
        for broken in (b"", b"garbage", wasm("hello"), whole[: len(whole) // 2], whole[:-1]):
            with pytest.raises(errors.ModuleError):
                c.core.load(broken)


@pytest.mark.parametrize(
    "over",
    [
        {"workers": 0},
        {"workers": 65},
        {"micro_slice_fuel": 0},
        {"quantum_ns": (1, 1, 1, 0)},
        {"guests_max": 0},
        {"stacks_max": 301},
        {"wasm_stack_bytes": 0},
        {"inflight_max": 0},
        {"tenants_max": 0},
        {"memory_bytes_max": 1 << 40},
        {"result_bytes_max": 1 << 31},
    ],
)
def test_core_refuses_what_does_not_fit(over: dict[str, Any]) -> None:
    with pytest.raises(errors.InputError):
        _core.Core(**core_arguments(**over))


def test_core_without_address_space_or_library() -> None:
    with pytest.raises(MemoryError, match="address space"):
        _core.Core(**core_arguments(guests_max=100_000))


def test_submit_errors() -> None:
    with control(queue_items_max=2) as c, control() as other:
        with pytest.raises(errors.InputError):
            c.submit("hello", tier=4)
        with pytest.raises(errors.InputError):
            c.submit("hello", tenant=16)
        with pytest.raises(errors.InputError, match="16 bytes"):
            c.submit("hello", seed=b"short")
        with pytest.raises(errors.InputError, match="another core"):
            c.modules["hello"] = other.module("hello")
            c.submit("hello")
        del c.modules["hello"]
        held = [c.submit("asker", tier=1) for _ in range(2)]
        with pytest.raises(errors.QueueFullError):
            c.submit("hello")
        more = c.submit("hello", admitted=True)
        for run in (*held, more):
            run.guest.kill()
        c.until(lambda: all(run.exit for run in (*held, more)))
        c.audit()
    with pytest.raises(errors.ClosedError):
        c.submit("hello")
    with pytest.raises(errors.ClosedError):
        c.core.drain()
    with pytest.raises(errors.ClosedError):
        c.core.load(artifact("hello"))
    with pytest.raises(errors.ClosedError):
        c.core.statistics()
    with pytest.raises(errors.ClosedError):
        c.core.submit_foreign(None, -1, tenant=0, tier=0)


# --- events and answers ---------------------------------------------------------


def test_exit_fields() -> None:
    with control() as c:
        before = time.monotonic_ns()
        runs = {
            "returned": c.submit("hello", b'{"a":1}'),
            "failed": c.submit("script", script(("output", 0, 3), ("return", 42))),
            "trap": c.submit("script", script(("unreachable",))),
            "fuel": c.submit("hog", fuel=1_000_000),
            "killed": c.submit("hog"),
        }
        runs["killed"].guest.kill()
        c.until(lambda: all(run.exit for run in runs.values()))
        for expected, run in runs.items():
            assert run.exit is not None
            reason, _code, _output, message, fuel, slot_ns, submitted_ns, first_ns, *rest = run.exit
            preemptions, demotions, stdout, stderr, answers, steps = rest
            assert answers == steps == -1  # a wasm guest is not brought back to unwind
            assert stdout == stderr == b""
            assert reason == expected
            assert before <= submitted_ns <= time.monotonic_ns()
            assert preemptions == demotions == 0
            if reason != "killed":
                assert fuel > 0 and slot_ns > 0 and first_ns >= submitted_ns
            assert bool(message) == (reason in ("trap", "fuel"))
        assert runs["returned"].exit is not None and runs["returned"].exit[2] == b'{"a":1}'
        assert runs["failed"].exit is not None and runs["failed"].exit[1] == 42
        assert runs["trap"].exit is not None and "boom" in runs["trap"].exit[3]
        assert runs["fuel"].exit is not None and runs["fuel"].exit[4] <= 1_000_000
        c.audit()


def test_call_is_reported_once_and_answered() -> None:
    with control() as c:
        run = c.submit("script", script(("call", 1, 0x10000, 4, 0x100, 8), ("peek", 0x100), ("call", 1, 0, 0, 0, 0)))
        c.until(lambda: bool(run.waits))
        assert run.requests == [(1, 1, bytes(4))]
        assert run.waits == [(1,)]
        run.reply(99, b"nobody")
        run.reply(1, b"abcd")
        run.reply(1, b"late")
        c.until(lambda: len(run.waits) == 2)
        run.reply(2, b"no", status=1)
        c.until(lambda: run.exit is not None)
        assert run.exit is not None
        assert results(run.exit[2]) == [4, 0x64636261, -1]
        assert run.waits == [(1,), (2,)]
        # after the end everything is quietly ignored
        run.reply(1, b"x")
        run.guest.kill()
        run.guest.grant(5, True)
        run.guest.go_live()
        assert run.guest.owner is None
        c.audit()


def test_answers_have_a_limit() -> None:
    with control() as c:
        run = c.submit("script", script(("call", 1, 0, 0, 0, 0)))
        c.until(lambda: bool(run.waits))
        with pytest.raises(errors.InputError):
            run.reply(1, bytes(LIMITS["result_bytes_max"] + 1))
        run.reply(1, bytes(LIMITS["result_bytes_max"]))
        c.until(lambda: run.exit is not None)
        assert run.exit is not None and results(run.exit[2]) == [LIMITS["result_bytes_max"]]


def test_log_lines_come_in_order_with_handle_0() -> None:
    with control() as c:
        run = c.submit("last_words")
        c.until(lambda: run.exit is not None)
        assert run.requests == [(0, 13, bytes(8))] * 40


def test_replay_waits_for_the_control_plane() -> None:
    two = [("submit", 1, 0, 0), ("submit", 1, 0, 0), ("poke", 0, 1), ("poke", 4, 2)]
    with control() as c:
        run = c.submit("script", script(*two, ("wait_any", 0, 2), ("wait_any", 0, 2)), replay=True)
        c.until(lambda: len(run.waits) == 1)
        run.reply(2, b"b")
        c.until(lambda: len(run.waits) == 2)  # 2 is answered, but the wait suspends all the same
        run.reply(1, b"a")
        run.guest.go_live()
        c.until(lambda: run.exit is not None)
        assert run.exit is not None and results(run.exit[2])[4:] == [1, 1]  # seq 1 is handle 2


def test_fuel_is_asked_for_once_per_grant() -> None:
    with control() as c:
        run = c.submit("script", script(("submit", 1, 0, 0), ("spin", 8_000_000)), fuel=9 << 20, fuel_final=False)
        c.until(lambda: run.fuel_stops == 1)
        run.reply(1, b"x")  # no reason to ask again
        other = c.submit("hello")
        c.until(lambda: other.exit is not None)
        assert run.fuel_stops == 1
        run.guest.grant(1, False)
        c.until(lambda: run.fuel_stops == 2)
        run.guest.grant(1 << 40, False)
        c.until(lambda: run.exit is not None)
        assert run.exit is not None and run.exit[0] == "returned"
        c.audit()


# --- lifetime -------------------------------------------------------------------


def test_guests_and_owners_are_freed() -> None:
    with control() as c:
        c.module("hello")
        gc.collect()
        references: list[weakref.ref[Run]] = []
        for kill in (False, True):
            for _ in range(100):
                run = c.submit("asker" if kill else "hello", b"1")
                if kill:
                    run.guest.kill()
                references.append(weakref.ref(run))
            del run
            c.until(lambda: c.core.statistics()["admitted"] == 0, events=False)
            c.until(lambda: c.take() == 0, events=False)
        gc.collect()  # a traceback or frame may have held one
        assert [r for r in references if r() is not None] == []
        assert not [o for o in gc.get_objects() if type(o) is _core.Guest]


def test_an_owner_nobody_holds_still_gets_its_exit() -> None:
    """The core keeps a guest and its owner until the exit was drained."""
    with control() as c:
        seen = 0
        for _ in range(50):
            c.submit("hello", b"1")
        gc.collect()
        while seen < 50:
            for owner, kind, _requests, detail in c.core.drain():
                assert isinstance(owner, Run) and kind == "exit" and detail[2] == b"1"
                seen += 1


def busy(names: tuple[str, ...], count: int) -> tuple[Control, list[Run]]:
    """A core at work on guests that do not end; at least one has been seen running."""
    made = Control()
    runs = [made.submit(names[i % len(names)], script(("call", 1, 0, 0, 0, 0))) for i in range(count)]
    made.until(lambda: any(run.requests for run in runs))
    return made, runs


def test_close_with_live_guests_frees_all() -> None:
    made, runs = busy(("hog", "asker", "script", "start_loops"), 60)
    slot = made.foreign()
    references = [weakref.ref(run) for run in runs]
    made.core.close()
    made.core.close()
    runs[0].guest.kill()
    runs[0].guest.complete(1, 0, b"", 0, 0)
    slot.foreign.release()
    del runs, slot
    gc.collect()
    assert [r for r in references if r() is not None] == []
    core = weakref.ref(made)
    del made
    gc.collect()
    assert core() is None
    assert not [o for o in gc.get_objects() if type(o) in (_core.Guest, _core.Core, _core.Module, _core.Foreign)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_core_dropped_without_close_stops_first(keep: bool) -> None:
    """The collector must not free guests under running workers, whatever it clears first."""
    for _ in range(5):
        made, runs = busy(("hog", "asker"), 20)
        kept = runs[3].guest if keep else None
        del made, runs
        gc.collect()
        if kept is not None:
            kept.kill()
        del kept
        gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is _core.Core]


# --- threads --------------------------------------------------------------------


@pytest.mark.stress
def test_fault_L43_gil_and_core_locks_do_not_meet() -> None:
    """Threads fight for the GIL while guests are submitted, answered and killed: nothing waits for ever."""
    stop = threading.Event()

    def burn() -> None:
        x = 0
        while not stop.is_set():
            x = (x * 31 + 7) % 1_000_003

    def compile_and_load(core: Any) -> None:
        while not stop.is_set():
            core.load(_core.compile_module(LIBRARY, wasm("hello"), **LIMITS))

    rng = random.Random(43)
    with control(workers=2, stacks_max=20, quantum_ns=(200_000,) * 4, aging_threshold=50) as c:
        threads = [threading.Thread(target=burn) for _ in range(3)]
        threads.append(threading.Thread(target=compile_and_load, args=(c.core,)))
        for thread in threads:
            thread.start()
        try:
            runs: list[Run] = []
            ended = 0
            end = time.monotonic() + 4
            while time.monotonic() < end or runs:
                if time.monotonic() < end and len(runs) < 60:
                    kind = rng.choice(("hello", "script", "talker", "asker", "last_words"))
                    data = {"script": script(("call", 1, 0, 0, 0, 0)), "talker": b"\3\0\0\0\1\0\0\0"}.get(kind, b"1")
                    runs.append(
                        c.submit(kind, data, tier=rng.randrange(4), answer=lambda h, o, p: (0, h.to_bytes(4, "little")))
                    )
                for run in runs:
                    if rng.random() < 0.002 or (time.monotonic() >= end and run.requests):
                        run.guest.kill()
                if not c.take():
                    c.core.statistics()
                ended += sum(run.exit is not None for run in runs)
                runs = [run for run in runs if run.exit is None]
                assert time.monotonic() < end + 60
            assert ended > 20
            c.audit()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
