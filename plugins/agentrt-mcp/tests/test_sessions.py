"""Sessions with a server that has faults on demand: who shares one, what becomes of calls when it dies, is slow, says
too much or changes its tools."""

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mcp_kit import HttpServer, Place, config, lines, opened, until

pytestmark = pytest.mark.timeout(180)


def error(outcome: Any) -> dict[str, Any]:
    assert not outcome.ok
    return msgspec.json.decode(outcome.payload)


def test_hints_are_believed_only_if_the_settings_say_so(place: Place) -> None:
    async def main() -> None:
        trusted = place.faulty(place.folder())
        doubted = place.faulty(place.folder(), trust_hints=False, kinds={"count": "keyed", "add": "pure"})
        async with opened(config({"trusted": trusted, "doubted": doubted})) as bench:
            kinds = {spec.name: spec.kind for spec in bench.registry}
            assert (kinds["trusted.add"], kinds["trusted.meta"]) == ("keyed", "keyed")
            assert (kinds["trusted.count"], kinds["doubted.meta"]) == ("at_most_once", "at_most_once")
            assert (kinds["doubted.count"], kinds["doubted.add"]) == ("keyed", "pure")

    asyncio.run(main())


def test_a_call_carries_its_key_and_its_attempt(place: Place, folder: Path) -> None:
    async def main() -> None:
        async with opened(config({"f": place.faulty(folder)})) as bench:
            told = await bench.value("f.meta", key="run_1/2:3", attempt=4)
            assert told == {"agentrt/idempotency-key": "run_1/2:3", "agentrt/attempt": 4}
            assert await bench.value("f.meta", key=None) == {"agentrt/attempt": 1}

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
def test_tenants_share_a_process_only_if_the_settings_say_so(place: Place, folder: Path, shared: bool) -> None:
    async def main() -> None:
        async with opened(config({"f": place.faulty(folder, shared=shared)})) as bench:
            counts = [await bench.value("f.count", tenant=tenant) for tenant in ("acme", "hooli", "acme", "hooli")]
            assert counts == ([1, 2, 3, 4] if shared else [1, 1, 2, 2])

    asyncio.run(main())


def test_sessions_are_bounded_and_idle_ones_make_room(place: Place, folder: Path) -> None:
    async def main() -> None:
        async with opened(config({"f": place.faulty(folder, sessions_max=2)})) as bench:
            for tenant in ("a", "b", "a"):
                assert await bench.value("f.add", {"x": 1, "y": 2}, tenant=tenant) == 3
            begun = [bench.begin("f.wait", {"name": "go"}, tenant=tenant) for tenant in ("a", "b", "c")]
            await until(lambda: "wait go" in lines(folder))
            (folder / "go").touch()
            assert all(outcome.ok for outcome in await asyncio.wait_for(asyncio.gather(*begun), 60))

    asyncio.run(main())


def test_a_server_that_dies_is_a_failure_by_kind_and_comes_back(place: Place, folder: Path) -> None:
    async def main() -> None:
        async with opened(config({"f": place.faulty(folder)})) as bench:
            outcome = await bench.call("f.die_once", {"name": "died"})
            assert (outcome.code, outcome.host_died, outcome.unknown) == ("tool_host_died", True, True)
            assert "status 3" in error(outcome)["message"] and "this is the end" in error(outcome)["message"]
            outcome = await bench.call("f.die_once", {"name": "died"})
            while not outcome.ok:  # in its pause
                assert outcome.code == "tool_unavailable" and not outcome.unknown
                await asyncio.sleep(error(outcome)["retry_after_s"])
                outcome = await bench.call("f.die_once", {"name": "died"})
            assert lines(folder).count("die_once died") == 2

    asyncio.run(main())


