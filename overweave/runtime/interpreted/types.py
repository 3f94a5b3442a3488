"""Types of interpreted tensors, made once: Triton 3.6 makes those of every result anew, a third of all its work.

Nothing changes but the time: a shape, once made, is shared by all types and tensors that have it, and nobody writes to
one. Applied by `interpreter.repair`, which stands between this module and Triton's first import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter


class _Shape(NamedTuple):
    """What depends on a shape alone: the parts of a type, and those of a tensor, which Triton holds as constants."""

    sizes: Any
    numel: int
    text: str
    tensor_sizes: Any
    tensor_numel: Any


_SHAPES: dict[tuple[int, ...], _Shape] = {}
_NUMPY: dict[str, np.dtype[Any]] = {}
_original_block: Callable[[Any, Any, Any], None] = tl.core.block_type.__init__
_original_numpy: Callable[[Any], np.dtype[Any]] = triton_interpreter._get_np_dtype
_bits: dict[str, int] = {}
_SCALAR = tl.core.tuple([]), tl.core.constexpr(1)


def install_type_cache() -> None:
    """For the rest of this process."""
    tl.core.block_type.__init__ = _init_block_type
    tl.core.tensor.__init__ = _init_tensor
    triton_interpreter._get_np_dtype = _numpy_dtype
    triton_interpreter._validate_np_data_size = _fits
    triton_interpreter.TensorHandle.__init__ = _init_handle


def _init_block_type(self: Any, element_ty: Any, shape: Iterable[Any]) -> None:
    sizes = tuple(size.value if isinstance(size, tl.core.constexpr) else size for size in shape)
    known = _SHAPES.get(sizes)
    if known is None:
        _original_block(self, element_ty, shape)
        constants = tl.core.tuple([tl.core.constexpr(size) for size in self.shape])
        known = _Shape(self.shape, self.numel, str(self.shape), constants, tl.core.constexpr(self.numel))
        _SHAPES[sizes] = known
    self.element_ty, self.shape, self.numel = element_ty, known.sizes, known.numel
    self.name = f"<{known.text}, {element_ty}>"
    self.of_tensor = known.tensor_sizes, known.tensor_numel


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


def _fits(array: Any, kind: Any) -> bool:
    """Whether numbers of numpy's type are no wider than those of Triton's, of which even truths take a byte."""
    bits = _bits.get(kind.name)
    if bits is None:
        bits = _bits[kind.name] = 64 if isinstance(kind, tl.pointer_type) else max(8, kind.primitive_bitwidth)
    fits: bool = array.itemsize * 8 <= bits
    return fits
