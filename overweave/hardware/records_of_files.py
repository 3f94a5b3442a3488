"""What a file of records says before it is one, and which of their fields a wrong name is nearest to."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct

from overweave.errors import nearest
from overweave.untrusted import check_keys, check_words

_UNKNOWN_FIELD = re.compile("unknown field `([^`]*)`")


def values_of(data: bytes, most_bytes: int) -> object:
    """Decoded JSON. Raises what msgspec raises, and ValueError for more bytes, keys that stand twice, words that no
    terminal prints.
    """
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    told: object = msgspec.json.decode(data)
    check_keys(data)
    check_words(told)
    return told


def nearest_field(told: str, record: type[Struct]) -> str:
    """A cure for msgspec's error about a field that no record has. Empty for other errors."""
    unknown = _UNKNOWN_FIELD.search(told)
    if unknown is None:
        return ""
    structs, names = [record], set[str]()
    for struct in structs:
        names.update(struct.__struct_fields__)
        kinds = get_type_hints(struct).values()
        structs += [each for kind in kinds for each in _structs_of(kind) if each not in structs]
    return nearest("Fields", unknown.group(1), sorted(names), "docs/how-to/machines.md")


def _structs_of(kind: Any) -> list[type[Struct]]:
    """The records that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return [kind]
    return [each for part in get_args(kind) for each in _structs_of(part)]
