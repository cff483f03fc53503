"""Profiles, estimates, capacity, and what flow control may not import."""

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentrt.flow
from agentrt.errors import ConfigError, InputError, StoreCorruptError
from agentrt.flow.accounts import agent_id, node_id, run_account_id, tenant_id
from agentrt.flow.admission import Admission, AdmissionLimits, Bound
from agentrt.flow.amounts import NO_LIMIT
from agentrt.flow.buckets import RateLimit
from agentrt.flow.capacity import FAN_OUT_DEFAULT, Headroom, Room, capacity
from agentrt.flow.children import EnsembleLimits
from agentrt.flow.decisions import WAIT_REASON, Control, Decision, Scope
from agentrt.flow.estimates import Estimates
from agentrt.flow.limits import RateRule
from agentrt.flow.profilebounds import NO_RATE, queues_over, rates_over
from agentrt.flow.profilefile import read_profiles
from agentrt.flow.profiles import (
    APPLIED_MAX,
    InForce,
    Profile,
    apply,
    check_profile,
    decode_applied,
    encode_applied,
    roll_back,
)
from agentrt.flow.quotas import Quota
from agentrt.flow.windows import Span
from agentrt.states import WAIT_REASONS

DAY = check_profile(
    "day",
    {
        "limits": {
            "node": {"tokens/day": 1e9},
            "tenant:*": {"tokens/hour": 100, "depth": 4},
            "tenant:acme": {"tokens/hour": 500},
            "agent:acme/planner": {"tool_calls": 7},
            "agent:*/planner": {"tool_calls": 5, "retries": 1},
        },
        "budgets": {"agent:*/*": {"tool_calls": 50}, "agent:acme/planner": {"wall_s": 60}},
        "quotas": {"tool:search/day": {"count": 100, "reset_s": 32_400}},
        "concurrency": {"provider:openai": 8},
        "tier_weights": [1000, 100, 10, 1],
        "prewarm": {"planner": 3},
        "ensemble": {"queued_max": 10},
    },
)


def test_exact_names_win_over_any_name_key_by_key() -> None:
    force = InForce(DAY)
    assert force.limits_of(tenant_id("acme")) == {"tokens/hour": 500, "depth": 4}
    assert force.limits_of(tenant_id("other")) == {"tokens/hour": 100, "depth": 4}
    assert force.limits_of(agent_id("acme", "planner")) == {"tool_calls": 7, "retries": 1}
    assert force.limits_of(agent_id("acme", "other")) == {}
    assert force.limits_of(node_id()) == {"tokens/day": 10**9}
    assert force.limits_of(run_account_id("run_1")) == {}  # runs have budgets
    assert force.budget_of("acme", "planner") == {"tool_calls": 50, "wall_s": 60}
    assert force.ensemble() == EnsembleLimits(queued_max=10)


def test_a_profile_goes_over_what_is_there_and_comes_off_again() -> None:
    night = check_profile(
        "night",
        {
            "limits": {"tenant:acme": {"tokens/hour": 9}},
            "quotas": {"tool:search/day": {"count": 5}, "tool:search/hour": {"count": 1}},
            "concurrency": {"provider:openai": 2, "tool:search": 1},
            "prewarm": {"planner": 0},
        },
    )
    base = InForce(DAY)
    force, change = apply(base, night, "cron", 5, "it is late")
    assert force.limits_of(tenant_id("acme")) == {"tokens/hour": 9, "depth": 4}
    assert set(force.quotas()) == {
        Quota(Scope.TOOL, "search", 5, Span.DAY),
        Quota(Scope.TOOL, "search", 1, Span.HOUR),
    }
    assert force.concurrency() == {"provider:openai": 2, "tool:search": 1}
    assert (force.prewarm(), force.tier_weights()) == ({"planner": 0}, (1000, 100, 10, 1))
    assert (change.action, change.by, change.at_ns, change.reason) == ("apply", "cron", 5, "it is late")
    assert (change.digest_before, change.digest_after) == (base.digest_hex(), force.digest_hex())
    assert apply(force, night, "cron", 6)[0] == force  # again is once
    assert decode_applied(DAY, encode_applied(force)) == force
    for name in ("night", None):
        back, change = roll_back(force, name, "ann", 7)
        assert back == base and change.digest_after == base.digest_hex() and change.action == "roll_back"
    with pytest.raises(InputError, match="is not applied"):
        roll_back(base, None, "ann", 8)


