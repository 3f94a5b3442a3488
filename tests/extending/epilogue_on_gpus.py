"""The toy epilogues in every kind of kernel that ends a sum, a part of one, a whole row or a product, on GPUs or on CPU
ranks: run by torchrun.

    torchrun --standalone --nproc-per-node 2 -m tests.extending.epilogue_on_gpus

Whole numbers, scaled by powers of two, must come out to the bit, of two sets of tensors by turns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.gpu_ranks import join
from tests.extending import toy_epilogue, toy_rows

SCATTERS = ("sequential", "scatter kernel=portable", "scatter kernel=hopper", "scatter_packed")
ALL_REDUCES = ("sequential", "two_shot", "two_shot kernel=portable", "one_shot_packed", "two_shot_packed")
PLANS: dict[str, dict[str, tuple[str, ...]]] = {
    "sums": {
        "all_gather_matmul": ("sequential", "push kernel=portable", "push kernel=hopper"),
        "matmul_reduce_scatter": ("sequential", "scatter", "ring_stored", "scatter_packed"),
        "matmul_all_reduce": ("sequential", "two_shot", "ring_stored", "one_shot_packed", "two_shot_packed"),
    },
    "parts": {
        "matmul_reduce_scatter": (*SCATTERS, "ring_stored", "fused_ring kernel=portable", "fused_ring kernel=hopper"),
        "matmul_all_reduce": (*ALL_REDUCES, "ring_stored", "two_shot sums=epilogue"),
    },
    "rows": {"matmul_reduce_scatter": SCATTERS, "matmul_all_reduce": (*ALL_REDUCES, "two_shot sums=epilogue")},
}
M, N, K, LOW, HIGH = 512, 1024, 256, -24.0, 40.0
FP8 = {"fp8_largest": 448.0, "fp8_smallest": 1e-12}


def is_right(form: str, operator: str, plan: str, seed: int, device: torch.device) -> bool:
    """Whether a call is plain torch, to the bit."""
    ranks, rank, gathers = dist.get_world_size(), dist.get_rank(), operator == "all_gather_matmul"
    torch.manual_seed(seed + (0 if gathers else rank))
    x, w = (torch.randint(-1, 2, shape).to(device, torch.bfloat16) for shape in ((M, K), (K, N)))
    scale = torch.tensor([0.5, 2.0]).repeat(N // 2).to(device, torch.bfloat16)
    own = x.chunk(ranks)[rank].contiguous() if gathers else x
    given: dict[str, Any] = {"alpha": scale, "low": LOW, "high": HIGH} if form == "sums" else {"beta": scale}
    given |= FP8 if form == "rows" else {}
    made = getattr(ow, operator)(own, w, **given, plan=plan)
    total = x.float() @ w.float()
    if not gathers:
        dist.all_reduce(total)
    total = total.chunk(ranks)[rank] if operator == "matmul_reduce_scatter" else total
    if form == "sums":
        wanted: tuple[Any, ...] = (toy_epilogue.in_torch(total, (scale.float(), LOW, HIGH)).bfloat16(),)
    else:
        scaled = (total * scale.float()).bfloat16()
        wanted = toy_rows.quantised(scaled, tuple(FP8.values())) if form == "rows" else (scaled,)
    found = made if isinstance(made, tuple) else (made,)
    return all(torch.equal(one.float(), other.float()) for one, other in zip(found, wanted, strict=True))


def cases(on_gpus: bool) -> Iterator[tuple[str, str, str]]:
    """The form, the operator and the plan of each; on CPUs without options."""
    for form, plans in PLANS.items():
        for operator, names in plans.items():
            for name in names if on_gpus else dict.fromkeys(each.split()[0] for each in names):
                yield form, operator, name


def main() -> int:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        device = join(timedelta(seconds=60))  # ranks may share a GPU
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    toy_epilogue.add()
    toy_rows.add()
    wrong = []
    for (form, operator, plan), turn in product(cases(on_gpus), range(6)):
        if not is_right(form, operator, plan, turn % 2, device):
            wrong.append(f"{form}: {operator} {plan} call {turn}")
    print(f"rank {dist.get_rank()}: {wrong or 'all right'}")
    dist.destroy_process_group()
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
