"""The tiles of a matmul that are linted, as one table: a row stands for all combinations of what it lists."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from campaigns.lint.lint_case import RARE_VARIANTS, SCALED, SUM, VARIANTS, Variant
from campaigns.lint.lint_matmul import ONE_WEIGHT, STAYS, ByExperts, Stored, Tile
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import TILE_KERNEL, MatmulConfig
from overweave.ir.problem import Problem
from overweave.schedules.catalog.realized import shapes_of_tiles
from overweave.schedules.records.record import Adds
from overweave.schedules.tiles.grouped import shapes_of_experts
from overweave.schedules.tiles.shape import KernelChoice, shapes

KERNELS: tuple[KernelChoice, ...] = ("portable", "hopper")
# Which of the shapes of a kernel, in their order.
EVERY, FIRST, FIRST_TWO, OTHERS = slice(None), slice(1), slice(2), slice(1, None)
COMMON, TRACED_SUM, SCALED_SUM = VARIANTS[-1], SUM._replace(traced=True), SCALED._replace(two_sources=False)
SUM_ACROSS = SUM._replace(is_transposed=True)
OF_EXPERTS, ALL_OF_EXPERTS = ByExperts(True), ByExperts(True, True, True, True)
BIASED, BY_ROWS = Epilogue(bias=True), Epilogue(scaling="rows")
BY_TENSOR = Epilogue(scaling="tensor", bias=True, activation="gelu_tanh")
EPILOGUES = (
    Epilogue(bias=True, activation="silu"),
    BIASED,
    Epilogue(bias=True, activation="gelu_tanh", residual=True),
)
FINISHED = Epilogue(bias=True, activation="silu", residual=True)
SCALED_FINISHED = replace(FINISHED, scaling="rows")
SWIGLU, GELU_GATE = (
    Epilogue(activation="silu", gate=True),
    Epilogue(activation="gelu_tanh", residual=True, gate=True),
)
SCALED_SWIGLU = replace(SWIGLU, scaling="rows")
CLAMPED_SWIGLU = replace(SWIGLU, bias=True, gating=(7.0, 1.702, 1.0))
SCALED_GATES = tuple(
    Epilogue(scaling=scaling, activation=activation, residual=residual, gate=True)  # type: ignore[arg-type]
    for scaling, activation, residual in product(("rows", "tensor"), (None, "silu", "gelu"), (False, True))
)


class Tiles(NamedTuple):
    """Tiles of some kernels: every combination of the fields of a `Tile`, in these of the kernel's shapes."""

    dtype: Dtype = "bfloat16"
    variants: tuple[Variant, ...] = (COMMON,)
    epilogues: tuple[Epilogue, ...] = (NO_EPILOGUE,)
    addends: tuple[int, ...] = (0,)
    weights: tuple[int, ...] = (1,)
    stored: tuple[Stored, ...] = (STAYS,)
    experts: tuple[ByExperts, ...] = (ONE_WEIGHT,)
    shapes: slice = EVERY
    kernels: tuple[KernelChoice, ...] = KERNELS


