"""What is left to a run: the answer to ``ctx.capacity()``, from plain snapshots. Pure."""

from collections.abc import Iterable
from typing import Final

import msgspec

from agentrt.flow.amounts import NO_LIMIT


class Headroom(msgspec.Struct, frozen=True):
    """Room under one rate or concurrency limit that the run's calls go through, and when there is more."""

    scope: str
    name: str
    limit: str
    left: int
    until_ns: int = 0


class Room(msgspec.Struct, frozen=True):
    """What bounds the children of a run, in numbers; NO_LIMIT where nothing does."""

    depth: int = 0  # of the run; 0: nobody has started it
    depth_max: int = NO_LIMIT
    children: int = 0  # that it has started
    children_max: int = NO_LIMIT
    queued: int = 0  # of its ensemble, accepted and not begun
    queued_max: int = NO_LIMIT


class StepEstimate(msgspec.Struct, frozen=True):
    """What a step of that kind (``tool:name``, ``model:profile``), or a ``child`` by itself, has cost in ``count``
    cases: means, and ``_upper`` what few pass."""

    what: str
    count: int
    tokens: int
    tokens_upper: int
    microdollars: int
    microdollars_upper: int
    wall_ms: int
    wall_ms_upper: int


class Capacity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is left to a run. A value of None: nothing bounds it. ``rates``: limits on its calls, and the room that they
    have left. ``estimates``: what the steps and children of its agent have cost so far. ``fan_out``: how many children
    it makes sense to start now; ``limited_by`` names what makes that so few."""

    at_ns: int
    fan_out: int
    limited_by: str
    model_calls: int | None = None
    tool_calls: int | None = None
    tokens: int | None = None
    microdollars: int | None = None
    fuel: int | None = None
    retries: int | None = None
    context_tokens: int | None = None
    wall_s: float | None = None
    depth_left: int | None = None
    children_left: int | None = None
    queue_left: int | None = None
    result_bytes: int | None = None
    rates: tuple[Headroom, ...] = ()
    depth: int = 0
    queued: int = 0
    estimates: tuple[StepEstimate, ...] = ()


#: Suggested where nothing bounds the children of a run: picked by feel.
FAN_OUT_DEFAULT: Final = 16


def capacity(
    at_ns: int,
    left: dict[str, int],
    bounds: dict[str, int],
    room: Room,
    *,
    deadline_ns: int = 0,
    rates: Iterable[Headroom] = (),
    per_child: dict[str, int] | None = None,
    estimates: Iterable[StepEstimate] = (),
) -> Capacity:
    """``left``: what may still be reserved of the counted keys, NO_LIMIT where nothing bounds it. ``per_child``: what a
    child uses by experience, of the same keys; a child is taken to use at least one call of those that are bounded."""
    rates = tuple(rates)
    depth_left = _less(room.depth_max, room.depth)
    children_left = _less(room.children_max, room.children)
    queue_left = _less(room.queued_max, room.queued)
    found = [(children_left, "fan_out"), (queue_left, "queue"), (NO_LIMIT if depth_left else 0, "depth")]
    need = {"model_calls": 1, "tool_calls": 1} | {key: value for key, value in (per_child or {}).items() if value > 0}
    # A child may need no model or tool at all; none left of one of them suggests one child at most, not none.
    for key, value in need.items():
        amount = left.get(key, NO_LIMIT)
        if amount != NO_LIMIT:
            found.append((max(1, amount // value) if amount else int(key not in ("tokens", "microdollars")), key))
    found += [(max(1, rate.left), f"{rate.scope}:{rate.name} {rate.limit}") for rate in rates]
    wall_s = None
    if deadline_ns:
        wall_s = max(0, deadline_ns - at_ns) / 1e9
        if deadline_ns <= at_ns:
            found.append((0, "wall_s"))
    fan_out, limited_by = min(found)
    if fan_out >= FAN_OUT_DEFAULT:
        fan_out, limited_by = FAN_OUT_DEFAULT, "default"
    return Capacity(
        at_ns=at_ns,
        fan_out=fan_out,
        limited_by=limited_by,
        **{key: _known(left.get(key, NO_LIMIT)) for key in _COUNTED},
        context_tokens=bounds.get("context_tokens"),
        wall_s=wall_s,
        depth_left=_known(depth_left),
        children_left=_known(children_left),
        queue_left=_known(queue_left),
        result_bytes=bounds.get("result_bytes"),
        rates=rates,
        depth=room.depth,
        queued=room.queued,
        estimates=tuple(estimates),
    )


_COUNTED: Final = ("model_calls", "tool_calls", "tokens", "microdollars", "fuel", "retries")


def _less(limit: int, used: int) -> int:
    return limit if limit == NO_LIMIT else max(0, limit - used)


def _known(value: int) -> int | None:
    return None if value == NO_LIMIT else value
