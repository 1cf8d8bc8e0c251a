"""Sessions, writes, stores, feeds and heartbeats under accidents, in virtual time: what each of them promises."""

from __future__ import annotations

import contextlib
import gc
import math
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from doors import Door
from torch.distributed import DistStoreError
from virtual import DELIVERED, LOST_ANSWER, LOST_REQUEST, REFUSED, Call, Fate, MemoryClient, MemoryEtcd, flaky
from worlds import TTL, World, insist, play, simulated

from ftcoord import concurrency
from ftcoord.core.layout import store_values_span
from ftcoord.core.lease import TRUST_FOR, SessionState
from ftcoord.errors import (
    ConfigError,
    EtcdError,
    EtcdNoSpace,
    EtcdUnavailable,
    LeaseLost,
    OutcomeUnknown,
    RequestRefused,
)
from ftcoord.etcd.api import Delete, Event, Get, KeyValue, Put, RangeResult, Span, TxnResult, absent
from ftcoord.primitives.leased_key import LeasedKey
from ftcoord.primitives.mirror import Feed, Informer, Mirror
from ftcoord.primitives.sentinel import SentinelFor
from ftcoord.primitives.session import INTRODUCED_AFTER, Session
from ftcoord.primitives.write_once import ExactlyOnceWriter, write_once
from ftcoord.store import EtcdStore

CONNECTED, SUSPENDED, LOST = SessionState.CONNECTED, SessionState.SUSPENDED, SessionState.LOST


def wild(seed: int) -> Callable[[Call], Fate]:
    """A network on which anything happens to one call in four."""
    return flaky(seed, refused=0.05, lost_requests=0.06, lost_answers=0.08, late=0.06, delay=0.02)


# -- leases -----------------------------------------------------------------------------------------------------------


BAD_TTLS = (0, -1, 86_401, 1e300, 2.5, math.inf, math.nan, True, None, "soon")


@pytest.mark.parametrize("ttl", BAD_TTLS)
def test_a_session_asks_etcd_for_no_lease_that_makes_no_sense(ttl: Any) -> None:
    """etcd would grant 2 s where 0 is asked for by mistake, or decades."""

    def scenario(world: World) -> None:
        with pytest.raises(
            ConfigError, match=r"^ttl(=.* is not valid| is missing): give a whole number from 1 to 86400 \(seconds\)"
        ):
            Session(world.etcd.client(), ttl)
        assert not world.etcd.leases

    play(scenario, 0)


@pytest.mark.parametrize("ttl", BAD_TTLS)
def test_a_store_refuses_such_a_ttl_before_it_has_a_client(ttl: Any) -> None:
    """And not with its first change. Its endpoints are refused where there is nothing else to refuse."""
    with pytest.raises(ConfigError, match=r"^ttl(=| is missing)"):
        EtcdStore("no endpoint", ttl=ttl)
    with pytest.raises(ConfigError, match=r"^endpoints="):
        EtcdStore("no endpoint", ttl=60)


@simulated
def test_a_session_is_suspended_before_anybody_can_see_its_lease_end(world: World) -> None:
    told: list[tuple[SessionState, float]] = []
    client = world.etcd.client()
    session = Session(client, TTL, lambda state: told.append((state, concurrency.now())))
    client.put("/key", b"", session.lease_id)
    world.sleep(random.uniform(0, 3 * TTL))
    client.cut_off()
    cut = concurrency.now()
    world.until(lambda: not world.keys("/key"), "its key is gone")
    (state, when), gone = told[0], concurrency.now()
    assert state is SUSPENDED
    assert cut + TTL * (TRUST_FOR - 1 / 3) - 0.1 < when < gone - TTL * (1 - TRUST_FOR) + 0.1
    assert session.state is SUSPENDED, "only etcd can say that it is lost"
    client.reconnect()
    world.until(lambda: len(told) > 1, "it is told")
    assert [state for state, _ in told] == [SUSPENDED, LOST]
    assert session.state is LOST


