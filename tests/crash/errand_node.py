"""A node that runs errands and is killed, or whose hosts are: ``python errand_node.py python|wasm|process FOLDER``.

One JSON object a line on stdin, an errand each: ``{"order", "at", "victim"}``. The order is the idempotency key, so an
errand that an earlier life began goes on. Errands that are asked for at once run at once. ``at`` is a pass
("prepare.durable:3", "effect.after:2", "never"; "" for none) at which SIGKILL goes to the ``victim``: the node, or all
its hosts of agents or of tools, their template, or the programs. When the errand has ended, one JSON object goes to
stdout: how, which points were passed since one was named last, and what people did. They are in here, too: they
approve, and settle what waits for them by what the ledger says. Ends when stdin does.
"""

import asyncio
import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Final

from errand_agents import errand
from errand_processes import processes
from errand_tools import FOLDER, TOOLS, crash_file, give_up, read_ledger

from agentrt import Command, Run, RunInfo, Runtime, load_config
from agentrt.engine import crashpoints
from agentrt.errors import InputError, StepSettledError

GUEST: Final = Path(__file__).parents[2] / "examples/guests/errand.wasm"
PROGRAM: Final = Path(__file__).with_name("errand_program.py")
RECONCILABLE_PATH: Final = "2:3"
AT_MOST_ONCE_PATH: Final = "2:8"
_FEW: Final = 2  # errands at once
_POLL_S: Final = 0.003
_POLL_MANY_S: Final = 0.05
_LOOK_AT_ALL: Final = 40  # polls


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
    for pid in [os.getpid()] if victim == "node" else processes(os.getpid(), victim):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Operator:
    """What people do for runs that wait for them: approve, and settle by what the ledger says."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self._runtime = runtime
        self._folder = folder
        self.errands: dict[str, list[str]] = {}  # run -> what was done about it and its children
        self._began = asyncio.Event()

    def begin(self, run: Run) -> None:
        self.errands.setdefault(run.run_id, [])
        self._began.set()

    def end(self, run: Run) -> list[str]:
        did = self.errands.pop(run.run_id)
        if not self.errands:
            self._began.clear()
        return did

    async def work(self) -> None:
        for turn in count():
            await self._began.wait()
            few = len(self.errands) <= _FEW
            if few and turn % _LOOK_AT_ALL:
                infos = [await self._runtime.describe_run(run_id) for run_id in [*self.errands]]
            else:  # children need people, too, if more rarely
                infos = await self._runtime.list_runs(limit=100_000)
            for info in infos:
                if info.wait_reason in ("approval", "operator"):
                    did = await self._see_to(self._runtime.run(info.run_id), info)
                    if did is not None:
                        self.errands.get(info.run_id, []).append(did)
            await asyncio.sleep(_POLL_S if few else _POLL_MANY_S)

    async def _see_to(self, run: Run, info: RunInfo) -> str | None:
        try:
            if info.wait_reason == "approval":
                await run.approve(by="errand_node")
                return None
            if info.detail is None:
                return None  # whoever lets it go on lets all its steps run again: not without knowing which
            orders = {e["place"]: e["order"] for e in read_ledger(self._folder) if e["key"].startswith(run.run_id)}
            if "cannot say" in info.detail:  # its host died each time that it was asked
                await (run.settle(RECONCILABLE_PATH, 2) if 2 in orders else run.retry(RECONCILABLE_PATH))
                return "found out"
            if "may not be done twice" not in info.detail:
                await run.resume()
                return "resumed"
            if 3 in orders:
                await run.settle(AT_MOST_ONCE_PATH, 3)
                return "settled"
            give_up(self._folder, orders[1])  # first: a node that is killed tells nobody what it did
            await run.settle_failed(AT_MOST_ONCE_PATH, "it did not happen, and will not")
            return "gave up"
        except (StepSettledError, InputError):  # it has moved on meanwhile
            return None


async def errand_of(asked: dict[str, str], runtime: Runtime, passes: Passes, operator: Operator) -> None:
    order = asked["order"]
    run = await runtime.submit("errand", {"order": order}, idempotency_key=order)
    operator.begin(run)
    result = await run.wait()
    said = {
        "order": order,
        "state": result.state.value,
        "result": None if result.result is None else json.loads(result.result),
        "error": None if result.error is None else result.error.decode(),
        "operated": operator.end(run),
        "passed": passes.passed,
    }
    print(json.dumps(said), flush=True)


def program() -> Command:
    path = os.pathsep.join(part for part in sys.path if part)
    return Command((sys.executable, "-S", str(PROGRAM)), environment=(f"PYTHONPATH={path}",))


async def main(backend: str, folder: Path) -> None:
    passes = Passes()
    settings = {
        "limits.hot_ms": 0,
        "limits.lock_grace_ms": 60_000,  # no lock is broken because the machine is full
        "flow.breaker_failures": 0,  # no tool is given up because its hosts are killed
        "wasm.guests_max": 256,
        "wasm.memory_bytes_max": 1 << 24,
        "tools.start_timeout_ms": 300_000,
        "programs.confined": False,
        "programs.kills_max": 1_000,
        "programs.start_timeout_ms": 300_000,
    }
    async with (
        Runtime(store=folder / "store", config=load_config(arguments=settings), tools=TOOLS) as runtime,
        asyncio.TaskGroup() as errands,
    ):
        if backend == "python":
            await runtime.register(errand)
        else:
            await runtime.register("errand", GUEST if backend == "wasm" else program())
        operator = Operator(runtime, folder)
        working = errands.create_task(operator.work())
        (folder / "pid").write_text(str(os.getpid()))
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            at, victim = asked["at"], asked["victim"]
            if at:
                passes.begin(at, victim)
            if at.startswith("effect."):
                pid = os.getpid() if victim == "node" else 0
                crash_file(folder).write_text(json.dumps({"at": at, "pid": pid}))
            errands.create_task(errand_of(asked, runtime, passes, operator))
        working.cancel()


if __name__ == "__main__":
    os.environ[FOLDER] = sys.argv[2]
    assert crashpoints.ARMED
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
