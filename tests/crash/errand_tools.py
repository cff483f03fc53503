"""The errand's tools, one of each kind that has an effect, and the ledger in which the effects are.

The ledger is a file outside of the store: one JSON object a line, appended and synced before the tool answers. It
stands for a service that knows its callers' keys: a keyed effect that comes again is entered as a repetition.
"""

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any, Final

from agentrt import tool
from agentrt.tools import NOT_FOUND, Found

FOLDER: Final = "AGENTRT_TEST_ERRAND"
#: Effects that must happen once, by place; place 3 may be missing if an operator gave it up.
KINDS: Final = {1: "keyed", 2: "reconcilable", 3: "at_most_once", 4: "keyed", 5: "keyed", 6: "keyed"}


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """All entries, oldest first. A line that a killed process began and did not end is none."""
    try:
        text = (folder / "ledger").read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split(b"\n")[:-1] if line]


def give_up(folder: Path, order: str) -> None:
    """An operator says that the at_most_once effect of the order did not happen and will not."""
    with (folder / "given_up").open("a") as file:
        file.write(f"{order}\n")


def given_up(folder: Path) -> set[str]:
    """All orders of `give_up`."""
    file = folder / "given_up"
    return set(file.read_text().splitlines()) if file.exists() else set()


def crash_file(folder: Path) -> Path:
    """Says at which effect a process is killed, ``{"at": "effect.after:3", "pid": 0}``; pid 0 is the tool's own."""
    return folder / "crash"


def _pass(at: str) -> None:
    file = crash_file(Path(os.environ[FOLDER]))
    if file.exists():
        told = json.loads(file.read_text())
        if told["at"] == at:
            file.unlink()  # once
            os.kill(told["pid"] or os.getpid(), signal.SIGKILL)


def _enter(kind: str, key: str, order: str, place: int, attempt: int) -> None:
    folder = Path(os.environ[FOLDER])
    _pass(f"effect.before:{place}")
    fd = os.open(folder / "ledger", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        again = kind == "keyed" and any(entry["key"] == key for entry in read_ledger(folder))
        entry = {"kind": kind, "key": key, "order": order, "place": place, "attempt": attempt, "again": again}
        os.write(fd, b"\n" + json.dumps(entry).encode() + b"\n")  # it ends the line of who was killed in the middle
        os.fsync(fd)
    finally:
        os.close(fd)
    _pass(f"effect.after:{place}")


def _find(order: str, place: int, *, idempotency_key: str) -> Any:
    found = any(entry["key"] == idempotency_key for entry in read_ledger(Path(os.environ[FOLDER])))
    return Found(place) if found else NOT_FOUND


@tool(kind="keyed", timeout=30)
async def errand_keyed(order: str, place: int, *, idempotency_key: str, attempt: int) -> int:
    _enter("keyed", idempotency_key, order, place, attempt)
    return place


@tool(kind="reconcilable", timeout=30, reconcile=_find)
def errand_reconcilable(order: str, place: int, *, idempotency_key: str, attempt: int) -> int:
    _enter("reconcilable", idempotency_key, order, place, attempt)
    return place


@tool(kind="at_most_once", timeout=30)
def errand_at_most_once(order: str, place: int, *, idempotency_key: str, attempt: int) -> int:
    _enter("at_most_once", idempotency_key, order, place, attempt)
    return place


TOOLS: Final = (errand_keyed, errand_reconcilable, errand_at_most_once)
