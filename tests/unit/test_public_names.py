"""What `import ftcoord` gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ftcoord
from ftcoord.config import Endpoint, EtcdConfig
from ftcoord.errors import ConfigError


def run(code: str) -> list[str]:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("name", ["errors.RoundOver", "coordination.LighthouseServer", "timer.active"])
def test_submodules_are_there_and_loaded_when_used(name: str) -> None:
    code = f"import ftcoord, sys; print('grpc' in sys.modules, ftcoord.{name}.__name__)"
    assert run(code) == ["False", name.rpartition(".")[2]]


@pytest.mark.parametrize("first", ["pass", "ftcoord.EtcdClient", "ftcoord.coordination"])
def test_dir_lists_what_is_public_and_nothing_else(first: str) -> None:
    """Also after others were loaded."""
    names = run(f"import ftcoord\n{first}\nprint(*(name for name in dir(ftcoord) if not name.startswith('__')))")
    assert names == sorted(ftcoord.__all__)
    assert all(hasattr(ftcoord, name) for name in dir(ftcoord))


def test_what_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EtcdClints'"):
        ftcoord.EtcdClints  # noqa: B018


ENDPOINTS = (Endpoint("etcd1"), Endpoint("etcd2", 4000))


@pytest.mark.parametrize(
    "etcd",
    ["etcd1,etcd2:4000", ["etcd1", "etcd2:4000"], EtcdConfig(ENDPOINTS), None],
    ids=["text", "list", "config", "none"],
)
def test_a_client_takes_what_the_others_take(etcd: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOORD_ENDPOINTS", "etcd1,etcd2:4000")
    with ftcoord.EtcdClient(etcd) as client:  # type: ignore[arg-type]
        assert client.config.endpoints == ENDPOINTS


@pytest.mark.parametrize("etcd", [5, b"etcd1", [], [5], "etcd1:0"], ids=repr)
def test_a_client_refuses_all_else(etcd: object) -> None:
    with pytest.raises(ConfigError, match="endpoints"):
        ftcoord.EtcdClient(etcd)  # type: ignore[arg-type]
