"""``agentrt run`` and ``agentrt runs`` on real guests, as a shell sees them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrt.cli import exits
from agentrt.doctor import selftest

AGENTRT = [sys.executable, "-c", "from agentrt.cli.main import main; main()"]
TOOLS = """
from agentrt import tool

@tool(kind="pure")
def greet(name: str) -> str:
    return f"hello, {name}"
"""


@pytest.fixture
def guests(tmp_path: Path) -> Path:
    """A folder with a guest that returns, one that faults and one that never ends."""
    for name, body in (("returns", selftest.RETURNS), ("faults", selftest.FAULTS), ("loops", selftest.LOOPS)):
        (tmp_path / f"{name}.wasm").write_bytes(selftest.module(body))
    (tmp_path / "junk.wasm").write_bytes(b"MZ\x90")
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


def agentrt(folder: Path, *arguments: str) -> tuple[int, str, str]:
    command = [*AGENTRT, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100)
    return done.returncode, done.stdout, done.stderr


def run_json(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = agentrt(folder, "run", "--json", *arguments)
    assert out, err
    (line,) = out.splitlines()
    return code, json.loads(line)


def test_a_run_that_succeeds(guests: Path) -> None:
    code, out, err = agentrt(guests, "run", "returns.wasm", "--tier", "urgent", "--tool", "tools.py:greet")
    assert (code, out) == (exits.OK.code, "null\n")
    assert "accepted" in err


AGENTS = """
from agentrt import Context, agent
from tools import greet

@agent
async def hello(ctx: Context, name: str) -> str:
    return await ctx.tool(greet, name=name)
"""


def test_a_python_file_is_run_with_its_tools(guests: Path) -> None:
    """Without a node, and durably: the second command with the key gets the first one's result."""
    (guests / "one.py").write_text(AGENTS)
    (guests / "two.py").write_text(AGENTS + AGENTS[AGENTS.index("@agent") :].replace("hello", "other"))
    place = ("--store", "runs", "--idempotency-key", "once", "--input", '"Ada"')
    first, second = run_json(guests, "one.py", *place), run_json(guests, "one.py:hello", *place)
    assert (first[0], first[1]["result"]) == (exits.OK.code, "hello, Ada")
    assert second[1]["run_id"] == first[1]["run_id"]
    code, outcome = run_json(guests, "two.py", "--input", '"Ada"')
    assert code == exits.INPUT.code and "2 agents: hello, other" in outcome["error"]["message"]
    code, outcome = run_json(guests, "two.py:other", "--input", '"Ada"')
    assert (code, outcome["result"]) == (exits.OK.code, "hello, Ada")
    code, outcome = run_json(guests, "tools.py")
    assert code == exits.INPUT.code and "0 agents" in outcome["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "code", "state", "error"),
    [
        (["returns.wasm"], exits.OK, "SUCCEEDED", None),
        (["faults.wasm"], exits.FAILED, "FAILED", "trap"),
        (["loops.wasm", "--fuel", "1000000"], exits.FAILED, "BUDGET_EXHAUSTED", "budget_exhausted"),
    ],
)
def test_how_a_run_ended(
    guests: Path, arguments: list[str], code: exits.ExitCode, state: str, error: str | None
) -> None:
    exit_code, outcome = run_json(guests, *arguments)
    assert (exit_code, outcome["state"]) == (code.code, state)
    assert (outcome["error"] and outcome["error"]["code"]) == error
    assert outcome["fuel"] <= 1_000_000


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["junk.wasm"], exits.INPUT, "module"),
        (["returns.wasm", "--input", "{"], exits.INPUT, "input"),
        (["returns.wasm", "--tier", "4"], exits.INPUT, "input"),
        (["returns.wasm", "--tool", "tools.py:nothing"], exits.INPUT, "input"),
        (["returns.wasm", "--tool", "no_such_module_here"], exits.INPUT, "input"),
        (["returns.wasm", "--store", "/proc/nowhere"], exits.STORE, "store"),
    ],
)
def test_what_is_refused(guests: Path, arguments: list[str], code: exits.ExitCode, error: str) -> None:
    exit_code, outcome = run_json(guests, *arguments)
    assert (exit_code, outcome["error"]["code"]) == (code.code, error)


def test_a_key_makes_one_run_of_two_commands(guests: Path) -> None:
    place = ("returns.wasm", "--store", "runs", "--idempotency-key", "once")
    first, second = run_json(guests, *place), run_json(guests, *place)
    assert first[0] == second[0] == exits.OK.code
    assert first[1]["run_id"] == second[1]["run_id"]
    code, outcome = run_json(guests, *place, "--input", "7")
    assert (code, outcome["error"]["code"]) == (exits.INPUT.code, "idempotency_conflict")
    code, out, _ = agentrt(guests, "runs", "ls", "--store", "runs", "--json")
    assert [json.loads(line)["run_id"] for line in out.splitlines()] == [first[1]["run_id"]]
    code, out, _ = agentrt(guests, "runs", "show", first[1]["run_id"], "--store", "runs", "--json")
    assert (code, json.loads(out)["state"]) == (exits.OK.code, "SUCCEEDED")


def test_a_store_in_use_is_said_to_be(guests: Path) -> None:
    command = [*AGENTRT, "run", "loops.wasm", "--store", "runs"]
    node = subprocess.Popen(command, cwd=guests, stderr=subprocess.PIPE, text=True)
    try:
        assert node.stderr is not None
        while "accepted" not in (line := node.stderr.readline()):
            assert line, "it ended without accepting"
        code, outcome = run_json(guests, "returns.wasm", "--store", "runs")
        assert (code, outcome["error"]["code"]) == (exits.STORE.code, "store_in_use")
        assert str(node.pid) in outcome["error"]["message"]
        code, out, _ = agentrt(guests, "runs", "ls", "--store", "runs", "--json")
        assert (code, json.loads(out)["state"]) == (exits.OK.code, "ACTIVE")
    finally:
        node.kill()
        node.communicate()


def test_ctrl_c_leaves_an_accepted_run_for_later(guests: Path) -> None:
    command = [*AGENTRT, "run", "loops.wasm", "--store", "runs"]
    node = subprocess.Popen(
        command,
        cwd=guests,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Who starts the tests in the background of a shell has it ignored, and so would this child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert node.stderr is not None
    while "accepted" not in (line := node.stderr.readline()):
        assert line, "it ended without accepting"
    node.send_signal(signal.SIGINT)
    _, err = node.communicate(timeout=60)
    assert node.returncode == exits.INTERRUPTED.code, err
    assert "Traceback" not in err
    _, out, _ = agentrt(guests, "runs", "ls", "--store", "runs", "--json")
    assert json.loads(out)["state"] == "ACTIVE"
