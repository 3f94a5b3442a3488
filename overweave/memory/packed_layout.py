"""The layout of packed messages (LL protocol): the same for every rank and device.

A space has two halves, used by calls of odd and of even epoch. A half has a part for the messages of each sending rank,
and for a two-shot all-reduce a second one for its sums. A part is as large as the plan of the call needs, a half as
large as the space has room for.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.plan import INT32_BYTES, MESSAGE_BYTES, MESSAGE_DATA_BYTES, PACKED_KERNEL, PackedConfig, Plan
from overweave.ir.schedule import Buffer, Copy, Operation, Put, Reduce
from overweave.ir.shards import shard_rows
from overweave.memory.layout import aligned

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
    lo, hi = shard_rows(whole.rows, world_size, 0)
    return hi - lo


def _message_count(words: int) -> int:
    return -(-words // DATA_WORDS)
