"""Is `matmul_all_reduce` with a residual and an RMSNorm right on GPUs, in every plan, and what does the fusion save?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_norms
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_norms --rounds 30        (and the times, side by side)

Integers: z must have the bits of the sum and then the residual, its norm no more than one rounding off fp64, and both
the same bits on every rank; with two sets of tensors by turns, eager and as replays of a graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as functional

import overweave as ow
from campaigns.exact.gpu_exactness import ALL_REDUCE, Case, Inputs, expected, make_inputs
from campaigns.gpu_ranks import join, report, spread_over
from overweave.tuner.measure.statistics import median
from overweave.tuner.measure.timer import Effort, compare

PLANS = (
    "sequential",
    "one_shot_packed",
    "two_shot_packed",
    "two_shot kernel=hopper pieces=1",
    "two_shot kernel=portable pieces=2",
    "two_shot kernel=hopper pieces=2 sums=epilogue",
)
SIZES = ((1, 4096, 512), (5, 1304, 520), (1000, 8192, 512), (2048, 5120, 1024))  # m, n, k
TIMED = ((16, 4096, 1024), (256, 8192, 2048), (2048, 8192, 2048), (8192, 8192, 2048))
EPS = 1e-5
ROUNDING = 2**-8  # of bf16, and a little for the order in which squares are added

Sizes = tuple[int, int, int]
Norm = tuple[torch.Tensor, torch.Tensor | None]  # weight, residual
Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Set(NamedTuple):
    """A call's tensors, and z as it must be."""

    inputs: Inputs
    norm: Norm
    z: torch.Tensor


def make_set(case: Case, seed: int, has_residual: bool) -> Set:
    """weight and residual are the same on every rank."""
    chance = torch.Generator("cuda")
    chance.manual_seed(seed)
    weight = torch.randn(case.n, device="cuda", generator=chance).to(case.dtype)
    residual = torch.randn(case.m, case.n, device="cuda", generator=chance).to(case.dtype) if has_residual else None
    inputs = make_inputs(case, seed, exact=True)
    total = expected(case, inputs, torch.float32).to(case.dtype)
    return Set(inputs, (weight, residual), total if residual is None else total + residual)


def call_of(case: Case, own: Set) -> tuple[torch.Tensor, torch.Tensor]:
    weight, residual = own.norm
    return ow.matmul_all_reduce(own.inputs.x, own.inputs.w, norm=ow.RmsNorm(weight, residual, EPS), plan=case.plan)


def wrong(own: Set, got: tuple[torch.Tensor, torch.Tensor]) -> str:
    """What is wrong with a result, or nothing."""
    normed, z = got
    if not torch.equal(z, own.z):
        return f"z off by {float((z.float() - own.z.float()).abs().max()):.2e}"
    exact = functional.rms_norm(z.double(), (z.shape[1],), own.norm[0].double(), EPS)
    off = float(((normed.double() - exact).abs() / (exact.abs() + 1e-3)).max())
    first = normed.clone()
    dist.broadcast(first, 0)
    if not torch.equal(first, normed):
        return "bits differ from rank 0's"
    return f"norm off by {off:.2e}" if not off <= ROUNDING else ""


def replay_of(call: Call) -> Call:
    """The call as a graph; its results lie where the capture put them."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> tuple[torch.Tensor, torch.Tensor]:
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        return results

    return replay


def check(plan: str, sizes: Sequence[Sizes]) -> tuple[int, list[str]]:
    """How many results were looked at, and which were wrong."""
    count, failures = 0, []
    for m, n, k in sizes:
        for has_residual in (False, True):
            case = Case(ALL_REDUCE, m, n, k, torch.bfloat16, False, plan)
            sets = [make_set(case, seed, has_residual) for seed in (1, 2)]
            calls = [partial(call_of, case, own) for own in sets]
            replays = [replay_of(call) for call in calls]
            for turn in range(6):
                own, call = sets[turn % 2], (calls, replays)[turn // 2 % 2][turn % 2]
                why, count = wrong(own, call()), count + 1
                if why:
                    failures.append(f"{plan} {m}x{n}x{k} residual={has_residual} turn {turn}: {why}")
    return count, failures


def times(rounds: int) -> None:
    """The chosen plan, and each that norms, with the norm fused and with torch's own operations behind it."""
    for m, n, k in TIMED:
        methods: dict[str, Callable[[int], object]] = {}
        for plan in (None, *PLANS):
            own = make_set(Case(ALL_REDUCE, m, n, k, torch.bfloat16, False, plan), 1, True)
            methods[f"{plan}, fused"] = _fused(own, plan)
            methods[f"{plan}, torch behind"] = _behind(own, plan)
        for call in methods.values():
            call(0)
        effort = Effort(rounds=rounds, host_calls=0)
        samples = compare(methods, torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD, effort)
        if dist.get_rank() == 0:
            for name, us in samples.device_us.items():
                print(f"{m}x{n}x{k}  {name:60s} {median(us):9.1f} us", flush=True)


def _fused(own: Set, plan: str | None) -> Callable[[int], object]:
    norm = ow.RmsNorm(*own.norm, EPS)
    return lambda turn: ow.matmul_all_reduce(own.inputs.x, own.inputs.w, norm=norm, plan=plan)


def _behind(own: Set, plan: str | None) -> Callable[[int], object]:
    (weight, residual), n = own.norm, own.inputs.w.shape[1]
    assert residual is not None

    def call(turn: int) -> torch.Tensor:
        z = ow.matmul_all_reduce(own.inputs.x, own.inputs.w, plan=plan) + residual
        return functional.rms_norm(z, (n,), weight, EPS)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=0, help="time so many rounds too")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes are checked")
    arguments = parser.parse_args()
    join(timedelta(seconds=60))
    for plan in PLANS:
        started = time.monotonic()
        count, failures = check(plan, spread_over(SIZES, arguments.sizes))
        report.line(f"norm behind {plan}", count, failures, started)
    if arguments.rounds:
        times(arguments.rounds)
    ow.check()
    report.finish()


if __name__ == "__main__":
    main()
