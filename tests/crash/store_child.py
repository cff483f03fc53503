"""The process that is killed: commits through an LMDB store and says on stdout what was acknowledged.

    store_child.py FOLDER RUNS [FLAG ...]

First every run that the store holds goes on from where it is, then new ones are accepted up to RUNS; ended runs are
followed by new ones. Some batches (`row_version`) also write the row (OUTBOX, run) -> version, so that half a batch
would show; the others can go to the tail, or have large results. One line per acknowledged batch: ``run_id version``.
Ends only by being killed. FLAGs are LMDB's sync switches to turn off, with ``blobs.`` before them those of the blobs'
file, and tail.
"""

import asyncio
import os
import random
import sys
from typing import ClassVar

from agentrt.errors import StoreError
from agentrt.fold import head_of
from agentrt.stores.base import OUTBOX, Batch, Head, Row
from agentrt.stores.keys import run_prefix
from agentrt.stores.lmdb import LmdbStore
from agentrt.stores.tail import Tail
from agentrt.testing.stores import Script

STEPS = 30  # per run


def row_version(head: Head) -> int:
    """Version of the last batch with a row, of a run with that head."""
    return head.version if head.ended_ns else max(1, head.version // 32 * 32)


def run(folder: str, runs: int, off: list[str]) -> None:
    class Store(LmdbStore):
        _flags: ClassVar = {flag: False for flag in off if "." not in flag and flag != "tail"}
        _blob_flags: ClassVar = {flag.removeprefix("blobs."): False for flag in off if flag.startswith("blobs.")}

    if "tail" in off:
        Tail.flags = 0
    loop = asyncio.new_event_loop()
    # A small map, so that it grows under the load, and a small log, so that runs are filed under it.
    store = Store(
        folder,
        loop,
        map_bytes=2**18,
        map_bytes_max=2**28,
        free_bytes_min=0,
        force_place=True,
        log_bytes_max=2**16,
    )

    def go_on(script: Script) -> None:
        if script.fold.ended is not None:
            script = Script()
        version = script.fold.version
        if version == 0:
            batch = script.accept(script.run_id)
        elif version < 2 * STEPS:
            # Now and then a result that is a blob.
            large = random.Random(version).randbytes(40_000) if version % 11 == 0 else None
            batch = script.step(size_bytes=10 + version * 37 % 3000, result=large)
        else:
            batch = script.end()
        assert batch.head is not None
        version = batch.head.version
        if version == row_version(batch.head):
            row = Row(OUTBOX, run_prefix(script.run_id), str(version).encode())
            batch = Batch(batch.head, batch.after_version, batch.records, (*batch.rows, row), batch.unique)

        def done(error: StoreError | None) -> None:
            assert error is None, error
            os.write(1, f"{script.run_id} {version}\n".encode())
            go_on(script)

        store.commit(batch, done)

    under_way = 0
    after = ""
    while page := store.scan_heads(after):
        after = page[-1].run_id
        for head in page:
            if head.ended_ns == 0 and under_way < runs:
                go_on(_resume(store, head.run_id))
                under_way += 1
    for _ in range(runs - under_way):
        go_on(Script())
    loop.run_forever()


def _resume(store: LmdbStore, run_id: str) -> Script:
    script = Script.resume(run_id, store.read_records(run_id))
    assert head_of(script.fold, run_id) == store.read_head(run_id)
    return script


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
