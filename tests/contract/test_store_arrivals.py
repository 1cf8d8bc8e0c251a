"""Reading and awaiting many keys of an EtcdStore: how often etcd is asked, and what is seen meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial

import pytest
from doors import Watching
from helpers import DEADLINE, eventually
from rdzv_nodes import spawn
from torch.distributed import DistStoreError

from ftcoord.errors import RoundOver
from ftcoord.etcd.api import Span
from ftcoord.etcd.client import EtcdClient
from ftcoord.store import KEYS_PER_REQUEST, EtcdStore

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
    assert (watching.reads, len(watching.spans)) == (2, 1)  # all, and again once the watch stands


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
