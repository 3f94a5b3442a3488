"""Arguments about an annotated kernel: the schedules of its tensors, and its integer arguments."""

from __future__ import annotations

from overweave.compiler.frontend.symbols.expressions import SHAPE
from overweave.errors import InputError


def schedules_of(words: list[str]) -> str | dict[str, str]:
    """Return one schedule, or one for each tensor (`TENSOR:SCHEDULE`). Raises InputError."""
    if len(words) == 1 and ":" not in words[0]:
        return words[0]
    by_tensor = dict(word.partition(":")[::2] for word in words)
    if len(by_tensor) != len(words) or not all(by_tensor.values()):
        raise InputError(f"schedules {words}", "not one for each tensor", "Write TENSOR:SCHEDULE, each tensor once")
    return by_tensor


def integers_of(text: str) -> dict[str, int]:
    """Return `M=8192,N=3584` as name -> integer. Raises InputError."""
    integers: dict[str, int] = {}
    for word in text.split(",") if text.strip() else ():
        name, _, value = (part.strip() for part in word.partition("="))
        is_number = value.isascii() and value.isdecimal() and len(value) < 11
        if not (name.isidentifier() or SHAPE.fullmatch(name)) or name in integers or not is_number:
            request, reason = f"numbers {text[:60]!r}", f"{word[:40]!r} is none, or twice"
            raise InputError(request, reason, "Write NAME=NUMBER,NAME=NUMBER")
        integers[name] = int(value)
    return integers
