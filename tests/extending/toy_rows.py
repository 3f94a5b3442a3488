"""Two toy epilogues: products scaled before they are added, and whole rows quantised to fp8, with scales by rows."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from overweave.ir.operators.forms import Form, Input, OfRow
from overweave.ops.dispatch.library import register_epilogue


def scaled(y, beside):  # type: ignore[no-untyped-def]
    """`y * beta`, in torch and on the device: linear, so that it may be done to each rank's product."""
    return y * beside[0]


def quantised(y: torch.Tensor, beside: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values `[m, n]` in fp8 and scales `[m, 1]` in fp32: `values * scales` is y again."""
    rows, largest = y.float(), torch.full((), beside[0], dtype=torch.float32, device=y.device)
    # By a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds twice.
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=beside[1]) / largest
    return (rows / scales).to(torch.float8_e4m3fn), scales


def size(value):  # type: ignore[no-untyped-def]
    return tl.abs(value)


def scale(largest, n, numbers):  # type: ignore[no-untyped-def]
    return tl.div_rn(tl.maximum(largest, numbers[1], propagate_nan=tl.PropagateNan.ALL), numbers[0])


def quantised_element(value, of_row, beside):  # type: ignore[no-untyped-def]
    return tl.div_rn(value, tl.broadcast_to(of_row, value.shape))


ALPHA = Form(name="scaled_parts", inputs=(Input("beta"),), where=("part",), reference=scaled, device=scaled)
FP8_ROWS = Form(
    name="fp8_rows",
    numbers={"fp8_largest": 448.0, "fp8_smallest": 1e-12},
    where=("row",),
    makes=(Input("values", "y", "n", "float8_e4m3fn"), Input("scales", "y", "1", "float32")),
    reference=quantised,
    device=quantised_element,
    of_row=OfRow(of_element=size, combine="max", number=scale),
)


def add() -> None:
    """Operators that add take beta=, and fp8_largest= with fp8_smallest=, for which they return (values, scales)."""
    register_epilogue(ALPHA)
    register_epilogue(FP8_ROWS)
