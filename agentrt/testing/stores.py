"""The contract suite: every sentence of agentrt/stores/base.py as a test.

A store's own test module subclasses it and says how to open the store:

    class TestAcmeStore(StoreContract):
        @pytest.fixture
        def opener(self, tmp_path):
            return lambda loop: AcmeStore(tmp_path / "store", loop)

``opener(loop)`` opens a session; called again after ``close`` it must find what the last session left. Sessions run
their loop on a thread of its own, and the tests call the store from other threads, as a runtime does.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from agentrt import records as r
from agentrt.digest import digest, request_digest
from agentrt.errors import (
    ClosedError,
    DuplicateError,
    InternalError,
    StaleWriteError,
    StoreError,
    StoreInUseError,
)
from agentrt.fold import RunFold, apply, fold, head_of
from agentrt.ids import child_run_id, idempotency_key, new_run_id
from agentrt.stores.base import EVENTS, IDEMPOTENCY, INBOX, OUTBOX, READY, TABLES, Batch, Head, Row, Store, scan_all
from agentrt.stores.keys import idempotency_row_key, inbox_key, ready_key, ready_value, run_prefix
from agentrt.stores.memory import MemoryDisk, MemoryStore

Opener = Callable[[asyncio.AbstractEventLoop], Store]

_WAIT_SECONDS: Final = 60.0


class Script:
    """Makes the batches that an engine would commit for one run, with the head that fold says."""

    def __init__(self, run_id: str | None = None, tenant: str = "acme") -> None:
        self.run_id = new_run_id() if run_id is None else run_id
        self.tenant = tenant
        self.fold = RunFold()
        self._place = 0
        self._now_ns = 1_700_000_000_000_000_000

    @classmethod
    def resume(cls, run_id: str, records: list[r.Record]) -> "Script":
        """Goes on where the records end."""
        script = cls(run_id)
        script.fold = fold(records)
        script._place = len(script.fold.steps)
        script._now_ns = script.fold.at_ns
        return script

    def _batch(self, records: list[r.Record], rows: tuple[Row, ...] = (), unique: tuple[Row, ...] = ()) -> Batch:
        after = self.fold.version
        for record in records:
            apply(self.fold, record)
        return Batch(head_of(self.fold, self.run_id), after, tuple(records), rows, unique)

    def _next(self, offset: int = 1) -> tuple[int, int]:
        self._now_ns += 1000
        return self.fold.version + offset, self._now_ns

    def accept(self, key: str | None = None, tier: int = 2) -> Batch:
        """The first batch, with its READY row and, if there is a key, its idempotency row."""
        seq, now_ns = self._next()
        record = r.RunAccepted(
            seq, now_ns, self.tenant, "agent", "0" * 64, b'{"n": 1}', tier, b"s" * 16, 10**9, {"abi": "1"}, key
        )
        ready = Row(READY, ready_key(tier, now_ns, self.run_id), ready_value(record.version, record.agent))
        row = Row(IDEMPOTENCY, idempotency_row_key(self.tenant, key), self.run_id.encode()) if key else None
        return self._batch([record], (ready,), (row,) if row else ())

    def step(self, size_bytes: int = 10, result: bytes | None = None) -> Batch:
        """The outcome of the step before, if there is one, and the next step: the joined commit of the engine. The
        result is ``result``, or ``size_bytes`` of one kind."""
        records: list[r.Record] = []
        request = b'{"tool": "t"}'
        if self._place:
            seq, now_ns = self._next()
            result = b"1" * size_bytes if result is None else result
            records.append(
                r.StepCommitted(
                    seq,
                    now_ns,
                    f"1:{self._place}",
                    "tool.call",
                    request_digest("tool.call", request),
                    True,
                    result,
                    digest(result),
                    1,
                    r.Cost(fuel=7),
                )
            )
        self._place += 1
        path = f"1:{self._place}"
        seq, now_ns = self._next(len(records) + 1)
        records.append(
            r.StepPrepared(
                seq,
                now_ns,
                path,
                "tool.call",
                "keyed",
                request,
                request_digest("tool.call", request),
                idempotency_key(self.run_id, path, "t"),
                1,
            )
        )
        return self._batch(records)

    def rows(self, *rows: Row, unique: tuple[Row, ...] = ()) -> Batch:
        """Side rows with a small record."""
        seq, now_ns = self._next()
        return self._batch([r.TierChanged(seq, now_ns, 2, "test")], rows, unique)

    def end(self) -> Batch:
        """The last batch; the READY row goes."""
        seq, now_ns = self._next()
        accepted = self.fold.run()
        ready = Row(READY, ready_key(accepted.base_tier, accepted.at_ns, self.run_id), None)
        return self._batch([r.RunEnded(seq, now_ns, "SUCCEEDED", b'"done"', None)], (ready,))


class Session:
    """A store open on a loop of its own; `commit` waits, `give` does not."""

    def __init__(self, opener: Opener) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="session-loop", daemon=True)
        self.thread.start()
        self.raised: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.raised.append(context))
        try:
            self.store = opener(self.loop)
        except BaseException:
            self._stop()
            raise

    def give(self, batch: Batch) -> "Future[StoreError | None]":
        """The outcome, later; a second call of ``done`` fails the loop's handler, which `close` looks at."""
        outcome: Future[StoreError | None] = Future()
        self.store.commit(batch, outcome.set_result)
        return outcome

    def commit(self, batch: Batch) -> StoreError | None:
        return self.give(batch).result(_WAIT_SECONDS)

    def must(self, *batches: Batch) -> None:
        """All are committed."""
        for outcome in [self.give(batch) for batch in batches]:
            assert outcome.result(_WAIT_SECONDS) is None

    def close(self) -> None:
        self.store.close()
        # What close left on its way to the loop has run when this has.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(_WAIT_SECONDS)
        self._stop()
        assert not self.raised, self.raised

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_WAIT_SECONDS)
        self.loop.close()


