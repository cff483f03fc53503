"""Events of a bus in memory become runs of a node: through the door, the store, restarts, the API and the CLI."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from serve_kit import agentrt, lines

from agentrt import Runtime
from agentrt.cli import exits
from agentrt.client import Client
from agentrt.config import Config, load_config
from agentrt.engine.accept import Asked, Origin, Via
from agentrt.errors import IdempotencyConflictError
from agentrt.hooks import HOOKS_VERSION, hookimpl
from agentrt.ingress.port import Delivery
from agentrt.node.node import Node
from agentrt.plugins import Plugins
from agentrt.states import RunState
from agentrt.testing.ingresses import MemoryBus, MemoryIngress, numbered
from agentrt.upkeep.verify import verify

SEQUENCE = Path(__file__).parents[2] / "examples" / "guests" / "sequence.wasm"


class Plugin:
    """Brings the bus."""

    AGENTRT_HOOKS = HOOKS_VERSION

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus

    @hookimpl
    def agentrt_ingresses(self) -> Any:
        return {"memory": self._make}

    def _make(self, config: Config, name: str, source: Any, secrets: Any) -> MemoryIngress:
        return self.bus.ingress(source.topic)


def settings(folder: Path, **more: Any) -> Config:
    return load_config(
        arguments={
            "store.path": str(folder / "store"),
            "store.force_place": True,
            "store.free_bytes_min": 0,
            "ingress.sources": {
                "orders": {"kind": "memory", "topic": "orders", "agent": "sequence", "tier": 2, "tenant": "acme"}
                | more.pop("source", {})
            },
            **{key.replace("__", "."): value for key, value in more.items()},
        }
    )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def started(tmp_path: Path, bus: MemoryBus) -> Iterator[Callable[..., Runtime]]:
    """``started(**settings)``: a runtime on the test's store, with its agent and its ingresses."""
    made: list[Runtime] = []

    def start(**more: Any) -> Runtime:
        plugins = Plugins.load({"bus": Plugin(bus)}, entry_points=False)
        made.append(Runtime(config=settings(tmp_path, **more), plugins=plugins))
        made[-1].start_sync()
        made[-1].register_sync("sequence", SEQUENCE)
        made[-1].open_ingresses_sync()
        return made[-1]

    yield start
    for runtime in made:
        runtime.close_sync()


def inputs(count: int, start: int = 0) -> list[bytes]:
    """Each another text; what their runs make of it does not matter."""
    return [b" " * n + b"[]" for n in range(start, start + count)]


def test_events_become_runs_as_the_source_says(bus: MemoryBus, started: Any) -> None:
    runtime = started()
    bus.publish("orders", [b"[]"] * 50)
    until(lambda: runtime.ingress_statistics()["orders"].acknowledged == 50)
    runs = runtime.list_runs_sync(limit=1000)
    assert len(runs) == 50
    assert {(run.tenant, run.agent, run.base_tier) for run in runs} == {("acme", "sequence", 2)}
    results = runtime.wait_many_sync([runtime.run(run.run_id) for run in runs])
    assert {result.state for result in results} == {RunState.SUCCEEDED}
    origins = runtime.read_store_sync(lambda store: [store.read_records(run.run_id, 0, 1)[0].origin for run in runs])
    assert len({*origins}) == 50 and "memory:orders 0 0" in origins


def test_fault_d20_an_event_that_comes_again_after_a_restart_is_the_same_run(
    bus: MemoryBus, started: Any, tmp_path: Path
) -> None:
    """Nothing that the bus was told counts: as after a rebalance, or a crash before the acknowledgement."""
    first = started()
    bus.publish("orders", inputs(40))
    until(lambda: first.ingress_statistics()["orders"].acknowledged == 40)
    first.close_sync()
    bus.positions.clear()
    second = started()
    bus.publish("orders", inputs(1, 40))
    until(lambda: second.ingress_statistics()["orders"].acknowledged == 41)
    assert second.ingress_statistics()["orders"].accepted == 41
    assert len(second.list_runs_sync(limit=1000)) == 41
    assert second.statistics_sync().engine.duplicates == 40
    second.close_sync()
    verdict = verify(tmp_path / "store")
    assert verdict.sound, verdict.findings


def test_an_event_of_another_content_under_the_same_name_is_a_dead_letter(bus: MemoryBus, started: Any) -> None:
    """A topic that was made anew counts from the start."""
    runtime = started()
    bus.publish("orders", inputs(2))
    until(lambda: runtime.ingress_statistics()["orders"].acknowledged == 2)
    runtime.close_sync()
    bus.positions.clear()
    bus.events.clear()
    again = started()
    bus.publish("orders", inputs(2, 10))
    until(lambda: again.ingress_statistics()["orders"].dead == 2)
    assert len(again.list_runs_sync()) == 2


