"""Tests marked ``sweep`` take minutes, and run when they are asked for: ``-m sweep``. So do those marked ``rebalance``:
with the mock brokers a group does not always come together again (JoinGroup is answered InvalidRequest, or partitions
stay with a member that is gone), and whether that is theirs or ours is not known yet."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sweep: kills nodes for minutes; only with -m sweep")
    config.addinivalue_line("markers", "rebalance: do not always pass with the mock brokers; only with -m rebalance")
    config.addinivalue_line("markers", "timeout: of pytest-timeout")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [mark for mark in ("sweep", "rebalance") if mark not in config.option.markexpr]
    dropped = [item for item in items if any(item.get_closest_marker(mark) for mark in left_out)]
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)
