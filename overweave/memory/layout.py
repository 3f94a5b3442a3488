"""Where buffers, signals and packed messages lie: the same offsets on every rank and device.

Packed messages (LL protocol): a space has two halves, used by calls of odd and of even epoch. A half has a part for the
messages of each sending rank, and for a two-shot all-reduce a second one for its sums. A part is as large as the plan
of the call needs, a half as large as the space has room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.blocks import stored_shape
from overweave.ir.dtype import Dtype
from overweave.ir.plan import (
    INT32_BYTES,
    MESSAGE_BYTES,
    MESSAGE_DATA_BYTES,
    PACKED_KERNEL,
    SIGNAL_CAPACITY,
    PackedConfig,
    Plan,
)
from overweave.ir.schedule import LOCAL, SYMMETRIC, Buffer, Copy, Operation, Put, Reduce, Schedule
from overweave.ir.shards import shard_rows

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


SMALLEST_HALF_BYTES = 8 << 20
DATA_WORDS = MESSAGE_DATA_BYTES // INT32_BYTES


class Stretches(NamedTuple):
    """How programs divide what a rank sends to another. span: words of each program, pushed in `turns` loop steps."""

    span: int
    programs: int
    turns: int


class PackedLayout(Struct, frozen=True):
    """What one plan's calls need of a space. source, out: the buffers that a kernel pushes from and stores to.

    words: int32 words of the matrix that is summed or gathered. shard_words: of what a rank sends to another.
    row_words: of a row, if a program takes whole rows; else 0.
    """

    part_bytes: int
    half_bytes: int
    source: str
    out: str
    words: int
    shard_words: int
    row_words: int

    def stretches(self, block: int) -> Stretches:
        """Divide a shard among programs. block: messages that a program has in flight at a time."""
        span = self.row_words or DATA_WORDS * block
        return Stretches(span, -(-self.shard_words // span), -(-_message_count(span) // block))


def lay_out_packed(plan: Plan) -> PackedLayout:
    """Return the layout of a plan's messages, all zero if it has no packed operations. Raises ScheduleError."""
    config = plan.realization.packed
    engines = {one.queue: one.engine for one in plan.realization.engines}
    members = [operation for operation in plan.schedule.operations if engines[operation.queue] == PACKED_KERNEL]
    if not members:
        return PackedLayout(0, 0, "", "", 0, 0, 0)
    if config is None:
        raise ScheduleError(f"lay out {plan.name}", "its packed kernel has no configuration", "Give it a PackedConfig")
    source, out = _source_and_out(members, config)
    whole = plan.schedule.buffer(out if config.exchange == "gather" else source)
    row_bytes = whole.cols * whole.itemsize_bytes(plan.realization.dtype)
    rows = whole.rows if config.exchange == "one_shot" else _shard_size(whole, plan.schedule.world_size)
    row_words = row_bytes // INT32_BYTES if plan.problem.of_rows else 0
    shard_words = rows * row_bytes // INT32_BYTES
    messages = rows * _message_count(row_words) if row_words else _message_count(shard_words)
    part_bytes = aligned(messages * MESSAGE_BYTES)
    return PackedLayout(
        part_bytes=part_bytes,
        half_bytes=config.shots * plan.schedule.world_size * part_bytes,
        source=source,
        out=out,
        words=whole.rows * row_bytes // INT32_BYTES,
        shard_words=shard_words,
        row_words=row_words,
    )


def _source_and_out(members: list[Operation], config: PackedConfig) -> tuple[str, str]:
    """Return the buffers that the kernel pushes from and stores its results in. A two-shot stores where it gathers."""
    sums = [operation for operation in members if isinstance(operation, Reduce)]
    moved = [part.buffer for operation in members if isinstance(operation, Copy) for part in operation.destinations]
    if config.exchange == "gather":
        return next(
            part.buffer for operation in members if isinstance(operation, Put) for part in operation.sources
        ), moved[0]
    out = moved[0] if config.exchange == "two_shot" else sums[0].out.buffer
    return sums[0].operands[sums[0].rank].buffer, out


def _shard_size(whole: Buffer, world_size: int) -> int:
    """Return the rows of the largest shard."""
    lo, hi = shard_rows(whole.rows, world_size, 0)
    return hi - lo


def _message_count(words: int) -> int:
    return -(-words // DATA_WORDS)
