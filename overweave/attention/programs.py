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
from typing import Any, NamedTuple, Protocol

import torch
from msgspec.structs import replace

from overweave.attention.pieces import wide
from overweave.attention.sequence import Piece, Sequence
from overweave.ir.schedule import Schedule
from overweave.lang.mapping import TileChannel, Tiles
from overweave.ops.author.tile_program import TileCall
from overweave.ops.author.tile_schedule import CallersMatrix, tile_schedule
from overweave.runtime.handwritten import Access, Declared, OwnBuffer, Part, SymmetricBuffer
from overweave.schedules.records.attention import OPERATORS, PER_SHARD

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

    def with_elements(self, columns: int, dtype: torch.dtype) -> Travel:
        """The same of other rows of keys."""
        return self._replace(columns=columns, dtype=dtype)

    def held(self, rank: int, source: int) -> tuple[BufferRows, ...]:
        """Where a peer's shard lies with a rank."""
        return tuple((name, self.place(source, slice(0, self.sequence.own(source)))) for name in TRAVEL)

    def parts(self, rank: int, source: int) -> tuple[BufferRows, ...]:
        """Where a rank computes its parts of the gradients of a shard's keys and values."""
        whole = slice(0, self.sequence.own(source))
        names, rows = (LANDED, self.landing(rank, whole)) if source == rank else (PARTS, self.place(source, whole))
        return tuple((name, rows) for name in names)

    def added(self, rank: int, source: int) -> tuple[BufferRows, ...]:
        """What it adds to them: nothing, before they are with the owner."""
        return ()

    def landed(self, rank: int) -> tuple[tuple[slice, tuple[BufferRows, ...]], ...]:
        """What a rank's gradients are the sum of: rows of its own, and where a part of them lies."""
        pieces = ((giver, self.sequence.piece(giver, rank)) for giver in range(self.sequence.ranks))
        seen = ((giver, piece.keys) for giver, piece in pieces if piece is not None)
        return tuple((keys, tuple((name, self.landing(giver, keys)) for name in LANDED)) for giver, keys in seen)

    def landing(self, giver: int, keys: slice) -> slice:
        """Where parts that a rank has computed of its owner's rows lie with the owner."""
        return moved(keys, giver * self._longest)

    @property
    def _longest(self) -> int:
        """Rows of the longest shard; one at least, for a buffer."""
        return max(1, self.sequence.own(0))

    def schedule(self) -> Schedule | None:
        """What is proven before it runs; None where nothing moves."""
        return on_paper(self, PER_SHARD) if self.sequence.rows else None

    def write(
        self, call: TileCall, given: tuple[RowsPlace, RowsPlace], work: Work, paper: OnPaper | None = None
    ) -> None:
        """A call. given: the own keys and values, `[rows, columns]`."""
        write(call, self, given, work, paper)


class TravelProgram(Protocol):
    """What `on_paper` needs of a program."""

    @property
    def sequence(self) -> Sequence: ...
    @property
    def is_backward(self) -> bool: ...
    def declared(self) -> Declared: ...
    def with_elements(self, columns: int, dtype: torch.dtype) -> TravelProgram: ...
    def write(
        self, call: TileCall, given: tuple[RowsPlace, RowsPlace], work: Work, paper: OnPaper | None = None
    ) -> None: ...


def on_paper(program: TravelProgram, plan: str, columns: int = COLUMNS_ON_PAPER) -> Schedule:
    """A program of at least one row as a Schedule of the plan's name, in which the results of pieces are rows of
    `seen`, and sums of gradients fp32."""
    name = f"{OPERATORS[program.is_backward]}.{plan}"
    sequence, plain = program.sequence, program.with_elements(columns, torch.float32)
    shard = partial(CallersMatrix, sequence.rows, columns, is_shard=True)
    results = ("dq", "dk", "dv") if program.is_backward else ("out",)
    callers = {"k": shard("keys"), "v": shard("values")}
    callers |= {name: shard(name, is_result=True) for name in results}
    callers["seen"] = CallersMatrix(sequence.ranks, 1, "seen", is_result=True)

    def write(call: TileCall, k: Any, v: Any, seen: Any, **results: Any) -> None:
        plain.write(call, (k, v), Work(nothing, nothing, nothing), OnPaper(seen, tuple(results.values())))

    schedule = tile_schedule(name, plain.declared(), callers, sequence.ranks, write)
    narrow = program.with_elements(columns, torch.bfloat16).declared().buffers
    wide_names = {name for name, each in narrow.items() if each.dtype == torch.float32}
    buffers = (replace(each, dtype="float32") if each.name in wide_names else each for each in schedule.buffers)
    return replace(schedule, buffers=tuple(buffers))


