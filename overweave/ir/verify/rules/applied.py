"""Whether the table of an author's kernel runs the tiles of its Applies, each once, behind the waits that they say.

Which rows a tile reads is the author's word (its directives) and the schedule's (`needs`); here it is seen that every
tile number stands in the table, and that the parts of what is read late wait for whoever writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overweave.ir.schedule import INPUT, OUTPUT, Apply, Buffer, Put, Region
from overweave.ir.tile_order import APPLY, OWN_SHARD, WORKSPACE, TileRow
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.races import overlap
from overweave.ir.verify.rules.verdict import Findings


def source_of(apply: Apply, homes: Mapping[str, str]) -> tuple[int, int]:
    """(OWN_SHARD or WORKSPACE, by how many rows the caller's shard is shifted in its tensor) of what the tiles read."""
    own = [need for need in apply.needs if homes[need.region.buffer] == INPUT]
    return (OWN_SHARD, own[0].row - own[0].region.rows[0]) if own else (WORKSPACE, 0)


def check_carried(put: Put, applies: Iterable[Apply], homes: Mapping[str, str], findings: Findings) -> None:
    """A kernel whose tiles carry what the caller holds has a pointer to it only if some tile also reads it there.

    applies: of all ranks, which run one kernel.
    """
    read = {need.region.buffer for apply in applies for need in apply.needs}
    for source in put.sources:
        if homes[source.buffer] in (INPUT, OUTPUT) and not source.is_empty and source.buffer not in read:
            said = f"tiles carry it from {source.buffer} of the caller's, which none of them reads there"
            findings.add("lowering", put, said, source)


def check_places(apply: Apply, homes: Mapping[str, str], findings: Findings) -> None:
    """The kernel finds row r of a tensor at row r of its buffer, or of the caller's shard, shifted by one number."""
    _, shift = source_of(apply, homes)
    for need in (*apply.needs, *apply.late_needs):
        by = shift if homes[need.region.buffer] == INPUT else 0
        if (need.row - by, need.col) != (need.region.rows[0], need.region.cols[0]):
            said = f"its tiles look for {need.tensor}[{need.row},{need.col}] elsewhere, shifted by {by} rows"
            findings.add("lowering", apply, said, need.region)
    shifts = {
        (made.tensor, made.region.rank, made.row - made.region.rows[0], made.col - made.region.cols[0])
        for made in apply.makes
    }
    places = {(made.tensor, made.region.rank) for made in apply.makes}
    if len(shifts) > len(places) or any(col for *_, col in shifts):
        findings.add("lowering", apply, "what it makes of one tensor lies at different offsets")


def slices_of(at: int, row: TileRow, count: int) -> dict[str, int]:
    """What the tile that is claimed as number `at` claims of the slices: those of Puts before its Apply (`row.col`).

    Each of the first tiles claims one at least. So behind as many tiles as slices all are claimed, and no tile looks.
    """
    looks = at < count
    return {"col": row.col if looks else 0, "width": int(looks)}


def check_slices(rows: list[TileRow], before: Mapping[int, int], count: int, findings: Findings) -> None:
    """Whether tiles claim what they must, and all of it. before: of each operation, how many slices go before it;
    count: of all."""
    for at, row in enumerate(rows):
        wanted = slices_of(at, row._replace(col=before[row.operation]), count)
        if (row.col, row.width) != (wanted["col"], wanted["width"]):
            said = f"tile {at} claims slices up to {row.col} ({row.width}), not {wanted['col']} ({wanted['width']})"
            findings.add("lowering", None, said)
            return
    claimed = max(len(rows), before[rows[-1].operation] if rows else 0)
    if claimed < count:
        findings.add("lowering", None, f"its tiles claim {claimed} of {count} slices: nobody moves the others")


def check_applied(apply: Apply, rows: list[TileRow], homes: Mapping[str, str], findings: Findings) -> None:
    """Adds a refusal for a tile that is missing, stands twice, belongs to another operation or reads elsewhere."""
    check_places(apply, homes, findings)
    source = source_of(apply, homes)
    if any((row.source, row.source_row) != source for row in rows):
        findings.add("lowering", apply, f"a tile reads from another place than {source}")
    if any(row.kind != APPLY for row in rows):
        findings.add("lowering", apply, "a tile is of another kernel")
    if len(rows) != apply.instances:  # which may be more than any memory holds
        findings.add("lowering", apply, f"the table has {len(rows)} tiles of {apply.instances}")
        return
    found = sorted(row.row for row in rows)
    expected = [number for lo, hi in apply.tiles for number in range(lo, hi)]
    if found != expected:
        wrong = sorted(set(found) ^ set(expected)) or found
        side = "lacks" if wrong[0] in expected and wrong[0] not in found else "has"
        findings.add("lowering", apply, f"the table {side} tile {wrong[0]}, against its {len(expected)} tiles")


def note_places(apply: Apply, buffers: Mapping[str, Buffer], places: dict[str, set[str]]) -> None:
    """Adds the buffers in which the operation's tensors lie to those of others: a kernel has one of each."""
    for need in (*apply.needs, *apply.late_needs):
        side = "own shard" if buffers[need.region.buffer].home == INPUT else "workspace"
        places.setdefault(f"{side} of {need.tensor}", set()).add(need.region.buffer)
    for made in (one for one in apply.makes if one.region.rank == apply.rank):
        places.setdefault(f"place of {made.tensor}", set()).add(made.region.buffer)


def check_parts(
    apply: Apply, parts: Iterable[TileRow], placed: tuple[Graph, tuple[str, ...]], findings: Findings
) -> None:
    """The parts' waits are the late ones, and each part waits for all that write its rows of what is read late.

    placed: the graph, and the queues whose operations, launched before the kernel, end before it starts.
    """
    graph, after = placed
    position = graph.operations.index(apply)
    base = apply.rank * graph.signals_per_rank
    late = {key - base: graph.full[key] for key in graph.late.get(position, ())}
    listed = list(parts) if late else []
    waited: dict[int, int] = {}
    for part in listed:
        is_range = 0 <= part.wait_lo <= part.wait_hi <= part.wait_lo + len(late)
        waits = waits_of(part) if is_range else {}
        waited |= waits
        if not is_range or any(late.get(key) != at for key, at in waits.items()):
            said = f"part [{part.row}:{part.row_end}] waits until [{part.wait_lo}:{part.wait_hi}] are {part.wait_count}"
            findings.add("lowering", apply, f"{said}, against {sorted(late.items())[:8]}")
            return
    if waited != late:
        findings.add(
            "lowering", apply, f"its parts wait for {sorted(waited.items())[:8]}, not {sorted(late.items())[:8]}"
        )
        return
    for need in apply.late_needs if late else ():
        lo = need.row
        inside = [part for part in listed if part.row < lo + need.region.shape[0] and lo < part.row_end]
        if (
            sum(min(part.row_end, lo + need.region.shape[0]) - max(part.row, lo) for part in inside)
            != need.region.shape[0]
        ):
            findings.add(
                "lowering", apply, f"its parts do not cover rows [{lo}:{lo + need.region.shape[0]}] once", need.region
            )
        needed = _announced(need.region, graph, base, after)
        for part in inside:
            if not needed <= waits_of(part).keys():
                missing = sorted(needed - waits_of(part).keys())[:8]
                said = f"part [{part.row}:{part.row_end}] does not wait for signals {missing}"
                findings.add("lowering", apply, said, need.region)


def waits_of(row: TileRow) -> Mapping[int, int]:
    """The signals that a row waits for, with their counts."""
    waits = dict.fromkeys(range(row.wait_lo, row.wait_hi), row.wait_count)
    return waits | ({row.also: row.also_count} if row.also >= 0 else {})


def _announced(region: Region, graph: Graph, base: int, after: tuple[str, ...]) -> set[int]:
    """The own signals by which those who write the region, or a part of it, say so to its rank.

    after: the rank's queues whose writers need not say so to a kernel that starts when they have ended.
    """
    keys: set[int] = set()
    for operation, notified in zip(graph.operations, graph.notified, strict=True):
        has_ended = operation.rank == region.rank and operation.queue in after
        if not has_ended and any(overlap(region, written) for written in operation.writes):
            keys |= {key - base for key in notified if 0 <= key - base < graph.signals_per_rank}
    return keys
