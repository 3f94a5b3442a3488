"""The layer norm of examples/kernels on CPU ranks, against torch: gathered by every back end, and pushed when stored.

Run by test_authored.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from examples.kernels.layer_norm import layer_norm_kernel  # noqa: E402
from overweave.memory.group import Group  # noqa: E402
from overweave.ops.author.compile import FusedKernel  # noqa: E402
from tests.compiler.authored_kernels import (  # noqa: E402
    BY_KERNEL,
    BY_TILES,
    IN_BULK,
    WORLDS,
    Errors,
    calls,
    off,
    read,
    shard,
)
from tests.ranks import run_ranks  # noqa: E402

read(layer_norm_kernel)

ROWS, COLS, EPS = 26, 40, 1e-5
RING = "all_gather.ring pieces=2"
GATHERS = ("all_gather.push pieces=2", "all_gather.pull", "all_gather.collective", RING, BY_KERNEL, IN_BULK, *BY_TILES)
SPREADS = ("spread.push", "spread.push pieces=3", "spread.push mover=tiles pieces=2")


def run(fused: FusedKernel, x: torch.Tensor, y: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Runs it; the mean of each row, and one over its deviation."""
    generator = torch.Generator().manual_seed(3)
    weight, bias = (torch.randn(COLS, generator=generator) for _ in range(2))
    mean, rstd = torch.full((rows,), torch.nan), torch.full((rows,), torch.nan)
    fused(x, y, weight, bias, mean, rstd, COLS, rows, COLS, EPS, BLOCK_SIZE=16)
    return [weight, bias, mean, rstd]


def of_call(call: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, COLS, generator=torch.Generator().manual_seed(call)) + call


def gathered(schedule: str) -> Errors:
    def one(fused: FusedKernel, group: Group, call: int) -> float:
        x, y = of_call(call), torch.full((ROWS, COLS), torch.nan)
        weight, bias, mean, rstd = run(fused, shard(x, group).clone(), y, ROWS)
        deviation = (x.var(1, correction=0) + EPS).rsqrt()
        exact = torch.nn.functional.layer_norm(x, (COLS,), weight, bias, EPS)
        return max(off(y, exact), off(mean, x.mean(1)), off(rstd, deviation))

    return calls(layer_norm_kernel, {"X": schedule}, one)


def spread(schedule: str) -> Errors:
    """Every rank normalises its own rows, and all get all of them."""

    def one(fused: FusedKernel, group: Group, call: int) -> float:
        sides = [of_call(10 * call + rank, 8) for rank in range(group.world_size)]
        y = torch.full((group.world_size * 8, COLS), torch.nan)
        weight, bias, mean, _ = run(fused, sides[group.rank], y, 8)
        exact = torch.nn.functional.layer_norm(torch.cat(sides), (COLS,), weight, bias, EPS)
        return max(off(y, exact), off(mean, sides[group.rank].mean(1)))

    return calls(layer_norm_kernel, {"Y": schedule}, one)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("schedule", GATHERS)
def test_of_gathered_rows(schedule: str, world_size: int):
    """Shards are uneven on three ranks, and on four."""
    found = run_ranks(gathered, world_size, schedule)
    assert max(error for errors in found for error in errors) < 1e-5


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("schedule", SPREADS)
def test_what_is_stored_is_pushed(schedule: str, world_size: int):
    found = run_ranks(spread, world_size, schedule)
    assert max(error for errors in found for error in errors) < 1e-5
