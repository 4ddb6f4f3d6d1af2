"""Links in Markdown, and paths of pages and tests that texts and sources name, lead to what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "docs", "engine", "examples", "src", "tests", "tools")
HISTORY = ("CHANGELOG.md", "progress.md")  # name files as they were called at the time


def files(*suffixes: str) -> Iterator[Path]:
    """The repository's files of these kinds, without what was built."""
    yield from (path for path in sorted(ROOT.glob("*")) if path.suffix in suffixes)
    for folder in FOLDERS:
        inside = (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes)
        yield from (path for path in inside if not {"build", "__pycache__"} & set(path.relative_to(ROOT).parts))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", list(files(".md")), ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        target, _, anchor = link.partition("#")
        place = page.parent / target if target else page
        assert place.exists(), link
        assert not anchor or anchor in anchors(place), link


@pytest.mark.parametrize("file", list(files(".md", ".py", ".c", ".h")), ids=name)
def test_every_page_and_test_that_is_named_exists(file: Path) -> None:
    named = set(re.findall(r"(?<![\w/.])(?:docs|tests)/[\w/-]+\.(?:md|py|c|json)\b", file.read_text(encoding="utf-8")))
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing or file.name in HISTORY
