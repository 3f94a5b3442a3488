"""Whether tile tables store and move what their operations say: products, addends, and what copy kernels push."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from overweave.ir.blocks import block_cells
from overweave.ir.dtype import SUM_DTYPE, Dtype
from overweave.ir.plan import COPY_WORD_BYTES, MOST_PEERS
from overweave.ir.schedule import INPUT, LIMIT, OUTPUT, Buffer, Compute, Copy, Operation, Put, ReducePut, Region
from overweave.ir.shards import tile_parts
from overweave.ir.tile_order import COPY, MULTIPLY, NO_ADDENDS, OWN_SHARD, WORKSPACE, TileRow, store_target
from overweave.ir.verify.rules.verdict import Findings


def check_stores(operation: Operation, rows: list[TileRow], world_size: int, findings: Findings) -> None:
    """Check the rank where tiles store. Only a Compute stores at peers: on one rank, or, a sum of one addend, on
    all."""
    if not isinstance(operation, Compute):
        if any(row.to for row in rows):
            findings.add("lowering", operation, "a tile stores at a peer, but multiplies nothing")
        return
    to = store_target(operation, world_size) if operation.out else 0
    if to is None or (to < 0 and len(operation.addends) != 1):
        message = "tiles store a product at one rank, a sum of one addend at one or at every rank"
        findings.add("lowering", operation, f"{message}, not at {sorted(operation.stored_at)}")
    elif to and world_size - 1 > MOST_PEERS:
        findings.add("lowering", operation, f"tiles store at {MOST_PEERS} peers at most, not at {world_size - 1}")
    elif to > 0 and any(row.weight or row.into for row in rows):
        findings.add("lowering", operation, "a tile stores at a peer what is not its kernel's first output")
    elif any(row.to != to for row in rows):
        findings.add("lowering", operation, "a tile stores its result at another rank")


# Whether the tiles of a product whose blocks are permuted store each block in its cell, and multiply what it holds.

_FIELDS = ("kind", "row", "row_end", "col", "source", "source_row", "width", "shift")


def check_block_stores(
    compute: Compute, rows: Sequence[TileRow], buffers: Mapping[str, Buffer], findings: Findings
) -> None:
    """Check tiles of a product with permuted blocks: each stores one whole cell, and multiplies that block's rows and
    columns.

    Engines are checked first: the tiles of the kernel are the blocks of the buffer, and the regions whole blocks.
    """
    b = buffers[compute.b.buffer]
    whole = all(part.cols == (0, buffers[part.buffer].cols) for part in compute.a)
    if not whole or compute.b.rows != (0, b.rows) or compute.accumulate:
        message = "the kernel multiplies whole rows of `a` by whole columns of `b`, and adds to nothing"
        findings.add("lowering", compute, message)
        return
    if [part.shape[0] for part in compute.a] != [part.shape[0] for part in compute.out]:
        findings.add("lowering", compute, "`a` and `out` are not cut alike")
        return
    expected: set[tuple[int, ...]] = set()
    for a, out in zip(compute.a, compute.out, strict=True):
        buffer, source = buffers[out.buffer], OWN_SHARD if buffers[a.buffer].home == INPUT else WORKSPACE
        blocks = buffer.blocks
        for cell in block_cells(blocks, (buffer.rows, buffer.cols), (out.rows, out.cols)) if blocks else ():
            row = cell.start // blocks.cols if blocks else 0
            source_row = a.rows[0] + cell.rows[0] - out.rows[0]
            shift = compute.b.cols[0] + cell.cols[0] - out.cols[0]
            height = blocks.rows if blocks else 0
            expected.add((MULTIPLY, row, row + height, 0, source, source_row, 0, shift))
    actual = [tuple(getattr(row, name) for name in _FIELDS) for row in rows]
    wrong = set(actual) ^ expected
    if wrong:
        kind, row, _, _, _, source_row, _, shift = first = min(wrong)
        side = "lacks" if first in expected else "has"
        where = f"the cell from row {row}, of rows from {source_row} by columns from {shift}"
        findings.add("lowering", compute, f"the table {side} a tile of kind {kind} of {where}")
    elif len(set(actual)) != len(actual):
        findings.add("lowering", compute, "the table has a tile twice")


# Whether the tile table of a matmul adds the addends of its Computes, behind their late waits.


def check_addends(
    operation: Operation,
    rows: list[TileRow],
    late: Mapping[int, int],
    buffers: Mapping[str, Buffer],
    findings: Findings,
) -> None:
    """Check the addends of an operation's tiles. Only a Compute has addends; all other tiles must have none. late:
    signal -> full count, of the operation's late waits, numbered as in the table."""
    addends = operation.addends if isinstance(operation, Compute) else ()
    place = operation.place if isinstance(operation, Compute) and addends else NO_ADDENDS
    if any(row.place != place for row in rows):
        message = f"{place} of its addends stand before the product" if addends else "it has no addends"
        findings.add("lowering", operation, f"{message}; a tile says otherwise")
    for addend in addends:
        if buffers[addend.buffer].home in (INPUT, OUTPUT):
            findings.add("lowering", operation, "the kernel adds what lies in the workspace", addend)
    for lo, hi, count in {(row.late_lo, row.late_hi, row.late_count) for row in rows}:
        waits = dict.fromkeys(range(lo, hi), count) if 0 <= lo <= hi <= lo + len(late) else None
        if waits != late or (not late and (lo, hi, count) != (0, 0, 0)):
            message = f"a tile waits until signals [{lo}:{hi}] are {count} before it adds"
            findings.add("lowering", operation, f"{message}, not for {sorted(late.items())[:8]}")


# Whether the table of a copy kernel moves what its Puts say, in words of 16 bytes.


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
