"""What a Problem gives and what it owes: the logical values of the caller's tensors, as the operator's record says.

A schedule states Given and Goal of its own. `ir/verify` holds them against these, so that no plan assumes more, or
promises less, than its Problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.dtype import Dtype
from overweave.ir.operators.forms import SCALE_DTYPE, SCALE_X
from overweave.ir.plan import numbered
from overweave.ir.problem import Problem
from overweave.ir.schedule import Range
from overweave.ir.shards import rows_of
from overweave.ir.tensors import FACTORS, product, received, scale_of

GATHERED_OUT = "gathered_out"  # the output that the gathered operand is returned in


class Holding(Struct, frozen=True):
    """Element `[first + i, j]` of a rank's tensor `buffer` is element `[at[0] + i, at[1] + j]` of the logical `tensor`.

    shape: rows and columns that this is true of. reduced: the range that an element is summed over, or None of an
    element that is moved and not computed. counted: as of a Buffer.
    """

    buffer: str
    rank: int
    shape: tuple[int, int]
    dtype: Dtype
    tensor: str
    at: tuple[int, int]
    reduced: Range | None = None
    first: int = 0
    counted: str | None = None


def given_to(problem: Problem, rank: int) -> Iterator[Holding]:
    """What a rank's operands hold when a call begins."""
    record, (a, b), dtype = problem.record, FACTORS, problem.dtype
    _, col = problem.start(record.x, rank)
    first = 0
    if record.exchanges:
        yield from _blocks_of(problem, rank)
    for lo, hi in () if record.exchanges else problem.operand_ranges(rank):
        yield Holding(record.x.name, rank, (hi - lo, problem.k), dtype, a, (lo, col), first=first)
        if problem.epilogue.scaling == "rows":
            yield Holding(SCALE_X, rank, (hi - lo, 1), SCALE_DTYPE, scale_of(a), (lo, col), first=first)
        first += hi - lo
    brought, (row, col) = problem.weight_rows(rank), problem.start(record.w, rank)
    for index, cols in enumerate(problem.widths):
        yield Holding(numbered(record.w.name, index), rank, (rows_of((brought,)), cols), dtype, b, (row, col))
        col += cols


def _blocks_of(problem: Problem, rank: int) -> Iterator[Holding]:
    """What a rank brings for each rank: a block of the rows that are received there."""
    block, name, counted = problem.block, problem.record.x.name, "sent" if problem.counted else None
    for to in range(problem.world_size):
        shape, tensor = (block, problem.k), received(FACTORS[0], to)
        at = rank * block, 0
        yield Holding(name, rank, shape, problem.dtype, tensor, at, first=to * block, counted=counted)


def _products_of_all(problem: Problem, rank: int) -> Iterator[Holding]:
    """What a rank gets of each rank: products by that rank's weight of a block of its rows."""
    record, block = problem.record, problem.block
    made, counted = product(problem.factor(rank), FACTORS[1]), "received" if problem.counted else None
    for source in range(problem.world_size):
        at, shape, first = (source * block, source * problem.n), (block, problem.n), source * block
        reduced, dtype = (0, problem.k), problem.result_dtype
        yield Holding(record.y.name, rank, shape, dtype, made, at, reduced, first=first, counted=counted)


def owed_by(problem: Problem, rank: int) -> Iterator[Holding]:
    """What a rank's results hold when a call ends, but for what the epilogue and the norm make of sums."""
    record, rows = problem.record, problem.result_rows(rank)
    reduced = (0, problem.k * record.parts(problem.world_size).get("k", 1))
    if record.exchanges and not record.gathers:
        yield from _products_of_all(problem, rank)
        return
    row, col = (0, 0) if record.y.ownership == "gathered" else problem.start(record.y, rank)
    ranges = problem.result_ranges(rank) if problem.strip else ((row, row + rows),)
    for index, cols in enumerate(problem.widths):
        name, made = numbered(record.y.name, index), product(problem.factor(rank), FACTORS[1])
        counted, first = "received" if problem.counted else None, 0
        for lo, hi in ranges:
            shape, at, dtype = (hi - lo, cols), (lo, col), problem.result_dtype
            yield Holding(name, rank, shape, dtype, made, at, reduced, first=first, counted=counted)
            first += hi - lo
        col += cols
    if problem.returns_gathered:
        yield Holding(GATHERED_OUT, rank, (problem.m, problem.k), problem.dtype, FACTORS[0], (0, 0))
