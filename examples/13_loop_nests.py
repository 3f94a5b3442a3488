"""Ring attention and Cannon's matmul as loop nests: which blocks pass between which neighbours, proven and printed.

python examples/13_loop_nests.py
"""

from __future__ import annotations

from collections import Counter

from overweave.errors import InputError
from overweave.lower import Attention, Matmul, Nest, buffer, loop, loops, parallelize, shard, shift

RING = Nest(
    Attention(batch=1, heads=8, rows=4096, head_dim=64),
    (
        parallelize("q", 0),  # each rank has queries
        *(shard("q", q=0), shard("k", kv=0), shard("v", kv=0), shard("o", q=0)),
        loop("kv", 4),
        shift("kv", 0),  # each begins with its own keys
        *(buffer("k"), buffer("v")),  # and passes on what it has used
    ),
)
CANNON = Nest(
    Matmul(1024, 1024, 1024),
    (
        *(parallelize("m", 0), parallelize("n", 1)),
        *(shard("x", m=0, k=1), shard("w", k=0, n=1), shard("y", m=0, n=1)),
        loop("k", 2),
        shift("k", (0, 1)),  # rank (i, j) begins with block i + j
        *(buffer("x"), buffer("w")),
    ),
)


def main() -> None:
    for name, nest, mesh in (("ring attention", RING, 4), ("Cannon's matmul", CANNON, (2, 2))):
        lowered = loops(nest, mesh=mesh)
        print(f"{name}: {dict(Counter(type(each).__name__ for each in lowered.schedule.operations))}, proven")
        for step in lowered.steps:
            print(f"  {step}")
    try:
        loops(Nest(CANNON.op, (*CANNON.words, shift("k", 0, by=2))), mesh=(2, 2))
    except InputError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
