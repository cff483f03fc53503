"""Admission in the engine: every door passes it, every refusal is somebody's, and nobody keeps a place that another one
needs to go on."""

import asyncio
import gc
from functools import partial
from typing import Any

import pytest
from engine_kit import Ctx, Node, World, run, settle
from test_engine_waits import HOT, Clock

from agentrt.engine import edge, repeats
from agentrt.engine.accept import Asked, Origin, Via
from agentrt.engine.group import Group
from agentrt.engine.info import EngineLimits
from agentrt.errors import AgentrtError, ClosedError, IdempotencyConflictError, InputError, QueueFullError
from agentrt.flow.admission import AdmissionLimits, Applicant, Bound
from agentrt.flow.classifier import Classifier, Rule
from agentrt.flow.profiles import check_profile
from agentrt.flow.urgent import UrgentRates
from agentrt.stores.memory import MemoryDisk

SPAWN, JOIN = 6, 7
WAITS = Via(wait=True)
MS = 10**6


def held(ctx: Ctx, input: Any) -> Any:
    """One call, of a tool that the test answers."""
    yield ctx.wait(ctx.tool("put", n=input))
    return input


def parent(ctx: Ctx, input: Any) -> Any:
    """So many generations below it, ``width`` children each; all at once."""
    if not input["depth"]:
        yield ctx.wait(ctx.tool("add", a=1, b=1))
        return 1
    below = input | {"depth": input["depth"] - 1}
    how = {"when_full": input.get("when_full", "block")}
    spawns = [ctx.op(SPAWN, agent="parent", input=below, **how) for _ in range(input["width"])]
    joins, total, refused = [], 1, []
    for spawn in spawns:
        yield ctx.wait(spawn)
        answer = ctx.read(spawn)
        if "error" in answer:
            refused.append(answer["error"]["code"])
        else:
            joins.append(ctx.op(JOIN, run_id=answer["run_id"]))
    for join in joins:
        yield ctx.wait(join)
        total += ctx.read(join)
    return total if not refused else sorted(refused)


def make(limits: EngineLimits, disk: MemoryDisk | None = None, **how: Any) -> Node:
    node = Node(disk or MemoryDisk(), World(), limits=limits, **how)
    node.register("held", held)
    node.register("parent", parent)
    return node


def bounds(node: Bound = Bound(1000, 10**6), **how: Any) -> EngineLimits:  # noqa: B008
    limits = AdmissionLimits(**({"tier_pct": (100, 100, 100, 100)} | how))
    return EngineLimits(hot_ns=10**15, queue_items_max=node.items, queue_bytes_max=node.bytes, admission=limits)


