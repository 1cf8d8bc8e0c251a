"""The part of etcd's public v3 API that ftcoord uses, as protobuf messages declared at run time.

Numbers are those of etcd's `rpc.proto` and `kv.proto` (https://etcd.io/docs/v3.5/dev-guide/api_reference_v3/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ftcoord.etcd.rpc.protobuf import declare

_MESSAGES: Final[dict[str, str]] = {
    "Header": "cluster_id 1 uint64, member_id 2 uint64, revision 3 int64, raft_term 4 uint64",
    "KeyValue": "key 1 bytes, create_revision 2 int64, mod_revision 3 int64, version 4 int64, value 5 bytes,"
    " lease 6 int64",
    "Event": "type 1 int32, kv 2 KeyValue, prev_kv 3 KeyValue",
    "RangeRequest": "key 1 bytes, range_end 2 bytes, limit 3 int64, revision 4 int64, sort_order 5 int32,"
    " sort_target 6 int32, keys_only 8 bool, count_only 9 bool, max_create_revision 13 int64",
    "RangeResponse": "header 1 Header, kvs 2 KeyValue*, more 3 bool, count 4 int64",
    "PutRequest": "key 1 bytes, value 2 bytes, lease 3 int64",
    "PutResponse": "header 1 Header",
    "DeleteRangeRequest": "key 1 bytes, range_end 2 bytes",
    "DeleteRangeResponse": "header 1 Header, deleted 2 int64",
    "RequestOp": "request_range 1 RangeRequest?request, request_put 2 PutRequest?request,"
    " request_delete_range 3 DeleteRangeRequest?request, request_txn 4 TxnRequest?request",
    "ResponseOp": "response_range 1 RangeResponse?response, response_put 2 PutResponse?response,"
    " response_delete_range 3 DeleteRangeResponse?response, response_txn 4 TxnResponse?response",
    "Compare": "result 1 int32, target 2 int32, key 3 bytes, version 4 int64?operand, create_revision 5 int64?operand,"
    " mod_revision 6 int64?operand, value 7 bytes?operand, lease 8 int64?operand, range_end 64 bytes",
    "TxnRequest": "compare 1 Compare*, success 2 RequestOp*, failure 3 RequestOp*",
    "TxnResponse": "header 1 Header, succeeded 2 bool, responses 3 ResponseOp*",
    "CompactionRequest": "revision 1 int64, physical 2 bool",
    "CompactionResponse": "header 1 Header",
    "WatchCreateRequest": "key 1 bytes, range_end 2 bytes, start_revision 3 int64, filters 5 int32*,"
    " watch_id 7 int64, fragment 8 bool",
    "WatchCancelRequest": "watch_id 1 int64",
    "WatchProgressRequest": "",
    "WatchRequest": "create_request 1 WatchCreateRequest?request, cancel_request 2 WatchCancelRequest?request,"
    " progress_request 3 WatchProgressRequest?request",
    "WatchResponse": "header 1 Header, watch_id 2 int64, created 3 bool, canceled 4 bool, compact_revision 5 int64,"
    " cancel_reason 6 string, fragment 7 bool, events 11 Event*",
    "LeaseGrantRequest": "ttl 1 int64, id 2 int64",
    "LeaseGrantResponse": "header 1 Header, id 2 int64, ttl 3 int64, error 4 string",
    "LeaseRevokeRequest": "id 1 int64",
    "LeaseRevokeResponse": "header 1 Header",
    "LeaseKeepAliveRequest": "id 1 int64",
    "LeaseKeepAliveResponse": "header 1 Header, id 2 int64, ttl 3 int64",
    "StatusRequest": "",
    "LeaseTimeToLiveRequest": "id 1 int64, keys 2 bool",
    "LeaseTimeToLiveResponse": "header 1 Header, id 2 int64, ttl 3 int64, granted_ttl 4 int64",
    "StatusResponse": "header 1 Header, version 2 string, db_size 3 int64, leader 4 uint64, raft_term 6 uint64,"
    " errors 8 string*, db_size_in_use 9 int64, is_learner 10 bool, db_size_quota 12 int64",
    "AlarmRequest": "action 1 int32",
    "AlarmMember": "member_id 1 uint64, alarm 2 int32",
    "AlarmResponse": "header 1 Header, alarms 2 AlarmMember*",
    "Member": "id 1 uint64, name 2 string",
    "MemberListRequest": "",
    "MemberListResponse": "header 1 Header, members 2 Member*",
    "AuthenticateRequest": "name 1 string, password 2 string",
    "AuthenticateResponse": "header 1 Header, token 2 string",
    "AuthUserRequest": "name 1 string, password 2 string",
    "AuthUserGrantRoleRequest": "user 1 string, role 2 string",
    "AuthSwitchRequest": "",
    "AuthResponse": "header 1 Header",
}

PUT_EVENT: Final = 0
NO_PUTS: Final = 0
"""The filter of a watch that gets deletions only."""
SORT: Final = {"oldest": 1, "newest": 2}
SORT_BY_CREATE: Final = 2
ALARM_NAMES: Final = {1: "NOSPACE", 2: "CORRUPT"}
"""etcd's alarms by number."""
COMPARE_RESULT: Final = {"=": 0, ">": 1, "<": 2, "!=": 3}
COMPARE_TARGET: Final = {"version": 0, "create": 1, "mod": 2, "value": 3, "lease": 4}
COMPARE_FIELD: Final = {
    "version": "version",
    "create": "create_revision",
    "mod": "mod_revision",
    "value": "value",
    "lease": "lease",
}

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
COMPACT = Method("KV/Compact", "CompactionRequest", "CompactionResponse")
WATCH = Method("Watch/Watch", "WatchRequest", "WatchResponse")
GRANT = Method("Lease/LeaseGrant", "LeaseGrantRequest", "LeaseGrantResponse")
REVOKE = Method("Lease/LeaseRevoke", "LeaseRevokeRequest", "LeaseRevokeResponse")
KEEP_ALIVE = Method("Lease/LeaseKeepAlive", "LeaseKeepAliveRequest", "LeaseKeepAliveResponse")
TIME_TO_LIVE = Method("Lease/LeaseTimeToLive", "LeaseTimeToLiveRequest", "LeaseTimeToLiveResponse")
STATUS = Method("Maintenance/Status", "StatusRequest", "StatusResponse")
ALARMS = Method("Maintenance/Alarm", "AlarmRequest", "AlarmResponse")
MEMBERS = Method("Cluster/MemberList", "MemberListRequest", "MemberListResponse")
AUTHENTICATE = Method("Auth/Authenticate", "AuthenticateRequest", "AuthenticateResponse")
USER_ADD = Method("Auth/UserAdd", "AuthUserRequest", "AuthResponse")
USER_CHANGE_PASSWORD = Method("Auth/UserChangePassword", "AuthUserRequest", "AuthResponse")
USER_GRANT_ROLE = Method("Auth/UserGrantRole", "AuthUserGrantRoleRequest", "AuthResponse")
AUTH_ENABLE = Method("Auth/AuthEnable", "AuthSwitchRequest", "AuthResponse")
AUTH_DISABLE = Method("Auth/AuthDisable", "AuthSwitchRequest", "AuthResponse")
