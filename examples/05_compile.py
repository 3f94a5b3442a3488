"""An annotated single-GPU kernel becomes a distributed one: four emulated ranks, real signals, no GPU.

python examples/05_compile.py
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
from overweave.memory.group import resolve  # noqa: E402
from overweave.runtime.host.processes import run_ranks  # noqa: E402

RANKS, M, N, K = 4, 128, 48, 32
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 4}
compile_kernel = ow.compile  # loaded once, before the ranks are forked


def call(schedule: str) -> float:
    """This rank's part: its rows of `a`, all of `b`, all of `c`. How far it is off plain torch."""
    group = resolve(None)
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(M, K, generator=generator), torch.randn(K, N, generator=generator)
    c = torch.full((M, N), torch.nan)
    fused = compile_kernel(matmul_kernel, schedule)
    fused(a.chunk(RANKS)[group.rank].contiguous(), b, c, M, N, K, K, 1, N, 1, N, 1, **BLOCKS)
    return float((c - a @ b).abs().max())


def main() -> None:
    for schedule in ("all_gather.push pieces=2", "all_gather.pull", "all_gather.collective"):
        errors = run_ranks(call, RANKS, schedule)
        print(f"{schedule}: off plain torch by {max(errors):.1e} on {RANKS} ranks")


if __name__ == "__main__":
    main()
