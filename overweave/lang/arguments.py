"""Arguments of a kernel that uses the tile primitives: a channel and symmetric tensors, one argument each.

They are named tuples, which Triton flattens. `layout` is a constexpr: `folded` for the compiler, plain for the
interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import triton.language as tl


class Channel(NamedTuple):
    """A TileChannel on one rank, in one call. Kernels pass it to the primitives, and read no field.

    signals: this rank's, int32. peers: the address of each rank's signals, int64. words, limits: arguments of waits
    (memory/device/signals.py). producer_table, consumer_table: a dynamic mapping, int32 (lang/mapping.py), None for the
    static one. counts: how many tiles add to each counter of a dynamic mapping. number: in timeout reports. layout: the
    TileChannel.
    """

    signals: Any
    peers: Any
    words: Any
    limits: Any
    producer_table: Any
    consumer_table: Any
    counts: Any
    rank: Any
    number: Any
    layout: Any


class SymmetricTensor(NamedTuple):
    """A symmetric matrix. own: pointer to this rank's. addresses: of every rank's, int64. layout: a SymmetricLayout."""

    own: Any
    addresses: Any
    layout: Any


@dataclass(frozen=True)
class SymmetricLayout:
    """stride: elements from row to row. is_shard: each rank stores only its shard's rows, the first one at row 0."""

    stride: int
    is_shard: bool


@dataclass(frozen=True)
class Folded:
    """Wraps a dataclass so that Triton's compiler sees each attribute as a constexpr."""

    data: Any

    def __getattr__(self, name: str) -> tl.constexpr:
        if name.startswith("__"):
            raise AttributeError(name)
        return folded(getattr(self.data, name))


def folded(value: Any) -> tl.constexpr:
    """Return a value as a constexpr; a dataclass wrapped, so that its attributes are constexprs, too."""
    return tl.constexpr(Folded(value) if is_dataclass(value) else value)
