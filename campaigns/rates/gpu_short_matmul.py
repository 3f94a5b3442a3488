"""What of a short matmul is no multiplying? The Hopper kernel beside cuBLAS, over ever longer k, on one GPU.

    python -m campaigns.gpu_short_matmul [--rows 1024] [--cols 4096]

One wave of tiles. The time that is left at no k is what a launch costs, up to the first step and from the last one on.
Then a traced run of each says when, after the first tile was claimed, the last was, and when tiles were ready to be
multiplied and stored: what of the whole time lies outside is the launch and the way to the first claim, and the end.
"""

from __future__ import annotations

import argparse

import torch

from campaigns.gpu_ranks import need_gpus
from campaigns.rates.gpu_rates import made, medians_us, operands, product, rows_of
from overweave.ir.plan import MatmulConfig
from overweave.memory.device.signals import CLAIMED, READY, STORED
from overweave.runtime.gpu.kernels.matmul import Matmul
from overweave.schedules.tiles.shape import HOPPER

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
SAMPLES = 25
SHAPES = (HOPPER[0].config, HOPPER[4].config)


def times_us(m: int, n: int, k: int) -> list[float]:
    """Of cuBLAS, an empty kernel's worth of nothing (two events), and each tile shape."""
    a, b = operands(m, n, k)
    exact = product(a, b)
    matmuls = [made(config, a, b, exact) for config in SHAPES]
    nothing = torch.zeros(1, device="cuda")
    return medians_us([lambda: torch.mm(a, b, out=exact), lambda: nothing.zero_(), *matmuls], SAMPLES)


def traced(m: int, n: int, k: int, config: MatmulConfig) -> str:
    """When things happened, in us after the first claim; the third run counts."""
    a, b = operands(m, n, k)
    out = torch.empty(m, n, device="cuda", dtype=a.dtype)
    matmul = Matmul(config, rows_of(m, n, k, config), a, b, out, traced=True)
    (whole_us,) = medians_us([matmul], 3)
    first = matmul.trace[:, CLAIMED.value].min()
    claimed, ready, stored = ((matmul.trace[:, at.value] - first).double() / 1e3 for at in (CLAIMED, READY, STORED))
    said = f"last claimed {claimed.max():5.2f}, ready {ready.min():5.2f} to {ready.max():5.2f}"
    return f"{said}, stored {stored.min():6.2f} to {stored.max():6.2f} of {whole_us:6.2f} us"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu_short_matmul")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cols", type=int, default=4096)
    asked = parser.parse_args()
    need_gpus()
    m, n = asked.rows, asked.cols
    for k in LENGTHS:
        library_us, nothing_us, *ours = times_us(m, n, k)
        said = ", ".join(
            f"{config.block_m}x{config.block_n} {us:6.2f}" for config, us in zip(SHAPES, ours, strict=True)
        )
        print(f"{m}x{n}x{k:5d}: cuBLAS {library_us:6.2f} us, {said}, one word set to zero {nothing_us:5.2f}")
    for k in LENGTHS:
        for config in SHAPES:
            print(f"{m}x{n}x{k:5d} {config.block_m}x{config.block_n}: {traced(m, n, k, config)}")


if __name__ == "__main__":
    main()
