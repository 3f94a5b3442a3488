"""NCCL collectives of permuted blocks: each is one call on contiguous ranges of memory."""

from __future__ import annotations

from collections.abc import Mapping

from overweave.errors import ScheduleError
from overweave.ir.library_call import call_sides, library_obstacle
from overweave.ir.schedule import Buffer, Collective, Operation
from overweave.memory.group import Group
from overweave.memory.subgroups import subgroup
from overweave.runtime.library.calls import MOVES, BoundLibraryCall, TensorsByName
from overweave.runtime.library.library import as_movable


def permuted_collective_call(
    operation: Operation, buffers: Mapping[str, Buffer], group: Group, most_sms: int = 0
) -> BoundLibraryCall:
    """Bind a collective of permuted blocks; the result takes the tensors of all buffers. Raises ScheduleError for an
    operation that is not one call on contiguous ranges; verify refuses it, too.

    most_sms: SMs that its kernel may take; 0: no limit.
    """
    sides = call_sides(operation, buffers) if isinstance(operation, Collective) else ""
    if not isinstance(operation, Collective) or isinstance(sides, str):
        found = library_obstacle(operation, buffers)
        raise ScheduleError(f"run {operation.name} by the library", found, "Run it on CPU tensors, at depth `library`")
    source, target = sides
    adds = operation.function in ("all_reduce", "reduce_scatter")
    run = MOVES[operation.function](subgroup(group, operation.ranks, most_sms).process_group)

    def call(tensors: TensorsByName) -> None:
        parts = [tensors[side.buffer].view(-1)[slice(*side.span)] for side in (target, source)]
        work = run(*(parts if adds else map(as_movable, parts)))
        if work is not None:
            work.wait()  # on a GPU, in stream order

    return call
