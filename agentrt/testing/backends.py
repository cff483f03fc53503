"""The contract suite of backends: what the engine relies on (agentrt/backends/base.py) as tests.

class TestAcmeBackend(BackendContract):
    echo = b"…"       # an agent that returns its input
    asks = b"…"       # one that calls the tool ``add`` with {"n": 1}, then {"n": 2}, one after the other, and
                      # returns the list of both results

    @pytest.fixture
    def opener(self):
        return lambda: AcmeBackend(load_config(...))
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar, Final

import msgspec
import pytest
import uvloop

from agentrt.backends.base import Backend, Exit, Guest, Program, Request
from agentrt.errors import ModuleError
from agentrt.syscalls import BY_OP

Opener = Callable[[], Backend]
_WAIT_S: Final = 60.0
_CLOCK_NS: Final = 1_700_000_000 * 10**9


class Recorded:
    """The engine's side of one guest: keeps what it is told."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.requests: list[Request] = []
        self.waiting: list[tuple[int, ...]] = []
        self.ended: asyncio.Future[Exit] = self.loop.create_future()
        self.changed = asyncio.Event()
        self.guest: Guest

    def on_syscalls(self, requests: list[Request], waiting: tuple[int, ...] | None) -> None:
        self._check()
        self.requests += requests
        if waiting is not None:
            self.waiting.append(waiting)
        self.changed.set()

    def on_abandoned(self, handles: tuple[int, ...]) -> None:
        self._check()

    def on_unwinding(self) -> None:
        self._check()

    def on_safe_point(self) -> None:
        self._check()

    def may_snapshot(self) -> bool:
        return False

    def on_cut_short(self, reason: str, message: str, answers: int) -> bool:
        return False

    def on_exit(self, exit: Exit) -> None:
        self._check()
        self.ended.set_result(exit)
        self.changed.set()

    def _check(self) -> None:
        assert threading.get_ident() == self.thread, "an event on another thread than the control loop's"
        assert not self.ended.done(), "an event after the end"

    async def until(self, count: int) -> None:
        """So many syscalls were made, or the guest has ended."""
        async with asyncio.timeout(_WAIT_S):
            while len(self.requests) < count and not self.ended.done():
                self.changed.clear()
                await self.changed.wait()

    async def suspended(self, count: int) -> None:
        """The guest was reported as waiting so many times."""
        async with asyncio.timeout(_WAIT_S):
            while len(self.waiting) < count and not self.ended.done():
                self.changed.clear()
                await self.changed.wait()

    def answer(self, handle: int, value: Any, seq: int) -> None:
        self.guest.complete(handle, 0, msgspec.json.encode(value), _CLOCK_NS + seq, seq)

    async def exit(self) -> Exit:
        return await asyncio.wait_for(asyncio.shield(self.ended), _WAIT_S)


def begin(backend: Backend, program: Program, input: Any = None, *, replay: bool = False, **more: Any) -> Recorded:
    """Start a guest."""
    events = Recorded()
    settings: dict[str, Any] = {"tenant": "acme", "tier": 1, "fuel": 10**10, "seed": b"0123456789abcdef"} | more
    events.guest = backend.start(
        program,
        events,
        input=msgspec.json.encode(input),
        clock_ns=_CLOCK_NS,
        admitted=False,
        replay=replay,
        **settings,
    )
    return events


