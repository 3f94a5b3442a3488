"""Tile kernels whose results lie block by block, alone on one GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.ir.blocks import Blocks, stored_shape
from overweave.ir.plan import MatmulConfig, Plan
from overweave.ir.problem import Problem
from overweave.ir.tile_order import NO_SIGNAL
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import STAGED, TILES
from overweave.tuner.calibrate.rates import Matmul

RANKS = 2  # of the plan whose tables a lone GPU runs: it waits for nobody
Shape = tuple[int, int, int]


class Stored(NamedTuple):
    """A matmul that stores block by block, with the plan that says how."""

    plan: Plan
    matmul: Matmul
    blocks: Blocks

    @property
    def config(self) -> MatmulConfig:
        assert self.plan.realization.matmul is not None
        return self.plan.realization.matmul


def plan_of(shape: Shape, library_sms: int = 16, groups: str = "auto") -> Plan:
    """The wave groups of an all-reduce, in the tiles of the Hopper kernel."""
    m, n, k = shape
    problem = Problem(operator="matmul_all_reduce", m=m, n=n, k=k, world_size=RANKS, dtype="bfloat16")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    options: dict[str, str | int] = {"kernel": "hopper", "sms": sms, "library_sms": library_sms, "groups": groups}
    return build("matmul_all_reduce.waves", problem, options, rank=0)


def stored(plan: Plan, a: torch.Tensor, b: torch.Tensor, sms_beside: int = 0, traced: bool = False) -> Stored:
    """The tiles of a plan on one GPU, which tell nobody."""
    buffer = plan.schedule.buffer(STAGED)
    out = torch.full(stored_shape(buffer), float("nan"), device=a.device, dtype=a.dtype)
    rows = tuple(row._replace(signal=NO_SIGNAL) for row in plan.tile_order(0, TILES).rows)
    assert plan.realization.matmul is not None
    assert buffer.blocks is not None
    matmul = Matmul(plan.realization.matmul, rows, a, b, out, traced=traced, sms_beside=sms_beside)
    return Stored(plan, matmul, buffer.blocks)
