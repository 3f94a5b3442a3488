"""Arguments of a kernel that uses the tile primitives: a channel and symmetric tensors, one argument each.

They are named tuples, which Triton flattens. `layout` is a constexpr: `folded` for the compiler, plain for the
interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import triton.language as tl


class Channel(NamedTuple):
    """One rank's view of a TileChannel in one call. Kernels only pass it on.

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
    """A symmetric matrix. own: pointer to this rank's. addresses: of each rank's, int64."""

    own: Any
    addresses: Any
    layout: Any


@dataclass(frozen=True)
class SymmetricLayout:
    """stride: elements from row to row. is_shard: each rank holds its own shard's rows only, from row 0 on."""

    stride: int
    is_shard: bool


@dataclass(frozen=True)
class Folded:
    """Wraps plain data so that each attribute is a constexpr to Triton's compiler."""

    data: Any

    def __getattr__(self, name: str) -> tl.constexpr:
        if name.startswith("__"):
            raise AttributeError(name)
        return folded(getattr(self.data, name))


def folded(value: Any) -> tl.constexpr:
    """Return a value as a constexpr."""
    return tl.constexpr(Folded(value) if is_dataclass(value) else value)
