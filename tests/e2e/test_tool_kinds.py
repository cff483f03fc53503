"""Kinds, batches, cancels, classes, secrets and workers of tools, in real hosts."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tool_kinds_fixture as fixture
from tool_kit import SECOND_NS, Node, hosts_of, is_running, node, parent_of, wait_until

from agentrt.errors import ConfigError, InputError
from agentrt.tools import EnvironmentSecrets, SecretError, ToolLimits, ToolOutcome, ToolPool, ToolRegistry
from agentrt.tools.importing import tools_in

pytestmark = pytest.mark.timeout(120)

SPECS = tools_in(fixture)


def value(outcome: ToolOutcome) -> Any:
    assert outcome.ok, outcome
    return msgspec.json.decode(outcome.payload)


def message(outcome: ToolOutcome) -> str:
    text = msgspec.json.decode(outcome.payload)["message"]
    assert isinstance(text, str)
    return text


# --- reconciling ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["charge", "charge_async"])
def test_reconcile_says_what_became_of_a_call(name: str, tmp_path: Path) -> None:
    file = str(tmp_path / "effects")

    async def test(node: Node) -> None:
        args = {"file": file, "cents": 5}
        ask = lambda: node.call(name, args, key="k1", attempt=3, reconcile=True)[1]  # noqa: E731
        assert value(await ask()) == {"found": "no", "result": None}
        assert value(await node.call(name, args, key="k1")[1]) == "charged"
        assert value(await ask()) == {"found": "yes", "result": {"line": "k1 5", "asked_at": 3}}
        fixture.note(file, "cannot tell")
        other = await node.call(name, args, key="k2", attempt=3, reconcile=True)[1]
        assert value(other) == {"found": "unknown", "result": None}
        assert fixture.lines(file) == ["k1 5", "cannot tell"]  # asking did nothing

    node(test, specs=SPECS)


def test_an_effect_whose_process_died_is_unknown_and_then_found(tmp_path: Path) -> None:
    file = str(tmp_path / "effects")

    async def test(node: Node) -> None:
        host = value(await node.begin("host_pid"))
        args = {"file": file, "cents": 7, "die": True}
        outcome = await node.call("charge", args, key="k")[1]
        assert (
            outcome.unknown and outcome.host_died and outcome.code == "tool_host_died" and "SIGKILL" in message(outcome)
        )
        found = value(await node.call("charge", args, key="k", attempt=2, reconcile=True)[1])
        assert found == {"found": "yes", "result": {"line": "k 7", "asked_at": 2}}
        assert fixture.lines(file) == ["k 7"]
        assert value(await node.begin("host_pid")) == host  # only the worker died

    node(test, specs=SPECS)


def test_a_reconcile_function_that_fails_is_a_typed_outcome() -> None:
    async def test(node: Node) -> None:
        expected = {
            "raise": "tool_failed", "type": "tool_result", "die": "tool_host_died", "slow": "tool_timeout",
        }  # fmt: skip
        for how, code in expected.items():
            outcome = await node.call("badly", {"how": how}, reconcile=True)[1]
            assert (outcome.ok, outcome.code) == (False, code)
        with pytest.raises(InputError, match="has no reconcile function"):
            node.call("double", {"x": 1}, reconcile=True)

    node(test, specs=SPECS)


# --- batches -------------------------------------------------------------------


def test_calls_that_wait_together_are_one_batch_each_with_its_own_outcome() -> None:
    async def test(node: Node) -> None:
        assert await node.value("double", x=1) == [2, 1]  # alone: the function itself
        outcomes = await asyncio.gather(*(node.begin("double", x=x) for x in (1, 2, -1, "x", 3)))
        assert [value(outcomes[i]) for i in (0, 1, 4)] == [[2, 4], [4, 4], [6, 4]]
        assert outcomes[2].code == "tool_failed" and message(outcomes[2]) == "negative"
        assert outcomes[3].code == "tool_args"

    node(test, specs=SPECS)


def test_one_item_on_which_the_whole_batch_fails_does_not_fail_the_others() -> None:
    async def test(node: Node) -> None:
        outcomes = await asyncio.gather(*(node.begin("double", x=x) for x in (1, -2, 3)))
        assert [value(outcomes[0]), value(outcomes[2])] == [[2, 1], [6, 1]]  # done again alone: it is pure
        assert message(outcomes[1]) == "ValueError: -2 alone"

    node(test, specs=SPECS)


def test_a_batch_is_full_at_its_bound_and_does_not_wait_longer() -> None:
    async def test(node: Node) -> None:
        await node.value("double", x=0)
        futures = [node.begin("double", x=x) for x in range(20)]
        sizes = [value(await future)[1] for future in futures]
        assert sizes == [8] * 16 + [4] * 4

    node(test, specs=SPECS)


def test_each_call_of_a_batch_keeps_its_key_and_attempt() -> None:
    async def test(node: Node) -> None:
        await node.value("host_pid")
        calls = [node.call("add", {"x": i}, key=f"k{i}", attempt=i + 1)[1] for i in range(50)]
        for i, future in enumerate(calls):
            assert value(await future) == {"key": f"k{i}", "attempt": i + 1, "n": 50}
        statistics = node.pool.statistics()
        assert statistics.running == statistics.queued == statistics.queued_bytes == 0

    node(test, specs=SPECS)


def test_calls_without_a_host_are_batched_when_one_comes() -> None:
    async def test(node: Node) -> None:
        futures = []
        for i in range(120):  # one after the other, all before the first host is there
            futures.append(node.call("add", {"x": i}, key=f"k{i}")[1])
            await asyncio.sleep(0)
        sizes = [value(await future)["n"] for future in futures]
        assert sizes == [100] * 100 + [20] * 20

    node(test, specs=SPECS, spares=0)


@pytest.mark.parametrize("tool_of", ["tenants", "tiers", "timeouts"])
def test_only_calls_that_belong_together_share_a_batch(tool_of: str) -> None:
    async def test(node: Node) -> None:
        ways: list[dict[str, Any]] = {
            "tenants": [{"tenant": "a"}, {"tenant": "b"}],
            "tiers": [{"tier": 1}, {"tier": 2}],
            "timeouts": [{}, {"timeout_ns": 5 * SECOND_NS}],
        }[tool_of]
        futures = [node.call("double", {"x": i}, **ways[i % 2])[1] for i in range(6)]
        assert [value(await future)[1] for future in futures] == [3] * 6

    node(test, specs=SPECS)


@pytest.mark.parametrize(
    ("how", "code", "unknown"),
    [("raise", "tool_failed", False), ("none", "tool_failed", False), ("short", "tool_failed", False),
     ("hang", "tool_timeout", True), ("die", "tool_host_died", True)],
)  # fmt: skip
def test_a_batch_that_may_not_be_repeated_fails_as_a_whole(how: str, code: str, unknown: bool, tmp_path: Path) -> None:
    file = str(tmp_path / "effects")

    async def test(node: Node) -> None:
        calls = [node.call("once", {"file": file, "how": how}, key=f"k{i}")[1] for i in range(3)]
        for outcome in await asyncio.gather(*calls):
            assert (outcome.code, outcome.unknown, outcome.host_died) == (code, unknown, how == "die")
        assert fixture.lines(file) == ["k0 batch", "k1 batch", "k2 batch"]  # and nothing was done again

    node(test, specs=SPECS)


# --- workers -------------------------------------------------------------------


def test_a_sync_tool_that_overruns_takes_nothing_down() -> None:
    async def test(node: Node) -> None:
        host = value(await node.begin("host_pid"))
        first = value(await node.begin("pids"))
        assert first["parent"] not in (host, os.getpid()) and first["threads"] == 1
        others = [node.begin("pure_sync", file="/dev/null", seconds=0.4), node.begin("code_sleep", seconds=0.4)]
        outcome = await node.begin("overrun")
        assert (outcome.code, outcome.unknown, outcome.host_died) == ("tool_timeout", True, False)
        assert outcome.cost_ns == SECOND_NS // 50
        for other in others:
            assert (await other).ok
        assert value(await node.begin("host_pid")) == host
        assert node.pool.statistics().hosts_died == 0

    node(test, specs=SPECS)


@pytest.mark.parametrize(("how", "text"), [("exit", "status 9"), ("signal", "SIGSEGV")])
def test_a_sync_tool_that_ends_its_process_takes_nothing_down(how: str, text: str) -> None:
    async def test(node: Node) -> None:
        other = node.begin("pure_sync", file="/dev/null", seconds=0.3)
        outcome = await node.begin("dies", how=how)
        assert outcome.code == "tool_host_died" and outcome.host_died and outcome.unknown and text in message(outcome)
        assert (await other).ok and node.pool.statistics().hosts_died == 0

    node(test, specs=SPECS)


def test_workers_are_kept_and_as_many_as_there_are_calls() -> None:
    async def test(node: Node) -> None:
        pids = {value(await node.begin("pids"))["pid"] for _ in range(20)}
        assert len(pids) == 1
        futures = [node.begin("pure_sync", file="/dev/null", seconds=0.1) for _ in range(12)]
        used = [value(await future) for future in futures]
        assert len(set(used)) == 4  # the bound

    node(test, specs=SPECS, sync_calls_per_host_max=4, hosts_per_domain_max=1)


def test_fault_L44_threads_and_processes_stay_flat_over_1000_sync_timeouts() -> None:
    def processes() -> int:
        return sum(is_running(int(name)) and _is_ours(int(name)) for name in os.listdir("/proc") if name.isdigit())

    others = processes()  # of tests before

    async def test(node: Node) -> None:
        host = value(await node.begin("host_pid"))
        outcomes = await asyncio.gather(*(node.begin("overrun") for _ in range(32)))
        before = (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), _threads(host), _fds(host))
        for _ in range(31):
            outcomes += await asyncio.gather(*(node.begin("overrun") for _ in range(32)))
        assert len(outcomes) == 1024 and {outcome.code for outcome in outcomes} == {"tool_timeout"}
        await wait_until(lambda: _fds(host) <= before[3], "the last workers are gone")
        after = (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), _threads(host), _fds(host))
        assert after <= before
        assert value(await node.begin("host_pid")) == host and node.pool.statistics().hosts_started <= 3
        # template, host, spares of both classes, their forkers, and a worker or two
        await wait_until(lambda: processes() <= others + 10, "the processes of the last workers are gone")

    node(test, specs=SPECS, hosts_per_domain_max=1)


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def _fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _is_ours(pid: int) -> bool:
    """A process below this one."""
    while pid > 1:
        try:
            pid = parent_of(pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        if pid == os.getpid():
            return True
    return False


def test_a_killed_host_is_not_reported_before_its_workers_are_gone(tmp_path: Path) -> None:
    """What was given to a host may be repeated once it is known to be dead: nothing of it may run then."""
    file = tmp_path / "pid"

    async def test(node: Node) -> None:
        host = value(await node.begin("host_pid"))
        running = [node.begin("keyed_sync", file=str(file), seconds=60) for _ in range(6)]
        await wait_until(lambda: len(fixture.lines(str(file))) == 6, "the workers are at it")
        os.kill(host, signal.SIGKILL)
        outcome = await running[0]
        assert outcome.host_died and outcome.unknown
        workers = [int(line) for line in fixture.lines(str(file))]
        assert not any(map(is_running, workers)), "a worker outlived its host"
        for future in running:
            assert (await future).host_died

    node(test, specs=SPECS)


# --- how hosts start -----------------------------------------------------------


@pytest.mark.parametrize("mode", ["import", "bare", "exec"])
def test_hosts_are_the_same_however_they_start(mode: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        assert await node.value("double", x=2) == [4, 1]
        assert value(await node.call("add", {"x": 1}, key="k")[1])["key"] == "k"
        assert (await node.begin("overrun")).code == "tool_timeout"
        host = value(await node.begin("host_pid"))
        assert os.getpgid(host) == os.getsid(host) == host
        os.kill(host, signal.SIGKILL)
        await wait_until(lambda: node.pool.statistics().hosts_died == 1, "its death is seen")
        assert value(await node.begin("host_pid")) != host
        assert node.pool.statistics().start_mode == mode

    node(test, specs=SPECS, template=mode)


#: The first import is to see what is declared, the second the template's.
NTH_IMPORT = """
def nth():
    with open(__file__ + ".imports", "a+") as count:
        count.write("x")
        count.seek(0)
        return len(count.read())
