"""doctor: the report's shape, every state reachable, and findings that are true of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrt import doctor
from agentrt.config import Config, SchedulerConfig, StoreConfig, WasmConfig
from agentrt.doctor import Check, Examined, Report, engine, host, security, timing
from agentrt.machine import Cgroup, Machine, read_machine
from agentrt.sandbox import SandboxError
from agentrt.settings import GIB
from agentrt.sizing import engine_library


@pytest.fixture
def here(tmp_path: Path) -> Examined:
    return Examined(Config(), read_machine(), tmp_path)


def with_machine(examined: Examined, **changes: Any) -> Examined:
    machine: Machine = msgspec.structs.replace(examined.machine, **changes)
    return msgspec.structs.replace(examined, machine=machine)


def only(checks: Any) -> Check:
    (check,) = checks
    return check


def test_the_worst_state_is_the_report_s() -> None:
    def check(state: Any) -> Check:
        return Check(name="x", state=state, found="y")

    assert Report(()).state == "works"
    assert Report((check("works"), check("degraded"))).state == "degraded"
    assert Report((check("refused"), check("works"), check("degraded"))).state == "refused"


def test_what_does_not_work_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WAKEUP_COUNT", 20)
    monkeypatch.setattr(timing, "FSYNC_COUNT", 4)
    report = doctor.examine(Config(store=StoreConfig(path=str(tmp_path / "not" / "yet"))))
    names = [check.name for check in report.checks]
    assert len(set(names)) == len(names)
    expected = {"kernel", "python", "cpus", "numa", "mappings", "fsync", "nice", "real-time", "wake-up", "engine"}
    assert expected | {"signal handlers", "landlock", "seccomp", "pidfd", "cgroup cpu", "cgroup memory"} <= set(names)
    for check in report.checks:
        assert check.found
        assert bool(check.why) == (check.state != "works"), check
    assert not (tmp_path / "not").exists()  # looking changes nothing
    assert json.loads(json.dumps(report.to_dict()))["checks"][0]["name"] == names[0]


def test_a_check_that_fails_is_reported_and_the_others_go_on(here: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_the_moon(examined: Examined) -> Any:
        yield Check(name="first", state="works", found="half of it")
        raise OSError("no moon")

    monkeypatch.setattr(host, "EXAMINERS", (check_the_moon, host.check_numa))
    for module in (timing, engine, security):
        monkeypatch.setattr(module, "EXAMINERS", ())
    report = doctor.examine(Config())
    assert [check.name for check in report.checks] == ["first", "the moon", "numa"]
    assert report.checks[1].state == "refused"
    assert "OSError: no moon" in report.checks[1].why


def test_more_workers_than_cpus(here: Examined) -> None:
    check = only(host.check_cpus(msgspec.structs.replace(here, config=Config(scheduler=SchedulerConfig(workers=64)))))
    assert check.state == "degraded"
    assert "more workers than usable CPUs" in check.why


def test_a_quota_is_worse_than_a_cpuset(here: Examined) -> None:
    check = only(host.check_cpus(with_machine(here, cpus=(0, 1, 2, 3), cpu_quota=1.5)))
    assert (check.state, check.data["workers"]) == ("degraded", 2)
    assert only(host.check_cpus(with_machine(here, cpus=(0, 1, 2, 3), cpu_quota=None))).state == "works"


def test_several_numa_nodes(here: Examined) -> None:
    check = only(host.check_numa(with_machine(here, nodes={0: (0,), 1: (1,)})))
    assert (check.state, check.found) == ("degraded", "2 nodes")


def test_fault_G70_controllers_are_judged_one_by_one(here: Examined) -> None:
    """On a hybrid host a v2 mount exists while memory is on v1."""
    groups = (
        Cgroup("memory", 1, Path("/sys/fs/cgroup/memory"), True),
        Cgroup("blkio", 1, Path("/sys/fs/cgroup/blkio"), True),
        Cgroup("pids", 2, Path("/sys/fs/cgroup/unified"), True),
        Cgroup("cpu", 2, Path("/sys/fs/cgroup/unified"), False),
    )
    found = {check.name: check for check in host.check_cgroups(with_machine(here, cgroups=groups))}
    assert found["cgroup pids"].state == "works"
    assert found["cgroup memory"].found == "v1 only (hybrid)"
    assert found["cgroup io"].found == "v1 only (hybrid)"
    assert found["cgroup cpu"].found == "v2, read-only"
    assert found["cgroup cpuset"].found == "not there (hybrid)"
    assert {check.state for name, check in found.items() if name != "cgroup pids"} == {"degraded"}


def test_mappings(here: Examined) -> None:
    assert only(host.check_mappings(with_machine(here, map_count_max=10**6, memory_bytes=64 * GIB))).state == "works"
    for light, state in ((False, "degraded"), (True, "works")):
        machine = with_machine(here, map_count_max=65_530, memory_bytes=64 * GIB, light_guards=light)
        assert only(host.check_mappings(machine)).state == state
    greedy = msgspec.structs.replace(here, config=Config(wasm=WasmConfig(guests_max=500_000)))
    check = only(host.check_mappings(with_machine(greedy, map_count_max=65_530)))
    assert check.state == "refused"
    assert "sysctl vm.max_map_count=" in check.hint


def test_fsync_measures_the_store_s_disk(here: Examined) -> None:
    check = only(timing.check_fsync(here))
    assert check.data["folder"] == str(here.folder)
    assert 0 < check.data["p50_us"] <= check.data["p99_us"]
    assert list(here.folder.iterdir()) == []


def test_a_store_that_cannot_be_written_is_refused(here: Examined) -> None:
    check = only(timing.check_fsync(msgspec.structs.replace(here, folder=Path("/proc"))))
    assert check.state == "refused"


def test_memory_that_looks_like_a_disk_is_not_one(here: Examined) -> None:
    shm = Path("/dev/shm")
    if timing.file_system_of(shm) != "tmpfs":
        pytest.skip("no tmpfs here")
    check = only(timing.check_fsync(msgspec.structs.replace(here, folder=shm)))
    assert check.state == "degraded"
    assert "does not survive" in check.why


def test_priorities_are_tried_and_not_kept(here: Examined) -> None:
    before = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    nice, real_time = timing.check_priorities(here)
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == before
    for check in (nice, real_time):
        assert check.state == ("works" if check.data["permitted"] else "degraded")


def children() -> set[str]:
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_wake_up_leaves_no_hogs(here: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WAKEUP_COUNT", 20)
    before = children()
    check = only(timing.check_wakeup(here))
    assert check.data["count"] == 20
    assert check.data["p50_us"] <= check.data["p99_us"] <= check.data["max_us"]
    assert children() <= before


@pytest.mark.parametrize(("percent", "expected"), [(0, 0.001), (50, 0.051), (99, 0.1), (100, 0.1)])
def test_percentile(percent: float, expected: float) -> None:
    assert timing.percentile_us(list(range(100, 0, -1)), percent) == expected


# --- the engine ----------------------------------------------------------------


def test_the_engine_works(here: Examined) -> None:
    check = only(engine.check_engine(here))
    assert check.state == "works", check
    assert check.data["version"].startswith("50.")


def test_another_version_is_refused(here: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("49.0.0", "50.0.0", "51.0.0"):
        monkeypatch.setattr(engine.importlib.metadata, "version", lambda name, version=version: version)
        check = only(engine.check_engine(here))
        assert (check.state, check.found) == ("refused", f"wasmtime {version}")


def test_a_library_that_is_none_is_refused(here: Examined, tmp_path: Path) -> None:
    library = tmp_path / "libwasmtime.so"
    library.write_bytes(b"\x7fELF nothing")
    other = msgspec.structs.replace(here, config=Config(wasm=WasmConfig(engine_lib=str(library))))
    check = only(engine.check_engine(other))
    assert check.state == "refused"
    assert check.why


def test_a_self_test_that_dies_is_told_by_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    real = subprocess.run

    def dying(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(engine.subprocess, "run", dying)
    assert engine._selftest("x") == "the self-test ended with signal 11"


@pytest.mark.parametrize("flags", [[], ["-X", "faulthandler"]])
def test_faults_trap_whether_or_not_faulthandler_was_on_before(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *flags, "-m", "agentrt.doctor.selftest", engine_library()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert json.loads(done.stdout) == {"ok": True, "why": ""}, done.stderr


def test_faulthandler_is_reported() -> None:
    code = (
        "from agentrt.doctor.engine import check_faulthandler; from agentrt.doctor import Examined; "
        "print(next(iter(check_faulthandler(None))).state)"
    )
    for flags, state in (([], "works"), (["-X", "faulthandler"], "degraded")):
        done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == state


def test_the_table_of_needs_follows_from_the_findings() -> None:
    from agentrt.doctor.needs import NEEDS

    names = {check.name for check in doctor.examine(Config()).checks}
    assert all(names & set(need.checks) for need in NEEDS if need.checks), "a need that the doctor never looks at"
    cgroups = next(need for need in NEEDS if need.checks == ("cgroup cpu",))
    assert cgroups.here(()) is None
    kept = next(need for need in NEEDS if set(need.checks) == {"landlock", "seccomp"})
    works = Check(name="landlock", state="works", found="x")
    assert kept.here([works]) == "works"
    assert kept.here([works, Check(name="seccomp", state="degraded", found="x")]) == "degraded"
    report = Report((works,)).to_dict()
    assert [need["what"] for need in report["needs"]] == [need.what for need in NEEDS]


def test_asking_whether_memory_can_be_bound_binds_nothing(here: Examined) -> None:
    from agentrt.machine import memory_nodes

    before = memory_nodes()
    assert only(host.check_numa_memory(here)).name == "numa memory"
    assert memory_nodes() == before


def test_native_processes_are_tried(here: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrt.backends.process import means

    check = only(security.check_native_processes(here))
    assert check.state in ("works", "degraded", "refused")
    assert (check.state == "works") is (check.why == "")
    monkeypatch.setattr(means, "_try", refuse)
    check = only(security.check_native_processes(here))
    assert check.state == "refused" and "for this test" in check.why


def refuse(*_: object) -> None:
    raise SandboxError("no, for this test")
