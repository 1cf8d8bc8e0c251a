"""What goes over the wire to etcd and back: messages, methods, and what a failed call means.

Messages are declared at run time, with the numbers of etcd's `rpc.proto` and `kv.proto`
(https://etcd.io/docs/v3.5/dev-guide/api_reference_v3/). Only field numbers, types and method paths go over the wire. So
no generated code ties users to one protobuf version, and messages of one form share a name. They have their own
descriptor pools: no clash with another client in the same process.

A write is reported as without effect (`EtcdUnavailable`) only if that is provable, because the request never left this
process or because etcd reports that it refused it before proposing it. Any other failure of a write is
`OutcomeUnknown`. (Compare `isSafeRetryMutableRPC` in etcd's clientv3.) `EtcdNoSpace` promises nothing: etcd returns it
both when it admits a write and after it has applied one (`quotaApplierV3`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from ftcoord.core.layout import decode_key, encode_key
from ftcoord.errors import (
    NO_ETCD,
    EtcdAuthError,
    EtcdError,
    EtcdNoSpace,
    EtcdUnavailable,
    LeaseLost,
    OutcomeUnknown,
    RequestRefused,
    WrongEndpoint,
)
from ftcoord.etcd.api import Compare, Get, KeyValue, Op, Put, RangeResult, TxnResult, check_writes

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,  # enums are varints too, and open: an unknown number survives
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
}


def declare(package: str, messages: Mapping[str, str]) -> dict[str, Any]:
    """The message classes of a package, by name.

    Args:
        package: any name; it does not go over the wire.
        messages: for each message its fields, as "name number type, ...". A type is a scalar's or another message's
            name; `*` after it repeats the field, `?group` puts it into a oneof.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for spec in filter(None, fields.split(",")):
            _add_field(package, message, spec)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def _add_field(package: str, message: descriptor_pb2.DescriptorProto, spec: str) -> None:
    name, number, kind = spec.split()
    kind, _, group = kind.partition("?")
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.endswith("*"):
        kind, field.label = kind[:-1], _Field.LABEL_REPEATED
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
    if group:
        if not message.oneof_decl:
            message.oneof_decl.add(name=group)
        field.oneof_index = 0


_MESSAGES: Final[dict[str, str]] = {
    "Empty": "",  # also for answers of which nothing is read
    "Header": "member_id 2 uint64, revision 3 int64",
    "KeyValue": "key 1 bytes, create_revision 2 int64, mod_revision 3 int64, version 4 int64, value 5 bytes,"
    " lease 6 int64",
    "Event": "type 1 int32, kv 2 KeyValue",
    "RangeRequest": "key 1 bytes, range_end 2 bytes, limit 3 int64, revision 4 int64, sort_order 5 int32,"
    " sort_target 6 int32, keys_only 8 bool, count_only 9 bool",
    "RangeResponse": "header 1 Header, kvs 2 KeyValue*, count 4 int64",
    "PutRequest": "key 1 bytes, value 2 bytes, lease 3 int64",
    "DeleteRangeRequest": "key 1 bytes, range_end 2 bytes",
    "DeleteRangeResponse": "deleted 2 int64",
    "RequestOp": "request_range 1 RangeRequest?request, request_put 2 PutRequest?request,"
    " request_delete_range 3 DeleteRangeRequest?request",
    "ResponseOp": "response_range 1 RangeResponse?response, response_put 2 Empty?response,"
    " response_delete_range 3 DeleteRangeResponse?response",
    "Compare": "result 1 int32, target 2 int32, key 3 bytes, version 4 int64?operand, create_revision 5 int64?operand,"
    " mod_revision 6 int64?operand, value 7 bytes?operand, lease 8 int64?operand",
    "TxnRequest": "compare 1 Compare*, success 2 RequestOp*, failure 3 RequestOp*",
    "TxnResponse": "header 1 Header, succeeded 2 bool, responses 3 ResponseOp*",
    "CompactionRequest": "revision 1 int64",
    "WatchCreateRequest": "key 1 bytes, range_end 2 bytes, start_revision 3 int64, filters 5 int32*, watch_id 7 int64",
    "WatchCancelRequest": "watch_id 1 int64",
    "WatchRequest": "create_request 1 WatchCreateRequest?request, cancel_request 2 WatchCancelRequest?request",
    "WatchResponse": "header 1 Header, watch_id 2 int64, created 3 bool, canceled 4 bool, compact_revision 5 int64,"
    " cancel_reason 6 string, events 11 Event*",
    "LeaseGrantRequest": "ttl 1 int64",
    "LeaseId": "id 1 int64",
    "Lease": "id 2 int64, ttl 3 int64, granted_ttl 4 int64",
    "StatusResponse": "header 1 Header, version 2 string, db_size 3 int64, leader 4 uint64, raft_term 6 uint64,"
    " errors 8 string*, db_size_in_use 9 int64, is_learner 10 bool, db_size_quota 12 int64",
    "AlarmMember": "member_id 1 uint64, alarm 2 int32",
    "AlarmResponse": "alarms 2 AlarmMember*",
    "Member": "id 1 uint64, name 2 string",
    "MemberListResponse": "members 2 Member*",
    "User": "name 1 string, password 2 string",
    "Token": "token 2 string",
    "UserRole": "user 1 string, role 2 string",
}

