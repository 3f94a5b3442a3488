"""Finer-grain overlap: each shard is cut once more, all peers send a piece at a time, and the library multiplies them.

Eight schedules (`Point`) of one gather, or of an all-to-all, where a rank has another shard for each target. Pieces are
pushed to all peers, gathered, multiplied and scattered on streams beside each other. Products of rows that do not
follow each other in the result are scattered there; products of columns are added in fp32 and rounded once.
SOURCE: FiCCO (Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap) V-A, V-B, Figure 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.contract import GATHERED_OUT
from overweave.ir.dtype import SUM_DTYPE
from overweave.ir.operators import all_gather_matmul, all_to_all_matmul
from overweave.ir.operators.record import Operator
from overweave.ir.plan import COPY_ENGINE, indexed_name
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Collective, Copy, Goal, InitialContents, Operation, Put, Range, Reduce, Region
from overweave.ir.shards import piece_rows
from overweave.schedules.communication import (
    COPIES,
    EXCHANGES,
    GATHERS,
    MAIN,
    SCATTERS,
    A,
    Communication,
    MatmulChunk,
    ReducedPart,
    Split,
    X,
    Y,
    common,
    communicated,
    is_empty,
    region,
    shifted,
)
from overweave.schedules.records import needs, option_sets, options
from overweave.schedules.records.record import Method, MethodInputs, Need

# Buffers: what arrives; own columns, row by row; products to be scattered; sums of the products of columns.
LANDED, OWN_COLUMNS, PRODUCTS, ADDED = "landed", "own_columns", "products", "added"
Steps = Iterator[Operation | MatmulChunk]


def finer(point: Point, work: MethodInputs) -> Communication:
    """What a point of the design space moves."""
    problem, m, k, size = work.problem, work.problem.m, work.problem.k, work.problem.world_size
    split = replace(work.split, pieces=size)
    pieces = Pieces(point, split, k, work.settings.carrier == "library" and size > 1)
    landed = pieces.landed()
    each = [_Rank(pieces, landed, rank, problem) for rank in range(size if m else 0)]
    is_exchange = problem.record.exchanges
    rows = m if is_exchange else split.shard_size
    x = Buffer(X, rows, k, "input", counted=None if problem.has_fixed_sizes else "sent")
    gathered = Buffer(GATHERED_OUT, m, k, "output")
    returned = (gathered,) if problem.returns_gathered else ()
    results = [Buffer(indexed_name(Y, at), m, cols, "output") for at, cols in enumerate(problem.widths)]
    made = communicated(
        size,
        [step for one in each for step in chain(one.steps(), one.returned() if returned else ())],
        (x, *returned, *results),
        given=(given for one in each for given in one.given(x)),
        goal=(Goal(region(gathered, one.rank, (0, m)), A, 0, 0) for one in each if returned),
        tiles_read=True,
    )
    dtypes = {PRODUCTS: problem.out_dtype, ADDED: SUM_DTYPE}
    kept = (buffer for buffer in made.buffers if buffer not in results)  # which the matmul names
    buffers = tuple(replace(one, dtype=dtypes.get(one.name.partition(".")[0])) for one in kept)
    return replace(made, buffers=buffers, parts={one.rank: one.parts() for one in each if one.adds})


class _Rank:
    """What one rank does, in the order of its launches."""

    def __init__(self, all_pieces: Pieces, landed: list[list[list[ShardPiece]]], rank: int, problem: Problem) -> None:
        self.all, self.landed, self.rank, self.problem = all_pieces, landed, rank, problem
        self.split, self.own, self.widths = all_pieces.split, all_pieces.split.shard(rank), problem.widths
        self.height, self.cuts = self.own[1] - self.own[0], all_pieces.cuts()
        self.is_uniform, self.is_fused = all_pieces.point.steps == "uniform", all_pieces.point.matmul == "fused"
        self.adds = len(self.cuts) > 1  # one cut is the whole reduced axis
        # Of rows that are exchanged a rank has a shard for each rank, of those that are gathered one for all.
        self.targets = range(len(landed)) if problem.record.exchanges else range(rank, rank + 1)

    def given(self, x: Buffer) -> Iterator[InitialContents]:
        """What the rank begins with."""
        for target in self.targets if self.height else ():
            yield InitialContents(
                region(x, self.rank, self._x_rows(self.own, target)), self.problem.factor(target), self.own[0], 0
            )

    def steps(self) -> Steps:
        yield from () if self.all.is_by_library else self._pushed()
        if not self.is_uniform and self.height:
            own = Region(X, self.rank, self._x_rows(self.own, self.rank), (0, self.all.k))
            yield MatmulChunk(name=f"multiply.{self.rank}.own", rank=self.rank, rows=self.own, region=own)
        for at, pieces in enumerate(self.landed[self.rank]):
            yield from self._exchanged(pieces) if self.all.is_by_library else self._gathered(pieces)
            for index, group in enumerate(self._groups(pieces)):
                yield from self._multiplied(group, f"{self.rank}.{pieces[0].step}.{index}", is_first=at == 0)
        yield from self._rounded() if self.adds else ()

    def _pushed(self) -> Steps:
        """The own pieces to where peers have a place for them, one to every peer before the next."""
        places = {
            (peer, piece.step): piece
            for peer in self.split.peers(self.rank)
            for pieces in self.landed[peer]
            for piece in pieces
            if piece.owner == self.rank
        }
        size, is_ring = self.split.world_size, self.split.order == "ring"
        queues = {away: COPIES if is_ring else f"{COPIES}.{away}" for away in range(1, size)}
        # What one queue carries stands together: it is one launch.
        for step, away in sorted(product(range(size), queues), key=lambda at: queues[at[1]]):
            peer = self.split.peer(self.rank, away)
            if (peer, step) in places:
                piece = places[peer, step]
                yield Put(
                    name=f"push.{self.rank}-{peer}.{step}",
                    rank=self.rank,
                    queue=queues[away],
                    sources=(self._in_x(piece, peer),),
                    destinations=(_lies(piece, peer),),
                )

    def _gathered(self, pieces: Sequence[ShardPiece]) -> Steps:
        """The own piece, where the step's matmul reads it among those of the peers."""
        for piece in pieces:
            if piece.owner == self.rank and piece.place:
                yield self._copy(f"gather.{self.rank}.{piece.step}", GATHERS, [self._in_x(piece)], [self._lies(piece)])

    def _exchanged(self, pieces: Sequence[ShardPiece]) -> Steps:
        """One collective for the pieces of all ranks. It sends whole rows: own columns are gathered in such first."""
        step, cols, top = pieces[0].step, pieces[0].cols, (pieces[0].place or (0, 0))[0]
        landing, sources = {piece.owner: self._lies(piece) for piece in pieces}, [Region(X, self.rank, (0, 0), cols)]
        for piece in pieces:
            if piece.owner == self.rank:
                sources = [self._in_x(piece, target) for target in self.targets]
        if self.cuts and self.rank in landing:
            first = step * len(sources) * self.height
            tops = range(first, first + len(sources) * self.height, self.height)
            packed = [Region(OWN_COLUMNS, self.rank, (lo, lo + self.height), (0, cols[1] - cols[0])) for lo in tops]
            yield self._copy(f"gather.{self.rank}.{step}", GATHERS, sources, packed)
            sources = packed
        nothing, ranks = Region(LANDED, self.rank, (top, top), (0, cols[1] - cols[0])), tuple(range(len(self.landed)))
        yield Collective(
            name=f"exchange.{self.rank}.{step}",
            rank=self.rank,
            queue=EXCHANGES,
            function="all_to_all" if self.problem.record.exchanges else "all_gather",
            label=f"exchange.{step}",
            ranks=ranks,
            sources=tuple(sources),
            destinations=tuple(landing.get(owner, nothing) for owner in ranks),
        )

    def _groups(self, pieces: Sequence[ShardPiece]) -> list[list[ShardPiece]]:
        """The pieces of a step that are multiplied together: those that lie side by side, if matmuls are fused."""
        groups: list[list[ShardPiece]] = []
        for piece in pieces:
            if piece.owner == self.rank and not self.is_uniform:
                continue
            before = groups[-1][-1].place if groups else None
            if self.is_fused and before and piece.place and before[1] == piece.place[0]:
                groups[-1].append(piece)
            else:
                groups.append([piece])
        return groups

    def _multiplied(self, group: list[ShardPiece], name: str, is_first: bool) -> Steps:
        """Pieces by each weight: to their rows of the result, to the sums, or to where they are scattered from."""
        first, last = group[0], group[-1]
        is_own = group == [first] and first.owner == self.rank
        place = _span(first.place, last.place) if first.place and last.place else None
        read = self._in_x(first) if is_own or place is None else replace(self._lies(first), rows=place)
        chunk = MatmulChunk(name=f"multiply.{name}", rank=self.rank, rows=_span(first.rows, last.rows), region=read)
        if self.adds:
            rows = _span(self._sum_rows(first.owner), self._sum_rows(last.owner))
            yield replace(chunk, cols=first.cols, into=tuple(self._each(ADDED, rows)), adds=not is_first)
        elif place is None or self._follow(group):
            yield chunk
        else:
            yield replace(chunk, rows=place, into=tuple(self._each(PRODUCTS, place)))
            places, rows_of = [piece.place for piece in group if piece.place], [piece.rows for piece in group]
            for at in range(len(self.widths)):
                sources = [self._of(PRODUCTS, at, rows) for rows in places]
                yield self._copy(f"scatter.{name}.{at}", SCATTERS, sources, [self._of(Y, at, rows) for rows in rows_of])

    def _follow(self, group: list[ShardPiece]) -> bool:
        """Whether rows of pieces that lie side by side do so in the result, where filled rows of blocks do not."""
        if not self.problem.has_fixed_sizes:
            return len(group) == 1
        return all(one.rows[1] == other.rows[0] for one, other in zip(group, group[1:], strict=False))

    def _rounded(self) -> Steps:
        """The sums to the result: blocks that are filled in part one by one."""
        shards = [rows for rows in map(self.split.shard, range(len(self.landed))) if not is_empty(rows)]
        blocks = [(0, self.split.rows)] if self.problem.has_fixed_sizes else shards
        cut = (common(rows, block) for rows in self._added_rows() for block in blocks)
        for index, rows in enumerate(rows for rows in cut if not is_empty(rows)):
            owners = [owner for owner in range(len(self.landed)) if _is_within(self.split.shard(owner), rows)]
            held = _span(self._sum_rows(owners[0]), self._sum_rows(owners[-1]))
            for at in range(len(self.widths)):
                yield Reduce(
                    name=f"round.{self.rank}.{index}.{at}",
                    rank=self.rank,
                    queue=MAIN,
                    operands=(self._of(ADDED, at, held),),
                    out=self._of(Y, at, rows),
                )

    def returned(self) -> Steps:
        """All of what is gathered, to the caller's output, step by step."""
        queue = GATHERS if len(self.landed) > 1 else MAIN
        for pieces in self.landed[self.rank]:
            sources = [self._in_x(piece) if piece.owner == self.rank else self._lies(piece) for piece in pieces]
            places = [Region(GATHERED_OUT, self.rank, piece.rows, piece.cols) for piece in pieces]
            yield self._copy(f"return.{self.rank}.{pieces[0].step}", queue, sources, places)

    def parts(self) -> tuple[ReducedPart, ...]:
        """The rows whose products of columns are added, and the own ones, if these are multiplied as they are."""
        added = tuple((rows, self.cuts) for rows in self._added_rows())
        return added if self.is_uniform or not self.height else ((self.own, ((0, self.all.k),)), *added)

    def _added_rows(self) -> list[Range]:
        """Rows of the result that are rounded sums."""
        whole = (0, self.split.rows)
        if self.is_uniform or not self.height:
            return [whole]
        return [rows for rows in ((self.own[1], whole[1]), (0, self.own[0])) if not is_empty(rows)]

    def _sum_rows(self, owner: int) -> Range:
        """Where the sums of a shard lie: as in the result, but for peers that are multiplied in ring order."""
        rows = self.split.shard(owner)
        if self.is_uniform:
            return rows
        behind = self.split.rows - self.own[1]
        return shifted(rows, -self.own[1] if owner > self.rank else behind)

    def _in_x(self, piece: ShardPiece, target: int | None = None) -> Region:
        """Where the rank has a piece of its own; of rows that are exchanged, the one for a target, or itself."""
        return Region(X, self.rank, self._x_rows(piece.rows, self.rank if target is None else target), piece.cols)

    def _x_rows(self, rows: Range, target: int) -> Range:
        first = self.split.shard(target)[0] if self.problem.record.exchanges else 0
        return shifted(rows, first - self.own[0])

    def _lies(self, piece: ShardPiece) -> Region:
        return _lies(piece, self.rank)

    def _each(self, buffer: str, rows: Range) -> Iterator[Region]:
        return (self._of(buffer, at, rows) for at in range(len(self.widths)))

    def _of(self, buffer: str, weight: int, rows: Range) -> Region:
        return Region(indexed_name(buffer, weight), self.rank, rows, (0, self.widths[weight]))

    def _copy(self, name: str, queue: str, sources: Iterable[Region], places: Iterable[Region]) -> Copy:
        return Copy(name=name, rank=self.rank, queue=queue, sources=tuple(sources), destinations=tuple(places))


