"""The methods of sums behind a matmul: of reduce-scatters, and of all-reduces."""

from __future__ import annotations

from functools import partial

from overweave.ir.operators import matmul_all_reduce, matmul_reduce_scatter
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, LIBRARY, PACKED_KERNEL, REDUCE_KERNEL, TILE_KERNEL
from overweave.ir.schedule import ECHOES
from overweave.schedules.families import packed
from overweave.schedules.methods.by_moves import (
    by_moves,
    summed_by_library,
    summed_in_groups,
    summed_in_waves,
    sums_of_moves,
)
from overweave.schedules.moves import island_templates
from overweave.schedules.moves.reduction_templates import in_place, round_ring_of_tiles, straight
from overweave.schedules.records import option_sets, options
from overweave.schedules.records.needs import LEVELS, UNSCALED, from_ranks
from overweave.schedules.records.options import Option
from overweave.schedules.records.record import Adds, Margin, MarginCase, Method

# Sums that pull beside tiles: not measured. As much as the worst of what else tiles and peers share is given.
OF_PULLS = option_sets.OF_STORES
# Of two H200s sim_accuracy of rings.* finds reduce-scatters round a ring no more than 34 us too short, and 16 %, but
# for the one in whole tiles that takes half ones now; own tiles that add no more than 36 us, but 23 %. With these
# margins no choice is one that was measured behind the library (campaigns.choices.cold_choice, of the same files).
OF_RINGS_OF_TWO, OF_OWN_SUMS = Margin(15.0, 0.01), Margin(30.0, 0.02)
# Of four H200s sim_accuracy of small_weighed.* finds pieces round a ring up to 91 us too short, where each shard is one
# wave of tiles: `fused_ring` has the margins of all-reduces round a ring.
# All-reduces by finished parts. MEASURED: on layers of 1,024 to 8,192 rows those whose own tiles add what arrived take
# 6 to 23 % more than predicted, those whose sums are a kernel's 0 to 7 % (4 x H200,
# benchmarks/results/llm_layers.matmul_all_reduce.h200x4.2026-11-22.json, and prefill.* of the same day). With these
# margins no choice is one that was measured behind the library.
OF_SUMMING_KERNELS, OF_ADDING_TILES = Margin(10.0, 0.035), Margin(20.0, 0.06)

_RS, _AR = matmul_reduce_scatter.OPERATOR.name, matmul_all_reduce.OPERATOR.name
_tiles = partial(Method, multiplies=TILE_KERNEL, moves=(COPY_ENGINE,))
_messages = partial(
    Method,
    moves=(PACKED_KERNEL,),
    reuse=ECHOES,
    options=(options.MATMUL,),
    grids=(option_sets.AS_IT_IS, option_sets.EARLY),
    margins=(option_sets.OF_MESSAGES,),
    adds=Adds(PACKED_KERNEL),
    norms=PACKED_KERNEL,
)
_ring_stored = partial(
    _tiles,
    name="ring_stored",
    source="the ring of NCCL's collectives, with the stores at a peer of Flux 4.1",
    adds=Adds(TILE_KERNEL, "ring", "result"),
    options=option_sets.STORED_ROUND,
    grids=(option_sets.IN_TWO,),
)

_by_islands = partial(
    _tiles,
    name="islands",
    summary="partials are added inside islands, and each sum crosses to its owner's island once, beside the next tiles",
    source="AutoOverlap 5.1, Figure 4: heterogeneous by levels of a mesh; Flux (arXiv 2406.06858) 5.1: two nodes",
    write=by_moves(island_templates.sums, island_templates.gather),
    has_levels=True,
    adds=Adds(LIBRARY, precision="result"),
    norms=LIBRARY,
    options=option_sets.ISLANDS,
    needs=LEVELS,
    grids=({"pieces": (1, 2)},),
    margins=(option_sets.NOT_MEASURED,),
)


