"""The pytest plug-in, as its users have it: pytest finds it by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers import DEADLINE

FIXTURES = """
import threading
import ftcoord
import pytest
from ftcoord.core.lease import SessionState

class Told:
    def __init__(self):
        self.states, self.changed = [], threading.Event()
    def __call__(self, state):
        self.states.append(state)
        if state is SessionState.LOST:
            self.changed.set()

@pytest.fixture(params=["server", "memory"])
def whichever(request):
    return request.getfixturevalue({"server": "etcd_server", "memory": "ftcoord_etcd"}[request.param])

def client_of(etcd):
    return etcd.client() if hasattr(etcd, "client") else etcd.get_client()

@pytest.mark.parametrize("named", ["session", "id", "key", "client"])
def test_a_lost_lease(whichever, expire_lease, named):
    told = Told()
    with client_of(whichever) as client:
        session = ftcoord.Session(client, 3600, told)
        client.put(f"/key-{named}", b"", session.lease_id)
        what = {"session": session, "id": session.lease_id, "key": f"/key-{named}", "client": session}[named]
        expire_lease(client if named == "client" else whichever, what)
        assert client.get(f"/key-{named}").one is None
        assert told.changed.wait(60), "an hour is not over, and yet it is told"
        assert session.state is SessionState.LOST
        session.close()

def test_what_cannot_expire(ftcoord_etcd, expire_lease):
    ftcoord_etcd.client().put("/no-lease", b"")
    for key, problem in [("/none", "does not exist"), ("/no-lease", "lies under no lease")]:
        with pytest.raises(ValueError, match=problem):
            expire_lease(ftcoord_etcd, key)

def test_one_server_for_all(etcd_server):
    with etcd_server.get_client() as client:
        client.put("/seen", b"")
    test_one_server_for_all.seen = etcd_server

def test_the_same_server(etcd_server):
    assert etcd_server is test_one_server_for_all.seen

def test_a_cluster(etcd_cluster, expire_lease):
    with ftcoord.EtcdClient(etcd_cluster.endpoints) as client:
        lease = client.grant(60)
        client.put("/key", b"", lease.id)
        expire_lease(etcd_cluster, lease)
        assert client.get("/key").one is None
        etcd_cluster.kill(0)
        assert client.get("/key", timeout=60).one is None

def test_each_test_has_an_etcd_in_memory_of_its_own(ftcoord_etcd):
    assert ftcoord_etcd.revision == 1
    with ftcoord.Heartbeat("job", "me", 10, etcd=ftcoord_etcd.client()):
        assert ftcoord_etcd.revision == 2
"""

NOT_USED = """
import sys

def test_nothing_is_loaded():
    assert not {"torch", "grpc", "greenlet", "google.protobuf", "ftcoord.embedded"} & sys.modules.keys()
    assert "ftcoord.testing.etcd" not in sys.modules
    assert "ftcoord.testing.plugin" in sys.modules
"""


def run(folder: Path, test: str, *arguments: str) -> str:
    """Run a user's tests in a process of their own; what pytest said, if all passed."""
    (folder / "test_user.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=2 * DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_fixtures(tmp_path: Path) -> None:
    assert "13 passed" in run(tmp_path, FIXTURES)


def test_who_does_not_use_it_loads_nothing(tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, NOT_USED)


def test_the_fixtures_say_what_they_are(tmp_path: Path) -> None:
    said = run(tmp_path, "def test_nothing(): pass", "--fixtures")
    for name in ("etcd_server [session scope]", "etcd_cluster", "ftcoord_etcd", "expire_lease"):
        assert f"\n{name} -- " in said
