"""Library operations ready to be called: what does not change from call to call is decided when a plan is bound.

A product alone and a collective of whole buffers, which most library plans are, have short ways of their own; the rest
runs as runtime/library/epilogue.py and runtime/library/library.py have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions

from overweave.ir.blocks import CUT_BY_MEMBER
from overweave.ir.counts import COUNTS, Filled
from overweave.ir.plan import W_REST, X_REST, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Compute, Operation, Region
from overweave.memory.group import Group
from overweave.memory.subgroups import subgroup
from overweave.runtime.library.epilogue import finish_sum, run_with_epilogue
from overweave.runtime.library.library import full_precision
from overweave.runtime.library.views import Cut, Views, ViewShape, region_index

TensorsByName = dict[str, torch.Tensor]
BoundLibraryCall = Callable[[TensorsByName], None]
_Factor = tuple[str, Cut | None, str, Cut | None]  # a buffer, and what of it; its product's, and what of that


def counted_call(operation: Operation, plan: Plan, group: Group) -> BoundLibraryCall:
    """As `library_call`, of an operation on the rows that a call's counts fill, which each call works out."""

    def call(tensors: TensorsByName) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        filled = Filled(plan.schedule, tensors[COUNTS].tolist()).operation(operation)
        _general_call(filled, plan.problem, shapes, group)(tensors)

    return call


def library_call(
    operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape], group: Group
) -> BoundLibraryCall:
    """One operation on this rank: call it with the tensors of all buffers, and what an epilogue or norm reads besides.

    shapes: of the buffers. It runs on the current stream. Raises whatever the library raises.
    """
    short = _plain_matmul_call(operation, problem, shapes) or _flat_collective_call(operation, problem, shapes, group)
    return short or _general_call(operation, problem, shapes, group)


def is_plain_matmul(operation: Operation, plan: Plan) -> bool:
    """Whether an operation is products of whole rows by one whole weight alone, whose factors may lie in two parts."""
    shapes = {each.name: (each.rows, each.cols) for each in plan.schedule.buffers}
    return not plan.problem.counted and bool(_plain_matmuls(operation, plan.problem, shapes))


def allocated_output(operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape]) -> str | None:
    """The buffer that an operation fills whole by one matmul, and makes if it is not among the tensors."""
    match _plain_matmuls(operation, problem, shapes):
        case [(_, _, out, None)]:
            return out
        case _:
            return None


def _general_call(
    operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape], group: Group
) -> BoundLibraryCall:
    views, ends_sums = Views((operation,), shapes), problem.has_sum_epilogue

    def call(tensors: TensorsByName) -> None:
        view = views.of(tensors)
        run_with_epilogue(operation, problem, view, (tensors, group))
        if ends_sums:
            finish_sum(operation, problem, view, tensors)

    return call


def _plain_matmuls(operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape]) -> list[_Factor]:
    """Of products of whole rows by one whole weight, and nothing else; none of other operations."""
    if not isinstance(operation, Compute) or operation.addends or operation.accumulate:
        return []
    if (
        problem.product_epilogue.bits
        or (problem.norm and problem.world_size == 1)
        or region_index(operation.b, shapes) is not None
    ):
        return []
    return [
        (a.buffer, region_index(a, shapes), out.buffer, region_index(out, shapes))
        for a, out in zip(operation.a, operation.out, strict=True)
        if not out.is_empty
    ]


def _plain_matmul_call(
    operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape]
) -> BoundLibraryCall | None:
    factors, precise = _plain_matmuls(operation, problem, shapes), full_precision(getattr(torch, problem.dtype))
    if not factors or not isinstance(operation, Compute):
        return None
    weight = operation.b.buffer

    def call(tensors: TensorsByName) -> None:
        w = tensors[weight]
        with precise:
            for a, a_cut, out, out_cut in factors:
                x = tensors[a] if a_cut is None else tensors[a][a_cut]
                if out in tensors:
                    torch.mm(x, w, out=tensors[out] if out_cut is None else tensors[out][out_cut])
                else:
                    tensors[out] = torch.mm(
                        x, w
                    )  # `allocated_output`: the matmul asks for memory quicker than its caller
            if X_REST in tensors:
                _add_rest(tensors)

    def _add_rest(tensors: TensorsByName) -> None:
        for _, a_cut, out, out_cut in factors:
            x = tensors[X_REST] if a_cut is None else tensors[X_REST][a_cut]
            target = tensors[out] if out_cut is None else tensors[out][out_cut]
            target.addmm_(x, tensors[W_REST])

    return call


def _flat_collective_call(
    operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape], group: Group
) -> BoundLibraryCall | None:
    """A collective from one whole buffer to one, both row-major, as the buffers of plans are."""
    if not isinstance(operation, Collective) or problem.norm is not None or problem.epilogue.scaling:
        return None
    if operation.finishes:
        return None
    parts: tuple[Region, ...] = (*operation.sources, *operation.destinations)
    if len(parts) != 2 or any(region_index(part, shapes) is not None for part in parts):
        return None
    source, target = (part.buffer for part in parts)
    move, rows, members = MOVES.get(operation.function), [part.shape[0] for part in parts], len(operation.ranks)
    each = [members if is_dealt else 1 for is_dealt in CUT_BY_MEMBER[operation.function]]
    if rows[0] * each[1] != rows[1] * each[0]:
        return None  # a short shard's, which is padded
    if move is None or (source == target) != (operation.function == "all_reduce"):
        return None
    run = move(subgroup(group, operation.ranks).process_group)

    def call(tensors: TensorsByName) -> None:
        work = run(tensors[target], tensors[source])
        if work is not None:
            work.wait()  # on a GPU, in stream order

    return call


# As torch.distributed's own functions call a process group, without what they ask first: a bound plan's tensors are
# dense and real, on a rank of the group.
_Move = Callable[[torch.Tensor, torch.Tensor], dist.Work | None]


def _all_gather(group: dist.ProcessGroup) -> _Move:
    how = AllgatherOptions()
    how.asyncOp = False
    return lambda target, source: group._allgather_base(target, source, how)


def _reduce_scatter(group: dist.ProcessGroup) -> _Move:
    how = ReduceScatterOptions()
    how.reduceOp, how.asyncOp = dist.ReduceOp(dist.ReduceOp.SUM), False
    return lambda target, source: group._reduce_scatter_base(target, source, how)


def _all_reduce(group: dist.ProcessGroup) -> _Move:
    how = AllreduceOptions()
    how.reduceOp, how.asyncOp = dist.ReduceOp(dist.ReduceOp.SUM), False
    return lambda target, source: group.allreduce([target], how)


def _all_to_all(group: dist.ProcessGroup) -> _Move:
    how = AllToAllOptions()
    how.asyncOp = False
    return lambda target, source: group.alltoall_base(target, source, [], [], how)


MOVES = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
