"""Where packed messages lie: the same for every rank and device.

A space has two halves, which calls use by turns, as their epoch is odd or even; a half, a part for the messages of each
rank, and where sums are shared a second one for those. Parts are as large as the plan of the call needs, halves as
large as the space has room for.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.plan import MESSAGE_BYTES, MESSAGE_DATA_BYTES, PACKED_KERNEL, PackedConfig, Plan
from overweave.ir.schedule import Buffer, Copy, Operation, Put, Reduce
from overweave.ir.shards import shard_rows
from overweave.ir.words import INT32_BYTES
from overweave.memory.layout import aligned

SMALLEST_HALF_BYTES = 8 << 20
DATA_WORDS = MESSAGE_DATA_BYTES // INT32_BYTES


class Stretches(NamedTuple):
    """How what a rank sends to another is dealt to programs: so many words each, pushed in so many turns."""

    span: int
    programs: int
    turns: int


class PackedLayout(Struct, frozen=True):
    """What one plan's calls need of a space. source, out: the buffers that a kernel pushes from and stores to.

    words: of the matrix that is summed or gathered. shard_words: of what a rank sends to another. row_words: of a row,
    if programs have whole ones; else 0.
    """

    part_bytes: int
    half_bytes: int
    source: str
    out: str
    words: int
    shard_words: int
    row_words: int

    def stretches(self, block: int) -> Stretches:
        """block: messages that a program has under way at a time."""
        span = self.row_words or DATA_WORDS * block
        return Stretches(span, -(-self.shard_words // span), -(-_messages(span) // block))


def lay_out_packed(plan: Plan) -> PackedLayout:
    """Of a plan without packed operations, which has no rows, nothing."""
    config = plan.realization.packed
    engines = {one.queue: one.engine for one in plan.realization.engines}
    members = [each for each in plan.schedule.operations if engines[each.queue] == PACKED_KERNEL]
    if not members:
        return PackedLayout(0, 0, "", "", 0, 0, 0)
    if config is None:
        raise ScheduleError(f"lay out {plan.name}", "its packed kernel has no configuration", "Give it a PackedConfig")
    source, out = _ends(members, config)
    whole = plan.schedule.buffer(out if config.exchange == "gather" else source)
    row_bytes = whole.cols * whole.itemsize_bytes(plan.realization.dtype)
    rows = whole.rows if config.exchange == "one_shot" else _shard_size(whole, plan.schedule.world_size)
    row_words = row_bytes // INT32_BYTES if plan.problem.of_rows else 0
    shard_words = rows * row_bytes // INT32_BYTES
    messages = rows * _messages(row_words) if row_words else _messages(shard_words)
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


def _ends(members: list[Operation], config: PackedConfig) -> tuple[str, str]:
    """The buffers that the kernel takes from and leaves its results in. What is summed is, before it is shared."""
    sums = [each for each in members if isinstance(each, Reduce)]
    moved = [part.buffer for each in members if isinstance(each, Copy) for part in each.destinations]
    if config.exchange == "gather":
        return next(part.buffer for each in members if isinstance(each, Put) for part in each.sources), moved[0]
    out = moved[0] if config.exchange == "two_shot" else sums[0].out.buffer
    return sums[0].operands[sums[0].rank].buffer, out


def _shard_size(whole: Buffer, world_size: int) -> int:
    lo, hi = shard_rows(whole.rows, world_size, 0)
    return hi - lo


def _messages(words: int) -> int:
    return -(-words // DATA_WORDS)
