"""Library collectives of permuted blocks: each is one call on the stretches of memory that its blocks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overweave.errors import ScheduleError
from overweave.ir.blocks import Span, image_of
from overweave.ir.schedule import Buffer, Collective, Operation, Region
from overweave.memory.group import Group
from overweave.memory.subgroups import part_of
from overweave.runtime.library.calls import MOVES, Call, Tensors

Stretch = tuple[str, Span]  # elements of a buffer's memory


def is_permuted(operation: Operation, buffers: Mapping[str, Buffer]) -> bool:
    """Whether an operation reads or writes a buffer whose blocks are permuted."""
    return any(buffers[part.buffer].blocks is not None for part in (*operation.reads, *operation.writes))


def stretch_call(operation: Operation, buffers: Mapping[str, Buffer], group: Group, most_sms: int = 0) -> Call:
    """The operation on this rank, given the memory of all buffers. Raises ScheduleError for one that is no collective:
    a library of matrices finds none in permuted blocks.

    most_sms: that its kernel may take; 0: as many as the library likes.
    """
    if not isinstance(operation, Collective):
        found = f"the library cannot address the permuted blocks of {operation.name}"
        raise ScheduleError(f"run {operation.name} by the library", found, "Run it on CPU tensors, at depth `library`")
    source, target = _stretch(operation.sources, buffers), _stretch(operation.destinations, buffers)
    move = MOVES[operation.function]
    run = move(part_of(group, operation.ranks, most_sms).process_group)

    def call(tensors: Tensors) -> None:
        parts = [tensors[name].view(-1)[slice(*span)] for name, span in (target, source)]
        work = run(*parts)
        if work is not None:
            work.wait()  # on a GPU, in stream order

    return call


def _stretch(parts: Sequence[Region], buffers: Mapping[str, Buffer]) -> Stretch:
    """All that a collective sends, or gets: of members one behind the other, as verify knows."""
    buffer = buffers[parts[0].buffer]
    cut = tuple((part.rows, part.cols) for part in parts)
    span = image_of(buffer.blocks, (buffer.rows, buffer.cols), cut, by_cells=True).stretch
    assert span is not None, "verify refuses a collective of anything else"
    return buffer.name, span
