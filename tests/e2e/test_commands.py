"""Native commands as tools: what goes in and comes out, bounds, ends, and runs that call them."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import command_agents
from tool_kit import Node, node, wait_until

from agentrt import Runtime
from agentrt.backends.process.settings import ProcessConfig
from agentrt.config import load_config
from agentrt.errors import ConfigError, InputError, QueueFullError
from agentrt.tools.commands import command_tool
from agentrt.tools.outcome import EVICTED_RUNNING, EVICTED_WAITING
from agentrt.tools.secrets import EnvironmentSecrets

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
#: Confined as well as this machine can: what is tested here is not the confinement.
LOOSE = {"process": ProcessConfig(allow_unsandboxed=True, stall_ms=1000)}


def shell(name: str, script: str, **more: Any) -> Any:
    more = {"kind": "pure", "timeout": 60, "input": "text", "output": "text"} | more
    return command_tool(name, ["sh", "-c", script], **more)


SHOW = 'echo "$AGENTRT_IDEMPOTENCY_KEY $AGENTRT_ATTEMPT $GREETING"; env | cut -d= -f1 | sort | tr "\\n" " "'
SPECS = [
    command_tool("echo_json", ["cat"], kind="pure"),
    shell("script", "cat > s; sh s"),
    shell("keyed", SHOW, kind="keyed", environment={"GREETING": "hello"}),
    shell("heeds", "trap 'echo heeded; exit 0' USR1; while :; do sleep 0.01; done"),
    shell("no_json", "echo nothing", output="json"),
    shell("fails", "echo some words >&2; exit 3"),
    shell("crashes", "sh -c 'kill -SEGV $$'; exit 139"),
    shell("slow", "sleep 1000", timeout=0.3),
    shell("slow_keyed", "sleep 1000", timeout=0.3, kind="keyed"),
    shell("forever", "sleep 1000"),
    shell("once", "sleep 1000", kind="at_most_once"),
    shell("talks", "yes"),
    shell("whispers", "yes >&2 & sleep 0.2; echo done"),
    shell("orphans", "(setsid sh -c \"trap '' TERM; sleep 1000\" &) ; sleep 1000 & echo started"),
    command_tool("not_there", ["/no/such/program"], kind="pure"),
    command_tool("secretive", ["sh", "-c", "cat"], kind="pure", secrets=["stripe"], output="text"),
]  # fmt: skip


def commands(test: Any, specs: Any = None, **more: Any) -> None:
    """A node with commands only: no host of Python tools starts beside them."""
    made_with = LOOSE | more.pop("made_with", {})
    node(test, specs=SPECS if specs is None else specs, made_with=made_with, spares=0, template="exec", **more)


def test_arguments_come_in_and_results_go_out() -> None:
    async def test(node: Node) -> None:
        assert await node.value("echo_json", a=[1, {"b": None}], c="ü") == {"a": [1, {"b": None}], "c": "ü"}
        assert await node.value("script", text="echo $((6 * 7)); pwd >/dev/null") == "42\n"
        big = "x" * 500_000
        assert (await node.value("echo_json", big=big)) == {"big": big}

    commands(test)


def test_the_environment_is_what_was_granted_and_the_step() -> None:
    async def test(node: Node) -> None:
        os.environ["AGENTRT_TEST_LEAK"] = "1"
        try:
            _, future = node.call("keyed", {"text": ""}, key="k-1", attempt=3)
            told = msgspec.json.decode((await future).payload)
        finally:
            del os.environ["AGENTRT_TEST_LEAK"]
        first, names = told.splitlines()
        assert first == "k-1 3 hello"
        assert set(names.split()) - {"_", "SHLVL", "OLDPWD"} == {
            "AGENTRT_ATTEMPT", "AGENTRT_IDEMPOTENCY_KEY", "GREETING", "HOME", "LANG", "PATH", "PWD", "TMPDIR",
        }  # fmt: skip

    commands(test)


def test_each_call_has_an_empty_folder_of_its_own() -> None:
    async def test(node: Node) -> None:
        script = "ls -A | tr '\\n' ' '; touch mine; ls -A | wc -l"
        assert await node.value("script", text=script) == await node.value("script", text=script) == "s 2\n"

    commands(test)


@pytest.mark.parametrize(
    ("name", "args", "code", "words"),
    [
        ("fails", {"text": ""}, "tool_failed", "status 3: some words"),
        ("no_json", {"text": ""}, "tool_result", "no JSON"),
        ("crashes", {"text": ""}, "tool_failed", "139"),
        ("slow", {"text": ""}, "tool_timeout", "0.3 seconds"),
        ("talks", {"text": ""}, "tool_result_too_big", "standard output"),
        ("not_there", {}, "tool_host_start", "/no/such/program"),
        ("script", {"txt": ""}, "tool_args", "txt"),
        ("script", {"text": 1}, "tool_args", "text"),
    ],
)
def test_failures(name: str, args: dict[str, Any], code: str, words: str) -> None:
    async def test(node: Node) -> None:
        outcome = await node.call(name, args)[1]
        assert (outcome.ok, outcome.code) == (False, code)
        assert words in msgspec.json.decode(outcome.payload)["message"]
        assert outcome.unknown is (code == "tool_timeout")
        assert not outcome.host_died

    commands(test, result_bytes_max=MIB)


def test_what_it_says_on_its_standard_error_is_bounded_and_does_not_stop_it() -> None:
    async def test(node: Node) -> None:
        assert await node.value("whispers", text="") == "done\n"

    commands(test)


def test_a_process_that_is_killed_from_outside_is_an_outcome_nobody_saw() -> None:
    async def test(node: Node) -> None:
        future = node.begin("forever", text="")
        pool = node.pool._commands._pools["code"]
        await wait_until(lambda: any(call.process and call.process.pid for call in pool.running), "it runs")
        (call,) = pool.running
        assert call.process is not None
        os.kill(call.process.pid, signal.SIGKILL)
        outcome = await future
        assert (outcome.code, outcome.host_died, outcome.unknown) == ("tool_host_died", True, True)
        assert "SIGKILL" in msgspec.json.decode(outcome.payload)["message"]

    commands(test)


def test_cancelling() -> None:
    async def test(node: Node) -> None:
        pool = node.pool
        running, ended = node.call("forever", {"text": ""})
        await wait_until(lambda: bool(pool._commands._pools["code"].running), "it runs")
        waiting, never = node.call("forever", {"text": ""}, tier=3)
        pool.cancel(waiting)
        outcome = await never
        assert (outcome.code, outcome.unknown) == ("cancelled", False)
        pool.cancel(running)
        pool.cancel(running)
        outcome = await ended
        assert (outcome.code, outcome.unknown) == ("cancelled", True)
        await wait_until(lambda: not pool._commands._pools["code"].running, "it is gone")
        # One that may have had its effect is left to finish.
        handle, future = node.call("once", {"text": ""})
        await wait_until(lambda: bool(pool._commands._pools["code"].running), "it runs")
        pool.cancel(handle)
        await node.value("echo_json", tier=0)
        assert not future.done()

    commands(test, hosts_max=2)


def test_the_last_places_are_for_the_higher_tiers_and_the_line_goes_by_tier() -> None:
    order: list[int] = []

    async def test(node: Node) -> None:
        pool = node.pool
        first = node.call("forever", {"text": ""}, tier=3)
        await wait_until(lambda: bool(pool._commands._pools["code"].running), "it runs")
        futures = []
        for tier in (3, 3, 2, 1):
            _, future = node.call("echo_json", {}, tier=tier)
            future.add_done_callback(lambda _, tier=tier: order.append(tier))
            futures.append(future)
        await futures[-1]  # tier 1 has a place that tiers 2 and 3 have not
        assert order == [1]
        urgent = node.call("echo_json", {}, tier=0)[1]
        assert (await urgent).ok
        assert order == [1]
        pool.cancel(first[0])
        await asyncio.gather(*futures)
        assert order == [1, 2, 3, 3]

    commands(test, hosts_max=3)


def test_queues_are_bounded() -> None:
    async def test(node: Node) -> None:
        for _ in range(3):
            node.call("forever", {"text": ""})
        with pytest.raises(QueueFullError):
            node.call("forever", {"text": ""})
        with pytest.raises(InputError, match="1000"):
            node.call("echo_json", {"big": "x" * 2000})
        assert node.pool.statistics().running + node.pool.statistics().queued == 3

    commands(test, queue_items_max=3, request_bytes_max=1000, hosts_max=3)


def test_secrets_go_in_and_do_not_come_out() -> None:
    async def test(node: Node) -> None:
        outcome = await node.call("secretive", {"key": "secret://stripe"}, tenant="acme")[1]
        assert outcome.ok
        assert b"sk_live_12345" not in outcome.payload and b"secret://stripe" in outcome.payload
        refused = await node.call("secretive", {"key": "secret://other"}, tenant="acme")[1]
        assert refused.code == "tool_secret"

    secrets = EnvironmentSecrets("X_", {"X_acme__stripe": "sk_live_12345"})
    commands(test, made_with={"secrets": secrets})


def alive(marker: str) -> list[int]:
    """Processes whose command line holds the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if marker in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_fault_L44_time_outs_and_grandchildren_leave_nothing() -> None:
    """Grandchildren that left the session and ignore SIGTERM; threads and descriptors of the node stay as they are."""
    marker = f"{77_000_000 + os.getpid()}"
    specs = [
        shell("leaves", f"(setsid sh -c \"trap '' TERM; sleep {marker}\" &); sleep {marker}", timeout=0.2),
        shell("ends", f"(setsid sh -c \"trap '' TERM; sleep {marker}\" &); echo over"),
    ]

    async def test(node: Node) -> None:
        assert await node.value("ends", text="") == "over\n"
        threads, fds = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            outcomes = await asyncio.gather(*(node.call("leaves", {"text": ""})[1] for _ in range(4)))
            assert {outcome.code for outcome in outcomes} == {"tool_timeout"}
        assert (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))) == (threads, fds)
        assert alive(marker) == []

    commands(test, specs=specs)


