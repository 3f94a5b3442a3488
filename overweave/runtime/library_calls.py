"""Library operations ready to be called: what does not change from call to call is decided when a plan is bound.

A product alone and a collective of whole buffers, which most library plans are, have short ways of their own; the rest
runs as runtime/epilogue.py and runtime/library.py have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from overweave.ir.plan import Problem
from overweave.ir.schedule import Collective, Compute, Operation, Region
from overweave.memory.group import Group
from overweave.runtime import library
from overweave.runtime.epilogue import run_with_epilogue
from overweave.runtime.library import full_precision
from overweave.runtime.norm import finish_sum
from overweave.runtime.views import Shape, Views, cut

Tensors = Mapping[str, torch.Tensor]
Call = Callable[[Tensors], None]


def library_call(operation: Operation, problem: Problem, shapes: Mapping[str, Shape], group: Group) -> Call:
    """One operation on this rank: call it with the tensors of all buffers, and what an epilogue or norm reads besides.

    shapes: of the buffers. It runs on the current stream. Raises whatever the library raises.
    """
    short = _product(operation, problem, shapes) or _collective(operation, problem, shapes, group)
    return short or _in_full(operation, problem, shapes, group)


def _in_full(operation: Operation, problem: Problem, shapes: Mapping[str, Shape], group: Group) -> Call:
    views, ends_sums = Views((operation,), shapes), problem.ends_sums

    def call(tensors: Tensors) -> None:
        view = views.of(tensors)
        run_with_epilogue(operation, problem, view, (tensors, group))
        if ends_sums:
            finish_sum(operation, problem, view, tensors)

    return call


def _product(operation: Operation, problem: Problem, shapes: Mapping[str, Shape]) -> Call | None:
    """Products of whole rows by one whole weight, and nothing else."""
    if not isinstance(operation, Compute) or operation.addends or operation.accumulate:
        return None
    if problem.of_products.bits or (problem.norm and problem.world_size == 1):
        return None
    weight, precise = operation.b.buffer, full_precision(getattr(torch, problem.dtype))
    pairs = [
        (a.buffer, cut(a, shapes), out.buffer, cut(out, shapes))
        for a, out in zip(operation.a, operation.out, strict=True)
        if not out.is_empty
    ]
    if cut(operation.b, shapes) is not None:
        return None

    def call(tensors: Tensors) -> None:
        w = tensors[weight]
        with precise:
            for a, a_cut, out, out_cut in pairs:
                x, y = tensors[a], tensors[out]
                torch.mm(x if a_cut is None else x[a_cut], w, out=y if out_cut is None else y[out_cut])

    return call


def _collective(operation: Operation, problem: Problem, shapes: Mapping[str, Shape], group: Group) -> Call | None:
    """A collective from one whole buffer to one, both row-major, as the buffers of plans are."""
    if not isinstance(operation, Collective) or problem.norm is not None or problem.epilogue.scaling:
        return None
    if operation.finishes:
        return None
    parts: tuple[Region, ...] = (*operation.sources, *operation.destinations)
    if len(parts) != 2 or any(cut(part, shapes) is not None for part in parts):
        return None
    (source, target), process_group = (part.buffer for part in parts), group.process_group
    if operation.function == "all_gather":
        return lambda tensors: library.all_gather_flat(tensors[target], tensors[source], group=process_group)
    if operation.function == "reduce_scatter":
        return lambda tensors: library.reduce_scatter_flat(tensors[target], tensors[source], group=process_group)
    if operation.function == "all_reduce" and source == target:
        return lambda tensors: dist.all_reduce(tensors[target], group=process_group)
    return None
