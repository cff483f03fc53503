"""Schedules of one tenant are found without a look at others'."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

from agentrt.engine.schedules import Schedule, Schedules
from agentrt.stores.base import SCHEDULES, Batch, Row, Store
from agentrt.stores.keys import schedule_key
from agentrt.stores.memory import MemoryStore
from agentrt.testing.stores import Session


class Counting:
    """A store that counts the rows it gives, and an engine as far as lists need one."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rows = 0

    def scan_rows(self, *arguments: Any) -> list[tuple[bytes, bytes]]:
        found = self.store.scan_rows(*arguments)
        self.rows += len(found)
        return found

    def look(self, function: Callable[[Any], Any], done: Callable[[Any, None], None]) -> None:
        done(function(self), None)


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(MemoryStore)
    yield session
    session.close()


def test_a_list_reads_its_own_rows_only(session: Session) -> None:
    wanted = {"acme": 3, "acm": 40, "acme2": 2_500, "": 4}
    rows = []
    for tenant, count in wanted.items():
        for number in range(count):
            item = Schedule("run_" + "0" * 26, tenant, f"n{number}", "0 0 * * *", "a", b"1", None, "skip", 1)
            rows.append(Row(SCHEDULES, schedule_key(tenant, item.name), msgspec.msgpack.encode(item)))
    session.must(Batch(None, 0, (), tuple(rows)))
    counting = Counting(session.store)
    schedules = Schedules(cast(asyncio.AbstractEventLoop, None), cast(Any, counting), cast(Any, None))
    for tenant, count in [*wanted.items(), ("nobody", 0), (None, sum(wanted.values()))]:
        counting.rows = 0
        found: list[Schedule] = []
        schedules.list(tenant, lambda items, error, found=found: found.extend(items))  # type: ignore[misc]
        assert len(found) == counting.rows == count
        assert tenant is None or {item.tenant for item in found} <= {tenant}
