"""Each benchmark runs and prints what it says it prints. Its figures mean nothing here."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentrt.demo.figures import percentile
from perf import guests, native, runq
from perf.__main__ import NAMES, main
from perf.bench import CoreBench, unpacked
from perf.plain import PlainEngine
from perf.timing import interleaved, isolated, median_ns

ROOT = Path(__file__).parents[2]
CPUS = len(os.sched_getaffinity(0))

#: What others read, by benchmark; more may be there.
FIGURES = {
    "process": {"spawn_us", "ended_us", "reweigh_100_us", "spawn_ratio"},
    "http": {"runs_per_s", "p99_ms", "urgent_p50_ms", "urgent_p99_ms", "urgent_seen_p99_ms"},
    "runq": {"pair_1t_ns", "pair_10k_tenants_ns", "everything_1t_ns", "push_max_us"}
    | ({"pair_2t_ns", "pair_1p1c_ns", "everything_2t_ns"} if CPUS > 1 else set()),
    "spawn": {"spawn_us", "idle_instance_kb", "runs_per_s", "durable_runs_per_s", "batch_runs_per_s"},
    "switch": {"switch_us", "yield_us", "requeue_us", "switch_1000_us", "overhead_pct", "overhead_compute_pct"},
    "latency": {
        *("core_p50_us", "core_p99_us", "core_p999_us", "submit_p99_us", "submit_durable_p99_us"),
        *("fill_core_p50_us", "fill_core_p99_us", "fill_core_p999_us"),
        *("mpy_core_p50_us", "mpy_core_p99_us", "mpy_core_p999_us"),
    },
    "density": {"live_guests", "live_guest_kb", "live_run_kb", "tenant_2mb_kb", "queued_runs", "queued_run_kb"},
    "journal": {"syscalls_per_s", "inline_syscalls_per_s"},
    "blobs": {"quiet_p99_ms", "quiet_max_ms", "p99_ms", "max_ms", "put_mib_per_s"},
    "frames": {
        *("capture_vs_memcpy", "capture_ms", "delta_vs_compare", "delta_ms", "delta_bytes_ratio", "restore_vs_memcpy"),
        *("resume_warm_ms", "resume_cold_ms", "clone_speedup", "clone_ms", "boot_ms", "clone_run_speedup"),
        "clone_quickjs_speedup",
        *("fuel_vs_plain", "syscalls_vs_plain", "syscalls_inside_vs_plain", "anywhere_vs_plain"),
        *("urgent_submit_p99_ms", "other_submit_p99_ms"),
    },
    "flow": {"step_us", "model_us", "gate_us", "wait_us", "names_us", "admit_us"},
    "waiting": {"bytes_per_cold_run", "rss_bytes_per_cold_run", "restart_accepting_s", "wake_all_per_s"},
    "overflow": {
        *("urgent_accept_idle_ms", "urgent_accept_full_ms", "urgent_accept_ms", "urgent_accept_full_p99_ms"),
        *("rss_growth_mib", "refused_pct", "unanswered"),
    },
    "native_hogs": {"p50_ms", "p99_ms", "max_ms", "hogs_pct", "idle_p99_ms"},
    "leaves": {"wake_p50_us", "wake_p99_us", "delay_us", "alone_wake_p99_us", "alone_delay_us"},
    "hog": {"p99_ms", "higher_tier_p99_ms", "quiet_p99_ms", "quiet_higher_tier_p99_ms"},
    "sandbox": {
        *("warm_ms", "warm_micropython_ms", "warm_micropython_cpu_ms", "warm_quickjs_ms", "warm_quickjs_cpu_ms"),
        "calls_per_s",
    },
    "step_floor": {"control_us", "store_us", "steps_per_s"},
    "steps": {"sequential_steps_per_s", "lmdb_puts_per_s", "sequential_vs_lmdb", "concurrent_steps_per_s"},
}
BASELINES = {
    "process": {"posix_spawn_us", "subprocess_us"},
    "runq": {"heapq_pair_1t_ns", "heapq_pair_2t_ns", "asyncio_pair_1t_ns", "mutex_pair_1t_ns", "mutex_push_max_us"},
    "spawn": {"wasmtime_py_spawn_us", "asyncio_tasks_per_s", "thread_pool_tasks_per_s"},
    "switch": {"asyncio_switch_us", "thread_switch_us"},
    "latency": {"nice_p50_us", "nice_p99_us", "threads_p99_us", "asyncio_p99_us"},
    "density": {"asyncio_task_kb", "thread_kb", "wasmtime_py_kb"},
    "journal": {"sqlite_steps_per_s", "sqlite_grouped_steps_per_s"},
    "blobs": {"inline_max_ms"},
    "http": {"nothing_per_s", "nothing_p99_ms", "nothing_cpu_us"},
    "flow": {"semaphore_us"},
    "frames": {"memcpy_ms", "compare_ms", "urgent_submit_alone_p99_ms", "other_submit_alone_p99_ms"},
    "sandbox": {"python_process_ms", "wasmtime_py_ms"},
    "waiting": set(),
    "hog": set(),
    "leaves": {"nice_wake_p50_us", "nice_wake_p99_us", "nice_delay_us"},
    "native_hogs": {"nice_p50_ms", "nice_p99_ms", "nice_max_ms", "nice_hogs_pct"},
    "overflow": {"capacity_per_s"},
    "step_floor": {"floor_control_us", "floor_store_us", "floor_steps_per_s"},
    "steps": set(),  # its peers are optional
}
#: Differences of two times or sizes: on a busy machine a tiny run may see less than nothing.
MAY_BE_NEGATIVE = {"switch", "density", "waiting", "overflow", "native_hogs", "leaves"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("langgraph", "mcp")])  # with their plugins
def test_benchmark_prints_one_json_object_last(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perf", name, "--tiny", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {"name", "figures", "baselines", "machine"}
    assert report["name"] == name
    assert set(report["figures"]) >= FIGURES[name]
    assert set(report["baselines"]) >= BASELINES[name]
    assert report["machine"]["command"] == f"python -m perf {name} --tiny --json"
    for key, value in (report["figures"] | report["baselines"]).items():
        assert math.isfinite(value), key
        assert value > 0 or name in MAY_BE_NEGATIVE, key
    if name in ("spawn", "journal"):
        assert report["machine"]["fdatasync_us"] > 0


def test_peers_whose_headers_are_missing_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_header", lambda header, *, cxx=False: False)
    report = runq.run(True)
    assert not [key for key in report.baselines if key.startswith(("moodycamel", "ck_ring"))]
    notes = " ".join(report.machine["notes"])
    assert "libconcurrentqueue-dev" in notes and "libck-dev" in notes


def test_readable_output_ends_with_the_same_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(native, "has_header", lambda header, *, cxx=False: False)
    main(["runq", "--tiny", "--dir", str(tmp_path)])
    assert tempfile.gettempdir() == str(tmp_path)
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    shown = {tuple(line.split()[:2]) for line in lines}
    assert {("figure", key) for key in report["figures"]} <= shown
    assert sum(line.startswith("note ") for line in lines) == len(report["machine"]["notes"])


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["nothing"])
    assert "invalid choice" in capsys.readouterr().err


def test_program_that_does_not_compile_or_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PERF", tmp_path)
    (tmp_path / "wrong.c").write_text("int main(void) { return nothing; }")
    with pytest.raises(RuntimeError, match="nothing"):
        native.run("wrong.c")
    (tmp_path / "failing.c").write_text('#include <stdio.h>\nint main(void) { fputs("no luck", stderr); return 3; }')
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*no luck"):
        native.run("failing.c")
    (tmp_path / "fine.c").write_text('#include <stdio.h>\nint main(void) { puts("a 1\\nb_ns 2.5"); return 0; }')
    assert native.run("fine.c") == {"a": 1, "b_ns": 2.5}
    assert native.has_header("stdio.h") and not native.has_header("no_such_header.h")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not native.has_header("stdio.h")
    with pytest.raises(RuntimeError, match="compiler"):
        native.run("fine.c")


def test_percentile_is_the_value_that_enough_do_not_exceed() -> None:
    values = [float(value) for value in range(1, 1001)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 99.9, 100)] == [1, 500, 990, 999, 1000]
    assert percentile([7.0], 99.9) == 7.0


def test_loops_are_calibrated_and_the_median_counts() -> None:
    calls: list[int] = []

    def loop(loops: int) -> float:
        calls.append(loops)
        return loops * 2e-6 * (100 if len(calls) % 5 == 0 else 1)  # some are disturbed

    assert median_ns(loop, tiny=False) == pytest.approx(2000)
    assert len(set(calls[-11:])) == 1
    assert calls[-1] * 2e-6 >= 0.05 / 100


def test_interleaved_measures_take_turns() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    assert interleaved(3, lambda: measure("a"), lambda: measure("b")) == [[1, 2], [3, 4], [5, 6]]
    assert order == ["a", "b"] * 3


def test_isolated_runs_in_another_process_and_raises_what_it_raised() -> None:
    assert isolated(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="invalid literal"):
        isolated(int, "x")


def test_plain_engine_does_the_same_as_the_core_and_tells_failures() -> None:
    with CoreBench({"scheduler.workers": 1}) as bench:
        engine = PlainEngine(bench.parameters)
        for guest in (guests.script_compute(100), guests.compute(1)):
            bench.submit(bench.load(guest))
            (exit,) = bench.take_exits(1)
            taken_ns, fuel = engine.run(engine.load(bench.compile(guest)), unpacked(guest)[1])
            assert exit.reason == "returned" and fuel == exit.fuel and taken_ns > 0
        failing = guests.script("1/0")
        with pytest.raises(RuntimeError, match="ended with 1"):
            engine.run(engine.load(bench.compile(failing)), unpacked(failing)[1])
