"""The door: what a run must be to be accepted, and what an idempotency key means.

Two requests are the same if the agent's name and the RFC 8785 form of the input are; the row that says so is written in
the transaction that accepts the run, and the store refuses a second one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.digest import canonical_text, digest
from agentrt.engine.budget import Budget, check_budget, child_budget, deadline_of
from agentrt.engine.callbacks import URL_CHARS_MAX
from agentrt.engine.info import Agent, EngineLimits
from agentrt.engine.steps import WAIT_S_MAX, Spawn
from agentrt.errors import (
    AgentrtError,
    DuplicateError,
    IdempotencyConflictError,
    InputError,
    QueueFullError,
    StoreCorruptError,
)
from agentrt.flow.classifier import Classifier, Ingress
from agentrt.ids import new_run_id, parse_run_id
from agentrt.jsontext import UnfitError, encode_exact
from agentrt.observe.parent import known_traceparent
from agentrt.records import RunAccepted
from agentrt.stores.base import IDEMPOTENCY, Row, Store
from agentrt.stores.keys import idempotency_row_key, origin_row_key
from agentrt.tiers import parse_tier

_NAME_CHARS_MAX: Final = 128
_KEY_CHARS_MAX: Final = 4096

#: Rules do not look into larger inputs: what they say of fields does not hold for those.
_LOOKED_AT_BYTES_MAX: Final = 1 << 20

_decode_any: Final = msgspec.json.decode
_decode_raw: Final = msgspec.json.Decoder(msgspec.Raw).decode


class _IdempotencyRow(msgspec.Struct, frozen=True, array_like=True):
    run_id: str
    digest: bytes


class Origin(msgspec.Struct, frozen=True):
    """The event of a bus that a run is made of: its name (agentrt/ingress/port.py), ``text``, and the digest of all
    that is the same at every delivery of it."""

    text: str
    digest: bytes


class Via(msgspec.Struct, frozen=True):
    """How a request came in: what rules and policies may look at beside the request itself. ``max_tier``: the most
    urgent tier that the caller may ask for, whatever rules say. ``wait``: whether the caller waits at a full door for
    as long as its tier may, rather than be refused at once."""

    door: str = "embedding"  # http, cli, embedding, schedule, spawn, bus
    source: str = ""
    type: str = ""
    headers: Mapping[str, str] = {}
    max_tier: int = 0
    wait: bool = False


EMBEDDED: Final = Via()


class Asked(msgspec.Struct, frozen=True):
    """A request as it came; see `Engine.accept`."""

    agent: str
    input: bytes
    tenant: str = "default"
    tier: int | str | None = None
    idempotency_key: str | None = None
    fuel_max: int | None = None
    budget: Mapping[str, int | float] | None = None
    timeout_ns: int | None = None
    start_ns: int | None = None
    callback_url: str | None = None
    traceparent: str | None = None
    via: Via = EMBEDDED
    origin: Origin | None = None


class Request(msgspec.Struct, frozen=True):
    """A request that may be accepted: what to journal, and the rows that must be new."""

    run_id: str
    accepted: RunAccepted
    unique: tuple[Row, ...]
    digest: bytes | None  # with an idempotency key
    origin: Origin | None


class _Constants(msgspec.Struct, frozen=True):
    """What all runs of a registered agent share."""

    agent: Agent
    tier: int
    pins: dict[str, str]


class Door:
    """Checks requests, and makes what is journaled of them; whether there is room is not its business.
    ``random_bytes(n)`` must be unpredictable."""

    def __init__(
        self,
        limits: EngineLimits,
        store: Store,
        pins: Mapping[str, str],
        now_ns: Callable[[], int],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._limits = limits
        self._backlog = store.backlog
        self._pins = dict(pins)
        self._now_ns = now_ns
        self._random_bytes = random_bytes
        self._constants: dict[str, _Constants] = {}  # by the agent's name
        #: What the operator gives runs of (tenant, agent).
        self.budget_of: Callable[[str, str], Budget] = lambda tenant, agent: {}
        self._tenant = ""  # the last one that may be

    def pins_of(self, agent: Agent) -> dict[str, str]:
        """What a run of the agent is pinned to if it is accepted now; always the same object, not to be changed."""
        return self._constants_of(agent).pins

    @property
    def node_pins(self) -> Mapping[str, str]:
        """What all runs are pinned to that this node accepts."""
        return self._pins

    def close(self) -> None:
        """Let go of the agents."""
        self._constants.clear()

    def _constants_of(self, agent: Agent) -> _Constants:
        constants = self._constants.get(agent.name)
        if constants is None or constants.agent is not agent:
            pins = self._pins | agent.program.pins | {"agent": agent.version}
            constants = self._constants[agent.name] = _Constants(agent, int(parse_tier(agent.tier)), pins)
        return constants

    def check(self, tenant: str, input: bytes) -> None:
        """What can be seen at once. Raises InputError."""
        if tenant != self._tenant:
            check_name("tenant", tenant)
            self._tenant = tenant
        self._check_input(input)

    def check_backlog(self) -> None:
        """Raises QueueFullError: the store has as much to write as it may."""
        limits = self._limits
        batches, size = self._backlog()
        if batches >= limits.backlog_items_max or size >= limits.backlog_bytes_max:
            name = "backlog_items_max" if batches >= limits.backlog_items_max else "backlog_bytes_max"
            raise QueueFullError(f"{batches} batches with {size} bytes wait for the store", limit=f"store.{name}")

    def enter(self, agent: Agent, asked: Asked, base_tier: int, idempotency_key: str | None) -> Request:
        """Of a request that passed `check`, with what rules made of it. Raises InputError."""
        limits, input, tenant = self._limits, asked.input, asked.tenant
        fuel = agent.fuel_max if asked.fuel_max is None else asked.fuel_max
        check_fuel(fuel, limits.run_fuel_max)
        constants = self._constants_of(agent)
        request_digest: bytes | None = None
        if idempotency_key is not None:
            check_text("an idempotency key", idempotency_key, _KEY_CHARS_MAX)
            request_digest = _digest(agent, input)
        elif input != b"null":
            check_json("the input", input)
        now = self._now_ns()
        begins = max(now, asked.start_ns or 0)
        amounts = self._budget(agent, tenant, asked.budget)
        callback_url, timeout_ns, traceparent = asked.callback_url, asked.timeout_ns, asked.traceparent
        if callback_url is not None:
            check_text("a callback's URL", callback_url, URL_CHARS_MAX)
        deadline_ns = begins + check_timeout(timeout_ns) if timeout_ns is not None else 0
        random = self._random_bytes(26)
        run_id = new_run_id(now // 1_000_000, random[16:])
        accepted = RunAccepted(
            1,
            now,
            tenant,
            agent.name,
            agent.version,
            input,
            base_tier,
            random[:16],
            fuel,
            constants.pins,
            idempotency_key,
            budget=amounts,
            deadline_ns=deadline_of(amounts, begins, deadline_ns) if amounts else deadline_ns,
            start_ns=begins if begins > now else 0,
            callback_url=callback_url,
            traceparent=None if traceparent is None else known_traceparent(traceparent),
            origin=None if asked.origin is None else asked.origin.text,
        )
        unique: tuple[Row, ...] = ()
        if idempotency_key is not None and request_digest is not None:
            value = msgspec.msgpack.encode(_IdempotencyRow(run_id, request_digest))
            unique = (Row(IDEMPOTENCY, idempotency_row_key(tenant, idempotency_key), value),)
        origin = asked.origin
        if origin is not None:
            value = msgspec.msgpack.encode(_IdempotencyRow(run_id, origin.digest))
            unique = (Row(IDEMPOTENCY, origin_row_key(origin.text), value), *unique)
        return Request(run_id, accepted, unique, request_digest, origin)

    def _budget(self, agent: Agent, tenant: str, asked: Mapping[str, int | float] | None) -> Budget:
        """What was asked for, else what the operator says, else what the agent's author does, key by key."""
        said = self.budget_of(tenant, agent.name)
        budget = agent.budget | said if said else agent.budget
        return budget if asked is None else budget | check_budget(asked)

    def tier_of(self, agent: Agent, asked: int | str | None) -> int:
        """The tier of a run of the agent for which this one is asked. Raises InputError."""
        return self._constants_of(agent).tier if asked is None else int(parse_tier(asked))

    def enter_child(
        self, agent: Agent, spawn: Spawn, tier: int, parent: RunAccepted, parent_id: str, path: str, tool_calls: int
    ) -> RunAccepted:
        """What a step spawns, with no more than its parent has left, which has used so many tool calls. Raises
        InputError, QueueFullError."""
        input = bytes(spawn.input)
        self._check_input(input)
        self.check_backlog()
        now = self._now_ns()
        asked = self._budget(agent, parent.tenant, spawn.budget)
        budget = child_budget(asked, parent, tool_calls, now)
        return RunAccepted(
            1,
            now,
            parent.tenant,
            agent.name,
            agent.version,
            input,
            tier,
            self._random_bytes(16),
            agent.fuel_max,
            self.pins_of(agent),
            None,
            f"{parent_id}/{path}",
            parent.root or parent_id,
            spawn.detached,
            budget,
            deadline_of(budget, now, 0 if spawn.detached else parent.deadline_ns),
            spawn.max_result_bytes or 0,
            depth=parent.depth + 1,
            traceparent=parent.traceparent,
        )

    def _check_input(self, input: bytes) -> None:
        limit = self._limits.request_bytes_max
        if len(input) > limit:
            raise InputError(f"an input of {len(input)} bytes, more than {limit}", limit="limits.request_bytes_max")


