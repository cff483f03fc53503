"""Tool hosts as processes: what runs in them, what ends them, and what the node's loop sees of it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tools_fixture as fixture
from tool_kit import SECOND_NS, Node, below, hosts_of, is_running, node, wait_until

from agentrt.errors import ClosedError, InputError, QueueFullError, UnknownToolError
from agentrt.tools import ToolOutcome, ToolSpec, describe_tools
from agentrt.tools.importing import tools_in

pytestmark = pytest.mark.timeout(120)

# --- calls ---------------------------------------------------------------------


def test_sync_and_async_tools_answer() -> None:
    async def test(node: Node) -> None:
        assert await node.value("echo", value={"a": [1, 2.5, None, "ü"]}) == {"a": [1, 2.5, None, "ü"]}
        assert await node.value("echo_sync", value="x") == "x"
        assert await node.value("geo.shift", point={"x": 1}, by=2) == {"x": 3, "y": 0}
        told = await node.value("whoami")
        assert told["key"] == "key-whoami" and told["attempt"] == 1 and told["pid"] != os.getpid()
        outcome = await node.begin("sleep_sync", seconds=0.05)
        assert outcome.ok and 0.05e9 <= outcome.cost_ns < 5e9

    node(test)


def test_what_the_caller_got_wrong_is_raised_at_once() -> None:
    async def test(node: Node) -> None:
        with pytest.raises(UnknownToolError):
            node.begin("no_such_tool")
        with pytest.raises(InputError, match="more than 1048576"):
            node.begin("echo", value="x" * (1 << 20))
        assert node.pool.statistics().calls == 0

    node(test)


def test_what_the_guest_got_wrong_is_a_typed_answer() -> None:
    async def test(node: Node) -> None:
        assert await node.code("geo.shift", point={"x": "1"}) == "tool_args"
        assert await node.code("geo.shift", point={"x": 1, "y": -1}) == "tool_args"
        assert await node.code("echo") == "tool_args"
        assert await node.code("echo", value=1, other=2) == "tool_args"
        assert await node.code("whoami", idempotency_key="forged") == "tool_args"

    node(test)


def test_what_a_tool_raises_reaches_the_caller_and_no_one_else() -> None:
    async def test(node: Node) -> None:
        pid = (await node.value("whoami"))["pid"]
        for how, text in (
            ("value", "ValueError: no"),
            ("tool", "no"),
            ("exit", "SystemExit: no"),
            ("interrupt", "KeyboardInterrupt: no"),
            ("cancelled", "CancelledError"),
        ):
            outcome = await node.begin("fail", text="no", how=how)
            assert outcome.code == "tool_failed" and not outcome.host_died
            assert msgspec.json.decode(outcome.payload)["message"] == text
        assert await node.code("fail_sync", text="no") == "tool_failed"
        outcome = await node.begin("fail", text="long" * 10_000)
        assert len(outcome.payload) < 8192
        assert (await node.value("whoami"))["pid"] == pid

    node(test)


def test_results_are_bounded_and_json() -> None:
    async def test(node: Node) -> None:
        assert len(await node.value("big", size=100_000 - 2)) == 99_998
        assert await node.code("big", size=100_000 - 1) == "tool_result_too_big"
        assert await node.value("result_of", what="set") == [1]
        for what in ("object", "cycle", "surrogate"):
            assert await node.code("result_of", what=what) == "tool_result"

    node(test, result_bytes_max=100_000)


def test_large_arguments_and_results_pass_in_both_directions_at_once() -> None:
    async def test(node: Node) -> None:
        text = "ü" * 400_000
        futures = [node.begin("echo", value=text) for _ in range(40)]
        for future in futures:
            outcome = await future
            assert outcome.ok and msgspec.json.decode(outcome.payload) == text

    node(test)


def test_many_calls_run_at_once_in_one_host_and_each_gets_its_own_answer() -> None:
    async def test(node: Node) -> None:
        futures = [node.begin("echo", value=i) for i in range(5000)]
        assert [msgspec.json.decode((await future).payload) for future in futures] == list(range(5000))
        statistics = node.pool.statistics()
        assert statistics.queued == statistics.running == statistics.queued_bytes == 0

    node(test, hosts_per_domain_max=1)


def test_tools_registered_later_reach_a_running_host() -> None:
    async def test(node: Node) -> None:
        pid = (await node.value("whoami"))["pid"]
        node.pool.registry.add(next(spec for spec in tools_in(fixture) if spec.name == "geo.shift"))
        assert await node.value("geo.shift", point={"x": 1}) == {"x": 2, "y": 0}
        assert (await node.value("whoami"))["pid"] == pid

    node(test, specs=[spec for spec in tools_in(fixture) if spec.name == "whoami"])


def test_tools_of_a_file_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    (tmp_path / "neighbour.py").write_text("value = 7\n")
    file.write_text(
        "import neighbour\nfrom agentrt.tools import tool\n@tool(kind='pure')\ndef seven() -> int:\n"
        "    return neighbour.value\n"
    )

    async def test(node: Node) -> None:
        assert await node.value("seven") == 7

    node(test, specs=describe_tools(str(file)))


def test_the_queue_is_bounded_in_items_and_bytes() -> None:
    async def fill(node: Node, **args: Any) -> int:
        futures = []
        with pytest.raises(QueueFullError):
            for _ in range(1000):
                futures.append(node.begin("echo", **args))
        for future in futures:
            assert (await future).ok
        assert (await node.begin("echo", **args)).ok
        return len(futures)

    async def items(node: Node) -> None:
        assert await fill(node, value=1) == 50

    async def size(node: Node) -> None:
        assert await fill(node, value="x" * 9_990) == 9  # 10,004 bytes each

    node(items, queue_items_max=50)
    node(size, queue_bytes_max=100_000)


def test_a_callback_that_raises_is_reported_and_harms_no_other_call() -> None:
    async def test(node: Node) -> None:
        reported: list[dict[str, Any]] = []
        node.pool.loop.set_exception_handler(lambda _, context: reported.append(context))

        def bad(_: ToolOutcome) -> None:
            raise RuntimeError("in done")

        node.pool.call("echo", b'{"value": 1}', key=None, tenant="t", tier=1, attempt=1, done=bad)
        assert await node.value("echo", value=2) == 2
        assert [str(context["exception"]) for context in reported] == ["in done"]

    node(test)


# --- time-outs -----------------------------------------------------------------


def test_an_async_tool_that_overruns_is_cancelled_alone() -> None:
    async def test(node: Node) -> None:
        slow = node.begin("sleep_long", seconds=0.6)
        pid = (await node.value("whoami"))["pid"]
        began = time.monotonic()
        assert await node.code("sleep_async", seconds=30) == "tool_timeout"
        assert 0.15 < time.monotonic() - began < 25
        assert msgspec.json.decode((await slow).payload) == pid  # in the same host, undisturbed
        assert node.pool.statistics().hosts_started == 2  # it and the spare

    node(test)


@pytest.mark.parametrize(("name", "args"), [("stubborn", {}), ("spin", {})])
def test_a_tool_that_cannot_be_stopped_ends_its_host(name: str, args: dict[str, Any]) -> None:
    async def test(node: Node) -> None:
        pid = (await node.value("whoami"))["pid"]
        other = node.begin("sleep_long", seconds=30)
        overrun = await node.begin(name, **args)
        assert overrun.code == "tool_timeout" and not overrun.host_died and overrun.unknown
        died = await other
        assert died.code == "tool_host_died" and died.host_died and died.unknown
        await wait_until(lambda: not is_running(pid), "the host is gone")
        assert (await node.value("whoami"))["pid"] != pid

    node(test)


def test_a_caller_may_shorten_the_timeout() -> None:
    async def test(node: Node) -> None:
        future: asyncio.Future[ToolOutcome] = node.pool.loop.create_future()
        node.pool.call(
            "sleep_long",
            b'{"seconds": 20}',
            key=None,
            tenant="t",
            tier=1,
            attempt=1,
            done=future.set_result,
            timeout_ns=SECOND_NS // 10,
        )
        assert (await future).code == "tool_timeout"

    node(test)


def test_fault_L44_threads_and_processes_stay_flat_over_many_timeouts() -> None:
    async def test(node: Node) -> None:
        threads = await node.value("threads")
        for _ in range(10):  # async: 1,000 in one host
            outcomes = await asyncio.gather(*(node.begin("sleep_async", seconds=30) for _ in range(100)))
            assert {outcome.code for outcome in outcomes} == {"tool_timeout"}
        assert await node.value("threads") == threads
        own_threads, own_files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        for _ in range(6):  # sync: each costs its host
            outcomes = await asyncio.gather(*(node.begin("sleep_sync", seconds=30) for _ in range(8)))
            assert {outcome.code for outcome in outcomes} == {"tool_timeout"}
        await wait_until(lambda: node.pool.statistics().hosts <= 2, "only the host in use and the spare remain")
        assert len(os.listdir("/proc/self/task")) <= own_threads
        assert len(os.listdir("/proc/self/fd")) <= own_files
        assert await node.value("threads") == threads

    node(test, hosts_per_domain_max=1)


def test_fault_L38_a_blocked_tool_does_not_block_the_loop() -> None:
    async def test(node: Node) -> None:
        await node.value("whoami")
        blocked = [node.begin("sleep_sync", seconds=30), node.begin("spin")]
        used = time.thread_time()
        turns = 0
        while not all(future.done() for future in blocked):
            await asyncio.sleep(0)
            turns += 1
            await asyncio.sleep(0.001)
        assert turns > 2  # a loop that a tool blocks has its first turn when that is over
        assert time.thread_time() - used < 0.5

    node(test)


# --- hosts that die ------------------------------------------------------------


@pytest.mark.parametrize(("name", "args"), [("die", {"status": 3}), ("die", {"status": 0}), ("segfault", {})])
def test_a_host_that_dies_leaves_its_calls_unknown_and_is_replaced(name: str, args: dict[str, Any]) -> None:
    async def test(node: Node) -> None:
        other = node.begin("sleep_long", seconds=30)
        await node.value("echo", value=1)
        for outcome in (await node.begin(name, **args), await other):
            assert outcome.host_died and outcome.code == "tool_host_died" and not outcome.ok
        assert await node.value("echo", value=2) == 2
        assert node.pool.statistics().hosts_died == 1

    node(test)


def test_answers_sent_before_the_host_died_count() -> None:
    async def test(node: Node) -> None:
        await node.value("echo", value=0)
        futures = [node.begin("echo", value=i) for i in range(100)]
        last = node.begin("die", status=1)
        outcomes = [await future for future in futures]
        assert (await last).host_died
        for i, outcome in enumerate(outcomes):
            assert outcome.host_died or msgspec.json.decode(outcome.payload) == i

    node(test)


def test_killed_hosts_are_replaced_and_waiting_calls_are_not_lost() -> None:
    async def test(node: Node) -> None:
        done = unknown = 0
        for round in range(5):
            pid = (await node.value("whoami"))["pid"]
            futures = [node.begin("echo", value=i) for i in range(600)]  # more than a host runs at once
            os.kill(pid, signal.SIGKILL)
            for future in futures:
                outcome = await future
                done += outcome.ok
                unknown += outcome.host_died
            assert done + unknown == 600 * (round + 1)
        assert done > 0
        statistics = node.pool.statistics()
        assert statistics.running == statistics.queued == statistics.queued_bytes == 0

    node(test, hosts_per_domain_max=1, calls_per_host_max=16)


def test_a_domain_whose_hosts_keep_dying_is_slowed_down_and_others_are_not() -> None:
    async def test(node: Node) -> None:
        await node.value("echo", value=1, tenant="good")
        began = time.monotonic()
        for _ in range(5):
            assert (await node.begin("die", tenant="bad", status=1)).host_died
        assert time.monotonic() - began > 0.2 + 0.4 + 0.8  # of four restarts the first is at once
        waiting = node.begin("die", tenant="bad", status=1)
        assert await node.value("echo", value=1, tenant="good") == 1
        assert not waiting.done()

    node(test, backoff_min_ns=SECOND_NS // 5)


def test_a_host_that_goes_mad_on_its_socket_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "mad.py"
    file.write_text(
        "import os, stat\nfrom agentrt.tools import tool\n"
        "@tool(kind='pure')\nasync def write(data: list[int]) -> None:\n"
        "    for fd in map(int, os.listdir('/proc/self/fd')):\n"
        "        try:\n"
        "            if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, bytes(data))\n"
        "        except OSError: pass\n"
        "@tool(kind='pure')\nasync def fine() -> int:\n    return 1\n"
    )

    async def test(node: Node) -> None:
        for data in (b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x02\0\0\0\x91\xa0", b"\x01\0\0\0\x80"):
            outcome = await node.begin("write", data=list(data))
            assert outcome.host_died
            assert await node.value("fine") == 1
        # an answer to a call nobody made is nothing
        forged = msgspec.msgpack.encode([[999_999, b"1", None, 0]])
        assert await node.value("write", data=list(len(forged).to_bytes(4, "little") + forged)) is None

    node(test, specs=describe_tools(str(file)))


def test_a_tool_that_takes_too_much_memory_fails_alone() -> None:
    async def test(node: Node) -> None:
        assert await node.value("take_memory", size=50_000_000) == 50_000_000
        assert await node.code("take_memory", size=400_000_000) == "tool_failed"
        assert await node.value("echo", value=1) == 1

    node(test, host_memory_bytes_max=300_000_000)


# --- hosts that do not start ---------------------------------------------------


def test_tools_that_cannot_be_imported_answer_every_call_without_a_restart_storm(tmp_path: Path) -> None:
    file = tmp_path / "gone.py"
    for text in ("import no_such_module_anywhere\n", "import sys; sys.exit(1)\n", "def late():\n  pass\n"):
        file.write_text(text)
        specs = [ToolSpec("late", "pure", SECOND_NS, True, f"{file}:late"), *tools_in(fixture)]

        async def test(node: Node) -> None:
            for _ in range(20):
                assert await node.code("late") == "tool_import"
            assert await node.value("echo", value=1) == 1  # tools of other sources are not touched
            assert node.pool.statistics().hosts_started <= 2

        node(test, specs=specs)


def test_a_tool_with_hints_that_cannot_be_resolved_is_refused_alone(tmp_path: Path) -> None:
    file = tmp_path / "hints.py"
    file.write_text(
        "from agentrt.tools import tool\n@tool(kind='pure')\ndef a(x: 'Missing') -> int:\n  return 1\n"
        "@tool(kind='pure')\ndef b() -> int:\n  return 2\n"
    )

    async def test(node: Node) -> None:
        assert await node.code("a", x=1) == "tool_import"
        assert await node.value("b") == 2

    node(test, specs=describe_tools(str(file)))


def test_hosts_that_die_while_starting_are_tried_again_then_calls_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "suicide.py"
    file.write_text("import os, sys\nif 'agentrt.tools.host' in sys.argv[0] or True: os._exit(7)\n")
    specs = [ToolSpec("never", "pure", SECOND_NS, True, f"{file}:never")]

    async def test(node: Node) -> None:
        outcomes = await asyncio.gather(*(node.begin("never") for _ in range(50)))
        for outcome in outcomes:
            assert outcome.code == "tool_host_start" and not outcome.host_died and b"status 7" in outcome.payload
        started = node.pool.statistics().hosts_started
        assert await node.code("never") == "tool_host_start"
        assert node.pool.statistics().hosts_started <= started + 1 <= 6

    async def recovers(node: Node) -> None:
        assert await node.code("never") == "tool_host_start"
        file.write_text("from agentrt.tools import tool\n@tool(kind='pure')\nasync def never() -> int:\n  return 1\n")
        deadline = time.monotonic() + 20
        while not (outcome := await node.begin("never")).ok:
            assert outcome.code == "tool_host_start" and time.monotonic() < deadline
            await asyncio.sleep(0.02)

    node(test, specs=specs, backoff_min_ns=SECOND_NS // 20)
    node(recovers, specs=specs, backoff_min_ns=SECOND_NS // 100, spares=0)


def test_a_host_that_hangs_while_starting_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "hang.py"
    file.write_text("import time\ntime.sleep(600)\n")

    async def test(node: Node) -> None:
        assert await node.code("never") == "tool_host_start"

    specs = [ToolSpec("never", "pure", SECOND_NS, True, f"{file}:never")]
    node(test, specs=specs, start_timeout_ns=SECOND_NS // 2, start_attempts_max=1, spares=0)


# --- who gets a host -----------------------------------------------------------


def test_a_host_serves_one_tenant_and_one_tier() -> None:
    async def test(node: Node) -> None:
        pids = {
            (tenant, tier): (await node.value("whoami", tenant=tenant, tier=tier))["pid"]
            for tenant in ("a", "b")
            for tier in range(4)
        }
        assert len(set(pids.values())) == 8
        for (tenant, tier), pid in pids.items():
            assert (await node.value("whoami", tenant=tenant, tier=tier))["pid"] == pid

    node(test)


def test_idle_hosts_are_retired() -> None:
    async def test(node: Node) -> None:
        pid = (await node.value("whoami"))["pid"]
        await wait_until(lambda: not is_running(pid), "the idle host is gone")
        assert node.pool.statistics().hosts_died == 0
        assert (await node.value("whoami"))["pid"] != pid

    node(test, idle_timeout_ns=SECOND_NS // 5, spares=0)


def test_more_domains_than_hosts_all_get_served() -> None:
    async def test(node: Node) -> None:
        futures = [node.begin("echo", tenant=f"t{i}", tier=i % 4, value=i) for i in range(24)]
        for i, future in enumerate(futures):
            assert msgspec.json.decode((await future).payload) == i
        assert node.pool.statistics().hosts <= 4

    node(test, hosts_max=4, turn_ns=SECOND_NS // 20)


def test_hosts_start_one_after_the_other_most_urgent_first() -> None:
    async def test(node: Node) -> None:
        order: list[int] = []
        futures = []
        for i, tier in enumerate((3, 2, 1, 0, 3, 2, 1, 0)):
            future = node.begin("echo", tenant=f"t{i}", tier=tier, value=i)
            future.add_done_callback(lambda _, tier=tier: order.append(tier))
            futures.append(future)
        started: set[int] = set()
        while not all(future.done() for future in futures):
            before = node.pool.statistics().hosts_started
            starting = sum(not (host.ready or host.ending) for host in hosts_of(node.pool))
            assert starting <= 1
            started.add(before)
            await asyncio.sleep(0)
        assert started >= set(range(2, 9)), "each host was started when the one before it was ready"
        assert order == sorted(order)

    node(test, starts_max=1, spares=0, hosts_max=16)


def test_the_last_host_is_kept_for_urgent_work() -> None:
    async def test(node: Node) -> None:
        slow = [node.begin("sleep_long", tenant=f"t{i}", tier=3, seconds=20) for i in range(6)]
        await wait_until(lambda: node.pool.statistics().running == 2, "the places of tier 3 are taken")
        assert (await node.value("echo", tier=0, value=1)) == 1
        assert not any(future.done() for future in slow)

    node(test, hosts_max=4)


def test_waiting_domains_are_served_by_tier_then_arrival() -> None:
    async def test(node: Node) -> None:
        order: list[str] = []
        first = node.begin("sleep_long", tenant="holder", tier=3, seconds=0.3)
        await wait_until(lambda: node.pool.statistics().running == 1, "the only host is taken")
        futures = []
        for tenant, tier in (("c3", 3), ("a2", 2), ("b2", 2), ("d1", 1), ("e0", 0)):
            future = node.begin("echo", tenant=tenant, tier=tier, value=1)
            future.add_done_callback(lambda _, tenant=tenant: order.append(tenant))
            futures.append(future)
        await asyncio.gather(first, *futures)
        await asyncio.sleep(0)
        assert order == ["e0", "d1", "a2", "b2", "c3"]

    node(test, hosts_max=1, turn_ns=1, spares=0)


def test_a_busy_domain_gives_up_its_host_after_its_turn() -> None:
    async def test(node: Node) -> None:
        stop = False

        async def keep_busy() -> None:
            while not stop:
                await node.value("sleep_long", tenant="greedy", tier=2, seconds=0.01)

        busy = [asyncio.ensure_future(keep_busy()) for _ in range(4)]
        await wait_until(lambda: node.pool.statistics().running > 0, "the greedy one has the host")
        assert await node.value("echo", tenant="modest", tier=2, value=1) == 1
        stop = True
        await asyncio.gather(*busy)

    node(test, hosts_max=1, turn_ns=SECOND_NS // 10, spares=0)


# --- the process ---------------------------------------------------------------


def test_a_host_starts_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere/special")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    term = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leak_read, leak_write = os.pipe()
    leaked = os.readlink(f"/proc/self/fd/{leak_write}")
    os.set_inheritable(leak_write, True)
    own_path = [os.path.abspath(part) for part in sys.path]

    async def test(node: Node) -> None:
        told = await node.value("environment")
        assert told["nice"] == 19
        assert told["sid"] == told["pid"] != os.getsid(0)
        assert told["blocked"] == [] and told["term"]
        assert told["pythonpath"] == "/nowhere/special"
        assert told["path"] == own_path
        assert leaked not in told["fds"]
        assert sum("socket" in target for target in told["fds"]) <= 4  # its own two, and the self-pipe of its loop

    try:
        node(test, host_nice=19)
    finally:
        signal.signal(signal.SIGTERM, term)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(leak_read)
        os.close(leak_write)


def test_what_tools_start_goes_with_their_host(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        file = tmp_path / "pid"
        assert await node.code("grandchild_then_hang", file=str(file)) == "tool_timeout"
        await wait_until(lambda: not is_running(int(file.read_text())), "the tool's own child is gone")

    node(test)


NODE = """
import asyncio, os, sys, uvloop
sys.path.insert(0, sys.argv[1])
import tools_fixture
from agentrt.tools import ToolPool, ToolRegistry, ToolLimits

