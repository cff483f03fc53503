"""What all tests share.

faulthandler: pytest switches it on before the first test, and a runtime made later works beside it; but pytest also
switches it off at the end, and plugins may toggle it. Toggled after the wasm engine has put its signal handlers in
place, a guest's out-of-bounds access kills the process instead of trapping. So pyproject.toml leaves it out
(``-p no:faulthandler``), and here is the guard for those who switch it on another way. A hang is still
shown: pytest-timeout prints all stacks.

Tests marked ``kernel`` run where AGENTRT_VM is set, as .ci/run does in its VM; elsewhere they are deselected. Tests
marked ``sweep`` (minutes) and ``vm`` (boot a VM) run when they are asked for: ``-m sweep``, ``-m vm``.
"""

import faulthandler
import os

import pytest
from hypothesis import HealthCheck, settings

# Shared machines stall at times: a slow example is no failure, a wrong one is. Failures print how to repeat them.
settings.register_profile("agentrt", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentrt")


def pytest_configure(config: pytest.Config) -> None:
    if faulthandler.is_enabled():
        raise pytest.UsageError(
            "faulthandler is on: start without PYTHONFAULTHANDLER, -X dev, -X faulthandler and -p faulthandler"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [mark for mark in ("sweep", "vm") if mark not in config.option.markexpr]
    if not os.environ.get("AGENTRT_VM"):
        left_out.append("kernel")
    dropped = [item for item in items if any(item.get_closest_marker(mark) for mark in left_out)]
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the developer's environment must not change what is tested."""
    for name in list(os.environ):
        if name.startswith("AGENTRT_") and ("__" in name or name == "AGENTRT_CONFIG"):
            monkeypatch.delenv(name)