TILES = (
    # Bare products in every layout, also traced and ragged; with what may follow.
    Tiles(variants=VARIANTS),
    Tiles("float16", VARIANTS),
    Tiles("float32", VARIANTS, kernels=("portable",)),
    Tiles(variants=RARE_VARIANTS, shapes=FIRST),
    Tiles(epilogues=EPILOGUES, shapes=FIRST_TWO),
    # Tiles that add what peers sent, and finish the sums. The portable kernel spills a little where rows are ragged: 80
    # bytes, in the epilogue.
    Tiles(variants=(SUM,), addends=(3, 1)),
    Tiles("float16", (SUM,), addends=(1,), shapes=FIRST),
    Tiles(variants=(TRACED_SUM,), addends=(1, 3), shapes=FIRST),
    Tiles(variants=(SUM._replace(ragged=True, is_transposed=True),), addends=(1, 3), shapes=FIRST, kernels=("hopper",)),
    Tiles(variants=(SUM,), epilogues=(FINISHED,), addends=(3, 1)),
    Tiles(FLOAT8, (SCALED_SUM,), (SCALED_FINISHED,), (3, 1), shapes=FIRST),
    Tiles(variants=(TRACED_SUM,), epilogues=(BIASED,), addends=(1,), shapes=FIRST),
    # Tiles that store at one peer, at three and at seven: products, sums that stay, and sums that go everywhere.
    Tiles(variants=(SUM,), addends=(3,), stored=(Stored(3),)),
    Tiles(variants=(SUM,), addends=(1,), stored=(Stored(3), Stored(3, True))),
    Tiles(variants=(SUM,), stored=(Stored(7),), shapes=FIRST),
    Tiles(variants=(TRACED_SUM,), addends=(1,), stored=(Stored(1, True),), shapes=FIRST),
    Tiles(variants=(TRACED_SUM,), addends=(7,), stored=(Stored(7),), shapes=FIRST),
    Tiles(variants=(SUM,), epilogues=(FINISHED,), addends=(1,), stored=(Stored(3, True),)),
    Tiles(FLOAT8, (SCALED_SUM,), (SCALED_FINISHED,), (3,), stored=(Stored(3),), shapes=FIRST),
    Tiles(FLOAT8, (SCALED_SUM,), (SCALED_FINISHED,), (1,), stored=(Stored(3, True),), shapes=FIRST),
    # Tiles of two weights in every shape, and of three; with what an epilogue reads for each column.
    Tiles(weights=(2,)),
    Tiles(variants=(COMMON, *RARE_VARIANTS), weights=(3,), shapes=FIRST),
    Tiles(epilogues=(BIASED,), weights=(2,), shapes=FIRST_TWO),
    Tiles(epilogues=EPILOGUES[:2], weights=(3,), shapes=FIRST_TWO),
    # Two products of each tile, of which one is a gate.
    Tiles(variants=(*VARIANTS, *RARE_VARIANTS), epilogues=(SWIGLU,), shapes=FIRST),
    Tiles(epilogues=(SWIGLU,), shapes=OTHERS),
    Tiles("float16", epilogues=(GELU_GATE,)),
    Tiles(FLOAT8, (SCALED,), SCALED_GATES, shapes=FIRST),
    Tiles(FLOAT8, (SCALED_SUM, SCALED._replace(traced=True)), (SCALED_SWIGLU,), shapes=FIRST),
    Tiles(FLOAT8, (SCALED,), (SCALED_SWIGLU,), shapes=OTHERS),
    # Operands in fp8, scaled by rows in every shape, or by one scale each.
    Tiles(FLOAT8, (SCALED,), (BY_ROWS,)),
    Tiles(FLOAT8, (SCALED,), (BY_TENSOR,), shapes=FIRST),
    Tiles(FLOAT8, (SCALED._replace(traced=True),), (replace(BY_TENSOR, scaling="rows", residual=True),), shapes=FIRST),
    Tiles(FLOAT8, (SCALED,), (replace(BY_ROWS, bias=True),), weights=(3,)),
    Tiles(FLOAT8, (SCALED,), (replace(BY_ROWS, bias=True),), weights=(2,), shapes=OTHERS),
    Tiles(FLOAT8, (SCALED_SUM,), (BY_ROWS,), addends=(3,)),
    Tiles(FLOAT8, (SCALED_SUM,), (Epilogue(scaling="tensor"),), addends=(1,), shapes=FIRST),
    Tiles(FLOAT8, (SCALED_SUM._replace(traced=True),), (BY_ROWS,), addends=(1,), shapes=FIRST),
    # Tiles of experts, in every shape; and with all that may come with them.
    Tiles(variants=(SUM,), experts=(OF_EXPERTS, ALL_OF_EXPERTS)),
    Tiles(variants=(SUM_ACROSS,), experts=(OF_EXPERTS, ALL_OF_EXPERTS), shapes=FIRST),
    Tiles(variants=(SUM,), experts=(ByExperts(True, gathers=True), ByExperts(True, scatters=True)), shapes=FIRST),
    Tiles(variants=(SUM_ACROSS._replace(ragged=True),), experts=(OF_EXPERTS, ALL_OF_EXPERTS), shapes=FIRST),
    Tiles("float16", (SUM,), experts=(ALL_OF_EXPERTS,), shapes=FIRST),
    Tiles("float32", (SUM,), experts=(ALL_OF_EXPERTS,), shapes=FIRST, kernels=("portable",)),
    Tiles(variants=(SUM_ACROSS,), epilogues=EPILOGUES[:2], experts=(ALL_OF_EXPERTS,), shapes=FIRST_TWO),
    Tiles(variants=(SUM_ACROSS,), epilogues=(SWIGLU, CLAMPED_SWIGLU), experts=(ALL_OF_EXPERTS,)),
    Tiles(FLOAT8, (SUM_ACROSS,), (BY_ROWS, SCALED_SWIGLU), experts=(ALL_OF_EXPERTS,)),
    Tiles(FLOAT8, (SUM_ACROSS,), (replace(CLAMPED_SWIGLU, scaling="rows"),), experts=(ALL_OF_EXPERTS,)),
)


def tiles() -> Iterator[Tile]:
    """Every tile of the table."""
    for row in TILES:
        for kernel, epilogue, addends, weights, stored in product(
            row.kernels, row.epilogues, row.addends, row.weights, row.stored
        ):
            known = configs(row, kernel, epilogue, addends, weights)[row.shapes]
            for config, variant, experts in product(known, row.variants, row.experts):
                yield Tile(row.dtype, config, variant, epilogue, addends, weights, stored, experts)


def configs(row: Tiles, kernel: KernelChoice, epilogue: Epilogue, addends: int, weights: int) -> list[MatmulConfig]:
    """The shapes in which a kernel can do this, in their order."""
    known = shapes(row.dtype, kernel, epilogue, weights)
    if row.experts[0].are:
        known = shapes_of_experts(row.dtype, kernel, epilogue)
    if addends:
        ranks = addends + 1
        size = Problem(operator="matmul_all_reduce", m=1024, n=1024, k=1024, world_size=ranks, dtype=row.dtype)
        known = shapes_of_tiles(replace(size, epilogue=epilogue), kernel, Adds(TILE_KERNEL), "epilogue")
    return [shape.config for shape in known]
