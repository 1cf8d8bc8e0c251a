"""Converts between requests and results of etcd's API and the messages on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftcoord.core.layout import decode_key, encode_key
from ftcoord.etcd.api import Compare, Get, KeyValue, Op, Put, RangeResult, TxnResult, check_writes
from ftcoord.etcd.rpc import messages


def key_value(raw: Any) -> KeyValue:
    """A KeyValue message as a plain value."""
    return KeyValue(decode_key(raw.key), raw.value, raw.create_revision, raw.mod_revision, raw.version, raw.lease)


def range_request(get: Get) -> Any:
    """A RangeRequest message."""
    request = messages.message("RangeRequest")()
    _write_range(request, get)
    return request


# Field by field: half of the time that keyword arguments take, which showed in every transaction.


def txn_request(compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> Any:
    """A TxnRequest message. Raises RequestRefused for a transaction that only reads."""
    check_writes(success, failure)
    request = messages.message("TxnRequest")()
    for compare in compares:
        _write_compare(request.compare.add(), compare)
    for op in success:
        _write_op(request.success.add(), op)
    for op in failure:
        _write_op(request.failure.add(), op)
    return request


def _write_range(raw: Any, get: Get) -> None:
    raw.key = encode_key(get.span.start) or b"\0"
    if get.span.end:
        raw.range_end = get.span.end
    if get.limit:
        raw.limit = get.limit
    if get.revision:
        raw.revision = get.revision
    if get.keys_only:
        raw.keys_only = True
    if get.count_only:
        raw.count_only = True
    if get.order != "keys":
        raw.sort_order, raw.sort_target = messages.SORT[get.order], messages.SORT_BY_CREATE
    if get.created_before:
        raw.max_create_revision = get.created_before - 1


def _write_op(raw: Any, op: Op) -> None:
    if isinstance(op, Get):
        _write_range(raw.request_range, op)
    elif isinstance(op, Put):
        put = raw.request_put
        put.key, put.value, put.lease = encode_key(op.key), op.value, op.lease
    else:
        delete = raw.request_delete_range
        delete.key, delete.range_end = encode_key(op.span.start) or b"\0", op.span.end


def _write_compare(raw: Any, compare: Compare) -> None:
    raw.key, raw.result = encode_key(compare.key), messages.COMPARE_RESULT[compare.relation]
    raw.target = messages.COMPARE_TARGET[compare.target]
    setattr(raw, messages.COMPARE_FIELD[compare.target], compare.operand)
    if compare.end:
        raw.range_end = compare.end


def txn_result(response: Any, revision: int) -> TxnResult:
    """The result in a TxnResponse message."""
    return TxnResult(response.succeeded, revision, tuple(_op_result(one, revision) for one in response.responses))


def range_result(response: Any, revision: int) -> RangeResult:
    """The result in a RangeResponse message."""
    return RangeResult(tuple(key_value(kv) for kv in response.kvs), response.count, revision)


def _op_result(response: Any, revision: int) -> RangeResult | int | None:
    if response.HasField("response_range"):
        return range_result(response.response_range, revision)
    if response.HasField("response_delete_range"):
        return int(response.response_delete_range.deleted)
    return None
