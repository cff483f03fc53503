"""Hostile scripts: each ends within its bounds, the next call is clean, and the node's memory is what it was."""

import os
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import hostile
import msgspec
import pytest
from sandbox_kit import RUNTIMES, Sandbox

from agentrt.tools.outcome import ToolOutcome

MIB = 1 << 20
FUEL = 300_000_000
#: What the allocator may keep, besides the memory of the guests that may be there at once.
RSS_SLACK_BYTES = 100 * MIB
CLEAN = {"micropython": "len(dir()) and 2", "cpython": "len(dir()) and 2", "quickjs": "1 + 1"}


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def begin(sandbox: Sandbox, script: hostile.Script) -> "Future[ToolOutcome]":
    tool = "js.exec" if script.runtime == "quickjs" else "python.exec"
    return sandbox.begin(tool, {"code": script.code, "runtime": script.runtime, "fuel": FUEL})[1]


def check(script: hostile.Script, outcome: ToolOutcome) -> None:
    assert outcome.ok, (script, outcome)
    result = msgspec.json.decode(outcome.payload)
    code = result["error"]["code"] if result["error"] else ""
    assert code in script.ends, (script, result)
    assert len(outcome.payload) < 3 * MIB
    assert result["fuel"] <= FUEL


def clean(sandbox: Sandbox) -> None:
    """Nothing of the calls before is seen: the same call is the same to the byte."""
    for runtime in RUNTIMES:
        assert sandbox.run(runtime, CLEAN[runtime])["value"] == 2


def storm(sandbox: Sandbox, scripts: Iterable[hostile.Script]) -> None:
    begun = [(script, begin(sandbox, script)) for script in scripts]
    for script, outcome in begun:
        check(script, outcome.result(600))
    clean(sandbox)
    statistics = sandbox.do(sandbox.tools.statistics)
    assert (statistics.running, statistics.waiting, statistics.failures) == (0, 0, 0)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_hostile_script_of_each_kind(cache: Path, runtime: str) -> None:
    with Sandbox(cache, calls_max=4) as sandbox:
        clean(sandbox)
        storm(sandbox, [hostile.script(runtime, name, 0) for name in hostile.names(runtime)])


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_a_thousand_hostile_scripts(cache: Path) -> None:
    kinds = [(runtime, name) for runtime in RUNTIMES for name in hostile.names(runtime)]
    scripts = [hostile.script(*kinds[number % len(kinds)], number // len(kinds)) for number in range(1000)]
    with Sandbox(cache, calls_max=4) as sandbox:
        clean(sandbox)
        storm(sandbox, scripts[:200])  # every kind: the allocator has what it keeps
        before = rss()
        for at in range(200, 1000, 100):
            storm(sandbox, scripts[at : at + 100])
        assert rss() - before < RSS_SLACK_BYTES
