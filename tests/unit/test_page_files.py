"""What the page is made of is in the wheel."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "ftcoord" / "dashboard" / "static"


def test_the_wheel_has_all_files_of_the_page() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["ftcoord"].split()
    packed = {path for pattern in patterns for path in (ROOT / "ftcoord").glob(pattern)}
    there = {path for path in STATIC.rglob("*") if path.is_file()}
    assert there
    assert there <= packed


def test_all_that_the_page_loads_is_among_them() -> None:
    named = re.findall(r'(?:src|href)="static/([^"]+)"', (STATIC / "index.html").read_text(encoding="utf-8"))
    assert len(named) >= 3
    assert all((STATIC / name).is_file() for name in named)
