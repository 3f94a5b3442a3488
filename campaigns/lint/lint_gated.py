"""Tiles with a gate as they are compiled and linted: which shape, in which variant, with what done to its products."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from msgspec.structs import replace

from campaigns.lint.lint_case import RARE_VARIANTS, SCALED, VARIANTS, dealt
from campaigns.lint.lint_matmul import Tile
from overweave.ir.dtype import FLOAT8
from overweave.ir.epilogue import Epilogue
from overweave.schedules.tiles.shape import Kernel, shapes


def gated_tiles(kernel: Kernel) -> Iterator[Tile]:
    """Of a kernel: those of 16 bits and those of fp8."""
    yield from _of_16_bits(kernel)
    yield from _of_fp8(kernel)


def _of_16_bits(kernel: Kernel) -> Iterator[Tile]:
    """Two products of each tile, in every shape and, of the first, in every layout, traced, ragged, with a residual."""
    swiglu = Epilogue(activation="silu", gate=True)
    first, *others = (shape.config for shape in shapes("bfloat16", kernel, swiglu))
    for variant in (*VARIANTS, *RARE_VARIANTS):
        yield Tile("bfloat16", first, variant, swiglu)
    for config in others:
        yield Tile("bfloat16", config, VARIANTS[-1], swiglu)
    rest = Epilogue(activation="gelu_tanh", residual=True, gate=True)
    for shape in shapes("float16", kernel, rest):
        yield Tile("float16", shape.config, VARIANTS[-1], rest)


def _of_fp8(kernel: Kernel) -> Iterator[Tile]:
    """The same in fp8, each product scaled by its own: with all that may be done, in every shape, and dealt out."""
    swiglu = Epilogue(scaling="rows", activation="silu", gate=True)
    for scaling, activation, residual in product(("rows", "tensor"), (None, "silu", "gelu"), (False, True)):
        epilogue = Epilogue(scaling=scaling, activation=activation, residual=residual, gate=True)  # type: ignore[arg-type]
        yield Tile(FLOAT8, shapes(FLOAT8, kernel, epilogue)[0].config, SCALED, epilogue)
    first, *others = shapes(FLOAT8, kernel, swiglu)
    for variant in (SCALED._replace(two_sources=False), SCALED._replace(traced=True)):
        yield Tile(FLOAT8, first.config, variant, swiglu)
    most = replace(swiglu, activation="gelu", residual=True)
    for shape in others:
        yield Tile(FLOAT8, shape.config, SCALED, swiglu)
        yield Tile(FLOAT8, dealt(shape), SCALED, most)
    yield Tile(FLOAT8, dealt(first), SCALED, swiglu)