def repeat_keys(asked: Asked, idempotency_key: str | None) -> tuple[bytes, ...]:
    """Of the IDEMPOTENCY rows that are there if the request, or its event, made a run before; () of a request that
    could not have."""
    try:
        keys = () if idempotency_key is None else (idempotency_row_key(asked.tenant, idempotency_key),)
        return keys if asked.origin is None else (origin_row_key(asked.origin.text), *keys)
    except InputError:
        return ()


def settle_repeat(agent: Agent, asked: Asked, idempotency_key: str | None, value: bytes) -> str | AgentrtError:
    """What such a row means, as `settle_duplicate` says."""
    try:
        request_digest = None if idempotency_key is None else _digest(agent, asked.input)
    except InputError as error:
        return error
    return settle_duplicate(DuplicateError("it was accepted before", value), request_digest, asked.origin)


def _digest(agent: Agent, input: bytes) -> bytes:
    return digest(agent.name.encode() + b"\0" + canonical_text(input))


def ingress_of(asked: Asked, classifier: Classifier) -> Ingress:
    """The request as rules see it. Raises InputError."""
    payload = None
    if classifier.reads_payload and len(asked.input) <= _LOOKED_AT_BYTES_MAX:
        try:
            payload = _decode_any(asked.input)
        except UNREADABLE as error:
            raise InputError(f"the input is not JSON: {error}") from error
    via = asked.via
    return Ingress(
        door=via.door,
        tenant=asked.tenant,
        source=via.source,
        type=via.type,
        headers=via.headers,
        payload=payload,
        agent=asked.agent,
        tier=None if asked.tier is None else int(parse_tier(asked.tier)),
        idempotency_key=asked.idempotency_key,
        max_tier=via.max_tier,
    )


