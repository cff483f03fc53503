"""Rules at every door of the engine: which agent, tier and key a request gets, and who may not come in."""

from typing import Any

import pytest
from engine_kit import Ctx, Node, World, run
from test_engine_waits import HOT

from agentrt.engine.accept import Via
from agentrt.errors import ConfigError, DeniedError, IdempotencyConflictError, InputError, QueueFullError
from agentrt.flow.classifier import Classifier, Rule
from agentrt.flow.profilefile import read_profiles
from agentrt.flow.urgent import UrgentRates
from agentrt.records import RunAccepted
from agentrt.stores.memory import MemoryDisk

SPAWN, JOIN = 6, 7

RULES = (
    Rule(door="bus", type="order.*", fields={"order.kind": "rush"}, set_agent="rush", set_tier="urgent",
         set_key="{source}/{field:order.id}"),
    Rule(headers={"x-batch": "*"}, set_tier="batch"),
    Rule(type="spam", refuse="nobody wants it"),
    Rule(door="spawn", agent="old", set_agent="rush", set_tier="urgent"),
    Rule(door="spawn", agent="never", refuse="not from within"),
)  # fmt: skip


def named(ctx: Ctx, input: Any) -> Any:
    yield ctx.wait(ctx.tool("add", a=1, b=1))
    return "done"


def spawner(ctx: Ctx, input: Any) -> Any:
    spawn = ctx.op(SPAWN, agent=input)
    yield ctx.wait(spawn)
    answer = ctx.read(spawn)
    if "error" in answer:
        return answer["error"]["code"]
    join = ctx.op(JOIN, run_id=answer["run_id"])
    yield ctx.wait(join)
    return answer["run_id"]


def make(classifier: Classifier | None = None, disk: MemoryDisk | None = None, **how: Any) -> Node:
    node = Node(disk or MemoryDisk(), World(), limits=HOT, classifier=classifier or Classifier(RULES), **how)
    for name in ("rush", "slow", "never"):
        node.register(name, named)
    node.register("spawner", spawner)
    return node


def accepted(node: Node, run_id: str) -> RunAccepted:
    record = node.records(run_id)[0]
    assert isinstance(record, RunAccepted)
    return record


def order(number: int) -> dict[str, Any]:
    return {"order": {"kind": "rush", "id": number}}


BUS = Via("bus", "orders", "order.new")


def test_a_request_gets_the_agent_tier_and_key_that_rules_say() -> None:
    async def main() -> None:
        told: list[Any] = []
        node = make()
        node.engine.observe(lambda event, data: told.append(data) if event == "decision" else None)
        first = await node.submit("", order(1), via=BUS)
        found = accepted(node, first)
        assert (found.agent, found.base_tier, found.idempotency_key) == ("rush", 0, "orders/1")
        assert (told[-1].control, told[-1].action, told[-1].name) == ("classifier", "classify", "bus")
        assert await node.submit("", order(1), via=BUS) == first  # delivered twice
        assert await node.submit("", order(2), via=BUS) != first
        with pytest.raises(IdempotencyConflictError):
            await node.submit("", order(1) | {"more": 1}, via=BUS)
        other = accepted(node, await node.submit("slow", 1, tier=1, via=Via("http", headers={"x-batch": "yes"})))
        assert (other.agent, other.base_tier, other.idempotency_key) == ("slow", 2, None)
        plain = accepted(node, await node.submit("slow", 1, tier=3, idempotency_key="mine"))
        assert (plain.base_tier, plain.idempotency_key) == (3, "mine")
        await node.close()

    run(main())


def test_what_rules_refuse_or_cannot_complete_leaves_nothing() -> None:
    async def main() -> None:
        node = make()
        with pytest.raises(DeniedError, match="nobody wants it"):
            await node.submit("slow", 1, via=Via(type="spam"))
        with pytest.raises(InputError, match="makes its key") as incomplete:
            await node.submit("", {"order": {"kind": "rush"}}, via=BUS)
        assert not isinstance(incomplete.value, DeniedError)
        with pytest.raises(InputError, match="names no agent"):
            await node.submit("", 1)
        assert not node.disk.heads and node.engine._intake.admission.items == 0
        await node.close()

    run(main())


def test_no_rule_and_no_request_is_more_urgent_than_tenant_and_caller_may_be() -> None:
    async def main() -> None:
        node = make(Classifier(RULES, {"acme": 2}, 1))
        for tenant, via, tier, expected in (
            ("acme", BUS, None, 2),
            ("other", BUS, None, 1),
            ("acme", Via(), 3, 3),
            ("acme", Via(), None, 2),  # the agent's own is 1
            ("other", Via(max_tier=2), 0, 2),
        ):
            name, input = ("", order(9)) if via is BUS else ("slow", 1)
            run_id = await node.submit(name, input, tenant=tenant, via=via, tier=tier)
            assert accepted(node, run_id).base_tier == expected
        without = make(Classifier())
        assert accepted(without, await without.submit("slow", 1, tier=0, via=Via(max_tier=3))).base_tier == 3
        await node.close()
        await without.close()

    run(main())


