"""The contract suite of observers: what `agentrt.notifiers.port.Observer` says, as tests.

class TestAcmeStatistics(ObserverContract):
    @pytest.fixture
    def opener(self, server):                      # a fake of what it reports to
        return lambda: acme_observer(server.url)
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from agentrt.engine.info import Emitted, RunInfo, RunResult
from agentrt.ids import new_run_id
from agentrt.notifiers.port import Observer
from agentrt.notifiers.service import NotifierService
from agentrt.records import Cost
from agentrt.states import TERMINAL, RunState

_WAIT_S: Final = 30.0
_RUNS: Final = 20


def life(run_id: str, state: RunState) -> list[tuple[str, Any]]:
    """All that is told of a run: accepted, waiting for an operator once, emitting something, ending like that."""
    accepted = RunInfo(run_id, RunState.ACTIVE, "acme", "qualifier", "1" * 64, 1, 1, 1, time.time_ns())
    parked = RunInfo(
        run_id, RunState.WAITING, "acme", "qualifier", "1" * 64, 1, 1, 4, accepted.accepted_ns, 0, "operator", "1:2"
    )
    well = state is RunState.SUCCEEDED
    result = RunResult(
        run_id,
        state,
        b"[1]" if well else None,
        None if well else b'{"code":"run_failed","message":"no"}',
        Cost(10**6, 10**7, 250, 40),
        1,
        None,
        "acme",
        "qualifier",
    )
    return [("accepted", accepted), ("parked", parked), ("emitted", Emitted(run_id, "1:3", b"null")), ("ended", result)]


class ObserverContract:
    """Subclass it, give it the fixture ``opener``, which makes one, and pytest runs it all. An observer is called on
    its thread's loop, so it finds a running one, and must not block it."""

    @pytest.fixture
    def opener(self) -> Callable[[], Observer]:
        raise NotImplementedError("the subclass says how its observer is made")

    @pytest.mark.parametrize("state", sorted(TERMINAL))
    def test_it_takes_all_that_happens_to_a_run(self, opener: Callable[[], Observer], state: RunState) -> None:
        async def tell() -> None:
            observer = opener()
            for event, data in life(new_run_id(), state):
                assert observer(event, data) is None  # nobody awaits it

        asyncio.run(tell())

    def test_it_takes_what_it_has_seen_nothing_of(self, opener: Callable[[], Observer]) -> None:
        """It was not there when the run was accepted: the node has restarted since."""

        async def tell() -> None:
            for event, data in reversed(life(new_run_id(), RunState.SUCCEEDED)):
                opener()(event, data)

        asyncio.run(tell())

    def test_what_later_releases_may_tell_is_no_harm(self, opener: Callable[[], Observer]) -> None:
        async def tell() -> None:
            observer = opener()
            observer("moved", object())
            for event, data in life(new_run_id(), RunState.SUCCEEDED):
                observer(event, data)

        asyncio.run(tell())

    def test_a_node_does_not_disable_it(self, opener: Callable[[], Observer]) -> None:
        """Through the node's own service, many runs side by side."""
        service = NotifierService({}, {"yours": opener})
        service.start()
        runs = [life(new_run_id(), RunState.SUCCEEDED) for _ in range(_RUNS)]
        for events in zip(*runs, strict=True):
            for event, data in events:
                service.observe(event, data)
        end = time.monotonic() + _WAIT_S
        while (found := service.statistics()["observer yours"]).told < 4 * _RUNS and not found.disabled:
            assert time.monotonic() < end
            time.sleep(0.01)
        service.stop()
        assert (found.disabled, found.told, found.lost) == ("", 4 * _RUNS, 0)
