"""A core with a small control plane for tests, and the guests of csrc/tests/make_guests.py."""

import functools
import importlib.util
import select
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wasmtime

from agentrt import _core
from agentrt.sizing import engine_library

LIBRARY = engine_library()
LIMITS: dict[str, int] = {
    "guests_max": 300,
    "stacks_max": 300,
    "memory_bytes_max": 4 << 20,
    "wasm_stack_bytes": 128 << 10,
    "table_elements_max": 1000,
    "request_bytes_max": 1 << 16,
    "result_bytes_max": 1 << 20,
    "inflight_max": 64,
}
SECOND_NS = 10**9
FUEL = 10**15
WATCHDOG_S = 60

_spec = importlib.util.spec_from_file_location(
    "make_guests", Path(__file__).resolve().parents[2] / "csrc" / "tests" / "make_guests.py"
)
assert _spec is not None and _spec.loader is not None
_make_guests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_make_guests)
GUESTS: dict[str, str] = _make_guests.GUESTS
COMMANDS: tuple[str, ...] = _make_guests.COMMANDS


def wasm(name: str) -> bytes:
    return bytes(wasmtime.wat2wasm(GUESTS[name]))


@functools.cache
def artifact(name: str) -> bytes:
    return _core.compile_module(LIBRARY, wasm(name), **LIMITS)


def script(*lines: tuple[Any, ...]) -> bytes:
    """Input of the guest ``script``: (command, up to five numbers) each."""
    return b"".join(
        struct.pack("<6i", 255 if what == "return" else COMMANDS.index(what), *args, *(0,) * (5 - len(args)))
        for what, *args in lines
    )


def results(output: bytes) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<q", output)]


def core_arguments(**over: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "engine_lib": LIBRARY,
        "workers": 2,
        "micro_slice_fuel": 50_000,
        "quantum_ns": (60 * SECOND_NS,) * 4,
        "queue_items_max": 100_000,
        "queue_bytes_max": 1 << 28,
        "aging_threshold": 0,
        "aging_wait_ns": (0, 0, 0, 0),
        "tier0_share_pct": 100,
        "tenants_max": 16,
        "base_tier_ops": 1 << 1,
        "nice": 0,
        "pin": False,
        **LIMITS,
    }
    return arguments | over


class Run:
    """What the test knows of a guest. ``answer`` turns a request into (status, payload), or None to keep it."""

    def __init__(self, answer: "Callable[[int, int, bytes], tuple[int, bytes] | None] | None") -> None:
        self.answer = answer
        self.guest: Any = None
        self.requests: list[tuple[int, int, bytes]] = []
        self.waits: list[tuple[int, ...]] = []
        self.fuel_stops = 0
        self.exits: list[tuple[Any, ...]] = []
        self.seq = 0

    def reply(self, handle: int, payload: bytes = b"", status: int = 0) -> None:
        self.seq += 1
        self.guest.complete(handle, status, payload, self.seq, self.seq)

    @property
    def exit(self) -> tuple[Any, ...] | None:
        return self.exits[0] if self.exits else None


class Slot:
    """What the test knows of a foreign task."""

    def __init__(self) -> None:
        self.foreign: Any = None
        self.events: list[tuple[str, int, int]] = []

    @property
    def state(self) -> str:
        return self.events[-1][0] if self.events else "queued"


class Control:
    def __init__(self, **over: Any) -> None:
        self.core = _core.Core(**core_arguments(**over))
        self.modules: dict[str, Any] = {}

    def module(self, name: str) -> Any:
        if name not in self.modules:
            self.modules[name] = self.core.load(artifact(name))
        return self.modules[name]

    def submit(
        self,
        name: str,
        data: bytes = b"",
        *,
        tier: int = 1,
        answer: "Callable[[int, int, bytes], tuple[int, bytes] | None] | None" = None,
        **over: Any,
    ) -> Run:
        run = Run(answer)
        arguments: dict[str, Any] = {
            "tenant": 0,
            "restored": None,
            "fuel": FUEL,
            "seed": bytes(16),
            "clock_ns": 0,
            "admitted": False,
            "replay": False,
        }
        run.guest = self.core.submit(self.module(name), run, tier=tier, input=data, **(arguments | over))
        return run

    def foreign(self, pidfd: int = -1, tier: int = 2) -> Slot:
        slot = Slot()
        slot.foreign = self.core.submit_foreign(slot, pidfd, tenant=0, tier=tier)
        return slot

    def take(self) -> int:
        """Takes and records the events there are; answers what is to be answered."""
        events = self.core.drain()
        for owner, kind, requests, detail in events:
            if isinstance(owner, Slot):
                owner.events.append((kind, *detail))
                continue
            owner.requests += requests
            assert not owner.exits, "an event after the exit"
            if kind == "exit":
                owner.exits.append(detail)
            elif kind == "fuel":
                owner.fuel_stops += 1
            elif detail is not None:
                owner.waits.append(detail)
            if owner.answer is not None:
                for handle, op, payload in requests:
                    answered = owner.answer(handle, op, payload) if handle else None
                    if answered is not None:
                        owner.reply(handle, answered[1], answered[0])
        return len(events)

    def until(self, condition: Callable[[], bool], *, events: bool = True) -> None:
        """Takes events until the condition holds. Without ``events`` it may come true silently."""
        end = time.monotonic() + WATCHDOG_S
        while not condition():
            if self.take():
                continue
            ready, _, _ = select.select([self.core.fd], [], [], WATCHDOG_S if events else 0.001)
            assert ready or (not events and time.monotonic() < end), "nothing happens any more"

    def audit(self) -> None:
        """After everything ended: nothing is live, queued or admitted (S32)."""
        self.until(lambda: self.core.statistics()["live"] == 0, events=False)
        statistics = self.core.statistics()
        assert statistics["admitted"] == statistics["admitted_bytes"] == 0
        assert statistics["queued"] == [0, 0, 0, 0]
        assert self.core.drain() == []


@contextmanager
def control(**over: Any) -> Iterator[Control]:
    made = Control(**over)
    try:
        yield made
    finally:
        made.core.close()