def test_a_tenant_begins_no_more_urgent_runs_than_it_may() -> None:
    async def main() -> None:
        clock = [1_000 * 10**9]
        node = make(Classifier(), urgent_rates=UrgentRates(10, {"vip": 0}), now_ns=lambda: clock[0])
        await node.submit("slow", 1, tenant="acme", tier=0)
        for via in (Via("http"), Via(wait=True)):  # nobody waits at a full door for that
            with pytest.raises(QueueFullError) as refused:
                await node.submit("slow", 1, tenant="acme", tier=0, via=via)
            assert (refused.value.limit, refused.value.retry_after_s) == ("flow.urgent_per_minute", 6.0)
        assert node.engine.statistics().decisions["rate/refuse/tenant"] == 2
        for tenant, tier in (("acme", 1), ("rival", 0), ("vip", 0), ("vip", 0)):
            await node.submit("slow", 1, tenant=tenant, tier=tier)
        with pytest.raises(QueueFullError):
            await node.submit("rush", 1, tenant="rival", tier="urgent")
        clock[0] += 6 * 10**9
        run_id = await node.submit("spawner", "rush", tenant="acme", tier=0)
        assert (await node.result(run_id)).state == "SUCCEEDED"  # its child is urgent, too, and does not count
        await node.until(lambda: not node.engine._intake.admission.items)
        await node.close()

    run(main())


def test_a_restart_gives_no_tenant_more_urgent_runs() -> None:
    """What counts is in the store: runs of tier 0 that somebody asked for, not their children, not long ago."""

    async def main() -> None:
        clock = [1_000_000 * 10**9]

        def node_of(disk: MemoryDisk) -> Node:
            return make(Classifier(), disk=disk, urgent_rates=UrgentRates(10, {"vip": 0}), now_ns=lambda: clock[0])

        disk = MemoryDisk()
        node = node_of(disk)
        await node.result(await node.submit("spawner", "rush", tenant="rival", tier=0))
        clock[0] += 600 * 10**9
        for tenant, tier in (("acme", 0), ("vip", 0), ("calm", 1)):
            await node.result(await node.submit("rush", 1, tenant=tenant, tier=tier))
        await node.close()
        clock[0] += 10**9
        node = node_of(disk)
        node.engine.entrance.recall_urgent(node.store)
        with pytest.raises(QueueFullError) as refused:
            await node.submit("rush", 1, tenant="acme", tier=0)
        assert refused.value.retry_after_s == 5.0
        for tenant in ("rival", "vip", "calm"):
            await node.submit("rush", 1, tenant=tenant, tier=0)
        await node.close()

    run(main())


def test_children_come_through_a_door_too() -> None:
    async def main() -> None:
        node = make()
        child = (await node.result(await node.submit("spawner", "old", tier=1))).value()
        found = accepted(node, child)
        assert (found.agent, found.base_tier) == ("rush", 1)  # never more urgent than its parent
        assert (await node.result(await node.submit("spawner", "never"))).value() == "denied"
        assert not node.engine._intake.promised
        await node.close()

    run(main())


def test_rules_come_from_the_file_of_limits() -> None:
    text = """
[base.limits.node]
tool_calls = 5
[[rules]]
type = "a"
set_tier = "urgent"
[[rules]]
tenant = "t?"
fields = { "x.y" = "1" }
refuse = "no"
"""
    found = read_profiles(text, "f")
    assert found.rules == (Rule(type="a", set_tier="urgent"), Rule(tenant="t?", fields={"x.y": "1"}, refuse="no"))
    for wrong in (
        '[[rules]]\ncolour = "red"',
        '[[rules]]\nset_tier = "soon"',
        "[[rules]]\nheaders = 1",
        "rules = 3",
        "[rules]",
    ):
        with pytest.raises(ConfigError, match="rule"):
            read_profiles(wrong, "f")


def test_rules_do_not_look_at_secrets() -> None:
    for rule in (Rule(headers={"Authorization": "*"}), Rule(set_key="{header:cookie}")):
        with pytest.raises(ConfigError, match="looks at"):
            Classifier([rule])
    assert Classifier(RULES).header_names == {"x-batch"} and Classifier(RULES).reads_payload
    assert not Classifier([Rule(door="x")]).reads_payload