class Asks:
    """Submits without waiting for the answer."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.answers: dict[int, str | AgentrtError] = {}
        self.dones: dict[int, Any] = {}

    def ask(self, number: int, input: int | None = None, **how: Any) -> None:
        def done(run_id: str | None, error: BaseException | None) -> None:
            assert number not in self.answers, "answered twice"
            assert run_id is not None or isinstance(error, AgentrtError)
            self.answers[number] = run_id if run_id is not None else error  # type: ignore[assignment]

        self.dones[number] = done
        self.node.engine.accept("held", b"%d" % (number if input is None else input), done, **how)

    @property
    def accepted(self) -> list[int]:
        """In the order in which they were let in."""
        return [number for number, answer in self.answers.items() if isinstance(answer, str)]

    @property
    def refused(self) -> list[int]:
        return [number for number, answer in self.answers.items() if not isinstance(answer, str)]

    async def come(self, count: int) -> None:
        await self.node.until(lambda: len(self.answers) == count)


async def end_one(node: Node) -> None:
    await node.until(lambda: bool(node.tools.held))
    ended = sum(node.engine.statistics().ended.values())
    node.tools.answer_one()
    await node.until(lambda: sum(node.engine.statistics().ended.values()) == ended + 1)


@pytest.mark.parametrize(
    ("limits", "asks", "limit"),
    [
        (bounds(tenants={"acme": Bound(2, 0)}), {"tenant": "acme"}, "flow.queue_items_max"),
        (bounds(tenant=Bound(0, 2)), {}, "flow.queue_bytes_max"),
        (bounds(tiers=(Bound(), Bound(), Bound(2, 0), Bound())), {"tier": 2}, "flow.queue_tier_items_max"),
        (bounds(tiers=(Bound(), Bound(), Bound(0, 2), Bound())), {"tier": 2}, "flow.queue_tier_bytes_max"),
        (bounds(classes={"agent": Bound(2, 0)}), {}, "flow.classes.queue_items_max"),
        (bounds(classes={"agent": Bound(0, 2)}), {}, "flow.classes.queue_bytes_max"),
        (bounds(Bound(2, 10**6)), {}, "scheduler.queue_items_max"),
        (bounds(Bound(10, 2)), {}, "scheduler.queue_bytes_max"),
        (bounds(Bound(4, 10**6), tier_pct=(100, 75, 50, 25)), {"tier": "batch"}, "scheduler.queue_items_max"),
    ],
)
def test_every_bound_refuses_the_next_one_and_says_which_it_is_and_when_to_come_back(
    limits: EngineLimits, asks: dict[str, Any], limit: str
) -> None:
    async def main() -> None:
        told: list[Any] = []
        node = make(limits)
        node.engine.observe(lambda event, data: told.append(data) if event == "decision" else None)
        node.tools.hold = True
        door = Asks(node)
        for number in range(3):
            door.ask(number, **asks)
        await door.come(3)
        assert door.refused == [2]
        error = door.answers[2]
        assert isinstance(error, QueueFullError) and error.limit == limit
        assert error.retry_after_s is not None and error.retry_after_s >= 1 and error.hint
        assert told[-1].control == "admission" and told[-1].action == "refuse" and told[-1].value == 2
        if "tenant" in asks or "tier" in asks:  # others are let in
            door.ask(3, tenant="other", tier=1)
            await door.come(4)
            assert door.refused == [2]
        while node.engine._runs:
            await end_one(node)
        door.ask(9, **asks)
        await node.until(lambda: 9 in door.answers)
        assert 9 in door.accepted
        assert node.engine.statistics().refused == 1
        await node.close()

    run(main())


def test_what_would_never_fit_is_the_callers_mistake() -> None:
    async def main() -> None:
        node = make(bounds(tenant=Bound(0, 10)))
        for via in (Via(), WAITS):
            with pytest.raises(InputError, match="10 bytes"):
                await node.submit("held", "x" * 20, via=via)
        await node.close()

    run(main())


def test_who_waits_is_let_in_by_tier_and_refused_after_its_time() -> None:
    async def main() -> None:
        clock = Clock()
        waits = (1000 * MS, 2000 * MS, 3000 * MS, 4000 * MS)
        node = make(bounds(Bound(2, 10**6), wait_ns=waits, door=Bound(5, 10**6)), monotonic_ns=clock)
        node.tools.hold = True
        door = Asks(node)
        for number, tier in enumerate((3, 3, 3, 2, 1, 1)):
            door.ask(number, tier=tier, via=WAITS)
        await door.come(2)
        await end_one(node)
        await door.come(3)
        assert door.accepted == [0, 1, 4]
        clock.forward(2)
        node.engine._intake._due()
        await door.come(4)
        late = door.answers[5]
        assert isinstance(late, QueueFullError) and "as long as one may wait" in late.message
        node.engine.entrance.stop_entering(door.dones[3])  # it has gone, and hears nothing
        await end_one(node)
        await door.come(5)
        assert door.accepted == [0, 1, 4, 2]
        door.ask(6, tier=3, via=WAITS)
        node.engine.stop_accepting()
        await node.until(lambda: 6 in door.answers)
        assert isinstance(door.answers[6], ClosedError) and 3 not in door.answers
        assert not node.engine._intake._callers and node.engine._intake.admission.waiting == 0
        await node.close()

    run(main())


def test_a_full_door_sheds_the_least_urgent_never_what_is_accepted() -> None:
    async def main() -> None:
        node = make(bounds(Bound(1, 10**6), door=Bound(2, 10**6)))
        node.tools.hold = True
        door = Asks(node)
        for number, tier in enumerate((3, 2, 3, 1, 3, 0)):
            door.ask(number, tier=tier, via=WAITS)
        await door.come(4)
        assert door.accepted == [0] and sorted(door.refused) == [1, 2, 4]
        shed = door.answers[1]
        assert (
            isinstance(shed, QueueFullError) and "more urgent" in shed.message and shed.limit == "flow.door_items_max"
        )
        for _ in range(3):
            await end_one(node)
        assert door.accepted == [0, 5, 3]
        await node.close()

    run(main())


def test_what_changed_while_one_waited_is_seen_when_it_comes_in() -> None:
    async def main() -> None:
        node = make(bounds(Bound(1, 10**6)))
        node.tools.hold = True
        door = Asks(node)
        door.ask(0)
        door.ask(1, tenant="a", via=WAITS)
        door.ask(2, via=WAITS)
        node.engine.tenants.disable("a", "", lambda error: None)
        await door.come(1)
        await end_one(node)
        await door.come(3)
        assert isinstance(door.answers[1], InputError) and door.accepted == [0, 2]
        await end_one(node)
        assert node.engine._intake.admission.items == 0
        await node.close()

    run(main())


def test_tier_0_comes_in_as_ever_at_a_hundred_times_the_load() -> None:
    """Each of 10,000 asks that cannot be served is refused to its caller; what is kept of them is nothing."""

    async def main() -> None:
        node = make(bounds(Bound(100, 10**6), tier_pct=(100, 95, 90, 80), door=Bound(20, 10**6)))
        node.tools.hold = True
        door, number = Asks(node), 0
        for _ in range(100):
            for _ in range(100):
                number += 1
                door.ask(number, tier=1 + number % 3, via=WAITS if number % 2 else Via())
            before = len(node.engine._runs)
            node.engine.accept("held", b"0", lambda run_id, error: None, tier=0)
            assert len(node.engine._runs) == before + 1, "tier 0 was not let in at once"
            assert node.engine._intake.admission.items <= 100 and node.engine._intake.admission.waiting <= 20
            await node.until(lambda: bool(node.tools.held))
            await end_one(node)
            while len(node.engine._runs) > 96:
                await end_one(node)
        assert number == len(door.answers) + len(node.engine._intake._callers)
        refused = [door.answers[number] for number in door.refused]
        assert len(refused) > 9_000
        assert all(isinstance(error, QueueFullError) and error.retry_after_s for error in refused)
        assert node.engine.statistics().refused == len(refused)
        assert len(node.engine.flow.decisions) <= 1000 and len(node.engine._intake.admission._ends) <= 200
        await node.close()

    run(main())


@pytest.mark.parametrize("depth", [1, 3])
def test_parents_that_wait_for_children_keep_no_place_that_these_need(depth: int) -> None:
    async def main() -> None:
        node = make(bounds(Bound(2, 10**6)))  # nobody leaves memory by waiting
        runs = [await node.submit("parent", {"depth": depth, "width": 3}, via=WAITS) for _ in range(4)]
        total = sum(3**level for level in range(depth + 1))
        for run_id in runs:
            assert (await node.result(run_id)).value() == total
        assert node.engine._intake.admission.items == 0 and not node.engine._intake._children
        node.check_disk()
        await node.close()

    run(main())


def test_a_planner_is_blocked_while_its_tenant_is_full() -> None:
    def planner(ctx: Ctx, input: Any) -> Any:
        spawns = [ctx.op(SPAWN, agent="held", input=number) for number in range(input)]
        for spawn in spawns:
            yield ctx.wait(spawn)
        joins = [ctx.op(JOIN, run_id=ctx.read(spawn)["run_id"]) for spawn in spawns]
        for join in joins:
            yield ctx.wait(join)
        return len(joins)

    async def main() -> None:
        node = make(bounds(tenants={"acme": Bound(3, 0)}))
        node.register("planner", planner)
        node.tools.hold = True
        run_id = await node.submit("planner", 12, tenant="acme")
        for left in range(12, 0, -1):
            await node.until(lambda left=left: len(node.tools.held) == min(3, left))  # type: ignore[misc]
            assert len([m for m in node.engine._runs.values() if m.accepted.agent == "held"]) <= 3
            if left > 3:
                info = await node.engine.queries.describe(run_id)
                assert info.wait_reason == "space" and "flow.queue_items_max" in (info.detail or "")
            await end_one(node) if left > 1 else node.tools.answer_one()
        assert (await node.result(run_id)).value() == 12
        assert not node.engine._intake.promised and not node.engine._intake._children
        await node.close()

    run(main())


def test_a_planner_that_does_not_want_to_wait_is_told() -> None:
    async def main() -> None:
        node = make(bounds(Bound(2, 10**6)))
        node.tools.hold = True
        await node.submit("held", 1)
        run_id = await node.submit("parent", {"depth": 1, "width": 2, "when_full": "refuse"})
        assert (await node.result(run_id)).value() == ["ensemble_full", "ensemble_full"]
        await node.close()

    run(main())


def test_a_blocked_planner_leaves_memory_and_goes_on_after_a_restart_or_is_cancelled() -> None:
    async def main() -> None:
        clock = Clock()
        disk, limits = MemoryDisk(), EngineLimits(hot_ns=0, queue_items_max=1)
        node = make(limits, disk, now_ns=clock)
        node.tools.hold = True
        first = await node.submit("held", 1)
        await end_one(node)
        await node.result(first)
        planner = await node.submit("parent", {"depth": 1, "width": 2})
        blocker = asyncio.ensure_future(node.submit("held", 2, via=WAITS))
        await node.until(lambda: node.fold(planner).wait is not None, 200_000)
        await blocker
        node.crash()

        clock.forward(61)  # nobody at the old node's door is known any more: it looks again by itself
        again = make(limits, disk, now_ns=clock)
        again.engine.recover()
        assert (await again.result(planner)).value() == 3
        other = await again.submit("parent", {"depth": 1, "width": 2})
        await again.cancel(other)
        await again.result(other)
        await again.until(lambda: again.engine._intake.admission.items <= 1, 200_000)
        assert not again.engine._intake._children and not again.engine.flow._kept
        again.check_disk()
        await again.close()

    run(main())


def test_a_place_that_a_child_was_promised_and_nobody_asks_for_is_given_back() -> None:
    async def main() -> None:
        node = make(HOT)
        intake = node.engine._intake
        assert intake.admit_child("run_x/1:1", Applicant(1, "a"), block=True) is None
        assert intake.promised == 1 == intake.admission.items
        intake._unclaimed([*intake._promised])
        assert intake.promised == 0 == intake.admission.items
        assert intake.claim("run_x/1:1") is None  # who comes after all is accepted all the same
        await node.close()

    run(main())


def test_many_wait_at_the_door_each_for_itself() -> None:
    async def main() -> None:
        node = make(bounds(Bound(10, 10**6), door=Bound(30, 10**6)))
        future: asyncio.Future[Any] = node.loop.create_future()
        inputs = [str(number).encode() for number in range(100)]
        node.engine.entrance.accept_many(Group(100, partial(settle, future)), "held", inputs, via=WAITS)
        found = await future
        refused = [index for index, each in enumerate(found) if isinstance(each, QueueFullError)]
        assert len(refused) >= 60 and refused == sorted(refused) and all(isinstance(found[n], str) for n in range(40))
        for each in found:
            if isinstance(each, str):
                await node.result(each)
        await node.close()

    run(main())


def test_a_profile_shuts_the_queue_and_opens_it_for_those_at_the_door() -> None:
    """By a profile one run of a tenant is in; without it those who wait are; a restart keeps what was applied."""

    async def main() -> None:
        disk = MemoryDisk()
        node = make(bounds(), disk)
        node.tools.hold = True
        few = check_profile("few", {"queues": {"tenant:*": {"items": 1}, "tier:2": {"wait_ms": 0}}})

        async def change(action: Any, *what: Any) -> None:
            future: asyncio.Future[Any] = node.loop.create_future()
            action(*what, "ann", "", partial(settle, future))
            await future

        await change(node.engine.profiles.apply, few)
        door = Asks(node)
        door.ask(0)
        door.ask(1, via=WAITS)
        door.ask(2)
        door.ask(3, tier=2, via=WAITS)  # its tier does not wait now
        await door.come(3)
        assert door.accepted == [0] and sorted(door.refused) == [2, 3]
        await change(node.engine.profiles.roll_back, None)
        await door.come(4)
        assert door.accepted == [0, 1]
        door.ask(4)
        await door.come(5)
        assert door.accepted == [0, 1, 4]
        await change(node.engine.profiles.apply, few)
        node.crash()
        node = make(bounds(), disk)
        node.tools.hold = True
        node.engine.recover()
        await node.until(lambda: len(node.tools.held) == 3)
        door = Asks(node)
        door.ask(5)
        await door.come(1)
        assert door.refused == [5]
        await change(node.engine.profiles.roll_back, None)
        door.ask(6)
        await door.come(2)
        assert door.accepted == [6]
        await node.close()

    run(main())


def test_a_door_is_told_without_asking_only_what_asking_would_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_LATER_S", 0)

    async def main() -> None:
        now = [10**18]
        limits = bounds(Bound(4, 10**6), tier_pct=(100, 75, 50, 50), tenants={"acme": Bound(1, 0)})
        node = make(limits, monotonic_ns=lambda: now[0])
        told: list[Any] = []
        node.engine.observe(lambda event, data: told.append(data) if event == "decision" else None)
        node.tools.hold = True
        door = Asks(node)

        def unread(tier: int, tenant: str = "other") -> QueueFullError | None:
            return node.engine.entrance.refuse_unread(tier, tenant)

        door.ask(0, tier=2)
        door.ask(1, tenant="acme", tier=2)
        assert unread(2) is None  # full, and nobody has been told so
        door.ask(2, tier=2)
        door.ask(3, tenant="acme", tier=1)
        await door.come(4)
        assert door.refused == [2, 3]
        for tier, tenant, number in ((2, "other", 2), (3, "new", 2), (1, "acme", 3), (0, "acme", 3)):
            error = unread(tier, tenant)
            asked = door.answers[number]
            assert error is not None and isinstance(asked, QueueFullError) and error is not asked
            assert (str(error), error.limit, error.retry_after_s) == (str(asked), asked.limit, asked.retry_after_s)
        assert unread(1) is None and unread(0) is None  # there is room for more urgent ones
        await node.until(lambda: len(told) == 6)
        assert node.engine.statistics().refused == 6 and not node.engine._intake.edge._untold
        now[0] += edge._FRESH_NS + 1
        assert unread(2) is None
        door.ask(4, tier=2)
        await door.come(5)
        assert unread(2) is not None
        await end_one(node)
        assert unread(2) is None
        await node.close()
        assert node.engine.statistics().refused == 8 == len(told)

    run(main())


def test_a_crowd_at_the_door_lets_urgent_requests_by() -> None:
    """One that is posted while many are looked at waits for one of them, not for a turn's."""

    async def main() -> None:
        node = make(bounds(Bound(30, 10**6)))
        node.tools.hold = True
        order: list[str] = []
        hurry = [False, False, True, False, True]  # asked before each but the first of a turn
        node.engine.entrance.hurried = lambda: hurry.pop(0) if hurry else False
        door = node.engine.entrance
        enter = door.enter
        door.enter = lambda asked, done: (order.append(str(asked.tier)), enter(asked, done))  # type: ignore[method-assign,assignment,func-returns-value]
        found: list[Any] = []
        group: Group[str] = Group(40, lambda answers, error: found.extend(answers))
        door.accept_many(group, "held", [b"0"] * 40, tier=2)
        assert order == ["2"] * 3
        node.loop.call_soon(lambda: door.enter(Asked("held", b"1", tier=0), lambda *answer: None))
        await node.until(lambda: len(found) == 40)
        assert order.index("0") <= 3 + 2 and order.count("2") == 40  # what was put off before goes first, for its part
        assert sum(isinstance(each, str) for each in found) == 29
        await node.close()

    run(main())


