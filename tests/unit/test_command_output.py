"""How commands show what they are told, and that what they tell is described."""

from __future__ import annotations

import getpass
import io
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st
from reports import made

from ftcoord import cli
from ftcoord.commands.shared import ETCD_FLAGS, WIDEST, Terminal, to_json, to_line, to_yaml, who
from ftcoord.config import EtcdConfig
from ftcoord.core.rendezvous_records import WorkerFailure
from ftcoord.escaping import neutral
from ftcoord.operator import report
from ftcoord.operator.report import FORMAT, Done, Examination, Finding, JobLine, JobList

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.text())
def test_what_is_shown_is_printable_and_on_one_line(text: str) -> None:
    shown = neutral(text)
    assert shown.isprintable()
    assert text.isprintable() <= (shown == text)


def test_what_moves_a_cursor_is_shown_as_an_escape() -> None:
    assert neutral("a\x1b[2J\x07\r\n\u202e\udc80\x9b") == r"a\x1b[2J\x07\r\n\u202e\udc80\x9b"


def lines_of(jobs: list[str]) -> JobList:
    return made(JobList, FORMAT, "/f", [made(JobLine, job, "other", None, 1, None, None, 0, "") for job in jobs])


@given(st.lists(st.text()))
def test_json_and_yaml_say_the_same_in_ascii(jobs: list[str]) -> None:
    found = lines_of(jobs)
    assert to_json(found).isascii()
    assert to_yaml(found).isascii()
    assert json.loads(to_json(found)) == json.loads(to_line(found, "json"))
    assert to_line(found, "json").count("\n") == 1


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), max_codepoint=0xFFFF))))
def test_yaml_is_read_as_json_is(jobs: list[str]) -> None:
    found = lines_of(jobs)
    assert yaml.safe_load(to_yaml(found)) == json.loads(to_json(found))
    assert list(yaml.safe_load_all(to_line(found, "yaml") * 2)) == [json.loads(to_json(found))] * 2


@pytest.mark.parametrize("value", [(), ("a",), ("yes", "1", "null", "- x", "a: b", "#")])
def test_yaml_takes_no_text_for_something_else(value: tuple[str, ...]) -> None:
    assert yaml.safe_load(to_yaml(made(Done, FORMAT, "no", value, ())))["did"] == list(value)


def test_a_table_is_as_wide_as_it_must_be() -> None:
    found = (("\u65e5\u672c", 5), ("a\x1b", None), ("x" * 99, 12))
    rows = [{"name": name, "n": n} for name, n in found]
    table = list(Terminal(out=io.StringIO()).table("NAME=name N=n", rows))
    assert table[0] == f"NAME{' ' * (WIDEST - 4)}   N"
    assert table[1] == f"\u65e5\u672c{' ' * (WIDEST - 4)}   5"
    assert table[2] == rf"a\x1b{' ' * (WIDEST - 5)}   -"
    assert table[3] == f"{'x' * (WIDEST - 3)}...  12"


@pytest.mark.parametrize(
    ("colours", "out", "env", "coloured"),
    [
        ("auto", Tty, {}, True),
        ("auto", io.StringIO, {}, False),
        ("auto", Tty, {"NO_COLOR": "1"}, False),
        ("auto", Tty, {"TERM": "dumb"}, False),
        ("always", io.StringIO, {"NO_COLOR": "1"}, True),
        ("never", Tty, {}, False),
    ],
)
def test_colours_are_for_terminals(
    colours: str, out: type[io.StringIO], env: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    screen = out()
    Terminal("table", colours, screen).show(None, [Terminal("table", colours, screen).word("running")])
    assert ("\x1b[32mrunning\x1b[0m" in screen.getvalue()) == coloured


def test_json_has_no_colours() -> None:
    screen = Tty()
    Terminal("json", "always", screen).show(
        made(Examination, FORMAT, True, [made(Finding, "ok", "a", "b", "")]), ["not this"]
    )
    assert json.loads(screen.getvalue()) == {
        "format": 1,
        "healthy": True,
        "findings": [{"level": "ok", "about": "a", "found": "b", "do": ""}],
    }


# -- what is promised -----------------------------------------------------------------------------------------------


def documents() -> list[type]:
    return [WorkerFailure, *(one for one in vars(report).values() if typing.is_typeddict(one))]


def form_of(kind: Any) -> Any:
    """A type as docs/cli.md spells it."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return f"list of {form_of(inner[0])}"
    if type(None) in inner:
        return f"{form_of(inner[0])} or null"
    if typing.get_origin(kind) is typing.Literal:
        return "text"
    return {str: "text", int: "number", float: "number", bool: "true or false"}.get(kind, getattr(kind, "__name__", ""))


@pytest.mark.parametrize("document", documents(), ids=lambda one: one.__name__)
def test_each_field_is_described_with_its_form(document: type) -> None:
    """So that nobody changes the JSON without changing what is promised of it."""
    section = PAGE.read_text(encoding="utf-8").partition(f"### {document.__name__}\n")[2].partition("\n#")[0]
    rows = [(name, form or "text") for name, form in re.findall(r"^- `(\w+)`(?: \(([^)]+)\))?", section, re.MULTILINE)]
    hints = typing.get_type_hints(document)
    assert rows == [(name, form_of(hints[name])) for name in document.__annotations__]


def parsers() -> dict[str, Any]:
    actions = cli._parser()._actions
    choices: dict[str, Any] = next(action.choices for action in actions if isinstance(action.choices, dict))
    return choices


@pytest.mark.parametrize("command", parsers())
def test_each_command_and_flag_is_described_with_its_variable(command: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"`ftcoord {command}" in page
    for flag in parsers()[command].get_default("flags"):
        if not flag.name.startswith("-"):
            continue
        assert flag.variable.startswith("FTCOORD_")
        assert re.search(rf"^- `{flag.name}`[^:]*, `{flag.variable}`: ", page, re.MULTILINE), flag.name


def test_the_help_shows_etcds_defaults() -> None:
    config = EtcdConfig.load(env={})
    shown = {flag.dest: flag.default for flag in ETCD_FLAGS if flag.default is not None}
    assert shown == {"endpoints": config.endpoints[0].target, "request_timeout": config.request_timeout}


def test_bash_completes_a_command() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "ftcoord.cli", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    tried = "COMP_WORDS=(ftcoord st); COMP_CWORD=1; _shtab_ftcoord; echo ${COMPREPLY[@]}"
    found = subprocess.run(["bash", "-c", f"{script}\n{tried}"], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["status", "stop"]


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("No username set")], ids=repr)
def test_who_acts_has_a_name_though_the_host_knows_none(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that runs as a user of whom its passwd does not know."""

    def unknown() -> str:
        raise error

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert who().startswith(f"uid {os.getuid()}@")
