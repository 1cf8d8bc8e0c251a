"""How the page's command is started, and what it refuses before it opens any socket."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftcoord import cli
from ftcoord.commands.paging import _token
from ftcoord.errors import ConfigError

TOKEN = "0123456789abcdef"


def test_a_token_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert _token({}) == ""
    assert _token({"FTCOORD_DASHBOARD_TOKEN": TOKEN}) == TOKEN
    assert _token({"FTCOORD_DASHBOARD_TOKEN_FILE": str(path)}) == TOKEN


@pytest.mark.parametrize("token", ["short", f"{TOKEN} with spaces", f"{TOKEN}é", f"{TOKEN}\n{TOKEN}"])
def test_a_token_that_is_none_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _token({"FTCOORD_DASHBOARD_TOKEN": token})
    assert token not in str(refused.value)


def test_two_tokens_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="must hold the token"):
        _token({"FTCOORD_DASHBOARD_TOKEN_FILE": str(path)})
    with pytest.raises(ConfigError, match="unset one"):
        _token({"FTCOORD_DASHBOARD_TOKEN": TOKEN, "FTCOORD_DASHBOARD_TOKEN_FILE": str(path)})


@pytest.mark.parametrize("listen", ["29511", "here:", "here:70000", "here:x"])
def test_an_address_that_is_none_is_refused(listen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", "--endpoints", "127.0.0.1:1", "--listen", listen]) == 2
    assert "write it as" in capsys.readouterr().err


def test_no_flag_takes_the_token(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["dashboard", "--token", TOKEN])
    assert "unrecognized" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; from ftcoord import cli;"
        " sys.exit(cli.main(['dashboard', '--endpoints', '127.0.0.1:1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'ftcoord[dashboard]'" in done.stderr
