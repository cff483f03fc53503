"""Documentation that follows from code is what the code says, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from agentrt.reference import PAGES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name](), "run: python -m agentrt.reference docs"


def _pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    """A claim that names its test, or a module, names one that exists."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    folders, suffixes = "agentrt|csrc|deploy|perf|plugins|tests", "py|c|h|toml|md|service"
    for name in re.findall(rf"`((?:{folders})/[\w./-]*\w\.(?:{suffixes}))`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "README.md" or name.startswith("decisions/") or f"({name})" in index, name
