"""Settings become the rules of the gate."""

import pytest

from agentrt.config import load_config
from agentrt.errors import ConfigError
from agentrt.flow.admission import Bound
from agentrt.flow.decisions import Scope
from agentrt.flow.gate import SUCCESS, Call, Gate, Ticket, Waiting
from agentrt.flowlimits import admission_limits, gate_limits, loop_limits


def left(gate: Gate, tenant: str, **call: str) -> dict[str, int]:
    rooms = gate.headroom(Call(tenant, 1, **call), 10**18)
    return {f"{room.scope}:{room.name} {room.limit}": room.left for room in rooms}


def test_tables_hold_for_their_names_and_the_rest_for_each_tenant() -> None:
    config = load_config(
        env={},
        arguments={
            "flow.requests_per_minute": 600,
            "flow.at_once": 10,
            "flow.tenants": {"acme": {"requests_per_minute": 6000, "weight": 3}, "free": {"requests_per_minute": 0}},
            "flow.tools": {"search": {"at_once": 2}},
            "flow.providers": {"openai": {"tokens_per_minute": 1000}},
            "flow.models": {"small": {"at_once": 4}},
            "models.providers": {"openai": {"base_url": "https://models.example/v1"}},
            "models.catalog": {"small": {"provider": "openai"}},
        },
    )
    limits = gate_limits(config)
    gate = Gate(limits)
    assert left(gate, "other", tool="t") == {"tenant:other at_once": 10, "tenant:other requests/60s": 60}
    assert left(gate, "acme", tool="search") == {
        "tenant:acme at_once": 10,
        "tool:search at_once": 2,
        "tenant:acme requests/60s": 600,
    }
    assert left(gate, "free")["tenant:free requests/60s"] > 10**9
    assert left(gate, "other", cls="model", provider="openai")["provider:openai tokens/60s"] == 100
    assert left(gate, "other", cls="model", provider="openai", model="small")["model:openai/small at_once"] == 4
    assert limits.weights == {"acme": 3}
    assert {rule.scope for rule in limits.breakers} == {Scope.TOOL, Scope.PROVIDER, Scope.PAIR}


def test_models_have_targets_for_the_time_that_calls_take() -> None:
    """One that answers in time gets more calls at once, one that is late does not."""
    config = load_config(
        env={},
        arguments={
            "flow.latency_ms": 100,
            "flow.models": {"slow": {"latency_ms": 1000}, "any": {"latency_ms": 0}},
            "models.providers": {"p": {"base_url": "https://models.example/v1"}},
            "models.catalog": {name: {"provider": "p"} for name in ("quick", "slow", "any")},
        },
    )
    gate = Gate(gate_limits(config))

    def at_once_after(model: str, took_ms: int) -> int:
        now = 10**18
        for _ in range(20):
            tickets = []
            while isinstance(ticket := gate.request(Call("t", 0, "model", provider="p", model=model), now), Ticket):
                tickets.append(ticket)
            assert isinstance(ticket, Waiting)
            gate.cancel(ticket.ticket, now)
            now += took_ms * 10**6
            for each in tickets:
                gate.finish(each, SUCCESS, now)
        return len(tickets)

    for model, target_ms in (("quick", 100), ("slow", 1000)):
        assert at_once_after(model, target_ms + 1) == 8
        assert at_once_after(model, target_ms) > 8
    assert at_once_after("any", 10**6) > 8


def test_admission_gets_its_bounds_from_the_settings() -> None:
    config = load_config(
        env={},
        arguments={
            "scheduler.queue_items_max": 100,
            "flow.queue_items_max": 50,
            "flow.queue_tier_items_max": (0, 0, 7, 0),
            "flow.tenants": {"acme": {"queue_items_max": 5, "weight": 3}, "other": {"weight": 2}},
            "flow.classes": {"code": {"queue_bytes_max": 9}},
            "flow.admission_wait_ms": (1, 2, 3, 4),
        },
    )
    limits = admission_limits(config)
    assert limits.tenant == Bound(50, 0) and limits.tenants == {"acme": Bound(5, 0)}
    assert limits.classes == {"code": Bound(0, 9)} and limits.tiers[2] == Bound(7, 0)
    assert limits.wait_ns == (10**6, 2 * 10**6, 3 * 10**6, 4 * 10**6)
    assert limits.weights == {"acme": 3, "other": 2} and limits.node.items == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"flow.tools": {"search": {"queue_items_max": 1}}},
        {"flow.classes": {"browser": {"queue_bytes_max": 1}}},
        {"flow.classes": {"agent": {"urgent_per_minute": 1}}},
        {"flow.models": {"m": {"urgent_per_minute": 1}}},
        {"flow.classes": {"agent": {"max_tier": 1}}},
        {"flow.queue_bytes_max": 1000},
        {"flow.door_bytes_max": 2**20, "limits.request_bytes_max": 2**21},
    ],
)
def test_bounds_of_runs_stand_where_runs_are(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="queue_|door_|urgent_|max_tier"):
        load_config(env={}, arguments=wrong)


def test_controls_can_be_switched_off() -> None:
    off = {"flow.breaker_failures": 0, "flow.loop_iterations": 0, "flow.loop_repeats": 0, "flow.loop_rallies": 0}
    config = load_config(env={}, arguments=off)
    assert not gate_limits(config).breakers and not gate_limits(config).rates and not gate_limits(config).bulkheads
    loops = loop_limits(config)
    assert not (loops.iterations or loops.repeats or loops.rallies)


@pytest.mark.parametrize(
    "wrong",
    [
        {"flow.loop_repeats": 1},
        {"flow.retry_base_ms": 2000, "flow.retry_cap_ms": 1000},
        {"flow.models": {"none": {"at_once": 4}}},
        {"flow.tools": {"search": {"latency_ms": 4}}},
    ],
)
def test_relations_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="flow"):
        load_config(env={}, arguments=wrong)
