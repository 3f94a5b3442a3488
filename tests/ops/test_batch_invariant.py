"""Under `ow.settings(batch_invariant=True)` a row has the same bits in every batch, by all plans that run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

import overweave as ow
from campaigns.exact.gpu_batches import Calls, differing
from overweave.errors import InputError, RankMismatch
from overweave.ir.epilogue import Norm
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import LIBRARY
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS, methods_for
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.outside import OUTSIDE
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.space.space import candidate
from overweave.tuner.space.target import Target
from tests.ranks import run_ranks

N, K = 24, 64
BF16, FP32 = torch.bfloat16, torch.float32
MOVED = {"pieces": 2, "own_pieces": 2, "order": "all_peers", "mover": "copy_kernel"}  # what changes how rows move


def plans_of(operator: str, world_size: int) -> list[str]:
    """Every plan that CPU ranks run under the setting: each method as it is, and with each option that moves rows."""
    found = []
    for method in methods_for(operator):
        for options in ({}, {name: value for name, value in MOVED.items() if method.takes(name)}):
            asked = MethodRequest(problem_of(operator, 64, world_size), options, Target("cpu"))
            found += [] if obstacle(asked, method, "device") else [str(candidate(method.name, options))]
    return list(dict.fromkeys(found))


def small(operator: str, plans: tuple[str, ...] = (), **changed: Any) -> Calls:
    """In the largest batch rows of exchanges travel in waves, too, whose blocks lie permuted."""
    return Calls(operator, plans, N, K, (1, 2, 7, 64, 256))._replace(**changed)


def problem_of(operator: str, m: int, world_size: int) -> Problem:
    return Problem(operator=operator, m=m, n=N, k=K, world_size=world_size, dtype="bfloat16", batch_invariant=True)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_row_has_the_same_bits_in_every_batch_by_every_plan_that_is_allowed(operator: str):
    plans = plans_of(operator, 2)
    assert plans
    assert run_ranks(differing, 2, small(operator, tuple(plans))) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("operator", OPERATORS)
def test_so_it_has_in_other_groups_and_in_fp32(operator: str, world_size: int):
    assert run_ranks(differing, world_size, small(operator, dtype=FP32)) == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_so_has_its_norm(operator: str):
    assert run_ranks(differing, 2, small(operator, norm=True)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_so_have_activations_of_sums(operator: str):
    """In fp32, where torch's vectors and what is behind them round unlike."""
    assert run_ranks(differing, 2, small(operator, activation="silu", dtype=FP32)) == [[], []]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kernel", ["portable", "hopper"])
def test_tiles_and_rows_of_norms_are_the_same_for_all_numbers_of_rows(name: str, kernel: str):
    method = METHODS[name]
    if method.varies_with_rows:
        with pytest.raises(InputError, match="not batch-invariant: "):
            build(name, problem_of(method.operator, 64, 2), {})
        return
    found = set()
    for m in (2, 64, 4096):
        problem = replace(problem_of(method.operator, m, 2), n=4096, k=4096)
        problem = replace(problem, norm=Norm(eps=1e-5) if method.norms and problem.record.forms.norm else None)
        realization = build(name, problem, {"kernel": kernel}, rank=0).realization
        assert realization.matmul is not None
        assert realization.matmul.split_n == 1
        found.add((realization.matmul, realization.reduction if problem.norm else None))
    assert len(found) == 1


def test_records_say_why_a_library_is_none():
    library = [method for method in METHODS.values() if method.multiplies == LIBRARY]
    assert library
    assert all("order over k" in method.varies_with_rows for method in library)
    asked = MethodRequest(problem_of("matmul_all_reduce", 64, 2))
    assert all(any("order over k" in need.why(asked) for need in each.needs) for each in OUTSIDE.values())


@pytest.mark.parametrize(
    "plan", ["scatter sums=epilogue", "scatter block_k=32", "scatter half_tiles=on", "ring_stored"]
)
def test_a_plan_by_name_that_depends_on_the_batch_is_refused_with_a_cure(plan: str):
    told = run_ranks(refusal, 2, plan)
    assert told[0] == told[1]
    assert "not batch-invariant: " in told[0]
    assert "ow.settings(batch_invariant=False)" in told[0]


def refusal(plan: str) -> str:
    with ow.settings(batch_invariant=True), pytest.raises(InputError) as refused:
        ow.matmul_reduce_scatter(torch.ones(4, K), torch.ones(K, N), plan=plan)
    return str(refused.value)


def unlike() -> str:
    rank, x, w = dist.get_rank(), torch.ones(4, K), torch.ones(K, N)
    with ow.settings(batch_invariant=rank == 0), pytest.raises(RankMismatch) as refused:
        ow.matmul_all_reduce(x, w, plan="two_shot")
    return str(refused.value)


def test_ranks_whose_settings_differ_are_told():
    assert all("batch_invariant=True" in told for told in run_ranks(unlike, 2))


def test_explain_says_what_the_setting_takes_and_leaves_out():
    sizes = {"m": 64, "n": 4096, "k": 4096, "world_size": 4}
    with ow.settings(batch_invariant=True):
        choice = ow.explain("matmul_all_reduce", **sizes)
    assert METHODS[choice.plan].varies_with_rows == ""
    assert "because calls are batch-invariant" in str(choice)
    assert any("sequential" in each.candidate and "kernel of its matmul" in each.obstacle for each in choice.weights)
    assert "batch-invariant" not in str(ow.explain("matmul_all_reduce", **sizes))


def test_a_dtype_of_which_no_plan_is_invariant_is_refused():
    with ow.settings(batch_invariant=True), pytest.raises(InputError, match="float32 under ow"):
        ow.explain("matmul_all_reduce", m=64, n=4096, k=4096, world_size=4, dtype="fp32")
