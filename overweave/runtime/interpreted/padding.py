"""NaN that loads are padded with, where numbers are kept as bits: of NaN the interpreter makes the bits of zero.

Applied by `interpreter.repair`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.runtime.interpreter as triton_interpreter

from overweave.runtime.interpreted.numbers import PATTERNS, round_to_nearest

_Builder = triton_interpreter.InterpreterBuilder
_NAN = triton_interpreter._ir.PADDING_OPTION.PAD_NAN
_original_load = _Builder.create_descriptor_load
_original_block_load = getattr(_Builder, "create_tensor_pointer_load", None)  # gone from later Tritons


def install_nan_padding() -> None:
    """For the rest of this process."""
    _Builder.create_descriptor_load = _descriptor_load
    if _original_block_load is not None:
        _Builder.create_tensor_pointer_load = _block_load


def _descriptor_load(self: Any, descriptor: Any, indices: Any, *how: Any, **named: Any) -> Any:
    loaded = _original_load(self, descriptor, indices, *how, **named)
    return _pad(loaded, descriptor.materialize_pointers, indices) if descriptor.padding == _NAN else loaded


def _block_load(self: Any, pointer: Any, boundary_check: Any, padding: Any, *how: Any, **named: Any) -> Any:
    loaded = _original_block_load(self, pointer, boundary_check, padding, *how, **named)  # type: ignore[misc]
    return _pad(loaded, pointer.materialize_pointers, boundary_check) if padding == _NAN else loaded


def _pad(loaded: Any, materialize: Any, where: Any) -> Any:
    name = loaded.dtype.scalar.name
    if name in PATTERNS:
        mask = materialize(where)[1]
        inside = mask if isinstance(mask, np.ndarray) else mask.data
        loaded.data = np.where(inside, loaded.data, round_to_nearest(np.array([np.nan], np.float32), name))
    return loaded
