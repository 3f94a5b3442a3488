"""Reductions and scans of interpreted kernels, in the order in which the lanes of a warp combine.

Triton 3.6 uses numpy for some, and loops over all elements in Python for others. Here every combine function is applied
to halves: by `tl.reduce` to the lower and the upper half until one element is left, as lanes do by `shfl.bfly`, and by
`tl.associative_scan` to elements 1, 2, 4, ... apart, as by `shfl.up`. So sums round as with one element a lane, and
`argmax` with NaN, which depends on the order, gives a GPU's result. With more elements a thread, or more warps, a GPU's
order depends on the layout.
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
    """Patch the interpreter for the rest of this process."""
    tl.core.tensor.__bool__ = _scalar_bool
    triton_interpreter.ReduceOps.apply_impl = _reduce
    triton_interpreter.ScanOps.apply_impl = _scan


def _reduce(self: Any, inputs: Sequence[Any]) -> list[Any]:
    """Reduce an axis as a warp's butterfly (shfl.bfly) does: combine lower and upper half until one is left.

    The axis has a power of two of elements, as every axis of a Triton block. axis None: of all elements. Returns one
    tensor for each input.
    """
    axis = self.axis
    blocks = _tensors([tensor.handle.data for tensor in inputs], inputs)
    if axis is None:
        blocks, axis = _tensors([tensor.handle.data.reshape(-1) for tensor in blocks], inputs), 0
    while (size := blocks[0].handle.data.shape[axis]) > 1:
        lower, upper = (_tensors([_half(t, axis, half, size // 2) for t in blocks], inputs) for half in (0, 1))
        blocks = _combine(self.combine_fn, lower, upper)
    return [_result(self, tensor, inputs[0]) for tensor in blocks]


def _half(tensor: Any, axis: int, half: int, size: int) -> Any:
    """Return the lower (half 0) or upper (1) `size` elements of an axis."""
    index = [slice(None)] * tensor.handle.data.ndim
    index[axis] = slice(half * size, (half + 1) * size)
    return tensor.handle.data[tuple(index)]


def _result(self: Any, tensor: Any, inputs: Any) -> Any:
    """Return a reduced tensor, without the axis unless `keep_dims`."""
    data = tensor.handle.data
    if self.axis is None:
        data = data.reshape([1] * inputs.handle.data.ndim if self.keep_dims else ())
    elif not self.keep_dims:
        data = np.squeeze(data, self.axis)
    return _tensor(data, tensor.dtype)


def _scan(self: Any, inputs: Sequence[Any]) -> list[Any]:
    """Scan an axis as the lanes of a warp do (shfl.up): combine each element with the one 1, 2, 4, ... before it."""
    axis = self.axis
    data = [np.flip(t.handle.data, axis) if self.reverse else t.handle.data for t in inputs]
    parts, size, distance = _tensors(data, inputs), data[0].shape[axis], 1
    positions = np.arange(size).reshape([-1 if dim == axis % data[0].ndim else 1 for dim in range(data[0].ndim)])
    while distance < size:
        before = _tensors([np.roll(t.handle.data, distance, axis) for t in parts], inputs)
        combined = _combine(self.combine_fn, before, parts)
        updated = [
            np.where(positions >= distance, new.handle.data, old.handle.data)
            for new, old in zip(combined, parts, strict=True)
        ]
        parts, distance = _tensors(updated, combined), 2 * distance
    results = [np.flip(t.handle.data, axis) if self.reverse else t.handle.data for t in parts]
    return list(_tensors(results, parts))


def _combine(function: Any, one: _Tensors, other: _Tensors) -> _Tensors:
    """Combine all pairs at once; one after another if the function branches on a value, which a block cannot."""
    combine = function.rewrite()
    _combining.blocks = True
    try:
        result = combine(*one, *other)
    except _BranchesError:
        result = _one_by_one(combine, one, other)
    finally:
        _combining.blocks = False
    results = tuple(result) if isinstance(result, (tuple, tl.core.tuple)) else (result,)
    return tuple(_cast_like(tensor, like) for tensor, like in zip(results, one, strict=True))


class _BranchesError(Exception):
    """A combine function has branched on a block."""


_combining = threading.local()


def _scalar_bool(self: Any) -> bool:
    """Return the truth of a scalar; True for a block, as Triton's interpreter. In a combine function a block raises."""
    data = self.handle.data
    if data.size != 1 and getattr(_combining, "blocks", False):
        raise _BranchesError
    return bool(data.item()) if data.size == 1 else True


def _one_by_one(combine: Any, one: _Tensors, other: _Tensors) -> _Tensors:
    """Combine pairs of elements one after another."""
    _combining.blocks = False
    outputs = [np.empty_like(each.handle.data) for each in one]
    for index in np.ndindex(outputs[0].shape):
        pair = [_tensor(np.asarray(each.handle.data[index]), each.dtype) for each in (*one, *other)]
        result = combine(*pair)
        for output, number, each in zip(outputs, result if isinstance(result, tuple) else (result,), one, strict=True):
            output[index] = _cast_like(
                number, _tensor(np.asarray(each.handle.data[index]), each.dtype)
            ).handle.data.item()
    return _tensors(outputs, one)


def _cast_like(value: Any, like: Any) -> Any:
    """Convert the result of a combine function, which may be a number, to the dtype and shape of `like`."""
    value = triton_interpreter.interpreter_semantic.to_tensor(value)
    if value.dtype != like.dtype:
        value = value.to(like.dtype)
    shape = like.handle.data.shape
    return (
        value if value.handle.data.shape == shape else _tensor(np.broadcast_to(value.handle.data, shape), value.dtype)
    )


def _tensors(arrays: Sequence[Any], like: Sequence[Any]) -> _Tensors:
    return tuple(_tensor(data, each.dtype) for data, each in zip(arrays, like, strict=True))


def _tensor(data: Any, dtype: Any) -> Any:
    scalar = dtype.scalar
    contiguous = np.ascontiguousarray(data) if data.ndim else np.array([data])
    shape = tl.block_type(scalar, list(data.shape)) if data.ndim else scalar
    return tl.core.tensor(triton_interpreter.TensorHandle(contiguous, scalar), shape)