@simulated
def test_a_renewal_counts_from_when_it_was_sent_however_late_its_answer_comes(world: World) -> None:
    """etcd counts the TTL from before the answer. Each answer takes up to 3 s; then nothing is answered any more."""
    ttl, sent = 3 * TTL, [concurrency.now()]
    cut_at = random.uniform(0, 5 * ttl)

    def fate(call: Call) -> Fate:
        if call.method != "renew":
            return DELIVERED
        if concurrency.now() > cut_at:
            return LOST_REQUEST
        sent.append(concurrency.now())
        return Fate(answers=random.uniform(0, 3))

    session = Session(world.etcd.client(fate), ttl)
    world.until(lambda: session.state is SUSPENDED, "it is suspended", 10 * ttl)
    assert concurrency.now() == pytest.approx(sent[-1] + TRUST_FOR * ttl, abs=0.2)
    session.orphan()


@simulated
def test_a_session_outlives_renewals_that_get_lost(world: World) -> None:
    client = world.etcd.client(flaky(world.seed, refused=0.1, lost_requests=0.1, lost_answers=0.1))
    session = insist(lambda: Session(client, TTL))
    insist(lambda: client.put("/key", b"", session.lease_id))
    world.sleep(20 * TTL)
    assert world.keys("/key")
    assert session.state is CONNECTED


@simulated
def test_leases_whose_etcd_hangs_cost_the_others_none(world: World) -> None:
    """All are renewed by one thread of the process."""
    with MemoryEtcd() as away:
        far = away.client()
        hanging = [Session(far, 3) for _ in range(5)]
        kept = [Session(world.observer, 6) for _ in range(5)]
        far.cut_off()
        world.sleep(10 * 6)
        assert [session.state for session in kept] == [CONNECTED] * 5
        assert [session.state for session in hanging] == [SUSPENDED] * 5
        for session in (*kept, *hanging):
            session.orphan()


@simulated
def test_a_lease_that_rests_is_renewed_when_it_is_wanted_again(world: World) -> None:
    session = Session(world.observer, TTL)
    for _ in range(5):
        session.rest()
        world.sleep(random.uniform(0, TTL * 0.6))
        session.wake()
        world.sleep(random.uniform(0, TTL))
        assert session.state is CONNECTED
    session.rest()
    world.sleep(2 * TTL)
    session.wake()
    world.until(lambda: session.state is LOST, "it is told")
    with pytest.raises(LeaseLost):
        session.renew(1)


@simulated
def test_a_short_rest_costs_no_renewal(world: World) -> None:
    renewals = list[Call]()
    client = world.etcd.client(lambda call: (renewals.append(call) if call.method == "renew" else None, DELIVERED)[1])
    session = Session(client, 600)
    for _ in range(100):
        session.rest()
        session.wake()
    world.sleep(1)
    assert not renewals
    session.close()


class Notes(SentinelFor):
    """A sentinel that notes what it is told of one lease: when it was renewed last, and whether it is to rest."""

    def __init__(self) -> None:
        self.renewed_at: float | None = None
        self.rests = False

    def keep(self, lease_id: int, ttl: float, sent_at: float, *, starts: bool = True) -> None:
        self.renewed_at, self.rests = concurrency.now(), False

    def rest(self, lease_id: int) -> None:
        self.rests = True

    def drop(self, lease_id: int) -> None:
        self.renewed_at = None


@simulated
def test_a_sentinel_stands_by_while_etcd_revokes_the_lease(world: World) -> None:
    """The process may be killed meanwhile. It renews nothing, though: what is not revoked is to end by time."""
    client, notes, over = world.etcd.client(), Notes(), concurrency.event()

    def close() -> None:
        with contextlib.suppress(EtcdUnavailable, OutcomeUnknown):
            session.close(timeout=2)
        over.set()

    with mock.patch.object(SentinelFor, "of", return_value=notes):
        session = Session(client, TTL, deaths="/deaths")
    world.sleep(random.uniform(INTRODUCED_AFTER + 0.1, 2 * TTL))
    client.cut_off()
    world.sleep(random.uniform(0, 0.5))  # a renewal may be under way
    concurrency.thread(close, "closes").start()
    world.sleep(1)
    assert not over.is_set()
    assert notes.renewed_at is not None
    assert notes.rests
    if random.random() < 0.5:
        client.reconnect()
    over.wait()
    world.sleep(TTL)  # after which no renewal is under way
    assert notes.renewed_at is None