PUT_EVENT: Final = 0
NO_PUTS: Final = 0
"""The filter of a watch that gets deletions only."""
SORT: Final = {"oldest": 1, "newest": 2}
SORT_BY_CREATE: Final = 2
ALARM_NAMES: Final = {1: "NOSPACE", 2: "CORRUPT"}
"""etcd's alarms by number."""
_RELATION: Final = {"=": 0, ">": 1, "<": 2, "!=": 3}
_TARGET: Final = {
    "version": (0, "version"),
    "create": (1, "create_revision"),
    "mod": (2, "mod_revision"),
    "value": (3, "value"),
    "lease": (4, "lease"),
}
"""For each target of a guard its number, and the field of its operand."""

_CLASSES: Final = declare("ftcoord.etcdv3", _MESSAGES)


def message(name: str) -> Any:
    """The message class of this name."""
    return _CLASSES[name]


class Method:
    """One remote procedure: its path, and how its request and response are encoded."""

    def __init__(self, path: str, request: str, response: str) -> None:
        self.path = f"/etcdserverpb.{path}"
        self.name = path.rpartition("/")[2]
        self.serialize: Callable[[Any], bytes] = _CLASSES[request].SerializeToString
        self.parse: Callable[[bytes], Any] = _CLASSES[response].FromString


RANGE = Method("KV/Range", "RangeRequest", "RangeResponse")
TXN = Method("KV/Txn", "TxnRequest", "TxnResponse")
COMPACT = Method("KV/Compact", "CompactionRequest", "Empty")
WATCH = Method("Watch/Watch", "WatchRequest", "WatchResponse")
GRANT = Method("Lease/LeaseGrant", "LeaseGrantRequest", "Lease")
REVOKE = Method("Lease/LeaseRevoke", "LeaseId", "Empty")
KEEP_ALIVE = Method("Lease/LeaseKeepAlive", "LeaseId", "Lease")
TIME_TO_LIVE = Method("Lease/LeaseTimeToLive", "LeaseId", "Lease")
STATUS = Method("Maintenance/Status", "Empty", "StatusResponse")
ALARMS = Method("Maintenance/Alarm", "Empty", "AlarmResponse")
MEMBERS = Method("Cluster/MemberList", "Empty", "MemberListResponse")
AUTHENTICATE = Method("Auth/Authenticate", "User", "Token")
USER_ADD = Method("Auth/UserAdd", "User", "Empty")
USER_CHANGE_PASSWORD = Method("Auth/UserChangePassword", "User", "Empty")
USER_GRANT_ROLE = Method("Auth/UserGrantRole", "UserRole", "Empty")
AUTH_ENABLE = Method("Auth/AuthEnable", "Empty", "Empty")
AUTH_DISABLE = Method("Auth/AuthDisable", "Empty", "Empty")


def key_value(raw: Any) -> KeyValue:
    """A KeyValue message as a plain value."""
    return KeyValue(decode_key(raw.key), raw.value, raw.create_revision, raw.mod_revision, raw.version, raw.lease)


def range_request(get: Get) -> Any:
    """A RangeRequest message."""
    request = message("RangeRequest")()
    _write_range(request, get)
    return request


# Field by field: half of the time that keyword arguments take, which showed in every transaction.


