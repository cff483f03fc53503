"""What a guest may ask for, decoded: one request type per op, and what a step under way holds.

Pure. `decode` turns a syscall's payload into a request or says why it is none; `Registration` names the side rows of a
waiting step, which are written with its StepPrepared and go with its outcome.
"""

import math
from typing import Any, Final, Literal, NamedTuple

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.engine.history import Recorded
from agentrt.errors import InputError
from agentrt.flow.amounts import Amounts
from agentrt.flow.gate import Ticket
from agentrt.ids import parse_run_id
from agentrt.records import Cost
from agentrt.stores.base import LOCKS, TIMERS, WAITS, Row
from agentrt.stores.keys import address_of, lock_key, timer_key, wait_key

#: The longest that anything waits: 10 years. What is longer is a mistake of units.
WAIT_S_MAX: Final = 10 * 366 * 24 * 3600
NAME_CHARS_MAX: Final = 512
#: The topic under which a run's own mailbox has its address; no topic of a guest begins with a zero character.
MAILBOX_TOPIC: Final = "\0run"
_LOCK_TOPIC: Final = "\0lock"


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Request of ``tool.call``."""

    tool: str
    args: msgspec.Raw = msgspec.Raw(b"{}")


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``timer.sleep``."""

    seconds: float


class EventWait(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``event.wait``; without a topic it is the run's own mailbox."""

    topic: str | None = None
    key: str = ""
    timeout_s: float | None = None


class ApprovalRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``approval.request``."""

    question: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    timeout_s: float | None = None


class Spawn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``run.spawn``."""

    agent: str
    input: msgspec.Raw = msgspec.Raw(b"null")
    tier: int | str | None = None
    detached: bool = False
    max_result_bytes: int | None = None
    budget: dict[str, int | float] | None = None
    when_full: Literal["block", "refuse"] = "block"  # what to do when its ensemble's queue is full


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``run.join``."""

    run_id: str


class LockAcquire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``lock.acquire``."""

    name: str
    timeout_s: float | None = None


class LockRelease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``lock.release``."""

    name: str
    token: int


class LockForeign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``lock.foreign``: a lock that is held elsewhere is declared, or (with the owner that the declaration
    was answered with) it is not held any more."""

    name: str
    owner: str | None = None


class EventSend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``event.send``: to a run or to a topic."""

    run_id: str | None = None
    topic: str | None = None
    key: str = ""
    data: msgspec.Raw = msgspec.Raw(b"null")
    id: str | None = None


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``checkpoint``."""

    state: msgspec.Raw = msgspec.Raw(b"null")


class Emit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``emit``."""

    data: msgspec.Raw = msgspec.Raw(b"null")


class CapacityGet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of ``capacity.get``."""


Request = (
    ToolCall
    | Sleep
    | EventWait
    | ApprovalRequest
    | Spawn
    | Join
    | LockAcquire
    | LockRelease
    | LockForeign
    | EventSend
    | Checkpoint
    | Emit
    | CapacityGet
)

_TYPES: Final[dict[str, Any]] = {
    "tool.call": ToolCall,
    "timer.sleep": Sleep,
    "event.wait": EventWait,
    "approval.request": ApprovalRequest,
    "run.spawn": Spawn,
    "run.join": Join,
    "lock.acquire": LockAcquire,
    "lock.release": LockRelease,
    "lock.foreign": LockForeign,
    "event.send": EventSend,
    "checkpoint": Checkpoint,
    "emit": Emit,
    "capacity.get": CapacityGet,
}
_DECODERS: Final = {op: msgspec.json.Decoder(kind).decode for op, kind in _TYPES.items()}

#: What a run waits for while a step of this op is open.
WAIT_REASON: Final = {
    "timer.sleep": "timer",
    "event.wait": "event",
    "approval.request": "approval",
    "run.join": "child",
    "lock.acquire": "lock",
}
#: Executed by somebody else: their outcomes arrive at `RunMachine.on_outcome`. All other steps wait or are written.
EXECUTED: Final = frozenset({"tool.call", "model.generate"})
#: Allowed while a run unwinds.
UNWINDING_OPS: Final = frozenset({"tool.call", "emit", "lock.release", "lock.foreign"})


class BadRequestError(ValueError):
    """The payload is no request of its op; the text is for the guest."""


def decode(op: str, payload: bytes) -> Request:
    """The request. Raises BadRequestError."""
    try:
        request: Request = _DECODERS[op](payload)
    except UNREADABLE as error:
        raise BadRequestError(f"{op}: {error}") from None
    wrong = _wrong(request)
    if wrong is not None:
        raise BadRequestError(f"{op}: {wrong}")
    return request


def _wrong(request: Request) -> str | None:
    kind = type(request)
    if kind is Sleep:
        return _bad_time("seconds", request.seconds)  # type: ignore[union-attr]
    if isinstance(request, EventWait):
        return (
            _bad_time("timeout_s", request.timeout_s)
            or _bad_name("topic", request.topic)
            or _bad_name("key", request.key, empty=True)
        )
    if isinstance(request, ApprovalRequest):
        return _bad_time("timeout_s", request.timeout_s)
    if isinstance(request, EventSend):
        if (request.run_id is None) is (request.topic is None):
            return "exactly one of run_id and topic is given"
        return (
            _bad_name("topic", request.topic)
            or _bad_name("key", request.key, empty=True)
            or _bad_name("id", request.id)
            or (None if request.run_id is None else _bad_run_id(request.run_id))
        )
    if isinstance(request, LockAcquire):
        return _bad_name("name", request.name) or _bad_time("timeout_s", request.timeout_s)
    if isinstance(request, LockRelease | LockForeign):
        return _bad_name("name", request.name)
    if isinstance(request, Join):
        return _bad_run_id(request.run_id)
    if isinstance(request, Spawn) and request.max_result_bytes is not None and request.max_result_bytes < 1:
        return "max_result_bytes is at least 1"
    return None


def checked_event(run_id: str | None, topic: str | None, key: str, data: bytes, id: str | None) -> EventSend:
    """An event from outside. Raises InputError."""
    for name, text in (("run_id", run_id), ("topic", topic), ("key", key), ("id", id)):
        if (text is not None or name == "key") and not (isinstance(text, str) and _is_utf8(text)):
            raise InputError(f"{name} is text, not {text!r:.200}")
    event = EventSend(run_id, topic, key, msgspec.Raw(data), id)
    wrong = _wrong(event)
    if wrong is not None:
        raise InputError(wrong)
    return event


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad_time(name: str, seconds: float | None) -> str | None:
    if seconds is None or (math.isfinite(seconds) and 0 <= seconds <= WAIT_S_MAX):
        return None
    return f"{name} is 0 to {WAIT_S_MAX}, not {seconds}"


def _bad_name(name: str, text: str | None, *, empty: bool = False) -> str | None:
    if text is None or ((text or empty) and len(text) <= NAME_CHARS_MAX and not text.startswith("\0")):
        return None
    return f"{name} has 1 to {NAME_CHARS_MAX} characters and does not begin with a zero"


def _bad_run_id(text: str) -> str | None:
    try:
        parse_run_id(text)
    except InputError as error:
        return error.message
    return None


def due_answer(op: str) -> tuple[bool, bytes]:
    """What a step is answered whose time has run out: (ok, payload)."""
    if op == "timer.sleep":
        return True, b"null"
    if op == "approval.request":
        return True, b'{"approved":false,"by":null,"comment":"timeout"}'
    return False, b'{"code":"timeout","message":"nothing came in time"}'


_NO_COST: Final = Cost()


class StepInFlight(msgspec.Struct, eq=False):
    """A step between its syscall and its answer."""

    handle: int
    path: str
    op: str
    request: bytes
    digest: bytes
    tool: str = ""  # or the profile of a model; empty: nobody executes it
    kind: str = ""
    args: bytes = b""
    key: str | None = None
    attempt: int = 1
    called: bool = False  # its tool has been asked
    prepared_ns: int = 0  # time of its first StepPrepared
    not_before_ns: int = 0  # of its next attempt
    evicted: bool = False  # the runtime ended its last attempt, which does not count
    guarded: bool = False  # the loop guard has seen it
    unwinding: bool = False  # an unwinding handler has asked for it
    held: Amounts | None = None  # what the ledger holds for it; None: as its record says
    lost_lock: str | None = None  # broken while its tool was at work: it is not done again
    too_slow: bytes | None = None  # what its last attempt answered, when time-outs have used up all of them
    recorded: Recorded | None = None  # a pure step that is executed again for its result
    reserved: Cost = _NO_COST  # what it may use at most, beside the call itself
    cost: Cost = _NO_COST  # of its outcome
    plan: Any = None  # of model.generate: its `ModelChoice`
    ticket: Ticket | None = None  # that it may begin with, if the ticket holds nothing
    call: object = None  # the attempt under way, as who executes it knows it


class Registration(NamedTuple):
    """The side rows of a waiting step."""

    due_ns: int  # of its row in TIMERS; 0: it has none
    address: bytes  # of its row in WAITS; empty: it has none
    rows: tuple[Row, ...]

    def gone(self) -> tuple[Row, ...]:
        """The rows' removal."""
        return tuple(Row(row.table, row.key, None) for row in self.rows)


_NOTHING: Final = Registration(0, b"", ())


def registration(run_id: str, tenant: str, op: str, path: str, request: bytes, prepared_ns: int) -> Registration:
    """The rows that the step has from its StepPrepared, made at ``prepared_ns``, to its outcome."""
    if op not in WAIT_REASON or op == "run.join":
        return _NOTHING
    decoded: Any = _DECODERS[op](request)
    seconds = decoded.seconds if op == "timer.sleep" else decoded.timeout_s
    rows: tuple[Row, ...] = ()
    due_ns = 0
    if seconds is not None:
        due_ns = prepared_ns + round(seconds * 1e9)
        value = asked_at(prepared_ns) if op == "approval.request" else op.encode()
        rows = (Row(TIMERS, timer_key(due_ns, run_id, path), value),)
    address = b""
    if op == "event.wait":
        address = wait_address(run_id, tenant, decoded)
        rows += (Row(WAITS, wait_key(address, prepared_ns, run_id, path), b"event"),)
    elif op == "lock.acquire":
        address = lock_address(tenant, decoded.name)
        rows += (Row(WAITS, wait_key(address, prepared_ns, run_id, path), b"lock"),)
    return Registration(due_ns, address, rows)


_ASKED: Final = b"approval.request"


def asked_at(prepared_ns: int) -> bytes:
    """The value of an approval's row in TIMERS: its deadline moves by the downtimes since then."""
    return _ASKED + prepared_ns.to_bytes(8, "big")


def parse_asked_at(value: bytes) -> int | None:
    """When the approval was asked for (Unix ns) whose timer has this value; None: it is not one's."""
    if not value.startswith(_ASKED) or len(value) != len(_ASKED) + 8:
        return None
    return int.from_bytes(value[len(_ASKED) :], "big")


def wait_address(run_id: str, tenant: str, request: EventWait) -> bytes:
    """Where the event that is waited for will arrive."""
    if request.topic is None:
        return address_of(tenant, MAILBOX_TOPIC, run_id)
    return address_of(tenant, request.topic, request.key)


def lock_address(tenant: str, name: str) -> bytes:
    """Where those wait who want the lock."""
    return address_of(tenant, _LOCK_TOPIC, name)


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A row of LOCKS. Without a run nobody holds the lock, and it is dirty."""

    tenant: str
    name: str
    run_id: str | None
    token: int
    since_ns: int


def dirty_row(tenant: str, name: str, token: int) -> Row:
    """What the end of a run that holds the lock leaves."""
    return Row(LOCKS, lock_key(tenant, name), msgspec.msgpack.encode(Held(tenant, name, None, token, 0)))


def send_address(tenant: str, request: EventSend) -> bytes:
    """Where the event goes."""
    if request.topic is None:
        return address_of(tenant, MAILBOX_TOPIC, request.run_id or "")
    return address_of(tenant, request.topic, request.key)
