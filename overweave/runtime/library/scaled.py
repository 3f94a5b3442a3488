"""Products of fp8 operands outside of our kernels: torch's scaled matmul on a GPU, fp32 on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from overweave.compat.torch_names import scaled_mm
from overweave.ir.operators.forms import GATE, SCALE_W, SCALE_X
from overweave.ir.schedule import Compute
from overweave.runtime.library.library import EndPair, View, add_product, full_precision

TensorsByName = Mapping[str, torch.Tensor]
Scales = tuple[torch.Tensor, torch.Tensor]
SCALES_BYTES = 16  # cuBLAS requires scales at multiples of so many bytes


def multiply_scaled(compute: Compute, view: View, tensors: TensorsByName, ends: EndPair) -> None:
    """`out = (a @ b) * scale_x * scale_w` for each part of `a`; scales per tensor, or of its rows and all columns.

    With addends, or added to what lies there, the scaled product stays fp32 until the sum is rounded. ends: as of
    `run_operation`.
    """
    for a, scale_x, out in zip(compute.a, row_scales(compute, view, tensors), compute.out, strict=True):
        if out.is_empty:
            continue
        scales, target = (scale_x, column_scales(tensors)[0]), view(out)
        if compute.addends or compute.accumulate:
            product = target.new_empty(target.shape, dtype=torch.float32)
            scaled_matmul(view(a), view(compute.b), scales, product)
            add_product(compute, product, view, (out, ends))
        else:
            scaled_matmul(view(a), view(compute.b), scales, target)


def row_scales(compute: Compute, view: View, tensors: TensorsByName) -> list[torch.Tensor]:
    """Return the row scales of each part of `a`, or the one scale of all."""
    return [view(region) for region in compute.scales] or [tensors[SCALE_X]] * len(compute.a)


def column_scales(tensors: TensorsByName) -> tuple[torch.Tensor, ...]:
    """Return the scales of the weight, and of the gate if there is one: both are in one tensor."""
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
        scaled_mm(a, b, align_scales(scales[0]), align_scales(scales[1]), out_dtype=out.dtype, out=out)
    else:
        one = torch.ones(1, 1, dtype=torch.float32, device=a.device)
        out.copy_(scaled_mm(a, b, one, one, out_dtype=torch.float32) * scales[0] * scales[1])


def align_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales at an address that cuBLAS accepts: those of a gate, behind the weight's, may need a copy."""
    return scales.clone() if scales.data_ptr() % SCALES_BYTES else scales
