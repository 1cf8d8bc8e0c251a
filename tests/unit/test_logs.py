"""Log lines about changes of state, and how they are shown."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime

import builders
import pytest

from ftcoord.core.rendezvous_records import RoundHead, Seat
from ftcoord.errors import ConfigError, EtcdError
from ftcoord.escaping import SHOWN, named
from ftcoord.log_once import LogOnce
from ftcoord.logs import JsonFormatter, TextFormatter, log_change, show_log_lines
from ftcoord.rendezvous.handler import round_line

log = logging.getLogger("ftcoord.rendezvous.test")


def test_a_change_of_state_names_its_member_and_revision(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ftcoord"):
        log_change(log, "run 'a': it began", run="a", member="1f", revision=7, reason="", round=None)
    (record,) = caplog.records
    assert record.getMessage() == "run 'a': it began [member 1f, revision 7]"
    told = json.loads(JsonFormatter().format(record))
    assert datetime.fromisoformat(told.pop("time").replace("Z", "+00:00")).timestamp() == pytest.approx(
        record.created, abs=0.001
    )
    assert told == {
        "level": "INFO",
        "logger": "ftcoord.rendezvous.test",
        "pid": record.process,
        "message": "run 'a': it began [member 1f, revision 7]",
        "run": "a",
        "member": "1f",
        "revision": 7,
    }
    assert record.filename == "test_logs.py"  # whoever logs, not the helper


def test_an_exception_stays_on_its_line(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("of the\ntest")
    except ValueError:
        log.exception("it failed: %s", "\x1b[2J\n")
    line = JsonFormatter().format(caplog.records[0])
    assert "\n" not in line
    assert "ValueError: of the\ntest" in json.loads(line)["exception"]
    assert json.loads(line)["message"] == "it failed: \x1b[2J\n"


HOSTILE = "evil\x1b[2J\u202e\u200b\nE1127 00:00:00 1 root] FORGED"
SHOWN_AS = r"evil\x1b[2J\u202e\u200b\nE1127 00:00:00 1 root] FORGED"


def test_text_of_others_is_escaped_before_any_formatter_sees_it(caplog: pytest.LogCaptureFixture) -> None:
    """A user's own formatter, too, gets lines that move no cursor and forge no record."""
    log_change(log, f"replica {HOSTILE} died", logging.WARNING, reason=HOSTILE)
    LogOnce(log).say(HOSTILE)
    log.warning("%s", EtcdError(HOSTILE))
    assert [one.getMessage() for one in caplog.records] == [f"replica {SHOWN_AS} died", SHOWN_AS, SHOWN_AS]
    assert named([HOSTILE, "b"]) == f"{SHOWN_AS}, b"


def test_the_text_format_escapes_what_it_is_given(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("replica %s", HOSTILE)
    first, *traceback = TextFormatter().format(caplog.records[0]).split("\n")
    assert first.endswith(f"] replica {SHOWN_AS}")
    assert traceback[-1] == " E1127 00:00:00 1 root] FORGED"
    assert all(line.isprintable() and line.startswith(" ") for line in traceback)


def test_another_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="FTCOORD_LOG_FORMAT"):
        show_log_lines({"FTCOORD_LOG_FORMAT": "xml"})


SHOW = """
import logging
from ftcoord import logs
{before}
logs.{show}({env})
for name in ("rendezvous", "primitives"):
    for level in (logging.INFO, logging.WARNING):
        logs.log_change(logging.getLogger(f"ftcoord.{{name}}.x"), f"{{name}} {{level}}", level, run="a")
"""


def shown(env: dict[str, str], show: str = "show_log_lines", before: str = "") -> list[str]:
    """What a process prints that has no logging of its own but for `before`."""
    code = SHOW.format(env=env, show=show, before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.splitlines()


def test_changes_of_state_and_warnings_are_shown_by_default() -> None:
    lines = shown({})
    assert [line.partition("] ")[2] for line in lines] == ["rendezvous 20", "rendezvous 30", "primitives 30"]
    assert [line[0] for line in lines] == ["I", "W", "W"]


def test_loglevel_counts_for_all() -> None:
    assert len(shown({"LOGLEVEL": "debug"})) == 4
    assert len(shown({"LOGLEVEL": "WARNING"})) == 2


def test_json_is_shown_where_it_is_asked_for() -> None:
    lines = [json.loads(line) for line in shown({"FTCOORD_LOG_FORMAT": "JSON"})]
    assert [(one["message"], one["run"]) for one in lines] == [
        ("rendezvous 20", "a"),
        ("rendezvous 30", "a"),
        ("primitives 30", "a"),
    ]


def test_a_program_of_the_users_own_shows_lines_only_if_it_is_asked_to() -> None:
    assert len(shown({"FTCOORD_LOG_FORMAT": "text"}, "show_if_asked")) == 3
    unasked = shown({}, "show_if_asked")  # Python itself prints warnings where nobody has set up logging
    assert unasked == ["rendezvous 30", "primitives 30"]


def test_a_program_with_logging_of_its_own_is_left_alone() -> None:
    own = "logging.basicConfig(format='own %(message)s')"
    assert shown({"FTCOORD_LOG_FORMAT": "json"}, before=own) == ["own rendezvous 30", "own primitives 30"]


def test_a_line_names_the_first_hosts_only() -> None:
    assert named([f"h{number}" for number in range(SHOWN + 2)]).endswith(f"h{SHOWN - 1} and 2 more")


def test_the_line_of_a_round_says_who_decided_it() -> None:
    seats = (Seat("1", "n1", "host1"), Seat("2", "n2", "host2"))
    small = builders.round_(3, seats, address="host1", port=1, before="host3 left", by="2")
    assert round_line("a", small, 1) == (
        "run 'a', round 3: this node is rank 1 of 2, on host1, host2, decided by host2; the round before ended:"
        " host3 left"
    )
    assert "decided by member 9" in round_line("a", builders.round_(3, seats, address="host1", port=1, by="9"), 0)
    large = RoundHead(3, "0" * 16, 2, 1, "host1", 1, by="2")
    assert "with host1, decided by member 2" in round_line("a", large, 0)