def test_two_events_with_one_key_are_one_run(bus: MemoryBus, started: Any) -> None:
    runtime = started(source={"key": "{field:order}", "agent": "sequence"})
    bus.publish("orders", [b'{"order": 1}', b'{"order": 2}', b'{"order": 1}', b'{"other": 1}'])
    until(lambda: runtime.ingress_statistics()["orders"].acknowledged == 4)
    statistics = runtime.ingress_statistics()["orders"]
    assert (statistics.accepted, statistics.dead) == (3, 1)
    assert len(runtime.list_runs_sync()) == 2


def test_a_name_is_unique_across_tenants_and_agents(started: Any) -> None:
    """Whatever the settings have become meanwhile."""
    import asyncio

    async def accept(runtime: Runtime, digest: bytes, tenant: str, key: str | None = None) -> str:
        asked = Asked("sequence", b"[]", tenant, None, key, via=Via("bus"), origin=Origin("bus p 7", digest))
        return await runtime.accept_event(asked)

    runtime = started()
    first = asyncio.run(accept(runtime, b"d" * 16, "acme"))
    assert asyncio.run(accept(runtime, b"d" * 16, "hooli")) == first
    assert asyncio.run(accept(runtime, b"d" * 16, "acme", key="k")) == first
    with pytest.raises(IdempotencyConflictError, match="the event bus p 7 was another one"):
        asyncio.run(accept(runtime, b"e" * 16, "acme"))
    assert len(runtime.list_runs_sync()) == 1


def test_a_full_node_pauses_a_low_tier_and_takes_all_of_it_later(bus: MemoryBus, started: Any) -> None:
    runtime = started(scheduler__queue_items_max=5, source={"held_items_max": 20})
    bus.publish("orders", inputs(400))
    until(lambda: runtime.ingress_statistics()["orders"].acknowledged == 400)
    found = runtime.ingress_statistics()["orders"]
    assert (found.accepted, found.dead, found.held, found.paused) == (400, 0, 0, [])
    assert len(runtime.list_runs_sync(limit=1000)) == 400


def test_a_node_that_stops_accepting_loses_nothing(bus: MemoryBus, started: Any) -> None:
    first = started()
    first.stop_accepting()
    bus.publish("orders", inputs(20))
    until(lambda: first.ingress_statistics()["orders"].refused > 0)
    first.close_sync()
    assert not any(bus.positions.values())
    second = started()
    until(lambda: second.ingress_statistics()["orders"].acknowledged == 20)


def test_a_full_node_stops_at_once(bus: MemoryBus, started: Any) -> None:
    """Events that stand at the door are given up, not waited for, and come again."""
    first = started(scheduler__queue_items_max=1, source={"held_items_max": 20})
    first.register_sync("hog", SEQUENCE.with_name("hog.wasm"))
    first.submit_sync("hog", {"rounds": 10**15}, fuel=10**12)  # has the only place for long
    bus.publish("orders", inputs(20))
    until(lambda: first.ingress_statistics()["orders"].held >= 10)
    began = time.monotonic()
    first.close_sync()
    assert time.monotonic() - began < 30 and not any(bus.positions.values())  # its own wait is 300 s
    second = started()
    until(lambda: second.ingress_statistics()["orders"].acknowledged == 20)


def test_a_full_place_for_dead_letters_pauses_too(bus: MemoryBus, started: Any) -> None:
    runtime = started(ingress__dead_letters_items_max=3, source={"held_items_max": 10})
    bus.publish("orders", [b"no json %d" % n for n in range(50)])
    until(lambda: runtime.ingress_statistics()["orders"].refused > 5)
    until(lambda: runtime.ingress_statistics()["orders"].acknowledged == 3)
    found = runtime.ingress_statistics()["orders"]
    assert (found.dead, bool(found.paused)) == (3, True)


# --- over HTTP and the command line ------------------------------------------------


