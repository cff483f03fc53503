"""One agent's program in this process, without a host: a scripted engine gives its answers."""

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from agentrt.agents.declare import Entry
from agentrt.agents.loop import close_generator
from agentrt.agents.protocol import Answer, Ask, HostLimits, Start
from agentrt.agents.run import AgentRun
from agentrt.syscalls import BY_NUMBER

sys.set_asyncgen_hooks(finalizer=close_generator)  # as in hosts; asyncio puts its own in place while it runs

CLOCK_NS = 1_700_000_000 * 10**9


class Local:
    """A program that is a function of the test."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._entry = Entry(function)

    def entry(self, run: AgentRun) -> Entry:
        return self._entry


class Driver:
    """A run and what it has asked for so far."""

    def __init__(
        self,
        function: Callable[..., Any],
        input: Any = None,
        *,
        restored: Any = None,
        seed: bytes = b"0123456789abcdef",
        limits: HostLimits | None = None,
        clock_ns: int = CLOCK_NS,
    ) -> None:
        state = None if restored is None else msgspec.json.encode(restored)
        start = Start(1, "entry", "run_1", "acme", msgspec.json.encode(input), state, seed, clock_ns, [])
        self.run = AgentRun(Local(function), start, limits or HostLimits())
        self.clock_ns = clock_ns
        self.asked: list[Ask] = []
        self.logs: list[Any] = []
        self.abandoned: list[int] = []
        self.answers: list[Answer] = []

    def start(self) -> "Driver":
        self.run.start()
        self._take()
        return self

    def answer(self, handle: int, value: Any = None, *, failed: bool = False, after_ns: int = 10**6) -> "Driver":
        self.clock_ns += after_ns
        return self.give(Answer(handle, int(failed), msgspec.json.encode(value), self.clock_ns))

    def fail(self, handle: int, code: str, **details: Any) -> "Driver":
        return self.answer(handle, {"code": code, "message": "no", **details}, failed=True)

    def give(self, answer: Answer) -> "Driver":
        self.answers.append(answer)
        self.run.complete(answer)
        self._take()
        return self

    def unwind(self, reason: str = "cancelled") -> "Driver":
        self.run.unwind(reason)
        self._take()
        return self

    def _take(self) -> None:
        for ask in self.run.requests:
            if ask.handle:
                assert ask.handle == len(self.asked) + 1  # 1, 2, 3, …
                self.asked.append(ask)
            else:
                self.logs.append(msgspec.json.decode(ask.payload))
        self.abandoned += self.run.abandoned
        self.run.requests.clear()
        self.run.abandoned.clear()

    @property
    def waiting(self) -> tuple[int, ...]:
        return self.run.waiting

    def requests(self) -> list[tuple[str, Any]]:
        return [(BY_NUMBER[ask.op].op, msgspec.json.decode(ask.payload)) for ask in self.asked]

    def result(self) -> Any:
        assert self.run.exit is not None, self.requests()
        assert self.run.exit.reason == "returned", self.run.exit
        assert self.run.exit.output is not None
        return msgspec.json.decode(self.run.exit.output)

    def failure(self) -> Any:
        assert self.run.exit is not None
        assert self.run.exit.reason == "failed", self.run.exit
        assert self.run.exit.output is not None
        return msgspec.json.decode(self.run.exit.output)
