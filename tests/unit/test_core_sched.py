"""Scheduling through the binding: what a guest computes does not depend on it; tiers, quanta, foreign tasks."""

import hashlib
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from core_fixture import Control, Run, control, script

from agentrt.errors import InputError

ROUNDS = struct.pack("<I", 30_000)


def outcome(run: Run) -> tuple[object, ...]:
    """What must be the same in every execution: reason, code, output, fuel."""
    assert run.exit is not None
    reason, code, output, _message, fuel, *_ = run.exit
    return reason, code, output, fuel


def alone(name: str, data: bytes) -> tuple[object, ...]:
    with control(workers=1, micro_slice_fuel=2**40) as c:
        run = c.submit(name, data)
        c.until(lambda: run.exit is not None)
        return outcome(run)


# --- determinism (law 10) ---------------------------------------------------------


@pytest.mark.parametrize("micro_slice", [1, 17, 1000, 9_999, 50_000, 1_000_000, 2**62])
def test_result_and_fuel_do_not_depend_on_micro_slices(micro_slice: int) -> None:
    expected = alone("compute", ROUNDS)
    with control(micro_slice_fuel=micro_slice) as c:
        runs = [c.submit("compute", ROUNDS, tier=i % 4) for i in range(4 if micro_slice < 100 else 20)]
        c.until(lambda: all(run.exit for run in runs))
        assert {outcome(run) for run in runs} == {expected}
        c.audit()


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(10))
def test_result_and_fuel_do_not_depend_on_preemption(seed: int) -> None:
    """Hundreds of executions, preempted at random by each other, by urgent work and by quanta of microseconds."""
    rounds = struct.pack("<I", 600_000)  # longer than any quantum below, on any machine
    expected = alone("compute", rounds)
    rng = random.Random(seed)
    with control(
        workers=1 + seed % 3,
        micro_slice_fuel=rng.choice((300, 5_000, 50_000)),
        quantum_ns=tuple(rng.randrange(20_000, 100_000) for _ in range(4)),
        aging_threshold=rng.choice((0, 3, 50)),
        stacks_max=rng.choice((2, 5, 300)),
        tier0_share_pct=rng.choice((10, 100)),
    ) as c:
        runs = [c.submit("compute", rounds, tier=rng.randrange(4), tenant=rng.randrange(16)) for _ in range(40)]
        urgent: list[Run] = []
        while not all(run.exit for run in runs):
            if len(urgent) < 500:
                urgent.append(c.submit("hello", b"u", tier=0))
            c.take()
        c.until(lambda: all(run.exit for run in urgent))
        assert {outcome(run) for run in runs} == {expected}
        assert sum(run.exit[8] for run in runs if run.exit) + sum(run.exit[9] for run in runs if run.exit) > 0
        c.audit()


def replay_history(c: Control, data: bytes, shuffle: random.Random) -> tuple[tuple[object, ...], list[int]]:
    """Runs a talker, answering in random order; returns the outcome and the order of the answers it was given."""
    order: list[int] = []
    run = c.submit("talker", data)
    open_handles: list[int] = []
    known = 0
    while run.exit is None:
        c.until(lambda: run.exit is not None or len(run.requests) > known or bool(run.waits))  # noqa: B023
        open_handles += [handle for handle, _, _ in run.requests[known:]]
        known = len(run.requests)
        if run.exit is None and run.waits and open_handles:
            handle = open_handles.pop(shuffle.randrange(len(open_handles)))
            order.append(handle)
            run.reply(handle, handle.to_bytes(4, "little"))
            run.waits.clear()
        elif run.exit is None:
            c.take()
    return outcome(run), order


def test_replay_in_recorded_order_gives_the_same_run() -> None:
    data = struct.pack("<II", 9, 1000)
    with control() as c:
        histories = [replay_history(c, data, random.Random(seed)) for seed in range(20)]
        assert len({str(order) for _, order in histories}) > 10
        for expected, order in histories:
            run = c.submit("talker", data, replay=True)
            for handle in order:
                c.until(lambda: bool(run.waits))  # noqa: B023
                assert handle in run.waits[-1]
                run.waits.clear()
                run.reply(handle, handle.to_bytes(4, "little"))
            run.guest.go_live()
            c.until(lambda: run.exit is not None)  # noqa: B023
            assert outcome(run) == expected
        c.audit()


