"""A node that runs errands and is killed, or whose hosts are: ``python errand_node.py python|wasm FOLDER``.

One JSON object a line on stdin, an errand each: ``{"order", "at", "victim"}``. The order is the idempotency key, so an
errand that an earlier life began goes on. ``at`` is a pass ("prepare.durable:3", "effect.after:2", "" for none) at which
SIGKILL goes to the ``victim``: the node, or all its hosts of agents or of tools, or their template. When the errand
has ended, one JSON object goes to stdout: how, which points were passed, and what an operator did. The node approves
what it is asked to, and settles what waits for an operator by what the ledger says. Ends when stdin does.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from errand_agents import errand
from errand_tools import FOLDER, TOOLS, crash_file, read_ledger

from agentrt import Run, Runtime, RunInfo, load_config
from agentrt.engine import crashpoints
from agentrt.errors import InputError, StepSettledError

GUEST: Final = Path(__file__).parents[2] / "examples/guests/errand.wasm"
AT_MOST_ONCE_PATH: Final = "2:8"
_POLL_S: Final = 0.003
_LOOK_AT_ALL: Final = 40  # polls


def victims(kind: str) -> list[int]:
    """Processes of this node: "agents" and "tools" are hosts, "agents_template" and "tools_template" what forks them."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_bytes()
            except OSError:
                continue
            parents[int(name)] = int(stat.rpartition(b")")[2].split()[1])
    me = os.getpid()
    what, _, template = kind.partition("_")
    templates = [pid for pid, parent in parents.items() if parent == me and _runs(pid, what)]
    return templates if template else [pid for pid, parent in parents.items() if parent in templates]


def _runs(pid: int, what: str) -> bool:
    try:
        return f"agentrt.{what}.".encode() in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return False


class Passes:
    """What is passed during one errand, and whom it kills. Control thread, but for `begin`."""

    def __init__(self) -> None:
        self.begin("", "")

    def begin(self, at: str, victim: str) -> None:
        self._at, self._victim = at, victim
        self.passed: list[str] = []
        crashpoints.act_with(self)

    def __call__(self, name: str, count: int) -> None:
        place = f"{name}:{count}"
        self.passed.append(place)
        if place == self._at:
            kill(self._victim)


def kill(victim: str) -> None:
    for pid in [os.getpid()] if victim == "node" else victims(victim):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


async def operate(run: Run, info: RunInfo, folder: Path) -> str | None:
    """What people do for a run that waits for them; what it was."""
    try:
        if info.wait_reason == "approval":
            await run.approve(by="errand_node")
        elif info.wait_reason != "operator":
            return None
        elif "may not be done twice" not in (info.detail or ""):
            await run.resume()
            return "resumed"
        else:
            keys = [entry["key"] for entry in read_ledger(folder) if entry["place"] == 3]
            if any(key.startswith(run.run_id) for key in keys):
                await run.settle(AT_MOST_ONCE_PATH, 3)
                return "settled"
            await run.settle_failed(AT_MOST_ONCE_PATH, "it did not happen, and will not")
            return "gave up"
    except (StepSettledError, InputError):
        pass  # it has moved on meanwhile
    return None


async def see_through(runtime: Runtime, run: Run, folder: Path) -> dict[str, Any]:
    """Wait for the errand's end, and do what people have to."""
    waiter = asyncio.ensure_future(run.wait())
    operated: list[str] = []
    polls = 0
    while not waiter.done():
        infos = [await run.describe()]
        polls += 1
        if polls % _LOOK_AT_ALL == 0:  # children need people more rarely
            infos = [info for info in await runtime.list_runs(limit=10_000) if info.wait_reason]
        for info in infos:
            did = await operate(runtime.run(info.run_id), info, folder)
            if did:
                operated.append(did)
        await asyncio.wait([waiter], timeout=_POLL_S)
    result = waiter.result()
    error = None if result.error is None else result.error.decode()
    value = None if result.result is None else json.loads(result.result)
    return {"state": result.state.value, "result": value, "error": error, "operated": operated}


async def main(backend: str, folder: Path) -> None:
    passes = Passes()
    settings = {
        "limits.hot_ms": 0,
        "wasm.guests_max": 64,
        "wasm.memory_bytes_max": 1 << 24,
        "tools.start_timeout_ms": 300_000,
        # a sequential agent's outcomes always join its next step, unless each has to go alone
        "store.commit_delay_us": int(os.environ.get("ERRAND_COMMIT_DELAY_US", "200")),
    }
    async with Runtime(store=folder / "store", config=load_config(arguments=settings), tools=TOOLS) as runtime:
        if backend == "python":
            await runtime.register(errand)
        else:
            await runtime.register("errand", GUEST)
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            at, victim, order = asked["at"], asked["victim"], asked["order"]
            passes.begin(at, victim)
            if at.startswith("effect."):
                pid = os.getpid() if victim == "node" else 0
                crash_file(folder).write_text(json.dumps({"at": at, "pid": pid}))
            run = await runtime.submit("errand", {"order": order}, idempotency_key=order)
            said = await see_through(runtime, run, folder)
            print(json.dumps({"order": order, "passed": passes.passed, **said}), flush=True)


if __name__ == "__main__":
    os.environ[FOLDER] = sys.argv[2]
    assert crashpoints.ARMED
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
