"""Are bias, activation and residual right on GPUs, in every plan, in every call and when tensors move?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_epilogues [--activations silu] [--sizes 1] [--only push]

Of all_gather_matmul, and behind the sums of matmul_reduce_scatter and matmul_all_reduce
(campaigns/exact/ended_sums.py). --only: plans that contain this text, the operator before them, such as
`matmul_all_reduce two_shot`. Each result is compared with fp32, a few roundings of bf16 allowed, also of what a library
rounds in between; every plan meets two sets of tensors by turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.exact.ended_sums import TOLERANCE, Sizes, Tensors, check_sums
from campaigns.gpu_ranks import join, report, spread_over
from overweave.ir.epilogue import Activation
from overweave.ops import reference

PLANS = ("sequential", "per_shard", "push kernel=hopper", "push kernel=portable", "pull kernel=hopper pieces=2")
ACTIVATIONS: tuple[Activation | None, ...] = (None, "silu", "gelu", "gelu_tanh")
SIZES = ((1000, 1304, 520), (2048, 2752, 1024))  # m, n, k


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


class Pair(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    gate: torch.Tensor
    residual: torch.Tensor


def pair_of(m: int, n: int, k: int, is_transposed: bool) -> Pair:
    x, w, _, residual = tensors_of(m, n, k)
    gate = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().t()
    w, gate = (each if is_transposed else each.contiguous() for each in (w, gate))
    return Pair(x, w, gate, residual)


def gate_error_of(given: Pair, m: int, plan: str, activation: Activation | None, has_residual: bool) -> float:
    """The largest error of a gated call, over one and the exact sizes of what is rounded."""
    x, w, gate, residual = given
    extras = ow.Extras(activation=activation, residual=residual if has_residual else None, gate=gate)
    y = ow.all_gather_matmul(x, w, m=m, extras=extras, plan=plan).float()
    wide = residual.float() if has_residual else None
    exact = reference.all_gather_matmul(
        x.float(), w.float(), m=m, activation=activation, residual=wide, gate=gate.float()
    )
    up, down = (reference.all_gather_matmul(x.float(), each.float(), m=m).abs() for each in (w, gate))
    return float(((y - exact).abs() / (exact.abs() + up * (down + 1) + 1)).max())


def wrong_product(given: Pair, m: int, plan: str, columns: tuple[int, ...]) -> str:
    """Which of several products has other bits than a call of its own, or is not near to fp32; empty if none is."""
    x, w = given.x, given.w
    weights = [part.contiguous() if w.is_contiguous() else part for part in w.split(columns, dim=1)]
    bias = torch.randn(w.shape[1], device="cuda").bfloat16()
    several = ow.all_gather_matmul(x, weights, m=m, extras=ow.Extras(bias=bias), plan=plan)
    biases = bias.split(columns)
    for index, (y, weight, own) in enumerate(zip(several, weights, biases, strict=True)):
        exact = reference.all_gather_matmul(x.float(), weight.float(), m=m, bias=own.float())
        if not float(((y.float() - exact).abs() / (exact.abs() + 1)).max()) < TOLERANCE:
            return f"weight {index} is wrong"
        if plan.startswith("pu") and not torch.equal(y, alone(x, weight, own, m, plan)):
            return f"weight {index} has other bits than alone"
    return ""


def alone(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, m: int, plan: str) -> torch.Tensor:
    return ow.all_gather_matmul(x, weight, m=m, extras=ow.Extras(bias=bias.clone()), plan=plan)


def check_bias_and_residual(plan: str, sizes: Sequence[Sizes], activations: Sequence[Activation | None]) -> None:
    started, failures, count = time.monotonic(), [], 0
    for (m, n, k), activation in product(sizes, activations):
        both = tensors_of(m, n, k), tensors_of(m, n, k)
        for turn in range(4):
            error, count = error_of(both[turn % 2], m, plan, activation), count + 1
            if not error < TOLERANCE:
                failures.append(f"{plan} {activation} {m}x{n}x{k} call {turn}: error {error:.2e}")
    report.line(plan, count, failures, started)


def check_gates(plan: str, sizes: Sequence[Sizes], activations: Sequence[Activation | None]) -> None:
    started, failures, count = time.monotonic(), [], 0
    for (m, n, k), activation, flags in product(sizes, activations, ((False, True), (True, False))):
        is_transposed, has_residual = flags
        both = [pair_of(m, n, k, is_transposed) for _ in range(2)]
        for turn in range(4):
            error, count = gate_error_of(both[turn % 2], m, plan, activation, has_residual), count + 1
            if not error < TOLERANCE:
                failures.append(f"{plan} gate {activation} {flags} {m}x{n}x{k} call {turn}: error {error:.2e}")
    report.line(f"{plan}, gated", count, failures, started)


def check_several(plan: str, sizes: Sequence[Sizes]) -> None:
    started, failures, count = time.monotonic(), [], 0
    for (m, n, k), parts, is_transposed in product(sizes, (2, 3), (False, True)):
        columns = (n - 40 * (parts - 1), *(40 for _ in range(parts - 1)))
        both = [pair_of(m, n, k, is_transposed) for _ in range(2)]
        for turn in range(4):
            wrong, count = wrong_product(both[turn % 2], m, plan, columns), count + 1
            if wrong:
                failures.append(f"{plan} {columns} b^T={is_transposed} {m}x{k} call {turn}: {wrong}")
    report.line(f"{plan}, several weights", count, failures, started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = {activation or "none": activation for activation in ACTIVATIONS}
    parser.add_argument("--activations", nargs="+", choices=named, default=list(named), help="each compiles kernels")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes")
    parser.add_argument("--only", default="", help="plans that contain this text, the operator before them")
    arguments = parser.parse_args()
    activations = [named[name] for name in arguments.activations]
    sizes = spread_over(SIZES, arguments.sizes)
    join(timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    for plan in (plan for plan in PLANS if arguments.only in f"all_gather_matmul {plan}"):
        check_bias_and_residual(plan, sizes, activations)
        check_gates(plan, sizes, activations)
        check_several(plan, sizes)
    check_sums(arguments.only, sizes, activations)
    report.finish()


if __name__ == "__main__":
    main()
