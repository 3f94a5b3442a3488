"""Methods that are lists of chunk moves: a template of moves is all that a method needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from overweave.ir.operators.all_gather_matmul import OPERATOR
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, LIBRARY, REDUCE_KERNEL, TILE_KERNEL
from overweave.ir.schedule import Collective, Range
from overweave.ir.shards import piece_rows
from overweave.schedules.communication import (
    CARRYING_TILES,
    EXCHANGES,
    PUSHES,
    TILES,
    TOTAL,
    Communication,
    Split,
    Y,
    in_parts,
    queues_of,
    stored_at_peers,
)
from overweave.schedules.families.wave_groups import in_groups, is_at_once
from overweave.schedules.moves.gather_templates import Mesh, Template, gather_of
from overweave.schedules.moves.moves import Chunk, Reduction, ReductionStep, Sum
from overweave.schedules.moves.moves import Collective as Together
from overweave.schedules.moves.reduction import Placing, chunked_reduction, reduced
from overweave.schedules.moves.reduction_templates import ReductionTemplate, reduction_of
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.records import option_sets, options
from overweave.schedules.records.movers import mesh_of
from overweave.schedules.records.record import Adds, Method, MethodInputs

MoveTemplate = Callable[[Mesh], Iterator[ReductionStep]]  # a template of a gather, or of sums


def by_moves(
    template: MoveTemplate, shared: Template | None = None, *, sends: bool = False
) -> Callable[[MethodInputs], Communication]:
    """Return a method's `write` that runs a template of moves: a gather, or sums, as the operator needs.

    shared: for sums that every rank gets, the gather that follows. sends: the rows that tiles write are gathered.
    """
    return partial(_moved, template, shared, sends)


def _moved(template: MoveTemplate, shared: Template | None, sends: bool, work: MethodInputs) -> Communication:
    """Return the communication of a template of moves for one call."""
    problem, split = work.problem, work.split
    cols, parts = problem.moved_columns, dict.fromkeys((PUSHES, TILES), split.tile_rows)
    mesh = mesh_of(split, problem, work.settings)
    if not problem.record.gathers:
        reduction = reduction_of(template, shared if problem.record.shares_sums else None, mesh)
        return reduced(reduction, (split.rows, cols), work.held, parts, _placing(work), split.only)
    gather = gather_of(template, mesh)  # type: ignore[arg-type]  # of a gather no move is a sum
    returns_gathered = problem.returns_gathered
    made = transferred(gather, split.rows, cols, sends=sends, returns_gathered=returns_gathered, only=split.only)
    return stored_at_peers(in_parts(made, parts)) if sends else in_parts(made, parts)


def sums_of_moves(
    template: Callable[[ReductionTemplate], Iterator[ReductionStep]], work: MethodInputs, *, beside: bool = True
) -> Communication:
    """Return the communication of a template of sums for one call; `Method.adds` says which engine adds.

    beside: the reduction kernel may run beside the tiles.
    """
    split, cols, settings, adds = work.split, work.problem.moved_columns, work.settings, work.method.adds
    by_tiles = settings.sums == "epilogue" or (adds is not None and adds.by == TILE_KERNEL)
    sums = ReductionTemplate(
        mesh_of(split, work.problem, settings),
        "tiles" if by_tiles else "kernel",
        settings.own_pieces,
        work.problem.record.shares_sums,
        adds is not None and adds.order == "arrival",
    )
    moves = tuple(template(sums)) if split.world_size > 1 else ()
    reduction = Reduction(split.world_size, moves, sums.everywhere, settings.copy_programs)
    parts = dict.fromkeys((PUSHES, TILES), split.tile_rows)
    # A single sum of all own rows waits for all tiles anyway.
    are_behind = not beside or (settings.own_pieces == 1 and not sums.everywhere)
    return reduced(reduction, (split.rows, cols), work.held, parts, _placing(work, are_behind), split.only)


def _placing(work: MethodInputs, are_behind: bool = False) -> Placing:
    """Return where sums are placed and who adds them, from the method and settings of a call."""
    adds, is_stored = work.method.adds, work.settings.mover in CARRYING_TILES
    return Placing(
        blocks=work.sums,
        by_library=adds is not None and adds.by == LIBRARY,
        are_behind=are_behind,
        is_one_wave=work.split.is_one_wave,
        tiles_end_in=Y if is_stored and not work.problem.of_rows else TOTAL,
    )


def collectives_by_piece(split: Split) -> tuple[Together, ...]:
    """Return one library collective for each piece: the same piece of every rank's shard."""
    ranks = range(split.world_size)
    return _together(tuple(split.piece_of(rank, piece) for rank in ranks) for piece in range(split.pieces))


