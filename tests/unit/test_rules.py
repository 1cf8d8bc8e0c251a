"""One numbering of the rules: in the module that decides, in what its verdicts say, and in docs/protocol.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

from ftcoord.core import quorum, rendezvous

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
MODULES = [rendezvous, quorum]


@pytest.mark.parametrize("module", MODULES)
def test_the_docstring_has_the_rules(module: ModuleType) -> None:
    assert tuple(re.findall(r"^  ([A-Z]\d+ [a-z ]+)\. ", module.__doc__ or "", re.MULTILINE)) == module.RULES


@pytest.mark.parametrize("module", MODULES)
def test_the_protocol_numbers_them_in_the_same_way(module: ModuleType) -> None:
    letter = module.RULES[0][0]
    found = re.findall(
        rf"^(\d+)\. \*\*({letter}\d+ [a-z ]+)\.\*\* ", PROTOCOL.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert tuple(rule for _, rule in found) == module.RULES
    assert [number for number, _ in found] == [rule.split()[0][1:] for rule in module.RULES]


@pytest.mark.parametrize("module", MODULES)
def test_each_verdict_names_its_rule(module: ModuleType) -> None:
    """`Wait` has its rule third or by name; `Publish` third or by name."""
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    verdicts = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("Publish", "Wait")]
    assert len(verdicts) >= 3
    nameless = [call.lineno for call in verdicts if len(call.args) < 3 and "rule" not in {k.arg for k in call.keywords}]
    assert not nameless
