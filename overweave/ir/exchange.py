"""What a packed queue exchanges, told from its operations: which of the packed kernels runs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from overweave.ir.plan import PackedExchange
from overweave.ir.schedule import Buffer, Copy, Operation, Reduce


def exchange_of(members: Collection[Operation], buffers: Mapping[str, Buffer]) -> PackedExchange:
    """members: the operations of all ranks in the queue. Whether they do it rightly is for verify to say.

    What came as it is, is moved out of its messages. Sums of whole partials are made by everybody, for itself.
    """
    sums = [each for each in members if isinstance(each, Reduce)]
    is_moved = any(isinstance(each, Copy) and each.sources for each in members)
    if is_moved:
        return "two_shot" if sums else "gather"
    is_everybodys = len({each.rank for each in sums}) == len({each.rank for each in members})
    return "one_shot" if is_everybodys and all(_is_whole(each, buffers) for each in sums) else "scatter"


def _is_whole(total: Reduce, buffers: Mapping[str, Buffer]) -> bool:
    own = [part for part in total.operands if part.rank == total.rank and buffers[part.buffer].home == "local"]
    return any(part.shape == (buffers[part.buffer].rows, buffers[part.buffer].cols) for part in own)
