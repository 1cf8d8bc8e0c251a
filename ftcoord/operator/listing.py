"""Reads which jobs there are."""

from __future__ import annotations

from collections.abc import Iterator

from ftcoord.core.layout import Span, branch_of, decode_key, run_id_of, runs_span
from ftcoord.etcd.api import EtcdCalls, Get


def job_ids(etcd: EtcdCalls, key_prefix: str) -> Iterator[str]:
    """The ids of all jobs below a key prefix, as they are found. Raises EtcdError."""
    everything = runs_span(key_prefix)
    rest = everything
    while (found := etcd.range(Get(rest, limit=1, keys_only=True)).one) is not None:
        job = run_id_of(key_prefix, found.key)
        if job is not None:
            yield job
        rest = _behind(branch_of(key_prefix, found.key), everything)


def _behind(span: Span, whole: Span) -> Span:
    """The part of a span after another one."""
    start = decode_key(span.end) if span.end else f"{span.start}\0"
    return Span(start, stop=decode_key(whole.end))
