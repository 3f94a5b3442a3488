"""Sums with a residual and an RMSNorm on CPU ranks: every plan against plain torch; bad arguments."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overweave as ow
from overweave.errors import InputError, OverweaveError
from overweave.ir.operators.registry import operator_of
from overweave.ir.shards import shard_rows
from tests.ops import reference
from tests.ranks import run_ranks

SUMS: dict[str, Any] = {
    "matmul_all_reduce": (ow.matmul_all_reduce, reference.matmul_all_reduce_norm),
    "matmul_reduce_scatter": (ow.matmul_reduce_scatter, reference.matmul_reduce_scatter_norm),
}
PLANS = (
    None,
    "sequential",
    "one_shot_packed",
    "two_shot_packed",
    "two_shot pieces=1",
    "two_shot pieces=3",
)
SCATTERING = (
    None,
    "sequential",
    "per_shard",
    "scatter_packed",
    "scatter pieces=3 own_pieces=2",
    "scatter_pull",
    "waves sms=6 library_sms=2 block_m=16 block_n=16",
)
N, K = 24, 16
EPS = 1e-3


def normed_sums(operator: str, plans: tuple[str | None, ...]) -> list[str]:
    """What is not, bit for bit, plain torch's: of integers every sum is exact, and z and the norm round where it does.

    And of floats, what ranks or plans with kernels do not agree on.
    """
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    for m, dtype, has_residual in product((1, ranks - 1, 37), (torch.bfloat16, torch.float32), (False, True)):
        torch.manual_seed(m)
        weight, residual = torch.randn(N).to(dtype), torch.randn(m, N).to(dtype) if has_residual else None
        if residual is not None and operator_of(operator).scatters:
            residual = residual[slice(*shard_rows(m, ranks, rank))]
        torch.manual_seed(rank)
        x, w = torch.randint(-1, 2, (m, K)).to(dtype), torch.randint(-1, 2, (K, N)).to(dtype)
        computed, referred = SUMS[operator]
        wanted, z_wanted = referred(x, w, weight, residual, EPS)
        for plan in plans:
            normed, z = computed(x, w, norm=ow.RmsNorm(weight, residual, EPS), plan=plan)
            if not (torch.equal(z, z_wanted) and torch.equal(normed, wanted)):
                wrong.append(f"{plan} m={m} {dtype} residual={has_residual}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_plan_does_what_plain_torch_does(world_size: int):
    for operator, plans in zip(SUMS, (PLANS, SCATTERING), strict=True):
        assert run_ranks(normed_sums, world_size, operator, plans) == [[]] * world_size


def sum_floats() -> list[str]:
    """Of floats: plans with kernels have z's bits, that of `y + residual`, and every rank the same of both."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(7)
    weight, residual = torch.randn(N).bfloat16(), torch.randn(37, N).bfloat16()
    torch.manual_seed(rank)
    x, w = torch.randn(37, K).bfloat16(), torch.randn(K, N).bfloat16()
    for plan in PLANS[2:]:
        z_wanted = ow.matmul_all_reduce(x, w, plan="two_shot") + residual
        normed, z = ow.matmul_all_reduce(x, w, norm=ow.RmsNorm(weight, residual, EPS), plan=plan)
        everybodys = [torch.empty_like(normed) for _ in range(ranks)]
        dist.all_gather(everybodys, normed)
        exact = torch.nn.functional.rms_norm(z.double(), (N,), weight.double(), EPS)
        if not torch.equal(z, z_wanted) or not all(torch.equal(normed, other) for other in everybodys):
            wrong.append(f"{plan}: bits")
        if not torch.allclose(normed.double(), exact, rtol=2**-8, atol=1e-6):  # one rounding
            wrong.append(f"{plan}: {float((normed - exact).abs().max())}")
    return wrong


def test_floats_have_the_bits_of_a_sum_and_then_a_residual():
    assert run_ranks(sum_floats, 3) == [[]] * 3


