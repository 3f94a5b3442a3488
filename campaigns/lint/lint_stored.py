"""Tiles that store at peers as they are compiled and linted."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from campaigns.lint.lint_case import SCALED, SUM
from campaigns.lint.lint_matmul import Stored, Tile
from overweave.ir.dtype import FLOAT8
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import TILE_KERNEL, MatmulConfig
from overweave.ir.problem import Problem
from overweave.schedules.finished import shapes_of_tiles
from overweave.schedules.methods.record import Adds
from overweave.schedules.tiles.shape import Kernel, shapes

FINISHED = Epilogue(bias=True, activation="silu", residual=True)
OURS = Problem(operator="matmul_all_reduce", m=1024, n=1024, k=1024, world_size=4, dtype="bfloat16")


def stored_tiles(kernel: Kernel) -> Iterator[Tile]:
    """Beside sums that stay, and beside such as go everywhere; of one peer and of seven; with all that may follow."""
    for shape in shapes("bfloat16", kernel):
        yield Tile("bfloat16", shape.config, SUM, addends=3, stored=Stored(3))
        for spreads in (False, True):
            yield Tile("bfloat16", shape.config, SUM, addends=1, stored=Stored(3, spreads))
    first, traced = shapes("bfloat16", kernel)[0].config, SUM._replace(traced=True)
    yield Tile("bfloat16", first, SUM, stored=Stored(7))
    yield Tile("bfloat16", first, traced, addends=1, stored=Stored(1, True))
    yield Tile("bfloat16", first, traced, addends=7, stored=Stored(7))
    for config in _of(kernel, replace(OURS, epilogue=FINISHED)):
        yield Tile("bfloat16", config, SUM, FINISHED, 1, stored=Stored(3, True))
    scaled, alone = replace(FINISHED, scaling="rows"), SCALED._replace(two_sources=False)
    by_rows = _of(kernel, replace(OURS, dtype=FLOAT8, epilogue=scaled))[0]
    for addends in (3, 1):
        yield Tile(FLOAT8, by_rows, alone, scaled, addends, stored=Stored(3, addends == 1))


def _of(kernel: Kernel, problem: Problem) -> tuple[MatmulConfig, ...]:
    return tuple(shape.config for shape in shapes_of_tiles(problem, kernel, Adds(TILE_KERNEL, "ring"), "epilogue"))
