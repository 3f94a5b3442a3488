"""Arguments of an author's fused kernel in a call of a plan: the author's own, and those that the compiler added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from overweave.compiler.emit.emit import PARAMETERS, PUSH_PARAMETERS, STORE_PLACES
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import AUTHOR_KERNEL
from overweave.ir.schedule import Apply, Operation, Put
from overweave.ir.tensors import all_to_all_source
from overweave.ir.tile_order import APPLY, COPY, PART, TileRow
from overweave.memory.lower import slice_targets
from overweave.runtime.authored import AuthoredKernel
from overweave.runtime.kernel_calls.bind import Binding
from overweave.runtime.kernel_calls.call import table_tensor


class AuthorCall(NamedTuple):
    """Arguments by name, and the number of tiles."""

    arguments: dict[str, Any]
    tiles: int


def author_call(
    kernel: AuthoredKernel, author_arguments: Mapping[str, Any], binding: Binding, queue: str
) -> AuthorCall | None:
    """Return the arguments of a queue's kernel; None if it has no tiles on this rank. author_arguments: by name."""
    plan, rank, offsets = binding.plan, binding.rank, binding.addresses.layout.buffers
    rows = plan.tile_order(rank, queue).rows
    tiles, parts = count_rows(rows, APPLY), count_rows(rows, PART)
    if not tiles:
        return None
    arguments = kernel.arguments(
        author_arguments, lambda name: binding.workspace_buffer(name) if name in offsets else None
    )
    signals, words, limits, world_size = binding.protocol
    arrays = [table_tensor(rows, binding.workspace.device), binding.claims(AUTHOR_KERNEL), signals, words, limits]
    arguments |= dict(zip(PARAMETERS, (*arrays, tiles, parts, world_size), strict=True))
    if any(isinstance(one, Put) and one.queue == queue for one in plan.schedule.operations):
        targets = binding.table(slice_targets(binding.addresses, rank, queue))
        arguments |= dict(zip(PUSH_PARAMETERS, (targets, count_rows(rows, COPY)), strict=True))
    if kernel.peer_store is not None:
        operations = (one for one in plan.schedule.of_rank(rank) if one.queue == queue)
        arguments[STORE_PLACES] = binding.table(_peer_store_rows(operations, kernel, binding))
    return AuthorCall(arguments, tiles)


def count_rows(rows: Iterable[TileRow], kind: int) -> int:
    """Return how many rows of a tile table are of a kind."""
    return [row.kind for row in rows].count(kind)


def _peer_store_rows(operations: Iterable[Operation], kernel: AuthoredKernel, binding: Binding) -> list[list[int]]:
    """Return one row per operation of a queue whose tiles store at peers: number of targets, then two words for each.

    The two: offset of the target from this rank's buffer, in elements; address of its rank's signals, 0 if none is
    notified there.
    """
    assert kernel.peer_store is not None
    plan, bases, offsets = binding.plan, binding.heap.addresses, binding.addresses.layout.buffers
    own = bases[binding.rank] + offsets[kernel.buffers[kernel.peer_store.parameter][1]]
    itemsize = ITEMSIZE_BYTES[plan.dtype_of(kernel.buffers[kernel.peer_store.parameter][1])]
    rows: list[list[int]] = []
    for apply in operations:
        row: list[int] = []
        notified_ranks = {notify.rank for notify in apply.notifies}
        for buffer, rank, row_shift in _store_targets(apply, kernel) if isinstance(apply, Apply) else ():
            distance = (bases[rank] + offsets[buffer] - own) // itemsize
            row += [
                distance + row_shift * plan.schedule.buffer(buffer).cols,
                bases[rank] if rank in notified_ranks else 0,
            ]
        rows.append([len(row) // 2, *row])
    return [row + [0] * (1 + 2 * plan.schedule.world_size - len(row)) for row in rows]


def _store_targets(apply: Apply, kernel: AuthoredKernel) -> list[tuple[str, int, int]]:
    """Return (buffer, rank, row shift) of each place where the tiles of an Apply store the tensor that goes to peers.

    Row shift: first row of the region there, minus first row of the Apply's first tile.
    """
    assert kernel.peer_store is not None
    regions = [one.region for one in apply.makes if all_to_all_source(one.tensor) == kernel.peer_store.tensor]
    lowest: dict[tuple[str, int], int] = {}
    for region in regions:
        key = (region.buffer, region.rank)
        lowest[key] = min(region.rows[0], lowest.get(key, region.rows[0]))
    first = next(islice(kernel.space.coordinates(), apply.tiles[0][0], None))
    row, _ = kernel.space.touched(kernel.peer_store.dims[0], first)
    return [(buffer, rank, low - row) for (buffer, rank), low in lowest.items()]
