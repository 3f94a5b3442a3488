"""The programs of attention split over ranks: which keys and values travel in which order, what waits for what, on any
device and on paper.

Each shard of keys and values is signalled behind its rows, and its piece is computed once it has come, the own one
first. A rank pushes to each peer the rows that the peer sees, and no others. Backwards they travel again; the parts of
their gradients are computed shard by shard, return to the owner while others are computed, and are added there in fp32
in the order of ranks.
SOURCE: TileLink, section 5 (figure 6); the order of pushes: docs/design/0004-house.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from overweave.attention.pieces import wide
from overweave.attention.sequence import Piece, Sequence
from overweave.ir.schedule import Schedule
from overweave.lang.mapping import TileChannel, Tiles
from overweave.ops.author.tile_program import TileCall
from overweave.ops.author.tile_schedule import CallersMatrix, tile_schedule
from overweave.runtime.handwritten import Declared, OwnBuffer, Part, SymmetricBuffer, Uses

TRAVEL = ("keys", "values")
PARTS, LANDED = tuple(f"parts_{name}" for name in TRAVEL), tuple(f"landed_{name}" for name in TRAVEL)
COLUMNS_ON_PAPER = 8
RowsPlace = Part | torch.Tensor
BufferRows = tuple[str, slice]  # a buffer, and rows of it


class Travel(NamedTuple):
    """The program `per_shard`: of a sequence, whose rows have so many columns of keys."""

    sequence: Sequence
    columns: int
    dtype: torch.dtype
    is_backward: bool = False

    def declared(self) -> Declared:
        """What peers address."""
        rows, ranks = self._longest * self.sequence.ranks, self.sequence.ranks
        names = dict.fromkeys(TRAVEL, self.dtype)
        if self.is_backward:
            names |= dict.fromkeys((*PARTS, *LANDED), wide(self.dtype))
        buffers = {name: SymmetricBuffer(rows, self.columns, dtype) for name, dtype in names.items()}
        signals = ("arrived", "computed", "landed") if self.is_backward else ("arrived",)
        return Declared(buffers, dict.fromkeys(signals, TileChannel(Tiles(ranks, 1, 1, 1, ranks))))

    def place(self, source: int, rows: slice) -> slice:
        """Where rows of a shard lie among those of all."""
        return moved(rows, self.sequence.stored(source)[0])

    def parts(self, rank: int, source: int, keys: slice) -> tuple[BufferRows, ...]:
        """Where a rank computes its parts of the gradients of a shard's keys and values."""
        names, rows = (LANDED, self.landing(rank, keys)) if source == rank else (PARTS, self.place(source, keys))
        return tuple((name, rows) for name in names)

    def landing(self, giver: int, keys: slice) -> slice:
        """Where parts that a rank has computed of its owner's rows lie with the owner."""
        return moved(keys, giver * self._longest)

    @property
    def _longest(self) -> int:
        """Rows of the longest shard; one at least, for a buffer."""
        return max(1, self.sequence.own(0))

    def schedule(self) -> Schedule | None:
        """The program on paper, in which the results of pieces are rows of `seen`."""
        (rows, ranks, *_), columns = self.sequence, COLUMNS_ON_PAPER
        if not rows:
            return None
        paper = self._replace(columns=columns, dtype=torch.float32)
        shard = partial(CallersMatrix, rows, columns, is_shard=True)
        results = ("dq", "dk", "dv") if self.is_backward else ("out",)
        callers = {"k": shard("keys"), "v": shard("values")}
        callers |= {name: shard(name, is_result=True) for name in results}
        callers["seen"] = CallersMatrix(ranks, 1, "seen", is_result=True)
        name = f"attention.{'backward.' * self.is_backward}per_shard"
        return tile_schedule(name, paper.declared(), callers, ranks, paper._on_paper)

    def _on_paper(self, call: TileCall, k: Any, v: Any, seen: Any, **results: Any) -> None:
        write(call, self, (k, v), Work(_nothing, _nothing), OnPaper(seen, tuple(results.values())))


class Work(NamedTuple):
    """What a rank computes. piece: of a shard. finish: what all pieces, and parts that have landed, come to."""

    piece: Callable[[int, OwnBuffer], object]
    finish: Callable[[OwnBuffer], object]


class OnPaper(NamedTuple):
    """Where results of pieces lie, a row for each shard, and those of the call."""

    seen: Part
    results: tuple[Part, ...]