def test_only_so_many_profiles_are_applied_at_once() -> None:
    force = InForce(DAY)
    for number in range(APPLIED_MAX):
        force, _ = apply(force, Profile(name=f"p{number}"), "x", number)
    with pytest.raises(InputError, match="Roll one back"):
        apply(force, Profile(name="one more"), "x", 99)
    assert apply(force, Profile(name="p3"), "x", 99)[0].applied[-1].name == "p3"


@pytest.mark.parametrize(
    "said",
    [
        {"limit": {}},
        {"limits": 3},
        {"limits": {"tenant": {"tokens": 1}}},
        {"limits": {"tenant:": {"tokens": 1}}},
        {"limits": {"agent:planner": {"tokens": 1}}},
        {"limits": {"run:r": {"tokens": 1}}},
        {"limits": {"node": 3}},
        {"limits": {"node": {"tokens/year": 1}}},
        {"budgets": {"tenant:a": {"tokens": 1}}},
        {"budgets": {"agent:a/b": {"tokens/day": 1}}},
        {"quotas": {"tool:search": {"count": 1}}},
        {"quotas": {"run:r/day": {"count": 1}}},
        {"quotas": {"tool:search/day": 5}},
        {"quotas": {"tool:search/day": {"count": 0}}},
        {"quotas": {"tool:search/hour": {"count": 1, "reset_s": 3600}}},
        {"quotas": {"tool:search/day": {"count": 1, "reset": 3}}},
        {"concurrency": {"tenant:a": 1}},
        {"concurrency": {"pool:a": 1}},
        {"concurrency": {"tool:a": 0}},
        {"concurrency": {"tool:a": True}},
        {"tier_weights": [1, 2, 3]},
        {"tier_weights": [1, 2, 3, 4]},
        {"tier_weights": [0, 0, 0, 0]},
        {"prewarm": {"a": -1}},
        {"rates": {"openai": {"requests_per_minute": 1}}},
        {"rates": {"agent:a": {"requests_per_minute": 1}}},
        {"rates": {"tool:a": {"requests": 1}}},
        {"rates": {"tool:a": {"requests_per_minute": -1}}},
        {"rates": {"tool:a": 5}},
        {"queues": {"tier:4": {"items": 1}}},
        {"queues": {"class:": {"items": 1}}},
        {"queues": {"node": {"items": 0}}},
        {"queues": {"door": {"bytes": 0}}},
        {"queues": {"tenant:a": {"pct": 1}}},
        {"queues": {"tier:0": {"pct": 0}}},
        {"queues": {"tier:0": {"wait_ms": -1}}},
        {"queues": {"tenant:a": {"items": True}}},
        {"preload": "a"},
        {"preload": [""]},
        {"preload": [3]},
        {"ensembles": {"researcher": {"queued_max": 1}}},
        {"ensembles": {"tenant:a": {"queued_max": 1}}},
        {"ensembles": {"agent:a/b": {"queued": 1}}},
        {"ensembles": {"agent:a/b": {"queued_max": 0}}},
        {"ensembles": {"agent:a/b": 1}},
        {"ensemble": {"queue": 1}},
        {"ensemble": {"queued_max": 0}},
        {"ensemble": {"queued_max": "5"}},
    ],
)
def test_profiles_that_cannot_be_are_refused_by_name(said: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="profile 'wrong'|the quota of|an ensemble's queue"):
        check_profile("wrong", said)