def _lies(piece: ShardPiece, rank: int) -> Region:
    """Where a piece has arrived on a rank."""
    assert piece.place is not None, f"{piece} stays with rank {rank}"
    return Region(LANDED, rank, piece.place, (0, piece.shape[1]))


def _span(first: Range, last: Range) -> Range:
    return first[0], last[1]


def _is_within(rows: Range, whole: Range) -> bool:
    return whole[0] <= rows[0] < rows[1] <= whole[1]


# What each step of a finer-grain schedule brings to a rank, and where it lies there.
#
# A step has one piece of the shard of every rank. What arrives in a step lies side by side, so that one matmul can read
# it as it is; only a rank's own piece must be gathered there, if at all.
# SOURCE: FiCCO (Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap) V-A, V-B, Figure 11.


class Point(Struct, frozen=True):
    """One of the eight schedules that three choices span.

    cut: what a piece of a shard is, whole rows or whole columns. steps: uniform, each with a piece of every rank, the
    own too; hetero, the own shard first, then steps of peers' pieces. matmul: fused, one for a step; unfused, one for a
    piece.
    """

    cut: Literal["rows", "columns"]
    steps: Literal["uniform", "hetero"]
    matmul: Literal["fused", "unfused"]

    @property
    def name(self) -> str:
        """As the paper has it: 1-D of rows, 2-D of columns."""
        return f"{self.steps}_{self.matmul}_{'1d' if self.cut == 'rows' else '2d'}"


