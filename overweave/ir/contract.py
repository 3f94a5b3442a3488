"""The pre- and postconditions of a Problem: which logical values callers' tensors hold before and after a call.

They follow from the operator's record. A schedule states Given and Goal of its own; `ir/verify` compares them with
these, so that a plan assumes no more and delivers no less than its Problem says.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.dtype import Dtype
from overweave.ir.operators.forms import SCALE_DTYPE, SCALE_X
from overweave.ir.plan import indexed_name
from overweave.ir.problem import Problem
from overweave.ir.schedule import Range
from overweave.ir.shards import rows_of
from overweave.ir.tensors import FACTORS, all_to_all_result, product, scale_of

GATHERED_OUT = "gathered_out"  # the output that the gathered operand is returned in


class Holding(Struct, frozen=True):
    """Element `[first + i, j]` of a rank's tensor `buffer` is element `[at[0] + i, at[1] + j]` of the logical `tensor`.

    shape: rows and columns that this is true of. reduced: the range that an element is summed over; None if the element
    is moved and not computed. counted: as of a Buffer.
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


def preconditions(problem: Problem, rank: int) -> Iterator[Holding]:
    """Yield what a rank's operands hold when a call begins."""
    record, (a, b), dtype = problem.record, FACTORS, problem.dtype
    _, col = problem.start(record.x, rank)
    first = 0
    if record.exchanges:
        yield from _sent_blocks(problem, rank)
    for lo, hi in () if record.exchanges else problem.operand_ranges(rank):
        yield Holding(record.x.name, rank, (hi - lo, problem.k), dtype, a, (lo, col), first=first)
        if problem.epilogue.scaling == "rows":
            yield Holding(SCALE_X, rank, (hi - lo, 1), SCALE_DTYPE, scale_of(a), (lo, col), first=first)
        first += hi - lo
    weight_rows, (row, col) = problem.weight_rows(rank), problem.start(record.w, rank)
    for index, cols in enumerate(problem.widths):
        yield Holding(indexed_name(record.w.name, index), rank, (rows_of((weight_rows,)), cols), dtype, b, (row, col))
        col += cols


def _sent_blocks(problem: Problem, rank: int) -> Iterator[Holding]:
    """Yield the blocks of rows that a rank passes to an all-to-all, one for each rank."""
    block, name, counted = problem.block, problem.record.x.name, "sent" if problem.counted else None
    for to in range(problem.world_size):
        shape, tensor = (block, problem.k), all_to_all_result(FACTORS[0], to)
        corner = rank * block, 0
        yield Holding(name, rank, shape, problem.dtype, tensor, corner, first=to * block, counted=counted)


def _received_blocks(problem: Problem, rank: int) -> Iterator[Holding]:
    """Yield what a rank gets from each rank by an all-to-all: a block of its rows times that rank's weight."""
    record, block = problem.record, problem.block
    tensor, counted = product(problem.factor(rank), FACTORS[1]), "received" if problem.counted else None
    for source in range(problem.world_size):
        corner, shape, first = (source * block, source * problem.n), (block, problem.n), source * block
        reduced, dtype = (0, problem.k), problem.result_dtype
        yield Holding(record.y.name, rank, shape, dtype, tensor, corner, reduced, first=first, counted=counted)


def postconditions(problem: Problem, rank: int) -> Iterator[Holding]:
    """Yield what a rank's results hold when a call ends, before the epilogue of sums and the norm."""
    record, rows = problem.record, problem.result_rows(rank)
    reduced = (0, problem.k * record.parts(problem.world_size).get("k", 1))
    if record.exchanges and not record.gathers:
        yield from _received_blocks(problem, rank)
        return
    row, col = (0, 0) if record.y.ownership == "gathered" else problem.start(record.y, rank)
    ranges = problem.result_ranges(rank) if problem.strip else ((row, row + rows),)
    for index, cols in enumerate(problem.widths):
        name, tensor = indexed_name(record.y.name, index), product(problem.factor(rank), FACTORS[1])
        counted, first = "received" if problem.counted else None, 0
        for lo, hi in ranges:
            shape, corner, dtype = (hi - lo, cols), (lo, col), problem.result_dtype
            yield Holding(name, rank, shape, dtype, tensor, corner, reduced, first=first, counted=counted)
            first += hi - lo
        col += cols
    if problem.returns_gathered:
        yield Holding(GATHERED_OUT, rank, (problem.m, problem.k), problem.dtype, FACTORS[0], (0, 0))