async def main():
    loop = asyncio.get_running_loop()
    tools = [tools_fixture.whoami, tools_fixture.spin, tools_fixture.hold]
    pool = ToolPool(ToolRegistry(tools), loop, ToolLimits(spares=1))
    pool.start()
    told = loop.create_future()
    pool.call("whoami", b"{}", key="k", tenant="t", tier=1, attempt=1, done=told.set_result)
    await told
    held = b'{"file": "%s"}' % sys.argv[2].encode()
    pool.call("hold", held, key="h", tenant="t", tier=1, attempt=1, done=print)
    while not os.path.exists(sys.argv[2]) or not open(sys.argv[2]).read(): await asyncio.sleep(0.01)
    pool.call("spin", b"{}", key=None, tenant="t", tier=1, attempt=1, done=print, timeout_ns=60 * 10**9)
    while any(not host.ready for host in pool._pools['tool'].hosts): await asyncio.sleep(0.01)
    print(*(host.pid for host in pool._pools['tool'].hosts), flush=True)
    await asyncio.sleep(600)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def test_nothing_survives_a_kill_of_the_node(tmp_path: Path) -> None:
    held = tmp_path / "held"
    process = subprocess.Popen(
        [sys.executable, "-c", NODE, str(Path(__file__).parent), str(held)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    hosts = {int(word) for word in process.stdout.readline().split()}
    pids = below(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(hosts) == 2 and hosts < pids and int(held.read_text()) in pids
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a process outlived its node"
        time.sleep(0.005)


def test_after_close_nothing_is_delivered_and_nothing_is_left() -> None:
    outcomes: list[ToolOutcome] = []

    async def test(node: Node) -> None:
        pid = (await node.value("whoami"))["pid"]
        future = node.begin("sleep_long", seconds=30)
        future.add_done_callback(lambda future: outcomes.append(future.result()))
        await node.pool.close()
        await node.pool.close()
        with pytest.raises(ClosedError):
            node.begin("echo", value=1)
        assert not is_running(pid)

    node(test)
    assert outcomes == []


def test_a_pool_closed_while_its_hosts_start_leaves_nothing() -> None:
    children_before = _children()

    async def test(node: Node) -> None:
        node.begin("echo", value=1)
        await asyncio.sleep(0)

    node(test, spares=3)
    assert _children() == children_before


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_loop_cpu_per_call_is_small() -> None:
    """A guard against work creeping in per call; the figure itself is measured in perf/."""

    async def test(node: Node) -> None:
        await node.value("echo", value=1)
        used = time.thread_time()
        for _ in range(20):
            futures = [node.begin("echo", value=i) for i in range(200)]
            await asyncio.gather(*futures)
        assert (time.thread_time() - used) / 4000 < 100e-6

    node(test)


# --- the node stops -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["heeds_notice", "heeds_notice_sync"])
def test_a_tool_may_heed_the_notice_that_the_node_stops(name: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        future = node.begin(name, file=str(tmp_path / "begun"))
        await wait_until((tmp_path / "begun").exists, "the tool runs")
        node.pool.stop()
        outcome = await asyncio.wait_for(future, 20)
        assert (outcome.ok, outcome.payload) == (True, b'"in time"')

    node(test)


def test_what_does_not_end_when_the_node_stops_is_evicted(tmp_path: Path) -> None:
    """Nothing that runs is disturbed before; what has not begun never does; nobody is told that a host died."""

    async def test(node: Node) -> None:
        running = [
            node.begin("heeds_notice_sync", file=str(tmp_path / "sync"), heed=False),
            node.begin("sleep_long", seconds=60),
        ]
        await wait_until((tmp_path / "sync").exists, "the tool runs")
        waiting = [node.begin("echo_sync", value=1) for _ in range(3)]
        await asyncio.sleep(0)
        node.pool.stop()
        late = node.begin("echo", value=1)
        for future in (*waiting, late):
            outcome = await asyncio.wait_for(future, 20)
            assert (outcome.code, outcome.evicted, outcome.unknown) == ("tool_evicted", True, False)
        assert not any(future.done() for future in running)
        node.pool.evict()
        for future in running:
            outcome = await asyncio.wait_for(future, 20)
            assert (outcome.code, outcome.evicted, outcome.unknown) == ("tool_evicted", True, True)
        assert node.pool.statistics().hosts_died == 0

    node(test, hosts_max=1, sync_calls_per_host_max=1)