class ShardPiece(Struct, frozen=True):
    """Rows of a rank's shard, in the whole tensor, and columns of them. Never empty.

    place: the rows of a landing buffer where the piece lies, from column 0 on; None of a rank's own that stays in x.
    """

    owner: int
    step: int
    rows: Range
    cols: Range
    place: Range | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


class Pieces(Struct, frozen=True):
    """All pieces of a gather of `[rows, k]`. is_by_library: whether one collective brings each step."""

    point: Point
    split: Split
    k: int
    is_by_library: bool

    def cuts(self) -> tuple[Range, ...]:
        """The ranges of columns that are pieces; none of rows. Vector loads of a matmul begin where a cut does."""
        if self.point.cut == "rows":
            return ()
        whole = piece_rows((0, self.k), self.split.world_size, self.split.alignment)
        return tuple(cols for cols in whole if not is_empty(cols))

    def of_owners(self) -> list[list[ShardPiece]]:
        """The pieces of each rank's shard, in the order in which they are sent."""
        found, cuts, size = [], self.cuts(), self.split.world_size
        for owner in range(size):
            rows, whole = self.split.shard(owner), (0, self.k)
            in_rows = piece_rows(rows, size, self.split.alignment)
            boxes = [(rows, cols) for cols in cuts] or [(piece, whole) for piece in in_rows]
            pieces = [ShardPiece(owner, step, rows, cols) for step, (rows, cols) in enumerate(boxes)]
            found.append([piece for piece in pieces if not is_empty(piece.rows)])
        return found

    def landed(self) -> list[list[list[ShardPiece]]]:
        """Of each rank the pieces of each step, in the order in which they lie there. No step is empty."""
        by_step: dict[int, dict[int, ShardPiece]] = {}
        for piece in (piece for of_owner in self.of_owners() for piece in of_owner):
            by_step.setdefault(piece.step, {})[piece.owner] = piece
        steps = [by_step[step] for step in sorted(by_step)]
        return [self._placed(rank, steps) for rank in range(self.split.world_size)]

    def _placed(self, rank: int, steps: list[dict[int, ShardPiece]]) -> list[list[ShardPiece]]:
        """In rank order where the own piece lies among the others, else in ring order, the own one last."""
        is_uniform, is_fused = self.point.steps == "uniform", self.point.matmul == "fused"
        in_order = list(range(self.split.world_size))
        owners = in_order if is_uniform or self.is_by_library else [*self.split.peers(rank), rank]
        placed, top = [], 0
        for step in steps:
            is_joined = self.is_by_library or (is_uniform and is_fused and len(step) > 1)
            pieces = []
            for piece in (step[owner] for owner in owners if owner in step):
                is_here = piece.owner != rank or is_joined
                place = (top, top + piece.shape[0]) if is_here else None
                pieces.append(replace(piece, place=place))
                top = place[1] if place else top
            placed.append(pieces)
        return placed


