"""Notifiers and observers: nothing they do reaches a run or another plugin."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrt.engine.info import RunInfo, RunResult
from agentrt.notifiers import service as module
from agentrt.notifiers.port import Notification, Notifier
from agentrt.notifiers.service import NotifierService, notification_of
from agentrt.records import Cost
from agentrt.states import RunState


def ended(number: int, state: RunState = RunState.SUCCEEDED, error: bytes | None = None) -> RunResult:
    return RunResult(f"run_{number}", state, None, error, Cost(), 1, None, "acme", "frogs")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Keeps:
    """Tells a list; ``holds`` until it is set."""

    def __init__(self, told: list[Any], fails_at: int = -1) -> None:
        self.told, self.fails_at = told, fails_at
        self.closed = False

    async def notify(self, notification: Notification) -> None:
        await asyncio.sleep(0)
        if len(self.told) == self.fails_at:
            raise RuntimeError("the pager is gone")
        self.told.append(notification.run_id)

    async def close(self) -> None:
        self.closed = True


def test_fault_p74_a_plugin_that_raises_is_disabled_and_keeps_nothing_from_the_others() -> None:
    """Whatever raises, wherever it stands: in its factory, at the first event, later, when it is closed."""

    class CannotClose(Keeps):
        async def close(self) -> None:
            raise RuntimeError("not now")

    def cannot_be_made() -> Notifier:
        raise RuntimeError("no pager")

    told: dict[str, list[Any]] = {name: [] for name in ("a", "b", "c", "d", "e")}

    def bad_observer(event: str, data: Any) -> None:
        raise RuntimeError("no dashboard")

    service = NotifierService(
        {
            "never": cannot_be_made,
            "a": lambda: Keeps(told["a"], fails_at=0),
            "b": lambda: Keeps(told["b"]),
            "c": lambda: Keeps(told["c"], fails_at=2),
            "d": lambda: CannotClose(told["d"]),
        },
        {"bad": lambda: bad_observer, "e": lambda: lambda event, data: told["e"].append(data.run_id)},
    )
    service.start()
    for number in range(5):
        service.observe("ended", ended(number))
    until(lambda: all(len(told[name]) == 5 for name in "bde") and len(told["c"]) == 2)
    service.stop()
    found = service.statistics()
    assert {name.split()[1] for name, each in found.items() if each.disabled} == {"never", "a", "c", "bad"}
    assert found["notifier c"].disabled == "RuntimeError: the pager is gone"
    assert told["b"] == told["d"] == told["e"] == [f"run_{n}" for n in range(5)] and told["a"] == []


def test_a_slow_one_loses_what_is_too_much_and_the_others_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_ITEMS_MAX", 10)
    told: list[Any] = []
    go, entered = threading.Event(), threading.Event()

    class Slow(Keeps):
        async def notify(self, notification: Notification) -> None:
            entered.set()
            await asyncio.to_thread(go.wait)

    service = NotifierService({"slow": lambda: Slow([]), "quick": lambda: Keeps(told)}, {})
    service.start()
    for number in range(40):
        service.observe("ended", ended(number))
        until(lambda number=number: len(told) > number)  # type: ignore[misc]
    entered.wait()
    slow = service.statistics()["notifier slow"]
    assert (slow.lost, slow.waiting) == (29, 10) and service.statistics()["notifier quick"].lost == 0
    go.set()
    service.stop()
    assert service.statistics()["notifier slow"].told == 11  # what waited is told when the node stops


def test_stopping_waits_for_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.05)

    class Hangs(Keeps):
        async def notify(self, notification: Notification) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None:
            await asyncio.Event().wait()

    service = NotifierService({"hangs": lambda: Hangs([])}, {})
    service.start()
    service.observe("ended", ended(1))
    service.stop()
    NotifierService({"never": lambda: Keeps([])}, {}).stop()  # was not started


def test_what_people_are_told() -> None:
    waits = RunInfo("run_1", RunState.WAITING, "acme", "frogs", "v", 1, 1, 5, 0, wait_reason="approval", detail="1:3")
    assert notification_of("parked", waits) == Notification(
        "waiting", "run_1", "acme", "frogs", "WAITING", "approval: 1:3"
    )
    timer = RunInfo("run_1", RunState.WAITING, "acme", "frogs", "v", 1, 1, 5, 0, wait_reason="timer")
    assert notification_of("parked", timer) is None
    failed = ended(1, RunState.FAILED, b'{"code": "trap", "message": "secret things"}')
    assert notification_of("ended", failed) == Notification("ended", "run_1", "acme", "frogs", "FAILED", "trap")
    assert notification_of("accepted", waits) is None and notification_of("decision", object()) is None
