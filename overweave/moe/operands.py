"""What a grouped matmul can take: dtypes, shapes, devices. Every refusal says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch

from overweave.errors import InputError
from overweave.ir.operators.forms import Activation
from overweave.moe.checks import DTYPES
from overweave.moe.fp8 import FP8
from overweave.ops.call.operands import check_primal
from overweave.runtime.library.grouped import Grouped

_ASKED = "grouped_matmul"


def check_tensors(required: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Raise InputError for what is no tensor."""
    for name, given in (*required.items(), *optional.items()):
        if not isinstance(given, torch.Tensor) and not (given is None and name in optional):
            raise _refused(f"{name} is a {type(given).__name__}", "Pass a torch.Tensor")


def check(call: Grouped) -> None:
    """Raise InputError for arguments that the operation cannot take."""
    x, w = call.x, call.w
    for name in ("x", *call.factors):
        check_primal(f"{_ASKED}: {name}", getattr(call, name))
    if any(not isinstance(each, int | float) for each in call.gating):
        raise _refused(f"gating is {call.gating}", "Pass (limit, slope, shift), three numbers")
    if x.dim() != 2 or w.dim() != 3:
        raise _refused(f"x has {x.dim()} dimensions and w {w.dim()}", "Pass x [rows, k] and w [experts, k, n]")
    if x.shape[1] != w.shape[1]:
        raise _refused(f"x has {x.shape[1]} columns and w {w.shape[1]} rows", "Pass w as [experts, k, n]")
    if x.dtype not in (*DTYPES, FP8) or w.dtype != x.dtype:
        raise _refused(f"x is {x.dtype} and w {w.dtype}", f"Pass both as one of {(*DTYPES, FP8)}")
    if (x.dtype == FP8) != (call.scale_x is not None) or (call.scale_x is None) != (call.scale_w is None):
        raise _refused(f"x is {x.dtype}, with {_given(call)}", "Pass scale_x and scale_w with fp8, and without it none")
    if not w.shape[0]:
        raise _refused("w has no expert", "Pass w as [experts, k, n]")
    if call.out_dtype not in DTYPES:
        raise _refused(f"out_dtype is {call.out_dtype}", f"Name one of {DTYPES}")
    if call.activation and call.activation not in get_args(Activation):
        raise _refused(f"activation is {call.activation!r}", f"Name one of {', '.join(get_args(Activation))}")
    several = len(call.factors) > 1
    if several and len({each.stride() for each in call.factors.values()}) > 1 and w.numel():
        raise _refused("w and gate lie differently in memory", "Pass both in one layout")
    if call.gating and (len(call.gating) != 3 or not several or (call.gating[1] != 1.0 and call.activation != "silu")):
        found = f"gating is {call.gating}, of activation {call.activation!r}{'' if several else ' without a gate'}"
        raise _refused(found, "Pass (limit, slope, shift) beside a gate, slope 1.0 but of silu")
    _check_shapes(call)


def _check_shapes(call: Grouped) -> None:
    (experts, _, n), pairs = call.w.shape, call.pairs
    of_products = (experts, *(() if len(call.factors) == 1 else (2,)), n)
    integer, single = (torch.int32,), (torch.float32,)
    expected = {
        "offs": ((experts,), integer),
        **{name: (tuple(call.w.shape), (call.w.dtype,)) for name in call.factors},
        "bias": (of_products, (*DTYPES,)),
        "rows": ((pairs,), integer),
        "into": ((pairs,), integer),
        "row_weights": ((pairs,), single),
        "scale_x": ((call.x.shape[0],), single),
        "scale_w": (of_products, single),
    }
    for name, (shape, dtypes) in expected.items():
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            found = f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
            raise _refused(found, f"Pass {' or '.join(map(str, dtypes))} {shape}")
        if tensor.device != call.x.device:
            raise _refused(f"{name} is on {tensor.device}, x on {call.x.device}", "Pass both on one device")
    if call.w.device != call.x.device:
        raise _refused(f"w is on {call.w.device}, x on {call.x.device}", "Pass both on one device")


def _given(call: Grouped) -> str:
    return " and ".join(name for name in ("scale_x", "scale_w") if getattr(call, name) is not None) or "no scales"


def _refused(found: str, cure: str) -> InputError:
    return InputError(_ASKED, found, cure)