def test_fault_P73_a_process_has_one_waiter_and_signals_go_through_its_descriptor() -> None:
    """Kills and ends at once: no signal ever meets another process, no wait is lost."""

    async def test(node: Node) -> None:
        for round in range(30):
            handle, future = node.call("script", {"text": "exit 0"})
            if round % 3:
                await asyncio.sleep(0)
            node.pool.cancel(handle)
            outcome = await future
            assert outcome.code in (None, "cancelled")

    commands(test)


def test_a_node_that_closes_takes_its_commands_along() -> None:
    marker = f"{78_000_000 + os.getpid()}"

    async def test(node: Node) -> None:
        node.call("sleeps", {"text": ""})
        node.call("sleeps", {"text": ""}, tenant="other")
        await wait_until(lambda: len(alive(f"sleep\0{marker}")) == 2, "both run")

    commands(test, specs=[shell("sleeps", f"sleep {marker}; true")])
    assert alive(marker) == []


def test_a_node_that_stops_tells_those_that_listen_and_evicts_the_others() -> None:
    async def test(node: Node) -> None:
        heeds = node.begin("heeds", text="", tier=0)
        deaf, waits = node.begin("forever", text="", tier=0), node.begin("forever", text="", tier=0)
        pool = node.pool._commands._pools["code"]
        await wait_until(lambda: sum(bool(call.began_ns) for call in pool.running) == 2, "two run")
        node.pool.stop()
        assert await waits == EVICTED_WAITING
        assert await node.begin("echo_json") == EVICTED_WAITING
        while not heeds.done():  # the first notice may come before it has its handler
            node.pool.stop()
            await asyncio.sleep(0.01)
        assert heeds.result().payload == b'"heeded\\n"'
        assert not deaf.done()  # without a handler it is not told, and goes on
        node.pool.evict()
        assert await deaf == EVICTED_RUNNING

    commands(test, hosts_max=2)


