"""Where packed messages lie: the same for every rank and device.

A space has two halves, which calls use by turns, as their epoch is odd or even; a half, a part for the messages of each
rank, and where sums are shared a second one for those. Parts are as large as the plan of the call needs, halves as
large as the space has room for.
"""

from __future__ import annotations

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.plan import MESSAGE_BYTES, PACKED_KERNEL, Plan, messages_of
from overweave.ir.schedule import Reduce
from overweave.ir.words import INT32_BYTES
from overweave.memory.layout import ALIGNMENT_BYTES

HALVES = 2
SMALLEST_HALF_BYTES = 8 << 20


class PackedLayout(Struct, frozen=True):
    """What one plan's calls need of a space. messages: from each rank to each, in each shot.

    partial, out: the buffers of a rank's partial and of the result, both of a shape and dtype. words: of either.
    sum_words: of the largest sum.
    """

    messages: int
    part_bytes: int
    half_bytes: int
    partial: str
    out: str
    shape: tuple[int, int]
    dtype: Dtype
    words: int
    sum_words: int


def lay_out_packed(plan: Plan) -> PackedLayout:
    """The largest product that a packed kernel of the plan sums, as messages, and the partial that it lies in."""
    config = plan.realization.packed
    sums = [
        operation
        for operation in plan.schedule.operations
        if isinstance(operation, Reduce) and plan.realization.engine_of(operation.queue) == PACKED_KERNEL
    ]
    if not sums:
        return PackedLayout(0, 0, 0, "", "", (0, 0), plan.realization.dtype, 0, 0)
    if config is None:
        raise ScheduleError(f"lay out {plan.name}", "its packed kernel has no configuration", "Give it a PackedConfig")
    elements = max(one.out.shape[0] * one.out.shape[1] for one in sums)
    partial = plan.schedule.buffer(sums[0].operands[sums[0].rank].buffer)
    dtype = plan.dtype_of(partial.name)
    messages = messages_of(elements, dtype)
    part_bytes = -(-messages * MESSAGE_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    words = partial.rows * partial.cols * ITEMSIZE_BYTES[dtype] // INT32_BYTES
    return PackedLayout(
        messages=messages,
        part_bytes=part_bytes,
        half_bytes=config.shots * plan.schedule.world_size * part_bytes,
        partial=partial.name,
        out=sums[0].out.buffer,
        shape=(partial.rows, partial.cols),
        dtype=dtype,
        words=words,
        sum_words=elements * ITEMSIZE_BYTES[dtype] // INT32_BYTES,
    )
