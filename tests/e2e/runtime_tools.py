"""Tools of the runtime's tests: a ledger in a file, one line per execution, so that a test sees what was done twice."""

import asyncio
import os
import time
from pathlib import Path

from agentrt import tool


def entries(ledger: Path) -> list[list[str]]:
    """For the tests: the ledger's lines, as words."""
    return [line.split() for line in ledger.read_text().splitlines()]


def _wait_at_gate(place: int) -> None:
    """A place beyond the one in the file named by LEDGER_GATE is not entered before the file says so."""
    gate = os.environ.get("LEDGER_GATE")
    while gate and place > int(Path(gate).read_text()):
        time.sleep(0.005)


@tool(kind="keyed", timeout=20)
def ledger_add(order: str, place: int, *, idempotency_key: str, attempt: int) -> dict[str, bool]:
    """Append to the file named by LEDGER; O_APPEND makes a line one write."""
    time.sleep(float(os.environ.get("LEDGER_SLOW_S", "0")) * (place * 7 % 16))
    _wait_at_gate(place)
    line = f"{idempotency_key} {order} {place} {attempt}\n"
    file = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
    return {"new": True}


@tool(kind="keyed", timeout=20, name="slow_add")
async def slow_add(order: str, place: int, *, idempotency_key: str, attempt: int) -> dict[str, bool]:
    await asyncio.sleep(0.05)
    return ledger_add(order, place, idempotency_key=idempotency_key, attempt=attempt)


@tool(kind="pure", timeout=20)
async def double(x: int) -> int:
    return 2 * x


@tool(kind="pure", timeout=20)
def block() -> None:
    """Keeps its thread, and the interpreter of its host, for a while."""
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        sum(range(1000))
