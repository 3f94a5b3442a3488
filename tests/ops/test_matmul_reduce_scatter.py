"""`matmul_reduce_scatter` on CPU ranks through its public face: every bit, for any shape, dtype, layout, plan."""

from __future__ import annotations

import pytest
import torch

import overweave as ow
from overweave.ir.operators.matmul_reduce_scatter import OPERATOR as RECORD
from overweave.schedules.catalog.catalog import names
from tests.ops import reference
from tests.ops.calls import DTYPES, calls_by_plan, calls_of_any_size, wrong_calls
from tests.ranks import run_ranks

OPERATOR = RECORD.name
PLANS = (
    "sequential",
    "per_shard",
    "scatter",
    "scatter_stored",
    "ring_stored",
    "scatter_pull",
    "scatter_packed",
    "fused_ring",
    "remote_add",
    "decomposed",
    "waves",
)
WITH_OPTIONS = (
    "per_shard order=all_peers",
    "scatter pieces=1",
    "scatter pieces=3 order=all_peers",
    "fused_ring pieces=1",
    "remote_add pieces=3 order=all_peers",
    "fused_ring pieces=3 block_m=16 block_n=16",
    "scatter block_m=16 block_n=16",
    "scatter_stored pieces=3 order=all_peers block_m=16 block_n=16",
    "ring_stored pieces=3 block_m=16 block_n=16",
    "decomposed pieces=3",
    "waves sms=6 block_m=16 block_n=16",
    "scatter_pull pieces=1 own_pieces=1",
    "scatter_pull pieces=3 own_pieces=2 block_m=16 block_n=16",
)


def test_every_plan_of_the_catalog_is_tried():
    assert names(OPERATOR) == tuple(f"{OPERATOR}.{plan}" for plan in PLANS)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_rows(world_size: int):
    calls = calls_of_any_size(OPERATOR, world_size, seed=world_size)
    assert run_ranks(wrong_calls, world_size, calls) == [[]] * world_size


@pytest.mark.slow
def test_every_plan():
    calls = calls_by_plan(OPERATOR, PLANS + WITH_OPTIONS, m=37, dtypes=("bfloat16",))
    assert run_ranks(wrong_calls, 3, calls) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_plan_and_dtype_with_any_number_of_rows(world_size: int):
    dtypes = DTYPES if world_size < 8 else DTYPES[:1]  # eight ranks take as long as all others
    calls = [call for m in (0, 1, world_size - 1, 67) for call in calls_by_plan(OPERATOR, PLANS, m, dtypes)]
    calls += [call for seed in range(4) for call in calls_of_any_size(OPERATOR, world_size, seed)]
    assert run_ranks(wrong_calls, world_size, calls, timeout_s=200) == [[]] * world_size


def compare_with_plain_torch() -> list[float]:
    """The largest difference to the reference, for even and ragged shards."""
    torch.manual_seed(torch.distributed.get_rank())
    w, differences = torch.randn(16, 8), []
    for m in (8, 5):
        x = torch.randn(m, 16)
        ours, theirs = ow.matmul_reduce_scatter(x, w), reference.matmul_reduce_scatter(x, w)
        differences.append(float((ours - theirs).abs().max()))
    return differences


def test_the_reference_says_the_same():
    assert all(difference < 1e-5 for told in run_ranks(compare_with_plain_torch, 2) for difference in told)


def sum_twice() -> list[bool]:
    """Floats whose sum depends on the order: the same bits at every call, and the same as rank order gives."""
    torch.manual_seed(0)
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    xs, w = torch.randn(world_size, 2 * world_size, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    partials = (xs @ w).float()[:, 2 * rank : 2 * rank + 2]
    in_order = partials[0]
    for partial in partials[1:]:
        in_order = in_order + partial
    return [torch.equal(ow.matmul_reduce_scatter(xs[rank], w), in_order.bfloat16()) for _ in range(3)]


def test_sums_are_in_rank_order_and_rounded_once():
    assert run_ranks(sum_twice, 4) == [[True] * 3] * 4
