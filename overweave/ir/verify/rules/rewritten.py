"""Which elements of buffers are written more than once in a call."""

from __future__ import annotations

from collections.abc import Iterable

from overweave.ir.schedule import Collective, Compute, Operation, Reduce, ReducePut, Region, Retire


def rewritten_buffers(operations: Iterable[Operation]) -> set[tuple[str, int]]:
    """Return the instances of buffers (name, rank) that some operation adds to, or retires a part of."""
    changed: list[Region] = []
    for operation in operations:
        if isinstance(operation, ReducePut):
            changed += operation.destinations
        elif isinstance(operation, Retire):
            changed += operation.regions
        elif isinstance(operation, Compute) and operation.accumulate:
            changed += operation.out
        elif isinstance(operation, Reduce) and operation.out in operation.operands:
            changed.append(operation.out)
        elif isinstance(operation, Collective) and is_in_place(operation):
            changed += operation.destinations
    return {(region.buffer, region.rank) for region in changed}


def is_in_place(part: Collective) -> bool:
    """Whether it sums where its operands lie."""
    return part.function == "all_reduce" and part.sources == part.destinations
