"""The pages for users: their links lead somewhere, and they name every setting that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftcoord import config
from ftcoord.rendezvous import settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """What a heading is called in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, heading in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if heading:
            headings = HEADING.findall(target.read_text(encoding="utf-8"))
            assert heading in map(anchor, headings), f"{page.name} links to {path}#{heading}"


def test_links_are_found() -> None:
    """Else the test above would pass on nothing at all."""
    assert LINK.findall("[a](b.md#c) [d](https://e) [f](#g)") == [("b.md", "c"), ("", "g")]
    assert anchor("What is promised, here") == "what-is-promised-here"


def test_each_setting_is_described() -> None:
    described = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    names = {*settings._NAMES, *(name for names in config._VARIABLES.values() for name in names)}
    assert not sorted(name for name in names if f"`{name}`" not in described)
