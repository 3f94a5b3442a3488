"""Reads untrusted files: without blocking, up to a size, and only JSON with one meaning.

Text of such a file goes through `printable` before it is printed to a terminal.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

MAX_DEPTH = 16
LONGEST_WORD = 1000
_ALL_SQUARE = bytes.maketrans(b"{}", b"[]")
_NEITHER_QUOTES_NOR_BRACKETS = bytes(byte for byte in range(256) if byte not in b'"[]{}')


class NotAFileError(OSError):
    """A folder, a pipe or a device."""


def read_bytes(path: Path, most: int) -> bytes:
    """Read up to `most` + 1 bytes of a regular file, without blocking. Raises OSError, NotAFileError for anything but a
    regular file, or ValueError for an impossible name."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotAFileError("not a regular file")
        return file.read(most + 1)


def check_shallow(data: bytes) -> None:
    """Raise ValueError for brackets that do not match, are in strings or nest deeper than MAX_DEPTH.

    It scans bytes, without recursion. Escapes are removed first, then all but quotes and brackets, so that strings
    become pairs of quotes, which are removed, too: no string of a schedule has a bracket. Each pass then removes the
    innermost brackets.
    """
    brackets = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_ALL_SQUARE, _NEITHER_QUOTES_NOR_BRACKETS)
    brackets = brackets.replace(b'""', b"")
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(f"brackets that do not match, stand in strings or nest more than {MAX_DEPTH} deep")


def check_keys(data: bytes) -> None:
    """Raise ValueError for a key that is twice in one object. data: JSON that passed `check_shallow`."""
    json.loads(data, object_pairs_hook=_refuse_twins)


def check_words(value: object) -> None:
    """Raise ValueError for a string among decoded values that is very long, or not printable."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if not item.isprintable() or len(item) > LONGEST_WORD:
                raise ValueError(f"words that are not printed: {printable(item)[:60]!r}")
        elif isinstance(item, dict):
            stack += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            stack += item


def printable(text: str) -> str:
    """Replace each control character, or one that reorders text, by a question mark."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _refuse_twins(pairs: list[tuple[str, object]]) -> None:
    """Raise for a duplicate key. json calls it for each object, innermost first; it returns nothing, to save memory."""
    if len({key for key, _ in pairs}) != len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for position, key in enumerate(keys) if key in keys[:position])
        raise ValueError(f"key `{twin[:40]}` stands twice in one object")
