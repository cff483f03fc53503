"""The small parts: the recovery plan, the commit delay, the loop's watch, crash points, the bridge."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine import crashpoints
from agentrt.engine.control import ControlThread
from agentrt.engine.flusher import FineTimer, Flusher
from agentrt.engine.loopwatch import LongTurn, LoopWatch
from agentrt.engine.priority import raise_thread
from agentrt.engine.recovery import RecoveryPlan
from agentrt.errors import ClosedError, ConfigError, StoreError
from agentrt.stores.memory import MemoryStore
from agentrt.testing.stores import Script

# --- recovery plan ------------------------------------------------------------------------

Entry = tuple[int, int, int, int]  # tier, accepted, run, version


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 30), st.integers(0, 3)), max_size=60),
    st.lists(st.integers(0, 3), max_size=4),
    st.sets(st.integers(0, 30), max_size=8),
)
def test_the_plan_gives_every_run_of_a_registered_version_once_in_order(
    entries: list[Entry], registered: list[int], discarded: set[int]
) -> None:
    plan = RecoveryPlan(10**9)
    expected: dict[str, tuple[int, int, str, str]] = {}
    half = len(registered) // 2
    for version in registered[:half]:
        plan.register(f"v{version}")
    for tier, accepted, number, version in entries:
        plan.add(tier, accepted, f"r{number}", f"v{version}")
        expected.setdefault(f"r{number}", (tier, accepted, f"r{number}", f"v{version}"))
    for number in discarded:
        plan.discard(f"r{number}")
        expected.pop(f"r{number}", None)
    for version in registered[half:]:
        plan.register(f"v{version}")
    assert len(plan) == len(expected)
    due = sorted(entry for entry in expected.values() if entry[3] in {f"v{version}" for version in registered})
    taken = plan.take(1, 1000)
    assert taken == [entry[2] for entry in due]
    assert sorted(plan.take_kept(1000)) == sorted({*expected} - {*taken})
    assert len(plan) == 0 and plan.kept == 0


def test_the_plan_keeps_the_pace() -> None:
    plan = RecoveryPlan(100)  # per second; at most 2 at once
    plan.register("v")
    for number in range(1000):
        plan.add(number % 4, number, f"r{number}", "v")
    second, taken = 1_000_000_000, 0
    for turn in range(100):
        taken += len(plan.take(1 + turn * second // 100, 64))
    assert 99 <= taken <= 102
    assert len(plan.take(3600 * second, 64)) == 2  # time that passed unused does not add up
    assert plan.take(3601 * second, 0) == []


def test_the_plan_waits_for_memories_that_come_back() -> None:
    second, size = 1_000_000_000, 500
    plan = RecoveryPlan(10**6, 1000)
    plan.register("v")
    for number in range(1000):
        plan.add(number % 4, number, f"r{number}", "v")
    at, taken = [], 0
    for turn in range(1000):
        for _ in plan.take(1 + turn * second // 100, 1):
            plan.charge(size)
            at.append(turn)
            taken += 1
    assert 19 <= taken <= 21  # ten seconds, half a second each
    assert all(later - earlier >= 48 for earlier, later in pairwise(at))
    assert len(plan.take(3600 * second, 64)) == 64  # what does not come back from a frame is not charged
    plan.charge(10 * size)
    assert plan.take(3601 * second, 64) == [] and len(plan.take(3606 * second, 64)) == 64


# --- commit delay -------------------------------------------------------------------------


class Machine:
    """What the flusher sees of a machine."""

    def __init__(self, now: int) -> None:
        self.pending_since_ns = now
        self.waits = True
        self.joining = True
        self.queued = False  # its guest has no CPU slot yet
        self.unheard = False  # it has asked for more, and the loop does not know yet
        self.flushed = 0

    def flush(self) -> None:
        self.flushed += 1
        self.waits = False


def test_who_has_no_slot_yet_is_given_longer_to_ask_for_more_but_not_for_ever() -> None:
    async def main() -> None:
        now = 0
        flusher = Flusher(asyncio.get_running_loop(), 200_000, lambda: now)
        queued, asked_nothing = Machine(0), Machine(0)
        queued.queued = True
        for machine in (queued, asked_nothing):
            flusher.add(machine)  # type: ignore[arg-type]
        now = 49_900_000
        while not asked_nothing.flushed:
            await asyncio.sleep(0)
        assert not queued.flushed and queued.joining
        ran = Machine(now)
        ran.queued = True
        flusher.add(ran)  # type: ignore[arg-type]
        now = 50_100_000
        while not queued.flushed:
            await asyncio.sleep(0)
        assert not ran.flushed
        ran.queued = False  # it got a slot, and asked for nothing
        while not ran.flushed:
            await asyncio.sleep(0)
        flusher.close()

    uvloop.run(main())


def test_who_was_answered_after_the_bell_or_has_an_event_on_its_way_is_not_flushed_by_a_long_turn() -> None:
    async def main() -> None:
        now = 0
        flusher = Flusher(asyncio.get_running_loop(), 200_000, lambda: now)
        lone, unheard, later = Machine(0), Machine(0), Machine(30_000_000)
        unheard.unheard = True
        for machine in (lone, unheard, later):
            flusher.add(machine)  # type: ignore[arg-type]
        now = 40_000_000  # the turn in which `later` was answered took so long
        flusher._flush_due(300_000)
        assert (lone.flushed, unheard.flushed, later.flushed) == (1, 0, 0)
        later.pending_since_ns = 60_000_000  # a clock that was set back
        unheard.unheard = False  # its event was about something else
        flusher._flush_due(300_000)
        assert unheard.flushed and later.flushed
        flusher.close()

    uvloop.run(main())


def test_the_fine_timer_is_finer_than_the_loops() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        waits = []
        for _ in range(40):
            fired = asyncio.Event()
            timer = FineTimer(loop, fired.set)
            began = time.perf_counter_ns()
            timer.arm(200_000)
            await fired.wait()
            waits.append(time.perf_counter_ns() - began)
            timer.close()
            timer.close()
        assert min(waits) >= 200_000
        assert sorted(waits)[5] < 900_000, waits  # a loop timer takes 1 ms and more

    uvloop.run(main())


def test_outcomes_are_flushed_after_the_delay_unless_they_found_company() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        now, busy = 0, False
        flusher = Flusher(loop, 200_000, lambda: now, lambda: busy)
        lone, joined, newer = Machine(0), Machine(0), Machine(0)
        for machine in (lone, joined, newer):
            flusher.add(machine)  # type: ignore[arg-type]
        joined.waits = False  # committed with its guest's next step
        newer.pending_since_ns = 150_000  # the same, and has the next outcome already
        now = 210_000
        while not lone.flushed:
            await asyncio.sleep(0)
        assert (lone.flushed, joined.flushed, newer.flushed) == (1, 0, 0)
        assert (lone.joining, joined.joining, newer.joining) == (False, False, True)
        busy, now = True, 400_000  # the store has enough to do
        for _ in range(200):
            await asyncio.sleep(0)
        assert not newer.flushed
        now = 3_000_000
        while not newer.flushed:
            await asyncio.sleep(0)
        last = Machine(now)
        flusher.add(last)  # type: ignore[arg-type]
        flusher.flush_all()
        assert last.flushed == 1 and flusher.alone == 2
        flusher.close()

    uvloop.run(main())


# --- the loop's watch -----------------------------------------------------------------------


def burn(cpu_ns: int) -> None:
    until = time.thread_time_ns() + cpu_ns
    while time.thread_time_ns() < until:
        pass


def test_a_turn_that_blocks_is_reported_with_the_line_and_one_that_sleeps_is_innocent() -> None:
    async def main() -> None:
        turns: list[LongTurn] = []
        watch = LoopWatch(asyncio.get_running_loop(), cpu_max_ns=20_000_000, interval_ns=2_000_000, report=turns.append)
        await asyncio.sleep(0.02)
        time.sleep(0.06)  # noqa: ASYNC251
        await asyncio.sleep(0.02)
        assert not turns
        burn(80_000_000)
        await asyncio.sleep(0.05)
        assert turns and turns[0].cpu_ns > 20_000_000 and watch.long_turns == len(turns)
        assert any("burn" in turn.stack for turn in turns)
        beat = watch.heartbeat_ns
        await asyncio.sleep(0.05)
        assert watch.heartbeat_ns > beat
        watch.close()

    uvloop.run(main())


# --- crash points -------------------------------------------------------------------------------


def test_closing_the_watch_between_two_pings_ends_it() -> None:
    async def main() -> None:
        watch = LoopWatch(asyncio.get_running_loop(), cpu_max_ns=1_000_000, interval_ns=1_000_000)
        told = threading.Event()

        class Closing(threading.Event):
            """`close` happens just before the watcher asks."""

            def clear(self) -> None:
                watch._stop.set()
                self.set()
                told.set()
                super().clear()

        watch._pong = Closing()
        told.wait(5)  # the loop answers no more: it waits for the watcher
        watch._thread.join(5)
        assert told.is_set() and not watch._thread.is_alive()

    uvloop.run(main())


@pytest.mark.parametrize("text", ["", "nowhere:1", "end.durable", "end.durable:0", "end.durable:x", "end.durable:-1"])
def test_a_crash_point_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        crashpoints.parse(text)


def test_the_nth_pass_kills_the_process() -> None:
    code = (
        "from agentrt.engine.crashpoints import hit\n"
        "for n in range(5):\n hit('end.durable'); hit('tool.outcome'); print(n, flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {crashpoints.VARIABLE: "tool.outcome:3"}, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL and done.stdout == b"0\n1\n"
    assert not crashpoints.ARMED  # in this process


def test_every_pass_is_told_to_who_asks_for_it() -> None:
    code = (
        "from agentrt.engine.crashpoints import act_with, hit\n"
        "for n in range(2):\n act_with(lambda name, count: print(name, count, flush=True))\n"
        " hit('end.durable'); hit('tool.outcome'); hit('end.durable')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {crashpoints.VARIABLE: crashpoints.EVERY}, capture_output=True
    )
    assert done.returncode == 0
    assert done.stdout.decode().splitlines() == ["end.durable 1", "tool.outcome 1", "end.durable 2"] * 2
    kills = subprocess.run(
        [sys.executable, "-c", "from agentrt.engine.crashpoints import hit\nhit('end.durable')"],
        env=os.environ | {crashpoints.VARIABLE: crashpoints.EVERY},
    )
    assert kills.returncode == -signal.SIGKILL


# --- the model store -----------------------------------------------------------------------------


def test_the_model_store_acknowledges_in_order_and_a_bounded_number_in_a_turn() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop)
        told: list[int] = []
        raised: list[Any] = []
        loop.set_exception_handler(lambda loop, context: raised.append(context["exception"]))

        def give(number: int) -> None:
            def done(error: StoreError | None) -> None:
                assert error is None
                told.append(number)
                if number == 5:
                    raise ValueError("mine")

            store.commit(Script().accept(), done)

        for number in range(2_000):
            give(number)
        assert told == []  # never from within commit
        turns = 0
        while len(told) < 2_000:
            before = len(told)
            await asyncio.sleep(0)
            assert len(told) - before <= 512
            turns += 1
        assert 4 <= turns <= 6
        assert told == [*range(2_000)]
        assert [str(error) for error in raised] == ["mine"]  # and harms no other
        await asyncio.to_thread(give, 2_000)  # from another thread: the loop is woken
        await asyncio.wait_for(_until(lambda: told[-1] == 2_000), 5)

    asyncio.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# --- the bridge ----------------------------------------------------------------------------------


@pytest.fixture
def control() -> Any:
    thread = ControlThread()
    thread.start()
    yield thread
    if not thread._stopped:
        thread.stop()


def test_calls_from_many_threads_arrive_once_and_in_order(control: ControlThread) -> None:
    got: list[tuple[int, int]] = []
    start = threading.Barrier(4)

    def post(name: int) -> None:
        start.wait()
        for number in range(2000):
            control.post(lambda number=number: got.append((name, number)))  # type: ignore[misc]

    threads = [threading.Thread(target=post, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    control.ask_sync(lambda done: done(None, None))
    assert len(got) == 8000
    for name in range(4):
        assert [number for by, number in got if by == name] == list(range(2000))


def test_urgent_calls_go_first_and_shut_nobody_out(control: ControlThread) -> None:
    """A quarter of the turns is the others', should all say that theirs are urgent."""
    held, made = threading.Event(), threading.Event()
    order: list[str] = []
    control.post(held.wait)
    for _ in range(20):
        control.post(order.append, "other")
    for _ in range(9):
        control.post_urgent(order.append, "urgent")
    control.post(made.set)
    held.set()
    assert made.wait(60)
    first = "".join(name[0] for name in order)[:12]
    assert sorted(order) == ["other"] * 20 + ["urgent"] * 9
    assert first.count("u") == 9 and "oo" not in first


