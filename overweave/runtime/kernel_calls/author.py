"""What an author's fused kernel is given in a call of a plan: the author's own arguments, and those of the compiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from overweave.compiler.emit.emit import CARRYING, PARAMETERS, PLACES
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import AUTHOR_KERNEL
from overweave.ir.schedule import Apply, Operation, Put
from overweave.ir.tensors import exchanged
from overweave.ir.tile_order import APPLY, COPY, PART, TileRow
from overweave.memory.lower import slice_targets
from overweave.runtime.authored import AuthoredKernel
from overweave.runtime.kernel_calls.bind import Binding
from overweave.runtime.kernel_calls.call import table_tensor


class AuthorCall(NamedTuple):
    """Arguments by name, and how many tiles there are."""

    arguments: dict[str, Any]
    tiles: int


def author_call(
    kernel: AuthoredKernel, author_arguments: Mapping[str, Any], binding: Binding, queue: str
) -> AuthorCall | None:
    """The kernel of a queue; None if it has no tiles on this rank. author_arguments: the author's arguments."""
    plan, rank, offsets = binding.plan, binding.rank, binding.addresses.layout.buffers
    rows = plan.tile_order(rank, queue).rows
    tiles, parts = count_rows(rows, APPLY), count_rows(rows, PART)
    if not tiles:
        return None
    arguments = kernel.arguments(author_arguments, lambda name: binding.own(name) if name in offsets else None)
    signals, words, limits, world_size = binding.protocol
    arrays = [table_tensor(rows, binding.workspace.device), binding.claims(AUTHOR_KERNEL), signals, words, limits]
    arguments |= dict(zip(PARAMETERS, (*arrays, tiles, parts, world_size), strict=True))
    if any(isinstance(one, Put) and one.queue == queue for one in plan.schedule.operations):
        targets = binding.table(slice_targets(binding.addresses, rank, queue))
        arguments |= dict(zip(CARRYING, (targets, count_rows(rows, COPY)), strict=True))
    if kernel.peer_store is not None:
        operations = (one for one in plan.schedule.of_rank(rank) if one.queue == queue)
        arguments[PLACES] = binding.table(_peer_store_rows(operations, kernel, binding))
    return AuthorCall(arguments, tiles)


def count_rows(rows: Iterable[TileRow], kind: int) -> int:
    """How many rows of a table are of a kind."""
    return [row.kind for row in rows].count(kind)


def _peer_store_rows(operations: Iterable[Operation], kernel: AuthoredKernel, binding: Binding) -> list[list[int]]:
    """For tiles that store at peers, one row per operation of their queue: at how many places, then for each how many
    elements it lies behind the own buffer, and where its rank's signals are (0: nobody there waits).
    """
    assert kernel.peer_store is not None
    plan, bases, offsets = binding.plan, binding.heap.addresses, binding.addresses.layout.buffers
    own = bases[binding.rank] + offsets[kernel.buffers[kernel.peer_store.parameter][1]]
    itemsize = ITEMSIZE_BYTES[plan.dtype_of(kernel.buffers[kernel.peer_store.parameter][1])]
    rows: list[list[int]] = []
    for apply in operations:
        row: list[int] = []
        told = {notify.rank for notify in apply.notifies}
        for buffer, rank, further in _store_targets(apply, kernel) if isinstance(apply, Apply) else ():
            between = (bases[rank] + offsets[buffer] - own) // itemsize
            row += [between + further * plan.schedule.buffer(buffer).cols, bases[rank] if rank in told else 0]
        rows.append([len(row) // 2, *row])
    return [row + [0] * (1 + 2 * plan.schedule.world_size - len(row)) for row in rows]


def _store_targets(apply: Apply, kernel: AuthoredKernel) -> list[tuple[str, int, int]]:
    """Where the tiles of an Apply store the tensor that goes to peers, by buffer and rank, and how many rows further on
    than the own one: the first of its tiles has its first row."""
    assert kernel.peer_store is not None
    made = [one.region for one in apply.makes if exchanged(one.tensor) == kernel.peer_store.tensor]
    lowest: dict[tuple[str, int], int] = {}
    for region in made:
        key = (region.buffer, region.rank)
        lowest[key] = min(region.rows[0], lowest.get(key, region.rows[0]))
    first = next(islice(kernel.space.coordinates(), apply.tiles[0][0], None))
    row, _ = kernel.space.touched(kernel.peer_store.dims[0], first)
    return [(buffer, rank, low - row) for (buffer, rank), low in lowest.items()]
