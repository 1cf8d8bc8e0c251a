"""How the page's command is started, and what it refuses before it opens any socket."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftcoord import cli
from ftcoord.commands.demo_server_dashboard_gateway_metrics import token_of
from ftcoord.errors import ConfigError

TOKEN = "0123456789abcdef"


def test_a_token_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"\ufeff{TOKEN}\r\n", encoding="utf-8")  # as an editor may write it
    assert token_of({}) == ""
    assert token_of({"FTCOORD_DASHBOARD_TOKEN": TOKEN}) == TOKEN
    assert token_of({"FTCOORD_DASHBOARD_TOKEN_FILE": str(path)}) == TOKEN


@pytest.mark.parametrize("token", ["short", f"{TOKEN} with spaces", f"{TOKEN}é", f"{TOKEN}\n{TOKEN}"])
def test_a_token_that_is_none_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError) as refused:
        token_of({"FTCOORD_DASHBOARD_TOKEN": token})
    assert token not in str(refused.value)


def test_two_tokens_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="must hold the token"):
        token_of({"FTCOORD_DASHBOARD_TOKEN_FILE": str(path)})
    with pytest.raises(ConfigError, match="unset one"):
        token_of({"FTCOORD_DASHBOARD_TOKEN": TOKEN, "FTCOORD_DASHBOARD_TOKEN_FILE": str(path)})


@pytest.mark.parametrize("listen", ["29511", "here:", "here:70000", "here:x", "http://127.0.0.1:0"])
def test_an_address_that_is_none_is_refused(listen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", "--endpoints", "127.0.0.1:1", "--listen", listen]) == 2
    assert "write it as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--page-port", "x"], "--page-port"), (["--page-port", "0", "--page-host", "a b"], "--page-host")],
)
def test_a_gateways_page_that_cannot_be_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gateway", "--etcd", "etcd://127.0.0.1:1/job", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_gateways_page_has_no_weak_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FTCOORD_DASHBOARD_TOKEN", "weak")
    assert cli.main(["gateway", "--etcd", "etcd://127.0.0.1:1/job", "--page-port", "0"]) == 2
    assert "FTCOORD_DASHBOARD_TOKEN" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; from ftcoord import cli;"
        " sys.exit(cli.main(['dashboard', '--endpoints', '127.0.0.1:1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install starlette uvicorn" in done.stderr
