"""The programs of overlapped experts: what travels in which order, what waits for what, on any device and on paper.

Rows are pushed to peers by copy engine, each shard with a signal behind it. The first matmul multiplies a shard's rows
once they have come, the own ones first; the second computes the rows of one owner after the other, and pushes each
while it computes the next. On paper rows of h stand by pairs of a token and an expert, in the order of tokens: where a
routing puts a pair among the rows of its expert is a permutation, which `routing.places` says. A shard's pairs are all
that its experts can have, so that one proof serves every routing, with empty experts and without.
SOURCE: TileLink, section 5 (figure 5); the order of pushes: docs/design/0004-house.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.schedule import Schedule
from overweave.ir.shards import shard_rows
from overweave.lang.mapping import TileChannel, Tiles
from overweave.ops.author.tile_program import TileCall
from overweave.ops.author.tile_schedule import CallersMatrix, tile_schedule
from overweave.runtime.handwritten import Declared, OwnBuffer, Part, SymmetricBuffer, Uses

RowsPlace = Part | torch.Tensor


class Sizes(NamedTuple):
    """Of a call: what travels, `[m, columns]` in a dtype, and `top` experts of each token."""

    m: int
    columns: int
    top: int
    dtype: torch.dtype
    ranks: int

    def rows(self, rank: int) -> tuple[int, int]:
        """The tokens of a rank."""
        return shard_rows(self.m, self.ranks, rank)

    @property
    def shard(self) -> int:
        """Rows that the longest shard has; one at least, for a buffer."""
        return max(1, -(-self.m // self.ranks))


def _one_a_rank(ranks: int) -> TileChannel:
    return TileChannel(Tiles(ranks, 1, 1, 1, ranks))


def gather_buffers(sizes: Sizes) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """What peers address in the first matmul."""
    rows, signals = sizes.shard * sizes.ranks, _one_a_rank(sizes.ranks)
    buffers = {
        "tokens": SymmetricBuffer(rows, sizes.columns, sizes.dtype),
        "experts": SymmetricBuffer(rows, sizes.top, torch.int32),
    }
    return buffers, {"tokens": signals, "experts": signals}


def write_gather(
    call: TileCall,
    sizes: Sizes,
    given: tuple[RowsPlace, RowsPlace],
    route: Callable[[OwnBuffer], object],
    multiply: Callable[[int, OwnBuffer], object],
    h: Part | None = None,
) -> None:
    """A call of the first matmul. given: the own tokens and their experts. multiply: a shard's tokens by their experts.
    h: the result on paper, by pairs of tokens and experts, as they stand before they are sorted."""
    x, ids = given
    rank, ranks = call.rank, sizes.ranks
    own, copies = slice(*sizes.rows(rank)), call.queue("copies")
    for what, name in ((ids, "experts"), (x, "tokens")):
        call.rank_copy_data(what, call.part(name)[own])
        call.rank_notify(name, rank, rank)
    for what, name in ((ids, "experts"), (x, "tokens")):
        for step in range(1, ranks):
            peer = (rank + step) % ranks
            copies.rank_copy_data(what, call.part(name, peer)[own])
            copies.rank_notify(name, rank, peer)
    for source in range(ranks):
        call.rank_wait("experts", source)
    every = (Uses(call.part("experts")[0 : sizes.m], "experts"),)
    call.rank_compute("route", route, every)
    for step in range(ranks):
        source = (rank - step) % ranks  # in the order in which shards arrive
        low, high = sizes.rows(source)
        call.rank_wait("tokens", source)
        reads = (Uses(call.part("tokens")[low:high], "x", low), *every)
        pairs = slice(low * sizes.top, high * sizes.top)
        call.rank_compute(
            f"multiply_{source}",
            partial(multiply, source),
            reads,
            _made(h and h[pairs], "h", pairs.start),
        )


def scatter_buffers(sizes: Sizes) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """What peers address in the second matmul."""
    rows, signals = sizes.shard * sizes.ranks, _one_a_rank(sizes.ranks)
    buffers = {name: SymmetricBuffer(rows, sizes.columns, sizes.dtype) for name in ("parts", "landed")}
    return buffers, {"computed": signals, "landed": signals}


def write_scatter(
    call: TileCall,
    sizes: Sizes,
    compute: Callable[[int, torch.Tensor], object],
    add: Callable[[OwnBuffer], object],
    paper: tuple[Part, Part] | None = None,
) -> None:
    """A call of the second matmul. compute: the sums over experts of an owner's tokens into a matrix. add: the landed
    parts of all ranks. paper: h, by pairs as in `write_gather`, and y."""
    rank, ranks, copies = call.rank, sizes.ranks, call.queue("copies")
    block = slice(rank * sizes.shard, rank * sizes.shard + sizes.rows(rank)[1] - sizes.rows(rank)[0])
    for step in range(1, ranks + 1):
        owner = (rank + step) % ranks
        low, high = sizes.rows(owner)
        name, rows = ("landed", block) if owner == rank else ("parts", slice(low, high))
        pairs = slice(low * sizes.top, high * sizes.top)
        call.rank_compute(
            f"compute_{owner}",
            partial(_into, partial(compute, owner), (name, rows)),
            (Uses(paper[0][pairs], "h", pairs.start),) if paper else (),
            _made(paper and call.part(name)[rows], f"part.{rank}", low),
        )
        if owner == rank:
            call.rank_notify("landed", rank, rank)
            continue
        call.rank_notify("computed", owner, rank)
        copies.rank_wait("computed", owner)
        landing = slice(rank * sizes.shard, rank * sizes.shard + high - low)
        copies.rank_copy_data(call.part("parts")[low:high], call.part("landed", owner)[landing])
        copies.rank_notify("landed", rank, owner)
    _write_sum(call, sizes, add, paper and paper[1])


def _into(compute: Callable[[torch.Tensor], object], target: tuple[str, slice], own: OwnBuffer) -> None:
    name, rows = target
    compute(own(name)[rows])


def _from_and_into(
    compute: Callable[[OwnBuffer, torch.Tensor], object], target: tuple[str, slice], own: OwnBuffer
) -> None:
    name, rows = target
    compute(own, own(name)[rows])


def _write_sum(call: TileCall, sizes: Sizes, add: Callable[[OwnBuffer], object], y: Part | None) -> None:
    """The end of a call: the landed parts of the own tokens are added."""
    for source in range(sizes.ranks):
        call.rank_wait("landed", source)
    low, high = sizes.rows(call.rank)
    starts = [source * sizes.shard for source in range(sizes.ranks)]
    landed = (
        Uses(call.part("landed")[at : at + high - low], f"part.{source}", low) for source, at in enumerate(starts)
    )
    call.rank_compute("add", add, tuple(landed), _made(y, "y", low))


def chain_buffers(sizes: Sizes) -> tuple[dict[str, SymmetricBuffer], dict[str, TileChannel]]:
    """What peers address in a whole layer. slots: the experts of tokens and their weights, words of 32 bits."""
    buffers, channels = scatter_buffers(sizes)
    rows = sizes.shard * sizes.ranks
    buffers["tokens"] = SymmetricBuffer(rows, sizes.columns, sizes.dtype)
    buffers["slots"] = SymmetricBuffer(rows, 2 * sizes.top, torch.int32)
    return buffers, channels | {"tokens": _one_a_rank(sizes.ranks)}


def write_chain(
    call: TileCall,
    sizes: Sizes,
    given: tuple[RowsPlace, RowsPlace],
    compute: Callable[[int, OwnBuffer, torch.Tensor], object],
    add: Callable[[OwnBuffer], object],
    y: Part | None = None,
) -> None:
    """A call of a whole layer: a shard's tokens arrive, their experts' sums are computed and go back to their owner,
    while other shards arrive and return. given: the own tokens and slots. compute: the sums of a shard into a matrix.
    add: the landed parts of all ranks. y: the result on paper."""
    x, slots = given
    rank, ranks = call.rank, sizes.ranks
    own, copies, returns = slice(*sizes.rows(rank)), call.queue("copies"), call.queue("returns")
    call.rank_copy_data(slots, call.part("slots")[own])
    call.rank_copy_data(x, call.part("tokens")[own])
    call.rank_notify("tokens", rank, rank)
    for step in range(1, ranks):
        peer = (rank + step) % ranks
        copies.rank_copy_data(slots, call.part("slots", peer)[own])
        copies.rank_copy_data(x, call.part("tokens", peer)[own])
        copies.rank_notify("tokens", rank, peer)
    for step in range(ranks):
        owner = (rank - step) % ranks  # in the order in which shards arrive
        low, high = sizes.rows(owner)
        begin = rank * sizes.shard
        name, rows = ("landed", slice(begin, begin + high - low)) if owner == rank else ("parts", slice(low, high))
        call.rank_wait("tokens", owner)
        call.rank_compute(
            f"layer_{owner}",
            partial(_from_and_into, partial(compute, owner), (name, rows)),
            (Uses(call.part("tokens")[low:high], "x", low), Uses(call.part("slots")[low:high], "slots", low)),
            _made(call.part(name)[rows], f"part.{rank}", low),
        )
        if owner == rank:
            call.rank_notify("landed", rank, rank)
            continue
        call.rank_notify("computed", owner, rank)
        returns.rank_wait("computed", owner)
        returns.rank_copy_data(call.part("parts")[low:high], call.part("landed", owner)[begin : begin + high - low])
        returns.rank_notify("landed", rank, owner)
    _write_sum(call, sizes, add, y)


def _made(part: Part | None, tensor: str, row: int = 0) -> tuple[Uses, ...]:
    return () if part is None else (Uses(part, tensor, row),)


BUFFERS = {"gather": gather_buffers, "scatter": scatter_buffers, "chain": chain_buffers}


def schedule_of(kind: str, sizes: Sizes, width: int) -> Schedule:
    """The `per_shard` program of a kind: `gather` (all_gather_experts), `scatter` (experts_reduce_scatter) or `chain`
    (experts_mlp). width: columns of h. Raises InputError for another kind."""
    if kind not in WRITERS:
        raise InputError(f"experts' schedule {kind!r}", "there is no such kind", f"Use one of {', '.join(WRITERS)}")
    buffers, channels = BUFFERS[kind](sizes)
    declared = Declared({name: replace(each, dtype=torch.float32) for name, each in buffers.items()}, channels)
    pairs = sizes.m * sizes.top
    x = CallersMatrix(sizes.m, sizes.columns, "x", is_shard=True)
    y = CallersMatrix(sizes.m, sizes.columns, "y", is_shard=True, is_result=True)
    ids, slots = (CallersMatrix(sizes.m, each * sizes.top, name, is_shard=True) for each, name in OF_TOKENS)
    callers = {
        "gather": {"x": x, "ids": ids, "h": CallersMatrix(pairs, width, "h", is_result=True)},
        "scatter": {"h": CallersMatrix(pairs, width, "h"), "y": y},
        "chain": {"x": x, "own_slots": slots, "y": y},
    }[kind]
    name = f"experts.{kind}.per_shard"
    return tile_schedule(
        name, declared, callers, sizes.ranks, lambda call, **given: WRITERS[kind](call, sizes, **given)
    )


def _nothing(*_: Any) -> None:
    pass


def _gather(call: TileCall, sizes: Sizes, x: Any, ids: Any, h: Any) -> None:
    write_gather(call, sizes, (x, ids), _nothing, _nothing, h)


def _scatter(call: TileCall, sizes: Sizes, h: Any, y: Any) -> None:
    write_scatter(call, sizes, _nothing, _nothing, (h, y))


def _chain(call: TileCall, sizes: Sizes, x: Any, own_slots: Any, y: Any) -> None:
    write_chain(call, sizes, (x, own_slots), _nothing, _nothing, y)


OF_TOKENS = ((1, "experts"), (2, "slots"))  # words beside a token for each of its experts
WRITERS: dict[str, Callable[..., None]] = {"gather": _gather, "scatter": _scatter, "chain": _chain}
