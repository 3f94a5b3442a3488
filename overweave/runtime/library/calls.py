"""Operations and whole plans of cuBLAS and NCCL, or torch and gloo: what recurs is decided when a plan is bound.

A plain matmul and a collective of whole buffers have fast paths: most such plans consist of these. Other operations run
as in runtime/library/epilogue.py and runtime/library/library.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions

from overweave.errors import ScheduleError
from overweave.ir.blocks import CUT_BY_MEMBER, stored_shape
from overweave.ir.counts import COUNTS, Filled
from overweave.ir.launch.streams import queues_beside
from overweave.ir.library_call import call_sides, is_permuted, library_obstacle
from overweave.ir.plan import LIBRARY, W_REST, X_REST, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import LOCAL, Buffer, Collective, Compute, Operation, Region
from overweave.memory.board.board import Board
from overweave.memory.group import Group, create_subgroups, subgroup
from overweave.memory.outside_modes import empty_factory
from overweave.runtime.library.epilogue import finish_sum, run_with_epilogue
from overweave.runtime.library.library import View, as_movable, full_precision

ViewShape = tuple[int, ...]
Cut = slice | tuple[slice, slice]


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, ViewShape]:
    """Return the shapes of tensors by name; x and w in two parts have the shape of both together."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if X_REST in shapes:
        (rows, k), (_, cols) = shapes["x"], shapes["w"]
        k += shapes[X_REST][1]
        shapes |= {"x": (rows, k), "w": (k, cols)}
    return shapes


class Views:
    """Computes views of the regions of operations. shapes: of the buffers."""

    def __init__(self, operations: Iterable[Operation], shapes: Mapping[str, ViewShape]) -> None:
        regions = [region for operation in operations for region in (*operation.reads, *operation.writes)]
        # The region itself is kept alive: its id is the key.
        self._indices = {id(region): (region, region.buffer, region_index(region, shapes)) for region in regions}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> View:
        """Return a function from a region to its view in these tensors, by buffer name."""
        indices = self._indices

        def view(region: Region) -> torch.Tensor:
            _, buffer, index = indices[id(region)]
            return tensors[buffer] if index is None else tensors[buffer][index]

        return view


