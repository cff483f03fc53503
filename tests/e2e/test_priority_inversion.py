"""Priority inversion on a node with one slot: a hog in the middle keeps nobody from a lock that a low tier holds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lending_agents as agents

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.run import Run
from agentrt.states import RunState

GUESTS = Path(__file__).parents[1] / "guests"
EXAMPLES = Path(__file__).parents[2] / "examples" / "guests"
ACQUIRE, RELEASE, EVENT = 8, 9, 4
FOREVER_MS = 3_600_000


@contextmanager
def node() -> Iterator[Runtime]:
    """One slot, and nobody is demoted or ages into it."""
    arguments = {
        "store.kind": "memory",
        "limits.hot_ms": 60_000,
        "limits.lock_grace_ms": 60_000,
        "wasm.guests_max": 256,
        "wasm.stacks_max": 256,
        "scheduler.workers": 1,
        "scheduler.quantum_ms": [FOREVER_MS] * 4,
        "scheduler.aging_threshold": 1_000_000,
        "scheduler.aging_wait_ms": [0, 0, 0, 0],
    }
    with Runtime(store=None, config=load_config(arguments=arguments)) as runtime:
        runtime.register_sync("spin", GUESTS / "spin.wasm")
        runtime.register_sync("sequence", EXAMPLES / "sequence.wasm")
        runtime.register_sync(agents.worker)
        yield runtime


def until(condition: Callable[[], Any], what: str) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError(what)


def hog(runtime: Runtime) -> Run:
    """Of tier 1, and at work."""
    run = runtime.submit_sync("spin", None, tier=1)
    until(lambda: run.describe_sync().scheduler == "RUNNING", "the hog never runs")
    return run


def test_a_wasm_holder_of_the_lowest_tier_lets_an_urgent_waiter_through() -> None:
    with node() as runtime:
        held = [[ACQUIRE, {"name": "l"}], [EVENT, {"topic": "go"}], [RELEASE, {"name": "l", "token": "$1.token"}]]
        low = runtime.submit_sync("sequence", held, tier=3)
        until(lambda: low.describe_sync().wait_reason == "event", "the holder never holds")
        busy = hog(runtime)
        runtime.send_sync(None, topic="go")
        time.sleep(0.1)
        assert low.describe_sync().state is RunState.ACTIVE  # it has its event, and no slot
        urgent = runtime.submit_sync(
            "sequence", [[ACQUIRE, {"name": "l"}], [RELEASE, {"name": "l", "token": "$1.token"}]], tier=0
        )
        assert urgent.result_sync(30)[0]["dirty"] is False
        # It may be back in the slot, and done, before it is taken from there.
        done = RunState.SUCCEEDED
        until(lambda: low.describe_sync().tier == 3 or low.describe_sync().state is done, "the tier is not given back")
        assert busy.describe_sync().state is RunState.ACTIVE
        busy.cancel_sync()
        assert low.result_sync(30)[2] is None


def test_a_python_holder_of_the_lowest_tier_lets_an_urgent_waiter_through() -> None:
    with node() as runtime:
        emitted: list[str] = []
        runtime.observe(lambda event, data: emitted.append(data.run_id) if event == "emitted" else None)
        low = runtime.submit_sync("worker", {"name": "l", "turns": 300, "work_ms": 2}, tier=3)
        until(lambda: low.run_id in emitted, "the holder never holds")
        busy = hog(runtime)
        urgent = runtime.submit_sync("worker", {"name": "l", "turns": 1, "work_ms": 1}, tier=0)
        until(lambda: low.describe_sync().tier == 0 or urgent.describe_sync().state is RunState.SUCCEEDED, "not lent")
        assert urgent.result_sync(60) == "done"
        assert busy.describe_sync().state is RunState.ACTIVE
        busy.cancel_sync()
        assert low.result_sync(30) == "done"
