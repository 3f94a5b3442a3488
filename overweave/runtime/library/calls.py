"""Bound operations of cuBLAS and NCCL: what does not change from call to call is decided when a plan is bound.

A plain matmul and a collective of whole buffers have fast paths: most such plans consist of these. Other operations run
as in runtime/library/epilogue.py and runtime/library/library.py.
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


def call_of(operation: Operation, plan: Plan, shapes: Mapping[str, ViewShape], group: Group) -> BoundLibraryCall:
    """As `library_call`, of a plan's operation, whatever its sizes follow from."""
    if plan.problem.has_fixed_sizes:
        return library_call(operation, plan.problem, shapes, group)
    return _counted_call(operation, plan, group)


def _counted_call(operation: Operation, plan: Plan, group: Group) -> BoundLibraryCall:
    """Bind an operation on the rows that a call's counts fill: each call derives its regions. As `library_call`."""

    def call(tensors: TensorsByName) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        filled = Filled(plan.schedule, tensors[COUNTS].tolist()).operation(operation)
        _general_call(filled, plan.problem, shapes, group)(tensors)

    return call


def library_call(
    operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape], group: Group
) -> BoundLibraryCall:
    """Bind one operation on this rank. The result takes the tensors of all buffers, of the epilogue and of the norm.

    shapes: of the buffers. It runs on the current stream. Raises whatever torch raises.
    """
    fast = _plain_matmul_call(operation, problem, shapes) or _flat_collective_call(operation, problem, shapes, group)
    return fast or _general_call(operation, problem, shapes, group)


def is_plain_matmul(operation: Operation, plan: Plan) -> bool:
    """Return whether an operation is plain matmuls of whole rows by one whole weight: then k may be in two parts."""
    shapes = {each.name: (each.rows, each.cols) for each in plan.schedule.buffers}
    return plan.problem.has_fixed_sizes and bool(_plain_matmuls(operation, plan.problem, shapes))


def allocated_output(operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape]) -> str | None:
    """Return the buffer that an operation fills by one plain matmul, and so can allocate; None if there is none."""
    match _plain_matmuls(operation, problem, shapes):
        case [(_, _, out, None)]:
            return out
        case _:
            return None


def _general_call(
    operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape], group: Group
) -> BoundLibraryCall:
    """Bind any operation by `run_with_epilogue` and `finish_sum`."""
    views, has_sum_epilogue = Views((operation,), shapes), problem.has_sum_epilogue

    def call(tensors: TensorsByName) -> None:
        view = views.of(tensors)
        run_with_epilogue(operation, problem, view, (tensors, group))
        if has_sum_epilogue:
            finish_sum(operation, problem, view, tensors)

    return call


def _plain_matmuls(operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape]) -> list[_Factor]:
    """Return (a, its slice, out, its slice) of each matmul of whole rows by one whole weight; [] for other operations.

    A slice of None stands for the whole buffer.
    """
    if not isinstance(operation, Compute) or operation.addends or operation.accumulate:
        return []
    if (
        problem.product_epilogue.bits
        or (problem.of_rows and problem.world_size == 1)
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
    """Bind plain matmuls; None for other operations."""
    matmuls, in_full_precision = (
        _plain_matmuls(operation, problem, shapes),
        full_precision(getattr(torch, problem.dtype)),
    )
    if not matmuls or not isinstance(operation, Compute):
        return None
    weight = operation.b.buffer

    def call(tensors: TensorsByName) -> None:
        w = tensors[weight]
        with in_full_precision:
            for a, a_cut, out, out_cut in matmuls:
                x = tensors[a] if a_cut is None else tensors[a][a_cut]
                if out in tensors:
                    torch.mm(x, w, out=tensors[out] if out_cut is None else tensors[out][out_cut])
                else:
                    tensors[out] = torch.mm(x, w)  # `allocated_output`: torch.mm allocates quicker
            if X_REST in tensors:
                _add_rest(tensors)

    def _add_rest(tensors: TensorsByName) -> None:
        for _, a_cut, out, out_cut in matmuls:
            x = tensors[X_REST] if a_cut is None else tensors[X_REST][a_cut]
            target = tensors[out] if out_cut is None else tensors[out][out_cut]
            target.addmm_(x, tensors[W_REST])

    return call


def _flat_collective_call(
    operation: Operation, problem: Problem, shapes: Mapping[str, ViewShape], group: Group
) -> BoundLibraryCall | None:
    """Bind a collective from one whole buffer to another, both row-major; None for other operations."""
    if not isinstance(operation, Collective) or problem.of_rows is not None or problem.epilogue.scaling:
        return None
    if operation.finishes:
        return None
    parts: tuple[Region, ...] = (*operation.sources, *operation.destinations)
    if len(parts) != 2 or any(region_index(part, shapes) is not None for part in parts):
        return None
    source, target = (part.buffer for part in parts)
    bind_move, rows, members = MOVES.get(operation.function), [part.shape[0] for part in parts], len(operation.ranks)
    parts_per_rank = [members if is_dealt else 1 for is_dealt in CUT_BY_MEMBER[operation.function]]
    if rows[0] * parts_per_rank[1] != rows[1] * parts_per_rank[0]:
        return None  # a shard of fewer rows: it is padded
    if bind_move is None or (source == target) != (operation.function == "all_reduce"):
        return None
    run = bind_move(subgroup(group, operation.ranks).process_group)

    def call(tensors: TensorsByName) -> None:
        work = run(tensors[target], tensors[source])
        if work is not None:
            work.wait()  # on a GPU, in stream order

    return call


# Calls of the process group as torch.distributed's functions make them, without their checks: a bound plan's tensors
# are dense and real, on a rank of the group.
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
