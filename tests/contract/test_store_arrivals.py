"""Reading and awaiting many keys of an EtcdStore: how often etcd is asked, and what is seen meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial

import pytest
from helpers import DEADLINE, eventually
from rdzv_nodes import spawn
from torch.distributed import DistStoreError
from watching import Watching

from ftcoord.errors import RoundOver
from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.store import EtcdStore
from ftcoord.store.store import KEYS_PER_REQUEST

LONG = timedelta(seconds=DEADLINE)
MANY = 2 * KEYS_PER_REQUEST + 50
KEYS = [f"info/{number}" for number in range(MANY)]
VALUES = [b"v%d" % number for number in range(MANY)]


@pytest.fixture
def watching(client: EtcdClient) -> Watching:
    return Watching(client)


@pytest.fixture
def store(watching: Watching, prefix: str) -> Iterator[EtcdStore]:
    """The one that reads."""
    with_fence = EtcdStore(watching, f"{prefix}/", LONG)
    yield with_fence
    with_fence.close()


@pytest.fixture
def writer(client: EtcdClient, prefix: str) -> Iterator[EtcdStore]:
    """Another client of the same store."""
    writer = EtcdStore(client, f"{prefix}/", LONG)
    yield writer
    writer.close()


def test_many_keys_that_are_there_are_read_at_once(store: EtcdStore, writer: EtcdStore, watching: Watching) -> None:
    writer.multi_set(KEYS, VALUES)
    assert store.multi_get(KEYS[::-1]) == VALUES[::-1]
    assert (watching.reads, watching.spans) == (1, [])


def test_many_keys_among_more_others_are_read(store: EtcdStore, writer: EtcdStore, watching: Watching) -> None:
    others = [f"info/1/other/{number}" for number in range(2 * MANY)]
    writer.multi_set([*others, *KEYS], ["x"] * len(others) + VALUES)
    assert store.multi_get(KEYS) == VALUES
    assert watching.reads == 1 + MANY  # one that found too much, and then each
    store.wait(KEYS)
    assert watching.spans == []


def test_many_keys_beside_more_others_are_read_at_once(store: EtcdStore, writer: EtcdStore, watching: Watching) -> None:
    others = [f"info/other/{number}" for number in range(2 * MANY)]
    writer.multi_set([*others, *KEYS], ["x"] * len(others) + VALUES)
    assert store.multi_get(KEYS) == VALUES
    store.wait(KEYS)
    assert (watching.reads, watching.spans) == (2, [])


@pytest.mark.parametrize("there", [0, 1, MANY - 2])
def test_many_keys_that_come_one_by_one_take_one_watch(
    store: EtcdStore, writer: EtcdStore, watching: Watching, there: int
) -> None:
    """Rank 0 reads what all the others write, as they come."""
    writer.multi_set(KEYS[:there], VALUES[:there])
    waiting = spawn(partial(store.multi_get, KEYS))
    eventually(lambda: watching.stands, "the watch stands")
    for key, value in zip(KEYS[there:], VALUES[there:], strict=True):
        writer.set(key, value)
    assert waiting.result(DEADLINE) == VALUES
    assert (watching.reads, len(watching.spans)) == (3, 1)  # all, how many others, and again once the watch stands


def test_values_that_come_in_every_way_are_as_they_are_there(store: EtcdStore, writer: EtcdStore) -> None:
    """A counter, a value that looks like one, an appended one, an empty one."""
    waiting = spawn(lambda: store.multi_get(["in/count", "in/mark", "in/more", "in/empty"]))
    writer.set("in/mark", b"\0ftcoord+1:1")
    writer.set("in/more", b"a")
    writer.append("in/more", b"b")
    writer.add("in/count", 5)
    writer.set("in/empty", b"")
    count, mark, more, empty = waiting.result(DEADLINE)
    assert (count, mark, empty) == (b"5", b"\0ftcoord+1:1", b"")
    assert more in (b"a", b"ab")  # as it was when it was seen first


def test_keys_that_come_among_more_others_are_awaited(
    store: EtcdStore, writer: EtcdStore, watching: Watching, prefix: str
) -> None:
    """A watch of all that begins alike would bring too much of what nobody waits for."""
    writer.multi_set([f"info/other/{number}" for number in range(30)], ["x"] * 30)
    waits = [spawn(partial(store.multi_get, KEYS[:3])), spawn(partial(store.wait, KEYS[:3]))]
    eventually(lambda: watching.stands, "a watch stands")
    for key, value in zip(KEYS[:3], VALUES[:3], strict=True):
        writer.set(key, value)
    assert [waiting.result(DEADLINE) for waiting in waits] == [VALUES[:3], None]
    assert all(span.start.startswith((f"{prefix}/data/info/", f"{prefix}/queues/info%2F")) for span in watching.spans)
    assert not any(span == Span(f"{prefix}/data/info/", is_prefix=True) for span in watching.spans)


def test_a_wait_for_values_and_queues_takes_two_watches(
    store: EtcdStore, writer: EtcdStore, watching: Watching
) -> None:
    keys = ["in/a/b", "in/c d", "in/%", "in/e"]
    waiting = spawn(partial(store.wait, keys))
    eventually(lambda: watching.stands == 2, "both watches stand")
    for number, key in enumerate(keys):
        writer.set(key, b"") if number % 2 else writer.queue_push(key, "item")
    waiting.result(DEADLINE)
    assert len(watching.spans) == 2
    assert store.check(keys)


def test_a_wait_does_not_end_with_a_key_that_is_gone_again(
    store: EtcdStore, writer: EtcdStore, watching: Watching
) -> None:
    waiting = spawn(partial(store.wait, ["in/a", "in/b"]))
    eventually(lambda: watching.stands == 2, "both watches stand")
    writer.set("in/a", b"")
    writer.delete_key("in/a")
    writer.set("in/b", b"")
    eventually(lambda: len(watching.spans) > 2, "it waits for the one that is gone")
    assert not waiting.done()
    writer.set("in/a", b"")
    waiting.result(DEADLINE)


WAITS: dict[str, Callable[[EtcdStore, Sequence[str]], object]] = {
    "multi_get": EtcdStore.multi_get,
    "wait": EtcdStore.wait,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_for_many_keys_says_which_did_not_come(
    client: EtcdClient, prefix: str, wait: Callable[[EtcdStore, Sequence[str]], object]
) -> None:
    store = EtcdStore(client, f"{prefix}/", timedelta(seconds=0.5))
    store.multi_set(KEYS[:-1], VALUES[:-1])
    with pytest.raises(DistStoreError, match=f"nobody set '{KEYS[-1]}' in time"):
        wait(store, KEYS)
    with pytest.raises(DistStoreError, match="nobody set 'other/0' in time"):
        wait(store, ["other/0", "other/1"])
    store.close()


@pytest.mark.parametrize("there", [MANY, MANY - 1])
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_for_many_keys_ends_with_the_fence(
    client: EtcdClient, prefix: str, wait: Callable[[EtcdStore, Sequence[str]], object], there: int
) -> None:
    """The watch of the keys is deaf, so only the read that follows the end of the fence sees whether all are there."""
    fence = f"{prefix}/fence"
    client.put(fence, b"")
    deaf = Watching(client, deaf_to=f"{prefix}/data/info/")
    store, writer = EtcdStore(deaf, f"{prefix}/", LONG, fence=fence), EtcdStore(client, f"{prefix}/", LONG)
    waiting = spawn(partial(wait, store, KEYS))
    eventually(lambda: deaf.stands >= 2 and deaf.stands == len(deaf.spans), "all watches stand")
    writer.multi_set(KEYS[:there], VALUES[:there])
    client.delete(Span(fence))
    if there == MANY:
        waiting.result(DEADLINE)
    else:
        with pytest.raises(RoundOver, match="join the next one"):
            waiting.result(DEADLINE)
    store.close()
    writer.close()
