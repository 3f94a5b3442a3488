"""Whether the tile table of a matmul adds the addends of its Computes, behind their late waits."""

from __future__ import annotations

from collections.abc import Mapping

from overweave.ir.schedule import INPUT, OUTPUT, Buffer, Compute, Operation
from overweave.ir.tile_order import NO_ADDENDS, TileRow
from overweave.ir.verify.rules.verdict import Findings


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