@pytest.mark.parametrize("together", [True, False])
def test_refusals_leave_no_garbage(together: bool) -> None:
    """Circles of errors and frames are the garbage collector's, which holds up the control loop, and so urgent runs: at
    thousands of refusals a second for tens of milliseconds each second."""

    async def main() -> None:
        node = make(bounds(Bound(1, 10**6), tenants={"acme": Bound(1, 0)}))
        node.tools.hold = True
        await node.submit("held", 0)
        told: list[Any] = []

        def refuse() -> None:
            if together:
                group: Group[str] = Group(20, lambda found, error: told.extend(found))
                node.engine.entrance.accept_many(group, "held", [b"0"] * 20, tier=1)
            else:
                for number in range(20):
                    node.engine.accept("held", b"0", lambda run_id, error: told.append(error), tier=number % 4)
            assert len(told) == 20 and all(isinstance(error, QueueFullError) for error in told)
            told.clear()

        refuse()
        gc.collect()
        gc.disable()
        try:
            refuse()
            assert gc.collect() == 0
        finally:
            gc.enable()
        await node.close()

    run(main())


# --- repeats of what was accepted -----------------------------------------------------------


def test_who_repeats_an_accepted_request_gets_its_run_however_full_the_node_is() -> None:
    """Whether he would be refused, or would wait; another request with its key is told so, a new one is refused."""

    async def main() -> None:
        node = make(bounds(Bound(2, 10**6)))
        node.tools.hold = True
        door = Asks(node)
        door.ask(0, idempotency_key="first")
        door.ask(1, idempotency_key="second", tenant="acme")
        await door.come(2)
        accepted = dict(door.answers)

        def again(number: int, input: int, key: str | None, **how: Any) -> None:
            door.ask(number, input, idempotency_key=key, **how)

        for number, via in ((10, Via()), (20, WAITS)):
            again(number, 0, "first", via=via)
            again(number + 1, 1, "second", tenant="acme", via=via)
            again(number + 2, 7, "first", via=via)
        again(30, 0, "second")  # another tenant's key
        again(31, 0, "new")
        again(32, 0, None)
        again(33, 0, "x" * 5_000)
        await door.come(12)
        for number in (10, 20):
            assert [door.answers[number], door.answers[number + 1]] == [accepted[0], accepted[1]]
            conflict = door.answers[number + 2]
            assert isinstance(conflict, IdempotencyConflictError) and conflict.run == accepted[0]
        assert all(isinstance(door.answers[number], QueueFullError) for number in (30, 31, 32, 33))
        assert node.engine.statistics().duplicates == 4 and not node.engine._intake._callers

        again(40, 5, "waits", via=WAITS)  # a new one goes on waiting
        await node.until(lambda: not node.engine.entrance._repeats._reading)
        assert 40 not in door.answers
        await end_one(node)
        await door.come(13)
        assert isinstance(door.answers[40], str)
        await node.close()

    run(main())


