"""Which of the packed kernels runs a queue of LL-protocol messages (data and flag in one word), by its operations."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from overweave.ir.plan import PackedExchange
from overweave.ir.schedule import Buffer, Copy, Operation, Reduce


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
