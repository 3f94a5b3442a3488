"""A cache of the shapes of interpreted tensors: Triton 3.6 builds the type of every result anew, a third of its time.

A shape is shared by all types and tensors that have it, and is never written to. Applied by `interpreter.repair`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter


class _Shape(NamedTuple):
    """What depends on a shape alone: attributes of a block type, and of a tensor, where they are constexprs."""

    sizes: Any
    numel: int
    text: str
    tensor_sizes: Any
    tensor_numel: Any


_SHAPES: dict[tuple[int, ...], _Shape] = {}
_NUMPY: dict[str, np.dtype[Any]] = {}  # name of Triton's dtype -> numpy's
_original_block: Callable[[Any, Any, Any], None] = tl.core.block_type.__init__
_original_numpy: Callable[[Any], np.dtype[Any]] = triton_interpreter._get_np_dtype
_bits: dict[str, int] = {}
_SCALAR = tl.core.tuple([]), tl.core.constexpr(1)


def install_type_cache() -> None:
    """Patch the interpreter for the rest of this process."""
    tl.core.block_type.__init__ = _init_block_type
    tl.core.tensor.__init__ = _init_tensor
    triton_interpreter._get_np_dtype = _numpy_dtype
    triton_interpreter._validate_np_data_size = _fits
    triton_interpreter.TensorHandle.__init__ = _init_handle


def _init_block_type(self: Any, element_ty: Any, shape: Iterable[Any]) -> None:
    """`block_type.__init__`, with the parts that depend on the shape from the cache."""
    sizes = tuple(size.value if isinstance(size, tl.core.constexpr) else size for size in shape)
    cached = _SHAPES.get(sizes)
    if cached is None:
        _original_block(self, element_ty, shape)
        constants = tl.core.tuple([tl.core.constexpr(size) for size in self.shape])
        cached = _Shape(self.shape, self.numel, str(self.shape), constants, tl.core.constexpr(self.numel))
        _SHAPES[sizes] = cached
    self.element_ty, self.shape, self.numel = element_ty, cached.sizes, cached.numel
    self.name = f"<{cached.text}, {element_ty}>"
    self.of_tensor = cached.tensor_sizes, cached.tensor_numel


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _SCALAR


def _numpy_dtype(type: Any) -> np.dtype[Any]:
    scalar = type.scalar
    if scalar.name not in _NUMPY:
        _NUMPY[scalar.name] = _original_numpy(scalar)
    return _NUMPY[scalar.name]


def _init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not _fits(data, dtype):
        raise ValueError(f"numpy data of {data.itemsize * 8} bits is wider than {dtype}")


def _fits(array: Any, dtype: Any) -> bool:
    """Return whether numpy's elements are no wider than Triton's; a Triton int1 takes a byte."""
    bits = _bits.get(dtype.name)
    if bits is None:
        bits = _bits[dtype.name] = 64 if isinstance(dtype, tl.pointer_type) else max(8, dtype.primitive_bitwidth)
    fits: bool = array.itemsize * 8 <= bits
    return fits
