"""Whether a schedule of counted blocks is right for all counts: whether every row keeps its place of a block.

A call fills the first rows of each block, as many as its counts say; the others are never read. So a proof for whole
blocks holds of every call, if a row that one operation leaves out is left out by all others too: a row of a tensor that
a counted buffer holds at the start is in one *cell*, `(source, target, row)`. It may be stored in a counted buffer in
the same cell only. In other buffers it may lie anywhere, but is moved, added or multiplied row by row only, as the rows
of whole blocks are paired (`ir/counts.py`): a region of a counted buffer with the first rows of its partner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from overweave.ir.plan import COPY_ENGINE, LIBRARY, Plan
from overweave.ir.schedule import (
    OUTPUT,
    Collective,
    Compute,
    Copy,
    Get,
    Operation,
    Put,
    Reduce,
    ReducePut,
    Region,
    Schedule,
)
from overweave.ir.verify.rules.values import UNKNOWN, ZERO, RegionValue
from overweave.ir.verify.rules.verdict import Findings

Pair = tuple[Region, Region]
CountedRows = tuple[
    int, int, int
]  # rows `[lo, hi)`, and the cell of the first, whose successors are those of the others


class Cells:
    """The cells of counted buffers, and of the rows of tensors that these hold at the start.

    A cell is a number: those of a block follow one another, and so do the blocks that a rank receives. The buffers are
    whole blocks of one size.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.size = schedule.world_size
        # buffer -> `sent` or `received`
        self.sides = {each.name: each.counted for each in schedule.buffers if each.counted}
        rows = next((each.rows for each in schedule.buffers if each.counted), 0)
        self.block = rows // self.size
        self._spans: dict[str, list[CountedRows]] = {}  # tensor -> its rows with their cells
        for given in schedule.given if self.sides else ():
            if given.region.buffer in self.sides and not given.region.is_empty:
                first = given.row - given.region.rows[0]
                spans = ((first + lo, first + hi, cell) for lo, hi, cell in self.of_region(given.region))
                self._spans.setdefault(_rows_of(given.tensor), []).extend(spans)
        self.conflict = next((name for name, spans in self._spans.items() if not _merge_spans(spans)), None)

    def of_region(self, region: Region) -> Iterator[CountedRows]:
        """Yield the cells of rows of a counted buffer, as spans of consecutive cells."""
        (lo, hi), rank = region.rows, region.rank
        if self.sides[region.buffer] == "received":
            yield lo, hi, rank * self.size * self.block + lo
            return
        while lo < hi:
            target, row = divmod(lo, self.block)
            end = min(hi, (target + 1) * self.block)
            yield lo, end, (target * self.size + rank) * self.block + row
            lo = end

    def check_whole(self, operation: Operation, region: Region, value: RegionValue, findings: Findings) -> None:
        """Refuse an operation that needs all rows of a value if some may be missing."""
        if self._spans and any(_rows_of(piece.tensor) in self._spans for piece in value):
            message = "it needs all rows there, and a call fills as many as its counts say"
            findings.add("value", operation, message, region)

    def check_stored(self, operation: Operation, region: Region, value: RegionValue, findings: Findings) -> None:
        """Refuse a value whose rows are stored in other cells of a counted buffer than their own."""
        message = self._misplaced(region, value) if region.buffer in self.sides else ""
        if message:
            findings.add("value", operation, message, region)

    def _misplaced(self, region: Region, value: RegionValue) -> str:
        """Return why a region of a counted buffer must not take a value; "" if it may."""
        for piece in value:
            if piece.tensor in (UNKNOWN, ZERO):
                continue
            top = region.rows[0] + piece.lo_i
            part = Region(region.buffer, region.rank, (top, region.rows[0] + piece.hi_i), region.cols)
            for lo, hi, cell in self.of_region(part):
                row = piece.row + lo - top
                if not self._rows_match(_rows_of(piece.tensor), row, hi - lo, cell):
                    source, target, block_row = self._coordinates(cell)
                    place = f"row {block_row} of the block from rank {source} to rank {target}"
                    return f"{piece.tensor}[{row},{piece.col}] is no {place}: counts may fill one without the other"
        return ""

    def _rows_match(self, tensor: str, row: int, count: int, cell: int) -> bool:
        """Whether `count` rows of a tensor from `row` on are in consecutive cells from `cell` on."""
        spans = self._spans.get(tensor, [])
        while count > 0:
            index = bisect_right(spans, row, key=lambda span: span[0]) - 1
            if index < 0 or spans[index][1] <= row or spans[index][2] + row - spans[index][0] != cell:
                return False
            overlap = min(count, spans[index][1] - row)
            row, count, cell = row + overlap, count - overlap, cell + overlap
        return True

    def _coordinates(self, cell: int) -> tuple[int, int, int]:
        """Return source, target and row of a cell."""
        block, row = divmod(cell, self.block)
        return block % self.size, block // self.size, row


