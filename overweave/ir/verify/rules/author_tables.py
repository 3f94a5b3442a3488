"""Whether the table of an author's kernel runs the tiles of its Applies, each once, behind their waits.

Which rows a tile reads is stated by the author (directives) and the schedule (`needs`), and taken from there. Checked
is that every tile number stands in the table, and that parts of late needs wait for the writers of their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overweave.ir.schedule import INPUT, OUTPUT, Apply, Buffer, Put, Region, overlap
from overweave.ir.tile_order import APPLY, OWN_SHARD, WORKSPACE, TileRow
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import Findings


def source_of(apply: Apply, homes: Mapping[str, str]) -> tuple[int, int]:
    """Return (OWN_SHARD or WORKSPACE, row shift of the caller's shard in its tensor) of what the tiles read."""
    input_needs = [need for need in apply.needs if homes[need.region.buffer] == INPUT]
    return (OWN_SHARD, input_needs[0].row - input_needs[0].region.rows[0]) if input_needs else (WORKSPACE, 0)


def check_slice_sources(put: Put, applies: Iterable[Apply], homes: Mapping[str, str], findings: Findings) -> None:
    """Refuse slices of a caller's buffer that no tile reads: the kernel has no pointer to it then. applies: of all
    ranks, which run one kernel."""
    read = {need.region.buffer for apply in applies for need in apply.needs}
    for source in put.sources:
        if homes[source.buffer] in (INPUT, OUTPUT) and not source.is_empty and source.buffer not in read:
            message = f"tiles push it from {source.buffer} of the caller's, which none of them reads there"
            findings.add("lowering", put, message, source)


def check_offsets(apply: Apply, homes: Mapping[str, str], findings: Findings) -> None:
    """Check that row r of a tensor is row r of its buffer, or of the caller's shard, shifted by one number for all."""
    _, shift = source_of(apply, homes)
    for need in (*apply.needs, *apply.late_needs):
        by = shift if homes[need.region.buffer] == INPUT else 0
        if (need.row - by, need.col) != (need.region.rows[0], need.region.cols[0]):
            message = f"its tiles look for {need.tensor}[{need.row},{need.col}] elsewhere, shifted by {by} rows"
            findings.add("lowering", apply, message, need.region)
    shifts = {
        (output.tensor, output.region.rank, output.row - output.region.rows[0], output.col - output.region.cols[0])
        for output in apply.makes
    }
    places = {(output.tensor, output.region.rank) for output in apply.makes}
    if len(shifts) > len(places) or any(col for *_, col in shifts):
        findings.add("lowering", apply, "what it makes of one tensor lies at different offsets")


def slice_claims(claim: int, row: TileRow, count: int) -> dict[str, int]:
    """Return TileRow's `col` and `width` of the tile that is claimed as number `claim`: the slices of Puts before its
    Apply (`row.col`). Each of the first `count` tiles claims at least one slice, so all slices are claimed by then.
    """
    looks = claim < count
    return {"col": row.col if looks else 0, "width": int(looks)}


def check_slices(rows: list[TileRow], before: Mapping[int, int], count: int, findings: Findings) -> None:
    """Check that tiles claim all slices (pieces of Puts, which programs push between their tiles), each those it must.
    before: operation -> slices of the operations before it. count: all slices."""
    for claim, row in enumerate(rows):
        expected = slice_claims(claim, row._replace(col=before[row.operation]), count)
        if (row.col, row.width) != (expected["col"], expected["width"]):
            message = (
                f"tile {claim} claims slices up to {row.col} ({row.width}), not {expected['col']} ({expected['width']})"
            )
            findings.add("lowering", None, message)
            return
    claimed = max(len(rows), before[rows[-1].operation] if rows else 0)
    if claimed < count:
        findings.add("lowering", None, f"its tiles claim {claimed} of {count} slices: no tile pushes the others")


def check_tile_numbers(apply: Apply, rows: list[TileRow], homes: Mapping[str, str], findings: Findings) -> None:
    """Add a refusal for a tile that is missing, stands twice, belongs to another operation or reads elsewhere."""
    check_offsets(apply, homes, findings)
    source = source_of(apply, homes)
    if any((row.source, row.source_row) != source for row in rows):
        findings.add("lowering", apply, f"a tile reads from another place than {source}")
    if any(row.kind != APPLY for row in rows):
        findings.add("lowering", apply, "a tile is of another kernel")
    if len(rows) != apply.instances:  # which may be more than any memory holds
        findings.add("lowering", apply, f"the table has {len(rows)} tiles of {apply.instances}")
        return
    actual = sorted(row.row for row in rows)
    expected = [number for lo, hi in apply.tiles for number in range(lo, hi)]
    if actual != expected:
        wrong = sorted(set(actual) ^ set(expected)) or actual
        side = "lacks" if wrong[0] in expected and wrong[0] not in actual else "has"
        findings.add("lowering", apply, f"the table {side} tile {wrong[0]}, against its {len(expected)} tiles")


def note_operand_buffers(apply: Apply, buffers: Mapping[str, Buffer], places: dict[str, set[str]]) -> None:
    """Add the buffers of the operation's tensors to `places`, role -> buffers: a kernel has one pointer for each
    role."""
    for need in (*apply.needs, *apply.late_needs):
        side = "own shard" if buffers[need.region.buffer].home == INPUT else "workspace"
        places.setdefault(f"{side} of {need.tensor}", set()).add(need.region.buffer)
    for output in (one for one in apply.makes if one.region.rank == apply.rank):
        places.setdefault(f"place of {output.tensor}", set()).add(output.region.buffer)


def check_parts(
    apply: Apply, parts: Iterable[TileRow], context: tuple[Graph, tuple[str, ...]], findings: Findings
) -> None:
    """Check that parts wait for all late waits, and each part for all writers of its rows of a late need. context: the
    graph, and the queues whose operations, launched before the kernel, end before it starts."""
    graph, after = context
    position = graph.operations.index(apply)
    base = apply.rank * graph.signals_per_rank
    late = {key - base: graph.full[key] for key in graph.late.get(position, ())}
    late_parts = list(parts) if late else []
    waited: dict[int, int] = {}
    for part in late_parts:
        is_range = 0 <= part.wait_lo <= part.wait_hi <= part.wait_lo + len(late)
        waits = waits_of(part) if is_range else {}
        waited |= waits
        if not is_range or any(late.get(key) != count for key, count in waits.items()):
            message = (
                f"part [{part.row}:{part.row_end}] waits until [{part.wait_lo}:{part.wait_hi}] are {part.wait_count}"
            )
            findings.add("lowering", apply, f"{message}, against {sorted(late.items())[:8]}")
            return
    if waited != late:
        findings.add(
            "lowering", apply, f"its parts wait for {sorted(waited.items())[:8]}, not {sorted(late.items())[:8]}"
        )
        return
    for need in apply.late_needs if late else ():
        lo = need.row
        inside = [part for part in late_parts if part.row < lo + need.region.shape[0] and lo < part.row_end]
        if (
            sum(min(part.row_end, lo + need.region.shape[0]) - max(part.row, lo) for part in inside)
            != need.region.shape[0]
        ):
            findings.add(
                "lowering", apply, f"its parts do not cover rows [{lo}:{lo + need.region.shape[0]}] once", need.region
            )
        needed = _signals_of_writers(need.region, graph, base, after)
        for part in inside:
            if not needed <= waits_of(part).keys():
                missing = sorted(needed - waits_of(part).keys())[:8]
                message = f"part [{part.row}:{part.row_end}] does not wait for signals {missing}"
                findings.add("lowering", apply, message, need.region)


def waits_of(row: TileRow) -> Mapping[int, int]:
    """Return signal -> count of a row's waits."""
    waits = dict.fromkeys(range(row.wait_lo, row.wait_hi), row.wait_count)
    return waits | ({row.also: row.also_count} if row.also >= 0 else {})


def _signals_of_writers(region: Region, graph: Graph, base: int, after: tuple[str, ...]) -> set[int]:
    """Return the own signals that the writers of the region, or of a part of it, notify on its rank. after: the rank's
    queues whose writers end before the kernel starts, and need not notify it."""
    keys: set[int] = set()
    for operation, notified in zip(graph.operations, graph.notified, strict=True):
        has_ended = operation.rank == region.rank and operation.queue in after
        if not has_ended and any(overlap(region, written) for written in operation.writes):
            keys |= {key - base for key in notified if 0 <= key - base < graph.signals_per_rank}
    return keys