def txn_request(compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> Any:
    """A TxnRequest message. Raises RequestRefused for a transaction that only reads."""
    check_writes(success, failure)
    request = message("TxnRequest")()
    for compare in compares:
        _write_compare(request.compare.add(), compare)
    for op in success:
        _write_op(request.success.add(), op)
    for op in failure:
        _write_op(request.failure.add(), op)
    return request


def _write_range(raw: Any, get: Get) -> None:
    raw.key, raw.range_end = encode_key(get.span.start) or b"\0", get.span.end
    raw.limit, raw.revision, raw.keys_only, raw.count_only = get.limit, get.revision, get.keys_only, get.count_only
    if get.order != "keys":
        raw.sort_order, raw.sort_target = SORT[get.order], SORT_BY_CREATE


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
    raw.key, raw.result = encode_key(compare.key), _RELATION[compare.relation]
    raw.target, field = _TARGET[compare.target]
    setattr(raw, field, compare.operand)


def txn_result(response: Any) -> TxnResult:
    """The result in a TxnResponse message."""
    revision = response.header.revision
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


_NEVER_LEFT: Final = re.compile("failed to connect to all addresses|DNS resolution failed|Name resolution failed")
_NOT_PROPOSED: Final = re.compile("etcdserver: (no leader|too many requests|rpc not supported for learner)")
_SETTINGS: Final = "--rdzv-endpoint, --endpoints or FTCOORD_ENDPOINTS"
_UNFIT: Final = {
    "certificate has expired": "its certificate has expired: give etcd a new one",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted: set FTCOORD_CA_CERT to that of its CA",
    "Hostname Verification Check failed": "its certificate is for another host: name it as the certificate does, or set"
    " FTCOORD_SERVER_NAME",
    "ALERT_(BAD_CERTIFICATE|CERTIFICATE_REQUIRED|UNKNOWN_CA)": "it wants a client certificate that it trusts: set"
    " FTCOORD_CERT and FTCOORD_KEY",
    r"WRONG_VERSION_NUMBER|Handshake read failed \((Socket closed|recvmsg)": "it does not answer in TLS: write http://,"
    " and leave out the TLS settings",
    "Failed parsing HTTP/2": f"something else than etcd answers there: correct {_SETTINGS}",
    "Socket closed|reset by peer": f"it closes the connection: write https:// if it wants TLS, or correct {_SETTINGS}",
}
"""Texts of gRPC for a connection that fails whenever it is tried, and what each means."""
_CONNECT_ERROR: Final = re.compile(r"Failed to connect to remote host: (.*)|(timed out|Endpoint closing)", re.DOTALL)
_STALE_TOKEN: Final = re.compile("invalid auth token|revision in token is older|user name is empty")
_AUTH: Final = re.compile(
    "authentication failed|permission denied|user name is empty|user not found|no password|role not found"
)
_UNANSWERED_CODES: Final = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNKNOWN", "ABORTED")
_REFUSED_CODES: Final = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE")


def is_stale_token(details: str) -> bool:
    """Whether a login token expired, was forgotten by a restarted server, or is missing because authentication was
    enabled after the last login. A client with a user logs in again and repeats the call."""
    return _STALE_TOKEN.search(details) is not None


def blames_member(code: str, details: str) -> bool:
    """Whether another member may do better."""
    return code in _UNANSWERED_CODES or _NOT_PROPOSED.search(details) is not None


def translate(code: str, details: str, *, write: bool, where: str) -> EtcdError:
    """The exception for a failed call of the member `where`.

    `code` is the name of a gRPC status code (https://grpc.io/docs/guides/status-codes/), `details` its text.
    """
    fate = f"etcd at {where}: {details or code} ({code})"
    if _NEVER_LEFT.search(details):
        return _not_connected(details, where)
    if _NOT_PROPOSED.search(details):
        return EtcdUnavailable(fate)
    if "requested lease not found" in details:
        return LeaseLost(f"{fate}; it expired or was revoked: take a new one")
    if "database space exceeded" in details:
        return EtcdNoSpace(
            f"{fate}: NOSPACE; make room with `etcdctl compact REVISION` and `etcdctl defrag`, then"
            " `etcdctl alarm disarm`; a write may have happened all the same: re-read before repeating it"
        )
    if _AUTH.search(details) or code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return EtcdAuthError(
            f"{fate}; check FTCOORD_USER, FTCOORD_PASSWORD and the client certificate, and that the user's role may use"
            " the key prefix"
        )
    if code in _UNANSWERED_CODES:
        return OutcomeUnknown(f"{fate}; the write may have happened") if write else EtcdUnavailable(fate)
    if code in _REFUSED_CODES:
        return RequestRefused(f"{fate}; etcd takes at most 128 operations and 1.5 MiB a request")
    return EtcdError(fate)


def _not_connected(details: str, where: str) -> EtcdUnavailable:
    for text, meaning in _UNFIT.items():
        if re.search(text, details):
            return WrongEndpoint(f"{NO_ETCD} {where}: {meaning}")
    found = _CONNECT_ERROR.search(details)
    if found is None:
        return EtcdUnavailable(f"{NO_ETCD} {where}: {details}; correct {_SETTINGS}, or the TLS settings")
    problem = found[1].lower() if found[1] else "the connection is not answered"
    return EtcdUnavailable(f"{NO_ETCD} {where}: {problem}. Start one (ftcoord server), or set {_SETTINGS}")
