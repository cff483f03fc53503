"""Tests marked ``sweep`` take minutes, and run when they are asked for: ``-m sweep``. One provider serves most."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import RUNTIMES, Sandbox


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sweep: takes minutes; only with -m sweep")
    config.addinivalue_line("markers", "timeout: of pytest-timeout")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "sweep" not in config.option.markexpr:
        dropped = [item for item in items if item.get_closest_marker("sweep")]
        if dropped:
            items[:] = [item for item in items if item not in dropped]
            config.hook.pytest_deselected(items=dropped)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AGENTRT_SANDBOX_CACHE keeps modules and images from run to run, which take minutes to make."""
    kept = os.environ.get("AGENTRT_SANDBOX_CACHE")
    return Path(kept) if kept else tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="session")
def sandbox(cache: Path) -> Iterator[Sandbox]:
    with Sandbox(cache) as sandbox:
        for runtime in RUNTIMES:
            sandbox.run(runtime, "1")  # the images are there from now on, for all tests
        yield sandbox
