"""A toy epilogue in every kind of kernel that ends a sum or a product, on GPUs or on CPU ranks: run by torchrun.

Whole numbers, scaled by powers of two, must come out to the bit, of two sets of tensors by turns.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import join
from tests.extending import toy_epilogue

PLANS = {
    "all_gather_matmul": ("sequential", "push kernel=portable", "push kernel=hopper"),
    "matmul_reduce_scatter": ("sequential", "scatter", "ring_stored", "scatter_packed"),
    "matmul_all_reduce": ("sequential", "two_shot", "ring_stored", "one_shot_packed", "two_shot_packed"),
}
M, N, K, LOW, HIGH = 512, 1024, 256, -24.0, 40.0


def is_right(operator: str, plan: str, seed: int, device: torch.device) -> bool:
    ranks, rank, gathers = dist.get_world_size(), dist.get_rank(), operator == "all_gather_matmul"
    torch.manual_seed(seed + (0 if gathers else rank))
    x, w = (torch.randint(-1, 2, shape).to(device, torch.bfloat16) for shape in ((M, K), (K, N)))
    alpha = torch.tensor([0.5, 2.0]).repeat(N // 2).to(device, torch.bfloat16)
    own = x.chunk(ranks)[rank].contiguous() if gathers else x
    y = getattr(ow, operator)(own, w, alpha=alpha, low=LOW, high=HIGH, plan=plan)
    total = x.float() @ w.float()
    if not gathers:
        dist.all_reduce(total)
    wanted = toy_epilogue.in_torch(total, (alpha.float(), LOW, HIGH)).bfloat16()
    return torch.equal(y, wanted.chunk(ranks)[rank] if operator == "matmul_reduce_scatter" else wanted)


def main() -> int:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        device = join(timedelta(seconds=60))  # ranks may share a GPU
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    toy_epilogue.add()
    wrong = []
    for operator, plans in PLANS.items():
        for plan, turn in product(plans if on_gpus else [each.split()[0] for each in plans], range(6)):
            if not is_right(operator, plan, turn % 2, device):
                wrong.append(f"{operator} {plan} call {turn}")
    print(f"rank {dist.get_rank()}: {wrong or 'all right'}")
    dist.destroy_process_group()
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
