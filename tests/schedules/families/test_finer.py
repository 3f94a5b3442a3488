"""Finer-grain overlap: eight points of one design space, proven for every group, each with the steps that it names."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from overweave.schedules.families.finer import EXCHANGE_METHODS, GATHER_METHODS, POINTS
from overweave.sim.simulate import total_us

NAMES = [point.name for point in POINTS]
WAYS = ({}, {"order": "ring"}, {"carrier": "library"})


def planned(name: str, m: int = 1024, world_size: int = 4, *, k: int = 256, options=None, **more) -> Plan:
    fields = {"operator": "all_gather_matmul", "n": 48, "dtype": "bfloat16", **more}
    return build(f"{fields['operator']}.{name}", Problem(m=m, k=k, world_size=world_size, **fields), options or {})


def test_the_three_choices_have_eight_points_and_the_paper_keeps_four():
    assert len(set(POINTS)) == 8
    kept = [method.name for method in GATHER_METHODS if method.grids]
    assert kept == ["uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d"]
    assert all(bool(method.dropped) != bool(method.grids) for method in (*GATHER_METHODS, *EXCHANGE_METHODS))
    assert [method.name for method in (*GATHER_METHODS, *EXCHANGE_METHODS)] == NAMES * 2


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(8, marks=pytest.mark.nightly)])
def test_all_are_proven_whatever_m_and_k_are(world_size: int):
    """Pieces of unequal rows or columns, empty ones, ranks without rows, k below one piece; one weight and two."""
    square = 16 * world_size * world_size
    for name, m, (k, columns), way in itertools.product(
        NAMES, (0, 1, 37, square + 5), ((8, ()), (100, (16, 32))), WAYS
    ):
        plan = planned(name, m, world_size, k=k, options=way, columns=columns, returns_gathered=bool(columns))
        assert verify_plan(plan, MachineLimits()).refusals == (), (name, m, k, columns, way)


@pytest.mark.parametrize(
    ("name", "epilogue", "found"),
    [
        ("uniform_fused_2d", Epilogue(bias=True), "added before anything like bias"),
        ("uniform_fused_2d", Epilogue(scaling="rows"), "without scales of rows"),
        ("hetero_fused_1d", Epilogue(residual=True), "where the residual lies"),
        ("uniform_fused_1d", Epilogue(scaling="rows"), "in another order than their scales"),
    ],
)
def test_what_a_point_cannot_do_is_refused_by_name(name: str, epilogue: Epilogue, found: str):
    with pytest.raises(InputError, match=found):
        planned(name, epilogue=epilogue)


def test_a_residual_beside_products_that_are_scattered_is_no_plan():
    """Whoever writes such a plan by hand is refused, too."""
    residual = Epilogue(residual=True)
    for name, is_right in (("hetero_unfused_1d", True), ("hetero_fused_1d", False)):
        plan = planned(name)
        changed = replace(plan, problem=replace(plan.problem, epilogue=residual))
        refusals = [str(each) for each in verify_plan(changed, MachineLimits()).refusals]
        assert (refusals == []) == is_right
        assert is_right or "a product that lies elsewhere" in refusals[0]


def test_a_matmul_runs_beside_what_arrives_later():
    machine = load("h200x4")
    size = Problem(operator="all_gather_matmul", m=16384, n=4096, k=4096, world_size=4, dtype="bfloat16")
    alone = total_us(build("all_gather_matmul.sequential", size, {}), machine)
    for name in ("hetero_fused_1d", "hetero_unfused_1d"):
        assert total_us(build(f"all_gather_matmul.{name}", size, {}), machine) < alone


def test_a_collective_does_not_land_pieces_whose_sizes_counts_change():
    with pytest.raises(InputError, match="whose sizes are known"):
        planned("uniform_fused_1d", operator="all_to_all_matmul", counted=True, options={"carrier": "library"})