def test_one_that_dies_at_once_is_left_alone_for_longer_and_longer(place: Place, folder: Path) -> None:
    async def main() -> None:
        server = place.server(["-c", "import sys; sys.exit('I cannot')"], [])
        async with opened(config({"f": server, "g": place.faulty(folder)})) as bench:
            assert "f.add" not in bench.registry and "g.add" in bench.registry
            server = bench.tools._servers["f"]
            await until(lambda: server._backoffs[""].failures >= 4)
            assert server._backoffs[""].until - server._loop.time() < 30
            assert await bench.listing("f") == {}
            assert set(await bench.listing()) == set(await bench.listing("g"))

    asyncio.run(main())


def test_a_slow_call_is_cancelled_at_its_time_out(place: Place, folder: Path) -> None:
    async def main() -> None:
        async with opened(config({"f": place.faulty(folder, timeout_s=0.3)})) as bench:
            outcome = await bench.call("f.wait", {"name": "never"})
            assert (outcome.code, outcome.unknown, outcome.host_died) == ("tool_timeout", True, False)
            await until(lambda: "cancelled never" in lines(folder), "the server was not told")
            assert await bench.value("f.add", {"x": 1, "y": 2}) == 3  # in the same session
            assert lines(folder).count("start") == 2  # the node's and the tenant's

    asyncio.run(main())


def test_cancelling_tells_the_server_unless_the_effect_may_not_be_lost(place: Place, folder: Path) -> None:
    async def main() -> None:
        kinds = {"wait": "at_most_once"}
        servers = {"f": place.faulty(folder), "once": place.faulty(other := place.folder(), kinds=kinds)}
        async with opened(config(servers)) as bench:
            begun = bench.begin("f.wait", {"name": "a"})
            await until(lambda: "wait a" in lines(folder))
            bench.tools.cancel(bench.last)
            outcome = await asyncio.wait_for(begun, 60)
            assert (outcome.code, outcome.unknown) == ("cancelled", True)
            await until(lambda: "cancelled a" in lines(folder))
            begun = bench.begin("once.wait", {"name": "b"})
            await until(lambda: "wait b" in lines(other))
            bench.tools.cancel(bench.last)
            (other / "b").touch()
            assert (await asyncio.wait_for(begun, 60)).ok

    asyncio.run(main())


def test_results_are_bounded(place: Place, folder: Path) -> None:
    async def main() -> None:
        settings = config({"f": place.faulty(folder)}, **{"limits.result_bytes_max": 100_000})
        async with opened(settings) as bench:
            assert len(await bench.value("f.big", {"size": 1_000})) == 1_000
            assert (await bench.call("f.big", {"size": 100_000})).code == "tool_result_too_big"
            outcome = await bench.call("f.big", {"size": 4_000_000})  # a line that nobody would hold
            assert outcome.code == "tool_host_died" and "wrote a line of more than" in error(outcome)["message"]
            await asyncio.sleep(0.2)
            assert await bench.value("f.chatter", {"size": 100}) == "done"  # lines that are no messages are skipped

    asyncio.run(main())


def test_arguments_are_held_to_the_schema_before_anything_is_sent(place: Place, folder: Path) -> None:
    async def main() -> None:
        async with opened(config({"f": place.faulty(folder)})) as bench:
            for wrong in ({}, {"name": 3}, [], "text", None):
                outcome = await bench.call("f.wait", wrong) if wrong else await bench.call("f.wait")
                assert outcome.code == "tool_args" and not outcome.unknown
            assert not [line for line in lines(folder) if line.startswith("wait")]

    asyncio.run(main())


def test_what_a_running_run_sees_does_not_change(place: Place, folder: Path) -> None:
    """A server that changes a tool adds a version; who calls the old one is told if it would not be that any more."""

    async def main() -> None:
        settings = config({"f": place.faulty(folder, shared=True)})
        async with opened(settings) as bench:
            before = await bench.listing()
            old = bench.registry.get("f.add")
            assert await bench.value(before["f.add"]["call"], {"x": 1, "y": 2}) == 3
            assert await bench.value("f.grow") == "grown"
            await until(lambda: "f.grown" in bench.registry, "the server's change was not followed")
            after = await bench.listing()
            assert bench.registry.get("f.add") == old
            assert after["f.add"]["version"] != before["f.add"]["version"]
            assert await bench.value("f.grown", {"x": 7}) == 7
            assert await bench.value(after["f.add"]["call"], {"x": 1, "y": 2, "z": 3}) == 6
            outcome = await bench.call("f.add", {"x": 1, "y": 2})
            assert outcome.code == "tool_conflict" and after["f.add"]["call"] in error(outcome)["message"]

    asyncio.run(main())


