"""Library queues beside tiles, and collectives of a part of the group: proven, simulated and emulated."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from campaigns.oracle.plans.library_queues import ROWS, K, N, Sizes, gathered_beside, gathered_in_pairs, reduced_beside
from overweave.hardware.machine import load
from overweave.ir.launch.order import launch_order
from overweave.ir.launch.streams import queues_beside, waits_without_deadline
from overweave.ir.plan import MatmulConfig, Plan
from overweave.ir.schedule import Collective, Notify, Wait
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.group import resolve
from overweave.runtime.host.host import run_on_host
from overweave.sim.simulate import simulate, total_us
from tests.plans import refusals, with_operations
from tests.ranks import run_ranks

MACHINE = replace(load("h200x4"), gpus=8)


def plans(world_size: int) -> list[Plan]:
    return [reduced_beside(world_size), gathered_beside(world_size, 24), gathered_in_pairs(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("which", range(3))
def test_it_is_proven_and_simulated(which: int, world_size: int):
    if which == 1 and ROWS % (2 * world_size):
        pytest.skip("halves of shards")
    plan = plans(world_size)[which]
    verify_plan(plan, MachineLimits()).raise_if_refused()
    assert simulate(plan, MACHINE).total_us > 0


def test_what_stands_beside_the_tiles_has_a_stream_of_its_own():
    assert queues_beside(reduced_beside(2)) == {"groups"}
    assert queues_beside(reduced_beside(2, after=("tiles",))) == set()
    assert queues_beside(gathered_beside(2, 24)) == {"gathers"}
    assert queues_beside(gathered_in_pairs(2)) == set()


def test_it_is_launched_behind_its_producers_and_a_stream_waits_for_it():
    plan = reduced_beside(2)
    assert [action.queue for action in launch_order(plan, 0)] == ["tiles", "groups", "groups"]
    assert waits_without_deadline(plan, 0) == ()  # own tiles come by themselves
    far = replace(plan.schedule, operations=tuple(_told_by_a_peer(one) for one in plan.schedule.operations))
    assert waits_without_deadline(replace(plan, schedule=far), 0) == (Wait("computed", (1, 2), 2),)


def _told_by_a_peer(operation):
    """With the second group's signal on the other rank, in place of the own one."""
    told = tuple(Notify(one.pad, 1 - one.rank, 1) if one.signal == 1 else one for one in operation.notifies)
    return replace(operation, notifies=told)


def test_beside_the_tiles_it_takes_less_time_than_behind_them():
    large = Sizes(8192, 2048, 4096, MatmulConfig(block_m=128, block_n=256, block_k=64))
    beside, behind = reduced_beside(4, large), reduced_beside(4, large, after=("tiles",))
    assert total_us(beside, MACHINE) < total_us(behind, MACHINE)


def test_tiles_that_wait_for_the_library_leave_it_sms():
    assert "[residency]" in refusals(gathered_beside(2, 0))
    assert not refusals(gathered_beside(2, 24))
    assert "none to tiles" in refusals(gathered_beside(2, 132))


def test_collectives_that_ranks_enqueue_in_another_order_are_refused():
    plan = reduced_beside(2)
    first, second = (one for one in plan.schedule.of_rank(1) if isinstance(one, Collective))
    changed = {first.name: replace(second, name=first.name), second.name: replace(first, name=second.name)}
    operations = tuple(changed.get(one.name, one) for one in plan.schedule.operations)
    assert "[deadlock]" in refusals(with_operations(plan, operations))


def test_a_collective_that_waits_for_tiles_behind_it_is_refused():
    plan = gathered_beside(2, 24)
    late = [
        replace(one, notifies=(Notify("done", one.rank, 0),)) if one.name.startswith("multiply") else
        replace(one, waits=(Wait("done", (0, 1), 4),))
        for one in plan.schedule.operations
    ]  # fmt: skip
    pads = (*plan.schedule.pads, replace(plan.schedule.pads[0], name="done", size=1))
    schedule = replace(plan.schedule, pads=pads, operations=tuple(late))
    assert "[deadlock]" in refusals(replace(plan, schedule=schedule))


def test_a_sub_group_on_which_ranks_disagree_is_refused():
    plan = gathered_in_pairs(4)
    parts = plan.schedule.operations
    others = (parts[0], replace(parts[1], ranks=(1, 2)), *parts[2:])
    assert "[form]" in refusals(with_operations(plan, others))
    assert "ascending order" in refusals(gathered_in_pairs(4, is_turned=True))


def reduced(world_size: int, after: tuple[str, ...]) -> bool:
    group = resolve(None)
    plan = reduced_beside(world_size, after=after)
    xs = [torch.randint(-4, 5, (ROWS, K), generator=torch.Generator().manual_seed(one)).float() for one in range(8)]
    ws = [torch.randint(-4, 5, (K, N), generator=torch.Generator().manual_seed(9 + one)).float() for one in range(8)]
    y = torch.empty(ROWS, N)
    for _ in range(3):
        y.fill_(torch.nan)
        run_on_host(plan, group, {"x": xs[group.rank], "w": ws[group.rank]}, {"y": y})
    return torch.equal(y, sum(x @ w for x, w in zip(xs[:world_size], ws, strict=False)))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_beside_tiles_are_emulated_bit_for_bit(world_size: int):
    assert run_ranks(reduced, world_size, world_size, ()) == [True] * world_size


def gathered(world_size: int) -> bool:
    group = resolve(None)
    whole = torch.randint(-4, 5, (ROWS, K), generator=torch.Generator().manual_seed(1)).float()
    w = torch.randint(-4, 5, (K, N), generator=torch.Generator().manual_seed(2 + group.rank)).float()
    y, size = torch.empty(ROWS, N), ROWS // world_size
    own = whole[group.rank * size : (group.rank + 1) * size].clone()
    for _ in range(3):
        y.fill_(torch.nan)
        run_on_host(gathered_beside(world_size, 24), group, {"x": own, "w": w}, {"y": y})
    return torch.equal(y, whole @ w)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_gathers_beside_tiles_are_emulated_bit_for_bit(world_size: int):
    assert run_ranks(gathered, world_size, world_size) == [True] * world_size


def paired(world_size: int) -> list[float]:
    group = resolve(None)
    x, y = torch.full((4, 8), float(group.rank)), torch.full((8, 8), -1.0)
    for _ in range(2):
        run_on_host(gathered_in_pairs(world_size), group, {"x": x}, {"y": y})
    return [float(y[0, 0]), float(y[4, 0])]


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_collective_of_a_part_of_the_group_is_emulated(world_size: int):
    firsts = [rank - rank % 2 for rank in range(world_size)]
    seconds = [first + 1.0 if first + 1 < world_size else -1.0 for first in firsts]
    expected = [[float(first), second] for first, second in zip(firsts, seconds, strict=True)]
    assert run_ranks(paired, world_size, world_size) == expected