# -- writes -----------------------------------------------------------------------------------------------------------


@simulated
def test_what_etcd_has_no_space_for_and_writes_all_the_same_is_written(world: World) -> None:
    world.observer.put("/beside", b"")
    world.etcd.set_no_space(True, let_in=1)
    reads = Get(Span("/beside")), Get(Span("/", is_prefix=True))
    outcome = write_once(world.observer, Put("/key", b"1"), None, reads=reads)
    beside, below = outcome.reads
    assert (outcome.done, outcome.kv) == (True, world.observer.get("/key").one)
    assert [kv.key for kv in (*beside.kvs, *below.kvs)] == ["/beside", "/beside", "/key"]
    assert outcome.revision == beside.revision == below.revision
    with pytest.raises(EtcdNoSpace):
        write_once(world.observer, Put("/other", b"1"), None)
    assert world.observer.get("/other").one is None


@simulated
def test_a_signal_handlers_change_outlives_the_grant_that_it_broke_into(world: World) -> None:
    """Both find no lease, so each is granted one."""
    grants = 0

    def fate(call: Call) -> Fate:
        nonlocal grants
        if call.method == "grant" and (grants := grants + 1) == 1:
            store.set("nested", b"")
        return DELIVERED

    store = EtcdStore(world.etcd.client(fate), "/s/", timedelta(seconds=5))
    store.set("outer", b"")
    gc.collect()
    assert store.check(["nested", "outer"])
    world.until(lambda: len(world.etcd.leases) == 1, "the other lease is given up")
    store.close()


@simulated
def test_nobody_knows_what_a_full_etcd_wrote_that_then_goes_away(world: World) -> None:
    client = world.etcd.client()
    client.fate = lambda call: DELIVERED if call.writes else REFUSED
    world.etcd.set_no_space(True, let_in=1)
    with pytest.raises(OutcomeUnknown):
        write_once(client, Put("/key", b"1"), None)


@simulated
def test_a_change_that_etcd_had_no_space_for_is_made_or_not_made_for_good(world: World) -> None:
    changes = ExactlyOnceWriter(world.observer, "/ops/", 600, None, None, concurrency.event())
    world.observer.put("/queue", b"item")
    changes.make([Put("/warm", b"")], [], None, concurrency.now() + 60)
    world.etcd.set_no_space(True, let_in=1)
    popped = changes.make([Delete(Span("/queue")), Put("/popped", b"")], [], "/popped", concurrency.now() + 60)
    assert (popped.done, popped.kv) == (True, world.observer.get("/popped").one)
    with pytest.raises(EtcdNoSpace):
        changes.make([Put("/popped", b"")], [], None, concurrency.now() + 60)
    world.etcd.set_no_space(False)
    assert changes.make([Put("/after", b"")], [], None, concurrency.now() + 60).done
    assert {key: world.observer.get(key).kvs[0].version for key in ("/popped", "/after")} == {"/popped": 1, "/after": 1}
    changes.close()


@simulated
def test_a_change_is_of_unknown_outcome_if_any_of_its_attempts_was(world: World) -> None:
    """The first one is made and its answer lost; the later ones never leave."""
    client = world.etcd.client()
    fates = iter((LOST_ANSWER,))
    client.fate = lambda call: next(fates, REFUSED) if call.writes else DELIVERED
    changes = ExactlyOnceWriter(client, "/ops/", 600, None, None, concurrency.event())
    with pytest.raises(OutcomeUnknown, match="was not answered, and then"):
        changes.make([Put("/made", b"")], [], None, concurrency.now() + 2)
    assert world.observer.get("/made").one is not None
    with pytest.raises(EtcdUnavailable):
        changes.make([Put("/not made", b"")], [], None, concurrency.now() + 2)
    changes.close()


