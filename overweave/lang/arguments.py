"""What a kernel that uses the tile primitives is given: a channel and symmetric tensors, each as one argument.

They are tuples with names, which Triton takes apart. `layout` is a constant of the kernel: where Triton compiles,
`folded`; where it interprets, as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import triton.language as tl


class Channel(NamedTuple):
    """One rank's view of a TileChannel in one call. What it holds is the library's; kernels pass it on.

    signals: the own ones, int32. peers: where each rank's signals lie, int64. words, limits: of every wait
    (memory/device/signals.py). tables: a dynamic mapping, int32 (lang/mapping.py), or None where the static one holds;
    counts: how many tiles add to each counter of a dynamic producer. layout: the TileChannel.
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
    """A matrix that every rank has one of. own: this rank's, to load and store. addresses: where each rank's lies."""

    own: Any
    addresses: Any
    layout: Any


@dataclass(frozen=True)
class SymmetricLayout:
    """stride: elements from row to row. is_shard: rows are one rank's, counted from the start of its shard."""

    stride: int
    is_shard: bool


@dataclass(frozen=True)
class Folded:
    """Plain data whose every attribute is a constant to Triton's compiler."""

    data: Any

    def __getattr__(self, name: str) -> tl.constexpr:
        if name.startswith("__"):
            raise AttributeError(name)
        return folded(getattr(self.data, name))


def folded(value: Any) -> tl.constexpr:
    """A value as a constant of a kernel that is compiled."""
    return tl.constexpr(Folded(value) if is_dataclass(value) else value)
