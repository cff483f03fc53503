"""What the end-to-end tests of the runtime share."""

from pathlib import Path

import pytest


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which runtime_tools.ledger_add writes."""
    path = tmp_path / "ledger"
    path.touch()
    monkeypatch.setenv("LEDGER", str(path))
    return path
