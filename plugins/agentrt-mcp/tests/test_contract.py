"""The provider against agentrt's contract suite, with a server that is a program and one that is an address."""

import asyncio

import pytest
from agentrt_mcp.provider import McpTools
from mcp_kit import HttpServer, Place, config

from agentrt.testing.tools import Opener, ToolProviderContract
from agentrt.tools.spec import ToolRegistry


class TestStdioServer(ToolProviderContract):
    call = ("faulty.add", {"x": 1, "y": 2})
    failing = ("faulty.fail", {"why": "because"})

    @pytest.fixture
    def opener(self, place: Place) -> Opener:
        settings = config({"faulty": place.faulty(place.folder())})

        def make(registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> McpTools:
            return McpTools(settings, registry, loop)

        return make


class TestHttpServer(ToolProviderContract):
    call = ("faulty.add", {"x": 1, "y": 2})
    failing = ("faulty.add", {"x": 1, "y": "2"})

    @pytest.fixture
    def opener(self, http: HttpServer) -> Opener:
        settings = config({"faulty": {"url": http.url, "trust_hints": True}})

        def make(registry: ToolRegistry, loop: asyncio.AbstractEventLoop) -> McpTools:
            return McpTools(settings, registry, loop)

        return make