def _rows_of(tensor: str) -> str:
    """Return the name of the tensor whose rows those of a product are."""
    return tensor.partition("@")[0]


def _merge_spans(spans: list[CountedRows]) -> bool:
    """Sort and merge spans in place. Return whether no row is in two cells."""
    spans.sort()
    merged: list[CountedRows] = []
    for lo, hi, cell in spans:
        if not merged or lo > merged[-1][1]:
            merged.append((lo, hi, cell))
            continue
        first, end, first_cell = merged[-1]
        if cell - lo == first_cell - first:
            merged[-1] = (first, max(end, hi), first_cell)
        elif lo < end:
            return False
        else:
            merged.append((lo, hi, cell))
    spans[:] = merged
    return True


def check_counted(schedule: Schedule, findings: Findings) -> None:
    """Add a refusal for operations that would mix rows of partly filled blocks. The form of the schedule is sound.
    `coverage.py` checks which rows values are, and whether they land in their cells."""
    counted = {each.name: each for each in schedule.buffers if each.counted}
    if not counted:
        return
    _check_buffers(schedule, findings)
    if findings.refusals:
        return
    cells, sent = Cells(schedule), dict[tuple[str, int, int], Region]()  # by label, source and target
    if cells.conflict is not None:
        findings.add("form", None, f"a row of {cells.conflict} is given in two places of the blocks")
    for operation in schedule.operations:
        touched = [region for region in (*operation.reads, *operation.writes) if region.buffer in counted]
        if isinstance(operation, Collective) and touched:
            pairs = list(zip(operation.ranks, operation.sources, strict=False))
            sent |= {(operation.label, operation.rank, to): region for to, region in pairs}
        if touched and (message := _pairing_obstacle(operation)):
            findings.add("form", operation, message, touched[0])
            return
    for operation in schedule.operations:
        for one, other in _pairs(operation, sent):
            if isinstance(operation, Collective) and (one.buffer in counted) != (other.buffer in counted):
                findings.add(
                    "form", operation, "a collective has filled rows at one end, and whole blocks at the other"
                )
            elif message := _pair_mismatch(one, other, cells):
                findings.add("form", operation, message, other)


def _check_buffers(schedule: Schedule, findings: Findings) -> None:
    """Check that counted buffers have one block for each rank, all of one size, and that every output is counted."""
    size = schedule.world_size
    most = max((each.rows for each in schedule.buffers if each.counted and each.rows % size == 0), default=0)
    for buffer in schedule.buffers:
        if buffer.counted and (buffer.rows % size or buffer.blocks is not None):
            findings.add("form", None, f"the {buffer.rows} rows of buffer {buffer.name} are no {size} whole blocks")
        elif buffer.counted and buffer.rows != most:
            sizes = f"blocks of buffer {buffer.name} have {buffer.rows // size} rows, others {most // size}"
            findings.add("form", None, f"{sizes}: a call's counts are of blocks of one size")
        elif buffer.home == OUTPUT and not buffer.counted:
            message = f"output {buffer.name} is not counted, and of what a call does not fill it would hold anything"
            findings.add("form", None, message)


