"""Whether the table of a copy kernel moves what its Puts say, in words of 16 bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from overweave.ir.dtype import SUM_DTYPE, Dtype
from overweave.ir.kernel_limits import COPY_WORD_BYTES
from overweave.ir.schedule import INPUT, LIMIT, Buffer, Copy, Put, ReducePut, Region
from overweave.ir.shards import tile_parts
from overweave.ir.tile_order import COPY, OWN_SHARD, WORKSPACE, TileRow
from overweave.ir.verify.rules.verdict import Findings

CopiedRows = tuple[int, int, int, int, int]  # row, row_end, col, source, source_row


def check_copy(
    move: Put | Copy, rows: list[TileRow], buffers: Mapping[str, Buffer], dtype: Dtype, findings: Findings
) -> None:
    """Add a refusal for every difference between the kernel's tiles and the operation."""
    if any(row.kind != COPY or row.width for row in rows):
        findings.add("lowering", move, "a tile is of another kernel")
    if len(move.sources) > 1:
        findings.add("lowering", move, f"the kernel moves one rectangle, not {len(move.sources)}")
        return
    if isinstance(move, ReducePut):
        for region in move.destinations:
            if (buffers[region.buffer].dtype or dtype) != SUM_DTYPE:
                findings.add("lowering", move, f"the kernel adds in {SUM_DTYPE}", region)
    for region in (*move.sources, *move.destinations):
        _check_region(move, region, buffers[region.buffer], dtype, findings)
    expected = list(_tiles(move, buffers))
    actual = [(row.row, row.row_end, row.col, row.source, row.source_row) for row in rows]
    if sorted(actual) != sorted(expected):
        message = (
            f"the table moves {len(actual)} tiles {sorted(actual)[:2]}, not {len(expected)} {sorted(expected)[:2]}"
        )
        findings.add("lowering", move, message)


def _check_region(move: Put | Copy, region: Region, buffer: Buffer, dtype: Dtype, findings: Findings) -> None:
    """Check that a region is whole rows, in words that the kernel can address."""
    row_bytes = buffer.cols * buffer.itemsize_bytes(dtype)
    if region.cols != (0, buffer.cols):
        findings.add("lowering", move, "the kernel moves whole rows", region)
    elif row_bytes % COPY_WORD_BYTES:
        message = f"rows are {row_bytes} bytes; the kernel moves words of {COPY_WORD_BYTES}"
        findings.add("alignment", move, message, region)
    elif -(-region.shape[0] // move.instances) * row_bytes > LIMIT:  # places are of 64 bits, what a tile moves of 32
        findings.add("width", move, "a tile's words need more than 31 bits", region)


def _tiles(move: Put | Copy, buffers: Mapping[str, Buffer]) -> Iterator[CopiedRows]:
    """Yield the tiles of a Put or a Copy."""
    if not move.sources:
        yield 0, 0, 0, WORKSPACE, 0
    for source, target in zip(move.sources, move.destinations, strict=True):
        place = OWN_SHARD if buffers[source.buffer].home == INPUT else WORKSPACE
        for lo, hi in tile_parts(target.rows, move.instances):
            yield lo, hi, target.cols[0], place, lo + source.rows[0] - target.rows[0]