# --- declared -------------------------------------------------------------------------


def test_declared_in_the_configuration() -> None:
    config = load_config(
        env={},
        arguments={
            "tools.commands": {
                "word-count": {"command": ["wc", "-w"], "kind": "pure", "input": "text", "timeout_ms": 1500},
            }
        },
    )
    from agentrt.tools.commands import command_specs

    (spec,) = command_specs(config.tools.commands)
    assert (spec.name, spec.kind, spec.cls, spec.timeout_ns) == ("word-count", "pure", "code", 1_500_000_000)
    assert spec.command is not None and spec.command.argv == ("wc", "-w")
    for wrong in ({"command": []}, {"command": ["./x"]}, {"command": ["x"], "environment": ["LD_PRELOAD=x"]},
                  {"command": ["x"], "environment": ["X"]}, {"command": ["x"], "read": ["etc"]},
                  {"command": ["x"], "kind": "at_most_once", "preempt": "discard"}):  # fmt: skip
        with pytest.raises(ConfigError, match="tools.commands.bad"):
            load_config(env={}, arguments={"tools.commands": {"bad": wrong}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"},
        {"kind": "reconcilable"},
        {"timeout": 0},
        {"cls": "No"},
        {"command": "ls -l"},
        {"command": ["a\0b"]},
        {"environment": {"AGENTRT_ATTEMPT": "1"}},
        {"environment": {"A": "\0"}},
        {"write": ["relative"]},
        {"memory_bytes_max": -1},
        {"key_ttl": 5},
        {"input": "xml"},
    ],
)
def test_declarations_are_checked_where_they_are_made(wrong: dict[str, Any]) -> None:
    given = {"name": "good", "command": ["ls"], "kind": "pure"} | wrong
    with pytest.raises(InputError):
        command_tool(given.pop("name"), given.pop("command"), **given)


def test_a_run_calls_a_command(tmp_path: Path) -> None:
    async def run() -> None:
        config = load_config(env={}, arguments={"process.allow_unsandboxed": True, "store.path": str(tmp_path)})
        async with Runtime(config=config, tools=[command_agents.count_words]) as runtime:
            await runtime.register(command_agents.counts)
            submitted = await runtime.submit("counts", "four words are here")
            assert await submitted.result() == {"words": 4}

    asyncio.run(run())