class Work(NamedTuple):
    """What a rank computes. piece: of a shard. add: of gradients, the sum of what the piece has of those of the shard,
    and of what has come of ranks before. finish: what all pieces, and parts that have landed, come to."""

    piece: Callable[[int, OwnBuffer], object]
    add: Callable[[int, OwnBuffer], object]
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
        result = (Access(paper.seen[source : source + 1], "seen", source),) if paper else ()
        call.rank_compute(f"piece_{source}", partial(_piece_and_part, work, source, travel), reads, (*result, *makes))
        if travel.is_backward and piece is not None and source != rank:
            _write_return(call, travel, source, piece.keys)
    reads = (Access(paper.seen, "seen"),) if paper else ()
    if travel.is_backward:
        reads += tuple(_landed(call, travel))
    begin, _ = travel.sequence.stored(rank)
    makes = tuple(Access(each, each.buffer, begin) for each in paper.results) if paper else ()
    call.rank_compute("finish", work.finish, reads, makes)


def _piece_and_part(work: Work, source: int, travel: Travel, own: OwnBuffer) -> None:
    work.piece(source, own)
    if travel.is_backward:
        work.add(source, own)


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
) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """What a piece reads and makes on paper, beside its result. The own shard is read where the caller has it."""
    (source, piece), rank = at, call.rank
    if piece is None:
        return (), ()
    place = travel.place(source, piece.keys)
    reads = tuple(
        Access(own[piece.keys] if source == rank else call.part(name)[place], name, place.start)
        for name, own in zip(TRAVEL, given, strict=True)
        if isinstance(own, Part)
    )
    if not travel.is_backward:
        return reads, ()
    parts = zip(TRAVEL, travel.parts(rank, source), strict=True)
    made = ((of, call.part(name)[moved(piece.keys, rows.start)]) for of, (name, rows) in parts)
    return reads, tuple(Access(part, f"{of}.{rank}", place.start) for of, part in made)


def _write_return(call: TileCall, travel: Travel, owner: int, keys: slice) -> None:
    """Parts of an owner's gradients go to it, beside what is computed next."""
    returns, place, landing = call.queue("returns"), travel.place(owner, keys), travel.landing(call.rank, keys)
    call.rank_notify("computed", owner, call.rank)
    returns.rank_wait("computed", owner)
    for part, landed in zip(PARTS, LANDED, strict=True):
        returns.rank_copy_data(call.part(part)[place], call.part(landed, owner)[landing])
    returns.rank_notify("landed", call.rank, owner)


def _landed(call: TileCall, travel: Travel) -> Iterator[Access]:
    """The parts that every rank has of the own gradients, once they are there."""
    for giver in range(travel.sequence.ranks):
        piece = travel.sequence.piece(giver, call.rank)
        if piece is None:
            continue
        if giver != call.rank:
            call.rank_wait("landed", giver)
        landing, begin = travel.landing(giver, piece.keys), travel.place(call.rank, piece.keys).start
        for of, name in zip(TRAVEL, LANDED, strict=True):
            yield Access(call.part(name)[landing], f"{of}.{giver}", begin)


def moved(rows: slice, by: int) -> slice:
    """Rows that lie so many further."""
    return slice(rows.start + by, rows.stop + by)


def nothing(*_: Any) -> None:
    """What is computed on paper."""
