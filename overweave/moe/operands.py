"""What a grouped matmul can take: dtypes, shapes, devices. Every refusal says what to do."""

from __future__ import annotations

import torch

from overweave.errors import InputError
from overweave.runtime.library.epilogue import ACTIVATIONS
from overweave.runtime.library.grouped import Grouped

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
_ASKED = "grouped_matmul"


def check(call: Grouped) -> None:
    """Raises InputError for arguments that the operation cannot take."""
    x, w = call.x, call.w
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
    if call.activation and call.activation not in ACTIVATIONS:
        raise _refused(f"activation is {call.activation!r}", f"Name one of {', '.join(ACTIVATIONS)}")
    if call.gate is not None and call.bias is not None:
        raise _refused("bias and gate are given", "Multiply without a gate, then gate what comes out")
    if call.gate is not None and call.gate.stride() != w.stride() and w.numel():
        raise _refused("w and gate lie differently in memory", "Pass both in one layout")
    _check_shapes(call)


def _check_shapes(call: Grouped) -> None:
    (experts, _, n), pairs = call.w.shape, call.pairs
    of_scales = (experts, n) if call.gate is None else (experts, 2, n)
    integer, single = (torch.int32,), (torch.float32,)
    expected = {
        "offs": ((experts,), integer),
        "bias": ((experts, n), (*DTYPES,)),
        "gate": (tuple(call.w.shape), (call.w.dtype,)),
        "rows": ((pairs,), integer),
        "into": ((pairs,), integer),
        "row_weights": ((pairs,), single),
        "scale_x": ((call.x.shape[0],), single),
        "scale_w": (of_scales, single),
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