def padded_rows(rows: int, parts: int) -> int:
    """Round rows up to a multiple of `parts`, so that `merge_parts` can merge them as equal parts."""
    return -(-rows // parts) * parts


def merge_parts(operation: Operation, shapes: Mapping[str, ViewShape], buffer_rows: Mapping[str, int]) -> Operation:
    """Return the operation; a collective whose equal parts are adjacent in a buffer becomes one of a single part.

    buffer_rows: buffer -> its rows, if its memory has more (as of `shapes`). The last parts may then be shorter, or
    empty: the merged part extends over the padding, which is never read.
    """
    if isinstance(operation, Collective) and operation.function == "all_gather":
        return replace(operation, destinations=_merge_parts(operation.destinations, shapes, buffer_rows))
    if isinstance(operation, Collective) and operation.function == "reduce_scatter":
        return replace(operation, sources=_merge_parts(operation.sources, shapes, buffer_rows))
    if isinstance(operation, Collective) and operation.function == "all_to_all":
        sources, destinations = (_merge_parts(side, shapes, {}) for side in (operation.sources, operation.destinations))
        if len(sources) == len(destinations) == 1:
            return replace(operation, sources=sources, destinations=destinations)
    return operation


def _merge_parts(
    parts: tuple[Region, ...], shapes: Mapping[str, ViewShape], buffer_rows: Mapping[str, int]
) -> tuple[Region, ...]:
    """Return adjacent equal parts of one buffer as one part; others unchanged."""
    first, size = parts[0], parts[0].shape[0]
    rows, cols = shapes[first.buffer]
    top, last = first.rows[0], buffer_rows.get(first.buffer, rows)
    bounds = [min(top + at * size, last) for at in range(len(parts) + 1)]
    is_one_buffer = all((part.buffer, part.rank, part.cols) == (first.buffer, first.rank, (0, cols)) for part in parts)
    if not is_one_buffer or [part.rows for part in parts] != list(pairwise(bounds)) or top + len(parts) * size > rows:
        return parts
    return (replace(first, rows=(top, top + len(parts) * size)),)


def region_index(region: Region, shapes: Mapping[str, ViewShape]) -> Cut | None:
    """Return the index of a region in its buffer: None for the whole buffer, one slice for whole rows."""
    rows, cols = shapes.get(region.buffer, (-1, -1))
    if region.cols != (0, cols):
        return slice(*region.rows), slice(*region.cols)
    return None if region.rows == (0, rows) else slice(*region.rows)


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
        problem.product_epilogue.steps
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


def permuted_collective_call(
    operation: Operation, buffers: Mapping[str, Buffer], group: Group, most_sms: int = 0
) -> BoundLibraryCall:
    """Bind a collective of permuted blocks; the result takes the tensors of all buffers. Raises ScheduleError for an
    operation that is not one call on contiguous ranges; verify refuses it, too.

    most_sms: SMs that its kernel may take; 0: no limit.
    """
    sides = call_sides(operation, buffers) if isinstance(operation, Collective) else ""
    if not isinstance(operation, Collective) or isinstance(sides, str):
        found = library_obstacle(operation, buffers)
        raise ScheduleError(f"run {operation.name} by the library", found, "Run it on CPU tensors, at depth `library`")
    source, target = sides
    adds = operation.function in ("all_reduce", "reduce_scatter")
    run = MOVES[operation.function](subgroup(group, operation.ranks, most_sms).process_group)

    def call(tensors: TensorsByName) -> None:
        parts = [tensors[side.buffer].view(-1)[slice(*side.span)] for side in (target, source)]
        work = run(*(parts if adds else map(as_movable, parts)))
        if work is not None:
            work.wait()  # on a GPU, in stream order

    return call


def is_library_plan(plan: Plan) -> bool:
    """Return whether cuBLAS and NCCL alone run a plan, on one stream: without kernels of ours and without signals."""
    engines = {assignment.engine for assignment in plan.realization.engines}
    return engines <= {LIBRARY} and not plan.schedule.pads and not queues_beside(plan)


class LibraryRun:
    """A plan run by cuBLAS and NCCL alone: no signals, no workspace; local buffers come from torch's allocator.

    allocated_outputs: results that its matmuls allocate unless they are passed.
    """

    was_captured = False  # a graph that captured it keeps its own memory

    def __init__(self, plan: Plan, group: Group, example: Mapping[str, torch.Tensor]) -> None:
        problem, shapes = plan.problem, shapes_of(example)
        buffers = {each.name: each for each in plan.schedule.buffers}
        local = [each for each in plan.schedule.buffers if each.home == LOCAL]
        allocated_shapes = {each.name: _allocated_shape(each, group.world_size) for each in local}
        shapes |= allocated_shapes
        create_subgroups(group, plan.schedule.of_rank(group.rank))
        rows, permuted = {each.name: each.rows for each in local}, list[Operation]()
        operations = list(plan.schedule.of_rank(group.rank))
        if problem.has_fixed_sizes:
            permuted = [each for each in operations if is_permuted(each, buffers)]
            operations = [each if each in permuted else merge_parts(each, shapes, rows) for each in operations]
        allocated = {allocated_output(each, problem, shapes) for each in operations if problem.has_fixed_sizes}
        self.allocated_outputs = frozenset(name for name in allocated if name in example)

        def how(operation: Operation) -> BoundLibraryCall:
            if operation in permuted:
                return permuted_collective_call(operation, buffers, group)
            return call_of(operation, plan, shapes, group)

        self._calls = [how(each) for each in operations]
        self._empty = empty_factory(example["w"].device)
        self._local = [
            (each.name, allocated_shapes[each.name], _dtype(each, problem.dtype))
            for each in local
            if each.name not in allocated
        ]
        self._board = Board.of(group)
        self._board.probes_rarely = True  # NCCL's watchdog ends a collective that waits for a dead peer

    def __call__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Run the plan once, on the current stream. Add what it allocates to the tensors."""
        for name, shape, dtype in self._local:
            tensors[name] = self._empty(shape, dtype)
        for call in self._calls:
            call(tensors)
        if not self._board.is_watched:  # else the workspace does so at exit
            self._board.finish()  # collectives in flight have NCCL's watchdog


def _allocated_shape(buffer: Buffer, ranks: int) -> tuple[int, int]:
    """Return rows and columns of a local buffer's memory: rows padded for equal parts, unless blocks are permuted."""
    return stored_shape(buffer) if buffer.blocks else (padded_rows(buffer.rows, ranks), buffer.cols)


def _dtype(buffer: Buffer, otherwise: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, buffer.dtype or otherwise)
    return found
