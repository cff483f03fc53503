"""Tests marked ``sweep`` take minutes, and run when they are asked for: ``-m sweep``."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sweep: kills nodes for minutes; only with -m sweep")
    config.addinivalue_line("markers", "timeout: of pytest-timeout")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "sweep" not in config.option.markexpr:
        dropped = [item for item in items if item.get_closest_marker("sweep")]
        if dropped:
            items[:] = [item for item in items if item not in dropped]
            config.hook.pytest_deselected(items=dropped)
