"""The pytest plugin: what tests of agents, tools and plugins begin with. Installed with agentrt; nothing is imported
before a test asks for it.

    def test_it(agentrt_runtime):
        runtime = agentrt_runtime(qualifier, tools=[lookup])
        assert runtime.submit_sync("qualifier", {"company": "Hooli"}).wait_sync(30).value() == "fine"

Python agents are imported in a confined process: keep them in a module that imports no more than they need.

Run tests of agents with ``-p no:faulthandler``: the wasm engine and Python's fault handler cannot share signals.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from agentrt import Runtime
    from agentrt.config import Config
    from agentrt.testing.models import ModelServer


@pytest.fixture
def agentrt_config() -> "Callable[..., Config]":
    """``agentrt_config(store__path=…)``: settings for a test, ``__`` for the dot. A store in memory, nothing from the
    environment."""
    from agentrt.config import load_config

    def config(**settings: Any) -> "Config":
        given = {name.replace("__", "."): value for name, value in settings.items()}
        return load_config(env={}, arguments={"store.kind": "memory"} | given)

    return config


@pytest.fixture
def agentrt_runtime(agentrt_config: "Callable[..., Config]") -> "Iterator[Callable[..., Runtime]]":
    """``agentrt_runtime(*agents, tools=(), plugins=None, **settings)``: a started runtime, closed after the test.
    ``agents``: functions decorated with `@agent`, or (name, module). ``plugins``: name -> module or object, beside
    those that are installed."""
    from agentrt import Runtime
    from agentrt.plugins import Plugins

    made: list[Runtime] = []

    def start(*agents: Any, tools: Any = (), plugins: Mapping[str, object] | None = None, **settings: Any) -> Runtime:
        runtime = Runtime(config=agentrt_config(**settings), tools=tools, plugins=Plugins.load(plugins))
        made.append(runtime)
        runtime.start_sync()
        for agent in agents:
            runtime.register_sync(*(agent if isinstance(agent, tuple) else (agent,)))
        return runtime

    yield start
    for runtime in reversed(made):
        runtime.close_sync()


@pytest.fixture
def agentrt_models() -> "Iterator[ModelServer]":
    """A model server with faults by script; ``agentrt_models.config()`` are the settings that lead to it."""
    from agentrt.testing.models import ModelServer

    with ModelServer() as server:
        yield server
