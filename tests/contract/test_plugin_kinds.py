"""What comes with agentrt against the contract suites of the kinds of plugins; stores have a module of their own."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrt.backends import wasi
from agentrt.backends.python.backend import PythonBackend
from agentrt.backends.python.limits import PythonLimits
from agentrt.backends.slots import FreeSlots
from agentrt.backends.wasm import WasmBackend
from agentrt.config import load_config
from agentrt.engine.ports import Tools
from agentrt.errors import ClosedError
from agentrt.models.openai import OpenAiProvider
from agentrt.models.provider import ModelProvider, Secrets
from agentrt.models.settings import ProviderConfig
from agentrt.notifiers.port import Notification, Notifier, Observer
from agentrt.policy import ALLOW, Decision, Defer, Deny, Policy
from agentrt.states import RunState
from agentrt.testing import backends, model_providers, tools
from agentrt.testing.backends import BackendContract
from agentrt.testing.model_providers import ModelProviderContract
from agentrt.testing.models import ModelServer, Reply
from agentrt.testing.notifiers import NotifierContract
from agentrt.testing.observers import ObserverContract
from agentrt.testing.policies import PolicyContract
from agentrt.testing.tools import ToolProviderContract
from agentrt.tools import ToolLimits, ToolPool, tool
from agentrt.tools.outcome import EVICTED_WAITING, Done, ToolOutcome
from agentrt.tools.router import ToolRouter
from agentrt.tools.spec import ToolRegistry, ToolSpec

HERE = Path(__file__)

AGENTS = """
from agentrt.agents import agent


@agent
async def echo(ctx, input):
    return input


@agent
async def asks(ctx, input):
    return [await ctx.tool("add", n=1), await ctx.tool("add", n=2)]
"""
ECHO_SCRIPT = b"import sys\nprint(sys.stdin.read())\n"
ASKS_SCRIPT = b"""
import json, host

def add(n):
    return json.loads(host.call("tool.call", json.dumps({"tool": "add", "args": {"n": n}})))["value"]

print(json.dumps([add(1), add(2)]))
"""


def packed(script: bytes) -> bytes:
    return wasi.pack(wasi.micropython().read_bytes(), args=["micropython", "/agent.py"], files={"/agent.py": script})


class TestWasmBackend(BackendContract):
    echo = packed(ECHO_SCRIPT)
    asks = packed(ASKS_SCRIPT)

    @pytest.fixture
    def opener(self, tmp_path_factory: pytest.TempPathFactory) -> backends.Opener:
        cache = tmp_path_factory.getbasetemp() / "kinds-cache"  # one for all: a module is compiled once
        return lambda: WasmBackend(load_config(arguments={"scheduler.workers": 2, "wasm.cache_path": str(cache)}))


class TestPythonBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def agents(self, tmp_path: Path) -> None:
        file = tmp_path / "agents.py"
        file.write_text(AGENTS)
        type(self).echo, type(self).asks = f"{file}:echo".encode(), f"{file}:asks".encode()

    @pytest.fixture
    def opener(self) -> backends.Opener:
        class Late(PythonBackend):
            """Its slots belong to the loop, which is there when it is opened."""

            def __init__(self) -> None:
                pass

            async def open(self) -> None:
                super().__init__(PythonLimits(), FreeSlots(asyncio.get_running_loop()))
                await super().open()

        return Late


@tool(kind="keyed")
def double(x: int) -> int:
    """For the pool's test."""
    return 2 * x


