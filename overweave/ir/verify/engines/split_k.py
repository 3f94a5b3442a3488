"""Whether the rows of a table that share a split-K tile cover each step of k once."""

from __future__ import annotations

from collections.abc import Iterable

from overweave.ir.plan import MatmulConfig, split_k_obstacle
from overweave.ir.schedule import Compute, Operation
from overweave.ir.tile_order import TileRow
from overweave.ir.verify.rules.verdict import Findings

MOST_SHARES = 1 << 15  # the arrival counter's upper half counts poisoned shares


def merge_split_k(
    operation: Operation, rows: list[TileRow], config: MatmulConfig | None, findings: Findings
) -> list[TileRow]:
    """Return the rows with one in place of all that share a tile. Add refusals for shares that do not make up one
    tile."""
    if not any(row.shares or _has_split_fields(row) for row in rows):
        return rows
    if not isinstance(operation, Compute) or config is None:
        findings.add("lowering", operation, "only tiles of a matmul can be split along k")
        return rows
    if split_k_obstacle(config):
        findings.add("lowering", operation, f"its tiles cannot be split along k: {split_k_obstacle(config)}")
    tiles = [row for row in rows if not row.shares]
    if any(_has_split_fields(row) for row in tiles):
        findings.add("lowering", operation, "a whole tile has a range of k or a place for partials")
    groups: dict[int, list[TileRow]] = {}
    for row in rows:
        if row.shares:
            groups.setdefault(row.partial, []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: row.share)
        message = _split_k_fault(group, operation.b.shape[0], config.block_k)
        if message:
            findings.add(
                "lowering", operation, f"the shares of a tile at row {group[0].row}, column {group[0].col} {message}"
            )
            tiles += group
        else:
            tiles.append(_without_split_fields(group[0]))
    return tiles


def check_partials(rows: Iterable[TileRow], findings: Findings) -> None:
    """Refuse tiles that share a slot of partial sums."""
    tiles = sorted({(row.partial, row.shares) for row in rows if row.shares})
    for (slot, shares), (next_slot, _) in zip(tiles, tiles[1:], strict=False):
        if slot + shares > next_slot:
            findings.add("lowering", None, f"two tiles share slot {next_slot} of the partial sums")


def _split_k_fault(group: list[TileRow], k: int, block_k: int) -> str:
    """Return why such shares do not make up one tile; "" if they do."""
    shares = group[0].shares
    if not 2 <= shares <= MOST_SHARES or [row.share for row in group] != list(range(shares)):
        return f"are {[row.share for row in group][:10]} of {shares}"
    if len({_without_split_fields(row) for row in group}) > 1:
        return "differ in more than their range of k"
    bounds = [group[0].k_lo, *(row.k_hi for row in group)]
    if (bounds[0], bounds[-1]) != (0, k) or [row.k_lo for row in group] != bounds[:-1]:
        return f"are not all of k={k} once"
    if any(hi <= lo for lo, hi in zip(bounds, bounds[1:], strict=False)) or any(each % block_k for each in bounds[:-1]):
        return f"do not begin at steps of {block_k}"
    return ""


def _has_split_fields(row: TileRow) -> bool:
    return (row.k_lo, row.k_hi, row.share, row.partial) != (0, 0, 0, 0)


def _without_split_fields(row: TileRow) -> TileRow:
    return row._replace(k_lo=0, k_hi=0, share=0, shares=0, partial=0)
