"""A toy epilogue, `clamp(y * alpha, low, high)`: all that one needs, in one file, registered by one call."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from overweave.ir.operators.forms import Form, Input
from overweave.ops.dispatch.library import register_epilogue


def in_torch(y: Any, beside: tuple[Any, ...]) -> Any:
    """The elements `[m, n]`, in torch. beside: alpha `[n]`, low, high."""
    alpha, low, high = beside
    return (y * alpha).clamp(low, high)


def on_device(value, beside):  # type: ignore[no-untyped-def]
    """The same of some elements, in fp32."""
    return tl.minimum(tl.maximum(value * beside[0], beside[1]), beside[2])


FORM = Form(
    name="scaled_clamp",
    inputs=(Input("alpha"),),
    numbers={"low": -1.0, "high": 1.0},
    reference=in_torch,
    device=on_device,
)


def add() -> None:
    """The one call: from now on every operator that takes epilogues takes alpha=, low= and high=."""
    register_epilogue(FORM)
