from __future__ import annotations

import pytest

from overweave.ir.plan import Problem
from overweave.ir.schedule import Compute
from overweave.runtime.rests import rest_ns
from overweave.schedules.catalog import build

M, N, K = 8192, 8192, 7168


def rest(operator: str, world_size: int, waves: float, dtype: str = "bfloat16") -> int:
    problem = Problem(operator=operator, m=M, n=N, k=K, world_size=world_size, dtype=dtype)
    plan = build(f"{operator}.ring_stored", problem, {})
    return rest_ns(problem, (each for each in plan.schedule.of_rank(0) if isinstance(each, Compute)), waves)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_strips_of_a_tile_take_about_half_of_its_time(world_size: int):
    """A tile of 128 x 256 takes 0.66 us for each 64 of k, and has 32 strips."""
    half_ns = 0.66e3 * K / 64 / 2
    assert 0.9 * half_ns < 32 * rest("matmul_reduce_scatter", world_size, 3.9) < 1.1 * half_ns


def test_numbers_of_twice_the_size_take_twice_as_long():
    assert rest("matmul_reduce_scatter", 4, 3.9, "float32") == 2 * rest("matmul_reduce_scatter", 4, 3.9)


@pytest.mark.parametrize("waves", [0.1, 0.97])
def test_nobody_rests_where_the_next_rank_waits_for_each_tile(waves: float):
    assert rest("matmul_reduce_scatter", 4, waves) == 0


def test_sums_for_several_peers_leave_at_once():
    assert rest("matmul_all_reduce", 2, 3.9) > 0
    assert [rest("matmul_all_reduce", size, 3.9) for size in (3, 4, 8)] == [0, 0, 0]
