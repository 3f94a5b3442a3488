"""Communication that other compilers decided, as proven plans: placements, loop nests, and synthesis for any links."""

from overweave.lower.layouts import Mesh
from overweave.lower.nest import Nest, buffer, loop, parallelize, shard, shift
from overweave.lower.partition import placements
from overweave.lower.walk import loops
from overweave.lower.work import Attention, Lowered, Matmul

__all__ = [
    "Attention",
    "Lowered",
    "Matmul",
    "Mesh",
    "Nest",
    "buffer",
    "loop",
    "loops",
    "parallelize",
    "placements",
    "shard",
    "shift",
]