def _noise(seed: int, size_bytes: int) -> bytes:
    """Bytes that no other seed gives."""
    return random.Random(seed).randbytes(size_bytes)


def _until(condition: Callable[[], bool]) -> None:
    """Waits for what happens in the background."""
    over_s = time.monotonic() + _WAIT_SECONDS
    while not condition():
        assert time.monotonic() < over_s, "it did not come about"
        time.sleep(0.002)


def everything(store: Store) -> dict[str, Any]:
    """All that a store holds, as plain data: heads, records and rows. Checks that every head is its journal's fold and
    found among its tenant's."""
    heads: dict[str, Head] = {}
    after = ""
    while page := store.scan_heads(after, limit=100):
        heads |= {head.run_id: head for head in page}
        after = page[-1].run_id
    journals = {run_id: store.read_records(run_id) for run_id in heads}
    for run_id, head in heads.items():
        assert head_of(fold(journals[run_id]), run_id) == head
        assert store.read_head(run_id) == head
    for tenant in {head.tenant for head in heads.values()}:
        own = [head for head in heads.values() if head.tenant == tenant]
        assert store.scan_heads(limit=len(own) + 1, tenant=tenant) == own
    return {
        "heads": heads,
        "journals": journals,
        "tables": {table: dict(scan_all(store, table)) for table in TABLES},
    }


