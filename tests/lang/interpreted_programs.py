"""Tile programs that are proven on paper (tests/ops/author/test_tile_schedule.py), run between interpreted ranks.

Run by test_primitives.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.lang.mapping import Tiles  # noqa: E402
from overweave.ops.author.tile_program import TileProgram  # noqa: E402
from tests.lang.tile_programs import COLS, ROWS, Gathered, Pushed  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402


def run(make: Callable[[int], Gathered | Pushed]) -> None:
    """Three calls in a row, each bit for bit."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sketch = make(ranks)
    program = TileProgram(sketch.declared.buffers, sketch.declared.channels)
    own = slice(*Tiles(ROWS, COLS, -(-ROWS // ranks), 16, ranks).rows_of(rank))
    for turn in range(3):
        whole, x, out = (torch.full((ROWS, COLS), torch.nan) for _ in range(3))
        whole[:] = torch.arange(ROWS * COLS).reshape(ROWS, COLS) + 1000 * turn
        x[own] = whole[own]
        with program.call() as call:
            sketch.write(call, x=x if make is Pushed else x[own], out=out)
        assert torch.equal(out, whole)


@pytest.mark.parametrize("make", [Gathered, Pushed])
@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_that_are_proven_on_paper_run(ranks: int, make: Callable[[int], Gathered | Pushed]):
    run_ranks(run, ranks, make)
