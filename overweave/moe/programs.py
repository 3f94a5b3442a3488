"""The programs of overlapped experts: what travels in which order, what waits for what, on any device and on paper.

Rows are pushed to peers by copy engine, each shard with a signal behind it; what says where they go travels ahead of
them. The first matmul is one launch, whose tiles wait for the shards that they read. The second computes columns of all
tokens: the first ones travel to the owners of these tokens while the last ones are computed, and who owns tokens adds
what comes of them, columns by columns. On paper rows of h stand by pairs of a token and an expert, in the order of
tokens: where a routing puts a pair among the rows of its expert is a permutation, which `routing.places` says. A tile
of the first matmul may read any rows of the shards that it waits for, and one of the second all rows, so that one proof
serves every routing, with empty experts and without.
SOURCE: TileLink, section 5 (figure 5); the order of pushes: docs/design/0004-house.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.schedule import Schedule
from overweave.ir.shards import shard_rows
from overweave.lang.mapping import TileChannel, Tiles
from overweave.ops.author.tile_program import TileCall
from overweave.ops.author.tile_schedule import CallersMatrix, tile_schedule
from overweave.runtime.handwritten import Access, Declared, OwnBuffer, Part, SymmetricBuffer

RowsPlace = Part | torch.Tensor
COLUMNS_STEP = 8  # elements: rows of whole words of 16 bytes
TILE_COLUMNS = 256  # of which a launch of the second matmul has whole ones, where there are four or more
# The second matmul computes columns in so many launches at most, and no more than leave copies of so many bytes, which
# links carry at half their rate. The last has a third of the columns that the others have: it travels with nothing but
# sums to hide behind.
MOST_CUTS, LEAST_COPY, LAST_PART = 4, 5 << 18, 1 / 3
# How many operations of a matmul take as long as a byte from a peer, and a quarter more.
# MEASURED: 600 TFLOP/s by 330 GB/s of the links of H200s (docs/design/0004-house.md).
OPERATIONS_A_BYTE = 2300


class Sizes(NamedTuple):
    """Of a call: what travels, `[m, columns]` in a dtype, `top` experts of each token, and how many words of 32 bits
    say of a token what they are."""

    m: int
    columns: int
    top: int
    dtype: torch.dtype
    ranks: int
    words: int = 1

    def rows(self, rank: int) -> tuple[int, int]:
        """Return the range of tokens of a rank."""
        return shard_rows(self.m, self.ranks, rank)

    def pairs(self, rank: int) -> slice:
        """Return the range of pairs of a rank's tokens with their experts."""
        low, high = self.rows(rank)
        return slice(low * self.top, high * self.top)

    @property
    def shard(self) -> int:
        """Return the rows of the longest shard; one at least, for a buffer."""
        return max(1, -(-self.m // self.ranks))

    def experts_ahead(self, experts: int, columns: int) -> int:
        """Of how many experts own tokens are multiplied before others: of as many as that takes as long as tokens
        travel, that weights of few experts are read once more. columns: of the first matmul."""
        share = OPERATIONS_A_BYTE * (self.ranks - 1) / max(1, self.top * columns)
        return min(experts, ceil(share * experts))

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Return the columns of each launch of the second matmul, in their order."""
        step = min(TILE_COLUMNS, self.columns // 4 // COLUMNS_STEP * COLUMNS_STEP)
        count = max(2, min(MOST_CUTS, self.shard * self.columns * self.dtype.itemsize // LEAST_COPY))
        share = self.columns / (count - 1 + LAST_PART)
        ends = {round(share * cut / step) * step for cut in range(1, count)} if step else set[int]()
        found = sorted({0, self.columns, *ends})
        return tuple(pairwise(found)) or ((0, 0),)


def _one_a_rank(ranks: int) -> TileChannel:
    return TileChannel(Tiles(ranks, 1, 1, 1, ranks))


def gather_buffers(sizes: Sizes) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """What peers address in the first matmul. slots: the experts of tokens, and their weights if these travel, too."""
    rows, signals = sizes.shard * sizes.ranks, _one_a_rank(sizes.ranks)
    buffers = {
        "tokens": SymmetricBuffer(rows, sizes.columns, sizes.dtype),
        "slots": SymmetricBuffer(rows, sizes.words, torch.int32),
    }
    return buffers, {"tokens": signals, "slots": signals}


def write_gather(
    call: TileCall,
    sizes: Sizes,
    given: tuple[RowsPlace, RowsPlace],
    route: Callable[[OwnBuffer], object],
    multiply: Callable[[OwnBuffer, Any], object],
    h: Part | None = None,
) -> None:
    """A call of the first matmul. given: the own tokens and their slots. multiply: all tokens by their experts, in
    tiles that wait for the shards of a channel. h: the result on paper, by pairs of tokens and experts."""
    rank, ranks = call.rank, sizes.ranks
    own, copies = slice(*sizes.rows(rank)), call.queue("copies")
    travelling = tuple(zip(("slots", "tokens"), given[::-1], strict=True))
    for name, what in travelling:
        call.rank_copy_data(what, call.part(name)[own])
        call.rank_notify(name, rank, rank)
    for name, what in travelling:
        for step in range(1, ranks):
            peer = (rank + step) % ranks
            copies.rank_copy_data(what, call.part(name, peer)[own])
            copies.rank_notify(name, rank, peer)
    for source in range(ranks):
        call.rank_wait("slots", source)
    every = (Access(call.part("slots")[0 : sizes.m], "slots"),)
    call.rank_compute("route", route, every)
    shards = {}
    for step in range(ranks):
        source = (rank - step) % ranks  # in the order in which shards arrive
        low, high = sizes.rows(source)
        reads = (Access(call.part("tokens")[low:high], "x", low), *every) if low < high else ()
        shards[source] = (reads, _made(h and h[sizes.pairs(source)], "h", low * sizes.top))
    call.rank_compute_arriving("multiply", multiply, "tokens", shards)


def scatter_buffers(sizes: Sizes) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """What peers address in the second matmul. Columns of each launch have buffers of their own, of which copies are
    whole stretches; a peer is told of all but the last ones at once."""
    rows, signals = sizes.shard * sizes.ranks, _one_a_rank(sizes.ranks)
    buffers = {
        f"{name}{cut}": SymmetricBuffer(rows, high - low, sizes.dtype)
        for name in ("parts", "landed")
        for cut, (low, high) in enumerate(sizes.cuts)
    }
    computed = (f"computed{cut}" for cut in range(len(sizes.cuts)))
    return buffers, dict.fromkeys((*computed, "landed", "last"), signals)


ColumnsStep = Callable[[int, OwnBuffer], object]  # of columns, by their number


def write_scatter(
    call: TileCall, sizes: Sizes, compute: ColumnsStep, add: ColumnsStep, paper: tuple[Part, Part] | None = None
) -> None:
    """A call of the second matmul. compute: columns of all products, and the sums over experts of peers' tokens. add:
    columns of the own tokens' sums, with the landed parts of peers. paper: h, by pairs as in `write_gather`, and y."""
    h, y = paper or (None, None)
    _send_sums(call, sizes, compute, h)
    low, _ = sizes.rows(call.rank)
    for cut, columns in enumerate(sizes.cuts):
        made = _made(y and y[:, slice(*columns)], "y", low, columns[0])
        _add_sums(call, sizes, (cut, partial(add, cut)), h, made)


def _send_sums(call: TileCall, sizes: Sizes, compute: ColumnsStep, h: Part | None) -> None:
    """Columns of what peers' tokens get from this rank, each to the owners while the next ones are computed."""
    rank, ranks, returns = call.rank, sizes.ranks, call.queue("returns")
    peers, last = [(rank + step) % ranks for step in range(1, ranks)], len(sizes.cuts) - 1
    for cut, columns in enumerate(sizes.cuts):
        parts, made = call.part(f"parts{cut}"), list[Access]()
        for owner in peers:
            low, high = sizes.rows(owner)
            made += _made(h and parts[low:high], f"part.{rank}", low, columns[0])
        call.rank_compute(f"compute{cut}", partial(compute, cut), _made(h, "h"), (*made,))
        call.rank_notify(f"computed{cut}", rank, rank)
        returns.rank_wait(f"computed{cut}", rank)
        for owner in peers:
            low, high = sizes.rows(owner)
            begin = rank * sizes.shard
            returns.rank_copy_data(parts[low:high], call.part(f"landed{cut}", owner)[begin : begin + high - low])
            if cut >= last - 1:
                returns.rank_notify("last" if cut == last else "landed", rank, owner)


def _add_sums(
    call: TileCall,
    sizes: Sizes,
    step: tuple[int, Callable[[OwnBuffer], object]],
    h: Part | None,
    made: tuple[Access, ...],
) -> None:
    """Columns of the own tokens' sums. step: which, and what adds them."""
    (cut, add), rank, last = step, call.rank, len(sizes.cuts) - 1
    (low, high), read = sizes.rows(rank), list[Access]()
    for source in ((rank + step) % sizes.ranks for step in range(1, sizes.ranks)):
        if cut in (0, last):
            call.rank_wait("last" if cut == last else "landed", source)
        landed = call.part(f"landed{cut}")[source * sizes.shard : source * sizes.shard + high - low]
        read += [Access(landed, f"part.{source}", low, sizes.cuts[cut][0])]
    pairs = sizes.pairs(rank)
    call.rank_compute(f"add{cut}", add, (*read, *_made(h and h[pairs], "h", pairs.start)), made)


def total_buffers(sizes: Sizes) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """What peers address in the second matmul of tokens that every rank has: as `scatter_buffers`, and all sums."""
    (buffers, channels), rows = scatter_buffers(sizes), sizes.shard * sizes.ranks
    for cut, (low, high) in enumerate(sizes.cuts):
        buffers[f"sums{cut}"] = SymmetricBuffer(rows, high - low, sizes.dtype)
        channels |= dict.fromkeys((f"summed{cut}", f"gathered{cut}"), _one_a_rank(sizes.ranks))
    return buffers, channels


def write_total(
    call: TileCall, sizes: Sizes, steps: tuple[ColumnsStep, ColumnsStep], y: RowsPlace, h: Part | None = None
) -> None:
    """A call of the second matmul whose sums all ranks get: scattered, and gathered column by column. steps: compute
    and add, as of `write_scatter`. y: the sums of all tokens. h: on paper."""
    (compute, add), rank, ranks, totals = steps, call.rank, sizes.ranks, call.queue("totals")
    _send_sums(call, sizes, compute, h)
    low, high = sizes.rows(rank)
    for cut, columns in enumerate(sizes.cuts):
        own = call.part(f"sums{cut}")[low:high]
        _add_sums(call, sizes, (cut, partial(add, cut)), h, _made(h and own, "y", low, columns[0]))
        call.rank_notify(f"summed{cut}", rank, rank)
        totals.rank_wait(f"summed{cut}", rank)
        for peer in ((rank + step) % ranks for step in range(1, ranks)):
            totals.rank_copy_data(own, call.part(f"sums{cut}", peer)[low:high])
            totals.rank_notify(f"gathered{cut}", rank, peer)
    for cut, columns in enumerate(sizes.cuts):
        for source in ((rank + step) % ranks for step in range(1, ranks)):
            call.rank_wait(f"gathered{cut}", source)
        call.rank_copy_data(call.part(f"sums{cut}")[0 : sizes.m], y[:, slice(*columns)])


def chain_buffers(sizes: Sizes) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """Return the buffers and channels of a whole layer."""
    first, second = gather_buffers(sizes), scatter_buffers(sizes)
    return first[0] | second[0], first[1] | second[1]


def _made(part: Part | None, tensor: str, row: int = 0, col: int = 0) -> tuple[Access, ...]:
    return () if part is None else (Access(part, tensor, row, col),)


BUFFERS = {"gather": gather_buffers, "scatter": scatter_buffers, "total": total_buffers, "chain": chain_buffers}


class LayerProgram(NamedTuple):
    """The `push` program of a kind, for one size of calls."""

    kind: str
    sizes: Sizes

    def declared(self) -> Declared:
        """Return the symmetric buffers and channels."""
        return Declared(*BUFFERS[self.kind](self.sizes))

    def schedule(self) -> Schedule:
        """Return the schedule that is proven before the program runs."""
        return schedule_of(self.kind, self.sizes, COLUMNS_STEP)


def schedule_of(kind: str, sizes: Sizes, width: int) -> Schedule:
    """The `push` program of a kind: `gather` (all_gather_experts), `scatter` (experts_reduce_scatter), `total`
    (experts_all_reduce) or `chain` (experts_mlp). width: columns of h. Raises InputError for another kind."""
    if kind not in WRITERS:
        raise InputError(f"experts' schedule {kind!r}", "there is no such kind", f"Use one of {', '.join(WRITERS)}")
    buffers, channels = BUFFERS[kind](sizes)
    declared = Declared({name: replace(each, dtype=torch.float32) for name, each in buffers.items()}, channels)
    pairs = sizes.m * sizes.top
    x = CallersMatrix(sizes.m, sizes.columns, "x", is_shard=True)
    y = CallersMatrix(sizes.m, sizes.columns, "y", is_shard=True, is_result=True)
    h = CallersMatrix(pairs, width, "h", is_result=kind in ("gather", "chain"))
    slots = CallersMatrix(sizes.m, sizes.words, "slots", is_shard=True)
    callers = {
        "gather": {"x": x, "own_slots": slots, "h": h},
        "scatter": {"h": h, "y": y},
        "total": {"h": h, "y": replace(y, is_shard=False)},
        "chain": {"x": x, "own_slots": slots, "h": h, "y": y},
    }[kind]
    name = f"experts.{kind}.push"
    return tile_schedule(
        name, declared, callers, sizes.ranks, lambda call, **given: WRITERS[kind](call, sizes, **given)
    )


def _nothing(*_: Any) -> None:
    pass


def _gather(call: TileCall, sizes: Sizes, x: Any, own_slots: Any, h: Any) -> None:
    write_gather(call, sizes, (x, own_slots), _nothing, _nothing, h)


def _scatter(call: TileCall, sizes: Sizes, h: Any, y: Any) -> None:
    write_scatter(call, sizes, _nothing, _nothing, (h, y))


def _chain(call: TileCall, sizes: Sizes, x: Any, own_slots: Any, h: Any, y: Any) -> None:
    _gather(call, sizes, x, own_slots, h)
    _scatter(call, sizes, h, y)


def _total(call: TileCall, sizes: Sizes, h: Any, y: Any) -> None:
    write_total(call, sizes, (_nothing, _nothing), y, h)


WRITERS: dict[str, Callable[..., None]] = {
    "gather": _gather,
    "scatter": _scatter,
    "total": _total,
    "chain": _chain,
}
