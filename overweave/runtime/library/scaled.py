"""Products of fp8 operands where a library multiplies: torch's scaled matmul on a GPU, fp32 on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from overweave.compat.torch_names import scaled_mm
from overweave.ir.epilogue import GATE, SCALE_W, SCALE_X
from overweave.ir.schedule import Compute
from overweave.runtime.library.library import End, View, add_addends, full_precision

TensorsByName = Mapping[str, torch.Tensor]
Scales = tuple[torch.Tensor, torch.Tensor]
SCALES_BYTES = 16  # at multiples of which the library takes scales


def multiply_scaled(compute: Compute, view: View, tensors: TensorsByName, end: End | None) -> None:
    """`out = (a @ b) * scale_x * scale_w` for each part of `a`; scales per tensor, or of its rows and all columns.

    With addends, or added to what lies there, the scaled product stays fp32 until the sum is rounded. end: as of
    `run_operation`.
    """
    for a, scale_x, out in zip(compute.a, scales_of_rows(compute, view, tensors), compute.out, strict=True):
        if out.is_empty:
            continue
        scales, target = (scale_x, scales_of_columns(tensors)[0]), view(out)
        if compute.addends:
            product = target.new_empty(target.shape, dtype=torch.float32)
            scaled_matmul(view(a), view(compute.b), scales, product)
            add_addends(compute, product, view, end)
        elif compute.accumulate:
            product = target.new_empty(target.shape, dtype=torch.float32)
            scaled_matmul(view(a), view(compute.b), scales, product)
            target += product
        else:
            scaled_matmul(view(a), view(compute.b), scales, target)


def scales_of_rows(compute: Compute, view: View, tensors: TensorsByName) -> list[torch.Tensor]:
    """For each part of `a` the scales of its rows, or the one of all."""
    return [view(region) for region in compute.scales] or [tensors[SCALE_X]] * len(compute.a)


def scales_of_columns(tensors: TensorsByName) -> tuple[torch.Tensor, ...]:
    """Those of the weight; and if there is a gate its own, behind them in one tensor."""
    scale_w = tensors[SCALE_W]
    return scale_w.reshape(1, -1).chunk(2, dim=1) if GATE in tensors else (scale_w,)


def scaled_matmul(a: torch.Tensor, b: torch.Tensor, scales: Scales, out: torch.Tensor) -> None:
    """`out = (a @ b) * scales[0] * scales[1]`, summed in fp32 without torch's fast accumulation.

    a: `[m, k]`; b: `[k, n]`, stored as `[n, k]`; scales: fp32 `[1, 1]` both, or `[m, 1]` and `[1, n]`. Scaled by rows
    torch returns only bf16: in another dtype the scales are applied to its fp32 product.
    """
    if a.device.type == "cpu":
        with full_precision(torch.float32):
            out.copy_(torch.mm(a.float(), b.float()) * scales[0] * scales[1])
    elif out.dtype == torch.bfloat16 or scales[1].numel() == 1:
        scaled_mm(a, b, aligned(scales[0]), aligned(scales[1]), out_dtype=out.dtype, out=out)
    else:
        one = torch.ones(1, 1, dtype=torch.float32, device=a.device)
        out.copy_(scaled_mm(a, b, one, one, out_dtype=torch.float32) * scales[0] * scales[1])


def aligned(scales: torch.Tensor) -> torch.Tensor:
    """The same, where the library takes them: those of a gate lie behind the weight's."""
    return scales.clone() if scales.data_ptr() % SCALES_BYTES else scales
