"""How long does a layer of experts take, beside NCCL, index operations and torch's grouped matmul, each in one graph?

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_experts_times [--only MoE-1] [--tokens 64 256]

A whole layer, tensor parallel, in bf16: SwiGLU experts whose weights are split over the ranks, tokens sharded on the
way in and out, routed evenly and by Zipf's law. Methods are interleaved; the median of the slowest rank is printed, in
us, with the ratio of the baseline to the quickest of ours, and the matmuls alone. --tokens: of all ranks, in place of
those of the shapes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from campaigns.gpu_ranks import arguments, join, leave, sharers
from overweave import moe
from overweave.compat.torch_names import all_gather_single, reduce_scatter_single

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes" / "moe.mixture_of_experts.json"
MORE = (
    {"name": "Mixtral", "tokens": 8192, "hidden": 4096, "intermediate": 14336, "experts": 8, "topk": 2},
    {"name": "Qwen3-235B", "tokens": 8192, "hidden": 4096, "intermediate": 1536, "experts": 128, "topk": 8},
    {"name": "DeepSeek-V3", "tokens": 8192, "hidden": 7168, "intermediate": 2048, "experts": 256, "topk": 8},
)
ROUNDS, IN_A_ROW, ZIPF = 15, 4, 0.8
Method = Callable[[], torch.Tensor]


class LayerInputs(NamedTuple):
    """This rank's part of a layer."""

    x: torch.Tensor
    ids: torch.Tensor
    topk_weights: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def inputs_of(case: dict[str, int], tokens: int, zipf: bool) -> LayerInputs:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    draw = torch.Generator("cuda").manual_seed(rank)
    hidden, inner, experts, top = (case[name] for name in ("hidden", "intermediate", "experts", "topk"))
    own, part = tokens // ranks, inner // ranks
    shares = torch.arange(1, experts + 1, device="cuda").float() ** (-ZIPF if zipf else 0.0)
    ids = torch.multinomial(shares.expand(max(own, 1), -1), top, generator=draw)[:own].int()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16).div_(float(shape[-1]) ** 0.5)

    weights = torch.rand(own, top, generator=draw, device="cuda")
    return LayerInputs(drawn(own, hidden), ids, weights, drawn(experts, 2 * part, hidden), drawn(experts, hidden, part))


def multiplied(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, given: LayerInputs) -> torch.Tensor:
    """Both matmuls in plain torch: what NCCL's sums are of."""
    (tokens, top), experts = ids.shape, given.up.shape[0]
    chosen, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(experts, device="cuda", dtype=chosen.dtype), right=True).int()
    products = functional.grouped_mm(x[order // top], given.up.transpose(1, 2), offs=ends)
    first, second = products.chunk(2, 1)
    h = functional.silu(first) * second
    z = functional.grouped_mm(h, given.down.transpose(1, 2), offs=ends)
    back = torch.empty_like(z)
    back[order] = z
    sums: torch.Tensor = (back.view(tokens, top, -1) * weights.unsqueeze(2).to(z.dtype)).sum(1)
    return sums


def by_nccl(given: LayerInputs) -> torch.Tensor:
    ranks = dist.get_world_size()
    x, ids, weights = (each.new_empty((each.shape[0] * ranks, each.shape[1])) for each in given[:3])
    for whole, part in zip((x, ids, weights), given, strict=False):
        all_gather_single(whole, part)
    sums = multiplied(x, ids, weights, given)
    y = torch.empty_like(given.x)
    reduce_scatter_single(y, sums)
    return y


def methods_of(given: LayerInputs) -> dict[str, Method]:
    x, ids, weights, up, down = given
    layer = moe.ExpertWeights(up, down, glu=moe.Glu())

    def halves() -> torch.Tensor:
        h, routed = moe.all_gather_experts(x, ids, up, glu=moe.Glu(), plan="push")
        return moe.experts_reduce_scatter(h, routed, weights, down, plan="push")

    ranks = dist.get_world_size()
    whole = [each.repeat(ranks, 1) for each in given[:3]]

    def alone() -> torch.Tensor:
        h, routed = moe.experts_matmul(whole[0], whole[1], up, glu=moe.Glu())
        return moe.experts_sum(h, routed, whole[2], down)

    return {
        "nccl": lambda: by_nccl(given),
        "sequential": lambda: moe.experts_mlp(x, ids, weights, layer, plan="sequential"),
        "halves": halves,
        "push": lambda: moe.experts_mlp(x, ids, weights, layer, plan="push"),
        "alone": alone,
    }


def captured(method: Method) -> Callable[[], None]:
    for _ in range(3):
        method()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        method()
    return graph.replay


def times_us(methods: dict[str, Method]) -> dict[str, float]:
    """The median of the slowest rank."""
    is_captured = sharers() == 1
    calls = {name: captured(method) if is_captured else method for name, method in methods.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            begin.record()
            for _ in range(IN_A_ROW):
                call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3 / IN_A_ROW)
    medians = torch.tensor([sorted(each)[len(each) // 2] for each in found.values()], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(found, medians.tolist(), strict=True))


def errors_of(methods: dict[str, Method]) -> str:
    """How far ours are off the baseline, relative to its largest element: a check that they compute the same."""
    wanted = methods["nccl"]().float()
    off = [
        float((methods[name]().float() - wanted).abs().max() / wanted.abs().max())
        for name in ("sequential", "halves", "push")
    ]
    return " ".join(f"{each:.4f}" for each in off)


def told(case: dict[str, int], tokens: int, zipf: bool) -> None:
    methods = methods_of(inputs_of(case, tokens, zipf))
    off, found = errors_of(methods), times_us(methods)
    quickest = min(found[name] for name in ("sequential", "halves", "push"))
    if dist.get_rank() == 0:
        line = " ".join(f"{name} {each:8.1f}" for name, each in found.items())
        skew = "zipf" if zipf else "even"
        print(f"{case['name']:12s} {tokens:6d} {skew} {line} | {found['nccl'] / quickest:5.3f} off {off}", flush=True)


def main() -> None:
    parser = arguments(str(__doc__), deadline_s=20.0)
    parser.add_argument("--tokens", type=int, nargs="*", default=())
    asked: argparse.Namespace = parser.parse_args()
    join(timedelta(seconds=asked.deadline))
    for case in (*json.loads(SHAPES.read_text())["cases"], *MORE):
        if asked.only in case["name"]:
            for tokens in asked.tokens or (case["tokens"],):
                for zipf in (False, True):
                    told(case, tokens, zipf)
                    torch.cuda.empty_cache()
    leave()


if __name__ == "__main__":
    main()