def _together(pieces: Iterable[tuple[Range, ...]]) -> tuple[Together, ...]:
    """Return a library collective of the rows of each piece, without those that have none."""
    return tuple(Together(tuple(map(Chunk, piece))) for piece in pieces if any(lo < hi for lo, hi in piece))


def beside_tiles(made: Communication) -> Communication:
    """Return the communication with its collectives on a side stream, beside the tiles of later pieces."""
    steps = [replace(step, queue=EXCHANGES) if isinstance(step, Collective) else step for step in made.steps]
    return replace(made, steps=tuple(steps), queues=queues_of(steps))


def summed_by_library(work: MethodInputs) -> Communication:
    """Return the library's all-reduce, or reduce-scatter, of all rows behind the matmul."""
    return _by_library(work, replace(work.split, pieces=1))


def summed_in_waves(work: MethodInputs) -> Communication:
    """Return the library's piece by piece, each beside the matmul of the next piece."""
    return beside_tiles(_by_library(work, work.split))


def summed_in_groups(work: MethodInputs) -> Communication:
    """Return the library's for each group of waves of tiles, or of all rows where there are no groups."""
    if is_at_once(work):
        return summed_by_library(work)
    return in_groups(work, "all_reduce" if work.problem.record.shares_sums else "reduce_scatter")


def _by_library(work: MethodInputs, split: Split) -> Communication:
    everywhere = work.problem.record.shares_sums
    rows = piece_rows((0, split.rows), split.pieces, split.alignment) if everywhere else ()
    moves = _together((one,) for one in rows) if everywhere else collectives_by_piece(split)
    reduction = Reduction(split.world_size, moves if split.world_size > 1 else (), everywhere)
    # An author's tiles store where their tensor has the rows.
    how = Placing(is_gathered=work.method.multiplies != AUTHOR_KERNEL)
    return chunked_reduction(reduction, split.rows, work.problem.moved_columns, work.held, how, split.only)


def method_of_moves(template: MoveTemplate, operator: str = OPERATOR.name, **fields: Any) -> Method:
    """Return a Method of a template of moves.

    Its name is the function's, its summary the first line of the docstring. A tile kernel multiplies, the copy engine
    moves, and a reduction kernel adds. fields: fields of Method that differ; `options` come beside `pieces` and the
    tiles' own. It has no measured times: it is chosen unmeasured only if it is predicted to gain much.
    """
    taken = (options.PIECES, *fields.pop("options", ()), *options.TILES)
    sums: dict[str, Any] = {}
    if operator_of(operator).adds:
        passes_on = any(isinstance(move, Sum) for move in template(Mesh(rows=4, cols=8, world_size=4)))
        sums = {"adds": Adds(REDUCE_KERNEL, precision="result" if passes_on else "float32"), "norms": REDUCE_KERNEL}
    known = {
        "name": template.__name__,
        "summary": (template.__doc__ or "").partition("\n")[0].rstrip("."),
        "write": by_moves(template),
        "multiplies": TILE_KERNEL,
        "moves": (COPY_ENGINE,),
        "margins": (option_sets.NOT_MEASURED,),
    }
    return Method(operator=operator, options=taken, **{**known, **sums, **fields})
