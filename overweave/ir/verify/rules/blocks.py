"""Whether permutations of blocks are bijections, and operations that need contiguous memory have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overweave.ir.blocks import CUT_BY_MEMBER, Span, block_cells, permutation_obstacle, regions_by_member
from overweave.ir.library_call import call_sides, image_of_regions, is_permuted, library_obstacle
from overweave.ir.plan import LIBRARY, REDUCE_KERNEL, TILE_KERNEL, Plan
from overweave.ir.schedule import INPUT, OUTPUT, Buffer, Collective, Compute, Reduce, Region, Schedule
from overweave.ir.verify.rules.verdict import Findings


def check_blocks(schedule: Schedule, findings: Findings) -> None:
    """Check that every permutation is a bijection, and that its buffer is not the caller's."""
    for buffer in schedule.buffers:
        if buffer.blocks is None:
            continue
        if message := permutation_obstacle(buffer.blocks, (buffer.rows, buffer.cols)):
            findings.add("form", None, f"the permutation of buffer {buffer.name} {message}")
        if buffer.home in (INPUT, OUTPUT):
            findings.add("form", None, f"buffer {buffer.name} is the caller's, whose tensors lie row by row")


def check_extra_rows(schedule: Schedule, findings: Findings) -> None:
    """Refuse operations on rows that a collective moves without naming them, since they share a cell with its
    regions."""
    buffers = {buffer.name: buffer for buffer in schedule.buffers if buffer.blocks}
    extra_rows: dict[tuple[str, int], dict[Region, Collective]] = {}
    parts = [one for one in schedule.operations if isinstance(one, Collective)] if buffers else []
    for part in parts:
        for region in (*part.reads, *part.writes):
            if region.buffer in buffers:
                for rows, cols in image_of_regions(buffers, (region,), by_cells=True).extra:
                    extra = Region(region.buffer, region.rank, rows, cols)
                    extra_rows.setdefault((region.buffer, region.rank), {})[extra] = part
    for operation in schedule.operations if extra_rows else ():
        for region in (*operation.reads, *operation.writes):
            for extra, mover in extra_rows.get((region.buffer, region.rank), {}).items():
                if _intersect(region.rows, extra.rows) and _intersect(region.cols, extra.cols):
                    message = f"{mover.name} moves rows of the same cell, and so these, which it does not name"
                    findings.add("form", operation, message, region)