NUMBERS = st.dictionaries(st.sampled_from(["items", "bytes"]), st.integers(1, 10**9), max_size=2)
QUEUES = st.dictionaries(
    st.sampled_from(["node", "door", "tier:0", "tier:3", "class:c", "tenant:a", "tenant:*"]), NUMBERS
)


@given(QUEUES, QUEUES)
def test_queues_of_profiles_go_over_the_configured_ones_number_by_number(low: Any, high: Any) -> None:
    """Against a naive model: each number is that of the uppermost layer that has it, the node's at most its own."""
    config = AdmissionLimits(
        node=Bound(1000, 10**6), tenant=Bound(50, 0), tenants={"a": Bound(7, 70)}, classes={"d": Bound(3, 0)}
    )
    force = InForce(check_profile("base", {"queues": low}), (check_profile("p", {"queues": high}),))
    found = queues_over(config, force.queues())

    def said(name: str, key: str, below: int) -> int:
        return int(high.get(name, {}).get(key, low.get(name, {}).get(key, below)))

    def bound(name: str, below: Bound) -> Bound:
        return Bound(said(name, "items", below.items), said(name, "bytes", below.bytes))

    node = bound("node", config.node)
    assert found.node == Bound(min(node.items, 1000), min(node.bytes, 10**6))
    assert found.door == bound("door", config.door)
    assert found.tiers == (bound("tier:0", Bound()), Bound(), Bound(), bound("tier:3", Bound()))
    assert found.tenant == bound("tenant:*", config.tenant)
    assert found.tenants["a"] == bound("tenant:a", Bound(7, 70))
    assert found.classes.get("c", Bound()) == bound("class:c", Bound()) and found.classes["d"] == Bound(3, 0)
    assert set(found.tenants) == {"a"} and {"d"} <= set(found.classes) <= {"c", "d"}
    if not low and not high:
        assert found == config
    Admission(config).configure(found, 0)


def test_tiers_of_a_profile_fill_and_wait_as_it_says() -> None:
    said = check_profile("p", {"queues": {"tier:2": {"pct": 5, "wait_ms": 0}, "tier:3": {"wait_ms": 7}}}).queues
    found = queues_over(AdmissionLimits(), said)
    assert found.tier_pct == (100, 95, 5, 80)
    assert found.wait_ns == (10**9, 10 * 10**9, 0, 7_000_000)


def test_ensembles_of_agents_have_bounds_of_their_own() -> None:
    base = check_profile(
        "base",
        {
            "ensemble": {"queued_max": 9, "live_max": 3},
            "ensembles": {"agent:*/planner": {"live_max": 2}, "agent:acme/planner": {"queued_max": 7}},
        },
    )
    force = InForce(base, (check_profile("p", {"ensembles": {"agent:acme/*": {"live_max": 1}}}),))
    assert force.ensemble() == force.ensemble("other", "other") == EnsembleLimits(9, live_max=3)
    assert force.ensemble("other", "planner") == EnsembleLimits(9, live_max=2)
    assert force.ensemble("acme", "planner") == EnsembleLimits(7, live_max=1)
    assert InForce(base).ensemble("acme", "planner") == EnsembleLimits(7, live_max=2)
    over = InForce(base, (check_profile("q", {"ensemble": {"queued_max": 5}}),))
    assert over.ensemble("acme", "planner") == EnsembleLimits(5)  # a layer is over all that is below


