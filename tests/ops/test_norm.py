"""`matmul_all_reduce` with a residual and an RMSNorm on CPU ranks: every plan against plain torch; bad arguments."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional

import overweave as ow
from overweave.errors import InputError, OverweaveError
from overweave.ops import reference
from overweave.runtime.processes import run_ranks

PLANS = (
    None,
    "sequential",
    "one_shot",
    "one_shot mover=copy_kernel",
    "one_shot_pull",
    "two_shot pieces=1",
    "two_shot pieces=3",
    "two_shot_pull pieces=2",
)
N, K = 24, 16
EPS = 1e-3


def normed_sums() -> list[str]:
    """What is not, bit for bit, plain torch's: of integers every sum is exact, and z and the norm round where it does.

    And of floats, what ranks or plans with kernels do not agree on.
    """
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    for m, dtype, has_residual in product((1, ranks - 1, 37), (torch.bfloat16, torch.float32), (False, True)):
        torch.manual_seed(m)
        weight, residual = torch.randn(N).to(dtype), torch.randn(m, N).to(dtype) if has_residual else None
        torch.manual_seed(rank)
        x, w = torch.randint(-1, 2, (m, K)).to(dtype), torch.randint(-1, 2, (K, N)).to(dtype)
        wanted, z_wanted = reference.matmul_all_reduce_norm(x, w, weight, residual, EPS)
        for plan in PLANS:
            normed, z = ow.matmul_all_reduce(x, w, norm=ow.RmsNorm(weight, residual, EPS), plan=plan)
            if not (torch.equal(z, z_wanted) and torch.equal(normed, wanted)):
                wrong.append(f"{plan} m={m} {dtype} residual={has_residual}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_plan_does_what_plain_torch_does(world_size: int):
    assert run_ranks(normed_sums, world_size) == [[]] * world_size
