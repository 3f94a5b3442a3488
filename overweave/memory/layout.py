"""Where a Schedule's buffers and signals lie in one slot of a workspace: the same offsets on every rank and device."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.blocks import stored_shape
from overweave.ir.dtype import Dtype
from overweave.ir.plan import SIGNAL_CAPACITY
from overweave.ir.schedule import LOCAL, SYMMETRIC, Schedule

ALIGNMENT_BYTES = 256
# One word per 128-byte line: waiters poll their own line, and no writer shares a word's neighbourhood with another.
# SOURCE: vLLM #2760 (flags packed in one word are not morally strong), FACTS of the PTX memory model.
SIGNAL_STRIDE_WORDS = 32
SIGNAL_STRIDE_BYTES = 4 * SIGNAL_STRIDE_WORDS
REPORT_WORDS = 8  # int32: a kernel's report of a wait that timed out (memory/device/signals.py)


class SlotLayout(Struct, frozen=True):
    """Byte offsets inside a slot. Signals come first, numbered through all pads in the schedule's order.

    buffers: symmetric or local buffer -> its offset, row-major as `stored_shape` says.
    pads: pad -> number of its first signal.
    """

    signals: int
    pads: dict[str, int]
    buffers: dict[str, int]
    size_bytes: int

    def signal(self, pad: str, index: int) -> int:
        """Return the number of a signal among all signals of the slot."""
        return self.pads[pad] + index

    def signal_offset(self, pad: str, index: int) -> int:
        """Return the byte offset of a signal's word in the slot."""
        return self.signal(pad, index) * SIGNAL_STRIDE_BYTES


def lay_out(schedule: Schedule, dtype: Dtype) -> SlotLayout:
    """Lay out signals, then the symmetric and local buffers, each aligned for TMA. Raises ScheduleError."""
    allocated = (buffer for buffer in schedule.buffers if buffer.home in (SYMMETRIC, LOCAL))
    sizes = {buffer.name: prod(stored_shape(buffer)) * buffer.itemsize_bytes(dtype) for buffer in allocated}
    return lay_out_slot(schedule.name, {pad.name: pad.size for pad in schedule.pads}, sizes)


def lay_out_slot(name: str, pads: Mapping[str, int], sizes_bytes: Mapping[str, int]) -> SlotLayout:
    """Lay out a slot. pads: name -> signals. sizes_bytes: by buffer. Raises ScheduleError for too many signals."""
    first_signals: dict[str, int] = {}
    signals = 0
    for pad, size in pads.items():
        first_signals[pad] = signals
        signals += size
    if signals > SIGNAL_CAPACITY:
        found = f"{signals} signals, a slot holds {SIGNAL_CAPACITY}"
        raise ScheduleError(f"lay out {name}", found, "Use fewer pieces, or larger tiles")
    buffers: dict[str, int] = {}
    offset = SIGNAL_CAPACITY * SIGNAL_STRIDE_BYTES
    for buffer, size_bytes in sizes_bytes.items():
        buffers[buffer] = offset
        offset = aligned(offset + size_bytes)
    return SlotLayout(signals, first_signals, buffers, offset)


def aligned(size_bytes: int) -> int:
    """Round up to where a buffer may begin."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
