"""Profiles by the clock and by events: each wish is carried out once, whatever is killed, and leaves its record."""

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
from engine_kit import Ctx, Node, World, run, settle
from test_engine_waits import HOT, SEND, Clock, timed

from agentrt.engine.profiling import APPLY_TOPIC
from agentrt.engine.schedules import NOBODYS, next_time
from agentrt.errors import InputError
from agentrt.flow.profiles import Change, check_profile
from agentrt.stores.base import EVENTS, SCHEDULES, TIMERS
from agentrt.stores.memory import MemoryDisk

HOURLY = "0 * * * *"
PROFILES = {
    "night": check_profile("night", {"limits": {"tenant:*": {"tool_calls/day": 7}}}),
    "day": check_profile("day", {"limits": {"tenant:*": {"tool_calls/day": 3}}}),
}
OPS = "ops"


def sender(ctx: Ctx, input: Any) -> Any:
    """Sends an event, twice under the same id."""
    for _ in range(2):
        yield ctx.wait(ctx.op(SEND, topic=APPLY_TOPIC, data=input, id="same"))
    return "sent"


def make(disk: MemoryDisk, clock: Clock, *, recover: bool = True) -> Node:
    limits = msgspec.structs.replace(HOT, profiles_tenant=OPS)
    node = Node(disk, World(), limits=limits, now_ns=clock, profiles=PROFILES)
    node.register("sender", sender)
    if recover:
        node.engine.recover()
    return node


async def ask(node: Node, function: Any, *arguments: Any) -> Any:
    future: asyncio.Future[Any] = node.loop.create_future()
    function(*arguments, partial(settle, future))
    return await future


async def put(node: Node, action: Any, profile: str = "night") -> None:
    future: asyncio.Future[None] = node.loop.create_future()
    done = partial(settle, future, None)
    node.engine.schedules.put(NOBODYS, "s", HOURLY, profile, b"null", None, "once", done, action)
    await future


def applied(node: Node) -> list[str]:
    return [profile.name for profile in node.engine.flow.force.applied]


async def changes(node: Node) -> list[Change]:
    found: list[Change] = await ask(node, node.engine.profiles.changes)
    return found


def test_a_schedule_applies_a_profile_and_takes_it_off() -> None:
    async def main() -> None:
        disk, clock = MemoryDisk(), Clock()
        node = make(disk, clock)
        await put(node, "apply")
        clock.now = next_time(HOURLY, clock.now)
        await timed(node, lambda: applied(node) == ["night"])
        await put(node, "roll_back")
        clock.now = next_time(HOURLY, clock.now)
        await timed(node, lambda: applied(node) == [])
        clock.now = next_time(HOURLY, clock.now)  # nothing to take off: told, and the schedule goes on
        await timed(node, lambda: ("profile", "refuse", "profile") in node.engine.flow.decisions.counted)
        await timed(node, lambda: len(disk.tables[TIMERS]) == 1 == len(disk.tables[SCHEDULES]))
        made = await changes(node)
        assert [(each.action, each.profile, each.by) for each in made] == [
            ("apply", "night", "schedule s"),
            ("roll_back", "night", "schedule s"),
        ]
        assert made[0].digest_before == made[1].digest_after != made[0].digest_after
        await node.close()

    run(main())


@pytest.mark.parametrize("how", ["schedule", "event"])
def test_a_crash_at_every_commit_of_a_change_makes_it_once(how: str) -> None:
    async def main() -> None:
        for stored in (False, True):
            for at in range(4):
                disk, clock = MemoryDisk(), Clock()
                node = make(disk, clock)
                if how == "schedule":
                    await put(node, "apply")
                node.store.at, node.store.applied = node.store.commits + at, stored
                if how == "schedule":
                    clock.now = next_time(HOURLY, clock.now)
                else:
                    send = asyncio.ensure_future(node.send(OPS, topic=APPLY_TOPIC, data={"profile": "night"}, id="e"))
                await asyncio.wait([asyncio.ensure_future(node.store.crashed.wait())], timeout=0.3)
                node.crash()
                if how == "event":
                    send.cancel()
                node = make(disk, clock)
                if how == "event":  # who was not answered asks again
                    await node.send(OPS, topic=APPLY_TOPIC, data={"profile": "night"}, id="e")
                await timed(node, lambda node=node: applied(node) == ["night"])  # type: ignore[misc]
                await timed(node, lambda disk=disk: not disk.tables[EVENTS])  # type: ignore[misc]
                assert len(await changes(node)) == 1, (stored, at)
                await node.close()

    run(main())


