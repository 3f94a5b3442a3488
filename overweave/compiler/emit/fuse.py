"""What a proven plan asks of an annotated kernel, and what the fused kernel promises to the lint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from overweave.compiler.contract import Contract, Guard
from overweave.compiler.emit.emit import Weaving
from overweave.compiler.frontend.soundness import check_kernel
from overweave.compiler.frontend.source.author import read_file, read_source
from overweave.compiler.frontend.source.kernel import AnnotatedKernel, read_kernel
from overweave.ir.footprint import TileSpace
from overweave.ir.plan import AUTHOR_KERNEL, Plan
from overweave.ir.schedule import INPUT, Apply, Operation, Put
from overweave.ir.tensors import all_to_all_source


def kernel_of(path: Path, name: str, line: int | None = None) -> AnnotatedKernel:
    """The annotated kernel of a file, in which Python saw it at a line. Raises InputError for the file, DirectiveError
    for what stands in it."""
    return _read(path, read_file(path, name), name, line)


@lru_cache(maxsize=32)  # a tuner, or an author, tries one kernel with many schedules
def _read(path: Path, data: bytes, name: str, line: int | None) -> AnnotatedKernel:
    kernel = read_kernel(read_source(path, data, name, line))
    check_kernel(kernel)
    return kernel


def weaving_of(plan: Plan, space: TileSpace, wanted: Mapping[str, object]) -> Weaving:
    """What the plan's tiles must do, the same on every rank."""
    applies = [operation for operation in plan.schedule.operations if isinstance(operation, Apply)]
    streamed = {axis.name for axis in space.axes if axis.is_streamed}
    early = {load.tensor for load in space.loads if load.dims[0].axis not in streamed}
    return Weaving(
        waits=frozenset(early & wanted.keys()) if any(apply.waits for apply in applies) else frozenset(),
        chosen=_chosen(plan),
        streams=any(apply.late_waits for apply in applies),
        signals=any(apply.notifies for apply in applies),
        carries=plan.realization.slices if any(_is_carried(plan, one) for one in plan.schedule.operations) else None,
        away=_stored_away(plan),
        exchanges=tuple((tensor, str(how)) for tensor, how in wanted.items()),
    )


def _is_carried(plan: Plan, operation: Operation) -> bool:
    return isinstance(operation, Put) and plan.realization.engine_of(operation.queue) == AUTHOR_KERNEL


def _stored_away(plan: Plan) -> str | None:
    """The tensor that tiles store at peers."""
    applies = (operation for operation in plan.schedule.operations if isinstance(operation, Apply))
    made = ((apply, one) for apply in applies for one in apply.makes)
    return next((all_to_all_source(one.tensor) for apply, one in made if one.region.rank != apply.rank), None)


def _chosen(plan: Plan) -> str | None:
    """The tensor that tiles find in two places: with the caller, or where it arrives."""
    homes = {buffer.name: buffer.home for buffer in plan.schedule.buffers}
    sides: dict[str, set[bool]] = {}
    for operation in plan.schedule.operations:
        for need in operation.needs if isinstance(operation, Apply) else ():
            sides.setdefault(all_to_all_source(need.tensor), set()).add(homes[need.region.buffer] == INPUT)
    return next((tensor for tensor, found in sides.items() if len(found) == 2), None)


def contract_of(kernel: AnnotatedKernel, weaving: Weaving, tensor_cores: int = 0) -> Contract:
    """What the PTX must show: exactly the waits and the signals that were emitted, in front of and behind their data.

    tensor_cores: matmul groups that stay in flight in the main loop; 0 where the kernel promises none.
    """
    streamed = {axis.name for axis in kernel.axes if axis.is_streamed}
    late = [load.directive for load in kernel.loads if load.directive.dims[0].names & streamed]
    waited = [load.directive for load in kernel.loads if load.directive.tensor in weaving.waits]
    early = [f"overweave_{said.parameter}" if said.tensor == weaving.chosen else said.parameter for said in waited]
    guarded = dict.fromkeys(early + [said.parameter for said in late if weaving.streams])
    stored = dict.fromkeys(store.directive.parameter for store in kernel.stores)
    waits = bool(weaving.waits) + weaving.streams
    signals = "*overweave_places" if weaving.away else "overweave_signals"
    return Contract(
        waits=waits,
        releases=bool(weaving.signals) + bool(weaving.carries),
        looks=waits,
        guarded=(Guard("overweave_signals", tuple(guarded), optional=True),) if waits else (),
        announced=(
            *((Guard(signals, tuple(stored), optional=True),) if weaving.signals else ()),
            *((Guard("*overweave_targets", ("*overweave_targets",), optional=True),) if weaving.carries else ()),
        ),
        alarm=("overweave_words", "*overweave_limits"),
        claims=("overweave_claims",),
        wgmma=bool(tensor_cores),
        depth=tensor_cores,
    )
