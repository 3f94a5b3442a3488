"""Whether permutations of blocks are bijections, and operations that need contiguous memory find it behind them."""

from __future__ import annotations

from collections.abc import Mapping

from overweave.ir.blocks import Image, image_of, obstacle
from overweave.ir.plan import COPY_ENGINE, LIBRARY, Plan
from overweave.ir.schedule import INPUT, OUTPUT, Buffer, Collective, Copy, Get, Put, ReducePut, Region, Schedule
from overweave.ir.verify.verdict import Findings


def check_blocks(schedule: Schedule, findings: Findings) -> None:
    """Every permutation is a bijection, and of a buffer whose memory is not the caller's."""
    for buffer in schedule.buffers:
        if buffer.blocks is None:
            continue
        if said := obstacle(buffer.blocks, (buffer.rows, buffer.cols)):
            findings.add("form", None, f"the permutation of buffer {buffer.name} {said}")
        if buffer.home in (INPUT, OUTPUT):
            findings.add("form", None, f"buffer {buffer.name} is the caller's, whose tensors lie row by row")


def image(buffers: Mapping[str, Buffer], regions: tuple[Region, ...]) -> Image:
    """The image in memory of regions of one buffer."""
    buffer = buffers[regions[0].buffer]
    return image_of(buffer.blocks, (buffer.rows, buffer.cols), tuple((one.rows, one.cols) for one in regions))


def check_stretch(
    buffers: Mapping[str, Buffer], part: Collective, group: tuple[Region, ...], findings: Findings
) -> None:
    """What a library call sends to one member, or receives from one, is one stretch of a permuted buffer.

    Of a buffer whose elements lie row by row it is one region, which the library may pack first.
    """
    names = {region.buffer for region in group}
    if len(names) > 1 or (len(group) > 1 and buffers[group[0].buffer].blocks is None):
        findings.add("form", part, f"{len(group)} regions for one member, which share no permutation", group[0])
    elif buffers[group[0].buffer].blocks is not None and image(buffers, group).stretch is None:
        findings.add("form", part, "a library call needs one stretch of memory, and this is none", group[0])
    elif buffers[group[0].buffer].blocks is not None and part.finishes:
        findings.add("form", part, "finishes sums in permuted blocks; finish them where they lie row by row", group[0])


def check_pair(
    buffers: Mapping[str, Buffer],
    part: Collective,
    ends: tuple[tuple[Region, ...], tuple[Region, ...]],
    findings: Findings,
) -> None:
    """Both ends of what a collective moves have the same shapes, dtype and order in memory."""
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
    if permuted and image(buffers, sources).order != image(buffers, destinations).order:
        findings.add("form", part, "its blocks lie in another order there", destinations[0])


def check_permuted_engines(plan: Plan, findings: Findings) -> None:
    """Which engines reach a permuted buffer: library calls, and copies between stretches of equal order.

    Kernels address rows and columns, and store through no permutation.
    """
    buffers = {buffer.name: buffer for buffer in plan.schedule.buffers}
    permuted = {name for name, buffer in buffers.items() if buffer.blocks is not None}
    if not permuted:
        return
    engines = {one.queue: one.engine for one in plan.realization.engines}
    for operation in plan.schedule.operations:
        touched = [part for part in (*operation.reads, *operation.writes) if part.buffer in permuted]
        engine = engines.get(operation.queue)
        if not touched or engine == LIBRARY:
            continue
        if engine != COPY_ENGINE or not isinstance(operation, Put | Get | Copy) or isinstance(operation, ReducePut):
            said = f"a {engine} addresses rows and columns, and this buffer's blocks are permuted"
            findings.add("engine", operation, said, touched[0])
            continue
        for source, destination in zip(operation.sources, operation.destinations, strict=True):
            ends = image(buffers, (source,)), image(buffers, (destination,))
            if source.is_empty or not permuted & {source.buffer, destination.buffer}:
                continue
            if None in (ends[0].stretch, ends[1].stretch) or ends[0].order != ends[1].order:
                said = "a copy engine needs one stretch of memory at both ends, in the same order"
                findings.add("engine", operation, said, destination)
