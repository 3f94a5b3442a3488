"""Files that nobody vouches for: read without waiting, no more than was asked for, and none that mean two things.

What is told of such a file goes through `printable`: its words reach terminals.
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
    """What a regular file holds, up to one byte more than it may; nobody is waited for. Raises OSError, NotAFileError
    for anything else, or ValueError where the name cannot be one."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotAFileError("not a regular file")
        return file.read(most + 1)


def check_shallow(data: bytes) -> None:
    """Raises ValueError where brackets do not match, stand in strings or nest deeper than MAX_DEPTH.

    Passes over bytes, without recursion or a tree: what is read into types that nest no deeper is not asked.

    Escapes go first, then all but quotes and brackets, so that strings become pairs of quotes and go too: none of a
    schedule holds a bracket. Then each pass peels one layer of innermost brackets.
    """
    brackets = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_ALL_SQUARE, _NEITHER_QUOTES_NOR_BRACKETS)
    brackets = brackets.replace(b'""', b"")
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(f"brackets that do not match, stand in strings or nest more than {MAX_DEPTH} deep")


def check_keys(data: bytes) -> None:
    """Raises ValueError where a key stands twice in one object of JSON that is shallow."""
    json.loads(data, object_pairs_hook=_refuse_twins)


def check_words(value: object) -> None:
    """Raises ValueError where a string among decoded values is very long, or a terminal would not print it as it is."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            if not each.isprintable() or len(each) > LONGEST_WORD:
                raise ValueError(f"words that are not printed: {printable(each)[:60]!r}")
        elif isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            waiting += each


def printable(text: str) -> str:
    """Words with a question mark for each character that a terminal obeys, or that shows others in another order."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _refuse_twins(pairs: list[tuple[str, object]]) -> None:
    """Called for each object, innermost first; what it keeps of one is nothing."""
    if len({key for key, _ in pairs}) != len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for position, key in enumerate(keys) if key in keys[:position])
        raise ValueError(f"key `{twin[:40]}` stands twice in one object")