def _by_library(operator: str, collective: str, *options_of_waves: Option) -> tuple[Method, ...]:
    """The library's sum behind the matmul, beside it piece by piece, and beside it by groups of waves."""
    pieces = f"one library matmul for each piece of rows, and a library {collective} of each beside the next one"
    waves = f"tiles of one kernel store block by block, library {collective}s of groups of waves run beside them"
    reordered = "FlashOverlap (arXiv 2504.19519) 3: signals by groups of waves, reordering around library collectives"
    library = partial(Method, operator=operator, adds=Adds(LIBRARY, "library", "result"))
    return (
        library(
            name="sequential",
            lowering="direct",
            transport=f"{collective.replace('-', '_')}.collective",
            summary=f"one library matmul, then library {collective}",
            write=summed_by_library,
            norms=LIBRARY,
            grids=(option_sets.AS_IT_IS,),
        ),
        library(
            name="decomposed",
            summary=pieces,
            source="the decomposition that FlashOverlap (arXiv 2504.19519) is held against in 6.1",
            write=summed_in_waves,
            options=(options.PIECES,),
        ),
        library(
            name="waves",
            summary=waves,
            source=reordered,
            write=summed_in_groups,
            multiplies=TILE_KERNEL,
            moves=(LIBRARY, REDUCE_KERNEL),
            norms=REDUCE_KERNEL,
            options=(*option_sets.WAVES, *options_of_waves),
            margins=(MarginCase(margin=option_sets.OF_STORES),),
            needs=(UNSCALED,),
        ),
    )


