"""Permuted buffers in the emulation: tiles are stored through the map, library calls move memory as it lies."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.memory.group import resolve
from overweave.memory.lower import refuse_permuted
from overweave.runtime.host.host import run_on_host
from tests.ir.wave_groups import wave_groups
from tests.ranks import run_ranks


def whole_numbers(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def sum_in_waves(m: int, n: int, k: int) -> bool:
    group = resolve(None)
    plan = wave_groups(group.world_size, (m, n, k * group.world_size), (8, 8), 5, 3)
    xs = [whole_numbers((m, k), rank) for rank in range(group.world_size)]
    ws = [whole_numbers((k, n), 100 + rank) for rank in range(group.world_size)]
    y = torch.full((m, n), torch.nan)
    run_on_host(plan, group, {"x": xs[group.rank], "w": ws[group.rank]}, {"y": y}, timeout_s=20)
    return torch.equal(y, sum(x @ w for x, w in zip(xs, ws, strict=True)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_wave_groups_add_exactly(world_size: int):
    assert all(run_ranks(sum_in_waves, world_size, 40, 30, 24))


def test_a_plan_is_refused_before_it_is_bound_to_a_gpu():
    plan = wave_groups(2, (40, 30, 48), (8, 8), 5, 3)
    refuse_permuted(replace(plan.schedule, buffers=tuple(one for one in plan.schedule.buffers if one.blocks is None)))
    with pytest.raises(ScheduleError, match="the blocks of buffer staged are permuted"):
        refuse_permuted(plan.schedule)
