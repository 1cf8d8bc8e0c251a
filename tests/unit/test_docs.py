"""The documents keep up with the code: links, commands, files, settings and public names in them exist."""

from __future__ import annotations

import argparse
import importlib.util
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftcoord import cli, config
from ftcoord.rendezvous import settings

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = ROOT / "docs" / "benchmarks.md"
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(
    r"(?:\.ci|[\w-]+)(?:/[\w.-]+)*\.(?:py|md|yml|sh|sbatch|toml|cfg)|(?:tests|docs|docker|examples)/(?:[\w-]+/)*"
)
WIDTH = 120


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchor(heading: str) -> str:
    """What a heading is called in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def commands(text: str) -> Iterator[str]:
    """Whatever a page shows as code that a shell could run, a line each."""
    for language, body in FENCE.findall(text):
        if language in {"console", ""}:
            yield from (line.removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines())
    yield from INLINE.findall(prose(text))


def each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=name_of)


@each(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for path, heading in LINK.findall(prose(read(page))):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {path}"
        if heading:
            headings = HEADING.findall(prose(read(target)))
            assert heading in map(anchor, headings), f"{name_of(page)} links to {path}#{heading}"


@each(PAGES)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    named = {target for line in commands(read(page)) for target in re.findall(r"^make ([\w-]+)", line)}
    assert not named - targets


@each(PAGES)
def test_ftcoords_commands_exist(page: Path) -> None:
    parser = cli._parser()
    known = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    for line in commands(read(page).partition("### Removed")[0]):
        if found := re.match(r"(?:\w+=\S+ )*ftcoord ([a-z]\w*)(.*)", line):
            assert found[1] in known, line
            flags = re.findall(r"(?<!\S)--[\w-]+", found[2].partition("#")[0])
            assert not set(flags) - set(known[found[1]]._option_string_actions), line


def selected(path: str, words: str) -> set[str]:
    """The tests below a path that `-k` selects, by their function's or parameter's name, or their file's."""
    wanted = [word for word in re.findall(r"\w+", words) if word not in {"and", "or", "not"}]
    files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("test_*.py"))
    tests = {name for file in files for name in re.findall(r"def (test_\w+)", read(file))}
    if all(any(word in read(file) for file in files) for word in wanted):
        hit = {name for name in tests if any(word in name for word in wanted)}
        return hit or {file.name for file in files if any(word in file.name or word in read(file) for word in wanted)}
    return set()


@each(PAGES)
def test_pytest_commands_select_tests(page: Path) -> None:
    for line in commands(read(page)):
        if found := re.search(r"(?:^|\s|do )pytest ([^|;#]*)", line):
            words = re.search(r"-k \"?([\w ]+?)\"?\s*$", found[1].strip())
            paths = [word for word in found[1].split() if word.startswith("tests/")] or ["tests"]
            for path in paths:
                assert (ROOT / path).exists(), line
                assert not words or selected(path, words[1]), line


@each(PAGES)
def test_modules_that_are_run_exist(page: Path) -> None:
    for line in commands(read(page)):
        for module in re.findall(r"-m ((?:ftcoord|benchmarks)[\w.]*)", line):
            assert importlib.util.find_spec(module) is not None, line


@each(PAGES)
def test_files_that_are_named_exist(page: Path) -> None:
    """Relative to the repository, to the package, or to the page."""
    for text in INLINE.findall(prose(read(page))):
        if FILE.fullmatch(text) and "/" in text and not text.startswith("members/"):
            homes = [ROOT, ROOT / "ftcoord", page.parent]
            assert any((home / text).exists() for home in homes), f"{name_of(page)} names {text}"


@each([page for page in PAGES if page != GENERATED])
def test_lines_are_short(page: Path) -> None:
    """But for code, and for tables, whose rows Markdown cannot break."""
    long = [line for line in prose(read(page)).splitlines() if len(line) > WIDTH and not line.startswith("|")]
    assert not long


def test_each_setting_is_described() -> None:
    described = read(ROOT / "docs" / "configuration.md")
    names = {*settings.CONF_NAMES, *(name for names in config._VARIABLES.values() for name in names)}
    assert not sorted(name for name in names if f"`{name}`" not in described)


def test_settings_that_are_described_exist() -> None:
    described = read(ROOT / "docs" / "configuration.md")
    rows = re.findall(r"^\| (.*?) \|", described.partition("## rdzv_conf")[2], re.MULTILINE)
    names = {name for row in rows for name in INLINE.findall(row)}
    assert names == set(settings.CONF_NAMES)


def test_variables_that_are_named_exist() -> None:
    sources = [*ROOT.glob("*.yml"), ROOT / "Makefile"]
    sources += [path for folder in ("ftcoord", "tests", "docker") for path in (ROOT / folder).rglob("*.[ps][yh]")]
    known = {name for path in sources if path != Path(__file__) for name in re.findall(r"FTCOORD_[A-Z_]+", read(path))}
    named = {name for page in PAGES for name in re.findall(r"FTCOORD_[A-Z_]+", read(page))}
    assert not named - known


def test_docs_that_the_code_names_exist() -> None:
    for path in sorted((ROOT / "ftcoord").rglob("*.py")):
        with tokenize.open(path) as file:
            for name in re.findall(r"docs/[\w/-]+\.md|\b[A-Z]{4,}\.md\b", file.read()):
                assert (ROOT / name).exists(), f"{name_of(path)} names {name}"
