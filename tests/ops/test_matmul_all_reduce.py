"""`matmul_all_reduce` on CPU ranks through its public face: every bit, for any shape, dtype, layout, plan."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import InputError
from overweave.ir.operators.matmul_all_reduce import OPERATOR as RECORD
from overweave.schedules.catalog.catalog import names
from tests.ops import reference
from tests.ops.calls import DTYPES, calls_by_plan, calls_of_any_size, wrong_calls
from tests.ranks import run_ranks

OPERATOR = RECORD.name
PLANS = (
    "sequential",
    "one_shot_packed",
    "two_shot_packed",
    "two_shot",
    "ring_stored",
    "decomposed",
    "waves",
)
WITH_OPTIONS = (
    "two_shot pieces=1",
    "two_shot pieces=3 sums=epilogue",
    "ring_stored pieces=3 block_m=16 block_n=16",
    "decomposed pieces=3",
    "waves sms=4 block_m=16 block_n=16",
)
OURS = PLANS[1:] + WITH_OPTIONS


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
    torch.manual_seed(dist.get_rank())
    w, differences = torch.randn(16, 8), []
    for m in (8, 5):
        x = torch.randn(m, 16)
        ours, theirs = ow.matmul_all_reduce(x, w), reference.matmul_all_reduce(x, w)
        differences.append(float((ours - theirs).abs().max()))
    return differences


def test_the_reference_says_the_same():
    assert all(difference < 1e-5 for told in run_ranks(compare_with_plain_torch, 2) for difference in told)


def sum_by_every_plan() -> list[str]:
    """Floats whose sum depends on the order: the plans that are not rank order's bits, the same at every call, on all
    ranks. Tiles that add to their own product do not round it first: they only have to agree.
    """
    torch.manual_seed(0)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    xs, w = torch.randn(world_size, 37, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    in_order = torch.zeros(37, 8)
    for partial in xs @ w:
        in_order = in_order + partial.float()
    wrong = []
    for plan in OURS:
        results = [ow.matmul_all_reduce(xs[rank], w, plan=plan) for _ in range(3)]
        everybodys = [torch.empty_like(results[0]) for _ in range(world_size)]
        dist.all_gather(everybodys, results[0])
        adds = any(word in plan for word in ("epilogue", "stored"))
        wanted = everybodys[0] if adds else in_order.bfloat16()
        if not all(torch.equal(result, wanted) for result in (*results, *everybodys)):
            wrong.append(plan)
    return wrong


@pytest.mark.slow
def test_sums_are_in_rank_order_and_the_same_on_every_rank():
    assert run_ranks(sum_by_every_plan, 4) == [[]] * 4


def ask_for_what_kernels_cannot_add() -> list[str]:
    """What is raised for rows that do not start at multiples of 16 bytes, by plan; a call without a plan is right."""
    told = []
    x, w = torch.ones(4, 8), torch.ones(8, 3)
    for plan in (plan for plan in PLANS[1:] if plan != "decomposed"):  # which the library adds
        with pytest.raises(InputError) as caught:
            ow.matmul_all_reduce(x, w, plan=plan)
        told.append(str(caught.value))
    assert torch.equal(ow.matmul_all_reduce(x, w), torch.full((4, 3), 16.0))
    return told


def test_ragged_rows_are_the_librarys():
    for told in run_ranks(ask_for_what_kernels_cannot_add, 2):
        assert all("n=3" in text and "16 bytes" in text for text in told)
