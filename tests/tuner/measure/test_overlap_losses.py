"""Measured losses: shapes are scaled until they fit, every cut covers the whole, and on a CPU they can be timed."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from overweave.ir.problem import Problem
from overweave.tuner.measure import overlap_losses
from overweave.tuner.measure.overlap_losses import loss_names, measured_losses, shrink_to_memory
from overweave.tuner.measure.timer import Effort
from overweave.tuner.model.overlap_losses import MATMULS

SMALL = Problem(operator="all_gather_matmul", m=250, n=32, k=130, world_size=4, dtype="bfloat16")
QUICK = Effort(rounds=1, warmup=0, host_calls=0)


def test_the_longer_side_is_halved_until_all_fits_and_by_what_is_told():
    large = replace(SMALL, m=1 << 20, n=1280, k=8192, world_size=8)
    assert shrink_to_memory(large, 1 << 40) == (large, 1)
    problem, scaled = shrink_to_memory(large, 16 << 30)
    assert (problem.k, problem.m * scaled) == (8192, 1 << 20)
    assert scaled in (2, 4, 8)
    deep, scaled = shrink_to_memory(replace(large, m=8192, k=1 << 20), 8 << 30)
    assert (deep.m, deep.k * scaled) == (8192, 1 << 20)


def test_what_one_gpu_can_measure_is_named():
    assert loss_names(("dil",)) == MATMULS
    assert loss_names(("comm",)) == ()
    beside = loss_names(("cil",))
    assert "matmul beside host copies" in beside
    assert {f"copies on {sms} SMs beside matmul" for sms in (8, 16, 32)} < set(beside)


@pytest.mark.slow
def test_cuts_are_timed_and_compute_the_whole_product():
    factors = measured_losses(SMALL, MATMULS, QUICK)
    assert tuple(factors) == MATMULS
    assert all(factor > 0 for factor in factors.values())
    here = overlap_losses._Here(SMALL, torch.device("cpu"), QUICK)
    whole = here.a.float() @ here.b.float()
    for parts in (4, 16):
        here.out.fill_(float("nan"))
        here.sums.fill_(float("nan"))
        here._by_rows(parts, 0)
        here._by_columns(parts, 0)
        torch.testing.assert_close(here.out.float(), whole, rtol=0.02, atol=0.1)
        torch.testing.assert_close(here.sums, whole, rtol=1e-4, atol=1e-3)