@simulated
def test_a_change_is_made_once_or_never(world: World) -> None:
    """Behind a gate that opens and closes: what was made is there once, and what was refused never comes, also late."""
    made: dict[str, bool] = {}
    stop = concurrency.event()

    def change(writer: int) -> None:
        client = world.etcd.client(wild(10 * world.seed + writer))
        changes = ExactlyOnceWriter(client, f"/ops/{writer}/", 600, None, None, concurrency.event())
        for number in range(6):
            name = f"/made/{writer}/{number}"
            made[name] = changes.make([Put(name, b"")], [absent("/gate")], "/gate", concurrency.now() + 60).done
        changes.close()

    def open_and_close() -> None:
        while not stop.wait(random.uniform(0, 0.5)):
            world.observer.put("/gate", b"")
            stop.wait(random.uniform(0, 0.5))
            world.observer.delete(Span("/gate"))

    gate = concurrency.thread(open_and_close, "gate")
    gate.start()
    run(world, *(lambda writer=writer: change(writer) for writer in range(3)))
    world.sleep(10)  # what was late has arrived
    stop.set()
    gate.join()
    there = world.observer.range(Get(Span("/made/", is_prefix=True)))
    assert {kv.key: kv.version for kv in there.kvs} == {name: 1 for name, done in made.items() if done}
    assert len(made) == 18


STORE_OPERATIONS: dict[str, Callable[[EtcdStore], object]] = {
    "add": lambda store: store.add("key", 1),
    "append": lambda store: store.append("key", "1"),
}


@pytest.mark.parametrize("operate", STORE_OPERATIONS.values(), ids=STORE_OPERATIONS)
def test_an_operation_that_others_always_overtake_ends_in_time(operate: Callable[[EtcdStore], object]) -> None:
    @simulated
    def play(world: World) -> None:
        class Overtaken(Door):
            tries = 0

            def txn(self, *args: Any, **how: Any) -> TxnResult:
                self.tries += 1
                assert self.tries < 100, "it tries and tries"
                world.observer.delete(Span(f"{store_values_span('/s/').start}key"))
                world.observer.put(f"{store_values_span('/s/').start}key", b"1")
                return super().txn(*args, **how)

        store = EtcdStore(Overtaken(world.observer), "/s/", timedelta(seconds=5))
        began = concurrency.now()
        with pytest.raises(DistStoreError, match="others changed 'key'"):
            operate(store)
        assert concurrency.now() - began < 8
        store.close()

    play()


@pytest.mark.parametrize("operate", STORE_OPERATIONS.values(), ids=STORE_OPERATIONS)
def test_an_operation_succeeds_though_others_change_the_key_all_the_time(
    operate: Callable[[EtcdStore], object],
) -> None:
    """The key keeps its value for 3 ms, and a request takes 2 ms."""

    @simulated
    def play(world: World) -> None:
        client = world.etcd.client(lambda call: Fate(arrives=0.001, answers=0.001))
        store = EtcdStore(client, "/s/", timedelta(seconds=60))
        stop = concurrency.event()

        def overwrite() -> None:
            while not stop.is_set():
                world.observer.put(f"{store_values_span('/s/').start}key", b"1")
                world.sleep(0.003)

        def change() -> None:
            for _ in range(10):
                operate(store)
            stop.set()

        run(world, overwrite, change)
        store.close()

    play()