def residuals_by_keyword() -> list[bool]:
    """A residual beside a norm is that of the norm; of two residuals neither is."""
    torch.manual_seed(7)
    x, w, weight, residual = torch.randn(5, K), torch.randn(K, N), torch.randn(N), torch.randn(5, N)
    wanted = ow.matmul_all_reduce(x, w, norm=ow.RmsNorm(weight, residual))
    for _ in range(2):
        found = ow.matmul_all_reduce(x, w, residual=residual, norm=ow.RmsNorm(weight))
        bare = ow.matmul_all_reduce(x, w, norm=ow.RmsNorm(weight))
    with pytest.raises(InputError, match="Pass one of the two"):
        ow.matmul_all_reduce(x, w, residual=residual, norm=ow.RmsNorm(weight, residual))
    return [*map(torch.equal, found, wanted), not torch.equal(bare[1], wanted[1])]


def test_the_residual_of_a_norm_may_be_a_keyword():
    assert run_ranks(residuals_by_keyword, 2) == [[True] * 3] * 2


def moved_norms() -> bool:
    """The second call of a signature reads its own weight and residual, not those of the first."""
    x, w = torch.ones(2, K), torch.ones(K, N)
    same = True
    for by in (1.0, 2.0):
        weight, residual = torch.full((N,), by), torch.full((2, N), by)
        normed, z = ow.matmul_all_reduce(x, w, norm=ow.RmsNorm(weight, residual, EPS))
        total = dist.get_world_size() * K + by
        same &= torch.equal(z, torch.full((2, N), total))
        same &= torch.allclose(normed, torch.full((2, N), by * total / (total**2 + EPS) ** 0.5))
    return same


def test_each_call_reads_its_own_tensors():
    assert run_ranks(moved_norms, 2) == [True, True]


def call_without_rows() -> list[list[int]]:
    norm = ow.RmsNorm(torch.ones(N), torch.ones(0, N))
    return [list(out.shape) for out in ow.matmul_all_reduce(torch.ones(0, K), torch.ones(K, N), norm=norm)]


def test_a_call_without_rows():
    assert run_ranks(call_without_rows, 2) == [[[0, N], [0, N]]] * 2


def errors_of_bad_norms() -> list[str]:
    x, w, weight = torch.ones(2, K), torch.ones(K, N), torch.ones(N)
    found = []
    for norm, plan in (
        (ow.RmsNorm(torch.ones(N + 1)), None),
        (ow.RmsNorm(weight.double()), None),
        (ow.RmsNorm([1.0] * N), None),
        (ow.RmsNorm(weight, torch.ones(3, N)), None),
        (ow.RmsNorm(weight, torch.ones(N, 2).t()), None),
        (ow.RmsNorm(weight, eps=0.0), None),
        (ow.RmsNorm(weight, eps=1), None),
        (weight, None),
        (ow.RmsNorm(weight), "torch.one_shot"),
    ):
        try:
            ow.matmul_all_reduce(x, w, norm=norm, plan=plan)
            found.append("nothing raised")
        except OverweaveError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_bad_arguments_are_typed_errors_on_every_rank():
    words = ("norm_weight", "float32", "list", "residual", "contiguous", "eps", "eps", "RmsNorm or None")
    words += ("torch's",)
    for of_rank in run_ranks(errors_of_bad_norms, 2):
        assert all(found.startswith("InputError") for found in of_rank), of_rank
        assert all(word in found for word, found in zip(words, of_rank, strict=True)), of_rank


def activations_beside_norms() -> list[str]:
    """What is said of one, differentiated and not."""
    x, said = torch.ones(4, K), []
    for (call, _), is_differentiated in product(SUMS.values(), (False, True)):
        w = torch.ones(K, N, requires_grad=is_differentiated)
        with pytest.raises(InputError) as refused:
            call(x, w, activation="silu", norm=ow.RmsNorm(torch.ones(N)))
        said.append(str(refused.value))
    return said


def test_no_activation_is_taken_beside_a_norm():
    for said in run_ranks(activations_beside_norms, 2):
        assert all("silu beside a norm" in each for each in said), said


def ask_for_different_norms() -> str:
    x, w = torch.ones(2, K), torch.ones(K, N)
    try:
        ow.matmul_all_reduce(x, w, norm=ow.RmsNorm(torch.ones(N), eps=1e-5 if dist.get_rank() else 1e-6))
    except OverweaveError as error:
        return type(error).__name__
    return "nothing raised"


def test_ranks_agree_on_the_norm():
    assert run_ranks(ask_for_different_norms, 2) == ["RankMismatch"] * 2
