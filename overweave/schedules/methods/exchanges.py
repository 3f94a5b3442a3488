"""The methods of all-to-alls before a matmul, and behind one."""

from __future__ import annotations

from functools import partial

from overweave.errors import InputError
from overweave.ir.operators.all_to_all_matmul import OPERATOR
from overweave.ir.operators.matmul_all_to_all import OPERATOR as RETURNS
from overweave.ir.plan import COPY_ENGINE, LIBRARY, REDUCE_KERNEL, TILE_KERNEL
from overweave.schedules.communication import (
    PUSHES,
    TILES,
    Communication,
    in_parts,
    stored_at_peers,
)
from overweave.schedules.families.wave_groups import in_groups
from overweave.schedules.methods.by_moves import beside_tiles, collectives_by_piece
from overweave.schedules.moves.gather_templates import all_to_all_of
from overweave.schedules.moves.island_templates import exchange
from overweave.schedules.moves.moves import AllToAll
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.records import needs, option_sets, options
from overweave.schedules.records.movers import mesh_of
from overweave.schedules.records.record import WITH_KERNELS, MarginCase, Method, MethodInputs


def exchanged(by_library: bool, work: MethodInputs) -> Communication:
    """An all-to-all of the rows that are multiplied, or of their products."""
    split, cols, sends = work.split, work.problem.moved_columns, not work.problem.record.gathers
    moves = all_to_all_of(sends, by_library, mesh_of(split, work.problem, work.settings))
    made = transferred(moves, split.rows, cols, sends=sends, only=split.only)
    made = in_parts(made, dict.fromkeys((PUSHES, TILES), split.tile_rows))
    return stored_at_peers(made) if sends else made


def by_islands(work: MethodInputs) -> Communication:
    """An all-to-all on two levels."""
    split, cols, sends = work.split, work.problem.moved_columns, not work.problem.record.gathers
    mesh = mesh_of(split, work.problem, work.settings)
    moves = AllToAll(split.world_size, tuple(exchange(mesh, sends)), sends)
    return transferred(moves, split.rows, cols, sends=sends, only=split.only)


def _waves(work: MethodInputs) -> Communication:
    """In groups where blocks are whole tiles, so that all have as many rows of tiles; else at once behind all tiles."""
    config, groups = work.config, work.settings.groups
    assert config is not None, "tiles of a kernel"
    is_ragged = work.problem.block % config.block_m != 0
    if groups is not None and is_ragged:
        found = f"blocks of {work.problem.block} rows are no whole tiles of {config.block_m}"
        raise InputError(f"build {work.method.full_name}", found, "Leave groups out, or pad the blocks")
    if groups is None and (is_ragged or work.split.world_size == 1):
        return exchanged(True, work)
    return in_groups(work, "all_to_all")


def decomposed(work: MethodInputs) -> Communication:
    """The same piece of every block at once, by the library, beside the matmuls of the next pieces."""
    split, ranks = work.split, range(work.split.world_size)
    if len(ranks) == 1 or not split.rows:
        return exchanged(True, work)
    moves = AllToAll(len(ranks), collectives_by_piece(split), True)
    return beside_tiles(transferred(moves, split.rows, work.problem.moved_columns, sends=True, only=split.only))


_library, _behind = partial(Method, operator=OPERATOR.name), partial(Method, operator=RETURNS.name)
# What both operators have: the moves of blocks are the same before a matmul and behind it.
# MEASURED: with the margin of kernels cold_choice of moe*.2026-11-28, of two H200s and of four, finds 0.983 of the
# quickest in the mean, and nothing behind the library.
_per_peer = partial(
    Method,
    name="per_peer",
    write=partial(exchanged, False),
    moves=(COPY_ENGINE,),
    options=(options.ORDER, options.CARRIER),
    grids=(option_sets.AS_IT_IS, {"order": ("all_peers",)}),
    margins=(MarginCase(margin=WITH_KERNELS),),
)
_push = partial(
    Method,
    name="push",
    write=partial(exchanged, False),
    multiplies=TILE_KERNEL,
    moves=(COPY_ENGINE,),
    options=option_sets.PUSHED,
    needs=(needs.WHOLE_BLOCKS,),
    grids=(
        option_sets.PIECES,
        {"pieces": (1, 2), "order": ("all_peers",)},
        {"pieces": (1, 2), **option_sets.BY_KERNEL},
    ),
)
_by_islands = partial(
    Method,
    name="islands",
    write=by_islands,
    source="Flux (arXiv 2406.06858) 5.1: two nodes; the relay of NCCL's PXN, of a whole island",
    multiplies=TILE_KERNEL,
    moves=(COPY_ENGINE,),
    has_levels=True,
    options=option_sets.ISLANDS,
    needs=(needs.WHOLE_BLOCKS, *needs.LEVELS),
    grids=({"pieces": (1, 2)},),
    margins=(option_sets.NOT_MEASURED,),
)
METHODS = (
    _library(
        name="sequential",
        transport="all_to_all.receive_collective",
        summary="library all-to-all, then one library matmul",
        write=partial(exchanged, True),
        grids=(option_sets.AS_IT_IS,),
    ),
    _per_peer(
        operator=OPERATOR.name,
        summary="blocks pushed by copy engine, one library matmul per peer's block",
        source="the decomposition by shards of PyTorch's asynchronous tensor parallelism, of FiCCO's all-to-alls",
    ),
    _push(
        operator=OPERATOR.name,
        transport="all_to_all.receive",
        summary="pieces of blocks pushed by copy engine or kernel, tiles of one kernel wait",
        source="Flux (arXiv 2406.06858) 4.2, of an all-to-all",
    ),
    _by_islands(
        operator=OPERATOR.name,
        summary="blocks for other islands cross to one rank of each, which passes them on, beside earlier tiles",
    ),
    _behind(
        name="sequential",
        transport="all_to_all.send_collective",
        summary="one library matmul, then library all-to-all",
        write=partial(exchanged, True),
        grids=(option_sets.AS_IT_IS,),
    ),
    _per_peer(
        operator=RETURNS.name,
        summary="one library matmul per peer's block, blocks pushed by copy engine as they are multiplied",
        source="the decomposition by shards of PyTorch's asynchronous tensor parallelism",
    ),
    _push(
        operator=RETURNS.name,
        transport="all_to_all.send",
        summary="pieces of blocks pushed by copy engine or kernel as soon as tiles of one kernel have them",
        source="Flux (arXiv 2406.06858) 4.2, of an all-to-all",
    ),
    _by_islands(
        operator=RETURNS.name,
        summary="blocks for other islands are multiplied first, and cross to one rank of each, which passes them on",
    ),
    _behind(
        name="waves",
        summary="tiles of one kernel store block by block, library all-to-alls of groups of waves run beside them",
        source="FlashOverlap (arXiv 2504.19519) 3.3.4: a pool for each destination, in the order of its tiles",
        write=_waves,
        multiplies=TILE_KERNEL,
        moves=(LIBRARY, REDUCE_KERNEL),
        options=option_sets.WAVES,
        needs=(needs.WHOLE_BLOCKS,),
        grids=(option_sets.AS_IT_IS,),
        margins=(MarginCase(margin=option_sets.OF_STORES),),
    ),
    _behind(
        name="decomposed",
        summary="one library matmul per piece of each block, whose library all-to-all runs beside the next piece",
        source="FlashOverlap (arXiv 2504.19519) 6.1.3: VanillaDecomposition",
        write=decomposed,
        options=(options.PIECES,),
        grids=(option_sets.PIECES,),
    ),
)