@simulated
def test_adding_zero_does_not_compete_with_those_who_add(world: World) -> None:
    """Not even if the first of them adds between the read and the put."""

    class Preceded(Door):
        def txn(self, *args: Any, **how: Any) -> TxnResult:
            asked.append("txn")
            adding.add("key", 5)
            return super().txn(*args, **how)

        def range(self, *args: Any, **how: Any) -> RangeResult:
            asked.append("range")
            return super().range(*args, **how)

    asked: list[str] = []
    adding = EtcdStore(world.observer, "/s/", timedelta(seconds=5))
    reading = EtcdStore(Preceded(world.observer), "/s/", timedelta(seconds=5))
    assert reading.add("key", 0) == 5
    assert asked == ["range", "txn"]
    assert (adding.add("key", 5), reading.add("key", 0)) == (10, 10)
    assert asked == ["range", "txn", "range"]
    for store in (adding, reading):
        store.close()


@simulated
def test_adding_zero_to_what_is_no_number_is_refused(world: World) -> None:
    """Also if somebody sets it between the read and the put."""

    class Preceded(Door):
        def txn(self, *args: Any, **how: Any) -> TxnResult:
            world.observer.put(f"{store_values_span('/s/').start}key", b"text")
            return super().txn(*args, **how)

    store = EtcdStore(Preceded(world.observer), "/s/", timedelta(seconds=5))
    for _ in range(2):
        with pytest.raises(DistStoreError, match="holds no decimal number"):
            store.add("key", 0)
    store.close()


# -- copies and changes of keys ---------------------------------------------------------------------------------------


def disturb(world: World, client: MemoryClient, chance: random.Random) -> None:
    """Something that happens to a watch."""

    def compact() -> None:
        with contextlib.suppress(RequestRefused):  # it is compacted already
            world.etcd.compact(max(world.etcd.revision - chance.randrange(3), 1))

    chance.choice((world.etcd.change_leader, client.cut_off, client.reconnect, compact, lambda: None))()


def write_at_random(world: World, chance: random.Random, leases: list[int]) -> None:
    key = f"/f/{chance.randrange(4)}"
    kind = chance.randrange(6)
    if kind == 0:
        world.observer.delete(Span(key))
    elif kind == 1:
        world.observer.delete(Span("/f/", is_prefix=True))
    elif kind == 2:
        leases.append(world.observer.grant(2).id)
        world.observer.put(key, b"leased", leases[-1])
    else:
        world.observer.txn((), [Put(key, str(chance.random()).encode()), Put("/elsewhere", b"")])


@simulated
def test_a_feed_tells_every_change_that_fits_the_last(world: World) -> None:
    """Whatever interrupts it, each change fits the one before; and a lost one is made up for with its key's next."""
    chance = random.Random(world.seed)
    client = world.etcd.client()
    lost: list[str] = []

    def loses(event: Event) -> bool:
        if chance.random() < 0.2:
            lost.append(event.kv.key)
            return True
        return False

    client.loses = loses
    feed, told = Feed(client, Span("/f/", is_prefix=True)), dict[str, KeyValue]()

    def catch_up() -> None:
        quiet = 0
        while quiet < 3:
            news = None
            with contextlib.suppress(EtcdError):
                news = feed.next(0.2)
            quiet = quiet + 1 if news is None else 0
            for key, was, now in news or ():
                assert told.get(key) == was != now
                told.pop(key, None)
                if now is not None:
                    told[key] = now

    leases: list[int] = []
    for _ in range(15):
        write_at_random(world, chance, leases)
        disturb(world, client, chance)
        catch_up()
    client.reconnect()
    client.loses = lambda _event: False
    world.sleep(5)
    world.observer.put(lost[-1] if lost else "/f/0", b"last")
    catch_up()
    assert told == {kv.key: kv for kv in world.observer.range(Get(Span("/f/", is_prefix=True))).kvs}
    feed.close()


