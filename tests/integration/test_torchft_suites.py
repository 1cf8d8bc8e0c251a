"""torchft's own tests, as its wheel brings them, with ftcoord's classes in place of its native ones."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import ftcoord
from ftcoord.etcd.server import EtcdServer

pytest.importorskip("torchft", reason="torchft has no wheel for this Python")
pytestmark = pytest.mark.alone  # torchft's replicas miss a quorum when they are 100 ms late, and some tests then fail

LIMIT = 900.0
"""Seconds for one module, on a machine that is busy with other things."""


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("coordination_test", 1),
        ("lighthouse_test", 4),
        ("manager_test", 23),
        ("manager_integ_test", 7),
        ("local_sgd_integ_test", 28),
    ],
)
def test_of_torchft(etcd: EtcdServer, tmp_path: Path, module: str, known: int) -> None:
    """As many tests as are in torchft 0.2.0; what needs a GPU is skipped there, and does not count."""
    source = str(Path(str(ftcoord.__file__)).parent.parent)
    options = ("-p", "no:cacheprovider", "--junit-xml=report.xml", f"--rootdir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "ftcoord.torchft", "-m", "pytest", *options, "--pyargs", f"torchft.{module}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source, "FTCOORD_ENDPOINTS": etcd.get_endpoint(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    (suite,) = ElementTree.parse(tmp_path / "report.xml").getroot().iter("testsuite")
    count = {name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    assert count["failures"] == count["errors"] == 0, done.stdout
    assert count["tests"] - count["skipped"] >= known, done.stdout