def test_an_event_of_the_tenant_that_may_changes_profiles_in_order() -> None:
    async def main() -> None:
        disk, clock = MemoryDisk(), Clock()
        node = make(disk, clock)
        for number, data in enumerate(
            (
                {"profile": "night", "reason": "it is dark"},
                {"profile": "day"},
                {"action": "roll_back", "profile": "night"},
                {"profile": "nobody"},
                {"colour": "red"},
                [1],
                {"action": "roll_back"},
            )
        ):
            await node.send(OPS, topic=APPLY_TOPIC, data=data, id=str(number))
        await timed(node, lambda: not disk.tables[EVENTS])
        made = await changes(node)
        assert [(each.action, each.profile, each.by) for each in made] == [
            ("apply", "night", "event 0"),
            ("apply", "day", "event 1"),
            ("roll_back", "night", "event 2"),
            ("roll_back", "day", "event 6"),
        ]
        assert made[0].reason == "it is dark" and applied(node) == []
        assert node.engine.flow.decisions.counted["profile", "refuse", "profile"] == 3
        await node.close()

    run(main())


def test_a_run_of_that_tenant_may_and_nobody_elses() -> None:
    async def main() -> None:
        disk, clock = MemoryDisk(), Clock()
        node = make(disk, clock)
        for tenant in ("default", OPS):
            run_id = await node.submit("sender", {"profile": "night"}, tenant=tenant)
            assert (await node.result(run_id)).value() == "sent"
            if tenant == "default":
                assert applied(node) == [] and len(disk.tables[EVENTS]) == 1  # for whoever of it waits for it
        await timed(node, lambda: applied(node) == ["night"])
        assert len(await changes(node)) == 1  # an id counts once
        await node.close()

    run(main())


def test_events_that_came_before_the_node_served_them_are_carried_out() -> None:
    async def main() -> None:
        disk, clock = MemoryDisk(), Clock()
        before = Node(disk, World(), limits=HOT, now_ns=clock, profiles=PROFILES)  # nobody may
        await before.send(OPS, topic=APPLY_TOPIC, data={"profile": "night"})
        assert applied(before) == [] and len(disk.tables[EVENTS]) == 1
        before.crash()
        node = make(disk, clock, recover=False)
        await timed(node, lambda: applied(node) == ["night"])
        await node.close()

    run(main())


def test_backends_keep_ready_what_the_profiles_in_force_say() -> None:
    async def main() -> None:
        told: list[dict[str, int]] = []
        node = make(MemoryDisk(), Clock())

        def prewarm(counts: Any) -> None:
            told.append({program.version: count for program, count in counts})

        node.backend.prewarm = prewarm  # type: ignore[attr-defined]
        hosts: list[dict[str, int]] = []
        node.tools.prewarm = hosts.append  # type: ignore[attr-defined]
        warm = check_profile("warm", {"prewarm": {"sender": 3, "nobody": 1, "class:code": 2}})
        await ask(node, node.engine.profiles.apply, warm, "ann", "")
        assert told[-1] == {"v-sender": 3} and hosts[-1] == {"code": 2}
        node.register("other", sender)
        assert told[-1] == {"v-sender": 3, "v-other": 0}
        await ask(node, node.engine.profiles.roll_back, None, "ann", "")
        assert told[-1] == {"v-sender": 0, "v-other": 0} and hosts[-1] == {}
        await node.close()

    run(main())


def test_a_schedule_of_nonsense_is_refused() -> None:
    async def main() -> None:
        node = make(MemoryDisk(), Clock())
        with pytest.raises(InputError):
            node.engine.schedules.put(
                NOBODYS, "s", "never", "night", b"null", None, "once", lambda error: None, "apply"
            )
        await node.close()

    run(main())