# The methods of finer-grain overlap: all eight points of one design space, of which four are never chosen.


_SUMMARIES = {
    "rows": "pieces of shards by rows from all peers at once",
    "columns": "pieces of shards by columns from all peers at once, products added in fp32",
    "uniform": "every step alike",
    "hetero": "the own shard first",
    "fused": "one library matmul for a step",
    "unfused": "one library matmul for a piece",
}
_SHARDS_ROWS = "the paper drops it: columns are cut where m < k, and there matmuls of fewer rows lose more"
_DROPPED = {
    Point("rows", "uniform", "unfused"): (
        "the paper drops it: it cuts the matmuls of hetero_unfused_1d once more and moves as much"
    ),
    Point("columns", "uniform", "unfused"): _SHARDS_ROWS,
    Point("columns", "hetero", "fused"): _SHARDS_ROWS,
    Point("columns", "hetero", "unfused"): _SHARDS_ROWS,
}
# As the paper lists them, the four that it keeps first.
POINTS = (
    Point("rows", "uniform", "fused"),
    Point("rows", "hetero", "fused"),
    Point("rows", "hetero", "unfused"),
    Point("columns", "uniform", "fused"),
    *_DROPPED,
)


def _needs(point: Point) -> tuple[Need, ...]:
    if point.cut == "columns":
        return (needs.PLAIN_PARTS,)
    return (needs.NO_RESIDUAL, needs.NO_ROW_SCALES) if point.matmul == "fused" else ()


def _method(operator: Operator, point: Point) -> Method:
    return Method(
        operator=operator.name,
        name=point.name,
        summary=", ".join(_SUMMARIES[word] for word in (point.cut, point.steps, point.matmul)),
        source="FiCCO V-B, Figure 11",
        dropped=_DROPPED.get(point, ""),
        write=partial(finer, point),
        moves=(COPY_ENGINE,),
        options=(options.ALL_PEERS, options.CARRIER),
        needs=_needs(point),
        grids=() if point in _DROPPED else (option_sets.AS_IT_IS,),
        margins=(option_sets.NOT_MEASURED,),
    )


GATHER_METHODS = tuple(_method(all_gather_matmul.OPERATOR, point) for point in POINTS)
EXCHANGE_METHODS = tuple(_method(all_to_all_matmul.OPERATOR, point) for point in POINTS)
