from collections.abc import Iterator
from pathlib import Path

import pytest
from mcp_kit import HttpServer, Place, http_server


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout")


@pytest.fixture(scope="session")
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


@pytest.fixture
def folder(place: Place) -> Path:
    return place.folder()


@pytest.fixture
def http(folder: Path) -> Iterator[HttpServer]:
    with http_server(folder) as server:
        yield server
