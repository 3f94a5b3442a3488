"""Permuted buffers in the emulation: tiles are stored through the map, library calls move memory as it lies."""

from __future__ import annotations

import pytest
import torch

from campaigns.cases import ALL_REDUCE, REDUCE_SCATTER
from campaigns.exact.exactness import Case, compute, make_data
from overweave.ir.problem import Problem
from overweave.memory.group import resolve
from overweave.runtime.host.host import run_on_host
from overweave.schedules.catalog.catalog import build
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


def wrong_waves() -> list[str]:
    """Several groups, ragged rows and columns, uneven shards, epilogues aside; a second call in the same slots."""
    group, wrong = resolve(None), []
    for operator, m, n in ((ALL_REDUCE, 2046, 600), (REDUCE_SCATTER, 2046, 600), (REDUCE_SCATTER, 300, 136)):
        shape = {"m": m, "n": n, "k": 32, "world_size": group.world_size, "dtype": "float32"}
        problem = Problem(operator=operator, **shape)
        case = Case(f"{operator}.waves", problem, {"sms": 8, "library_sms": 4}, seed=m)
        plan = build(case.schedule, problem, case.options)
        for call in range(2):
            data = make_data(case, group.rank, is_integer=True, call=call)
            if not torch.equal(compute(case, plan, group, data, "library"), data.exact.float()):
                wrong.append(f"{case} call {call}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_waves_of_the_catalog_add_exactly(world_size: int):
    assert run_ranks(wrong_waves, world_size) == [[]] * world_size
