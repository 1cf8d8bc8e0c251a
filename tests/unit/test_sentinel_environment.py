"""The environment of a sentinel: it finds the ftcoord of its process, and nothing that the process does not."""

from __future__ import annotations

import os
import site
from pathlib import Path

import pytest

import ftcoord
from ftcoord.primitives.sentinel import _environment

ROOT = str(Path(ftcoord.__file__).parent.parent)


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each Python looks by itself, besides its own modules."""
    found: list[str] = []
    monkeypatch.setattr(site, "getsitepackages", lambda: found)
    monkeypatch.setattr(site, "getusersitepackages", lambda: "/home/somebody/site-packages")
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    return found


@pytest.mark.parametrize("users", [None, "/users"])
def test_where_it_is_installed_nothing_else_of_that_place_comes_first(
    sites: list[str], monkeypatch: pytest.MonkeyPatch, users: str | None
) -> None:
    """Left there by others, a `dataclasses.py` would break the sentinel, and not its process."""
    sites.append(ROOT)
    if users is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", users)
    assert _environment().get("PYTHONPATH") == users


def test_where_it_is_installed_for_one_user(sites: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(site, "getusersitepackages", lambda: ROOT)
    assert "PYTHONPATH" not in _environment()
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    assert _environment()["PYTHONPATH"] == ROOT


def test_the_name_of_the_place_may_be_another(
    sites: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "link").symlink_to(ROOT)
    sites.append(str(tmp_path / "link"))
    assert "PYTHONPATH" not in _environment()


def test_what_only_this_process_finds_is_found_first(sites: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/users")
    assert _environment()["PYTHONPATH"] == os.pathsep.join([ROOT, "/users"])
    monkeypatch.delenv("PYTHONPATH")
    assert _environment()["PYTHONPATH"] == ROOT
