"""Reductions and scans of interpreted kernels, in the order in which the lanes of a warp combine.

Triton 3.6 has functions of numpy for some, and goes over all elements in Python for the others. Here whichever function
combines is applied to halves: `tl.reduce` to the lower and the upper half until one is left, as lanes exchange by
`shfl.bfly`, and `tl.associative_scan` to elements 1, 2, 4, ... apart, as by `shfl.up`. So sums round as those of one
element a lane, and what `argmax` makes of a NaN, which depends on the order, is a GPU's. More elements a thread or more
warps combine in an order of their own, which the layout decides.
Applied by `interpreter.repair`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

_Tensors = tuple[Any, ...]


def install_warp_reductions() -> None:
    """For the rest of this process."""
    tl.core.tensor.__bool__ = _scalar_bool
    triton_interpreter.ReduceOps.apply_impl = _reduce
    triton_interpreter.ScanOps.apply_impl = _scan


def _reduce(self: Any, given: Sequence[Any]) -> list[Any]:
    axis = self.axis
    parts = _tensors([tensor.handle.data for tensor in given], given)
    if axis is None:
        parts, axis = _tensors([tensor.handle.data.reshape(-1) for tensor in parts], given), 0
    while (size := parts[0].handle.data.shape[axis]) > 1:
        low, high = (_tensors([_half(t, axis, which, size // 2) for t in parts], given) for which in (0, 1))
        parts = _combine(self.combine_fn, low, high)
    return [_result(self, tensor, given[0]) for tensor in parts]


def _half(tensor: Any, axis: int, which: int, size: int) -> Any:
    index = [slice(None)] * tensor.handle.data.ndim
    index[axis] = slice(which * size, (which + 1) * size)
    return tensor.handle.data[tuple(index)]


def _result(self: Any, tensor: Any, given: Any) -> Any:
    data = tensor.handle.data
    if self.axis is None:
        data = data.reshape([1] * given.handle.data.ndim if self.keep_dims else ())
    elif not self.keep_dims:
        data = np.squeeze(data, self.axis)
    return _tensor(data, tensor.dtype)


def _scan(self: Any, given: Sequence[Any]) -> list[Any]:
    axis = self.axis
    turned = [np.flip(t.handle.data, axis) if self.reverse else t.handle.data for t in given]
    parts, size, apart = _tensors(turned, given), turned[0].shape[axis], 1
    places = np.arange(size).reshape([-1 if at == axis % turned[0].ndim else 1 for at in range(turned[0].ndim)])
    while apart < size:
        before = _tensors([np.roll(t.handle.data, apart, axis) for t in parts], given)
        met = _combine(self.combine_fn, before, parts)
        chosen = [
            np.where(places >= apart, new.handle.data, old.handle.data) for new, old in zip(met, parts, strict=True)
        ]
        parts, apart = _tensors(chosen, met), 2 * apart
    ends = [np.flip(t.handle.data, axis) if self.reverse else t.handle.data for t in parts]
    return list(_tensors(ends, parts))


def _combine(function: Any, one: _Tensors, other: _Tensors) -> _Tensors:
    """All pairs at once; one after another, where a function branches on its numbers, which a block does not have."""
    combine = function.rewrite()
    _combining.blocks = True
    try:
        made = combine(*one, *other)
    except _BranchesError:
        made = _one_by_one(combine, one, other)
    finally:
        _combining.blocks = False
    found = tuple(made) if isinstance(made, (tuple, tl.core.tuple)) else (made,)
    return tuple(_cast_like(tensor, like) for tensor, like in zip(found, one, strict=True))


class _BranchesError(Exception):
    """A function that combines asked whether a block is true."""


_combining = threading.local()


def _scalar_bool(self: Any) -> bool:
    """Of one number. What else the interpreter takes for true is not told apart, but where numbers are combined."""
    data = self.handle.data
    if data.size != 1 and getattr(_combining, "blocks", False):
        raise _BranchesError
    return bool(data.item()) if data.size == 1 else True


def _one_by_one(combine: Any, one: _Tensors, other: _Tensors) -> _Tensors:
    _combining.blocks = False
    made = [np.empty_like(each.handle.data) for each in one]
    for at in np.ndindex(made[0].shape):
        pair = [_tensor(np.asarray(each.handle.data[at]), each.dtype) for each in (*one, *other)]
        found = combine(*pair)
        for held, number, each in zip(made, found if isinstance(found, tuple) else (found,), one, strict=True):
            held[at] = _cast_like(number, _tensor(np.asarray(each.handle.data[at]), each.dtype)).handle.data.item()
    return _tensors(made, one)


def _cast_like(made: Any, like: Any) -> Any:
    """What a function returned, which may be a number, as one of the reduced tensors."""
    made = triton_interpreter.interpreter_semantic.to_tensor(made)
    if made.dtype != like.dtype:
        made = made.to(like.dtype)
    shape = like.handle.data.shape
    return made if made.handle.data.shape == shape else _tensor(np.broadcast_to(made.handle.data, shape), made.dtype)


def _tensors(datas: Sequence[Any], like: Sequence[Any]) -> _Tensors:
    return tuple(_tensor(data, each.dtype) for data, each in zip(datas, like, strict=True))


def _tensor(data: Any, kind: Any) -> Any:
    scalar = kind.scalar
    held = np.ascontiguousarray(data) if data.ndim else np.array([data])
    shape = tl.block_type(scalar, list(data.shape)) if data.ndim else scalar
    return tl.core.tensor(triton_interpreter.TensorHandle(held, scalar), shape)
