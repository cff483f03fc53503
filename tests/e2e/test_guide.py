"""docs/guide.md, followed to the letter."""

from pathlib import Path

import pytest
from page_kit import DOCS, follow


@pytest.mark.timeout(600)
def test_the_guide(tmp_path: Path) -> None:
    assert follow(DOCS / "guide.md", tmp_path, [8420, 8421]) >= 30