def settle_duplicate(
    error: AgentrtError, request_digest: bytes | None, origin: Origin | None = None
) -> str | AgentrtError:
    """What the store's refusal of an acceptance means: the run that the same request, or event, made earlier, or an
    error."""
    if not isinstance(error, DuplicateError) or (request_digest is None and origin is None):
        return error
    try:
        found = msgspec.msgpack.decode(error.value, type=_IdempotencyRow)
        parse_run_id(found.run_id)
    except (*UNREADABLE, InputError) as unreadable:
        return StoreCorruptError(f"the row of an idempotency key cannot be read: {unreadable}")
    if found.digest == request_digest or (origin is not None and found.digest == origin.digest):
        return found.run_id
    if request_digest is None:
        assert origin is not None
        return IdempotencyConflictError(
            f"the event {origin.text} was another one when it became a run",
            run=found.run_id,
            hint="Has its topic been made anew, or its time changed?",
        )
    return IdempotencyConflictError(
        f"the idempotency key was used with another agent or input: digest {found.digest.hex()} then,"
        f" {request_digest.hex()} now",
        run=found.run_id,
        hint="Use another key for another request",
    )


def check_timeout(timeout_ns: int) -> int:
    """Raises InputError unless it is more than 0 and at most ten years."""
    if not 0 < timeout_ns <= WAIT_S_MAX * 10**9:
        raise InputError(f"a run's timeout is more than 0 and at most {WAIT_S_MAX} seconds, not {timeout_ns / 1e9}")
    return timeout_ns


def check_fuel(fuel: int, most: int) -> None:
    """Raises InputError."""
    if type(fuel) is not int or not 0 < fuel <= most:
        raise InputError(f"fuel is 1 to {most}, not {fuel!r:.200}", limit="limits.run_fuel_max")


def check_text(what: str, text: str, chars_max: int, *, empty: bool = False) -> None:
    """Raises InputError unless it is text that can be stored, of at most so many characters."""
    if not isinstance(text, str) or len(text) > chars_max or not (text or empty):
        raise InputError(f"{what} is text of {0 if empty else 1} to {chars_max} characters, not {text!r:.200}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is no text that can be written as UTF-8: {error}") from None


def check_name(what: str, name: str) -> None:
    """Raises InputError unless ``name`` may name a tenant or an agent."""
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS_MAX or not name.isprintable():
        raise InputError(f"{what}: 1 to {_NAME_CHARS_MAX} printable characters, not {name!r:.200}")


def encode_json(what: str, value: Any, bytes_max: int | None = None) -> bytes:
    """Plain data as JSON. Raises InputError: what `encode_exact` refuses, more than ``bytes_max`` bytes (the setting
    limits.request_bytes_max)."""
    try:
        data = encode_exact(value)
    except UnfitError as error:
        raise InputError(f"{what} {error}") from None
    if bytes_max is not None and len(data) > bytes_max:
        raise InputError(f"{what} has {len(data)} bytes, more than {bytes_max}", limit="limits.request_bytes_max")
    return data


def check_json(what: str, data: bytes) -> None:
    """Raises InputError unless the bytes are JSON text."""
    try:
        if not data.isascii():
            data.decode()
        _decode_raw(data)
    except UNREADABLE as error:
        raise InputError(f"{what} is not JSON: {error}") from error
