"""The contract suite of notifiers: every sentence of `agentrt.notifiers.port.Notifier` as a test.

class TestAcmeNotifier(NotifierContract):
    @pytest.fixture
    def opener(self, pager):                       # a fake of what it tells
        return lambda: AcmeNotifier(pager.url)

    @pytest.fixture
    def told(self, pager):
        return lambda: [page.run_id for page in pager.pages]
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import pytest

from agentrt.ids import new_run_id
from agentrt.notifiers.port import Notification, Notifier
from agentrt.notifiers.service import NotifierService

_WAIT_S: Final = 30.0


def notifications(count: int) -> list[Notification]:
    """Of both kinds, about runs of their own."""
    return [
        Notification("ended", new_run_id(), "acme", "qualifier", "SUCCEEDED")
        if place % 2
        else Notification("waiting", new_run_id(), "acme", "qualifier", "WAITING", "approval: 1:3")
        for place in range(count)
    ]


class NotifierContract:
    """Subclass it, give it the fixtures ``opener`` (makes one, inside a loop) and ``told`` (the run ids that whoever it
    tells was told of, in order), and pytest runs it all. ``both``: it tells of both events, not of ends alone."""

    both = True

    @pytest.fixture
    def opener(self) -> Callable[[], Notifier]:
        raise NotImplementedError("the subclass says how its notifier is made")

    @pytest.fixture
    def told(self) -> Callable[[], list[str]]:
        raise NotImplementedError("the subclass says what was told")

    def _expected(self, given: list[Notification]) -> list[str]:
        return [found.run_id for found in given if self.both or found.event == "ended"]

    def test_everything_is_told_once_and_in_order(
        self, opener: Callable[[], Notifier], told: Callable[[], list[str]]
    ) -> None:
        given = notifications(10)

        async def tell() -> None:
            notifier = opener()
            for notification in given:
                await asyncio.wait_for(notifier.notify(notification), _WAIT_S)
            await asyncio.wait_for(notifier.close(), _WAIT_S)

        asyncio.run(tell())
        assert told() == self._expected(given)

    def test_one_that_is_cancelled_ends_at_once_and_the_next_one_arrives(
        self, opener: Callable[[], Notifier], told: Callable[[], list[str]]
    ) -> None:
        first, second = notifications(4)[1::2]

        async def tell() -> None:
            notifier = opener()
            task = asyncio.create_task(notifier.notify(first))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=_WAIT_S)
            assert task.done()
            await asyncio.wait_for(notifier.notify(second), _WAIT_S)
            await notifier.close()

        asyncio.run(tell())
        assert told()[-1] == second.run_id

    def test_closing_one_that_was_never_used(self, opener: Callable[[], Notifier]) -> None:
        async def tell() -> None:
            await asyncio.wait_for(opener().close(), _WAIT_S)

        asyncio.run(tell())

    def test_a_node_tells_it(self, opener: Callable[[], Notifier], told: Callable[[], list[str]]) -> None:
        """Through the node's own service, which says if it was disabled."""
        from agentrt.engine.info import RunResult
        from agentrt.records import Cost
        from agentrt.states import RunState

        service = NotifierService({"yours": opener}, {})
        service.start()
        run_ids = [new_run_id() for _ in range(5)]
        for run_id in run_ids:
            result = RunResult(run_id, RunState.SUCCEEDED, b"1", None, Cost(), 1, None, "acme", "qualifier")
            service.observe("ended", result)
        end = time.monotonic() + _WAIT_S
        while service.statistics()["notifier yours"].told < 5 and time.monotonic() < end:
            time.sleep(0.01)
        found = service.statistics()["notifier yours"]
        service.stop()
        assert (found.disabled, found.told, found.lost) == ("", 5, 0)
        assert told() == run_ids
