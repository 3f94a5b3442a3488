"""Decoding of JSON files of records, and suggestions for unknown fields."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct

from overweave.errors import nearest
from overweave.untrusted import check_keys, check_words

_UNKNOWN_FIELD = re.compile("unknown field `([^`]*)`")


def values_of(data: bytes, most_bytes: int) -> object:
    """Return decoded JSON. Raises msgspec's errors, and ValueError for too many bytes, duplicate keys, unprintable
    words."""
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    values: object = msgspec.json.decode(data)
    check_keys(data)
    check_words(values)
    return values


def nearest_field(error: str, record: type[Struct]) -> str:
    """Return a cure for msgspec's error about an unknown field; "" for other errors."""
    unknown = _UNKNOWN_FIELD.search(error)
    if unknown is None:
        return ""
    structs, names = [record], set[str]()
    for struct in structs:
        names.update(struct.__struct_fields__)
        kinds = get_type_hints(struct).values()
        structs += [each for kind in kinds for each in _structs_of(kind) if each not in structs]
    return nearest("Fields", unknown.group(1), sorted(names), "docs/how-to/machines.md")


def _structs_of(kind: Any) -> list[type[Struct]]:
    """Return the records that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return [kind]
    return [each for part in get_args(kind) for each in _structs_of(part)]