_of_scatters, _of_reductions = _by_library(_RS, "reduce-scatter", options.ROWS), _by_library(_AR, "all-reduce")
METHODS = (
    _of_scatters[0],
    Method(
        operator=_RS,
        name="per_shard",
        summary="one library matmul per shard, put to its owner, who sums in order",
        source="the decomposition by shards of PyTorch's asynchronous tensor parallelism",
        write=partial(sums_of_moves, straight),
        moves=(COPY_ENGINE,),
        adds=Adds(LIBRARY),
        norms=LIBRARY,
        options=(options.ORDER, options.CARRIER),
        grids=(option_sets.AS_IT_IS,),
    ),
    _tiles(
        operator=_RS,
        name="scatter",
        lowering="template",
        summary="tiles of one kernel signal, copy engine scatters pieces, owners sum in order",
        source="Flux (arXiv 2406.06858) 4.1, with copies by the copy engine",
        write=partial(sums_of_moves, straight),
        adds=Adds(REDUCE_KERNEL),
        norms=REDUCE_KERNEL,
        options=(options.SUMS, options.OWN_PIECES, *option_sets.PUSHED),
        grids=(
            {**option_sets.PIECES, "own_pieces": (1, 2, 4)},
            {**option_sets.PIECES, "sums": ("epilogue",)},
            {"pieces": (1, 2), "own_pieces": (1,), **option_sets.BY_KERNEL},
        ),
        margins=(MarginCase(margin=OF_OWN_SUMS, options={"sums": "epilogue"}),),
    ),
    _tiles(
        operator=_RS,
        name="scatter_stored",
        summary="tiles of one kernel store straight at their owners, whose own tiles, the last, add them in order",
        source="Flux (arXiv 2406.06858) 4.1: stores of tiles straight at their owners",
        write=partial(sums_of_moves, straight),
        moves=(TILE_KERNEL,),
        adds=Adds(TILE_KERNEL),
        options=option_sets.STORED,
        needs=(from_ranks(3, "ring_stored"),),
        grids=({**option_sets.PIECES, "order": ("ring", "all_peers")},),
        margins=(MarginCase(margin=option_sets.OF_STORES),),
    ),
    _ring_stored(
        operator=_RS,
        summary=(
            "round a ring: tiles add the sum that arrived, and store theirs straight at the next rank, or at last in y"
        ),
        write=partial(sums_of_moves, round_ring_of_tiles),
        moves=(TILE_KERNEL,),
        margins=(MarginCase(margin=OF_RINGS_OF_TWO, ranks=2), MarginCase(margin=option_sets.OF_STORES)),
    ),
    _tiles(
        operator=_RS,
        name="scatter_pull",
        summary=(
            "tiles of one kernel store locally and owners are told, whose sums beside the last tiles read them there"
        ),
        source="Flux (arXiv 2406.06858) 4.2: ready tiles are read at their peers",
        write=partial(sums_of_moves, in_place),
        moves=(REDUCE_KERNEL, COPY_ENGINE),
        adds=Adds(REDUCE_KERNEL),
        norms=REDUCE_KERNEL,
        options=(options.PIECES, options.OWN_PIECES, *options.TILES),
        grids=({"pieces": (1, 2), "own_pieces": (1, 2, 4)},),
        margins=(MarginCase(margin=OF_PULLS),),
    ),
    _messages(
        operator=_RS,
        name="scatter_packed",
        transport="reduce_scatter.packed",
        summary="one matmul, packed parts to their owners, who sum in order",
        source="messages that carry their flag, as in NCCL's LL protocol",
        write=partial(packed.packed_sums, packed.straight),
    ),
    _tiles(
        operator=_RS,
        name="fused_ring",
        summary=(
            "tiles of one kernel add the sum that arrived, pieces travel on round the ring until their owner adds "
            "the last"
        ),
        source="the ring of NCCL's collectives, in the tiles of the matmul",
        write=partial(sums_of_moves, round_ring_of_tiles),
        adds=Adds(TILE_KERNEL, "ring", "result"),
        options=(options.PIECES, *options.TILES),
        needs=(from_ranks(3, "scatter sums=epilogue"),),
        grids=(option_sets.PIECES,),
        margins=(MarginCase(margin=option_sets.OF_SUMS_IN_A_RING, waves=2), MarginCase(margin=option_sets.OF_STORES)),
    ),
    _tiles(
        operator=_RS,
        name="remote_add",
        summary=(
            "a kernel adds pieces at their owners as they come, in fp32: in no order, so bits may differ between calls"
        ),
        source="Flux (arXiv 2406.06858) 4.1: additions at the owner",
        write=partial(sums_of_moves, straight),
        moves=(COPY_KERNEL, REDUCE_KERNEL),
        adds=Adds(COPY_KERNEL, "arrival"),
        options=(options.PIECES, options.ORDER, options.COPY_PROGRAMS, *options.TILES),
    ),
    _by_islands(operator=_RS),
    *_of_scatters[1:],
    _of_reductions[0],
    _messages(
        operator=_AR,
        name="one_shot_packed",
        transport="all_reduce.one_shot_packed",
        summary="one matmul, then a kernel pushes packed partials, and sums",
        source="the one-shot all-reduce of TensorRT-LLM, in messages that carry their flag",
        write=partial(packed.packed_sums, packed.one_shot),
    ),
    _messages(
        operator=_AR,
        name="two_shot_packed",
        transport="all_reduce.two_shot_packed",
        summary="one matmul, then one kernel: owners sum packed parts, and push the sums to all, packed",
        source="the two-shot all-reduce of TensorRT-LLM, in messages that carry their flag",
        write=partial(packed.packed_sums, packed.straight),
    ),
    _tiles(
        operator=_AR,
        name="two_shot",
        lowering="template",
        summary="tiles of one kernel signal, owners sum pieces in order, copy engine moves parts and sums",
        source="the two-shot all-reduce of torch's symmetric memory, piece by piece",
        write=partial(sums_of_moves, straight),
        adds=Adds(REDUCE_KERNEL),
        norms=REDUCE_KERNEL,
        options=(options.SUMS, *option_sets.FUSED),
        grids=({"pieces": (1, 2, 4, 8), "sums": ("kernel", "epilogue")},),
        margins=(
            MarginCase(margin=OF_ADDING_TILES, options={"sums": "epilogue"}),
            MarginCase(margin=OF_SUMMING_KERNELS, options={"sums": "kernel"}),
        ),
    ),
    _ring_stored(
        operator=_AR,
        summary=(
            "tiles add what arrived, and store at the next rank, its owner's at every rank; the sums are moved to y"
        ),
        write=partial(sums_of_moves, round_ring_of_tiles, beside=False),
        moves=(TILE_KERNEL, REDUCE_KERNEL),
        norms=REDUCE_KERNEL,
        margins=(
            MarginCase(margin=option_sets.OF_SUMS_IN_A_RING, ranks=2),
            MarginCase(margin=option_sets.OF_SUMS_IN_A_RING, waves=2),
            MarginCase(margin=option_sets.OF_STORES),
        ),
    ),
    _by_islands(operator=_AR),
    *_of_reductions[1:],
)
