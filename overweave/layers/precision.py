"""Autocast for the factors of a matmul: differentiable casts before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch

from overweave.compat.torch_names import is_any_autocast_enabled

_CAST = (torch.bfloat16, torch.float16, torch.float32)  # neither fp64 nor fp8
is_autocast: Callable[[], bool] = is_any_autocast_enabled  # on any device: the quick question


def autocast_dtype(factor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts a factor of `torch.nn.functional.linear`; None: it is not cast."""
    device = factor.device.type
    if factor.dtype not in _CAST or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


@overload
def cast(factor: torch.Tensor) -> torch.Tensor: ...
@overload
def cast(factor: torch.Tensor | None) -> torch.Tensor | None: ...
def cast(factor: torch.Tensor | None) -> torch.Tensor | None:
    """Cast a factor as autocast does for `torch.nn.functional.linear`."""
    dtype = None if factor is None else autocast_dtype(factor)
    return factor if factor is None or dtype is None else factor.to(dtype)
