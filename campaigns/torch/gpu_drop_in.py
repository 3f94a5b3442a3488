"""Do torch's fused operators, answered by overweave, give torch's values and strides on GPUs? Installed, and captured.

    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_drop_in [--replays 100]

answers: every operator, dimension, layout and option, held against torch's plain collectives and matmuls, bit for bit.
captured: a gather and a reduce-scatter in one CUDA graph, whose inputs change between replays, against the same calls
made one by one; not on ranks that share a GPU, whose library is gloo.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import Check, arguments, integers, run_campaign, shard, sharers
from campaigns.torch.fused_calls import GATHER, SCATTER, Fused, difference, fused_calls
from overweave.memory.group import process_group_of

ROWS, HIDDEN, INNER = 512, 1024, 2048


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    """Every call, by operator; then the graph."""
    ow.install(strict=True)
    calls = list(fused_calls(dist.get_world_size()))
    for name in dict.fromkeys(call.name for call in calls):
        chosen = [call for call in calls if call.name == name]
        yield Check(f"answers: {name}", partial(differences, chosen))
    yield Check(f"captured: {GATHER}, {SCATTER}", partial(captured, asked.replays), asked.replays)
    yield Check("counted: every call was overweave's", uncounted)


def differences(calls: list[Fused]) -> Iterator[str]:
    """In what each answer differs from torch's plain one."""
    return (difference(call, 0, "cuda") for call in calls)


def uncounted() -> Iterator[str]:
    """Operators whose calls torch answered."""
    yield from (f"{name}: {site}" for name, site in ow.report().operators.items() if site.by_torch.total())


def captured(replays: int) -> Iterator[str]:
    """A layer's two halves in one graph: what is wrong with each replay."""
    if sharers() > 1:  # gloo is the library, and a plan of it may be chosen, which cannot be captured
        return
    group, ranks = process_group_of(None).group_name, dist.get_world_size()
    x = integers(ROWS, HIDDEN, seed=0)
    own = shard(x)
    up, down = integers(HIDDEN, INNER // ranks, seed=1), integers(INNER // ranks, HIDDEN, seed=2)

    def layer(rows: torch.Tensor) -> torch.Tensor:
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(rows, [up], 0, group, return_A=False)
        result: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(y.relu(), down, "sum", 0, group)
        return result

    for _ in range(3):
        layer(own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = layer(own)
    for turn in range(replays):
        own.copy_(shard(integers(ROWS, HIDDEN, seed=3 + turn)))
        graph.replay()
        yield "" if torch.equal(made, layer(own)) else f"replay {turn} differs"


def main() -> None:
    """Runs the campaign among the ranks that torchrun started."""
    parser = arguments(__doc__ or "", 60.0)
    parser.add_argument("--replays", type=int, default=100)
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()
