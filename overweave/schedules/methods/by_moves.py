"""Methods that are lists of chunk moves: what a template says is the whole of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from overweave.ir.operators.all_gather_matmul import OPERATOR
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import COPY_ENGINE, LIBRARY, REDUCE_KERNEL, TILE_KERNEL
from overweave.ir.schedule import Collective, Queue
from overweave.schedules.communication import (
    CARRYING_TILES,
    COMPLETE,
    EXCHANGES,
    PUSHES,
    TILES,
    TOTAL,
    Communication,
    Split,
    Y,
    in_parts,
)
from overweave.schedules.moves.gather_templates import Mesh, Template, gather_of
from overweave.schedules.moves.moves import Chunk, Reduction, ReductionStep, Sum
from overweave.schedules.moves.moves import Collective as Together
from overweave.schedules.moves.peer_stores import stored_at_peers
from overweave.schedules.moves.reduction import Placing, chunked_reduction, reduced
from overweave.schedules.moves.reduction_templates import ReductionTemplate, reduction_of
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.records import option_sets, options
from overweave.schedules.records.movers import mesh_of
from overweave.schedules.records.record import Adds, Method, MethodInputs

MoveTemplate = Callable[[Mesh], Iterator[ReductionStep]]  # a template of a gather, or of sums


def by_moves(
    written: MoveTemplate, shared: Template | None = None, *, sends: bool = False
) -> Callable[[MethodInputs], Communication]:
    """What writes a list of chunk moves, for a method's `write`: of a gather, or of sums, as its operator says.

    shared: the gather by which every rank gets the sums, where it does. sends: what tiles write is gathered.
    """
    return partial(_moved, written, shared, sends)


def _moved(written: MoveTemplate, shared: Template | None, sends: bool, work: MethodInputs) -> Communication:
    problem, split = work.problem, work.split
    cols, parts = problem.moved_columns, dict.fromkeys((PUSHES, TILES), split.tile_rows)
    mesh = mesh_of(split, cols, work.settings)
    if not problem.record.gathers:
        reduction = reduction_of(written, shared if problem.record.shares_sums else None, mesh)
        return reduced(reduction, (split.rows, cols), work.held, parts, _placing(work))
    gather = gather_of(written, mesh)  # type: ignore[arg-type]  # of a gather no move is a sum
    made = transferred(gather, split.rows, cols, sends=sends, returns_gathered=problem.returns_gathered)
    return stored_at_peers(in_parts(made, parts)) if sends else in_parts(made, parts)


def sums_of_moves(
    written: Callable[[ReductionTemplate], Iterator[ReductionStep]], beside: bool = True
) -> Callable[[MethodInputs], Communication]:
    """What writes sums as a list of chunk moves, for a method's `write`; who adds is the method's to say.

    beside: whether a kernel that sums may run beside the tiles.
    """
    return partial(_summed, written, beside)


def _summed(
    written: Callable[[ReductionTemplate], Iterator[ReductionStep]], beside: bool, work: MethodInputs
) -> Communication:
    split, cols, settings, adds = work.split, work.problem.moved_columns, work.settings, work.method.adds
    by_tiles = settings.sums == "epilogue" or (adds is not None and adds.by == TILE_KERNEL)
    how = ReductionTemplate(
        mesh_of(split, cols, settings),
        "tiles" if by_tiles else "kernel",
        settings.own_pieces,
        work.problem.record.shares_sums,
    )
    moves = tuple(written(how)) if split.world_size > 1 else ()
    reduction = Reduction(split.world_size, moves, how.everywhere, settings.copy_programs)
    parts = dict.fromkeys((PUSHES, TILES), split.tile_rows)
    # One sum of all own rows waits for all tiles.
    are_behind = not beside or (settings.own_pieces == 1 and not how.everywhere)
    return reduced(reduction, (split.rows, cols), work.held, parts, _placing(work, are_behind))


def _placing(work: MethodInputs, are_behind: bool = False) -> Placing:
    """How sums are made, as the method of a call says."""
    adds, is_stored = work.method.adds, work.settings.mover in CARRYING_TILES
    return Placing(
        blocks=work.sums,
        by_library=adds is not None and adds.by == LIBRARY,
        are_behind=are_behind,
        is_one_wave=work.split.is_one_wave,
        tiles_end_in=Y if is_stored and work.problem.norm is None else TOTAL,
    )


def pieces_together(split: Split) -> tuple[Together, ...]:
    """The same piece of every rank's shard at once, by the library."""
    ranks = range(split.world_size)
    pieces = (tuple(Chunk(split.piece(rank, piece)) for rank in ranks) for piece in range(split.pieces))
    return tuple(Together(parts) for parts in pieces if any(lo < hi for lo, hi in (part.rows for part in parts)))


def beside_tiles(made: Communication) -> Communication:
    """The same, what the library carries on a stream beside the tiles of what it carries later."""
    steps = (replace(step, queue=EXCHANGES) if isinstance(step, Collective) else step for step in made.steps)
    return replace(made, steps=tuple(steps), queues=(Queue(EXCHANGES, COMPLETE),))


def summed_in_waves(work: MethodInputs) -> Communication:
    """Sums by the library of the same piece of every rank's shard, beside the tiles of the next."""
    split = work.split
    moves = pieces_together(split) if split.world_size > 1 else ()
    return beside_tiles(chunked_reduction(Reduction(split.world_size, moves), split.rows, work.problem.n, work.held))


def method_of_moves(written: MoveTemplate, operator: str = OPERATOR.name, **fields: Any) -> Method:
    """The method that a template is: called as the function is, described by its first line, computed by tiles that
    wait for the copy engine's moves, or signal; sums are a kernel's. fields: of the record, where it is to differ;
    `options` are those beside `pieces` and the tiles' own. Nothing is known of its times: it is taken unmeasured only
    where it is predicted to gain much.
    """
    taken = (options.PIECES, *fields.pop("options", ()), *options.TILES)
    sums: dict[str, Any] = {}
    if operator_of(operator).adds:
        passes_on = any(isinstance(move, Sum) for move in written(Mesh(rows=4, cols=8, world_size=4)))
        sums = {"adds": Adds(REDUCE_KERNEL, precision="result" if passes_on else "float32"), "norms": REDUCE_KERNEL}
    known = {
        "name": written.__name__,
        "summary": (written.__doc__ or "").partition("\n")[0].rstrip("."),
        "write": by_moves(written),
        "multiplies": TILE_KERNEL,
        "moves": (COPY_ENGINE,),
        "margins": (option_sets.NOT_MEASURED,),
    }
    return Method(operator=operator, options=taken, **{**known, **sums, **fields})
