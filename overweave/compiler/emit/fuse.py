"""Reads annotated kernels, and derives from a verified plan what to emit into them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from overweave.compiler.emit.emit import FusionOptions
from overweave.compiler.frontend.soundness import check_kernel
from overweave.compiler.frontend.source.author import read_file, read_source
from overweave.compiler.frontend.source.kernel import AnnotatedKernel, read_kernel
from overweave.ir.footprint import TileSpace
from overweave.ir.plan import AUTHOR_KERNEL, Plan
from overweave.ir.schedule import INPUT, Apply, Operation, Put
from overweave.ir.tensors import all_to_all_source


def kernel_of(path: Path, name: str, line: int | None = None) -> AnnotatedKernel:
    """Read and check the annotated kernel `name` of a file. line: its first line, as Python imported it.

    Raises InputError for a file that cannot be read or has changed since, DirectiveError for a wrong directive.
    """
    return _read(path, read_file(path, name), name, line)


@lru_cache(maxsize=32)  # a tuner, or an author, tries one kernel with many schedules
def _read(path: Path, data: bytes, name: str, line: int | None) -> AnnotatedKernel:
    kernel = read_kernel(read_source(path, data, name, line))
    check_kernel(kernel)
    return kernel


def fusion_options(plan: Plan, space: TileSpace, schedules: Mapping[str, object]) -> FusionOptions:
    """Derive from a plan what its tiles wait for, signal and push; equal on every rank. schedules: by tensor name."""
    applies = [operation for operation in plan.schedule.operations if isinstance(operation, Apply)]
    streamed = {axis.name for axis in space.axes if axis.is_streamed}
    tensors_before_loops = {load.tensor for load in space.loads if load.dims[0].axis not in streamed}
    return FusionOptions(
        waited_tensors=frozenset(tensors_before_loops & schedules.keys())
        if any(apply.waits for apply in applies)
        else frozenset(),
        dual_source=_dual_source_tensor(plan),
        waits_in_loop=any(apply.late_waits for apply in applies),
        notifies=any(apply.notifies for apply in applies),
        push_path=plan.realization.slices
        if any(_is_pushed_by_tiles(plan, one) for one in plan.schedule.operations)
        else None,
        stored_at_peers=_tensor_stored_at_peers(plan),
        exchanges=tuple((tensor, str(schedule)) for tensor, schedule in schedules.items()),
    )


def _is_pushed_by_tiles(plan: Plan, operation: Operation) -> bool:
    """Whether the author's kernel itself pushes a Put, in slices between its tiles."""
    return isinstance(operation, Put) and plan.realization.engine_of(operation.queue) == AUTHOR_KERNEL


def _tensor_stored_at_peers(plan: Plan) -> str | None:
    """Return the tensor of which some tiles write their result to another rank, or None."""
    applies = (operation for operation in plan.schedule.operations if isinstance(operation, Apply))
    products = ((apply, content) for apply in applies for content in apply.makes)
    return next(
        (all_to_all_source(content.tensor) for apply, content in products if content.region.rank != apply.rank), None
    )


def _dual_source_tensor(plan: Plan) -> str | None:
    """Return the tensor that some tiles read from the caller's shard and others from the receive buffer, or None."""
    homes = {buffer.name: buffer.home for buffer in plan.schedule.buffers}
    reads_input: dict[str, set[bool]] = {}  # tensor -> for each tile, whether it reads the caller's shard
    for operation in plan.schedule.operations:
        for need in operation.needs if isinstance(operation, Apply) else ():
            reads_input.setdefault(all_to_all_source(need.tensor), set()).add(homes[need.region.buffer] == INPUT)
    return next((tensor for tensor, kinds in reads_input.items() if len(kinds) == 2), None)