def test_answers_and_errors_come_back_to_asyncio_and_to_threads(control: ControlThread) -> None:
    def good(done: Any) -> None:
        done(threading.get_ident(), None)

    def bad(done: Any) -> None:
        done(None, ClosedError("no"))

    async def waits() -> str:
        await asyncio.sleep(0.001)
        return "slept"

    async def main() -> None:
        answers = await asyncio.gather(*(control.ask(good) for _ in range(500)))
        assert set(answers) == {control._thread.ident}
        with pytest.raises(ClosedError):
            await control.ask(bad)
        assert await control.ask(control.operation(waits)) == "slept"

    asyncio.run(main())
    assert control.ask_sync(good) == control._thread.ident
    with pytest.raises(ClosedError):
        control.ask_sync(bad)
    assert control.ask_sync(control.operation(waits)) == "slept"


def test_who_gives_up_is_undone(control: ControlThread) -> None:
    undone = threading.Event()

    def never(done: Any) -> Any:
        return undone.set

    with pytest.raises(TimeoutError):
        control.ask_sync(never, 0.01)
    assert undone.wait(5)
    undone.clear()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(control.ask(never), 0.01)

    asyncio.run(main())
    assert undone.wait(5)


def test_a_stopped_thread_says_so(control: ControlThread) -> None:
    control.stop()
    with pytest.raises(ClosedError):
        control.post(lambda: None)
    with pytest.raises(ClosedError):
        control.ask_sync(lambda done: done(None, None))