BUSES: list[MemoryBus] = []


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`agentrt serve`, in this process, with a plugin that is installed."""
    (tmp_path / "acme_bus.py").write_text(
        "import test_ingress\nfrom agentrt.hooks import hookimpl\nAGENTRT_HOOKS = 2\n"
        "@hookimpl\ndef agentrt_ingresses():\n"
        "    return {'memory': lambda config, name, source, secrets: test_ingress.BUSES[-1].ingress(source.topic)}\n"
    )
    info = tmp_path / "acme_bus-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_bus\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrt]\nmain = acme_bus\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "test_ingress", sys.modules[__name__])
    BUSES.append(MemoryBus())
    agents = {"sequence": {"source": str(SEQUENCE)}}
    node = Node(settings(tmp_path, http__listen="127.0.0.1:0", node__agents=agents))
    told = node.start()
    try:
        yield type("Served", (), {"url": told.url, "key": told.admin_key, "node": node, "bus": BUSES[-1]})
    finally:
        node.stop()
        BUSES.pop()
        sys.modules.pop("acme_bus", None)


def test_dead_letters_are_shown_retried_and_dropped(node: Any) -> None:
    poison: Sequence[bytes] = (b"{broken", b"\xff\xfe", b'"fine, but for nobody"')
    node.bus.publish("orders", inputs(3))
    node.bus.publish("nobody", poison[2:])
    node.bus.publish("orders", poison[:2])
    runtime: Runtime = node.node.runtime
    until(lambda: runtime.ingress_statistics()["orders"].acknowledged == 5)
    code, out, _ = agentrt(node, "ingresses", "--json")
    (source,) = lines(out)
    assert code == exits.OK.code
    assert (source["name"], source["accepted"], source["dead"], source["state"]) == ("orders", 3, 2, "running")
    assert agentrt(node, "ingresses")[0] == exits.OK.code

    code, out, _ = agentrt(node, "dead-letters", "ls", "--json")
    letters = lines(out)
    assert code == exits.OK.code and {letter["code"] for letter in letters} == {"input"}
    assert all("payload" not in letter and "payload_base64" not in letter for letter in letters)
    assert "is not JSON" in agentrt(node, "dead-letters", "ls")[1]
    assert lines(agentrt(node, "dead-letters", "ls", "--json", "--after", letters[0]["id"])[1]) == letters[1:]
    shown = [lines(agentrt(node, "dead-letters", "show", letter["id"])[1])[0] for letter in letters]
    assert {found.get("payload") or found["payload_base64"] for found in shown} == {"{broken", "//4="}

    # It is as wrong as before, and stays.
    code, _, err = agentrt(node, "dead-letters", "retry", letters[0]["id"])
    assert code == exits.INPUT.code and "is not JSON" in err
    for letter in letters:
        assert agentrt(node, "dead-letters", "drop", letter["id"])[0] == exits.OK.code
    assert agentrt(node, "dead-letters", "ls", "--json")[1] == ""
    assert agentrt(node, "dead-letters", "show", letters[0]["id"])[0] == exits.INPUT.code
    assert agentrt(node, "dead-letters", "drop", "nonsense")[0] == exits.INPUT.code
    with Client(node.url, key=node.key) as client:
        made = client.make_key("acme", ["runs:read", "runs:write", "node:read"])
    node.key = made.secret
    assert agentrt(node, "dead-letters", "ls")[0] == exits.REFUSED.code


def test_what_was_put_right_becomes_the_events_one_run(node: Any) -> None:
    runtime: Runtime = node.node.runtime
    runtime.disable_tenant_sync("acme", "unpaid")
    node.bus.publish("orders", inputs(1))
    until(lambda: runtime.ingress_statistics()["orders"].dead == 1)
    (letter,) = lines(agentrt(node, "dead-letters", "ls", "--json")[1])
    assert letter["code"] == "tenant_disabled"
    runtime.enable_tenant_sync("acme")
    code, out, _ = agentrt(node, "dead-letters", "retry", letter["id"])
    assert code == exits.OK.code
    assert runtime.run(out.strip()).wait_sync(30).state is RunState.SUCCEEDED
    assert agentrt(node, "dead-letters", "ls", "--json")[1] == ""
    # The bus delivers it again: it is that run.
    node.bus.positions.clear()
    node.bus.restart()
    node.bus.publish("orders", numbered(0))
    until(lambda: runtime.ingress_statistics()["orders"].acknowledged == 2)
    assert [run.run_id for run in runtime.list_runs_sync()] == [out.strip()]


def test_the_name_of_a_delivery_is_checked(bus: MemoryBus, started: Any) -> None:
    from agentrt.errors import InputError
    from agentrt.ingress.service import check_name

    for wrong in (
        Delivery("", "0", 1, b""),
        Delivery("a b", "0", 1, b""),
        Delivery("a", "0\n", 1, b""),
        Delivery("a", "0", -1, b""),
        Delivery("a", "0", 2**63, b""),
        Delivery("a" * 201, "0", 1, b""),
    ):
        with pytest.raises(InputError):
            check_name(wrong)
    check_name(Delivery("nats:ORDERS@2026", "0", 2**63 - 1, b""))
