"""Operations run by cuBLAS, torch or NCCL: one torch or collective call each, on the caller's stream, on any device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from overweave.compat.torch_names import (
    all_gather_single,
    get_cublas_allow_bf16_reduced_precision_reduction,
    get_cublas_allow_fp16_reduced_precision_reduction,
    get_cublas_allow_tf32,
    is_any_autocast_enabled,
    reduce_scatter_single,
    set_cublas_allow_bf16_reduced_precision_reduction,
    set_cublas_allow_fp16_reduced_precision_reduction,
    set_cublas_allow_tf32,
)
from overweave.errors import ScheduleError
from overweave.ir.schedule import Clear, Collective, Compute, Copy, Operation, Reduce, Region
from overweave.memory.group import Group, subgroup

# `overweave.install` registers overweave's kernels for these operators. overweave itself calls the operators to run
# torch's kernels: as a plan that it chose, and as a baseline of a measurement. `use_torch_kernels` marks such a call.


class _Thread(threading.local):
    wants_torch = False


_THREAD = _Thread()


@contextmanager
def use_torch_kernels() -> Iterator[None]:
    """Run the operators by torch's kernels inside, in this thread."""
    before, _THREAD.wants_torch = _THREAD.wants_torch, True
    try:
        yield
    finally:
        _THREAD.wants_torch = before


def wants_torch() -> bool:
    """Return whether this thread is inside `use_torch_kernels`."""
    return _THREAD.wants_torch


View = Callable[[Region], torch.Tensor]
End = Callable[[torch.Tensor, Region], None]  # applies an epilogue in place to what goes to a region
# Of a product before it is added, if anything is done to it, and of a sum that is complete: in fp32.
EndPair = tuple[End | None, End]

# The C functions behind torch.backends.cuda.matmul's properties: read and write.
_Setting = tuple[Callable[[], Any], Callable[..., None]]
_SHORTCUTS: dict[torch.dtype, _Setting] = {
    torch.float32: (get_cublas_allow_tf32, set_cublas_allow_tf32),
    torch.float16: (
        get_cublas_allow_fp16_reduced_precision_reduction,
        set_cublas_allow_fp16_reduced_precision_reduction,
    ),
    torch.bfloat16: (
        get_cublas_allow_bf16_reduced_precision_reduction,
        set_cublas_allow_bf16_reduced_precision_reduction,
    ),
}


class full_precision:  # noqa: N801 - a context manager, called as torch calls its own
    """Matmuls inside sum in fp32, whatever the caller has set.

    fp32 does not become TF32. 16-bit operands are not summed in 16 bits, as cuBLAS does where it splits a small matmul
    along k. MEASURED: 1.42 times the error of the unsplit matmul (fp16 and bf16, H200, 2026-11-20).
    For fp8 there is no such setting: its matmul takes an argument instead (runtime/library/epilogue.py).
    Autocast, which would cast operands down, is off inside.
    An object can be entered repeatedly, but not recursively.
    """

    __slots__ = ("_previous", "_setting", "_without_autocast")

    def __init__(self, dtype: torch.dtype) -> None:
        self._setting = _SHORTCUTS.get(dtype)
        self._previous: tuple[bool, ...] | None = None  # the caller's setting, if it allows reduced precision
        self._without_autocast: ExitStack | None = None

    def __enter__(self) -> None:
        if self._setting is not None:
            read, write = self._setting
            setting = read()  # for 16 bits a tuple: the second value allows split-K
            values = setting if setting.__class__ is tuple else (setting,)
            if values[0]:
                self._previous = values
                write(False, *values[1:])
        if is_any_autocast_enabled():
            self._without_autocast = ExitStack()
            self._without_autocast.enter_context(without_autocast())

    def __exit__(self, *failure: object) -> None:
        if self._without_autocast is not None:
            self._without_autocast.close()
            self._without_autocast = None
        if self._previous is not None and self._setting is not None:
            self._setting[1](*self._previous)
            self._previous = None


