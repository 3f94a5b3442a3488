"""Which buffers are added to: their elements are written more than once."""

from __future__ import annotations

from overweave.ir.schedule import Collective, Compute, Reduce, ReducePut, Region
from overweave.ir.verify.rules.graphs import Graph


def accumulated(graph: Graph) -> set[tuple[str, int]]:
    """The instances of buffers that some operation adds to."""
    added_to: list[Region] = []
    for operation in graph.operations:
        if isinstance(operation, ReducePut):
            added_to += operation.destinations
        elif isinstance(operation, Compute) and operation.accumulate:
            added_to += operation.out
        elif isinstance(operation, Reduce) and operation.out in operation.operands:
            added_to.append(operation.out)
        elif isinstance(operation, Collective) and is_in_place(operation):
            added_to += operation.destinations
    return {(region.buffer, region.rank) for region in added_to}


def is_in_place(part: Collective) -> bool:
    """Whether an all-reduce replaces what it reads."""
    return part.function == "all_reduce" and part.sources == part.destinations
