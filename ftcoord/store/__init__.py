"""EtcdStore: a c10d Store whose keys live in etcd."""

from ftcoord.store.errors import QueueEmptyError, RoundOverError
from ftcoord.store.store import EtcdStore

__all__ = ["EtcdStore", "QueueEmptyError", "RoundOverError"]