def test_seed_and_clock_come_from_the_caller() -> None:
    data = script(("random", 0x100, 8), ("peek", 0x100), ("clock_now",))
    with control() as c:
        digests = []
        for seed, clock_ns in ((b"a" * 16, 5), (b"a" * 16, 5), (b"b" * 16, 5), (b"a" * 16, 10**18)):
            run = c.submit("script", data, seed=seed, clock_ns=clock_ns)
            c.until(lambda: run.exit is not None)  # noqa: B023
            digests.append(hashlib.sha256(repr(outcome(run)).encode()).hexdigest())
        assert digests[0] == digests[1]
        assert len(set(digests)) == 3


# --- tiers --------------------------------------------------------------------------


def test_urgent_run_ends_while_hogs_hold_all_workers() -> None:
    with control(quantum_ns=(50_000_000,) * 4) as c:
        hogs = [c.submit("asker", tier=3) for _ in range(20)]
        c.until(lambda: any(hog.requests for hog in hogs))
        for _ in range(50):
            urgent = c.submit("hello", b"now", tier=0)
            c.until(lambda: urgent.exit is not None)  # noqa: B023
        assert not any(hog.exit for hog in hogs)
        for hog in hogs:
            hog.guest.kill()
        c.until(lambda: all(hog.exit for hog in hogs))
        assert c.core.statistics()["preemptions"] > 0
        c.audit()


def test_a_hog_sinks_and_a_step_lifts_it() -> None:
    spins = [("spin", 40_000_000)] * 4
    with control(workers=1, quantum_ns=(5_000_000,) * 4) as c:
        run = c.submit("script", script(*spins, ("call", 1, 0, 0, 0, 0), *spins), tier=0)
        c.until(lambda: bool(run.waits))
        before = c.core.statistics()
        assert before["demotions"] == 3
        assert before["slot_ns"][3] > 0
        run.reply(1)
        c.until(lambda: run.exit is not None)
        after = c.core.statistics()
        assert after["slot_ns"][0] > before["slot_ns"][0]  # it began at its base tier again
        assert after["demotions"] == 6
        assert run.exit is not None and run.exit[9] == 6


def test_aging_lets_the_lowest_tier_through() -> None:
    with control(workers=1, aging_threshold=5, quantum_ns=(1_000_000,) * 4) as c:
        low = c.submit("hello", b"low", tier=3)
        done = 0
        while low.exit is None:
            high = [c.submit("hello", b"high", tier=1) for _ in range(10)]
            c.until(lambda: all(run.exit for run in high) or low.exit is not None)  # noqa: B023
            done += 10
            assert done < 10_000
        c.until(lambda: c.core.statistics()["admitted"] == 0, events=False)


def test_waiting_runs_hold_no_slot() -> None:
    with control(workers=1) as c:
        waiting = [c.submit("script", script(("call", 1, 0, 0, 0, 0)), tier=0) for _ in range(200)]
        c.until(lambda: all(run.waits for run in waiting))
        other = c.submit("hello", b"x", tier=3)
        c.until(lambda: other.exit is not None)
        for run in waiting:
            run.reply(1)
        c.until(lambda: all(run.exit for run in waiting))
        c.audit()


# --- foreign tasks --------------------------------------------------------------------


