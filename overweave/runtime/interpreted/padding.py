"""NaN padding of loads of dtypes that are kept as bits: Triton's interpreter pads them with the bits of zero.

Applied by `interpreter.repair`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from overweave.runtime.interpreted.numbers import BIT_DTYPES, round_to_nearest

_Builder = triton_interpreter.InterpreterBuilder
_NAN = triton_interpreter._ir.PADDING_OPTION.PAD_NAN
_original_load = _Builder.create_descriptor_load
_original_block_load = getattr(_Builder, "create_tensor_pointer_load", None)  # gone from later Tritons


def install_nan_padding() -> None:
    """Patch the interpreter for the rest of this process."""
    _Builder.create_descriptor_load = _descriptor_load
    if _original_block_load is not None:
        _Builder.create_tensor_pointer_load = _block_load


def _descriptor_load(self: Any, descriptor: Any, indices: Any, *options: Any, **named: Any) -> Any:
    loaded = _original_load(self, descriptor, indices, *options, **named)
    return _pad(loaded, descriptor.materialize_pointers, indices) if descriptor.padding == _NAN else loaded


def _block_load(self: Any, pointer: Any, boundary_check: Any, padding: Any, *options: Any, **named: Any) -> Any:
    loaded = _original_block_load(self, pointer, boundary_check, padding, *options, **named)  # type: ignore[misc]
    return _pad(loaded, pointer.materialize_pointers, boundary_check) if padding == _NAN else loaded


def _pad(block: Any, materialize: Any, indices: Any) -> Any:
    """Replace elements out of bounds by NaN. materialize: returns pointers and mask."""
    name = block.dtype.scalar.name
    if name in BIT_DTYPES:
        mask = materialize(indices)[1]
        inside = mask if isinstance(mask, np.ndarray) else mask.data
        block.data = np.where(inside, block.data, round_to_nearest(np.array([np.nan], np.float32), name))
    return block
