"""Which version a run goes on with: every policy against everything that may be there."""

import itertools
from typing import Any

import pytest
from engine_kit import FakeProgram

from agentrt.agents import agent
from agentrt.engine.info import Agent
from agentrt.engine.upgrade import Bring, Fail, Migrate, Pinned, Start, There, Wait, decide
from agentrt.errors import InputError, UnknownToolError
from agentrt.tools.spec import ToolRegistry, tool
from agentrt.upgrading import ON_UPGRADE, check_upgrade, migration_tool


def make(version: str, policy: str = "pin", **pins: str) -> Agent:
    program: Any = FakeProgram(version, pins, lambda ctx, input: iter(()))
    backend: Any = None
    return Agent("a", version, backend, program, 1, 1, {}, policy, "m" if policy == "migrate" else None)


def pinned(**how: Any) -> Pinned:
    given: dict[str, Any] = {
        "run_id": "run_1",
        "agent": "a",
        "version": "v1",
        "pins": {"agent": "v1", "engine": "1"},
        "at_start": False,
        "has_state": False,
        "ending": False,
    }
    return Pinned(**(given | how))


def there(current: Agent | None, own: Agent | None = None, *, kept: bool = False, **node: str) -> There:
    return There(current, own, node, kept)


@pytest.mark.parametrize("policy", ON_UPGRADE)
def test_a_run_of_the_present_version_goes_on_with_it(policy: str) -> None:
    now = make("v1", policy, engine="1")
    assert decide(pinned(), there(now)) == Start(now, {})
    assert decide(pinned(), there(None, now)) == Start(now, {})


def test_without_any_agent_it_waits_and_says_for_what() -> None:
    verdict = decide(pinned(), there(None, kept=True))
    assert isinstance(verdict, Wait) and "nobody has registered agent a" in verdict.detail and "v1" in verdict.detail


@pytest.mark.parametrize("kept,own", [*itertools.product((False, True), (False, True))])
def test_pin_stays_with_its_own_version(kept: bool, own: bool) -> None:
    old, new = make("v1", engine="1"), make("v2", "pin", engine="2")
    verdict = decide(pinned(), there(new, old if own else None, kept=kept))
    if own:
        assert verdict == Start(old, {})
    elif kept:
        assert verdict == Bring("v1")
    else:
        assert isinstance(verdict, Wait) and "on_upgrade='continue'" in verdict.detail and "v1" in verdict.detail


def test_continue_changes_every_pin_at_once() -> None:
    new = make("v2", "continue", engine="2")
    verdict = decide(pinned(), there(new, make("v1", engine="1"), agentrt="9"))
    assert verdict == Start(new, {"agent": "v2", "engine": "2", "agentrt": "9"})


def test_migrate_happens_at_the_start_of_a_segment_only() -> None:
    old, new = make("v1", engine="1"), make("v2", "migrate", engine="1")
    assert decide(pinned(at_start=True, has_state=True), there(new, old)) == Migrate(new, {"agent": "v2"})
    assert decide(pinned(at_start=True), there(new, old)) == Start(new, {"agent": "v2"})  # it has not begun
    assert decide(pinned(), there(new, old)) == Start(old, {})
    assert decide(pinned(), there(new, kept=True)) == Bring("v1")
    verdict = decide(pinned(), there(new))
    assert isinstance(verdict, Wait) and "checkpoint" in verdict.detail


def test_a_failed_migration_leaves_the_run_with_its_own_version_or_says_what_failed() -> None:
    old, new = make("v1", engine="1"), make("v2", "migrate", engine="1")
    run = pinned(at_start=True, has_state=True, migration_failed="tool_failed: no such field")
    assert decide(run, there(new, old)) == Start(old, {})
    assert decide(run, there(new, kept=True)) == Bring("v1")
    verdict = decide(run, there(new))
    assert isinstance(verdict, Wait) and "no such field" in verdict.detail


def test_fail_ends_the_run_and_names_both_versions() -> None:
    verdict = decide(pinned(), there(make("v2", "fail"), make("v1")))
    assert isinstance(verdict, Fail) and verdict.error.code == "upgraded"
    assert "v1" in verdict.error.message and "v2" in verdict.error.message and verdict.error.run == "run_1"


@pytest.mark.parametrize("policy", ["pin", "migrate", "fail"])
def test_what_unwinds_does_so_under_its_own_version(policy: str) -> None:
    old = make("v1", engine="1")
    run = pinned(at_start=True, has_state=True, ending=True)
    assert decide(run, there(make("v2", policy, engine="1"), old)) == Start(old, {})
    assert decide(run, there(make("v2", policy, engine="1"), kept=True)) == Bring("v1")


@pytest.mark.parametrize("policy,at_start", [*itertools.product(ON_UPGRADE, (False, True))])
def test_another_engine_is_an_upgrade_too(policy: str, at_start: bool) -> None:
    now = make("v1", policy, engine="2")
    verdict = decide(pinned(at_start=at_start), there(now))
    if policy == "continue" or (policy == "migrate" and at_start):
        assert verdict == Start(now, {"engine": "2"})
    elif policy == "fail":
        assert isinstance(verdict, Fail)
    else:
        assert isinstance(verdict, Wait) and "engine 1, this node has 2" in verdict.detail


@tool(kind="pure")
def good(state: dict, from_version: str) -> dict:
    return state


@tool(kind="keyed")
def keyed(state: dict, from_version: str, *, idempotency_key: str) -> dict:
    return state


@tool(kind="pure")
def other(state: dict) -> dict:
    return state


def plain(state: dict, from_version: str) -> dict:
    return state


@pytest.mark.parametrize(
    "policy,migrate",
    [
        ("later", None),
        ("migrate", None),
        ("pin", good),
        (None, good),
        ("migrate", keyed),
        ("migrate", other),
        ("migrate", plain),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_said(policy: str | None, migrate: Any) -> None:
    with pytest.raises(InputError):
        check_upgrade("a", policy, migrate)
    with pytest.raises(InputError):

        @agent(on_upgrade=policy, migrate=migrate)
        async def declared(ctx: Any) -> None: ...


def test_a_migrate_function_is_a_pure_tool_of_the_node() -> None:
    registry = ToolRegistry([keyed])
    assert check_upgrade("a", None, None) == ("pin", None)
    assert check_upgrade("a", "migrate", good) == ("migrate", good)
    assert migration_tool(registry, good) == "good" and migration_tool(registry, "good") == "good"
    with pytest.raises(InputError):
        migration_tool(registry, "keyed")
    with pytest.raises(UnknownToolError):
        migration_tool(registry, "nobody")
