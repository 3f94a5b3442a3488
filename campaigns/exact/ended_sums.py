"""Are bias, activation and residual behind summed results right on GPUs? For campaigns/exact/gpu_epilogues.py.

Without an activation every bit is held: of integers all sums are exact. With one, floats are compared with fp32, a few
roundings of bf16 allowed, also of what a library rounds in between. Ranks of an all-reduce must have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import report
from overweave.ir.epilogue import Activation
from overweave.ir.shards import shard_rows
from overweave.ops import reference

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
PLANS = (
    (SCATTER, "sequential"),
    (SCATTER, "per_shard"),
    (SCATTER, "scatter_packed"),
    (SCATTER, "scatter kernel=hopper"),
    (SCATTER, "scatter kernel=portable mover=copy_kernel"),
    (SCATTER, "scatter sums=epilogue kernel=hopper"),
    (SCATTER, "scatter sums=epilogue kernel=portable"),
    (SCATTER, "fused_ring kernel=hopper pieces=2"),
    (SCATTER, "remote_add kernel=hopper"),
    (SCATTER, "scatter_stored kernel=hopper"),
    (SCATTER, "scatter_stored kernel=portable"),
    (SCATTER, "ring_stored kernel=hopper"),
    (SCATTER, "scatter_pull kernel=hopper"),
    (SCATTER, "scatter_pull kernel=portable"),
    (REDUCE, "sequential"),
    (REDUCE, "one_shot_packed"),
    (REDUCE, "two_shot_packed"),
    (REDUCE, "two_shot kernel=hopper"),
    (REDUCE, "two_shot sums=epilogue kernel=portable"),
    (REDUCE, "ring_stored kernel=hopper"),
)
TOLERANCE = 2**-6  # of bf16, which rounds by up to 2**-9: a library does so four times at most

Sizes = tuple[int, int, int]


class Tensors(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor


def tensors_of(operator: str, sizes: Sizes, seed: int, is_integer: bool) -> Tensors:
    """x and w of the rank's own part of k; bias, and the residual of an all-reduce, the same on every rank."""
    m, n, k = sizes
    lo, hi = shard_rows(m, dist.get_world_size(), dist.get_rank()) if operator == SCATTER else (0, m)

    def made(*shape: int, of: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(of)
        if is_integer:  # one in eight is 1 and one is -1: bf16 holds what travels of eight ranks' sums, too
            eighths = torch.randint(-4, 4, shape, generator=generator, device="cuda").bfloat16()
            return (eighths == 3).bfloat16() - (eighths == -4).bfloat16()
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    own = 1000 * seed + dist.get_rank() + 1
    w = made(n, k, of=own + 500)
    w = w.t() if is_integer else (w / k**0.5).t()
    return Tensors(made(m, k, of=own), w, made(n, of=seed), made(m, n, of=seed + 1)[lo:hi].contiguous())


def wrong_sum(operator: str, plan: str, given: Tensors, activation: Activation | None) -> str:
    """What is wrong with a call; empty if nothing is."""
    x, w, bias, residual = given
    y = getattr(ow, operator)(x, w, extras=ow.Extras(bias, activation, residual), plan=plan)
    exact = getattr(reference, operator)(
        x.float(), w.float(), bias=bias.float(), activation=activation, residual=residual.float()
    )
    summed = getattr(reference, operator)(x.float(), w.float(), bias=bias.float())
    error = ((y.float() - exact).abs() / (exact.abs() + summed.abs() + 1)).max() if y.numel() else torch.zeros(())
    if activation is None and not torch.equal(y, exact.bfloat16()):
        return f"not exact, error {float(error):.2e}"
    if not float(error) < TOLERANCE:
        return f"error {float(error):.2e}"
    if operator == REDUCE:
        first = y.clone()
        dist.broadcast(first, 0)
        return "" if torch.equal(first, y) else "other bits than on the first rank"
    return ""


def check_sums(only: str, sizes: Sequence[Sizes], activations: Sequence[Activation | None]) -> None:
    """Every plan that contains `only`, with two sets of tensors by turns."""
    for operator, plan in ((operator, plan) for operator, plan in PLANS if only in f"{operator} {plan}"):
        started, failures, count = time.monotonic(), [], 0
        for size, activation in product(sizes, activations):
            both = [tensors_of(operator, size, seed, activation is None) for seed in (1, 2)]
            for turn in range(4):
                wrong, count = wrong_sum(operator, plan, both[turn % 2], activation), count + 1
                if wrong:
                    failures.append(f"{operator} {plan} {activation} {size} call {turn}: {wrong}")
        report.line(f"{operator} {plan}", count, failures, started)
