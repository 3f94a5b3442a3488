"""What a caller wants done to a product: bias, activation, residual. Checked here, told as an `Epilogue`."""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch

from overweave.errors import InputError
from overweave.ir.plan import BIAS, NO_EPILOGUE, RESIDUAL, Activation, Epilogue

_ALIGNED_BYTES = 16
_ACTIVATIONS = get_args(Activation)


class Extras(NamedTuple):
    """`activation(y + bias) + residual` for a product y `[m, n]`: bias `[n]`, activation `silu`, `gelu` or `gelu_tanh`,
    residual `[m, n]`. None: that step is left out.
    """

    bias: torch.Tensor | None = None
    activation: str | None = None
    residual: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names under which plans know them, as matrices."""
        named = {} if self.bias is None else {BIAS: self.bias.unsqueeze(0)}
        return named if self.residual is None else named | {RESIDUAL: self.residual}


NO_EXTRAS = Extras()


def key_of_extras(extras: Extras | None) -> tuple[object, ...]:
    """Everything about a caller's extras, whatever they are, that decides how a call runs."""
    if not isinstance(extras, Extras):
        return (type(extras),)
    return (_key_of(extras.bias), str(extras.activation), _key_of(extras.residual))


def checked_epilogue(operator: str, extras: Extras | None, shape: tuple[int, int], like: torch.Tensor) -> Epilogue:
    """The epilogue of a product `[m, n]` with the dtype and device of `like`. Raises InputError."""
    if extras is None:
        return NO_EPILOGUE
    if not isinstance(extras, Extras):
        raise InputError(f"{operator}: extras", f"got {type(extras).__name__}", "Pass ow.Extras(...), or None")
    m, n = shape
    for name, tensor, wanted in ((BIAS, extras.bias, (n,)), (RESIDUAL, extras.residual, (m, n))):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{operator}: {name}", f"got {type(tensor).__name__}", "Pass a torch.Tensor, or None")
        found = f"got {list(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (wanted, like.dtype, like.device):
            cure = f"Pass {list(wanted)} of {like.dtype} on {like.device}"
            raise InputError(f"{operator}: {name}", found, cure)
        if not tensor.is_contiguous():
            raise InputError(f"{operator}: {name} row-major", found, f"Pass {name}.contiguous()")
        if torch.is_grad_enabled() and tensor.requires_grad:
            cure = "Call it under no_grad"
            raise InputError(f"{operator}: tensors without gradient", f"{name} requires_grad", cure)
    if extras.activation is not None and extras.activation not in _ACTIVATIONS:
        cure = f"Use one of {', '.join(_ACTIVATIONS)}, or None"
        raise InputError(f"{operator}: activation", f"got {str(extras.activation)[:40]!r}", cure)
    return Epilogue(
        bias=extras.bias is not None,
        activation=extras.activation,  # type: ignore[arg-type]
        residual=extras.residual is not None,
    )


def _key_of(tensor: torch.Tensor | None) -> object:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor)
    needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
    misaligned = tensor.data_ptr() % _ALIGNED_BYTES
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, needs_gradient, misaligned
