"""Rows in fp8 with scales of their own: activations as a call comes to them, and weights once."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from overweave.errors import InputError
from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.backends import load

FP8 = torch.float8_e4m3fn
FP8_FROM = (8, 9)  # the first GPUs for which Triton compiles e4m3
_LEAST = 1e-12  # that a row's largest element is taken for: rows of zeros stay zeros


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row of x in fp8, and its scale: x is `values * scales[..., None]`, within what fp8 rounds.

    Plain torch:  scales = x.float().abs().amax(-1).clamp(min=1e-12) / 448
                  values = (x.float() / scales[..., None]).to(torch.float8_e4m3fn)

    x: `[..., k]`, bf16, fp16 or fp32, such as tokens `[t, k]` or weights of experts `[experts, n, k]`. Returns values
    e4m3 `[..., k]` and scales fp32 `[...]`. On a GPU one launch. Gradients: none; a backward through it raises.
    Raises InputError for what has no rows.
    """
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or not x.is_floating_point():
        found = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise InputError("quantise_rows of x [..., k]", f"got {found}", "Pass rows in bf16, fp16 or fp32")
    values, scales = torch.ops.overweave.quantised_rows(x.flatten(0, -2))
    return values.view(x.shape), scales.view(x.shape[:-1])


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.device.type == "cpu" or torch.cuda.get_device_capability(x.device) < FP8_FROM:
        rows = x.float()
        largest = rows.abs().amax(1) if x.shape[1] else rows.new_zeros(x.shape[0])
        scales = largest.clamp(min=_LEAST) / torch.finfo(FP8).max
        return (rows / scales.unsqueeze(1)).to(FP8), scales
    x = x if x.stride(1) == 1 else x.contiguous()
    values, scales = _fake(x)
    load("gpu quantise")(x, values, scales)
    return values, scales


def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(x.shape[0], dtype=torch.float32)


def _refuse(ctx: Any, *gradients: Any) -> NoReturn:
    raise NotImplementedError("overweave.moe has no gradients of fp8; multiply in bf16 where x or w needs one")


define(
    TorchOp(
        "quantised_rows", "(Tensor x) -> (Tensor, Tensor)", _quantised, _fake, _refuse, lambda ctx, inputs, output: None
    )
)
