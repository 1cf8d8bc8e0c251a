"""What a test can do to an etcd in memory, in virtual time; what etcd does by itself is in tests/contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from virtual import MemoryEtcd, Scheduler

from ftcoord import concurrency
from ftcoord.errors import EtcdError, EtcdNoSpace, EtcdUnavailable, LeaseLost, Rewound
from ftcoord.etcd.api import Began, Span, WatchItem

SEEDS = range(20)


def virtual(test: Callable[[Scheduler, MemoryEtcd], None]) -> Callable[[], None]:
    """Run a test in virtual time, under several seeds."""

    def play() -> None:
        for seed in SEEDS:
            world = Scheduler(seed)

            def main(world: Scheduler = world) -> None:
                with MemoryEtcd() as etcd:
                    test(world, etcd)

            world.run(main)

    play.__doc__ = test.__doc__
    return play


def took(call: Callable[[], object], error: type[EtcdError]) -> float:
    """Virtual seconds until a call has failed."""
    before = concurrency.now()
    with pytest.raises(error):
        call()
    return concurrency.now() - before


# -- an etcd in trouble ---------------------------------------------------------------------------------------------


@virtual
def test_no_lease_ends_in_an_outage_and_all_begin_again_after_it(world: Scheduler, etcd: MemoryEtcd) -> None:
    client = etcd.client()
    client.put("/key", b"", client.grant(10).id)
    with etcd.outage():
        late = etcd.client()
        assert took(lambda: late.get("/key", timeout=3), EtcdUnavailable) == pytest.approx(3, abs=0.1)
        world.sleep(100)
    world.sleep(9)
    assert client.get("/key").one is not None
    world.sleep(2)
    assert client.get("/key").one is None


@virtual
def test_an_etcd_that_hung_ends_the_leases_whose_time_is_over(world: Scheduler, etcd: MemoryEtcd) -> None:
    client = etcd.client()
    short, long = client.grant(10).id, client.grant(200).id
    client.put("/short", b"", short)
    client.put("/long", b"", long)
    with etcd.outage(hangs=True):
        world.sleep(100)
    assert took(lambda: client.renew(short), LeaseLost) == pytest.approx(0, abs=0.1)
    world.sleep(1)
    assert client.get("/short").one is None
    assert client.get("/long").one is not None


@virtual
def test_an_etcd_that_goes_back(world: Scheduler, etcd: MemoryEtcd) -> None:
    """What was written since is gone, also its leases; watches that are ahead of it hear so, others go on."""
    client, items, behind = etcd.client(), list[WatchItem](), list[WatchItem]()
    kept, lost = client.grant(100).id, 0
    client.put("/kept", b"", kept)
    client.watch(Span("/", is_prefix=True), 0, items.append)
    client.watch(Span("/kept"), 0, behind.append)
    before, revision = etcd.snapshot(), etcd.revision
    lost = client.grant(100).id
    client.put("/lost", b"", lost)
    world.sleep(1)
    etcd.rewind(before)
    world.sleep(1)
    assert etcd.revision == revision
    assert isinstance(items[-1], Rewound)
    assert [type(item) for item in behind] == [Began, Began]
    assert client.get("/lost").one is None
    assert client.renew(kept) == 100
    with pytest.raises(LeaseLost):
        client.renew(lost)
    assert client.grant(100).id not in (kept, lost)
    client.put("/kept", b"again")
    etcd.rewind(before)
    assert client.get("/kept").kvs[0].value == b"", "one may go back to the same more than once"


@virtual
def test_an_etcd_without_space_takes_no_puts_and_grants_no_leases(world: Scheduler, etcd: MemoryEtcd) -> None:
    client = etcd.client()
    lease = client.grant(10).id
    client.put("/key", b"")
    etcd.set_no_space(True)
    for refused in (lambda: client.put("/key", b""), lambda: client.grant(10)):
        with pytest.raises(EtcdNoSpace, match="NOSPACE"):
            refused()
    assert client.renew(lease) == 10
    assert client.delete(Span("/key")) == 1
    client.revoke(lease)
    etcd.set_no_space(False)
    client.put("/key", b"")
