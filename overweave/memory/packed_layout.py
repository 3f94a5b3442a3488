"""Where packed messages lie: the same for every rank and device.

A space has two halves, which calls use by turns, as their epoch is odd or even; a half, a part for the messages of each
rank. Parts are as large as the plan of the call needs, halves as large as the space has room for.
"""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.plan import MESSAGE_BYTES, PACKED_KERNEL, Plan, messages_of
from overweave.ir.schedule import Reduce
from overweave.memory.layout import ALIGNMENT_BYTES

HALVES = 2
SMALLEST_HALF_BYTES = 8 << 20


class PackedLayout(Struct, frozen=True):
    """What one plan's calls need of a space. messages: from each rank to each."""

    messages: int
    part_bytes: int
    half_bytes: int


def lay_out_packed(plan: Plan) -> PackedLayout:
    """The largest product that a packed kernel of the plan sums, as messages."""
    sums = (
        operation.out.shape
        for operation in plan.schedule.operations
        if isinstance(operation, Reduce) and plan.realization.engine_of(operation.queue) == PACKED_KERNEL
    )
    elements = max((rows * cols for rows, cols in sums), default=0)
    messages = messages_of(elements, plan.realization.dtype)
    part_bytes = -(-messages * MESSAGE_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return PackedLayout(messages, part_bytes, plan.schedule.world_size * part_bytes)
