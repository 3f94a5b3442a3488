"""When the matmul of few rows may compute, and in how many shares."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import MOST_SPLITS
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import method_of
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.record import MethodRequest
from overweave.schedules.tiles.shape import LEAST_STEPS, SHAPES, skinny_shape

PROBLEM = Problem(operator="all_gather_matmul", m=8, n=4096, k=1024, world_size=4, dtype="bfloat16")


@pytest.mark.parametrize(("m", "rows"), [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (500, 64)])
def test_rows_choose_the_tile(m: int, rows: int) -> None:
    assert skinny_shape((m, 4096, 4096), 132).block_m == rows


@pytest.mark.parametrize(("n", "shares"), [(1536, 5), (2560, 3), (4096, 2), (7168, 1), (14336, 1), (64, MOST_SPLITS)])
def test_every_sm_has_a_program(n: int, shares: int) -> None:
    assert skinny_shape((1, n, 8192), 132).splits == shares


def test_shares_have_some_steps() -> None:
    for k in (1, 16, 100, 1000, 3000):
        config = skinny_shape((1, 64, k), 132)
        assert config.splits == 1 or k >= LEAST_STEPS * config.splits * config.block_k


def test_all_fits_the_shared_memory_of_a_block() -> None:
    for one in SHAPES:
        assert one.stages * (one.block_m + one.block_n) * one.block_k * 2 <= 227 << 10


def said(problem: Problem) -> str:
    """What stands against the matmul of few rows, whatever the device."""
    method = method_of("matmul_all_reduce.one_shot_packed")
    return obstacle(MethodRequest(problem, {"matmul": "skinny"}), method, "schedule")


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"dtype": "float32"}, "16 bits"), ({"epilogue": Epilogue(activation="silu")}, "silu")],
)
def test_what_it_cannot_do_is_said(changes: dict[str, object], why: str) -> None:
    problem = replace(PROBLEM, **changes)
    assert said(PROBLEM) == ""
    assert why in said(problem)
    with pytest.raises(InputError, match=why):
        build("all_gather_matmul.gather_packed", problem, {"matmul": "skinny"})
    build("all_gather_matmul.gather_packed", problem, {"matmul": "library"})


def test_sums_may_be_finished_behind_it() -> None:
    finished = Epilogue(bias=True, activation="silu", residual=True)
    problem = replace(PROBLEM, operator="matmul_all_reduce", epilogue=finished)
    plan = build("matmul_all_reduce.one_shot_packed", problem, {"matmul": "early"})
    assert plan.realization.skinny is not None
    assert "bias" in said(replace(problem, world_size=1))


def test_who_multiplies_is_no_option_of_other_plans() -> None:
    with pytest.raises(InputError, match="option matmul"):
        build("all_gather_matmul.per_shard", PROBLEM, {"matmul": "skinny"})
