"""What kernels are given beside tensor descriptors and constants: one named tuple for each subject.

Kernels read the fields by name. A pointer field holds a tensor or its stand-in (runtime/kernel_calls/call.py); a
field that a kernel has no use for is None, which the compiler knows. Tensor descriptors stay arguments of their own:
Triton 3.6 does not launch them inside tuples.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, NamedTuple

from msgspec import Struct


class LaunchTiles(NamedTuple):
    """The tiles of a launch. table: int32 `[tiles, columns]` (ir/tile_order.py). claims: the counter from which a
    program takes its next tile. trace: int64 `[tiles, TRACE_COLUMNS]`, written if the kernel is traced. tiles: how
    many; of a table that the device fills, where their number lies.
    """

    table: Any
    claims: Any
    trace: Any
    tiles: Any


class SignalWords(NamedTuple):
    """What waits, signals and alarms read and write (memory/device/signals.py), and how many ranks the group has."""

    signals: Any
    words: Any
    limits: Any
    world_size: int


class MatmulOutputs(NamedTuple):
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
    """What an epilogue reads (kernels/epilogue.operands_of). Scales of rows: scale_x lies beside the own rows of `a`,
    scale_gathered beside gathered ones.
    """

    inputs: Any
    scale_x: Any
    scale_gathered: Any


class ExpertRows(NamedTuple):
    """Of a matmul by experts (kernels/experts.py), whose tiles name one (`TileRow.weight`). step: how many rows of the
    weights, as they lie in memory, each expert's are behind those of the one before.

    rows: int32, which row of `source`, `stride` elements apart, each row of the product is made of; None: each its own.
    into: int32, where each row is stored; None: at its own. weights: fp32, what each row is multiplied by last, or
    None. How many rows there are is told twice as large: a number that is 1 is a constant, and Triton 3.6 loses those
    of tuples within tuples that partitions are given.
    """

    step: int
    source: Any
    stride: int
    twice_source_rows: int
    rows: Any
    into: Any
    twice_out_rows: int
    weights: Any


class Arrivals(NamedTuple):
    """Of a matmul by experts whose source's rows arrive while it runs: tiles wait for the signals of the shards that
    they read, and name `number` in a report of a timeout.

    bounds: int32 `[sources, experts]`, where each expert's rows begin that are of a source's shard, or of one behind
    it. Shards come as ranks push them: the own one, that of the rank before it, and so on. ahead: of so many experts,
    the first ones, tiles stand in that order; those of the others follow.
    """

    bounds: Any
    rank: int
    sources: int
    ahead: int
    number: int


class AtPeers(NamedTuple):
    """Where tiles store at other ranks, if any does (kernels/tile_end.py). places: int64, a row of two for each rank.
    everyone: how many ranks there are, if sums are stored at every one.
    """

    places: Any = None
    everyone: int | None = None


class AfterSums(NamedTuple):
    """What stands beside sums that end with an epilogue, or with whole rows (kernels/reduction.py). residual: what is
    added to rows before they are normed. inputs: what the epilogue or the form of rows reads. z: where rows lie
    before they are finished. numbers: fp32, where those of rows go.
    """

    residual: Any = None
    inputs: Any = None
    z: Any = None
    numbers: Any = None


class Traits(Struct, frozen=True, kw_only=True):
    """What a matmul kernel is compiled for: one constant, which its device functions hand on whole.

    b_is_transposed: how the weights lie in memory. two_sources: whether tiles read rows of both places of `a`.
    epilogue: its code (kernels/epilogue.py). is_gated: whether a tile has two products of one rectangle. addends: how
    many a tile with addends has. weights: by how many it multiplies. EXPERTS (kernels/tile_end.py): a tile names one of
    many in one tensor. gathers: whether rows of `a` are gathered
    (ExpertRows). precision: of the portable kernel's products. Of the Hopper kernel: stages, split_n: as in
    `MatmulConfig`; in_columns: consumers share a tile's columns; peers: where tiles store.
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
    """How `topk_ids` lie, and what they name: experts of a token, strides in elements, experts; and from how many
    sources tokens are, of `shard` each but the last ones."""

    top: int
    row_stride: int
    col_stride: int
    experts: int
    sources: int
    shard: int


class SlotsShape(NamedTuple):
    """Of sums over slots (kernels/slots.py): rows and columns, and how many elements apart rows lie, and the parts of
    ranks; and the own rank."""

    rows: int
    cols: int
    z_step: int
    weights_step: int
    landed_step: int
    rank_step: int
    out_step: int
    rank: int


class Messages(NamedTuple):
    """Where packed messages lie. spaces: that of each rank, which has two halves of `half` bytes, and in each a part of
    `stride` bytes for every rank, and behind these, of a two-shot, another for what it sends of its sums. state:
    memory/device/packed.py.
    """

    spaces: Any
    state: Any
    stride: int
    half: int


class ShardSpans(NamedTuple):
    """How what is exchanged is dealt out: `total` int32 words in all, of which each rank owns `shard`, the last ones
    fewer or none, or, of a one-shot, all; to each program a stretch of `span` words of a shard, in so many turns.
    """

    total: int
    shard: int
    span: int
    turns: int


class Assembly(Struct, frozen=True):
    """Inline assembly with its constraints, as a constant, which Triton knows by a digest."""

    text: str
    constraints: str

    def __repr__(self) -> str:
        return f"Assembly({sha256((self.constraints + self.text).encode()).hexdigest()[:12]})"


class PackedTraits(Struct, frozen=True, kw_only=True):
    """What a kernel of packed messages is compiled for. exchange: kernels/packed/exchange.py. senders: one fewer than
    ranks; poll: what looks for so many messages at once (memory/device/packed.py). block: messages
    of a program at a time. chained: it starts early, or the matmul behind it. epilogue: of sums. rows: what is done to
    whole rows.
    """

    exchange: str
    senders: int
    poll: Assembly
    block: int
    chained: bool
    epilogue: int
    rows: int


class SentRows(NamedTuple):
    """Rows that are sent (kernels/rows.py). rows: int32 `[last, words]`; beside, in the same order, or None. chosen:
    int32, the rows that go, rank by rank; None: they lie in that order. starts: int32 `[W + 1]`, where those for each
    rank begin.
    """

    rows: Any
    beside: Any
    chosen: Any
    starts: Any


class RowBounds(NamedTuple):
    """shard: the most rows that a rank sends to another. most: that a rank receives. last: of those that this rank may
    send, how many there are. peers: how many; a number that the compiler does not know."""

    shard: Any
    most: Any
    last: Any
    peers: Any


class RowSizes(Struct, frozen=True):
    """What kernels that send rows are compiled for. words, beside: int32 words of a row, and of what travels beside it.
    step_rows, step_words: what a program moves at a time. tells: counts are pushed first.
    """

    words: int
    beside: int
    step_rows: int
    step_words: int
    tells: bool
