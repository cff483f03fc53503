"""Native commands that make room: by a state that they hand over, or by being killed and begun again."""

import re
import sys
from pathlib import Path
from signal import SIGUSR1
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command_kit import public_folder
from tool_kit import Node, node, wait_until

from agentrt.backends.process.process import Process, _catches
from agentrt.backends.process.settings import ProcessConfig
from agentrt.config import load_config
from agentrt.tools import ToolOutcome, commandpool
from agentrt.tools.commandpool import CommandCall
from agentrt.tools.commands import command_specs, command_tool
from agentrt.tools.outcome import EVICTED_RUNNING

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
UP = "echo up >&2; while :; do sleep 0.01; done"
GOES_ON = 'if [ -n "$AGENTRT_STATE_FD" ]; then echo "from $(cat <&3), attempt $AGENTRT_ATTEMPT"; exit 0; fi; '


def shell(name: str, script: str, **more: Any) -> Any:
    more = {"kind": "at_most_once", "timeout": 60, "preempt": "snapshot"} | more
    return command_tool(name, ["sh", "-c", script], input="text", output="text", **more)


SPECS = [
    shell("hands_over", GOES_ON + "trap 'echo 41; exit 75' USR1; " + UP),
    shell("deaf", "echo up >&2; while :; do sleep 0.01; done", timeout=1),
    shell("stays", "trap 'told=yes' USR1; echo up >&2; while [ -z \"$told\" ]; do :; done; sleep 0.3; echo told $told"),
    shell("ends", "trap 'echo done; exit 0' USR1; " + UP),
    shell("huge", "trap 'head -c 100000 /dev/zero; exit 75' USR1; " + UP),
    shell("unasked", "echo 41; exit 75"),
    shell("not_its_policy", "trap 'exit 75' USR1; " + UP, preempt="freeze"),
    shell("discarded", UP, kind="pure", preempt="discard"),
]


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full machine 50 ms may be over before a shell has had its turn."""
    if "stands_still" not in request.node.name:
        monkeypatch.setattr(commandpool, "_NOTICE_S", 30.0)


def commands(test: Any, specs: Any = SPECS, group: str = "auto", **limits: Any) -> None:
    process = ProcessConfig(allow_unsandboxed=True, cgroup=group)
    made_with = {"process": process, "tier0_share_pct": 100}
    node(test, specs=specs, made_with=made_with, spares=0, template="exec", **limits)


async def up(node: Node, other_than: Process | None = None) -> tuple[CommandCall, Process]:
    """The only call and its process, once that listens."""
    running = node.pool._commands._pools["code"].running

    def listens() -> bool:
        return any(b"up" in call.errors and call.process is not other_than for call in running)

    await wait_until(listens, "it listens")
    (call,) = running
    assert call.process is not None
    return call, call.process


class Urgent:
    """Urgent work, until it is done."""

    def __init__(self, node: Node) -> None:
        self.wanted = True
        node.pool.urgent(lambda: self.wanted)


async def makes_room(node: Node, process: Process) -> None:
    """It hands over its state, to urgent work, or to the next if it was too late and stands still: nobody says when a
    full machine lets it run."""
    while not process.ended:
        urgent = Urgent(node)
        await wait_until(lambda: process.ended or process.frozen, "it has made room or stands still")
        urgent.wanted = False
        await wait_until(lambda: process.ended or not process.frozen, "it goes on")


def text(outcome: ToolOutcome) -> Any:
    assert outcome.ok, outcome
    return msgspec.json.decode(outcome.payload)


@pytest.mark.parametrize("group", ["auto", "none"])
def test_a_state_that_was_handed_over_is_what_the_call_goes_on_from(group: str) -> None:
    async def test(node: Node) -> None:
        future = node.begin("hands_over", text="", tier=2)
        _, first = await up(node)
        await makes_room(node, first)
        assert text(await future) == "from 41, attempt 1\n"
        assert node.pool.statistics().processes["started"] == 2

    commands(test, group=group)


@pytest.mark.parametrize(("name", "comes_out"), [("hands_over", True), ("deaf", False), ("not_its_policy", False)])
def test_who_stands_still_for_lack_of_memory_is_killed_once_its_state_is_out(name: str, comes_out: bool) -> None:
    async def test(node: Node) -> None:
        future = node.begin(name, text="", tier=2)
        _, process = await up(node)
        if process.leaf is not None:
            process.leaf.freeze()
        process.stalled = True  # as the watch of its leaf finds
        process._launcher._on_stalled(process)
        outcome = await future
        assert text(outcome) == "from 41, attempt 1\n" if comes_out else outcome.code == "tool_memory"

    commands(test)


@pytest.mark.parametrize("name", ["deaf", "stays"])
def test_one_without_a_handler_or_without_a_state_stands_still_and_goes_on(name: str) -> None:
    async def test(node: Node) -> None:
        future = node.begin(name, text="", tier=2)
        _, process = await up(node)
        urgent = Urgent(node)
        await wait_until(lambda: process.frozen or future.done(), "it stands still")
        assert process.preempted and not future.done()
        urgent.wanted = False
        outcome = await future
        assert node.pool.statistics().processes["started"] == 1
        assert outcome.code == "tool_timeout" if name == "deaf" else text(outcome) == "told yes\n"

    commands(test)


def test_who_is_done_when_the_notice_comes_has_its_result() -> None:
    async def test(node: Node) -> None:
        future = node.begin("ends", text="", tier=2)
        await up(node)
        Urgent(node)
        assert text(await future) == "done\n"

    commands(test)


def test_a_state_is_bounded_like_a_result() -> None:
    async def test(node: Node) -> None:
        future = node.begin("huge", text="", tier=2)
        await up(node)
        Urgent(node)
        assert (await future).code == "tool_result_too_big"

    commands(test, result_bytes_max=64_000)


def test_status_75_is_a_failure_unless_it_was_asked_for() -> None:
    async def test(node: Node) -> None:
        outcome = await node.begin("unasked", text="", tier=2)
        assert outcome.code == "tool_failed" and msgspec.json.decode(outcome.payload)["status"] == 75

    commands(test)


def test_what_has_another_policy_is_not_told() -> None:
    async def test(node: Node) -> None:
        future = node.begin("not_its_policy", text="", tier=2)
        _, process = await up(node)
        urgent = Urgent(node)
        await wait_until(lambda: process.frozen, "it stands still")
        urgent.wanted = False
        await wait_until(lambda: not process.frozen, "it goes on")
        assert not future.done()

    commands(test)


def test_a_state_that_is_handed_over_to_a_node_that_stops_is_settled_by_kind() -> None:
    async def test(node: Node) -> None:
        future = node.begin("hands_over", text="", tier=2)
        await up(node)
        node.pool.stop()
        assert await future == EVICTED_RUNNING

    commands(test)


def test_what_is_discarded_does_not_begin_again_while_urgent_work_stays_and_gets_through_in_the_end() -> None:
    async def test(node: Node) -> None:
        node.begin("discarded", text="", tier=2)
        process: Process | None = None
        for times in range(1, 4):
            call, process = await up(node, process)
            urgent = Urgent(node)
            await wait_until(lambda gone=process: gone.ended, "it is gone")  # type: ignore[misc]
            await wait_until(lambda call=call: call.process is not None and call.process.pid != 0, "the next is born")  # type: ignore[misc]
            assert call.process is not None and call.discards == times
            await wait_until(lambda call=call: call.process.preempted, "it makes room at once")  # type: ignore[misc]
            assert node.pool.statistics().processes["started"] == times + 1, "one, which waits"
            urgent.wanted = False
            await wait_until(lambda call=call: not call.process.preempted, "it goes on")  # type: ignore[misc]
        call, process = await up(node, process)
        Urgent(node)
        await wait_until(lambda: process.frozen, "it is stopped instead")
        assert not process.ended and call.discards == 3

    commands(test)


def test_the_script_of_the_documentation_counts_all_numbers_whatever_comes_between() -> None:
    (script,) = re.findall(r"```sh\n# sum\.sh.*?\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    numbers = 200_000
    assert script.count("1000000") == 1

    async def test(node: Node) -> None:
        future = node.begin("sum", tier=1)
        for states in (0, 1, 2):
            process = await counts(node, future)
            if future.done():
                assert states, "it was too quick to be asked"
                break
            await makes_room(node, process)
        assert text(await future) == f"{numbers * (numbers + 1) // 2}\n"

    async def counts(node: Node, future: Any) -> Process:
        """Its process, once that would hear a notice."""
        running = node.pool._commands._pools["code"].running
        found = [None]

        def hears() -> bool:
            found[:] = [call.process for call in running]
            return future.done() or any(each and each.begun and _catches(each.pid, SIGUSR1) for each in found)

        await wait_until(hears, "it counts")
        return found[0]

    with public_folder() as folder:
        (folder / "sum.sh").write_text(script.replace("1000000", str(numbers)))
        (folder / "sum.sh").chmod(0o644)
        table = {
            "command": ["sh", str(folder / "sum.sh")], "kind": "at_most_once", "output": "text", "preempt": "snapshot",
            "read": [str(folder)],
        }  # fmt: skip
        config = load_config(env={}, arguments={"tools.commands": {"sum": table}})
        commands(test, specs=list(command_specs(config.tools.commands)))
