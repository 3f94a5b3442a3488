"""A caller's autocast changes nothing: operators compute in the dtypes that they are given, in every plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.processes import run_ranks
from tests.ops.calls import Call, run

pytestmark = pytest.mark.slow
PLANS = {
    "all_gather_matmul": ("sequential", "per_shard", "push"),
    "matmul_reduce_scatter": ("sequential", "scatter", "scatter sums=epilogue"),
    "matmul_all_reduce": ("sequential", "two_shot", "one_shot_packed"),
}


def differing(operator: str) -> list[str]:
    torch.manual_seed(dist.get_rank())
    told = []
    for plan in PLANS[operator]:
        call = Call(operator, 32, "float32", plan)
        rows = 32 // dist.get_world_size() if operator == "all_gather_matmul" else 32
        x, w = torch.randn(rows, call.k), torch.randn(call.k, call.n)
        (plain,) = run(call, x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (cast,) = run(call, x, w)
        if plain.dtype != cast.dtype or not torch.equal(plain, cast):
            told.append(plan)
    return told


@pytest.mark.parametrize("operator", PLANS)
def test_bits_are_those_without_autocast(operator: str):
    assert run_ranks(differing, 2, operator) == [[], []]
