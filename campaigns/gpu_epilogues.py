"""Are bias, activation and residual right on GPUs, in every plan, in every call and when tensors move?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_epilogues

Each result is compared with fp32, a few roundings of bf16 allowed, also of what a library rounds in between; every plan
meets two sets of tensors by turns.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import join, report
from overweave.ir.plan import Activation
from overweave.ops import reference

PLANS = ("sequential", "per_shard", "push kernel=hopper", "push kernel=portable", "pull kernel=hopper pieces=2")
ACTIVATIONS: tuple[Activation | None, ...] = (None, "silu", "gelu", "gelu_tanh")
SIZES = ((1000, 1304, 520), (2048, 2752, 1024))  # m, n, k
TOLERANCE = 2**-6  # of bf16, which rounds by up to 2**-9: a library does so three times


class Tensors(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor


def tensors_of(m: int, n: int, k: int) -> Tensors:
    """Random ones, those of a rank's own: x is its shard."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(m, k, device="cuda").bfloat16().chunk(ranks)[rank].contiguous()
    w = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().t()
    return Tensors(x, w, torch.randn(n, device="cuda").bfloat16(), torch.randn(m, n, device="cuda").bfloat16())


def error_of(given: Tensors, m: int, plan: str, activation: Activation | None) -> float:
    """The largest error of a call, over one and the exact sizes of what is rounded: the sum, the result."""
    x, w, bias, residual = given
    y = ow.all_gather_matmul(x, w, m=m, extras=ow.Extras(bias, activation, residual), plan=plan)
    exact = reference.all_gather_matmul(
        x.float(), w.float(), m=m, bias=bias.float(), activation=activation, residual=residual.float()
    )
    summed = reference.all_gather_matmul(x.float(), w.float(), m=m, bias=bias.float())
    return float(((y.float() - exact).abs() / (exact.abs() + summed.abs() + 1)).max())


def main() -> None:
    join(timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    for plan in PLANS:
        started, failures, count = time.monotonic(), [], 0
        for (m, n, k), activation in product(SIZES, ACTIVATIONS):
            both = tensors_of(m, n, k), tensors_of(m, n, k)
            for turn in range(4):
                error, count = error_of(both[turn % 2], m, plan, activation), count + 1
                if not error < TOLERANCE:
                    failures.append(f"{plan} {activation} {m}x{n}x{k} call {turn}: error {error:.2e}")
        report.line(plan, count, failures, started)
    report.finish()


if __name__ == "__main__":
    main()
