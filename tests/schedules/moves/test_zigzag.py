"""Two ranges of rows a rank: dealt to and fro, gathered, proven, simulated and emulated; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.hardware.machine import load
from overweave.ir.footprint import Axis, Dim, Operand, TileSpace
from overweave.ir.problem import Problem
from overweave.ir.shards import owned_rows, shard_rows
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.group import resolve
from overweave.runtime.host.host import run_on_host
from overweave.schedules.catalog import catalog
from overweave.schedules.moves.moves import Chunk, Collective, Gather, Put
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.weave.exchange import exchange
from overweave.sim.simulate import total_us
from tests.ranks import run_ranks
from tests.registries import kept_registries
from tests.schedules.moves import zigzag

NAMES = tuple(f"{zigzag.OPERATOR.name}.{method.name}" for method in zigzag.METHODS)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with kept_registries():
        zigzag.add()
        yield


def problem(world_size: int, m: int) -> Problem:
    return Problem(operator=zigzag.OPERATOR.name, m=m, n=24, k=16, world_size=world_size, dtype="bfloat16")


@pytest.mark.parametrize("m", [0, 1, 5, 37, 64])
def test_every_row_has_one_owner(m: int):
    for world_size, ranges in product(range(1, 9), (1, 2)):
        dealt = [owned_rows(m, world_size, rank, ranges) for rank in range(world_size)]
        rows = [row for owned in dealt for lo, hi in owned for row in range(lo, hi)]
        assert sorted(rows) == list(range(m))
        assert owned_rows(m, world_size, 0) == (shard_rows(m, world_size, 0),)


def test_zigzag_is_from_the_front_and_from_the_end():
    assert [owned_rows(24, 3, rank, 2) for rank in range(3)] == [((0, 4), (20, 24)), ((4, 8), (16, 20)), ((8, 16),)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_it_is_proven_and_simulated(name: str, world_size: int):
    for m in (0, 3, 37, 64):
        plan = catalog.build(name, problem(world_size, m), {})
        verdict = verify_plan(plan, MachineLimits())
        assert verdict.ok, str(verdict)
        if world_size <= 4 and m:
            assert total_us(plan, load("h200x4")) > 0


def wrong(m: int) -> list[str]:
    """The plans whose integer results are not exact."""
    zigzag.add()
    group, found = resolve(None), []
    own = problem(group.world_size, m)
    whole = torch.arange(m * 16).reshape(m, 16).remainder(7).bfloat16()
    w = torch.arange(16 * 24).reshape(16, 24).remainder(5).bfloat16()
    x = torch.cat([whole[lo:hi] for lo, hi in own.operand_ranges(group.rank)])
    for name in NAMES:
        y = torch.full((m, 24), torch.nan, dtype=torch.bfloat16)
        run_on_host(catalog.build(name, own, {}), group, {"x": x, "w": w}, {"y": y}, timeout_s=20)
        if not torch.equal(y, whole @ w):
            found.append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [2, 37, 64])
def test_it_is_exact_on_emulated_ranks(world_size: int, m: int):
    assert run_ranks(wrong, world_size, m) == [[]] * world_size


def test_a_plan_for_shards_of_another_deal_is_refused():
    for name, other in ((NAMES[1], "all_gather_matmul"), ("all_gather_matmul.per_shard", zigzag.OPERATOR.name)):
        operator = name.split(".")[0]
        plan = catalog.build(name, replace(problem(2, 64), operator=operator), {})
        verdict = verify_plan(replace(plan, problem=replace(plan.problem, operator=other)), MachineLimits())
        assert "but the problem gives a[" in str(verdict)


@pytest.mark.parametrize("ranges", [0, 3, True, "zigzag"])
def test_no_such_number_of_ranges(ranges: object):
    with pytest.raises(InputError, match="ranges="):
        Gather(2, (), ranges=ranges)  # type: ignore[arg-type]


def test_a_chunk_of_rows_that_a_rank_does_not_own_is_refused():
    with pytest.raises(ScheduleError, match="neither its own nor has it all arrived"):
        transferred(Gather(2, (Put(0, 1, Chunk((0, 8))),), ranges=2), 16, 4)  # rows 4 to 8 are rank 1's
    with pytest.raises(ScheduleError, match="not one of each rank's own shard"):
        transferred(Gather(2, (Collective((Chunk((0, 8)), Chunk((8, 16)))),), ranges=2), 16, 4)
    with pytest.raises(ScheduleError, match="lacks 16 of 64 elements"):
        transferred(
            Gather(2, (Put(0, 1, Chunk((0, 4))), Put(0, 1, Chunk((12, 16))), Put(1, 0, Chunk((4, 8)))), ranges=2), 16, 4
        )


def test_an_authors_kernel_gathers_shards_of_one_range():
    space = TileSpace("k", (Axis("row", 16, 4),), (Operand("x", "x", (Dim(16, "row"), Dim(8))),), ())
    with pytest.raises(ScheduleError, match="its shards are 2 ranges of rows each"):
        exchange(space, "x", Gather(2, (), ranges=2), 2)