def is_autocast() -> bool:
    """Return whether autocast is on."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off inside. It costs next to nothing if autocast is off already."""
    if not is_autocast():
        yield
        return
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def run_operation(operation: Operation, view: View, group: Group, ends: EndPair | None = None) -> None:
    """Run one operation of a library queue. view: returns this rank's tensor of a region. Raises ScheduleError.

    A collective's sums, and products that are stored as they are, are rounded: the caller ends these.
    """
    if isinstance(operation, Compute):
        _multiply(operation, view, ends)
    elif isinstance(operation, Reduce):
        _sum_in_order(operation, view, ends)
    elif isinstance(operation, Clear):
        for region in operation.destinations:
            view(region).zero_()
    elif isinstance(operation, Copy):
        for source, target in zip(operation.sources, operation.destinations, strict=True):
            if not source.is_empty:
                view(target).copy_(view(source))
    elif isinstance(operation, Collective):
        COLLECTIVES[operation.function](operation, view, subgroup(group, operation.ranks))
    else:
        raise ScheduleError(
            f"run {operation.name} by the library", "it moves data between ranks", "Give its queue to the copy engine"
        )


def _multiply(compute: Compute, view: View, ends: EndPair | None) -> None:
    b = view(compute.b)
    for a, out in zip(compute.a, compute.out, strict=True):
        if out.is_empty:
            continue
        if compute.addends or (compute.accumulate and ends and ends[0]):
            with full_precision(torch.float32):
                add_product(compute, torch.mm(view(a).float(), b.float()), view, (out, ends))
        else:
            with full_precision(b.dtype):
                multiply_into(view(out), view(a), b, compute.accumulate)


def multiply_into(target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adds: bool) -> None:
    """`target = a @ b`, or `target += a @ b`; a target of a wider dtype takes the fp32 sums unrounded."""
    if target.dtype == a.dtype:
        torch.addmm(target, a, b, out=target) if adds else torch.mm(a, b, out=target)
    elif a.is_cuda and adds:
        torch.addmm(target, a, b, out_dtype=target.dtype, out=target)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=target.dtype, out=target)
    else:
        multiply_into(target, a.to(target.dtype), b.to(target.dtype), adds)


def add_product(compute: Compute, product: torch.Tensor, view: View, into: tuple[Region, EndPair | None]) -> None:
    """Add a product, fp32, to what lies at its output, or among a Compute's addends, in order. into: the output."""
    out, ends = into
    if ends is not None and ends[0] is not None:
        ends[0](product, out)
    if not compute.addends:
        target = view(out)
        target += product
        return
    operands = [view(addend) for addend in compute.addends]
    operands.insert(compute.place, product)
    total = operands[0].to(torch.float32, copy=True)
    for operand in operands[1:]:
        total += operand
    if ends is not None and compute.finishes:
        ends[1](total, out)
    for place in compute.writes:
        view(place).copy_(total)


def _sum_in_order(reduce: Reduce, view: View, ends: EndPair | None) -> None:
    """Sum the operands of a Reduce in fp32, in order, and store the sum rounded once."""
    if reduce.out.is_empty:
        return
    is_exact = len(reduce.operands) == 1 and not reduce.finishes
    total = view(reduce.operands[0]).to(torch.float32, copy=not is_exact)
    for operand in reduce.operands[1:]:
        total += view(operand)
    if ends is not None and reduce.finishes:
        ends[1](total, reduce.out)
    view(reduce.out).copy_(total)


def as_movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one-byte elements as uint8: NCCL and gloo move no fp8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _all_gather(collective: Collective, view: View, group: Group) -> None:
    """Run all_gather on shards padded to equal rows.

    Padding is uninitialised and never read: it lands behind the rows of a buffer (`merge_parts` in calls.py), or in
    temporary memory.
    """
    source, *targets = [as_movable(view(part)) for part in (*collective.sources, *collective.destinations)]
    source = source.contiguous()  # a slice of columns is not
    is_joined = len(targets) == 1 and targets[0].is_contiguous()
    size = targets[0].shape[0] // len(collective.ranks) if is_joined else max(target.shape[0] for target in targets)
    sent = source
    if source.shape[0] < size:
        sent = source.new_empty((size, source.shape[1]))
        sent[: source.shape[0]] = source
    gathered_in_place = targets[0] if is_joined else equal_parts(targets, size)
    if gathered_in_place is not None:
        all_gather_single(gathered_in_place, sent, group=group.process_group)
        return
    gathered = source.new_empty((size * len(targets), source.shape[1]))
    all_gather_single(gathered, sent, group=group.process_group)
    for target, part in zip(targets, gathered.split(size), strict=True):
        target.copy_(part[: target.shape[0]])