"""
UNSAFE = {
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    "socket": "import socket\nkept = socket.socketpair()\n",
    "file": "kept = open(__file__)\n",
    "exit": "import os\nif nth() == 2: os._exit(1)\n",
    "hang": "import time\nif nth() == 2: time.sleep(600)\n",
}


@pytest.mark.parametrize("what", UNSAFE)
def test_modules_that_must_not_be_shared_are_imported_by_each_process(what: str, tmp_path: Path) -> None:
    """Each worker has an import of its own, since two must not share what it opened."""
    (tmp_path / "unsafe_tools.py").write_text(
        f"{NTH_IMPORT}{UNSAFE[what]}import os\nfrom agentrt.tools import tool\nborn_in = os.getpid()\n"
        "@tool(kind='pure')\nasync def here() -> list[int]:\n    return [born_in, os.getpid()]\n"
        "@tool(kind='pure')\ndef sync_here() -> list[int]:\n    return [born_in, os.getpid()]\n"
    )
    from agentrt.tools import describe_tools

    async def test(node: Node) -> None:
        for name in ("here", "sync_here"):
            born_in, pid = await node.value(name)
            assert born_in == pid
        assert node.pool.statistics().start_mode == "bare"

    node(
        test,
        specs=describe_tools(str(tmp_path / "unsafe_tools.py")),
        start_timeout_ns=(6 if what == "hang" else 60) * SECOND_NS,
    )


def test_a_template_that_dies_is_replaced_and_its_hosts_are_reported() -> None:
    async def test(node: Node) -> None:
        host = value(await node.begin("host_pid"))
        running = node.begin("wait_then_note", file="/dev/null", seconds=60)
        await asyncio.sleep(0)
        template = parent_of(host)
        assert template != os.getpid()
        os.kill(template, signal.SIGKILL)
        assert (await running).host_died
        assert value(await node.begin("host_pid")) != host
        assert node.pool.statistics().start_mode == "import"

    node(test, specs=SPECS)


def test_templates_that_keep_dying_are_given_up() -> None:
    async def test(node: Node) -> None:
        for _ in range(3):
            host = value(await node.begin("host_pid"))
            os.kill(parent_of(host), signal.SIGKILL)
            await wait_until(lambda host=host: not is_running(host), "its hosts are gone")  # type: ignore[misc]
            # The pool has heard of it, or the next call would be given to the dead one.
            await wait_until(lambda: node.pool.statistics().hosts == 0, "the pool knows")
        assert value(await node.begin("host_pid"))
        assert node.pool.statistics().start_mode == "exec"

    node(test, specs=SPECS, spares=0, backoff_min_ns=1_000_000)


# --- cancels -------------------------------------------------------------------


def test_a_call_that_no_host_has_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    file = str(tmp_path / "effects")

    async def test(node: Node) -> None:
        handle, future = node.call("wait_then_note", {"file": file, "seconds": 0}, key="k")
        batch = [node.call("double", {"x": x}) for x in range(3)]
        node.pool.cancel(handle)
        node.pool.cancel(batch[1][0])
        assert not future.done()  # never from inside
        outcome = await future
        assert (outcome.ok, outcome.code, outcome.unknown) == (False, "cancelled", False)
        assert (await batch[1][1]).code == "cancelled"
        assert [value(await batch[i][1]) for i in (0, 2)] == [[0, 2], [4, 2]]
        node.pool.cancel(handle)  # again, and of nobody
        node.pool.cancel(None)
        await node.value("host_pid")
        assert fixture.lines(file) == []
        statistics = node.pool.statistics()
        assert statistics.queued == statistics.queued_bytes == statistics.running == 0

    node(test, specs=SPECS)


def test_cancelled_calls_that_wait_leave_no_trace() -> None:
    async def test(node: Node) -> None:
        blocker = node.begin("code_sleep", seconds=1)
        await wait_until(lambda: node.pool.statistics().running == 1, "the host is taken")
        outcomes = 0
        for _ in range(50):
            calls = [node.call("code_sleep", {"seconds": 0}) for _ in range(100)]
            for handle, _ in calls:
                node.pool.cancel(handle)
            outcomes += sum([(await future).code == "cancelled" for _, future in calls])
        assert outcomes == 5000
        domain = next(iter(node.pool._pools["code"]._domains.values()))
        assert sum(map(len, domain.lanes)) < 200
        assert (await blocker).ok and value(await node.begin("code_sleep", seconds=0)) is None

    node(test, specs=SPECS, calls_per_host_max=1, sync_calls_per_host_max=1, hosts_per_domain_max=1)


def test_a_running_async_tool_gets_asyncios_cancellation(tmp_path: Path) -> None:
    file = str(tmp_path / "effects")

    async def test(node: Node) -> None:
        other = node.call("wait_then_note", {"file": file, "seconds": 0.5}, key="other")[1]
        handle, future = node.call("wait_then_note", {"file": file, "seconds": 60}, key="k")
        await wait_until(lambda: "k began" in fixture.lines(file), "it began")
        node.pool.cancel(handle)
        outcome = await future
        assert (outcome.code, outcome.unknown) == ("cancelled", True)
        assert "k cancelled" in fixture.lines(file)
        assert value(await other) == "done"

    node(test, specs=SPECS)


@pytest.mark.parametrize(
    ("how", "code", "unknown"),
    [("result", None, False), ("tool_error", "tool_failed", False), ("raise", "cancelled", True)],
)
def test_what_a_cancelled_tool_makes_of_it_is_its_outcome(
    how: str, code: str | None, unknown: bool, tmp_path: Path
) -> None:
    file = str(tmp_path / "effects")

    async def test(node: Node) -> None:
        handle, future = node.call("cleans_up", {"file": file, "how": how}, key="k")
        await wait_until(lambda: fixture.lines(file) != [], "it began")
        node.pool.cancel(handle)
        outcome = await future
        assert (outcome.code, outcome.unknown) == (code, unknown)

    node(test, specs=SPECS)


def test_a_pure_tool_that_ignores_its_cancel_is_answered_without_and_harms_no_other(tmp_path: Path) -> None:
    file = str(tmp_path / "effects")

    async def test(node: Node) -> None:
        host = value(await node.begin("host_pid"))
        handle, future = node.call("ignores_cancel", {"file": file})
        await wait_until(lambda: fixture.lines(file) != [], "it began")
        began = time.monotonic()
        node.pool.cancel(handle)
        assert (await future).code == "cancelled" and 0.09 < time.monotonic() - began < 25
        assert value(await node.begin("host_pid")) == host

    node(test, specs=SPECS, cancel_grace_ns=SECOND_NS // 10)


def test_a_running_sync_tool_is_ended_if_it_is_pure_and_left_to_finish_if_not(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        pure, keyed = str(tmp_path / "pure"), str(tmp_path / "keyed")
        pure_handle, pure_call = node.call("pure_sync", {"file": pure, "seconds": 60})
        keyed_handle, keyed_call = node.call("keyed_sync", {"file": keyed, "seconds": 0.5}, key="k")
        await wait_until(lambda: bool(fixture.lines(pure) and fixture.lines(keyed)), "both began")
        node.pool.cancel(pure_handle)
        node.pool.cancel(keyed_handle)
        assert (await pure_call).code == "cancelled"
        assert not is_running(int(fixture.lines(pure)[0]))
        assert value(await keyed_call) == "done"

    node(test, specs=SPECS, cancel_grace_ns=10 * SECOND_NS)


# --- classes and trust domains -------------------------------------------------


def test_classes_have_hosts_and_bounds_of_their_own() -> None:
    async def test(node: Node) -> None:
        assert value(await node.begin("code_pid")) != value(await node.begin("host_pid"))
        taken = [node.begin("code_sleep", seconds=2) for _ in range(8)]
        assert value(await node.begin("host_pid"))  # the other class is not concerned
        assert sum(pool.statistics().running for pool in node.pool._pools.values()) <= 2
        assert len(node.pool._pools["code"].hosts) == 1
        with pytest.raises(InputError, match="more than 100"):
            node.begin("code_sleep", seconds=0, more="x" * 100)
        for future in taken:
            assert (await future).ok

    code = ToolLimits(
        host_nice=0, hosts_max=1, hosts_per_domain_max=1, calls_per_host_max=2, sync_calls_per_host_max=1, spares=0,
        request_bytes_max=100,
    )  # fmt: skip
    node(test, specs=SPECS, made_with={"classes": {"code": code}})


def test_limits_for_a_class_that_is_not_there_are_refused() -> None:
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(ConfigError, match="no class 'gpu'"):
            ToolPool(ToolRegistry(SPECS), loop, classes={"gpu": ToolLimits()})
    finally:
        loop.close()


def test_a_host_is_shared_within_a_trust_domain_only() -> None:
    async def test(node: Node) -> None:
        pids = {tenant: value(await node.begin("host_pid", tenant=tenant)) for tenant in ("a.1", "a.2", "b.1")}
        assert pids["a.1"] == pids["a.2"] != pids["b.1"]

    node(test, specs=SPECS, made_with={"trust_domain": lambda tenant: tenant.partition(".")[0]})


# --- secrets -------------------------------------------------------------------

VALUES = {"t": {"token": 'very "secret" väl\\ue'}, "other": {"token": "another-value"}}


class Provider:
    environment_prefix = ""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def get(self, tenant: str, name: str) -> str:
        self.asked.append((tenant, name))
        if name == "other":
            if tenant == "slow":
                time.sleep(0.5)
            if tenant == "broken":
                raise RuntimeError("contains " + VALUES["t"]["token"])
            return "short"
        try:
            return VALUES[tenant][name]
        except KeyError:
            raise SecretError(f"there is no secret {name}") from None


def test_a_secret_reaches_the_tool_and_nothing_else_holds_it() -> None:
    provider = Provider()
    secret = VALUES["t"]["token"]

    async def test(node: Node) -> None:
        expected = [len(secret), sum(secret.encode()), ["a secret://token"]]
        ref = {"token": "secret://token"}
        assert value(await node.begin("use_secret", **ref, more=["a secret://token"])) == expected
        assert value(await node.begin("use_secret_sync", **ref, level=1)) == len(secret)
        assert (await node.begin("use_secret", tenant="other", **ref)).payload.startswith(b"[13,")
        echoed = await node.begin("use_secret", **ref, how="echo")
        assert value(echoed) == {"sent": "Bearer secret://token", "secret://token": ["secret://token"], "more": None}
        refused = await node.begin("use_secret", **ref, how="raise")
        assert message(refused) == "ValueError: refused: 'secret://token'"
        unfit = await node.begin("use_secret_sync", **ref, level="secret://token")
        assert unfit.code == "tool_args" and secret not in message(unfit)
        asked = len(provider.asked)
        assert value(await node.begin("no_secret", **ref)) == "secret://token"  # it declares none
        assert value(await node.begin("use_secret", token="plain"))[0] == 5
        assert len(provider.asked) == asked

    node(test, specs=SPECS, made_with={"secrets": provider})


def test_secrets_that_cannot_be_had_are_typed_failures() -> None:
    async def test(node: Node) -> None:
        for tenant, args, text in (
            ("nobody", {"token": "secret://token"}, "there is no secret token"),
            ("t", {"token": "secret://undeclared"}, "does not declare the secret 'undeclared'"),
            ("t", {"token": "secret://"}, "does not declare the secret ''"),
            ("t", {"token": "secret://other"}, "fewer than 8 characters"),
            ("broken", {"token": "secret://other"}, "failed for other: RuntimeError"),
            ("slow", {"token": "secret://other"}, "too slow"),
        ):
            outcome = await node.begin("use_secret", tenant=tenant, **args)
            assert outcome.code == "tool_secret" and not outcome.unknown and text in message(outcome)
        await wait_until(lambda: node.pool.statistics().queued == 0, "nothing is left")

    node(test, specs=SPECS, made_with={"secrets": Provider()}, secret_timeout_ns=SECOND_NS // 5)


def test_without_a_provider_a_reference_is_refused() -> None:
    async def test(node: Node) -> None:
        assert "no provider of secrets" in message(await node.begin("use_secret", token="secret://token"))

    node(test, specs=SPECS)


@pytest.mark.parametrize("mode", ["import", "exec"])
def test_hosts_do_not_have_the_secrets_of_the_environment(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_SECRET_t__token", "value-of-t")
    monkeypatch.setenv("ACME_SECRET_other__token", "value-of-other")
    secrets = EnvironmentSecrets("ACME_SECRET_")

    async def test(node: Node) -> None:
        seen = value(await node.begin("environment_names"))
        assert "PATH" in seen["now"] and "ACME_SECRET" not in seen["now"]
        if mode == "import":
            assert "PATH" in seen["born_with"] and "ACME_SECRET" not in seen["born_with"]
        assert value(await node.begin("use_secret", token="secret://token"))[0] == len("value-of-t")

    node(test, specs=SPECS, template=mode, made_with={"secrets": secrets})


def test_hosts_of_all_classes_are_gone_after_close() -> None:
    pids: list[int] = []

    async def test(node: Node) -> None:
        for name in ("host_pid", "code_pid"):
            pids.append(value(await node.begin(name)))
        pids.extend(host.pid for host in hosts_of(node.pool))

    node(test, specs=SPECS)
    assert not any(map(is_running, pids))
