"""Real etcds for the tests."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import crashes
import kept
import pytest
from etcd_cluster import EtcdCluster, FragileEtcd
from helpers import DEADLINE

from ftcoord import concurrency
from ftcoord.config import EtcdConfig
from ftcoord.embedded.server import EtcdServer
from ftcoord.etcd.api import Delete, Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.metrics import exporter, process
from ftcoord.primitives.sentinel import Sentinel

signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background ignores it for us


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each of xdist's workers begins with another file of a folder. In a fresh clone pytest rewrites the assertions of
    all files and compiles them, which takes 8 s: side by side all workers would do that with each file; so they find
    what another one has compiled."""
    report = yield
    worker, files = getattr(collector.config, "workerinput", None), report.result
    if worker and files and all(isinstance(file, pytest.Module) for file in files):
        first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
        report.result = files[first:] + files[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The workers' files in one order again, which xdist wants."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.nodeid.partition("::")[0])


gc.disable()  # until all tests are collected: it would look through them again and again, which takes it a second


def pytest_collection_finish() -> None:
    """Thousands of tests, torch and what it brings are there until the end: the collector need not look at them each
    time, which takes it a tenth of a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def frozen() -> Iterator[None]:
    """What was there when the tests began stays out of the collector's sight: once one test had called `gc.unfreeze()`,
    each `gc.collect()` of all later ones took a third of a second instead of a millisecond."""
    yield
    assert gc.get_freeze_count(), "a test calls gc.unfreeze(), which undoes this freeze too: take the call out"


@pytest.fixture(scope="session", autouse=True)
def processes() -> Iterator[None]:
    """How those end that the tests start: see `no_process_crashes`. Some end with the session."""
    with crashes.noticed():
        yield
    assert crashes.crashed() == []


@pytest.fixture(autouse=True)
def no_process_crashes() -> Iterator[None]:
    """None that a test starts, also where the test does not look at its exit code."""
    yield
    assert crashes.crashed() == []


def stop_serving() -> None:
    """As if nothing had been served."""
    export = concurrency.of_process(exporter._Export)
    if export.server is not None:
        export.server.close()
    export.begun, export.server = False, None
    process.end_counting()


@pytest.fixture
def serves_no_metrics() -> Iterator[None]:
    """Before and after a test that has this process serve its metrics."""
    stop_serving()
    yield
    stop_serving()


@pytest.fixture(autouse=True)
def no_lease_is_kept_alive_for_nobody() -> Iterator[None]:
    """Every session that a test opens, it closes."""
    yield
    kept.check()


@pytest.fixture(autouse=True)
def no_sentinel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the process of the tests, but for those that are marked. To start one takes as much of a processor as
    most tests do. Processes that a test starts have theirs."""
    if request.node.get_closest_marker("sentinel") is None:
        monkeypatch.setattr(Sentinel, "of_process", lambda: None)


_numbers = itertools.count(1)


_shared: list[tuple[EtcdServer, Path]] = []
"""The etcd of all tests of this process, once there is one, and its log."""


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests that do no harm to it. Keep to the keys of `prefix`."""
    log = tmp_path_factory.mktemp("etcd") / "log"
    with EtcdServer(log_path=str(log)) as server:
        _shared.append((server, log))
        yield server
        _shared.clear()


@pytest.fixture(autouse=True)
def the_shared_etcd_lives() -> Iterator[None]:
    """Whoever ends it is told of, and not who needs it next."""
    yield
    for server, log in _shared:
        assert server.is_running(), "the etcd of all tests has ended:\n" + "\n".join(log.read_text().splitlines()[-40:])


@pytest.fixture(scope="module", autouse=True)
def the_shared_etcd_is_empty() -> Iterator[None]:
    """When the next file begins: commands that look at all jobs took five times as long with those of all earlier
    tests."""
    yield
    for server, _ in _shared:
        if server.is_running():
            with server.get_client() as client:
                client.txn([], [Delete(Span("", is_prefix=True))])


@pytest.fixture
def prefix() -> str:
    """The start of the keys that belong to this test alone."""
    return f"/test-{next(_numbers)}"


@pytest.fixture
def client(etcd: EtcdServer) -> Iterator[EtcdClient]:
    """A client of `etcd`."""
    with EtcdClient(EtcdConfig.load(etcd.get_endpoint(), env={}, request_timeout=DEADLINE)) as client:
        yield client


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[FragileEtcd]:
    """An etcd that this test may kill and pause. Of a test that fails, the end of its log is shown."""
    log = tmp_path / "etcd.log"
    with FragileEtcd(log_path=str(log)) as server:
        yield server
        print(f"etcd {'runs' if server.is_running() else 'has ended'}:", *log.read_text().splitlines()[-30:], sep="\n")


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    """Three members that this test may kill and pause."""
    with EtcdCluster(3) as members:
        yield members


@pytest.fixture
def cluster_client(cluster: EtcdCluster) -> Iterator[EtcdClient]:
    """A client that knows all members, and starts with the first one."""
    with EtcdClient(EtcdConfig.load(cluster.endpoints)) as client:
        yield client
