from __future__ import annotations

import pytest

from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute
from overweave.runtime.kernel_calls.bind import LINK_INTERVAL_NS, STRIP_BYTES, peer_store_interval_ns
from overweave.schedules.catalog.catalog import build

SMS = 132


def pace(
    operator: str,
    world_size: int,
    waves: float,
    strip_bytes: int = STRIP_BYTES,
    k: int = 4096,
    dtype: str = "bfloat16",
) -> int:
    problem = Problem(operator=operator, m=8192, n=8192, k=k, world_size=world_size, dtype=dtype)
    plan = build(f"{operator}.ring_stored", problem, {})
    return peer_store_interval_ns(
        problem, (each for each in plan.schedule.of_rank(0) if isinstance(each, Compute)), waves, strip_bytes
    )


def test_strips_come_as_fast_as_the_link_takes_them():
    """Between what stores of all SMs reached together, and what the link is made for, both in GB/s."""
    assert [pace("matmul_reduce_scatter", size, 3.9) for size in (2, 3, 4)] == [LINK_INTERVAL_NS] * 3
    assert 310 < SMS * STRIP_BYTES / LINK_INTERVAL_NS < 450


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("k", [5504, 7168, 14336])
def test_strips_of_a_long_tile_take_about_half_of_its_time(k: int, world_size: int):
    """A tile of 128 x 256 takes 0.66 us for each 64 of k, and has 32 strips."""
    half_ns = 0.66e3 * k / 64 / 2
    assert 0.9 * half_ns < 32 * pace("matmul_reduce_scatter", world_size, 3.9, k=k) < 1.1 * half_ns


@pytest.mark.slow
def test_numbers_of_twice_the_size_take_twice_as_long():
    pair = [pace("matmul_reduce_scatter", 4, 3.9, k=7168, dtype=dtype) for dtype in ("float32", "bfloat16")]
    assert pair[0] == 2 * pair[1]


def test_smaller_strips_come_faster():
    assert pace("matmul_reduce_scatter", 4, 3.9, 1024) == LINK_INTERVAL_NS // 2


@pytest.mark.parametrize("waves", [0.1, 0.97])
def test_nobody_waits_where_the_next_rank_waits_for_each_tile(waves: float):
    assert pace("matmul_reduce_scatter", 4, waves) == 0


@pytest.mark.slow
def test_sums_for_several_peers_leave_at_once():
    assert pace("matmul_all_reduce", 2, 3.9) == LINK_INTERVAL_NS
    assert [pace("matmul_all_reduce", size, 3.9) for size in (3, 4, 8)] == [0, 0, 0]