def test_rates_of_profiles_go_over_the_configured_ones() -> None:
    rules = (
        RateRule(Scope.TOOL, "*", RateLimit(10)),
        RateRule(Scope.PROVIDER, "p", RateLimit(100)),
        RateRule(Scope.PROVIDER, "p", RateLimit(5000, unit="tokens")),
    )
    said = {
        "tool:search": {"requests_per_minute": 0},  # an exception from what holds for all
        "provider:p": {"requests_per_minute": 7},
        "model:p/m": {"tokens_per_minute": 9},
        "tenant:*": {"requests_per_minute": 3},
    }
    found = {(rule.scope, rule.name, rule.rate.unit): rule.rate.limit for rule in rates_over(rules, said)}
    assert found == {
        (Scope.TOOL, "*", "requests"): 10,
        (Scope.TOOL, "search", "requests"): NO_RATE,
        (Scope.PROVIDER, "p", "requests"): 7,
        (Scope.PROVIDER, "p", "tokens"): 5000,
        (Scope.MODEL, "p/m", "tokens"): 9,
        (Scope.TENANT, "*", "requests"): 3,
    }
    gone = rates_over(rules, {"provider:p": {"requests_per_minute": 0}, "tool:*": {"requests_per_minute": 0}})
    assert [(rule.scope, rule.rate.unit) for rule in gone] == [(Scope.PROVIDER, "tokens")]
    assert rates_over(rules, {}) == rules


def test_a_profile_has_a_name() -> None:
    for name in ("", "x" * 129, "a\nb"):
        with pytest.raises(InputError):
            check_profile(name, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*Profile.__struct_fields__]), JSON, max_size=4))
def test_no_data_does_more_than_be_refused(said: dict[str, Any]) -> None:
    try:
        profile = check_profile("any", said)
    except InputError:
        return
    assert decode_applied(DAY, encode_applied(InForce(DAY, (profile,)))).applied == (profile,)


@given(st.binary(max_size=60))
def test_stored_profiles_are_read_or_refused(data: bytes) -> None:
    try:
        decode_applied(DAY, data)
    except StoreCorruptError:
        pass


# --- estimates -------------------------------------------------------------------


def test_estimates_follow_what_steps_use() -> None:
    estimates = Estimates()
    assert estimates.of("a", "tool:t") is None
    estimates.observe("a", "tool:t", 100, 10, 1_000)
    first = estimates.of("a", "tool:t")
    assert first is not None and (first.count, first.tokens, first.tokens_upper) == (1, 100, 300)
    for _ in range(200):
        estimates.observe("a", "tool:t", 1_000, 20, 5_000)
    settled = estimates.of("a", "tool:t")
    assert settled is not None and settled.count == 201
    assert (settled.tokens, settled.microdollars, settled.wall_ns) == (1_000, 20, 5_000)
    assert settled.tokens <= settled.tokens_upper <= 1_001


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200))
def test_an_estimate_lies_within_what_was_seen(values: list[int]) -> None:
    estimates = Estimates()
    for value in values:
        estimates.observe("a", "model:m", value, 0, 0)
    found = estimates.of("a", "model:m")
    assert found is not None
    assert min(values) - 1 <= found.tokens <= max(values) + 1
    assert found.tokens_upper >= found.tokens and (found.microdollars, found.wall_ns_upper) == (0, 0)


def test_the_longest_unused_estimate_goes() -> None:
    estimates = Estimates(names_max=2)
    for agent in ("a", "b", "a", "c"):
        estimates.observe(agent, "tool:t", 1, 1, 1)
    assert len(estimates) == 2 and estimates.of("b", "tool:t") is None and estimates.of("a", "tool:t") is not None


# --- capacity --------------------------------------------------------------------


def test_what_is_left_is_shown_and_the_least_of_it_suggests_the_fan_out() -> None:
    left = {"tokens": 900, "tool_calls": 40, "microdollars": NO_LIMIT}
    room = Room(depth=1, depth_max=4, children=2, children_max=12, queued=5, queued_max=100)
    rates = [Headroom("provider", "openai", "requests/60s", 9, 77)]
    found = capacity(10**9, left, {"context_tokens": 8_000}, room, deadline_ns=4 * 10**9, rates=rates)
    assert (found.fan_out, found.limited_by) == (9, "provider:openai requests/60s")
    assert (found.tokens, found.tool_calls, found.microdollars, found.fuel) == (900, 40, None, None)
    assert (found.depth_left, found.children_left, found.queue_left) == (3, 10, 95)
    assert (found.wall_s, found.context_tokens, found.rates) == (3.0, 8_000, tuple(rates))
    by_tokens = capacity(10**9, left, {}, room, per_child={"tokens": 300})
    assert (by_tokens.fan_out, by_tokens.limited_by) == (3, "tokens")