def test_the_control_thread_cannot_wait_for_itself(control: ControlThread) -> None:
    def ask(done: Any) -> None:
        try:
            control.ask_sync(lambda inner: inner(1, None))
        except RuntimeError as error:
            done(str(error), None)

    assert "itself" in control.ask_sync(ask)


# --- priority ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nice", "realtime"), [(0, False), (-5, False), (0, True)])
def test_priority_says_what_is_in_force_and_children_do_not_inherit_it(nice: int, realtime: bool) -> None:
    said: list[Any] = []

    def body() -> None:
        said.append(raise_thread(threading.get_native_id(), nice=nice, realtime=realtime))
        policy = os.sched_getscheduler(0)
        child = os.fork()
        if child == 0:
            os._exit(0 if os.sched_getscheduler(0) == os.SCHED_OTHER and os.nice(0) >= 0 else 1)
        said.append((policy, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    text, (policy, child_status) = said
    assert child_status == 0
    if "SCHED_RR" in text:
        assert policy & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR
    else:
        assert text.startswith("nice ")


def test_recent_results_are_told_at_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrt.engine import waiters as module
    from agentrt.engine.info import RunResult
    from agentrt.records import Cost
    from agentrt.states import RunState

    monkeypatch.setattr(module, "RECENT_MAX", 3)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        asked: list[str] = []
        waiters = module.Waiters(loop, None, None)  # type: ignore[arg-type]
        monkeypatch.setattr(waiters, "look", lambda run_id, last: asked.append(run_id))

        def result(number: int, text: bytes = b"1") -> RunResult:
            return RunResult(f"run_{number}", RunState.SUCCEEDED, text, None, Cost(), 1)

        for number in range(4):
            waiters.ended(result(number))
        waiters.ended(result(9, b"x" * (module.RECENT_BYTES_MAX + 1)))
        told: list[str] = []
        for number in (0, 1, 2, 3, 9):
            waiters.add(f"run_{number}", lambda found, error: told.append(found.run_id if found else "?"), live=False)
        assert told == []  # never from within add
        await asyncio.sleep(0)
        assert told == ["run_1", "run_2", "run_3"]
        assert asked == ["run_0", "run_9"]  # too old, and too large: the store knows

    asyncio.run(main())
