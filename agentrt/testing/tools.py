"""The contract suite of tool providers: what the engine relies on (`agentrt.engine.ports.Tools`) as tests.

class TestAcmeTools(ToolProviderContract):
    call = ("acme.lookup", {"company": "Hooli"})     # ends well
    failing = ("acme.lookup", {"company": 3})        # does not

    @pytest.fixture
    def opener(self):
        return lambda registry, loop: open_tools(load_config(...), registry, loop)
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar, Final

import msgspec
import pytest
import uvloop

from agentrt.engine.ports import Tools
from agentrt.errors import AgentrtError, ClosedError, UnknownToolError
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolRegistry

Opener = Callable[[ToolRegistry, asyncio.AbstractEventLoop], Tools]
_WAIT_S: Final = 60.0


class Bench:
    """A started provider on a running loop."""

    def __init__(self, tools: Tools, registry: ToolRegistry) -> None:
        self.tools, self.registry = tools, registry
        self.loop = asyncio.get_running_loop()
        self.last: Any = None  # what the last call returned

    def begin(self, name: str, args: Any, *, key: str = "key", **more: Any) -> "asyncio.Future[ToolOutcome]":
        """Call it; checks that the outcome comes later, once, and on the loop."""
        future: asyncio.Future[ToolOutcome] = self.loop.create_future()
        thread, inside = threading.get_ident(), True

        def done(outcome: ToolOutcome) -> None:
            assert not inside, "an outcome from inside the call"
            assert threading.get_ident() == thread, "an outcome on another thread"
            assert not future.done(), "a second outcome"
            future.set_result(outcome)

        data = msgspec.json.encode(args)
        self.last = self.tools.call(name, data, key=key, tenant="acme", tier=1, attempt=1, done=done, **more)
        inside = False
        return future

    async def call(self, name: str, args: Any, **more: Any) -> ToolOutcome:
        return await asyncio.wait_for(self.begin(name, args, **more), _WAIT_S)


class ToolProviderContract:
    """Subclass it, give it ``opener``, ``call`` and ``failing``, and pytest runs it all."""

    #: (tool, arguments): one call that ends well, one whose tool says no. They may be made any number of times.
    call: ClassVar[tuple[str, Any]]
    failing: ClassVar[tuple[str, Any]]

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError("the subclass says how its tools are opened")

    @pytest.fixture
    def run(self, opener: Opener) -> Iterator[Callable[[Callable[[Bench], Awaitable[None]]], None]]:
        """``run(test)``: awaits the test with a bench on a loop as the node's, and closes the provider."""

        def run(test: Callable[[Bench], Awaitable[None]]) -> None:
            async def main() -> None:
                registry = ToolRegistry()
                bench = Bench(opener(registry, asyncio.get_running_loop()), registry)
                try:
                    if (opened := getattr(bench.tools, "open", None)) is not None:
                        await asyncio.wait_for(opened(), _WAIT_S)
                    bench.tools.start()
                    await test(bench)
                finally:
                    await asyncio.wait_for(bench.tools.close(), _WAIT_S)

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())

        yield run

    def test_its_tools_are_registered(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            for name, _ in (self.call, self.failing):
                spec = bench.registry.get(name)
                assert spec.kind in ("pure", "keyed", "reconcilable", "at_most_once")
                assert spec.timeout_ns > 0

        run(test)

    def test_a_call_that_ends_well(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            outcome = await bench.call(*self.call)
            assert outcome.ok and outcome.code is None and not outcome.unknown and not outcome.host_died
            msgspec.json.decode(outcome.payload)
            assert outcome.cost_ns >= 0

        run(test)

    def test_a_call_that_fails_says_why(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            outcome = await bench.call(*self.failing)
            error = msgspec.json.decode(outcome.payload)
            assert not outcome.ok and outcome.code
            assert error["code"] == outcome.code and isinstance(error["message"], str)

        run(test)

    def test_many_at_once_each_get_one_outcome(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            begun = [bench.begin(*(self.failing if n % 5 == 4 else self.call), key=f"k{n}") for n in range(50)]
            outcomes = await asyncio.wait_for(asyncio.gather(*begun), _WAIT_S)
            assert [outcome.ok for outcome in outcomes] == [n % 5 != 4 for n in range(50)]

        run(test)

    def test_what_it_does_not_have_it_refuses(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            with pytest.raises(UnknownToolError):
                bench.begin("there.is.no.such.tool", {})

        run(test)

    def test_arguments_that_are_no_object_are_refused_or_fail(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            wrong: list[Any] = [[], "text", None, {"of_a_later_release": 1}]
            for args in wrong:
                try:
                    outcome = await bench.call(self.call[0], args)
                except AgentrtError:
                    continue
                assert outcome.ok is (outcome.code is None)

        run(test)

    def test_statistics_may_be_asked_at_any_time(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            bench.tools.statistics()
            begun = bench.begin(*self.call)
            bench.tools.statistics()
            await asyncio.wait_for(begun, _WAIT_S)

        run(test)

    def test_what_nobody_wants_any_more_still_has_one_outcome(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            begun = []
            for n in range(10):
                begun.append(bench.begin(*self.call, key=f"k{n}"))
                if n % 2:
                    bench.tools.cancel(bench.last)
                    bench.tools.cancel(bench.last)
            outcomes = await asyncio.wait_for(asyncio.gather(*begun), _WAIT_S)
            assert all(outcome.ok for outcome in outcomes[::2])
            bench.tools.cancel(bench.last)  # it has ended

        run(test)

    def test_when_the_node_stops_what_is_under_way_ends(self, run: Any) -> None:
        """After `stop` nothing begins; after `evict` every call has its outcome, evicted or not."""

        async def test(bench: Bench) -> None:
            begun = [bench.begin(*self.call, key=f"k{n}") for n in range(5)]
            bench.tools.stop()
            begun.append(bench.begin(*self.call, key="late"))
            bench.tools.evict()
            outcomes = await asyncio.wait_for(asyncio.gather(*begun), _WAIT_S)
            assert outcomes[-1].evicted and not outcomes[-1].ok and not outcomes[-1].unknown

        run(test)

    def test_after_closing_nothing_is_taken_and_nothing_comes(self, run: Any) -> None:
        async def test(bench: Bench) -> None:
            begun = [bench.begin(*self.call, key=f"k{n}") for n in range(5)]
            await asyncio.wait_for(bench.tools.close(), _WAIT_S)
            before = [future.done() for future in begun]
            with pytest.raises(ClosedError):
                bench.begin(*self.call)
            await asyncio.sleep(0.1)
            assert [future.done() for future in begun] == before

        run(test)
