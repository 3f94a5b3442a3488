"""What a caller wants done to a product: bias, activation, residual, gate, scales. Checked; told as an `Epilogue`."""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch

from overweave.errors import InputError
from overweave.ir.epilogue import BIAS, GATE, NO_EPILOGUE, RESIDUAL, SCALE_W, SCALE_X, Activation, Epilogue
from overweave.ops.call.scales import Scales, checked_scaling

_ACTIVATIONS = get_args(Activation)
_TENSORS = (BIAS, RESIDUAL, GATE, SCALE_X, SCALE_W)


class Extras(NamedTuple):
    """`activation(y + bias) + residual` for a product, or for a sum of all ranks' products, y `[m, n]`: bias `[n]`,
    activation `silu`, `gelu` or `gelu_tanh`, residual `[m, n]`. None: that step is left out. Of a sum that is scattered
    the residual has the own rows, `[S, n]`; of one that all ranks get, both are the same on every rank.

    Of fp8 operands y is `(x @ w) * scale_x * scale_w`, as torch._scaled_mm has it, and the scales are needed, fp32:
    one element each, the same scale_x on every rank; or scale_x `[m/W, 1]` of the own rows, which travel with them, and
    scale_w `[1, n]`. out_dtype: of y, bias and residual; bf16 if None.
    gate, a second weight `[k, n]` in the layout of the first: `y * activation(x @ gate) + residual`, without bias. With
    `silu` that is SwiGLU, with `gelu` GEGLU, without activation a bilinear unit. Of fp8 operands the gate is fp8 too,
    and has scales of its own behind those of w: scale_w has two elements, or is `[1, 2n]`.
    Of several weights, bias and scale_w have the columns of all of them, side by side; no residual and no gate.
    """

    bias: torch.Tensor | None = None
    activation: str | None = None
    residual: torch.Tensor | None = None
    scale_x: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    gate: torch.Tensor | None = None

    @property
    def scales(self) -> Scales:
        """Those of fp8 operands."""
        return Scales(self.scale_x, self.scale_w, self.out_dtype)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names under which plans know them, as they were passed: `as_matrices` of ops/call/prepared.py."""
        found = {}
        given = (self.bias, self.residual, self.gate, self.scale_x, self.scale_w)
        for name, tensor in zip(_TENSORS, given, strict=True):
            if tensor is not None:
                found[name] = tensor
        return found


def checked_epilogue(operator: str, extras: Extras | None, m: int, operands: tuple[torch.Tensor, ...]) -> Epilogue:
    """The epilogue of results of `m` rows, of operands x and weights. Raises InputError."""
    if extras is not None and not isinstance(extras, Extras):
        raise InputError(f"{operator}: extras", f"got {type(extras).__name__}", "Pass ow.Extras(...), or None")
    x, *weights = operands
    has_gate = extras is not None and extras.gate is not None
    scaling = checked_scaling(operator, extras.scales if extras else Scales(), x, *weights, has_gate=has_gate)
    if extras is None:
        return NO_EPILOGUE
    w, n = weights[0], sum(each.shape[1] for each in weights)
    k, dtype = x.shape[1], extras.scales.result_dtype(x)
    if len(weights) > 1 and (extras.residual is not None or has_gate):
        found = f"a residual or a gate with {len(weights)} weights"
        raise InputError(f"{operator}: extras", found, "Pass one weight, or finish the products yourself")
    for name, tensor, wanted in (
        (BIAS, extras.bias, (n,)),
        (RESIDUAL, extras.residual, (m, n)),
        (GATE, extras.gate, (k, n)),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{operator}: {name}", f"got {type(tensor).__name__}", "Pass a torch.Tensor, or None")
        found = f"got {list(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
        kept = x.dtype if name == GATE else dtype
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (wanted, kept, x.device):
            cure = f"Pass {list(wanted)} of {kept} on {x.device}"
            raise InputError(f"{operator}: {name}", found, cure)
        if name == GATE:
            _check_layout(operator, tensor, w)
        elif not tensor.is_contiguous():
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
        scaling=scaling,
        gate=has_gate,
    )


def _check_layout(operator: str, gate: torch.Tensor, w: torch.Tensor) -> None:
    alike = gate.is_contiguous() if w.is_contiguous() else gate.t().is_contiguous()
    if not alike:
        found = f"gate has strides {gate.stride()}, w {w.stride()}"
        raise InputError(f"{operator}: gate in the memory layout of w", found, "Lay them out alike")
