"""What kernels are given beside tensor descriptors and constants: one named tuple for each subject.

Kernels read the fields by name. A pointer field holds a tensor or its stand-in (runtime/kernel_calls/call.py); a
field that a kernel has no use for is None, which the compiler knows. Tensor descriptors stay arguments of their own:
Triton 3.6 does not launch them inside tuples.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class TileQueue(NamedTuple):
    """The tiles of a launch. table: int32 `[tiles, columns]` (ir/tile_order.py). claims: the counter from which a
    program takes its next tile. trace: int64 `[tiles, TRACE_COLUMNS]`, written if the kernel is traced.
    """

    table: Any
    claims: Any
    trace: Any
    tiles: int


class SignalWords(NamedTuple):
    """What waits, signals and alarms read and write (memory/device/signals.py), and how many ranks the group has."""

    signals: Any
    words: Any
    limits: Any
    world_size: int


class Products(NamedTuple):
    """What a matmul writes: the output `[rows, n]` of each of up to three weights, and the columns of each. total: a
    second output of the first weight, which some tiles write instead (`TileRow.into`).
    """

    out: Any
    out_1: Any
    out_2: Any
    n: int
    n_1: int | None
    n_2: int | None
    total: Any


class Ends(NamedTuple):
    """What an epilogue reads (kernels/epilogue.py). scale_x lies beside the own rows of `a`, scales beside gathered
    ones.
    """

    bias: Any
    residual: Any
    scale_x: Any
    scales: Any
    scale_w: Any


class AtPeers(NamedTuple):
    """Where tiles store at other ranks, if any does (kernels/stored.py). places: int64, a row of two for each rank.
    everyone: how many ranks there are, if sums are stored at every one.
    """

    places: Any = None
    everyone: int | None = None


class AfterSums(NamedTuple):
    """What stands beside sums that end with an epilogue or a norm (kernels/norm.py). z: where the norm's input goes."""

    bias: Any = None
    residual: Any = None
    norm_weight: Any = None
    z: Any = None
