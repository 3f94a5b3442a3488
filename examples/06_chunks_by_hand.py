"""A gather written chunk by chunk, every rank doing something else: proven, printed, and run on three emulated ranks.

python examples/06_chunks_by_hand.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()  # in this process Triton interprets

sys.path.insert(0, str(Path(__file__).parent))

from kernels.matmul import matmul_kernel  # noqa: E402

import overweave as ow  # noqa: E402
from overweave.ir.text.parse import to_text  # noqa: E402
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.host.processes import run_ranks  # noqa: E402

RANKS, M, N, K = 3, 96, 32, 32
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 4}
NUMBERS = {"M": M, "N": N, "K": K, **BLOCKS}
compile_kernel = ow.compile  # loaded once, before the ranks are forked

GATHER = ow.Gather(
    RANKS,
    (
        # Rank 0 passes its 32 rows down a chain, in halves: rank 1 sends on what has arrived.
        ow.Put(0, 1, ow.Chunk((0, 16))),
        ow.Put(0, 1, ow.Chunk((16, 32))),
        ow.Put(1, 2, ow.Chunk((0, 16))),
        ow.Put(1, 2, ow.Chunk((16, 32))),
        # Rank 1 puts its own rows to rank 0 by columns, in a lane beside the chain.
        ow.Put(1, 0, ow.Chunk((32, 64), cols=(0, 8)), lane=1),
        ow.Put(1, 0, ow.Chunk((32, 64), cols=(8, 32)), lane=1),
        # Rank 2 pulls them, but only when rank 1's second move, the end of the chain, is complete.
        ow.Get(2, 1, ow.Chunk((32, 64)), after=((1, 1),)),
        # Whoever wants rows of rank 2 comes for them.
        ow.Get(0, 2, ow.Chunk((64, 96))),
        ow.Get(1, 2, ow.Chunk((64, 96)), lane=2),
    ),
)


def call() -> float:
    """This rank's part. How far it is off plain torch."""
    group = resolve(None)
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(M, K, generator=generator), torch.randn(K, N, generator=generator)
    c = torch.full((M, N), torch.nan)
    fused = compile_kernel(matmul_kernel, {"A": GATHER})
    fused(a.chunk(RANKS)[group.rank].contiguous(), b, c, M, N, K, K, 1, N, 1, N, 1, **BLOCKS)
    return float((c - a @ b).abs().max())


def main() -> None:
    plan = compile_kernel(matmul_kernel, {"A": GATHER}).plan(NUMBERS, RANKS, "float32")  # proven, or it raises
    moves = [line for line in to_text(plan.schedule).splitlines() if line.startswith(("rank", "  copies", "  main"))]
    print("\n".join(moves))
    print(f"proven; off plain torch by {max(run_ranks(call, RANKS)):.1e} on {RANKS} ranks")


if __name__ == "__main__":
    main()
