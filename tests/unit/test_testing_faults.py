import asyncio
from collections.abc import Iterator

import pytest

from agentrt.errors import StaleWriteError, StoreFullError
from agentrt.stores.memory import MemoryStore
from agentrt.testing.faults import FaultStore
from agentrt.testing.stores import Script, Session


@pytest.fixture
def store() -> Iterator[FaultStore]:
    made = []

    def open_(loop: asyncio.AbstractEventLoop) -> FaultStore:
        made.append(FaultStore(MemoryStore(loop), loop))
        return made[0]

    session = Session(open_)
    made[0].session = session  # type: ignore[attr-defined]
    yield made[0]
    session.close()


def test_held_commits_wait_unseen_and_keep_their_order(store: FaultStore) -> None:
    session: Session = store.session  # type: ignore[attr-defined]
    script = Script()
    session.must(script.accept())
    store.hold()
    given = [session.give(script.step()) for _ in range(3)]
    assert store.held() == 3 and store.backlog()[0] == 3
    assert len(store.read_records(script.run_id)) == 1
    store.release(1)
    assert given[0].result(10) is None and not given[1].done()
    assert len(store.read_records(script.run_id)) == 2
    store.release()
    assert [outcome.result(10) for outcome in given] == [None] * 3
    session.must(script.end())


def test_what_follows_a_refusal_is_refused_until_the_run_is_read_again(store: FaultStore) -> None:
    session: Session = store.session  # type: ignore[attr-defined]
    script, other = Script(), Script()
    session.must(script.accept())
    refusals = iter([StoreFullError("full")])
    store.refuse_when(lambda batch: next(refusals, None) if batch.head.run_id == script.run_id else None)
    given = [session.give(script.step()), session.give(script.step()), session.give(other.accept())]
    kinds = [type(outcome.result(10)) for outcome in given]
    assert kinds == [StoreFullError, StaleWriteError, type(None)]
    again = Script.resume(script.run_id, store.read_records(script.run_id))
    session.must(again.step(), again.step(), again.end())
    assert [batch.head.run_id for batch in store.given].count(other.run_id) == 1