def test_changes_over_http_are_followed(http: HttpServer) -> None:
    async def main() -> None:
        async with opened(config({"f": {"url": http.url}})) as bench:
            assert await bench.value("f.grow") == "grown"
            await until(lambda: "f.grown" in bench.registry, "the server's change was not followed")

    asyncio.run(main())


def test_tools_are_remembered_while_their_server_is_away(place: Place, folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        settings = place.faulty(folder, shared=True)
        async with opened(config({"f": settings}, **{"plugins.mcp.catalog_path": str(tmp_path)})) as bench:
            await bench.value("f.grow")
            await until(lambda: "f.grown" in bench.registry)
            names = {spec.name: spec.kind for spec in bench.registry}
        away = settings | {"command": ["/nowhere/to/be/found"]}
        async with opened(config({"f": away}, **{"plugins.mcp.catalog_path": str(tmp_path)})) as bench:
            known = {spec.name: spec.kind for spec in bench.registry}
            assert known == names | {"f.add": "at_most_once"}  # the plain name is the newest version's
            outcome = await bench.call("f.grown", {"x": 1})
            assert outcome.code == "tool_unavailable" and not outcome.unknown
            assert "f.grown" in await bench.listing()
        (tmp_path / "f.json").write_text("{")
        async with opened(config({"f": away}, **{"plugins.mcp.catalog_path": str(tmp_path)})) as bench:
            assert [spec.name for spec in bench.registry] == ["mcp.tools"]

    asyncio.run(main())


def test_secrets_are_a_tenants_own_and_told_to_nobody(
    place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"": "of-the-node-itself", "acme__": "of-acme-1234", "hooli__": "of-hooli-1234"}
    for tenant, value in values.items():
        monkeypatch.setenv(f"MCP_TEST_{tenant or '__'}api", value)

    async def main() -> None:
        server = place.faulty(folder, environment={"API_KEY": "secret://api"}, secrets=["api"])
        server["environment"] |= {"PYTHONPATH": str(place.packages)}
        settings = config({"f": server}, **{"secrets.environment_prefix": "MCP_TEST_"})
        async with opened(settings) as bench:
            for tenant in ("acme", "hooli"):
                assert await bench.value("f.environment", {"name": "API_KEY"}, tenant=tenant) == "secret://api"
                # What it has of others shows whose it is.
                got = await bench.value("f.echo", {"value": ["secret://api"]}, tenant=tenant)
                assert got == {"value": ["secret://api"]}
                mine = values[f"{tenant}__"]
                assert await bench.value("f.echo", {"value": mine}, tenant=tenant) == {"value": "secret://api"}
                other = values["hooli__" if tenant == "acme" else "acme__"]
                assert await bench.value("f.echo", {"value": other}, tenant=tenant) == {"value": other}
            outcome = await bench.call("f.echo", {"value": "secret://api"}, tenant="nobody")
            assert outcome.code == "tool_unavailable" and "there is no secret api" in error(outcome)["message"]
            outcome = await bench.call("f.echo", {"value": "secret://other"})
            assert outcome.code == "tool_secret"
            told = [(await bench.call("f.die_once", {"name": "d"})).payload]
        text = "".join(record.getMessage() for record in caplog.records) + repr(told)
        assert "this is the end, secret://api" in text
        assert not any(value in text for value in values.values())

    asyncio.run(main())


def test_secrets_in_headers(http: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TEST_acme__api", "of-acme-1234")
    monkeypatch.setenv("MCP_TEST___api", "of-node-1234")

    async def main() -> None:
        server = {"url": http.url, "headers": {"Authorization": "Bearer secret://api"}}
        settings = config({"f": server}, **{"secrets.environment_prefix": "MCP_TEST_"})
        async with opened(settings) as bench:
            assert await bench.value("f.header", {"name": "authorization"}) == "Bearer secret://api"

    asyncio.run(main())


def test_a_program_is_confined(place: Place, folder: Path) -> None:
    hidden = place.folder()
    (hidden / "file").write_text("hidden")

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = {"PROBE_PORT": str(probe.getsockname()[1])}
            server = place.faulty(folder, environment=port)
            server["read"] = [path for path in server["read"] if path != str(place.path)]
            server["read"] += [str(place.path / "tests"), str(place.packages)]
            async with opened(
                config({"f": server, "g": place.faulty(place.folder(), network=True, environment=port)})
            ) as b:
                assert await b.value("f.files", {"path": str(hidden / "file")}) == "PermissionError"
                assert await b.value("f.network") != "connected"
                assert await b.value("g.network") == "connected"

    asyncio.run(main())


def test_an_address_that_dies_and_comes_back(http: HttpServer) -> None:
    async def main() -> None:
        async with opened(config({"f": {"url": http.url, "trust_hints": True}})) as bench:
            outcome = await bench.call("f.die_once", {"name": "died"})
            assert (outcome.code, outcome.unknown) == ("tool_host_died", True)
            outcomes = [await bench.call("f.die_once", {"name": "died"}) for _ in range(3)]
            # One may still have gone out on a connection that was kept.
            assert {(each.code, each.unknown) for each in outcomes[1:]} == {("tool_unavailable", False)}, outcomes
            http.start()
            outcome = await bench.call("f.die_once", {"name": "died"})
            while not outcome.ok:
                assert outcome.code == "tool_unavailable", outcome
                await asyncio.sleep(0.1)
                outcome = await bench.call("f.die_once", {"name": "died"})
            assert lines(http.folder).count("die_once died") == 2

    asyncio.run(main())


def test_what_runs_when_the_node_stops_is_evicted(place: Place, folder: Path) -> None:
    async def main() -> None:
        async with opened(config({"f": place.faulty(folder, calls_max=1)})) as bench:
            running, waiting = bench.begin("f.wait", {"name": "x"}), bench.begin("f.wait", {"name": "y"})
            await until(lambda: "wait x" in lines(folder))
            bench.tools.stop()
            outcome = await asyncio.wait_for(waiting, 60)
            assert outcome.evicted and not outcome.unknown and not running.done()
            bench.tools.evict()
            outcome = await asyncio.wait_for(running, 60)
            assert outcome.evicted and outcome.unknown

    asyncio.run(main())


def test_nothing_is_left(place: Place, folder: Path) -> None:
    """No process, no thread, no descriptor."""
    import os

    def state() -> tuple[int, set[str]]:
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("agentrt-mcp")}
        return len(os.listdir("/proc/self/fd")), names

    async def main() -> None:
        async with opened(config({"f": place.faulty(folder)})) as bench:
            assert await bench.value("f.add", {"x": 1, "y": 2}) == 3
            bench.begin("f.wait", {"name": "never"})
            await until(lambda: "wait never" in lines(folder))

    asyncio.run(main())
    before = state()
    for _ in range(3):
        (folder / "log").unlink()
        asyncio.run(main())
    after = state()
    assert after[0] <= before[0] + 2 and not after[1], (before, after)
    running = [
        entry for entry in os.listdir("/proc") if entry.isdigit() and str(folder).encode() in _command(int(entry))
    ]
    assert not running


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_catalog_is_a_file_that_others_can_read(place: Place, folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        settings = config({"f": place.faulty(folder)}, **{"plugins.mcp.catalog_path": str(tmp_path / "mcp")})
        async with opened(settings) as bench:
            await until(lambda: (tmp_path / "mcp" / "f.json").exists())
            assert "f.add" in bench.registry
        kept = json.loads((tmp_path / "mcp" / "f.json").read_text())
        assert kept["format"] == 1 and kept["tools"]["add"][0]["kind"] == "keyed"

    asyncio.run(main())