class TestToolPool(ToolProviderContract):
    call = ("double", {"x": 1})
    failing = ("double", {"x": "1"})

    @pytest.fixture
    def opener(self) -> tools.Opener:
        def open_pool(registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> Tools:
            spec = registry.add(ToolSpec("double", "keyed", 30 * 10**9, False, f"{HERE}:double"))
            assert registry.get("double") is spec
            return ToolPool(registry, loop, ToolLimits(hosts_max=2))

        return open_pool


class Inside:
    """Tools that are answered in this process, as another provider's."""

    def __init__(self, registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> None:
        self.registry = registry
        self._loop = loop
        self._closed = self._stopped = False
        registry.add(ToolSpec("inside.double", "pure", 10**9, False, "", provider="inside"))

    def call(self, name: str, args: bytes, *, done: Done, **more: Any) -> object:
        self.registry.get(name)
        if self._closed:
            raise ClosedError("the tools are closed")
        asked = msgspec.json.decode(args)
        x = asked.get("x") if isinstance(asked, dict) else None
        outcome = ToolOutcome(True, b"%d" % (2 * x), None, 0, False) if type(x) is int else _FAILED
        if self._stopped:
            outcome = EVICTED_WAITING
        self._loop.call_soon(self._tell, done, outcome)
        return None

    def _tell(self, done: Done, outcome: ToolOutcome) -> None:
        if not self._closed:
            done(outcome)

    def start(self) -> None:
        pass

    def statistics(self) -> Any:
        return {}

    def cancel(self, call: Any) -> None:
        """It is answered in the next turn anyway."""

    def stop(self) -> None:
        self._stopped = True

    def evict(self) -> None:
        """What was begun is answered in the next turn anyway."""

    async def close(self) -> None:
        self._closed = True


_FAILED = ToolOutcome(False, b'{"code": "tool_args", "message": "x is a number"}', "tool_args", 0, False)


class TestRoutedTools(ToolProviderContract):
    """The tools of another provider beside the built-in one, whose hosts are not told of them."""

    call = ("inside.double", {"x": 1})
    failing = ("inside.double", {"x": "1"})

    @pytest.fixture
    def opener(self) -> tools.Opener:
        def open_router(registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> Tools:
            inside = Inside(registry, loop)
            registry.add(ToolSpec("double", "keyed", 30 * 10**9, False, f"{HERE}:double"))
            return ToolRouter(registry, ToolPool(registry, loop, ToolLimits(hosts_max=2)), {"inside": inside})

        return open_router

    def test_both_are_called_and_hosts_import_their_own_only(self, run: Any) -> None:
        async def test(bench: tools.Bench) -> None:
            assert [number for number, _ in bench.registry.importable_from(0)] == [1]
            outcomes = [await bench.call(name, {"x": 4}) for name in ("inside.double", "double", "inside.double")]
            assert [outcome.payload for outcome in outcomes] == [b"8"] * 3

        run(test)


def test_a_router_hands_on_what_a_provider_may_have_beside_the_protocol() -> None:
    """Whoever has neither is left alone."""

    class More:
        def __init__(self, told: list[str]) -> None:
            self.told = told

        async def open(self) -> None:
            self.told.append("open")

        def urgent(self, wanted: Callable[[], bool]) -> None:
            self.told.append(f"urgent {wanted()}")

    told: list[str] = []
    others: Any = {"more": More(told), "most": More(told), "neither": object()}
    builtin: Any = More(told)
    router = ToolRouter(ToolRegistry(), builtin, others)
    asyncio.run(router.open())
    router.urgent(lambda: True)
    assert told == ["open"] * 3 + ["urgent True"] * 3


class TestOpenAiProvider(ModelProviderContract):
    @pytest.fixture
    def server(self) -> Iterator[ModelServer]:
        with ModelServer() as server:
            yield server

    @pytest.fixture
    def opener(self, server: ModelServer) -> model_providers.Opener:
        def make(secrets: Secrets) -> ModelProvider:
            return OpenAiProvider("yours", ProviderConfig(base_url=server.url), secrets)

        return make

    @pytest.fixture
    def break_down(self, server: ModelServer) -> Callable[[], None]:
        def break_down() -> None:
            server.answer = lambda body: Reply(status=500)

        return break_down

    @pytest.fixture
    def stall(self, server: ModelServer) -> Callable[[], None]:
        def stall() -> None:
            server.answer = lambda body: Reply(delay=3600)

        return stall


class Quiet:
    """A policy of one rule."""

    version = "1"

    def decide(self, kind: str, facts: Mapping[str, Any]) -> Decision:
        if kind == "run.accept" and facts["tier"] == 0:
            return Deny("nothing is that urgent") if facts.get("parent") else Defer("ask again")
        return ALLOW


class TestPolicy(PolicyContract):
    @pytest.fixture
    def policy(self) -> Policy:
        return Quiet()


class Pager:
    def __init__(self, pages: deque[str]) -> None:
        self._pages = pages

    async def notify(self, notification: Notification) -> None:
        await asyncio.sleep(0)
        self._pages.append(notification.run_id)

    async def close(self) -> None:
        pass


class TestNotifier(NotifierContract):
    @pytest.fixture
    def pages(self) -> deque[str]:
        return deque()

    @pytest.fixture
    def opener(self, pages: deque[str]) -> Callable[[], Notifier]:
        return lambda: Pager(pages)

    @pytest.fixture
    def told(self, pages: deque[str]) -> Callable[[], list[str]]:
        return lambda: list(pages)


class TestObserver(ObserverContract):
    """Counts by event, and tenants of what has ended."""

    @pytest.fixture
    def opener(self) -> Callable[[], Observer]:
        counts: Counter[str] = Counter()

        def observer(event: str, data: Any) -> None:
            counts[event] += 1
            if event == "ended":
                counts[data.tenant] += 1

        return lambda: observer


@pytest.mark.parametrize(
    ("wrong", "broken"),
    [
        (lambda event, data: {"accepted": 1, "parked": 2, "emitted": 3, "ended": 4}[event], "it_takes_all"),
        (lambda event, data: None if event != "moved" else data.run_id, "later_releases"),
        (lambda event, data: data.value() and None if event == "ended" else None, "it_takes_all"),
    ],
)
def test_the_suite_finds_observers_that_a_node_would_disable(wrong: Observer, broken: str) -> None:
    suite = ObserverContract()
    checks = {
        "it_takes_all": lambda: suite.test_it_takes_all_that_happens_to_a_run(lambda: wrong, RunState.FAILED),
        "later_releases": lambda: suite.test_what_later_releases_may_tell_is_no_harm(lambda: wrong),
    }
    with pytest.raises(Exception):  # noqa: B017 (whatever it is)
        checks[broken]()