@contextmanager
def spinner() -> Iterator[tuple[int, int]]:
    """A process that spins: its pid and a pidfd."""
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-Sc", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        pidfd = os.pidfd_open(child.pid)
        try:
            yield child.pid, pidfd
        finally:
            child.send_signal(signal.SIGKILL)
            os.close(pidfd)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_foreign_process_is_stopped_for_urgent_work_and_goes_on() -> None:
    with control(workers=1) as c, spinner() as (pid, pidfd):
        slot = c.foreign(pidfd, tier=2)
        c.until(lambda: slot.state == "granted")
        hog = c.submit("asker", tier=0)
        c.until(lambda: bool(hog.requests) and slot.state == "preempted")
        c.until(lambda: process_state(pid) == "T", events=False)
        hog.guest.kill()
        c.until(lambda: hog.exit is not None and slot.state == "granted")
        c.until(lambda: process_state(pid) == "R", events=False)
        slot.foreign.release()
        slot.foreign.release()
        c.until(lambda: slot.state == "released")
        assert [name for name, _, _ in slot.events] == ["granted", "preempted", "granted", "released"]
        assert slot.events[-1] == ("released", 2, 1)
        assert slot.foreign.owner is None
        slot.foreign.release()
        c.audit()


def test_foreigns_share_by_quanta() -> None:
    with control(workers=1, quantum_ns=(2_000_000,) * 4) as c:
        slots = [c.foreign(tier=3) for _ in range(3)]
        c.until(lambda: all(sum(e[0] == "preempted" for e in slot.events) >= 3 for slot in slots))
        for slot in slots:
            slot.foreign.release()
        c.until(lambda: all(slot.state == "released" for slot in slots))
        for slot in slots:
            grants, preemptions = slot.events[-1][1:]
            assert 0 <= grants - preemptions <= 1
        c.audit()


def test_a_foreign_in_the_queue_can_be_released() -> None:
    with control(workers=1) as c:
        holder = c.foreign(tier=1)
        c.until(lambda: holder.state == "granted")
        waiting = c.foreign(tier=1)
        waiting.foreign.release()
        c.until(lambda: waiting.state == "released")
        assert waiting.events == [("released", 0, 0)]
        holder.foreign.release()
        c.until(lambda: holder.state == "released")
        c.audit()


# --- tier lending -----------------------------------------------------------------------


def lend(of: Any, tier: int | None) -> None:
    while not of.lend(tier):
        pass


def test_a_lent_tier_holds_in_the_queue_while_it_runs_and_while_it_waits() -> None:
    with control(workers=1, quantum_ns=(2**36,) * 4) as c:
        hog = c.submit("asker", tier=1)
        c.until(lambda: bool(hog.requests))
        low = c.submit("script", script(("call", 1, 0, 0, 0, 0), ("spin", 2**31 - 1), ("spin", 2**31 - 1)), tier=3)
        lend(low.guest, 0)
        c.until(lambda: bool(low.waits))
        lend(low.guest, None)
        lend(low.guest, 0)
        low.reply(1)
        c.until(lambda: low.guest.ran_ns > 20_000_000, events=False)
        assert hog.guest.scheduler_state == "PREEMPTED" and c.core.statistics()["demotions"] == 0
        ran_ns = hog.guest.ran_ns
        lend(low.guest, None)
        c.until(lambda: hog.guest.ran_ns > ran_ns + 1_000_000, events=False)
        assert low.guest.scheduler_state == "PREEMPTED"
        with pytest.raises(InputError):
            low.guest.lend(9)
        for run in (low, hog):
            run.guest.kill()
        c.until(lambda: low.exit is not None and hog.exit is not None)
        assert low.guest.lend(0) and low.guest.ran_ns == 0  # too late, and harmless
        c.audit()


def test_a_lent_turn_of_a_process_takes_the_slot() -> None:
    with control(workers=1) as c, spinner() as (pid, pidfd):
        hog = c.submit("asker", tier=1)
        c.until(lambda: bool(hog.requests))
        slot = c.foreign(pidfd, tier=3)
        lend(slot.foreign, 0)
        c.until(lambda: slot.state == "granted")
        lend(slot.foreign, None)
        c.until(lambda: slot.state == "preempted")
        c.until(lambda: process_state(pid) == "T", events=False)
        hog.guest.kill()
        c.until(lambda: hog.exit is not None and slot.state == "granted")
        slot.foreign.release()
        c.until(lambda: slot.state == "released")
        assert slot.foreign.lend(0)
        c.audit()