def test_the_same_event_of_a_bus_gets_its_run_however_full_the_node_is() -> None:
    async def main() -> None:
        node = make(bounds(Bound(1, 10**6)))
        node.tools.hold = True
        found: list[Any] = []

        def arrive(number: int, digest: bytes = b"d") -> None:
            origin = Origin(f"topic/{number}", digest)
            asked = Asked("held", b"1", via=Via("bus"), origin=origin)
            node.engine.entrance.enter(asked, lambda run_id, error: found.append(run_id or error))

        arrive(1)
        await node.until(lambda: len(found) == 1)
        for number, digest in ((1, b"d"), (1, b"other"), (2, b"d")):
            arrive(number, digest)
        await node.until(lambda: len(found) == 4)
        first, same, other, new = found
        assert same == first and isinstance(other, IdempotencyConflictError) and isinstance(new, QueueFullError)
        await node.close()

    run(main())


def test_so_do_repeats_of_urgent_requests_beyond_their_rate() -> None:
    async def main() -> None:
        node = make(bounds(), urgent_rates=UrgentRates(1))
        node.tools.hold = True
        found: list[Any] = []

        def ask(key: str) -> None:
            done = lambda run_id, error: found.append(run_id or error)  # noqa: E731
            node.engine.accept("held", b"1", done, tenant="acme", tier=0, idempotency_key=key)

        ask("first")
        await node.until(lambda: len(found) == 1)
        ask("first")
        ask("second")
        await node.until(lambda: len(found) == 3)
        assert found[1] == found[0] and isinstance(found[2], QueueFullError)
        await node.close()

    run(main())


