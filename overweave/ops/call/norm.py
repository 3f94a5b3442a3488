"""What a caller wants done to the rows of a sum: a residual added, and the RMSNorm that follows in a transformer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.epilogue import NORM_EPS, NORM_WEIGHT, RESIDUAL, Norm


class RmsNorm(NamedTuple):
    """`z = y + residual` and `z / sqrt(mean(z ** 2) + eps) * weight`, row by row, for a sum y `[m, n]`.

    weight: `[n]`. residual: `[m, n]`, the same on every rank if the results shall be; None: nothing is added. Both in
    the dtype of y. eps: above 0.
    """

    weight: torch.Tensor
    residual: torch.Tensor | None = None
    eps: float = NORM_EPS

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names under which plans know them, as they were passed: `as_matrices` of ops/call/prepared.py."""
        named = {NORM_WEIGHT: self.weight}
        return named if self.residual is None else named | {RESIDUAL: self.residual}


def checked_norm(operator: str, norm: RmsNorm | None, shape: tuple[int, int], like: torch.Tensor) -> Norm | None:
    """The norm of a sum `[m, n]` with the dtype and device of `like`. Raises InputError."""
    if norm is None:
        return None
    if not isinstance(norm, RmsNorm):
        raise InputError(f"{operator}: norm", f"got {type(norm).__name__}", "Pass ow.RmsNorm(...), or None")
    _check(operator, "norm weight", norm.weight, shape[1:], like)
    if norm.residual is not None:
        _check(operator, "norm residual", norm.residual, shape, like)
    if not isinstance(norm.eps, float) or not 0 < norm.eps < math.inf:
        raise InputError(f"{operator}: norm eps", f"got {norm.eps!r}"[:60], "Pass a float above 0, such as 1e-5")
    return Norm(eps=norm.eps, residual=norm.residual is not None)


def _check(operator: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{operator}: {name}", f"got {type(tensor).__name__}", "Pass a torch.Tensor")
    if (tuple(tensor.shape), tensor.dtype, tensor.device) != (shape, like.dtype, like.device):
        found = f"got {list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        raise InputError(f"{operator}: {name}", found, f"Pass {list(shape)} of {like.dtype} on {like.device}")
    if not tensor.is_contiguous():
        found = f"its strides are {tensor.stride()}"
        raise InputError(f"{operator}: {name} row-major", found, "Pass it through .contiguous()")
    if torch.is_grad_enabled() and tensor.requires_grad:
        cure = "Call it under no_grad"
        raise InputError(f"{operator}: tensors without gradient", f"{name} requires_grad", cure)
