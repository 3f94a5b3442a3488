"""The methods of all-reduces behind a matmul."""

from __future__ import annotations

from functools import partial

from overweave.ir.operators.matmul_all_reduce import OPERATOR
from overweave.ir.plan import COPY_ENGINE, LIBRARY, PACKED_KERNEL, REDUCE_KERNEL, TILE_KERNEL
from overweave.ir.schedule import ECHOES
from overweave.schedules.families import packed
from overweave.schedules.methods.by_moves import summed_by_library, summed_in_groups, summed_in_waves, sums_of_moves
from overweave.schedules.moves.reduction_templates import round_ring_of_tiles, straight
from overweave.schedules.records import option_sets, options
from overweave.schedules.records.needs import UNSCALED
from overweave.schedules.records.record import Adds, Margin, MarginCase, Method

# All-reduces by finished parts. MEASURED: on layers of 1,024 to 8,192 rows those whose own tiles add what arrived take
# 6 to 23 % more than predicted, those whose sums are a kernel's 0 to 7 % (4 x H200,
# benchmarks/results/llm_layers.matmul_all_reduce.h200x4.2026-11-22.json, and prefill.* of the same day). With these
# margins no choice is one that was measured behind the library.
OF_SUMMING_KERNELS, OF_ADDING_TILES = Margin(10.0, 0.035), Margin(20.0, 0.06)


_library = partial(Method, operator=OPERATOR.name)
_tiles = partial(_library, multiplies=TILE_KERNEL, moves=(COPY_ENGINE,))
_messages = partial(
    _library,
    moves=(PACKED_KERNEL,),
    reuse=ECHOES,
    options=(options.MATMUL,),
    margins=(option_sets.OF_MESSAGES,),
    adds=Adds(PACKED_KERNEL),
    norms=PACKED_KERNEL,
)
METHODS = (
    _library(
        name="sequential",
        transport="all_reduce.collective",
        summary="one library matmul, then library all-reduce",
        write=summed_by_library,
        adds=Adds(LIBRARY, "library", "result"),
        norms=LIBRARY,
        grids=(option_sets.AS_IT_IS,),
    ),
    _messages(
        name="one_shot_packed",
        transport="all_reduce.one_shot_packed",
        summary="one matmul, then a kernel pushes packed partials, and sums",
        source="the one-shot all-reduce of TensorRT-LLM, in messages that carry their flag",
        write=partial(packed.packed_sums, packed.one_shot),
        grids=(option_sets.AS_IT_IS, option_sets.EARLY),
    ),
    _messages(
        name="two_shot_packed",
        transport="all_reduce.two_shot_packed",
        summary="one matmul, then one kernel: owners sum packed parts, and push the sums to all, packed",
        source="the two-shot all-reduce of TensorRT-LLM, in messages that carry their flag",
        write=partial(packed.packed_sums, packed.straight),
        grids=(option_sets.AS_IT_IS, option_sets.EARLY),
    ),
    _tiles(
        name="two_shot",
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
    _tiles(
        name="ring_stored",
        summary=(
            "tiles add what arrived, and store at the next rank, its owner's at every rank; the sums are moved to y"
        ),
        source="the ring of NCCL's collectives, with the stores at a peer of Flux 4.1",
        write=partial(sums_of_moves, round_ring_of_tiles, beside=False),
        moves=(TILE_KERNEL, REDUCE_KERNEL),
        adds=Adds(TILE_KERNEL, "ring", "result"),
        norms=REDUCE_KERNEL,
        options=option_sets.STORED_ROUND,
        grids=(option_sets.IN_TWO,),
        margins=(
            MarginCase(margin=option_sets.OF_SUMS_IN_A_RING, ranks=2),
            MarginCase(margin=option_sets.OF_SUMS_IN_A_RING, waves=2),
            MarginCase(margin=option_sets.OF_STORES),
        ),
    ),
    _library(
        name="decomposed",
        summary="one library matmul for each piece of rows, and a library all-reduce of each beside the next one",
        source="the decomposition that FlashOverlap (arXiv 2504.19519) is held against in 6.1",
        write=summed_in_waves,
        adds=Adds(LIBRARY, "library", "result"),
        options=(options.PIECES,),
    ),
    _tiles(
        name="waves",
        summary="tiles of one kernel store block by block, library all-reduces of groups of waves run beside them",
        source="FlashOverlap (arXiv 2504.19519) 3: signals by groups of waves, reordering around library collectives",
        write=summed_in_groups,
        moves=(LIBRARY, REDUCE_KERNEL),
        adds=Adds(LIBRARY, "library", "result"),
        norms=REDUCE_KERNEL,
        options=option_sets.WAVES,
        margins=(MarginCase(margin=option_sets.OF_STORES),),
        needs=(UNSCALED,),
    ),
)
