"""The operators under autocast: operands are cast as those of `torch.nn.functional.linear` are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overweave.compat.torch_names import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard, OpOverload

_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
KEYS = {device: key.name for device, key in _KEYS.items()}
_CAST = (torch.bfloat16, torch.float16, torch.float32)  # neither fp64 nor fp8


def autocast_kernel(op: OpOverload, device: str, kept: frozenset[int]) -> Callable[..., Any]:
    """The kernel of an op for autocast on a device. kept: which of its tensors are never cast, as scales of fp8."""
    below = DispatchKeySet(_KEYS[device])

    def kernel(*tensors: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        cast = [each if index in kept else _cast(each, dtype) for index, each in enumerate(tensors)]
        with ExcludeDispatchKeyGuard(below):
            return op(*cast, **options)

    return kernel


def _cast(each: Any, dtype: torch.dtype) -> Any:
    if isinstance(each, list):
        return [_cast(one, dtype) for one in each]
    return each.to(dtype) if isinstance(each, torch.Tensor) and each.dtype in _CAST else each
