"""All-reduces: what each plan moves and in which order, and that no rank's sums could start ahead of its tiles."""

from __future__ import annotations

import itertools

import pytest

from overweave.errors import InputError
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Compute, Put
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build, names

OPERATOR = "matmul_all_reduce"
TWO_SHOTS = [
    {"sums": sums, "order": order, "pieces": pieces}
    for sums, order, pieces in itertools.product(("kernel", "epilogue"), ("ring", "all_peers"), (1, 3))
]


def plan_of(method: str, m: int = 512, world_size: int = 4, **options: str | int) -> Plan:
    problem = Problem(operator=OPERATOR, m=m, n=48, k=16, world_size=world_size, dtype="bfloat16")
    return build(f"{OPERATOR}.{method}", problem, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", TWO_SHOTS, ids=lambda options: " ".join(map(str, options.values())))
def test_every_two_shot_is_proven_for_any_number_of_rows(options: dict[str, str | int]):
    for world_size, m in itertools.product((2, 3, 4), (1, 3, 5, 37, 200)):
        plan = plan_of("two_shot", m, world_size, block_m=16, **options)
        assert verify_plan(plan, MachineLimits()).refusals == ()


@pytest.mark.parametrize("method", ["one_shot_packed", "two_shot_packed"])
def test_every_other_plan_is_proven_for_any_number_of_rows(method: str):
    for world_size, m in itertools.product((2, 3, 4), (1, 3, 5, 37, 200)):
        assert verify_plan(plan_of(method, m, world_size), MachineLimits()).refusals == ()


@pytest.mark.parametrize("options", TWO_SHOTS, ids=lambda options: " ".join(map(str, options.values())))
@pytest.mark.parametrize("m", [1, 5, 200])
def test_sums_beside_the_tiles_wait_for_own_tiles_first(m: int, options: dict[str, str | int]):
    """Else they could take the SMs that the tiles need (runtime/gpu/bound.py). Ranks without rows of their own too."""
    schedule = plan_of("two_shot", m, block_m=16, **options).schedule
    for rank in range(4):
        own = list(schedule.of_rank(rank))
        told = {(n.pad, n.signal) for tile in own if isinstance(tile, Compute) for n in tile.notifies if n.rank == rank}
        first = next((operation for operation in own if operation.queue == "sums"), None)
        assert first is None or any((wait.pad, wait.signals[0]) in told for wait in first.waits)


def test_sequential_multiplies_into_the_result_and_reduces_it_there():
    compute, reduce = plan_of("sequential").schedule.of_rank(1)
    assert isinstance(compute, Compute)
    assert isinstance(reduce, Collective)
    assert reduce.function == "all_reduce"
    assert compute.out == reduce.sources == reduce.destinations
    assert compute.out[0].buffer == "y"


def test_two_shot_computes_own_rows_last_and_scatters_before_it_shares():
    of_one = list(plan_of("two_shot", pieces=2, block_m=64).schedule.of_rank(1))
    first_rows = {(owner, piece): 128 * owner + 64 * piece for owner in range(4) for piece in (0, 1)}
    of_peers, own = [first_rows[owner, p] for p in (0, 1) for owner in (2, 3, 0)], [128, 192]
    assert [one.out[0].rows[0] for one in of_one if isinstance(one, Compute)] == [*of_peers, *own]
    copies = [operation for operation in of_one if isinstance(operation, Put)]
    assert [put.peer for put in copies] == [2, 3, 0] * 4
    assert [put.sources[0].buffer for put in copies] == ["partial"] * 6 + ["total"] * 6
    assert copies[6].waits
    assert not copies[7].waits  # it stands behind the one that waited
    sums = [operation for operation in of_one if operation.queue == "sums"]
    assert [one.out.rows[0] for one in sums[:2]] == own
    assert sums[0].instances == 8
    moved = [one.out.rows[0] for one in sums[2:]]
    assert moved == [*own, *(first_rows[owner, p] for p in (0, 1) for owner in (0, 3, 2))]


def test_more_rows_than_a_number_holds_are_refused():
    problem = Problem(operator=OPERATOR, m=2**30, n=8, k=8, world_size=4, dtype="bfloat16")
    for name in names(OPERATOR):
        with pytest.raises(InputError, match="31 bits"):
            build(name, problem, {}, rank=0)
