"""Hosts of tools that a killed node has left: nobody is asked what became of their calls before they are gone."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import tool_kinds_fixture as kinds
from tool_kit import Node, below, is_running, node, parent_of, wait_until

from agentrt import Runtime, load_config
from agentrt.tools import ToolOutcome
from agentrt.tools.importing import tools_in
from agentrt.tools.orphans import Orphans


def _holders(folder: Path, pids: set[int]) -> set[int]:
    """Which of these processes have a node's file open."""
    return {pid for pid in pids if any(link.startswith(f"{folder}/hosts.") for link in _links(pid))}


def written(file: Path) -> bool:
    return file.exists() and file.read_text() != ""


def number_in(file: Path) -> int:
    return int(file.read_text())


def _links(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


@pytest.mark.parametrize("mode", ["import", "bare", "exec"])
def test_every_process_that_tools_run_in_holds_the_file_and_what_they_execute_does_not(
    mode: str, tmp_path: Path
) -> None:
    file = tmp_path / "executed"

    async def test(node: Node) -> None:
        host = await node.value("sleep_long", seconds=0)
        node.begin("hold", file=str(file))
        await wait_until(lambda: written(file), "a worker has executed something")
        executed = number_in(file)
        worker = parent_of(executed)
        ours = below(os.getpid())
        assert {host, worker, executed} <= ours
        assert {host, parent_of(worker), worker} <= _holders(tmp_path, ours)  # its forker is between them
        assert executed not in _holders(tmp_path, ours)

    node(test, made_with={"folder": tmp_path}, template=mode)
    assert not list(tmp_path.glob("hosts.*")), "a node that has ended leaves nothing"
    assert not Orphans(tmp_path).left()


def test_a_question_waits_for_the_hosts_of_the_node_before_and_nothing_else_does(tmp_path: Path) -> None:
    file = str(tmp_path / "effects")
    before = Orphans(tmp_path)
    orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[before.fd])
    os.close(before.fd)  # as a kill does

    async def test(node: Node) -> None:
        args = {"file": file, "cents": 5}
        question = node.call("charge", args, key="k", attempt=2, reconcile=True)[1]
        given_up, answer = node.call("charge", args, key="other", attempt=2, reconcile=True)
        node.pool.cancel(given_up)
        assert (await answer).code == "cancelled"
        outcome: ToolOutcome = await node.call("charge", args, key="new")[1]
        assert outcome.ok and not question.done()
        kinds.note(file, "k 5")  # the orphan's effect, only now
        orphan.communicate(b"\n")
        assert b'"found":"yes"' in (await question).payload

    try:
        node(test, specs=tools_in(kinds), made_with={"folder": tmp_path})
    finally:
        orphan.kill()
        orphan.communicate()


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_node_has_such_a_file_if_it_can_have_a_successor(where: str, tmp_path: Path) -> None:
    settings = (
        {"store.kind": "memory"} if where == "memory" else {"store.path": str(tmp_path), "store.force_place": True}
    )
    with Runtime(config=load_config(arguments=settings)):
        assert len(list(tmp_path.glob("hosts.*"))) == (where == "folder")
    assert not list(tmp_path.glob("hosts.*"))


def test_questions_that_wait_when_the_node_stops_are_the_next_ones(tmp_path: Path) -> None:
    before = Orphans(tmp_path)

    async def test(node: Node) -> None:
        args = {"file": str(tmp_path / "effects"), "cents": 5}
        question = node.call("charge", args, key="k", attempt=2, reconcile=True)[1]
        node.pool.stop()
        assert (await question).evicted
        last = node.call("charge", args, key="k", attempt=2, reconcile=True)[1]
        assert (await last).evicted

    node(test, specs=tools_in(kinds), made_with={"folder": tmp_path})
    before.close()


def test_all_that_a_killed_node_left_is_gone_before_its_successor_asks(tmp_path: Path) -> None:
    """The whole chain: a template, a host, its forker and a worker."""
    held = tmp_path / "held"
    code = NODE.format(here=str(Path(__file__).parent), folder=str(tmp_path), held=str(held))
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        asyncio.run(wait_until(lambda: written(held), "the worker works"))
        pids = below(process.pid)
        assert len(_holders(tmp_path, pids)) >= 4
    finally:
        process.kill()
    process.wait()
    successor = Orphans(tmp_path)
    asyncio.run(wait_until(lambda: not successor.left(), "all are gone"))
    assert not any(_links(pid) for pid in pids if is_running(pid))
    successor.close()
    assert not list(tmp_path.glob("hosts.*"))


NODE = """
import asyncio, sys
sys.path.insert(0, {here!r})
import tools_fixture
from pathlib import Path
from agentrt.tools import ToolPool, ToolRegistry, ToolLimits

async def main():
    registry = ToolRegistry([tools_fixture.hold])
    pool = ToolPool(registry, asyncio.get_running_loop(), ToolLimits(), folder=Path({folder!r}))
    pool.start()
    args = b'{{"file": "' + {held!r}.encode() + b'"}}'
    pool.call("hold", args, key="h", tenant="t", tier=1, attempt=1, done=print)
    await asyncio.sleep(600)

asyncio.run(main())
"""
