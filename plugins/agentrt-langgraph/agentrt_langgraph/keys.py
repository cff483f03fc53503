"""Keys of the saver's rows. Pure.

    c | thread (16) | namespace (16) | checkpoint     -> the checkpoint, its metadata and its parent
    w | thread (16) | namespace (16) | checkpoint | task (16) | index -> a pending write
    r | run (16) | thread (16) | namespace (16) | checkpoint -> nothing: the checkpoint is of the run

Names of threads, namespaces, tasks and runs stand as BLAKE2b hashes, for they may be longer than a key. Checkpoint ids
sort by time; they stand turned round (every byte and the 0 at the end complemented), so that the newest comes first.
"""

from hashlib import blake2b
from typing import Final

from agentrt.errors import InputError

CHECKPOINT: Final = b"c"
WRITE: Final = b"w"
RUN: Final = b"r"
#: Ids are UUIDs of 36 characters; this is what there is room for beside the hashes.
ID_BYTES_MAX: Final = 300
_TURN: Final = bytes(255 - byte for byte in range(256))


def name_hash(name: str) -> bytes:
    """16 bytes."""
    return blake2b(name.encode(), digest_size=16).digest()


def turned(checkpoint_id: str) -> bytes:
    """Sorts before all ids that are less. Raises InputError for what cannot be an id."""
    raw = checkpoint_id.encode()
    if not raw or b"\0" in raw or len(raw) > ID_BYTES_MAX:
        raise InputError(f"{checkpoint_id[:50]!r} is no checkpoint id")
    return (raw + b"\0").translate(_TURN)


def thread_prefix(table: bytes, thread: str) -> bytes:
    """Of all rows of the thread in the table."""
    return table + name_hash(thread)


def namespace_prefix(table: bytes, thread: str, namespace: str) -> bytes:
    """Of all rows of the thread's namespace in the table."""
    return thread_prefix(table, thread) + name_hash(namespace)


def checkpoint_key(thread: str, namespace: str, checkpoint_id: str) -> bytes:
    """Of the checkpoint's row; with `WRITE` in place of its first byte, the prefix of its writes."""
    return namespace_prefix(CHECKPOINT, thread, namespace) + turned(checkpoint_id)


def writes_prefix(checkpoint: bytes) -> bytes:
    """Of the pending writes of the checkpoint with that key."""
    return WRITE + checkpoint[1:]


def write_key(checkpoint: bytes, task_id: str, index: int) -> bytes:
    """Of one write; indices may be negative."""
    return writes_prefix(checkpoint) + name_hash(task_id) + (index + 2**31).to_bytes(4, "big")


def run_key(run_id: str, checkpoint: bytes) -> bytes:
    """Says that the checkpoint with that key is of the run."""
    return RUN + name_hash(run_id) + checkpoint[1:]


def checkpoint_of(run_row: bytes) -> bytes:
    """The key of the checkpoint that a `run_key` names."""
    return CHECKPOINT + run_row[17:]
