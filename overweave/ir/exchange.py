"""How operations exchange rows: by which packed kernel, and whether at other GPUs' memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from overweave.ir.plan import PackedExchange
from overweave.ir.schedule import Buffer, Collective, Copy, Operation, Reduce, Schedule


def packed_exchange(members: Collection[Operation], buffers: Mapping[str, Buffer]) -> PackedExchange:
    """Return the kind of packed kernel that runs `members`, the operations of all ranks in the queue. It looks at the
    kinds of operations only; `verify/engines/packed.py` checks what they do."""
    sums = [each for each in members if isinstance(each, Reduce)]
    if any(isinstance(each, Copy) and each.sources for each in members):  # moves gathered rows out of messages
        return "two_shot" if sums else "gather"
    every_rank_adds = len({each.rank for each in sums}) == len({each.rank for each in members})
    return "one_shot" if every_rank_adds and all(_is_whole(each, buffers) for each in sums) else "scatter"


def _is_whole(total: Reduce, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a Reduce adds all of its rank's local partial sum, not a shard of it."""
    own = [(part, buffers[part.buffer]) for part in total.operands if part.rank == total.rank]
    return any(buffer.home == "local" and part.shape == (buffer.rows, buffer.cols) for part, buffer in own)


NO_REACH = "do not reach each other's memory, where it reads or writes rows"


def addresses_peers(schedule: Schedule) -> bool:
    """Whether an operation other than an NCCL collective reads or writes on another rank, or any notifies one."""
    return any(_reached(operation) for operation in schedule.operations)


def crossing_operation(schedule: Schedule, islands: Sequence[Collection[int]]) -> str:
    """Return the first operation that reads, writes or notifies on a rank of another island itself, by its name; "" if
    none does."""
    own = {rank: frozenset(island) for island in islands for rank in island} if len(islands) > 1 else {}
    crossing = (each.name for each in schedule.operations if own and not _reached(each) <= own[each.rank])
    return next(crossing, "")


def reached_by(schedule: Schedule, rank: int) -> set[int]:
    """Return the other ranks whose memory the operations of a rank read, write or notify themselves."""
    return {peer for operation in schedule.of_rank(rank) for peer in _reached(operation)}


def _reached(operation: Operation) -> set[int]:
    """Return the other ranks that an operation notifies, reads or writes on itself."""
    touched = () if isinstance(operation, Collective) else (*operation.reads, *operation.writes)
    told = {notify.rank for notify in operation.notifies}
    return {*told, *(region.rank for region in touched)} - {operation.rank}
