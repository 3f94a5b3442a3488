"""`all_gather_matmul` on CPU ranks through its public face: every bit, whatever the shape, dtype, layout and plan."""

from __future__ import annotations

import pytest
import torch

import overweave as ow
from overweave.ir.operators.all_gather_matmul import OPERATOR as RECORD
from overweave.schedules.catalog.catalog import names
from overweave.schedules.families.finer import POINTS
from tests.ops import reference
from tests.ops.calls import DTYPES, Call, calls_by_plan, calls_of_any_size, wrong_calls
from tests.ranks import run_ranks

OPERATOR = RECORD.name
PLANS = ("sequential", "per_shard", "push", "gather_packed", "pull")
PLANS += ("mesh", "ring", "double_ring", "islands")
FINER = tuple(point.name for point in POINTS)
WITH_OPTIONS = (
    "per_shard order=all_peers",
    "push pieces=1",
    "push pieces=3 order=all_peers",
    "pull pieces=3",
    "push block_m=16 block_n=16",
    "mesh pieces=3 col_pieces=2 lanes=2 axis=outer island=3",
    "ring pieces=1 lanes=2",
    "double_ring pieces=3 col_pieces=2",
)


def test_every_plan_of_the_catalog_is_tried():
    assert names(OPERATOR) == tuple(f"{OPERATOR}.{plan}" for plan in (*PLANS, *FINER))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_rows(world_size: int):
    calls = calls_of_any_size(OPERATOR, world_size, seed=world_size)
    assert run_ranks(wrong_calls, world_size, calls) == [[]] * world_size


@pytest.mark.slow
def test_every_plan():
    calls = calls_by_plan(OPERATOR, PLANS + FINER + WITH_OPTIONS, m=37, dtypes=("bfloat16",))
    gathered = [Call(OPERATOR, 37, plan=plan, returns_gathered=True) for plan in PLANS + FINER]
    assert run_ranks(wrong_calls, 3, calls + gathered) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_plan_and_dtype_with_any_number_of_rows(world_size: int):
    dtypes = DTYPES if world_size < 8 else DTYPES[:1]  # eight ranks take as long as all others
    calls = [call for m in (0, 1, world_size - 1, 67) for call in calls_by_plan(OPERATOR, PLANS, m, dtypes)]
    calls += [call for seed in range(4) for call in calls_of_any_size(OPERATOR, world_size, seed)]
    assert run_ranks(wrong_calls, world_size, calls, timeout_s=200) == [[]] * world_size


def compare_with_plain_torch() -> list[float]:
    """The largest difference to the reference, shards even by default and ragged with m."""
    torch.manual_seed(torch.distributed.get_rank())
    w, differences = torch.randn(16, 8), []
    for rows, m in ((4, None), (2 if torch.distributed.get_rank() == 0 else 1, 3)):
        x = torch.randn(rows, 16)
        ours, theirs = ow.all_gather_matmul(x, w, m=m), reference.all_gather_matmul(x, w, m=m)
        differences.append(float((ours - theirs).abs().max()))
    return differences


def test_the_reference_says_the_same():
    assert all(difference < 1e-5 for told in run_ranks(compare_with_plain_torch, 2) for difference in told)
