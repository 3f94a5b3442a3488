"""Whether a schedule of counted blocks is right for all counts: whether operations keep rows in their place of a block.

What is proven of whole blocks holds of the filled rows of any call: an operation reads a filled row where it writes
one, and in no other. For that, the rows that it pairs must be the same row of the same block, `(source, target, row)`.
A buffer that is not counted holds rows where the schedule says; they are paired with rows of one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.plan import COPY_ENGINE, LIBRARY, Plan
from overweave.ir.schedule import (
    Buffer,
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
from overweave.ir.verify.verdict import Findings

Pair = tuple[Region, Region]


def check_counted(schedule: Schedule, findings: Findings) -> None:
    """Adds a refusal for what would mix rows of blocks that are filled in part. The form of the schedule is sound."""
    buffers, size = {each.name: each for each in schedule.buffers}, schedule.world_size
    counted = {each.name for each in schedule.buffers if each.counted}
    for buffer in (buffers[name] for name in sorted(counted)):
        if buffer.rows % size or buffer.blocks is not None:
            findings.add("form", None, f"the {buffer.rows} rows of buffer {buffer.name} are no {size} whole blocks")
            return
    sent: dict[tuple[str, int, int], Region] = {}  # by label, source and target
    for operation in schedule.operations if counted else ():
        touched = [region for region in (*operation.reads, *operation.writes) if region.buffer in counted]
        if isinstance(operation, Collective) and touched:
            pairs = list(zip(operation.ranks, operation.sources, strict=False))
            sent |= {(operation.label, operation.rank, to): region for to, region in pairs}
        if touched and (said := _unpaired(operation)):
            findings.add("form", operation, said, touched[0])
            return
    for operation in schedule.operations if counted else ():
        for one, other in _pairs(operation, sent):
            if isinstance(operation, Collective) and (one.buffer in counted) != (other.buffer in counted):
                findings.add(
                    "form", operation, "a collective has filled rows at one end, and whole blocks at the other"
                )
            elif said := _mixes(one, other, buffers, size):
                findings.add("form", operation, said, other)


def _unpaired(operation: Operation) -> str:
    """Why an operation has no pairs of rows that correspond."""
    if isinstance(operation, Compute):
        plain = not (operation.addends or operation.copies or operation.scales)
        return "" if plain else "a matmul with addends, copies or scales does not know which rows are filled"
    if isinstance(operation, Collective) and operation.function == "all_to_all":
        return ""
    if isinstance(operation, Reduce) and len(operation.operands) == 1:  # it moves, and rounds
        return ""
    is_move = isinstance(operation, Put | Get | Copy) and not isinstance(operation, ReducePut)
    return "" if is_move else f"a {type(operation).__name__} does not know which rows are filled"


def _pairs(operation: Operation, sent: dict[tuple[str, int, int], Region]) -> Iterator[Pair]:
    if isinstance(operation, Compute):
        yield from zip(operation.a, operation.out, strict=True)
    elif isinstance(operation, Put | Get | Copy):
        yield from zip(operation.sources, operation.destinations, strict=True)
    elif isinstance(operation, Reduce):
        yield from zip(operation.operands, (operation.out,), strict=True)
    elif isinstance(operation, Collective):
        for source, region in zip(operation.ranks, operation.destinations, strict=False):
            if (operation.label, source, operation.rank) in sent:
                yield sent[operation.label, source, operation.rank], region


def _mixes(one: Region, other: Region, buffers: dict[str, Buffer], size: int) -> str:
    """Why rows that correspond are not the same row of the same block; empty if they are."""
    counted = [region for region in (one, other) if buffers[region.buffer].counted]
    if not counted or one.is_empty:
        return ""
    blocks = {region: buffers[region.buffer].rows // size for region in counted}
    straddles = [region for region, block in blocks.items() if region.rows[0] // block != (region.rows[1] - 1) // block]
    if len(counted) == 2 and (buffers[one.buffer].counted, one.rank) == (buffers[other.buffer].counted, other.rank):
        return "" if one.rows == other.rows and len(set(blocks.values())) == 1 else f"{one} holds other rows of blocks"
    if straddles:
        return f"{straddles[0]} is of several blocks, whose filled rows lie elsewhere beside it"
    if len(counted) == 2 and _cell(one, buffers, size) != _cell(other, buffers, size):
        return f"{one} holds other rows of a block, or those of another block"
    return ""


def _cell(region: Region, buffers: dict[str, Buffer], size: int) -> tuple[int, int, int]:
    """Source, target and row of the block's row with which a region begins."""
    block, row = divmod(region.rows[0], buffers[region.buffer].rows // size)
    ends = (region.rank, block) if buffers[region.buffer].counted == "sent" else (block, region.rank)
    return (*ends, row)


def check_counted_engines(plan: Plan, findings: Findings) -> None:
    """What touches counted rows is the library's or the copy engine's: kernels have addresses of whole blocks."""
    counted = {each.name for each in plan.schedule.buffers if each.counted}
    for operation in plan.schedule.operations if counted else ():
        engine = plan.realization.engine_by_queue.get(operation.queue)
        touched = [region for region in (*operation.reads, *operation.writes) if region.buffer in counted]
        if touched and engine not in (LIBRARY, COPY_ENGINE):
            said = f"a {engine} knows whole blocks alone, and this buffer is filled in part"
            findings.add("engine", operation, said, touched[0])