@pytest.mark.parametrize(
    ("left", "room", "deadline_ns", "fan_out", "limited_by"),
    [
        ({}, Room(), 0, FAN_OUT_DEFAULT, "default"),
        ({}, Room(depth=4, depth_max=4), 0, 0, "depth"),
        ({}, Room(children=5, children_max=5), 0, 0, "fan_out"),
        ({}, Room(queued=9, queued_max=5), 0, 0, "queue"),
        ({"tool_calls": 0}, Room(), 0, 1, "tool_calls"),
        ({"tool_calls": 2}, Room(), 0, 2, "tool_calls"),
        ({}, Room(), 10**9, 0, "wall_s"),
    ],
)
def test_what_suggests_the_fan_out(
    left: dict[str, int], room: Room, deadline_ns: int, fan_out: int, limited_by: str
) -> None:
    found = capacity(10**9, left, {}, room, deadline_ns=deadline_ns)
    assert (found.fan_out, found.limited_by) == (fan_out, limited_by)
    assert "inf" not in msgspec.json.encode(found).decode()


# --- decisions and purity ----------------------------------------------------------


def test_waits_of_controls_are_reasons_that_runs_wait_for() -> None:
    assert set(WAIT_REASON.values()) <= WAIT_REASONS


def test_a_decision_says_who() -> None:
    decision = Decision(at_ns=1, control=Control.BUDGET, action="wait", scope=Scope.NODE)
    assert decision.who == "node"
    assert msgspec.structs.replace(decision, scope=Scope.TENANT, name="acme").who == "tenant:acme"


IMPURE = {"time", "asyncio", "os", "random", "secrets", "threading", "socket", "subprocess"}
#: Pure as well.
INNER = tuple(f"agentrt.{name}" for name in ("flow", "errors", "decoding", "digest", "states", "tiers"))
MODULES = sorted(Path(agentrt.flow.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_flow_control_is_pure(path: Path) -> None:
    """No clock, loop, system, randomness or engine: whoever calls it brings them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            names = [node.module or ""]
        else:
            continue
        for name in names:
            assert name.split(".")[0] not in IMPURE, name
            assert not name.startswith("agentrt") or name.startswith(INNER), name


def test_flow_control_has_modules_to_look_at() -> None:
    assert {"budgets", "quotas", "capacity", "profiles", "decisions"} <= {path.stem for path in MODULES}


# --- the file --------------------------------------------------------------------


def test_the_file_of_limits_is_read_as_profiles() -> None:
    text = """
        [base.limits]
        node = {"tokens/day" = 5}
        [profiles.night.ensemble]
        queued_max = 3
    """
    read = read_profiles(text, "limits.toml")
    assert read.base.limits == {"node": {"tokens/day": 5}}
    assert read.profiles == {"night": Profile(name="night", ensemble=EnsembleLimits(3))}
    assert read_profiles("", "").base == Profile(name="base")


@pytest.mark.parametrize(
    "text",
    [
        "[base",
        "x = 1",
        "base = 1",
        "profiles = 1",
        "[profiles]\nnight = 3",
        "[base.limits]\nnode = {tokens = -1}",
        "[profiles.night]\nlimit = {}",
    ],
)
def test_a_file_that_cannot_be_names_itself(text: str) -> None:
    with pytest.raises(ConfigError, match=r"limits\.toml: "):
        read_profiles(text, "limits.toml")
