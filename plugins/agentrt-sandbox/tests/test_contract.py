"""The provider against agentrt's contract suite."""

from pathlib import Path

import pytest
from agentrt_sandbox.provider import SandboxTools
from sandbox_kit import config_with

from agentrt.testing.tools import Opener, ToolProviderContract


class TestSandboxTools(ToolProviderContract):
    call = ("python.exec", {"code": "1 + 1"})
    failing = ("python.exec", {"code": "1 + 1", "fuel": 0})

    @pytest.fixture
    def opener(self, cache: Path) -> Opener:
        return lambda registry, loop: SandboxTools(config_with(cache), registry, loop)