@simulated
def test_an_informer_shows_what_etcd_has(world: World) -> None:
    chance = random.Random(world.seed)
    client = world.etcd.client()
    shown: list[tuple[dict[str, KeyValue], dict[str, KeyValue]]] = []

    def tell(first: Mirror, second: Mirror) -> None:
        shown.append((dict(first.kvs), dict(second.kvs)))

    spans = (Span("/f/", is_prefix=True), Span("/elsewhere"))
    gathers = chance.random() < 0.5
    informer = Informer(client, spans, tell, "ftcoord-test", failed=lambda error: None, gathers=gathers)
    leases: list[int] = []
    for _ in range(15):
        write_at_random(world, chance, leases)
        disturb(world, client, chance)
        world.sleep(chance.uniform(0, 0.5))
    client.reconnect()
    world.sleep(5)
    expected = tuple({kv.key: kv for kv in world.observer.range(Get(span)).kvs} for span in spans)
    world.until(lambda: shown[-1] == expected, "it shows what etcd has")
    informer.close()


@simulated
def test_an_informer_that_gathers_reports_once_for_all_that_came_meanwhile(world: World) -> None:
    every = [b"%d" % at for at in range(10)]
    assert reported_of(world, every, gathers=True) == [b"0", b"9"]
    assert reported_of(world, every, gathers=False) == every


def reported_of(world: World, values: list[bytes], *, gathers: bool) -> list[bytes]:
    """What an informer reports of a key that takes these values, all but the first while it reports that."""
    key, begun, goes_on, seen = f"/g/{gathers}", concurrency.event(), concurrency.event(), list[bytes]()

    def tell(mirror: Mirror) -> None:
        seen.append(mirror.one.value if mirror.one else b"")
        if seen[-1] == values[0]:
            begun.set()
            assert goes_on.wait(60)

    spans = [Span(key)]
    informer = Informer(world.etcd.client(), spans, tell, "ftcoord-test", failed=lambda error: None, gathers=gathers)
    world.until(lambda: bool(seen), "it is in sync")
    world.observer.put(key, values[0])
    assert begun.wait(60)
    for value in values[1:]:
        world.observer.put(key, value)
    world.sleep(1)  # all is in its inbox
    goes_on.set()
    world.until(lambda: seen[-1] == values[-1], "it has heard of all")
    informer.close()
    return seen[seen.index(values[0]) :]


@simulated
def test_no_change_is_taken_for_a_missed_one(world: World) -> None:
    """Nothing is read twice where no watch was interrupted, and no event got lost."""
    reads: list[Get] = []
    client = world.etcd.client()
    deliver = client.fate
    client.fate = lambda call: (reads.append(call.asked) if call.method == "range" else None, deliver(call))[1]
    feed = Feed(client, Span("/f/", is_prefix=True))
    chance = random.Random(world.seed)
    while not feed._mirror.synced:
        feed.next(0.1)
    leases: list[int] = []
    for _ in range(30):
        write_at_random(world, chance, leases)
        feed.next(chance.uniform(0, 0.1))
    assert len(reads) == 1
    feed.close()


# -- a key that a thread keeps at its wanted value ---------------------------------------------------------------------


@simulated
def test_a_leased_key_comes_to_have_the_wanted_value(world: World) -> None:
    """Whatever gets lost or late, and though the lease ends now and then."""
    chance = random.Random(world.seed)
    client = world.etcd.client(wild(world.seed))
    key, wanted = LeasedKey(client, TTL, lambda lease: f"/l/{lease:x}", "tests"), b""
    for _ in range(12):
        wanted = b"%d" % chance.randrange(3)
        key.put(wanted)
        if chance.random() < 0.2:
            for kv in world.observer.range(Get(Span("/l/", is_prefix=True))).kvs[:1]:
                world.etcd.expire(kv.lease)
        world.sleep(chance.uniform(0, 2))

    def there() -> list[bytes]:
        return list(world.keys("/l/").values())

    world.until(lambda: there() == [wanted], "the wanted value")
    world.sleep(10)  # also when all that was late has arrived
    assert there() == [wanted]
    key.close(5)


def run(world: World, *works: Callable[[], object]) -> None:
    """Do all of these at the same time, each in a process of its own."""
    threads = []
    for number, work in enumerate(works):
        with world.scheduler.process(f"worker {number}"):
            threads.append(concurrency.thread(work, f"work {number}"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
