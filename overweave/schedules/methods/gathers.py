"""The methods of all-gathers before a matmul."""

from __future__ import annotations

from functools import partial

from overweave.ir.operators.all_gather_matmul import OPERATOR
from overweave.ir.plan import COPY_ENGINE, LIBRARY, PACKED_KERNEL, TILE_KERNEL
from overweave.ir.schedule import ECHOES
from overweave.schedules.communication import Communication
from overweave.schedules.families.packed import gather_packed
from overweave.schedules.methods.by_moves import by_moves
from overweave.schedules.moves import gather_templates, island_templates
from overweave.schedules.records import option_sets, options
from overweave.schedules.records.needs import FAR_PAIRS, LEVELS
from overweave.schedules.records.record import Margin, MarginCase, Method, MethodInputs

# A gather of two ranks whose shards the library multiplies by one weight. Its call costs the host 59 us if its tensors
# come back, and 212 us if not (benchmarks/results/host_cost.h200x2.2026-11-23.txt), which the GPU mostly needs itself.
# MEASURED: of some 120 rows of *.all_gather_matmul.*.json the choice reaches 0.996 of the quickest in the mean, and
# 0.992 with the margin of other plans of library calls. Of four ranks it was measured where shards are long alone.
OF_SHARDS_OF_TWO = Margin(5.0, 0.01)


def _packed(work: MethodInputs) -> Communication:
    if work.split.world_size == 1:
        return by_moves(gather_templates.at_once)(work)
    return gather_packed(work.split, work.problem.k, work.problem.returns_gathered)


_library = partial(Method, operator=OPERATOR.name)
_tiles = partial(_library, multiplies=TILE_KERNEL, moves=(COPY_ENGINE,))
_messages = partial(
    _library,
    moves=(PACKED_KERNEL,),
    reuse=ECHOES,
    options=(options.MATMUL,),
    margins=(option_sets.OF_MESSAGES,),
)
METHODS = (
    _library(
        name="sequential",
        lowering="direct",
        transport="all_gather.collective",
        summary="library all-gather, then one library matmul",
        write=by_moves(gather_templates.at_once),
        grids=(option_sets.AS_IT_IS,),
    ),
    _library(
        name="per_shard",
        summary="shards pushed by copy engine, one library matmul per shard",
        source="the decomposition by shards of PyTorch's asynchronous tensor parallelism",
        write=by_moves(gather_templates.push),
        moves=(COPY_ENGINE,),
        options=(options.ORDER, options.CARRIER),
        grids=(option_sets.AS_IT_IS,),
        margins=(MarginCase(margin=OF_SHARDS_OF_TWO, ranks=2, weights=1),),
    ),
    _tiles(
        name="push",
        lowering="template",
        summary="pieces pushed by copy engine or kernel, tiles of one kernel wait",
        source="Flux (arXiv 2406.06858) 4.2; with all_peers and pieces, FiCCO",
        write=by_moves(gather_templates.push),
        options=option_sets.PUSHED,
        grids=(
            option_sets.PIECES,
            {"pieces": (1, 2), "order": ("all_peers",)},
            # A shard of one wave computes nothing while the next one travels.
            {"pieces": (1, 2), "half_tiles": ("on",)},
            {"pieces": (1, 2), **option_sets.BY_KERNEL},
        ),
    ),
    _messages(
        name="gather_packed",
        transport="all_gather.packed",
        summary="gathered in packed messages, one matmul",
        source="messages that carry their flag, as in NCCL's LL protocol",
        write=_packed,
        grids=(option_sets.AS_IT_IS, {"matmul": ("skinny", "early")}),
    ),
    _tiles(
        name="pull",
        summary="pieces pulled from staged shards, tiles of one kernel wait",
        source="Flux (arXiv 2406.06858) 4.2",
        write=by_moves(gather_templates.pull),
        options=(*option_sets.FUSED, options.ROTATION),
        grids=({"pieces": (1, 2)},),
    ),
    _tiles(
        name="mesh",
        summary="chunks by rows and columns go straight to every rank of a mesh, line by line of it",
        source="AutoOverlap 5.1, Figure 4",
        write=by_moves(gather_templates.across_mesh),
        options=(*option_sets.CUT, options.ISLAND, options.AXIS, options.LANES, *options.TILES),
    ),
    _tiles(
        name="ring",
        summary="every rank passes on what came from the next one",
        source="AutoOverlap 5.1, Figure 4",
        write=by_moves(gather_templates.round_ring),
        options=(*option_sets.CUT, options.LANES, *options.TILES),
        needs=(FAR_PAIRS,),
        grids=({"pieces": (1, 2)},),
    ),
    _tiles(
        name="double_ring",
        summary="two rings, one each way, take a shard's chunks by turns",
        source="AutoOverlap 5.1, Figure 4",
        write=by_moves(gather_templates.round_two_rings),
        options=(*option_sets.CUT, *options.TILES),
        needs=(FAR_PAIRS,),
        grids=({"pieces": (2, 4)},),
    ),
    _tiles(
        name="islands",
        summary="gathered inside islands, while each shard crosses to other islands once and is passed on there",
        source="AutoOverlap 5.1, Figure 4: heterogeneous by levels of a mesh",
        write=by_moves(island_templates.gather),
        has_levels=True,
        options=(*option_sets.ISLANDS, options.CROSSING),
        needs=LEVELS,
        grids=({"pieces": (1, 2), "island": (2, 4)}, {"pieces": (1, 2), "carrier": (LIBRARY,)}),
    ),
)