def _reduce_scatter(collective: Collective, view: View, group: Group) -> None:
    """Run reduce_scatter on shards padded to equal rows. Sums of padding are never read."""
    sources, target = [view(source) for source in collective.sources], view(collective.destinations[0])
    is_joined = len(sources) == 1 and sources[0].is_contiguous()
    size = sources[0].shape[0] // len(collective.ranks) if is_joined else max(source.shape[0] for source in sources)
    packed = sources[0] if is_joined else equal_parts(sources, size)
    if packed is None:
        packed = target.new_empty((size * len(sources), target.shape[1]))
        for part, source in zip(packed.split(size), sources, strict=True):
            part[: source.shape[0]] = source
    is_landing = target.shape[0] == size and target.is_contiguous()
    summed = target if is_landing else target.new_empty((size, target.shape[1]))
    reduce_scatter_single(summed, packed, group=group.process_group)
    if summed is not target:
        target.copy_(summed[: target.shape[0]])


def equal_parts(parts: list[torch.Tensor], size: int) -> torch.Tensor | None:
    """Return adjacent parts of `size` rows each as one tensor; None if they are not adjacent or not equal."""
    first = parts[0]
    cols, step = first.shape[1], size * first.shape[1] * first.element_size()
    if first.stride() != (cols, 1) or first.numel() == 0 or any(part.shape[0] != size for part in parts):
        return None
    if any(part.data_ptr() != first.data_ptr() + index * step for index, part in enumerate(parts)):
        return None
    return first.as_strided((size * len(parts), cols), (cols, 1), first.storage_offset())


def _all_reduce(collective: Collective, view: View, group: Group) -> None:
    """Run all_reduce in place; another source, and a slice of columns, is copied first."""
    source, target = view(collective.sources[0]), view(collective.destinations[0])
    summed = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    if source.data_ptr() != summed.data_ptr():
        summed.copy_(source)
    dist.all_reduce(summed, group=group.process_group)
    if summed is not target:
        target.copy_(summed)


def _all_to_all(collective: Collective, view: View, group: Group) -> None:
    """Run all_to_all. A single part on each side is divided equally among the ranks; empty parts are no messages."""
    sources = [view(source) for source in collective.sources]
    targets = [view(target) for target in collective.destinations]
    packed, landing = _adjacent(sources), _adjacent(targets)
    if packed is None:
        packed = torch.cat([part.flatten() for part in sources])
    received_flat = packed.new_empty(sum(part.numel() for part in targets)) if landing is None else landing
    sizes = [part.numel() for part in targets], [part.numel() for part in sources]
    received, sent = sizes if len(targets) > 1 else (None, None)
    dist.all_to_all_single(received_flat, packed, received, sent, group=group.process_group)
    if landing is None:
        for target, part in zip(targets, received_flat.split(sizes[0]), strict=True):
            target.copy_(part.view(target.shape))


def _adjacent(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return row-major parts that follow each other in memory, but for empty ones, as one row; None if they do not."""
    filled = [part for part in parts if part.numel()] or parts[:1]
    starts = [part.data_ptr() for part in filled]
    sizes = [part.numel() * part.element_size() for part in filled]
    follow = (start + size == after for start, size, after in zip(starts, sizes, starts[1:], strict=False))
    if not all(part.is_contiguous() for part in filled) or not all(follow):
        return None
    return filled[0].as_strided((sum(part.numel() for part in filled),), (1,))


COLLECTIVES: dict[str, Callable[[Collective, View, Group], None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