class StoreContract:
    """Subclass it, give it the ``opener`` fixture, and pytest runs it all."""

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError("the subclass says how its store is opened")

    @pytest.fixture
    def session(self, opener: Opener) -> Iterator[Session]:
        session = Session(opener)
        yield session
        session.close()

    # --- reading back ---------------------------------------------------------------

    def test_what_was_committed_is_read_back(self, session: Session) -> None:
        script = Script()
        batches = [script.accept("k"), script.step(), script.step(), script.end()]
        session.must(*batches)
        store = session.store
        expected = [record for batch in batches for record in batch.records]
        assert store.read_records(script.run_id) == expected
        assert store.read_records(script.run_id, 2) == expected[2:]
        assert store.read_records(script.run_id, len(expected)) == []
        assert store.read_records(script.run_id, len(expected) + 5) == []
        assert store.read_head(script.run_id) == batches[-1].head
        assert store.read_row(IDEMPOTENCY, idempotency_row_key("acme", "k")) == script.run_id.encode()
        everything(store)

    def test_what_is_not_there(self, session: Session) -> None:
        store = session.store
        assert store.read_head(new_run_id()) is None
        assert store.read_records(new_run_id()) == []
        assert store.scan_heads() == []
        for table in TABLES:
            assert store.read_row(table, b"k") is None
            assert store.scan_rows(table) == []

    def test_results_of_any_size(self, session: Session) -> None:
        script = Script()
        session.must(script.accept(), script.step())
        for size_bytes in (0, 1, 2000, 4096, 70_000, 4 * 2**20):
            session.must(script.step(size_bytes))
        records = session.store.read_records(script.run_id)
        sizes = [len(record.result or b"") for record in records if isinstance(record, r.StepCommitted)]
        assert sizes == [0, 1, 2000, 4096, 70_000, 4 * 2**20]

    # --- large payloads ----------------------------------------------------------------

    def test_large_payloads_come_back_whole(self, opener: Opener) -> None:
        """Inputs, results, states, errors and values of rows of more than 16 KiB."""
        session = Session(opener)
        script = Script()
        accept = script.accept("k")
        input = _noise(1, 100_000)
        records = (msgspec.structs.replace(accept.records[0], input=input),)
        session.must(Batch(accept.head, 0, records, accept.rows, accept.unique))
        result = _noise(2, 5 * 2**20)
        value, unique = Row(EVENTS, b"large", _noise(3, 50_000)), Row(EVENTS, b"unique", _noise(4, 30_000))
        session.must(script.step(), script.step(result=result), script.rows(value, unique=(unique,)), script.step())
        seq, now_ns = script._next()
        state = _noise(5, 2**20)
        session.must(script._batch([r.Checkpoint(seq, now_ns, 2, state)]))
        seq, now_ns = script._next()
        error = _noise(6, 20_000)
        unknown = r.OutcomeUnknown(seq, now_ns, "1:3", "x")
        session.must(script._batch([unknown, r.RunEnded(seq + 1, now_ns, "FAILED", None, error)]))
        for _ in range(2):
            store = session.store
            found = store.read_records(script.run_id)
            assert found[0] == records[0]
            assert [r_.result for r_ in found if isinstance(r_, r.StepCommitted)] == [result, b"1" * 10]
            assert [r_.state for r_ in found if isinstance(r_, r.Checkpoint)] == [state]
            assert isinstance(found[-1], r.RunEnded) and found[-1].error == error
            assert store.read_records(script.run_id, len(found) - 1) == found[-1:]
            assert store.read_row(EVENTS, b"large") == value.value
            assert store.scan_rows(EVENTS) == [(b"large", value.value), (b"unique", unique.value)]
            refused = session.commit(Batch(None, 0, (), (), (Row(EVENTS, b"unique", b"1"),)))
            assert isinstance(refused, DuplicateError) and refused.value == unique.value
            session.close()
            session = Session(opener)
        session.close()

    def test_values_that_look_like_a_name_of_a_blob(self, session: Session) -> None:
        values = [b"\xc1", b"\xc1" * 41, b"\xc1" + bytes(40), b"\xc1" * 20_000, b""]
        session.must(Batch(None, 0, (), tuple(Row(EVENTS, b"%d" % n, value) for n, value in enumerate(values))))
        assert [value for _, value in session.store.scan_rows(EVENTS)] == values

    def test_a_batch_waits_for_the_large_one_before_it(self, session: Session) -> None:
        """Of its run, in order; and what follows a large one that is refused is refused."""
        script, other = Script(), Script()
        session.must(script.accept(), script.step(), other.accept())
        order: list[int] = []
        for number in range(12):
            batch = script.step(result=_noise(number, 2**20 if number % 3 == 0 else 10))
            session.store.commit(batch, lambda error, number=number: order.append(number))  # type: ignore[misc]
        session.must(script.step(), other.step())
        assert order == list(range(12))
        errors = [
            session.give(self._raw(other, 5, Row(EVENTS, b"k", _noise(7, 2**20)))),
            session.give(self._raw(other, 6, Row(EVENTS, b"k", b"1"))),
        ]
        assert [type(outcome.result(_WAIT_SECONDS)) for outcome in errors] == [StaleWriteError] * 2
        assert session.store.read_row(EVENTS, b"k") is None
        session.must(other.step())
        seqs = [record.seq for record in session.store.read_records(script.run_id)]
        assert seqs == list(range(1, script.fold.version + 1))

    def test_blobs_go_when_nothing_names_them(self, opener: Opener) -> None:
        """With the last run and the last row, also when a session ended before it could see to that."""
        session = Session(opener)
        one, two = Script(), Script()
        shared, row = _noise(1, 70_000), Row(EVENTS, b"k", _noise(2, 40_000))
        session.must(one.accept(), two.accept())
        for script in (one, two):
            session.must(script.step(), script.step(result=shared), script.step(result=_noise(id(script), 300_000)))
        session.must(Batch(None, 0, (), (row, msgspec.structs.replace(row, key=b"l"))))
        assert session.store.blob_count() == 4
        session.must(one.end(), two.end())
        session.must(Batch(None, 0, (), (Row(EVENTS, b"k", b"small"),), (), one.run_id))
        _until(lambda: session.store.blob_count() == 3)
        assert session.store.read_records(two.run_id)[2].result == shared  # type: ignore[union-attr]
        assert session.store.read_row(EVENTS, b"l") == row.value
        session.must(Batch(None, 0, (), (Row(EVENTS, b"l", None),), (), two.run_id))
        session.close()
        session = Session(opener)
        _until(lambda: session.store.blob_count() == 0)
        again = Script()
        session.must(again.accept(), again.step(), again.step(result=shared))
        assert session.store.read_records(again.run_id)[2].result == shared  # type: ignore[union-attr]
        assert session.store.blob_count() == 1
        session.close()

    def test_a_refused_batch_leaves_no_blob(self, session: Session) -> None:
        script = Script()
        session.must(script.accept())
        stale = self._raw(script, 3, Row(EVENTS, b"k", _noise(1, 70_000)))
        assert isinstance(session.commit(stale), StaleWriteError)
        _until(lambda: session.store.blob_count() == 0)

    def test_reads_while_runs_with_blobs_are_erased(self, session: Session) -> None:
        """A run is read whole or not at all."""
        over = threading.Event()
        failures: list[BaseException] = []
        scripts: list[Script] = []

        def look() -> None:
            try:
                while not over.is_set():
                    for script in scripts[-3:]:
                        assert len(session.store.read_records(script.run_id)) in range(8)
                    session.store.scan_rows(EVENTS)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(40):
            scripts.append(script := Script())
            key = b"%d" % number
            session.must(script.accept(), script.step(), script.step(result=_noise(number, 30_000)), script.end())
            session.must(Batch(None, 0, (), (Row(EVENTS, key, _noise(-number - 1, 30_000)),)))
            session.must(Batch(None, 0, (), (Row(EVENTS, key, None),), (), script.run_id))
        over.set()
        for thread in threads:
            thread.join(_WAIT_SECONDS)
        assert not failures, failures
        _until(lambda: session.store.blob_count() == 0)

    def test_a_long_journal(self, session: Session) -> None:
        script = Script()
        session.must(script.accept(), *[script.step() for _ in range(3000)])
        read = session.store.read_records
        assert [record.seq for record in read(script.run_id)] == list(range(1, 6001))
        for after, limit in ((0, 1), (0, 5999), (17, 2000), (5990, 100), (6000, 1), (5, 0)):
            seqs = [record.seq for record in read(script.run_id, after, limit)]
            assert seqs == list(range(after + 1, min(6000, after + limit) + 1))

    def test_neighbours_do_not_mix(self, session: Session) -> None:
        base = Script()
        near = [Script(base.run_id[:-1] + letter) for letter in "0123" if base.run_id[-1] != letter]
        for script in (base, *near):
            session.must(script.accept(), script.step(), script.step())
        for script in (base, *near):
            assert len(session.store.read_records(script.run_id)) == 4

    def test_read_results_never_change(self, session: Session) -> None:
        script = Script()
        session.must(script.accept(), script.step())
        records, heads = session.store.read_records(script.run_id), session.store.scan_heads()
        rows = session.store.scan_rows(READY)
        copies = list(records), list(heads), list(rows)
        session.must(script.step(), script.end())
        assert (records, heads, rows) == copies

    # --- scans -------------------------------------------------------------------------

    def test_scan_rows_by_prefix_and_page(self, session: Session) -> None:
        script, other = Script(), Script()
        children = sorted(child_run_id(script.run_id, f"1:{n}") for n in range(1, 6))
        mine = [Row(INBOX, inbox_key(script.run_id, child), b"%d" % n) for n, child in enumerate(children)]
        theirs = [Row(INBOX, inbox_key(other.run_id, child), b"x") for child in children[:2]]
        session.must(script.accept(), other.accept(), script.rows(*reversed(mine)), other.rows(*theirs))
        store, prefix = session.store, run_prefix(script.run_id)
        assert [value for _, value in store.scan_rows(INBOX, prefix)] == [b"0", b"1", b"2", b"3", b"4"]
        assert store.scan_rows(INBOX, prefix, limit=2) == store.scan_rows(INBOX, prefix)[:2]
        assert store.scan_rows(INBOX, prefix, after=mine[1].key) == store.scan_rows(INBOX, prefix)[2:]
        assert store.scan_rows(INBOX, prefix, after=mine[-1].key) == []
        assert store.scan_rows(INBOX, prefix, after=b"\0") == store.scan_rows(INBOX, prefix)
        assert len(list(scan_all(store, INBOX))) == 7
        assert [key for key, _ in scan_all(store, INBOX)] == sorted(row.key for row in (*mine, *theirs))
        assert store.scan_rows(OUTBOX) == []

    def test_rows_that_belong_to_no_run(self, session: Session) -> None:
        row, other = Row(OUTBOX, b"k", b"1"), Row(OUTBOX, b"other", b"2")
        session.must(Batch(None, 0, (), (other,), (row,)))
        assert session.store.scan_rows(OUTBOX) == [(b"k", b"1"), (b"other", b"2")]
        error = session.commit(Batch(None, 0, (), (Row(OUTBOX, b"other", None),), (row,)))
        assert isinstance(error, DuplicateError) and error.value == b"1"
        session.must(Batch(None, 0, (), (Row(OUTBOX, b"other", None),)))
        assert session.store.scan_rows(OUTBOX) == [(b"k", b"1")]
        with pytest.raises(InternalError):
            session.store.commit(Batch(None, 0, ()), lambda error: None)

    def test_a_run_is_erased_whole_and_alone(self, opener: Opener) -> None:
        session = Session(opener)
        script, other, live = Script(), Script(), Script()
        session.must(script.accept(), other.accept(), live.accept())
        session.must(script.step(), other.step(), live.step())
        session.must(script.end(), other.end())
        session.must(Batch(None, 0, (), (Row(OUTBOX, b"k", b"1"),), (), script.run_id))
        store = session.store
        assert store.read_head(script.run_id) is None and store.read_records(script.run_id) == []
        assert [head.run_id for head in store.scan_heads()] == sorted((other.run_id, live.run_id))
        assert len(store.read_records(other.run_id)) == other.fold.version
        session.must(live.step(), Batch(None, 0, (), (), (), script.run_id))  # again changes nothing
        session.close()
        session = Session(opener)
        store = session.store
        assert store.read_head(script.run_id) is None and store.read_records(script.run_id) == []
        assert len(store.read_records(live.run_id)) == live.fold.version
        session.must(Script(script.run_id).accept())  # its id is free
        session.close()

    def test_scan_ready_by_tier_then_age(self, session: Session) -> None:
        scripts = {tier: [Script() for _ in range(3)] for tier in (3, 0, 2)}
        for tier, group in scripts.items():
            session.must(*[script.accept(tier=tier) for script in group])
        order = [key[0] for key, _ in session.store.scan_rows(READY)]
        assert order == [0] * 3 + [2] * 3 + [3] * 3

    def test_scan_heads_in_order(self, session: Session) -> None:
        scripts = [Script() for _ in range(25)]
        session.must(*[script.accept() for script in scripts])
        ids = sorted(script.run_id for script in scripts)
        store = session.store
        assert [head.run_id for head in store.scan_heads()] == ids
        assert [head.run_id for head in store.scan_heads(limit=3)] == ids[:3]
        assert [head.run_id for head in store.scan_heads(after=ids[10])] == ids[11:]
        back = ids[::-1]
        assert [head.run_id for head in store.scan_heads(newest_first=True)] == back
        assert [head.run_id for head in store.scan_heads(limit=3, newest_first=True)] == back[:3]
        assert [head.run_id for head in store.scan_heads(ids[10], 4, True)] == ids[6:10][::-1]
        assert store.scan_heads(ids[0], newest_first=True) == []
        assert [head.run_id for head in store.scan_heads(f"run_7{'Z' * 25}", newest_first=True)] == back

    def test_heads_of_a_tenant(self, opener: Opener) -> None:
        session = Session(opener)
        names = ("acme", "acm", "acme\0", "ä" * 400)
        scripts = [Script(tenant=names[number % 4]) for number in range(24)]
        session.must(*[script.accept() for script in scripts])
        session.must(*[script.step() for script in scripts[::2]], *[script.end() for script in scripts[1::2]])
        erased = scripts[3]
        session.must(Batch(None, 0, (), (), (), erased.run_id))
        for again in range(2):
            store = session.store
            for name in names:
                ids = sorted(s.run_id for s in scripts if s.tenant == name and s is not erased)
                assert store.scan_heads(tenant=name) == [store.read_head(run_id) for run_id in ids]
                assert [head.run_id for head in store.scan_heads(ids[1], 3, tenant=name)] == ids[2:5]
                assert [head.run_id for head in store.scan_heads("", 2, True, name)] == ids[:-3:-1]
                assert [head.run_id for head in store.scan_heads(ids[3], 2, True, name)] == [ids[2], ids[1]]
                # A cursor may be of any run, or of none that there is.
                between = scripts[0].run_id
                later = [run_id for run_id in ids if run_id > between]
                assert [head.run_id for head in store.scan_heads(between, tenant=name)] == later
                assert store.scan_heads(ids[-1], tenant=name) == store.scan_heads(ids[0], 5, True, name) == []
                assert len(store.scan_heads(f"run_7{'Z' * 25}", 99, True, name)) == len(ids)
            assert store.scan_heads(tenant="nobody") == store.scan_heads("", 5, True, "nobody") == []
            assert store.scan_heads("", 0, tenant="acme") == []
            if not again:
                session.close()
                session = Session(opener)
        session.close()

    # --- all or nothing, in order -----------------------------------------------------------

    @pytest.mark.parametrize("after", ["behind", "ahead", "exists", "missing"])
    def test_a_stale_batch_changes_nothing(self, session: Session, after: str) -> None:
        script = Script()
        session.must(script.accept("k"), script.step())
        before = everything(session.store)
        row = Row(OUTBOX, b"o", b"1")
        match after:
            case "behind":
                batch = self._raw(script, 1, row)
            case "ahead":
                batch = self._raw(script, 3, row)
            case "exists":
                batch = self._raw(script, 0, row)
            case _:
                batch = self._raw(Script(), 2, row)
        assert isinstance(session.commit(batch), StaleWriteError)
        assert everything(session.store) == before
        session.must(script.step())

    @staticmethod
    def _raw(script: Script, after: int, *rows: Row, unique: tuple[Row, ...] = ()) -> Batch:
        """A batch of one record with no regard for what the run did so far."""
        head = Head(script.run_id, after + 1, "ACTIVE", "acme", "agent", "0" * 64, 2, 2, 1)
        return Batch(head, after, (r.CancelRequested(after + 1, 1, "test"),), rows, unique)

    def test_a_duplicate_names_what_it_found_and_changes_nothing(self, session: Session) -> None:
        first, second = Script(), Script()
        session.must(first.accept("same"))
        before = everything(session.store)
        error = session.commit(second.accept("same"))
        assert isinstance(error, DuplicateError)
        assert error.value == first.run_id.encode()
        assert everything(session.store) == before

    def test_of_two_at_once_one_is_the_duplicate(self, session: Session) -> None:
        scripts = [Script() for _ in range(20)]
        given = [session.give(script.accept("same")) for script in scripts]
        errors = [outcome.result(_WAIT_SECONDS) for outcome in given]
        assert errors[0] is None
        assert all(isinstance(error, DuplicateError) for error in errors[1:])
        assert {error.value for error in errors[1:] if isinstance(error, DuplicateError)} == {
            scripts[0].run_id.encode()
        }
        assert list(everything(session.store)["heads"]) == [scripts[0].run_id]

    def test_another_tenant_may_use_the_same_key(self, session: Session) -> None:
        session.must(Script(tenant="a").accept("same"), Script(tenant="b").accept("same"))

    def test_unique_after_delete_and_before_rows(self, session: Session) -> None:
        script = Script()
        row = Row(OUTBOX, b"k", b"1")
        gone = Row(OUTBOX, b"k", None)
        session.must(script.accept(), script.rows(unique=(row,)), script.rows(gone), script.rows(unique=(row,)))
        # Within a batch unique rows come first: this one is refused, though the same batch would delete the row ...
        assert isinstance(session.commit(self._raw(script, script.fold.version, gone, unique=(row,))), DuplicateError)
        # ... and here the last word is the row's.
        session.must(script.rows(gone), script.rows(Row(OUTBOX, b"k", b"2"), unique=(row,)))
        assert session.store.read_row(OUTBOX, b"k") == b"2"

    def test_rows_are_put_replaced_and_deleted(self, session: Session) -> None:
        script = Script()
        session.must(
            script.accept(),
            script.rows(Row(INBOX, b"a", b"1"), Row(INBOX, b"b", b"")),
            script.rows(Row(INBOX, b"a", b"2"), Row(INBOX, b"never", None)),
        )
        store = session.store
        assert (store.read_row(INBOX, b"a"), store.read_row(INBOX, b"b")) == (b"2", b"")
        session.must(script.rows(Row(INBOX, b"a", None), Row(INBOX, b"c", b"x"), Row(INBOX, b"c", b"y")))
        assert dict(store.scan_rows(INBOX)) == {b"b": b"", b"c": b"y"}

    def test_a_batch_without_records_changes_rows_of_its_run_only(self, session: Session) -> None:
        script = Script()
        session.must(script.accept())
        head = head_of(script.fold, script.run_id)
        session.must(Batch(head, head.version, (), (Row(INBOX, b"m", b"1"),)))
        assert session.store.read_row(INBOX, b"m") == b"1"
        assert session.store.read_head(script.run_id) == head
        session.must(script.step())
        stale = Batch(head, head.version, (), (Row(INBOX, b"m", b"2"),))
        assert isinstance(session.commit(stale), StaleWriteError)
        assert session.store.read_row(INBOX, b"m") == b"1"

    def test_fault_C24_nothing_overwrites_what_came_first(self, session: Session) -> None:
        """Two ends of one run from the same version: the store lets one through, whatever the other says."""
        script = Script()
        session.must(script.accept())
        late = self._raw(script, script.fold.version)
        session.must(script.end())
        assert isinstance(session.commit(late), StaleWriteError)
        head = session.store.read_head(script.run_id)
        assert head is not None and head.state == "SUCCEEDED"

    def test_what_follows_a_refused_batch_is_refused(self, session: Session) -> None:
        first, second = Script(), Script()
        session.must(first.accept("same"))
        batches = [second.accept("same"), second.step(), second.step(), second.end()]
        given = [session.give(batch) for batch in batches]
        kinds = [type(outcome.result(_WAIT_SECONDS)) for outcome in given]
        assert kinds == [DuplicateError, StaleWriteError, StaleWriteError, StaleWriteError]
        assert session.store.read_records(second.run_id) == []
        # A refused run was never there: the same id may come again.
        again = Script(second.run_id)
        session.must(again.accept("other"), again.step())

    def test_done_is_called_once_in_order_on_the_loop(self, session: Session) -> None:
        scripts = [Script() for _ in range(5)]
        calls: list[tuple[int, int]] = []
        over = threading.Event()
        batches = [script.accept() for script in scripts]
        for _ in range(60):
            batches += [script.step() for script in scripts]
        batches.insert(100, self._raw(scripts[0], 0))  # a refused one keeps its place, too
        for number, batch in enumerate(batches):

            def done(_: StoreError | None, number: int = number) -> None:
                calls.append((number, threading.get_ident()))
                if number == len(batches) - 1:
                    over.set()

            session.store.commit(batch, done)
        assert over.wait(_WAIT_SECONDS)
        assert [number for number, _ in calls] == list(range(len(batches)))
        assert {thread for _, thread in calls} == {session.thread.ident}

    def test_when_done_is_called_it_is_readable(self, session: Session) -> None:
        script = Script()
        seen: Future[list[int]] = Future()
        found: list[int] = []
        batches = [script.accept(), *[script.step() for _ in range(20)]]

        def done(error: StoreError | None, version: int) -> None:
            head = session.store.read_head(script.run_id)
            assert error is None and head is not None and head.version >= version
            assert len(session.store.read_records(script.run_id)) >= version
            found.append(version)
            if len(found) == len(batches):
                seen.set_result(found)

        for batch in batches:
            assert batch.head is not None
            session.store.commit(batch, lambda error, version=batch.head.version: done(error, version))  # type: ignore[misc]
        assert len(seen.result(_WAIT_SECONDS)) == len(batches)

    def test_a_done_that_raises_stops_nobody(self, session: Session) -> None:
        script = Script()

        def bad(_: StoreError | None) -> None:
            raise ZeroDivisionError

        session.store.commit(script.accept(), bad)
        session.must(script.step(), script.step())
        assert len(session.raised) == 1
        session.raised.clear()

    def test_what_cannot_fit_together_is_refused_at_once(self, session: Session) -> None:
        script = Script()
        session.must(script.accept())
        before = everything(session.store)
        good = script.step()
        long_key = Row(INBOX, b"k" * 512, b"")
        calls: list[StoreError | None] = []
        for batch in (
            Batch(good.head, 0, good.records),
            Batch(good.head, good.after_version, good.records + good.records),
            Batch(good.head, good.after_version, ()),
            Batch(good.head, good.after_version, good.records, (Row("nowhere", b"k", b""),)),
            Batch(good.head, good.after_version, good.records, (Row(INBOX, b"", b""),)),
            Batch(good.head, good.after_version, good.records, (long_key,)),
            Batch(good.head, good.after_version, good.records, (), (long_key,)),
            Batch(good.head, good.after_version, good.records, (), (Row(INBOX, b"k", None),)),
        ):
            with pytest.raises(InternalError):
                session.store.commit(batch, calls.append)
        session.must(good)
        assert calls == []
        assert before["heads"] != everything(session.store)["heads"]

    # --- sessions ---------------------------------------------------------------------------

    def test_everything_is_there_after_reopen(self, opener: Opener) -> None:
        session = Session(opener)
        scripts = [Script() for _ in range(30)]
        for number, script in enumerate(scripts):
            session.must(script.accept(f"k{number}"), *[script.step() for _ in range(number)])
        before = everything(session.store)
        session.close()
        again = Session(opener)
        assert everything(again.store) == before
        again.must(*[script.step() for script in scripts])  # versions go on
        assert isinstance(again.commit(Script().accept("k7")), DuplicateError)
        again.close()

    def test_every_open_raises_the_generation(self, opener: Opener) -> None:
        generations = []
        for _ in range(3):
            session = Session(opener)
            generations.append(session.store.generation)
            session.close()
        assert generations == [generations[0], generations[0] + 1, generations[0] + 2]
        assert generations[0] >= 1

    def test_two_sessions_never_both_write(self, opener: Opener) -> None:
        """Either the second open is refused, or the first session is over with it."""
        script = Script()
        first = Session(opener)
        first.must(script.accept())
        try:
            second = Session(opener)
        except StoreInUseError:
            first.must(script.step())
            first.close()
            return
        assert isinstance(first.commit(script.step()), StaleWriteError)
        assert [record.seq for record in second.store.read_records(script.run_id)] == [1]
        first.close()
        second.close()

    def test_close_commits_what_was_given(self, opener: Opener) -> None:
        session = Session(opener)
        scripts = [Script() for _ in range(50)]
        given = [session.give(script.accept()) for script in scripts]
        given += [session.give(script.step()) for script in scripts]
        session.close()
        assert [outcome.result(0) for outcome in given] == [None] * 100
        again = Session(opener)
        assert all(len(again.store.read_records(script.run_id)) == 2 for script in scripts)
        again.close()

    def test_closed_is_closed(self, opener: Opener) -> None:
        session = Session(opener)
        script = Script()
        session.must(script.accept())
        store = session.store
        session.close()
        store.close()
        calls: list[StoreError | None] = []
        uses: tuple[Callable[[], object], ...] = (
            lambda: store.commit(script.step(), calls.append),
            lambda: store.read_head(script.run_id),
            lambda: store.read_records(script.run_id),
            lambda: store.read_row(INBOX, b"k"),
            lambda: store.scan_rows(INBOX),
            lambda: store.scan_heads(),
            store.backlog,
            store.blob_count,
        )
        for use in uses:
            with pytest.raises(ClosedError):
                use()
        assert calls == []

    def test_backlog_returns_to_nothing(self, session: Session) -> None:
        scripts = [Script() for _ in range(50)]
        given = [session.give(script.accept()) for script in scripts]
        items, size_bytes = session.store.backlog()
        assert 0 <= items <= 50 and (size_bytes > 0) == (items > 0)
        for outcome in given:
            assert outcome.result(_WAIT_SECONDS) is None
        assert session.store.backlog() == (0, 0)

    # --- many threads ---------------------------------------------------------------------------

    def test_threads_with_runs_of_their_own(self, session: Session) -> None:
        def work(_: int) -> str:
            script = Script()
            given = [session.give(script.accept()), *[session.give(script.step()) for _ in range(40)]]
            assert session.store.read_head(new_run_id()) is None
            assert [outcome.result(_WAIT_SECONDS) for outcome in given] == [None] * 41
            assert len(session.store.read_records(script.run_id)) == 80
            session.store.scan_heads(limit=5)
            return script.run_id

        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(work, range(16)))
        assert set(everything(session.store)["heads"]) == set(runs)

    def test_threads_that_race_for_one_run(self, session: Session) -> None:
        """Compare and swap on the version: each version has exactly one winner."""
        script = Script()
        session.must(script.accept())
        winners: list[int] = []
        start = threading.Barrier(6)

        def work() -> None:
            start.wait(_WAIT_SECONDS)
            for _ in range(30):
                head = session.store.read_head(script.run_id)
                assert head is not None
                error = session.commit(self._raw(script, head.version))
                if error is None:
                    winners.append(head.version + 1)
                else:
                    assert isinstance(error, StaleWriteError)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_WAIT_SECONDS)
        assert sorted(winners) == list(range(2, 2 + len(winners)))
        assert [record.seq for record in session.store.read_records(script.run_id)] == [1, *sorted(winners)]

    # --- against the model -------------------------------------------------------------------------

    def test_it_does_what_the_model_does(self, fresh_opener: Callable[[], Opener]) -> None:
        class Machine(_Machine):
            def __init__(self) -> None:
                super().__init__(fresh_opener())

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )

    @pytest.fixture
    def fresh_opener(self) -> Callable[[], Opener]:
        """Makes openers, each of a store of its own, for the model test."""
        raise NotImplementedError("the subclass says how fresh stores are opened")


