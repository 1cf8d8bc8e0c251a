"""Protobuf messages declared at run time.

Only field numbers, types and method paths go over the wire, so messages need no generated code that ties users to one
protobuf version. They have their own descriptor pools: no clash with another client in the same process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