def test_looking_for_repeats_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In reads and in what waits for them: beyond, a refusal is one."""
    monkeypatch.setattr(repeats, "_PENDING_MAX", 5)
    monkeypatch.setattr(repeats, "_AT_ONCE", 3)

    async def main() -> None:
        node = make(bounds(Bound(1, 10**6)))
        node.tools.hold = True
        door = Asks(node)
        door.ask(0, idempotency_key="first")
        await door.come(1)
        reads: list[Any] = []
        look = node.engine.entrance._repeats._look
        node.engine.entrance._repeats._look = lambda function, done: (reads.append(function), look(function, done))  # type: ignore[assignment,func-returns-value]
        for number in range(1, 12):
            door.ask(number, 0, idempotency_key="first")
        refused = [number for number, answer in door.answers.items() if number and not isinstance(answer, str)]
        assert refused == [7, 8, 9, 10, 11]  # one is read at once, five wait
        await door.come(12)
        assert {door.answers[number] for number in range(7)} == {door.answers[0]}
        assert len(reads) == 3
        await node.close()

    run(main())


def test_a_door_reads_what_may_be_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_LATER_S", 0)

    async def main() -> None:
        node = make(bounds(Bound(1, 10**6)))
        told: list[Any] = []
        node.engine.observe(lambda event, data: told.append(data) if event == "decision" else None)
        node.tools.hold = True
        door = Asks(node)
        door.ask(0, idempotency_key="first")
        door.ask(1)
        await door.come(2)
        unread = node.engine.entrance.refuse_unread
        assert unread(0, "default") and unread(0, "default", "new") and unread(0, "acme", "first")
        assert unread(0, "default", "first") is None
        await node.until(lambda: len(told) == 4)
        await node.close()
        assert node.engine.statistics().refused == 4  # who is not refused is not counted

        rules = Classifier([Rule(set_key="{field:id}")])
        node = make(bounds(Bound(1, 10**6)), classifier=rules)
        node.tools.hold = True
        found: list[Any] = []
        for number in (1, 2):
            node.engine.accept("held", b'{"id":"%d"}' % number, lambda run_id, error: found.append(run_id or error))
        await node.until(lambda: len(found) == 2)
        assert isinstance(found[1], QueueFullError)
        assert node.engine.entrance.refuse_unread(0, "default") is None  # its key is in what was not read
        node.engine.accept("held", b'{"id":"1"}', lambda run_id, error: found.append(run_id or error))
        await node.until(lambda: len(found) == 3)
        assert found[2] == found[0]
        await node.close()

    run(main())