class BackendContract:
    """Subclass it, give it ``opener``, ``echo`` and ``asks``, and pytest runs it all."""

    echo: ClassVar[bytes]
    asks: ClassVar[bytes]

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError("the subclass says how its backend is made")

    @pytest.fixture
    def run(self, opener: Opener) -> Iterator[Callable[[Callable[[Backend], Awaitable[None]]], None]]:
        """``run(test)``: awaits the test with an open backend on a loop as the node's, and closes it."""

        def run(test: Callable[[Backend], Awaitable[None]]) -> None:
            async def main() -> None:
                backend = await asyncio.to_thread(opener)
                await backend.open()
                try:
                    await test(backend)
                finally:
                    await asyncio.wait_for(backend.close(), _WAIT_S)

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())

        yield run

    # --- programs ---

    def test_a_program_is_named_by_its_content(self, run: Any) -> None:
        async def test(backend: Backend) -> None:
            first, again, other = [await backend.prepare(code) for code in (self.echo, self.echo, self.asks)]
            assert first.version == again.version != other.version
            assert len(first.version) == 64 and set(first.version) <= set("0123456789abcdef")
            assert all(isinstance(part, str) for pin in first.pins.items() for part in pin)
            assert isinstance(first.unwinds, bool)

        run(test)

    def test_what_is_no_program_is_refused_and_harms_nothing(self, run: Any) -> None:
        async def test(backend: Backend) -> None:
            for code in (b"", b"\0" * 100, b"\xff" * 1000):
                with pytest.raises(ModuleError):
                    await backend.prepare(code)
            assert (await begin(backend, await backend.prepare(self.echo), 1).exit()).output == b"1"

        run(test)

    # --- guests ---

    def test_a_guest_returns_what_it_was_given(self, run: Any) -> None:
        async def test(backend: Backend) -> None:
            program = await backend.prepare(self.echo)
            guests = {n: begin(backend, program, {"n": n}, tenant=f"t{n % 3}", tier=n % 4) for n in range(20)}
            for n, events in guests.items():
                exit = await events.exit()
                assert exit.reason == "returned" and exit.output is not None
                assert msgspec.json.decode(exit.output) == {"n": n} and not events.requests

        run(test)

    def test_syscalls_are_numbered_in_program_order(self, run: Any) -> None:
        async def test(backend: Backend) -> None:
            events = begin(backend, await backend.prepare(self.asks))
            events.guest.go_live()
            for handle in (1, 2):
                await events.until(handle)
                request = events.requests[-1]
                assert (request.handle, request.op) == (handle, BY_OP["tool.call"].number)
                asked = msgspec.json.decode(request.payload)
                assert (asked["tool"], asked["args"]) == ("add", {"n": handle})
                events.answer(handle, handle * 10, seq=handle)
            exit = await events.exit()
            assert exit.reason == "returned" and msgspec.json.decode(exit.output or b"") == [10, 20]

        run(test)

    def test_a_replay_asks_for_the_same(self, run: Any) -> None:
        """The same program, input, seed and answers: the same syscalls, to the byte."""

        async def test(backend: Backend) -> None:
            program = await backend.prepare(self.asks)
            first = begin(backend, program)
            first.guest.go_live()
            await first.until(1)
            first.answer(1, 10, seq=1)
            await first.until(2)
            again = begin(backend, program, replay=True)
            await again.suspended(1)
            again.answer(1, 10, seq=1)
            await again.suspended(2)
            again.guest.go_live()
            await again.until(2)
            assert again.requests == first.requests
            for events in (first, again):
                events.answer(2, 20, seq=2)
            ends = [await events.exit() for events in (first, again)]
            assert ends[0].output == ends[1].output and {end.reason for end in ends} == {"returned"}

        run(test)

    def test_a_guest_that_is_killed_ends_once(self, run: Any) -> None:
        async def test(backend: Backend) -> None:
            program = await backend.prepare(self.asks)
            guests = [begin(backend, program) for _ in range(5)]
            for events in guests[:3]:
                events.guest.go_live()
                await events.until(1)
            for events in guests:  # some have made a syscall, some may not have begun
                events.guest.kill()
                events.guest.kill()
            for events in guests:
                assert (await events.exit()).reason == "killed"
            guests[0].answer(1, 10, seq=1)  # ignored
            assert (await begin(backend, await backend.prepare(self.echo), 1).exit()).output == b"1"

        run(test)

    def test_what_guests_have_used_never_shrinks(self, run: Any) -> None:
        async def test(backend: Backend) -> None:
            events = begin(backend, await backend.prepare(self.asks))
            events.guest.go_live()
            await events.until(1)
            before = events.guest.ran_ns
            assert 0 <= before <= events.guest.ran_ns
            events.answer(1, 10, seq=1)
            await events.until(2)
            assert events.guest.ran_ns >= before
            events.guest.kill()
            await events.exit()

        run(test)

    def test_statistics_are_plain_data(self, run: Any) -> None:
        async def test(backend: Backend) -> None:
            msgspec.json.encode(backend.statistics())
            assert backend.name

        run(test)