def write(
    call: TileCall, travel: Travel, given: tuple[RowsPlace, RowsPlace], work: Work, paper: OnPaper | None = None
) -> None:
    """A call. given: the own keys and values, `[rows, columns]`."""
    rank, ranks = call.rank, travel.sequence.ranks
    _write_travel(call, travel, given)
    for step in range(ranks):
        source = (rank - step) % ranks  # in the order in which shards arrive
        piece = travel.sequence.piece(rank, source)
        if piece is not None and source != rank:
            call.rank_wait("arrived", source)
        reads, makes = _of_piece(call, travel, given, (source, piece)) if paper else ((), ())
        result = (Uses(paper.seen[source : source + 1], "seen", source),) if paper else ()
        call.rank_compute(f"piece_{source}", partial(work.piece, source), reads, (*result, *makes))
        if travel.is_backward and piece is not None and source != rank:
            _write_return(call, travel, source, piece.keys)
    reads = (Uses(paper.seen, "seen"),) if paper else ()
    if travel.is_backward:
        reads += tuple(_landed(call, travel))
    begin, _ = travel.sequence.stored(rank)
    makes = tuple(Uses(each, each.buffer, begin) for each in paper.results) if paper else ()
    call.rank_compute("finish", work.finish, reads, makes)


def _write_travel(call: TileCall, travel: Travel, given: tuple[RowsPlace, RowsPlace]) -> None:
    """What peers see of the own rows goes to them, with a signal behind it, to the next rank first."""
    copies, ranks = call.queue("copies"), travel.sequence.ranks
    for step in range(1, ranks):
        peer = (call.rank + step) % ranks
        piece = travel.sequence.piece(peer, call.rank)
        if piece is None:
            continue
        place = travel.place(call.rank, piece.keys)
        for name, own in zip(TRAVEL, given, strict=True):
            copies.rank_copy_data(own[piece.keys], call.part(name, peer)[place])
        copies.rank_notify("arrived", call.rank, peer)


def _of_piece(
    call: TileCall, travel: Travel, given: tuple[RowsPlace, RowsPlace], at: tuple[int, Piece | None]
) -> tuple[tuple[Uses, ...], tuple[Uses, ...]]:
    """What a piece reads and makes on paper, beside its result. The own shard is read where the caller has it."""
    (source, piece), rank = at, call.rank
    if piece is None:
        return (), ()
    place = travel.place(source, piece.keys)
    reads = tuple(
        Uses(own[piece.keys] if source == rank else call.part(name)[place], name, place.start)
        for name, own in zip(TRAVEL, given, strict=True)
        if isinstance(own, Part)
    )
    if not travel.is_backward:
        return reads, ()
    parts = zip(TRAVEL, travel.parts(rank, source, piece.keys), strict=True)
    return reads, tuple(Uses(call.part(name)[rows], f"{of}.{rank}", place.start) for of, (name, rows) in parts)


def _write_return(call: TileCall, travel: Travel, owner: int, keys: slice) -> None:
    """Parts of an owner's gradients go to it, beside what is computed next."""
    returns, place, landing = call.queue("returns"), travel.place(owner, keys), travel.landing(call.rank, keys)
    call.rank_notify("computed", owner, call.rank)
    returns.rank_wait("computed", owner)
    for part, landed in zip(PARTS, LANDED, strict=True):
        returns.rank_copy_data(call.part(part)[place], call.part(landed, owner)[landing])
    returns.rank_notify("landed", call.rank, owner)


def _landed(call: TileCall, travel: Travel) -> Iterator[Uses]:
    """The parts that every rank has of the own gradients, once they are there."""
    for giver in range(travel.sequence.ranks):
        piece = travel.sequence.piece(giver, call.rank)
        if piece is None:
            continue
        if giver != call.rank:
            call.rank_wait("landed", giver)
        landing, begin = travel.landing(giver, piece.keys), travel.place(call.rank, piece.keys).start
        for of, name in zip(TRAVEL, LANDED, strict=True):
            yield Uses(call.part(name)[landing], f"{of}.{giver}", begin)


def moved(rows: slice, by: int) -> slice:
    """Rows that lie so many further."""
    return slice(rows.start + by, rows.stop + by)


def _nothing(*_: Any) -> None:
    pass
