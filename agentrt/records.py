"""The journal's records and their codec.

A record is a msgpack array ``[tag, seq, at_ns, …]``, a batch of them a msgpack array of records. Tags are numbers
fixed for good: a new kind gets a new number, a new field goes to the end with a default, so that old journals keep
loading. ``seq`` numbers the records of a run from 1 through all segments and is the run's ``state_version`` after the
record. ``at_ns`` is wall-clock time in Unix nanoseconds. Requests and results are JSON text as bytes, exactly as the
guest sent or got them.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.errors import StoreCorruptError


class Cost(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step or run has used: guest fuel, CPU slot time (ns), money (micro-dollars), model tokens."""

    fuel: int = 0
    slot_ns: int = 0
    micro_usd: int = 0
    tokens: int = 0


class _Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    seq: int
    at_ns: int


class RunAccepted(_Record, frozen=True, array_like=True, tag=1):
    """The run exists. ``pins`` maps what was pinned (engine, abi, agent, …) to its version or digest."""

    tenant: str
    agent: str
    version: str  # content-addressed version of the agent (sha256 of its module, hex)
    input: bytes
    base_tier: int
    seed: bytes  # 16 bytes, source of random.bytes
    fuel_max: int
    pins: dict[str, str] = {}
    idempotency_key: str | None = None
    parent: str | None = None  # "run_id/path" of the spawning step
    root: str | None = None  # run that the ensemble began with; None: this one
    detached: bool = False  # goes on when its parent ends
    budget: dict[str, int | float] = {}  # see engine/budget.py
    deadline_ns: int = 0  # Unix ns at which it is TIMED_OUT; 0: none
    result_bytes_max: int = 0  # 0: the node's limit
    start_ns: int = 0  # Unix ns before which it does not begin; 0: at once
    depth: int = 0  # how many runs are above it
    callback_url: str | None = None  # who is told when it has ended
    traceparent: str | None = None  # the caller's span (W3C trace context), of the ensemble's root
    origin: str | None = None  # the event of a bus that it was made of: "source partition offset"


class StepPrepared(_Record, frozen=True, array_like=True, tag=2, gc=False):
    """Phase one: the step will be executed. ``key`` is its idempotency key, kept by retries and recovery."""

    path: str  # "segment:place", e.g. "1:3"
    op: str
    kind: str  # keyed, reconcilable, at_most_once
    request: bytes
    digest: bytes
    key: str
    attempt: int
    reserved: Cost = Cost()


class StepCommitted(_Record, frozen=True, array_like=True, tag=3, gc=False):
    """The step's outcome. A pure step has no `StepPrepared` and keeps only ``result_digest``: replay runs it again."""

    path: str
    op: str
    digest: bytes  # of the request
    ok: bool
    result: bytes | None  # result, or error as JSON when not ok; None: pure, only its digest is kept
    result_digest: bytes
    attempt: int
    cost: Cost = Cost()
    active_ns: int = 0  # how long the run had been at work by then, if that is bounded


class StepAborted(_Record, frozen=True, array_like=True, tag=4):
    """A prepared step that certainly had no effect and will be prepared again or given up."""

    path: str
    reason: str


class StepEvicted(_Record, frozen=True, array_like=True, tag=5):
    """The step's process was ended by the runtime before an outcome was seen; settled by its kind, no attempt."""

    path: str
    reason: str


class OutcomeUnknown(_Record, frozen=True, array_like=True, tag=6):
    """Nobody saw how the step ended; settled by its kind."""

    path: str
    reason: str


class Waiting(_Record, frozen=True, array_like=True, tag=7):
    reason: str  # one of states.WAIT_REASONS
    path: str | None = None
    detail: str | None = None
    until_ns: int = 0  # Unix ns at which it is looked at again, by its row in TIMERS; 0: there is none
    active_ns: int = 0  # see StepCommitted


class Resumed(_Record, frozen=True, array_like=True, tag=8):
    path: str | None = None
    retry: tuple[str, ...] = ()  # steps that an operator lets run once more, whatever their kind and attempts


class Spawned(_Record, frozen=True, array_like=True, tag=9):
    path: str
    child: str
    detached: bool


class Checkpoint(_Record, frozen=True, array_like=True, tag=10):
    """Starts segment ``segment``; the state is what ``ctx.restored`` gives."""

    segment: int
    state: bytes


class FrameTaken(_Record, frozen=True, array_like=True, tag=11):
    frame: str
    fuel: int


class TierChanged(_Record, frozen=True, array_like=True, tag=12):
    tier: int
    reason: str


class CancelRequested(_Record, frozen=True, array_like=True, tag=13):
    reason: str


class Ending(_Record, frozen=True, array_like=True, tag=14):
    towards: str  # a terminal state
    reason: str
    limit: str | None = None  # the limit that the run has reached
    code: str | None = None  # of the error, if ``towards`` does not say it
    answers: int = -1  # that its program is given before it unwinds; -1: all that came before this record
    steps: int = -1  # that its program asked for in this segment; its handlers' come after them. -1: as many as it asks
    cost: Cost = Cost()  # of a guest that was cut short and is brought back to unwind


class LockBroken(_Record, frozen=True, array_like=True, tag=15):
    lock: str
    token: int


class Upgraded(_Record, frozen=True, array_like=True, tag=16):
    pins: dict[str, str]


class RunEnded(_Record, frozen=True, array_like=True, tag=17):
    """Terminal. ``result`` is the guest's output (JSON) when SUCCEEDED; ``error`` is an error as JSON otherwise."""

    state: str
    result: bytes | None
    error: bytes | None
    cost: Cost = Cost()


class Exported(_Record, frozen=True, array_like=True, tag=18):
    """The run left this store under ``export_id``: it is nobody's until somebody imports it."""

    export_id: str


class Imported(_Record, frozen=True, array_like=True, tag=19):
    """A store took the run over from that export: it goes on in the state that it was exported in."""

    export_id: str


Record = (
    RunAccepted
    | StepPrepared
    | StepCommitted
    | StepAborted
    | StepEvicted
    | OutcomeUnknown
    | Waiting
    | Resumed
    | Spawned
    | Checkpoint
    | FrameTaken
    | TierChanged
    | CancelRequested
    | Ending
    | LockBroken
    | Upgraded
    | RunEnded
    | Exported
    | Imported
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record)
_batch_decoder: Final = msgspec.msgpack.Decoder(list[Record])


def encode_record(record: Record) -> bytes:
    """The record as stored."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """The record from its stored form. Raises StoreCorruptError on anything else."""
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise StoreCorruptError(f"a journal record cannot be read: {error}") from error


def encode_batch(records: Sequence[Record]) -> bytes:
    """The records of one batch as stored: one array of them."""
    return _encoder.encode(records)


def decode_batch(data: bytes) -> list[Record]:
    """The records of a batch from their stored form. Raises StoreCorruptError on anything else."""
    try:
        return _batch_decoder.decode(data)
    except UNREADABLE as error:
        raise StoreCorruptError(f"a batch of journal records cannot be read: {error}") from error
