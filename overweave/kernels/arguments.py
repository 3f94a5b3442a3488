"""Kernel arguments other than tensor descriptors and scalars: one named tuple a subject.

Kernels read the fields by name. A pointer field holds a tensor or its stand-in (runtime/kernel_calls/call.py); a
field that a kernel does not use is None, at compile time. Tensor descriptors stay arguments of their own: Triton 3.6
cannot launch them inside tuples.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, NamedTuple

from msgspec import Struct


class LaunchTiles(NamedTuple):
    """The tiles of a launch.

    table: int32 `[tiles, columns]` (ir/tile_order.py). claims: work counter from which programs claim tiles. trace:
    int64 `[tiles, TRACE_COLUMNS]`, written by traced kernels. tiles: their number; a pointer to it if the device fills
    the table.
    """

    table: Any
    claims: Any
    trace: Any
    tiles: Any


class SignalWords(NamedTuple):
    """Memory that waits, notifies and timeout reports access (memory/device/signals.py); the number of ranks."""

    signals: Any
    words: Any
    limits: Any
    world_size: int


class MatmulOutputs(NamedTuple):
    """Outputs of a matmul: `out` `[rows, n]` of each of up to three B matrices, and their widths.

    total: a second output of the first B matrix, for tiles whose `TileRow.into` is not 0.
    """

    out: Any
    out_1: Any
    out_2: Any
    n: int
    n_1: int | None
    n_2: int | None
    total: Any


class EpilogueArgs(NamedTuple):
    """Inputs of a matmul's epilogue (kernels/epilogue.operands_of). scale_x, scale_gathered: fp8 scales of rows of
    `a`."""

    inputs: Any
    scale_x: Any
    scale_gathered: Any


class ExpertRows(NamedTuple):
    """Arguments of a grouped matmul by experts (kernels/experts.py).

    rows_per_expert: rows of b in memory order from one expert's matrix to the next. row_index: int32, the row of
    `source` (rows `source_stride` elements apart) for each output row; None: no gather. out_index: int32, the row at
    which each output row is stored; None: its own. row_scales: fp32 factor (routing weight) of each output row, or
    None. Row counts are doubled, because Triton 3.6 makes an argument of 1 a constexpr and loses it in nested tuples
    of warp-specialised partitions.
    """

    rows_per_expert: int
    source: Any
    source_stride: int
    source_rows_x2: int
    row_index: Any
    out_index: Any
    out_rows_x2: int
    row_scales: Any


class Arrivals(NamedTuple):
    """Arguments of a grouped matmul whose rows of x arrive while it runs: tiles wait for their source ranks' signals.

    row_starts: int32 `[sources, experts]`, first row of each expert from each source rank. Shards arrive in the order
    rank, rank - 1, ... (mod sources). early_experts: tiles of so many first experts stand in the table in that order,
    those of other experts after them. operation: number that a timeout reports.
    """

    row_starts: Any
    rank: int
    sources: int
    early_experts: int
    operation: int


class PeerStores(NamedTuple):
    """Where tiles store at other ranks; None: they do not. peer_table: int64 (kernels/tile_end.py).

    spread_ranks: the number of ranks, if some sums are stored at all ranks.
    """

    peer_table: Any = None
    spread_ranks: int | None = None


class SumEpilogueArgs(NamedTuple):
    """Inputs and outputs of the epilogue or row-wise form that ends a sum (kernels/reduction.py).

    residual: added to rows before they are normed. inputs: what the epilogue or form reads. z: rows before the norm,
    written. row_statistics: fp32, the statistic of each row, written; or None.
    """

    residual: Any = None
    inputs: Any = None
    z: Any = None
    row_statistics: Any = None


class Traits(Struct, frozen=True, kw_only=True):
    """Compile-time traits of a matmul kernel, one constexpr that its device functions pass on.

    b_is_transposed: memory layout of B. two_sources: tiles read own and gathered rows of `a`. epilogue: its code
    (kernels/epilogue.py). is_gated: a tile has a second product, by the gate weight. addends: of a tile, at most.
    weights: number of B matrices, or EXPERTS (kernels/tile_end.py). gathers: rows of `a` are gathered (ExpertRows).
    precision: of the portable kernel's dot. Of the Hopper kernel: stages, split_n: as in `MatmulConfig`; in_columns:
    consumers divide a tile's columns, not its rows; peers: ranks that tiles store at, besides the own.
    """

    b_is_transposed: bool
    two_sources: bool
    traced: bool
    epilogue: int
    is_gated: bool
    addends: int
    weights: int
    gathers: bool = False
    precision: str = ""
    stages: int = 0
    split_n: int = 1
    in_columns: bool = False
    peers: int = 0


class TopkShape(NamedTuple):
    """Shape of `topk_ids`: top-k, strides in elements, number of experts, source ranks, tokens of each source."""

    top: int
    row_stride: int
    col_stride: int
    experts: int
    sources: int
    shard: int


class SlotsShape(NamedTuple):
    """Shape of the combine of experts (kernels/slots.py): rows, columns, strides in elements, and the own rank."""

    rows: int
    cols: int
    z_stride: int
    weights_stride: int
    received_stride: int
    rank_stride: int
    out_stride: int
    rank: int


class Messages(NamedTuple):
    """Memory of LL-protocol messages. spaces: int64, address of each rank's. Each has two halves of `half` bytes.

    A half has `stride` bytes for the messages of each sending rank, and in a two-shot as much again for its sums.
    state: memory/device/packed.py.
    """

    spaces: Any
    state: Any
    stride: int
    half: int


class ShardSpans(NamedTuple):
    """How words are divided among ranks and programs.

    total: int32 words in all. shard: of each rank, the last ones fewer or none; of a one-shot all. span: of a program,
    pushed in `iterations` of the kernel's block of messages.
    """

    total: int
    shard: int
    span: int
    iterations: int


class Assembly(Struct, frozen=True):
    """Inline assembly with its constraints, as a constexpr; its repr is a digest, by which Triton caches kernels."""

    text: str
    constraints: str

    def __repr__(self) -> str:
        return f"Assembly({sha256((self.constraints + self.text).encode()).hexdigest()[:12]})"


class PackedTraits(Struct, frozen=True, kw_only=True):
    """Compile-time traits of the kernel of packed (LL-protocol) messages.

    exchange: gather, scatter, one_shot or two_shot. senders: ranks - 1. poll: assembly that polls so many messages at
    once (memory/device/packed.py). block: messages of a program at a time. chained: this kernel or the matmul after it
    starts early, by dependent launch. epilogue: code of the sums' epilogue; rows: of their row-wise form; 0: none.
    """

    exchange: str
    senders: int
    poll: Assembly
    block: int
    chained: bool
    epilogue: int
    rows: int


class SentRows(NamedTuple):
    """Rows to send to other ranks (kernels/rows.py).

    rows: int32 `[source rows, words]`; metadata: words of each row, or None. indices: int32, of the rows to send, rank
    by rank; None: rows are in that order already. starts: int32 `[W + 1]`: first position of each rank.
    """

    rows: Any
    metadata: Any
    indices: Any
    starts: Any


class RowBounds(NamedTuple):
    """Bounds: most_sent: rows to one rank. most_received: a rank's capacity. source_rows: rows of `SentRows.rows`.

    peers: number of peers, which the compiler must not know.
    """

    most_sent: Any
    most_received: Any
    source_rows: Any
    peers: Any


class RowSizes(Struct, frozen=True):
    """Compile-time sizes of kernels that send rows. words, metadata: int32 words of a row, and of its metadata.

    step_rows, step_words: block that a program copies at a time. pushes_counts: counts are pushed first.
    """

    words: int
    metadata: int
    step_rows: int
    step_words: int
    pushes_counts: bool
