"""The syscall table: what an agent can ask of the runtime. One row per op; everything else is generated from it or
checked against it (the guest header, docs, the engine's handlers).

Numbers are fixed for good. ``replay`` says where a replayed guest's answer comes from: ``recorded`` (from the journal),
``again`` (executed again, digest compared), ``computed`` (a function of the journal position), ``silent`` (nothing
happens). ``cancel`` says what a cancel does to one in flight: ``finish`` (its outcome is still recorded), ``wake`` (the
wait ends) or ``none``.
"""

from typing import Final

import msgspec


class Syscall(msgspec.Struct, frozen=True):
    number: int
    op: str
    ctx: str  # name in Python's ctx
    request: str  # shape of the request, JSON
    response: str  # shape of the answer, JSON
    step: bool  # outcome remembered
    prepare: bool  # needs phase one
    waits: bool  # may park the run
    replay: str
    cancel: str
    served: bool  # this release answers it


def _row(number: int, op: str, ctx: str, request: str, response: str, flags: str, replay: str, cancel: str) -> Syscall:
    return Syscall(
        number, op, ctx, request, response, "s" in flags, "p" in flags, "w" in flags, replay, cancel, "+" in flags
    )


# flags: s step, p phase one, w waits, + served by this release
TABLE: Final = (
    _row(1, "tool.call", "ctx.tool", '{"tool": str, "args": object}', "its result", "spw+", "recorded", "finish"),
    _row(
        2,
        "model.generate",
        "ctx.model",
        '{"profile": str, "messages": array, "tools": array or null, "tool_choice": str or null,'
        ' "schema": object or null, "task": str, "output_tokens_max": int or null, "temperature": number or null,'
        ' "stop": array or null, "context": str or null, "stream": bool, "needs": object}',
        '{"text": str or null, "finish": str, "model": str, "usage": object, "cost_micro_usd": int,'
        ' "tool_calls": array, "data": any}',
        "spw+",
        "recorded",
        "finish",
    ),
    _row(3, "timer.sleep", "asyncio.sleep", '{"seconds": number}', "null", "spw+", "recorded", "wake"),
    _row(
        4,
        "event.wait",
        "ctx.event",
        '{"topic": str or null, "key": str, "timeout_s": number or null}',
        '{"id": str, "data": any}',
        "spw+",
        "recorded",
        "wake",
    ),
    _row(
        5,
        "approval.request",
        "ctx.approval",
        '{"question": str, "data": any, "timeout_s": number or null}',
        '{"approved": bool, "by": str or null, "comment": str or null}',
        "spw+",
        "recorded",
        "wake",
    ),
    _row(
        6,
        "run.spawn",
        "ctx.spawn",
        '{"agent": str, "input": any, "tier": int or str or null, "detached": bool, "max_result_bytes": int or null,'
        ' "budget": object or null, "when_full": "block" or "refuse"}',
        '{"run_id": str}',
        "sp+",
        "recorded",
        "finish",
    ),
    _row(7, "run.join", "run.result", '{"run_id": str}', "the child's result", "spw+", "recorded", "wake"),
    _row(
        8,
        "lock.acquire",
        "ctx.lock",
        '{"name": str, "timeout_s": number or null}',
        '{"token": int, "dirty": bool}',
        "spw+",
        "recorded",
        "wake",
    ),
    _row(9, "lock.release", "lock.release", '{"name": str, "token": int}', "null", "sp+", "recorded", "finish"),
    _row(
        10,
        "event.send",
        "ctx.send",
        '{"run_id": str or null, "topic": str or null, "key": str, "data": any, "id": str or null}',
        '{"id": str}',
        "sp+",
        "recorded",
        "finish",
    ),
    _row(11, "checkpoint", "ctx.checkpoint", '{"state": any}', "none: the guest starts again", "s+", "silent", "none"),
    _row(12, "emit", "ctx.emit", '{"data": any}', "null", "s+", "recorded", "finish"),
    _row(13, "log", "ctx.log", '{"level": str, "message": str}', "null", "+", "silent", "none"),
    _row(14, "capacity.get", "ctx.capacity", "{}", "object", "s+", "recorded", "finish"),
    _row(15, "clock.now", "time.time", "{}", "int (Unix ns)", "+", "computed", "none"),
    _row(16, "random.bytes", "random.randbytes", '{"count": int}', "bytes", "+", "computed", "none"),
    _row(
        17,
        "lock.foreign",
        "ctx.foreign_lock",
        '{"name": str, "owner": str or null}',
        '{"name": str, "owner": str, "held": bool}',
        "s+",
        "recorded",
        "finish",
    ),
)

BY_NUMBER: Final = {row.number: row for row in TABLE}
BY_OP: Final = {row.op: row for row in TABLE}

assert len(BY_NUMBER) == len(BY_OP) == len(TABLE)