_RUNS: Final = [f"run_01J00000000000000000000{n:03d}" for n in range(3)]
_KEYS: Final = [b"a", b"a\0", b"ab", b"b"]


class _Machine(RuleBasedStateMachine):
    """The store and the model get the same groups of batches, some of them wrong; answers and contents agree."""

    def __init__(self, opener: Opener) -> None:
        super().__init__()
        self.opener = opener
        self.disk = MemoryDisk()

    @initialize()
    def open(self) -> None:
        self.session = Session(self.opener)
        self.model = Session(lambda loop: MemoryStore(loop, self.disk))

    def teardown(self) -> None:
        self.session.close()
        self.model.close()

    rows = st.lists(
        st.builds(Row, st.sampled_from(TABLES[:2]), st.sampled_from(_KEYS), st.none() | st.binary(max_size=3)),
        max_size=3,
    )
    unique = st.lists(
        st.builds(Row, st.sampled_from(TABLES[:2]), st.sampled_from(_KEYS), st.binary(max_size=3)), max_size=1
    )
    batches = st.tuples(st.sampled_from(_RUNS), st.integers(0, 2), st.integers(-1, 1), rows, unique)

    @rule(group=st.lists(batches, min_size=1, max_size=8))
    def commit(self, group: list[tuple[str, int, int, list[Row], list[Row]]]) -> None:
        versions: dict[str, int] = {}
        outcomes = []
        for run_id, count, off, rows, unique in group:
            known = self.disk.heads.get(run_id)
            base = versions.get(run_id, known.version if known is not None else 0)
            after = max(0, base + (off if off < 0 or len(rows) > 2 else 0))
            if after + count < 1:
                continue
            versions[run_id] = after + count
            tenant = "t" if run_id == _RUNS[1] else "u"
            head = Head(run_id, after + count, "ACTIVE", tenant, "a", "v", 1, 1, 1)
            records = tuple(r.CancelRequested(after + 1 + n, n, "x") for n in range(count))
            batch = Batch(head, after, records, tuple(rows), tuple(unique))
            outcomes.append((self.session.give(batch), self.model.give(batch)))
        for got, expected in outcomes:
            error, model_error = got.result(_WAIT_SECONDS), expected.result(_WAIT_SECONDS)
            assert type(error) is type(model_error)
            if isinstance(error, DuplicateError) and isinstance(model_error, DuplicateError):
                assert error.value == model_error.value

    @rule()
    def reopen(self) -> None:
        self.session.close()
        self.model.close()
        self.session = Session(self.opener)
        self.model = Session(lambda loop: MemoryStore(loop, self.disk))
        assert self.session.store.generation == self.model.store.generation

    @rule(prefix=st.sampled_from([b"", b"a", b"c"]), after=st.sampled_from([b"", *_KEYS]), limit=st.integers(1, 3))
    def scan(self, prefix: bytes, after: bytes, limit: int) -> None:
        for table in TABLES[:2]:
            got = self.session.store.scan_rows(table, prefix, after, limit)
            assert got == self.model.store.scan_rows(table, prefix, after, limit)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "session"):
            return
        store, model = self.session.store, self.model.store
        assert store.scan_heads() == model.scan_heads() == store.scan_heads(newest_first=True)[::-1]
        for tenant in "tu":
            assert store.scan_heads(tenant=tenant) == model.scan_heads(tenant=tenant)
        for run_id in _RUNS:
            assert store.read_records(run_id) == model.read_records(run_id)
            assert store.read_head(run_id) == model.read_head(run_id)
        for table in TABLES:
            assert store.scan_rows(table) == model.scan_rows(table)
