"""Floats, whose sums depend on the order: that of ranks, rounded once, alike on every rank, and as near as torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import OPERATORS
from campaigns.exact.calls import FP8, Case, Form, Inputs, expected, make_inputs, results
from overweave.ir.shards import shard_rows
from overweave.schedules.catalog.catalog import names
from overweave.schedules.methods.registry import METHODS
from tests.ops.table import WITH_OPTIONS, refused
from tests.ranks import run_ranks

AR, RS = "matmul_all_reduce", "matmul_reduce_scatter"
ROWS, K, N, EPS = 37, 16, 24, 1e-3


def summed_by_kernels(operator: str) -> list[str]:
    """Plans whose sums are not a library's, which adds in an order of its own."""
    plans = [*(name.partition(".")[2] for name in names(operator)), *WITH_OPTIONS[operator]]
    adds = {plan: METHODS[f"{operator}.{plan.split()[0]}"].adds for plan in plans}
    return [plan for plan, how in adds.items() if how is not None and how.order != "arrival"]


def wrong_bits(operator: str) -> list[str]:
    """Plans whose results are not rank order's, the same at every call and on all ranks; with a norm, too.

    What the first two ranks have cancels out, and is so large that in any other order it takes the rest along.

    Tiles that add to their own product do not round it first, and sums on their ways meet in another order: they only
    have to agree.
    """
    torch.manual_seed(0)
    ranks, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    xs, w = torch.randint(-2, 3, (ranks, ROWS, K)).bfloat16(), torch.randint(-2, 3, (K, N)).bfloat16()
    xs[0], xs[1] = xs[0] * 2.0**30, xs[0] * -(2.0**30)
    whole, weight = torch.randn(ROWS, N).bfloat16(), torch.randn(N).bfloat16()
    own = slice(*shard_rows(ROWS, ranks, rank)) if operator == RS else slice(None)
    in_order = torch.zeros(ROWS, N)
    for partial in xs @ w:
        in_order = in_order + partial.float()
    call = getattr(ow, operator)
    for plan in summed_by_kernels(operator):
        ys = [call(xs[rank], w, plan=plan) for _ in range(2)]
        others = ("epilogue", "stored", "ring", "remote_add", "decomposed", "waves", "synth")
        adds = any(word in plan for word in others)
        alike = is_shared(ys[0]) if operator == AR else True
        if not (torch.equal(*ys) and alike and (adds or torch.equal(ys[0], in_order[own].bfloat16()))):
            wrong.append(plan)
        case = Case(operator, ROWS, N, K, plan=plan, form=Form(norm=True, residual=True))
        if not refused(case, ranks):
            normed, z = call(xs[rank], w, norm=ow.RmsNorm(weight, whole[own], EPS), plan=plan)
            exact = torch.nn.functional.rms_norm(z.double(), (N,), weight.double(), EPS)
            alike = is_shared(normed) if operator == AR else True
            rounded_first = adds or torch.equal(z, ys[0] + whole[own])
            if not (alike and rounded_first and torch.allclose(normed.double(), exact, rtol=2**-8, atol=1e-6)):
                wrong.append(f"{plan} and a norm")
    return wrong


def is_shared(y: torch.Tensor) -> bool:
    everybodys = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, y)
    return all(torch.equal(y, other) for other in everybodys)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [RS, AR])
def test_sums_are_in_rank_order_rounded_once_and_the_same_on_every_rank(operator: str):
    assert run_ranks(wrong_bits, 4, operator) == [[]] * 4


def further_off(operator: str) -> list[str]:
    """Plans of fp8 operands whose errors are more than 1.05 times plain torch's, both against fp64."""
    wrong = []
    case = Case(operator, 64, 48, 64, FP8, True, form=Form(scaling="rows"))
    inputs = make_inputs(case, 1, exact=False)
    truth = expected(case, inputs, torch.float64)
    theirs = off(plain(case, inputs), truth)
    for name in names(operator):
        named = case._replace(plan=name.partition(".")[2])
        if not refused(named, dist.get_world_size()):
            ours = off(results(named, inputs)[0], truth)
            wrong += [] if ours <= 1.05 * theirs < 2**-7 else [f"{named}: {ours} for {theirs}"]
    return wrong


def plain(case: Case, inputs: Inputs) -> torch.Tensor:
    """What torch makes of the operands: products rounded to 16 bits, and summed so."""
    assert inputs.gathered_scale is not None
    y = (inputs.gathered.float() @ inputs.w.float() * inputs.gathered_scale * inputs.scale_w).bfloat16()
    if case.record.adds:
        dist.all_reduce(y)
    return y[slice(*shard_rows(case.m, dist.get_world_size(), dist.get_rank()))] if case.record.scatters else y


def off(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_plan_of_fp8_is_further_from_the_truth_than_torch(operator: str):
    assert run_ranks(further_off, 4, operator) == [[]] * 4


def forms_of_norms_and_weights() -> list[bool]:
    """A residual beside a norm is the norm's. A list of one weight is a list; one tensor twice is two weights."""
    torch.manual_seed(7)
    x, w, weight, residual = torch.randn(5, K), torch.randn(K, N), torch.randn(N), torch.randn(5, N)
    wanted = ow.matmul_all_reduce(x, w, norm=ow.RmsNorm(weight, residual))
    for _ in range(2):
        found = ow.matmul_all_reduce(x, w, residual=residual, norm=ow.RmsNorm(weight))
        bare = ow.matmul_all_reduce(x, w, norm=ow.RmsNorm(weight))
    (alone,), both = ow.all_gather_matmul(x, [w]), ow.all_gather_matmul(x, (w, w))
    is_two = torch.equal(*both) and both[0].data_ptr() != both[1].data_ptr()
    return [*map(torch.equal, found, wanted), not torch.equal(bare[1], wanted[1]), torch.equal(alone, both[0]), is_two]


def test_other_ways_to_say_the_same():
    assert run_ranks(forms_of_norms_and_weights, 2) == [[True] * 5] * 2