def _intersect(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def check_sides(buffers: Mapping[str, Buffer], part: Collective, findings: Findings) -> None:
    """Check one part of a collective: one call can run it on permuted blocks (ir/library_call.py). Without permuted
    blocks each member has one region, which torch may pack first."""
    if not (part.ranks and part.sources and part.destinations):
        return  # refused by `_check_collective`
    if is_permuted(part, buffers):
        sides = call_sides(part, buffers)
        if isinstance(sides, str):
            findings.add("form", part, sides, part.sources[0])
        return
    for side, is_per_member in zip((part.sources, part.destinations), CUT_BY_MEMBER[part.function], strict=True):
        for group in regions_by_member(side, is_per_member, len(part.ranks)):
            if len(group) > 1:
                message = f"{len(group)} regions for one member, which share no permutation"
                findings.add("form", part, message, group[0])
                return


def check_members(buffers: Mapping[str, Buffer], parts: Sequence[Collective], findings: Findings) -> None:
    """Check that the parts of all members agree: all on permuted blocks, in parts of one size, or none. Without
    permuted blocks, short shares of a gather or a scatter are padded by rows, so all must have equal columns."""
    permuted = [is_permuted(part, buffers) for part in parts]
    if not any(permuted):
        wide = {one.cols[1] - one.cols[0] for part in parts for one in (*part.reads, *part.writes)}
        if parts[0].function in ("all_gather", "reduce_scatter") and len(wide) > 1:
            findings.add("form", parts[0], f"shares of an {parts[0].function} are {sorted(wide)[:8]} columns wide")
        return
    if not all(permuted):
        other = parts[permuted.index(False)]
        findings.add("form", other, "other members of the collective move permuted blocks, and it moves rows")
        return
    sizes: dict[int, Collective] = {}
    for part in parts:
        sides = call_sides(part, buffers)
        if not isinstance(sides, str):
            sizes.setdefault(sides[0].part_size, part)
    if len(sizes) > 1:
        message = f"members move equal parts, and this one's differ from others': {sorted(sizes)[:8]} elements"
        findings.add("form", list(sizes.values())[-1], message)


def check_pair(
    buffers: Mapping[str, Buffer],
    part: Collective,
    ends: tuple[tuple[Region, ...], tuple[Region, ...]],
    findings: Findings,
) -> None:
    """Check that both ends of what a collective moves have the same shapes, dtype and order in memory."""
    sources, destinations = ends
    if len(sources) != len(destinations):
        findings.add("form", part, f"{len(sources)} regions for {len(destinations)}", destinations[0])
        return
    for source, destination in zip(sources, destinations, strict=True):
        if source.shape != destination.shape:
            findings.add("form", part, f"{source} does not fit {destination}", destination)
            return
        if buffers[source.buffer].dtype != buffers[destination.buffer].dtype:
            findings.add("form", part, f"{source} has another dtype than {destination}", destination)
            return
    permuted = any(buffers[end[0].buffer].blocks is not None for end in ends)
    if permuted and len({image_of_regions(buffers, end, by_cells=True).order for end in ends}) > 1:
        findings.add("form", part, "its blocks lie in another order there", destinations[0])


def check_permuted_engines(plan: Plan, findings: Findings) -> None:
    """Refuse engines that cannot reach a permuted buffer. Those that can: collectives, tiles of a matmul that are whole
    blocks, and the reduction kernel, which reads through the map."""
    buffers = {buffer.name: buffer for buffer in plan.schedule.buffers}
    permuted = {name for name, buffer in buffers.items() if buffer.blocks is not None}
    engines = {one.queue: one.engine for one in plan.realization.engines}
    for operation in plan.schedule.operations if permuted else ():
        touched = [part for part in (*operation.reads, *operation.writes) if part.buffer in permuted]
        engine = engines.get(operation.queue)
        if not touched:
            continue
        if engine == LIBRARY:
            message = library_obstacle(operation, buffers)
        elif engine == TILE_KERNEL and isinstance(operation, Compute):
            message = _tiles_obstacle(plan, operation, buffers)
        elif engine == REDUCE_KERNEL and isinstance(operation, Reduce):
            message = _reader_obstacle(operation, buffers)
        else:
            message = f"a {engine} addresses rows and columns, and this buffer's blocks are permuted"
        if message:
            findings.add("engine", operation, message, touched[0])


def _tiles_obstacle(plan: Plan, compute: Compute, buffers: Mapping[str, Buffer]) -> str:
    """Return why tiles cannot store products in permuted blocks, each block as one tile; "" if they can."""
    config = plan.realization.matmul
    if any(buffers[part.buffer].blocks for part in compute.reads) or compute.copies or compute.addends:
        return "tiles read no permuted blocks, and add nothing to what they store there"
    for out in compute.out:
        blocks = buffers[out.buffer].blocks
        if blocks is None or config is None or (blocks.rows, blocks.cols) != (config.block_m, config.block_n):
            return "its tiles are no blocks of the buffer"
        shape = buffers[out.buffer].rows, buffers[out.buffer].cols
        cells = block_cells(blocks, shape, (out.rows, out.cols))
        if any((cell.rows, cell.cols) != cell.block for cell in cells):
            return "its tiles are parts of the buffer's blocks, and a tile stores a whole one"
    return ""


def _reader_obstacle(reduce: Reduce, buffers: Mapping[str, Buffer]) -> str:
    """Return why the reduction kernel cannot read through the map of blocks; "" if it can. It reads one operand of its
    own rank, whose blocks begin at multiples of their height, from the first row on, into the same rows and columns."""
    (operand, *more), out = reduce.operands, reduce.out
    blocks = buffers[operand.buffer].blocks
    if more or blocks is None or blocks.tops or operand.rank != reduce.rank or buffers[out.buffer].blocks:
        return "the kernel that sums reads one operand of its own rank by a map, in blocks of equal height"
    is_in_place = operand.rows == out.rows and operand.cols == out.cols and operand.rows[0] == operand.cols[0] == 0
    return "" if is_in_place else "what it reads by a map it moves to the same rows and columns, from the first on"
