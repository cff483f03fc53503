"""Profiles over HTTP and on a real node: by whom, by the clock, by events; and hosts that are kept ready."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import http_fixture
import msgspec
import pytest
from test_admission import serving
from test_http_api import problem

from agentrt import Runtime, load_config
from agentrt.cgroup import shared

LIMITS = """
[profiles.night.limits]
"tenant:*" = { "tokens/hour" = 10_000_000 }

[profiles.rush]
concurrency = { "class:tool" = 2 }
prewarm = { greet = 3, "class:tool" = 2 }
tier_weights = [10_000, 500, 50, 5]
"""


def config(tmp_path: Path, **more: str) -> dict[str, object]:
    (tmp_path / "flow.toml").write_text(LIMITS)
    return {
        "store.path": str(tmp_path / "store"),
        "store.force_place": True,
        "flow.file": str(tmp_path / "flow.toml"),
    } | more


def test_operators_switch_profiles_over_http_and_everybody_sees_who_did(tmp_path: Path) -> None:
    settings = config(tmp_path, **{"flow.profiles_tenant": "ops"})
    with (
        Runtime(config=load_config(env={}, arguments=settings), tools=http_fixture.TOOLS) as runtime,
        serving(runtime, [http_fixture.greet]) as served,
    ):
        other = served.client("acme", ["runs:read", "runs:write", "node:read"])
        assert served.admin.put("/v1/profiles/night").status_code == 200
        problem(other.put("/v1/profiles/night"), 403, "forbidden")
        problem(served.admin.put("/v1/profiles/day"), 422, "input")
        schedule = {"cron": "0 20 * * *", "profile": "rush"}
        problem(other.put("/v1/profile-schedules/evening", json=schedule), 403, "forbidden")
        assert served.admin.put("/v1/profile-schedules/evening", json=schedule).status_code == 200
        problem(served.admin.put("/v1/profile-schedules/x", json={"cron": "0 20 * * *"}), 422, "input")
        shown = served.admin.get("/v1/schedules").json()["schedules"]
        assert [(each["name"], each["agent"], each["action"]) for each in shown] == [("evening", "rush", "apply")]
        assert other.get("/v1/schedules").json()["schedules"] == []
        problem(other.delete("/v1/profile-schedules/evening"), 403, "forbidden")
        assert served.admin.delete("/v1/profile-schedules/evening").status_code == 204

        assert other.post("/v1/events", json={"topic": "APPLY_PROFILE", "data": {"profile": "rush"}}).status_code == 202
        ops = served.client("ops", ["runs:write"])
        event = {"topic": "APPLY_PROFILE", "data": {"profile": "rush", "reason": "a sale"}, "id": "sale"}
        assert ops.post("/v1/events", json=event).status_code == 202

        async def applied() -> None:
            async with asyncio.timeout(30):
                while (await runtime.flow_view()).applied != ("night", "rush"):
                    await asyncio.sleep(0.01)

        asyncio.run(applied())
        found = other.get("/v1/profiles").json()
        assert (found["known"], found["applied"]) == (["night", "rush"], ["night", "rush"])
        assert [(each["profile"], each["by"], each["reason"]) for each in found["changes"][1:]] == [
            ("rush", "event sale", "a sale")
        ]
        assert found["changes"][0]["digest_after"] == found["changes"][1]["digest_before"]


def test_processes_share_the_cpu_as_the_profiles_in_force_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, ...]] = []

    def share(weights: tuple[int, ...]) -> Callable[[], None]:
        told.append(weights)
        return lambda: None

    monkeypatch.setattr(shared, "share", share)
    for applied in (False, True):  # and again after a restart
        with Runtime(config=load_config(env={}, arguments=config(tmp_path)), tools=http_fixture.TOOLS) as runtime:
            if not applied:
                runtime.apply_profile_sync("rush")
            else:
                runtime.roll_back_profile_sync()
    assert told == [(), (10_000, 500, 50, 5), (10_000, 500, 50, 5), ()]


def test_a_profile_keeps_hosts_ready_for_agents_that_nobody_has_used_yet(tmp_path: Path) -> None:
    async def main() -> None:
        made = load_config(env={}, arguments=config(tmp_path))
        none = {kind: msgspec.structs.replace(getattr(made, kind), spares=0) for kind in ("python", "tools")}
        made = msgspec.structs.replace(made, **none)
        async with Runtime(config=made, tools=http_fixture.TOOLS) as runtime:
            await runtime.register(http_fixture.greet)

            async def spares(count: int) -> None:
                async with asyncio.timeout(60):
                    while (await runtime.statistics()).backends["python"]["spares"] != count:
                        await asyncio.sleep(0.01)

            async def spare_tool_hosts(count: int) -> None:
                async with asyncio.timeout(60):
                    while (await runtime.statistics()).tools.spares != count:
                        await asyncio.sleep(0.01)

            await spares(0)
            await spare_tool_hosts(0)
            await runtime.apply_profile("rush")
            await spares(3)
            await spare_tool_hosts(2)
            run = await runtime.submit("greet", "Ada")
            assert await run.result() == "hello Ada"
            await spares(3)  # what was taken is replaced
            await runtime.roll_back_profile()

    asyncio.run(main())
