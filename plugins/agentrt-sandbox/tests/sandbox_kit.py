"""A provider on a thread and loop of its own, with a core of its own; calls from the test's thread."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import msgspec
import uvloop
from agentrt_sandbox.provider import SandboxTools

from agentrt.config import Config, load_config
from agentrt.tools.outcome import ToolOutcome
from agentrt.tools.spec import ToolRegistry

MIB = 1 << 20
RUNTIMES = ("micropython", "cpython", "quickjs")
_WAIT_S = 1_500.0  # a hang; the first call of CPython waits for its image


def config_with(cache: Path, **settings: Any) -> Config:
    """With a core of two workers, and settings of the plugin."""
    config = load_config(env={}, arguments={"wasm.cache_path": str(cache), "wasm.guests_max": 64})
    return msgspec.structs.replace(config, plugins={"sandbox": settings})


class Sandbox:
    """``with Sandbox(cache, calls_max=1) as sandbox: sandbox.run("micropython", "1 + 1")``."""

    def __init__(self, cache: Path, **settings: Any) -> None:
        self._config = config_with(cache, **settings)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.registry = ToolRegistry()
        self.tools: SandboxTools = self.do(lambda: SandboxTools(self._config, self.registry, self._loop))
        self.do(self.tools.start)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self.tools.close(), self._loop).result(_WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    def do(self, what: Callable[[], Any]) -> Any:
        """Call it on the loop."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(what())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(_WAIT_S)

    def begin(
        self, tool: str, args: Any, *, tenant: str = "acme", tier: int = 1, **more: Any
    ) -> "tuple[Any, Future[ToolOutcome]]":
        """The call, and its outcome to come."""
        outcome: Future[ToolOutcome] = Future()
        data = args if isinstance(args, bytes) else msgspec.json.encode(args)

        def call() -> Any:
            return self.tools.call(
                tool, data, key="k", tenant=tenant, tier=tier, attempt=1, done=outcome.set_result, **more
            )

        return self.do(call), outcome

    def call(self, tool: str, args: Any, **more: Any) -> ToolOutcome:
        return self.begin(tool, args, **more)[1].result(_WAIT_S)

    def run(self, runtime: str, code: str, **args: Any) -> dict[str, Any]:
        """The result of code, which must be one."""
        tool = "js.exec" if runtime == "quickjs" else "python.exec"
        outcome = self.call(tool, {"code": code, "runtime": runtime, **args})
        assert outcome.ok, outcome
        found: dict[str, Any] = msgspec.json.decode(outcome.payload)
        return found
