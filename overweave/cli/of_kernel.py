"""What command lines say of an annotated kernel: the schedules of its tensors, and its numbers."""

from __future__ import annotations

from overweave.compiler.frontend.symbols.expressions import SHAPE
from overweave.errors import InputError


def schedules_of(words: list[str]) -> str | dict[str, str]:
    """One schedule, or one for each tensor, as command lines give them. Raises InputError."""
    if len(words) == 1 and ":" not in words[0]:
        return words[0]
    named = dict(word.partition(":")[::2] for word in words)
    if len(named) != len(words) or not all(named.values()):
        raise InputError(f"schedules {words}", "not one for each tensor", "Write TENSOR:SCHEDULE, each tensor once")
    return named


def numbers_of(text: str) -> dict[str, int]:
    """`M=8192,N=3584` as numbers by name. Raises InputError."""
    numbers: dict[str, int] = {}
    for word in text.split(",") if text.strip() else ():
        name, _, value = (part.strip() for part in word.partition("="))
        is_number = value.isascii() and value.isdecimal() and len(value) < 11
        if not (name.isidentifier() or SHAPE.fullmatch(name)) or name in numbers or not is_number:
            asked, found = f"numbers {text[:60]!r}", f"{word[:40]!r} is none, or twice"
            raise InputError(asked, found, "Write NAME=NUMBER,NAME=NUMBER")
        numbers[name] = int(value)
    return numbers
