"""What the functions of experts take: a typed error, with the cure, for everything else, on every rank."""

from __future__ import annotations

import torch

from overweave.errors import InputError
from overweave.moe.fp8 import FP8
from overweave.ops.call.operands import check_primal

IDS = (torch.int32, torch.int64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_rows(name: str, x: object, what: str = "x") -> None:
    """Raise InputError for x that is no matrix of rows."""
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        found = f"got {list(x.shape)}" if isinstance(x, torch.Tensor) else f"got {type(x).__name__}"
        raise InputError(f"{name}: {what}, a matrix of rows", found, "Pass [rows, columns]: x.flatten(0, -2)")
    check_primal(f"{name}: {what}", x)


def check_routing(name: str, tokens: int, topk_ids: object, topk_weights: object) -> None:
    """Raise InputError for experts, or weights if there are any, that are not those of so many tokens."""
    asked = f"{name}: topk_ids [{tokens}, top]"
    if not isinstance(topk_ids, torch.Tensor) or topk_ids.dtype not in IDS or topk_ids.dim() != 2:
        told = f"{topk_ids.dtype} {list(topk_ids.shape)}" if isinstance(topk_ids, torch.Tensor) else str(type(topk_ids))
        raise InputError(asked, f"got {told}", "Pass the experts of each row of x: int32 or int64")
    if topk_ids.shape[0] != tokens or topk_ids.shape[1] < 1:
        raise InputError(asked, f"got {list(topk_ids.shape)}", "Pass the experts of each row of x, at least one")
    if topk_weights is None:
        return
    is_tensor = isinstance(topk_weights, torch.Tensor)
    if not is_tensor or topk_weights.shape != topk_ids.shape or not topk_weights.is_floating_point():  # type: ignore[attr-defined]
        told = f"{topk_weights.dtype} {list(topk_weights.shape)}" if is_tensor else type(topk_weights).__name__  # type: ignore[attr-defined]
        raise InputError(f"{name}: topk_weights {list(topk_ids.shape)}", f"got {told}", "Pass a float for each expert")


def check_weights(name: str, x: torch.Tensor, w: object, bias: object, scale: object = None, least: int = 1) -> None:
    """Weights of experts `[E, n, k]`, in the dtype of x, or in fp8 with scales, and their biases, `[E, n]` both.
    least: of experts. Raises InputError."""
    asked = f"{name}: w [experts, n, {x.shape[1]}] in {x.dtype}"
    if not isinstance(w, torch.Tensor) or w.dim() != 3 or w.shape[2] != x.shape[1]:
        found = f"got {list(w.shape)}" if isinstance(w, torch.Tensor) else f"got {type(w).__name__}"
        raise InputError(asked, found, "Pass weights as F.linear takes them, one below the other; or w.transpose(1, 2)")
    check_scale(f"{name}: scale_w", w, scale)
    if (scale is None and w.dtype != x.dtype) or w.device != x.device:
        raise InputError(
            asked, f"got {w.dtype} on {w.device}, x is on {x.device}", "Pass both in one dtype, on one device"
        )
    if x.dtype not in DTYPES:
        raise InputError(f"{name} in a dtype of {DTYPES}", f"got {x.dtype}", "Pass bf16, fp16 or fp32")
    check_primal(asked, w)
    if w.shape[0] < least:
        raise InputError(asked, "got no experts", "Pass at least one, alike on all ranks")
    check_bias(f"{name}: bias", bias, list(w.shape[:2]), "Pass a row of floats for each expert")


def check_scale(asked: str, w: torch.Tensor, scale: object) -> None:
    """Raise InputError for weights in fp8 without scales `[E, n]`, and for scales of other weights."""
    if scale is None and w.dtype != FP8:
        return
    is_it = isinstance(scale, torch.Tensor) and scale.dtype == torch.float32 and scale.shape == w.shape[:2]
    if w.dtype != FP8 or not is_it:
        found = f"{scale.dtype} {list(scale.shape)}" if isinstance(scale, torch.Tensor) else type(scale).__name__
        cure = "Pass w and scale_w as `quantise_rows(w)` returns them"
        raise InputError(f"{asked}, fp32 {list(w.shape[:2])} of w in {FP8}", f"got {found} beside {w.dtype}", cure)


def check_bias(asked: str, bias: object, shape: list[int], cure: str) -> None:
    """Raise InputError for a bias of experts of another shape or dtype; none is right."""
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor):
        raise InputError(f"{asked} {shape}", f"got {type(bias).__name__}", cure)
    if list(bias.shape) != shape or bias.dtype not in DTYPES:
        raise InputError(f"{asked} {shape}", f"got {bias.dtype} {list(bias.shape)}", cure)
