"""Communication that other compilers decided, as proven plans: placements and loop nests."""

from overweave.lower.layouts import RankMesh
from overweave.lower.nest import Nest, buffer, loop, parallelize, shard, shift
from overweave.lower.partition import placements
from overweave.lower.walk import loops
from overweave.lower.work import AttentionOp, Lowered, MatmulOp

__all__ = [
    "AttentionOp",
    "Lowered",
    "MatmulOp",
    "Nest",
    "RankMesh",
    "buffer",
    "loop",
    "loops",
    "parallelize",
    "placements",
    "shard",
    "shift",
]