def _pairing_obstacle(operation: Operation) -> str:
    """Return why an operation has no pairs of corresponding rows; "" if it has."""
    if isinstance(operation, Compute) and len(operation.a) != len(operation.out):
        return "`a` and `out` are not cut alike, and their filled rows are paired part by part"
    if isinstance(operation, Compute):
        found = "a matmul with addends, copies or scales does not know which rows are filled"
        return found if operation.beside else ""
    if isinstance(operation, Collective) and operation.function == "all_to_all":
        return ""
    if isinstance(operation, Reduce) and len(operation.operands) == 1:  # it moves, and rounds
        return ""
    is_move = isinstance(operation, Put | Get | Copy) and not isinstance(operation, ReducePut)
    return "" if is_move else f"a {type(operation).__name__} does not know which rows are filled"


def _pairs(operation: Operation, sent: dict[tuple[str, int, int], Region]) -> Iterator[Pair]:
    """Yield the pairs of regions whose rows correspond. sent: (label, source, target) -> region of an all-to-all."""
    if isinstance(operation, Compute):
        yield from zip(operation.a, operation.out, strict=False)
    elif isinstance(operation, Put | Get | Copy):
        yield from zip(operation.sources, operation.destinations, strict=True)
    elif isinstance(operation, Reduce):
        yield from zip(operation.operands, (operation.out,), strict=False)
    elif isinstance(operation, Collective):
        for source, region in zip(operation.ranks, operation.destinations, strict=False):
            if (operation.label, source, operation.rank) in sent:
                yield sent[operation.label, source, operation.rank], region


def _pair_mismatch(one: Region, other: Region, cells: Cells) -> str:
    """Return why corresponding rows are not the same row of the same block; "" if they are."""
    counted = [region for region in (one, other) if region.buffer in cells.sides and not region.is_empty]
    if not counted:
        return ""
    if one.shape[0] != other.shape[0]:
        return f"{one} has other rows than {other}, and filled ones are paired"
    sides = [(cells.sides.get(region.buffer), region.rank) for region in (one, other)]
    if sides[0] == sides[1]:
        return "" if one.rows == other.rows else f"{one} holds other rows of blocks"
    block = cells.block
    straddles = [region for region in counted if region.rows[0] // block != (region.rows[1] - 1) // block]
    if straddles:
        return f"{straddles[0]} is of several blocks, whose filled rows lie elsewhere beside it"
    if len(counted) == 2 and next(cells.of_region(one))[2] != next(cells.of_region(other))[2]:
        return f"{one} holds other rows of a block, or those of another block"
    return ""


def check_counted_engines(plan: Plan, findings: Findings) -> None:
    """Check counted blocks against the problem's, and that only libraries and copy engines touch their rows. Kernels
    address whole blocks."""
    counted = {each.name: each for each in plan.schedule.buffers if each.counted}
    for buffer in counted.values():
        if not plan.problem.counted or buffer.rows != plan.problem.m:
            blocks = f"of {plan.problem.block} rows" if plan.problem.counted else "not counted"
            message = f"buffer {buffer.name} has counted blocks of {buffer.rows // plan.schedule.world_size} rows"
            findings.add("form", None, f"{message}; those of the problem are {blocks}")
    for operation in plan.schedule.operations if counted else ():
        engine = plan.realization.engine_by_queue.get(operation.queue)
        touched = [region for region in (*operation.reads, *operation.writes) if region.buffer in counted]
        if touched and engine not in (LIBRARY, COPY_ENGINE):
            message = f"a {engine} knows whole blocks alone, and this buffer is filled in part"
            findings.add("engine", operation, message, touched[0])
